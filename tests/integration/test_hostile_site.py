"""One hostile site beside nine ordinary ones in one target, against the same with a tenth ordinary one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from common.chain import Chain
from common.segments.columns import SCHEMA
from common.segments.parquet_guard import MAX_MESSAGE_BYTES
from compaction.verify import verify_chains
from tests.integration.test_chain_turns import BIG, SMALL, Centre, counted_pool, empty_messages, put_forged
from tests.support.basics import PATIENCE
from tests.support.ingress import Archive
from tests.support.stores import FaultyStore

ROWS = 20_000  # of each ordinary site: two turns
MEMORY = 128 << 20  # `memory_limit`, as it is where nothing is said


def long_subjects() -> pa.Table:
    """Text that is stored once and expanded for every row."""
    table, place = empty_messages(16_000), SCHEMA.get_field_index("subject")
    return table.set_column(place, SCHEMA.field(place), pa.repeat("x" * 3_800, table.num_rows))


# Of each: how many partitions hold it, and what.
HOSTILE: dict[str, tuple[int, Callable[[], pa.Table]]] = {
    "very many messages": (6, lambda: empty_messages(200_000)),
    "pages of 60 MiB in some thousand bytes": (4, lambda: empty_messages(120, 512 << 10)),
    "too large messages": (4, lambda: empty_messages(1, MAX_MESSAGE_BYTES + 4096)),
    "long subjects": (4, long_subjects),
}


def archive_with(folder: Path, partitions: int, tenth: Callable[[], pa.Table]) -> Archive:
    """Nine ordinary sites, and a tenth with so many partitions of one segment."""
    archive = Archive(folder)
    for chain in SMALL:
        put_forged(archive, chain, empty_messages(ROWS, 100))
    for partition in range(partitions):
        put_forged(archive, Chain(BIG.site, BIG.feed, 0, partition), tenth())
    return archive


async def turns_until_carried(archive: Archive) -> int:
    """How many turns all ten sites had until the nine ordinary ones were carried."""
    centre, turns = Centre(archive, MEMORY), list[Chain]()
    real = centre.prefetcher.decoder.turn

    async def turn(source: Any, *args: Any) -> Any:
        turns.append(source.segment.chain)
        return await real(source, *args)

    centre.prefetcher.decoder.turn = turn  # type: ignore[method-assign,assignment]
    async with centre.running():
        await centre.reaches(dict.fromkeys(SMALL, ROWS + 1), PATIENCE)
        return len(turns)


def verify_calls(archive: Archive) -> dict[str, int]:
    """Requests to the store that `verify` of one ordinary site makes."""
    archive.store.objects = counted = FaultyStore(archive.objects)  # type: ignore[assignment]
    (report,) = verify_chains(archive.store, archive.documents, [SMALL[0]], deep=True)
    assert report.problems == []
    return dict(counted.calls)


@pytest.mark.parametrize("kind", HOSTILE)
async def test_nine_sites_wait_as_long_beside_a_hostile_one_as_beside_a_tenth(kind: str, tmp_path: Path) -> None:
    calm = archive_with(tmp_path / "calm", 1, lambda: empty_messages(ROWS, 100))
    beside = archive_with(tmp_path / "hostile", *HOSTILE[kind])
    with counted_pool() as pool:
        turns = await turns_until_carried(beside)

    assert turns <= 2 * await turns_until_carried(calm)
    assert pool.max_memory() <= MEMORY
    assert verify_calls(beside) == verify_calls(calm)
