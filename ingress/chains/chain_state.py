"""The state of one chain on its way into a target, and the registry of all chains of the target."""

from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from common.archive import documents
from common.archive.catalog import FeedId
from common.archive.segment import SegmentRef
from common.chain import Chain
from common.errors import ConfigError, FloeError, Stopped
from common.exits import checkpoint_command, choices, position_command
from common.logs import get_logger
from common.sequences import SequenceRange, Stretch
from common.settings.ingress import SourceSettings, TargetSettings
from ingress import errors
from ingress.chains.plan import ChainPlan, Phase, SearchState
from ingress.chains.sources import PatternSources
from ingress.rows.decoder import IncompleteFill
from ingress.rows.prepare import Preparer, TargetLimits, rule_of

log = get_logger(__name__)

_STICKY_PHASES = (Phase.FAILED, Phase.STOPPED, Phase.PAUSED)  # a new plan ends none of these
_CHECKED_EACH_TICK = (
    Phase.BEGINNING, Phase.SEARCHING, Phase.LATE, Phase.LOST, Phase.DAMAGED, Phase.FAILED,
)  # fmt: skip
_WITH_WORK = (Phase.READY, Phase.SKIPPING_START, Phase.SKIPPING_HOLE)


ReadLimits = Callable[[], Awaitable[TargetLimits]]


class Turn(Enum):
    """Place of a chain among the chains that are read in turns."""

    NONE = "not waiting for one"
    QUEUED = "waiting for one"
    ACTIVE = "having one"
    AGAIN = "having one, and wants the next one too"


@dataclass(slots=True, eq=False)
class ChainState:
    """State of a chain: how far it is decoded, and the work that is planned.

    | phase | waits for | ended by |
    |---|---|---|
    | BEGINNING | `begin_obstacle`; checked each tick | `begin` |
    | SKIPPING_START | its turn | `finish_skip`; `replan`, which makes it begin again |
    | SEARCHING | its turn, or the next tick | `adopt_plan` |
    | READY | its turn | `end_turn`, with the last stretch; `replan`, `block` |
    | SKIPPING_HOLE | its turn | `finish_skip`, `replan` |
    | IDLE, DONE | another tail, a notification, a listing that is due | `wake` |
    | LATE, LOST, DAMAGED | a segment or a decision; checked each tick | `wake`, `skip`, `resume_with` |
    | FAILED | the next tick | `wake` |
    | STOPPED | an operator, or `retry_at` | `retry` |
    | PAUSED | an operator | `resume` |
    | any of them | | `fail`, `stop`; `pause`, which is called on a new state of the chain |

    `position`: the next sequence to decode; 0 until the chain's beginning is known. `end`: the last sequence of its
    incarnation; None if that has not ended. `archived`: the end of coverage in the chain's tail, a hint; 0 if unknown.
    `rest`: the unread part of the stretch in which a turn ended. `range_to_skip`: the range that is skipped next,
    without a row. `rechecked_position`: the position at which damaged segments were read a second time.
    `searched_hole`: a lost hole for which all segments were listed, and the part of it that none covers.
    `incomplete_fill`: the filled hole at which the chain blocks, because sequences of it were missing by then;
    `blocked_since`: its first sequence and the start of the wait, by the store's clock; `skipped_ranges`: ranges of
    filled holes that are skipped. `stopped`: the error that stopped it, until it continues; from `retry_at` (monotonic
    seconds) on it is checked again. `begin_obstacle`: the reason why it has not begun. `end_before_start`: an end of
    coverage that was still before the moment at which it is to begin; 0: none. `listing_due`: the next search lists,
    whatever the tail shows; `search_all_levels`, `check_skipped_gaps`: additional work for it. `reread_at`: damaged
    segments are read again from then on (monotonic seconds).
    """

    chain: Chain
    preparer: Preparer
    position: int = 0
    end: int | None = field(default=None, init=False)
    archived: int = 0
    phase: Phase = field(default=Phase.BEGINNING, init=False)
    turn: Turn = field(default=Turn.NONE, init=False)
    stretches: deque[Stretch[SegmentRef]] = field(default_factory=deque, init=False)
    rest: Stretch[SegmentRef] | None = field(default=None, init=False)
    range_to_skip: SequenceRange | None = field(default=None, init=False)
    plan: ChainPlan = field(default_factory=lambda: ChainPlan(Phase.IDLE), init=False)
    search: SearchState = field(default_factory=SearchState, init=False)
    damaged: set[str] = field(default_factory=set, init=False)
    rechecked_position: int = field(default=0, init=False)
    searched_hole: tuple[SequenceRange, SequenceRange] | None = field(default=None, init=False)
    incomplete_fill: IncompleteFill | None = field(default=None, init=False)
    blocked_since: tuple[int, float] | None = field(default=None, init=False)
    skipped_ranges: list[SequenceRange] = field(default_factory=list, init=False)
    stopped: FloeError | None = field(default=None, init=False)
    retry_at: float = field(default=float("inf"), init=False)
    begin_obstacle: str = field(default="", init=False)
    end_before_start: int = field(default=0, init=False)
    listing_due: bool = field(default=False, init=False)
    search_all_levels: bool = field(default=True, init=False)
    check_skipped_gaps: bool = field(default=True, init=False)
    reread_at: float = field(default=float("inf"), init=False)

    def __post_init__(self) -> None:
        self.wake()

    @property
    def has_begun(self) -> bool:
        return self.position > 0

    @property
    def is_done(self) -> bool:
        return self.end is not None and self.position > self.end and self.archived <= self.end

    @property
    def is_behind(self) -> bool:
        return self.archived >= self.position and self.plan.phase is not Phase.DONE

    @property
    def needs_listing(self) -> bool:
        """False if the chain is where its tail ends, and nothing else may be archived: a search then lists nothing."""
        is_asked_for = self.listing_due or self.search_all_levels or self.stopped is not None
        has_more = self.end not in (None, self.position - 1)
        is_blocked = self.plan.is_waiting or self.incomplete_fill is not None or has_more
        return is_asked_for or is_blocked or not 0 < self.archived == self.position - 1

    @property
    def is_waiting(self) -> bool:
        if self.stopped is not None or self.phase is Phase.PAUSED:
            return False
        return self.phase in _CHECKED_EACH_TICK or self.is_behind

    @property
    def can_continue(self) -> bool:
        return self.phase in _WITH_WORK

    @property
    def may_run(self) -> bool:
        return self.phase not in (Phase.STOPPED, Phase.PAUSED)

    def wake(self) -> None:
        if self.may_run and not self.can_continue:
            self.phase = Phase.SEARCHING if self.has_begun else Phase.BEGINNING

    def begin(self, first: int, start: int) -> None:
        """Begin at `start`. The archived sequences before it, from `first` on, are skipped. The skip is stored with
        the positions, so a restart begins at the same sequence.
        """
        self.position, self.phase = first, Phase.SEARCHING
        if start > first:
            self.range_to_skip, self.phase = SequenceRange(first, start - 1), Phase.SKIPPING_START

    def skip(self, part: SequenceRange) -> None:
        self.range_to_skip, self.phase = part, Phase.SKIPPING_HOLE

    def finish_skip(self) -> None:
        self.range_to_skip, self.phase = None, Phase.SEARCHING

    def replan(self, *, everywhere: bool = False) -> None:
        """Discard the planned reads. `everywhere`: the next search lists all levels."""
        self.stretches.clear()
        if self.phase is Phase.SKIPPING_START:
            # The range to omit is not known yet: from its position the chain would be replayed completely.
            self.position = 0
        self.range_to_skip = None
        if self.phase not in _STICKY_PHASES:
            self.phase = Phase.SEARCHING if self.has_begun else Phase.BEGINNING
        self.search_all_levels = self.search_all_levels or everywhere

    def block(self, fill: IncompleteFill) -> None:
        """Read nothing from the first sequence of `fill` on, until its missing sequences arrive or are skipped.

        Compaction rewrites the segment with a new LastModified: that does not restart the waiting time.
        """
        first, since = fill.rows.first, fill.segment.modified
        before = self.blocked_since[1] if self.blocked_since and self.blocked_since[0] == first else since
        self.incomplete_fill, self.blocked_since = fill, (first, min(before, since))
        self.replan()

    def fail(self) -> None:
        self.replan(everywhere=True)
        self.phase = Phase.FAILED

    def forget_damage(self) -> None:
        self.reread_at = float("inf")
        if self.damaged:
            self.damaged.clear()
            self.replan(everywhere=True)

    def set_end(self, end: int | None) -> None:
        """Set the last sequence of the incarnation; None: it has not ended."""
        if end != self.end:
            self.end = end
            self.replan()

    def adopt_plan(self, plan: ChainPlan) -> None:
        """Adopt a new plan and log the changes in it."""
        context = self.chain.log_context()
        if plan.hole is not None and plan.hole != self.plan.hole:
            waits = {"phase": str(plan.phase), "hole": str(plan.hole), "since": plan.waiting_since}
            log.warning("chain blocked", action="chain_blocked", **waits, **context)
        if plan.late_end != self.plan.late_end:
            context |= {"end": self.end, "found": plan.late_end}
            log.warning("coverage found after the end of the incarnation", action="late_coverage_found", **context)
        self.plan, self.phase = plan, plan.phase
        self.stretches.extend(plan.stretches)
        if plan.stretches:
            # A notification wakes the chain without a read of the tail; the listing is more recent anyway. Only another
            # listing shows if more follows.
            end = plan.stretches[-1].rows.last
            self.listing_due = self.listing_due or end > self.archived
            self.archived = max(self.archived, end)

    def resume_with(self, segment: SegmentRef) -> None:
        last = segment.coverage.last if self.end is None else min(segment.coverage.last, self.end)
        self.stretches.append(Stretch(segment, SequenceRange(self.position, last)))
        self.plan = ChainPlan(Phase.READY, tuple(self.stretches))
        self.phase = Phase.READY

    def end_turn(self, stretch: Stretch[SegmentRef], *, is_done: bool) -> Stretch[SegmentRef] | None:
        """End a turn that read `stretch`, the first one, up to `position` or completely. Return the rest of it, which
        is read next; None if there is none, or if another plan was made meanwhile.
        """
        if not self.stretches or self.stretches[0] is not stretch:
            return None
        self.stretches.popleft()
        self.rest = None if is_done else Stretch(stretch.segment, SequenceRange(self.position, stretch.rows.last))
        self.stretches.extendleft([self.rest] if self.rest else [])
        self.phase = Phase.READY if self.stretches else Phase.SEARCHING
        return self.rest

    # Stopping

    def stop(self, error: FloeError, retry_at: float) -> bool:
        """Stop the chain until `retry_at` (monotonic seconds). Return True if the stop, or its reason, is new."""
        is_new = self.stopped is None or str(self.stopped) != str(error)
        self.replan(everywhere=True)
        self.stopped, self.retry_at, self.phase = error, retry_at, Phase.STOPPED
        return is_new

    def retry(self, retry_at: float) -> None:
        """Search again: the cause of the stop may be repaired, and so may damaged segments. If the search fails, repeat
        it at `retry_at`.
        """
        if self.stopped is not None:
            self.retry_at = retry_at
        self.damaged.clear()
        self.check_skipped_gaps = True
        if self.phase is Phase.STOPPED:
            self.phase = Phase.SEARCHING
        self.replan(everywhere=True)

    def pause(self) -> None:
        """Pause the chain. Call it only on a new state of the chain, which holds no rows."""
        self.phase = Phase.PAUSED

    def resume(self) -> None:
        """Resume the chain, from the next search on."""
        self.phase, self.listing_due = Phase.IDLE, True

    def mark_resumed(self) -> None:
        if self.stopped is not None:
            self.stopped, self.retry_at = None, float("inf")
            log.info("chain recovered", action="chain_recovered", **self.chain.log_context())

    def status(self, positions: Mapping[Chain, int]) -> dict[str, Any]:
        plan, position = self.plan, positions.get(self.chain, 0)
        phase = self.phase if self.phase is Phase.PAUSED else plan.phase
        state: dict[str, Any] = {"position": position, "archived": self.archived, "phase": str(phase)}
        if plan.hole is not None:
            damaged_keys = sorted(self.damaged) if plan.phase is Phase.DAMAGED else []
            chain, hole, fill = self.chain, plan.hole, self.incomplete_fill
            hint = documents.filled_hole_remedies(chain, hole) if fill else errors.hole_hint(chain, hole, damaged_keys)
            state |= {"hole": str(hole), "waiting_since": plan.waiting_since, "hint": hint}
        if self.begin_obstacle:
            state["waits_for"] = self.begin_obstacle
        if self.phase is Phase.PAUSED:
            state["paused"] = True
        if (stopped := self.stopped) is not None:
            state |= {"stopped": stopped.message, "code": stopped.code, "hint": stopped.hint}
        return state


STREAM_JSON_MISSING = "stream.json does not exist yet"
_IncarnationId = tuple[str, str, int]  # site, feed, incarnation


@dataclass(slots=True)
class _Feed:
    """The known chains of one feed by incarnation. `unfinished`: chains not known to be replayed to their end.
    `refused`: chains above `max_chains`; `stopped`: the error for them.
    """

    incarnations: dict[int, list[Chain]] = field(default_factory=dict)
    unfinished: set[Chain] = field(default_factory=set)
    refused: set[Chain] = field(default_factory=set)
    stopped: FloeError | None = None


class ChainRegistry:
    """The chains of one target. `sources` of the configuration is an allow-list: no other chain is added. `patterns`:
    the feeds that its patterns have taken.

    `positions`: the next sequence of each chain, as stored; None until they are known. `limits`: the limits that rows
    are prepared for; `read_limits`: reads them from the target again (None: the limits never change). `known_sources`:
    with those that are no longer listed, of which an open intent may hold rows. `on_known_positions`: called once they
    are known.

    The cost of a change does not grow with the chains of other feeds: a hostile site may have thousands of them.
    """

    def __init__(self, settings: TargetSettings, limits: TargetLimits, read_limits: ReadLimits | None = None) -> None:
        self.target, self.known_sources = settings.stream, dict[FeedId, SourceSettings]()
        self.limits, self._read_limits = limits, read_limits
        self.patterns = PatternSources(settings)
        self.on_known_positions: Callable[[], None] = lambda: None
        self._positions: Mapping[Chain, int] | None = None
        self._last_begun_by_feed: dict[FeedId, int] | None = None
        self._states: dict[Chain, ChainState] = {}
        self._feeds: dict[FeedId, _Feed] = {}
        # Chains for which `obstacle` named another chain.
        self._waiting = set[Chain]()
        self._archived: dict[Chain, int] = {}
        self._previous: dict[_IncarnationId, Mapping[int, int] | None] = {}
        self._unended: dict[_IncarnationId, deque[tuple[Chain, int]]] = {}
        self._read_errors: dict[_IncarnationId, str] = {}
        self.change_sources(settings)

    @property
    def positions(self) -> Mapping[Chain, int] | None:
        return self._positions

    @positions.setter
    def positions(self, positions: Mapping[Chain, int] | None) -> None:
        if self._positions is None or positions is None or len(self._positions) != len(positions):
            self._last_begun_by_feed = None  # only `reset` removes a position
        self._positions = positions

    def __iter__(self) -> Iterator[ChainState]:
        return iter(list(self._states.values()))

    def get(self, chain: Chain) -> ChainState | None:
        return self._states.get(chain)

    def states_of(self, chains: Iterable[Chain]) -> list[ChainState]:
        """Return the states of those of `chains` that are known here, in order."""
        return [state for chain in sorted(chains) if (state := self._states.get(chain)) is not None]

    def is_current(self, state: ChainState) -> bool:
        """True until `state` is replaced: results for a replaced state do not count."""
        return self._states.get(state.chain) is state

    def pairs(self) -> list[tuple[str, str]]:
        return list(self._sources)

    def take_feeds(self, feeds: Collection[FeedId]) -> list[FeedId]:
        """Let patterns take feeds of the store, once the positions are known; return those that are new."""
        new = {} if self._positions is None else self.patterns.take(feeds, self._positions)
        self._sources |= new
        self.known_sources |= new
        return [*new]

    def preparer(self, chain: Chain) -> Preparer:
        """Return a preparer for the chain's rows. Raises ConfigError for a chain that is, and was, not in `sources`."""
        pair = chain.site, chain.feed
        # An open intent is read before discovery lets patterns take its feeds.
        if (source := self.known_sources.get(pair) or self._settings.source_of(*pair)) is None:
            text = f"target {self.target}: sources: expected {chain.site}/{chain.feed}, found none"
            act = "the open intent holds rows of it: list it until that is closed; or drop the rest of the intent"
            raise ConfigError(text, hint=choices((act, checkpoint_command(self.target, "--accept"))), code="E-SOURCES")
        return Preparer(chain, rule_of(source, chain), self.limits, active=source.acting_headers)

    def source(self, chain: Chain) -> SourceSettings:
        return self.known_sources[chain.site, chain.feed]

    def change_sources(self, settings: TargetSettings) -> None:
        """Take over the sources of `settings`, and drop the chains of others."""
        # A target whose patterns change begins anew.
        self._settings, self._sources = settings, {**settings.feed_sources, **self.patterns.plan.taken}
        self.source_names = tuple(sorted(settings.source_names))
        self.known_sources |= self._sources
        for pair in self._feeds.keys() - self._sources:
            for chains in self._feeds.pop(pair).incarnations.values():
                for chain in chains:
                    del self._states[chain]

    async def renew_limits(self) -> None:
        """Read the limits again, and prepare rows for them. Raises as `read_limits` does."""
        limits = await self._read_limits() if self._read_limits else self.limits
        if limits != self.limits:
            self.limits = limits
            for state in self:
                state.preparer = self.preparer(state.chain)

    def add(self, chain: Chain, end: int | None = None) -> ChainState | None:
        """Add a chain. None if it is not in `sources`, or if its feed has too many, which stops the feed.

        `end`: the end of coverage in its tail; None: not known.
        """
        if (source := self._sources.get(pair := (chain.site, chain.feed))) is None:
            return None
        is_rewritten = end is not None and end <= self._archived.get(chain, -1)
        if end is not None:
            self.set_archived_end(chain, end)
        if (state := self._states.get(chain)) is not None:
            # A tail that names no more than before may have replaced a newer one, of a paused twin.
            state.listing_due = state.listing_due or is_rewritten
            return state
        feed = self._feeds.setdefault(pair, _Feed())
        if len(feed.unfinished) >= source.max_chains and not feed.stopped:
            feed.unfinished = {each for each in feed.unfinished if not self._is_replayed(each)}
        position = (self._positions or {}).get(chain, 0)
        if feed.stopped or (len(feed.unfinished) >= source.max_chains and not self._is_replayed(chain)):
            self._refuse(feed, chain, source.max_chains)
            return None
        feed.incarnations.setdefault(chain.incarnation, []).append(chain)
        feed.unfinished.add(chain)
        return self.renew(chain, position)

    def _is_replayed(self, chain: Chain) -> bool:
        """True if the stored position shows that the chain is replayed to its end."""
        position = (self._positions or {}).get(chain, 0)
        return (end := self._end(chain, position)) is not None and max(position, 1) > end

    def _refuse(self, feed: _Feed, chain: Chain, limit: int) -> None:
        if not feed.refused:
            message = (
                f"{chain.site}/{chain.feed}: max_chains: expected at most {limit} chains not delivered to their end, "
                f"found more, such as {chain}: this feed is not delivered"
            )
            hint = "remove the foreign chains; or raise `max_chains` of its source, and start ingress again"
            feed.stopped = Stopped(message, hint=hint, code="E-CHAINS")
            context = {"site": chain.site, "feed": chain.feed, "code": "E-CHAINS", "target": self.target}
            log.error("feed stopped", action="feed_stopped", error=str(feed.stopped), **context)
        feed.refused.add(chain)

    def feed_error(self, chain: Chain) -> FloeError | None:
        """Return the error that stops all chains of the chain's feed; None if there is none."""
        feed = self._feeds.get((chain.site, chain.feed))
        return feed.stopped if feed else None

    def set_archived_end(self, chain: Chain, end: int) -> None:
        self._archived[chain] = end
        if state := self._states.get(chain):
            state.archived = end

    def reset(self, positions: Mapping[Chain, int]) -> None:
        if self._positions is None:
            self.on_known_positions()
        self.positions, self._last_begun_by_feed = positions, None
        known = [*self._states, *(chain for feed in self._feeds.values() for chain in feed.refused)]
        self._states, self._feeds, self._unended, self._waiting = {}, {}, {}, set()
        for chain in known:
            self.add(chain)

    def renew(self, chain: Chain, position: int) -> ChainState:
        """Replace the state by a new one. Rows that were read for the former one are not used."""
        archived = self._archived.get(chain, 0)
        state = ChainState(chain, self.preparer(chain), position, archived=archived)
        state.end = self._end(chain, position)
        # A tail shows if more is archived; without one, only a listing of all levels does.
        state.search_all_levels = archived == 0
        self._states[chain] = state
        return state

    # Incarnations

    def stream_documents_to_read(self, chain: Chain, *, retry_failed: bool = True) -> list[Chain]:
        """Return the incarnations with a `stream.json` to read before `chain` is searched: its own, and the next one if
        that exists. `retry_failed`: also those that could not be read before.
        """
        feed = self._feeds.get((chain.site, chain.feed), _Feed())
        wanted = [n for n in (chain.incarnation, chain.incarnation + 1) if n and n in feed.incarnations]
        wholes = [(chain.site, chain.feed, n) for n in wanted]
        return [Chain(*w) for w in wholes if w not in self._previous and (retry_failed or w not in self._read_errors)]

    def set_previous_ends(self, chain: Chain, previous: Mapping[int, int] | None) -> None:
        """Set the last sequences of the incarnation before, from `stream.json`; None: it names none."""
        self._previous[_incarnation_of(chain)] = previous
        feed = self._feeds.get((chain.site, chain.feed), _Feed())
        for each in feed.incarnations.get(chain.incarnation - 1, ()):
            self._states[each].set_end(self._end(each, (self._positions or {}).get(each, 0)))

    def record_unread(self, chain: Chain, reason: str) -> bool:
        """Record that the `stream.json` of the incarnation cannot be read. Return True if the reason is new."""
        is_news = self._read_errors.get(_incarnation_of(chain)) != reason
        self._read_errors[_incarnation_of(chain)] = reason
        return is_news

    def _end(self, chain: Chain, position: int) -> int | None:
        """Return the last sequence of the incarnation; None if it is not known to have ended."""
        if (previous := self._previous.get((chain.site, chain.feed, chain.incarnation + 1))) is not None:
            return previous.get(chain.partition, 0)
        # A later one has begun: segments that appear after this are reported, never replayed by themselves.
        return max(position, 1) - 1 if self._last_begun(chain) > chain.incarnation else None

    def _last_begun(self, chain: Chain) -> int:
        """Return the last incarnation of the chain's feed that has a position; -1 if none has."""
        if (begun := self._last_begun_by_feed) is None:
            begun = self._last_begun_by_feed = {}
            for each in self._positions or ():
                pair = each.site, each.feed
                begun[pair] = max(each.incarnation, begun.get(pair, -1))
        return begun.get((chain.site, chain.feed), -1)

    def obstacle(self, chain: Chain) -> str:
        """Return the obstacle that keeps a chain from beginning and passes by itself; empty if there is none."""
        if chain.incarnation == 0:
            return ""
        if _incarnation_of(chain) not in self._previous:
            return self._read_errors.get(_incarnation_of(chain), STREAM_JSON_MISSING)
        if not (left := self._unfinished(chain)):
            return ""
        self._waiting.add(chain)
        before, end = left[0]
        text = f"{before} is at {(self._positions or {}).get(before, 1)} and ends at {end}"
        return f"{text}; at most {len(left) - 1} more partitions have not ended" if len(left) > 1 else text

    def _unfinished(self, chain: Chain) -> deque[tuple[Chain, int]]:
        """Return the chains of the incarnation before, with their ends; the first of them has not reached its end."""
        if (left := self._unended.get(_incarnation_of(chain))) is None:
            ends = sorted((self._previous[_incarnation_of(chain)] or {}).items())
            before = chain.with_incarnation(chain.incarnation - 1)
            left = self._unended[_incarnation_of(chain)] = deque((before.with_partition(n), end) for n, end in ends)
        while left and (self._positions or {}).get(left[0][0], 1) > left[0][1]:
            left.popleft()  # only `reset` lowers a position
        return left

    def waits_for_known_chain(self, chain: Chain) -> bool:
        """True if the chain waits for the end of another chain that is known."""
        if _incarnation_of(chain) not in self._previous or not (left := self._unfinished(chain)):
            return False
        return left[0][0] in self._states

    def take_released(self) -> list[ChainState]:
        """Return the chains that no longer wait for the end of a known chain, each once after an `obstacle`."""
        released = [chain for chain in self._waiting if not self.waits_for_known_chain(chain)]
        self._waiting.difference_update(released)
        return self.states_of(released)

    def unknown_before(self, chain: Chain) -> list[int]:
        """Return the partitions that have coverage before `chain` by `stream.json`, but are unknown here. Empty unless
        the incarnation waits for one of them now.
        """
        if _incarnation_of(chain) not in self._previous or self.waits_for_known_chain(chain):
            return []
        return [each.partition for each, end in self._unfinished(chain) if end and each not in self._states]

    def check_may_begin(self, chain: Chain, first: int) -> None:
        """Raise Stopped if an operator must allow the incarnation to begin. `first`: its first sequence."""
        if chain.incarnation == 0:
            return
        if self._previous.get(_incarnation_of(chain)) is None:
            cause, act = "stream.json: expected the ends of the incarnation before, found none", "begin it anyway"
        elif self._settings.on_new_incarnation == "halt":
            cause, act = f"a new incarnation begins at {first}", "continue with it"
        else:
            return
        begin_at = position_command(self.target, chain, first)
        raise Stopped(f"chain {chain}: {cause}", hint=choices((f"to {act}", begin_at)), code="E-INCARNATION")


def _incarnation_of(chain: Chain) -> _IncarnationId:
    return chain.site, chain.feed, chain.incarnation
