"""How the service goes on after a stop, and how it ends: step by step, within its time."""

from __future__ import annotations

import asyncio
import io
import json
import os
import time
from pathlib import Path

import pytest

from common.chain import Chain
from common.jetstream.client import FloeClient
from common.logs import configure, flush
from common.metrics import REGISTRY
from common.tasks import Stop
from infra.local.nats import NatsServer
from tests.support.basics import PATIENCE, soon
from tests.support.commands import floe
from tests.support.ingress import Archive, Centre, check_exact, rows_of
from tests.support.proxies import TcpProxy

pytestmark = [pytest.mark.servers, pytest.mark.simulated]


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    archive = Archive(tmp_path / "store")
    archive.put(rows_of(1, 30))
    return archive


@pytest.mark.real
async def test_a_stopped_target_goes_on_without_a_restart_once_it_is_mended(centre: Centre, client: FloeClient) -> None:
    log = io.StringIO()
    configure("info", "json", stream=log)
    async with centre.running() as health:
        await centre.carried(client, 30)
        await client.api(f"STREAM.DELETE.{centre.target}")
        centre.archive.put(rows_of(31, 40))
        await soon(lambda: centre.status(health).get("state") == "stopped")
        status = centre.status(health)
        assert status["code"] in ("E-TARGET-GONE", "E-TARGET-RECREATED")
        assert "floe checkpoint set" in status["hint"]
        assert any(centre.target in problem for problem in health.problems())
        assert REGISTRY.get_sample_value("floe_ingress_stopped", {"target": centre.target}) == 1
        assert health.problems()

        command = ["checkpoint", "set", "-c", str(centre.write()), "--target", centre.target, "--forget"]
        result = await floe(*command, "--yes", env={**os.environ})  # the log of this process is that of the service
        assert result.code == 0, result
        check_exact(await centre.carried(client, 40), centre.archive, centre.prefix)
        await soon(lambda: not health.problems())
        assert REGISTRY.get_sample_value("floe_ingress_stopped", {"target": centre.target}) == 0
    flush()
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    actions = [line["action"] for line in lines if line.get("target", centre.target) == centre.target]
    told = ["started", "goes_on", "target_stopped", "over", "ended"]
    assert [action for n, action in enumerate(actions) if action in told and action not in actions[:n]] == told
    first, last = (next(line for line in lines if line["action"] == action) for action in ("started", "ended"))
    assert first["targets"] == [centre.target]
    assert last["messages"] == 70
    begins = [line for line in lines if line["action"] == "goes_on"]
    assert (begins[0]["chains"], begins[0]["target_sequence"]) == ({}, 0)


@pytest.mark.real
async def test_a_target_that_does_not_answer_ends_the_drain_in_time(
    client: FloeClient, tmp_path: Path, archive: Archive, nats_server: NatsServer, nats_url: str
) -> None:
    archive.put(rows_of(31, 3000))
    centre = Centre(tmp_path, archive, nats_url, publisher="single")
    async with TcpProxy(nats_server.port) as proxy:
        centre.urls = [proxy.url]
        stop = Stop()
        task = asyncio.create_task(centre.run(stop, shutdown_timeout="2s"))
        await centre.carried(client, 40)
        proxy.blackhole()
        began = time.monotonic()
        stop.set()
        await asyncio.wait_for(task, PATIENCE)
        took = time.monotonic() - began
        print(f"drained from a server that does not answer in {took:.1f} s")
        assert took < 60
        proxy.heal()
        centre.urls = [nats_url]
        async with centre.running():
            messages = await centre.carried(client, 100)
    sequences = [each.message.sequence for each in messages]
    assert sequences == list(range(1, len(sequences) + 1))


async def test_the_status_shows_phases_publisher_and_what_stops(client: FloeClient, centre: Centre) -> None:
    other = Chain("eu-west", "NODES")
    centre.archive.put(rows_of(1, 10, other), chain=other)
    centre.archive.put(rows_of(21, 30, other), chain=other)
    config = centre.write()

    async def shown(code: int = 0) -> dict[str, tuple[str, str, str]]:
        result = await floe("status", "-c", str(config), "--json")
        assert result.code == code, result
        return {row["site"]: (row["phase"], row["publisher"], row["why"]) for row in result.json()}

    async with centre.running():
        await centre.carried(client, 40)
    found = await shown()
    assert found["us-east"] == ("idle", "fast", "")
    assert found["eu-west"] == ("late", "fast", "11..20 is missing")
    await client.api(f"STREAM.DELETE.{centre.target}")
    found = await shown(3)
    assert {phase for phase, _, _ in found.values()} == {"stopped"}
    assert "E-TARGET-GONE: target " in found["us-east"][2]
    assert "floe checkpoint set -c " in found["us-east"][2], "with the command that lets it go on"
