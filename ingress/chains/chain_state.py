"""One chain on its way into a target, and all of them."""

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from common.chain import Chain
from common.errors import ConfigError, FloeError, Stopped
from common.exits import ways
from common.logs import get_logger
from common.metrics import begin
from common.segments import documents
from common.segments.segment import SegmentRef
from common.sequences import SequenceRange, Stretch
from common.settings.ingress import SourceSettings, TargetSettings
from ingress import errors
from ingress.chains.plan import ChainPlan, Phase, unfinished
from ingress.chains.search import SearchState
from ingress.errors import set_command, set_position
from ingress.rows.decoder import FromHole
from ingress.rows.prepare import Preparer, TargetLimits, rule_of

log = get_logger(__name__)

_AT_REST = (Phase.FAILED, Phase.STOPPED, Phase.PAUSED)  # a new plan ends none of these
_LOOKED_AT_EACH_TICK = (
    Phase.BEGINNING, Phase.LOOKING, Phase.LATE, Phase.LOST, Phase.DAMAGED, Phase.FAILED,
)  # fmt: skip
_GO_ON = (Phase.READY, Phase.OMITTING, Phase.PASSING)


AskLimits = Callable[[], Awaitable[TargetLimits]]


class Turn(Enum):
    """Where a chain stands among those that are read in turns."""

    NONE = "not waiting for one"
    QUEUED = "waiting for one"
    ACTIVE = "having one"
    AGAIN = "having one, and wants the next one too"


@dataclass(slots=True, eq=False)
class ChainState:
    """What is known of a chain, and how far it is decoded.

    | phase | waits for | ended by |
    |---|---|---|
    | BEGINNING | `waits_for`; looked at each tick | `begins` |
    | OMITTING | its turn | `passes`; `replan`, which makes it begin again |
    | LOOKING | its turn, or the next tick | `looked` |
    | READY | its turn | `next_stretch`, with the last one; `replan`, `stands` |
    | PASSING | its turn | `passes`, `replan` |
    | IDLE, DONE | a longer tail, a notification, 300 s | `wake` |
    | LATE, LOST, DAMAGED | a segment or a decision; looked at each tick | `wake`, `gives_up`, `leads_on` |
    | FAILED | the next tick | `wake` |
    | STOPPED | an operator, or `retry_at` | `retry` |
    | PAUSED | an operator | `resume` |
    | any of them | | `fail`, `stop`; `pause`, which is called on a new state of the chain |

    `position`: the next sequence to decode; 0 while it is not known where the chain begins. `end`: where its
    incarnation ended, None while it has not. `archived`: the end of coverage as the chain's tail
    says, a hint; 0 where unknown. `given_up`: what is passed next without a row. `rechecked`: the position
    at which damaged segments were read once more. `surveyed`: a lost hole for which everything was looked
    through, and what of it nothing covers.
    `gone`: where it stands because a hole was filled and something was missing by then; `stands_since`: its
    first sequence, and since when by the store's clock; `passed`: what of such ranges is given up. `stopped`:
    why it stopped, until it goes on; from `retry_at` (monotonic seconds) on it is looked at again.
    `waits_for`: why it has not begun. `unreached`: an end of coverage that was still before the moment at
    which it is to begin; 0: none was. `look_everywhere`, `look_behind`: what the next look does besides.
    """

    chain: Chain
    preparer: Preparer
    position: int = 0
    end: int | None = field(default=None, init=False)
    archived: int = 0
    phase: Phase = field(default=Phase.BEGINNING, init=False)
    turn: Turn = field(default=Turn.NONE, init=False)
    stretches: deque[Stretch[SegmentRef]] = field(default_factory=deque, init=False)
    given_up: SequenceRange | None = field(default=None, init=False)
    plan: ChainPlan = field(default_factory=lambda: ChainPlan(Phase.IDLE), init=False)
    search: SearchState = field(default_factory=SearchState, init=False)
    damaged: set[str] = field(default_factory=set, init=False)
    rechecked: int = field(default=0, init=False)
    surveyed: tuple[SequenceRange, SequenceRange] | None = field(default=None, init=False)
    gone: FromHole | None = field(default=None, init=False)
    stands_since: tuple[int, float] | None = field(default=None, init=False)
    passed: list[SequenceRange] = field(default_factory=list, init=False)
    stopped: FloeError | None = field(default=None, init=False)
    retry_at: float = field(default=float("inf"), init=False)
    waits_for: str = field(default="", init=False)
    unreached: int = field(default=0, init=False)
    look_everywhere: bool = field(default=True, init=False)
    look_behind: bool = field(default=True, init=False)
    looked_at: float = field(default=float("-inf"), init=False)
    looked_everywhere_at: float = field(default=float("-inf"), init=False)

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
    def waits(self) -> bool:
        if self.stopped is not None or self.phase is Phase.PAUSED:
            return False
        return self.phase in _LOOKED_AT_EACH_TICK or self.is_behind

    @property
    def goes_on(self) -> bool:
        return self.phase in _GO_ON

    @property
    def may_run(self) -> bool:
        return self.phase not in (Phase.STOPPED, Phase.PAUSED)

    def wake(self) -> None:
        if self.may_run and not self.goes_on:
            self.phase = Phase.LOOKING if self.has_begun else Phase.BEGINNING

    def begins(self, first: int, start: int) -> None:
        """Begin at `start`. What the archive holds before it, from `first` on, is given up. That is stored with the
        positions, so a restart begins at the same sequence.
        """
        self.position, self.phase = first, Phase.LOOKING
        if start > first:
            self.given_up, self.phase = SequenceRange(first, start - 1), Phase.OMITTING

    def gives_up(self, part: SequenceRange) -> None:
        self.given_up, self.phase = part, Phase.PASSING

    def passes(self) -> None:
        self.given_up, self.phase = None, Phase.LOOKING

    def replan(self, *, everywhere: bool = False) -> None:
        """Forget what was planned to be read. `everywhere`: the next look lists all levels."""
        self.stretches.clear()
        if self.phase is Phase.OMITTING:
            # It is not known yet what it leaves out: from its position it would be carried completely.
            self.position = 0
        self.given_up = None
        if self.phase not in _AT_REST:
            self.phase = Phase.LOOKING if self.has_begun else Phase.BEGINNING
        self.look_everywhere = self.look_everywhere or everywhere

    def stands(self, gone: FromHole) -> None:
        """Read nothing from where `gone` begins until what is missing arrives or is given up.

        Compaction writes the segment again with a new LastModified: that does not restart the waiting time.
        """
        first, since = gone.rows.first, gone.segment.modified
        before = self.stands_since[1] if self.stands_since and self.stands_since[0] == first else since
        self.gone, self.stands_since = gone, (first, min(before, since))
        self.replan()

    def fail(self) -> None:
        self.replan(everywhere=True)
        self.phase = Phase.FAILED

    def forget_damage(self) -> None:
        if self.damaged:
            self.damaged.clear()
            self.replan(everywhere=True)

    def ends_at(self, end: int | None) -> None:
        """`end`: last sequence of the incarnation; None: it has not ended."""
        if end != self.end:
            self.end = end
            self.replan()

    def looked(self, plan: ChainPlan, now: float) -> None:
        """Take over a new plan. `now`: monotonic seconds. What is new in the plan is logged."""
        context = self.chain.log_context()
        if plan.hole is not None and plan.hole != self.plan.hole:
            waits = {"phase": str(plan.phase), "hole": str(plan.hole), "since": plan.waiting_since}
            log.warning("chain waits", action="chain_waits", **waits, **context)
        if plan.beyond != self.plan.beyond:
            what = "coverage behind the end of the incarnation is not carried"
            log.warning(what, action="beyond_end", end=self.end, found=plan.beyond, **context)
        self.plan, self.phase, self.looked_at = plan, plan.phase, now
        self.stretches.extend(plan.stretches)
        if plan.stretches:
            # A notification wakes without the tail being read; the listing knows better anyway.
            self.archived = max(self.archived, plan.stretches[-1].rows.last)

    def leads_on(self, segment: SegmentRef) -> None:
        last = segment.coverage.last if self.end is None else min(segment.coverage.last, self.end)
        self.stretches.append(Stretch(segment, SequenceRange(self.position, last)))
        self.plan = ChainPlan(Phase.READY, tuple(self.stretches))
        self.phase = Phase.READY

    def next_stretch(self) -> Stretch[SegmentRef]:
        stretch = self.stretches.popleft()
        self.phase = Phase.READY if self.stretches else Phase.LOOKING
        return stretch

    # Stopping

    def stop(self, error: FloeError, retry_at: float) -> bool:
        """Carry none of it until `retry_at` (monotonic seconds). Returns whether that, or the reason, is new."""
        is_new = self.stopped is None or str(self.stopped) != str(error)
        self.replan(everywhere=True)
        self.stopped, self.retry_at, self.phase = error, retry_at, Phase.STOPPED
        return is_new

    def retry(self, retry_at: float) -> None:
        """Look again: what stopped it may be repaired, and so may damaged segments. If the look fails, look once more
        at `retry_at`.
        """
        if self.stopped is not None:
            self.retry_at = retry_at
        self.damaged.clear()
        if self.phase is Phase.STOPPED:
            self.phase = Phase.LOOKING
        self.replan(everywhere=True)

    def pause(self) -> None:
        """An operator wants nothing of it carried; called on a new state of the chain, which holds nothing."""
        self.phase = Phase.PAUSED

    def resume(self) -> None:
        """It is carried again, from the next look on."""
        self.phase = Phase.IDLE

    def went_on(self) -> None:
        if self.stopped is not None:
            self.stopped, self.retry_at = None, float("inf")
            log.info("chain goes on", action="chain_goes_on", **self.chain.log_context())

    def status(self, positions: Mapping[Chain, int]) -> dict[str, Any]:
        plan, position = self.plan, positions.get(self.chain, 0)
        phase = self.phase if self.phase is Phase.PAUSED else plan.phase
        state: dict[str, Any] = {"position": position, "archived": self.archived, "phase": str(phase)}
        if plan.hole is not None:
            away = sorted(self.damaged) if plan.phase is Phase.DAMAGED else []
            chain, hole = self.chain, plan.hole
            hint = documents.way_out_filled(chain, hole) if self.gone else errors.way_out_of(chain, hole, away)
            state |= {"hole": str(hole), "waiting_since": plan.waiting_since, "hint": hint}
        if self.waits_for:
            state["waits_for"] = self.waits_for
        if self.phase is Phase.PAUSED:
            state["paused"] = True
        if (stopped := self.stopped) is not None:
            state |= {"stopped": stopped.message, "code": stopped.code, "hint": stopped.hint}
        return state


class ChainRegistry:
    """The chains of one target. `sources` of the configuration is the allow-list: no other chain gets in.

    `positions`: what is stored for good, by chain: the next sequence; None while that is not known. `limits`: what
    rows are prepared for; `ask_limits`: asks the target again (None: the limits never change).
    """

    def __init__(self, settings: TargetSettings, limits: TargetLimits, ask_limits: AskLimits | None = None) -> None:
        self._settings, self.target = settings, settings.stream
        self.limits, self._ask_limits = limits, ask_limits
        self._sources = {pair: source for source in settings.sources for pair in source.pairs()}
        self.positions: Mapping[Chain, int] | None = None
        self._states: dict[Chain, ChainState] = {}
        self._archived: dict[Chain, int] = {}
        self._previous: dict[Chain, Mapping[int, int] | None] = {}
        self._unread: dict[Chain, str] = {}
        for site, feed in self._sources:
            begin("ingress_", site=site, feed=feed)

    def __iter__(self) -> Iterator[ChainState]:
        return iter(list(self._states.values()))

    def get(self, chain: Chain) -> ChainState | None:
        return self._states.get(chain)

    def is_current(self, state: ChainState) -> bool:
        """False once the state was replaced: what was found for an earlier state does not count."""
        return self._states.get(state.chain) is state

    def pairs(self) -> list[tuple[str, str]]:
        return list(self._sources)

    def preparer(self, chain: Chain) -> Preparer:
        """Raises ConfigError for a chain that may not flow in."""
        if (source := self._sources.get((chain.site, chain.feed))) is None:
            message = f"target {self.target}: sources: expected {chain.site}/{chain.feed}, found none"
            listed = "an intent holds rows of it: list it again until it ran once; or drop the rest of it"
            raise ConfigError(message, hint=ways((listed, set_command(self.target, "--accept"))), code="E-SOURCES")
        return Preparer(chain, rule_of(source, chain), self.limits)

    def source(self, chain: Chain) -> SourceSettings:
        return self._sources[chain.site, chain.feed]

    async def renew_limits(self) -> None:
        """Prepare rows for the target as it is now. Raises what asking the target raises."""
        limits = await self._ask_limits() if self._ask_limits else self.limits
        if limits != self.limits:
            self.limits = limits
            for state in self:
                state.preparer = self.preparer(state.chain)

    def add(self, chain: Chain) -> ChainState | None:
        """None for a chain that may not flow in."""
        if (chain.site, chain.feed) not in self._sources:
            return None
        if chain not in self._states:
            partition = str(chain.partition)
            begin("ingress_", target=self.target, site=chain.site, feed=chain.feed, partition=partition)
        return self._states.get(chain) or self.renew(chain, self.positions or {})

    def archive(self, chain: Chain, end: int) -> None:
        self._archived[chain] = end
        if state := self._states.get(chain):
            state.archived = end

    def reset(self, positions: Mapping[Chain, int]) -> None:
        self.positions = positions
        former, self._states = self._states, {}
        for chain in former:
            self.renew(chain, positions)

    def renew(self, chain: Chain, positions: Mapping[Chain, int]) -> ChainState:
        """A new state in place of the former one. What was read for the former one is not used."""
        archived = self._archived.get(chain, 0)
        state = ChainState(chain, self.preparer(chain), positions.get(chain, 0), archived=archived)
        state.end = self._end(chain, positions)
        # A tail tells whether there is more to be found; without one only all levels do.
        state.look_everywhere = archived == 0
        self._states[chain] = state
        return state

    # Incarnations

    def needs_previous(self) -> list[Chain]:
        found = {_whole(chain): chain for chain in self._states if chain.incarnation}
        return [chain for whole, chain in found.items() if whole not in self._previous]

    def set_previous(self, chain: Chain, previous: Mapping[int, int] | None) -> None:
        """`previous`: where the incarnation before ended, as `stream.json` says; None: it says nothing."""
        self._previous[_whole(chain)] = previous
        for state in self._states.values():
            state.ends_at(self._end(state.chain, self.positions or {}))

    def cannot_read(self, chain: Chain, why: str) -> bool:
        """The `stream.json` of the chain's incarnation exists and cannot be read. Returns whether that is new."""
        is_news = self._unread.get(_whole(chain)) != why
        self._unread[_whole(chain)] = why
        return is_news

    def _end(self, chain: Chain, positions: Mapping[Chain, int]) -> int | None:
        """None while the incarnation has not ended, as far as is known."""
        if (previous := self._previous.get(_whole(chain.next_incarnation()))) is not None:
            return previous.get(chain.partition, 0)
        later = any(
            (other.site, other.feed) == (chain.site, chain.feed) and other.incarnation > chain.incarnation
            for other in positions
        )
        # The next one has begun: what appears behind is reported, never delivered by itself.
        return positions.get(chain, 1) - 1 if later else None

    def obstacle(self, chain: Chain) -> str:
        """What keeps a chain from beginning and goes away by itself; empty if nothing does."""
        if chain.incarnation == 0:
            return ""
        if _whole(chain) not in self._previous:
            return self._unread.get(_whole(chain), "stream.json is not there yet")
        left = unfinished(chain, self._previous[_whole(chain)] or {}, self.positions or {})
        return "; ".join(f"{before} stands at {at} and ends at {end}" for before, (at, end) in left.items())

    def check_may_begin(self, chain: Chain, first: int) -> None:
        """Raises Stopped where an operator must decide whether the incarnation begins. `first`: where it would."""
        if chain.incarnation == 0:
            return
        if self._previous.get(_whole(chain)) is None:
            why, then = "stream.json: expected the ends of the incarnation before, found none", "begin it all the same"
        elif self._settings.on_new_incarnation == "halt":
            why, then = f"a new incarnation begins at {first}", "go on with it"
        else:
            return
        begin_at = set_position(self.target, chain, first)
        raise Stopped(f"chain {chain}: {why}", hint=ways((f"to {then}", begin_at)), code="E-INCARNATION")


def _whole(chain: Chain) -> Chain:
    return Chain(chain.site, chain.feed, chain.incarnation)
