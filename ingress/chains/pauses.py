"""The chains of a target that an operator has paused, in one key of the state bucket next to the target's state.

A resumed chain stays in the list with the time of its resumption, so that a running service notices that it must
check the chain again. The value is untrusted when it is read back. If this version did not write it, the target does
not begin, because a paused chain must not be replayed by mistake. A target that already runs keeps the decisions that
it knows. `floe chain resume --all` writes a new value.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import msgspec

from common.chain import Chain
from common.errors import Stopped
from common.exits import choices
from common.hints import resume_command
from common.nats.buckets import open_ingress_state
from common.nats.kv import KeyValue, KvDocument, state_key
from common.settings.root import Settings
from ingress.checkpoint import STATE_ROLE, StateStore
from ingress.errors import check_targets

PAUSES_VERSION = 1
PAUSES_ROLE = "pauses"
MAX_CHAINS = 5_000  # chains in the value, which has to stay far below 1 MiB


class Pause(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A pause of a chain: its time (RFC 3339), its author and the reason."""

    at: str
    by: str = ""
    note: str = ""


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    target: str
    paused: dict[str, Pause]
    resumed: dict[str, str]


# Created at import: if two threads decode a type for the first time at once, the process crashes.
_DECODER = msgspec.json.Decoder(_Wire)
_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Pauses:
    """Decisions of operators. `paused`: chains not replayed. `resumed`: the last request to check a chain again."""

    paused: Mapping[Chain, Pause] = field(default_factory=dict)
    resumed: Mapping[Chain, str] = field(default_factory=dict)

    def with_pause(self, chain: Chain, pause: Pause) -> Pauses:
        """Pause a chain. A chain that is paused already keeps its first entry."""
        paused = {**self.paused, chain: self.paused.get(chain, pause)}
        return Pauses(paused, {c: at for c, at in self.resumed.items() if c != chain})

    def with_resume(self, chain: Chain, at: str) -> Pauses:
        resumed = {**{c: t for c, t in self.resumed.items() if c != chain}, chain: at}
        limit = MAX_CHAINS - len(self.paused)
        kept = dict(list(resumed.items())[-limit:]) if limit > 0 else {}
        return replace(self, paused={c: p for c, p in self.paused.items() if c != chain}, resumed=kept)

    def with_all_resumed(self, at: str) -> Pauses:
        found = self
        for chain in self.paused:
            found = found.with_resume(chain, at)
        return found


class _Form:
    """The stored form of the pauses of one target."""

    def __init__(self, target: str) -> None:
        self._target = target

    def encode(self, pauses: Pauses) -> bytes:
        paused = {str(chain): pause for chain, pause in pauses.paused.items()}
        resumed = {str(chain): at for chain, at in pauses.resumed.items()}
        return _ENCODER.encode(_Wire(PAUSES_VERSION, self._target, paused, resumed))

    def decode(self, raw: bytes) -> Pauses:
        wire = _DECODER.decode(raw)
        if (wire.version, wire.target) != (PAUSES_VERSION, self._target):
            raise ValueError(f"expected {PAUSES_VERSION} of {self._target}, found {wire.version} {wire.target:.80}")
        paused = {Chain.parse(chain): pause for chain, pause in wire.paused.items()}
        return Pauses(paused, {Chain.parse(chain): at for chain, at in wire.resumed.items()})


class PauseStore:
    """The pauses of one target. `states`: the store of the target's state, which holds the chains with a position."""

    def __init__(self, bucket: KeyValue, target: str, states: StateStore | None = None) -> None:
        key = state_key(PAUSES_ROLE, target)

        def unreadable(reason: str) -> Stopped:
            return Stopped(
                f"pauses of target {target} cannot be read: {reason}",
                hint=choices((f"restore {key} of {bucket.bucket}; or resume all chains", resume_command(target, None))),
                code="E-PAUSES",
            )

        self._document, self._states = KvDocument(bucket, key, _Form(target), unreadable), states

    async def read(self) -> Pauses:
        """Read the pauses. Raises Stopped (E-PAUSES) for an unreadable value, else as the bucket does."""
        return (await self._document.get())[0] or Pauses()

    async def known_chains(self) -> list[Chain]:
        """Return the chains for which the target has a position; empty if its state is not known."""
        try:
            state = (await self._states.load()).state if self._states else None
        except Stopped:
            return []
        return [] if state is None else list(state.checkpoint.positions)

    async def change(self, step: Callable[[Pauses], Pauses]) -> Pauses:
        """Store the result of `step` on the current value; repeated if another writer was faster. Raises as `read`."""
        return await self._document.change(lambda found: step(found or Pauses())) or Pauses()

    async def resume_all(self, at: str) -> Pauses:
        """Resume all chains, even if the stored value cannot be read. Raises as the bucket does."""
        found = await self._document.change(lambda old: (old or Pauses()).with_all_resumed(at), allow_unreadable=True)
        return found or Pauses()


@asynccontextmanager
async def pause_stores(settings: Settings) -> AsyncIterator[dict[str, PauseStore]]:
    check_targets(settings.ingress)
    async with open_ingress_state(settings, "floe chain") as (_, bucket):
        names = [target.stream for target in settings.ingress.targets]
        yield {name: PauseStore(bucket, name, StateStore(bucket, state_key(STATE_ROLE, name), name)) for name in names}
