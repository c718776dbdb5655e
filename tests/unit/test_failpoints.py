"""Failpoints: the place and the pass that the environment names; the crash tests show that they kill and stop."""

import time
from collections.abc import Iterator

import pytest

from common import failpoints
from common.failpoints import FailpointRaised, failpoint


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    failpoints.set_failpoints("")
    failpoints._passes.clear()


def raised(points: str, times: int = 5) -> list[int]:
    """Return the passes of `here` at which it raised."""
    failpoints._passes.clear()
    failpoints.set_failpoints(points)
    found = []
    for number in range(1, times + 1):
        try:
            failpoint("here")
        except FailpointRaised:
            found.append(number)
    return found


def test_it_acts_at_the_place_and_the_pass_that_are_named_and_nowhere_else() -> None:
    assert raised("") == raised("elsewhere=raise@*") == []
    assert (raised("elsewhere=kill,here=raise"), raised("here=raise@3")) == ([1], [3])
    assert raised("here=raise@*") == [1, 2, 3, 4, 5]


def test_sleep_blocks_the_calling_thread_and_an_unknown_action_is_an_error() -> None:
    started = time.monotonic()
    assert raised("here=sleep:0.1@*", 3) == []
    assert time.monotonic() - started >= 0.3
    for points in ("here=explode", "here"):
        with pytest.raises(ValueError, match="unknown failpoint action"):
            raised(points)
