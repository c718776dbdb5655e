"""Egress captures what a stream is beside its messages: configuration, consumers, what was deleted."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.clock import NS_PER_S, parse_time
from common.errors import Refused
from common.jetstream.client import FloeClient, connect
from common.metrics import total
from common.segments.captures import CapturedConsumer, CaptureStore
from common.segments.keys import Layout
from common.settings.service import NatsSettings
from egress import metrics
from infra.local.nats import NatsServer
from tests.support.basics import PATIENCE, soon, unique
from tests.support.commands import configuration, floe
from tests.support.egress import QUICK, SITE, Bench
from tests.support.stores import FaultyStore

FAST = replace(QUICK, pace=replace(QUICK.pace, check=0.1, captured=0.3))
SELDOM = replace(QUICK, pace=replace(QUICK.pace, check=600.0))
ONCE = replace(QUICK, pace=replace(QUICK.pace, check=0.1))
EXPLICIT = {"ack_policy": "explicit", "deliver_policy": "all"}


def captures(bench: Bench) -> CaptureStore:
    return CaptureStore(Layout("data"), bench.objects)


async def made(client: FloeClient, stream: str, name: str, **config: Any) -> None:
    given = {"durable_name": name, "name": name, **EXPLICIT, **config}
    await client.api(f"CONSUMER.DURABLE.CREATE.{stream}.{name}", {"stream_name": stream, "config": given})


async def pulled(client: FloeClient, stream: str, name: str, count: int, acked: int) -> None:
    """Take `count` messages, acknowledge the first `acked`."""
    got: list[bytes] = []
    inbox = f"_INBOX.{unique('T')}"
    subscription = await client.subscribe_raw(inbox, lambda _subject, reply, _body, _headers: got.append(reply))
    request = json.dumps({"batch": count, "no_wait": True}).encode()
    client.send(b"PUB %s %s %d\r\n%s\r\n" % (
        client.api_subject(f"CONSUMER.MSG.NEXT.{stream}.{name}").encode(), inbox.encode(), len(request), request,
    ))  # fmt: skip
    await soon(lambda: len(got) >= count)
    for reply in got[:acked]:
        client.send(b"PUB %s 4\r\n+ACK\r\n" % reply)
    await client.round_trip(5.0)
    await subscription.unsubscribe()


def by_name(bench: Bench, stream: str) -> dict[str, CapturedConsumer]:
    found = captures(bench).consumers(bench.chain(stream))
    return {} if found is None else {each.name: each for each in found.consumers}


async def test_what_a_stream_is_stands_beside_its_messages(bench: Bench) -> None:
    """Consumers of several kinds; a position moves; a configuration changes; what was written stays."""
    stream = await bench.make_stream(unique("CAP"))
    await bench.publish(stream, [b"%d" % n for n in range(10)])
    await made(bench.client, stream, "some")
    await made(bench.client, stream, "filtered", filter_subject=f"{stream}.b", ack_policy="all", max_deliver=3)
    await made(bench.client, stream, "pushed", deliver_subject=unique("D"), ack_policy="none")
    await pulled(bench.client, stream, "some", 5, 3)
    chain, store = bench.chain(stream), captures(bench)
    async with bench.egress({"stream": stream, "capture_consumers": "1s"}, tuning=FAST):
        await bench.archived_to(stream, 10)
        await soon(lambda: by_name(bench, stream).get("some") is not None)
        found = by_name(bench, stream)
        assert found.keys() == {"some", "filtered", "pushed"}, "none of egress itself"
        some = found["some"]
        assert (some.delivered_consumer, some.delivered_stream, some.ack_pending) == (5, 5, 2)
        assert (some.ack_floor_consumer, some.ack_floor_stream, some.redelivered, some.paused) == (3, 3, 0, False)
        assert found["filtered"].config["max_deliver"] == 3
        await pulled(bench.client, stream, "some", 5, 5)
        await soon(lambda: by_name(bench, stream)["some"].delivered_stream == 10)
        await bench.client.api(f"STREAM.UPDATE.{stream}", {"name": stream, "subjects": [f"{stream}.>"],
                               "storage": "memory", "max_msgs": 77})  # fmt: skip
        await soon(lambda: (found := store.config(chain)) is not None and found.config["max_msgs"] == 77)
        await made(bench.client, stream, "late")
        await soon(lambda: "late" in by_name(bench, stream))
    configs = [store.read(ref) for ref in store.ls(chain, "config")]
    assert sorted(each.config["max_msgs"] for each in configs) == [-1, 77]  # type: ignore[union-attr]
    for kind in ("config", "consumers"):
        for ref in store.ls(chain, kind):
            assert ref.end <= 10
            document = store.read(ref)
            assert document is not None
            assert document.chain == str(chain)
            assert document.ts, "the time of the server"
            assert abs(document.moment_ns - parse_time(document.at)) < PATIENCE * NS_PER_S
    changed, gone = store.config(chain), store.deletions(chain)
    assert changed is not None
    assert gone is not None, "once, with the change"
    assert (gone.ts, gone.first, gone.last, gone.deleted) == (changed.ts, 1, 10, ())
    assert len(store.ls(chain, "deletions")) == 1


async def test_the_drain_captures_where_consumers_are(bench: Bench) -> None:
    """Between two captures of positions alone five minutes pass, unless egress is stopped."""
    stream = await bench.make_stream(unique("CAP"))
    await made(bench.client, stream, "app")
    chain, store = bench.chain(stream), captures(bench)
    async with bench.egress({"stream": stream, "capture_consumers": "1s"}, tuning=ONCE):
        await soon(lambda: by_name(bench, stream).get("app") is not None)
        await bench.publish(stream, [b"%d" % n for n in range(4)])
        await pulled(bench.client, stream, "app", 3, 2)
        await bench.archived_to(stream, 4)
        assert by_name(bench, stream)["app"].delivered_stream == 0
    found = store.consumers(chain)
    assert found is not None
    assert found.end == 4
    [app] = found.consumers
    assert (app.delivered_stream, app.ack_floor_stream, app.ack_pending) == (3, 2, 1)
    count = len(store.ls(chain, "consumers"))
    async with bench.egress({"stream": stream}, tuning=ONCE) as running:
        await soon(lambda: running.state(stream) == "reading")
    assert len(store.ls(chain, "consumers")) == count, "nothing moved"
    assert len(store.ls(chain, "config")) == 1


async def test_what_is_acknowledged_in_a_work_queue_is_captured_as_deleted(bench: Bench) -> None:
    stream = await bench.make_stream(unique("CAP"), retention="workqueue")
    await made(bench.client, stream, "app", filter_subject=f"{stream}.b")
    await bench.publish(stream, [b"1", b"2"], subject="b")
    await bench.publish(stream, [b"3"], subject="a")
    await bench.publish(stream, [b"4", b"5", b"6"], subject="b")
    chain, store = bench.chain(stream), captures(bench)
    feed = {"stream": stream, "filter_subject": f"{stream}.a", "capture_deletes": "1s"}
    async with bench.egress(feed, tuning=SELDOM):  # a period that is shorter than the pace counts
        await soon(lambda: (found := store.deletions(chain)) is not None and found.deleted == ((3, 3),))
        await pulled(bench.client, stream, "app", 3, 3)
        await soon(lambda: (found := store.deletions(chain)) is not None and found.first == 5)
    assert by_name(bench, stream).keys() == {"app"}, "not the durable of egress"
    last = store.deletions(chain)
    assert last is not None
    assert (last.first, last.last, last.deleted) == (5, 6, ())


async def test_only_partition_0_captures_and_never_says_never(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    stream = await bench.make_stream(unique("CAP"))
    await made(bench.client, stream, "app")
    feed = {"stream": stream, "partitions": [f"{stream}.a", f"{stream}.b"], "capture_consumers": "never"}
    store = captures(bench)
    async with bench.egress(feed, tuning=FAST) as running:
        await soon(lambda: running.state(stream) == running.state(f"{stream}/1") == "reading")
        await soon(lambda: store.config(bench.chain(stream)) is not None)
        changed = {"name": stream, "subjects": [f"{stream}.>"], "storage": "memory", "max_msgs": 77}
        await bench.client.api(f"STREAM.UPDATE.{stream}", changed)
        await soon(lambda: len(store.ls(bench.chain(stream), "config")) == 2)
    assert store.ls(bench.chain(stream), "consumers") == []
    assert told(caplog, "unforeseen") == [], "the loop of looks goes on without a period"


async def test_a_bucket_without_consumers_says_so_and_a_damaged_capture_is_told_and_followed_by_another(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    stream, store = await bench.make_stream(unique("CAP")), captures(bench)
    chain = bench.chain(stream)
    async with bench.egress({"stream": stream}, tuning=FAST):
        await soon(lambda: store.config(chain) is not None)
        await soon(lambda: store.consumers(chain) is not None)
    assert by_name(bench, stream) == {}
    [ref] = store.ls(chain, "config")
    bench.objects.put(ref.key, b"{}")
    caplog.set_level(logging.INFO, logger="egress.captures")
    async with bench.egress({"stream": stream}, tuning=FAST):
        await soon(lambda: len(store.ls(chain, "config")) == 2)
    assert len(told(caplog, "capture_ignored")) == 1


def told(caplog: pytest.LogCaptureFixture, action: str) -> list[dict[str, Any]]:
    return [r.msg for r in caplog.records if isinstance(r.msg, dict) and r.msg.get("action") == action]


async def test_without_the_right_it_is_told_once_and_all_else_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    denied = 'permissions: { publish: { deny: ["$JS.API.CONSUMER.LIST.>"] } }'
    users = f"{{user: egress, password: secret, {denied}}}, {{user: all, password: secret}}"
    caplog.set_level(logging.INFO, logger="egress.captures")
    with NatsServer(extra=f"authorization {{ users: [ {users} ] }}") as server:
        client = await connect(NatsSettings(url=server.url, user="all", password="secret"), name="test")
        bench = Bench(server.url, tmp_path, client)
        stream = await bench.make_stream(unique("CAP"))
        nats, store = {"user": "egress", "password": "secret"}, captures(bench)
        feed = {"stream": stream, "capture_consumers": "1s"}
        async with bench.egress(feed, tuning=FAST, nats=nats):
            await bench.publish(stream, [b"%d" % n for n in range(50)])
            await bench.archived_to(stream, 50)
            await soon(lambda: total(metrics.captures, feed=stream, what="consumers", result="failed") >= 2)
        await client.aclose()
    [warning] = told(caplog, "capture_failed")
    assert warning["what"] == "consumers"
    assert f'"$JS.API.CONSUMER.LIST.{stream}"' in warning["error"]
    assert store.config(bench.chain(stream)) is not None
    assert store.ls(bench.chain(stream), "consumers") == []


async def test_a_store_that_refuses_captures_stops_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    stream, chain = await bench.make_stream(unique("CAP")), bench.chain
    caplog.set_level(logging.INFO, logger="egress.captures")

    def refused(real: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        if "/consumers/" in key:
            raise Refused("the policy does not allow it")
        return real(key, *args, **kwargs)

    objects = FaultyStore(bench.objects).on("put_if_absent", refused)
    feed = {"stream": stream, "capture_consumers": "1s"}
    async with bench.egress(feed, tuning=FAST, objects=objects):  # type: ignore[arg-type]
        await soon(lambda: told(caplog, "capture_failed"))
        await bench.publish(stream, [b"x"] * 20)
        await bench.archived_to(stream, 20)
        objects.heal()
        await soon(lambda: captures(bench).consumers(chain(stream)) is not None)
        await soon(lambda: told(caplog, "over"))
    assert len(told(caplog, "capture_failed")) == len(told(caplog, "over")) == 1


async def test_what_a_stream_was_is_not_mixed_with_what_it_was_made_again_as(bench: Bench) -> None:
    stream = await bench.make_stream(unique("CAP"))
    await bench.publish(stream, [b"x"] * 5)
    first, second, store = bench.chain(stream), bench.chain(stream, 1), captures(bench)
    async with bench.egress({"stream": stream}, tuning=FAST):
        await bench.archived_to(stream, 5)
        await soon(lambda: store.config(first) is not None)
        await bench.delete_stream(stream)
        await bench.make_stream(stream, max_msgs=99)
        await bench.publish(stream, [b"y"] * 3)
        await soon(lambda: store.config(second) is not None)
    assert [store.read(ref).config["max_msgs"] for ref in store.ls(first, "config")] == [-1]  # type: ignore[union-attr]
    assert [store.read(ref).config["max_msgs"] for ref in store.ls(second, "config")] == [99]  # type: ignore[union-attr]


async def test_consumers_that_were_captured_are_listed(bench: Bench, tmp_path: Path) -> None:
    stream = await bench.make_stream(unique("CAP"))
    await made(bench.client, stream, "app", filter_subject=f"{stream}.a")
    await bench.publish(stream, [b"x"] * 5)
    path = configuration(bench, {"stream": stream})
    words = ("consumers", "ls", "-c", str(path), f"{SITE}/{stream}")
    none = await floe(*words)
    assert (none.code, none.out.splitlines()[1:]) == (0, [])
    assert "no consumers captured" in none.err
    in_one = {"max_messages": 5, "max_age": "1h"}
    async with bench.egress({"stream": stream, "segment": in_one}, tuning=ONCE):
        await bench.archived_to(stream, 5)
        await pulled(bench.client, stream, "app", 4, 3)
    shown = await floe(*words)
    assert shown.code == 0, shown.err
    assert shown.out.splitlines()[1].split() == ["app", "4", "3", "1", "0", f"{stream}.a", "-"]
    assert "1 consumer, captured" in shown.err
    assert "when 5 was archived" in shown.err
    found = (await floe(*words, "--json")).json()
    assert (found["end"], found["incarnation"], found["consumers"][0]["ack_floor_stream"]) == (5, 0, 3)
    assert found["age_seconds"] >= 0
    before = (await floe(*words, "--to-sequence", "4", "--json")).json()
    assert before["end"] in (None, 0), "as it was before 5 was archived"
    for wrong in (f"{SITE}/OTHER", f"{SITE}/{stream}/0000/0", SITE):
        assert (await floe(*words[:-1], wrong)).code == 2
