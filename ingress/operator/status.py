"""Views of `floe status` and `checkpoint ls`: the progress of each chain, from state, target and archive."""

import asyncio
from collections.abc import Collection, Coroutine, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain as joined
from typing import Any

import click

from common.chain import Chain
from common.cli import StatusView, Styled, ago, print_json, table
from common.clock import NS_PER_S, Clock, SystemClock, format_time
from common.errors import ConfigError, DataError, FloeError, Refused, Stopped
from common.jetstream.api import stream_info
from common.jetstream.buckets import state_of_ingress
from common.jetstream.client import FloeClient
from common.jetstream.kv import KeyValue, state_key
from common.logs import get_logger
from common.open import open_view
from common.segments.alive import OVERDUE, SILENT, STANDBY, Sighting, newest
from common.segments.archive import behind, carry
from common.segments.checks import look_for_foreign
from common.segments.documents import ChainStore, TargetPositions
from common.segments.keys import suggestion
from common.segments.store import SegmentStore
from common.service.process import Threads
from common.settings.ingress import SourceSettings, TargetSettings
from common.settings.root import Settings
from common.settings.types import duration_words
from ingress.chains.pauses import PauseStore
from ingress.chains.plan import Phase
from ingress.chains.search import Inside, look_into
from ingress.checkpoint import Gap, TargetState
from ingress.checkpoint_store import ROLE, StateStore
from ingress.errors import check_targets
from ingress.preflight import control_headers
from ingress.publishers.choose import choose, offered
from ingress.verdict.verdict import Finding, TargetErrors, judge, judge_shared, read

log = get_logger(__name__)


AT_WORK = ("reading", "closing", STANDBY)  # states of egress without a time limit

KEYS_LOOKED_AT = 100_000  # keys that are searched for foreign ones: about 100 requests
PARALLEL = 8  # chains that are read at the same time
LOOKS = 3  # attempts to read a target that a running service changes meanwhile

STATUS_COLUMNS = (
    "target", "chain", "phase", "archived", "carried", "lag", "behind", "last archived", "egress", "source lag",
    "publisher", "why",
)  # fmt: skip
NARROW = tuple(name for name in STATUS_COLUMNS if name != "publisher")
COLOURS = {
    **dict.fromkeys((Phase.LOST, Phase.DAMAGED, "stopped"), "red"),
    **dict.fromkeys((Phase.LATE, "paused", "missing"), "yellow"),
}


# One target


@dataclass(frozen=True, slots=True)
class Sight:
    """Status of one target. `state`: None if nothing is stored; `publisher`: its name, empty if none can be chosen;
    `stopped`: the reason why ingress would stop, empty if it would not.
    """

    state: TargetState | None = None
    publisher: str = ""
    stopped: str = ""
    paused: frozenset[Chain] = field(default_factory=frozenset)


async def read_sights(settings: Settings) -> dict[str, Sight]:
    """Return the status of each target, by its name. Raises as connecting does."""
    check_targets(settings.ingress)
    async with state_of_ingress(settings, "floe status") as (client, bucket):
        return {each.stream: await _sight(client, bucket, each) for each in settings.ingress.targets}


async def _sight(client: FloeClient, bucket: KeyValue, target: TargetSettings) -> Sight:
    try:
        state, finding = await _judged(client, bucket, target)
        pauses = await PauseStore(bucket, target.stream).read()
    except Stopped as error:  # a stored value that cannot be read
        return Sight(stopped=_in_words(error))
    publisher, why = "", "" if finding is None else _in_words(finding)
    if (info := await stream_info(client, target.stream)) is None:
        why = why or ("" if target.create else "target: no such stream")
    else:
        against = offered(client.server_version, info.config, control_headers(target), exclusive=target.exclusive)
        try:
            publisher = choose(target.stream, target.publisher, against)
        except ConfigError as error:
            why = why or error.message
    return Sight(state, publisher, why, frozenset(pauses.paused))


def _in_words(error: FloeError) -> str:
    """Return the reason of a stop, and the command that ends it."""
    return f"{error.code}: {error}".replace("\n", " ")


async def _judged(
    client: FloeClient, bucket: KeyValue, target: TargetSettings
) -> tuple[TargetState | None, FloeError | None]:
    """Return the stored state, and the error that ingress would stop with; None if it would not stop."""
    states = StateStore(bucket, state_key(ROLE, target.stream), target.stream)
    stored = await states.load()
    for _ in range(LOOKS):
        if stored.state is None:
            break
        reading = await read(client, target.stream)
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
    first segment that is not in the target was stored; 0 if there is none. `why`: the hole, or the reason of a
    stop. `last_archived`: when the tail was last written, by the store's clock. `egress`: the last report of the
    process that has the chain, None if there is none; it counts as silent after `silent_after` seconds. `end`: the
    last sequence of the incarnation, None if that has not ended. `begins`: its first sequence.
    """

    target: str
    publisher: str
    chain: Chain
    archived: int | None
    position: int | None
    phase: str = str(Phase.IDLE)
    lag_seconds: float = 0.0
    why: str = ""
    last_archived: float | None = None
    egress: Sighting | None = None
    silent_after: float = float("inf")
    end: int | None = None
    begins: int = 1

    @property
    def lag_sequences(self) -> int | None:
        """Archived sequences that are not in the target: an upper bound of the messages. None if there is a tail that
        cannot be read: then the archived end is not known.
        """
        if self.archived is None and self.last_archived is not None:
            return None
        archived = self.archived or 0
        reach = archived if self.end is None else min(archived, self.end)
        return max(0, reach - (self.position or self.begins) + 1)

    @property
    def source_lag_sequences(self) -> int | None:
        """Sequences of the stream that are not in the target, archived or not; None if egress reported nothing, or the
        archived end is not known.
        """
        if self.egress is None or self.lag_sequences is None:
            return None
        left = self.egress.sign.not_archived(self.chain.incarnation, self.archived or 0)
        return None if left is None else self.lag_sequences + left

    @property
    def egress_state(self) -> str | None:
        """State of egress for the chain; None if no egress process reported it."""
        if self.egress is None:
            return None
        state = self.egress.state(self.silent_after)
        return state if state in (SILENT, OVERDUE) else f"{state} {self.egress.sign.code}".strip()

    @property
    def alarm(self) -> bool:
        """True if it needs an operator: it is stopped, or late or silent for longer than `silent_after`."""
        if self.phase in ("stopped", Phase.LOST, Phase.DAMAGED):
            return True
        if self.phase == Phase.LATE and self.lag_seconds > self.silent_after:
            return True
        if self.egress is None:
            return False
        sign = self.egress.sign
        lasts = sign.state not in AT_WORK and self.egress.lasts > self.silent_after
        return self.egress_state == SILENT or sign.state == "stopped" or lasts

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
            and self.egress.sign.source_at_least(self.chain.incarnation, self.archived or 0),
            "source_lag_sequences": self.source_lag_sequences,
            "alarm": self.alarm,
            "why": self.why or self._why_not_archived(),
        }

    def cells(self, now: float) -> dict[str, object]:
        """Return it as one line of the table at `now`, by the store's clock."""
        return {
            "target": self.target,
            "chain": str(self.chain),
            "phase": Styled(self.phase, COLOURS.get(self.phase, "green")),
            "archived": self.archived,
            "carried": None if self.position is None else self.position - 1,
            "lag": self.lag_sequences,
            "behind": duration_words(self.lag_seconds),
            "last archived": ago(None if self.last_archived is None else now - self.last_archived),
            "egress": Styled(
                self.egress_state, "red" if self.alarm else "yellow" if self.egress_state == OVERDUE else ""
            ),
            "source lag": self.source_lag_sequences,
            "publisher": self.publisher or None,
            "why": self.why or self._why_not_archived(),
        }

    def _why_not_archived(self) -> str:
        if self.egress is None:
            return ""
        if self.egress_state in (SILENT, OVERDUE):
            return f"no sign of life of egress since {_time(self.egress.modified)}"
        return self.egress.sign.why and f"egress: {self.egress.sign.why}"


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else format_time(int(seconds) * NS_PER_S)


def by_newest_incarnation(chains: Iterable[Chain], sightings: Mapping[Chain, Sighting]) -> dict[Chain, Sighting]:
    """Return the reports of egress, by chain: for each partition the newest incarnation that `chains` or egress itself
    names. `sightings`: by partition, as `newest` gives them.
    """
    incarnations = {partition: each.sign.chain.incarnation for partition, each in sightings.items()}
    for chain in chains:
        if (partition := replace(chain, incarnation=0)) in incarnations:
            incarnations[partition] = max(incarnations[partition], chain.incarnation)
    return {replace(p, incarnation=k): sightings[p] for p, k in incarnations.items()}


def with_plan(standing: ChainStatus, found: Inside, patience: float, now: float) -> ChainStatus:
    """Return `standing` with the result of a search in the archive. `patience`: seconds until a late hole is lost."""
    plan = found.plan
    since = plan.stretches[0].segment.modified if plan.stretches else plan.waiting_since
    age = 0.0 if since is None else max(0.0, now - since)
    phase = Phase.LOST if plan.phase is Phase.LATE and age > patience else plan.phase
    why = f"{plan.hole} is missing" if plan.hole is not None else ""
    if found.gone is not None:
        why = f"{found.gone.missing} of {plan.hole} were gone when the hole there was filled"
    elif plan.phase is Phase.DAMAGED:
        why = f"{plan.hole} is damaged: {', '.join(found.damaged)}"
    return replace(standing, phase=str(phase), lag_seconds=age, why=why)


async def centre_view(settings: Settings) -> StatusView:
    """Return the progress of every chain of every target. Raises as connecting does."""
    sights = await read_sights(settings)
    clock, notes = SystemClock(), list[str]()
    store, documents = open_view(settings)
    with closing(store), closing(Threads("status", PARALLEL)) as threads:
        survey = ArchiveSurvey(store, documents, threads, clock, settings.ingress.silent_after)
        standings = await survey.standings(settings.ingress.targets, sights)
        with suppress(FloeError):
            foreign = await threads.run(look_for_foreign, store.objects, store.layout, (), KEYS_LOOKED_AT)
            notes += foreign.lines()
    rows, cells = [each.row() for each in standings], [each.cells(clock.now()) for each in standings]
    code = DataError.exit_code if any(standing.alarm for standing in standings) else 0
    return StatusView("centre", rows, cells, STATUS_COLUMNS, NARROW, code, notes=notes)


class ArchiveSurvey:
    """Reader of the archive for `floe status`."""

    def __init__(
        self, store: SegmentStore, documents: ChainStore, threads: Threads, clock: Clock, silent_after: float
    ) -> None:
        self._store, self._documents, self._threads = store, documents, threads
        self._clock, self._silent_after = clock, silent_after

    async def standings(self, targets: Iterable[TargetSettings], sights: Mapping[str, Sight]) -> list[ChainStatus]:
        """Return one status for each chain that has a tail or a position, or that only egress knows, by target and
        chain; and one for each feed of `sources` of which nothing is archived.
        """
        tails = await self._threads.run(self._documents.listed_tails)
        sightings = await self._sightings({site for each in targets for site, _ in each.source_of})
        wanted: list[Coroutine[Any, Any, ChainStatus]] = []
        for target in targets:
            name, sight, sources = target.stream, sights[target.stream], target.source_of
            positions = sight.state.checkpoint.positions if sight.state else {}
            chains = {chain for chain in tails if (chain.site, chain.feed) in sources} | {*positions}
            said = {c: found for c, found in sightings.items() if (c.site, c.feed) in sources}
            egress = by_newest_incarnation(chains, said)
            chains |= egress.keys()
            known = partial(ChainStatus, name, sight.publisher, archived=None, silent_after=self._silent_after)
            # A tail is a hint: it may be lost, or come after a segment.
            lacking = sorted(sources.keys() - {(chain.site, chain.feed) for chain in chains})
            begun = await asyncio.gather(*(self._threads.run(self._documents.chains, *pair) for pair in lacking))
            chains.update(*begun)
            for site, feed in (pair for pair, found in zip(lacking, begun, strict=True) if not found):
                there = suggestion(f"{site}/{feed}", {f"{chain.site}/{chain.feed}" for chain in tails})
                why = f"nothing archived of this feed; {there}"
                wanted.append(asyncio.sleep(0, known(Chain(site, feed), position=None, phase="missing", why=why)))
            ingress = await self._said(name)
            for chain in sorted(chains):
                written = tails[chain].modified if chain in tails else None
                each = known(chain, position=positions.get(chain), last_archived=written, egress=egress.get(chain))
                has_moved = ingress.positions.get(chain) != positions.get(chain)
                stop = "" if has_moved else ingress.stopped.get(chain, "")
                source = sources.get((chain.site, chain.feed))
                wanted.append(self._threads.run(self._standing, each, sight, source, stop))
        return await asyncio.gather(*wanted)

    async def _sightings(self, sites: Collection[str]) -> dict[Chain, Sighting]:
        layout, now = self._documents.layout, self._clock.now()
        try:
            listed = await self._threads.run(self._documents.listed_alive)
            infos = [info for info in listed if (layout.parse_alive(info.key) or ("",))[0] in sites]
            reads = (self._threads.run(self._documents.read_alive, info.key) for info in infos)
            found = await asyncio.gather(*reads)
        except Refused as error:
            log.warning("signs of life not read", action="alive_unread", code=error.code, error=str(error))
            return {}
        return newest(
            Sighting(sign, info.modified, max(0.0, now - info.modified), alive.time)
            for info, alive in zip(infos, found, strict=True)
            if alive is not None
            for sign in alive.chains
        )

    async def _said(self, target: str) -> TargetPositions:
        """Return the positions that ingress last stored for the target; empty if they cannot be read."""
        with suppress(FloeError):
            return await self._threads.run(self._documents.read_positions, target) or TargetPositions(target, 0.0)
        return TargetPositions(target, 0.0)

    # Blocking

    def _standing(self, found: ChainStatus, sight: Sight, source: SourceSettings | None, stop: str) -> ChainStatus:
        documents, chain = self._documents, found.chain
        found = found if found.position else replace(found, begins=self._begins(chain))
        position = found.position or found.begins
        if (reached := documents.read_tail(chain)) is None:
            reached = max((ref.coverage.last for ref in self._store.list(chain, position=position)), default=None)
        found = replace(found, archived=reached)
        if reached is None and found.position and documents.read_chain(chain) is None:
            found = replace(found, phase=str(Phase.LOST), why="its archive is gone from the bucket")
        if found.archived is not None and found.archived >= position:
            patience = source.lost_segment_timeout if source else float("inf")
            with suppress(FloeError):  # the tail still shows the archived end
                end = documents.read_end(chain)
                accepted = [gap.range for gap in documents.gaps(chain, position=position)]
                inside = look_into(self._store, chain, position, end, accepted)
                found = with_plan(replace(found, end=end), inside, patience, self._clock.now())
                floor = documents.floor(chain) if inside.plan.waits and inside.gone is None else None
                if floor is not None and floor.first > position:
                    found = replace(found, phase="stopped", why=str(floor))
                if inside.plan.beyond and not found.why:
                    found = replace(found, why=self._behind(chain, end or 0))
        if stop:
            found = replace(found, phase="stopped", why=stop.replace("\n", " "))
        return _as_decided(found, sight, is_listed=source is not None)

    def _begins(self, chain: Chain) -> int:
        """Return the first sequence of a chain of which nothing is in the target."""
        first = 1
        with suppress(FloeError):
            first = document.first if (document := self._documents.read_chain(chain)) else 1
            return max(first, self._documents.read_floor(chain) or 1)
        return first

    def _behind(self, chain: Chain, end: int) -> str:
        coverages = [ref.coverage for ref in self._store.list(chain, position=end + 1)]
        accepted = [gap.range for gap in self._documents.gaps(chain, position=end + 1)]
        if not (found := behind(coverages, end, accepted)):
            return ""
        ranges = ", ".join(map(str, found))
        return f"{ranges} behind the end {end} of the incarnation: {carry(chain, found[0])}"


def _as_decided(standing: ChainStatus, sight: Sight, *, is_listed: bool) -> ChainStatus:
    if sight.stopped:
        return replace(standing, phase="stopped", why=sight.stopped)
    if standing.chain in sight.paused:
        return replace(standing, phase="paused", why=standing.why or "paused by an operator")
    if not is_listed:
        return replace(standing, why="not among `sources` any more")
    if standing.position is None and not standing.why:
        return replace(standing, phase="new")
    return standing


CHECKPOINT_COLUMNS = ("target", "target_sequence", "chain", "position", "intent", "begins")
States = Mapping[str, TargetState | None]


async def read_states(settings: Settings) -> States:
    """Return the stored states, by the target's name; None if nothing is stored yet."""
    check_targets(settings.ingress)
    async with state_of_ingress(settings, "floe checkpoint") as (_, bucket):
        names = [target.stream for target in settings.ingress.targets]
        return {name: (await StateStore(bucket, state_key(ROLE, name), name).load()).state for name in names}


async def print_checkpoints(settings: Settings, as_json: bool) -> None:
    states, kept = await read_states(settings), list[dict[str, Any]]()
    try:
        kept = await asyncio.to_thread(kept_rows, open_view(settings)[1], settings.ingress.targets)
    except FloeError as error:  # the checkpoints do not depend on the store
        click.echo(f"not known what is kept from retention: {error}", err=True)
    if as_json:
        names = dict.fromkeys([*states, *(row["target"] for row in kept)])
        print_json([
            checkpoint_json(target, states.get(target)) | {"kept": [row for row in kept if row["target"] == target]}
            for target in names
        ])  # fmt: skip
        return
    rows = (_checkpoint_rows(target, state) for target, state in states.items() if state is not None)
    table(joined.from_iterable(rows), CHECKPOINT_COLUMNS)
    if kept:
        click.echo("kept from retention:")
        table(kept, KEPT_COLUMNS)


KEPT_COLUMNS = ("target", "said", "chain", "from", "why")


def kept_rows(documents: ChainStore, targets: Iterable[TargetSettings]) -> list[dict[str, Any]]:
    """List the data that retention keeps for each target that has stored positions or is in the configuration: by
    chain, the first sequence to keep; without a chain, everything. Blocking; raises as the store does.
    """
    sources = {each.stream: [f"{site}/{feed}" for site, feed in each.source_of] for each in targets}
    chains, rows = documents.chains(), list[dict[str, Any]]()
    for target in sorted({*documents.targets_with_positions(), *sources}):
        row: dict[str, Any] = {"target": target, "said": None, "chain": None, "from": None, "why": None}
        try:
            said = documents.read_positions(target)
        except DataError as error:
            rows.append({**row, "why": f"everything, it cannot be read: {error}"})
            continue
        if said is None:
            rows.append({**row, "why": "everything, until it says how far it is"})
            continue
        row["said"] = _time(said.time)
        if said.released:
            rows.append({**row, "why": "nothing: released"})
            continue
        needs = {chain: said.need(chain, 1, sources.get(target, ())) for chain in sorted({*chains, *said.positions})}
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
            "left_out": len(piece.left_out),
            "out_of_turn": piece.out_of_turn,
        }
        for piece in (intent.pieces if intent else ())
    ]
    return {
        "target": target,
        "target_sequence": checkpoint.target_sequence,
        "target_created": checkpoint.target_created,
        "begins": checkpoint.begins,
        "positions": [{**c.log_context(), "position": at} for c, at in sorted(checkpoint.positions.items())],
        "intent": intent and {"base": intent.base, "count": intent.count, "rows": rows},
    }


def _checkpoint_rows(target: str, state: TargetState) -> list[dict[str, object]]:
    texts: dict[Chain, list[str]] = {}  # the ranges of the open intent, by chain
    for piece in state.intent.pieces if state.intent else ():
        text = f"{piece.rows} given up" if isinstance(piece.segment, Gap) else str(piece.rows)
        texts.setdefault(piece.chain, []).append(f"{text} again" if piece.out_of_turn else text)
    checkpoint = state.checkpoint
    return [
        {
            "target": target,
            "target_sequence": checkpoint.target_sequence,
            "chain": chain,
            "position": checkpoint.positions.get(chain),
            "intent": " ".join(texts[chain]) if chain in texts else None,
            "begins": checkpoint.begins or None,
        }
        for chain in sorted({*checkpoint.positions, *texts})
    ]
