"""The demo's last step: every chain read in three places, by Floe's own code and by Spark, and compared."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field

from common.chain import Chain
from common.errors import FloeError
from common.jetstream.client import FloeClient
from common.open import open_chains, open_store
from common.segments.segment import Message, Reason, SegmentRef
from common.segments.store import SegmentStore
from common.sequences import Stretch, cover
from common.settings import loader
from infra.demo.result import Readings
from infra.demo.world import ADVISORIES, AWKWARD, NODES, PREFIX, SITES, STREAMS, TARGET, World, run_command
from infra.oracle import (
    Arrived,
    Trace,
    archive_holes,
    archived,
    prefixed,
    read_stream,
    source_trace,
    target_traces,
)

# What may follow on what: a node appears, falls silent, and comes back or is forgotten.
FOLLOWS = {
    "": {"new"},
    "new": {"timeout"},
    "timeout": {"recover", "expire"},
    "recover": {"timeout"},
    "expire": {"new"},
}
MAX_PROBLEMS = 5


@dataclass(slots=True)
class Stories:
    """The advisories of one stream. `counts`: by event; `problems`: what cannot be true, a few lines."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    _last: dict[str, str] = field(default_factory=dict)
    _ids: set[str] = field(default_factory=set)

    def take(self, message: Message) -> None:
        """Note one advisory."""
        document = json.loads(message.payload)
        event, value, identity = document["event"], document["value"], document["event_id"]
        before, self._last[value] = self._last.get(value, ""), event
        self.counts[event] += 1
        if event not in FOLLOWS[before]:
            self._note(f"{value}: {event} after {before or 'nothing'}")
        if identity in self._ids:
            self._note(f"{value}: {event} twice under one id")
        self._ids.add(identity)

    def _note(self, problem: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)


async def stories(client: FloeClient, stream: str) -> Stories:
    """Read all advisories of the stream."""
    told = Stories()
    await read_stream(client, stream, told.take)
    return told


@dataclass(frozen=True, slots=True)
class ArchivedChain:
    """One chain of the archive, read through the cover rule. `segments`: how many by level.

    `stored_bytes`: of the segments that the cover takes; `waiting_bytes`: of those merged into others since.
    `left_out`: messages left out by choice, as the ledgers of those segments say.
    """

    trace: Trace = field(default_factory=Trace)
    segments: Mapping[int, int] = field(default_factory=dict)
    stored_bytes: int = 0
    waiting_bytes: int = 0
    left_out: int = 0
    holes: tuple[str, ...] = ()


def read_archive(world: World) -> dict[Chain, ArchivedChain]:
    """All chains in the bucket, with subjects as the target has them."""
    settings = loader.load(str(world.central_config))
    with closing(open_store(settings)) as store:
        return {chain: _read_chain(store, chain) for chain in open_chains(settings).chains()}


def _read_chain(store: SegmentStore, chain: Chain) -> ArchivedChain:
    refs = store.list(chain)
    taken = {stretch.segment.key: stretch.segment.size for stretch in cover(refs, 1)}
    return ArchivedChain(
        Trace.of(archived(store, chain), prefixed(PREFIX)),
        Counter(ref.level for ref in refs),
        sum(taken.values()),
        sum(ref.size for ref in refs if ref.key not in taken),
        sum(_left_out(store, stretch) for stretch in cover(refs, 1)),
        tuple(str(hole) for hole in archive_holes(store, chain)),
    )


def _left_out(store: SegmentStore, stretch: Stretch[SegmentRef]) -> int:
    """Messages that the segment leaves out by choice, of those that it accounts for in the cover."""
    footer = store.footer(stretch.segment)
    chosen = sum(footer.ledger.counts.get(reason, 0) for reason in (Reason.SAMPLED_OUT, Reason.TOO_OLD))
    if stretch.rows == footer.coverage or not chosen:
        return chosen
    with store.open(stretch.segment, rows=stretch.rows) as reader:
        # Of a part the ledger does not tell; nothing is deleted from the sampled stream, so the rest is.
        return len(stretch.rows) - sum(batch.num_rows for batch in reader.batches(stretch.rows))


async def read_chains(
    clients: Mapping[str, FloeClient], archive: Mapping[Chain, ArchivedChain]
) -> tuple[list[Readings], list[str]]:
    """Each chain as it stands in source, archive and target; and what is wrong beside the messages."""
    arrived = await target_traces(clients["central"], TARGET)
    expected = [Chain(site, stream) for site in clients if site != "central" for stream in STREAMS]
    problems = _strangers(expected, archive, arrived)
    readings = []
    for chain in expected:
        source = await source_trace(clients[chain.site], chain.feed, prefixed(PREFIX))
        held = archive.get(chain, ArchivedChain())
        problems += [f"{chain}: a hole in the archive: {hole}" for hole in held.holes]
        target, delays = arrived.traces.get(chain, Trace()), arrived.delays.get(chain, ())
        sizes = (held.segments, held.stored_bytes, held.waiting_bytes, held.left_out)
        readings.append(Readings(chain, source, held.trace, target, delays, *sizes))
    return readings, problems


async def ask_advisories(clients: Mapping[str, FloeClient]) -> tuple[str, list[str]]:
    """What the sites' advisories say of their nodes, in a sentence; and what cannot be true of it."""
    counts: Counter[str] = Counter()
    problems: list[str] = []
    for site, client in clients.items():
        if site != "central":
            told = await stories(client, ADVISORIES)
            counts += told.counts
            problems += [f"{site}: {problem}" for problem in told.problems]
    return "advisories: " + ", ".join(f"{count:,} {event}" for event, count in counts.items()), problems


def _strangers(expected: list[Chain], archive: Mapping[Chain, object], arrived: Arrived) -> list[str]:
    """Chains and messages that nobody published."""
    found = sorted({*archive, *arrived.traces} - set(expected))
    problems = [f"{chain}: a chain that no site has" for chain in found]
    if arrived.foreign:
        problems.append(f"{arrived.foreign} messages in {TARGET} without provenance")
    return problems


async def ask_spark(world: World, readings: list[Readings]) -> tuple[str, list[str]]:
    """Count the archive's rows with a Spark query; a sentence about it, and what differs from our reading."""
    out = await run_command(world.folder, "spark query", "compaction.report", "-c", str(world.central_config))
    try:
        rows = {Chain.parse(row["chain"]): row for row in json.loads(out)}
    except (ValueError, KeyError, TypeError) as error:
        raise FloeError(f"spark query: expected JSON, found {out[:80]!r}", code="E-DEMO") from error
    problems = []
    for reading in readings:
        counted = rows.get(reading.chain, {}).get("messages", 0)
        if counted != len(reading.archive):
            problems.append(f"{reading.chain}: expected {len(reading.archive)} rows, Spark found {counted}")
    total = sum(row["messages"] for row in rows.values())
    senders = sum(row.get("subjects", 0) for chain, row in rows.items() if chain.feed == NODES)
    return f"Spark, reading the segments: {total:,} messages, {senders:,} nodes registered", problems


WHERE = (SITES[0], AWKWARD)  # the feed that holds every kind of message that is hard to carry


async def ask_drill(world: World) -> tuple[str, list[str]]:
    """Restore one feed into a scratch stream; a sentence about it, and what differs from the archive.

    Raises FloeError where the drill fails, or says nothing that can be read.
    """
    site, feed = WHERE
    command = ("floe", "drill", "-c", str(world.central_config), "--site", site, "--feed", feed, "--json")
    out = await run_command(world.folder, "drill", *command)
    try:
        found = json.loads(out)
        rows, seconds, is_well = found["rows"], found["seconds"], found["ok"]
    except (ValueError, KeyError, TypeError) as error:
        raise FloeError(f"floe drill --json: expected a report, found {out[:80]!r}", code="E-DEMO") from error
    problems = [] if is_well and rows else [f"drill of {site}/{feed}: {out[:500]}"]
    return f"{site}/{feed}: {rows:,} messages restored into a scratch stream in {seconds:.1f} s", problems
