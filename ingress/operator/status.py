"""Views of `floe status` and `checkpoint ls`: the progress of each chain, from state, target and archive."""

import asyncio
from collections.abc import Collection, Coroutine, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain as joined
from typing import Any

import click

from common.archive.catalog import ranges_after_end, replay_command
from common.archive.checks import find_foreign_keys
from common.archive.documents import ChainStore, TargetPositions
from common.archive.heartbeats import OVERDUE, SILENT, STANDBY, StoredHeartbeat, newest_by_partition
from common.archive.keys import suggestion
from common.archive.scan import ChainArchive
from common.archive.store import SegmentStore
from common.chain import Chain
from common.cli import StatusView, StyledCell, format_age, print_json, print_table
from common.clock import NS_PER_S, Clock, SystemClock, format_time
from common.errors import ConfigError, DataError, FloeError, Refused, Stopped
from common.logs import get_logger
from common.nats.api import stream_info
from common.nats.buckets import open_ingress_state
from common.nats.client import FloeClient
from common.nats.kv import KeyValue, state_key
from common.open import open_for_view
from common.service.process import ThreadPool
from common.settings.ingress import SourceSettings, TargetSettings
from common.settings.root import Settings
from common.settings.types import duration_words
from ingress.chains.pauses import PauseStore
from ingress.chains.plan import Phase
from ingress.chains.search import OpenedPlan, plan_from_contents
from ingress.checkpoint import Gap, TargetState
from ingress.checkpoint_store import STATE_ROLE, StateStore
from ingress.errors import check_targets
from ingress.preflight import control_headers
from ingress.publishers.choose import choose_publisher, objections
from ingress.verdict.verdict import Finding, TargetErrors, judge, judge_shared, read_target

log = get_logger(__name__)


WORKING_STATES = ("reading", "closing", STANDBY)  # states of egress without a time limit

MAX_FOREIGN_KEYS = 100_000  # keys that are searched for foreign ones: about 100 requests
PARALLEL_CHAINS = 8  # chains that are read at the same time
READ_ATTEMPTS = 3  # attempts to read a target that a running service changes meanwhile

STATUS_COLUMNS = (
    "target", "chain", "phase", "archived", "carried", "lag", "behind", "last archived", "egress", "source lag",
    "publisher", "why",
)  # fmt: skip
NARROW_STATUS_COLUMNS = tuple(name for name in STATUS_COLUMNS if name != "publisher")
PHASE_COLOURS = {
    **dict.fromkeys((Phase.LOST, Phase.DAMAGED, "stopped"), "red"),
    **dict.fromkeys((Phase.LATE, "paused", "missing"), "yellow"),
}


# One target


@dataclass(frozen=True, slots=True)
class TargetStatus:
    """Status of one target. `state`: None if nothing is stored; `publisher`: its name, empty if none can be chosen;
    `stopped`: the reason why ingress would stop, empty if it would not.
    """

    state: TargetState | None = None
    publisher: str = ""
    stopped: str = ""
    paused: frozenset[Chain] = field(default_factory=frozenset)


async def read_target_statuses(settings: Settings) -> dict[str, TargetStatus]:
    """Return the status of each target, by its name. Raises as connecting does."""
    check_targets(settings.ingress)
    async with open_ingress_state(settings, "floe status") as (client, bucket):
        return {each.stream: await _target_status(client, bucket, each) for each in settings.ingress.targets}


async def _target_status(client: FloeClient, bucket: KeyValue, target: TargetSettings) -> TargetStatus:
    try:
        state, finding = await _judged(client, bucket, target)
        pauses = await PauseStore(bucket, target.stream).read()
    except Stopped as error:  # a stored value that cannot be read
        return TargetStatus(stopped=_stop_text(error))
    publisher, reason = "", "" if finding is None else _stop_text(finding)
    if (info := await stream_info(client, target.stream)) is None:
        reason = reason or ("" if target.create else "target: no such stream")
    else:
        against = objections(client.server_version, info.config, control_headers(target), exclusive=target.exclusive)
        try:
            publisher = choose_publisher(target.stream, target.publisher, against)
        except ConfigError as error:
            reason = reason or error.message
    return TargetStatus(state, publisher, reason, frozenset(pauses.paused))


def _stop_text(error: FloeError) -> str:
    """Return the reason of a stop, and the command that ends it."""
    return f"{error.code}: {error}".replace("\n", " ")


async def _judged(
    client: FloeClient, bucket: KeyValue, target: TargetSettings
) -> tuple[TargetState | None, FloeError | None]:
    """Return the stored state, and the error that ingress would stop with; None if it would not stop."""
    states = StateStore(bucket, state_key(STATE_ROLE, target.stream), target.stream)
    stored = await states.load()
    for _ in range(READ_ATTEMPTS):
        if stored.state is None:
            break
        reading = await read_target(client, target.stream)
        verdict = judge(stored.state, reading) if target.exclusive else judge_shared(stored.state, reading, set())
        before, stored = stored, await states.load()
        if stored.revision == before.revision and verdict.finding is not Finding.STORED:
            return stored.state, TargetErrors(target.stream).error(verdict, [reading] if reading else [])
        if stored.revision == before.revision:
            break
    return stored.state, None


# One chain


@dataclass(frozen=True, slots=True)
class ChainStatus:
    """Progress of one chain. `archived`: the end of coverage by its tail, else by its segments; None without both.

    `position`: None if the target has nothing of it. `phase`: `ready idle late lost damaged done`, or
    `paused`, `stopped`, `new` (not begun), `missing` (nothing of its feed is archived). `lag_seconds`: since the
    first segment that is not in the target was stored; 0 if there is none. `reason`: the hole, or the reason of a
    stop. `last_archived`: when the tail was last written, by the store's clock. `egress`: the last report of the
    process that has the chain, None if there is none; it counts as silent after `silent_after` seconds. `end`: the
    last sequence of the incarnation, None if that has not ended. `first`: its first sequence.
    """

    target: str
    publisher: str
    chain: Chain
    archived: int | None
    position: int | None
    phase: str = str(Phase.IDLE)
    lag_seconds: float = 0.0
    reason: str = ""
    last_archived: float | None = None
    egress: StoredHeartbeat | None = None
    silent_after: float = float("inf")
    end: int | None = None
    first: int = 1

    @property
    def lag_sequences(self) -> int | None:
        """Archived sequences that are not in the target: an upper bound of the messages. None if there is a tail that
        cannot be read: then the archived end is not known.
        """
        if self.archived is None and self.last_archived is not None:
            return None
        archived = self.archived or 0
        reach = archived if self.end is None else min(archived, self.end)
        return max(0, reach - (self.position or self.first) + 1)

    @property
    def source_lag_sequences(self) -> int | None:
        """Sequences of the stream that are not in the target, archived or not; None if egress reported nothing, or the
        archived end is not known.
        """
        if self.egress is None or self.lag_sequences is None:
            return None
        left = self.egress.heartbeat.unarchived_count(self.chain.incarnation, self.archived or 0)
        return None if left is None else self.lag_sequences + left

    @property
    def egress_state(self) -> str | None:
        """State of egress for the chain; None if no egress process reported it."""
        if self.egress is None:
            return None
        state = self.egress.state(self.silent_after)
        return state if state in (SILENT, OVERDUE) else f"{state} {self.egress.heartbeat.code}".strip()

    @property
    def needs_operator(self) -> bool:
        """True if it needs an operator: it is stopped, or late or silent for longer than `silent_after`."""
        if self.phase in ("stopped", Phase.LOST, Phase.DAMAGED):
            return True
        if self.phase == Phase.LATE and self.lag_seconds > self.silent_after:
            return True
        if self.egress is None:
            return False
        heartbeat = self.egress.heartbeat
        lasts = heartbeat.state not in WORKING_STATES and self.egress.state_duration_s > self.silent_after
        return self.egress_state == SILENT or heartbeat.state == "stopped" or lasts

    def row(self) -> dict[str, object]:
        return {
            "view": "centre",
            "target": self.target,
            "publisher": self.publisher,
            **self.chain.log_context(),
            "phase": self.phase,
            "archived": self.archived,
            "last_archived": _time(self.last_archived),
            "position": self.position,
            "lag_sequences": self.lag_sequences,
            "lag_seconds": round(self.lag_seconds),
            "egress": self.egress_state,
            "egress_alive": self.egress and _time(self.egress.modified),
            "source_sequence": self.egress
            and self.egress.heartbeat.last_known_sequence(self.chain.incarnation, self.archived or 0),
            "source_lag_sequences": self.source_lag_sequences,
            "alarm": self.needs_operator,
            "why": self.reason or self._unarchived_reason(),
        }

    def cells(self, now: float) -> dict[str, object]:
        """Return it as one line of the table at `now`, by the store's clock."""
        return {
            "target": self.target,
            "chain": str(self.chain),
            "phase": StyledCell(self.phase, PHASE_COLOURS.get(self.phase, "green")),
            "archived": self.archived,
            "carried": None if self.position is None else self.position - 1,
            "lag": self.lag_sequences,
            "behind": duration_words(self.lag_seconds),
            "last archived": format_age(None if self.last_archived is None else now - self.last_archived),
            "egress": StyledCell(
                self.egress_state, "red" if self.needs_operator else "yellow" if self.egress_state == OVERDUE else ""
            ),
            "source lag": self.source_lag_sequences,
            "publisher": self.publisher or None,
            "why": self.reason or self._unarchived_reason(),
        }

    def _unarchived_reason(self) -> str:
        if self.egress is None:
            return ""
        if self.egress_state in (SILENT, OVERDUE):
            return f"no heartbeat of egress since {_time(self.egress.modified)}"
        return self.egress.heartbeat.why and f"egress: {self.egress.heartbeat.why}"


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else format_time(int(seconds) * NS_PER_S)


def by_incarnation(chains: Iterable[Chain], reports: Mapping[Chain, StoredHeartbeat]) -> dict[Chain, StoredHeartbeat]:
    """Return the reports of egress, by chain: for each partition the newest incarnation that `chains` or egress itself
    names. `reports`: by partition, as `newest_by_partition` gives them.
    """
    incarnations = {partition: each.heartbeat.chain.incarnation for partition, each in reports.items()}
    for chain in chains:
        if (partition := replace(chain, incarnation=0)) in incarnations:
            incarnations[partition] = max(incarnations[partition], chain.incarnation)
    return {replace(p, incarnation=k): reports[p] for p, k in incarnations.items()}


def with_plan(status: ChainStatus, found: OpenedPlan, lost_after_s: float, now: float) -> ChainStatus:
    """Return `status` with the result of a search in the archive. `lost_after_s`: seconds until a late hole is lost."""
    plan = found.plan
    since = plan.stretches[0].segment.modified if plan.stretches else plan.waiting_since
    age = 0.0 if since is None else max(0.0, now - since)
    phase = Phase.LOST if plan.phase is Phase.LATE and age > lost_after_s else plan.phase
    reason = f"{plan.hole} is missing" if plan.hole is not None else ""
    if found.incomplete_fill is not None:
        reason = f"{found.incomplete_fill.missing} of {plan.hole} were gone when the hole there was filled"
    elif plan.phase is Phase.DAMAGED:
        reason = f"{plan.hole} is damaged: {', '.join(found.damaged)}"
    return replace(status, phase=str(phase), lag_seconds=age, reason=reason)


async def centre_view(settings: Settings) -> StatusView:
    """Return the progress of every chain of every target. Raises as connecting does."""
    targets = await read_target_statuses(settings)
    clock, notes = SystemClock(), list[str]()
    store, documents = open_for_view(settings)
    with closing(store), closing(ThreadPool("status", PARALLEL_CHAINS)) as threads:
        reader = ArchiveReader(store, documents, threads, clock, settings.ingress.silent_after)
        statuses = await reader.read(settings.ingress.targets, targets)
        with suppress(FloeError):
            foreign = await threads.run(find_foreign_keys, store.objects, store.layout, (), MAX_FOREIGN_KEYS)
            notes += foreign.lines()
    rows, cells = [each.row() for each in statuses], [each.cells(clock.now()) for each in statuses]
    code = DataError.exit_code if any(status.needs_operator for status in statuses) else 0
    return StatusView("centre", rows, cells, STATUS_COLUMNS, NARROW_STATUS_COLUMNS, code, notes=notes)


class ArchiveReader:
    """Reader of the archive for `floe status`."""

    def __init__(
        self, store: SegmentStore, documents: ChainStore, threads: ThreadPool, clock: Clock, silent_after: float
    ) -> None:
        self._store, self._documents, self._threads = store, documents, threads
        self._clock, self._silent_after = clock, silent_after

    async def read(self, targets: Iterable[TargetSettings], statuses: Mapping[str, TargetStatus]) -> list[ChainStatus]:
        """Return one status for each chain that has a tail or a position, or that only egress knows, by target and
        chain; and one for each feed of `sources` of which nothing is archived.
        """
        tails = await self._threads.run(self._documents.list_tails)
        heartbeats = await self._heartbeats({site for each in targets for site, _ in each.feed_sources})
        wanted: list[Coroutine[Any, Any, ChainStatus]] = []
        for target in targets:
            name, status, sources = target.stream, statuses[target.stream], target.feed_sources
            positions = status.state.checkpoint.positions if status.state else {}
            chains = {chain for chain in tails if (chain.site, chain.feed) in sources} | {*positions}
            reported = {c: found for c, found in heartbeats.items() if (c.site, c.feed) in sources}
            egress = by_incarnation(chains, reported)
            chains |= egress.keys()
            known = partial(ChainStatus, name, status.publisher, archived=None, silent_after=self._silent_after)
            # A tail is a hint: it may be lost, or come after a segment.
            lacking = sorted(sources.keys() - {(chain.site, chain.feed) for chain in chains})
            begun = await asyncio.gather(*(self._threads.run(self._documents.chains, *pair) for pair in lacking))
            chains.update(*begun)
            for site, feed in (pair for pair, found in zip(lacking, begun, strict=True) if not found):
                there = suggestion(f"{site}/{feed}", {f"{chain.site}/{chain.feed}" for chain in tails})
                reason = f"nothing of this feed is archived; {there}"
                wanted.append(asyncio.sleep(0, known(Chain(site, feed), position=None, phase="missing", reason=reason)))
            ingress = await self._reported_positions(name)
            for chain in sorted(chains):
                written = tails[chain].modified if chain in tails else None
                each = known(chain, position=positions.get(chain), last_archived=written, egress=egress.get(chain))
                has_moved = ingress.positions.get(chain) != positions.get(chain)
                stop = "" if has_moved else ingress.stopped.get(chain, "")
                source = sources.get((chain.site, chain.feed))
                wanted.append(self._threads.run(self._read, each, status, source, stop))
        return await asyncio.gather(*wanted)

    async def _heartbeats(self, sites: Collection[str]) -> dict[Chain, StoredHeartbeat]:
        layout, now = self._documents.layout, self._clock.now()
        try:
            listed = await self._threads.run(self._documents.list_heartbeats)
            infos = [info for info in listed if (layout.parse_heartbeat(info.key) or ("",))[0] in sites]
            reads = (self._threads.run(self._documents.read_heartbeat, info.key) for info in infos)
            found = await asyncio.gather(*reads)
        except Refused as error:
            log.warning("heartbeats read failed", action="heartbeats_read_failed", code=error.code, error=str(error))
            return {}
        return newest_by_partition(
            StoredHeartbeat(heartbeat, info.modified, max(0.0, now - info.modified), alive.time)
            for info, alive in zip(infos, found, strict=True)
            if alive is not None
            for heartbeat in alive.chains
        )

    async def _reported_positions(self, target: str) -> TargetPositions:
        """Return the positions that ingress last stored for the target; empty if they cannot be read."""
        with suppress(FloeError):
            return await self._threads.run(self._documents.read_positions, target) or TargetPositions(target, 0.0)
        return TargetPositions(target, 0.0)

    # Blocking

    def _read(self, found: ChainStatus, target: TargetStatus, source: SourceSettings | None, stop: str) -> ChainStatus:
        documents, chain = self._documents, found.chain
        found = found if found.position else replace(found, first=self._first_sequence(chain))
        position = found.position or found.first
        if (reached := documents.read_tail(chain)) is None:
            reached = ChainArchive.listed(self._store, chain, position).end or None
        found = replace(found, archived=reached)
        if reached is None and found.position and documents.read_chain(chain) is None:
            found = replace(found, phase=str(Phase.LOST), reason="its archive is gone from the bucket")
        if found.archived is not None and found.archived >= position:
            lost_after_s = source.lost_segment_timeout if source else float("inf")
            with suppress(FloeError):  # the tail still shows the archived end
                end = documents.read_end(chain)
                accepted = [gap.range for gap in documents.gaps(chain, position=position)]
                inside = plan_from_contents(self._store, chain, position, end, accepted)
                found = with_plan(replace(found, end=end), inside, lost_after_s, self._clock.now())
                floor = documents.floor(chain) if inside.plan.is_waiting and inside.incomplete_fill is None else None
                if floor is not None and floor.first > position:
                    found = replace(found, phase="stopped", reason=str(floor))
                if inside.plan.late_end and not found.reason:
                    found = replace(found, reason=self._after_end_text(chain, end or 0))
        if stop:
            found = replace(found, phase="stopped", reason=stop.replace("\n", " "))
        return _with_decisions(found, target, is_listed=source is not None)

    def _first_sequence(self, chain: Chain) -> int:
        """Return the first sequence of a chain of which nothing is in the target."""
        first = 1
        with suppress(FloeError):
            first = document.first if (document := self._documents.read_chain(chain)) else 1
            return max(first, self._documents.read_floor(chain) or 1)
        return first

    def _after_end_text(self, chain: Chain, end: int) -> str:
        coverages = [ref.coverage for ref in ChainArchive.listed(self._store, chain, end + 1).refs]
        accepted = [gap.range for gap in self._documents.gaps(chain, position=end + 1)]
        if not (found := ranges_after_end(coverages, end, accepted)):
            return ""
        ranges = ", ".join(map(str, found))
        return f"{ranges} after the end {end} of the incarnation: {replay_command(chain, found[0])}"


def _with_decisions(status: ChainStatus, target: TargetStatus, *, is_listed: bool) -> ChainStatus:
    if target.stopped:
        return replace(status, phase="stopped", reason=target.stopped)
    if status.chain in target.paused:
        return replace(status, phase="paused", reason=status.reason or "paused by an operator")
    if not is_listed:
        return replace(status, reason="no longer among `sources`")
    if status.position is None and not status.reason:
        return replace(status, phase="new")
    return status


CHECKPOINT_COLUMNS = ("target", "target_sequence", "chain", "position", "intent", "begins")
States = Mapping[str, TargetState | None]


async def read_states(settings: Settings) -> States:
    """Return the stored states, by the target's name; None if nothing is stored yet."""
    check_targets(settings.ingress)
    async with open_ingress_state(settings, "floe checkpoint") as (_, bucket):
        names = [target.stream for target in settings.ingress.targets]
        return {name: (await StateStore(bucket, state_key(STATE_ROLE, name), name).load()).state for name in names}


async def print_checkpoints(settings: Settings, as_json: bool) -> None:
    states, kept = await read_states(settings), list[dict[str, Any]]()
    try:
        kept = await asyncio.to_thread(kept_rows, open_for_view(settings)[1], settings.ingress.targets)
    except FloeError as error:  # the checkpoints do not depend on the store
        click.echo(f"the positions kept from retention are unknown: {error}", err=True)
    if as_json:
        names = dict.fromkeys([*states, *(row["target"] for row in kept)])
        print_json([
            checkpoint_json(target, states.get(target)) | {"kept": [row for row in kept if row["target"] == target]}
            for target in names
        ])  # fmt: skip
        return
    rows = (_checkpoint_rows(target, state) for target, state in states.items() if state is not None)
    print_table(joined.from_iterable(rows), CHECKPOINT_COLUMNS)
    if kept:
        click.echo("kept from retention:")
        print_table(kept, KEPT_COLUMNS)


KEPT_COLUMNS = ("target", "said", "chain", "from", "why")


def kept_rows(documents: ChainStore, targets: Iterable[TargetSettings]) -> list[dict[str, Any]]:
    """List the data that retention keeps for each target that has stored positions or is in the configuration: by
    chain, the first sequence to keep; without a chain, everything. Blocking; raises as the store does.
    """
    sources = {each.stream: [f"{site}/{feed}" for site, feed in each.feed_sources] for each in targets}
    chains, rows = documents.chains(), list[dict[str, Any]]()
    for target in sorted({*documents.targets_with_positions(), *sources}):
        row: dict[str, Any] = {"target": target, "said": None, "chain": None, "from": None, "why": None}
        try:
            found = documents.read_positions(target)
        except DataError as error:
            rows.append({**row, "why": f"everything: its positions cannot be read: {error}"})
            continue
        if found is None:
            rows.append({**row, "why": "everything, until it stores its positions"})
            continue
        row["said"] = _time(found.time)
        if found.released:
            rows.append({**row, "why": "nothing: released"})
            continue
        needs = {c: found.needed_from(c, 1, sources.get(target, ())) for c in sorted({*chains, *found.positions})}
        rows += [{**row, "chain": str(chain), "from": at} for chain, at in needs.items() if at is not None]
    return rows


def checkpoint_json(target: str, state: TargetState | None) -> dict[str, Any]:
    if state is None:
        return {"target": target, "target_sequence": None, "positions": [], "intent": None}
    checkpoint, intent = state.checkpoint, state.intent
    rows = [
        {
            **piece.chain.log_context(),
            "first": piece.rows.first,
            "last": piece.rows.last,
            "count": piece.count,
            "is_gap": isinstance(piece.segment, Gap),
            "left_out": len(piece.parked),
            "out_of_turn": piece.is_retry,
        }
        for piece in (intent.pieces if intent else ())
    ]
    return {
        "target": target,
        "target_sequence": checkpoint.target_sequence,
        "target_created": checkpoint.target_created,
        "begins": checkpoint.foreign_upto,
        "positions": [{**c.log_context(), "position": at} for c, at in sorted(checkpoint.positions.items())],
        "intent": intent and {"base": intent.base, "count": intent.count, "rows": rows},
    }


def _checkpoint_rows(target: str, state: TargetState) -> list[dict[str, object]]:
    texts: dict[Chain, list[str]] = {}  # the ranges of the open intent, by chain
    for piece in state.intent.pieces if state.intent else ():
        text = f"{piece.rows} skipped" if isinstance(piece.segment, Gap) else str(piece.rows)
        texts.setdefault(piece.chain, []).append(f"{text} again" if piece.is_retry else text)
    checkpoint = state.checkpoint
    return [
        {
            "target": target,
            "target_sequence": checkpoint.target_sequence,
            "chain": chain,
            "position": checkpoint.positions.get(chain),
            "intent": " ".join(texts[chain]) if chain in texts else None,
            "begins": checkpoint.foreign_upto or None,
        }
        for chain in sorted({*checkpoint.positions, *texts})
    ]
