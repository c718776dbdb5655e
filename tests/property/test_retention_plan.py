"""The plan of retention against a model that checks every sequence by itself."""

from hypothesis import given
from hypothesis import strategies as st

from common.archive.segment import SegmentRef
from common.chain import Chain
from common.sequences import MAX_SEQUENCE, SequenceRange, choose_segment, cover
from compaction.retention import FloorPlan, RetentionRule, excess_bytes, plan_floor
from tests.support.compaction import NOW, refs

DAY = 86_400
RULES = st.builds(
    RetentionRule,
    max_age=st.sampled_from([0, 500, 1500, 2500]),
    keep_from_ns=st.sampled_from([None, int((NOW - 1000) * 1e9), int((NOW - 2000) * 1e9)]),
)
SEGMENTS = refs(60, level=2, size=500, count=20)
#: Seconds from the newest message of a segment to the storing of its object; below 0: the source's clock is ahead.
LEADS = st.lists(st.integers(-500, 2500), min_size=20, max_size=20)


def stretches_by_hand(segments: list[SegmentRef], first: int) -> list[tuple[SegmentRef, SequenceRange]]:
    found, position = [], first
    end = max((segment.coverage.last for segment in segments), default=0)
    while position <= end:
        if (segment := choose_segment(segments, position)) is None:
            position += 1
            continue
        found.append((segment, SequenceRange(position, segment.coverage.last)))
        position = segment.coverage.last + 1
    return found


def times_of(segments: list[SegmentRef], leads: list[int]) -> dict[str, float]:
    return {segment.key: segment.modified - lead for segment, lead in zip(segments, leads, strict=False)}


@given(SEGMENTS, LEADS, RULES, st.integers(0, 2000), st.integers(0, 90), st.integers(1, 70))
def test_what_goes_is_due_and_not_needed_and_all_that_is_so_goes(
    segments: list[SegmentRef], leads: list[int], rule: RetentionRule, excess: int, need: int, floor: int
):
    need = need or MAX_SEQUENCE
    times = times_of(segments, leads)
    held = cover([s for s in segments if s.coverage.last >= floor], floor)
    plan = plan_floor(held, floor, rule, NOW, excess, need, lambda segment: times[segment.key])

    due: list[tuple[SegmentRef, SequenceRange]] = []
    left = excess
    for segment, rows in stretches_by_hand(segments, floor)[:-1]:
        at = min(segment.modified, times[segment.key])
        latest = max(segment.modified, times[segment.key])
        is_held = rule.keep_from_ns is not None and latest >= rule.keep_from_ns / 1e9
        if is_held or not (left > 0 or (rule.max_age and NOW - at > rule.max_age)):
            break
        due.append((segment, rows))
        left -= segment.size
    going = [rows for _, rows in due if all(other.last < need for _, other in due if other.first <= rows.first)]

    assert plan.floor == max([floor, *(rows.last + 1 for rows in going)])
    assert plan.held_bytes == sum(segment.size for segment, _ in due[len(going) :])
    # Independent of the model: needed segments stay, the last segment stays, a floor does not fall.
    assert plan.floor == floor or plan.floor <= need
    assert plan.floor >= floor
    if above := [segment for segment in segments if segment.coverage.last >= floor]:
        assert max(segment.coverage.last for segment in above) >= plan.floor


@given(SEGMENTS, LEADS, st.integers(1, 60))
def test_a_plan_repeated_changes_nothing_and_a_footer_is_read_only_if_the_object_is_young(
    segments: list[SegmentRef], leads: list[int], floor: int
):
    times, read = times_of(segments, leads), list[str]()
    rule = RetentionRule(max_age=1500)

    def newest(segment: SegmentRef) -> float:
        read.append(segment.key)
        return times[segment.key]

    def planned(floor: int) -> FloorPlan:
        rest = [s for s in segments if s.coverage.last >= floor]
        return plan_floor(cover(rest, floor), floor, rule, NOW, 0, MAX_SEQUENCE, newest)

    plan = planned(floor)
    by_key = {segment.key: segment for segment in segments}
    stayed = [s for s in read if not NOW - times[s] > 1500]
    assert all(NOW - by_key[key].modified <= 1500 for key in read)
    assert len(stayed) <= 1
    assert (len(read), planned(plan.floor)) == (len(set(read)), plan)


CHAINS = st.builds(Chain, st.just("us-east"), st.just("NODES"), st.integers(0, 2), st.integers(0, 3))


@given(st.dictionaries(CHAINS, st.tuples(st.integers(0, 1000), st.integers(0, 100)), max_size=8), st.integers(0, 6000))
def test_bytes_above_the_limit_are_taken_from_the_oldest_incarnation_first(
    drawn: dict[Chain, tuple[int, int]], most: int
):
    held = {chain: (more + last, last) for chain, (more, last) in drawn.items()}
    found = excess_bytes(held, most)
    total = sum(size for size, _ in held.values())
    may_go = sum(size - last for size, last in held.values())

    assert found.keys() == held.keys()
    assert all(0 <= found[chain] <= size - last for chain, (size, last) in held.items())
    # Rounded up by less than a byte for each chain.
    assert min(max(0, total - most), may_go) <= sum(found.values()) <= min(max(0, total - most), may_go) + len(held)
    for older in held:
        for newer in held:
            if older.incarnation < newer.incarnation and found[newer]:
                assert found[older] == held[older][0] - held[older][1]
