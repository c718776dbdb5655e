"""Segments as a listing shows them, for tests of what compaction decides."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from hypothesis import strategies as st

from common.chain import Chain
from common.segments.keys import Layout, SegmentName
from common.segments.segment import SegmentRef
from common.segments.table import SegmentTable
from common.sequences import SequenceRange
from compaction.plan import Output, Planner
from compaction.tombstones import StoredTombstone, TombstoneIndex

CHAIN = Chain("us-east", "NODES")
LAYOUT = Layout("data")
NOW = 1_700_000_000.0


@dataclass(frozen=True)
class TestPolicy:
    """A policy whose maxima are out of the way."""

    __test__ = False

    from_: int = 0
    to: int = 1
    min_age: float = 60
    max_wait: float = 1000
    min_count: int = 3
    max_count: int = 1000
    min_size: int = 1000
    max_size: int = 1_000_000


def plan(
    segments: Sequence[SegmentRef], policy: TestPolicy, now: float, *, damaged: AbstractSet[str] = frozenset()
) -> list[Output]:
    """The outputs that are due among one chain's `segments` (all levels), planned in one window."""
    planner = Planner(policy, now)
    return [*planner.add([s for s in segments if s.key not in damaged]), *planner.end()]


def index_of(listed: SegmentTable, standing: Iterable[StoredTombstone]) -> TombstoneIndex:
    """What the tombstones `standing` say of what is listed."""
    index = TombstoneIndex(listed)
    for stone in standing:
        index.add(stone)
    return index


def ref(
    first: int,
    last: int,
    level: int = 0,
    *,
    size: int = 100,
    age: float = 500,
    twin: int = 0,
    chain: Chain = CHAIN,
) -> SegmentRef:
    """A segment whose object is `age` seconds old at NOW; `twin` tells those of equal coverage apart."""
    digest = hashlib.sha256(f"{first} {last} {level} {twin}".encode()).hexdigest()[:16]
    name = SegmentName(chain, level, SequenceRange(first, last), digest)
    return SegmentRef(name, LAYOUT.segment(name), size, NOW - age)


def refs(first: int, *, level: int, size: int, count: int) -> st.SearchStrategy[list[SegmentRef]]:
    """Segments with keys of their own, at most `count`; the others say how high theirs may be."""
    one = st.builds(
        lambda first, length, level, size, age, twin: ref(
            first, first + length, level, size=size, age=age, twin=twin
        ),
        st.integers(1, first),
        st.integers(0, 15),
        st.integers(0, level),
        st.integers(0, size),
        st.integers(0, 3000),
        st.integers(0, 1),
    )
    return st.lists(one, max_size=count, unique_by=lambda segment: segment.key)
