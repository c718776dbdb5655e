"""Stops of ingress: verdict, exit code and choices; how it continues, shares its targets, and ends."""

import asyncio
import io
import json
import os
from pathlib import Path

import pytest

from common.clock import SystemClock
from common.errors import ConfigError
from common.logs import configure, flush
from common.nats.api import RESTORE_KEY, RESTORE_PREFIX
from common.nats.client import FloeClient
from common.observe.monitor import Health
from common.tasks import Stop
from infra.local.nats import NatsServer
from ingress.target import examine_target
from tests.support.basics import PATIENCE, metric_value, soon
from tests.support.commands import floe
from tests.support.ingress import OTHER, Archive, Centre, check_exact, closed_at, foreign, make, rows_of, update
from tests.support.proxies import TcpProxy

pytestmark = [pytest.mark.servers, pytest.mark.simulated]


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    archive = Archive(tmp_path / "store")
    archive.put(rows_of(1, 30))
    return archive


async def carry_once(centre: Centre, client: FloeClient) -> None:
    async with centre.running():
        await closed_at(client, centre, 30)


async def test_a_missing_or_dangerous_target_ends_with_what_to_do(centre: Centre, client: FloeClient) -> None:
    centre.having(create=None)
    missing = await centre.ending()
    assert missing.exit_code == 78
    assert missing.message == f"target {centre.target}: expected a stream, found none and no `create`"
    assert missing.hint.startswith(f"nats stream add {centre.target} --subjects '{centre.target}.>'")

    await make(client, centre, retention="workqueue", storage="memory")
    error = await centre.having(create={"subjects": [f"{centre.target}.>"]}).ending()
    assert isinstance(error, ConfigError)  # and so it has problems
    assert error.problems == (
        f"target {centre.target}: retention: expected limits (create), found workqueue",
        f"target {centre.target}: storage: expected file (create), found memory",
    )


async def test_a_lasting_foreign_writer_ends_with_exit_code_4(centre: Centre, client: FloeClient) -> None:
    async def write_on() -> None:
        while True:
            await foreign(client, centre)

    await carry_once(centre, client)
    writing = asyncio.create_task(write_on())
    error = await centre.ending()
    writing.cancel()
    assert (error.exit_code, error.code) == (4, "E-TARGET-SHARED")


async def test_one_stop_stops_no_other(client: FloeClient, tmp_path: Path, archive: Archive, nats_url: str) -> None:
    bad = Centre(tmp_path, archive, nats_url, create=None)
    good = Centre(tmp_path, archive, nats_url)
    targets = [*bad.document()["ingress"]["targets"], *good.document()["ingress"]["targets"]]
    health, stop = Health(SystemClock()), Stop()

    running = asyncio.create_task(good.run(stop, health, targets=targets))
    await good.carried(client, 30)
    assert any(bad.target in problem for problem in health.problems())
    stop.set()
    with pytest.raises(ConfigError):
        await asyncio.wait_for(running, PATIENCE)


# Continuing, and ending


@pytest.mark.real
async def test_a_gone_target_is_refilled(centre: Centre, client: FloeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingress.delivery.TARGET_CHECK_INTERVAL_S", 0.5)
    log = io.StringIO()
    configure("info", "json", stream=log)
    # A lease that is lost while the target is stopped, and the command takes the processor, hides the recovery.
    async with centre.running(lease_ttl="10s") as health:
        await closed_at(client, centre, 30)
        await client.api(f"STREAM.DELETE.{centre.target}")
        await soon(lambda: centre.status(health).get("state") == "stopped")
        status = centre.status(health)
        assert status["code"] in ("E-TARGET-GONE", "E-TARGET-RECREATED")
        assert "floe checkpoint set" in status["hint"]
        assert any(centre.target in problem for problem in health.problems())
        assert metric_value("floe_ingress_stopped", {"target": centre.target}) == 1

        centre.archive.put(rows_of(31, 40))
        command = ["checkpoint", "set", "-c", str(centre.write()), "--target", centre.target, "--forget", "--yes"]
        result = await floe(*command, env={**os.environ})  # the log of this process is that of the service
        assert result.code == 0, result
        check_exact(await centre.carried(client, 40), centre.archive, centre.prefix)
        await soon(lambda: not health.problems())
        assert metric_value("floe_ingress_stopped", {"target": centre.target}) == 0
    flush()
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    actions = [line["action"] for line in lines if line.get("target", centre.target) == centre.target]
    wanted = ["process_started", "delivery_resumed", "target_stopped", "target_recovered", "process_ended"]
    assert [action for n, action in enumerate(actions) if action in wanted and action not in actions[:n]] == wanted
    first, last = (next(line for line in lines if line["action"] == f"process_{end}") for end in ("started", "ended"))
    assert (first["targets"], last["messages"]) == ([centre.target], 70)
    begins = [line for line in lines if line["action"] == "delivery_resumed"]
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
        stop.set()
        await asyncio.wait_for(task, 60)
        proxy.heal()
        centre.urls = [nats_url]
        async with centre.running():
            messages = await centre.carried(client, 100)
    sequences = [each.message.sequence for each in messages]
    assert sequences == list(range(1, len(sequences) + 1))


async def test_instances_share_targets(client: FloeClient, tmp_path: Path, archive: Archive, nats_url: str) -> None:
    centres = [Centre(tmp_path, archive, nats_url) for _ in range(4)]
    targets = [each.target_settings for each in centres]
    stops, healths = [Stop() for _ in range(2)], [Health(SystemClock()) for _ in range(2)]

    def start(number: int) -> asyncio.Task[None]:
        return asyncio.create_task(centres[0].run(stops[number], healths[number], targets=targets))

    def held(*numbers: int) -> list[int]:
        return sorted([[each.status(healths[n]).get("state") for each in centres].count("carrying") for n in numbers])

    first = start(0)
    await soon(lambda: held(0) == [4])
    second = start(1)
    await soon(lambda: held(0, 1) == [2, 2])
    first.cancel()  # nothing is handed over
    await soon(lambda: held(1) == [4])
    archive.put(rows_of(31, 40))
    for each in centres:
        check_exact(await each.carried(client, 40), archive, each.prefix)
    stops[1].set()
    await asyncio.wait_for(second, PATIENCE)


# Commands


@pytest.mark.real
async def test_checkpoint_and_status_show_how_far_everything_is(centre: Centre, client: FloeClient) -> None:
    for first in (1, 21):
        centre.archive.put(rows_of(first, first + 9, OTHER), chain=OTHER)
    async with centre.running():
        await closed_at(client, centre, 40)
    centre.archive.put(rows_of(31, 70))
    config = str(centre.write())

    (checkpoint,) = (await floe("checkpoint", "ls", "-c", config, "--json")).json()
    assert (checkpoint["target"], checkpoint["target_sequence"], checkpoint["intent"]) == (centre.target, 40, None)
    assert checkpoint["positions"] == [
        {"site": site, "feed": "NODES", "incarnation": 0, "partition": 0, "position": position}
        for site, position in (("eu-west", 11), ("us-east", 31))
    ]
    late, row = (await floe("status", "-c", config, "--json")).json()
    assert (late["phase"], late["publisher"], late["why"]) == ("late", "fast", "11..20 is missing")
    assert (row["archived"], row["position"], row["lag_sequences"]) == (70, 31, 40)
    assert 0 <= row["lag_seconds"] < 60
    assert (await floe("status", "-c", config)).out.splitlines()[0].split()[0] == "target"

    await client.api(f"STREAM.DELETE.{centre.target}")
    gone = await floe("status", "-c", config, "--json")
    assert (gone.code, {each["phase"] for each in gone.json()}) == (3, {"stopped"})
    assert "E-TARGET-GONE: target " in gone.json()[1]["why"]
    assert "floe checkpoint set -c " in gone.json()[1]["why"], "with the command that lets it go on"


async def test_a_target_that_is_being_restored_is_waited_for(client: FloeClient, centre: Centre) -> None:
    """Its subjects are those of the restore until that is done."""
    centre.having(create=None)
    await make(client, centre)
    await carry_once(centre, client)
    await update(
        client, centre, subjects=[f"{RESTORE_PREFIX}{centre.target}"], metadata={RESTORE_KEY: "0 first=1 end=30"}
    )
    async with centre.running() as health:
        await soon(lambda: "is being restored" in centre.status(health).get("why", ""))
        assert centre.status(health)["state"] == "waits"
        assert any("is being restored" in problem for problem in health.problems())
        (finding,) = await examine_target(client, centre.settings().ingress.targets[0], {})
        assert "is being restored" in f"{finding}"
        await update(client, centre, subjects=[f"{centre.target}.>"], metadata={})
        centre.archive.put(rows_of(31, 40))
        await centre.carried(client, 40)
