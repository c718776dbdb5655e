"""Properties of every plan of compaction, for any segments and any windows of a chain."""

from collections import Counter
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.archive.segment import SegmentRef
from common.sequences import holes
from compaction.plan import Planner, blocks, find_supersessions, may_supersede
from compaction.run import Compaction, LocalRunner, RunReport, Selection
from compaction.tombstones import Tombstone
from tests.support.compaction import CHAIN, NOW, Archive, TestPolicy, begun, index_of, plan, ref, refs, rows, table_of

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


@given(SEGMENTS, POLICIES, st.randoms(use_true_random=False))
def test_a_plan_spans_no_hole_takes_nothing_young_nothing_twice_and_no_more_than_the_maximum(segments, policy, random):
    outputs = plan(segments, policy, NOW)
    assert plan(random.sample(segments, len(segments)), policy, NOW) == outputs, "whatever the order of a listing"
    taken = [s.key for o in outputs for s in o.inputs]
    assert len(taken) == len(set(taken))
    for output in outputs:
        assert all(s.level == policy.from_ and NOW - s.modified >= policy.min_age for s in output.inputs)
        assert holes((s.coverage for s in output.inputs), output.coverage) == []
        reaches = accumulate((s.coverage.last for s in output.inputs), max)
        if any(reach < s.coverage.first for reach, s in zip(reaches, output.inputs[1:], strict=False)):
            # Only overlapping segments may exceed a maximum.
            assert (output.size <= policy.max_size, len(output.inputs) <= policy.max_count) == (True, True)
    for before, after in pairwise(outputs):
        assert before.coverage.last < after.coverage.first


@given(st.integers(3, 40), POLICIES)
def test_a_quiet_chain_is_compacted_once_it_has_waited(count, policy):
    segments = [ref(i * 10 + 1, i * 10 + 10, age=1, size=1) for i in range(count)]
    policy = replace(policy, min_count=3, max_size=10**9, max_count=10**6)
    [output] = plan(segments, policy, NOW + policy.min_age + policy.max_wait + 1)
    assert output.inputs == tuple(segments)


@given(SEGMENTS)
def test_what_is_contained_is_below_and_within_what_replaces_it(segments):
    for supersession in find_supersessions(segments):
        for lower in supersession.superseded:
            assert all(may_supersede(upper, lower) for upper in supersession.superseding)
            assert holes((s.rows for s in supersession.stretches), lower.coverage) == []
        assert Tombstone.of(supersession).problem() == ""


@given(SEGMENTS, st.sets(st.integers(0, 24)))
def test_deleting_leaves_the_coverage_as_it_was(segments, kept):
    """Delete any part, in any order, also with concurrent deletions."""
    found = enumerate(find_supersessions(segments))
    stones = [(Tombstone.of(s), f"t{n}", NOW - 10) for n, s in found if n not in kept]
    going = {s.key for each in index_of(table_of(segments), stones).deletable(NOW, 10) for s in each.superseded}
    left = [s for s in segments if s.key not in going]
    assert covered(left) == covered(segments)
    assert max((s.coverage.last for s in left), default=0) == max((s.coverage.last for s in segments), default=0)
    replacing = {u.key for stone, _, _ in stones for u in stone.superseding}
    assert not going & (replacing - {s.key for stone, _, _ in stones for s in stone.superseded})


@given(POLICIES)
def test_merging_comes_to_an_end(policy):
    segments, now = [ref(i * 10 + 1, i * 10 + 10, size=50) for i in range(20)], NOW
    for _ in range(4):
        now += 10_000
        outputs = plan(segments, policy, now)
        taken = {s.key for output in outputs for s in output.inputs}
        made = [ref(o.coverage.first, o.coverage.last, o.level, size=o.size)._replace(modified=now) for o in outputs]
        segments = [*(s for s in segments if s.key not in taken), *made]
    assert plan(segments, policy, now + 10_000) == []


# The windows and batches of a chain make no difference; whole archives: `test_archives.py`

LOW = TestPolicy(min_age=0, max_wait=-1, min_count=2, max_count=4, min_size=10**9, max_size=10**9)
HIGH = replace(LOW, from_=1, to=2)


def cut(segments, size):
    table = table_of(segments)
    for window in table.windows(size):
        yield [table[place] for places in window for place in places]


@given(SEGMENTS, POLICIES, st.integers(1, 6))
def test_a_plan_is_the_same_whatever_the_windows(segments, policy, size):
    planner, outputs = Planner(policy, NOW), []
    for window in cut(segments, size):
        outputs += planner.add(blocks(window))
    outputs += planner.end()
    assert outputs == plan(segments, policy, NOW)
    assert not planner.open_segments


@given(SEGMENTS, st.integers(1, 6))
def test_what_is_contained_is_the_same_whatever_the_windows(segments, size):
    def pairs(found):
        return Counter((s.key, u.superseding) for u in found for s in u.superseded)

    assert pairs(s for window in cut(segments, size) for s in find_supersessions(window)) == pairs(
        find_supersessions(segments)
    )


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return begun(tmp_path, CHAIN)


def run(archive: Archive, policies: list[TestPolicy], window: int) -> RunReport:
    return Compaction(archive.store, policies, 0, LocalRunner(archive.store), window=window, batch=1).run(Selection())


LATE_SEGMENTS = [
    ({15: (12, 18), 3: (3, 4)}, [LOW, HIGH], 1),  # a later window closes the group
    # In the last segment of the first group and in the first of the second, which a later batch merges.
    ({33: (33, 34), 43: (43, 44)}, [HIGH], 6),
]


@pytest.mark.parametrize(("late", "policies", "window"), LATE_SEGMENTS)
def test_a_late_segment_waits_until_what_contains_it_is_no_input_of_a_merge_of_the_same_round(
    archive: Archive, late: dict[int, tuple[int, int]], policies: list[TestPolicy], window: int
):
    for first in range(1, 80, 10):
        archive.put(first, first + 9, rows([first]), level=1, age=700)
    for row, coverage in late.items():
        archive.put(*coverage, rows([row]), age=700)
    for _ in range(5):
        assert run(archive, policies, window).failures == []
    assert archive.read().column("sequence").to_pylist() == sorted([*range(1, 80, 10), *late])


def test_a_failure_in_one_batch_is_reported_and_the_others_continue(archive: Archive):
    refs = [archive.put(first, first + 9, age=700) for first in range(1, 200, 10)]
    archive.path(refs[3].key).write_bytes(b"nothing")
    archive.age(refs[3].key, 700)
    report = run(archive, [LOW, HIGH], 1)
    assert [f.suspects for f in report.failures] == [(refs[3].key,)]
    merged = [m.ref.coverage for m in report.merged if m.ref.level == 1]
    assert sorted(map(str, merged)) == sorted(["1..30", "41..80", "81..120", "121..160", "161..200"])
