"""A sampled feed over a real server: what it keeps, tells and knows again after a stop."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from common.errors import Unavailable
from common.jetstream.api import create_stream
from common.jetstream.headers import Provenance
from common.jetstream.lease import Lease, Leases
from common.segments.segment import Message
from common.tasks import StopReason
from egress import metrics
from egress.advisories.advisory import parse
from egress.init import initialise
from infra.oracle import read_stream
from tests.support.basics import PATIENCE, counted, soon, unique
from tests.support.egress import SITE, Bench
from tests.support.headers import escape
from tests.support.stores import FaultyStore

pytestmark = pytest.mark.simulated


async def make(bench: Bench, **more: Any) -> dict[str, Any]:
    """A stream, a stream for reliable advisories whose duplicate window is no help, and a feed of both."""
    name = await bench.make_stream(unique("T"))
    config = {"name": f"{name}_ADV", "subjects": [f"{name}_ADV.>"], "storage": "memory"}
    await create_stream(bench.client, {**config, "duplicate_window": 100_000_000})
    return {
        "stream": name,
        "inspect_field": "id",
        "inspect_duration": "60s",
        "snapshot_interval": "1h",
        "advisory": {"subject": f"{name}_ADV.%s.%v", "reliable": True},
        **more,
    }


def documents(names: Iterable[str]) -> list[bytes]:
    return [json.dumps({"id": name}).encode() for name in names]


NODES = [f"n{number}" for number in range(10)]


async def send(bench: Bench, feed: dict[str, Any], names: Iterable[str]) -> int:
    """Publish a document of each; the last sequence."""
    await bench.publish(feed["stream"], documents(names))
    return await bench.last(feed["stream"])


async def freeze(bench: Bench, feed: dict[str, Any]) -> None:
    """Run egress until everything is archived, and drain it."""
    async with bench.egress(feed):
        await bench.archived_to(feed["stream"], await bench.last(feed["stream"]))


def kept(bench: Bench, feed: dict[str, Any]) -> list[int]:
    """The sequences of the rows; fails unless the archive accounts for all sequences."""
    bench.check(feed["stream"])
    return [message.sequence for message in bench.messages(feed["stream"])]


async def told(bench: Bench, feed: dict[str, Any]) -> Counter[tuple[str, str]]:
    """How often each event of each value is stored."""
    stored: list[Message] = []
    await read_stream(bench.client, f"{feed['stream']}_ADV", stored.append)
    found = [parse(message.payload) for message in stored]
    return Counter((document.event, document.value) for document in found if document is not None)


def once(event: str, names: Iterable[str]) -> Counter[tuple[str, str]]:
    return Counter((event, name) for name in names)


def states(bench: Bench) -> list[Path]:
    """The snapshots in the bucket, oldest position first."""
    return sorted((bench.root / "bucket").rglob("state/*-*"))


def rebuilt(feed: dict[str, Any], reason: str) -> float:
    return counted(metrics.sampler_rebuilt.labels(SITE, feed["stream"], 0, reason))


async def test_a_stretch_of_which_nothing_is_kept_becomes_an_empty_segment(bench: Bench) -> None:
    feed = await make(bench)
    async with bench.egress(feed):
        await bench.archived_to(feed["stream"], await send(bench, feed, NODES))
        await bench.archived_to(feed["stream"], await send(bench, feed, NODES))
    assert kept(bench, feed) == list(range(1, 11))
    last = bench.footers(feed["stream"])[-1]
    assert (last.rows, last.ledger.to_json(), last.coverage.last) == (0, {"sampled_out": 10}, 20)
    assert last.tip is not None
    assert last.sampling is not None
    assert last.sampling["inspect_field"] == "id"
    assert last.sampling_digest


async def begun(bench: Bench, *, crashes: bool = False) -> dict[str, Any]:
    """A feed that has copied and reported every node, and ended."""
    feed = await make(bench)
    running = bench.start(bench.settings(feed))
    await bench.archived_to(feed["stream"], await send(bench, feed, NODES))
    await soon(lambda: _has_told(bench, feed, 10))
    await (running.crash() if crashes else running.drain())
    return feed


async def goes_on(bench: Bench, feed: dict[str, Any], why: str = "") -> None:
    """Fails unless only what is new is copied and reported, and the sampler was built again for this reason only."""
    await send(bench, feed, [*NODES, "another"])
    await freeze(bench, feed)
    assert kept(bench, feed) == [*range(1, 11), 21]
    assert await told(bench, feed) == once("new", [*NODES, "another"])
    assert [each for each in ("settings", "source", "damaged") if rebuilt(feed, each)] == ([why] if why else [])


async def _has_told(bench: Bench, feed: dict[str, Any], count: int) -> bool:
    return await bench.last(f"{feed['stream']}_ADV") >= count


@pytest.mark.parametrize("crashes", [False, True])
async def test_after_a_clean_stop_nothing_is_read_again_and_after_a_crash_what_is_behind_the_last_snapshot(
    bench: Bench, crashes: bool
) -> None:
    feed = await begun(bench, crashes=crashes)
    assert states(bench)[-1].name.startswith(f"{1 if crashes else 11:020d}-")
    if not crashes:
        await bench.client.api(f"STREAM.PURGE.{feed['stream']}")
    await goes_on(bench, feed)


async def test_other_settings_build_the_sampler_again_without_a_storm(bench: Bench) -> None:
    feed = await begun(bench)
    await goes_on(bench, {**feed, "inspect_duration": "50s"}, "settings")
    assert len({footer.sampling_digest for footer in bench.footers(feed["stream"])}) == 2


async def test_a_source_that_has_moved_on_builds_it_again_without_a_storm(bench: Bench) -> None:
    feed = await begun(bench, crashes=True)
    await bench.client.api(f"STREAM.PURGE.{feed['stream']}")
    await goes_on(bench, feed, "source")


@pytest.mark.parametrize("all_of_them", [False, True])
async def test_a_damaged_snapshot_gives_way_to_an_older_one_or_the_archive(bench: Bench, all_of_them: bool) -> None:
    feed = await begun(bench)
    damaged = [path for path in states(bench) if all_of_them or path.name.startswith(f"{11:020d}-")]
    assert (len(damaged) == len(states(bench))) is all_of_them
    for path in damaged:
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    await goes_on(bench, feed, "damaged" if all_of_them else "")


async def test_silence_in_an_idle_stream_is_told_once_whatever_crashes(bench: Bench) -> None:
    feed = await make(bench, inspect_duration="6s", warn_duration="1s")
    await send(bench, feed, NODES)
    for _ in range(2):
        running = bench.start(bench.settings(feed))
        await soon(lambda running=running: running.state(feed["stream"]) == "reading")
        await soon(lambda: _has_told(bench, feed, 20))
        await asyncio.sleep(1.0)  # for the second one to tell anything again
        await running.crash()
    # On a busy machine some may have expired already.
    assert await told(bench, feed) - once("expire", NODES) == once("new", NODES) + once("timeout", NODES)
    async with bench.egress(feed):
        await soon(lambda: _has_told(bench, feed, 30))
    assert await told(bench, feed) == once("new", NODES) + once("timeout", NODES) + once("expire", NODES)


async def test_silence_is_told_in_a_filtered_feed_though_its_stream_is_busy(bench: Bench) -> None:
    feed = await make(bench, inspect_duration="3s", warn_duration="1s")
    feed["filter_subject"] = f"{feed['stream']}.a"
    await send(bench, feed, NODES)

    async def others() -> None:
        while True:
            await bench.publish(feed["stream"], documents(NODES), subject="b")
            await asyncio.sleep(0.02)

    load = asyncio.create_task(others())
    async with bench.egress(feed):
        await soon(lambda: _has_told(bench, feed, 30))
    load.cancel()
    await asyncio.wait({load})
    assert await told(bench, feed) == once("new", NODES) + once("timeout", NODES) + once("expire", NODES)


async def test_what_was_too_old_for_a_crashed_session_does_not_count_as_a_copy_later(bench: Bench) -> None:
    """The first session leaves the oldest message out because of the newest one that the source held; a later
    one must know that, or it takes the value for copied and the archive never holds it."""
    feed = await make(bench, max_age="1s")
    await send(bench, feed, ["a"])
    await asyncio.sleep(1.3)
    await send(bench, feed, ["b"])
    running = bench.start(bench.settings(feed))
    await bench.archived_to(feed["stream"], 2)
    await running.crash()
    await send(bench, feed, ["a", "b"])
    await freeze(bench, feed)
    assert kept(bench, feed) == [2, 3]
    assert bench.ledger(feed["stream"]) == {"sampled_out": 1, "too_old": 1}


async def test_a_relay_leaves_out_what_came_from_this_site(bench: Bench) -> None:
    feed = await make(bench, relay=True)
    await bench.publish(feed["stream"], documents(["a"]), headers=_hop(SITE))
    await bench.publish(feed["stream"], documents(["a"]), headers=_hop("elsewhere"))
    await freeze(bench, feed)
    assert kept(bench, feed) == [2]
    assert bench.ledger(feed["stream"]) == {"looped": 1}


def _hop(site: str) -> bytes:
    return escape(None, Provenance(site, "FEED", 0, 0, 7, 1))


async def test_snapshots_that_cannot_be_written_hold_nothing_up(bench: Bench) -> None:
    feed = await make(bench, snapshot_interval="1s")
    await send(bench, feed, NODES)
    await freeze(bench, feed)
    before = len(states(bench))
    failed = metrics.snapshots.labels(SITE, feed["stream"], "0", "failed")
    objects = FaultyStore(bench.objects).on("put_if_absent", _no_snapshots)
    async with bench.egress(feed, objects=objects):  # type: ignore[arg-type]
        async with asyncio.timeout(PATIENCE):
            while not counted(failed):
                await bench.archived_to(feed["stream"], await send(bench, feed, NODES))
        await bench.archived_to(feed["stream"], await send(bench, feed, ["another"]))
    assert len(states(bench)) == before
    await freeze(bench, feed)
    assert kept(bench, feed) == [*range(1, 11), await bench.last(feed["stream"])]


def _no_snapshots(real: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    if "/state/" in key:
        raise Unavailable("the store takes no snapshots")
    return real(key, *args, **kwargs)


async def test_a_lease_to_be_given_back_goes_at_the_end_of_a_segment(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases: list[Lease] = []
    acquire = Leases.acquire

    async def noted(self: Leases, key: str) -> Lease | None:
        lease = await acquire(self, key)
        leases.extend([lease] if lease else [])
        return lease

    monkeypatch.setattr(Leases, "acquire", noted)
    feed = await make(bench, segment={"max_age": "1h", "max_messages": 15})
    async with bench.egress(feed):
        await send(bench, feed, NODES)
        await soon(lambda: _has_told(bench, feed, 10))
        leases[-1].give_back.set(StopReason.GIVE_BACK)
        await asyncio.sleep(0.3)
        assert bench.end(feed["stream"]) == 0
        await send(bench, feed, [f"m{number}" for number in range(8)])
        await bench.archived_to(feed["stream"], 18)
        assert [str(footer.coverage) for footer in bench.footers(feed["stream"])] == ["1..15", "16..18"]
        await soon(lambda: states(bench)[-1].name.startswith(f"{19:020d}-"))
    assert kept(bench, feed) == list(range(1, 19))


async def test_advisories_that_would_feed_themselves_stop_the_feed_before_it_begins(bench: Bench) -> None:
    name = unique("LOOP")
    await bench.make_stream(name, subjects=[f"{name}.>"])
    advisory = {"subject": f"{name}.adv.%s.%v", "reliable": False}
    feed = {"stream": name, "inspect_subject_token": -1, "inspect_duration": "60s", "advisory": advisory}
    await bench.publish(name, documents("ab"), subject="data")
    done, problems = await initialise(bench.client, bench.settings(feed))
    assert [problem.code for problem in problems] == ["E-ADVISORY-LOOP"]
    assert ("advisories", "refused") in [(each.what, each.result) for each in done]
    async with bench.egress(feed) as running:
        await soon(lambda: running.state(name) == "stopped")
        assert f"{name}.adv.new.>" in running.status(name)["why"]
    assert await bench.last(name) == 2
    assert bench.refs(name) == []
    feed["filter_subject"] = f"{name}.data"  # nothing has begun, so it may still be filtered
    async with bench.egress(feed):
        await bench.archived_to(name, 2)
    assert (await initialise(bench.client, bench.settings(feed)))[1] == []


async def test_a_feed_that_has_begun_stops_where_its_stream_takes_its_advisories_too(bench: Bench) -> None:
    feed = await make(bench)
    name = feed["stream"]
    feed["advisory"] = {"subject": f"{name}_OWN.%s", "reliable": False}
    await send(bench, feed, NODES)
    await freeze(bench, feed)
    config = (await bench.client.api(f"STREAM.INFO.{name}"))["config"]
    subjects = config["subjects"]
    await bench.client.api(f"STREAM.UPDATE.{name}", {**config, "subjects": [*subjects, f"{name}_OWN.*"]})
    async with bench.egress(feed) as running:
        await soon(lambda: running.state(name) == "stopped")
        assert f"{name}_OWN.new" in running.status(name)["why"]
        await bench.client.api(f"STREAM.UPDATE.{name}", {**config, "subjects": subjects})
        await soon(lambda: running.state(name) == "reading")
