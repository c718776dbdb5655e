"""Counters that begin at 0; alerts, runbooks and the dashboard, which name metrics that exist, and each other."""

import itertools
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.metrics import DECLARED_METRICS, REGISTRY, counter, show_zeros
from egress.advisories.senders import SendResult
from egress.consumers import RESET_REASONS
from egress.metrics import ADVISORY_RESULTS
from infra import dashboards
from ingress import metrics as ingress_metrics
from tests.support.basics import metric_value, unique
from tests.support.reference import ROOT, alerts, metrics

PROMETHEUS = ROOT / "infra" / "prometheus"
TESTS = yaml.load((PROMETHEUS / "floe.rules.test.yml").read_text(), yaml.CSafeLoader)["tests"]
GUIDES = ROOT / "docs" / "guides"
ALERTS: list[dict[str, Any]] = alerts()
BASE = "https://floe.example.com/docs"  # of the runbooks' addresses; each reader sets it
NOT_FLOES = {"up", "process_resident_memory_bytes", "process_cpu_seconds_total", "process_start_time_seconds"}
LABELS = {each["name"]: set(each["labels"]) for each in metrics()}
NAMES = frozenset(LABELS)
SERIES = NAMES | {f"{name}{end}" for name in NAMES for end in ("_bucket", "_count", "_sum")} | NOT_FLOES


def kebab(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


def named(expression: str) -> set[str]:
    return set(dashboards.metrics_of(expression))


def panel_groups() -> list[list[dict[str, Any]]]:
    """Return the panels that are shown at first, rows included, then those of each row."""
    shown = dashboards.dashboard()["panels"]
    return [shown, *(each["panels"] for each in shown if each["type"] == "row")]


def expressions() -> list[str]:
    return [each["expr"] for panel in itertools.chain(*panel_groups()) for each in panel.get("targets", ())]


def test_an_alert_is_whole_and_its_metrics_exist() -> None:
    for alert in ALERTS:
        name, notes, metrics = alert["alert"], alert["annotations"], named(alert["expr"])
        assert (bool(metrics), metrics - SERIES) == (True, set()), name
        assert alert["labels"]["severity"] in ("page", "ticket"), name
        assert all((notes["summary"], notes["description"])), name
        assert notes["runbook_url"] == f"{BASE}/guides/troubleshooting.html#{kebab(name)}"
        for metric in sorted(metrics - {"up"})[:1]:
            shown = set(re.findall(r"\$labels\.(\w+)", notes["summary"]))
            assert shown - LABELS[metric] - {"instance", "job"} == set(), name


def test_alerts_runbooks_and_their_tests_name_the_same() -> None:
    names = [alert["alert"] for alert in ALERTS]
    tried = [(each["name"], bool(case["exp_alerts"])) for each in TESTS for case in each["alert_rule_test"]]

    runbooks = re.findall(r"^### (floe-\S+)$", (GUIDES / "troubleshooting.md").read_text(), re.MULTILINE)
    assert runbooks == [*map(kebab, names)]
    assert tried == [pair for name in names for pair in ((f"{name} fires", True), (f"{name} stays quiet", False))]


def test_the_docs_list_the_alerts_that_are_worth_a_call_at_night() -> None:
    listed = re.findall(r"^\| `(Floe\w+)` \|", (GUIDES / "monitoring.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(each["alert"] for each in ALERTS if each["labels"]["severity"] == "page")


def test_the_base_of_the_runbooks_is_set_by_the_command_of_the_docs() -> None:
    [command] = re.findall(r"^ *(sed '.*') infra/\S+ > \S+$", (GUIDES / "monitoring.md").read_text(), re.MULTILINE)
    rules = (PROMETHEUS / "floe.rules.yml").read_text()

    done = subprocess.run(["sh", "-c", command], input=rules, capture_output=True, text=True, check=True)

    assert BASE in rules
    assert yaml.safe_load(done.stdout) == yaml.safe_load(rules.replace(BASE, "https://wiki.example.net/floe"))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on the PATH (apt-get install prometheus)")
def test_promtool_finds_that_each_alert_fires_where_it_must_and_only_there() -> None:
    done = subprocess.run(["bash", PROMETHEUS / "check.sh"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


def test_without_promtool_the_check_reports_it(tmp_path: Path) -> None:
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    check, found = ["bash", PROMETHEUS / "check.sh"], {"PATH": str(tmp_path)}
    done = subprocess.run(check, env=found, capture_output=True, text=True, check=False)

    assert (done.returncode, "SKIPPED" in done.stderr) == (0, True)


def test_the_committed_dashboard_is_what_the_script_makes_and_shows_or_excuses_every_metric() -> None:
    found = expressions() + [each["expr"] for each in dashboards.dashboard()["annotations"]["list"]]
    shown = {re.sub("_(bucket|count|sum)$", "", name) for expression in found for name in named(expression)}
    left_out = [name for each in dashboards.LAYOUT["without_panel"].values() for name in each]
    selected = [each for expression in found for each in re.findall(r"(floe_\w+)\{([^}]*)\}", expression)]

    assert dashboards.DASHBOARD_PATH.read_text() == dashboards.render(), "python -m infra.dashboards"
    assert len(found) > 50
    assert {name for expression in found for name in named(expression)} - SERIES == set()
    assert sorted(left_out) == sorted(NAMES - shown)
    for metric, selector in selected:
        known = LABELS[re.sub("_(bucket|count|sum)$", "", metric)]
        assert set(re.findall(r"(\w+)[=!]", selector)) - known - {"instance"} == set(), metric


def test_six_numbers_are_shown_at_first_and_each_panel_explains_itself_and_follows_the_variables() -> None:
    (first, *_), runbooks = panel_groups(), {alert["annotations"]["runbook_url"] for alert in ALERTS}
    panels = [each for each in itertools.chain(*panel_groups()) if each["type"] != "row"]

    assert [each["type"] for each in first] == ["stat"] * 6 + ["row"] * len(dashboards.LAYOUT["rows"])
    assert all(each["collapsed"] for each in first[6:])
    assert [each["title"] for each in panels if not each["description"]] == []
    assert {link["url"] for each in panels for link in each["links"]} < runbooks
    for expression in expressions():
        assert "$instance" in expression or re.search("floe_compa|ALERTS", expression), expression


def test_no_panel_lies_upon_another() -> None:
    for panels in panel_groups():
        taken: set[tuple[int, int]] = set()
        for panel in panels:
            x, y, w, h = (panel["gridPos"][key] for key in "xywh")
            cells = {*itertools.product(range(x, x + w), range(y, y + h))}
            assert not cells & taken, panel["title"]
            assert x + w <= dashboards.GRID_WIDTH
            taken |= cells
    found = [panel["id"] for panel in itertools.chain(*panel_groups())]
    assert len({*found}) == len(found)


# Counters: the declared label values are the counted ones


@pytest.fixture
def name() -> Iterator[str]:
    """Yield a prefix for the names of metrics, and remove the metrics that have it."""
    name = unique("c")
    yield name
    for each in [each for each in DECLARED_METRICS if each.name.startswith(name)]:
        DECLARED_METRICS.remove(each)
        REGISTRY.unregister(each.metric)


def test_a_counter_shows_0_for_every_value_of_its_fixed_sets(name: str) -> None:
    counter(f"{name}_made", "Made.", ("site", "how"), how=("well", "badly"))
    counter(f"{name}_other", "Others.", ("site",), kind="other")

    show_zeros(f"{name}_", site="x")

    assert [metric_value(f"floe_{name}_made_total", {"site": "x", "how": how}) for how in ("well", "badly")] == [0, 0]
    assert metric_value(f"floe_{name}_other_total", {"site": "x"}) is None
    show_zeros(f"{name}_", "other", site="x")
    assert metric_value(f"floe_{name}_other_total", {"site": "x"}) == 0


def test_a_set_of_a_label_that_there_is_not_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected sets of its labels"):
        counter(unique("c"), "…", ("site",), reason=("x",))


def test_fixed_sets_are_what_is_counted() -> None:
    assert set(ADVISORY_RESULTS) == {each.value for each in SendResult}
    text = "".join(path.read_text() for path in (ROOT / "egress").rglob("*.py"))
    assert set(re.findall(r'(?:ReaderResetError|_reset)\(\s*"(\w+)"', text)) == set(RESET_REASONS)
    sets = {(each.name, label): values for each in DECLARED_METRICS for label, values in each.sets.items()}
    assert ingress_metrics.__name__, "its counters are declared"
    text += "".join(path.read_text() for path in (ROOT / "ingress").rglob("*.py"))
    for metric, name in re.findall(r'metrics\.(\w+)\.labels\([^)]*, "(\w+)"\)', text):
        assert any(name in values for (counted, _), values in sets.items() if metric in counted), (metric, name)
