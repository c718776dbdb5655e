"""`floe replay` and `floe drill` as commands: exit codes, output, what is left behind."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from common.jetstream.api import create_stream, stream_info
from common.jetstream.client import FloeClient
from common.segments.segment import Ledger, Message, Reason
from common.sequences import SequenceRange
from ingress.replay.drill import Trail, compare
from tests.scenarios.processes import Service
from tests.support.basics import PATIENCE, soon, unique
from tests.support.commands import invoke
from tests.support.ingress import CHAIN, Archive, Centre, rows_of
from tests.support.segments import message

FEED = ("--site", "us-east", "--feed", "NODES")


class World:
    """An archive, a server with a target, and a configuration."""

    def __init__(self, folder: Path, url: str, client: FloeClient) -> None:
        self.folder, self.client = folder, client
        self.archive = Archive(folder / "store")
        self.config = str(Centre(folder, self.archive, url).write())
        self.target = unique("BACK")

    async def make(self) -> None:
        await create_stream(
            self.client,
            {"name": self.target, "subjects": [f"{self.target}.>"], "allow_atomic": True, "allow_batched": True},
        )

    async def scratch(self) -> list[str]:
        found = await self.client.api("STREAM.NAMES", {"subject": "_floe_drill.>"})
        return list(found["streams"] or [])


@pytest.fixture
async def world(nats_url: str, tmp_path: Path, client: FloeClient) -> World:
    return World(tmp_path, nats_url, client)


@pytest.mark.servers
async def test_replay_as_a_command(world: World) -> None:
    world.archive.put(rows_of(1, 3000))
    await world.make()
    command = ("replay", "-c", world.config, *FEED, "--target", world.target, "--subject-prefix", world.target)
    planned = await invoke(*command, "--dry-run")
    assert (planned.code, planned.err) == (0, "")
    assert "3,000 messages" in planned.out
    assert "is empty" in planned.out

    slow = Service(world.folder, "replay", *command, "--rate", "500/s").start()
    async with asyncio.timeout(PATIENCE):
        while not await holds(world, 200):
            await asyncio.sleep(0.05)
    slow.send(signal.SIGTERM)
    assert slow.wait(PATIENCE) == 75
    assert "the same command goes on" in slow.tail()

    other = await invoke(*command, "--to-sequence", "7")
    assert other.code == 1
    assert "error[E-REPLAY-OTHER]" in other.err
    done = await invoke(*command, "--json")
    assert done.code == 0, done.err
    assert done.json()["rows"] == 3000
    assert await holds(world, 3000)
    again = await invoke(*command)
    assert again.code == 0
    assert "done before" in again.out
    wrong = await invoke(*command, "--from-time", "yesterday")
    assert wrong.code == 2
    assert "expected a time such as 2026-01-02T03:04:05Z" in wrong.err


async def holds(world: World, count: int) -> bool:
    info = await stream_info(world.client, world.target)
    return info is not None and info.messages >= count


@pytest.mark.servers
async def test_a_drill_finds_the_archive_well_and_leaves_nothing(world: World) -> None:
    rows = [
        *rows_of(1, 2990),
        *(message(s, b"", headers=b"NATS/1.0\r\nNats-Msg-Id: 1\r\n\r\n") for s in range(2991, 3001)),
    ]
    world.archive.put(rows, SequenceRange(1, 3010), ledger=Ledger({Reason.SAMPLED_OUT: 10}))
    well = await invoke("drill", "-c", world.config, *FEED, "--json")
    assert well.code == 0, well.err
    report = well.json()
    assert (report["rows"], report["expected"], report["ok"]) == (3000, 3000, True)
    assert report["full_restore_seconds"] > 0
    part = await invoke("drill", "-c", world.config, *FEED, "--from-sequence", "11", "--to-sequence", "20")
    assert part.code == 0
    assert "10 messages" in part.out
    assert await world.scratch() == []
    listed = await invoke("checkpoint", "ls", "-c", world.config)
    assert "FLOE_DRILL" not in listed.out


@pytest.mark.servers
async def test_a_drill_tells_holes_and_damage(world: World) -> None:
    world.archive.put(rows_of(1, 100))
    bad = world.archive.put(rows_of(101, 200))
    world.archive.put(rows_of(221, 300))
    path = world.archive.folder / bad.key
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 3] ^= 1
    path.write_bytes(bytes(raw))
    found = await invoke("drill", "-c", world.config, *FEED)
    assert found.code == 3, found.err
    assert "201..220" in found.out
    assert "NOT WELL" in found.out
    assert bad.name in found.out
    assert await world.scratch() == []


@pytest.mark.servers
async def test_a_row_that_the_server_does_not_take_is_told_with_a_command_for_drills(world: World) -> None:
    large = world.client.max_payload + 1
    world.archive.put([*rows_of(1, 100), message(101, b"x" * large)])
    found = await invoke("drill", "-c", world.config, *FEED)
    assert found.code == 1, found
    assert "error[E-MSG-TOO-LARGE]" in found.err
    again = f"drill again:\nfloe drill -c {world.config} --site us-east --feed NODES --incarnation 0"
    assert again in found.err
    assert await world.scratch() == []


@pytest.mark.servers
async def test_the_next_drill_removes_what_a_killed_one_left(world: World) -> None:
    world.archive.put(rows_of(1, 100))
    env = {"FLOE_FAILPOINTS": "replay.begun=kill"}
    killed = Service(world.folder, "drill", "drill", "-c", world.config, *FEED, env=env).start()
    assert killed.wait(PATIENCE) == -signal.SIGKILL
    left = await world.scratch()
    assert len(left) == 1

    async def swept() -> bool:
        return f"removed {left[0]}" in (await invoke("drill", "-c", world.config, *FEED)).err

    await soon(swept)
    assert await world.scratch() == []


def trail(*rows: Message) -> Trail:
    found = Trail()
    for row in rows:
        found.add(row)
    return found


def test_the_comparison_tells_apart_what_can_happen() -> None:
    one, two, three, four = (message(s) for s in range(1, 5))
    expected = trail(one, two, three)
    assert compare(expected, trail(one, two, three)).none
    assert compare(expected, trail(one, three)).lost == 1
    assert compare(expected, trail(one, two, two, three)).repeated == 1
    assert compare(expected, trail(two, one, three)).out_of_order == 1
    assert compare(expected, trail(one, two, three, four)).unexpected == 1
    for other in (
        message(3, b"else"),
        message(3, headers=b""),
        message(3, subject=b"nodes.two"),
        message(3, timestamp_ns=1),
    ):
        found = compare(expected, trail(one, two, other), CHAIN.feed)
        assert (found.altered, found.examples) == (1, ("NODES 3: altered",))
    summed = compare(expected, trail(one)).plus(compare(expected, trail(one, one, two, three)))
    assert (summed.expected, summed.lost, summed.repeated) == (6, 2, 1)
