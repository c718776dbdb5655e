"""An error in what a connection calls, or in one of its tasks, reaches whoever waits for it; and those in what a parent
and its worker processes do beside their work (`egress run --workers`).
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from common.clock import SystemClock
from common.errors import Unforeseen
from common.jetstream.api import create_stream, stream_info
from common.jetstream.client import FloeClient, connect, frame
from common.jetstream.kv import KeyValue
from common.jetstream.lease import Leases
from common.jetstream.pull import From, get_message, read_through, scan
from common.jetstream.requests import Requests
from common.leasing import LeaseWatcher
from common.service.monitor import Health
from common.settings.service import NatsSettings
from common.tasks import Stop, to_its_end
from egress.service import stop_of
from egress.workers.process import WorkerPlace, WorkerProcess
from egress.workers.supervisor import Supervisor, supervise
from infra.local.nats import NatsServer
from ingress.discovery.notifications import follow_subject
from ingress.operator.target_scan import TargetScan, run_scan
from ingress.publishers.publisher import Expected, Replies, Reply
from tests.support.basics import PATIENCE, soon, unique
from tests.support.ingress import client_of
from tests.support.proxies import TcpProxy
from tests.support.stores import Throw, break_sinks, count, fails, no_room

pytestmark = pytest.mark.servers

Listen = Callable[[FloeClient, pytest.MonkeyPatch], Coroutine[Any, Any, None]]


@pytest.fixture
async def proxy(nats_server: NatsServer) -> AsyncIterator[TcpProxy]:
    async with TcpProxy(nats_server.port) as proxy:
        yield proxy


@pytest.fixture
async def _owned() -> AsyncIterator[None]:
    """Every error has an owner: one without it would have ended the service."""
    loop, orphans = asyncio.get_running_loop(), list[str]()
    loop.set_exception_handler(lambda _, context: orphans.append(str(context.get("exception"))))
    yield
    loop.set_exception_handler(None)
    assert orphans == []


async def filled(client: FloeClient) -> str:
    """A stream of ten messages; the subject of the last is not UTF-8."""
    stream = unique("S")
    await create_stream(client, {"name": stream, "subjects": [f"{stream}.>"], "storage": "memory"})
    for number in range(9):
        client.send(frame(b"%b.%d" % (stream.encode(), number), b"x"))
    client.send(frame(stream.encode() + b".\xff", b"x"))

    async def all_there() -> bool:
        info = await stream_info(client, stream)
        return info is not None and info.messages == 10

    await soon(all_there)
    return stream


async def through(client: FloeClient, stream: str, sink: Callable[..., None] = lambda *_: None) -> None:
    await read_through(client, stream, 10, sink)


async def scanning(client: FloeClient, stream: str) -> None:
    async for _ in scan(client, stream, From(1), until=10):
        pass


@pytest.mark.usefixtures("_owned")
@pytest.mark.parametrize("reader", ["scan", "ask", "count", "read"])
async def test_whoever_reads_a_stream_gets_what_the_sink_raised(
    client: FloeClient, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    """At once, and neither the connection nor the service ends."""
    stream = await filled(client)
    if reader == "read":
        with pytest.raises(MemoryError, match="no room"):
            await asyncio.wait_for(through(client, stream, no_room), PATIENCE)
    with monkeypatch.context() as broken:
        break_sinks(broken)
        reading = {
            "scan": lambda: scanning(client, stream),
            "ask": lambda: get_message(client, stream, 10),
            "count": lambda: run_scan(client, stream, "limits", TargetScan(0, 10)),
            "read": lambda: through(client, stream),
        }[reader]()
        with pytest.raises(MemoryError, match="no room"):
            await asyncio.wait_for(reading, PATIENCE)
    assert client.generation == 1


# Listeners


async def rung(client: FloeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    Throw(monkeypatch, LeaseWatcher, "_on_connection")
    bucket = await KeyValue(client, unique("L"), ttl=5.0).ensure()
    watcher = LeaseWatcher(Leases(bucket, "one", 5.0, SystemClock()), client, "a.*", "members.", [])
    await watcher.run(Stop())


async def answered(client: FloeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    replies = await Replies.open(client)
    reply = Reply(replies.subject())
    Throw(monkeypatch, type(reply), "lost")
    replies.listen(reply)
    await replies.judged(reply, Expected("S", 1), 10)


async def notified(client: FloeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []

    def listening(*_: object) -> None:
        calls.append(True)
        if len(calls) > 1:  # the first time it is called by whoever follows, then by the connection
            raise MemoryError("no room")

    heard: Any = SimpleNamespace(is_wanted=True, listening=listening)
    await follow_subject(client, unique("events"), heard, SystemClock())


@pytest.mark.usefixtures("_owned")
@pytest.mark.parametrize("listen", [rung, answered, notified])
async def test_whoever_listens_to_the_connection_gets_what_the_listener_raised(
    proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch, listen: Listen
) -> None:
    async with client_of(proxy.url) as client:
        listening = asyncio.create_task(listen(client, monkeypatch))
        await soon(lambda: client._listeners)
        assert await client.round_trip(PATIENCE)
        await asyncio.sleep(0.2)
        proxy.cut()
        with pytest.raises(MemoryError, match="no room"):
            await asyncio.wait_for(listening, PATIENCE)
        await soon(lambda: client.is_up)


# The connection's own


@pytest.mark.usefixtures("_owned")
@pytest.mark.parametrize("name", ["round_trip", "writelines"], ids=["watchdog", "writing"])
async def test_a_failing_task_has_the_connection_made_again(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also while messages come, so that nothing looks dead."""
    async with client_of(nats_url) as other:
        client = await connect(NatsSettings(url=nats_url), name="test", ping_interval=0.3)
        subject = unique("s")
        await client.subscribe_raw(subject, lambda *_: None)
        owner = type(client if name == "round_trip" else client._transport)
        throw = Throw(monkeypatch, owner, name, where=lambda one, *_: one in (client, client._transport))
        client.send(frame(b"x.y", b""))

        async def reconnected() -> bool:
            other.send(frame(subject.encode(), b"x"))
            return client.generation > 1 and client.is_up

        await soon(reconnected)
        await client.aclose()
    assert throw.left == 0


@pytest.mark.usefixtures("_owned")
async def test_an_attempt_to_connect_that_fails_as_nobody_foresaw_is_not_the_last(
    proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_of(proxy.url) as client:
        throw = Throw(monkeypatch, FloeClient, "_select_next_server")
        proxy.cut()
        await soon(lambda: client.generation > 1 and client.is_up)
    assert throw.left == 0


@pytest.mark.parametrize(("owner", "name"), [(FloeClient, "_went_down"), (Requests, "sink")])
def test_what_keeps_the_connection_or_its_answers_away_ends_the_service(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """Everything in the process that asks would wait in vain."""
    throw = Throw(monkeypatch, owner, name, 0)

    async def service() -> None:
        async with TcpProxy(nats_server.port) as proxy, client_of(proxy.url) as client:
            throw.left = 1
            if owner is FloeClient:
                proxy.cut()
                await asyncio.sleep(10)
            await stream_info(client, "NONE")

    with pytest.raises(Unforeseen, match="no room"):
        asyncio.run(to_its_end(service()))


# Workers


SLEEPS = "import time; time.sleep(60)"
#: Its own end of the line is the last of `INDEX/COUNT/DESCRIPTOR`.
SPOILS = "import os, sys; os.write(int(sys.argv[-1].split('/')[2]), b'no json\\n');" + SLEEPS


def supervisor_of(*scripts: str) -> Supervisor:
    """A parent's supervisor whose workers run these scripts."""
    workers = [
        WorkerProcess(index, len(scripts), [sys.executable, "-c", script], dict(os.environ))
        for index, script in enumerate(scripts)
    ]
    return Supervisor(workers, 5.0, SystemClock(), random.Random(1))


@pytest.fixture(autouse=True)
async def _waited_for(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """A parent that ends with an error waits for none that it killed; the loop of the test has to."""
    started: list[asyncio.subprocess.Process] = []
    real = WorkerProcess.start

    async def start(worker: WorkerProcess, line: socket.socket) -> asyncio.subprocess.Process:
        started.append(process := await real(worker, line))
        return process

    monkeypatch.setattr(WorkerProcess, "start", start)
    yield
    for process in started:
        await asyncio.wait_for(process.wait(), PATIENCE)
    await asyncio.sleep(0.01)  # its transport closes in the turns after


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_worker_whose_line_nobody_can_read_is_started_again_and_others_go_on() -> None:
    supervisor, stop, before = supervisor_of(SPOILS, SLEEPS), Stop(), count("worker")
    running = asyncio.create_task(supervisor.run(stop))
    spoiled, other = supervisor.workers
    await soon(lambda: spoiled.restarts >= 1)
    assert count("worker") > before
    assert (other.restarts, running.done()) == (0, False)
    stop.set()
    await asyncio.wait_for(running, PATIENCE)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Health, "beat"), (WorkerProcess, "run_once"), (Supervisor, "_keep")],
    ids=["beat", "process", "worker"],
)
async def test_what_fails_in_the_parent_ends_all(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    supervisor, clock = supervisor_of(SLEEPS, SLEEPS), SystemClock()
    throw = Throw(monkeypatch, owner, name, times=0 if owner is Health else 1)
    running = asyncio.create_task(to_its_end(supervise(supervisor, Health(clock))))
    if owner is Health:
        await soon(lambda: all(worker.pid for worker in supervisor.workers))
        throw.left = 1
    pids = [worker.pid for worker in supervisor.workers if worker.pid]
    await fails(running)
    assert all(worker.pid == 0 for worker in supervisor.workers)
    await soon(lambda: all(map(is_gone, pids)))


async def test_a_worker_that_cannot_look_after_its_parent_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would live on without one."""
    mine, other = socket.socketpair()
    Throw(monkeypatch, WorkerPlace, "watch")

    async def worker() -> None:
        async with stop_of(WorkerPlace(0, 1, other.fileno()), 1) as stop:
            await stop.wait()

    with mine, other, pytest.raises(Unforeseen, match="no room"):
        await asyncio.wait_for(to_its_end(worker()), PATIENCE)
