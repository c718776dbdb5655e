"""The connection survives cuts, half-open sockets, dead servers and poison, and reports losses."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from common.errors import OutcomeUnknown, Unavailable
from common.nats.api import create_stream, stream_info
from common.nats.client import PING_INTERVAL_S, FloeClient, connect, connections, frame, reconnects
from common.settings.service import NatsSettings
from infra.local.nats import NatsServer
from tests.support.basics import PATIENCE, cancelled, counted, soon, unique
from tests.support.ingress import client_of
from tests.support.proxies import TcpProxy

INTERVAL = 0.4  # seconds between pings in tests of silence: a busy machine may be silent for as long


@pytest.fixture
async def proxy(nats_server: NatsServer) -> AsyncIterator[TcpProxy]:
    async with TcpProxy(nats_server.port) as proxy:
        yield proxy


@pytest.fixture
async def direct(nats_url: str) -> AsyncIterator[FloeClient]:
    """A connection without faults."""
    async with client_of(nats_url) as client:
        yield client


@pytest.fixture
async def client(proxy: TcpProxy) -> AsyncIterator[FloeClient]:
    async with proxied(proxy) as client:
        yield client


@pytest.fixture
async def watched(proxy: TcpProxy) -> AsyncIterator[FloeClient]:
    """A connection that soon notices silence."""
    async with proxied(proxy, INTERVAL) as client:
        yield client


@asynccontextmanager
async def proxied(proxy: TcpProxy, interval: float = PING_INTERVAL_S) -> AsyncIterator[FloeClient]:
    client = await connect(NatsSettings(url=proxy.url, connect_timeout=20.0), name="proxied", ping_interval=interval)
    yield client
    proxy.heal()
    await client.aclose()


async def reconnected(client: FloeClient, generation: int) -> None:
    """Wait for a generation above `generation` to be up."""
    await soon(lambda: client.generation > generation and client.is_up)


async def test_subscriptions_are_renewed_after_a_cut(client: FloeClient, proxy: TcpProxy, direct: FloeClient):
    subject, received, events = unique("s"), [], []
    await client.subscribe_raw(subject, lambda *m: received.append((client.generation, m[2])))
    remove = client.add_listener(events.append)
    lost, connected = counted(reconnects), counted(connections)
    for number in range(1, 4):
        generation = client.generation
        proxy.cut()
        await reconnected(client, generation)
        direct.send(frame(subject.encode(), b"%d" % number))
        await soon(lambda count=number: len(received) == count)
    assert [payload for _, payload in received] == [b"1", b"2", b"3"]
    assert [generation for generation, _ in received] == sorted({g for g, _ in received})
    assert (events, counted(reconnects), counted(connections)) == ([False, True] * 3, lost + 3, connected)
    remove()
    assert await stream_info(client, "NONE") is None


@pytest.mark.timing
@pytest.mark.parametrize("directions", [("up", "down"), ("down",), ("up",)], ids=["both", "answers", "questions"])
async def test_a_half_open_connection_is_noticed(watched: FloeClient, proxy: TcpProxy, directions: tuple[str, ...]):
    for pause in (0.0, INTERVAL * 0.9):
        await asyncio.sleep(pause)
        generation = watched.generation
        proxy.blackhole(*directions)
        began = time.monotonic()
        await soon(lambda: not watched.is_up)
        noticed = time.monotonic() - began
        proxy.heal()
        await reconnected(watched, generation)
        assert noticed < 2 * INTERVAL + 0.2


async def test_a_half_open_connection_with_unsent_bytes_is_dropped_too(watched: FloeClient, proxy: TcpProxy):
    """An orderly close would wait for a buffer that is never drained."""
    generation = watched.generation
    proxy.stall()
    watched.send(b"".join(frame(b"x.y", b"z" * 500_000) for _ in range(60)))
    flushing = asyncio.create_task(watched.flush_writes())
    await asyncio.sleep(0.1)
    assert not flushing.done() or not watched.is_up, "a stalled connection must hold its writer back"
    await soon(lambda: not watched.is_up)
    proxy.heal()
    await reconnected(watched, generation)
    with pytest.raises(Unavailable, match="lost while writing"):
        await flushing


async def test_a_dead_read_loop_is_noticed(watched: FloeClient):
    generation = watched.generation
    watched._reading_task.cancel()
    assert watched.is_up, "nats-py sees nothing"
    await reconnected(watched, generation)


async def test_a_lost_answer_is_an_unknown_outcome_at_once(client: FloeClient, proxy: TcpProxy, direct: FloeClient):
    stream = unique("S")
    await create_stream(direct, {"name": stream, "subjects": [stream]})
    proxy.blackhole("down")
    asked = asyncio.create_task(client.request_raw(stream.encode(), b"x", timeout=30))
    await soon(lambda: stored(direct, stream, 1))
    proxy.heal()
    with pytest.raises(OutcomeUnknown, match="the connection was lost before the answer came"):
        await asyncio.wait_for(asked, PATIENCE)
    assert await stored(direct, stream, 1)


async def stored(client: FloeClient, stream: str, messages: int) -> bool:
    info = await stream_info(client, stream)
    return info is not None and info.messages == messages


async def test_nothing_is_sent_later_or_while_it_is_down(client: FloeClient, proxy: TcpProxy, direct: FloeClient):
    stream, generation = unique("S"), client.generation
    await create_stream(direct, {"name": stream, "subjects": [stream]})
    proxy.cut()
    client.send(frame(stream.encode(), b"late"))
    await reconnected(client, generation)
    await client.request_raw(stream.encode(), b"first", timeout=PATIENCE)
    assert await stored(direct, stream, 1)
    await proxy.refuse()
    await soon(lambda: not client.is_up)
    with pytest.raises(Unavailable, match="connection is down"):
        client.send(frame(b"a", b""))
    with pytest.raises(Unavailable, match="lost while writing"):
        await client.flush_writes()
    with pytest.raises(Unavailable, match="connection is down"):
        await client.request_raw(b"a", b"", timeout=0.1)
    await proxy.listen()
    assert await client.wait_up(PATIENCE)


async def test_a_frame_that_the_server_refuses_costs_a_reconnect(client: FloeClient):
    generation = client.generation
    assert not await client.round_trip(0.0)
    assert await client.round_trip(PATIENCE), "a late answer does no harm"
    assert client.generation == generation
    client.send(frame(b"a", b"x" * (client.max_payload + 1)))
    await reconnected(client, generation)
    assert await stream_info(client, "NONE") is None


async def test_closing_leaves_no_socket_does_not_wait_for_a_dead_server_and_earlier_messages_arrive(
    proxy: TcpProxy, direct: FloeClient, nats_url: str, monkeypatch: pytest.MonkeyPatch
):
    client = await connect(NatsSettings(url=proxy.url), name="test")
    proxy.blackhole()
    asked = asyncio.create_task(client.request_raw(b"a", b"", timeout=4 * PATIENCE))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(client.aclose(), PATIENCE)
    await client.aclose()
    with pytest.raises(OutcomeUnknown, match="the connection was closed"):
        await asked
    subject, received = unique("s"), []
    await direct.subscribe_raw(subject, lambda *m: received.append(m[2]))
    monkeypatch.setattr("common.nats.client.CLOSE_TIMEOUT_S", PATIENCE)  # this server is not dead, but may be slow
    client = await connect(NatsSettings(url=nats_url), name="test")
    client.send(b"".join(frame(subject.encode(), b"x" * 1000) for _ in range(2000)))
    await client.aclose()
    await soon(lambda: len(received) == 2000)
    client = await connect(NatsSettings(url=nats_url), name="test")
    socket, closing = client._wire._io_writer.transport, asyncio.create_task(client.aclose())
    await asyncio.sleep(0)
    await cancelled(closing)
    assert socket.is_closing()
