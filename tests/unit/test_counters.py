"""Counters begin at 0: what they are declared with is what they are counted with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.metrics import COUNTED, REGISTRY, begin, counter
from egress.acks import REASONS
from egress.advisories.outbox import SendResult
from egress.metrics import ADVISORY_RESULTS
from ingress import metrics as ingress_metrics
from tests.support.basics import unique

ROOT = Path(__file__).parents[2]


@pytest.fixture
def name() -> Iterator[str]:
    """What the metrics of a test begin with; they are gone behind it."""
    name = unique("c")
    yield name
    for each in [each for each in COUNTED if each.name.startswith(name)]:
        COUNTED.remove(each)
        REGISTRY.unregister(each.metric)


def test_a_counter_shows_0_for_every_value_of_its_fixed_sets(name: str) -> None:
    counter(f"{name}_made", "Made.", ("site", "how"), how=("well", "badly"))
    counter(f"{name}_other", "Others.", ("site",), kind="other")

    begin(f"{name}_", site="x")

    made = [
        REGISTRY.get_sample_value(f"floe_{name}_made_total", {"site": "x", "how": how}) for how in ("well", "badly")
    ]
    assert made == [0, 0]
    assert REGISTRY.get_sample_value(f"floe_{name}_other_total", {"site": "x"}) is None
    begin(f"{name}_", "other", site="x")
    assert REGISTRY.get_sample_value(f"floe_{name}_other_total", {"site": "x"}) == 0


def test_a_set_of_a_label_that_there_is_not_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected sets of its labels"):
        counter(unique("c"), "…", ("site",), reason=("x",))


def test_fixed_sets_are_what_is_counted() -> None:
    assert set(ADVISORY_RESULTS) == {each.value for each in SendResult}
    text = "".join(path.read_text() for path in (ROOT / "egress").rglob("*.py"))
    assert set(re.findall(r'(?:ReaderResetError|_doubt)\(\s*"(\w+)"', text)) == set(REASONS)
    sets = {(each.name, label): values for each in COUNTED for label, values in each.sets.items()}
    assert ingress_metrics.__name__, "its counters are declared"
    text += "".join(path.read_text() for path in (ROOT / "ingress").rglob("*.py"))
    for metric, name in re.findall(r'metrics\.(\w+)\.labels\([^)]*, "(\w+)"\)', text):
        assert any(name in values for (counted, _), values in sets.items() if metric in counted), (metric, name)
