"""Sources of a target: the feeds that its patterns take, the beginning of each copy, and the chains that are paused.

Patterns: a pure plan over the feeds of the store, and the feeds that this process has taken.

Start keys are resolved once for a target and stored, so that a restart does not resolve them again:

    start_sequence            of the first incarnation; later ones are replayed completely
    start_time, start_delta   a time: of every incarnation the messages at or after it
    start_at_end              of every existing incarnation the messages after the end of its coverage

A target that has a position for any chain of the feed has begun: the keys are ignored then.

Pauses are in one key of the state bucket next to the target's state. A resumed chain stays in the list with the time of
its resumption, so that a running service notices that it must check the chain again. The value is untrusted when it is
read back. If this version did not write it, the target does not begin, because a paused chain must not be replayed by
mistake. A target that already runs keeps the decisions that it knows. `floe chain resume --all` writes a new value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from heapq import nsmallest

import msgspec

from common.archive.catalog import FeedId
from common.archive.documents import ChainStore, Document
from common.archive.scan import ChainArchive
from common.archive.store import SegmentStore
from common.archive.times import search
from common.chain import Chain
from common.clock import NS_PER_S, Clock, parse_time
from common.errors import Stopped
from common.exits import choices, resume_command
from common.logs import get_logger
from common.nats.kv import KeyValue, KvDocument, open_ingress_state, state_key
from common.sequences import MAX_SEQUENCE
from common.settings.ingress import SourceSettings, TargetSettings
from common.settings.root import Settings
from common.settings.service import StartSettings
from ingress.checkpoint import StateStore
from ingress.errors import check_targets

log = get_logger(__name__)

# Patterns

MAX_SHOWN_FEEDS = 20  # names in a line


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """The feeds that patterns match. `taken`: those that flow in, each with its entry; `untaken`: those that do not,
    each with the reason.
    """

    taken: Mapping[FeedId, SourceSettings] = field(default_factory=dict)
    untaken: Mapping[FeedId, str] = field(default_factory=dict)

    def untaken_texts(self) -> list[str]:
        """Return the first MAX_SHOWN_FEEDS of the feeds that do not flow in, with the reasons. From any thread."""
        return [f"{'/'.join(feed)}: {reason}" for feed, reason in nsmallest(MAX_SHOWN_FEEDS, self.untaken.items())]


def plan_sources(
    settings: TargetSettings,
    feeds: Collection[FeedId],
    stored: Collection[FeedId],
    taken: Collection[FeedId] = frozenset(),
) -> SourcePlan:
    """Plan the feeds of patterns. `feeds`: those in the store, and `stored`: those with a position of the target;
    `taken`: by an earlier plan of this process. If a limit is reached, those that are taken come first, then those that
    are stored, then the others by name.
    """
    flowing, untaken = dict[FeedId, SourceSettings](), dict[FeedId, str]()
    feeds_by_entry: dict[int, list[FeedId]] = {}
    for feed, numbers in settings.matched_feeds({*feeds, *stored}).items():
        if len(numbers) == 1:
            feeds_by_entry.setdefault(numbers[0], []).append(feed)
        else:
            entries = " and ".join(f"sources.{number}" for number in numbers)
            untaken[feed] = f"{entries} match it: name it in one of them"
    for number, matched in feeds_by_entry.items():
        source, counts = settings.sources[number], Counter[str]()
        for feed in sorted(matched, key=lambda each: (each not in taken, each not in stored, each)):
            if feed[0] not in counts and len(counts) >= source.max_sites:
                untaken[feed] = f"its site is beyond max_sites of sources.{number}, {source.max_sites}"
            elif counts[feed[0]] >= source.max_chains:
                untaken[feed] = f"its site has more feeds than max_chains of sources.{number}, {source.max_chains}"
            else:
                counts[feed[0]] += 1
                flowing[feed] = source
    return SourcePlan(flowing, untaken)


class PatternSources:
    """The feeds that one target has taken by patterns in this process, which gives none of them up."""

    def __init__(self, settings: TargetSettings) -> None:
        self._settings, self._patterns = settings, [*settings.patterns.values()]
        self._found, self.plan = set[FeedId](), SourcePlan()

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def may_take(self, feed: FeedId) -> bool:
        """True if a pattern matches the feed, and no plan has decided about it."""
        return feed not in self._found and any(source.matches(*feed) for source in self._patterns)

    def take(self, feeds: Collection[FeedId], positions: Collection[Chain]) -> Mapping[FeedId, SourceSettings]:
        """Plan with `feeds` of the store, and return those that are taken now."""
        stored = {(chain.site, chain.feed) for chain in positions}
        has_new = any(map(self.may_take, known := {*feeds, *stored}))
        self._found |= known
        if not has_new:
            return {}
        former, self.plan = self.plan, plan_sources(self._settings, self._found, stored, self.plan.taken)
        new = {feed: source for feed, source in self.plan.taken.items() if feed not in former.taken}
        context: dict[str, object] = {"target": self._settings.stream}
        if begun := ["/".join(feed) for feed in new if feed not in stored]:
            context |= {"count": len(begun), "feeds": ", ".join(begun[:MAX_SHOWN_FEEDS])}
            log.info("feeds taken", action="feeds_taken", **context)
        if wrong := [feed for feed in self.plan.untaken if feed not in former.untaken]:
            texts = [f"{'/'.join(feed)}: {self.plan.untaken[feed]}" for feed in wrong[:MAX_SHOWN_FEEDS]]
            context |= {"count": len(wrong), "feeds": "; ".join(texts)}
            log.error("feeds refused", action="feeds_refused", **context)
        return new


# Starts

START_VERSION = 1


class FeedStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Beginning of the copy of one feed. `moment_ns`: messages at or after this time (ns since 1970 UTC); None: no such
    bound. `sequence`: the first one of incarnation 0; 0: no such bound. `ends`: by chain, the sequence after which it
    begins.
    """

    format_version: int
    moment_ns: int | None = None
    sequence: int = 0
    ends: dict[str, int] = {}

    def to_json(self) -> bytes:
        return _START_ENCODER.encode(self)

    @classmethod
    def from_json(cls, raw: bytes) -> FeedStart:
        """Parse a stored start. Raises ValueError."""
        start = _START_DECODER.decode(raw)
        numbers = (start.sequence, *start.ends.values())
        if start.format_version != START_VERSION or not all(0 <= n <= MAX_SEQUENCE for n in numbers):
            raise ValueError(f"expected a start of version {START_VERSION}, found {start}")
        return start


# Created at import: if two threads decode a type for the first time at once, the process crashes.
_START_DECODER = msgspec.json.Decoder(FeedStart)
_START_ENCODER = msgspec.json.Encoder(order="sorted")
RESOLVED_AGAIN_HINT = "delete it, and the start keys are resolved again"


class StartResolver:
    """Resolution of the start keys for one target. Blocking."""

    def __init__(self, target: str, store: SegmentStore, documents: ChainStore, clock: Clock) -> None:
        self._target, self._store, self._documents, self._clock = target, store, documents, clock
        # By moment (ns): the sequence up to which nothing is at or after it; the search continues there.
        self._searched: dict[tuple[Chain, int], int] = {}

    def resolve(
        self, chain: Chain, settings: StartSettings, first: int, end: int | None, positions: Mapping[Chain, int]
    ) -> int:
        """Return the sequence at which `chain`, which has no position, begins; 0 while nothing is archived from the
        start time on.

        `first`: its first sequence in the archive; `end`: the last of its incarnation, None if that has not ended;
        `positions`: of all chains of the target. Raises DataError for an invalid document, else as the store does.
        """
        if (start := self._start(chain, settings, positions)) is None:
            return first
        behind = MAX_SEQUENCE if end is None else end + 1
        if start.moment_ns is None:
            wanted = max(start.sequence if chain.incarnation == 0 else 0, start.ends.get(str(chain), 0) + 1)
        elif (found := self._first_since(chain, start.moment_ns)) is not None:
            wanted = found
        elif end is None:
            return 0
        else:
            wanted = behind
        return max(first, min(wanted, behind))

    def _first_since(self, chain: Chain, moment_ns: int) -> int | None:
        """Return the first sequence at or after the moment; None if none is archived."""
        place = chain, moment_ns
        found, behind = search(self._store, chain, moment_ns, self._searched.get(place, 1))
        self._searched[place] = behind if found is None else 1
        return found

    def _start(self, chain: Chain, settings: StartSettings, positions: Mapping[Chain, int]) -> FeedStart | None:
        """Return the stored start, or store one now; None if the whole feed is replayed."""
        if not settings.is_set:
            return None
        key = self._documents.layout.start_document(self._target, chain.site, chain.feed)
        objects, claims = self._documents.objects, self._documents.claims
        form = FeedStart.to_json, FeedStart.from_json
        document = Document(objects, key, *form, hint=RESOLVED_AGAIN_HINT, claims=claims)
        if (start := document.read()) is not None:
            return start
        if any(_feed(other) == _feed(chain) for other in positions):
            return None
        found = document.create(start := self._resolve_new(chain, settings))
        log.info("start resolved", action="start_resolved", key=key, start=start.to_json().decode())
        return found

    def _resolve_new(self, chain: Chain, settings: StartSettings) -> FeedStart:
        if settings.start_at_end:
            return FeedStart(
                START_VERSION, ends={str(c): self._coverage_end(c) for c in self._documents.chains(*_feed(chain))}
            )
        if settings.start_sequence:
            return FeedStart(START_VERSION, sequence=settings.start_sequence)
        if settings.start_time:
            return FeedStart(START_VERSION, moment_ns=parse_time(settings.start_time))
        return FeedStart(START_VERSION, moment_ns=round((self._clock.now() - settings.start_delta) * NS_PER_S))

    def _coverage_end(self, chain: Chain) -> int:
        """Return the end of the coverage, by listing: the tail is a hint that may be old, or claim too much."""
        tail = self._documents.read_tail(chain) or 1
        return ChainArchive.listed(self._store, chain, tail).end or ChainArchive.listed(self._store, chain).end


def _feed(chain: Chain) -> tuple[str, str]:
    return chain.site, chain.feed


# Pauses

PAUSES_VERSION = 1
PAUSES_ROLE = "pauses"
MAX_PAUSED_CHAINS = 5_000  # chains in the value, which has to stay far below 1 MiB


class Pause(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A pause of a chain: its time (RFC 3339), its author and the reason."""

    at: str
    by: str = ""
    note: str = ""


class _StoredPauses(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    target: str
    paused: dict[str, Pause]
    resumed: dict[str, str]


# Created at import: if two threads decode a type for the first time at once, the process crashes.
_PAUSES_DECODER = msgspec.json.Decoder(_StoredPauses)
_PAUSES_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Pauses:
    """Decisions of operators. `paused`: chains not replayed. `resumed`: the last request to check a chain again."""

    paused: Mapping[Chain, Pause] = field(default_factory=dict)
    resumed: Mapping[Chain, str] = field(default_factory=dict)

    def with_pause(self, chain: Chain, pause: Pause) -> Pauses:
        """Pause a chain. A chain that is paused already keeps its first entry."""
        paused = {**self.paused, chain: self.paused.get(chain, pause)}
        return Pauses(paused, {c: at for c, at in self.resumed.items() if c != chain})

    def with_resume(self, chain: Chain, at: str) -> Pauses:
        resumed = {**{c: t for c, t in self.resumed.items() if c != chain}, chain: at}
        limit = MAX_PAUSED_CHAINS - len(self.paused)
        kept = dict(list(resumed.items())[-limit:]) if limit > 0 else {}
        return replace(self, paused={c: p for c, p in self.paused.items() if c != chain}, resumed=kept)

    def with_all_resumed(self, at: str) -> Pauses:
        found = self
        for chain in self.paused:
            found = found.with_resume(chain, at)
        return found


class _PausesForm:
    """The stored form of the pauses of one target."""

    def __init__(self, target: str) -> None:
        self._target = target

    def encode(self, pauses: Pauses) -> bytes:
        paused = {str(chain): pause for chain, pause in pauses.paused.items()}
        resumed = {str(chain): at for chain, at in pauses.resumed.items()}
        return _PAUSES_ENCODER.encode(_StoredPauses(PAUSES_VERSION, self._target, paused, resumed))

    def decode(self, raw: bytes) -> Pauses:
        wire = _PAUSES_DECODER.decode(raw)
        if (wire.version, wire.target) != (PAUSES_VERSION, self._target):
            raise ValueError(f"expected {PAUSES_VERSION} of {self._target}, found {wire.version} {wire.target:.80}")
        paused = {Chain.parse(chain): pause for chain, pause in wire.paused.items()}
        return Pauses(paused, {Chain.parse(chain): at for chain, at in wire.resumed.items()})


class PauseStore:
    """The pauses of one target. `states`: the store of the target's state, which holds the chains with a position."""

    def __init__(self, bucket: KeyValue, target: str, states: StateStore | None = None) -> None:
        key = state_key(PAUSES_ROLE, target)

        def unreadable(reason: str) -> Stopped:
            return Stopped(
                f"pauses of target {target} cannot be read: {reason}",
                hint=choices((f"restore {key} of {bucket.bucket}; or resume all chains", resume_command(target, None))),
                code="E-PAUSES",
            )

        self._document, self._states = KvDocument(bucket, key, _PausesForm(target), unreadable), states

    async def read(self) -> Pauses:
        """Read the pauses. Raises Stopped (E-PAUSES) for an unreadable value, else as the bucket does."""
        return (await self._document.get())[0] or Pauses()

    async def known_chains(self) -> list[Chain]:
        """Return the chains for which the target has a position; empty if its state is not known."""
        try:
            state = (await self._states.load()).state if self._states else None
        except Stopped:
            return []
        return [] if state is None else list(state.checkpoint.positions)

    async def change(self, step: Callable[[Pauses], Pauses]) -> Pauses:
        """Store the result of `step` on the current value; repeated if another writer was faster. Raises as `read`."""
        return await self._document.change(lambda found: step(found or Pauses())) or Pauses()

    async def resume_all(self, at: str) -> Pauses:
        """Resume all chains, even if the stored value cannot be read. Raises as the bucket does."""
        found = await self._document.change(lambda old: (old or Pauses()).with_all_resumed(at), allow_unreadable=True)
        return found or Pauses()


@asynccontextmanager
async def pause_stores(settings: Settings) -> AsyncIterator[dict[str, PauseStore]]:
    check_targets(settings.ingress)
    async with open_ingress_state(settings, "floe chain") as (_, bucket):
        names = [target.stream for target in settings.ingress.targets]
        yield {name: PauseStore(bucket, name, StateStore(bucket, name)) for name in names}
