"""Streams that are deleted and created again, while egress is down and while it runs."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import Any

from common.chain import Chain
from common.open import load_settings, open_chains
from infra.awkward import publish_awkward
from tests.scenarios.faults import Outcome
from tests.scenarios.judge import Sources, judge, source_of
from tests.scenarios.load import client_of, make_stream, publish
from tests.scenarios.world import World

SITE = "alpha"


async def recreated_while_down(s3: Any, rng: random.Random) -> Outcome:
    """The stream is made anew, and fills beyond its old end, while egress is down."""
    return await _recreated(s3, rng, running=False)


async def recreated_while_running(s3: Any, rng: random.Random) -> Outcome:
    """The stream is made anew within 30 seconds while egress runs."""
    return await _recreated(s3, rng, running=True)


async def _recreated(s3: Any, rng: random.Random, *, running: bool) -> Outcome:
    with World(s3, SITE) as world:
        started, sources = time.monotonic(), Sources()
        site, central = world.site_config(SITE), world.central_config()
        egress, ingress = world.egress(site), world.ingress(central)
        sources[Chain(SITE, "NODES", 0)] = await _history(world, rng, 500)
        await _archived(world, site, sources)
        if not running:
            assert egress.drain() == 0, egress.tail()
        await _recreate(world)
        sources[Chain(SITE, "NODES", 1)] = await _history(world, rng, rng.choice([200, 900]))
        egress.start()
        await _archived(world, site, sources)
        verdict = await judge(world, central, sources)
        assert egress.drain() == 0, egress.tail()
        assert ingress.drain() == 0, ingress.tail()
        return Outcome(verdict, time.monotonic() - started, Counter({"recreated": 1}))


async def recreated_unput(s3: Any, rng: random.Random) -> Outcome:
    """Messages that egress held when the stream was deleted belong to the old history."""
    with World(s3, SITE, segment={"max_age": "1h", "max_messages": 100_000}) as world:
        started, sources = time.monotonic(), Sources()
        site, central = world.site_config(SITE), world.central_config()
        egress, ingress = world.egress(site), world.ingress(central)
        sources[Chain(SITE, "NODES", 0)] = await _history(world, rng, 400)
        await asyncio.sleep(8)  # egress reads within a second of its start; nothing closes the segment
        await _recreate(world)
        sources[Chain(SITE, "NODES", 1)] = await _history(world, rng, 100)
        await _minted(world, site, 1)
        await asyncio.sleep(3)
        assert egress.drain() == 0, egress.tail()  # the drain puts what incarnation 1 has
        verdict = await judge(world, central, sources)
        assert ingress.drain() == 0, ingress.tail()
        return Outcome(verdict, time.monotonic() - started, Counter({"recreated before the put": 1}))


async def _history(world: World, rng: random.Random, count: int) -> Any:
    """Fill the stream (created on the first call) with `count` messages and read what it then holds."""
    url = world.sites[SITE].url
    async with client_of(url) as client:
        if not await _exists(client):
            await make_stream(client, "NODES", SITE)
        # Nothing is deleted again: egress may have archived it by then, and the source would not show it.
        await publish_awkward(client, "NODES", SITE, rng, 100, deleted_share=0)
        await publish(client, SITE, rng, count)
    return await source_of(url, "NODES")


async def _exists(client: Any) -> bool:
    from common.jetstream.api import stream_info

    return await stream_info(client, "NODES") is not None


async def _recreate(world: World) -> None:
    async with client_of(world.sites[SITE].url) as client:
        await client.api("STREAM.DELETE.NODES")
        await make_stream(client, "NODES", SITE)


async def _archived(world: World, config: Any, sources: Sources, seconds: float = 120) -> None:
    """Wait until the archive reaches the end of the newest history."""
    chain, source = max(sources.items())
    chains = open_chains(load_settings(str(config)))
    deadline = time.monotonic() + seconds
    while (chains.read_tail(chain) or 0) < source.plain.through:
        tails = "\n".join(service.tail() for service in world.services)
        assert time.monotonic() < deadline, f"{chain} not archived within {seconds} s\n{tails}"
        await asyncio.sleep(0.3)


async def _minted(world: World, config: Any, incarnation: int, seconds: float = 120) -> None:
    """Wait until the incarnation exists."""
    chains = open_chains(load_settings(str(config)))
    deadline = time.monotonic() + seconds
    while chains.read_chain(Chain(SITE, "NODES", incarnation)) is None:
        tails = "\n".join(service.tail() for service in world.services)
        assert time.monotonic() < deadline, f"incarnation {incarnation} not minted\n{tails}"
        await asyncio.sleep(0.3)
