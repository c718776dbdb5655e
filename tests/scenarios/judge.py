"""Was everything carried, once, in order, byte for byte; and does the archive account for every sequence?"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from common.chain import Chain
from common.jetstream.api import stream_info
from common.open import load_settings, open_store
from common.segments.store import SegmentStore
from infra.oracle import (
    Comparison,
    Trace,
    archive_holes,
    archived,
    compare,
    prefixed,
    source_trace,
    target_traces,
    total,
)
from tests.scenarios.load import client_of
from tests.scenarios.world import TARGET, World
from tests.support.basics import PATIENCE

PREFIX = "fleet"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the oracle found between source and archive, and between source and target."""

    archive: Comparison
    target: Comparison
    segments: int

    @property
    def ok(self) -> bool:
        return self.archive.ok and self.target.ok

    def report(self) -> str:
        return f"archive {self.archive.report()}\ntarget {self.target.report()}"


@dataclass(frozen=True, slots=True)
class Source:
    """What a source stream held, under its own subjects and under those of the target."""

    plain: Trace
    mapped: Trace


Sources = dict[Chain, Source]


async def source_of(url: str, stream: str) -> Source:
    """What the stream at `url` holds now."""
    async with client_of(url) as client:
        plain = await source_trace(client, stream)
        return Source(plain, await source_trace(client, stream, prefixed(PREFIX)))


async def sources_of(world: World, stream: str = "NODES") -> Sources:
    """What each site's stream holds now, as the first incarnation of its feed."""
    return {Chain(site, stream): await source_of(server.url, stream) for site, server in world.sites.items()}


async def messages_in(url: str, stream: str) -> int:
    """How many messages the stream holds; 0 where it does not exist."""
    async with client_of(url) as client:
        info = await stream_info(client, stream)
        return info.messages if info else 0


async def carried(world: World, count: int, seconds: float) -> None:
    """Wait until the target holds `count` messages. What is missing then is for the oracle to name."""
    deadline = time.monotonic() + seconds
    while await messages_in(world.central.url, TARGET) < count and time.monotonic() < deadline:
        await asyncio.sleep(0.3)


async def judge(world: World, config: Path, sources: Sources, seconds: float = PATIENCE) -> Verdict:
    """Wait until as much has arrived as the sources hold, then compare message by message."""
    await carried(world, sum(len(source.plain) for source in sources.values()), seconds)
    store = open_store(load_settings(str(config)))
    async with client_of(world.central.url) as client:
        arrived = await target_traces(client, TARGET)
    assert arrived.foreign == 0, f"{arrived.foreign} messages without provenance in the target"
    assert set(arrived.traces) <= set(sources), f"unexpected chains {set(arrived.traces) - set(sources)}"
    verdict = Verdict(
        total(archive_of(store, chain, source.plain) for chain, source in sources.items()),
        total(
            compare(source.mapped, arrived.traces.get(chain, Trace()), name=f"{chain} target")
            for chain, source in sources.items()
        ),
        sum(len(store.list(chain)) for chain in sources),
    )
    if not verdict.ok:
        world.print_tails()
    return verdict


def archive_of(store: SegmentStore, chain: Chain, source: Trace) -> Comparison:
    """What the archive holds of a chain against `source`. Fails where its segments do not account for all."""
    assert archive_holes(store, chain) == [], f"{chain}: holes {archive_holes(store, chain)}"
    for ref in store.list(chain):
        footer = store.footer(ref)
        assert footer.is_balanced(), f"{ref.key}: rows {footer.rows} + ledger {footer.ledger} != coverage"
    return compare(source, Trace.of(archived(store, chain)), name=f"{chain} archive")
