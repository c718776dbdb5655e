"""Looks of bounded length: what they find, what only a search finds, and which segments give the rows of an intent."""

from __future__ import annotations

from collections.abc import Iterable

from common.objects.port import ObjectInfo
from common.segments.keys import Layout, SegmentName
from common.segments.segment import SegmentRef
from common.segments.store import SegmentStore
from common.sequences import SequenceRange
from ingress.chains.plan import Phase
from ingress.chains.search import FIRST_PAGE, LISTED, NEXT_PAGE, SearchState, covering, look, survey
from tests.support.ingress import CHAIN

LAYOUT, NONE = Layout("data"), frozenset[str]()


class Counted:
    """A listing of `keys`; counts what is asked for."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.keys = sorted(keys)
        self.entries = 0

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> list[ObjectInfo]:
        found = [key for key in self.keys if key.startswith(prefix) and key > start_after][:limit]
        self.entries += len(found)
        return [ObjectInfo(key, 10, 1.0, "e") for key in found]


def key(first: int, last: int, level: int = 0) -> str:
    return LAYOUT.segment(SegmentName(CHAIN, level, SequenceRange(first, last), "0" * 16))


def store_of(*keys: str) -> tuple[SegmentStore, Counted]:
    objects = Counted(keys)
    return SegmentStore(objects, LAYOUT), objects  # type: ignore[arg-type]


def small(first: int, last: int) -> list[str]:
    """Level 0 in segments of one sequence."""
    return [key(each, each) for each in range(first, last + 1)]


def test_levels_above_are_asked_only_where_level_0_does_not_lead_on_and_until_one_does() -> None:
    store, objects = store_of(*small(1, 500), key(1, 500, 1))
    found = look(store, CHAIN, 5, None, NONE).stretches
    assert (found[0].rows.first, found[-1].rows.last, objects.entries) == (5, 4 + LISTED, LISTED)

    store, objects = store_of(*small(501, 900), key(1, 500, 2), *[key(n, n, 7) for n in range(1, 500)])
    [above, *_] = look(store, CHAIN, 42, None, NONE).stretches
    assert (above.segment.level, above.rows, objects.entries) == (2, SequenceRange(42, 500), LISTED + 1)


def test_a_look_reads_one_page_of_each_level_however_much_there_is() -> None:
    store, objects = store_of(*small(11, 5000), *[key(n, n, 1) for n in range(11, 5000)])

    plan = look(store, CHAIN, 10, None, NONE, search=(search := SearchState()))

    assert (plan.phase, plan.hole) == (Phase.LATE, SequenceRange(10, 10))
    assert objects.entries <= 3 * LISTED
    assert search.frontier


def test_a_segment_that_reaches_over_a_whole_page_of_later_ones_is_found_by_looking_on() -> None:
    """Egress reads again above a hole: what it writes then overlaps everything that was there."""
    store, _ = store_of(*small(11, 1000), key(5, 990))
    search, looks = SearchState(), 0

    while (plan := look(store, CHAIN, 10, None, NONE, search=search)).phase is Phase.LATE:
        looks += 1
        assert looks < 20, "not found"
    assert plan.stretches[0].rows == SequenceRange(10, 990)
    assert looks > 1


def test_a_search_begins_again_when_it_came_to_the_end_and_sees_what_arrived_meanwhile() -> None:
    store, objects = store_of(*small(11, 1000))
    search = SearchState()
    for _ in range(15):
        assert look(store, CHAIN, 10, None, NONE, search=search).phase is Phase.LATE
    objects.keys = sorted([*objects.keys, key(1, 500)])

    assert any(look(store, CHAIN, 10, None, NONE, search=search).phase is Phase.READY for _ in range(15))


def test_a_survey_sees_everything_before_something_is_given_up() -> None:
    hole = SequenceRange(10, 40)
    assert survey(*store_of()[:1], CHAIN, hole, NONE) == hole
    store, _ = store_of(*small(41, 3000), key(30, 2900))
    assert survey(store, CHAIN, hole, NONE) == SequenceRange(10, 29)
    assert survey(store, CHAIN, hole, {key(30, 2900)}) == hole
    store, _ = store_of(*small(41, 3000), key(30, 2900), key(1, 2950, 3))
    leads_on = survey(store, CHAIN, hole, NONE)
    assert isinstance(leads_on, SegmentRef)
    assert leads_on.coverage == SequenceRange(1, 2950)
    store, _ = store_of(key(15, 20), key(10, 12), key(41, 50))
    assert survey(store, CHAIN, hole, {key(10, 12)}) == SequenceRange(10, 14)


# The rows of an open intent

WANTED = SequenceRange(5, 50)


def test_what_is_covered_needs_one_page_whatever_stands_behind() -> None:
    store, objects = store_of(*small(1, 5_000))

    assert [each.rows.first for each in covering(store, CHAIN, WANTED, NONE)] == list(range(5, 51))
    assert objects.entries == FIRST_PAGE


def test_a_damaged_segment_is_made_up_for_by_a_level_above() -> None:
    store, objects = store_of(*small(1, 5_000), key(1, 1000, 2))

    found = covering(store, CHAIN, WANTED, {key(7, 7)})

    assert (found[-1].segment.level, found[-1].rows.last) == (2, 50)
    assert objects.entries <= 2 * FIRST_PAGE + 1


def test_a_segment_that_ends_pages_behind_the_range_is_found() -> None:
    others = [key(n, n) for n in range(1, 3000) if n != 7]
    store, objects = store_of(*others, key(6, 2500), *small(4000, 6000))

    found = covering(store, CHAIN, WANTED, NONE)

    assert [(each.rows.first, each.rows.last) for each in found] == [(5, 5), (6, 50)]
    assert objects.entries <= FIRST_PAGE + 3 * NEXT_PAGE


def test_a_hole_in_the_range_leaves_nothing() -> None:
    store, _ = store_of(*[key(n, n) for n in range(1, 3000) if n != 7])

    assert covering(store, CHAIN, WANTED, NONE) == []
    assert covering(store, CHAIN, WANTED, {key(5, 5)}) == []
