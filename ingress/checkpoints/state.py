"""What ingress remembers of a target, in one key of the state bucket, changed by compare-and-set only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from common.errors import OutcomeUnknown, Stopped
from common.service.pasting import ways
from ingress.checkpoint import TargetState
from ingress.checkpoint_store import from_json, to_json
from ingress.checkpoints.commands import set_command

ROLE = "ingress"
MAX_STATE = 900 * 1024  # bytes; a message of 1 MiB is what a server takes by default


class Entry(Protocol):
    """A value of the bucket and its revision."""

    @property
    def value(self) -> bytes: ...
    @property
    def revision(self) -> int: ...


class Bucket(Protocol):
    """The verbs of `common.jetstream.kv.KeyValue` that are needed here."""

    async def get(self, key: str) -> Entry | None: ...
    async def create(self, key: str, value: bytes) -> int | None: ...
    async def update(self, key: str, value: bytes, revision: int) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Stored:
    """What was read or written: the state (None: there is none yet) and its revision (0: none yet)."""

    state: TargetState | None
    revision: int


class StateMoved(Exception):
    """Another instance, or an operator, changed the stored state: `stored` is what is there now."""

    def __init__(self, stored: Stored) -> None:
        super().__init__("state moved by another instance")
        self.stored = stored


class StateStore:
    """The state of one target under one key."""

    def __init__(self, bucket: Bucket, key: str, target: str) -> None:
        self._bucket = bucket
        self._key = key
        self._target = target

    async def load(self) -> Stored:
        """What is stored now. Raises Stopped where it cannot be read, Unavailable, OutcomeUnknown."""
        entry = await self._bucket.get(self._key)
        if entry is None:
            return Stored(None, 0)
        return Stored(from_json(self._target, entry.value), entry.revision)

    async def save(self, state: TargetState, revision: int) -> Stored | None:
        """Store `state` if the revision still is `revision` (0: if there is no value yet).

        None where it is not: somebody else stored something. An answer that was lost is settled by reading.
        Raises Unavailable, and OutcomeUnknown where reading does not settle it.
        """
        value = to_json(self._target, state)
        if len(value) > MAX_STATE:
            raise Stopped(
                f"state of target {self._target}: expected at most {MAX_STATE} bytes, found {len(value)}",
                hint=ways(
                    (
                        "spread its sources over several targets; or forget chains that are listed no more",
                        set_command(self._target, "--forget-unlisted"),
                    )
                ),
                code="E-STATE-SIZE",
            )
        try:
            written = await self._write(value, revision)
        except OutcomeUnknown:
            return await self._settle(state, value, revision)
        return None if written is None else Stored(state, written)

    async def _write(self, value: bytes, revision: int) -> int | None:
        if revision == 0:
            return await self._bucket.create(self._key, value)
        return await self._bucket.update(self._key, value, revision)

    async def _settle(self, state: TargetState, value: bytes, revision: int) -> Stored | None:
        entry = await self._bucket.get(self._key)
        if entry is None or entry.revision == revision:
            # Not there yet, and perhaps still on its way: writing again can only store the same bytes once.
            written = await self._write(value, revision)
            if written is not None:
                return Stored(state, written)
            entry = await self._bucket.get(self._key)
        if entry is not None and entry.value == value and entry.revision > revision:
            return Stored(state, entry.revision)
        return None
