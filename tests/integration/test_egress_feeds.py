"""Archived messages of a stream and their ledger; starts of a service; a stream with a moving beginning, as most in
production have.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.chain import Chain
from common.errors import ConfigError, Refused
from common.observe.monitor import BEAT_INTERVAL_S
from egress import service
from egress.deps import Tuning
from egress.evidence import StreamComparison
from egress.session import Session
from infra.local.nats import NatsServer
from tests.support.basics import cancelled, soon, unique
from tests.support.egress import SITE, Bench, connected


@pytest.mark.simulated
async def test_two_feeds_of_one_stream_are_independent(bench: Bench) -> None:
    stream = await bench.make_stream(unique("T"))
    other = unique("OTHER")
    none = {"name": unique("NONE"), "stream": stream, "filter_subject": f"{stream}.none"}
    feeds = {"stream": stream}, {"name": other, "stream": stream, "filter_subject": f"{stream}.*.b"}, none
    await bench.publish(stream, [b"a"] * 10, subject="a")
    await bench.publish(stream, [b"b"] * 5, subject="x.b")
    await bench.publish(stream, [b"a"] * 10, subject="a")
    async with bench.egress(*feeds):
        await bench.archived_to(stream, 25)
        await bench.archived_to(other, 25)
        await bench.archived_to(none["name"], 25)
    assert (bench.messages(none["name"]), bench.ledger(none["name"])) == ([], {"not_matched": 25})
    assert all(footer.tip is None for footer in bench.footers(none["name"])), "an empty segment"
    await bench.same(stream, stream)
    bench.check(other)
    assert [m.sequence for m in bench.messages(other)] == [11, 12, 13, 14, 15]
    assert bench.ledger(other) == {"not_matched": 20}
    assert bench.chains.read_chain(bench.chain(other)).filters == (f"{stream}.*.b",)


@pytest.mark.simulated
async def test_an_idle_feed_needs_no_timer_and_reads_no_message_again(bench: Bench, monkeypatch: Any) -> None:
    stream, ticks, tick = await bench.filled([b"x"]), list[Session](), Session._tick
    compared, compare = [], StreamComparison.compare
    monkeypatch.setattr(Session, "_tick", lambda session: (ticks.append(session), tick(session)))
    monkeypatch.setattr(StreamComparison, "compare", lambda *given: (compared.append(given), compare(*given))[1])
    async with bench.egress({"stream": stream, "segment": {"max_age": "2s"}}, tuning=Tuning()):
        await bench.archived_to(stream, 1)
        await asyncio.sleep(60)
        del ticks[:], compared[:]
        await asyncio.sleep(120)
        assert (0 < len(ticks) <= 20, compared) == (True, [])
        await bench.publish(stream, [b"y"])
        await asyncio.wait_for(bench.archived_to(stream, 2), 4)  # the segment closes at its age
        await soon(lambda: compared)


@pytest.mark.simulated
async def test_everything_purged_is_covered_by_a_heartbeat_and_unverified_until_more_comes(bench: Bench) -> None:
    stream = await bench.begun([b"x"] * 5)
    await bench.publish(stream, [b"x"] * 5)
    await bench.client.api(f"STREAM.PURGE.{stream}")
    async with bench.egress({"stream": stream}) as running:
        await bench.archived_to(stream, 10)
        await soon(lambda: running.status(stream).get("verdict") == "unverified")
        await bench.archive(stream, [b"later"] * 3, 13)
        await soon(lambda: running.status(stream).get("verdict") == "same")
    bench.check(stream)
    assert bench.ledger(stream) == {"gone_before_read": 5}


STARTS = [
    ({}, 1),
    ({"start_sequence": 4}, 4),
    ({"start_at_end": True}, 11),
    ({"start_sequence": 50}, 50),
    ({"start_time": "2000-01-01T00:00:00Z"}, 1),
    ({"start_delta": "1h"}, 1),
    ({"start_time": "2100-01-01T00:00:00Z"}, 11),
]


@pytest.mark.parametrize(("start", "first"), STARTS)
@pytest.mark.simulated
async def test_a_feed_begins_at_its_start_key_and_the_key_counts_once(bench, start: dict[str, object], first: int):
    stream = await bench.filled([b"x"] * 10)
    async with bench.egress({"stream": stream, **start}) as running:
        await soon(lambda: running.state(stream) == "reading")
        await bench.archive(stream, [b"x"] * 45, 55)
    async with bench.egress({"stream": stream, "start_sequence": 8}) as running:
        await soon(lambda: running.state(stream) == "reading")
    assert bench.chains.read_chain(bench.chain(stream)).first == first
    bench.check(stream, first=first)
    assert ([m.sequence for m in bench.messages(stream)], bench.ledger(stream)) == (list(range(first, 56)), {})


INVALID_CHANGES = [
    ({"filter_subject": "STREAM.b"}, "the filter STREAM.b"),
    ({"relay": True}, "the whole stream as a relay"),
    ({"partitions": ["STREAM.0.>", "STREAM.1.>"]}, "2 partitions (STREAM.0.>, STREAM.1.>)"),
]


@pytest.mark.parametrize(("now", "shown"), INVALID_CHANGES)
@pytest.mark.simulated
async def test_an_invalid_change_of_a_begun_chain_stops_it(bench: Bench, now: dict[str, Any], shown: str) -> None:
    stream = await bench.begun([b"x"])
    changed = yaml.safe_load(yaml.safe_dump(now).replace("STREAM", stream))
    async with bench.egress({"stream": stream, **changed}) as running:
        status = await running.stopped(stream)
        expected = f"begun with the whole stream, configured with {shown.replace('STREAM', stream)}"
        assert (status["code"], expected in status["why"]) == ("E-FILTERS", True), status
        assert "floe egress repartition" in status["hint"]
        assert running.health.problems()
    assert bench.chains.read_chain(Chain(SITE, stream, 0, 1)) is None


@pytest.mark.simulated
async def test_a_stopped_feed_leaves_the_others_alone_and_resumes_when_it_can(bench: Bench) -> None:
    stream, missing = await bench.make_stream(unique("T")), unique("MISSING")
    await bench.publish(stream, [b"x"] * 3)
    async with bench.egress({"stream": missing}, {"stream": stream}) as running:
        await soon(lambda: running.state(missing) == "stopped")
        await bench.archived_to(stream, 3)
        assert any("does not exist" in problem for problem in running.health.problems())
        await bench.make_stream(missing)
        await bench.archive(missing, [b"x"] * 3, 3)
        assert not running.health.problems()


# Beginnings


# Simulated worlds have streams at their limit too; there each feed starts at the beginning.
async def test_a_feed_that_starts_at_the_end_begins_though_its_first_message_left_meanwhile(bench: Bench) -> None:
    stream = await bench.filled([b"x"] * 150, max_msgs=100)

    async def load() -> None:
        while True:
            await bench.publish(stream, [b"x"] * 150)

    loading = asyncio.create_task(load())
    async with bench.egress({"stream": stream, "start_at_end": True}):
        await soon(lambda: len(bench.refs(stream)) >= 3)
    await cancelled(loading)
    bench.check(stream, first=bench.chains.read_chain(bench.chain(stream)).first)
    assert set(bench.ledger(stream)) <= {"gone_before_read", "deleted"}


# The service waits for an unavailable server, and ends at once on an error that an operator must fix


async def test_a_server_that_is_down_at_the_start_is_waited_for(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats")
    bench = Bench(server.url, tmp_path, None)  # type: ignore[arg-type]
    running = bench.start(bench.settings({"stream": "S"}))
    await soon(lambda: any(problem.startswith("nats: ") for problem in running.health.problems()))
    for _ in range(2):  # /healthz stays good, so no watchdog restarts the process
        await soon(lambda: running.health.beat_age() > BEAT_INTERVAL_S / 2)
        await soon(lambda: running.health.beat_age() < BEAT_INTERVAL_S / 2)
    await running.drain()  # ends cleanly while it waits
    running = bench.start(bench.settings({"stream": "S"}))
    await soon(lambda: any(problem.startswith("nats: ") for problem in running.health.problems()))
    with server:
        bench.client = await connected(server.url)
        await bench.make_stream("S")
        await bench.archive("S", [b"x"] * 3, 3)
        await running.drain()
        await bench.client.aclose()


async def test_a_refused_credential_ends_the_start(tmp_path: Path) -> None:
    with NatsServer(users={"floe": "right"}) as server:
        bench = Bench(server.url, tmp_path, None)  # type: ignore[arg-type]
        settings = bench.settings({"stream": "S"})
        with pytest.raises(Refused):
            await bench.start(settings).task


@pytest.mark.simulated
async def test_a_bucket_that_does_not_exist_ends_the_start(far: Bench) -> None:
    far.store_config["url"] = "s3://no-such-bucket-here"
    with pytest.raises(ConfigError, match="no-such-bucket-here"):
        await far.start(far.settings({"stream": "S"})).task


@pytest.mark.simulated
async def test_a_service_is_not_ready_before_its_feeds_exist(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, seen, make = await bench.make_stream(unique("T")), list[list[str]](), service.make_deps

    def made(*given: Any) -> Any:
        seen.append(running.health.problems())
        return make(*given)

    monkeypatch.setattr(service, "make_deps", made)
    running = bench.start(bench.settings({"stream": stream}))
    await soon(lambda: running.state(stream) == "reading")
    assert (seen, running.health.problems()) == ([["feeds: starting"]], [])
    await running.drain()
