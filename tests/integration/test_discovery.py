"""The number of calls of a poll of many chains, and the effects of notifications."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from common.archive.documents import ChainDocument, ChainStore
from common.archive.keys import Layout
from common.chain import Chain
from common.clock import SystemClock
from common.errors import FloeError, Refused, Unavailable
from common.objects.local import LocalObjects
from common.observe.monitor import Health
from common.service.process import ThreadPool
from ingress import metrics
from ingress.chains.plan import Phase
from ingress.discovery import discovery as module
from ingress.discovery.discovery import MAX_UNKNOWN_CHAINS, Discovery, ListingSchedule
from ingress.discovery.notifications import NotificationHandler
from tests.integration.test_chain_turns import Centre
from tests.support.basics import counted, soon
from tests.support.clock import ManualClock
from tests.support.ingress import Archive, rows_of
from tests.support.stores import FaultyStore, Throw, raising
from tests.unit.test_notices import minio, segment_key

LAYOUT = Layout("data")
SITE, FEED = "us-east", "NODES"


class Target:
    """A listener that records its calls."""

    name, chains = "FLEET", SimpleNamespace(patterns=())

    def __init__(self) -> None:
        self.found_, self.woken, self.ticks = list[tuple[Chain, int | None]](), list[Chain](), 0

    def pairs(self) -> list[tuple[str, str]]:
        return [(SITE, FEED)]

    def add_chain(self, chain: Chain, end: int | None = None) -> None:
        self.found_.append((chain, end))

    def wake(self, chain: Chain) -> None:
        self.woken.append(chain)

    def search(self, chain: Chain, *, everywhere: bool) -> None: ...

    async def tick(self) -> None:
        self.ticks += 1

    def record_error(self, error: Exception) -> None:
        self.failed = error


class Place:
    """A store in a folder with some chains, the discovery that polls it, and the handler of its notifications."""

    def __init__(self, folder: Path, poll: float) -> None:
        self.objects = FaultyStore(LocalObjects(folder))
        self.documents = ChainStore(self.objects, LAYOUT)  # type: ignore[arg-type]
        self.threads, self.health = ThreadPool("look", 4), Health(SystemClock())
        self.discovery = Discovery(self.documents, self.threads, SystemClock(), self.health, poll)
        self.target, self.notified = Target(), NotificationHandler("nats", "floe", LAYOUT, self.discovery, self.health)

    def chain(self, number: int) -> Chain:
        return Chain(SITE, FEED, 0, number)

    def make(self, count: int) -> None:
        for number in range(count):
            self.documents.create_chain(self.chain(number), ChainDocument((), 1, 1))
            self.documents.write_tail(self.chain(number), 10)

    def notify(self, chain: Chain, bucket: str = "floe") -> None:
        self.notified.handle(json.dumps(minio(segment_key(chain), bucket=bucket)).encode())

    @asynccontextmanager
    async def polling(self) -> AsyncIterator[None]:
        """Run discovery; once it has polled everything, count its calls from there."""
        self.discovery.add(self.target)
        task = asyncio.create_task(self.discovery.run())
        try:
            await soon(lambda: task.done() or (self._has_polled() and self.threads.busy == 0))
            self.forget()
            yield
        finally:
            task.cancel()
            self.threads.close()
            with suppress(asyncio.CancelledError):
                await task

    def _has_polled(self) -> bool:
        is_listed = self.objects.calls["list"] >= 2 and not self.discovery._unrecorded
        return self.discovery.has_polled and self.target.ticks >= 1 and is_listed

    def forget(self) -> None:
        for each in (self.objects.calls, self.objects.keys, self.target.found_, self.target.woken):
            each.clear()
        self.target.ticks = 0


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, poll=3600)


async def test_one_change_among_many_chains_costs_one_listing_and_one_read(place: Place) -> None:
    place.make(200)
    async with place.polling():
        place.documents.write_tail(place.chain(7), 20)
        place.forget()

        await place.discovery.poll()

        assert (place.objects.calls, place.target.found_) == ({"list": 1, "get": 1}, [(place.chain(7), 20)])
        place.forget()
        await place.discovery.poll()
        assert place.objects.calls == {"list": 1}
        place.forget()
        place.discovery.remove(place.target)
        place.discovery.add(place.target)
        await soon(lambda: place.target.ticks)
        assert (len(place.target.found_), place.objects.calls) == (200, {"list": 1}), "it lists no documents again"
        place.documents.write_tail(place.chain(1), 30)  # while nobody listened
        place.notified.record_listening()
        await soon(lambda: (place.chain(1), 30) in place.target.found_)


async def test_a_site_with_many_tails_is_read_in_turn(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingress.discovery.discovery.MAX_TAILS_PER_POLL", 10)
    hostile = [Chain("a-site", FEED, 0, number) for number in range(25)]
    monkeypatch.setattr(place.target, "pairs", lambda: [(SITE, FEED), ("a-site", FEED)])
    for chain in (*hostile, place.chain(0), place.chain(1)):
        place.documents.write_tail(chain, 10)
    place.discovery.add(place.target)  # type: ignore[arg-type]

    read: list[Chain] = []
    for number in range(3):
        place.forget()
        place.discovery.poll_due.clear()
        await place.discovery.poll()
        read += [chain for chain, end in place.target.found_ if end is not None]
        assert place.objects.calls["get"] == min(10, 27 - number * 10) + (number == 0)  # that of the known tails
        assert place.discovery.poll_due.is_set() is (number < 2)
    assert {place.chain(0), place.chain(1)} <= set(read[:10])
    assert sorted(read) == sorted([*hostile, place.chain(0), place.chain(1)])
    for chain in (*hostile, place.chain(0)):  # all are known: those beyond the limit of one poll wait for the next
        place.documents.write_tail(chain, 20)
    place.forget()
    place.discovery.poll_due.clear()
    await place.discovery.poll()
    assert (len(place.target.found_), place.discovery.poll_due.is_set()) == (10, False)
    assert (place.chain(0), 20) in place.target.found_
    place.threads.close()


async def test_a_notification_wakes_its_chain_alone_asks_the_store_nothing_and_a_thousand_cause_few_polls(
    place: Place,
) -> None:
    place.make(20)
    async with place.polling():
        place.notify(Chain("elsewhere", FEED))
        place.notify(place.chain(1), bucket="another")
        place.notified.handle(b"garbage")
        place.notify(place.chain(3))
        await soon(lambda: place.target.woken)
        await asyncio.sleep(0.1)
        assert (place.target.woken, place.target.found_, place.objects.calls) == ([place.chain(3)], [], {})
        place.forget()
        began = time.monotonic()
        for _ in range(100):
            for _ in range(10):
                place.notify(place.chain(1))
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)

        # A second or more, with twenty polls each.
        assert 5 <= len(place.target.woken) <= 20 * (time.monotonic() - began) + 5
        assert place.objects.calls == {}


async def test_a_new_chain_is_asked_for_by_one_call_and_forged_ones_make_nothing_and_cost_little(place: Place) -> None:
    place.make(2)
    async with place.polling():
        place.documents.create_chain(place.chain(9), ChainDocument((), 1, 1))
        place.forget()
        place.notify(place.chain(9))
        await soon(lambda: place.target.found_ and place.target.ticks)  # a busy machine ticks without it, too

        assert (place.objects.calls, place.target.found_) == ({"head": 1}, [(place.chain(9), None)])
        place.notify(place.chain(9))
        await soon(lambda: place.target.woken)
        assert place.objects.calls == {"head": 1}, "it is known from then on"
        place.forget()
        for number in range(5000):
            place.notify(Chain(SITE, FEED, number % 9999, number))
        await soon(lambda: place.objects.calls["head"])
        await asyncio.sleep(0.1)

        assert place.objects.calls["head"] <= MAX_UNKNOWN_CHAINS
        assert place.target.found_ == []


async def test_a_target_added_during_a_poll_is_polled_next(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.make(1)
    chains, later = place.documents.chains, Target()
    monkeypatch.setattr(later, "pairs", lambda: [(SITE, "LATER")])

    def meanwhile(site: str, feed: str) -> list[Chain]:
        found = chains(site, feed)
        place.discovery.add(later)
        return found

    place.discovery.add(place.target)
    await place.discovery.poll()
    with monkeypatch.context() as patch:
        patch.setattr(place.documents, "chains", meanwhile)
        await place.discovery.list_chains()
    assert "sources" not in place.health.status()["parts"]
    await place.discovery.poll()
    await place.discovery.list_chains()
    assert place.health.status()["parts"]["sources"] == {"missing": [f"{SITE}/LATER"]}
    place.documents.create_chain(Chain(SITE, "LATER"), ChainDocument((), 1, 1))
    await place.discovery.list_chains()
    assert "sources" not in place.health.status()["parts"]
    assert [{chain.feed for chain, _ in each.found_} for each in (later, place.target)] == [{"LATER"}, {FEED}]
    place.threads.close()


async def test_endless_notifications_defer_no_poll(tmp_path: Path) -> None:
    place = Place(tmp_path, poll=0.2)
    place.make(2)
    async with place.polling():
        place.documents.write_tail(place.chain(0), 20)  # its notification is lost
        began, notified = time.monotonic(), 0
        while (place.chain(0), 20) not in place.target.found_ or notified < 100:
            place.notify(place.chain(1))
            notified += 1
            await asyncio.sleep(0.01)

        polls = (time.monotonic() - began) / 0.2
        assert 2 <= place.objects.calls["list"] <= 2 * polls + 2


async def test_waiting_chains_are_checked_between_polls(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK_INTERVAL_S", 0.1)
    place.make(1)
    async with place.polling():
        await soon(lambda: place.target.ticks >= 3)
        assert place.objects.calls == {}


async def test_a_missing_archive_is_shown_until_it_is_back(place: Place) -> None:
    place.make(2)
    async with place.polling():
        place.documents.create_chain(place.chain(7), ChainDocument((), 1, 1))  # of which nothing is archived yet
        await place.discovery.list_chains()
        await place.discovery.poll()
        assert not place.health.not_ready_reason("archive")
        place.objects.delete(place.documents.layout.tail(place.chain(1)))
        place.objects.put(place.documents.layout.tail(place.chain(0)), b"{")
        await place.discovery.poll()
        assert place.health.not_ready_reason("archive") == f"the archive of {place.chain(1)} is gone from the bucket"
        await soon(lambda: {*place.target.woken} == {place.chain(0), place.chain(1)})
        place.documents.write_tail(place.chain(1), 10)
        await place.discovery.poll()
        assert not place.health.not_ready_reason("archive")


@pytest.mark.parametrize("verb", ["list", "get"])
async def test_a_store_that_refuses_all_from_the_first_poll_on_ends_it(place: Place, verb: str) -> None:
    place.make(2)
    place.objects.on(verb, raising(Refused("no right")))
    with pytest.raises(Refused, match="no right"):
        async with place.polling():
            pass


@pytest.mark.parametrize("error", [Refused("no right"), Unavailable("away")])
async def test_a_store_that_has_worked_and_fails_is_retried_and_logged_once(tmp_path: Path, caplog, error: FloeError):
    place = Place(tmp_path, poll=0.05)
    place.make(2)
    async with place.polling():
        place.objects.on("list", raising(error))
        await soon(lambda: place.health.problems())
        await soon(lambda: counted(metrics.store_reachable) == 0)
        await soon(lambda: place.objects.calls["list"] >= 5)
        assert caplog.text.count("store check failed") == 1
        place.documents.write_tail(place.chain(1), 30)
        place.objects.heal()
        await soon(lambda: (place.chain(1), 30) in place.target.found_)
        await soon(lambda: not place.health.problems())


async def test_one_tail_that_is_refused_from_the_first_poll_on_ends_nothing(tmp_path: Path) -> None:
    place = Place(tmp_path, poll=0.05)
    place.make(3)
    key = LAYOUT.tail(place.chain(1))

    def refused(real: Callable[..., Any], asked: str, **limits: Any) -> Any:
        if asked == key:
            raise Refused("no right")
        return real(asked, **limits)

    place.objects.on("get", refused)
    async with place.polling():
        place.documents.write_tail(place.chain(2), 40)
        await soon(lambda: (place.chain(2), 40) in place.target.found_)
        assert any("no right" in problem for problem in place.health.problems())


async def test_a_listener_that_fails_keeps_back_no_other(place: Place) -> None:
    place.make(1)

    class Failing(Target):
        async def tick(self) -> None:
            raise Unavailable("away")

    place.discovery.add(Failing())
    place.discovery.add(place.target)
    with pytest.raises(Unavailable):
        await place.discovery.poll()
    assert place.target.ticks == 1


@pytest.mark.parametrize("name", ["add_chain", "wake", "tick"])
async def test_a_failing_listener_fails_alone(place: Place, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A chain is found and a notification of it comes; the polls continue."""
    place.make(1)
    failing = Target()
    Throw(monkeypatch, failing, name)
    place.discovery.add(failing)
    async with place.polling():
        place.notify(place.chain(0))
        await soon(lambda: place.target.woken == [place.chain(0)])
        await place.discovery.poll()
        assert isinstance(failing.failed, MemoryError)
        assert not hasattr(place.target, "failed")


async def test_failed_lookups_of_chains_are_retried_soon(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK_INTERVAL_S", 0.2)
    place.make(1)
    async with place.polling():
        await asyncio.to_thread(place.documents.create_chain, place.chain(5), ChainDocument((), 1, 1))
        place.forget()
        place.objects.on("list", raising(Unavailable("away")), nth=1)
        place.discovery.listing_due.set()
        await soon(lambda: (place.chain(5), None) in place.target.found_)


# Requests


async def test_a_heartbeat_that_names_more_than_the_tail_wakes_the_chain_once_an_attempt(place: Place) -> None:
    place.make(2)
    ends = {place.chain(0): 10, place.chain(1): 11, place.chain(7): 5}  # of the last one nothing was listed yet
    async with place.polling():
        place.discovery.sites = SimpleNamespace(read=AsyncMock(), archived_ends=ends.items)  # type: ignore[assignment]
        for _ in range(2):
            await place.discovery._read_heartbeats(place.discovery.sites)
            await place.discovery.poll()
        await soon(lambda: place.objects.calls["head"])
        assert place.target.woken == [place.chain(1)]
        place.discovery.remove(place.target)  # an attempt that ended before it delivered
        place.discovery.add(place.target)
        await place.discovery._read_heartbeats(place.discovery.sites)
        await place.discovery.poll()
        await soon(lambda: place.target.woken == [place.chain(1)] * 2)


def test_each_chain_is_listed_within_its_interval_and_not_too_many_at_once() -> None:
    clock, chains = ManualClock(), [Chain(SITE, FEED, 0, number) for number in range(300)]
    schedule = ListingSchedule(clock, 1.0)
    schedule.add(chains)
    listed = {(chain, is_full): [0.0] for chain in chains for is_full in (False, True)}
    for _ in range(7 * 24 * 60):
        clock.advance(60)
        taken = list(schedule.take_due({(SITE, FEED)}))
        assert sum(1 + is_full for _, is_full in taken) <= 1.0 * module.TICK_INTERVAL_S + 1
        for chain, is_full in taken:
            for kind in {False, is_full}:
                listed[chain, kind].append(clock.monotonic())
    assert not list(schedule.take_due({(SITE, "ANOTHER")}))
    for (_, is_full), times in listed.items():
        longest = max(later - at for at, later in pairwise([*times, clock.monotonic()]))
        assert longest <= (3 * 86_400 if is_full else 6 * 3600) + 1800


@pytest.mark.parametrize("source", [{}, {"site": "*", "feed": "N*"}])
async def test_a_first_look_takes_five_requests_and_a_restart_a_fifth_of_one(archive: Archive, source: Any) -> None:
    chains = [Chain(site, "NODES", 0, number) for site in ("big", "s1") for number in range(50)]
    for chain in chains:
        archive.put(rows_of(1, 10, chain), chain=chain)
    objects = archive.store.objects = archive.documents.objects = FaultyStore(archive.objects)  # type: ignore[assignment]
    stored: dict[Chain, int] = {}
    for allowed in (5 * len(chains), len(chains) // 5):
        objects.calls.clear()
        centre, threads, clock = Centre(archive, **source), ThreadPool("look", 4), ManualClock(1_700_005_000)
        discovery = Discovery(archive.documents, threads, clock, Health(clock), 10.0)
        centre.stored = stored
        async with centre.running():
            discovery.add(centre.prefetcher)
            for _ in range(6):  # a minute
                await discovery.poll()
                clock.advance(10)
            await discovery.list_chains()
            await soon(lambda: all(centre.stored.get(chain) == 11 for chain in chains))  # noqa: B023
            await soon(lambda: {each.phase for each in centre.prefetcher.chains} == {Phase.IDLE})  # noqa: B023
            await discovery.record_tails()
        threads.close()
        assert objects.calls.total() <= allowed, objects.calls
        stored = centre.stored
