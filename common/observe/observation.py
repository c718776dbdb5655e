"""Observation of a chain: the one type that a site, the centre, the archive and a check fill, and `floe status` shows.

Each view names the keys of its JSON and the columns of its table (`ViewFormat`); those of several views are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec

from common.archive.documents import ChainStore, CompactionRun
from common.archive.heartbeats import (
    HEARTBEAT_OVERDUE_S,
    OVERDUE,
    SILENT,
    STANDBY,
    HeartbeatObject,
    StoredHeartbeat,
    newest_by_partition,
)
from common.chain import Chain
from common.clock import format_unix
from common.errors import DataError, Refused
from common.objects.port import ObjectInfo
from common.settings.types import StyledCell, format_age

WORKING_STATES = ("reading", "closing", "deleted", STANDBY)  # states of egress without a time limit
GOOD_STATES = (*WORKING_STATES, "ready", "idle", "done", "new")
ALARM_STATES = ("stopped", "stalled", "lost", "damaged", SILENT, "not held")


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """State of one chain, as far as one observer knows it; the default for anything that it does not know.

    `state`: of the process that archives it, or at the centre `ready idle late lost damaged done`, or `paused`,
    `stopped`, `new` (not begun), `missing` (nothing of its feed is archived); `code`, `why`, `hint`: the reason, and
    the command that helps. `archived`: the last archived sequence, None if there is none; `is_end_known` False: it
    could not be read. `archived_at`: the time of the last archiving. `first`: the first sequence of the chain; `end`:
    the last of its incarnation, None if that has not ended. `source`: the last sequence of the stream. Times are in
    seconds since 1970, by the clock of the store.

    Of a site: `stream`; `open_segment`, as /status shows it; `holder` of its lease, unless `is_holder_known` is False;
    `known_from`: the source of the state. Of the centre: `target`, `publisher`; `position`: the next sequence to
    deliver, None if the target has nothing of the chain; `lag_seconds`: since the first segment that is not in the
    target was stored; `egress`: the last heartbeat of the process that has the chain, which counts as silent after
    `silent_after` seconds. Of the archive: `segments` of all levels, their `size` in bytes, the last compaction `run`.
    Of a check: `missing`: sequences in holes that no operator accepted; `damaged`: keys of objects that are no valid
    segments; `recreated`: seconds since the incarnation began because the stream was recreated or rolled back, None if
    it did not.
    """

    chain: Chain
    state: str = ""
    code: str = ""
    why: str = ""
    hint: str = ""
    archived: int | None = None
    is_end_known: bool = True
    archived_at: float | None = None
    first: int = 1
    end: int | None = None
    source: int | None = None
    stream: str = ""
    open_segment: Mapping[str, Any] | None = None
    holder: str | None = None
    is_holder_known: bool = True
    known_from: str = ""
    target: str = ""
    publisher: str = ""
    position: int | None = None
    lag_seconds: float = 0.0
    egress: StoredHeartbeat | None = None
    silent_after: float = float("inf")
    segments: int = 0
    size: int = 0
    run: CompactionRun | None = None
    missing: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    recreated: float | None = None

    @property
    def unarchived(self) -> int | None:
        """Sequences of the stream after the archive; None if either end is not known."""
        if self.egress is not None:
            return self.egress.heartbeat.unarchived_count(self.chain.incarnation, self.archived or 0)
        return unarchived(self.source, self.archived or 0 if self.is_end_known else None, self.first)

    @property
    def undelivered(self) -> int | None:
        """Archived sequences that are not in the target: an upper bound of the messages. None if the end of the archive
        is not known.
        """
        archived = self.archived or 0
        reach = archived if self.end is None else min(archived, self.end)
        return max(0, reach - (self.position or self.first) + 1) if self.is_end_known else None

    @property
    def lag_sequences(self) -> int | None:
        """Sequences that wait for the process that is observed: ingress for a target, else egress."""
        return self.undelivered if self.target else self.unarchived

    @property
    def source_lag_sequences(self) -> int | None:
        """Sequences of the stream that are not in the target, archived or not; None if egress reported nothing, or the
        archived end is not known.
        """
        left = None if self.egress is None else self.unarchived
        return None if left is None or self.undelivered is None else self.undelivered + left

    @property
    def source_sequence(self) -> int | None:
        """Last sequence of the stream, from NATS or by the last heartbeat; None if it is not known."""
        if self.egress is None:
            return self.source
        return self.egress.heartbeat.last_known_sequence(self.chain.incarnation, self.archived or 0)

    @property
    def egress_state(self) -> str | None:
        """State of egress for the chain; None if no egress process reported it."""
        if self.egress is None:
            return None
        state = self.egress.state(self.silent_after)
        return state if state in (SILENT, OVERDUE) else f"{state} {self.egress.heartbeat.code}".strip()

    @property
    def reason(self) -> str:
        """Reason of the state; without one, that of egress."""
        if self.why or self.egress is None:
            return self.why
        if self.egress_state in (SILENT, OVERDUE):
            return f"no heartbeat of egress since {format_unix(self.egress.modified)}"
        return self.egress.heartbeat.why and f"egress: {self.egress.heartbeat.why}"

    @property
    def needs_operator(self) -> bool:
        """True if it needs an operator: it is stopped, or late or silent for longer than `silent_after`."""
        if self.state in ALARM_STATES or (self.state == "late" and self.lag_seconds > self.silent_after):
            return True
        if self.egress is None:
            return False
        heartbeat = self.egress.heartbeat
        lasts = heartbeat.state not in WORKING_STATES and self.egress.state_duration_s > self.silent_after
        return self.egress_state == SILENT or heartbeat.state == "stopped" or lasts


def unarchived(source: int | None, archived: int | None, first: int = 1) -> int | None:
    """Return the number of sequences up to `source`, the last of the stream, that are not archived; None if an end is
    not known. `first`: of the chain; earlier messages of the stream need not be archived.
    """
    return None if source is None or archived is None else max(0, source - max(archived, first - 1))


# The JSON and the table of `floe status`

WIDE_COLUMNS = ("stream", "known from", "publisher")  # shown with `--wide` only
RowValues = Mapping[str, Callable[[Observation], object]]
CellValues = Mapping[str, Callable[[Observation, float], object]]

ROW_VALUES: RowValues = {
    "chain": lambda o: o.chain.log_context(),
    "last_archived": lambda o: format_unix(o.archived_at),
    "alarm": lambda o: o.needs_operator,
    "why": lambda o: o.reason,
}
CELLS: CellValues = {
    "chain": lambda o, _: str(o.chain),
    "state": lambda o, _: colour_state(o),
    "lag": lambda o, _: o.lag_sequences,
    "last archived": lambda o, now: format_age(None if o.archived_at is None else now - o.archived_at),
    "why": lambda o, _: o.reason,
}


def colour_state(observed: Observation) -> StyledCell:
    """Return the state and the code, in a colour by which an operator sees a stop."""
    colour = "red" if observed.state in ALARM_STATES else "green" if observed.state in GOOD_STATES else "yellow"
    return StyledCell(f"{observed.state} {observed.code}".strip(), colour)


@dataclass(frozen=True, slots=True)
class ViewFormat:
    """Form of one view of `floe status`. `keys`: of its JSON; `columns`: of its table. Each is an attribute of an
    `Observation`, unless `row_values` or `cells`, of this view or of all, has a function of it; that of a cell also
    takes the present, in seconds since 1970.
    """

    name: str
    keys: tuple[str, ...]
    columns: tuple[str, ...]
    row_values: RowValues = field(default_factory=dict)
    cells: CellValues = field(default_factory=dict)

    def row(self, observed: Observation) -> dict[str, object]:
        """Return the object of the JSON."""
        row: dict[str, Any] = {"view": self.name}
        for key in self.keys:
            function = self.row_values.get(key) or ROW_VALUES.get(key)
            value: Any = function(observed) if function else getattr(observed, key)
            row |= value if key == "chain" else {key: value}
        return row

    def cells_of(self, observed: Observation, now: float) -> dict[str, object]:
        """Return the cells by column, at `now`."""
        functions = {**CELLS, **self.cells}
        return {c: functions[c](observed, now) if c in functions else getattr(observed, c) for c in self.columns}


@dataclass(frozen=True, slots=True)
class StatusView:
    """One view of `floe status` at `now`. `details`: lines below the table; `notes`: servers that gave no answer, for
    stderr. `code`: 3 if an operator should act, 75 if something did not answer.
    """

    format: ViewFormat
    chains: Sequence[Observation]
    now: float
    code: int = 0
    details: Sequence[str] = ()
    notes: Sequence[str] = ()

    def rows(self) -> list[dict[str, object]]:
        """Return it for programs."""
        return [self.format.row(each) for each in self.chains]

    def table(self, *, is_wide: bool) -> tuple[list[dict[str, object]], list[str]]:
        """Return it for people: the cells of each row, and the columns to show."""
        columns = [name for name in self.format.columns if is_wide or name not in WIDE_COLUMNS]
        return [self.format.cells_of(each, self.now) for each in self.chains], columns


# Heartbeats in the store


def stored_heartbeats(
    infos: Iterable[ObjectInfo], objects: Iterable[HeartbeatObject | None], now: float
) -> list[StoredHeartbeat]:
    """Return the heartbeats in `objects`, which were read at `infos`, with their ages at `now`."""
    return [
        StoredHeartbeat(each, info.modified, max(0.0, now - info.modified), found.time)
        for info, found in zip(infos, objects, strict=True)
        if found is not None
        for each in found.chains
    ]


def read_heartbeats(documents: ChainStore, now: float, site: str | None = None) -> list[StoredHeartbeat]:
    """Return the heartbeats of a site, or of all, with their ages at `now`. Blocking. Raises Refused without the
    permission to read them.
    """
    infos = documents.list_heartbeats(site)
    return stored_heartbeats(infos, [documents.read_heartbeat(info.key) for info in infos], now)


def current_by_partition(documents: ChainStore, heartbeats: Iterable[StoredHeartbeat]) -> dict[Chain, StoredHeartbeat]:
    """Return the heartbeats as `newest_by_partition`, without overdue ones of partitions that the newest incarnation
    of their feed no longer has. Blocking.
    """
    found, newest, read_chain = (
        newest_by_partition(heartbeats),
        dict[tuple[str, str], Chain](),
        cache(documents.read_chain),
    )
    for chain in (each.heartbeat.chain for each in found.values()):
        newest[chain.site, chain.feed] = max(chain, newest.get((chain.site, chain.feed), chain))

    def is_former(stored: StoredHeartbeat) -> bool:
        chain = stored.heartbeat.chain
        last = newest[chain.site, chain.feed]
        if stored.age > HEARTBEAT_OVERDUE_S and chain.incarnation < last.incarnation:
            with suppress(DataError, Refused):  # of one site: it hides no other
                document = read_chain(last)
                return document is not None and document.partitions <= chain.partition
        return False

    return {partition: stored for partition, stored in found.items() if not is_former(stored)}
