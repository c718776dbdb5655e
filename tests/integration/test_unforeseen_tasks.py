"""Errors in callbacks and tasks of a connection reach their waiter. Also errors of a parent and its worker processes
beside their work (`egress run --workers`).
"""

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
from common.errors import UnexpectedError
from common.leasing import LeaseWatcher
from common.nats.api import create_stream, stream_info
from common.nats.client import FloeClient, connect, frame
from common.nats.kv import KeyValue
from common.nats.lease import Leases
from common.nats.protocol import PendingRequests
from common.nats.pull import StartAt, for_each_message, get_message, scan
from common.observe.monitor import Health
from common.settings.service import NatsSettings
from common.tasks import Stop, run_until_fatal
from egress.service import service_stop
from egress.workers import Supervisor, WorkerIdentity, WorkerProcess, supervise
from infra.local.nats import NatsServer
from ingress.discovery.notifications import follow_subject
from ingress.operator.correct import run_scan
from ingress.operator.corrections import TargetScan
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
    """Check that every error has an owner: one without it would have ended the service."""
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
    await for_each_message(client, stream, 10, sink)


async def scanning(client: FloeClient, stream: str) -> None:
    async for _ in scan(client, stream, StartAt(1), until=10):
        pass


@pytest.mark.usefixtures("_owned")
@pytest.mark.parametrize("reader", ["scan", "ask", "count", "read"])
async def test_a_reader_of_a_stream_gets_the_error_of_the_sink(
    client: FloeClient, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    """The error comes at once, and neither the connection nor the service ends."""
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
    await LeaseWatcher(Leases(bucket, "one", 5.0, SystemClock()), client, "a.*", "members.", []).run(Stop())


async def answered(client: FloeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    replies = await Replies.open(client)
    reply = Reply(replies.subject())
    Throw(monkeypatch, type(reply), "mark_lost")
    replies.listen(reply)
    await replies.wait_for_ack(reply, Expected("S", 1), PATIENCE)


async def notified(client: FloeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []

    def listening(*_: object) -> None:
        calls.append(True)
        if len(calls) > 1:  # called first by `follow_subject`, then by the connection
            raise MemoryError("no room")

    handler: Any = SimpleNamespace(is_active=True, record_listening=listening)
    await follow_subject(client, unique("events"), handler, SystemClock())


@pytest.mark.usefixtures("_owned")
@pytest.mark.parametrize("listen", [rung, answered, notified])
async def test_a_waiter_on_the_connection_gets_errors_of_its_listener(
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


# Tasks of the connection


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


@pytest.mark.parametrize(("owner", "name"), [(FloeClient, "_mark_down"), (PendingRequests, "sink")])
def test_a_loss_of_the_connection_or_its_answers_ends_the_service(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """Every request of the process would wait in vain."""
    throw = Throw(monkeypatch, owner, name, 0)

    async def service() -> None:
        async with TcpProxy(nats_server.port) as proxy, client_of(proxy.url) as client:
            throw.left = 1
            if owner is FloeClient:
                proxy.cut()
                await asyncio.sleep(PATIENCE)
            await stream_info(client, "NONE")

    with pytest.raises(UnexpectedError, match="no room"):
        asyncio.run(run_until_fatal(service()))


# Workers


SLEEPS = "import time; time.sleep(60)"
#: Its own end of the socket pair is the last of `INDEX/COUNT/DESCRIPTOR`.
SPOILS = "import os, sys; os.write(int(sys.argv[-1].split('/')[2]), b'no json\\n');" + SLEEPS


def supervisor_of(*scripts: str) -> Supervisor:
    """The supervisor of a parent with workers that run these scripts."""
    workers = [
        WorkerProcess(index, len(scripts), [sys.executable, "-c", script], dict(os.environ))
        for index, script in enumerate(scripts)
    ]
    return Supervisor(workers, 5.0, SystemClock(), random.Random(1))


@pytest.fixture(autouse=True)
async def _waited_for(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Wait for killed workers: a parent that ends with an error does not, but the loop of the test has to."""
    started: list[asyncio.subprocess.Process] = []
    real = WorkerProcess.start

    async def start(worker: WorkerProcess, line: socket.socket) -> asyncio.subprocess.Process:
        started.append(process := await real(worker, line))
        return process

    monkeypatch.setattr(WorkerProcess, "start", start)
    yield
    for process in started:
        await asyncio.wait_for(process.wait(), PATIENCE)
    await asyncio.sleep(0.01)  # its transport closes in later turns of the loop


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_worker_with_an_unreadable_line_is_started_again_and_others_continue() -> None:
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
    [(Health, "beat"), (WorkerProcess, "run_once"), (Supervisor, "_run_with_restarts")],
    ids=["beat", "process", "worker"],
)
async def test_failures_of_the_parent_end_all(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    supervisor, clock = supervisor_of(SLEEPS, SLEEPS), SystemClock()
    throw = Throw(monkeypatch, owner, name, times=0 if owner is Health else 1)
    running = asyncio.create_task(run_until_fatal(supervise(supervisor, Health(clock))))
    if owner is Health:
        await soon(lambda: all(worker.pid for worker in supervisor.workers))
        throw.left = 1
    pids = [worker.pid for worker in supervisor.workers if worker.pid]
    await fails(running)
    assert all(worker.pid == 0 for worker in supervisor.workers)
    await soon(lambda: all(map(is_gone, pids)))


async def test_a_worker_that_cannot_look_after_its_parent_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would live on without its parent."""
    mine, other = socket.socketpair()
    Throw(monkeypatch, WorkerIdentity, "watch_parent")

    async def worker() -> None:
        async with service_stop(WorkerIdentity(0, 1, other.fileno()), 1) as stop:
            await stop.wait()

    with mine, other, pytest.raises(UnexpectedError, match="no room"):
        await asyncio.wait_for(run_until_fatal(worker()), PATIENCE)
