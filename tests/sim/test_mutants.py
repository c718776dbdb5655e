"""The worlds find mistakes: the mutants that are found fastest, each within a few seeds.

`python -m tests.sim 1-300 --mutant NAME` looks for any other.
"""

from __future__ import annotations

import pytest

from tests.sim.test_worlds import worlds

#: By name, the last of the seeds that are looked at.
FASTEST = {
    "acknowledgements_never_sent": 3,
    "cover_skips_a_hole": 3,
    "filter_left_out": 2,
    "rows_of_former_positions_kept": 2,
    "tail_never_written": 3,
}


@pytest.mark.parametrize("name", sorted(FASTEST))
def test_a_mistake_is_found(name: str) -> None:
    assert f"mutant {name}: found" in worlds(f"1-{FASTEST[name]}", "--mutant", name)
