"""What all targets of a process share, and what no user tunes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from common.clock import Clock
from common.jetstream.client import FloeClient
from common.leasing.balancer import Sharing
from common.segments.documents import ChainStore
from common.segments.store import SegmentStore
from common.service.monitor import Health
from common.service.threads import Threads
from common.settings.ingress import IngressSettings
from ingress.chains.attendant import LOOK_AT_STOPPED
from ingress.discovery.discovery import Discovery
from ingress.redelivery import SPACING as RETRY_SPACING
from ingress.verdict.settle import LOOK_SPACING


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds: between the three looks that confirm a verdict, until a stopped target is looked at again,
    between two reports of what goes on, between two looks for parked messages that are asked for, until a
    chain that stopped is looked at again.
    """

    look_spacing: float = LOOK_SPACING
    reexamine: float = 10.0
    watch: float = 1.0
    parked: float = RETRY_SPACING
    look_at_stopped: float = LOOK_AT_STOPPED


@dataclass(frozen=True, slots=True)
class Parts:
    """The components. `connect` opens a fresh connection to the targets' server."""

    settings: IngressSettings
    client: FloeClient
    connect: Callable[[], Awaitable[FloeClient]]
    store: SegmentStore
    documents: ChainStore
    threads: Threads
    discovery: Discovery
    sharing: Sharing
    health: Health
    clock: Clock
    pace: Pace = field(default_factory=Pace)

    @property
    def memory_limit(self) -> int:
        """Bytes for one target. Split over all targets: whoever is left alone holds every one of them."""
        return self.settings.memory_limit // len(self.settings.targets)
