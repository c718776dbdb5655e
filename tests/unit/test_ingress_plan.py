"""Plans of ingress: searches of bounded length, holes, the rows of an intent, and the order of turns."""

import asyncio
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.archive.documents import AcceptedGap, accepted_part
from common.archive.keys import Layout, SegmentName
from common.archive.segment import SegmentRef
from common.archive.store import SegmentStore
from common.errors import OutcomeUnknown, Refused, Unavailable
from common.objects.port import ObjectInfo
from common.sequences import SequenceRange
from common.settings.ingress import SourceSettings
from ingress.chains import plan as planning
from ingress.chains.locate import StoreClock
from ingress.chains.plan import (
    SEARCH_PAGE,
    ChainPlan,
    Phase,
    SearchState,
    decide_hole,
    first_position,
    plan_chain,
    plan_from_listings,
    search_whole_chain,
    stretches_for,
)
from ingress.chains.prefetch import TurnQueue
from tests.support.clock import ManualClock
from tests.support.ingress import CHAIN

HALT, SKIP = (
    SourceSettings(site=("us-east",), feed=("NODES",), lost_segment_timeout=100.0, on_lost=on_lost)
    for on_lost in ("halt", "skip")
)


def ref(first: int, last: int, level: int = 0, modified: float = 100.0) -> SegmentRef:
    name = SegmentName(CHAIN, level, SequenceRange(first, last), "0" * 16)
    return SegmentRef(name, LAYOUT.segment(name), 10, modified)


def taken(plan: ChainPlan) -> list[tuple[int, int, int]]:
    return [(s.segment.level, s.rows.first, s.rows.last) for s in plan.stretches]


def late(since: float | None = 1000.0, phase: Phase = Phase.LATE) -> ChainPlan:
    return ChainPlan(phase, (), SequenceRange(11, 20), since)


def test_a_hole_is_late_since_the_first_segment_behind_it_came() -> None:
    plan = plan_chain([ref(1, 10), ref(31, 40, modified=7.0), ref(21, 30, modified=9.0)], 11, None)

    assert plan == ChainPlan(Phase.LATE, (), SequenceRange(11, 20), 7.0)


def test_a_hole_stays_late_since_it_was_but_the_time_of_damage_does_not_count() -> None:
    """Keep it, as compaction rewrites later segments; not that of damage: a removed segment may be put back."""
    now, elsewhere = late(2000.0), ChainPlan(Phase.LATE, (), SequenceRange(12, 20), 500.0)
    found = [now.with_wait_of(former).waiting_since for former in (late(), late(None), late(3000.0))]
    assert found == [1000.0, 2000.0, 2000.0]
    for former in (late(phase=Phase.DAMAGED), elsewhere, ChainPlan(Phase.READY)):
        assert now.with_wait_of(former) == now


def test_a_damaged_segment_is_left_out_where_another_covers_and_stops_the_chain_where_none_does() -> None:
    whole, damaged = ref(1, 30, level=1), ref(1, 40)
    assert taken(plan_chain([whole, damaged], 1, None)) == [(0, 1, 40)]
    assert taken(plan_chain([whole, damaged], 1, None, {damaged.key})) == [(1, 1, 30)]

    damaged, behind = ref(11, 20, modified=3.0), ref(18, 30)
    assert plan_chain([damaged], 11, None, {damaged.key}) == ChainPlan(Phase.DAMAGED, (), SequenceRange(11, 20), 3.0)
    assert plan_chain([damaged, behind], 11, None, {damaged.key}).hole == SequenceRange(11, 17)


def test_an_incarnation_is_carried_from_where_it_begins_to_its_end_and_not_beyond() -> None:
    plan = plan_chain([ref(1, 10), ref(11, 30)], 5, 20)

    assert (taken(plan), plan.late_end) == ([(0, 5, 10), (0, 11, 20)], 30)
    assert plan_chain([ref(1, 10), ref(11, 30)], 21, 20) == ChainPlan(Phase.DONE, late_end=30)
    found = [first_position(1, None), *(first_position(500, floor) for floor in (None, 900, 100))]
    assert found == [1, 500, 900, 500], "its first sequence, or what retention left"


# The states of a hole


def test_the_leading_part_of_a_hole_that_gaps_cover_without_a_break_is_accepted() -> None:
    def accepted(*gaps: tuple[int, int]) -> SequenceRange | None:
        return accepted_part(SequenceRange(11, 20), [SequenceRange(*each) for each in gaps])

    assert [accepted(), accepted((12, 20)), accepted((1, 10))] == [None] * 3
    assert accepted((11, 15)) == accepted((1, 15)) == SequenceRange(11, 15)
    assert accepted((1, 15), (16, 40)) == SequenceRange(11, 20)
    assert accepted((12, 13), (11, 11), (1, 5)) == SequenceRange(11, 13)


def test_a_hole_is_late_until_the_time_out_and_then_lost_except_damage_and_a_hole_that_nothing_follows() -> None:
    assert decide_hole(late(), [], 1099.9, SKIP) is None
    halted, lost = (decide_hole(late(), [], 1100.0, source) for source in (HALT, SKIP))
    assert halted.needs_operator
    assert (lost.needs_operator, lost.part, lost.reason) == (False, SequenceRange(11, 20), "no segment within 1m40s")
    assert (
        decide_hole(late(phase=Phase.DAMAGED), [], 10**9, SKIP)
        is decide_hole(late(since=None), [], 10**9, SKIP)
        is None
    )


@pytest.mark.parametrize("phase", [Phase.LATE, Phase.DAMAGED])
def test_what_is_accepted_is_given_up_at_once_and_no_more_than_that(phase: Phase) -> None:
    decided = decide_hole(late(phase=phase), [AcceptedGap(SequenceRange(9, 14), "why", "ops")], 0.0, HALT)

    found = decided.needs_operator, decided.part, decided.reason
    assert found == (False, SequenceRange(11, 14), "accepted by ops: why")


@pytest.mark.parametrize("at", ["yesterday", "2026-01-01", "2026-01-01T00:00:00", "2026-13-01T00:00:00Z"])
def test_a_corrupt_gap_or_one_with_a_bad_time_or_a_long_note_is_refused(at: str) -> None:
    good = AcceptedGap(SequenceRange(1, 2), decided_at="2026-01-01T00:00:00.123456789Z")

    assert AcceptedGap.from_json(good.to_json()) == good
    with pytest.raises(ValueError, match="expected a time with its zone"):
        AcceptedGap.from_json(good.to_json().replace(good.decided_at.encode(), at.encode()))
    with pytest.raises(ValueError, match="note: expected at most"):
        AcceptedGap(SequenceRange(1, 2), "x" * 1001)
    for corrupt in (b"", b"{}", b"[]", b"null", good.to_json().replace(b'"first":1', b'"first":50')):
        with pytest.raises(ValueError):
            AcceptedGap.from_json(corrupt)


def test_the_key_of_a_gap_holds_its_range_and_gaps_that_end_before_a_position_are_not_listed() -> None:
    layout, prefix = Layout("p"), "p/_floe/x/gaps/"
    key = layout.gap(prefix, SequenceRange(5, 9))

    assert (key, layout.parse_gap(prefix, key)) == (f"{prefix}{9:020d}-{5:020d}.json", SequenceRange(5, 9))
    assert layout.gaps_after(prefix, 9) < key < layout.gaps_after(prefix, 10)
    for foreign in (key + "x", "q" + key, f"{prefix}{5:020d}-{9:020d}.json", prefix):
        assert layout.parse_gap(prefix, foreign) is None


# The store's clock


class Objects:
    """A store with a clock set by the test; `error`: raised by a put, which takes `seconds`."""

    def __init__(self, error: Exception | None = None, seconds: float = 0.0) -> None:
        self.time, self.puts, self.error, self.seconds = 5000.0, 0, error, seconds

    def put(self, key: str, body: bytes) -> None:
        self.puts += 1
        time.sleep(self.seconds)
        if self.error:
            raise self.error

    def head(self, key: str) -> ObjectInfo | None:
        return ObjectInfo(key, 0, self.time, "e")

    def asked(self, clock: ManualClock | None = None) -> StoreClock:
        return StoreClock(self, "k", clock or ManualClock())  # type: ignore[arg-type]


def test_the_stores_clock_is_asked_once_a_minute_and_never_the_hosts() -> None:
    objects, clock = Objects(), ManualClock(now=1e12)
    store_clock = objects.asked(clock)
    assert store_clock.now(0.0) == 5000.0
    clock.advance(30)
    assert (store_clock.now(0.0), objects.puts) == (5030.0, 1)
    clock.advance(31)
    objects.time = 7000.0
    assert store_clock.now(0.0) == 7000.0

    slow = Objects(seconds=0.05)
    with ThreadPoolExecutor(3) as pool:  # threads that ask at once
        assert list(pool.map(slow.asked().now, [0.0] * 3)) == [5000.0] * 3
    assert slow.puts == 1


def test_where_ingress_may_not_write_nothing_is_later_than_what_is_there() -> None:
    store_clock = Objects(Refused("no")).asked()
    assert (store_clock.now(123.0), store_clock.now_or_host()) == (123.0, ManualClock().now())
    with pytest.raises(Unavailable):
        Objects(OutcomeUnknown("lost")).asked().now(123.0)


# The order of turns


def queue_of(*names: str, most: int = 3) -> TurnQueue[str]:
    """Return the queue of these names; the first letter of a name is its site."""
    queue = TurnQueue[str](most)
    for name in names:
        queue.put(name[0], name)
    return queue


async def next_of(queue: TurnQueue[str]) -> str:
    """Return the next turn, which ends before another begins."""
    site, waiting = await queue.begin_turn()
    queue.end_turn(site)
    return waiting


async def test_turns_are_fair_by_site_and_then_in_order() -> None:
    queue = queue_of("a1", "a2", "a3", "b1", "c1", "c2")
    assert [await next_of(queue) for _ in range(6)] == ["a1", "b1", "c1", "a2", "c2", "a3"]

    queue, found = queue_of("a1", "a2", "a3", "b1"), list[str]()
    for _ in range(8):  # both wait for every turn
        found.append(await next_of(queue))
        queue.put(found[-1][0], found[-1])
    assert found == ["a1", "b1", "a2", "b1", "a3", "b1", "a1", "b1"]


async def test_one_turn_is_left_for_a_site_that_begins_to_wait() -> None:
    queue = queue_of("a1", "a2", "a3", "a4", "a5")
    assert [(await queue.begin_turn())[1] for _ in range(3)] == ["a1", "a2", "a3"]
    waiting = asyncio.create_task(queue.begin_turn())
    for _ in range(2):
        await asyncio.sleep(0)
    assert not waiting.done(), "the site has three turns"
    queue.put("b", "b1")
    assert await waiting == ("b", "b1")
    queue.end_turn("a")
    assert await queue.begin_turn() == ("a", "a4")


async def test_nobody_waits_any_more_once_the_turns_are_cleared() -> None:
    queue = queue_of("a1", "a2", most=1)
    assert await queue.begin_turn() == ("a", "a1")
    queue.waiting.clear()
    queue.put("b", "b1")
    assert await queue.begin_turn() == ("b", "b1")
    queue.put("a", "a3")
    queue.end_turn("a")
    assert await queue.begin_turn() == ("a", "a3")


LAYOUT, NONE = Layout("data"), frozenset[str]()


class Counted:
    """A listing of `keys` that counts its requests."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.keys = sorted(keys)
        self.entries = 0

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> list[ObjectInfo]:
        found = [key for key in self.keys if key.startswith(prefix) and key > start_after][:limit]
        self.entries += len(found)
        return [ObjectInfo(key, 10, 1.0, "e") for key in found]


def key(first: int, last: int, level: int = 0) -> str:
    return ref(first, last, level).key


def store_of(*keys: str) -> tuple[SegmentStore, Counted]:
    objects = Counted(keys)
    return SegmentStore(objects, LAYOUT), objects  # type: ignore[arg-type]


def small(first: int, last: int) -> list[str]:
    """Return level 0 in segments of one sequence."""
    return [key(each, each) for each in range(first, last + 1)]


def test_levels_above_are_listed_only_if_level_0_does_not_continue_and_until_one_does() -> None:
    store, objects = store_of(*small(1, 500), key(1, 500, 1))
    found = plan_from_listings(store, CHAIN, 5, None, NONE).stretches
    assert (found[0].rows.first, found[-1].rows.last, objects.entries) == (5, 4 + SEARCH_PAGE, SEARCH_PAGE)

    store, objects = store_of(*small(501, 900), key(1, 500, 2), *[key(n, n, 7) for n in range(1, 500)])
    [above, *_] = plan_from_listings(store, CHAIN, 42, None, NONE).stretches
    assert (above.segment.level, above.rows, objects.entries) == (2, SequenceRange(42, 500), SEARCH_PAGE + 500)
    objects.keys = sorted([*objects.keys, *[key(n, n, 8) for n in range(1, 502)]])  # too many for one listing
    assert plan_from_listings(store, CHAIN, 42, None, NONE).stretches[0] == above
    assert objects.entries == 2 * SEARCH_PAGE + 500 + planning.MAX_ABOVE + 1


def test_a_pass_reads_one_page_of_each_level_however_much_there_is() -> None:
    store, objects = store_of(*small(11, 5000), *[key(n, n, 1) for n in range(11, 5000)])

    plan = plan_from_listings(store, CHAIN, 10, None, NONE, search=(search := SearchState()))

    assert (plan.phase, plan.hole) == (Phase.LATE, SequenceRange(10, 10))
    assert objects.entries <= 3 * SEARCH_PAGE + planning.MAX_ABOVE
    assert search.frontier


def test_a_survey_sees_everything_before_something_is_given_up() -> None:
    hole = SequenceRange(10, 40)
    assert search_whole_chain(*store_of()[:1], CHAIN, hole, NONE) == hole
    store, _ = store_of(*small(41, 3000), key(30, 2900))
    assert search_whole_chain(store, CHAIN, hole, NONE) == SequenceRange(10, 29)
    assert search_whole_chain(store, CHAIN, hole, {key(30, 2900)}) == hole
    store, _ = store_of(*small(41, 3000), key(30, 2900), key(1, 2950, 3))
    found = search_whole_chain(store, CHAIN, hole, NONE)
    assert found.coverage == SequenceRange(1, 2950)
    store, _ = store_of(key(15, 20), key(10, 12), key(41, 50))
    assert search_whole_chain(store, CHAIN, hole, {key(10, 12)}) == SequenceRange(10, 14)


# The rows of an open intent

WANTED = SequenceRange(5, 50)


def test_what_is_covered_needs_one_page_whatever_follows() -> None:
    store, objects = store_of(*small(1, 5_000))

    assert [each.rows.first for each in stretches_for(store, CHAIN, WANTED, NONE)] == list(range(5, 51))
    assert objects.entries == planning.COVER_FIRST_PAGE


def test_a_damaged_segment_is_replaced_by_a_level_above() -> None:
    store, objects = store_of(*small(1, 5_000), key(1, 1000, 2))

    found = stretches_for(store, CHAIN, WANTED, {key(7, 7)})

    assert (found[-1].segment.level, found[-1].rows.last) == (2, 50)
    assert objects.entries <= 2 * planning.COVER_FIRST_PAGE + 1


def test_a_segment_that_ends_pages_behind_the_range_is_found() -> None:
    store, objects = store_of(*[key(n, n) for n in range(1, 3000) if n != 7], key(6, 2500), *small(4000, 6000))

    found = stretches_for(store, CHAIN, WANTED, NONE)

    assert [(each.rows.first, each.rows.last) for each in found] == [(5, 5), (6, 50)]
    assert objects.entries <= planning.COVER_FIRST_PAGE + 3 * planning.COVER_NEXT_PAGE


def test_a_hole_in_the_range_leaves_nothing() -> None:
    store, _ = store_of(*[key(n, n) for n in range(1, 3000) if n != 7])

    assert (stretches_for(store, CHAIN, WANTED, NONE), stretches_for(store, CHAIN, WANTED, {key(5, 5)})) == ([], [])
