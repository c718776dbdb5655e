"""One hostile site beside nine ordinary ones in one target; at length in `tests.scenarios.hostile_site`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_chain_turns import counted_pool
from tests.scenarios.hostile_site import HOSTILE, MEMORY, archive_with, carried, compared, verify_calls

ROWS = 20_000  # of each ordinary site: two turns


@pytest.mark.parametrize("kind", HOSTILE)
async def test_nine_sites_wait_as_long_beside_a_hostile_one_as_beside_a_tenth(kind: str, tmp_path: Path) -> None:
    calm, beside = archive_with(tmp_path / "calm", None, ROWS), archive_with(tmp_path / "hostile", HOSTILE[kind], ROWS)
    with counted_pool() as pool:
        hostile = await carried(beside, ROWS)

    assert hostile.turns <= 2 * (await carried(calm, ROWS)).turns
    assert pool.max_memory() <= MEMORY
    assert verify_calls(beside) == verify_calls(calm)


@pytest.mark.timing
@pytest.mark.parametrize("kind", HOSTILE)
def test_nine_sites_cost_at_most_twice_the_processor_time_beside_a_hostile_one(kind: str, tmp_path: Path) -> None:
    found = compared(tmp_path, 100_000, kind)
    print(kind, found)
