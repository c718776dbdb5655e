"""Shrinking: a failing world becomes as small as it can, and the printed command repeats it."""

import re

import pytest

from tests.sim.command import worlds
from tests.sim.plan import Cut
from tests.sim.scenario import Result
from tests.sim.shrinking import Shrinking, broken_promise

MISTAKE = (
    *("26", "--messages", "80", "--mutant", "rows_sent_again_after_a_doubt"),
    *("--without", "cut,stale,store_loses,store_refuses"),
)
KINDS = ("kill", "pause", "cut")


def world(seed: int, cut: Cut) -> Result:
    """Return the result of a world of 30 faults that fails if faults 6 and 13 meet in at least 17 messages."""
    happened = [(number, KINDS[number % 3]) for number in range(30) if cut.only is None or number in cut.only]
    happened = [each for each in happened if each[1] not in cut.without]
    fails = {6, 13} <= {number for number, _ in happened} and cut.messages >= 17
    return Result(seed, "trace", "Broken: I2: twice" if fails else "Broken: I1: order", happened=happened)


def test_nothing_is_left_that_can_be_left_out() -> None:
    shrinking = Shrinking(world(1, Cut()), Cut(), world)
    shrinking.run()
    assert shrinking.cut == Cut(only=frozenset({6, 13}), messages=17)
    assert broken_promise(shrinking.result) == "I2"
    assert shrinking.runs < 60


@pytest.mark.parametrize("cut", [Cut(), Cut(frozenset({"kill", "cut"}), frozenset(), 3), Cut(only=frozenset({2, 11}))])
def test_options_show_all_that_is_left_out(cut: Cut) -> None:
    found = dict(re.findall(r"--(\w+) (\S+)", str(cut)))
    assert Cut.of(found.get("without", ""), found.get("only", ""), int(found.get("messages", 250))) == cut


def test_a_mistake_of_the_product_is_shown_by_its_smallest_world() -> None:
    shown = worlds(*MISTAKE, "--shrink", code=1)
    [(faults, messages)] = re.findall(r"shrunk in \d+ runs to (\d+) faults: seed .*? (\d+) messages", shown)
    assert (faults, int(messages) < 100) == ("1", True)
    again = re.findall(r"again: python -m tests.sim (.*) --log", shown)
    assert "I2" in worlds(*again[0].split(), code=1)
