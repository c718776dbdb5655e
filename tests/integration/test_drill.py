"""`floe replay` and `floe drill` as commands: exit codes, output, what is left behind."""

from __future__ import annotations

import signal

from common.jetstream.api import stream_info
from common.segments.segment import Ledger, Message, Reason
from common.sequences import SequenceRange
from ingress.replay.drill import Differences, Trail, compare
from tests.scenarios.processes import Service
from tests.support.basics import PATIENCE, soon
from tests.support.commands import invoke
from tests.support.ingress import CHAIN, rows_of
from tests.support.replay import World
from tests.support.segments import message

FEED = ("--site", "us-east", "--feed", "NODES")


def drill(world: World) -> tuple[str, ...]:
    return ("drill", "-c", str(world.centre.write()), *FEED)


async def scratch(world: World) -> list[str]:
    found = await world.client.api("STREAM.NAMES", {"subject": "_floe_drill.>"})
    return list(found["streams"] or [])


async def test_replay_as_a_command(world: World) -> None:
    world.fill((1, 3000))
    await world.make()
    folder = world.archive.folder.parent
    target = ("--target", world.target, "--subject-prefix", world.target)
    command = ("replay", "-c", str(world.centre.write()), *FEED, *target)
    planned = await invoke(*command, "--dry-run")
    assert (planned.code, planned.err) == (0, "")
    assert "3,000 messages" in planned.out
    assert "is empty" in planned.out

    slow = Service(folder, "replay", *command, "--rate", "500/s").start()
    await soon(lambda: holds(world, 200))
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


async def test_a_drill_finds_the_archive_well_and_leaves_nothing(world: World) -> None:
    rows = [
        *rows_of(1, 2990),
        *(message(s, b"", headers=b"NATS/1.0\r\nNats-Msg-Id: 1\r\n\r\n") for s in range(2991, 3001)),
    ]
    world.archive.put(rows, SequenceRange(1, 3010), ledger=Ledger({Reason.SAMPLED_OUT: 10}))
    well = await invoke(*drill(world), "--json")
    assert well.code == 0, well.err
    report = well.json()
    assert (report["rows"], report["expected"], report["ok"]) == (3000, 3000, True)
    assert report["full_restore_seconds"] > 0
    part = await invoke(*drill(world), "--from-sequence", "11", "--to-sequence", "20")
    assert part.code == 0
    assert "10 messages" in part.out
    assert await scratch(world) == []


async def test_a_drill_tells_holes_and_damage(world: World) -> None:
    world.fill((1, 100))
    bad = world.archive.put(rows_of(101, 200))
    world.archive.put(rows_of(221, 300))
    path = world.archive.folder / bad.key
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 3] ^= 1
    path.write_bytes(bytes(raw))
    found = await invoke(*drill(world))
    assert found.code == 3, found.err
    assert "201..220" in found.out
    assert "NOT WELL" in found.out
    assert bad.name in found.out
    assert await scratch(world) == []


async def test_a_row_that_the_server_does_not_take_is_told_with_a_command_for_drills(world: World) -> None:
    large = world.client.max_payload + 1
    world.archive.put([*rows_of(1, 100), message(101, b"x" * large)])
    found = await invoke(*(words := drill(world)))
    assert found.code == 1, found
    assert "error[E-MSG-TOO-LARGE]" in found.err
    assert f"drill again:\nfloe {' '.join(words)} --incarnation 0" in found.err
    assert await scratch(world) == []


async def test_the_next_drill_removes_what_a_killed_one_left(world: World) -> None:
    world.fill((1, 100))
    env = {"FLOE_FAILPOINTS": "replay.begun=kill"}
    killed = Service(world.archive.folder.parent, "drill", *drill(world), env=env).start()
    assert killed.wait(PATIENCE) == -signal.SIGKILL
    left = await scratch(world)
    assert len(left) == 1

    async def swept() -> bool:
        return f"removed {left[0]}" in (await invoke(*drill(world))).err

    await soon(swept)
    assert await scratch(world) == []


def trail(*rows: Message) -> Trail:
    found = Trail()
    for row in rows:
        found.add(row)
    return found


def test_the_comparison_tells_apart_what_can_happen() -> None:
    one, two, three, four = (message(s) for s in range(1, 5))
    expected = trail(one, two, three)
    for rows, told in (
        ((one, two, three), {}),
        ((one, three), {"lost": 1}),
        ((one, two, two, three), {"repeated": 1}),
        ((two, one, three), {"out_of_order": 1}),
        ((one, two, three, four), {"unexpected": 1}),
        *(
            ((one, two, message(3, **other)), {"altered": 1, "examples": ("NODES 3: altered",)})
            for other in ({"payload": b"else"}, {"headers": b""}, {"subject": b"nodes.two"}, {"timestamp_ns": 1})
        ),
    ):
        found = compare(expected, trail(*rows), CHAIN.feed)
        wanted = {"expected": 3, "found": len(rows), "examples": found.examples, **told}
        assert (found, found.none) == (Differences(**wanted), not told)
    summed = compare(expected, trail(one)).plus(compare(expected, trail(one, one, two, three)))
    assert (summed.expected, summed.lost, summed.repeated) == (6, 2, 1)
