"""`listing.1m`: which segments come next, decided in an archive of 1,000,000 of them.

The port is synthetic: its keys are made when they are asked for, so that what is measured is Floe's own work
over the pages of a listing, not a server's.
"""

from __future__ import annotations

import bisect
import random
import statistics
import time
from collections.abc import Sequence
from typing import overload

from bench.harness import Bench, Result
from common.chain import Chain
from common.objects.port import ObjectInfo
from common.segments.layout import Layout, SegmentName
from common.segments.store import SegmentStore
from common.sequences import SequenceRange
from ingress.chains.looking import next_stretches

CHAIN, LAYOUT = Chain("bench", "BENCH"), Layout("data")
NEW, OLD = 900_000, 100_000  # segments of level 0, and of level 1 before them
ROWS = 1000  # sequences of a segment
LOOKS = 300
SEED = 7


class Keys(Sequence[str]):
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
    """The one verb of an object store that a listing needs."""

    def __init__(self) -> None:
        self._levels = {
            LAYOUT.segments_prefix(CHAIN, 0): Keys(0, OLD * ROWS, NEW),
            LAYOUT.segments_prefix(CHAIN, 1): Keys(1, 0, OLD),
        }

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> list[ObjectInfo]:
        keys = self._levels.get(prefix, ())
        start = bisect.bisect_right(keys, start_after)
        stop = len(keys) if limit is None else min(len(keys), start + limit)
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


def million() -> Result:
    """The greater of two medians: at positions in level 0, and at positions that only level 1 covers."""
    store, rng = SegmentStore(Synthetic(), LAYOUT), random.Random(SEED)  # type: ignore[arg-type]
    old = [look(store, rng.randint(1, OLD * ROWS)) for _ in range(LOOKS)]
    new = [look(store, rng.randint(OLD * ROWS + 1, (OLD + NEW) * ROWS)) for _ in range(LOOKS)]
    return Result("listing.1m", round(max(statistics.median(old), statistics.median(new)), 2), "ms")


BENCHES = [Bench("listing.1m", "ms", "value <= 10", million)]
