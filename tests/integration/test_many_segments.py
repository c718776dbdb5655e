"""The memory of compaction and of verify for a chain with very many segments.

The store is synthetic: it makes keys on request and keeps no object, so that only the memory of Floe is measured.
"""

import gc
import hashlib
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from common.archive.documents import ChainDocument, ChainStore
from common.archive.keys import Layout, SegmentName
from common.archive.segment import Footer, Ledger, SegmentRef
from common.archive.store import SegmentStore
from common.chain import Chain
from common.objects.port import ObjectInfo
from common.sequences import SequenceRange
from compaction import verify
from compaction.merge import MergedSegment
from compaction.plan import Output
from compaction.run import Compaction, RunReport, Selection, prove_rows
from tests.support.compaction import TestPolicy

CHAIN, LAYOUT = Chain("us-east", "NODES"), Layout("data")
LEVEL_0, LEVEL_1 = LAYOUT.segments_prefix(CHAIN, 0), LAYOUT.segments_prefix(CHAIN, 1)
WIDTH = 10  # sequences of a segment of level 0; 100 times as many of level 1
FEW, MANY = 4000, 6000  # segments of level 0
POLICY = TestPolicy(min_age=0, max_wait=-1, max_count=500, min_size=10**12, max_size=10**12)


class Endless:
    """A store with `count` segments of level 0 and `above` of level 1 over the first of these. Of the objects put it
    keeps only the last, and the names of all.
    """

    def __init__(self, count: int, above: int) -> None:
        self.count, self.above = count, above
        self.put_keys: list[str] = []
        self._last: tuple[str, Any] = ("", b"")
        self._chain = ChainDocument((), 1, 1).to_json()

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> list[ObjectInfo]:
        if prefix == LAYOUT.documents_prefix():
            return [ObjectInfo(LAYOUT.chain_document(CHAIN), 1, 1.0, "e")]
        if prefix == LAYOUT.partition_prefix(CHAIN):
            prefix = LEVEL_0
        if prefix not in (LEVEL_0, LEVEL_1):
            return []
        count, width = (self.count, WIDTH) if prefix == LEVEL_0 else (self.above, 100 * WIDTH)
        position = int((start_after[len(prefix) :] or "0")[:20])
        # `start_after` is a position or the key of a segment, which is longer.
        begin = position // width if start_after.endswith(".parquet") else max(0, position - 1) // width
        end = count if limit is None else min(count, begin + limit)
        return [self._info(0 if prefix == LEVEL_0 else 1, n, width) for n in range(begin, end)]

    @staticmethod
    def _info(level: int, number: int, width: int) -> ObjectInfo:
        coverage = SequenceRange(number * width + 1, (number + 1) * width)
        return ObjectInfo(LAYOUT.segment(SegmentName(CHAIN, level, coverage, f"{number:016x}")), 100_000, 1.0, "e")

    def get(self, key: str, *, first: int = 0, length: int | None = None) -> bytes | None:
        if key == LAYOUT.chain_document(CHAIN):
            return self._chain
        return self._last[1] if key == self._last[0] else None

    def put(self, key: str, body: Any, **_more: object) -> None:
        self.put_keys.append(key)
        self._last = (key, body)

    def put_if_absent(self, key: str, body: Any, **_more: object) -> bool:
        self.put(key, body)
        return True

    def put_if_match(self, key: str, body: Any, _etag: str) -> bool:
        return self.put_if_absent(key, body)

    def head(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, 1, 1.0, "e")


class Place:
    """A runner that merges and proves nothing and reports success. `most`: segments that it was given at once."""

    def __init__(self) -> None:
        self.most = 0
        self.merges: list[int] = []  # outputs that it was given at once

    def map(self, work: Callable[..., object], items: Sequence[Output]) -> list[MergedSegment] | list[None]:
        if work is prove_rows:
            return [None] * len(items)
        self.most = max(self.most, sum(len(output.inputs) for output in items))
        self.merges.append(len(items))
        return [self._merged(output) for output in items]

    @staticmethod
    def _merged(output: Output) -> MergedSegment:
        digest = hashlib.sha256(output.inputs[0].key.encode()).hexdigest()[:16]
        name = SegmentName(CHAIN, output.level, output.coverage, digest)
        return MergedSegment(SegmentRef(name, LAYOUT.segment(name), 1, 1.0), len(output.inputs), output.size, 1, 1)


def compact(count: int, **sizes: int) -> tuple[RunReport, Place]:
    place = Place()
    store = SegmentStore(Endless(count, count // 1000), LAYOUT)  # type: ignore[arg-type]
    return Compaction(store, [POLICY], None, place, **sizes).run(Selection()), place


def sound(_store: SegmentStore, segment: SegmentRef, *, deep: bool) -> Footer:
    """A footer like that of any segment."""
    width = len(segment.coverage)
    return Footer(segment.chain, segment.level, segment.coverage, width, Ledger(), 1, 1, 1, None, "test")


def verified(objects: Any, reports: list[verify.ChainReport]) -> None:
    chains = ChainStore(objects, LAYOUT)
    reports += verify.verify_chains(SegmentStore(objects, LAYOUT), chains, [CHAIN], window=200)


def growth(work: Callable[[], object]) -> float:
    """The peak growth of memory in bytes. Objects from before do not affect the garbage collection."""
    gc.collect()
    gc.freeze()
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.unfreeze()


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.archive.store.TABLE_PAGE_SEGMENTS", 500)
    monkeypatch.setattr("compaction.verify.check_segment", sound)


def test_a_run_over_many_segments_keeps_few_of_them_in_memory() -> None:
    found: list[tuple[RunReport, Place]] = []
    few, many = (growth(lambda n=n: found.append(compact(n, window=200, batch=1000))) for n in (FEW, MANY))
    report, place = found[0]
    assert [m.inputs for m in report.merged] == [*[500] * 7, 100]  # level 1 covers the first 400 already
    assert (place.merges, place.most) == ([2, 2, 2, 2], 1000), "many outputs at a time, and not all"
    assert (many - few) / (MANY - FEW) < 100, "bytes for each segment more"


def test_verify_keeps_few_of_many_segments_in_memory() -> None:
    stores = [Endless(count, count // 1000) for count in (FEW, MANY)]
    reports: list[verify.ChainReport] = []
    few, many = (growth(partial(verified, each, reports)) for each in stores)
    assert (many - few) / (MANY - FEW) < 60, "bytes for each segment more"
    assert all(report.problems == [] for report in reports)
