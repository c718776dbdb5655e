"""What carrying needs of its surroundings; the simulation of crashes stands in for all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from common.chain import Chain
from common.tasks import Stop
from ingress.checkpoint import Intent, TargetState
from ingress.checkpoint_store import Stored
from ingress.rows.rows import Rows


class StateKeeper(Protocol):
    """Where the state is kept (`ingress.checkpoint_store.StateStore`)."""

    async def load(self) -> Stored: ...
    async def save(self, state: TargetState, revision: int) -> Stored | None: ...


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
