"""Signals to running services: SIGQUIT dumps stacks, SIGHUP takes over the configuration, SIGTERM drains; SIGUSR1 ends
none.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.chain import Chain
from common.nats.client import FloeClient
from common.nats.kv import KeyValue
from egress.partition import lease_key
from infra.demo.world import SPARK_CONF
from infra.local.process import kill_with_parent
from tests.scenarios.processes import Service
from tests.support.basics import PATIENCE, SharedS3, soon
from tests.support.commands import ROOT, configuration
from tests.support.compaction import CHAIN, Archive, begun
from tests.support.egress import Bench
from tests.support.ingress import Archive as Melted
from tests.support.ingress import Centre, rows_of
from tests.support.proxies import silent_store

pytestmark = pytest.mark.servers


class Running:
    """A service, its configuration file, and the lines of its log as documents."""

    def __init__(self, service: Service, config: Path) -> None:
        self.service, self.config = service, config

    def lines(self, action: str) -> list[dict[str, Any]]:
        text, _, _ = self.service.log.read_text(errors="replace").rpartition("\n")  # the rest is being written
        found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        return [line for line in found if line.get("action") == action]

    async def logged(self, action: str, count: int = 1) -> list[dict[str, Any]]:
        """The lines of this action, once there are `count`."""

        def there() -> bool:
            assert self.service.runs(), self.service.tail()
            return len(self.lines(action)) >= count

        await soon(there, every=0.1)
        return self.lines(action)

    def configure(self, **sections: Any) -> None:
        document = yaml.safe_load(self.config.read_text())
        for name, section in sections.items():
            document[name] = {**document.get(name, {}), **section}
        self.config.write_text(yaml.safe_dump(document))


@pytest.fixture
def services() -> Iterator[list[Service]]:
    started: list[Service] = []
    yield started
    for each in started:
        each.kill()


async def passes_through(running: Running, role: str, new: str, entries: Any, wait: Any, processes: int = 1) -> None:
    """Check the effect of each signal on a service. `processes`: its workers, and their parent; `entries`: those of a
    reload, which starts `new`; `wait`: for the result.
    """
    service = running.service
    service.send(signal.SIGQUIT)
    await running.logged("stacks_dumped", processes)
    await soon(lambda: any(f"{role}/" in frame for line in running.lines("task_dumped") for frame in line["stack"]))
    await soon(lambda: any(line["thread"] == "MainThread" and line["stack"] for line in running.lines("thread_dumped")))

    former = running.config.read_text()
    running.configure(log={"level": "debug"}, **{role: {"shutdown_timeout": "17s", "lease_ttl": "3s"}})
    service.send(signal.SIGHUP)
    changes = {(line["key"], line["in_file"]) for line in await running.logged("reload_refused", 2 * processes)}
    assert changes == {(f"{role}.shutdown_timeout", "17.0"), (f"{role}.lease_ttl", "3.0")}

    running.configure(nats={"user": "floe", "password": "a-password-of-the-file"})
    service.send(signal.SIGHUP)
    lines = await running.logged("reload_refused", 6 * processes)
    changes = {(line["key"], line["in_use"], line["in_file"], line["hint"]) for line in lines}
    assert ("nats.password", None, "a secret", "nats.password_file is read again without one") in changes
    assert not {key for key, *_ in changes if ".nats." in key}
    assert "a-password-of-the-file" not in service.log.read_text()

    running.config.write_text("[")
    service.send(signal.SIGHUP)
    await running.logged("configuration_refused", processes)
    assert all(
        str(running.config) in line["error"] for line in await running.logged("configuration_problem_found", processes)
    )
    assert not running.lines("configuration_reloaded")

    running.config.write_text(former)
    running.configure(log={"level": "debug"}, **{role: entries})
    service.send(signal.SIGHUP)
    for line in await running.logged("configuration_reloaded", processes):
        assert (line["taken"], line["started"], line["ended"]) == (["log.level"], [new], [])
    await wait()
    assert await asyncio.to_thread(service.drain) == 0, service.tail()


async def test_egress_and_its_workers_at_each_signal(bench: Bench, tmp_path: Path, services: list[Service]) -> None:
    stream, other = await bench.filled([b"x"] * 3), await bench.filled([b"x"] * 3)
    config = configuration(bench, {"stream": stream}, shutdown_timeout="60s")

    async def is_divided() -> bool:
        """As at a start."""
        bucket = await KeyValue(bench.client, bench.lease_bucket, ttl=2.0).ensure()
        holders = [await bucket.get(lease_key(bench.chain(feed))) for feed in (stream, other)]
        return len({each.value for each in holders if each}) == 2

    async def taken_over() -> None:
        await bench.archived_to(other, 3)
        await soon(is_divided)

    command = ["egress", "run", "-c", str(config), "--workers", "2"]
    running = Running(Service(tmp_path, "egress", *command).start(), config)
    services.append(running.service)
    await running.logged("members_changed", 2)
    feeds = [{"stream": stream}, {"stream": other, "segment": {"max_age": "1s"}}]
    await passes_through(running, "egress", other, {"feeds": feeds}, taken_over, processes=3)
    await bench.archived_to(stream, 3)


async def test_ingress_at_each_signal(
    tmp_path: Path, nats_url: str, client: FloeClient, services: list[Service]
) -> None:
    archive = Melted(tmp_path / "store")
    archive.put(rows_of(1, 5))
    centre = Centre(tmp_path, archive, nats_url)
    config = centre.write()
    running = Running(Service(tmp_path, "ingress", "ingress", "run", "-c", str(config)).start(), config)
    services.append(running.service)
    await running.logged("members_changed")
    running.service.send(signal.SIGUSR1)
    [line] = await running.logged("signal_ignored")
    assert (line["level"], line["event"]) == ("warning", "signal ignored")
    archive.put(rows_of(1, 5, af := Chain("af", "NODES")), chain=af)
    sources = [*centre.target_settings["sources"], {"site": "af", "feed": "NODES", "subject_prefix": centre.target}]
    targets, started = {"targets": [{**centre.target_settings, "sources": sources}]}, f"{centre.target}: af/NODES"
    await passes_through(running, "ingress", started, targets, lambda: centre.carried(client, 10))


# Compaction has no event loop


def compacting(archive: Archive, services: list[Service], *options: str, **env: str) -> Running:
    config = archive.folder / "floe.yaml"
    level = {"from": 0, "to": 1, "min_age": "1m", "max_wait": "10m", "min_count": 3}
    document = {
        "store": {"url": f"file://{archive.folder}/store"},
        "spool_dir": str(archive.folder / "spool"),
        "compaction": {"levels": [level], "engine": "local", "spark": {"conf": SPARK_CONF}},
    }
    config.write_text(yaml.safe_dump(document))
    service = Service(archive.folder, "compact", "-v", "compact", "-c", str(config), *options).start(**env)
    services.append(service)
    return Running(service, config)


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    found = begun(tmp_path, CHAIN)
    for first in range(1, 40, 10):
        found.put(first, first + 9, age=700)
    return found


async def test_compaction_ends_in_order_and_the_next_run_resumes(archive: Archive, services: list[Service]) -> None:
    before = archive.read(CHAIN)
    running = compacting(archive, services, FLOE_FAILPOINTS="compaction.verify=sleep:10")
    service = running.service
    await running.logged("item_finished")  # merged, and not proved yet
    for number in (signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
        service.send(number)
    assert await asyncio.to_thread(service.wait, PATIENCE) == 75, service.tail()
    await soon(lambda: any(line["thread"] == "MainThread" and line["stack"] for line in running.lines("thread_dumped")))
    assert running.lines("signal_ignored")
    assert running.lines("configuration_reloaded")
    assert "error[E-UNAVAILABLE]: stopped by a signal before the end; finished work stays" in service.tail()
    again = compacting(archive, services).service
    assert await asyncio.to_thread(again.wait, PATIENCE) == 0, again.tail()
    assert any(each.startswith("1:") for each in archive.ranges())
    assert archive.read(CHAIN) == before


@pytest.mark.spark
async def test_compaction_under_spark_ends_in_order_while_it_merges(archive: Archive, services: list[Service]) -> None:
    env = {"FLOE_FAILPOINTS": "compaction.put=sleep:600"}  # in the executors
    running = compacting(archive, services, "--engine", "spark", "--master", "local[1]", **env)
    await running.logged("merge_started")  # Spark may be starting still
    running.service.send(signal.SIGTERM)
    assert await asyncio.to_thread(running.service.wait, PATIENCE) == 75, running.service.tail()
    assert "stopped by a signal before the end" in running.service.tail()


async def test_compaction_ends_though_the_store_never_answers(s3: SharedS3, tmp_path: Path) -> None:
    async with silent_store(s3, tmp_path, compaction={"engine": "local"}) as (config, line):
        hurried = (
            "import sys, compaction.cli; compaction.cli.STORE_SILENCE_S = 2.0; from floe import main; sys.exit(main())"
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", hurried, "compact", "-c", config, cwd=ROOT, stderr=asyncio.subprocess.PIPE
        )
        kill_with_parent(process.pid)
        await soon(lambda: line.accepted > 0)
        process.send_signal(signal.SIGTERM)
        _, err = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode == 75, err
    assert b"stopped by a signal; the store has not answered for 2 s" in err


async def test_a_second_signal_ends_compaction_at_once(archive: Archive, services: list[Service]) -> None:
    running = compacting(archive, services, FLOE_FAILPOINTS="compaction.verify=sleep:600")
    await running.logged("item_finished")
    running.service.send(signal.SIGTERM)
    await running.logged("stop_requested")
    running.service.send(signal.SIGTERM)
    assert await asyncio.to_thread(running.service.wait, PATIENCE) == 143
