"""Which chains of a target an operator has paused, in one key of the state bucket beside the target's state.

A resumed chain stays named with the time of its resumption, so that a running service sees that somebody
wants it looked at again. Read back, the value is untrusted: where it is not what this version wrote, the
target does not begin, because a chain that somebody paused must not be carried by mistake; one that is being
carried keeps to what was known. `floe chain resume --all` writes it anew.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import msgspec

from common.chain import Chain
from common.errors import Stopped
from common.exits import command, ways
from common.jetstream.buckets import state_of_ingress
from common.jetstream.kv import KeyValue, KvDocument, state_key
from common.settings.root import Settings
from ingress.checkpoint_store import ROLE, StateStore
from ingress.errors import check_targets

VERSION = 1
PAUSES_ROLE = "pauses"
MOST = 5_000  # chains named in the value, which has to stay far below 1 MiB


class Pause(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Who paused a chain, when (RFC 3339), and why."""

    at: str
    by: str = ""
    note: str = ""


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    target: str
    paused: dict[str, Pause]
    resumed: dict[str, str]


# Made at import: a type that two threads decode for the first time at once ends the process.
_DECODER = msgspec.json.Decoder(_Wire)
_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Pauses:
    """`paused`: the chains that are not carried. `resumed`: when somebody wanted a chain looked at again."""

    paused: Mapping[Chain, Pause] = field(default_factory=dict)
    resumed: Mapping[Chain, str] = field(default_factory=dict)

    def pause(self, chain: Chain, pause: Pause) -> Pauses:
        """With `chain` paused; one that is paused stays as it was."""
        paused = {**self.paused, chain: self.paused.get(chain, pause)}
        return Pauses(paused, {c: at for c, at in self.resumed.items() if c != chain})

    def resume(self, chain: Chain, at: str) -> Pauses:
        """With `chain` carried again, or looked at again where it has stopped by itself."""
        resumed = {**{c: t for c, t in self.resumed.items() if c != chain}, chain: at}
        most = MOST - len(self.paused)
        kept = dict(list(resumed.items())[-most:]) if most > 0 else {}
        return replace(self, paused={c: p for c, p in self.paused.items() if c != chain}, resumed=kept)

    def resume_all(self, at: str) -> Pauses:
        """With every paused chain carried again."""
        found = self
        for chain in self.paused:
            found = found.resume(chain, at)
        return found


class _Form:
    """The stored form of the pauses of one target."""

    def __init__(self, target: str) -> None:
        self._target = target

    def encode(self, pauses: Pauses) -> bytes:
        paused = {str(chain): pause for chain, pause in pauses.paused.items()}
        resumed = {str(chain): at for chain, at in pauses.resumed.items()}
        return _ENCODER.encode(_Wire(VERSION, self._target, paused, resumed))

    def decode(self, raw: bytes) -> Pauses:
        wire = _DECODER.decode(raw)
        if (wire.version, wire.target) != (VERSION, self._target):
            raise ValueError(f"expected {VERSION} of {self._target}, found {wire.version} {wire.target:.80}")
        paused = {Chain.parse(chain): pause for chain, pause in wire.paused.items()}
        return Pauses(paused, {Chain.parse(chain): at for chain, at in wire.resumed.items()})


class PauseStore:
    """The pauses of one target. `states`: its state, for whoever asks what it carries."""

    def __init__(self, bucket: KeyValue, target: str, states: StateStore | None = None) -> None:
        key = state_key(PAUSES_ROLE, target)

        def unreadable(why: str) -> Stopped:
            anew = command("chain resume", f"--target {shlex.quote(target)}", "--all")
            return Stopped(
                f"pauses of target {target} cannot be read: {why}",
                hint=ways((f"restore {key} of {bucket.bucket}; or have nothing paused", anew)),
                code="E-PAUSES",
            )

        self._document, self._states = KvDocument(bucket, key, _Form(target), unreadable), states

    async def read(self) -> Pauses:
        """What is decided now. Raises Stopped (E-PAUSES) for an unreadable value, and as the bucket does."""
        return (await self._document.get())[0] or Pauses()

    async def carried(self) -> list[Chain]:
        """The chains of which the target has a position; none where its state is not known."""
        try:
            state = (await self._states.load()).state if self._states else None
        except Stopped:
            return []
        return [] if state is None else list(state.checkpoint.positions)

    async def change(self, step: Callable[[Pauses], Pauses]) -> Pauses:
        """Have stored what `step` makes of it, whoever else changes it too. Raises as `read`."""
        return await self._document.change(lambda found: step(found or Pauses())) or Pauses()

    async def resume_all(self, at: str) -> Pauses:
        """Have nothing paused, also where what stands there cannot be read. Raises what the bucket raises."""
        found = await self._document.change(lambda found: (found or Pauses()).resume_all(at), anew=True)
        return found or Pauses()


@asynccontextmanager
async def pause_stores(settings: Settings) -> AsyncIterator[dict[str, PauseStore]]:
    """A store for each target, by its name. Raises what connecting raises."""
    check_targets(settings.ingress)
    async with state_of_ingress(settings, "floe chain") as (_, bucket):
        names = [target.stream for target in settings.ingress.targets]
        yield {name: PauseStore(bucket, name, StateStore(bucket, state_key(ROLE, name), name)) for name in names}
