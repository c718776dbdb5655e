"""One chain on its way into a target."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from common.chain import Chain
from common.clock import Clock
from common.errors import ConfigError, FloeError, Stopped
from common.segments.segment import SegmentRef
from common.sequences import SequenceRange, Stretch
from common.service.exits import ways
from common.service.logs import get_logger
from common.service.metrics import begin
from common.settings.ingress import SourceSettings, TargetSettings
from ingress import hints
from ingress.chains.pauses import Pauses
from ingress.chains.plan import ChainPlan, Phase, unfinished
from ingress.chains.search import SearchState
from ingress.hints import set_command, set_position
from ingress.rows.decoder import FromHole
from ingress.rows.prepare import Preparer, TargetLimits
from ingress.rows.subjects import rule_of

log = get_logger("ingress.chains.chain_state")


@dataclass(slots=True, eq=False)
class ChainState:
    """What is known of a chain, and how far it is decoded.

    `position`: the next sequence to decode; 0 while it is not known where the chain begins. `end`: where its
    incarnation ended, None while it has not. `archived`: the end of coverage as the chain's tail
    says, a hint; 0 where unknown. `given_up`: what is passed next without a row; `is_beginning`: that is what
    the chain leaves out before it begins. `rechecked`: the position at which damaged segments were read once
    more. `surveyed`: a lost hole for which everything was looked through, and what of it nothing covers.
    `gone`: where it stands because a hole was filled and something was missing by then; `stands_since`: its
    first sequence, and since when by the store's clock; `passed`: what of such ranges is given up. `stopped`:
    why nothing more of it is carried until it is looked at again, at `retry_at` (in monotonic seconds) or
    when an operator asks for it. `paused`: an operator wants nothing of it carried. `waits_for`: why it has
    not begun. `unreached`: an end of coverage that was still before the moment at which it is to begin; 0:
    none was.
    """

    chain: Chain
    preparer: Preparer
    position: int = 0
    end: int | None = None
    archived: int = 0
    stretches: deque[Stretch[SegmentRef]] = field(default_factory=deque)
    given_up: SequenceRange | None = None
    is_beginning: bool = False
    plan: ChainPlan = field(default_factory=lambda: ChainPlan(Phase.IDLE))
    search: SearchState = field(default_factory=SearchState)
    damaged: set[str] = field(default_factory=set)
    rechecked: int = 0
    surveyed: tuple[SequenceRange, SequenceRange] | None = None
    gone: FromHole | None = None
    stands_since: tuple[int, float] | None = None
    passed: list[SequenceRange] = field(default_factory=list)
    stopped: FloeError | None = None
    retry_at: float = float("inf")
    is_retried: bool = False
    paused: bool = False
    waits_for: str = ""
    unreached: int = 0
    look_everywhere: bool = True
    look_behind: bool = True
    looked_at: float = float("-inf")
    looked_everywhere_at: float = float("-inf")
    is_due: bool = True
    is_queued: bool = False
    is_busy: bool = False
    again: bool = False
    failed: bool = False

    @property
    def has_begun(self) -> bool:
        return self.position > 0

    @property
    def is_done(self) -> bool:
        """Whether everything up to the end of the incarnation is decoded and its tail names no more."""
        return self.end is not None and self.position > self.end and self.archived <= self.end

    @property
    def waits(self) -> bool:
        """Whether it has to be looked at again soon."""
        if self.stopped is not None or self.paused:
            return False
        return (
            not self.has_begun
            or self.failed
            or self.plan.waits
            or (self.archived >= self.position and self.plan.phase is not Phase.DONE)
        )

    def begins(self, first: int, start: int) -> None:
        """It begins at `start`. What of the archive is before, from `first` on, is given up, and stored so
        with the positions: a restart begins at the same sequence.
        """
        self.position = first
        self.is_beginning = start > first
        self.given_up = SequenceRange(first, start - 1) if self.is_beginning else None

    def passes(self) -> None:
        """What is given up is on its way."""
        self.given_up, self.is_beginning = None, False

    def replan(self, *, everywhere: bool = False) -> None:
        """Forget what was going to be read; with `everywhere` look at all levels next time."""
        self.stretches.clear()
        if self.is_beginning:
            # Nothing says yet what it leaves out: from its position it would be carried whole.
            self.position = 0
        self.passes()
        self.look_everywhere = self.look_everywhere or everywhere

    def stands(self, gone: FromHole) -> None:
        """Nothing is read from where `gone` begins until what is missing comes, or is given up.

        Compaction puts the segment anew, with a new LastModified: that does not begin the waiting again.
        """
        first, since = gone.rows.first, gone.segment.modified
        before = self.stands_since[1] if self.stands_since and self.stands_since[0] == first else since
        self.gone, self.stands_since = gone, (first, min(before, since))
        self.replan()

    def fail(self) -> None:
        """The last look or read did not come to its end: everything is to be looked at again."""
        self.failed = True
        self.replan(everywhere=True)

    def forget_damage(self) -> None:
        """Give damaged segments another chance: somebody may have put them right."""
        if self.damaged:
            self.damaged.clear()
            self.replan(everywhere=True)

    def ends_at(self, end: int | None) -> None:
        """The incarnation ended at `end` (None: it has not)."""
        if end != self.end:
            self.end = end
            self.replan()

    def looked(self, plan: ChainPlan, now: float) -> None:
        """Take over a new plan, made at `now` (monotonic seconds); what is new about it is logged."""
        if plan.hole is not None and plan.hole != self.plan.hole:
            log.warning(
                "chain waits",
                action="chain_waits",
                phase=str(plan.phase),
                hole=str(plan.hole),
                since=plan.waiting_since,
                **self.chain.log_context(),
            )
        if plan.beyond != self.plan.beyond:
            log.warning(
                "coverage behind the end of the incarnation is not carried",
                action="beyond_end",
                end=self.end,
                found=plan.beyond,
                **self.chain.log_context(),
            )
        self.plan, self.looked_at = plan, now
        self.stretches.extend(plan.stretches)
        if plan.stretches:
            # A notification wakes without the tail being read; the listing knows better anyway.
            self.archived = max(self.archived, plan.stretches[-1].rows.last)

    # Stopping

    @property
    def may_run(self) -> bool:
        """Whether it may be looked at now."""
        return not self.paused and (self.stopped is None or self.is_retried)

    def stop(self, error: FloeError, retry_at: float) -> bool:
        """Nothing more of it is carried until `retry_at`; whether that, or the reason, is new."""
        is_new = self.stopped is None or str(self.stopped) != str(error)
        self.stopped, self.retry_at, self.is_retried, self.again = error, retry_at, False, False
        self.replan(everywhere=True)
        return is_new

    def retry(self, retry_at: float) -> None:
        """Look again: whether what stopped it is mended, and whether damaged segments are; if that does not
        come to an end, once more at `retry_at`.
        """
        self.is_retried, self.retry_at = self.stopped is not None, retry_at
        self.damaged.clear()
        self.replan(everywhere=True)

    def goes_on(self) -> None:
        """What stopped it is mended."""
        if self.stopped is None:
            return
        self.stopped, self.is_retried, self.retry_at = None, False, float("inf")
        log.info("chain goes on", action="chain_goes_on", **self.chain.log_context())

    def status(self, positions: Mapping[Chain, int]) -> dict[str, Any]:
        """What /status shows of it."""
        state: dict[str, Any] = {
            "position": positions.get(self.chain, 0),
            "archived": self.archived,
            "phase": str(self.plan.phase),
        }
        if self.plan.hole is not None:
            state["hole"] = str(self.plan.hole)
            state["waiting_since"] = self.plan.waiting_since
            away = sorted(self.damaged) if self.plan.phase is Phase.DAMAGED else []
            if self.gone:
                state["hint"] = hints.way_out_filled(self.chain, self.plan.hole)
            else:
                state["hint"] = hints.way_out_of(self.chain, self.plan.hole, away)
        if self.waits_for:
            state["waits_for"] = self.waits_for
        if self.paused:
            state["paused"] = True
        if self.stopped is not None:
            state |= {
                "stopped": self.stopped.message,
                "code": self.stopped.code,
                "hint": self.stopped.hint,
            }
        return state


Positions = Mapping[Chain, int]


class ChainRegistry:
    """The lanes of one target. `sources` of the configuration is the allow-list: no other chain gets one."""

    def __init__(self, settings: TargetSettings, shape: TargetLimits) -> None:
        self._settings, self._shape = settings, shape
        self._sources = {pair: source for source in settings.sources for pair in source.pairs()}
        self._lanes: dict[Chain, ChainState] = {}
        self._archived: dict[Chain, int] = {}
        self._previous: dict[Chain, Mapping[int, int] | None] = {}
        self._unread: dict[Chain, str] = {}
        for site, feed in self._sources:
            begin("ingress_", site=site, feed=feed)

    @property
    def target(self) -> str:
        """The name of the target stream."""
        return self._settings.stream

    @property
    def shape(self) -> TargetLimits:
        """What rows are made ready for."""
        return self._shape

    def __iter__(self) -> Iterator[ChainState]:
        return iter(list(self._lanes.values()))

    def get(self, chain: Chain) -> ChainState | None:
        """The lane of `chain`; None if it has none."""
        return self._lanes.get(chain)

    def pairs(self) -> list[tuple[str, str]]:
        """The (site, feed) that may flow in."""
        return list(self._sources)

    def allows(self, chain: Chain) -> bool:
        """Whether the chain may flow in."""
        return (chain.site, chain.feed) in self._sources

    def preparer(self, chain: Chain) -> Preparer:
        """What makes the rows of `chain` ready. Raises ConfigError for a chain that may not flow in."""
        source = self._sources.get((chain.site, chain.feed))
        if source is None:
            raise ConfigError(
                f"target {self._settings.stream}: sources: expected {chain.site}/{chain.feed}, found none",
                hint=ways(
                    (
                        "an intent holds rows of it: list it again until it ran once; or drop the rest of it",
                        set_command(self.target, "--accept"),
                    )
                ),
                code="E-SOURCES",
            )
        return Preparer(chain, rule_of(source), self._shape)

    def source(self, chain: Chain) -> SourceSettings:
        """The source entry of a chain that may flow in."""
        return self._sources[chain.site, chain.feed]

    def reshape(self, shape: TargetLimits) -> None:
        """The target takes other messages than before: rows are prepared for it as it is now."""
        if shape == self._shape:
            return
        self._shape = shape
        for lane in self._lanes.values():
            lane.preparer = self.preparer(lane.chain)

    def add(self, chain: Chain, positions: Positions) -> ChainState | None:
        """The lane of `chain`, made if it is new; None for a chain that may not flow in."""
        if not self.allows(chain):
            return None
        lane = self._lanes.get(chain)
        if lane is None:
            lane = self._lanes[chain] = self._lane(chain, positions)
            partition = str(chain.partition)
            begin("ingress_", target=self.target, site=chain.site, feed=chain.feed, partition=partition)
        return lane

    def archive(self, chain: Chain, end: int) -> None:
        """The chain's coverage ends at `end`, as its tail says."""
        self._archived[chain] = end
        if lane := self._lanes.get(chain):
            lane.archived = end

    def reset(self, positions: Positions) -> list[ChainState]:
        """Make all lanes anew, standing at `positions`; those that may be looked at at once."""
        former, self._lanes = self._lanes, {}
        for chain, lane in former.items():
            self._lanes[chain] = self._lane(chain, positions)
            self._lanes[chain].is_due = lane.is_due
        return [lane for lane in self._lanes.values() if not lane.is_due]

    def renew(self, lane: ChainState, positions: Positions) -> ChainState:
        """A lane of the same chain in place of `lane`, standing at `positions`; what was read for the former
        belongs to nobody.
        """
        renewed = self._lanes[lane.chain] = self._lane(lane.chain, positions)
        return renewed

    def _lane(self, chain: Chain, positions: Positions) -> ChainState:
        archived = self._archived.get(chain, 0)
        lane = ChainState(chain, self.preparer(chain), positions.get(chain, 0), archived=archived)
        lane.end = self._end(chain, positions)
        # A tail tells whether there is more to be found; without one only all levels do.
        lane.look_everywhere = archived == 0
        return lane

    # Incarnations

    def needs_previous(self) -> list[Chain]:
        """One chain of each incarnation above 0 whose `stream.json` was not read yet."""
        found = {_whole(chain): chain for chain in self._lanes if chain.incarnation}
        return [chain for whole, chain in found.items() if whole not in self._previous]

    def set_previous(self, chain: Chain, previous: Mapping[int, int] | None, positions: Positions) -> None:
        """What `stream.json` of the chain's incarnation says of the ends of the one before
        (None: nothing).
        """
        self._previous[_whole(chain)] = previous
        for lane in self._lanes.values():
            lane.ends_at(self._end(lane.chain, positions))

    def cannot_read(self, chain: Chain, why: str) -> bool:
        """`stream.json` of the chain's incarnation is there and cannot be read; whether that is news."""
        is_news = self._unread.get(_whole(chain)) != why
        self._unread[_whole(chain)] = why
        return is_news

    def _end(self, chain: Chain, positions: Positions) -> int | None:
        """Where the chain's incarnation ended; None while it has not, as far as known."""
        previous = self._previous.get(_whole(chain.next_incarnation()))
        if previous is not None:
            return previous.get(chain.partition, 0)
        later = any(
            (other.site, other.feed) == (chain.site, chain.feed) and other.incarnation > chain.incarnation
            for other in positions
        )
        # The next one has begun: what appears behind is reported, never delivered by itself.
        return positions.get(chain, 1) - 1 if later else None

    def obstacle(self, lane: ChainState, positions: Positions) -> str:
        """What keeps a lane from beginning, and passes by itself; empty if nothing does."""
        chain = lane.chain
        if chain.incarnation == 0:
            return ""
        if _whole(chain) not in self._previous:
            return self._unread.get(_whole(chain), "stream.json is not there yet")
        previous = self._previous[_whole(chain)]
        if previous is None:
            return ""
        left = unfinished(chain, previous, positions)
        return "; ".join(f"{before} stands at {at} and ends at {end}" for before, (at, end) in left.items())

    def check_may_begin(self, chain: Chain, first: int) -> None:
        """Raises Stopped where an operator decides whether an incarnation begins. `first`: where it would."""
        if chain.incarnation == 0:
            return
        begin = set_position(self._settings.stream, chain, first)
        if self._previous.get(_whole(chain)) is None:
            raise Stopped(
                f"chain {chain}: stream.json: expected the ends of the incarnation before, found none",
                hint=ways(("to begin it all the same", begin)),
                code="E-INCARNATION",
            )
        if self._settings.on_new_incarnation == "halt":
            raise Stopped(
                f"chain {chain}: a new incarnation begins at {first}",
                hint=ways(("to go on with it", begin)),
                code="E-INCARNATION",
            )


def _whole(chain: Chain) -> Chain:
    """The same for all partitions of an incarnation."""
    return Chain(chain.site, chain.feed, chain.incarnation)


ATTEND = 2.0  # seconds between two looks at what operators have decided

AskShape = Callable[[], Awaitable[TargetLimits]]


class Decisions(Protocol):
    """Who knows what operators have decided (`ingress.chains.pauses.PauseStore`)."""

    async def read(self) -> Pauses: ...


class PauseWatcher:
    """Keeps the lanes' `paused` and `stopped` as they are to be.

    `shape`: asks the target anew what it takes, for chains that stopped because of it (None: it never
    changes). `decisions`: which chains are paused (None: none ever is). `look_at_stopped`: seconds. `wake`:
    has a lane looked at. `hold`: drops what is ready of a lane, and makes it anew behind what was taken.
    """

    def __init__(
        self,
        target: str,
        roster: ChainRegistry,
        clock: Clock,
        shape: AskShape | None,
        decisions: Decisions | None,
        look_at_stopped: float,
        *,
        wake: Callable[[ChainState], None],
        hold: Callable[[ChainState], ChainState],
    ) -> None:
        self._target, self._roster, self._clock = target, roster, clock
        self._ask_shape, self._decisions, self._look_at_stopped = shape, decisions, look_at_stopped
        self._wake, self._hold = wake, hold
        self._decided: Pauses | None = None if decisions else Pauses()
        self._unread = ""  # why the decisions could not be read the last time

    @property
    def is_informed(self) -> bool:
        """Whether it is known which chains are paused; before, none may run."""
        return self._decided is not None

    async def run(self) -> None:
        """Look after them for ever."""
        while True:
            await self._clock.sleep(ATTEND)
            await self.attend()

    async def attend(self) -> None:
        """See what operators have decided, and look again at what has been stopped for long enough."""
        await self.read()
        now = self._clock.monotonic()
        await self._retry([lane for lane in self._roster if lane.stopped and now >= lane.retry_at])

    async def begin(self) -> None:
        """Return when it is known which chains are paused. Raises Stopped where that value is spoiled."""
        while not self.is_informed:
            await self.read()
            if not self.is_informed:
                await self._clock.sleep(ATTEND)

    async def read(self) -> None:
        """Take over what is decided; it stays as it was where that cannot be read now."""
        if self._decisions is None:
            return
        try:
            decided = await self._decisions.read()
        except FloeError as error:
            if self._decided is None and isinstance(error, Stopped):
                raise
            self._tell_unread(str(error))
            return
        self._unread = ""
        former, self._decided = self._decided or Pauses(), decided
        self.mark(self._roster)
        if former != decided:
            await self._retry(lane for lane in self._roster if _is_asked_for(lane.chain, former, decided))

    def _tell_unread(self, why: str) -> None:
        if why != self._unread:
            log.warning("decisions not readable", action="decisions", target=self._target, error=why)
        self._unread = why

    def mark(self, lanes: Iterable[ChainState]) -> None:
        """Have `lanes` paused or not as it is decided."""
        for lane in lanes:
            paused = self._decided is not None and lane.chain in self._decided.paused
            if paused == lane.paused:
                continue
            what = "chain paused" if paused else "chain resumed"
            log.info(what, action="pause", target=self._target, **lane.chain.log_context())
            current = self._hold(lane) if paused else lane
            current.paused = paused
            self._wake(current)

    def stop(self, lane: ChainState, error: FloeError) -> None:
        """Nothing more of the lane is carried until it is looked at again; told once for each reason."""
        told = _with_way_out(error, hints.resume(self._target, lane.chain))
        if lane.stop(told, self._clock.monotonic() + self._look_at_stopped):
            context = lane.chain.log_context()
            log.error("chain stopped", action="chain_stopped", error=str(told), code=told.code, **context)

    async def _retry(self, lanes: Iterable[ChainState]) -> None:
        """Look again at chains, by what the target takes now."""
        wanted = list(lanes)
        if any(lane.stopped for lane in wanted) and not await self._reshape():
            return
        for lane in wanted:
            if self._roster.get(lane.chain) is lane:
                lane.retry(self._clock.monotonic() + self._look_at_stopped)
                self._wake(lane)

    async def _reshape(self) -> bool:
        """Prepare rows for the target as it is now; whether that could be asked."""
        if self._ask_shape is None:
            return True
        try:
            self._roster.reshape(await self._ask_shape())
        except FloeError as error:
            log.warning("target not readable", action="shape", target=self._target, error=str(error))
            return False
        return True


def _is_asked_for(chain: Chain, former: Pauses, decided: Pauses) -> bool:
    """Whether an operator has just resumed the chain."""
    return chain in decided.resumed and decided.resumed[chain] != former.resumed.get(chain)


def _with_way_out(error: FloeError, look_again: str) -> FloeError:
    """The error; where its hint names no command, with the one that has the chain looked at at once."""
    if "floe " in error.hint:
        return error
    then = ways(("then, to have it looked at at once", look_again))
    told = FloeError(error.message, hint=ways(error.hint, then) if error.hint else then, code=error.code)
    told.exit_code = error.exit_code
    return told
