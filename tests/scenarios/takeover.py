"""Two instances for one target: how soon the other carries when the holder dies, or only sleeps."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from typing import Any

from common.chain import Chain
from common.open import load_settings, open_chains, open_store
from infra.oracle import prefixed
from tests.scenarios.delivery import store_of
from tests.scenarios.delivery_centre import LEASE_SECONDS, PREFIX, Instance
from tests.scenarios.delivery_meter import Meter, until
from tests.scenarios.delivery_writer import Author, Writer
from tests.scenarios.single_centre import SingleCentre, single_centre
from tests.support.basics import PATIENCE
from tests.support.oracle import classes

CHAINS = [Chain("alpha", "NODES"), Chain("beta", "NODES")]
PROMISED = 2.0  # lease times within which the other instance carries
INTENTS = 6  # with so many opened the holder dies, the last of them open
WITHIN = "SIGKILL within an intent"
MARGIN = 3.0  # lease times more for a machine that does other things too


async def take_overs(s3: Any, rng: random.Random, rounds: int, publisher: str = "auto") -> dict[str, Any]:
    """SIGKILL of the holder, SIGSTOP and SIGCONT of the next, SIGKILL within an intent, `rounds` times.

    Exact at the end. Raises AssertionError where the other one does not store within the promised time and
    margin, or where no intent was taken over.
    """
    started = time.monotonic()
    times: dict[str, list[float]] = {"SIGKILL": [], "SIGSTOP": [], WITHIN: []}
    store, sites = store_of(s3), [chain.site for chain in CHAINS]
    async with single_centre(store, sites, ["NODES"], instances=2, publisher=publisher) as at:
        settings = load_settings(str(at.config))
        segments, documents = open_store(settings), open_chains(settings)
        authors = [
            Author(segments, documents, chain, random.Random(rng.random()), prefixed(PREFIX)) for chain in CHAINS
        ]
        for instance in at.instances:
            instance.service.start()
        async with Meter(at.instances) as meter:
            with Writer(authors, random.Random(rng.random()), 400) as writer:
                assert await at.arrived(1, PATIENCE), "nothing was ever carried"
                for _ in range(rounds):
                    for kind, found in times.items():
                        taken_over = _taken_over_within if kind == WITHIN else _taken_over
                        found.append(await taken_over(at, meter, kind))
            compared = await at.judge(writer.expected)
            assert compared.ok, compared.report()
            await _settled(at, meter)  # a process that only begins cannot end well yet
            await at.drain()
        segments.close()
    worst = max(max(each) for each in times.values()) / LEASE_SECONDS
    assert worst <= PROMISED + MARGIN, f"taken over after {worst:.1f} lease times, not {PROMISED}: {times}"
    totals = meter.totals()
    assert totals["intents taken over"] > 0, f"no intent was taken over: {totals}"
    return {
        **{f"seconds after {kind}": [round(one, 2) for one in each] for kind, each in times.items()},
        "worst in lease times": round(worst, 2),
        "take-overs": meter.take_overs,
        **totals,
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


async def _taken_over_within(at: SingleCentre, meter: Meter, kind: str) -> float:
    """Seconds from the end of a holder with an open intent, and the other one's start, to the first message that this
    one stores.
    """
    first = await _settled(at, meter)
    second = next(instance for instance in at.instances if instance is not first)
    second.service.kill()
    second.service.start(FLOE_FAILPOINTS=f"ingress.after_intent=kill@{INTENTS}")
    assert await until(lambda: meter.answers(second), PATIENCE), f"{second.name} does not start"
    first.service.kill()
    took = await until(lambda: meter.holder == second.name or not second.service.runs(), 20 * LEASE_SECONDS)
    assert took, f"nobody took over before {kind}"
    first.service.start()
    assert await until(lambda: not second.service.runs(), PATIENCE), f"{second.name} opened no {INTENTS} intents"
    assert await until(lambda: meter.answers(first), PATIENCE), f"{first.name} does not start"
    started, before = time.monotonic(), await at.stored()
    assert await at.arrived(before + 1, 20 * LEASE_SECONDS), f"nobody took over after {kind}"
    seconds = time.monotonic() - started
    second.service.start()
    return seconds


async def _settled(at: SingleCentre, meter: Meter) -> Instance:
    """The instance that carries, once the other one stands by."""
    by_name = {instance.name: instance for instance in at.instances}
    up = await until(lambda: bool(meter.holder) and all(map(meter.answers, at.instances)), PATIENCE)
    assert up, "nobody carries"
    await asyncio.sleep(LEASE_SECONDS / 2)
    return by_name[meter.holder]
