"""Views of `floe status` and `checkpoint ls`: the progress of each chain, from state, target and archive."""

import asyncio
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain as joined
from typing import Any

import click
from msgspec import structs

from common.archive.catalog import FeedId, ranges_after_end, replay_command, suggestion
from common.archive.checks import find_foreign_keys
from common.archive.documents import ChainStore, TargetPositions
from common.archive.heartbeats import HEARTBEAT_OVERDUE_S, OVERDUE, HeartbeatObject, StoredHeartbeat
from common.archive.scan import ChainArchive
from common.archive.store import SegmentStore
from common.chain import Chain
from common.cli import print_json, print_table
from common.clock import Clock, SystemClock, format_unix
from common.errors import ConfigError, DataError, FloeError, Refused, Stopped
from common.logs import get_logger
from common.nats.api import stream_info
from common.nats.client import FloeClient
from common.nats.kv import KeyValue, open_ingress_state
from common.objects.port import ObjectInfo
from common.observe.observation import (
    Observation,
    StatusView,
    ViewFormat,
    colour_state,
    current_by_partition,
    stored_heartbeats,
)
from common.open import open_for_view
from common.service.process import ThreadPool
from common.settings.ingress import SourceSettings, TargetSettings
from common.settings.root import Settings
from common.settings.types import StyledCell, duration_words
from common.subjects import name_matches
from ingress.chains.plan import OpenedPlan, Phase, plan_from_contents
from ingress.chains.sources import PauseStore, plan_sources
from ingress.checkpoint import Gap, StateStore, TargetState
from ingress.errors import check_targets
from ingress.preflight import control_headers
from ingress.publishers.batches import choose_publisher, objections
from ingress.verdict.verdict import Finding, TargetErrors, judge, judge_shared, read_target

log = get_logger(__name__)


MAX_FOREIGN_KEYS = 10_000  # keys that are searched for foreign ones: about 10 requests
MAX_UNTAKEN_ROWS = 100  # of one target: feeds that match and are not delivered
PARALLEL_CHAINS = 16  # chains that are read at the same time: as many connections are kept open
HEARTBEATS_PER_CALL = 16  # read by one thread, one after the other: a change of threads costs as much as a read
READ_ATTEMPTS = 3  # attempts to read a target that a running service changes meanwhile

CENTRE_FORMAT = ViewFormat(
    "centre",
    keys=(
        "target", "publisher", "chain", "phase", "archived", "last_archived", "position", "lag_sequences",
        "lag_seconds", "egress", "egress_alive", "source_sequence", "source_lag_sequences", "alarm", "why",
    ),
    columns=(
        "target", "chain", "phase", "archived", "carried", "lag", "behind", "last archived", "egress", "source lag",
        "publisher", "why",
    ),
    row_values={
        "phase": lambda o: o.state,
        "lag_seconds": lambda o: round(o.lag_seconds),
        "egress": lambda o: o.egress_state,
        "egress_alive": lambda o: o.egress and format_unix(o.egress.modified),
    },
    cells={
        "phase": lambda o, _: colour_state(o),
        "carried": lambda o, _: None if o.position is None else o.position - 1,
        "behind": lambda o, _: duration_words(o.lag_seconds),
        "egress": lambda o, _: StyledCell(o.egress_state, _egress_colour(o)),
        "source lag": lambda o, _: o.source_lag_sequences,
        "publisher": lambda o, _: o.publisher or None,
    },
)  # fmt: skip


def _egress_colour(observed: Observation) -> str:
    return "red" if observed.needs_operator else "yellow" if observed.egress_state == OVERDUE else ""


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
    targets = settings.ingress.targets
    async with open_ingress_state(settings, "floe status") as (client, bucket):
        found = await asyncio.gather(*(_target_status(client, bucket, each) for each in targets))
    return {each.stream: status for each, status in zip(targets, found, strict=True)}


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
    states = StateStore(bucket, target.stream)
    stored = await states.load()
    for _ in range(READ_ATTEMPTS):
        if stored.state is None:
            break
        reading = await read_target(client, target.stream, control_headers(target))
        verdict = judge(stored.state, reading) if target.exclusive else judge_shared(stored.state, reading, set())
        before, stored = stored, await states.load()
        if stored.revision == before.revision:
            if verdict.finding is Finding.STORED:
                break
            return stored.state, TargetErrors(target.stream).error(verdict, [reading] if reading else [])
    return stored.state, None


def by_incarnation(chains: Iterable[Chain], reports: Mapping[Chain, StoredHeartbeat]) -> dict[Chain, StoredHeartbeat]:
    """Return the reports of egress, by chain: for each partition the newest incarnation that `chains` or egress itself
    names. `reports`: by partition, as `current_by_partition` gives them.
    """
    incarnations = {partition: each.heartbeat.chain.incarnation for partition, each in reports.items()}
    for chain in chains:
        if (partition := chain.with_incarnation(0)) in incarnations:
            incarnations[partition] = max(incarnations[partition], chain.incarnation)
    return {p.with_incarnation(k): reports[p] for p, k in incarnations.items()}


def with_plan(status: Observation, found: OpenedPlan, lost_after_s: float, now: float) -> Observation:
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
    return structs.replace(status, state=str(phase), lag_seconds=age, why=reason)


async def centre_view(settings: Settings) -> StatusView:
    """Return the progress of every chain of every target. Raises as connecting does."""
    targets = await read_target_statuses(settings)
    clock = SystemClock()
    store, documents = open_for_view(settings)
    with closing(store), closing(ThreadPool("status", PARALLEL_CHAINS)) as threads:
        reader = ArchiveReader(store, documents, threads, clock, settings.ingress.silent_after)
        statuses, notes = await asyncio.gather(
            reader.read(settings.ingress.targets, targets), _foreign_notes(store, threads)
        )
    code = DataError.exit_code if any(status.needs_operator for status in statuses) else 0
    return StatusView(CENTRE_FORMAT, statuses, clock.now(), code, notes=notes)


async def _foreign_notes(store: SegmentStore, threads: ThreadPool) -> Sequence[str]:
    with suppress(FloeError):
        return (await threads.run(find_foreign_keys, store.objects, store.layout, None, MAX_FOREIGN_KEYS)).lines()
    return ()


class ArchiveReader:
    """Reader of the archive for `floe status`."""

    def __init__(
        self, store: SegmentStore, documents: ChainStore, threads: ThreadPool, clock: Clock, silent_after: float
    ) -> None:
        self._store, self._documents, self._threads = store, documents, threads
        self._clock, self._silent_after = clock, silent_after

    async def read(self, targets: Iterable[TargetSettings], statuses: Mapping[str, TargetStatus]) -> list[Observation]:
        """Return one status for each chain that has a tail or a position, or that only egress knows, by target and
        chain; and one for each feed of `sources` of which nothing is archived.
        """
        targets = [*targets]
        tails, heartbeats, stored = await asyncio.gather(
            self._threads.run(self._documents.list_tails),
            self._heartbeats([source for target in targets for source in target.sources]),
            asyncio.gather(*(self._reported_positions(target.stream) for target in targets)),
        )
        archived, reported = _by_feed(tails), _by_feed(heartbeats)
        wanted: list[Observation | Coroutine[Any, Any, Observation]] = []
        for target, ingress in zip(targets, stored, strict=True):
            name, status = target.stream, statuses[target.stream]
            positions = status.state.checkpoint.positions if status.state else {}
            begun_feeds = _by_feed(positions).keys()
            plan = plan_sources(target, archived.keys(), begun_feeds)
            sources = {**target.feed_sources, **plan.taken}
            chains = {chain for pair in sources for chain in archived.get(pair, ())} | {*positions}
            egress = by_incarnation(chains, {c: heartbeats[c] for pair in sources for c in reported.get(pair, ())})
            chains |= egress.keys()
            known = partial(Observation, target=name, publisher=status.publisher, silent_after=self._silent_after)
            # A tail is a hint: it may be lost, or come after a segment.
            lacking = sorted(sources.keys() - {(chain.site, chain.feed) for chain in chains})
            begun = await asyncio.gather(*(self._threads.run(self._documents.chains, *pair) for pair in lacking))
            chains.update(*begun)
            for site, feed in (pair for pair, found in zip(lacking, begun, strict=True) if not found):
                there = suggestion(f"{site}/{feed}", {f"{chain.site}/{chain.feed}" for chain in tails})
                reason = f"nothing of this feed is archived; {there}"
                wanted.append(known(chain=Chain(site, feed), state="missing", why=reason))
            chains -= {chain for chain in chains if (chain.site, chain.feed) in plan.untaken}
            more = len(plan.untaken) - MAX_UNTAKEN_ROWS
            for untaken, reason in sorted(plan.untaken.items())[:MAX_UNTAKEN_ROWS]:
                why = f"{reason}; {more} more feeds are not delivered" if more > 0 else reason
                wanted.append(known(chain=Chain(*untaken), state="stopped", why=why))
            for chain in sorted(chains):
                written = tails[chain].modified if chain in tails else None
                each = known(
                    chain=chain,
                    state=str(Phase.IDLE),
                    position=positions.get(chain),
                    archived_at=written,
                    egress=egress.get(chain),
                )
                has_moved = ingress.positions.get(chain) != positions.get(chain)
                stop = "" if has_moved else ingress.stopped.get(chain, "")
                source = sources.get((chain.site, chain.feed))
                if (end := _reported_end(each)) is not None:
                    idle = structs.replace(each, archived=end)
                    wanted.append(_with_decisions(idle, status, stop, is_listed=source is not None))
                else:
                    wanted.append(self._threads.run(self._read, each, status, source, stop))
        reads = iter(await asyncio.gather(*(each for each in wanted if not isinstance(each, Observation))))
        return [each if isinstance(each, Observation) else next(reads) for each in wanted]

    async def _heartbeats(self, sources: Collection[SourceSettings]) -> dict[Chain, StoredHeartbeat]:
        layout, now = self._documents.layout, self._clock.now()
        sites = {site for source in sources for site in source.site}
        wide = [site for site in sites if "*" in site]
        try:
            listed = await self._threads.run(self._documents.list_heartbeats)
            named = ((info, (layout.parse_heartbeat(info.key) or ("",))[0]) for info in listed)
            infos = [info for info, site in named if site in sites or any(name_matches(each, site) for each in wide)]
            parts = (infos[at : at + HEARTBEATS_PER_CALL] for at in range(0, len(infos), HEARTBEATS_PER_CALL))
            found = await asyncio.gather(*(self._threads.run(self._read_heartbeats, part) for part in parts))
        except Refused as error:
            log.warning("heartbeats read failed", action="heartbeats_read_failed", code=error.code, error=str(error))
            return {}
        heartbeats = stored_heartbeats(infos, joined.from_iterable(found), now)
        return await self._threads.run(current_by_partition, self._documents, heartbeats)

    async def _reported_positions(self, target: str) -> TargetPositions:
        """Return the positions that ingress last stored for the target; empty if they cannot be read."""
        with suppress(FloeError):
            return await self._threads.run(self._documents.read_positions, target) or TargetPositions(target, 0.0)
        return TargetPositions(target, 0.0)

    # Blocking

    def _read_heartbeats(self, infos: Iterable[ObjectInfo]) -> list[HeartbeatObject | None]:
        return [self._documents.read_heartbeat(info.key) for info in infos]

    def _read(self, found: Observation, target: TargetStatus, source: SourceSettings | None, stop: str) -> Observation:
        documents, chain = self._documents, found.chain
        found = found if found.position else structs.replace(found, first=self._first_sequence(chain))
        position = found.position or found.first
        if (reached := documents.read_tail(chain)) is None:
            reached = ChainArchive.listed(self._store, chain, position).end or None
        is_known = reached is not None or found.archived_at is None
        found = structs.replace(found, archived=reached, is_end_known=is_known)
        if reached is None and found.position and documents.read_chain(chain) is None:
            found = structs.replace(found, state=str(Phase.LOST), why="its archive is gone from the bucket")
        if found.archived is not None and found.archived >= position:
            lost_after_s = source.lost_segment_timeout if source else float("inf")
            with suppress(FloeError):  # the tail still shows the archived end
                end = documents.read_end(chain)
                accepted = [gap.range for gap in documents.gaps(chain, position=position)]
                inside = plan_from_contents(self._store, chain, position, end, accepted)
                found = with_plan(structs.replace(found, end=end), inside, lost_after_s, self._clock.now())
                floor = documents.floor(chain) if inside.plan.is_waiting and inside.incomplete_fill is None else None
                if floor is not None and floor.first > position:
                    found = structs.replace(found, state="stopped", why=str(floor))
                if inside.plan.late_end and not found.why:
                    found = structs.replace(found, why=self._after_end_text(chain, end or 0))
        return _with_decisions(found, target, stop, is_listed=source is not None)

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


def _by_feed(chains: Iterable[Chain]) -> dict[FeedId, list[Chain]]:
    found: dict[FeedId, list[Chain]] = {}
    for chain in chains:
        found.setdefault((chain.site, chain.feed), []).append(chain)
    return found


def _reported_end(found: Observation) -> int | None:
    """Return the archived end of a chain by its heartbeat, if the target has reached it and the tail is surely older:
    then nothing need be read. Else None.
    """
    if found.egress is None or found.archived_at is None or found.position is None:
        return None
    heartbeat, is_newer = found.egress.heartbeat, found.egress.modified - found.archived_at > HEARTBEAT_OVERDUE_S
    is_its = heartbeat.is_active and heartbeat.chain == found.chain
    return heartbeat.end if is_newer and is_its and heartbeat.end == found.position - 1 else None


def _with_decisions(status: Observation, target: TargetStatus, stop: str, *, is_listed: bool) -> Observation:
    if stop:
        status = structs.replace(status, state="stopped", why=stop.replace("\n", " "))
    if target.stopped:
        return structs.replace(status, state="stopped", why=target.stopped)
    if status.chain in target.paused:
        return structs.replace(status, state="paused", why=status.why or "paused by an operator")
    if not is_listed:
        return structs.replace(status, why="no longer among `sources`")
    if status.position is None and not status.why:
        return structs.replace(status, state="new")
    return status


CHECKPOINT_COLUMNS = ("target", "target_sequence", "chain", "position", "intent", "begins")
States = Mapping[str, TargetState | None]


async def read_states(settings: Settings) -> States:
    """Return the stored states, by the target's name; None if nothing is stored yet."""
    check_targets(settings.ingress)
    async with open_ingress_state(settings, "floe checkpoint") as (_, bucket):
        names = [target.stream for target in settings.ingress.targets]
        return {name: (await StateStore(bucket, name).load()).state for name in names}


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


KEPT_COLUMNS = ("target", "stored", "chain", "from", "why")


def kept_rows(documents: ChainStore, targets: Iterable[TargetSettings]) -> list[dict[str, Any]]:
    """List the data that retention keeps for each target that has stored positions or is in the configuration: by
    chain, the first sequence to keep; without a chain, everything. Blocking; raises as the store does.
    """
    sources = {each.stream: each.source_names for each in targets}
    chains, rows = documents.chains(), list[dict[str, Any]]()
    for target in sorted({*documents.targets_with_positions(), *sources}):
        row: dict[str, Any] = {"target": target, "stored": None, "chain": None, "from": None, "why": None}
        try:
            found = documents.read_positions(target)
        except DataError as error:
            rows.append({**row, "why": f"everything: its positions cannot be read: {error}"})
            continue
        if found is None:
            rows.append({**row, "why": "everything, until it stores its positions"})
            continue
        row["stored"] = format_unix(found.time)
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
