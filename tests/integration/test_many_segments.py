"""The memory of compaction and of verify, where a chain has very many segments.

The store is made up: it makes keys when they are asked for and keeps no object, so that what is measured is
what Floe keeps.
"""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from common.chain import Chain
from common.objects.port import ObjectInfo
from common.segments.documents import ChainDocument, ChainStore
from common.segments.keys import Layout, SegmentName
from common.segments.segment import Footer, Ledger, SegmentRef
from common.segments.store import SegmentStore
from common.sequences import SequenceRange
from compaction import verify
from compaction.merge import Merged
from compaction.plan import Output
from compaction.run import Compaction, Report, Selection, prove_one
from compaction.sign_off import SignOffs
from tests.support.compaction import TestPolicy

CHAIN, LAYOUT = Chain("us-east", "NODES"), Layout("data")
LEVEL_0, LEVEL_1 = LAYOUT.segments_prefix(CHAIN, 0), LAYOUT.segments_prefix(CHAIN, 1)
WIDTH = 10  # sequences of a segment of level 0; 100 times as many of level 1
POLICY = TestPolicy(min_age=0, max_wait=-1, max_count=1000, min_size=10**12, max_size=10**12)


class Endless:
    """A store with `count` segments of level 0 and `above` of level 1 over the first of these; of what is put
    only the last is kept, with the names of all.
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
        # `start_after` is a position or the key of a segment, which ends in more.
        begin = position // width if start_after.endswith(".parquet") else max(0, position - 1) // width
        end = count if limit is None else min(count, begin + limit)
        return [self._info(0 if prefix == LEVEL_0 else 1, n, width) for n in range(begin, end)]

    @staticmethod
    def _info(level: int, number: int, width: int) -> ObjectInfo:
        coverage = SequenceRange(number * width + 1, (number + 1) * width)
        name = SegmentName(CHAIN, level, coverage, f"{number:016x}")
        return ObjectInfo(LAYOUT.segment(name), 100_000, 1.0, "e")

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
    """Merges and proves nothing and says that it did. `most`: segments that it was given at once."""

    def __init__(self) -> None:
        self.most = 0
        self.merges: list[int] = []  # outputs that it was given at once

    def map(self, work: Callable[..., object], items: Sequence[Output]) -> list[Merged] | list[None]:
        if work is prove_one:
            return [None] * len(items)
        self.most = max(self.most, sum(len(output.inputs) for output in items))
        self.merges.append(len(items))
        return [self._merged(output) for output in items]

    @staticmethod
    def _merged(output: Output) -> Merged:
        digest = hashlib.sha256(output.inputs[0].key.encode()).hexdigest()[:16]
        name = SegmentName(CHAIN, output.level, output.coverage, digest)
        return Merged(SegmentRef(name, LAYOUT.segment(name), 1, 1.0), len(output.inputs), output.size, 1, 1)


def compact(count: int, **sizes: int) -> tuple[Report, Place]:
    place = Place()
    store = SegmentStore(Endless(count, count // 1000), LAYOUT)  # type: ignore[arg-type]
    parts = Compaction(store, [POLICY], None, place, **sizes)  # type: ignore[arg-type]
    return parts.run(Selection()), place


def sound(_store: SegmentStore, segment: SegmentRef, *, deep: bool) -> Footer:
    """A footer as that of any segment."""
    width = len(segment.coverage)
    return Footer(segment.chain, segment.level, segment.coverage, width, Ledger(), 1, 1, 1, None, "test")


def verified(count: int) -> verify.ChainReport:
    objects: Any = Endless(count, count // 1000)
    return verify.verify_chains(SegmentStore(objects, LAYOUT), ChainStore(objects, LAYOUT), [CHAIN])[0]


def verified_again(objects: Any) -> verify.ChainReport:
    """As a nightly run does: what is signed off, in `objects` that were verified so before, is passed over."""
    sign_offs, chains = SignOffs(objects, LAYOUT, deep=False), ChainStore(objects, LAYOUT)
    return verify.verify_chains(SegmentStore(objects, LAYOUT), chains, [CHAIN], sign_offs=sign_offs)[0]


def growth(work: Callable[[], object]) -> float:
    """By how many bytes memory grew at most."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_run_over_many_segments_keeps_few_of_them_in_memory() -> None:
    report, place = compact(10_000, window=500, batch=3000)
    assert [m.inputs for m in report.merged] == [1000] * 9  # over the first 1,000 there is a level already
    assert (place.merges, place.most) == ([2, 3, 3, 1], 3000), "many outputs at a time, and not all"

    def run(count: int) -> float:
        return growth(lambda: compact(count, window=500, batch=3000))

    assert (run(15_000) - run(10_000)) / 5000 < 100, "bytes for each segment more"


def test_verify_of_many_segments_keeps_few_of_them_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "check_segment", sound)
    report = verified(6000)
    assert (report.segments, report.problems, report.overlapping) == ({0: 6000, 1: 6}, [], 0)
    few, many = growth(lambda: verified(10_000)), growth(lambda: verified(15_000))
    assert (many - few) / 5000 < 60, "bytes for each segment more"


def test_what_is_signed_off_takes_little_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "check_segment", sound)
    stores = [Endless(count, count // 1000) for count in (10_000, 15_000)]
    for each in stores:
        verified_again(each)
    (first, few), (second, many) = ((r := [], growth(lambda e=e, r=r: r.append(verified_again(e)))) for e in stores)
    assert [report.skipped for report in (*first, *second)] == [10_010, 15_015]
    assert (many - few) / 5000 < 80, "bytes for each segment more"
