"""`listing.1m`: which segments come next, decided in an archive of 1,000,000 of them.
`listing.egress_1m`: the memory in which egress finds where it goes on in one, and walks it for holes, with at
most 20 LISTs at the start of a session and one before each put.

The port is synthetic: its keys are made when they are asked for, so that what is measured is Floe's own work
over the pages of a listing, not a server's.
"""

from __future__ import annotations

import asyncio
import bisect
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import overload

from bench.harness import Bench, Figure
from common.chain import Chain
from common.objects.port import ObjectInfo
from common.segments.keys import Layout, SegmentName
from common.segments.store import PAGE, SegmentStore
from common.sequences import Covered, SequenceRange
from common.service.process import Threads
from egress.archive import Archive
from ingress.chains.search import next_stretches

CHAIN, LAYOUT = Chain("bench", "BENCH"), Layout("data")
NEW, OLD = 900_000, 100_000  # segments of level 0, and of level 1 before them
ROWS = 1000  # sequences of a segment
LOOKS = 300
SEED = 7


class LevelKeys(Sequence[str]):
    """The keys of one level, ascending: `count` segments of ROWS sequences each behind sequence `after`."""

    def __init__(self, level: int, after: int, count: int) -> None:
        self._level, self._after, self._count = level, after, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._key(each) for each in range(*index.indices(self._count))]
        return self._key(index)

    def _key(self, index: int) -> str:
        first = self._after + index * ROWS + 1
        coverage = SequenceRange(first, first + ROWS - 1)
        return LAYOUT.segment(SegmentName(CHAIN, self._level, coverage, f"{index:016x}"))


class Synthetic:
    """The one verb of an object store that a listing needs. `requests`: pages that it would take."""

    def __init__(self) -> None:
        self.requests = 0
        self._levels = {
            LAYOUT.segments_prefix(CHAIN, 0): LevelKeys(0, OLD * ROWS, NEW),
            LAYOUT.segments_prefix(CHAIN, 1): LevelKeys(1, 0, OLD),
        }

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> list[ObjectInfo]:
        if prefix == LAYOUT.partition_prefix(CHAIN):
            prefix = LAYOUT.segments_prefix(CHAIN, 0)
        keys = self._levels.get(prefix, ())
        start = bisect.bisect_right(keys, start_after)
        stop = len(keys) if limit is None else min(len(keys), start + limit)
        self.requests += max(1, -(-(stop - start) // PAGE))
        return [ObjectInfo(key, 100_000, 1.0, "e") for key in keys[start:stop]]


def look(store: SegmentStore, position: int) -> float:
    """Milliseconds that the decision takes."""
    started = time.perf_counter()
    found = next_stretches(store, CHAIN, position)
    elapsed = (time.perf_counter() - started) * 1000
    assert [each.rows.first for each in found[:1]] == [position], (
        f"expected rows from {position}, found {found[:1]}"
    )
    return elapsed


def million() -> Figure:
    """The greater of two medians: at positions in level 0, and at positions that only level 1 covers."""
    store, rng = SegmentStore(Synthetic(), LAYOUT), random.Random(SEED)  # type: ignore[arg-type]
    old = [look(store, rng.randint(1, OLD * ROWS)) for _ in range(LOOKS)]
    new = [look(store, rng.randint(OLD * ROWS + 1, (OLD + NEW) * ROWS)) for _ in range(LOOKS)]
    return Figure("listing.1m", round(max(statistics.median(old), statistics.median(new)), 2), "ms")


class HighMarks:
    """A high-water mark of every chain: where the archive ends."""

    async def get(self, _chain: Chain) -> int:
        return (OLD + NEW) * ROWS


async def session(objects: Synthetic) -> Archive:
    """What a session asks of the listing before it reads, and before a put. Fails where it asks too often."""
    store = SegmentStore(objects, LAYOUT)  # type: ignore[arg-type]
    archive = Archive(CHAIN, 1, store, None, HighMarks(), Threads("bench", 1))  # type: ignore[arg-type]
    await archive.load()
    end = (OLD + NEW) * ROWS
    assert archive.end == end, f"expected the end {end}, found {archive.end}"
    assert objects.requests <= 20, f"expected at most 20 LISTs at the start, found {objects.requests}"
    before = objects.requests
    assert not await archive.is_covered(end + 1), "expected nothing behind the end"
    assert objects.requests == before + 1, (
        f"expected one LIST before a put, found {objects.requests - before}"
    )
    return archive


def walked() -> Figure:
    """MB by which the process grows at most while a session begins and the whole chain is walked."""
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    archive, covered = asyncio.run(session(Synthetic())), Covered()
    for page in archive.pages():
        for ref in page:
            covered.add(ref.coverage)
    assert covered.stretches() == [SequenceRange(1, archive.end)], "expected no hole"
    return Figure("listing.egress_1m", round(_resident("VmHWM") - before, 1), "MB")


def _resident(what: str) -> float:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(what)) * 1024 / 1e6


BENCHES = [
    Bench("listing.1m", "ms", "value <= 10", million),
    Bench("listing.egress_1m", "MB", "value <= 20", walked),
]
