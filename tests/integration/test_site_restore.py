"""`floe restore SITE --all`, `floe drill SITE --all`: all streams of a site, sources first; the others are named."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from common.clock import format_time, parse_time
from common.nats.api import RESTORE_PREFIX, create_stream
from infra.local.nats import NatsServer
from ingress.recovery.plan import RestoreRequest
from ingress.recovery.site_restore import choose_feeds, in_waves
from tests.support import restoring as back
from tests.support.basics import soon, unique
from tests.support.commands import configuration, ran
from tests.support.egress import SITE, Bench

pytestmark = pytest.mark.servers

BEFORE, CREATED = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"


@dataclass
class Planned:
    """The fields of a plan that the choice reads."""

    name: str
    feed: str = ""
    end: int = 1
    lossy: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    created: str = CREATED
    time_range_ns: tuple[int, int] = (0, 0)
    rows: int = 1

    @property
    def request(self) -> RestoreRequest:
        return RestoreRequest(SITE, self.feed or self.name)


def test_each_stream_comes_from_the_whole_feed_that_reaches_furthest():
    plans = [
        Planned("A", "short", 5), Planned("A", "far", 9), Planned("A", "sampled", 20, ("sampled",)),
        Planned("B", "one", 3, ("hole",)), Planned("B", "other", 7, ("hole",)), Planned("C"),
        Planned("D", "earlier", 9, created=BEFORE), Planned("D", "later", 3),
        Planned("E", created=BEFORE, time_range_ns=(0, 1 << 62)),
        Planned("F", "most", 5, ("further",), rows=5), Planned("F", "sampled", 7, ("sampled",)),
    ]  # fmt: skip
    created_ns = dict.fromkeys("ABCDEF", parse_time(CREATED))
    whole, lossy = choose_feeds(plans, created_ns)  # type: ignore[arg-type]
    assert [plan.request.feed for plan in whole] == ["far", "C", "later", "E"]
    assert [plan.request.feed for plan in lossy] == ["other", "most"]


def test_sources_come_before_those_that_read_them_and_a_circle_ends():
    def reads(*names: str, **more: Any) -> dict[str, Any]:
        return {"sources": [{"name": name, **more} for name in names]}

    plans = [
        Planned("sum", config=reads("a", "b")), Planned("a", config=reads("raw", "elsewhere")), Planned("raw"),
        Planned("b"), Planned("far", config=reads("sum", external={"api": "x"})), Planned("own", config=reads("own")),
        Planned("x", config=reads("y")), Planned("y", config=reads("x")),
    ]  # fmt: skip
    waves = [{plan.name for plan in wave} for wave in in_waves(plans)]  # type: ignore[arg-type]
    assert waves == [{"raw", "b", "far", "own"}, {"a"}, {"sum"}, {"x", "y"}]


async def test_a_site_that_lost_its_server_comes_back_by_one_command(alone: tuple[Bench, NatsServer]) -> None:
    bench, _ = alone
    streams = [await bench.make_stream(unique(f"R{number}"), storage="file") for number in range(3)]
    for number, stream in enumerate(streams):
        await bench.publish(stream, [b"%d" % number] * 40)
    sampled = {"name": "SAMPLED", "stream": unique("L"), "inspect_subject_token": 2, "inspect_duration": "1h"}
    await bench.make_stream(sampled["stream"])
    await bench.publish(sampled["stream"], [b"x"] * 20)
    total, copy = unique("SUM"), unique("COPY")  # the second of a stream that does not come back
    for name, sources, count in ((total, streams[:2], 80), (copy, [sampled["stream"]], 20)):
        await create_stream(bench.client, {"name": name, "sources": [{"name": each} for each in sources]})
        await soon(lambda: bench.reaches(name, count))  # noqa: B023
    feeds = [{"stream": each} for each in (*streams, total, copy)] + [sampled]
    async with bench.egress(*feeds):
        for each in (*streams, total, copy):
            await bench.archived_to(each, await bench.last(each))
        await bench.archived_to("SAMPLED", 20)
    for each in (*streams, total, copy):
        await back.capture(bench, each, await bench.last(each))
    before = {each: await back.contents(bench, each) for each in (*streams, total)}
    # Not with the short leases of the bench: a drill ends if a busy machine lets its own expire.
    config = configuration(bench, *feeds, lease_bucket="DRILLS", lease_ttl="10s")
    drilled = (await ran("drill", "-c", str(config), SITE, "--all", "--json", code=3)).json()["streams"]
    assert {each["stream"]: each["state"] for each in drilled} == {
        **dict.fromkeys((*streams, total, copy), "drilled"), sampled["stream"]: "skipped",
    }  # fmt: skip
    assert (await bench.client.api("STREAM.NAMES", {"subject": f"{RESTORE_PREFIX}>"}))["total"] == 0
    for each in (*streams[:2], total, sampled["stream"], copy):
        await bench.delete_stream(each)

    words = ("restore", "-c", str(config), SITE, "--all", "--allow-elsewhere")
    planned = (await ran(*words, "--dry-run", "--json", code=1)).json()["streams"]
    states = dict.fromkeys((*streams[:2], total), "planned") | {streams[2]: "there", sampled["stream"]: "skipped"}
    assert {each["stream"]: each["state"] for each in planned} == states | {copy: "failed"}
    effects = [each["report"]["elsewhere"] for each in planned if each["stream"] == total]
    assert effects == [[f"sources: takes messages from stream {each!r}" for each in streams[:2]]]
    done = await ran(*words, "--json", code=1)
    assert {each["stream"]: each["state"] for each in done.json()["streams"]} == {
        each: "restored" if state == "planned" else state for each, state in (states | {copy: "failed"}).items()
    }
    assert f"\n{total}: note: source {streams[0]}: continues after 40, its newest archived message" in done.err
    for each in streams[:2]:  # nothing of them comes twice
        await bench.publish(each, [b"next"])
    await soon(lambda: bench.reaches(total, 82))
    assert [m.payload for m in (await back.contents(bench, total))[80:]] == [b"next"] * 2
    assert {each: (await back.contents(bench, each))[: len(before[each])] for each in before} == before
    again = await ran(*words[:-1], code=1)  # a stream that is back needs no permission
    assert f"site {SITE}: 1 failed, 1 skipped, 4 there" in again.out
    assert "the feed is sampled" in again.out
    assert f"[E-RESTORE-SOURCE] stream {copy}: source {sampled['stream']} is not back" in again.out


async def test_what_is_not_one_site_is_refused_and_a_stream_without_a_message_comes_back_empty(bench: Bench) -> None:
    empty, late = await bench.make_stream(unique("E")), await bench.filled([b"x"])
    async with bench.egress({"stream": empty}, {"stream": late}):
        await bench.archived_to(late, 1)
        await soon(lambda: bench.chains.read_chain(bench.chain(empty)) is not None)
    for each in (empty, late):
        await bench.delete_stream(each)
    config, until = str(configuration(bench, {"stream": empty})), (SITE, "--all", "--until", "2026-01-01T00:00:00Z")
    nothing = "no message comes back: an empty stream, which continues at 1"
    for words, text in (
        ((SITE,), "expected SITE/FEED, or SITE with --all"),
        ((f"{SITE}/X", "--all"), "expected SITE/FEED, or SITE with --all"),
        ((SITE, "--all", "--as", "Y"), "--all: expected no option for one stream"),
        (("nowhere", "--all", "--dry-run"), f"expected a site with an archive, found {SITE}"),
        ((*until, "--dry-run"), f"\n  {nothing}\n"),
        (until, f"restored  {empty}  (feed {empty}): {nothing}\n"),
        (until, f"skipped   {late}  (feed {late}): {SITE}/{late}/0000: expected a point in time after its first"),
    ):
        done = await ran("restore", "-c", config, *words, code=3 if "--until" in words else 2)
        assert text in done.err + done.out
    assert "expected SITE/FEED, or SITE with --all" in (await ran("drill", "-c", config, SITE, code=2)).err


async def test_at_a_point_in_time_the_incarnation_that_was_the_stream_then_comes_back(bench: Bench) -> None:
    stream = await bench.begun([b"before"] * 3)
    moment = format_time(time.time_ns())
    await bench.recreate(stream, [b"after"])
    later = bench.chain(stream).next_incarnation()
    async with bench.egress({"stream": stream}):
        await soon(lambda: bench.store.table(later).end == 1)
    document = bench.chains.read_stream(later)
    assert (document and document.stream_first) == 1
    await bench.delete_stream(stream)
    words = ("restore", "-c", str(configuration(bench, {"stream": stream})), SITE, "--all", "--until", moment)
    done = await ran(*words)
    assert f"{stream}: note: incarnation 0000 was the newest then" in done.err
    assert [message.payload for message in await back.contents(bench, stream)] == [b"before"] * 3
    assert f"site {SITE}: 1 there" in (await ran(*words)).out


async def test_streams_that_source_from_each_other_come_back_with_each_message_once(
    alone: tuple[Bench, NatsServer],
) -> None:
    bench, _ = alone
    names = unique("X"), unique("Y")
    for name, other in (names, names[::-1]):
        sources = [{"name": other, "filter_subject": f"{other}.>"}]
        await create_stream(bench.client, {"name": name, "subjects": [f"{name}.>"], "sources": sources})
    for name in names:
        await bench.publish(name, [b"%d" % number for number in range(30)])
    for name in names:
        await soon(lambda: bench.reaches(name, 60))  # noqa: B023
    async with bench.egress(*({"stream": each} for each in names)):
        for name in names:
            await bench.archived_to(name, 60)
    for name in names:
        await back.capture(bench, name, 60)
    before = [await back.contents(bench, name) for name in names]
    for name in names:
        await bench.delete_stream(name)
    config = str(configuration(bench, *({"stream": each} for each in names)))
    done = await ran("restore", "-c", config, SITE, "--all", "--allow-elsewhere")
    assert f"source {names[1]} comes back in the same run: continues after " in done.err
    for name in names:
        await bench.publish(name, [b"next"])
    for name in names:
        await soon(lambda: bench.reaches(name, 62))  # noqa: B023
    await asyncio.sleep(2)
    assert [await bench.last(name) for name in names] == [62, 62]
    assert [(await back.contents(bench, name))[:60] for name in names] == before
