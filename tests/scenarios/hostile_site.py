"""Must hold: one hostile site beside nine ordinary ones, against the same run with a tenth ordinary one.

python -m tests.scenarios.hostile_site FOLDER      one run over an archive that is there, in a process of its own
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from common.chain import Chain
from common.segments.columns import SCHEMA
from common.segments.parquet_guard import MAX_MESSAGE_BYTES
from compaction.verify import verify_chains
from tests.integration.test_chain_turns import BIG, SMALL, Centre, empty_messages, put_forged
from tests.scenarios.delivery_meter import peak_memory
from tests.support.basics import PATIENCE
from tests.support.ingress import Archive
from tests.support.stores import FaultyStore

MEMORY = 128 << 20  # `memory_limit`, as it is where nothing is said
MOST_RESIDENT = 600 << 20  # bytes: what docs/limits.md says of ingress, with one segment that is decoded alone
REPEATS = 3


def partitions(count: int) -> list[Chain]:
    return [Chain(BIG.site, BIG.feed, 0, partition) for partition in range(count)]


def very_many_messages(archive: Archive) -> None:
    for chain in partitions(6):
        put_forged(archive, chain, empty_messages(200_000))


def large_pages(archive: Archive) -> None:
    """Pages of 60 MiB in some thousand bytes; the target takes each message."""
    for chain in partitions(4):
        put_forged(archive, chain, empty_messages(120, 512 << 10))


def too_large_messages(archive: Archive) -> None:
    for chain in partitions(4):
        put_forged(archive, chain, empty_messages(1, MAX_MESSAGE_BYTES + 4096))


def long_subjects(archive: Archive) -> None:
    """Text that is stored once and expanded for every row."""
    for chain in partitions(4):
        table = empty_messages(16_000)
        place = SCHEMA.get_field_index("subject")
        subjects = pa.repeat("x" * 3_800, table.num_rows)
        put_forged(archive, chain, table.set_column(place, SCHEMA.field(place), subjects))


HOSTILE: dict[str, Callable[[Archive], None]] = {
    each.__name__: each for each in (very_many_messages, large_pages, too_large_messages, long_subjects)
}


def ordinary(archive: Archive, chain: Chain, rows: int) -> None:
    put_forged(archive, chain, empty_messages(rows, 100))


def archive_with(folder: Path, tenth: Callable[[Archive], None] | None, rows: int) -> Archive:
    """Nine ordinary sites of `rows` messages each, and `tenth`; None: another ordinary one."""
    archive = Archive(folder)
    for chain in SMALL:
        ordinary(archive, chain, rows)
    if tenth is None:
        ordinary(archive, BIG, rows)
    else:
        tenth(archive)
    return archive


@dataclass(frozen=True, slots=True)
class Waited:
    """Until the nine ordinary sites were carried: `turns` of all ten, `cpu` seconds of the process. `resident`: the
    most bytes that it held.
    """

    turns: int
    cpu: float
    resident: int


async def carried(archive: Archive, rows: int) -> Waited:
    centre, turns = Centre(archive, MEMORY), list[Chain]()
    real = centre.prefetcher.decoder.turn

    async def turn(source: Any, *args: Any) -> Any:
        turns.append(source.segment.chain)
        return await real(source, *args)

    centre.prefetcher.decoder.turn = turn  # type: ignore[method-assign,assignment]
    began = time.process_time()
    async with centre.running():
        await centre.reaches(dict.fromkeys(SMALL, rows + 1), PATIENCE)
        cpu, count = time.process_time() - began, len(turns)
    return Waited(count, cpu, peak_memory(os.getpid()))


def verify_calls(archive: Archive) -> dict[str, int]:
    """Requests to the store that `verify` of one ordinary site makes."""
    counted = FaultyStore(archive.objects)
    former, archive.store.objects = archive.store.objects, counted  # type: ignore[assignment]
    try:
        (report,) = verify_chains(archive.store, archive.documents, [SMALL[0]], deep=True)
    finally:
        archive.store.objects = former
    assert report.problems == []
    return dict(counted.calls)


def alone(folder: Path, rows: int) -> Waited:
    """`carried` in a process of its own."""
    words = [sys.executable, "-m", "tests.scenarios.hostile_site", str(folder), str(rows)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    return Waited(**json.loads(done.stdout.splitlines()[-1]))


def compared(folder: Path, rows: int, kind: str) -> dict[str, float]:
    """Medians of paired runs: how much longer nine sites wait beside a hostile one. Raises AssertionError where that
    is more than twice as long, or ingress takes more memory than it may.
    """
    beside, without = folder / kind, folder / "ordinary"
    if not without.exists():
        archive_with(without, None, rows)
    archive_with(beside, HOSTILE[kind], rows)
    pairs = [(alone(beside, rows), alone(without, rows)) for _ in range(REPEATS)]
    found = {
        "turns": statistics.median(hostile.turns / calm.turns for hostile, calm in pairs),
        "cpu": statistics.median(hostile.cpu / calm.cpu for hostile, calm in pairs),
        "resident": statistics.median(hostile.resident for hostile, _ in pairs),
    }
    assert found["turns"] <= 2, found
    assert found["cpu"] <= 2, found
    assert found["resident"] <= MOST_RESIDENT, found
    return found


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(carried(Archive(Path(sys.argv[1])), int(sys.argv[2]))))))
