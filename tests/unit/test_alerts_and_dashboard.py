"""Alerts, runbooks and the dashboard name metrics that exist, and each other."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Counter, Gauge, Histogram

from common.metrics import REGISTRY
from infra import dashboards
from tests.unit.test_docs import metric_names

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "infra" / "prometheus"
RULES = yaml.safe_load((PROMETHEUS / "floe.rules.yml").read_text())
TESTS = yaml.safe_load((PROMETHEUS / "floe.rules.test.yml").read_text())["tests"]
RUNBOOKS = (ROOT / "docs" / "runbooks.md").read_text()
ALERTS: list[dict[str, Any]] = [rule for group in RULES["groups"] for rule in group["rules"]]
BASE = "https://floe.example.com/docs"  # of the addresses of the runbooks; for each reader to set
NOT_FLOES = {"up", "process_resident_memory_bytes", "process_cpu_seconds_total"}


def named(expression: str) -> set[str]:
    """The metrics that an expression reads."""
    return set(re.findall(r"\b(?:floe_|process_)\w+|\bup\b", re.sub(r'"[^"]*"', "", expression)))


@cache
def names() -> frozenset[str]:
    return frozenset(metric_names())


def unknown(expression: str) -> set[str]:
    known = names()
    series = known | {f"{name}{end}" for name in known for end in ("_bucket", "_count", "_sum")}
    return named(expression) - series - NOT_FLOES


def labels_of() -> dict[str, set[str]]:
    """The labels of each of Floe's metrics."""
    assert names()
    found: dict[str, set[str]] = {}
    for metric, series in REGISTRY._collector_to_names.items():
        if isinstance(metric, Counter | Gauge | Histogram):
            for name in series:
                found[name] = set(metric._labelnames)
    return found


def kebab(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


def expressions() -> list[str]:
    return [each["expr"] for panel in dashboards.dashboard()["panels"] for each in panel.get("targets", ())]


def test_there_is_an_alert_for_all_that_operations_says_is_worth_one() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    [worth] = re.findall(r"^Worth a call at night.*?\n\n", text, re.MULTILINE | re.DOTALL)
    alerted = {name for alert in ALERTS for name in named(alert["expr"])}

    assert set(re.findall(r"\bfloe_\w+", worth)) - alerted == set()


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_is_whole_and_its_metrics_exist(alert: dict[str, Any]) -> None:
    name, notes = alert["alert"], alert["annotations"]

    assert named(alert["expr"])
    assert unknown(alert["expr"]) == set()
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert notes["summary"]
    assert notes["description"]
    assert notes["runbook_url"] == f"{BASE}/runbooks.html#{kebab(name)}"
    [metric, *_] = [each for each in sorted(named(alert["expr"])) if each != "up"] or [None]
    if metric is not None:
        shown = set(re.findall(r"\$labels\.(\w+)", notes["summary"]))
        assert shown - labels_of()[metric] - {"instance", "job"} == set()


def test_the_base_of_the_runbooks_is_set_by_the_command_of_the_docs(tmp_path: Path) -> None:
    [command] = re.findall(r"^(sed '.*') infra/\S+ > \S+$", (ROOT / "docs" / "monitoring.md").read_text(), re.MULTILINE)
    rules = (PROMETHEUS / "floe.rules.yml").read_text()

    done = subprocess.run(["sh", "-c", command], input=rules, capture_output=True, text=True, check=True)

    named = [
        rule["annotations"]["runbook_url"] for group in yaml.safe_load(done.stdout)["groups"] for rule in group["rules"]
    ]
    assert named == [
        each["annotations"]["runbook_url"].replace(BASE, "https://wiki.example.net/floe") for each in ALERTS
    ]
    assert BASE not in done.stdout


def test_each_alert_has_a_section_of_the_runbooks_and_the_other_way_round() -> None:
    sections = re.findall(r"^## (\S+)$", RUNBOOKS, re.MULTILINE)

    assert sections == [kebab(alert["alert"]) for alert in ALERTS]


def test_each_alert_is_tried_to_fire_and_to_stay_quiet() -> None:
    tried = [(each["name"], bool(case["exp_alerts"])) for each in TESTS for case in each["alert_rule_test"]]

    assert tried == [
        (f"{alert['alert']} {end}", fires)
        for alert in ALERTS
        for end, fires in (("fires", True), ("stays quiet", False))
    ]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on the PATH (apt-get install prometheus)")
def test_promtool_finds_that_each_alert_fires_where_it_must_and_only_there() -> None:
    done = subprocess.run(["bash", PROMETHEUS / "check.sh"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


def test_without_promtool_the_check_says_so_aloud(tmp_path: Path) -> None:
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    done = subprocess.run(
        ["bash", PROMETHEUS / "check.sh"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0
    assert "SKIPPED" in done.stderr


def test_check_deploy_tries_the_alerts_with_promtool() -> None:
    """Where it is missing, that is skipped aloud, and fails where an alert does not hold."""
    script = (ROOT / "infra" / "check_deploy.sh").read_text()
    [branch] = re.findall(r"^if command -v promtool .*?^fi$", script, re.MULTILINE | re.DOTALL)

    def told(*defined: str) -> list[str]:
        asked = "\n".join(['check() { echo "check ${*:2}"; }', 'skip() { echo "skip $1"; }', *defined, branch])
        done = subprocess.run(
            [str(shutil.which("bash")), "-c", asked], env={"PATH": ""}, capture_output=True, text=True
        )
        return done.stdout.splitlines()

    assert told("promtool() { :; }") == ["check bash infra/prometheus/check.sh"]
    [skipped] = told()
    assert skipped.startswith("skip promtool is not here")


def test_the_committed_dashboard_is_what_the_script_makes() -> None:
    assert dashboards.PLACE.read_text() == dashboards.text(), "python -m infra.dashboards"


def test_every_metric_of_the_dashboard_exists() -> None:
    found = expressions()

    assert len(found) > 50
    assert {expression: missing for expression in found if (missing := unknown(expression))} == {}


def test_every_metric_is_on_the_dashboard_or_left_out_for_a_reason() -> None:
    shown = {re.sub("_(bucket|count|sum)$", "", name) for expression in expressions() for name in named(expression)}
    left_out = [name for each in dashboards.LEFT_OUT.values() for name in each]

    assert len(left_out) == len(set(left_out))
    assert set(left_out) & shown == set()
    assert names() - shown == set(left_out)


def test_the_dashboard_selects_and_groups_by_labels_that_there_are() -> None:
    labels, wrong = labels_of(), {}
    for expression in expressions():
        for metric, selector in re.findall(r"(floe_\w+)\{([^}]*)\}", expression):
            missing = set(re.findall(r"(\w+)[=!]", selector)) - labels[re.sub("_(bucket|count|sum)$", "", metric)]
            if missing:
                wrong[expression] = missing
    assert wrong == {}


def test_no_panel_lies_upon_another() -> None:
    taken: set[tuple[int, int]] = set()
    document = json.loads(dashboards.text())
    for panel in document["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= dashboards.WIDTH
        taken |= cells
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])
