"""Captures that egress makes of a stream beside its messages: configuration, consumers, deleted sequences."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.archive.captures import CapturedConsumer, CaptureStore
from common.archive.keys import Layout
from common.clock import NS_PER_S, parse_time
from common.errors import Refused
from common.nats.api import create_consumer, delete_consumer, list_consumers
from egress.evidence import IdentityCheck
from egress.partition import is_floe_consumer
from tests.support import restoring as back
from tests.support.basics import PATIENCE, soon, unique
from tests.support.commands import configuration, floe
from tests.support.egress import QUICK, SITE, Bench
from tests.support.stores import FaultyStore

FAST = replace(QUICK, intervals=replace(QUICK.intervals, check=0.1, consumers_capture=0.3))
SELDOM = replace(QUICK, intervals=replace(QUICK.intervals, check=600.0))  # a shorter period of a feed counts
ONCE = replace(QUICK, intervals=replace(QUICK.intervals, check=0.1))
EXPLICIT = {"ack_policy": "explicit", "deliver_policy": "all"}


def captures(bench: Bench) -> CaptureStore:
    return CaptureStore(Layout("data"), bench.objects)


async def made(bench: Bench, stream: str, name: str, **config: Any) -> None:
    await create_consumer(bench.client, stream, {"durable_name": name, **EXPLICIT, **config})


def by_name(bench: Bench, stream: str) -> dict[str, CapturedConsumer]:
    found = captures(bench).consumers(bench.chain(stream))
    return {} if found is None else {each.name: each for each in found.consumers}


async def test_a_stream_is_captured_beside_its_messages(bench: Bench) -> None:
    """Consumers of several kinds; a position moves; a configuration changes; earlier captures stay."""
    stream = await bench.filled([b"%d" % n for n in range(10)])
    await made(bench, stream, "some")
    await made(bench, stream, "filtered", filter_subject=f"{stream}.b", ack_policy="all", max_deliver=3)
    await made(bench, stream, "pushed", deliver_subject=unique("D"), ack_policy="none")
    await back.consume(bench, stream, "some", 5, 3)
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
        await back.consume(bench, stream, "some", 5, 5)
        await soon(lambda: by_name(bench, stream)["some"].delivered_stream == 10)
        limited = {"name": stream, "subjects": [f"{stream}.>"], "storage": "memory", "max_msgs": 77}
        await bench.client.api(f"STREAM.UPDATE.{stream}", limited)
        await soon(lambda: (found := store.config(chain)) is not None and found.config["max_msgs"] == 77)
        await made(bench, stream, "late")
        await soon(lambda: "late" in by_name(bench, stream))
    configs = [store.read(ref) for ref in store.list_captures(chain, "config")]
    assert sorted(each.config["max_msgs"] for each in configs) == [-1, 77]  # type: ignore[union-attr]
    for ref in (*store.list_captures(chain, "config"), *store.list_captures(chain, "consumers")):
        document = store.read(ref)
        assert (document.chain, bool(document.ts), ref.end <= 10) == (str(chain), True, True)
        assert abs(document.moment_ns - parse_time(document.at)) < PATIENCE * NS_PER_S
    changed, gone = store.config(chain), store.deletions(chain)
    assert (gone.ts, gone.first, gone.last, gone.deleted) == (changed.ts, 1, 10, ()), "once, with the change"
    assert len(store.list_captures(chain, "deletions")) == 1


@pytest.mark.simulated
async def test_a_stop_while_the_stream_is_examined_has_its_last_capture_too(bench: Bench, monkeypatch) -> None:
    stream, examined = await bench.filled([b"%d" % n for n in range(10)]), asyncio.Event()
    judge_confirmed = IdentityCheck.judge_confirmed

    async def judge(*args: Any) -> Any:
        examined.set()
        await running.stop.wait()
        return await judge_confirmed(*args)

    await made(bench, stream, "app")
    async with bench.egress({"stream": stream, "capture_consumers": "1h"}, tuning=FAST) as running:
        await bench.archived_to(stream, 10)
        await soon(lambda: by_name(bench, stream).get("app") is not None)
        await back.consume(bench, stream, "app", 5)
        monkeypatch.setattr(IdentityCheck, "judge_confirmed", judge)
        for each in await list_consumers(bench.client, stream):
            if is_floe_consumer(each["name"]):
                await delete_consumer(bench.client, stream, each["name"])
        await examined.wait()
    assert by_name(bench, stream)["app"].delivered_stream == 5


async def test_a_lack_of_consumers_is_captured_and_a_damaged_capture_is_logged_and_replaced(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    stream, store = await bench.make_stream(unique("CAP")), captures(bench)
    chain = bench.chain(stream)
    async with bench.egress({"stream": stream}, tuning=FAST):
        await soon(lambda: store.config(chain) is not None)
        await soon(lambda: store.consumers(chain) is not None)
    assert by_name(bench, stream) == {}
    [ref] = store.list_captures(chain, "config")
    bench.objects.put(ref.key, b"{}")
    caplog.set_level(logging.INFO, logger="egress.captures")
    async with bench.egress({"stream": stream}, tuning=FAST):
        await soon(lambda: len(store.list_captures(chain, "config")) == 2)
    assert len(logged(caplog, "capture_ignored")) == 1


def logged(caplog: pytest.LogCaptureFixture, action: str) -> list[dict[str, Any]]:
    return [r.msg for r in caplog.records if isinstance(r.msg, dict) and r.msg.get("action") == action]


async def test_a_store_that_refuses_captures_stops_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    stream, chain = await bench.make_stream(unique("CAP")), bench.chain
    caplog.set_level(logging.INFO, logger="egress.captures")

    def refused(real: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        if "/consumers/" in key:
            raise Refused("the policy does not allow it")
        return real(key, *args, **kwargs)

    objects = FaultyStore(bench.objects).on("put_if_absent", refused)
    feed = {"stream": stream, "capture_consumers": "1s"}
    # A lease that a busy machine keeps: with each new one, a failure is logged once more.
    async with bench.egress(feed, tuning=SELDOM, objects=objects, lease_ttl="30s"):  # type: ignore[arg-type]
        await soon(lambda: logged(caplog, "capture_failed"))
        await bench.archive(stream, [b"x"] * 20, 20)
        objects.heal()
        await soon(lambda: captures(bench).consumers(chain(stream)) is not None)
        await soon(lambda: logged(caplog, "capture_recovered"))
    assert len(logged(caplog, "capture_failed")) == len(logged(caplog, "capture_recovered")) == 1


async def test_consumers_that_were_captured_are_listed(bench: Bench, tmp_path: Path) -> None:
    stream = await bench.make_stream(unique("CAP"))
    await made(bench, stream, "app", filter_subject=f"{stream}.a")
    await bench.publish(stream, [b"x"] * 5)
    words = ("consumers", "ls", "-c", str(configuration(bench, {"stream": stream})), f"{SITE}/{stream}")
    none = await floe(*words)
    assert (none.code, none.out.splitlines()[1:]) == (0, [])
    assert "no consumers captured" in none.err
    async with bench.egress({"stream": stream, "segment": {"max_messages": 5, "max_age": "1h"}}, tuning=ONCE):
        await bench.archived_to(stream, 5)
        await back.consume(bench, stream, "app", 4, 3)
    shown = await floe(*words)
    assert shown.code == 0, shown.err
    assert shown.out.splitlines()[1].split() == ["app", "4", "3", "1", "0", f"{stream}.a", "-"]
    assert "1 consumer, captured" in shown.err
    assert "when 5 was archived" in shown.err
    found = (await floe(*words, "--json")).json()
    assert (found["end"], found["incarnation"], found["consumers"][0]["ack_floor_stream"]) == (5, 0, 3)
    before = (await floe(*words, "--to-sequence", "4", "--json")).json()
    assert before["end"] in (None, 0), "as it was before 5 was archived"
    assert (await floe(*words[:-1], f"{SITE}/OTHER")).code == 2
