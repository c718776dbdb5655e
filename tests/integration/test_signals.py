"""Signals to running services: SIGQUIT dumps stacks, SIGHUP reads the configuration again, SIGTERM drains; SIGUSR1 ends
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

from infra.demo.world import SPARK_CONF
from infra.local.process import kill_with_parent
from tests.scenarios.processes import Service
from tests.support.basics import PATIENCE, SharedS3, soon, unique
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
        text = self.service.log.read_text(errors="replace")
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


async def passes_through(running: Running, role: str, processes: int = 1) -> None:
    """Check the effect of each signal on a service. `processes`: its workers, and their parent."""
    service = running.service
    service.send(signal.SIGQUIT)
    await running.logged("stacks_dumped", processes)
    stacks = [frame for line in await running.logged("task_dumped", processes) for frame in line["stack"]]
    assert any(f"{role}/" in frame for frame in stacks), stacks
    await soon(lambda: any(line["thread"] == "MainThread" and line["stack"] for line in running.lines("thread_dumped")))

    running.configure(log={"level": "debug"}, **{role: {"shutdown_timeout": "17s", "lease_ttl": "3s"}})
    service.send(signal.SIGHUP)
    for line in await running.logged("configuration_reloaded", processes):
        assert (line["taken"], line["restart"]) == (["log.level"], 2)
    changes = {(line["key"], line["now"]) for line in running.lines("restart_required")}
    assert changes == {(f"{role}.shutdown_timeout", "17.0"), (f"{role}.lease_ttl", "3.0")}
    assert len(running.lines("restart_required")) == 2 * processes, "each is named once"

    running.configure(nats={"user": "floe", "password": "a-password-of-the-file"})
    service.send(signal.SIGHUP)
    await running.logged("configuration_reloaded", 2 * processes)
    changes = {(line["key"], line["before"], line["now"]) for line in running.lines("restart_required")}
    assert ("nats.password", None, "a secret") in changes
    assert not {key for key, _, _ in changes if ".nats." in key}
    hints = {line.get("hint") for line in running.lines("restart_required") if line["key"] == "nats.password"}
    assert hints == {"nats.password_file is read again without one"}
    assert "a-password-of-the-file" not in service.log.read_text()

    running.config.write_text("[")
    service.send(signal.SIGHUP)
    await running.logged("configuration_refused", processes)
    assert all(
        str(running.config) in line["error"] for line in await running.logged("configuration_problem_found", processes)
    )

    assert await asyncio.to_thread(service.drain) == 0, service.tail()


async def test_egress_and_its_workers_at_each_signal(bench: Bench, tmp_path: Path, services: list[Service]) -> None:
    stream = await bench.make_stream(unique("NODES"))
    config = configuration(bench, {"stream": stream})
    command = ["egress", "run", "-c", str(config), "--workers", "2"]
    running = Running(Service(tmp_path, "egress", *command).start(), config)
    services.append(running.service)
    await running.logged("members_changed", 2)
    await passes_through(running, "egress", processes=3)


async def test_ingress_at_each_signal(tmp_path: Path, nats_url: str, services: list[Service]) -> None:
    archive = Melted(tmp_path / "store")
    archive.put(rows_of(1, 5))
    config = Centre(tmp_path, archive, nats_url).write()
    running = Running(Service(tmp_path, "ingress", "ingress", "run", "-c", str(config)).start(), config)
    services.append(running.service)
    await running.logged("members_changed")
    running.service.send(signal.SIGUSR1)
    [line] = await running.logged("signal_ignored")
    assert (line["level"], line["event"]) == ("warning", "signal ignored")
    await passes_through(running, "ingress")


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
