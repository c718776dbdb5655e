"""The segments that give the rows of an open intent: found without listing everything behind them."""

from __future__ import annotations

from common.sequences import SequenceRange
from ingress.chains.search import FIRST_PAGE, NEXT_PAGE, covering
from tests.unit.test_ingress_looking import CHAIN, key, small, store_of

NONE: frozenset[str] = frozenset()
WANTED = SequenceRange(5, 50)


def test_what_is_covered_needs_one_page_whatever_stands_behind() -> None:
    store, objects = store_of(*small(1, 20_000))

    found = covering(store, CHAIN, WANTED, NONE)

    assert [each.rows.first for each in found] == list(range(5, 51))
    assert objects.entries == FIRST_PAGE


def test_a_damaged_segment_is_made_up_for_by_a_level_above() -> None:
    store, objects = store_of(*small(1, 20_000), key(1, 1000, 2))

    found = covering(store, CHAIN, WANTED, {key(7, 7)})

    assert (found[-1].segment.level, found[-1].rows.last) == (2, 50)
    assert objects.entries <= 2 * FIRST_PAGE + 1


def test_a_segment_that_ends_pages_behind_the_range_is_found() -> None:
    others = [key(n, n) for n in range(1, 3000) if n != 7]
    store, objects = store_of(*others, key(6, 2500), *small(4000, 9000))

    found = covering(store, CHAIN, WANTED, NONE)

    assert [(each.rows.first, each.rows.last) for each in found] == [(5, 5), (6, 50)]
    assert objects.entries <= FIRST_PAGE + 3 * NEXT_PAGE


def test_a_hole_in_the_range_leaves_nothing() -> None:
    store, _ = store_of(*[key(n, n) for n in range(1, 3000) if n != 7])

    assert covering(store, CHAIN, WANTED, NONE) == []
    assert covering(store, CHAIN, WANTED, {key(5, 5)}) == []
