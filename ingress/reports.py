"""What `floe checkpoint ls` and `floe status` show."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from common.chain import Chain
from common.clock import Clock, SystemClock
from common.jetstream.client import connect
from common.jetstream.kv import KeyValue, state_key
from common.segments.documents import ChainStore
from common.segments.store import SegmentStore
from common.service.output import print_json, table
from common.service.threads import Threads
from common.service.wiring import open_chains, open_store
from common.settings.ingress import TargetSettings
from common.settings.root import Settings
from ingress.checkpoints.intent import Intent, TargetState
from ingress.checkpoints.state import ROLE, StateStore

PARALLEL = 8  # chains that are asked for at the same time

CHECKPOINT_COLUMNS = (
    "target",
    "target_sequence",
    "site",
    "feed",
    "incarnation",
    "partition",
    "position",
    "intent",
)
STATUS_COLUMNS = (
    "target", "site", "feed", "incarnation", "partition",
    "archived", "position", "lag_sequences", "lag_seconds",
)  # fmt: skip

States = Mapping[str, TargetState | None]


async def read_states(settings: Settings) -> States:
    """What is stored of each target, by its name; None where nothing is yet."""
    client = await connect(settings.nats_for("ingress"), name="floe checkpoint")
    try:
        bucket = await KeyValue.open(
            client, settings.ingress.state_bucket, replicas=settings.ingress.kv_replicas or 1
        )
        states = {}
        for target in settings.ingress.targets:
            store = StateStore(bucket, state_key(ROLE, target.stream), target.stream)
            states[target.stream] = (await store.load()).state
        return states
    finally:
        await client.aclose()


# checkpoint ls


async def print_checkpoints(settings: Settings, as_json: bool) -> None:
    """Print the checkpoint of every target of the configuration."""
    states = await read_states(settings)
    if as_json:
        print_json([checkpoint_json(target, state) for target, state in states.items()])
    else:
        table(_checkpoint_rows(states), CHECKPOINT_COLUMNS)


def checkpoint_json(target: str, state: TargetState | None) -> dict[str, Any]:
    """The checkpoint and the open intent of one target; null where nothing is stored."""
    if state is None:
        return {"target": target, "target_sequence": None, "positions": [], "intent": None}
    checkpoint = state.checkpoint
    positions = [
        {**chain.log_context(), "position": at} for chain, at in sorted(checkpoint.positions.items())
    ]
    return {
        "target": target,
        "target_sequence": checkpoint.target_sequence,
        "target_created": checkpoint.target_created,
        "positions": positions,
        "intent": state.intent and _intent_json(state.intent),
    }


def _intent_json(intent: Intent) -> dict[str, Any]:
    rows = [
        {
            **piece.chain.log_context(),
            "first": piece.rows.first,
            "last": piece.rows.last,
            "count": piece.count,
        }
        for piece in intent.pieces
    ]
    return {"base": intent.base, "count": intent.count, "rows": rows}


def _checkpoint_rows(states: States) -> Iterator[dict[str, object]]:
    for target, state in states.items():
        if state is None:
            continue
        intent = {piece.chain: str(piece.rows) for piece in state.intent.pieces} if state.intent else {}
        positions = state.checkpoint.positions
        for chain in sorted({*positions, *intent}):
            yield {
                "target": target,
                "target_sequence": state.checkpoint.target_sequence,
                **chain.log_context(),
                "position": positions.get(chain),
                "intent": intent.get(chain),
            }


# status


@dataclass(frozen=True, slots=True)
class Standing:
    """How far one chain is. `archived`: the end of coverage by its tail, None where there is no tail.

    `position`: None where the target has nothing of it. `lag_seconds`: since the first segment that is not
    carried was stored; 0 where everything is carried.
    """

    target: str
    chain: Chain
    archived: int | None
    position: int | None
    lag_seconds: float

    @property
    def lag_sequences(self) -> int:
        """Archived sequences that are not carried: at least as many as messages."""
        return max(0, (self.archived or 0) - (self.position or 1) + 1)

    def row(self) -> dict[str, object]:
        return {
            "target": self.target,
            **self.chain.log_context(),
            "archived": self.archived,
            "position": self.position,
            "lag_sequences": self.lag_sequences,
            "lag_seconds": round(self.lag_seconds),
        }


async def print_status(settings: Settings, as_json: bool) -> None:
    """Print where every chain of every target stands."""
    standings = await read_standings(settings, SystemClock())
    rows = [standing.row() for standing in standings]
    print_json(rows) if as_json else table(rows, STATUS_COLUMNS)


async def read_standings(settings: Settings, clock: Clock) -> list[Standing]:
    """Where every chain of every target stands, by target and chain."""
    states = await read_states(settings)
    survey = Survey(open_store(settings), open_chains(settings), clock)
    try:
        return await survey.standings(settings.ingress.targets, states)
    finally:
        survey.close()


class Survey:
    """Looks at the archive for `floe status`."""

    def __init__(self, store: SegmentStore, documents: ChainStore, clock: Clock) -> None:
        self._store, self._documents, self._clock = store, documents, clock
        self._threads = Threads("status", PARALLEL)

    async def standings(self, targets: tuple[TargetSettings, ...], states: States) -> list[Standing]:
        """One for each chain that has a tail or a position, by target and chain."""
        tails = set(await self._threads.run(self._documents.tails))
        wanted: list[tuple[str, Chain, int | None]] = []
        for target in targets:
            state = states.get(target.stream)
            positions = state.checkpoint.positions if state else {}
            pairs = {pair for source in target.sources for pair in source.pairs()}
            chains = {chain for chain in tails if (chain.site, chain.feed) in pairs} | {*positions}
            wanted += [(target.stream, chain, positions.get(chain)) for chain in sorted(chains)]
        return list(await asyncio.gather(*(self._standing(*each) for each in wanted)))

    async def _standing(self, target: str, chain: Chain, position: int | None) -> Standing:
        archived = await self._threads.run(self._documents.read_tail, chain)
        at, seconds = position or 1, 0.0
        if archived is not None and archived >= at:
            refs = await self._threads.run(self._store.list, chain, position=at, level=0, limit=1)
            seconds = max(0.0, self._clock.now() - refs[0].modified) if refs else 0.0
        return Standing(target, chain, archived, position, seconds)

    def close(self) -> None:
        """Let go of the threads and the spool folder."""
        self._threads.close()
        self._store.close()
