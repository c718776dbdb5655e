"""View of a site for `floe status`: each partition, from the running process, NATS and the store.

The process at `egress.monitor.listen` knows most: the open segment, and the hint of a stop. If it does not answer, or
another host has the partition, the heartbeats in the store and the archive provide the rest. The view names its source.
"""

import asyncio
import http.client
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field, replace
from typing import Any

from common.archive.documents import ChainStore
from common.archive.heartbeats import OVERDUE, SILENT, STANDBY, StoredHeartbeat, newest_by_partition
from common.chain import Chain
from common.cli import StatusView, StyledCell, format_age
from common.clock import SystemClock, format_time
from common.errors import DataError, OutcomeUnknown, Refused, Unavailable
from common.exits import EXIT_RETRY_LATER
from common.hints import resolve_command
from common.nats.api import stream_info
from common.nats.buckets import optional_leases
from common.nats.client import connect
from common.nats.lease import format_owner, new_owner
from common.observe.monitor import fetch
from common.open import open_for_view
from common.service.process import ThreadPool
from common.settings.egress import EgressMonitorSettings
from common.settings.root import Settings
from common.settings.types import duration_words, size_words
from egress.partition import Partition, all_partitions, lease_key

COLUMNS = (
    "chain", "state", "archived", "source", "lag", "open segment", "closes", "last archived", "holder", "stream",
    "known from", "why",
)  # fmt: skip
NARROW_COLUMNS = tuple(name for name in COLUMNS if name not in ("stream", "known from"))
NOT_HELD, UNKNOWN = "not held", "unknown"
ALARM_STATES = ("stopped", "stalled", SILENT, NOT_HELD)
STATE_COLOURS = {**dict.fromkeys(("reading", "closing", STANDBY), "green"), **dict.fromkeys(ALARM_STATES, "red")}


@dataclass(frozen=True, slots=True)
class NatsState:
    """Answers of NATS. `holders`: by partition, None if no process holds the lease; `sources`: the last sequence by
    stream, None if there is no such stream. `failure`: the reason that nothing was answered, empty if there is none.
    """

    holders: Mapping[Chain, str | None] = field(default_factory=dict)
    sources: Mapping[str, int | None] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True, slots=True)
class StoreState:
    """State of the site in the store. `tails`: the end of each chain and the time it was written; `heartbeats`: the
    newest heartbeat of each partition, none if they may not be read. `failure`: the reason that the store did not
    answer.
    """

    tails: Mapping[Chain, tuple[int | None, float]] = field(default_factory=dict)
    heartbeats: Mapping[Chain, StoredHeartbeat] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """Status of one partition. `shown`: the status from the monitor of the process that has it, empty if it is not
    known; `stored`: the newest heartbeat, which counts as silent after `silent_after` seconds; `tail`: the chain's
    end in the store and the time it was written, None if there is none, or if the store was not read (`store_read`).
    """

    partition: Partition
    chain: Chain
    shown: Mapping[str, Any]
    stored: StoredHeartbeat | None
    answers: NatsState
    tail: tuple[int | None, float] | None
    silent_after: float
    store_read: bool = True

    @property
    def known_from(self) -> str:
        """Source of the status."""
        return "monitor" if self.shown else "sign of life" if self.stored else "store"

    @property
    def state(self) -> str:
        """State from the process; otherwise from the lease and the heartbeat."""
        if self.shown:
            return str(self.shown["state"])
        if not self.answers.failure and self.answers.holders.get(self.partition.chain) is None:
            return NOT_HELD
        if self.stored is None:
            return UNKNOWN
        return self.stored.state(self.silent_after)

    @property
    def archived(self) -> int | None:
        """Last sequence archived, from the process or the store; None if there is none, or if it is not known."""
        end = self.shown.get("end") or (self.tail[0] if self.tail else None)
        return end or None

    @property
    def source(self) -> int | None:
        """Last sequence of the stream: from NATS now, or the last that the process received."""
        if (last_sequence := self.answers.sources.get(self.partition.stream)) is not None:
            return last_sequence
        last = self.shown.get("source_last")
        return last if last is not None else self.stored.heartbeat.source_last if self.stored else None

    @property
    def lag(self) -> int | None:
        """Sequences of the stream that are not archived; None if the end of the stream or archive is not known."""
        is_stored_known = self.store_read and (self.tail is None or self.tail[0] is not None)
        is_known = is_stored_known or self.shown.get("end") is not None
        if not is_known or self.source is None:
            return None
        return max(0, self.source - max(self.archived or 0, self._first - 1))

    @property
    def _first(self) -> int:
        """First sequence of the chain, 1 if it is not known; earlier messages of the stream need not be archived."""
        heartbeat = self.stored.heartbeat if self.stored else None
        known = heartbeat.first if heartbeat and heartbeat.chain.incarnation == self.chain.incarnation else None
        return int(self.shown.get("first") or known or 1)

    @property
    def reason(self) -> str:
        if self.state == NOT_HELD:
            return "no process holds its lease: egress does not archive it"
        if self.shown or self.stored is None:
            return str(self.shown.get("why", ""))
        if self.state in (SILENT, OVERDUE):
            return f"no heartbeat for {duration_words(self.stored.age)}"
        return self.stored.heartbeat.why

    @property
    def code(self) -> str:
        return str(self.shown.get("code", "")) if self.shown or self.stored is None else self.stored.heartbeat.code

    @property
    def hint(self) -> str:
        """Advice for a partition that stopped or waits."""
        if self.shown:
            return str(self.shown.get("hint", ""))
        is_stopped = self.stored is not None and self.stored.heartbeat.state == "stopped"
        return resolve_command(self.chain.feed) if is_stopped else ""

    @property
    def holder(self) -> str | None:
        """Holder of the lease, for people."""
        if (found := self.answers.holders.get(self.partition.chain)) is not None:
            return format_owner(found)
        return None

    @property
    def is_alarming(self) -> bool:
        """True if an operator ought to check the partition."""
        return self.state in ALARM_STATES

    def row(self) -> dict[str, object]:
        """Return the object for the JSON list."""
        return {
            "view": "site",
            **self.chain.log_context(),
            "stream": self.partition.stream,
            "state": self.state,
            "code": self.code,
            "archived": self.archived,
            "last_archived": None if self.tail is None else format_time(int(self.tail[1]) * 1_000_000_000),
            "source_sequence": self.source,
            "lag_sequences": self.lag,
            "open_segment": self.shown.get("open_segment"),
            "holder": self.answers.holders.get(self.partition.chain),
            "known_from": self.known_from,
            "alarm": self.is_alarming,
            "why": self.reason,
            "hint": self.hint,
        }

    def cells(self, now: float) -> dict[str, object]:
        """Return the row of the table at `now`."""
        held = self.shown.get("open_segment")
        return {
            "chain": str(self.chain),
            "state": StyledCell(f"{self.state} {self.code}".strip(), STATE_COLOURS.get(self.state, "yellow")),
            "archived": self.archived,
            "source": self.source,
            "lag": self.lag,
            "open segment": open_segment_text(held) if held else "none" if "open_segment" in self.shown else None,
            "closes": closing_text(held) if held else None,
            "last archived": format_age(None if self.tail is None else now - self.tail[1]),
            "holder": self.holder or ("?" if self.answers.failure else StyledCell("none", "red")),
            "stream": self.partition.stream,
            "known from": self.known_from,
            "why": self.reason,
        }


def open_segment_text(held: Mapping[str, Any]) -> str:
    """Describe the contents of the open segment, for people."""
    count, size, age = held["messages"], size_words(held["bytes"]), duration_words(held["age_seconds"])
    return f"{count} {'message' if count == 1 else 'messages'}, {size}, {age}"


def closing_text(held: Mapping[str, Any]) -> str:
    """Describe the limits that close it, for people."""
    return f"in {duration_words(held['closes_in_seconds'])} or at {size_words(held['max_size'])}"


async def site_view(settings: Settings) -> StatusView:
    """Return each partition of the site, from the sources that answer. Raises Refused if the store or NATS refuses the
    credential.
    """
    partitions, clock = all_partitions(settings.site, settings.egress.feeds), SystemClock()
    listen, notes = settings.egress.monitor.listen, list[str]()
    with closing(ThreadPool("status", 8)) as threads:
        first = asyncio.gather(
            threads.run(fetch_status, settings.egress.monitor),
            threads.run(_read_store, open_for_view(settings)[1], settings.site, clock.now()),
        )
        (shown, stored), answers = await asyncio.gather(first, _query_nats(settings, partitions, first))
    if stored.failure:
        notes.append(f"the store does not answer: {stored.failure}")
    if answers.failure:
        notes.append(f"NATS does not answer: {answers.failure}")
    if shown is None:
        where = f"at {listen}" if listen else "(egress.monitor.listen is empty)"
        notes.append(f"no process answers {where}: open segments are unknown, the rest comes from the store")
    statuses, tails, heartbeats = chains_of_status(shown or {}, settings.site), stored.tails, stored.heartbeats
    found = []
    for each in partitions:
        of_chain, heartbeat = statuses.get(each.chain, {}), heartbeats.get(each.chain)
        shown_chain = replace(each.chain, incarnation=of_chain.get("incarnation", 0))
        chain = _newest(each.chain, [shown_chain, *tails, *([heartbeat.heartbeat.chain] if heartbeat else [])])
        known = of_chain, heartbeat, answers, tails.get(chain)
        found.append(PartitionStatus(each, chain, *known, settings.ingress.silent_after, not stored.failure))
    now, details = clock.now(), list[str]()
    for status in found:
        if status.hint:
            lines = status.hint.split("\n")
            details += [f"{status.chain} {status.state}: {status.reason}", *(f"  {line}" for line in lines)]
    is_alarming = any(each.is_alarming for each in found)
    code = DataError.exit_code if is_alarming else EXIT_RETRY_LATER if answers.failure or stored.failure else 0
    rows, cells = [each.row() for each in found], [each.cells(now) for each in found]
    return StatusView("site", rows, cells, COLUMNS, NARROW_COLUMNS, code, details, notes)


def _newest(chain: Chain, known: Iterable[Chain]) -> Chain:
    """Return the newest incarnation of `chain` among those known."""
    return max((each for each in known if replace(each, incarnation=0) == chain), default=chain)


async def _query_nats(settings: Settings, partitions: Sequence[Partition], first: asyncio.Future[Any]) -> NatsState:
    """Query NATS. `first`: the reads of the archive's end. Streams are queried after it, so that none ends before its
    archive.
    """
    try:
        title = f"floe egress {settings.site} status"
        async with aclosing(await connect(settings.nats_for("egress"), name=title)) as client:
            leases = optional_leases(client, settings.egress, new_owner(settings.instance), client.clock)
            holders = {each.chain: await leases.get_owner(lease_key(each.chain)) for each in partitions}
            await asyncio.wait({first})
            infos = {name: await stream_info(client, name) for name in {each.stream for each in partitions}}
    except (Unavailable, OutcomeUnknown) as error:
        return NatsState(failure=error.message)
    return NatsState(holders, {name: info.last_sequence if info else None for name, info in infos.items()})


# Blocking calls


def fetch_status(settings: EgressMonitorSettings) -> dict[str, Any] | None:
    """Return the /status of the process at `listen`; None if none answers."""
    try:
        found = json.loads(fetch(settings, "/status"))
    except (OSError, http.client.HTTPException, ValueError):
        return None
    return found if isinstance(found, dict) else None


def chains_of_status(document: Mapping[str, Any], site: str) -> dict[Chain, dict[str, Any]]:
    """Return the parts of a /status, also that of several workers, for the chains of `site` that it has."""
    found: dict[Chain, dict[str, Any]] = {}
    for each in document.get("workers", {"": document}).values():
        for part, status in each.get("parts", {}).items():
            role, _, name = part.partition(" ")
            feed, _, number = name.partition("/")
            if role == "egress" and status.get("site") == site and status.get("state", STANDBY) != STANDBY:
                found[Chain(site, feed, partition=int(number or 0))] = status
    return found


def _read_store(documents: ChainStore, site: str, now: float) -> StoreState:
    try:
        listed = documents.list_tails(site).items()
        tails = {chain: (documents.read_tail(chain), info.modified) for chain, info in listed}
        return StoreState(tails, _heartbeats(documents, site, now))
    except (Unavailable, OutcomeUnknown) as error:
        return StoreState(failure=error.message)


def _heartbeats(documents: ChainStore, site: str, now: float) -> dict[Chain, StoredHeartbeat]:
    try:
        infos = documents.list_heartbeats(site)
    except Refused:
        return {}
    found = ((info, documents.read_heartbeat(info.key)) for info in infos)
    return newest_by_partition(
        StoredHeartbeat(sign, info.modified, max(0.0, now - info.modified), alive.time)
        for info, alive in found
        if alive is not None
        for sign in alive.chains
    )
