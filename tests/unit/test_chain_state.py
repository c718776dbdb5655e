"""The phases of a chain: each call in each phase leads to the phase in the table of `ChainState`."""

from collections.abc import Callable

import pytest

from common.archive.keys import Layout, SegmentName
from common.archive.segment import SegmentRef
from common.chain import Chain
from common.errors import Stopped
from common.sequences import SequenceRange, Stretch
from ingress.chains.chain_state import ChainState
from ingress.chains.plan import ChainPlan, Phase
from ingress.rows.decoder import IncompleteFill
from ingress.rows.prepare import Preparer, SubjectFilters, SubjectRule, TargetLimits

CHAIN = Chain("us-east", "NODES")
NAMES = [SegmentName(CHAIN, 0, SequenceRange(first, first + 4), "0" * 16) for first in (7, 12)]
FIRST, SECOND = (Stretch(SegmentRef(name, Layout().segment(name), 1, 100.0), name.coverage) for name in NAMES)
REST = {Phase.FAILED, Phase.STOPPED, Phase.PAUSED}
GOING = {Phase.READY, Phase.SKIPPING_START, Phase.SKIPPING_HOLE}
GIVEN_UP = SequenceRange(7, 9)


def state_in(phase: Phase) -> ChainState:
    """Return a chain at 7, or before its beginning, that reached the phase by the calls that a turn makes."""
    has_begun = phase not in (Phase.BEGINNING, Phase.SKIPPING_START)
    state = ChainState(CHAIN, Preparer(CHAIN, SubjectRule(), TargetLimits(SubjectFilters([">"]), 1024)), 7 * has_begun)
    hole = SequenceRange(7, 7) if phase in (Phase.LATE, Phase.LOST, Phase.DAMAGED) else None
    planned = ChainPlan(phase, (FIRST, SECOND) if phase is Phase.READY else (), hole)
    ways: dict[Phase, Callable[[], object]] = {
        Phase.BEGINNING: lambda: None,
        Phase.SEARCHING: lambda: None,
        Phase.SKIPPING_START: lambda: state.begin(7, 10),
        Phase.SKIPPING_HOLE: lambda: state.skip(GIVEN_UP),
        Phase.FAILED: state.fail,
        Phase.STOPPED: lambda: state.stop(Stopped("x"), 5.0),
        Phase.PAUSED: state.pause,
    }
    ways.get(phase, lambda: state.adopt_plan(planned))()
    assert state.phase is phase
    return state


@pytest.mark.parametrize("phase", Phase)
def test_what_belongs_to_a_phase_is_there_in_that_phase_only(phase: Phase) -> None:
    state = state_in(phase)
    assert len(state.stretches) == 2 * (phase is Phase.READY)
    assert (state.range_to_skip is not None) == (phase in (Phase.SKIPPING_START, Phase.SKIPPING_HOLE))
    assert (state.can_continue, state.may_run) == (phase in GOING, phase not in (Phase.STOPPED, Phase.PAUSED))
    assert (state.stopped is not None, state.retry_at == 5.0) == (phase is Phase.STOPPED,) * 2
    soon = phase in (Phase.BEGINNING, Phase.SEARCHING, Phase.LATE, Phase.LOST, Phase.DAMAGED, Phase.FAILED)
    assert state.is_waiting is (soon or phase is Phase.READY), "nothing else would have it looked at soon"


@pytest.mark.parametrize("phase", Phase)
def test_planning_again_and_a_wake_up_end_no_rest_and_a_failure_or_a_stop_drops_the_plan(phase: Phase) -> None:
    fresh = Phase.BEGINNING if phase in (Phase.BEGINNING, Phase.SKIPPING_START) else Phase.SEARCHING
    ends, retried = (phase if phase in REST else fresh), (phase if phase in REST - {Phase.STOPPED} else fresh)
    woken = phase if phase in GOING | REST - {Phase.FAILED} else fresh
    calls: list[tuple[Callable[[ChainState], object], Phase, bool]] = [
        (lambda state: state.wake(), woken, phase in GOING),
        (lambda state: state.set_end(40), ends, False),
        (lambda state: (state.damaged.add("x"), state.forget_damage()), ends, False),
        (lambda state: state.block(IncompleteFill(FIRST.segment, GIVEN_UP, 1, frozenset())), ends, False),
        (lambda state: state.retry(9.0), retried, False),
        (lambda state: state.fail(), Phase.FAILED, False),
        (lambda state: state.stop(Stopped("y"), 5.0), Phase.STOPPED, False),
    ]
    for call, expected, keeps in calls:
        state = state_in(phase)
        call(state)
        assert (state.phase, bool(state.stretches or state.range_to_skip)) == (expected, keeps)
        assert state.has_begun is (keeps if phase is Phase.SKIPPING_START else phase is not Phase.BEGINNING)


REASONS = [("archived", 0), ("archived", 5), ("archived", 9), ("listing_due", True), ("search_all_levels", True)]


@pytest.mark.parametrize(("name", "value"), [*REASONS, ("end", 5), ("end", 9), ("stopped", Stopped("x"))])
def test_a_chain_where_its_tail_ends_is_listed_only_for_another_reason(name: str, value: object) -> None:
    for phase in (Phase.IDLE, Phase.LATE, Phase.LOST, Phase.DAMAGED):
        state = state_in(phase)
        state.archived, state.search_all_levels = 6, False
        assert state.needs_listing is (phase is not Phase.IDLE)
        setattr(state, name, value)
        assert state.needs_listing


def test_a_turn_leads_through_what_is_planned_and_counts_for_nothing_where_something_else_is() -> None:
    state = state_in(Phase.READY)
    state.position = 9
    rest = state.end_turn(FIRST, is_done=False)
    assert (rest is state.stretches[0], rest.rows) == (True, SequenceRange(9, 11))
    assert state.end_turn(FIRST, is_done=True) is None
    assert (state.end_turn(rest, is_done=True), state.phase) == (None, Phase.READY)
    assert (state.end_turn(SECOND, is_done=True), state.phase) == (None, Phase.SEARCHING)
    state.skip(GIVEN_UP)
    state.finish_skip()
    assert (state.range_to_skip, state.phase) == (None, Phase.SEARCHING)
    state.set_end(10)
    state.resume_with(FIRST.segment)
    assert (state.phase, state.stretches[0].rows) == (Phase.READY, SequenceRange(9, 10))


def test_a_stop_is_news_once_and_is_over_where_the_chain_goes_on_or_is_resumed() -> None:
    state = state_in(Phase.STOPPED)
    assert [state.stop(Stopped(why), 6.0) for why in ("x", "y")] == [False, True]
    assert not state.is_waiting
    state.check_skipped_gaps = False
    state.retry(9.0)
    assert (bool(state.stopped), state.retry_at, state.is_waiting, state.check_skipped_gaps) == (True, 9.0, False, True)
    state.mark_resumed()
    assert (state.stopped, state.retry_at, state.is_waiting) == (None, float("inf"), True)
    state.pause()
    state.resume()
    assert state.phase is Phase.IDLE
