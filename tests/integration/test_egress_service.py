"""How egress begins: it waits for what is down, and ends at once for what an operator must mend."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, Refused
from common.service.monitor import Health
from egress import service
from infra.local.nats import NatsServer
from infra.local.process import free_port, spawn
from tests.integration.test_egress_workers import config_of
from tests.support.basics import PATIENCE, eventually, soon, unique
from tests.support.egress import Bench, connected

pytestmark = pytest.mark.simulated

ROOT = Path(__file__).parents[2]


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


async def test_a_bucket_that_does_not_exist_ends_the_start(far: Bench) -> None:
    far.store_config["url"] = "s3://no-such-bucket-here"
    with pytest.raises(ConfigError, match="no-such-bucket-here"):
        await far.start(far.settings({"stream": "S"})).task


@pytest.mark.real
async def test_the_command_runs_shows_its_state_and_drains(bench: Bench) -> None:
    stream, port = await bench.make_stream(unique("T")), free_port()
    await bench.publish(stream, [b"x"] * 10)
    config = config_of(bench, [stream], stream, port)
    process = spawn([sys.executable, "-m", "floe", "egress", "run", "-c", str(config)], cwd=ROOT, env=dict(os.environ))
    try:
        await bench.archived_to(stream, 10)
        line = f'floe_egress_messages_total{{feed="{stream}",partition="0",site="site"}} 10.0'
        await asyncio.to_thread(eventually, lambda: line in _page(port, "metrics"))
        part = json.loads(await asyncio.to_thread(_page, port, "status"))["parts"][f"egress {stream}"]
        assert (part["state"], part["incarnation"], part["holder"]) == ("reading", 0, "this instance")
        assert await asyncio.to_thread(_page, port, "readyz")
        assert Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text() == "", "no worker is needed"
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, PATIENCE) == 0
    finally:
        process.kill()
        process.wait()


def _page(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=PATIENCE) as answer:
        return str(answer.read().decode())


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
