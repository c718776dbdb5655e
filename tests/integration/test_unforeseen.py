"""Unforeseen errors, raised in places without a handler: their owner ends with a report, and starts again.

Nothing that was received may count as archived, be covered or be acknowledged because of one.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from common.clock import SystemClock
from common.nats.client import FloeClient, frame
from common.observe.monitor import Health
from common.settings.root import Settings
from common.tasks import run_until_fatal
from egress.builder import SegmentBuilder
from egress.memory import MemoryBudget
from infra.local.nats import NatsServer
from ingress.recovery.request import Pace, ReplayOptions
from tests.support.basics import PATIENCE, soon, unique
from tests.support.egress import QUICK, Bench
from tests.support.ingress import CHAIN, Archive, Centre, check_exact, client_of, rows_of
from tests.support.proxies import TcpProxy
from tests.support.replay import World
from tests.support.stores import Throw, count, fails
from tests.unit.test_notices import minio, segment_key

pytestmark = pytest.mark.simulated


def payloads(bench: Bench, feed: str) -> list[bytes]:
    return [message.payload for message in bench.messages(feed)]


async def holds(bench: Bench, stream: str, number: int) -> bool:
    return await bench.held(stream) == number


async def test_an_error_for_ever_is_shown_and_takes_nothing_along(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither heartbeats nor the other messages of the batch move anything; other feeds continue."""
    stream, other = [await bench.make_stream(unique("T"), retention="workqueue") for _ in range(2)]
    poison = Throw(
        monkeypatch, SegmentBuilder, "add_messages", float("inf"), lambda _, rows: b"poison" in rows.payloads
    )
    async with bench.egress({"stream": stream}, {"stream": other}) as running:
        await bench.publish(stream, [b"a", b"poison", b"b"])
        await bench.publish(other, [b"x"])
        await soon(lambda: len(poison.times) >= 4)
        await bench.archived_to(other, 1)
        await soon(lambda: running.state(stream) == "stopped")
        status = running.status(stream)
        assert "MemoryError: no room" in status["why"]
        assert (status["code"], "defect" in status["hint"]) == ("E-UNEXPECTED", True)
        assert any("no room" in problem for problem in running.health.problems())
        assert running.state(other) == "reading"
        assert (bench.end(stream), await bench.held(stream)) in ((0, 3), (1, 2))
        pauses = [b - a for a, b in zip(poison.times, poison.times[1:], strict=False)]
        assert pauses[2] > 0.5, pauses
        poison.left = 0
        await bench.archived_to(stream, 3)
        await soon(lambda: running.state(stream) == "reading")
    assert payloads(bench, stream) == [b"a", b"poison", b"b"]


async def test_failed_parts_of_egress_start_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One world, and an error in one place after the other; each time reading continues afterwards."""
    whole = await bench.make_stream(unique("T"), max_age=3_600_000_000_000)
    queue = await bench.make_stream(unique("T"), retention="workqueue")
    cut, sampled, beats = [await bench.make_stream(unique(name)) for name in ("T", "T", "BEAT")]
    advisories = await bench.make_stream(f"{sampled}_ADV")
    sampling = {"inspect_field": "id", "inspect_duration": "60s", "snapshot_interval": "1s"}
    advisory = {"advisory": {"subject": f"{advisories}.%s.%v", "reliable": True}}
    feeds = [{"stream": whole}, {"stream": queue}, {"stream": cut, "partitions": [f"{cut}.a", f"{cut}.b"]}]
    feeds.append({"stream": sampled, **sampling, **advisory})
    heartbeats = {"interval": "1s", "subjects": [{"subject": f"{beats}.h"}]}
    _hurry(monkeypatch)
    monkeypatch.setattr("egress.report.UNMATCHED_INTERVAL_S", 0.2)
    throws = armed(
        monkeypatch,
        """
        feed        egress.reader:Reader._on_heartbeat          called by the connection
        feed        egress.reader:Reader.pull                   called by whoever gives memory back, too
        feed        egress.consumers:Acknowledger.acknowledge_up_to in the session
        feed        egress.session:Session._check_progress      in a side task of the session, as the next four
        feed        egress.encoder:Encoder.encode_next
        feed        egress.uploader:Uploader.put,egress.session:Session._watch_lease
        decisions   egress.worker:Handover.is_decided
        walk        egress.evidence:IdentityCheck.find_position beside a session that goes on: each begins with it
        walk        egress.archive:ArchiveWalks._walk
        captures    egress.captures:StreamCapturer._capture
        expiry      egress.watchdog:ExpiryEstimate._seconds_left
        unmatched   egress.report:find_unmatched
        lease       common.nats.lease:Lease._renew
        heartbeats  egress.heartbeats:SubjectHeartbeats._publish
        heartbeats  egress.heartbeats:SubjectHeartbeats._on_write      called by the connection
        sharing     common.leasing:LeaseWatcher._on_lease       called by the connection
        sharing     common.leasing:LeaseWatcher._on_member
        sharing     common.leasing:LeaseGroup._check_all
        alive       egress.heartbeats:ProcessHeartbeat._put_once
        feed        egress.sampling.snapshot:SnapshotWriter._save       beside a sampled feed, as the next two
        feed        egress.advisories.senders:ReliableSender._step
        feed        egress.sampling.filters:IdleClock.idle_until
        """,
    )
    tuning = replace(QUICK, intervals=replace(QUICK.intervals, walk=0.3, page=0.01, alive=0.2))
    async with bench.egress(*feeds, heartbeats=heartbeats, tuning=tuning) as running:
        sent = 0
        for part, thrown in throws:
            before = count(part)
            for throw in thrown:
                throw.left = 1
            for stream in (whole, queue):
                await bench.publish(stream, [b"%d" % sent])
            sent += 1

            async def all_thrown() -> bool:
                """Make a snapshot due behind a newly closed segment; return True if all errors were raised."""
                await bench.publish(sampled, [b'{"id": "n%d"}' % await bench.last(sampled)])
                return not any(throw.left for throw in thrown)  # noqa: B023

            await soon(all_thrown, every=0.3)
            await soon(lambda: count(part) >= before + len(thrown))  # noqa: B023
            for stream in (whole, queue):
                await bench.archived_to(stream, sent)
        await soon(lambda: not running.health.problems())
        await soon(lambda: holds(bench, queue, 0))
        last = await bench.last(sampled)
        await bench.archived_to(sampled, last)
        await soon(lambda: holds(bench, advisories, last))
    assert [message.sequence for message in bench.messages(sampled)] == list(range(1, last + 1))
    bench.check(sampled)
    for stream in (whole, queue):
        assert (payloads(bench, stream), bench.ledger(stream)) == ([b"%d" % n for n in range(sent)], {})


async def test_a_reader_that_frees_memory_survives_another(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """All readers are asked at once; the error of one ends only its own session."""
    one, other = [await bench.make_stream(unique("T")) for _ in range(2)]
    budgets: set[MemoryBudget] = set()
    real = MemoryBudget.account

    def account(budget: MemoryBudget, *callbacks: Callable[[], None]) -> Any:
        budgets.add(budget)
        return real(budget, *callbacks)

    monkeypatch.setattr(MemoryBudget, "account", account)
    throw = Throw(monkeypatch, *place_of("egress.reader:Reader.pull"), 0)
    async with bench.egress({"stream": one}, {"stream": other}) as running:
        await soon(lambda: running.state(one) == running.state(other) == "reading")
        before, throw.left = count("feed"), 1
        [budget] = budgets
        budget.notify_release(*budget.accounts)
        assert throw.left == 0
        await soon(lambda: count("feed") == before + 1)
        for stream in (one, other):
            await bench.archive(stream, [b"x"], 1)


def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("common.tasks.RESTART_DELAYS_S", "ingress.target.TARGET_PAUSES_S"):
        monkeypatch.setattr(name, (0.1, 0.2))


def place_of(name: str) -> tuple[Any, str]:
    """The owner of a function, and its name in it."""
    owner, _, function = name.replace(":", ".").rpartition(".")
    return resolve_name(owner), function


def armed(monkeypatch: pytest.MonkeyPatch, table: str) -> list[tuple[str, list[Throw]]]:
    """By line the part that ends, and the places of its error, of which the second is reached after the first.

    Nothing is raised yet. Of a place that several tasks reach, only the one in the walk raises.
    """

    def throw(name: str) -> Throw:
        where = _in_a_walk if name.endswith("IdentityCheck.find_position") else lambda *_: True
        return Throw(monkeypatch, *place_of(name), 0, where)

    lines = [line.split() for line in table.strip().splitlines()]
    return [(part, [throw(name) for name in names.split(",")]) for part, names, *_ in lines]


def _in_a_walk(*_: object) -> bool:
    task = asyncio.current_task()
    return task is not None and task.get_name() == "walk"


class Notifying(Centre):
    """A centre that is notified of the chain on a NATS subject, since a store in a folder has no notifications."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.subject = unique("events").encode()
        self.notification = json.dumps(minio(segment_key(CHAIN), bucket=f"file://{self.archive.folder}")).encode()

    def settings(self, **ingress: Any) -> Settings:
        settings = super().settings(**ingress)
        changed = settings.ingress.model_copy(update={"events": f"nats://{self.subject.decode()}"})
        return settings.model_copy(update={"ingress": changed})


async def test_failed_parts_of_ingress_start_again(
    client: FloeClient, tmp_path: Path, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for egress; carried messages arrive once and in order all the same."""
    throws = armed(
        monkeypatch,
        """
        target     ingress.chains.prefetch:Prefetcher.add_chain  called by discovery, which serves all targets
        target     ingress.chains.prefetch:Prefetcher.tick
        target     ingress.publishers.publisher:Replies._sink    called by the connection, in the middle of a batch
        target     ingress.target:TargetRunner._watch,ingress.chains.prefetch:Prefetcher._turn
        target     ingress.chains.prefetch:Prefetcher.apply_decisions
        target     ingress.redelivery:Retries.check
        target     ingress.report:PositionsWriter.write_if_due
        discovery  ingress.discovery.discovery:Discovery.poll
        discovery  ingress.discovery.discovery:Discovery.list_chains
        discovery  ingress.discovery.sites:Heartbeats.read
        discovery  ingress.discovery.discovery:Discovery._check_notified
        target     ingress.chains.prefetch:Prefetcher.wake       called by discovery, for a notification
        events     ingress.discovery.notifications:NotificationHandler.handle
        lease      common.nats.lease:Lease._renew
        sharing    common.leasing:LeaseGroup._check_all
        """,
    )
    _hurry(monkeypatch)
    for name in ("CHAIN_LISTING_INTERVAL_S", "HEARTBEAT_READ_INTERVAL_S"):
        monkeypatch.setattr(f"ingress.discovery.discovery.{name}", 0.2)
    archive = Archive(tmp_path / "store")
    archive.put(rows_of(1, 10))
    centre = Notifying(tmp_path, archive, nats_url)
    async with centre.running() as health:
        await centre.carried(client, 10)
        for number, (part, thrown) in enumerate(throws, 2):
            before = count(part)
            for throw in thrown:
                throw.left = 1
            archive.put(rows_of(10 * number - 9, 10 * number))
            client.send(frame(centre.subject, centre.notification))
            await soon(lambda: not any(throw.left for throw in thrown))  # noqa: B023
            await soon(lambda: count(part) >= before + len(thrown))  # noqa: B023
            await centre.carried(client, 10 * number)
        await soon(lambda: not health.problems())
        check_exact(await centre.carried(client, 10 * len(throws) + 10), archive, centre.prefix)


# Replay and drill end with the error; the same command continues


@pytest.fixture
async def world(nats_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with client_of(nats_url) as client:
        world = World(tmp_path, nats_url, client)
        await world.make((1, 300))
        yield world


@pytest.mark.parametrize("place", ["source:ReplaySource._decode_all", "replay:ReplayRun._watch"])
async def test_any_failure_beside_a_replay_ends_it(world: World, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    Throw(monkeypatch, *place_of(f"ingress.recovery.{place}"))
    await fails(world.run())
    assert (await world.run()).finished
    assert await world.sequences() == list(range(1, 301))


async def test_a_replay_whose_lease_nobody_renews_takes_it_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    Throw(monkeypatch, *place_of("common.nats.lease:Lease._renew"))
    before = count("lease")
    assert (await asyncio.wait_for(world.run(ReplayOptions(pace=Pace(100))), PATIENCE)).finished
    assert (count("lease"), await world.sequences()) == (before + 1, list(range(1, 301)))


# Errors without an owner end the service


def _down(_self: object, *args: object) -> bool:
    """True for the call of a listener that reports a lost connection."""
    return args[-1] is False


EGRESS_PLACES = [
    *("egress.feed:PartitionFeed._work_under_lease", "egress.feed:PartitionFeed._stop_after_hand_over"),
    *("common.observe.monitor:Health.beat", "egress.feed:_deadline", "egress.heartbeats:Reachability.set_nats"),
]


@pytest.mark.real
@pytest.mark.parametrize("place", EGRESS_PLACES)
async def test_ownerless_errors_end_egress(
    bench: Bench, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    stream, is_listener = await bench.make_stream(unique("T")), place.endswith("nats")
    Throw(monkeypatch, *place_of(place), where=_down if is_listener else lambda *_: True)
    async with TcpProxy(nats_server.port) as proxy:
        bench.url = proxy.url
        running = bench.start(bench.settings({"stream": stream}))

        async def service() -> bool:
            return await running.task

        ending = asyncio.create_task(run_until_fatal(service()))
        if is_listener:
            await soon(lambda: running.state(stream) == "reading")
            proxy.cut()
        await fails(ending)
        assert running.task.done()


INGRESS_PLACES = [
    ("ingress.target:TargetSupervisor._hold", lambda one, *_: one.target.endswith("_A")),
    ("common.observe.monitor:Health.beat", lambda *_: True),
    ("ingress.service:Controller._set_nats_state", _down),
]


@pytest.mark.parametrize(("place", "where"), INGRESS_PLACES, ids=["target", "beat", "listener"])
async def test_ownerless_errors_end_ingress(
    tmp_path: Path, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, place: str, where: Callable[..., bool]
) -> None:
    """Also while another target is still carried."""
    Throw(monkeypatch, *place_of(place), where=where)
    async with TcpProxy(nats_server.port) as proxy:
        centre = Centre(tmp_path, Archive(tmp_path / "store"), proxy.url)
        targets = [
            {
                "stream": name,
                "create": {"subjects": [f"{name}.>"]},
                "sources": [{"site": "us-east", "feed": "NODES", "subject_prefix": name}],
            }
            for name in (f"{centre.target}_A", f"{centre.target}_B")
        ]
        health = Health(SystemClock())
        ending = asyncio.create_task(run_until_fatal(centre.run(health=health, targets=targets)))
        if where is _down:
            await soon(lambda: "carrying" in str(health.status()["parts"]))
            proxy.cut()
        await fails(ending)
