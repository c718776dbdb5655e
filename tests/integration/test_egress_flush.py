"""The open segment: shown while open, and closed at once by `floe egress flush`."""

import asyncio
from dataclasses import replace

import pytest

from common.nats.kv import KeyValue
from egress import metrics
from egress.flush import flush_requests
from tests.integration.test_egress_faults import fail_puts
from tests.support.basics import counted, soon, unique
from tests.support.commands import configuration, floe
from tests.support.egress import QUICK, SITE, Bench, Partitioned, feed_of, publish_over
from tests.support.stores import FaultyStore

pytestmark = pytest.mark.simulated

PROMPT, LONG = replace(QUICK, intervals=replace(QUICK.intervals, flush=0.1)), {"max_age": "1h"}


async def test_a_flush_closes_every_open_segment_that_is_shown_and_waits_until_it_is_stored(bench: Bench) -> None:
    stream = await bench.make_stream(unique("T"))
    parts, feed = Partitioned(bench, stream, 3), {**feed_of(stream), "segment": LONG}
    await publish_over(bench, stream, ["0.a", "1.b", "1.c"], 30, "x")
    config = str(configuration(bench, feed))
    async with bench.egress(feed, tuning=PROMPT) as running:
        for suffix in ("", "/1", "/2"):
            await running.received(f"{stream}{suffix}", 30)
        found = running.status(f"{stream}/1")["open_segment"]
        size = 20 * len(f"{stream}.1.b") + sum(len(f"x {i}") for i in range(30) if i % 3)
        assert (found["first"], found["messages"], found["bytes"]) == (1, 20, size)
        assert 3500 < found["closes_in_seconds"] + found["age_seconds"] <= 3600.01
        assert counted(metrics.open_messages.labels(SITE, stream, "1")) == 20
        before = counted(metrics.closed.labels(SITE, stream, "1", "flush"))
        done = await floe("egress", "flush", "-c", config, stream, "--json")
        assert done.code == 0, done
        rows = {row["partition"]: row for row in done.json()}
        assert [rows[number]["state"] for number in range(3)] == ["stored"] * 3
        assert [rows[number]["last"] for number in range(3)] == [30] * 3, "a stretch without rows is stored too"
        assert parts.ends() == {0: 30, 1: 30, 2: 30}
        assert counted(metrics.closed.labels(SITE, stream, "1", "flush")) == before + 1
        await publish_over(bench, stream, ["0.a", "1.b"], 10, "y")
        await running.received(stream, 40)
        await running.received(f"{stream}/1", 40)
        done = await floe("egress", "flush", "-c", config, f"{SITE}/{stream}/0000/1", "--json")
        assert (done.code, [(row["partition"], row["last"]) for row in done.json()]) == (0, [(1, 40)])
        assert parts.ends() == {0: 30, 1: 40, 2: 30}
        done = await floe("egress", "flush", "-c", config, f"{SITE}/{stream}/0003/1")
        assert (done.code, "expected the newest incarnation, 0000" in done.err) == (2, True), done
        done = await floe("egress", "flush", "-c", config)
        assert done.code == 0, done
        assert f"{SITE}/{stream}/0000/0: stored up to 40" in done.out
        done = await floe("egress", "flush", "-c", config, stream)
        assert (done.code, done.out.splitlines()[0]) == (0, f"{SITE}/{stream}/0000/0: stored up to 40")
        await soon(lambda: not running.service._flushing._done)  # a flush keeps its session in memory
    await parts.same(stream)


async def test_a_flush_leaves_the_choices_of_a_sampler_as_they_are(bench: Bench) -> None:
    stream = await bench.make_stream(unique("T"))
    sampling = {"stream": stream, "inspect_field": "id", "inspect_duration": "1h"}
    feeds = [{"name": name, **sampling, "segment": {**LONG}} for name in (unique("WHOLE"), unique("FLUSHED"))]
    config, (whole, flushed) = str(configuration(bench, *feeds)), (feed["name"] for feed in feeds)
    async with bench.egress(*feeds, tuning=PROMPT) as running:
        for count in (2, 7, 15):
            await bench.publish(stream, (b'{"id": "n%d"}' % n for n in range(count)))
            last = await bench.last(stream)
            await running.received(flushed, last)
            done = await floe("egress", "flush", "-c", config, flushed, "--json")
            assert done.code == 0, done
            assert [row["last"] for row in done.json()] == [last]
        assert (len(bench.refs(flushed)), bench.refs(whole)) == (3, [])
    kept = [message.sequence for message in bench.messages(flushed)]
    assert (len(kept), kept) == (15, [message.sequence for message in bench.messages(whole)])
    for feed in (whole, flushed):
        bench.check(feed)


async def test_without_a_lease_holder_it_fails_or_waits(bench: Bench) -> None:
    stream = await bench.make_stream(unique("T"))
    feed = {"stream": stream, "segment": LONG}
    config = str(configuration(bench, feed))
    done = await floe("egress", "flush", "-c", config, stream)
    assert done.code == 75
    assert "E-LEASE" in done.err
    assert "no process holds the lease" in done.err
    assert f"\nfloe egress run -c {config}\n" in done.err
    done = await floe("egress", "flush", "-c", config, stream, "--wait", "--timeout", "300ms")
    assert done.code == 75
    assert "within 0.3 s" in done.err
    assert f"\nfloe status -c {config}\n" in done.err
    waiting = asyncio.create_task(floe("egress", "flush", "-c", config, stream, "--wait", "--json"))
    async with bench.egress(feed, tuning=PROMPT):
        done = await waiting
        assert (done.code, [row["state"] for row in done.json()]) == (0, ["stored"])
        done = await floe("egress", "flush", "-c", config, stream, "--no-wait", "--json")
        assert (done.code, [row["state"] for row in done.json()]) == (0, ["asked"])
    for name in ("other", f"elsewhere/{stream}", f"{SITE}/{stream}/0000/1"):
        done = await floe("egress", "flush", "-c", config, name)
        assert (done.code, done.out) == (2, ""), name


async def test_segments_its_holder_could_not_store_are_flushed_on_takeover(bench: Bench) -> None:
    stream = await bench.make_stream(unique("T"))
    feed = {"stream": stream, "segment": LONG}
    config = str(configuration(bench, feed))
    await bench.publish(stream, [b"x"] * 20)
    store = FaultyStore(bench.objects)
    first = bench.start(bench.settings(feed), PROMPT, objects=store)  # type: ignore[arg-type]
    await first.received(stream, 20)
    fail_puts(store)
    requests = flush_requests(await KeyValue(bench.client, bench.state_bucket).ensure(), SITE)
    waiting = asyncio.create_task(floe("egress", "flush", "-c", config, stream, "--json"))

    async def is_closing() -> bool:
        found = (await requests.get())[0]
        return found is not None and [each.last for each in found.partitions.values()] == [20]

    await soon(is_closing)
    await first.crash()
    assert bench.end(stream) == 0
    async with bench.egress(feed, tuning=PROMPT):
        done = await waiting
        assert (done.code, [row["last"] for row in done.json()], bench.end(stream)) == (0, [20], 20)
    await bench.same(stream, stream)
