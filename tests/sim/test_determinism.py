"""One seed has one trace: run again, and in another process."""

from __future__ import annotations

from tests.sim.command import worlds


def test_a_seed_run_twice_has_one_trace() -> None:
    worlds("1-10", "--twice")


def test_a_seed_has_the_same_trace_in_another_process() -> None:
    assert traces(worlds("11-12")) == traces(worlds("11-12"))


def traces(output: str) -> list[str]:
    return [line.rpartition("trace ")[2] for line in output.splitlines() if line.startswith("seed ")]
