"""`floe egress run --workers N`: several processes that look like one from outside."""

import asyncio
import json
import os
import re
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from common.nats.kv import KeyValue, state_key
from infra.local.process import free_port
from tests.scenarios.processes import Service
from tests.support.basics import PATIENCE, eventually, soon, unique
from tests.support.commands import configuration, floe
from tests.support.egress import SITE, Bench


class Parent:
    """A parent process and its monitor."""

    def __init__(self, service: Service, port: int) -> None:
        self.service, self.port = service, port

    def page(self, path: str) -> tuple[int, str]:
        """Status and body; 0 if there is no answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def workers(self) -> dict[str, Any]:
        status, body = self.page("status")
        return json.loads(body)["workers"] if status == 200 else {}

    def pids(self) -> list[int]:
        return [worker["pid"] for worker in self.workers().values()]

    def parts(self) -> list[dict[str, Any]]:
        """The parts that /status shows, of each worker."""
        return [worker.get("parts", {}) for worker in self.workers().values()]

    async def answer(self, path: str, status: int) -> str:
        """The page of this path, once it has this status."""

        async def found() -> str:
            assert self.service.runs(), self.service.tail()
            answered, text = await asyncio.to_thread(self.page, path)
            return text if answered == status else ""

        return await soon(found, every=0.2)

    async def ended(self) -> int:
        return await asyncio.to_thread(self.service.wait, PATIENCE)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.service.log.read_text().splitlines() if line.startswith("{")]


def config_of(bench: Bench, feeds: list[str], stream: str, port: int, max_age: str = "1s", **egress: Any) -> Path:
    settings = [{"name": name, "stream": stream, "segment": {"max_age": max_age}} for name in feeds]
    return configuration(bench, *settings, monitor={"listen": f"127.0.0.1:{port}"}, **egress)


@contextmanager
def parent(config: Path, port: int, *options: str) -> Iterator[Parent]:
    running = Parent(Service(config.parent, "parent", "egress", "run", "-c", str(config), *options).start(), port)
    try:
        yield running
    finally:
        pids = running.pids() if running.service.runs() else []
        running.service.kill()
        for pid in filter(None, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def blocked(config: Path) -> Iterator[Callable[[int], None]]:
    """Let a process that reads this configuration wait until the function that this yields is called with its id."""
    text = config.read_text()
    config.unlink()
    os.mkfifo(config, 0o600)
    writing = os.open(config, os.O_RDWR)  # without a writer, a reader would find an empty file at once

    def is_read_by(pid: int) -> bool:
        with suppress(FileNotFoundError):  # a file that was closed meanwhile
            return str(config) in [os.path.realpath(each) for each in Path(f"/proc/{pid}/fd").iterdir()]
        return False

    def let_go(pid: int) -> None:
        eventually(lambda: is_read_by(pid))
        os.write(writing, text.encode())
        os.close(writing)

    yield let_go
    config.unlink()
    config.write_text(text)


async def feeds_of(bench: Bench, count: int = 4) -> tuple[str, list[str]]:
    return await bench.filled([b"x"] * 30), [unique("F") for _ in range(count)]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@asynccontextmanager
async def two_workers(bench: Bench, **egress: Any) -> AsyncIterator[tuple[Parent, list[str], list[int]]]:
    """A ready parent of two workers, its feeds, and the processes of its workers."""
    (stream, names), port = await feeds_of(bench, 2), free_port()
    with parent(config_of(bench, names, stream, port, workers=2, **egress), port) as running:
        await running.answer("readyz", 200)
        yield running, names, await asyncio.to_thread(running.pids)


async def leases_left(bench: Bench, names: list[str]) -> list[str]:
    kv = await KeyValue(bench.client, bench.lease_bucket, ttl=2.0).ensure()
    keys = [state_key("egress", SITE, name, "0") for name in names]
    return [key for key in keys if await kv.get(key) is not None]


async def seen(check: Callable[[], bool]) -> None:
    """Wait until `check`, which asks for pages, is true."""
    await soon(lambda: asyncio.to_thread(check), every=0.2)


async def test_two_workers_share_the_feeds_look_like_one_from_outside_and_flush_at_a_signal(bench: Bench) -> None:
    (stream, names), port = await feeds_of(bench), free_port()
    config = config_of(bench, names, stream, port, "1h", workers=2)
    with parent(config, port) as running:

        def has_opened(last: int) -> bool:
            """Return True if each worker shows an open segment up to `last` of each of its two feeds."""
            opened = [[part.get("open_segment") for part in parts.values()] for parts in running.parts()]
            return [[each["last"] for each in found if each] for found in opened] == [[last] * 2] * 2

        await running.answer("readyz", 200)
        # A late worker gets its two feeds from the other one, which may have archived some of them.
        await seen(lambda: [len(parts.get("sharing", {}).get("held", [])) for parts in running.parts()] == [2, 2])
        await bench.publish(stream, [b"y"] * 30)
        await seen(lambda: has_opened(60))
        await seen(lambda: running.page("metrics")[1].count("floe_egress_open_segment_messages{") == 8)
        running.service.send(signal.SIGUSR1)
        for name in names:
            await bench.archived_to(name, 60)
        await bench.publish(stream, [b"z"] * 30)
        await seen(lambda: has_opened(90))
        done = await floe("egress", "flush", "-c", str(config), "--json")
        assert (done.code, [row["last"] for row in done.json()]) == (0, [90] * 4)

        def counted() -> str:
            """Return the metrics once they are of both workers, with all that these have archived."""
            page = running.page("metrics")[1]
            rows = re.findall(r'^floe_egress_messages_total\{worker="(\d)".*\} (.*)$', page, re.MULTILINE)
            sums = [sum(float(count) for each, count in rows if each == worker) for worker in "01"]
            return page if sum(sums) == 360 and min(sums) >= 120 else ""

        page = await soon(lambda: asyncio.to_thread(counted), every=0.2)
        assert page.count("# TYPE floe_egress_messages_total counter") == 1
        assert 'floe_egress_worker_running{worker="1"} 1.0' in page
        assert not re.search(r"^floe_egress_share\{site", page, re.MULTILINE), "the parent has no feeds"
        await running.answer("healthz", 200)
        await bench.publish(stream, [b"open"] * 30)
        await seen(lambda: has_opened(120))  # what is open is stored at the end
        pids = await asyncio.to_thread(running.pids)
        for pid in (*pids, running.service.pid):  # as a supervisor does: the parent forwards its own signal, too
            os.kill(pid, signal.SIGTERM)
        assert await running.ended() == 0
    assert all(map(is_gone, pids))
    assert await leases_left(bench, names) == []
    lines = running.lines()
    assert {line["instance"] for line in lines} == {socket.gethostname()}
    for action in ("process_started", "process_ended"):
        assert {line.get("worker") for line in lines if line.get("action") == action} == {0, 1, None}
    assert sum(line["rows"] for line in lines if line.get("action") == "segment_put") == 480
    for name in names:
        await bench.same(name, stream)


async def test_a_worker_that_is_killed_vanishes_from_the_page_and_is_started_again(bench: Bench) -> None:
    (stream, names), port = await feeds_of(bench), free_port()
    config = config_of(bench, names, stream, port)
    with parent(config, port, "--workers", "2") as running:
        await running.answer("readyz", 200)
        before = await asyncio.to_thread(running.pids)
        with blocked(config) as let_go:
            os.kill(before[1], signal.SIGKILL)
            await seen(lambda: running.workers().get("1", {}).get("pid", 0) not in (0, before[1]))
            await running.answer("readyz", 503)
            assert 'worker="1",' not in await running.answer("metrics", 200)
            await running.answer("healthz", 200)  # as soon as the other one answers in time
            await asyncio.to_thread(let_go, running.workers()["1"]["pid"])
            await running.answer("readyz", 200)
        await bench.publish(stream, [b"y"] * 30)
        for name in names:
            await bench.archived_to(name, 60)
        assert 'floe_egress_worker_restarts_total{worker="1"} 1.0' in await running.answer("metrics", 200)
        running.service.send(signal.SIGINT)
        assert await running.ended() == 0
    for name in names:
        await bench.same(name, stream)


async def test_workers_end_when_their_parent_was_killed(bench: Bench) -> None:
    async with two_workers(bench) as (running, names, pids):
        running.service.kill()
        await soon(lambda: all(map(is_gone, pids)))
    assert await leases_left(bench, names) == []


async def test_a_worker_that_hangs_is_shown_as_such_waited_for_and_killed_by_a_second_signal(bench: Bench) -> None:
    async with two_workers(bench, shutdown_timeout="1h") as (running, _, pids):
        os.kill(pids[0], signal.SIGSTOP)

        async def shows_one_of_two() -> bool:
            health, metrics = await running.answer("healthz", 503), await running.answer("metrics", 200)
            return health == "worker 0: no answer\n" and 'worker="1",' in metrics

        await soon(shows_one_of_two)  # the other one may be slow, too
        running.service.send(signal.SIGTERM)
        await soon(lambda: is_gone(pids[1]))
        assert running.service.runs()
        running.service.send(signal.SIGTERM)
        assert await running.ended() == 143
        await soon(lambda: all(map(is_gone, pids)))


async def test_an_error_that_repeats_ends_all_workers(bench: Bench) -> None:
    stream, port = await bench.make_stream(unique("T")), free_port()
    assert (await KeyValue(bench.client, bench.lease_bucket, ttl=77.0).ensure()).ttl == 77.0
    with parent(config_of(bench, ["A"], stream, port, workers=2), port) as running:
        assert await running.ended() == 78
        assert "E-KV-TTL" in running.service.tail()
