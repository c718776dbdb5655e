"""Where ingress stops: the verdict, the exit code, the choices; and what it does about another instance."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from common.clock import SystemClock
from common.errors import AnotherWriter, ConfigError
from common.jetstream.api import GUARD, MARKER, stream_info
from common.jetstream.client import FloeClient, frame
from common.service.monitor import Health
from common.tasks import Stop
from ingress.target import examine_target
from tests.support.basics import PATIENCE, soon
from tests.support.commands import floe
from tests.support.ingress import Archive, Centre, check_exact, closed_at, count_in, make, rows_of, update

pytestmark = [pytest.mark.servers, pytest.mark.simulated]


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    archive = Archive(tmp_path / "store")
    archive.put(rows_of(1, 30))
    return archive


async def carry_once(centre: Centre, client: FloeClient) -> None:
    async with centre.running():
        await closed_at(client, centre, 30)


async def test_a_missing_target_ends_with_the_line_that_makes_it(centre: Centre) -> None:
    centre.having(create=None)

    error = await centre.ending()

    assert isinstance(error, ConfigError)
    assert error.exit_code == 78
    assert error.message == f"target {centre.target}: expected a stream, found none and no `create`"
    assert error.hint.startswith(f"nats stream add {centre.target} --subjects '{centre.target}.>'")


@pytest.mark.real
async def test_a_target_that_takes_nothing_of_a_source_is_not_made(centre: Centre, client: FloeClient) -> None:
    centre.having(create={"subjects": ["fx.>"]})
    found = f"sources.0: expected subjects that the target takes (fx.>), found {centre.target}.>"

    error = await centre.ending()

    assert isinstance(error, ConfigError)
    assert (error.code, error.exit_code) == ("E-TARGET", 78)
    assert error.problems == (f"target {centre.target}: {found}",)
    assert await stream_info(client, centre.target) is None
    doctor = await floe("doctor", "-c", str(centre.write()), "--json", "--role", "ingress")
    assert found in doctor.out
    assert "the target would not be made" in doctor.out


async def test_dangerous_differences_are_refused_all_at_once(centre: Centre, client: FloeClient) -> None:
    await make(client, centre, retention="workqueue", storage="memory")

    error = await centre.ending()

    assert isinstance(error, ConfigError)
    assert error.problems == (
        f"target {centre.target}: retention: expected limits (create), found workqueue",
        f"target {centre.target}: storage: expected file (create), found memory",
    )


async def test_deletion_is_told_while_idle(client: FloeClient, centre: Centre, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingress.delivery.IDLE_LOOK", 0.5)
    async with centre.running() as health:
        await centre.carried(client, 30)
        await client.api(f"STREAM.DELETE.{centre.target}")

        await soon(lambda: "E-TARGET-GONE" in str(health.status()))
        assert health.problems()


async def test_a_foreign_writer_that_goes_on_ends_with_exit_code_4(centre: Centre, client: FloeClient) -> None:

    async def write_on(client: FloeClient) -> None:
        while True:
            client.send(frame(f"{centre.target}.foreign".encode(), b"x"))
            await asyncio.sleep(0.01)

    await carry_once(centre, client)
    writing = asyncio.create_task(write_on(client))
    error = await centre.ending()
    writing.cancel()

    assert isinstance(error, AnotherWriter)
    assert (error.exit_code, error.code) == (4, "E-TARGET-SHARED")


async def test_one_target_that_stops_does_not_stop_another(
    client: FloeClient, tmp_path: Path, archive: Archive, nats_url: str
) -> None:
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


async def test_a_full_target_is_waited_for(client: FloeClient, centre: Centre) -> None:
    centre.having(create=None)
    await make(client, centre, discard="new", max_msgs=20)
    async with centre.running() as health:
        await soon(lambda: any("maximum messages exceeded" in p for p in health.problems()))
        assert await count_in(client, centre.target) in (0, 20)
        await update(client, centre, max_msgs=99)
        check_exact(await centre.carried(client, 30), centre.archive, centre.prefix)


# Commands


@pytest.mark.real
async def test_checkpoint_and_status_show_how_far_everything_is(centre: Centre, client: FloeClient) -> None:
    await carry_once(centre, client)
    centre.archive.put(rows_of(31, 70))
    config = str(centre.write())

    listed = await floe("checkpoint", "ls", "-c", config, "--json")
    shown = await floe("status", "-c", config, "--json")
    table = await floe("status", "-c", config)

    (checkpoint,) = listed.json()
    assert (checkpoint["target"], checkpoint["target_sequence"], checkpoint["intent"]) == (centre.target, 30, None)
    assert checkpoint["positions"] == [
        {"site": "us-east", "feed": "NODES", "incarnation": 0, "partition": 0, "position": 31}
    ]
    missing, row = shown.json()
    assert (missing["site"], missing["phase"]) == ("eu-west", "missing")  # of `sources`, not begun
    assert (row["archived"], row["position"], row["lag_sequences"]) == (70, 31, 40)
    assert 0 <= row["lag_seconds"] < 60
    assert table.out.splitlines()[0].split()[0] == "target"
    assert "70" in table.out


@pytest.mark.parametrize("count", [0, 30])
async def test_a_target_that_is_being_restored_is_waited_for(client: FloeClient, centre: Centre, count: int) -> None:
    """Its subjects are those of the restore until it is done. `count`: rows that it had been given before."""
    centre.having(create=None)
    guarded: dict[str, Any] = {"subjects": [f"{GUARD}{centre.target}"], "metadata": {MARKER: "0 first=1 end=30"}}
    if count:
        await make(client, centre)
        await carry_once(centre, client)
        await update(client, centre, **guarded)
    else:
        await make(client, centre, **guarded)
    async with centre.running() as health:
        await soon(lambda: "is being restored" in centre.status(health).get("why", ""))
        assert centre.status(health)["state"] == "waits"
        assert any("is being restored" in problem for problem in health.problems())
        (told,) = await examine_target(client, centre.settings().ingress.targets[0], {})
        assert "is being restored" in f"{told}"
        await update(client, centre, subjects=[f"{centre.target}.>"], metadata={})
        await centre.carried(client, 30)
