"""`floe restore` asleep or killed around its promotion. Simulated worlds kill it before, beside producers."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from common.nats.api import create_consumer, list_consumers, stream_info
from infra.local.process import spawn
from tests.support import restoring as back
from tests.support.basics import PATIENCE, has_stopped, soon, unique
from tests.support.commands import ROOT, configuration, floe
from tests.support.egress import Bench

pytestmark = pytest.mark.servers


async def lost(bench: Bench, **egress: object) -> tuple[str, list[object], str]:
    """An archived stream that is gone, its former messages, and a configuration."""
    stream = await bench.begun([b"%d" % n for n in range(200)], storage="file")
    before = await back.contents(bench, stream)
    await bench.delete_stream(stream)
    return stream, [*before], str(configuration(bench, {"stream": stream}, **egress))


async def asleep_before_promotion(stream: str, file: str, **options: object) -> subprocess.Popen[str]:
    """Start a restore that sleeps at a failpoint until it gets SIGCONT."""
    words = [sys.executable, "-m", "floe", "restore", "-c", file, f"site/{stream}", "--yes"]
    process = spawn(words, cwd=ROOT, env={**os.environ, "FLOE_FAILPOINTS": "restore.recorded=stop"}, **options)
    await soon(lambda: has_stopped(process.pid))
    return process


async def test_one_that_was_asleep_touches_nothing_of_the_one_that_was_done_meanwhile(bench: Bench) -> None:
    stream, before, file = await lost(bench)
    words = ("restore", "-c", file, f"site/{stream}", "--yes")
    for point in ("sending", "recorded"):  # the next command begins again
        done = await floe(*words, env={**os.environ, "FLOE_FAILPOINTS": f"restore.{point}=kill"})
        assert done.code == -signal.SIGKILL, done
    asleep = await asleep_before_promotion(stream, file)
    other = await floe(*words)
    assert other.code == 0, other
    await bench.publish(stream, [b"acknowledged"] * 5)
    asleep.send_signal(signal.SIGCONT)
    assert await asyncio.to_thread(asleep.wait, PATIENCE) == 78
    info = await stream_info(bench.client, stream)
    assert (info.restore_marker, info.config["subjects"]) == ("", [f"{stream}.>"])
    found = await back.contents(bench, stream)
    assert [*found[: len(before)]] == before
    assert [message.payload for message in found[len(before) :]] == [b"acknowledged"] * 5


async def test_a_subject_that_was_taken_meanwhile_leaves_it_under_its_guard(bench: Bench) -> None:
    # Its lease outlasts the sleep: without it, the restore would begin again, and be refused before its promotion.
    stream, before, file = await lost(bench, lease_bucket=unique("L"), lease_ttl="60s")
    asleep = await asleep_before_promotion(stream, file, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    other = await bench.make_stream(unique("O"), subjects=[f"{stream}.a"])
    asleep.send_signal(signal.SIGCONT)
    _, output = await asyncio.to_thread(asleep.communicate, timeout=PATIENCE)
    assert asleep.returncode == 78, output
    assert "error[E-RESTORE-PROMOTE]" in output
    assert f"stream {stream}: the server refuses its configuration: subjects overlap" in output
    assert "stays under its guard" in output
    await bench.client.request_raw(f"{stream}.a".encode(), b"for the other", timeout=PATIENCE)
    info = await stream_info(bench.client, stream)
    assert (bool(info.restore_marker), info.config["subjects"]) == (True, [f"_floe.restore.{stream}"])
    assert info.last_sequence == 200
    early = await floe("restore", "-c", file, f"site/{stream}", "--yes")
    assert early.code == 78, early
    assert f"error[E-RESTORE-SUBJECTS]: stream {stream}: expected subject {stream}.> to be free" in early.err
    assert [message.payload for message in await back.contents(bench, other)] == [b"for the other"]
    await bench.delete_stream(other)
    done = await floe("restore", "-c", file, f"site/{stream}", "--yes")
    assert done.code == 0, done
    assert [*await back.contents(bench, stream)] == before


async def test_killed_between_its_promotion_and_the_last_push_consumer(bench: Bench) -> None:
    stream = await bench.make_stream(unique("R"), storage="file")
    pushed = {name: f"push.{name}.{stream}" for name in ("one", "two")}
    for name, subject in pushed.items():
        await create_consumer(bench.client, stream, {"durable_name": name, "deliver_subject": subject})
    await bench.publish(stream, [b"%d" % n for n in range(20)])
    async with bench.egress({"stream": stream}):
        await bench.archived_to(stream, 20)
        await back.capture(bench, stream, 20)
    before = await back.contents(bench, stream)
    await bench.delete_stream(stream)
    words = ("restore", "-c", str(configuration(bench, {"stream": stream})), f"site/{stream}", "--allow-elsewhere")
    for point, left in (("promoted", {"one", "two"}), ("delivering", {"two"})):
        done = await floe(*words, env={**os.environ, "FLOE_FAILPOINTS": f"restore.{point}=kill"})
        assert done.code == -signal.SIGKILL, done
        assert not (await stream_info(bench.client, stream)).restore_marker
        there = {each["name"]: each["config"]["deliver_subject"] for each in await list_consumers(bench.client, stream)}
        assert {name for name, subject in there.items() if subject != pushed[name]} == left
    done = await floe(*words)
    assert (done.code, done.out) == (0, f"stream {stream}: was brought back earlier; delivering again: two\n"), done
    there = {each["name"]: each["config"]["deliver_subject"] for each in await list_consumers(bench.client, stream)}
    assert there == pushed
    assert await back.contents(bench, stream) == before
