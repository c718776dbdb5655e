"""A sampled feed over a real server: its rows, its advisories, and its memory after a stop."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from common.archive.segment import Message
from common.errors import Unavailable
from common.nats.api import create_stream
from egress import metrics
from egress.advisories.advisory import parse_advisory
from egress.init import set_up
from infra.oracle import read_stream
from tests.support.basics import PATIENCE, counted, soon, unique
from tests.support.egress import SITE, Bench
from tests.support.stores import FaultyStore

pytestmark = pytest.mark.simulated


async def make(bench: Bench, **more: Any) -> dict[str, Any]:
    """A stream, a stream for reliable advisories with a useless duplicate window, and a feed of both."""
    name = await bench.make_stream(unique("T"))
    config = {"name": f"{name}_ADV", "subjects": [f"{name}_ADV.>"], "storage": "memory"}
    await create_stream(bench.client, {**config, "duplicate_window": 100_000_000})
    sampling = {"inspect_field": "id", "inspect_duration": "60s", "snapshot_interval": "1h"}
    return {"stream": name, **sampling, "advisory": {"subject": f"{name}_ADV.%s.%v", "reliable": True}, **more}


def documents(names: Iterable[str]) -> list[bytes]:
    return [json.dumps({"id": name}).encode() for name in names]


NODES = [f"n{number}" for number in range(10)]


async def send(bench: Bench, feed: dict[str, Any], names: Iterable[str]) -> int:
    """Publish a document of each name, and return the last sequence."""
    await bench.publish(feed["stream"], documents(names))
    return await bench.last(feed["stream"])


def kept(bench: Bench, feed: dict[str, Any]) -> list[int]:
    """The sequences of the rows; fail unless the archive accounts for all sequences."""
    bench.check(feed["stream"])
    return [message.sequence for message in bench.messages(feed["stream"])]


async def stored_events(bench: Bench, feed: dict[str, Any]) -> Counter[tuple[str, str]]:
    """The number of stored advisories of each event of each value."""
    stored: list[Message] = []
    await read_stream(bench.client, f"{feed['stream']}_ADV", stored.append)
    found = [parse_advisory(message.payload) for message in stored]
    return Counter((document.event, document.value) for document in found if document is not None)


def once(event: str, names: Iterable[str]) -> Counter[tuple[str, str]]:
    return Counter((event, name) for name in names)


def states(bench: Bench) -> list[Path]:
    """The snapshots in the bucket, oldest position first."""
    return sorted((bench.root / "bucket").rglob("state/*-*"))


async def _has_stored(bench: Bench, feed: dict[str, Any], count: int) -> bool:
    return await bench.last(f"{feed['stream']}_ADV") >= count


@pytest.mark.parametrize(
    ("crashes", "changed", "rebuilds"),
    [(False, {}, 0), (True, {}, 0), (False, {"inspect_duration": "50s"}, 1)],
    ids=["clean stop", "crash", "other settings"],
)
async def test_it_resumes_with_its_memory_and_sends_nothing_twice(
    bench: Bench, crashes: bool, changed: dict[str, Any], rebuilds: int
) -> None:
    """After a clean stop nothing is read again, after a crash the messages behind the last snapshot, with other
    settings the archive.
    """
    feed = await make(bench)
    running = bench.start(bench.settings(feed))
    await bench.archived_to(feed["stream"], await send(bench, feed, NODES))
    await soon(lambda: _has_stored(bench, feed, 10))
    await (running.crash() if crashes else running.drain())
    assert states(bench)[-1].name.startswith(f"{1 if crashes else 11:020d}-")
    if not crashes:
        await bench.client.api(f"STREAM.PURGE.{feed['stream']}")
    await send(bench, feed, [*NODES, "another"])
    await bench.freeze({**feed, **changed})
    assert kept(bench, feed) == [*range(1, 11), 21]
    assert await stored_events(bench, feed) == once("new", [*NODES, "another"])
    assert counted(metrics.sampler_rebuilt.labels(SITE, feed["stream"], 0, "settings")) == rebuilds
    labels, rows = (SITE, feed["stream"], 0), bench.messages(feed["stream"])
    left_out = sum(len(row.subject) + len(row.payload) for row in rows[:10])  # the same once more
    assert counted(metrics.left_out_bytes.labels(*labels, "sampled_out")) == left_out
    raw = counted(metrics.raw_bytes.labels(*labels))
    assert counted(metrics.received_bytes.labels(*labels)) == raw + left_out > left_out
    assert len({footer.sampling_digest for footer in bench.footers(feed["stream"])}) == 1 + rebuilds


async def test_silence_is_seen_in_a_filtered_feed_though_its_stream_is_busy(bench: Bench) -> None:
    feed = await make(bench, inspect_duration="3s", warn_duration="1s")
    feed["filter_subject"] = f"{feed['stream']}.a"
    await send(bench, feed, NODES)

    async def others() -> None:
        while True:
            await bench.publish(feed["stream"], documents(NODES), subject="b")
            await asyncio.sleep(0.02)

    load = asyncio.create_task(others())
    async with bench.egress(feed):
        await soon(lambda: _has_stored(bench, feed, 30))
    load.cancel()
    await asyncio.wait({load})
    assert await stored_events(bench, feed) == once("new", NODES) + once("timeout", NODES) + once("expire", NODES)


async def test_a_row_too_old_for_a_crashed_session_does_not_count_as_a_copy_later(bench: Bench) -> None:
    """The first session leaves the oldest message out, because the source held a much newer one. A later session must
    know that, or it takes the value for copied and the archive never holds it."""
    feed = await make(bench, max_age="1s")
    await send(bench, feed, ["a"])
    await asyncio.sleep(1.3)
    await send(bench, feed, ["b"])
    running = bench.start(bench.settings(feed))
    await bench.archived_to(feed["stream"], 2)
    await running.crash()
    await send(bench, feed, ["a", "b"])
    await bench.freeze(feed)
    assert (kept(bench, feed), bench.ledger(feed["stream"])) == ([2, 3], {"sampled_out": 1, "too_old": 1})


async def test_snapshots_that_cannot_be_written_hold_nothing_up(bench: Bench) -> None:
    feed = await make(bench, snapshot_interval="1s")
    await send(bench, feed, NODES)
    await bench.freeze(feed)
    before = len(states(bench))
    failed = metrics.snapshots.labels(SITE, feed["stream"], "0", "failed")
    objects = FaultyStore(bench.objects).on("put_if_absent", _no_snapshots)
    async with bench.egress(feed, objects=objects):  # type: ignore[arg-type]
        async with asyncio.timeout(PATIENCE):
            while not counted(failed):
                await bench.archived_to(feed["stream"], await send(bench, feed, NODES))
        await bench.archived_to(feed["stream"], await send(bench, feed, ["another"]))
    assert len(states(bench)) == before
    await bench.freeze(feed)
    assert kept(bench, feed) == [*range(1, 11), await bench.last(feed["stream"])]


def _no_snapshots(real: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    if "/state/" in key:
        raise Unavailable("the store takes no snapshots")
    return real(key, *args, **kwargs)


async def test_advisories_that_would_feed_themselves_stop_the_feed_before_it_begins(bench: Bench) -> None:
    name = unique("LOOP")
    await bench.make_stream(name, subjects=[f"{name}.>"])
    advisory = {"subject": f"{name}.adv.%s.%v", "reliable": False}
    feed = {"stream": name, "inspect_subject_token": -1, "inspect_duration": "60s", "advisory": advisory}
    await bench.publish(name, documents("ab"), subject="data")
    done, problems = await set_up(bench.client, bench.settings(feed))
    assert [problem.code for problem in problems] == ["E-ADVISORY-LOOP"]
    assert ("advisories", "refused") in [(each.what, each.result) for each in done]
    async with bench.egress(feed) as running:
        await soon(lambda: running.state(name) == "stopped")
        assert f"{name}.adv.new.>" in running.status(name)["why"]
    assert await bench.last(name) == 2
    assert bench.refs(name) == []
    feed["filter_subject"] = f"{name}.data"  # nothing has begun, so it may still be filtered
    await bench.freeze(feed)
    assert (await set_up(bench.client, bench.settings(feed)))[1] == []


async def test_a_feed_that_has_begun_stops_where_its_stream_takes_its_advisories_too(bench: Bench) -> None:
    feed = await make(bench)
    name = feed["stream"]
    feed["advisory"] = {"subject": f"{name}_OWN.%s", "reliable": False}
    await send(bench, feed, NODES)
    await bench.freeze(feed)
    config = (await bench.client.api(f"STREAM.INFO.{name}"))["config"]
    await bench.client.api(f"STREAM.UPDATE.{name}", {**config, "subjects": [f"{name}.>", f"{name}_OWN.*"]})
    async with bench.egress(feed) as running:
        assert f"{name}_OWN.new" in (await running.stopped(name))["why"]
        await bench.client.api(f"STREAM.UPDATE.{name}", config)
        await soon(lambda: running.state(name) == "reading")
