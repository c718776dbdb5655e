"""The components that all targets of a process share, and the intervals that no setting changes."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from common.archive.documents import ChainStore
from common.archive.store import SegmentStore
from common.clock import Clock
from common.leasing import LeaseGroup, LeaseScope
from common.nats.client import FloeClient
from common.nats.kv import state_key
from common.observe.monitor import Health
from common.service.process import ThreadPool
from common.settings.ingress import IngressSettings
from ingress.checkpoint import STATE_ROLE
from ingress.discovery.discovery import Discovery
from ingress.errors import STOPPED_RECHECK_S
from ingress.redelivery import REQUEST_CHECK_INTERVAL_S
from ingress.verdict.settle import CONFIRM_INTERVAL_S


@dataclass(frozen=True, slots=True)
class IngressTuning:
    """Intervals in seconds: between the three reads that confirm a verdict, until a stopped target is checked again,
    between two reports, between two checks for parked messages to retry, until a stopped chain is checked again.
    """

    confirm_interval_s: float = CONFIRM_INTERVAL_S
    target_recheck_s: float = 10.0
    report_interval_s: float = 1.0
    parked_check_interval_s: float = REQUEST_CHECK_INTERVAL_S
    chain_recheck_s: float = STOPPED_RECHECK_S


@dataclass(frozen=True, slots=True)
class IngressDeps:
    """The components. `connect` opens a new connection to the targets' server. `oversize_lock`: as in `ByteBudget`."""

    settings: IngressSettings
    client: FloeClient
    connect: Callable[[], Awaitable[FloeClient]]
    store: SegmentStore
    documents: ChainStore
    threads: ThreadPool
    discovery: Discovery
    sharing: LeaseGroup
    health: Health
    clock: Clock
    tuning: IngressTuning
    oversize_lock: asyncio.Lock

    @property
    def memory_limit(self) -> int:
        """Bytes for one target. The memory is split over all targets, because one instance may have to hold the leases
        of all of them.
        """
        return self.settings.memory_limit // len(self.settings.targets)


# A target's lease is `ingress.{target}`, with two tokens; a member's key has four.
LEASE_SCOPE = LeaseScope(state_key(STATE_ROLE) + ".*", state_key(STATE_ROLE, "member") + ".", "ingress sharing")


def lease_key(target: str) -> str:
    return state_key(STATE_ROLE, target)
