"""Must hold: a target fed by 20 sites × 3 feeds keeps up with 20 segments a second, within its memory."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from tests.scenarios.delivery import store_of
from tests.scenarios.delivery_meter import peak_memory
from tests.scenarios.many_sites_archive import FEEDS, ROWS, SITES, Archive
from tests.scenarios.single_centre import SingleCentre, single_centre
from tests.support.basics import PATIENCE
from tests.support.oracle import classes

RATE = 20.0  # segments a second that arrive
LAG = 15.0  # seconds of arriving segments that may wait at the most, once what was there before is carried
MEMORY = 300 * 2**20  # bytes: the ask of the bench `memory.ingress`, at the default memory_limit


async def many_sites(
    s3: Any, rng: random.Random, segments: int, seconds: float, publisher: str = "auto"
) -> dict[str, Any]:
    """`segments` that are there before ingress starts, then `RATE` a second for `seconds`.

    Raises AssertionError where the target is not exact, ingress falls behind what arrives, or takes more
    memory than it may.
    """
    started = time.monotonic()
    async with single_centre(store_of(s3), SITES, FEEDS, publisher=publisher) as at:
        archive = Archive(at.config, rng.getrandbits(32))
        await asyncio.to_thread(archive.fill, segments)
        found = {"segments before": archive.segments, "seconds to write": round(time.monotonic() - started, 1)}
        found["catch-up segments/s"] = round(await _caught_up(at, archive, segments), 1)
        lags = await _kept_up(at, archive, rng, seconds)
        memory = peak_memory(at.ingress.pid)
        compared = await at.judge(await asyncio.to_thread(archive.expected))
        found |= {
            "segments": archive.segments,
            "median lag in seconds": round(statistics.median(lags), 1),
            "worst lag in seconds": round(max(lags), 1),
            "peak bytes": memory,
            **classes(compared),
            "messages": compared.expected,
            "seconds": round(time.monotonic() - started, 1),
        }
        assert compared.ok, f"{compared.report()}\n{found}"
        assert max(lags) <= LAG, f"expected at most {LAG} s of segments to wait: {found}"
        assert memory <= MEMORY, f"expected at most {MEMORY} bytes: {found}"
        await at.drain()
    return found


async def _caught_up(at: SingleCentre, archive: Archive, segments: int) -> float:
    """Segments a second from the first message in the target to the last of those that were there before."""
    at.ingress.start()
    assert await at.arrived(1, PATIENCE), "nothing was ever carried"
    started, before = time.monotonic(), await at.stored()
    # Above the rate that arrives, else it could never catch up.
    assert await at.arrived(archive.messages, 60 + segments / RATE), "slower than segments arrive"
    return (archive.messages - before) / ROWS / (time.monotonic() - started)


async def _kept_up(at: SingleCentre, archive: Archive, rng: random.Random, seconds: float) -> Sequence[float]:
    """For how many seconds of arrivals ingress was behind, looked at all the time."""
    lags = [0.0]
    arriving = asyncio.create_task(asyncio.to_thread(archive.arrive, rng, RATE, seconds))
    while not arriving.done():
        there = archive.messages
        stored = await at.stored()
        lags.append(max(0.0, there - stored) / ROWS / RATE)
        await asyncio.sleep(0.3)
    await arriving
    return lags
