"""The status of a feed and its words; confirmed answers, stalls, shares, one budget, requests to freeze."""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.archive.segment import Footer, Ledger, Reason
from common.archive.writer import SpooledSegment
from common.chain import Chain
from common.clock import RETRY_DELAYS_S, Backoff
from common.errors import Stopped, Unavailable
from common.leasing import fair_share, group_name, surplus
from common.metrics import REGISTRY
from common.nats.lease import format_owner, new_owner
from common.observe.monitor import Health
from common.sequences import SequenceRange
from common.settings.egress import SegmentSettings
from common.tasks import Stop, first_of, run_until_stopped
from egress import metrics, watchdog
from egress.builder import OpenSegment
from egress.deps import PARALLEL_STARTS, StartTurns, Tuning
from egress.evidence import confirm
from egress.flush import FlushRequest, FlushRequests
from egress.incarnations import filters_text
from egress.memory import MAX_WINDOW_BYTES, MemoryAccount, MemoryBudget
from egress.report import FeedReport, NewlyUnmatched, Unmatched, log
from egress.watchdog import ProgressCheck, SessionProgress, StreamLimits, seconds_left_by_age, seconds_left_by_size
from tests.support.basics import counted, unique
from tests.support.clock import ManualClock


def spooled(chain: Chain, first: int, last: int) -> SpooledSegment:
    coverage = SequenceRange(first, last)
    footer = Footer(chain, 0, coverage, 0, Ledger({Reason.DELETED: len(coverage)}), 0, None, None, None, "test")
    return SpooledSegment(Path("none"), footer, 1, "0" * 64)


class Feed(NamedTuple):
    clock: ManualClock
    health: Health
    chain: Chain
    report: FeedReport

    def status(self, *keys: str) -> tuple[Any, ...]:
        part = self.health.status()["parts"][f"egress {self.chain.feed}"]
        return tuple(part[key] for key in keys)

    def count(self, metric: Any) -> float:
        return counted(metric.labels(self.chain.site, self.chain.feed, "0"))

    def watched(self, waits: Callable[[int], Awaitable[bool]]) -> watchdog.Liveness:
        return watchdog.Liveness(ProgressCheck(60, 300, self.clock.monotonic()), waits, self.report, self.clock)


@pytest.fixture
def feed() -> Feed:
    clock, chain = ManualClock(), Chain("s", unique("F"))
    health = Health(clock)
    return Feed(clock, health, chain, FeedReport(chain, "S", health))


def test_the_position_is_the_first_sequence_that_is_not_accounted_for(feed: Feed) -> None:
    chain, report = feed.chain, feed.report
    report.set_reading(chain, 5, 0, 5)
    assert feed.status("position", "end") == (5, 0)
    assert feed.count(metrics.end_sequence) == 4, "what was before is not owed"
    report.set_reading(chain, 5, 4)
    assert feed.status("position", "end") == (5, 4)
    for first, last in ((5, 9), (10, 30)):
        report.record_put(spooled(chain, first, last), 0.1, last)
        assert feed.status("position", "end") == (last + 1, last)
    report.set_reading(chain, 40, 5000)  # in a hole
    report.record_put(spooled(chain, 40, 50), 0.1, 5000)
    assert feed.status("position", "end") == (51, 5000)
    assert feed.count(metrics.end_sequence) == 5000


def test_a_feed_that_leaves_takes_its_series_and_leaves_its_counts(feed: Feed) -> None:
    before = metrics.totals()["segments"]()
    feed.report.record_put(spooled(feed.chain, 1, 9), 0.1, 9)
    feed.report.set_unmatched(Unmatched(1, 1, "a"))
    feed.report.remove()
    assert metrics.totals()["segments"]() == before + 1
    samples = [sample for family in REGISTRY.collect() for sample in family.samples]
    assert not [each for each in samples if each.labels.get("feed") == feed.chain.feed]


def test_the_source_is_not_behind_the_archive_unless_it_was_rolled_back(feed: Feed) -> None:
    feed.report.set_reading(feed.chain, 5, 4)
    feed.report.record_source(9, None)
    ends = [feed.status("end", "source_last")]
    feed.report.record_put(spooled(feed.chain, 5, 30), 0.1, 30)
    ends.append(feed.status("end", "source_last"))  # messages archived since the request are in the stream
    for _ in range(2):  # asked before the put and answered after it; then it was rolled back
        feed.report.record_source(25, None)
        ends.append(feed.status("end", "source_last"))
        assert feed.count(metrics.source_sequence) == ends[-1][1]
    assert ends == [(4, 9), (30, 30), (30, 30), (30, 25)]


def test_the_open_segment_is_asked_for_whenever_the_page_is(feed: Feed) -> None:
    figures = metrics.open_messages, metrics.open_bytes, metrics.open_age
    feed.report.set_reading(feed.chain, 5, 4)
    assert (feed.status("open_segment"), feed.count(metrics.open_age)) == ((None,), 0)
    held = OpenSegment(5, 8, 3, 120, 12.5, 287.5, SegmentSettings())
    feed.report.set_open_segment(lambda: held)
    [shown] = feed.status("open_segment")
    found = {"messages": 3, "bytes": 120, "last": 8, "age_seconds": 12.5, "closes_in_seconds": 287.5}
    assert shown.items() >= {**found, "max_messages": 1_000_000, "max_size": 100 * 2**20}.items()
    assert [*map(feed.count, figures)] == [3, 120, 12.5]
    feed.report.set_open_segment()
    assert (feed.status("open_segment"), feed.count(metrics.open_messages)) == ((None,), 0)


def test_a_stop_names_the_incarnation_that_was_checked_and_a_recreated_source_is_counted(feed: Feed) -> None:
    assert feed.count(metrics.recreated) == 0, "an alert needs a beginning"
    feed.report.count_recreated()
    feed.report.follow(feed.chain.next_incarnation())
    feed.report.set_stopped(Stopped("why", code="E-FORKED"))
    assert feed.report.heartbeat().chain == feed.chain.next_incarnation()
    assert (feed.count(metrics.recreated), feed.count(metrics.incarnation)) == (1, 1)


def test_a_chain_waits_while_the_store_is_silent_unless_another_works_on_it(feed: Feed) -> None:
    feed.report.set_reading(feed.chain, 5, 4)
    assert feed.count(metrics.waiting) == 0
    for is_ready in (False, True):
        feed.health.set_ready("objects", is_ready)
        assert feed.count(metrics.waiting) == (not is_ready)
    feed.report.set_waiting(Unavailable("away"))
    assert feed.count(metrics.waiting) == 1
    feed.report.set_stopped(Stopped("it differs", code="E-FORKED"))
    assert feed.count(metrics.waiting) == 0
    feed.report.set_standby("another")
    feed.health.set_ready("objects", False)
    assert feed.count(metrics.waiting) == 0


def test_a_standby_reports_no_trouble_of_the_chain_it_had(feed: Feed) -> None:
    gauges = metrics.lease_held, metrics.stopped, metrics.stalled, metrics.lost, metrics.damaged, metrics.source_gone
    for each in gauges:
        each.labels("s", feed.chain.feed, "0").set(1)
    feed.report.set_standby("another")
    assert [*map(feed.count, gauges)] == [0] * 6


def test_a_chain_is_not_ready_while_a_stop_is_confirmed_and_keeps_one_it_has(feed: Feed) -> None:
    feed.report.set_reading(feed.chain, 5, 4)
    feed.report.set_checking("sequence 4 is not as archived")
    assert feed.health.problems() == [f"egress {feed.chain.feed}: sequence 4 is not as archived"]
    feed.report.set_working()
    assert feed.health.problems() == []
    feed.report.set_stopped(Stopped("it differs", code="E-FORKED"))
    feed.report.set_checking("sequence 4 is not as archived")
    assert feed.health.problems() == [f"egress {feed.chain.feed}: it differs"]


# Stalls


HALF = SessionProgress(count=50, received=50, archived=50, source=100)


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(log, "error", lambda _, **fields: found.append(fields["code"]))
    return found


async def test_a_stall_is_logged_once_and_cleared(feed: Feed, errors: list[str]) -> None:
    waits = iter([True, True, False])

    async def waiting(_: int) -> bool:
        return next(waits)

    liveness = feed.watched(waiting)
    assert await liveness.check(HALF) is None
    feed.clock.advance(60)
    for _ in range(2):
        doubt = await liveness.check(HALF)
        assert (doubt.reason, feed.count(metrics.stalled), errors) == ("stalled", 1, ["E-STALLED"])
    assert (await liveness.check(HALF), feed.count(metrics.stalled)) == (None, 0)


async def test_a_stall_that_lasts_over_readers_is_logged_once(feed: Feed, errors: list[str]) -> None:
    async def waiting(_: int) -> bool:
        return True

    fresh = replace(HALF, count=0)
    for states in ([fresh] * 3, [fresh] * 3, [HALF] * 3):  # the third has received something
        liveness = feed.watched(waiting)
        for state in states:
            doubt = await liveness.check(state)
            feed.clock.advance(30)
        assert doubt is not None
    assert errors == ["E-STALLED"] * 2


def test_time_goes_on_while_nobody_can_be_asked(feed: Feed) -> None:
    left, at = [feed.count(metrics.expiry)], feed.clock.monotonic() + 100
    feed.report.set_expiry(lambda: max(0.0, at - feed.clock.monotonic()))
    for passed in (40, 100):
        feed.clock.advance(passed)
        left.append(feed.count(metrics.expiry))
    feed.report.set_standby("another")
    assert [*left, feed.count(metrics.expiry)] == [math.inf, 60, 0, math.inf]


# Words


def test_an_owner_is_a_host_and_a_process() -> None:
    owners = {
        "-/vm/370/5ae63413": "vm (process 370)",
        "blue/vm/370/5ae63413": "blue on vm (process 370)",
        "a/b/vm/370/5ae63413": "a/b on vm (process 370)",
        "somebody else": "somebody else",
        "": "",
    }
    assert {owner: format_owner(owner) for owner in owners} == owners
    assert format_owner(new_owner("")).startswith(new_owner("").split("/")[1] + " (process ")


def test_filters_and_what_is_left_out_are_words() -> None:
    texts = {
        "the whole stream": [""],
        "the filter a.>": ["a.>"],
        "2 partitions (a, b)": ["a", "b"],
        "10 partitions (n0, n1, n2, n3, n4, n5, n6, n7 and 2 more)": [f"n{i}" for i in range(10)],
    }
    assert [filters_text(filters) for filters in texts.values()] == [*texts]
    many = NewlyUnmatched("nodes.3.>", Unmatched(11, 4, "nodes.3.n11"))
    assert str(many) == "nodes.3.>: 11 messages on 4 subjects, such as nodes.3.n11, belong to no partition any more"
    assert (
        str(NewlyUnmatched("", Unmatched(1, 1, "a")))
        == ">: 1 message on 1 subject, a, belongs to no partition any more"
    )
    some = NewlyUnmatched("", Unmatched(5, 2, "a", is_complete=False))
    assert str(some).startswith(">: at least 5 messages on 2 subjects, such as a,")


async def confirmed(answers: str, clock: ManualClock) -> str:
    waiting = answers.split()

    async def ask(_: None) -> str:
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]

    deps: Any = SimpleNamespace(clock=clock, tuning=Tuning(), with_fresh_client=lambda query: query(None))
    return await confirm(deps, ask, is_acceptable=lambda a: a == "same", key=lambda a: a[0])


async def test_only_an_answer_with_consequences_is_asked_three_times_and_those_that_never_agree_are_given_up() -> None:
    found = {
        "same": ("same", 0),
        "recreated1 recreated2 recreated3": ("recreated3", 20),
        "gone gone recreated recreated recreated": ("recreated", 40),  # a different answer restarts the count
        "gone gone same": ("same", 20),
    }
    clocks = {answers: ManualClock() for answers in found}
    assert {each: (await confirmed(each, clock), clock.monotonic()) for each, clock in clocks.items()} == found
    with pytest.raises(Unavailable, match="answers about the stream keep changing"):
        await confirmed("gone recreated " * 10, ManualClock())


async def test_work_is_dropped_when_the_stop_comes_first_and_what_it_raises_is_raised() -> None:
    stop = Stop()

    async def work(error: Exception | None = None) -> int:
        if error is not None:
            raise error
        return 7

    assert await run_until_stopped(stop, work()) == 7
    with pytest.raises(Unavailable, match="down"):
        await run_until_stopped(stop, work(Unavailable("down")))
    stop.set()
    assert await run_until_stopped(stop, asyncio.sleep(30)) is None


async def test_the_first_of_several_waits_ends_the_others_and_may_be_time() -> None:
    event, forgotten = asyncio.Event(), []

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            forgotten.append(True)

    asyncio.get_running_loop().call_soon(event.set)
    await asyncio.wait_for(first_of(never(), event.wait()), 10)
    assert forgotten == [True]
    await asyncio.wait_for(first_of(asyncio.Event().wait(), seconds=0.01), 10)


def test_delays_grow_with_jitter_and_begin_again() -> None:
    backoff = Backoff(random.Random(1))
    delays = [backoff.next_delay() for _ in range(20)]
    assert all(longest / 2 <= delay <= longest for delay, longest in zip(delays, RETRY_DELAYS_S, strict=False))
    assert max(delays) <= RETRY_DELAYS_S[-1]
    backoff.reset()
    assert backoff.next_delay() <= RETRY_DELAYS_S[0]


def test_a_budget_is_shared_by_many_chains_and_calls_when_there_is_room_again() -> None:
    woken: list[str] = []
    budget = MemoryBudget(100, chains=2)
    assert budget.has_room(1_000), "for one message of any size where it is empty"

    def account(name: str) -> MemoryAccount:
        return budget.account(partial(woken.append, name), partial(woken.append, f"{name} is largest"))

    one, other, idle = map(account, ("one", "other", "idle"))
    one.charge(70)
    assert (other.has_room(30), woken) == (True, [])
    assert (other.has_room(31), other.has_room(32), woken) == (False, False, ["one is largest"])
    assert (one.is_largest(), other.is_largest()) == (True, False)
    one.release(50)
    assert (woken[1:], budget.used) == (["one", "other"], 20)
    assert not idle.has_room(100)
    one.close()
    assert (woken[3:], budget.used) == (["one is largest", "idle"], 0)
    # Above the limit, each change may make another one the largest. A closed account counts no more.
    for each, size in ((other, 120), (idle, 1), (one, 5), (idle, -1)):
        each.charge(size)
    assert (woken[5:], budget.used) == (["other is largest"] * 2, 120)
    assert MemoryBudget(128 << 20).window_bytes == MAX_WINDOW_BYTES
    assert MemoryBudget(128 << 20, chains=100).window_bytes * 100 <= 128 << 20


async def test_feeds_begin_in_turns_of_which_one_that_hangs_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("egress.deps.START_TURN_S", 0.05)
    turns, stop = StartTurns(), Stop()
    async with AsyncExitStack() as held:

        async def take(count: int = PARALLEL_STARTS) -> list[Callable[[], None]]:
            return [await held.enter_async_context(turns.turn(stop)) for _ in range(count)]

        await take()
        [end] = await asyncio.wait_for(take(1), 10)
        end()
        monkeypatch.setattr("egress.deps.START_TURN_S", 60)
        await take()
        end()
        last = asyncio.create_task(take(1))
        await asyncio.sleep(0.1)
        assert not last.done(), "a turn ends once"
        stop.set()
        await asyncio.wait_for(last, 10)


# Fair shares: enough for every lease to be held, and no more


@given(st.integers(0, 10_000), st.integers(1, 100))
def test_all_shares_together_reach_and_one_less_of_each_does_not(chains: int, members: int) -> None:
    share = fair_share(chains, members)
    assert share * members >= chains
    assert chains == 0 or (share - 1) * members < chains
    assert fair_share(chains, 0) == chains, "one that nobody counts is the caller"


@given(st.sets(st.text(max_size=5), max_size=20), st.integers(0, 25))
def test_the_surplus_is_what_is_above_the_share_and_always_the_same(held: set[str], share: int) -> None:
    released = surplus(held, share)
    assert len(held - set(released)) == min(len(held), share)
    assert (surplus(sorted(held, reverse=True), share), surplus(held - set(released), share)) == (released, [])


def test_members_with_the_same_leases_in_any_order_are_one_circle() -> None:
    assert group_name(["a", "b"]) == group_name(["b", "a", "a"])
    assert group_name(["a", "b"]) != group_name(["a", "c"])
    assert group_name(["a.b"]) != group_name(["a", "b"])


# Requests to flush: partitions, by several commands at the same time


def test_a_request_replaces_that_of_its_partition_and_late_answers_to_that_are_dropped() -> None:
    found = FlushRequests({}).with_requests(["N/0", "N/1"], "a")
    late, answer = FlushRequest("a", 0, 9, is_stored=True), FlushRequest("b", 0, 12)

    again = found.with_answers({"N/0": late, "N/1": late}).with_requests(["N/0"], "b")
    assert again.partitions == {"N/0": FlushRequest("b"), "N/1": late}
    assert again.with_answers({"N/0": late, "N/2": late}) == again
    assert [each.state for each in again.with_answers({"N/0": answer}).partitions.values()] == ["closing", "stored"]


SECOND = 10**9


def progress() -> ProgressCheck:
    return ProgressCheck(timeout=60, segment_age=300, now=0.0)


def test_messages_that_wait_for_a_minute_are_a_stall_that_a_fresh_reader_may_heal_unless_there_is_no_room() -> None:
    for asks in (True, False):
        judge, state = progress().judge, replace(HALF, can_pull=asks)
        assert [judge(state, now) for now in (0.0, 30.0, 59.9)] == [None] * 3
        stall = judge(replace(state, source=200), 60.0)
        assert (stall.pending, stall.since, stall.is_healable) == ("sequences 51..200 are not received", 60.0, asks)


@pytest.mark.parametrize("change", [{"count": 51}, {"received": 51}, {"archived": 51, "received": 51}])
def test_any_progress_restarts_the_minute(change: dict[str, int]) -> None:
    judge, moved = progress().judge, replace(HALF, **change)
    judge(HALF, 0.0)
    assert [judge(moved, now) is None for now in (59.0, 118.0, 119.0)] == [True, True, False]


@pytest.mark.parametrize("state", [replace(HALF, source=50), replace(HALF, source=7), replace(HALF, is_done=True)])
def test_where_nothing_waits_nothing_stalls_and_the_next_message_has_a_minute(state: SessionProgress) -> None:
    judge = progress().judge

    assert [judge(state, now) for now in (0.0, 1000.0, 2000.0)] == [None] * 3
    assert [judge(HALF, now) is None for now in (2030.0, 2059.0, 2060.0)] == [True, True, False]


def test_what_is_received_and_not_archived_stalls_after_its_segment_had_to_close() -> None:
    judge = progress().judge
    received = SessionProgress(count=50, received=50, archived=10, source=50)

    assert [judge(received, now) for now in (0.0, 300.0, 359.0)] == [None] * 3
    stall = judge(replace(received, count=60, received=60, source=60), 360.0)
    assert (stall.pending, stall.is_healable) == ("sequences 11..60 are received and not archived", False)


def test_a_chain_that_archives_at_each_check_never_stalls() -> None:
    judge = progress().judge
    for archived in range(30):  # also while it reads no more, for lack of memory
        assert judge(SessionProgress(count=50, received=50, archived=archived, source=100), archived * 59.0) is None


# The time until the source deletes a message


def test_limits_of_a_stream() -> None:
    assert StreamLimits.of({"max_age": 5, "max_msgs": -1, "max_bytes": -1}) == StreamLimits(5)
    for config in ({"max_msgs": 10}, {"max_bytes": 10, "discard": "old"}):
        assert StreamLimits.of(config) == StreamLimits(0, True)
    keeps = ({"max_msgs": 10, "discard": "new"}, {"max_msgs": 10, "retention": "workqueue"})
    for config in (*keeps, {"max_msgs_per_subject": 1}):
        assert StreamLimits.of(config) == StreamLimits()


def test_it_is_kept_as_long_as_the_oldest_waiting_message_has_left_or_the_pace_takes_to_it() -> None:
    day, full = StreamLimits(86_400 * SECOND), StreamLimits(by_size=True)
    ages = ((100 * SECOND, 100 * SECOND), (100 * SECOND, 86_400 * SECOND), (0, 10 * 86_400 * SECOND))

    assert [seconds_left_by_age(day, *each) for each in ages] == [86_400, 100, 0]
    assert seconds_left_by_age(StreamLimits(), *ages[2]) == math.inf
    paces = ((400, 6), (1000, 6), (400, 0))
    assert [seconds_left_by_size(full, waiting=1000, first=first, rate=rate) for first, rate in paces] == [
        100,
        0,
        math.inf,
    ]
    assert seconds_left_by_size(StreamLimits(max_age_ns=1), waiting=1000, first=400, rate=6) == math.inf


def test_the_pace_follows_the_last_samples() -> None:
    rise = watchdog.FirstSequenceRate()

    assert [rise.add_sample(at, last) for at, last in ((0.0, 1), (30.0, 301), (60.0, 301))] == [0, 10, 5]
    paces = [rise.add_sample(float(now), 301) for now in range(90, 600, 30)]
    assert (paces[-1], rise.add_sample(600.0, 1)) == (0, 0), "what rose was long ago; another stream"
