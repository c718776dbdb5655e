"""One hostile site beside nine ordinary ones in one target, against the same with a tenth ordinary one.

python -m tests.integration.test_hostile_site FOLDER ROWS      the cost over an existing archive
"""

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from common.archive.columns import SCHEMA
from common.archive.guard import MAX_MESSAGE_BYTES
from common.chain import Chain
from compaction.verify import verify_chains
from infra.demo.world import PROJECT_FOLDER
from tests.integration.test_chain_turns import BIG, SMALL, Centre, counted_pool, empty_messages, put_forged
from tests.scenarios.delivery_meter import peak_memory
from tests.support.ingress import Archive
from tests.support.stores import FaultyStore

ROWS = 20_000  # of each ordinary site: two turns
MEMORY = 128 << 20  # the default of `memory_limit`
MOST_RESIDENT = 600 << 20  # bytes: the limit of docs/guides/capacity.md for ingress with one segment decoded alone


def long_subjects() -> pa.Table:
    """Messages with a text that is stored once and expanded for every row."""
    table, place = empty_messages(16_000), SCHEMA.get_field_index("subject")
    return table.set_column(place, SCHEMA.field(place), pa.repeat("x" * 3_800, table.num_rows))


# By name: the number of partitions that hold it, and its messages.
HOSTILE: dict[str, tuple[int, Callable[[], pa.Table]]] = {
    "very many messages": (6, lambda: empty_messages(200_000)),
    "pages of 60 MiB in some thousand bytes": (4, lambda: empty_messages(120, 512 << 10)),
    "too large messages": (4, lambda: empty_messages(1, MAX_MESSAGE_BYTES + 4096)),
    "long subjects": (4, long_subjects),
}


def archive_with(folder: Path, partitions: int, tenth: Callable[[], pa.Table], rows: int = ROWS) -> Archive:
    """Nine ordinary sites of `rows` messages each, and a tenth with `partitions` partitions of one segment."""
    archive = Archive(folder)
    for chain in SMALL:
        put_forged(archive, chain, empty_messages(rows, 100))
    for partition in range(partitions):
        put_forged(archive, Chain(BIG.site, BIG.feed, 0, partition), tenth())
    return archive


async def turns_until_carried(archive: Archive, rows: int = ROWS) -> int:
    """The number of turns of all ten sites until the nine ordinary ones are carried."""
    centre, turns = Centre(archive, MEMORY), list[bool]()
    real = centre.prefetcher.decoder.turn

    async def turn(*args: Any) -> Any:
        turns.append(any(centre.stored.get(chain) != rows + 1 for chain in SMALL))  # more follow until that is noticed
        return await real(*args)

    centre.prefetcher.decoder.turn = turn  # type: ignore[method-assign,assignment]
    async with centre.running():
        await centre.reaches(dict.fromkeys(SMALL, rows + 1))
        return sum(turns)


def verify_calls(archive: Archive) -> dict[str, int]:
    """The requests to the store that `verify` of one ordinary site makes."""
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


@pytest.mark.timing
@pytest.mark.parametrize("kind", HOSTILE)
def test_nine_sites_cost_at_most_twice_as_much_beside_a_hostile_one(kind: str, tmp_path: Path) -> None:
    rows = 100_000
    archive_with(tmp_path / "calm", 1, lambda: empty_messages(rows, 100), rows)
    archive_with(tmp_path / "hostile", *HOSTILE[kind], rows)

    def cost(name: str) -> tuple[float, int]:
        words = [sys.executable, "-m", "tests.integration.test_hostile_site", str(tmp_path / name), str(rows)]
        done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=PROJECT_FOLDER)
        seconds, resident = done.stdout.split()
        return float(seconds), int(resident)

    pairs = [(cost("hostile"), cost("calm")) for _ in range(3)]
    assert statistics.median(hostile[0] / calm[0] for hostile, calm in pairs) <= 2, pairs
    assert statistics.median(hostile[1] for hostile, _ in pairs) <= MOST_RESIDENT, pairs


if __name__ == "__main__":
    _began = time.process_time()
    asyncio.run(turns_until_carried(Archive(Path(sys.argv[1])), int(sys.argv[2])))
    print(time.process_time() - _began, peak_memory(os.getpid()))
