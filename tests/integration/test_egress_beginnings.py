"""How a service begins, and an incarnation on a stream whose beginning moves, as most streams in production do."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, Refused
from common.jetstream.api import stream_info
from common.service.monitor import Health
from egress import service
from infra.local.nats import NatsServer
from tests.support.basics import at_length, soon, unique
from tests.support.commands import paste
from tests.support.egress import Bench, connected
from tests.support.egress_process import Process, processes

LIMITS: dict[str, dict[str, Any]] = {
    "max_msgs": {"max_msgs": 100},
    "max_age": {"max_age": 100_000_000},
    "history of keys": {"max_msgs_per_subject": 3},
}


@asynccontextmanager
async def load(bench: Bench, stream: str) -> AsyncIterator[None]:
    """Publish on ten subjects for the length of the block, whatever becomes of the stream."""
    done = asyncio.Event()

    async def publish() -> None:
        number = 0
        while not done.is_set():
            for _ in range(30):
                bench.client.send(b"PUB %b.%d 8\r\n%08d\r\n" % (stream.encode(), number % 10, number))
                number += 1
            await asyncio.sleep(0.01)

    publishing = asyncio.create_task(publish())
    try:
        yield
    finally:
        done.set()
        await publishing


async def moving(bench: Bench, stream: str, limits: dict[str, Any]) -> None:
    """Make the stream, and wait until its first sequence rises."""
    await bench.make_stream(stream, **limits)

    async def has_moved() -> bool:
        info = await stream_info(bench.client, stream)
        return info is not None and info.first_sequence > 100

    await soon(has_moved)


async def goes_on(bench: Bench, stream: str, incarnation: int = 0) -> None:
    """Wait until three more segments are there."""
    count = len(bench.refs(stream, incarnation))
    await soon(lambda: len(bench.refs(stream, incarnation)) >= count + 3)


def check(bench: Bench, stream: str, incarnation: int) -> None:
    document = bench.chains.read_chain(bench.chain(stream, incarnation))
    assert document is not None
    bench.check(stream, incarnation, document.first)
    assert set(bench.ledger(stream, incarnation)) <= {"gone_before_read", "deleted"}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
async def test_a_stream_at_its_limit_is_archived_from_the_first_start_on(bench: Bench, limits: dict[str, Any]) -> None:
    """Under load: ended in its first moments, started again, and made anew with such a beginning."""
    stream = unique("T")
    async with load(bench, stream):
        await moving(bench, stream, limits)
        running = bench.start(bench.settings({"stream": stream}))
        await soon(lambda: bench.chains.read_chain(bench.chain(stream)) is not None)
        await running.crash()
        async with bench.egress({"stream": stream}):
            await goes_on(bench, stream)
        await bench.delete_stream(stream)
        await moving(bench, stream, limits)
        async with bench.egress({"stream": stream}):
            await goes_on(bench, stream, 1)
    check(bench, stream, 0)
    check(bench, stream, 1)


async def test_a_feed_that_starts_at_the_end_begins_though_its_first_message_left_meanwhile(bench: Bench) -> None:
    stream = unique("T")
    async with load(bench, stream):
        await moving(bench, stream, LIMITS["max_msgs"])
        async with bench.egress({"stream": stream, "start_at_end": True}):
            await goes_on(bench, stream)
    check(bench, stream, 0)


@pytest.mark.parametrize(
    "point", ["egress.before_stream_document", at_length("egress.after_stream_document"), "egress.after_chain_document"]
)
async def test_killed_while_it_begins_what_left_the_stream_until_the_next_start_is_gone_before_read(
    bench: Bench, point: str
) -> None:
    stream = await bench.make_stream(unique("T"))
    await bench.publish(stream, [b"x"] * 50)
    with processes() as started:
        started.append(Process(bench, stream, failpoints=f"{point}=kill"))
        assert await started[0].ended() == -signal.SIGKILL, started[0].log.read_text()
    assert await bench.mark(stream) == 0
    await bench.client.api(f"STREAM.PURGE.{stream}", {"seq": 41})
    async with bench.egress({"stream": stream}, lease_ttl="1s"):
        await bench.archived_to(stream, 50)
    assert bench.ledger(stream) == ({} if point == "egress.before_stream_document" else {"gone_before_read": 40})
    check(bench, stream, 0)


def lose(bench: Bench, incarnation: int) -> None:
    """Segments and documents of an incarnation are there no more."""
    prefix = f"incarnation={incarnation:04d}/"
    for info in list(bench.objects.list("data/")):
        if prefix in info.key:
            bench.objects.delete(info.key)


@pytest.mark.parametrize("incarnation", [0, 1])
async def test_an_archive_that_was_lost_with_its_documents_is_not_taken_for_a_first_start(
    bench: Bench, incarnation: int
) -> None:
    """Though the stream has moved on behind the old mark; given up by the command of the hint."""
    stream = await bench.begun([b"x"] * 10)
    if incarnation:
        async with bench.egress({"stream": stream}):
            await bench.recreate(stream, [b"y"] * 10)
            await bench.archived_to(stream, 10, incarnation=1)
    await bench.client.api(f"STREAM.PURGE.{stream}")
    await bench.publish(stream, [b"later"] * 5)
    lose(bench, incarnation)
    async with bench.egress({"stream": stream}) as running:
        assert "a high-water mark at 10, and neither" in (await running.stopped(stream))["why"]
        assert bench.chains.read_stream(bench.chain(stream, incarnation)) is None
        await paste(bench, running.status(stream)["hint"], {"stream": stream})
        await bench.archived_to(stream, 15, incarnation)
    check(bench, stream, incarnation)


# The service waits for what is down, and ends at once for what an operator must mend


async def test_a_server_that_is_down_at_the_start_is_waited_for(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats")
    bench = Bench(server.url, tmp_path, None)  # type: ignore[arg-type]
    running = bench.start(bench.settings({"stream": "S"}))
    await soon(lambda: any(problem.startswith("nats: ") for problem in running.health.problems()))
    await running.drain()  # ends cleanly while it waits
    running = bench.start(bench.settings({"stream": "S"}))
    await soon(lambda: any(problem.startswith("nats: ") for problem in running.health.problems()))
    with server:
        bench.client = await connected(server.url)
        await bench.make_stream("S")
        await bench.publish("S", [b"x"] * 3)
        await bench.archived_to("S", 3)
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
    healths = list[Health]()

    def made(*given: Any) -> Any:
        seen.append(healths[0].problems())
        return make(*given)

    monkeypatch.setattr(service, "make_deps", made)
    running = bench.start(bench.settings({"stream": stream}))
    healths.append(running.health)
    await soon(lambda: running.state(stream) == "reading")
    assert seen == [["feeds: starting"]]
    assert running.health.problems() == []
    await running.drain()
