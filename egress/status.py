"""View of a site for `floe status`: each partition, from the running process, NATS and the store.

The process at `egress.monitor.listen` knows most: the open segment, and the hint of a stop. If it does not answer, or
another host has the partition, the heartbeats in the store and the archive provide the rest. The view names its source.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass, field
from typing import Any

from common.archive.documents import ChainStore
from common.archive.heartbeats import OVERDUE, SILENT, STANDBY, StoredHeartbeat
from common.chain import Chain
from common.clock import SystemClock
from common.errors import ConfigError, DataError, OutcomeUnknown, Refused, Unavailable
from common.exits import EXIT_RETRY_LATER, resolve_command
from common.nats.api import stream_info
from common.nats.client import connect
from common.nats.lease import format_owner, new_owner, optional_leases
from common.observe.monitor import fetch_status
from common.observe.observation import Observation, StatusView, ViewFormat, current_by_partition, read_heartbeats
from common.observe.page import parts_of
from common.open import open_for_view
from common.service.process import ThreadPool
from common.settings.egress import EgressMonitorSettings, FeedSettings
from common.settings.root import Settings
from common.settings.types import StyledCell, duration_words, size_words
from egress.account import deleted_text, uncovered_text
from egress.partition import THIS_INSTANCE, Partition, all_partitions, lease_key

NOT_HELD, UNKNOWN = "not held", "unknown"  # states of a partition without a process that reports
FROM_MONITOR = "monitor"

SITE_FORMAT = ViewFormat(
    "site",
    keys=(
        "chain", "stream", "state", "code", "archived", "last_archived", "source_sequence", "lag_sequences",
        "open_segment", "holder", "known_from", "alarm", "why", "hint",
    ),
    columns=(
        "chain", "state", "archived", "source", "lag", "open segment", "closes", "last archived", "holder", "stream",
        "known from", "why",
    ),
    cells={
        "open segment": lambda o, _: open_segment_text(o.open_segment, has_none=o.known_from == FROM_MONITOR),
        "closes": lambda o, _: o.open_segment and closing_text(o.open_segment),
        "holder": lambda o, _: _holder_text(o),
        "known from": lambda o, _: o.known_from,
    },
)  # fmt: skip


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


def observe_partition(
    partition: Partition,
    chain: Chain,
    shown: Mapping[str, Any],
    stored: StoredHeartbeat | None,
    answers: NatsState,
    tail: tuple[int | None, float] | None,
    silent_after: float,
    *,
    is_store_read: bool = True,
) -> Observation:
    """Return the state of one partition. `shown`: the status from the monitor of the process that has it, empty if it
    is not known; `stored`: the newest heartbeat, which counts as silent after `silent_after` seconds; `tail`: the
    chain's end in the store and the time it was written, None if there is none, or if the store was not read.
    """
    known_from, state, holder = "store", UNKNOWN, answers.holders.get(partition.chain)
    code, why, hint = (str(shown.get(key, "")) for key in ("code", "why", "hint"))
    first, source = shown.get("first"), shown.get("source_last")
    if stored is not None:
        heartbeat = stored.heartbeat
        first = first or (heartbeat.first if heartbeat.chain.incarnation == chain.incarnation else None)
        source = heartbeat.source_last if source is None else source
    if shown:
        known_from, state = FROM_MONITOR, str(shown["state"])
    elif stored is not None:
        known_from, state, code, why = "sign of life", stored.state(silent_after), heartbeat.code, heartbeat.why
        hint = resolve_command(chain.feed) if heartbeat.state == "stopped" else ""
        if state in (SILENT, OVERDUE):
            why = f"no heartbeat for {duration_words(stored.age)}"
    if not (shown or answers.failure or holder is not None):
        state, why = NOT_HELD, "no process holds its lease: egress does not archive it"
    asked = answers.sources.get(partition.stream)
    is_stored_end_known = is_store_read and (tail is None or tail[0] is not None)
    return Observation(
        chain=chain,
        state=state,
        code=code,
        why=why,
        hint=hint,
        archived=shown.get("end") or (tail[0] if tail else None) or None,
        is_end_known=is_stored_end_known or shown.get("end") is not None,
        archived_at=None if tail is None else tail[1],
        first=int(first or 1),
        source=source if asked is None else asked,
        stream=partition.stream,
        open_segment=shown.get("open_segment"),
        holder=holder,
        is_holder_known=not answers.failure,
        known_from=known_from,
    )


def _holder_text(observed: Observation) -> object:
    nobody = StyledCell("none", "red") if observed.is_holder_known else "?"
    return format_owner(observed.holder or "") or nobody


def open_segment_text(held: Mapping[str, Any] | None, *, has_none: bool = False) -> str | None:
    """Describe the contents of the open segment, for people; `none` if it is known that there is none."""
    if not held:
        return "none" if has_none else None
    count, size, age = held["messages"], size_words(held["bytes"]), duration_words(held["age_seconds"])
    return f"{count} {'message' if count == 1 else 'messages'}, {size}, {age}"


def closing_text(held: Mapping[str, Any]) -> str:
    """Describe the limits that close it, for people."""
    return f"in {duration_words(held['closes_in_seconds'])} or at {size_words(held['max_size'])}"


async def site_view(settings: Settings) -> StatusView:
    """Return each partition of the site, from the sources that answer. Raises Refused if the store or NATS refuses the
    credential.
    """
    feeds, clock = [*settings.egress.feeds], SystemClock()
    listen, notes = settings.egress.monitor.listen, list[str]()
    with closing(ThreadPool("status", 8)) as threads:
        first = asyncio.gather(
            threads.run(_read_monitor, settings.egress.monitor),
            threads.run(_read_store, open_for_view(settings)[1], settings.site, clock.now()),
        )
        if settings.egress.patterns:
            shown, stored = await first
            known = {*chains_of_status(shown or {}, settings.site), *stored.heartbeats}
            feeds += _matched_feeds(settings, {chain.feed for chain in known})
        partitions = all_partitions(settings.site, feeds)
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
        shown_chain = each.chain.with_incarnation(of_chain.get("incarnation", 0))
        chain = _newest(each.chain, [shown_chain, *tails, *([heartbeat.heartbeat.chain] if heartbeat else [])])
        state = of_chain, heartbeat, answers, tails.get(chain), settings.ingress.silent_after
        found.append(observe_partition(each, chain, *state, is_store_read=not stored.failure))
    parts = parts_of(shown or {})
    details = [text for text in (deleted_text(parts), uncovered_text(parts)) if text]
    for status in found:
        if status.hint:
            lines = status.hint.split("\n")
            details += [f"{status.chain} {status.state}: {status.why}", *(f"  {line}" for line in lines)]
    is_alarming = any(each.needs_operator for each in found)
    code = DataError.exit_code if is_alarming else EXIT_RETRY_LATER if answers.failure or stored.failure else 0
    return StatusView(SITE_FORMAT, found, clock.now(), code, details, notes)


def _matched_feeds(settings: Settings, names: Iterable[str]) -> list[FeedSettings]:
    """Return those of the feeds `names` that patterns match."""
    found = (settings.egress.feed_named(name) for name in sorted(names))
    return [each for each in found if each is not None and each.streams]


def _newest(chain: Chain, known: Iterable[Chain]) -> Chain:
    """Return the newest incarnation of `chain` among those known."""
    return max((each for each in known if each.with_incarnation(0) == chain), default=chain)


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


def _read_monitor(settings: EgressMonitorSettings) -> dict[str, Any] | None:
    """Return the /status of the process at `listen`; None if none answers."""
    with suppress(ConfigError, Unavailable):
        return fetch_status(settings, "egress.monitor.listen")
    return None


def chains_of_status(document: Mapping[str, Any], site: str) -> dict[Chain, dict[str, Any]]:
    """Return the parts of a /status, also that of several workers, for the chains of `site` that it has."""
    found: dict[Chain, dict[str, Any]] = {}
    for name, status in parts_by_chain(document).items():
        feed, _, number = name.partition("/")
        if status.get("site") == site and status.get("state", STANDBY) != STANDBY:
            found[Chain(site, feed, partition=int(number or 0))] = status
    return found


def parts_by_chain(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the part of each chain in a /status, by `FEED` or `FEED/PARTITION`. Each worker shows every chain: the
    holder of its lease counts, else one that is not on standby.
    """
    found: dict[str, dict[str, Any]] = {}
    for each in document.get("workers", {"": document}).values():
        for part, status in each.get("parts", {}).items():
            role, _, name = part.partition(" ")
            if role == "egress" and (name not in found or _weight(status) >= _weight(found[name])):
                found[name] = status
    return found


def _weight(status: Mapping[str, Any]) -> int:
    if status.get("state", STANDBY) == STANDBY:
        return 0
    return 2 if status.get("holder") == THIS_INSTANCE else 1


def _read_store(documents: ChainStore, site: str, now: float) -> StoreState:
    try:
        listed = documents.list_tails(site).items()
        tails = {chain: (documents.read_tail(chain), info.modified) for chain, info in listed}
        heartbeats = list[StoredHeartbeat]()
        with suppress(Refused):
            heartbeats = read_heartbeats(documents, now, site)
        return StoreState(tails, current_by_partition(documents, heartbeats))
    except (Unavailable, OutcomeUnknown) as error:
        return StoreState(failure=error.message)
