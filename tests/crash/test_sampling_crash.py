"""Sampled egress, killed at random points and moments: it chooses and tells what it would have anyway.

Changed settings, an expired source and damaged snapshots: tests/integration/test_sampling_resume.py.
"""

from __future__ import annotations

from tests.scenarios.sampling import run
from tests.support.basics import seeded

CRASHES = 5  # 100 in `make soak`


async def test_crashes_change_neither_the_rows_nor_the_advisories() -> None:
    """I2, I6, I8."""
    found = await run(CRASHES, seeded().randrange(1 << 32))
    assert sum(found["crashes"].values()) == CRASHES
