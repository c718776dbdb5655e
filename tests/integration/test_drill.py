"""`floe replay` and `floe drill` as commands: exit codes, output, leftovers. With `--exact` the whole stream comes back
under a scratch name, on the same server or one of its own.
"""

import asyncio
import re
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from common.archive.segment import Ledger, Reason
from common.clock import SystemClock
from common.errors import ConfigError, Refused, Stopped, Unavailable
from common.nats.api import RESTORE_PREFIX, SCRATCH_PREFIX, create_consumer, create_stream, stream_info
from common.nats.restore import LocalServerMaker
from common.sequences import SequenceRange
from common.service.progress import Progress
from common.tasks import Stop
from infra.local.nats import NatsServer
from ingress.recovery.drill import Drill, ExactDrill
from ingress.recovery.plan import RestoreRequest
from ingress.recovery.read_back import read_differences
from ingress.recovery.request import RecoveryParts, ReplayRequest
from tests.scenarios.processes import Service
from tests.support import restoring as back
from tests.support.basics import PATIENCE, raises_code, soon, unique
from tests.support.commands import configuration, floe, invoke, ran
from tests.support.egress import SITE, Bench
from tests.support.ingress import rows_of
from tests.support.replay import World
from tests.support.segments import message

pytestmark = pytest.mark.servers

FEED = ("us-east/NODES",)


def words_of(world: World, lease_ttl: str = "10s") -> tuple[str, ...]:
    return ("drill", "-c", str(world.centre.write(lease_ttl=lease_ttl)), *FEED)  # not lost on a busy machine


async def scratch(world: World) -> list[str]:
    found = await world.client.api("STREAM.NAMES", {"subject": "_floe_drill.>"})
    return list(found["streams"] or [])


async def test_replay_as_a_command(world: World) -> None:
    await world.make((1, 3000))
    folder = world.archive.folder.parent
    target = ("--target", world.target, "--subject-prefix", world.target)
    command = ("replay", "-c", str(world.centre.write(lease_ttl="10s")), *FEED, *target)
    planned = await invoke(*command, "--dry-run")
    assert (planned.code, planned.err) == (0, "")
    assert "3,000 messages" in planned.out
    assert "is empty" in planned.out

    # A minute for all: it is stopped long before its end.
    slow = Service(folder, "replay", *command, "--rate", "50/s").start()
    await soon(lambda: holds(world, 20))
    slow.send(signal.SIGTERM)
    assert slow.wait(PATIENCE) == 75
    assert "the same command continues" in slow.tail()

    done = await ran(*command, "--json")
    assert done.json()["rows"] == 3000
    assert await holds(world, 3000)
    again = await ran(*command)
    assert "done before" in again.out


async def holds(world: World, count: int) -> bool:
    info = await stream_info(world.client, world.target)
    return info is not None and info.messages >= count


async def test_a_drill_finds_the_archive_well_and_leaves_nothing(world: World) -> None:
    same = [message(s, b"", headers=b"NATS/1.0\r\nNats-Msg-Id: 1\r\n\r\n") for s in range(2991, 3001)]
    world.archive.put([*rows_of(1, 2990), *same], SequenceRange(1, 3010), ledger=Ledger({Reason.SAMPLED_OUT: 10}))
    well = await ran(*words_of(world), "--json")
    report = well.json()
    assert (report["rows"], report["expected"], report["ok"]) == (3000, 3000, True)
    assert report["full_restore_seconds"] > 0
    part = await ran(*words_of(world), "--from-sequence", "11", "--to-sequence", "20")
    assert "10 messages" in part.out
    assert await scratch(world) == []


async def test_a_drill_that_is_stopped_while_it_compares_ends_at_once(world: World) -> None:
    world.fill((1, 3000))
    stop = Stop()

    class Stopping(Progress):
        def update(self, text: str, at: float) -> None:
            if text.startswith("compared"):
                stop.set()

    parts = RecoveryParts(world.archive.store, world.archive.documents, SystemClock(), Stopping())
    with pytest.raises(Unavailable, match="the drill was stopped before its end"):
        await Drill(world.centre.settings(), parts).run(ReplayRequest("us-east", "NODES", ""), stop)
    assert await scratch(world) == []


async def test_a_drill_shows_holes_and_damage(world: World) -> None:
    world.fill((1, 100))
    bad = world.archive.put(rows_of(101, 200))
    world.archive.put(rows_of(221, 300))
    path = world.archive.folder / bad.key
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 3] ^= 1
    path.write_bytes(bytes(raw))
    found = await ran(*words_of(world), code=3)
    assert all(text in found.out for text in ("201..220", "NOT as archived", bad.name)), found
    assert await scratch(world) == []


async def test_a_row_that_the_server_refuses_is_named_with_a_command_for_drills(world: World) -> None:
    large = world.client.max_payload + 1
    world.archive.put([*rows_of(1, 100), message(101, b"x" * large)])
    found = await ran(*(words := words_of(world)), code=1)
    assert "error[E-MSG-TOO-LARGE]" in found.err
    assert f"drill again:\nfloe {' '.join(words)}/0000 " in found.err
    assert await scratch(world) == []


async def test_the_next_drill_removes_leftovers_of_a_kill(world: World) -> None:
    world.fill((1, 100))
    env = {"FLOE_FAILPOINTS": "replay.begun=kill"}
    killed = Service(world.archive.folder.parent, "drill", *words_of(world, "2s"), env=env).start()
    assert killed.wait(PATIENCE) == -signal.SIGKILL
    left = await scratch(world)
    assert len(left) == 1

    async def swept() -> bool:
        return f"removed {left[0]}" in (await invoke(*words_of(world, "2s"))).err

    await soon(swept)
    assert await scratch(world) == []


EVERY, ROWS = 80, 75  # the last sequence, and the number of rows


async def used(bench: Bench, received: list[bytes]) -> str:
    """A stream in use, archived and captured in the middle: gaps, a purged beginning, consumers of several kinds. Its
    push consumer delivers to a subscriber that appends to `received`.
    """
    stream = await bench.make_stream(unique("D"), storage="file", max_age=3_600_000_000_000)
    push = f"push.{stream}"

    def on_message(_subject: bytes, _reply: bytes, payload: bytes, headers: bytes | None) -> None:
        if headers is None:  # not a heartbeat
            received.append(payload)

    await bench.client.subscribe_raw(push, on_message)
    for name, config in {
        "pull": {"ack_policy": "explicit", "filter_subject": f"{stream}.>"},
        "none": {"ack_policy": "none", "description": "é", "metadata": {"team": "billing"}},
        "push": {"ack_policy": "none", "deliver_subject": push, "flow_control": True, "idle_heartbeat": 30_000_000_000},
    }.items():
        await create_consumer(bench.client, stream, {"durable_name": name, **config})
    await bench.publish(stream, [b"%d" % n * (n % 30) for n in range(EVERY // 2)])
    await soon(lambda: len(received) >= EVERY // 2)
    await bench.client.api(f"STREAM.MSG.DELETE.{stream}", {"seq": 10})
    await bench.client.api(f"STREAM.PURGE.{stream}", {"seq": 5})
    async with bench.egress({"stream": stream, "capture_consumers": "never"}):
        await bench.archived_to(stream, EVERY // 2)
        await back.capture(bench, stream, EVERY // 2)
        await bench.publish(stream, [b"%d" % n * (n % 30) for n in range(EVERY // 2, EVERY)])
        await soon(lambda: len(received) >= EVERY)
        await bench.archived_to(stream, EVERY)
    return stream


async def left_behind(bench: Bench) -> list[str]:
    found = await bench.client.api("STREAM.NAMES", {"subject": f"{RESTORE_PREFIX}>"})
    return [each for each in found["streams"] or [] if each.startswith(SCRATCH_PREFIX)]  # not those of other tests


async def test_beside_the_stream_itself_nothing_is_delivered_twice(bench: Bench) -> None:
    received = list[bytes]()
    stream = await used(bench, received)
    before, positions, seen = await back.state(bench, stream), await back.positions(bench, stream), [*received]
    guarded = {
        "name": f"{SCRATCH_PREFIX}0123",
        "subjects": [f"{RESTORE_PREFIX}{SCRATCH_PREFIX}0123"],
        "metadata": {"floe.restore": "dead"},
    }
    await create_stream(bench.client, guarded)
    # A lease that is not lost on a busy machine, in a bucket beside that of egress.
    leases = {"lease_bucket": f"{bench.lease_bucket}_DRILL", "lease_ttl": "10s"}
    file = str(configuration(bench, {"stream": stream}, **leases))
    done = await ran("drill", "-c", file, f"{SITE}/{stream}", "--exact", "--json")
    report = done.json()
    assert (report["ok"], report["differences"], report["end"]) == (True, [], EVERY)
    assert report["consumers"] == ["none", "pull", "push"]
    assert report["read_back"] == report["rows"] == ROWS
    assert report["server"].startswith("the server, nats-server 2.")
    assert f"removed {SCRATCH_PREFIX}0123, a leftover of an earlier drill" in done.err
    assert await left_behind(bench) == []
    # The capture is from the middle, so an unchanged push consumer would have delivered the other half again.
    assert (await back.state(bench, stream), await back.positions(bench, stream), received) == (before, positions, seen)
    middle = await ran("drill", "-c", file, f"{SITE}/{stream}", "--exact", "--to-sequence", "20")
    assert "as in the archive: 15 read back, state, configuration, 0 consumers" in middle.out
    assert await left_behind(bench) == []


async def test_on_a_server_of_its_own_which_is_gone_afterwards(bench: Bench) -> None:
    stream = await used(bench, [])
    file = str(configuration(bench, {"stream": stream}))
    words = ("drill", "-c", file, f"{SITE}/{stream}", "--exact", "--server", "local")
    done = await floe(*words, "--json", seconds=2 * PATIENCE)
    assert done.code == 0, done
    assert (done.json()["ok"], len(done.json()["consumers"])) == (True, 3)
    assert done.json()["server"].startswith("a server of its own, nats-server 2.")
    assert [*Path(bench.root / "spool").glob("floe-spool-*")] == []
    assert await left_behind(bench) == []
    service = Service(bench.root, "drill", *words).start(FLOE_FAILPOINTS="restore.filled=stop")
    await soon(lambda: "starting a nats-server" in service.tail())
    home = service.tail().split("starting a nats-server in ")[1].split()[0]
    await soon(lambda: _servers(home) == 1)
    await soon(lambda: _blocks(home))
    service.send(signal.SIGKILL)
    assert service.wait(PATIENCE) == -signal.SIGKILL, service.tail()
    await soon(lambda: _servers(home) == 0)
    await ran(*words)  # and the leftovers of the killed one are removed
    assert [*Path(bench.root / "spool").glob("floe-spool-*")] == []


def _blocks(home: str) -> int:
    """The number of message block files below `home`, a folder that the server changes meanwhile."""
    with suppress(FileNotFoundError):
        return len(list(Path(home, "store").rglob("*.blk")))
    return 0


def _servers(home: str) -> int:
    """The number of processes with a configuration below `home`."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += f"{home}/nats.conf".encode() in path.read_bytes()
    return found


def drill(bench: Bench, stream: str, make_server: LocalServerMaker | None = None, **asked: object) -> ExactDrill:
    request = replace(RestoreRequest(SITE, stream), **asked)  # type: ignore[arg-type]
    parts = RecoveryParts(bench.store, bench.chains, SystemClock(), Progress())
    return ExactDrill(back.settings(bench, stream), request, parts, make_server)


async def test_a_stop_differences_holes_and_a_missing_program_are_named(bench: Bench) -> None:
    """Of one stream in use. A stop leaves nothing, and its command does not go to the real server."""
    stream, scratch, stop = await used(bench, []), unique(SCRATCH_PREFIX), Stop()
    command = rf"floe drill -c \S+ {SITE}/{stream} --exact"
    stop.set()
    for work, error, why, options in (
        (drill(bench, stream), Exception, "stopped before its end", ""),
        (drill(bench, stream, NatsServer, replicas=3), Unavailable, None, " --server local"),
    ):
        with pytest.raises(error, match=why) as caught:
            await work.run(stop)
        assert re.search(f"{command}{options}$", getattr(caught.value, "hint", ""))
        await asyncio.sleep(0)
        assert await left_behind(bench) == []
    work = back.restore(bench, stream, name=scratch, promote=False)
    async with work.open_connection() as client:
        plan = (await work.run(client, Stop())).plan
        assert await read_differences(client, plan) == []
        info = await stream_info(client, scratch)
        assert info is not None
        assert info.restore_marker
        await client.api(f"STREAM.UPDATE.{scratch}", {**info.config, "max_msgs_per_subject": 1000})
        await client.api(f"CONSUMER.DELETE.{scratch}.none")
        await create_consumer(client, scratch, {"durable_name": "new", "ack_policy": "explicit"})
        await back.consume(bench, scratch, "push", 1, acked=0)
        found = await read_differences(client, plan)
    await bench.delete_stream(scratch)
    assert found == [
        "configuration: expected max_msgs_per_subject -1, found 1000",
        "consumer none: expected, but missing",
        "consumer push: expected delivered 40 (as 40), found 41 (as 41)",
        "consumer push: expected ack_floor 40 (as 40), found 41 (as 41)",
        "consumer new: not expected",
    ]

    (bench.root / "bucket" / bench.refs(stream)[0].key).unlink()
    with raises_code(Stopped, "E-RESTORE-LOSSY") as hole:
        await drill(bench, stream).run(Stop())
    assert re.search(f"{command} --allow-lossy", hole.value.hint)
    assert (await drill(bench, stream, allow_lossy=True).run(Stop())).exit_code == 0

    def missing(*_: object, **__: object) -> NatsServer:
        raise FileNotFoundError("no nats-server")

    with raises_code(ConfigError, "E-DRILL-SERVER", 78):
        await drill(bench, stream, missing, allow_lossy=True).run(Stop())


async def test_a_right_to_remove_what_it_makes_is_missed_before_it_begins(bench: Bench) -> None:
    stream = await bench.begun([b"1", b"2"])
    rights = {"one": "$JS.API.CONSUMER.DELETE", "two": "$JS.API.STREAM.DELETE"}
    users = (f'{{user: {u}, password: p, permissions: {{publish: {{deny: ["{r}.>"]}}}}}}' for u, r in rights.items())
    with NatsServer(extra=f"authorization {{ users: [ {', '.join(users)} ] }}") as server:
        for user, right in rights.items():
            nats = {"url": server.url, "user": user, "password": "p"}
            work = back.restore(bench, stream, nats, name=unique(SCRATCH_PREFIX), promote=False)
            async with work.open_connection() as client:
                with pytest.raises(Refused, match=re.escape(f"{right}.{SCRATCH_PREFIX}")) as caught:
                    await work.run(client, Stop())
                assert (await client.api("STREAM.NAMES"))["streams"] is None
            assert caught.value.exit_code == 77


async def test_a_durable_before_the_first_message_is_no_difference(bench: Bench) -> None:
    """The server puts it at the first message, and counts again from there."""
    stream = await bench.make_stream(unique("D"), storage="file", max_msgs=10)
    for name in ("idle", "begun"):
        await create_consumer(bench.client, stream, {"durable_name": name, "ack_policy": "explicit"})
    await bench.publish(stream, [b"%d" % n for n in range(5)])
    await back.consume(bench, stream, "begun", 3)
    async with bench.egress({"stream": stream}):
        await bench.archive(stream, [b"%d" % n for n in range(25)], 30)
    await back.capture(bench, stream, 30, deletions=True)
    for server in (None, NatsServer):
        report = await drill(bench, stream, server).run(Stop())
        assert report.exit_code == 0, [*report.lines()]
