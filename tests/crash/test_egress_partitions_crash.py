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

import pytest

from infra.local.process import spawn
from tests.support.basics import PATIENCE, at_length, seeded, soon, unique
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


@pytest.mark.parametrize(
    "failpoint",
    [
        at_length("egress.after_end_noted=kill@1"),
        "egress.after_end_noted=kill@3",
        at_length("egress.after_stream_document=kill"),
        at_length("egress.after_chain_document=kill@1"),
        at_length("egress.after_chain_document=kill@2"),
    ],
)
async def test_killed_while_the_incarnation_is_closed(bench: Bench, failpoint: str) -> None:
    stream = await bench.make_stream(unique("T"))
    parts, feed = Partitioned(bench, stream, 3), feed_of(stream, segment={"max_age": "1s"})
    await publish_over(bench, stream, SUBJECTS, 90, "first")
    async with bench.egress(feed_of(stream)):
        await parts.archived_to(90)
    ends, before = parts.ends(), parts.messages()
    await recreate(bench, stream, 120)
    with host(bench, feed, failpoint) as process:
        code = await asyncio.to_thread(process.wait, PATIENCE)
    assert code == -signal.SIGKILL
    with host(bench, feed):
        await parts.archived_to(120, 1)
    assert parts.previous(1) == ends == parts.ends()
    assert parts.messages() == before
    assert len(bench.chains.chains(feed=stream)) == 6
    await parts.same(stream, 1)


@pytest.mark.soak
async def test_three_hosts_killed_at_random_through_recreations(bench: Bench) -> None:
    """Every incarnation that there is begins where all partitions of the one before ended."""
    rng, stream = seeded(), await bench.make_stream(unique("T"))
    parts, feed = Partitioned(bench, stream, 3), feed_of(stream, segment={"max_age": "1s"})
    points = ["egress.after_end_noted", "egress.after_put", "egress.after_stream_document", "egress.after_tail"]
    await publish_over(bench, stream, SUBJECTS, 60, "first")
    async with bench.egress(feed_of(stream)):
        await parts.archived_to(60)
    before = parts.messages()
    await recreate(bench, stream, 90)
    for _ in range(2):
        first, second = (f"{rng.choice(points)}=kill@{rng.randint(1, 3)}" for _ in range(2))
        with host(bench, feed, first), host(bench, feed, second):
            await asyncio.sleep(rng.uniform(2.0, 5.0))
    await publish_over(bench, stream, SUBJECTS, 30, "later")
    with host(bench, feed), host(bench, feed):
        await parts.archived_to(120, 1)
        await soon(lambda: parts.previous(1) == {0: 60, 1: 60, 2: 60})
    assert parts.messages() == before
    assert parts.previous(2) is None
    await parts.same(stream, 1)
