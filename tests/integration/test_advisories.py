"""Advisories: none lost, none twice, in order for each value, at any cut of a connection; and `floe advisories`."""

import asyncio
import json
import signal
from collections import defaultdict
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.errors import Unavailable
from common.nats.api import StreamInfo, create_consumer, stream_info
from common.nats.client import FloeClient, connect, frame
from common.nats.headers import build_block
from common.nats.pull import PullLimits, StartAt, scan
from common.settings.service import NatsSettings
from egress.advisories.advisory import Advisory, AdvisoryDocument, AdvisoryEvent
from egress.advisories.cli import format_advisory
from egress.advisories.senders import find_stored_ids
from infra.local.nats import NatsServer
from tests.support.advisories import SECOND, World, new, news, now_ns, running
from tests.support.basics import PATIENCE, soon
from tests.support.clock import ManualClock
from tests.support.commands import Done, invoke, spawned
from tests.support.proxies import TcpProxy
from tests.support.servers import connected

pytestmark = pytest.mark.simulated

HOUR = 3600 * SECOND


@pytest.fixture
async def world(client: FloeClient) -> World:
    """A world with names that no other test uses, and a stream."""
    world = World(client)
    await world.make_stream()
    return world


async def send(world: World, sent: Sequence[Advisory], client: FloeClient | None = None) -> None:
    """Send all advisories that a start finds in its snapshot, until none is pending."""
    async with running(world.advisories(client, outbox=sent, ack_timeout_s=5)) as advisories:
        advisories.finish_reread()
        await advisories.drain(40)
        assert advisories.pending() == ()


def once_and_in_order(found: Sequence[AdvisoryDocument], sent: Sequence[Advisory]) -> None:
    """Check that every advisory is there once, and those of a value in the order of sending."""
    assert len({document.event_id for document in found}) == len(found), "one is stored twice"
    there, wanted = defaultdict(list), defaultdict(list)
    for document in found:
        there[document.value].append((document.event, document.timestamp))
    for advisory in sent:
        wanted[advisory.value].append((advisory.event.value, advisory.event_time_ns // SECOND))
    assert there == wanted


def life_of(value: str, start: int) -> list[Advisory]:
    """All four events of a value from `start` on."""
    silent = Advisory(AdvisoryEvent.TIMEOUT, value, start, start + HOUR // 5)
    gone = Advisory(AdvisoryEvent.EXPIRE, value, start, start + HOUR)
    back = Advisory(AdvisoryEvent.RECOVER, value, start + HOUR, start + HOUR + HOUR // 2)
    return [new(value, start), silent, gone, new(value, start + HOUR), back]


async def test_without_a_stream_for_an_hour_none_is_lost(client: FloeClient, caplog: pytest.LogCaptureFixture) -> None:
    world = World(client, inspect_duration="1000h")  # however far the clock runs, no advisory is too late
    clock, start = ManualClock(now_ns() / SECOND), now_ns() - 2 * HOUR + 60 * SECOND
    sent = [each for value in ("a", "b", "größe x") for each in life_of(value, start)]
    began = clock.monotonic()
    async with running(world.advisories(clock=clock)) as advisories:
        advisories.finish_reread()
        advisories.enqueue(sent, may_be_sent=False)
        await soon(lambda: clock.monotonic() - began > 3600)
        assert (world.gauge("failing"), world.gauge("waiting")) == (1, len(sent))
        hours = (clock.monotonic() - began) / 3600
        assert world.counted()["failed"] < 1000 * hours  # the pauses between attempts grow
        assert advisories.pending() == tuple(sent)
        await advisories.drain(5)  # ends although nothing can be stored

        await world.make_stream()
        await soon(lambda: not advisories.pending())
        await soon(lambda: world.gauge("failing") == world.gauge("waiting") == 0)
    once_and_in_order(await world.stored(), sent)
    [warning] = [each for each in caplog.messages if "advisories not stored" in each]
    assert "E-ADVISORIES" in warning
    assert f"{world.prefix}.*.>" in warning


async def reached(world: World, count: int) -> bool:
    return await world.count() >= count


async def test_a_stream_that_cannot_be_read_is_read_later(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, failures = news(10), [Unavailable("no leader"), Unavailable("no leader")]
    await send(world, sent)

    async def fails_first(*arguments: object) -> set[str] | None:
        if failures:
            raise failures.pop()
        assert world.gauge("failing") == 1
        return await find_stored_ids(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("egress.advisories.senders.find_stored_ids", fails_first)
    async with running(world.advisories(outbox=sent)) as second:
        second.finish_reread()
        await soon(lambda: not second.pending())
        await soon(lambda: world.gauge("failing") == 0)
    once_and_in_order(await world.stored(), sent)


async def test_too_much_read_again_is_settled_before_the_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise reading would wait for room in the outbox, and room for the end of reading."""
    monkeypatch.setattr("egress.advisories.senders.Outbox.has_room", property(lambda outbox: len(outbox) < 100))
    sent = news(150)
    async with running(world.advisories()) as advisories:
        advisories.enqueue(sent[:120], may_be_sent=True)
        assert not advisories.has_room
        await soon(lambda: advisories.has_room)
        advisories.enqueue(sent[120:], may_be_sent=True)
        advisories.finish_reread()
        await advisories.drain(10)
    once_and_in_order(await world.stored(), sent)


async def test_without_a_usable_lease_nothing_is_sent(world: World) -> None:
    held = [False]
    async with running(world.advisories(may_send=lambda: held[0])) as advisories:
        advisories.enqueue([new("a")], may_be_sent=False)
        await asyncio.sleep(0.3)
        assert await world.count() == 0
        held[0] = True
        await advisories.drain(5)
    assert await world.count() == 1


async def test_a_host_whose_clock_is_ahead_loses_none(world: World) -> None:
    await world.client.api(f"STREAM.CREATE.{world.feed}", {"name": world.feed, "subjects": [world.feed]})
    clock, sent = ManualClock(now_ns() / SECOND + 7 * 86_400), life_of("a", now_ns() - HOUR)
    async with running(world.advisories(clock=clock)) as advisories:
        advisories.enqueue(sent, may_be_sent=False)
        await advisories.drain(10)
    once_and_in_order(await world.stored(), sent)


# Reading the stream back


@pytest.mark.real
async def test_ids_are_found_between_other_messages_deleted_ones_and_many_pieces(client: FloeClient) -> None:
    world, sent = World(client), news(20)
    await world.make_stream(subjects=[f"{world.prefix}.>", f"other{world.prefix}"])
    other = f"other{world.prefix}".encode()
    for index in range(0, 20, 4):
        await send(world, sent[index : index + 4])
        for number in range(5):
            client.send(frame(other, b"x", build_block([b"Nats-Msg-Id: %d.%d" % (index, number)])))
    client.send(frame(other, b"last"))
    await soon(lambda: reached(world, 46))
    info = await client.api(f"STREAM.INFO.{world.stream}")
    await client.api(f"STREAM.MSG.DELETE.{world.stream}", {"seq": info["state"]["last_seq"]})
    ids = {each.event_id for each in await world.stored(foreign=26 - 1)}
    small = PullLimits(batch=7, window_bytes=1024, heartbeat_s=0.2)

    found = await find_stored_ids(client, f"{world.prefix}.*.>", {*ids, "absent"}, sent[0].event_time_ns, small)
    assert (found, await find_stored_ids(client, f"{world.prefix}.*.>", ids, now_ns() + HOUR, small)) == (ids, set())
    assert await find_stored_ids(client, f"nobody{world.prefix}.>", ids, 0, small) is None
    consumers = await client.api(f"CONSUMER.NAMES.{world.stream}")
    assert not consumers["consumers"]  # none is left behind


async def test_an_old_answer_about_the_stream_hides_no_id_and_a_purge_meanwhile_ends_the_search(
    client: FloeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, sent = World(client), news(6)
    await world.make_stream()
    await send(world, sent)
    ids, info = {each.event_id for each in await world.stored()}, await stream_info(client, world.stream)
    assert info is not None

    async def of_a_former_leader(*_: object) -> StreamInfo:
        return replace(info, last_sequence=2)

    monkeypatch.setattr("egress.advisories.senders.stream_info", of_a_former_leader)
    assert await find_stored_ids(client, f"{world.prefix}.*.>", ids, sent[0].event_time_ns) == ids

    found, start = list[int](), StartAt(1)
    pieces = scan(client, world.stream, start, until=0, whole=True, limits=PullLimits(batch=1))
    async with aclosing(pieces):
        async for piece in pieces:
            found += [message.sequence for message in piece]
            await client.api(f"STREAM.PURGE.{world.stream}")
    assert 0 < len(found) < len(sent)


async def test_a_work_queue_relies_on_the_window(client: FloeClient, caplog: pytest.LogCaptureFixture) -> None:
    world, sent = World(client), news(20)
    await world.make_stream(retention="workqueue", duplicate_window=120 * SECOND)
    await create_consumer(client, world.stream, {"durable_name": "reader", "ack_policy": "explicit"})
    for _ in range(2):
        await send(world, sent)
    assert (await world.count(), world.counted()) == (len(sent), {"stored": 20, "duplicate": 20})
    assert "advisory check skipped" in caplog.text


RIGHTS = """
authorization { users: [
  {user: all, password: secret}
  {user: few, password: secret, permissions: {publish: ["adv.>"], subscribe: ["_INBOX.>"]}}
  {user: reader, password: secret, permissions: {publish: ["$JS.API.>"], subscribe: ["_INBOX.>"]}}
] }
"""


async def test_without_the_right_to_read_they_go_and_to_send_they_wait(caplog: pytest.LogCaptureFixture) -> None:
    with NatsServer(extra=RIGHTS) as server:
        every, few, reader = [
            await connect(NatsSettings(url=server.url, user=user, password="secret"), name="test")
            for user in ("all", "few", "reader")
        ]
        world, sent = World(every, prefix="adv"), news(5)
        await world.make_stream(duplicate_window=120 * SECOND)
        for _ in range(2):
            await send(world, sent, few)
        once_and_in_order(await world.stored(), sent)
        assert caplog.text.count("advisory check skipped") == 2  # once for each of the two
        sent = news(1000)
        # A lost answer would not count as a refusal, and a full wave would follow.
        async with running(world.advisories(reader, ack_timeout_s=PATIENCE)) as advisories:
            advisories.finish_reread()
            advisories.enqueue(sent, may_be_sent=False)
            await soon(lambda: world.counted()["failed"] > 256 + 8 and "E-ADVISORIES" in caplog.text)
            assert sorted(advisories.pending(), key=repr) == sorted(sent, key=repr)
        for each in (every, few, reader):
            await each.aclose()
    assert caplog.text.count("E-ADVISORIES") == 1
    assert caplog.text.count("nats permission refused") < 300


# Advisories that are not reliable


async def test_unreliable_ones_are_published_once_and_dropped_while_the_line_is_down(nats_server: NatsServer) -> None:
    async with TcpProxy(nats_server.port) as proxy:
        cut = await connected(proxy.url)
        world, sent = World(await connected(nats_server.url), reliable=False), news(1000)
        await world.make_stream()
        async with running(world.advisories(cut, outbox=news(3))) as advisories:
            advisories.enqueue(news(5), may_be_sent=True)
            advisories.finish_reread()
            advisories.enqueue(sent, may_be_sent=False)
            assert (advisories.has_room, advisories.pending()) == (True, ())
            await soon(lambda: reached(world, len(sent)))
            once_and_in_order(await world.stored(), sent)
            await proxy.refuse()
            await soon(lambda: not cut.is_up)
            advisories.enqueue(news(100), may_be_sent=False)
            await soon(lambda: world.counted()["dropped"] == 100)
            await proxy.listen()
            assert await cut.wait_up(PATIENCE)
            advisories.enqueue(news(7), may_be_sent=False)
            await soon(lambda: reached(world, len(sent) + 7))
        await cut.aclose()
        await world.client.aclose()
    assert world.counted() == {"dropped": 100, "published": len(sent) + 7}


# `floe advisories`


@pytest.fixture
def config(tmp_path: Path, nats_url: str) -> Path:
    return written(tmp_path / "site.yaml", {"site": "US_EAST", "nats": {"url": nats_url}})


def written(path: Path, settings: dict[str, Any]) -> Path:
    quiet = {"store": {"url": f"file://{path.parent}/bucket"}, "log": {"level": "warning"}}
    path.write_text(yaml.safe_dump({**quiet, **settings}))
    return path


async def floe(config: Path, *arguments: str) -> Done:
    return await invoke("advisories", *arguments, "-c", str(config))


async def store(world: World, sent: list[Advisory], foreign: int = 0) -> None:
    before = await world.count()
    for _ in range(foreign):  # before the others: who has read those has counted these
        world.client.send(frame(f"{world.prefix}.other".encode(), b'{"protocol": "x", "value": "node1"}'))
    async with running(world.advisories()) as advisories:
        advisories.enqueue(sent, may_be_sent=False)
        await advisories.drain(10)
    await soon(lambda: reached(world, before + len(sent) + foreign))


async def test_each_is_one_line_in_order_or_json_and_foreign_ones_are_counted(world: World, config: Path) -> None:
    empty = await floe(config, world.stream)
    assert (empty.code, empty.out, empty.err) == (0, "", "")
    silent = Advisory(AdvisoryEvent.TIMEOUT, "node1", (now := now_ns()) - 722 * SECOND, now - 60 * SECOND)
    await store(world, [silent, new("node2"), new("node1")], foreign=3)
    done = await floe(config, world.stream)
    first, second, _ = done.out.splitlines()
    assert first.endswith("] timeout node1 seen 11m2s earlier on US_EAST")
    assert second.endswith("]     new node2 seen 0s earlier on US_EAST")
    assert (done.code, done.err) == (0, f"3 messages of {world.stream} are no advisories\n")
    documents = [json.loads(line) for line in (await floe(config, world.stream, "node1", "--json")).out.splitlines()]
    assert sorted((each["event"], each["value"]) for each in documents) == [("new", "node1"), ("timeout", "node1")]
    assert list(documents[0]) == list(AdvisoryDocument.__struct_fields__)


async def test_since_counts_from_now_by_time_of_storing(world: World, config: Path) -> None:
    await store(world, [new("old", now_ns() - 30 * 86_400 * SECOND)])

    assert "old seen 0s earlier" in (await floe(config, world.stream, "--since", "1m")).out
    assert (await floe(config, world.stream, "--since", "1ms")).out == ""


async def test_other_subjects_and_headers_do_not_matter(world: World, tmp_path: Path, nats_url: str) -> None:
    document = (
        b'{"protocol":"io.choria.sr.v2.age_advisory","event_id":"26QSY17sb9aJL6UPPG6MLOVjIrE",'
        b'"inspect_field":"sender","age":3600,"seen":1647351430,"replicator":"US-EAST",'
        b'"timestamp":1647355030,"event":"expire","value":"node1"}'
    )
    world.client.send(frame(f"{world.prefix}.central.x".encode(), document))
    await soon(world.count)
    nowhere = {"url": "nats://127.0.0.1:1", "connect_timeout": "300ms"}
    targets = [{"stream": "T", "sources": [{"site": "s", "feed": "f"}]}]
    settings = {"nats": nowhere, "ingress": {"nats": {"url": nats_url}, "targets": targets}}
    centre = written(tmp_path / "centre.yaml", settings)

    shown = (await floe(centre, world.stream)).out
    assert shown == "[2022-03-15 14:37:10]  expire node1 seen 1h earlier on US-EAST\n"
    assert (await floe(centre, world.stream, "--nats", "egress")).code == 75


async def test_no_such_stream_ends_with_1_and_an_invalid_name_with_2(config: Path) -> None:
    done = await floe(config, "NO_SUCH_STREAM")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert done.err.startswith("error[E-STREAM]: stream NO_SUCH_STREAM: expected one on this server")
    for name in ("a.b", "a b", "*", ""):
        assert (await floe(config, name)).code == 2, name


@pytest.mark.real
async def test_follow_shows_those_that_come_until_it_is_interrupted(world: World, config: Path, tmp_path: Path) -> None:
    await store(world, [new("before")])
    out, errors = tmp_path / "out", tmp_path / "errors"
    words = ("advisories", world.stream, "--follow", "-c", str(config))
    with out.open("w") as stdout, errors.open("w") as stderr, spawned(*words, stdout=stdout, stderr=stderr) as process:
        await soon(lambda: "before" in out.read_text())
        await store(world, [new("after")], foreign=1)
        await soon(lambda: "after" in out.read_text())
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
    assert out.read_text().count("\n") == 2
    assert f"1 message of {world.stream} is no advisory" in errors.read_text()
    assert "Traceback" not in errors.read_text()


def test_a_line_stays_one_at_any_value_and_times() -> None:
    with pytest.raises(ValueError, match="expected seconds since 1970"):
        format_advisory(AdvisoryDocument("p", "i", "f", 0, 0, "r", 2**62, "new", "v"))
    unseen = AdvisoryDocument("p", "i", "f", -1, -62_135_596_800, "r", 0, "new", "v")
    assert format_advisory(unseen).startswith("[1970-01-01 00:00:00]     new v seen ")
    forged = AdvisoryDocument("p", "i", "f", 0, 0, "r", 0, "new", "a\n[2026-01-01 00:00:00] expire node1\x1b[2J\u202e")
    assert format_advisory(forged).isprintable()
