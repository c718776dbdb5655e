"""What carrying needs of its surroundings; the simulation of crashes stands in for all of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from common.chain import Chain
from common.tasks import Stop
from ingress.checkpoint import Intent, TargetState
from ingress.checkpoint_store import Stored
from ingress.rows.rows import Rows
from ingress.verdict.verdict import Origin, Sending, Settled, TargetReading, Unread


class StateKeeper(Protocol):
    """Where the state is kept (`ingress.checkpoint_store.StateStore`)."""

    async def load(self) -> Stored: ...
    async def save(self, state: TargetState, revision: int) -> Stored | None: ...


class Looker(Protocol):
    """Who looks at the target (`ingress.verdict.verdict.Target`)."""

    async def read(self) -> TargetReading | None: ...
    async def read_fresh(self) -> TargetReading | None: ...
    async def origins(self, places: Collection[int]) -> Mapping[int, Origin | Unread]: ...
    async def described(self, place: int) -> str: ...


class Settling(Protocol):
    """Who settles what is unclear: `ingress.verdict.settle.Reconciler` for exclusive targets,
    `ingress.verdict.settle.SharedSettler` for others.
    """

    @property
    def steps_over(self) -> bool: ...  # messages of others
    @property
    def sending(self) -> Sending: ...  # what this process sent of the open intent
    async def first(self) -> tuple[Stored, TargetReading | None]: ...
    async def settle(self, known: Stored, rows: Rows | None) -> Settled: ...
    async def check_moved(self, known: Stored) -> None: ...
    def check_lease(self) -> None: ...


class Recaller(Protocol):
    """Who finds the rows of an open intent again (`ingress.chains.recall.Recall`)."""

    async def rows(self, intent: Intent, stored: int) -> Rows: ...


class RowSource(Protocol):
    """Who has rows ready (`ingress.chains.prefetch.Prefetcher`)."""

    @property
    def recall(self) -> Recaller: ...
    async def take(self, stop: Stop, seconds: float) -> Rows | None: ...
    def release(self, rows: Rows) -> None: ...
    def closed(self, positions: Mapping[Chain, int]) -> None: ...
    def reset(self, positions: Mapping[Chain, int]) -> None: ...


class Tenure(Protocol):
    """The right to carry (`common.jetstream.lease.Lease`)."""

    def is_usable(self) -> bool: ...
