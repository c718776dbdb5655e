"""What `floe status` shows: where each chain of each target stands, by state, target and archive."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from common.chain import Chain
from common.clock import Clock, SystemClock
from common.errors import ConfigError, FloeError, Stopped
from common.jetstream.client import FloeClient, connect
from common.jetstream.kv import KeyValue, state_key
from common.jetstream.streams import stream_info
from common.segments.documents import ChainStore
from common.segments.store import SegmentStore
from common.service.output import print_json, table
from common.service.threads import Threads
from common.service.wiring import open_chains, open_store
from common.settings.ingress import SourceSettings, TargetSettings
from common.settings.root import Settings
from ingress.chains.looking import look
from ingress.chains.plan import ChainPlan, Phase
from ingress.checkpoints.intent import TargetState
from ingress.checkpoints.state import ROLE, StateStore
from ingress.decisions.pauses import PauseStore
from ingress.preflight import control_headers
from ingress.publishing.choice import choose, offered
from ingress.verdicts.shared import judge_shared
from ingress.verdicts.target import read
from ingress.verdicts.verdict import Finding, judge

PARALLEL = 8  # chains that are asked for at the same time
LOOKS = 3  # at a target that a running service moves on meanwhile

STATUS_COLUMNS = (
    "target", "publisher", "site", "feed", "incarnation", "partition", "phase",
    "archived", "position", "lag_sequences", "lag_seconds", "why",
)  # fmt: skip


# One target


@dataclass(frozen=True, slots=True)
class Sight:
    """What one target looks like. `state`: None where nothing is stored; `publisher`: how it is carried,
    empty where it cannot be; `stopped`: why ingress would stop, empty where it would not.
    """

    state: TargetState | None = None
    publisher: str = ""
    stopped: str = ""
    paused: frozenset[Chain] = field(default_factory=frozenset)


async def read_sights(settings: Settings) -> dict[str, Sight]:
    """What every target of the configuration looks like, by its name. Raises what connecting raises."""
    client = await connect(settings.nats_for("ingress"), name="floe status")
    try:
        replicas = settings.ingress.kv_replicas or 1
        bucket = await KeyValue.open(client, settings.ingress.state_bucket, replicas=replicas)
        return {each.stream: await _sight(client, bucket, each) for each in settings.ingress.targets}
    finally:
        await client.aclose()


async def _sight(client: FloeClient, bucket: KeyValue, target: TargetSettings) -> Sight:
    try:
        state, why = await _judged(client, bucket, target)
        name, against = await _publisher(client, target)
        pauses = await PauseStore(bucket, target.stream).read()
    except Stopped as error:  # a stored value that nobody can read
        return Sight(stopped=f"{error.code}: {error.message}")
    return Sight(state, name, why or against, frozenset(pauses.paused))


async def _judged(
    client: FloeClient, bucket: KeyValue, target: TargetSettings
) -> tuple[TargetState | None, str]:
    """The stored state, and what speaks against going on; the same state before and after the look."""
    keeper = StateStore(bucket, state_key(ROLE, target.stream), target.stream)
    stored = await keeper.load()
    for _ in range(LOOKS):
        if stored.state is None:
            return None, ""
        reading = await read(client, target.stream)
        verdict = (
            judge(stored.state, reading) if target.exclusive else judge_shared(stored.state, reading, set())
        )
        before, stored = stored, await keeper.load()
        if stored.revision == before.revision:
            return stored.state, "" if verdict.finding is Finding.STORED else _finding(verdict.finding)
    return stored.state, ""


def _finding(finding: Finding) -> str:
    return f"target: {finding.value}"


async def _publisher(client: FloeClient, target: TargetSettings) -> tuple[str, str]:
    """The publisher, and why there is none."""
    info = await stream_info(client, target.stream)
    if info is None:
        return "", "" if target.create else "target: no such stream"
    headers = control_headers(target)
    against = offered(client.server_version, info.config, headers, exclusive=target.exclusive)
    try:
        return choose(target.stream, target.publisher, against), ""
    except ConfigError as error:
        return "", error.message


# One chain


@dataclass(frozen=True, slots=True)
class Standing:
    """How far one chain is. `archived`: the end of coverage by its tail, None where there is no tail.

    `position`: None where the target has nothing of it. `phase`: `ready idle late lost damaged done`, or
    `paused`, `stopped`, `new` (not begun). `lag_seconds`: since the first segment that is not carried was
    stored; 0 where everything is carried. `why`: the hole, or what stops it.
    """

    target: str
    publisher: str
    chain: Chain
    archived: int | None
    position: int | None
    phase: str = str(Phase.IDLE)
    lag_seconds: float = 0.0
    why: str = ""

    @property
    def lag_sequences(self) -> int:
        """Archived sequences that are not carried: at least as many as messages."""
        return max(0, (self.archived or 0) - (self.position or 1) + 1)

    def row(self) -> dict[str, object]:
        """It as one line of the table, or one object of the list."""
        return {
            "target": self.target,
            "publisher": self.publisher,
            **self.chain.log_context(),
            "phase": self.phase,
            "archived": self.archived,
            "position": self.position,
            "lag_sequences": self.lag_sequences,
            "lag_seconds": round(self.lag_seconds),
            "why": self.why,
        }


def with_plan(standing: Standing, plan: ChainPlan, patience: float, now: float) -> Standing:
    """`standing` with what a look at the archive shows. `patience`: seconds until what is late is lost."""
    since = plan.waiting_since
    if plan.stretches:
        since = plan.stretches[0].segment.modified
    age = 0.0 if since is None else max(0.0, now - since)
    phase = Phase.LOST if plan.phase is Phase.LATE and age > patience else plan.phase
    why = f"{plan.hole} is missing" if plan.hole is not None else ""
    return replace(standing, phase=str(phase), lag_seconds=age, why=why)


async def print_status(settings: Settings, as_json: bool) -> None:
    """Print where every chain of every target stands."""
    standings = await read_standings(settings, SystemClock())
    rows = [standing.row() for standing in standings]
    print_json(rows) if as_json else table(rows, STATUS_COLUMNS)


async def read_standings(settings: Settings, clock: Clock) -> list[Standing]:
    """Where every chain of every target stands, by target and chain."""
    sights = await read_sights(settings)
    survey = Survey(open_store(settings), open_chains(settings), clock)
    try:
        return await survey.standings(settings.ingress.targets, sights)
    finally:
        survey.close()


class Survey:
    """Looks at the archive for `floe status`."""

    def __init__(self, store: SegmentStore, documents: ChainStore, clock: Clock) -> None:
        self._store, self._documents, self._clock = store, documents, clock
        self._threads = Threads("status", PARALLEL)

    async def standings(
        self, targets: tuple[TargetSettings, ...], sights: Mapping[str, Sight]
    ) -> list[Standing]:
        """One for each chain that has a tail or a position, by target and chain."""
        tails = set(await self._threads.run(self._documents.tails))
        wanted = []
        for target in targets:
            sight = sights.get(target.stream, Sight())
            sources = {pair: source for source in target.sources for pair in source.pairs()}
            positions = sight.state.checkpoint.positions if sight.state else {}
            chains = {chain for chain in tails if (chain.site, chain.feed) in sources} | {*positions}
            for chain in sorted(chains):
                source = sources.get((chain.site, chain.feed))
                wanted.append(self._standing(target.stream, sight, chain, source))
        return list(await asyncio.gather(*wanted))

    async def _standing(
        self, target: str, sight: Sight, chain: Chain, source: SourceSettings | None
    ) -> Standing:
        positions = sight.state.checkpoint.positions if sight.state else {}
        archived = await self._threads.run(self._documents.read_tail, chain)
        found = Standing(target, sight.publisher, chain, archived, positions.get(chain))
        if archived is not None and archived >= (found.position or 1):
            patience = source.lost_segment_timeout if source else float("inf")
            with suppress(FloeError):  # the tail still tells how far it is
                plan = await self._threads.run(
                    look, self._store, chain, found.position or 1, None, frozenset()
                )
                found = with_plan(found, plan, patience, self._clock.now())
        return _as_decided(found, sight, is_listed=source is not None)

    def close(self) -> None:
        """Let go of the threads and the spool folder."""
        self._threads.close()
        self._store.close()


def _as_decided(standing: Standing, sight: Sight, *, is_listed: bool) -> Standing:
    """What keeps the chain from being carried whatever the archive holds."""
    if sight.stopped:
        return replace(standing, phase="stopped", why=sight.stopped)
    if standing.chain in sight.paused:
        return replace(standing, phase="paused", why=standing.why or "paused by an operator")
    if not is_listed:
        return replace(standing, why="not among `sources` any more")
    if standing.position is None and not standing.why:
        return replace(standing, phase="new")
    return standing
