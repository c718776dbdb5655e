"""What holds of every plan, and of compaction run again and again, whatever the segments."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from common.segments.segment import SegmentRef
from common.segments.table import SegmentTable
from common.sequences import cover, holes
from compaction.plan import Output, Planner, Waiting, blocks
from compaction.supersede import contained, made_by, may_supersede, outstanding
from compaction.tombstones import StoredTombstone, Tombstone
from tests.support.compaction import CHAIN, NOW, TestPolicy, index_of, plan, ref, refs

SEGMENTS = refs(60, level=2, size=500, count=25)
POLICIES = st.builds(
    TestPolicy,
    min_age=st.integers(0, 1000),
    max_wait=st.integers(0, 3000),
    min_count=st.integers(1, 5),
    max_count=st.integers(2, 8),
    min_size=st.integers(0, 1500),
    max_size=st.integers(1, 2000),
)


def covered(segments: list[SegmentRef] | tuple[SegmentRef, ...]) -> set[int]:
    return {n for s in segments for n in range(s.coverage.first, s.coverage.last + 1)}


def parts(output: Output) -> list[list[SegmentRef]]:
    """The inputs cut wherever no two overlap."""
    found: list[list[SegmentRef]] = []
    reach = 0
    for segment in output.inputs:
        if segment.coverage.first > reach:
            found.append([])
        found[-1].append(segment)
        reach = max(reach, segment.coverage.last)
    return found


@given(SEGMENTS, POLICIES)
def test_a_plan_spans_no_hole_takes_nothing_young_and_nothing_twice(segments, policy):
    outputs = plan(segments, policy, NOW)
    taken = [s.key for o in outputs for s in o.inputs]
    assert len(taken) == len(set(taken))
    for output in outputs:
        assert covered(output.inputs) == covered([replace_coverage(output)])
        assert all(s.level == policy.from_ and NOW - s.modified >= policy.min_age for s in output.inputs)
        assert holes((s.coverage for s in output.inputs), output.coverage) == []
    for before, after in pairwise(outputs):
        assert before.coverage.last < after.coverage.first


def replace_coverage(output: Output) -> SegmentRef:
    return ref(output.coverage.first, output.coverage.last, output.level)


@given(SEGMENTS, POLICIES)
def test_a_maximum_is_passed_only_by_segments_that_overlap(segments, policy):
    for output in plan(segments, policy, NOW):
        if len(parts(output)) > 1:
            assert output.size <= policy.max_size
            assert len(output.inputs) <= policy.max_count


@given(SEGMENTS, POLICIES, st.randoms(use_true_random=False))
def test_the_order_of_a_listing_does_not_matter(segments, policy, random):
    shuffled = random.sample(segments, len(segments))
    assert plan(shuffled, policy, NOW) == plan(segments, policy, NOW)


@given(st.integers(3, 40), POLICIES)
def test_a_quiet_chain_is_compacted_once_it_has_waited(count, policy):
    segments = [ref(i * 10 + 1, i * 10 + 10, age=1, size=1) for i in range(count)]
    policy = replace(policy, min_count=3, max_size=10**9, max_count=10**6)
    later = NOW + policy.min_age + policy.max_wait + 1
    [output] = plan(segments, policy, later)
    assert output.inputs == tuple(segments)


def waits(segments: list[SegmentRef], policy: TestPolicy, now: float) -> Waiting:
    waiting = Waiting(CHAIN, policy, now)
    plan(segments, policy, now, waiting=waiting)
    return waiting


@settings(max_examples=500)
@given(SEGMENTS, POLICIES, st.integers(-500, 3000))
def test_what_waits_is_merged_at_the_moment_that_is_foretold_and_not_before(segments, policy, later):
    """Where nothing else comes, and what is due now is merged."""
    now = NOW + later
    due = {s.key for output in plan(segments, policy, now) for s in output.inputs}
    left = [s for s in outstanding(segments, policy.from_) if s.key not in due]
    waiting = waits(segments, policy, now)
    at, key = waiting.next_merge()
    assert waiting.segments == len(left)
    assert waiting.size == sum(s.size for s in left)
    if at == math.inf:
        assert key == ""
        assert plan(left, policy, now + 10**6) == []
        return
    assert at > now
    assert key in ("min_age", "max_wait")
    assert plan(left, policy, math.nextafter(at, 0)) == []
    [first, *_] = plan(left, policy, at)
    assert first.inputs
    assert plan(left, policy, at + 1000), "and it stays due"


@given(SEGMENTS, POLICIES)
def test_each_segment_that_waits_has_one_reason(segments, policy):
    waiting = waits(segments, policy, NOW)
    young = [block for block in blocks(outstanding(segments, policy.from_)) if is_young(block, policy)]
    assert waiting.young == sum(map(len, young))
    assert waiting.young_bytes == sum(s.size for block in young for s in block)
    old_at = [max(s.modified for s in block) + policy.min_age for block in young]
    assert waiting.old_at == min(old_at, default=math.inf)
    assert waiting.largest < max(policy.min_size, 1)
    assert 0 <= waiting.few <= waiting.small


def is_young(block: tuple[SegmentRef, ...], policy: TestPolicy) -> bool:
    return any(NOW - s.modified < policy.min_age for s in block)


def test_of_a_very_long_run_that_is_young_few_segments_are_kept():
    policy = TestPolicy(min_age=10**6, max_wait=10**7, min_count=10, max_count=100, min_size=10**9, max_size=10**9)
    segments = [ref(n * 10 + 1, n * 10 + 10, age=500_000 - n) for n in range(20_000)]
    waiting = Waiting(CHAIN, policy, NOW)
    planner = Planner(policy, NOW, waiting)
    tracemalloc.start()
    try:
        for window in range(0, len(segments), 500):
            planner.add(blocks(segments[window : window + 500]))
        planner.end()
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 500_000
    assert waiting.young == 20_000
    assert waiting.next_merge() == (segments[99].modified + 10**6, "min_age")


@given(SEGMENTS)
def test_what_is_contained_is_below_and_within_what_replaces_it(segments):
    for supersession in contained(segments):
        for lower in supersession.superseded:
            assert all(may_supersede(upper, lower) for upper in supersession.superseding)
            assert holes((s.rows for s in supersession.stretches), lower.coverage) == []
        assert Tombstone.of(supersession).problem() == ""


@given(SEGMENTS, st.sets(st.integers(0, 24)))
def test_deleting_leaves_the_coverage_as_it_was(segments, kept):
    """Whatever part of it is done, in whatever order, and whoever else deletes meanwhile."""
    standing = [
        StoredTombstone(Tombstone.of(s), f"t{n}", NOW - 10) for n, s in enumerate(contained(segments)) if n not in kept
    ]
    index = index_of(SegmentTable.listing(segments), standing)
    going = {s.key for each in index.deletable(NOW, 10) for s in each.superseded}
    left = [s for s in segments if s.key not in going]
    assert covered(left) == covered(segments)
    assert max((s.coverage.last for s in left), default=0) == max((s.coverage.last for s in segments), default=0)
    replacing = {u.key for stone in standing for u in stone.tombstone.superseding}
    condemned = {s.key for stone in standing for s in stone.tombstone.superseded}
    assert not going & (replacing - condemned)


class World:
    """Compaction of rows held in memory: what each segment holds is a set of sequences."""

    def __init__(self, segments: list[SegmentRef], rows: dict[str, frozenset[int]]) -> None:
        self.segments, self.rows = {s.key: s for s in segments}, dict(rows)
        self.standing: list[StoredTombstone] = []

    def listed(self) -> list[SegmentRef]:
        return list(self.segments.values())

    def read(self) -> list[int]:
        """What a reader of the cover sees."""
        return [
            n
            for stretch in cover(self.listed(), 1)
            for n in sorted(self.rows[stretch.segment.key])
            if n in stretch.rows
        ]

    def merge(self, policy: TestPolicy, now: float) -> None:
        for output in plan(self.listed(), policy, now):
            made = ref(output.coverage.first, output.coverage.last, output.level, size=output.size, twin=len(self.rows))
            made = made._replace(modified=now)
            self.segments[made.key] = made
            self.rows[made.key] = frozenset().union(*(self.rows[s.key] for s in output.inputs))
            self.bury([made_by(made, output.inputs)], now)

    def sweep(self, now: float) -> None:
        table = SegmentTable.listing(self.listed())
        buried = index_of(table, self.standing).buried()
        self.bury(contained([s for place, s in enumerate(table) if not buried[place]]), now)
        for each in list(index_of(table, self.standing).deletable(now, 100)):
            for segment in each.superseded:
                self.segments.pop(segment.key, None)

    def bury(self, supersessions: list, now: float) -> None:
        for supersession in supersessions:
            stone = Tombstone.of(supersession)
            if self.is_proved(supersession):
                self.standing.append(StoredTombstone(stone, stone.name, now))

    def is_proved(self, supersession) -> bool:
        found = {n for s in supersession.stretches for n in self.rows[s.segment.key] if n in s.rows}
        return all(self.rows[s.key] <= found for s in supersession.superseded)


@settings(max_examples=200)
@given(SEGMENTS, POLICIES, st.lists(st.sampled_from(["low", "high", "sweep"]), max_size=12))
def test_no_sequence_of_merges_and_deletions_changes_what_readers_see(segments, policy, steps):
    """Every third sequence of a coverage has a row, the same in each segment."""
    rows = {s.key: frozenset(n for n in covered([s]) if n % 3) for s in segments}
    world, now = World(segments, rows), NOW
    before = world.read()
    for step in steps:
        now += 5000
        if step == "sweep":
            world.sweep(now)
        else:
            world.merge(policy if step == "low" else replace(policy, from_=1, to=2), now)
        assert world.read() == before


@settings(max_examples=200)
@given(SEGMENTS, POLICIES, st.lists(st.sampled_from(["low", "high", "sweep"]), max_size=12))
def test_no_row_is_lost_where_segments_disagree_on_what_they_hold(segments, policy, steps):
    """Twins and levels leave out different sequences; what a deleted segment held, one that stays holds."""
    rows = {s.key: frozenset(n for n in covered([s]) if (n + s.level + s.size) % 3) for s in segments}
    world, now = World(segments, rows), NOW
    everything = frozenset().union(*rows.values())
    for step in steps:
        now += 5000
        if step == "sweep":
            world.sweep(now)
        else:
            world.merge(policy if step == "low" else replace(policy, from_=1, to=2), now)
        assert frozenset().union(*(world.rows[key] for key in world.segments)) == everything


@given(POLICIES)
def test_merging_comes_to_an_end(policy):
    segments = [ref(i * 10 + 1, i * 10 + 10, size=50) for i in range(20)]
    world, now = World(segments, {s.key: frozenset(covered([s])) for s in segments}), NOW
    for _ in range(4):
        now += 10_000
        world.merge(policy, now)
    assert plan(world.listed(), policy, now + 10_000) == []
