"""Retention and the readers of the archive: targets of ingress, egress, replay and drill."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from common import failpoints
from common.errors import FloeError
from common.nats.client import FloeClient
from compaction.retention import Retention, RetentionReport, RetentionRule
from ingress import report
from ingress.recovery.request import ReplayOptions
from tests.support.basics import commands_of, soon
from tests.support.commands import floe
from tests.support.ingress import CHAIN, Archive, Centre, check_exact, rows_of
from tests.support.replay import World, refused

pytestmark = [pytest.mark.servers, pytest.mark.simulated]

NOW = 4_000_000_000.0  # everything is old by then


def expire(archive: Archive) -> RetentionReport:
    """Run retention with everything due."""
    return Retention(archive.store, lambda _site, _feed: RetentionRule(1.0), {}).apply([CHAIN], NOW, lambda: None)


def ranges(archive: Archive) -> list[str]:
    return [str(ref.coverage) for ref in archive.store.list(CHAIN)]


async def reported_at(archive: Archive, centre: Centre, at: int) -> None:
    """Wait until the target reports this position."""
    read = archive.documents.read_positions
    await soon(lambda: (found := read(centre.target)) is not None and found.positions.get(CHAIN) == at)


@pytest.mark.real
async def test_a_released_target_that_is_carried_again_stops_with_the_command_to_resume(
    client: FloeClient, tmp_path: Path, archive: Archive, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "POSITIONS_INTERVAL_S", 1.0)
    archive.put(rows_of(1, 10))
    centre = Centre(tmp_path, archive, nats_url)
    async with centre.running():
        await centre.carried(client, 10)
        await reported_at(archive, centre, 11)
    for first in (11, 21, 31):
        archive.put(rows_of(first, first + 9))
    assert [(each.target, each.first) for each in expire(archive).holds] == [(centre.target, 11)]
    config = str(centre.write())
    [row] = (await floe("checkpoint", "ls", "-c", config, "--json")).json()
    assert [(kept["chain"], kept["from"], kept["why"]) for kept in row["kept"]] == [(str(CHAIN), 11, None)]
    assert (await floe("checkpoint", "release", "-c", config, centre.target, "--yes")).code == 0
    assert "nothing: released" in (await floe("checkpoint", "ls", "-c", config)).out
    expire(archive)
    assert (ranges(archive), archive.documents.read_floor(CHAIN)) == (["31..40"], 31)

    async with centre.running() as health:

        def stopped() -> Any:
            return next((each for each in centre.status(health).get("chains", {}).values() if each.get("code")), None)

        found = await soon(stopped)
        assert found["code"] == "E-FLOOR"
        assert "position 11: retention deleted the sequences before 31 at 20" in found["stopped"]
        [row] = [r for r in (await floe("status", "-c", config, "--json")).json() if r["position"]]
        assert (row["phase"], "retention deleted the sequences before 31" in row["why"]) == ("stopped", True)
        [command] = commands_of(found["hint"])
        words = shlex.split(command)[1:]
        words[words.index("-c") + 1] = config
        done = await floe(*words, "--yes")
        assert done.code == 0, done.err
        del archive.rows[CHAIN][10:30]
        check_exact(await centre.carried(client, 20), archive, centre.prefix)
        # It reports its position again, and holds the rows that it still needs.
        await reported_at(archive, centre, 41)


# Replay and drill


@pytest.fixture
async def cut(world: World) -> World:
    """A target and 1..300, of which retention left 201..300."""
    await world.make((1, 100), (101, 200), (201, 250), (251, 300))
    archive = world.archive
    archive.documents.raise_floor(CHAIN, 201)
    for ref in archive.store.list(CHAIN)[:2]:
        archive.store.delete(ref)
    return world


async def test_a_replay_names_gone_rows_and_since_when(cut: World) -> None:
    since = "us-east/NODES/0000/0: retention deleted the sequences before 201 at 20"
    for asked in ({}, {"from_sequence": 150}, {"to_time": "2062-01-02T03:04:05Z"}):
        assert sum(note.startswith(since) for note in (await cut.preview(**asked)).notes) == 1, asked
    assert not any("retention" in note for note in (await cut.preview(from_sequence=201)).notes)
    with pytest.raises(FloeError) as caught:
        await cut.preview(to_sequence=150)
    assert since in caught.value.hint
    assert ((await cut.run()).rows, await cut.sequences()) == (100, list(range(201, 301)))


async def test_a_replay_of_an_archive_that_is_deleted_stops_and_can_take_the_rest(world: World) -> None:
    await world.make((1, 100), (101, 200), (201, 300), (301, 310))
    failpoints.set_failpoints("replay.begun=raise")
    try:
        with pytest.raises(failpoints.FailpointRaised):
            await world.run()
    finally:
        failpoints.set_failpoints("")
    expire(world.archive)
    assert world.archive.documents.read_floor(CHAIN) == 301

    error = await refused(world, "E-FLOOR")
    assert "retention deleted the sequences before 301 at 20" in error.message
    assert "--skip-holes" in error.hint
    assert (await world.run(ReplayOptions(skip_holes=True))).finished
    assert await world.sequences() == list(range(301, 311))
