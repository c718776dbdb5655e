"""The generator of the Grafana dashboard: `python -m infra.dashboards` writes `infra/grafana/floe.json`.

`dashboards.yaml` has the panels. This module gives each its place, a description with the help texts of the metrics
that it shows, and links to the runbooks of the alerts that read them. The result is committed: a test checks that it is
current, and that every metric in it exists.
"""

import importlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from common.metrics import REGISTRY

INFRA = Path(__file__).parent
DASHBOARD_PATH = INFRA / "grafana" / "floe.json"
#: The modules that declare metrics, beside those that these import.
METRIC_MODULES = (
    "common.archive.store",
    "common.nats.client",
    "compaction.report",
    "egress.metrics",
    "egress.workers",
    "ingress.metrics",
    "ingress.recovery.living",
)

GRID_WIDTH, PANEL_HEIGHT = 24, 8  # of Grafana's grid; of a panel
NUMBER_WIDTH = 4  # of a panel with one number, which is half as high
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

LAYOUT: dict[str, Any] = yaml.safe_load((INFRA / "dashboards.yaml").read_text())


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel, as `dashboards.yaml` has it."""

    title: str
    number: str = ""
    series: Mapping[str, str] = field(default_factory=dict)
    unit: str = "short"
    note: str = ""
    red_from: float | None = 1
    green_from: float | None = None
    width: int = GRID_WIDTH // 3

    def metrics(self) -> list[str]:
        """Return the metrics that it shows, each once."""
        return metrics_of(" ".join([self.number, *self.series.values()]))

    def description(self) -> str:
        """Return the note, then the help text of each metric."""
        texts = [f"`{name}`: {text}" for name in self.metrics() if (text := help_texts().get(family_name(name)))]
        return "\n\n".join(filter(None, [self.note, *texts]))

    def size(self) -> tuple[int, int]:
        """Return width and height."""
        return (NUMBER_WIDTH, PANEL_HEIGHT // 2) if self.number else (self.width, PANEL_HEIGHT)


def metrics_of(expression: str) -> list[str]:
    """Return the metrics that an expression reads, each once."""
    return [*dict.fromkeys(re.findall(r"\b(?:floe_|process_)\w+|\bup\b", re.sub(r'"[^"]*"', "", expression)))]


def family_name(sample: str) -> str:
    """Return the name of a metric without the end that its samples have."""
    return re.sub("_(total|bucket|count|sum)$", "", sample)


@cache
def help_texts() -> dict[str, str]:
    """Return the help text of each metric by its family, from the code that declares it."""
    for name in METRIC_MODULES:
        importlib.import_module(name)
    return {family.name: family.documentation for family in REGISTRY.collect()}


@cache
def runbooks() -> list[tuple[str, str, list[str]]]:
    """Return name, address of the runbook and metrics of each alert."""
    groups = yaml.safe_load((INFRA / "prometheus" / "floe.rules.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    return [(each["alert"], each["annotations"]["runbook_url"], metrics_of(each["expr"])) for each in rules]


def dashboard() -> dict[str, Any]:
    """Return the dashboard in the form that Grafana imports."""
    guide = runbooks()[0][1].partition("#")[0]
    return {
        "uid": "floe",
        "title": "Floe",
        "tags": ["floe"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "1m",
        "time": {"from": "now-6h", "to": "now"},
        "annotations": {"list": [{**each, "datasource": DATASOURCE, "enable": True} for each in LAYOUT["annotations"]]},
        "links": [{"type": "link", "title": "Troubleshooting", "url": guide, "targetBlank": True}],
        "templating": {"list": [*_variables()]},
        "panels": [*_panels()],
    }


def render() -> str:
    """Return the content of the file."""
    return json.dumps(dashboard(), indent=1, sort_keys=True) + "\n"


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    for name, query in LAYOUT["variables"].items():
        yield {
            "name": name,
            "label": name,
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }


def _panels() -> Iterator[dict[str, Any]]:
    """Yield the panels of the first row, then the other rows, collapsed, each with its panels."""
    numbers = itertools.count(1)
    yield from _placed(LAYOUT["first_row"], 0, numbers)
    for y, (title, panels) in enumerate(LAYOUT["rows"].items(), PANEL_HEIGHT // 2):
        row = {"id": next(numbers), "type": "row", "title": title, "collapsed": True}
        place = {"x": 0, "y": y, "w": GRID_WIDTH, "h": 1}
        yield row | {"gridPos": place, "panels": [*_placed(panels, y + 1, numbers)]}


def _placed(panels: Sequence[Mapping[str, Any]], y: int, numbers: Iterator[int]) -> Iterator[dict[str, Any]]:
    """Yield the panels from left to right from `y` on, each line of them as high as its highest."""
    x = highest = 0
    for each in (Panel(**given) for given in panels):
        width, height = each.size()
        if x + width > GRID_WIDTH:
            x, y, highest = 0, y + highest, 0
        yield _panel(each) | {"id": next(numbers), "gridPos": {"x": x, "y": y, "w": width, "h": height}}
        x, highest = x + width, max(highest, height)


def _panel(panel: Panel) -> dict[str, Any]:
    shown = set(panel.metrics())
    steps: list[dict[str, Any]] = [{"color": "green" if panel.green_from is None else "red", "value": None}]
    if panel.number:
        bounds = {"red": panel.red_from, "green": panel.green_from}
        steps += [{"color": colour, "value": bound} for colour, bound in bounds.items() if bound is not None]
    defaults = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}}
    legend = {"legend": {"displayMode": "list"}}
    return {
        "type": "stat" if panel.number else "timeseries",
        "title": panel.title,
        "description": panel.description(),
        "links": [
            {"title": f"Runbook of {alert}", "url": url, "targetBlank": True}
            for alert, url, metrics in runbooks()
            if shown & set(metrics)
        ],
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults | ({} if panel.number else {"min": 0}), "overrides": []},
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}} if panel.number else legend,
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": expression, "legendFormat": text}
            for index, (text, expression) in enumerate(({"": panel.number} if panel.number else panel.series).items())
        ],
    }


if __name__ == "__main__":
    DASHBOARD_PATH.write_text(render())
