"""Killed between any two steps that end an incarnation and begin the next: nothing in both or in none."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from infra.local.process import spawn
from tests.support.basics import PATIENCE, unique
from tests.support.commands import ROOT, configuration
from tests.support.egress import Bench, Partitioned, feed_of, publish_over

SUBJECTS = ["0.a", "1.a", "2.a"]


@contextmanager
def host(bench: Bench, feed: dict[str, Any], failpoints: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """One egress process, killed at the end of the block."""
    log = bench.root / f"{unique('host')}.log"
    with log.open("wb") as out:
        process = spawn(
            [sys.executable, "-m", "tests.support.egress_process", str(configuration(bench, feed))],
            cwd=ROOT,
            env={**os.environ, "FLOE_FAILPOINTS": failpoints},
            stdout=out,
            stderr=out,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE)
        print(log.read_text()[-4000:])


async def recreate(bench: Bench, stream: str, count: int) -> None:
    await bench.delete_stream(stream)
    await bench.make_stream(stream)
    await publish_over(bench, stream, SUBJECTS, count, "second")


async def test_killed_while_the_incarnation_is_closed(bench: Bench) -> None:
    stream = await bench.make_stream(unique("T"))
    parts, feed = Partitioned(bench, stream, 3), feed_of(stream, segment={"max_age": "1s"})
    await publish_over(bench, stream, SUBJECTS, 90, "first")
    async with bench.egress(feed_of(stream)):
        await parts.archived_to(90)
    ends, before = parts.ends(), parts.messages()
    await recreate(bench, stream, 120)
    with host(bench, feed, "egress.after_end_noted=kill@3") as process:
        code = await asyncio.to_thread(process.wait, PATIENCE)
    assert code == -signal.SIGKILL
    with host(bench, feed):
        await parts.archived_to(120, 1)
    assert parts.previous(1) == ends == parts.ends()
    assert parts.messages() == before
    assert len(bench.chains.chains(feed=stream)) == 6
    await parts.same(stream, 1)
