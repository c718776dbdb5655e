"""The worlds find mistakes: the mutants that are found fastest.

`make soak ONLY=mutants` looks for all of them, `python -m tests.sim 1-300 --mutant NAME` for one.
"""

from tests.sim.command import worlds
from tests.sim.mutants import FOUND, MUTANTS, NOT_FOUND

FASTEST = (
    *("busy_taken_for_a_mistake", "coverage_of_a_merge_too_wide", "expected_sequence_left_out"),
    *("repeated_headers_dropped", "restored_without_a_guard"),
)


def test_each_mutant_is_found_or_its_reason_is_named() -> None:
    assert set(FOUND) | set(NOT_FOUND) == set(MUTANTS)
    assert not set(FOUND) & set(NOT_FOUND)
    assert len(FOUND) >= 30


def test_mistakes_are_found() -> None:
    shown = worlds(",".join(str(FOUND[name]) for name in FASTEST), "--mutant", ",".join(FASTEST))
    for name in FASTEST:
        assert f"mutant {name}: found at seed {FOUND[name]}:" in shown
