"""The components that all targets of a process share, and the intervals that no setting changes."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from common.clock import Clock
from common.jetstream.client import FloeClient
from common.jetstream.kv import state_key
from common.leasing import LeaseGroup, LeaseScope
from common.segments.documents import ChainStore
from common.segments.store import SegmentStore
from common.service.monitor import Health
from common.service.process import Threads
from common.settings.ingress import IngressSettings
from ingress.checkpoint_store import ROLE
from ingress.discovery.discovery import Discovery
from ingress.errors import LOOK_AT_STOPPED
from ingress.redelivery import SPACING as RETRY_SPACING
from ingress.verdict.settle import LOOK_SPACING


@dataclass(frozen=True, slots=True)
class IngressTuning:
    """Intervals in seconds: between the three reads that confirm a verdict, until a stopped target is checked again,
    between two reports, between two checks for parked messages to retry, until a stopped chain is checked again.
    """

    look_spacing: float = LOOK_SPACING
    reexamine: float = 10.0
    watch: float = 1.0
    parked: float = RETRY_SPACING
    look_at_stopped: float = LOOK_AT_STOPPED


@dataclass(frozen=True, slots=True)
class IngressDeps:
    """The components. `connect` opens a new connection to the targets' server. `alone`: as in `ByteBudget`."""

    settings: IngressSettings
    client: FloeClient
    connect: Callable[[], Awaitable[FloeClient]]
    store: SegmentStore
    documents: ChainStore
    threads: Threads
    discovery: Discovery
    sharing: LeaseGroup
    health: Health
    clock: Clock
    pace: IngressTuning
    alone: asyncio.Lock

    @property
    def memory_limit(self) -> int:
        """Bytes for one target. The memory is split over all targets, because one instance may have to hold the leases
        of all of them.
        """
        return self.settings.memory_limit // len(self.settings.targets)


# A target's lease is `ingress.{target}`, with two tokens; a member's key has four.
SCOPE = LeaseScope(state_key(ROLE) + ".*", state_key(ROLE, "member") + ".", "ingress sharing")


def lease_key(target: str) -> str:
    return state_key(ROLE, target)
