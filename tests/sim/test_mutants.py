"""The worlds find mistakes: the mutants that are found fastest, each within a few seeds.

`python -m tests.sim 1-300 --mutant NAME` looks for any other.
"""

from __future__ import annotations

import pytest

from tests.sim.test_worlds import worlds

#: By name, the last of the seeds that are looked at; the first of them that finds it is a lower one.
FASTEST = {
    "intent_taken_for_done": 3,
    "expected_sequence_left_out": 3,
}


@pytest.mark.parametrize("name", sorted(FASTEST))
def test_a_mistake_is_found(name: str) -> None:
    assert f"mutant {name}: found" in worlds(f"1-{FASTEST[name]}", "--mutant", name)
