"""Plans of compaction for a listing, replaced segments, deletions by tombstones, and items made ahead in a thread."""

import hashlib
import itertools
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from common.archive.store import SegmentRef
from common.chain import Chain
from common.logs import RESERVED_KEYS
from compaction.merge import prefetch
from compaction.plan import (
    Output,
    Planner,
    blocks,
    find_supersessions,
    may_supersede,
    supersession_of_merge,
    unite,
    unsuperseded,
    unsuperseded_overlaps,
)
from compaction.tombstones import Tombstone, TombstoneIndex
from tests.support.basics import PATIENCE
from tests.support.compaction import CHAIN, LAYOUT, NOW, StoredTombstone, TestPolicy, index_of, plan, ref, table_of


def ranges(outputs: list[Output]) -> list[str]:
    return [str(o.coverage) for o in outputs]


def tens(count: int, **how: float) -> list:
    """Return adjacent segments of ten sequences each."""
    return [ref(i * 10 + 1, i * 10 + 10, **how) for i in range(count)]


def test_only_the_larger_name_of_twins_is_merged():
    twins = [ref(1, 10, twin=n) for n in range(3)]
    [output] = plan([*twins, *tens(10)[1:]], TestPolicy(), NOW)
    assert output.inputs[0] == max(twins, key=lambda s: s.name)


HUNDREDS = [ref(i * 100 + 1, i * 100 + 100, level=1, size=500) for i in range(4)]
OVERLAPPING = [ref(first, last, size=600) for first, last in ((1, 60), (50, 100), (101, 200))]
# By the case: segments, settings of the policy that differ from TestPolicy's, coverages of the outputs.
DUE = {
    "an empty chain": ([], {}, ""),
    "a run below min_size": (tens(9), {}, ""),
    "a run of min_size": (tens(10), {}, "1..100"),
    "a run of max_count": (tens(5), {"max_count": 5}, "1..50"),
    "an oldest that may wait": (tens(3, age=999), {}, ""),
    "an oldest that has waited": ([*tens(2, age=500), ref(21, 30, age=1001)], {}, "1..30"),
    "too few, however old": (tens(2, age=10**9), {}, ""),
    "one alone for its age or count": ([ref(1, 10, age=10**9)], {"min_count": 1, "max_count": 1}, ""),
    "one alone that has the size": ([ref(1, 10, size=1000)], {}, "1..10"),
    "a young one ends the run": ([*tens(10), ref(101, 110, age=59), ref(111, 120)], {}, "1..100"),
    "max_size closes": (tens(10, size=300), {"min_size": 900, "max_size": 1000}, "1..30 31..60 61..90"),
    "closed below min_size": ([*tens(2, size=400), ref(21, 30, size=900)], {"max_size": 1000}, "1..20"),
    "overlapping ones stay together": (OVERLAPPING, {"max_size": 1000}, "1..100"),
    "no span over a hole": ([*tens(10), *(ref(n, n + 9) for n in range(102, 202, 10))], {}, "1..100 102..201"),
    "overlapped by a young one": ([*tens(10), ref(95, 120, age=1)], {"min_size": 900}, "1..90"),
    "accounted for above": ([*tens(10), ref(1, 100, level=1)], {}, ""),
    "accounted for above in part": ([*tens(20), ref(1, 95, level=1)], {}, "91..200"),
    "other levels": ([*tens(9), *HUNDREDS], {"from_": 1, "to": 2}, "1..400"),
}


@pytest.mark.parametrize(("segments", "settings", "due"), DUE.values(), ids=DUE)
def test_what_is_due_is_merged_and_nothing_else(segments: list[SegmentRef], settings: dict[str, Any], due: str):
    assert ranges(plan(segments, TestPolicy(**settings), NOW)) == due.split()


@pytest.mark.parametrize(
    ("count", "since"), [(1, 0), (2, 100 - 60), (3, 5000 - 1000), (9, 5000 - 1000), (10, 5000 - 60)]
)
def test_a_merge_is_due_from_the_time_at_which_its_first_segments_were_enough(count: int, since: int):
    outputs = plan([*tens(count, age=5000), ref(count * 10 + 1, count * 10 + 10, age=100)], TestPolicy(), NOW)
    assert [NOW - output.due for output in outputs] == [since] * (count > 1)


def test_an_output_names_its_level_and_inputs_and_leaves_the_level_of_its_log_line_alone():
    [output] = plan(tens(10), TestPolicy(min_size=1000), NOW)
    assert (output.level, len(output.inputs), output.log_context()["segment_level"]) == (1, 10, 1)
    assert not RESERVED_KEYS & output.log_context().keys()


def test_a_damaged_segment_ends_the_runs_beside_it_and_accounts_for_nothing_below():
    segments, broken = tens(21), ref(1, 100, level=1)
    assert ranges(plan(segments, TestPolicy(), NOW, damaged={segments[10].key})) == ["1..100", "111..210"]
    assert ranges(plan([*tens(10), broken], TestPolicy(), NOW, damaged={broken.key})) == ["1..100"]


def test_late_segments_are_united_with_what_contains_them_one_level_above():
    first, second, third = ref(1, 100, 1), ref(101, 200, 2), ref(301, 400, 1)
    found = unite([(ref(5, 9), first), (ref(90, 110), first, second), (ref(301, 302), third)])
    assert [(o.level, str(o.coverage), len(o.inputs)) for o in found] == [(3, "1..200", 4), (2, "301..400", 2)]


def test_late_segments_of_different_chains_or_above_level_9_are_not_united():
    other = Chain("eu-west", "NODES")
    found = unite([(ref(5, 9), ref(1, 10, 1)), (ref(5, 9, chain=other), ref(1, 10, 1, chain=other))])
    assert {o.chain for o in found} == {CHAIN, other}
    assert unite([(ref(5, 9), ref(1, 10, 9))]) == unite([]) == []


def test_late_segments_that_overlap_in_part_are_united_one_level_above_once_all_of_them_are_old():
    pair = ref(1, 40, 1), ref(33, 90, 1, age=100)
    [found] = unite([pair], Planner(TestPolicy(min_age=60), NOW).old_before)
    assert (found.level, str(found.coverage), found.inputs, unite([pair], NOW - 101)) == (2, "1..90", pair, [])


def test_what_overlaps_is_found_on_all_levels_but_not_below_what_supersedes_it():
    apart, first, second, third = ref(200, 210, 1), ref(1, 40, 1), ref(33, 60), ref(55, 90, 1)
    twin = ref(33, 60, twin=1)
    named = max(second, twin, key=lambda s: s.name)
    found = unsuperseded_overlaps(blocks([apart, third, ref(5, 9), second, twin, first]))
    assert list(found) == [(first, named, third)]
    assert list(unsuperseded_overlaps(blocks([first, second, ref(1, 60, 2)]))) == []


def test_what_is_united_is_left_out_of_the_runs_beside_it():
    segments = [*tens(21), ref(95, 110)]
    taken = {s.key for s in segments if s.coverage.overlaps(segments[-1].coverage)}
    planner = Planner(TestPolicy(min_size=900), NOW)
    assert ranges([*planner.add(blocks(segments), taken), *planner.end()]) == ["1..90", "111..210"]


# Replacing


def test_a_higher_level_ranks_above_a_lower_one_and_of_one_level_the_larger_name_of_the_same_coverage():
    small, large = sorted([ref(1, 10, 1, twin=1), ref(1, 10, 1, twin=2)], key=lambda s: s.name)
    upper, lower, foreign = ref(1, 100, 1), ref(1, 10), ref(1, 100, 1, chain=Chain("eu-west", "NODES"))
    assert may_supersede(upper, lower)
    assert may_supersede(large, small)
    for above, below in ((lower, upper), (small, large), (ref(1, 20, 1), small), (lower, lower), (foreign, lower)):
        assert not may_supersede(above, below)


def test_the_order_has_no_cycles():
    segments = [ref(1, last, level, twin=t) for last in (5, 10) for level in (0, 1, 2) for t in range(3)]
    for a, b, c in itertools.product(segments, repeat=3):
        if may_supersede(a, b) and may_supersede(b, c):
            assert may_supersede(a, c)
            assert not may_supersede(c, a)


def test_the_inputs_of_a_merge_are_found_again_by_its_output():
    inputs, output = [ref(1, 50), ref(51, 100)], ref(1, 100, 1)
    [found] = find_supersessions([*inputs, output])
    assert replace(found, is_exact=True) == supersession_of_merge(output, reversed(inputs))


def test_two_segments_together_may_contain_a_third_unless_there_is_a_hole_or_it_reaches_beyond():
    upper = [ref(1, 60, 1), ref(61, 100, 1)]
    [found] = find_supersessions([ref(50, 70), *upper])
    assert (found.superseding, [str(s.rows) for s in found.stretches]) == (tuple(upper), ["50..60", "61..70"])
    assert (
        find_supersessions([ref(50, 70), upper[0], ref(62, 100, 1)]) == find_supersessions([ref(91, 110), *upper]) == []
    )


def test_a_segment_is_replaced_by_what_stays_and_of_equal_ones_by_the_largest_name():
    lower, middle, upper = ref(1, 10), ref(1, 100, 1), ref(1, 1000, 2)
    [found] = find_supersessions([lower, middle, upper])
    assert (found.superseded, found.superseding) == ((lower, middle), (upper,))
    assert unsuperseded([lower, ref(11, 20), middle, ref(101, 110)], 0) == [ref(101, 110)]
    twins = sorted((ref(1, 10, twin=n) for n in range(3)), key=lambda s: s.name)
    [found] = find_supersessions(twins)
    assert (found.superseded, found.superseding) == (tuple(twins[:2]), (twins[2],))


def test_a_supersession_is_cut_into_parts_with_what_concerns_each():
    whole = supersession_of_merge(ref(1, 100, 1), [ref(1, 30), ref(31, 60), ref(61, 100)])
    assert whole.parts(3) == [whole]
    parts = whole.parts(2)
    assert [[str(s.coverage) for s in p.superseded] for p in parts] == [["1..30", "31..60"], ["61..100"]]
    assert [str(p.stretches[0].rows) for p in parts] == ["1..60", "61..100"]
    assert not any(p.is_exact for p in parts)


# Tombstones

INPUTS = (ref(1, 50), ref(51, 100))
OUTPUT, BEYOND = ref(1, 100, 1), ref(101, 150)
LISTING = [*INPUTS, OUTPUT, BEYOND]


def stored(output=OUTPUT, inputs=INPUTS, *, age: float = 1000) -> StoredTombstone:
    stone = Tombstone.of(supersession_of_merge(output, inputs))
    return stone, stone.name, NOW - age


def going(listing=LISTING, stones=None, *, grace: float = 100) -> list[str]:
    found = index(listing, *(stones or [stored()])).deletable(NOW, grace)
    return [str(s.coverage) for each in found for s in each.superseded]


def index(listing, *stones: StoredTombstone) -> TombstoneIndex:
    return index_of(table_of(listing), stones)


def changed(**fields: object) -> bytes:
    return json.dumps(json.loads(stored()[0].to_json()) | fields).encode()


def test_two_jobs_write_the_same_bytes_under_the_same_name_which_are_read_back():
    one = Tombstone.of(supersession_of_merge(OUTPUT, INPUTS))
    other = Tombstone.of(supersession_of_merge(ref(1, 100, 1, age=3), [ref(51, 100, age=7), ref(1, 50, age=9)]))
    assert (one.to_json(), one.name) == (other.to_json(), other.name)
    assert Tombstone.from_json(one.to_json(), LAYOUT, CHAIN) == one
    assert one.name.endswith(f"-{hashlib.sha256(one.to_json()).hexdigest()[:16]}.json")


UNSOUND_TOMBSTONES = [
    (b"[]", "expected an object"),
    (b"{", "Expecting property name"),
    (b'{"format_version":1,"superseded":[]}', "expected an object of"),
    (changed(format_version=2), "format_version: expected 1, found 2"),
    (changed(superseding=[]), "expected a list of segments that is not empty"),
    (changed(superseded=[{"level": 0, "name": "../../other", "size": 1}]), "expected the name of a segment"),
    (changed(superseded=[{"level": True, "name": INPUTS[0].name, "size": 1}]), "expected level, name and size"),
    (changed(superseding=[{"level": 0, "name": INPUTS[1].name, "size": 1}]), "is not below all"),
    (changed(superseded=[{"level": 0, "name": BEYOND.name, "size": 1}]), "is not contained"),
]


@pytest.mark.parametrize(("raw", "message"), UNSOUND_TOMBSTONES)
def test_an_unsound_tombstone_is_refused(raw, message):
    with pytest.raises(ValueError, match=message):
        Tombstone.from_json(raw, LAYOUT, CHAIN)


def test_nothing_goes_before_the_grace_is_over_or_while_what_replaces_it_is_not_there_as_it_was():
    assert going(stones=[stored(age=99)], grace=100) == []
    assert going(stones=[stored(age=100)], grace=100) == ["1..50", "51..100"]
    assert going([*INPUTS, BEYOND]) == going([*INPUTS, ref(1, 100, 1, size=99), BEYOND]) == []
    assert going([*INPUTS, OUTPUT]) == ["1..50"], "the greatest end of a chain stays"
    assert going([ref(1, 50, size=101), INPUTS[1], OUTPUT, BEYOND]) == ["51..100"], "another length than it says"


def test_nothing_goes_when_what_replaces_it_is_condemned_itself():
    upper = ref(1, 1000, 2)
    stones = [stored(), stored(upper, [OUTPUT])]
    assert going([*LISTING, upper], stones) == ["1..100"]
    assert [stone.key for stone in index([*LISTING, upper], *stones).valid_matches()] == [stones[1][1]]
    assert [*index([*LISTING, upper], *stones).superseded_mask()] == [0, 0, 0, 1, 0]


def test_a_tombstone_is_done_when_all_it_names_is_gone():
    assert (index(LISTING, stored()).finished_keys(), index([INPUTS[1], OUTPUT], stored()).finished_keys()) == ([], [])
    assert index([OUTPUT], stored()).finished_keys() == [stored()[1]]


def test_a_tombstone_names_segments_of_its_own_chain_only():
    foreign = Chain("eu-west", "NODES")
    stone = Tombstone.from_json(stored()[0].to_json(), LAYOUT, foreign)
    assert {s.chain for s in (*stone.superseded, *stone.superseding)} == {foreign}


def counting(count: int, closed: list[int] | None = None, fail_at: int = -1) -> Iterator[int]:
    try:
        for number in range(count):
            if number == fail_at:
                raise ValueError(f"at {number}")
            yield number
    finally:
        (closed if closed is not None else []).append(1)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("floe-ahead")]


def test_all_items_come_in_their_order_and_an_error_after_those_before_it():
    for count in (0, 1, 100):
        assert list(prefetch(counting(count))) == list(range(count))
    taken = []
    with pytest.raises(ValueError, match="at 7"):
        for item in prefetch(counting(100, fail_at=7)):
            taken.append(item)
    assert (taken, threads()) == (list(range(7)), [])


def test_the_source_is_closed_when_the_caller_stops_early():
    closed: list[int] = []
    items = prefetch(counting(100, closed))
    assert next(items) == 0
    items.close()
    assert (closed, threads()) == ([1], [])


def test_no_more_than_the_depth_is_made_ahead():
    made, released = [], threading.Event()

    def source() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            if number == 5:
                released.set()
            yield number

    items = prefetch(source(), depth=4)
    assert next(items) == 0
    assert released.wait(PATIENCE)
    assert len(made) <= 7
    items.close()
