"""Two instances for one target: how soon the other carries when the holder dies, or only sleeps."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from typing import Any

from common.chain import Chain
from common.service.wiring import load_settings, open_chains, open_store
from infra.oracle import prefixed
from infra.oracle_targets import classes
from tests.scenarios.delivery import store_of
from tests.scenarios.delivery_centre import LEASE_SECONDS, PREFIX, Instance
from tests.scenarios.delivery_meter import Meter, until
from tests.scenarios.delivery_writer import Author, Writer
from tests.scenarios.single_centre import SingleCentre, single_centre

CHAINS = [Chain("alpha", "NODES"), Chain("beta", "NODES")]
PROMISED = 2.0  # lease times within which the other instance carries
MARGIN = 3.0  # lease times more for a machine that does other things too


async def take_overs(s3: Any, rng: random.Random, rounds: int, publisher: str = "auto") -> dict[str, Any]:
    """SIGKILL of the holder, then SIGSTOP and SIGCONT of the next, `rounds` times; exact at the end.

    Raises AssertionError where the other one does not store within the promised time and margin.
    """
    started = time.monotonic()
    times: dict[str, list[float]] = {"SIGKILL": [], "SIGSTOP": []}
    store, sites = store_of(s3), [chain.site for chain in CHAINS]
    async with single_centre(store, sites, ["NODES"], instances=2, publisher=publisher) as at:
        settings = load_settings(str(at.config))
        segments, documents = open_store(settings), open_chains(settings)
        authors = [
            Author(segments, documents, chain, random.Random(rng.random()), prefixed(PREFIX))
            for chain in CHAINS
        ]
        for instance in at.instances:
            instance.service.start()
        async with Meter(at.instances) as meter:
            with Writer(authors, random.Random(rng.random()), 400) as writer:
                assert await at.arrived(1, 30), "nothing was ever carried"
                for _ in range(rounds):
                    for kind, found in times.items():
                        found.append(await _taken_over(at, meter, kind))
            compared = await at.judge(writer.expected)
            assert compared.ok, compared.report()
            await at.drain()
        segments.close()
    worst = max(max(each) for each in times.values()) / LEASE_SECONDS
    assert worst <= PROMISED + MARGIN, f"taken over after {worst:.1f} lease times, not {PROMISED}: {times}"
    return {
        **{f"seconds after {kind}": [round(one, 2) for one in each] for kind, each in times.items()},
        "worst in lease times": round(worst, 2),
        "take-overs": meter.take_overs,
        **meter.totals(),
        **classes(compared),
        "messages": compared.expected,
        "seconds": round(time.monotonic() - started, 1),
    }


async def _taken_over(at: SingleCentre, meter: Meter, kind: str) -> float:
    """Seconds from the end (or pause) of the holder to the first message that the other one stores."""
    holder = await _settled(at, meter)
    holder.service.send(signal.SIGKILL if kind == "SIGKILL" else signal.SIGSTOP)
    started = time.monotonic()
    await asyncio.sleep(0.3)  # what it had sent is stored
    before = await at.stored()
    assert await at.arrived(before + 1, 20 * LEASE_SECONDS), f"nobody took over after {kind}"
    seconds = time.monotonic() - started
    if kind == "SIGKILL":
        holder.service.kill()
        holder.service.start()
    holder.service.send(signal.SIGCONT)
    return seconds


async def _settled(at: SingleCentre, meter: Meter) -> Instance:
    """The instance that carries, once the other one stands by."""
    by_name = {instance.name: instance for instance in at.instances}
    up = await until(lambda: bool(meter.holder) and all(map(meter.answers, at.instances)), 30)
    assert up, "nobody carries"
    await asyncio.sleep(LEASE_SECONDS / 2)
    return by_name[meter.holder]
