"""The phases of a chain: each call in each phase leads where the table in `ChainState` says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.chain import Chain
from common.errors import Stopped
from common.segments.keys import Layout, SegmentName
from common.segments.segment import SegmentRef
from common.sequences import SequenceRange, Stretch
from ingress.chains.chain_state import ChainState
from ingress.chains.plan import ChainPlan, Phase
from ingress.rows.decoder import FromHole
from ingress.rows.prepare import Accepting, Preparer, SubjectRule, TargetLimits

CHAIN = Chain("us-east", "NODES")
NAMES = [SegmentName(CHAIN, 0, SequenceRange(first, first + 4), "0" * 16) for first in (7, 12)]
FIRST, SECOND = (Stretch(SegmentRef(name, Layout().segment(name), 1, 100.0), name.coverage) for name in NAMES)
REST = {Phase.FAILED, Phase.STOPPED, Phase.PAUSED}
GOING = {Phase.READY, Phase.OMITTING, Phase.PASSING}
GIVEN_UP = SequenceRange(7, 9)


def state_in(phase: Phase) -> ChainState:
    """A chain at 7, or before its beginning, that came to the phase as a turn brings it there."""
    has_begun = phase not in (Phase.BEGINNING, Phase.OMITTING)
    state = ChainState(CHAIN, Preparer(CHAIN, SubjectRule(), TargetLimits(Accepting([">"]), 1024)), 7 * has_begun)
    hole = SequenceRange(7, 7) if phase in (Phase.LATE, Phase.LOST, Phase.DAMAGED) else None
    planned = ChainPlan(phase, (FIRST, SECOND) if phase is Phase.READY else (), hole)
    ways: dict[Phase, Callable[[], object]] = {
        Phase.BEGINNING: lambda: None,
        Phase.LOOKING: lambda: None,
        Phase.OMITTING: lambda: state.begins(7, 10),
        Phase.PASSING: lambda: state.gives_up(GIVEN_UP),
        Phase.FAILED: state.fail,
        Phase.STOPPED: lambda: state.stop(Stopped("x"), 5.0),
        Phase.PAUSED: state.pause,
    }
    ways.get(phase, lambda: state.looked(planned, 3.0))()
    assert state.phase is phase
    return state


@pytest.mark.parametrize("phase", Phase)
def test_what_belongs_to_a_phase_is_there_in_that_phase_only(phase: Phase) -> None:
    state = state_in(phase)
    assert len(state.stretches) == 2 * (phase is Phase.READY)
    assert (state.given_up is not None) == (phase in (Phase.OMITTING, Phase.PASSING))
    assert (state.goes_on, state.may_run) == (phase in GOING, phase not in (Phase.STOPPED, Phase.PAUSED))
    assert (state.stopped is not None, state.retry_at == 5.0) == (phase is Phase.STOPPED,) * 2
    soon = phase in (Phase.BEGINNING, Phase.LOOKING, Phase.LATE, Phase.LOST, Phase.DAMAGED, Phase.FAILED)
    assert state.waits is (soon or phase is Phase.READY), "nothing else would have it looked at soon"


@pytest.mark.parametrize("phase", Phase)
def test_planning_anew_and_a_wake_up_end_no_rest_and_whatever_fails_or_stops_forgets_its_plan(phase: Phase) -> None:
    fresh = Phase.BEGINNING if phase in (Phase.BEGINNING, Phase.OMITTING) else Phase.LOOKING
    ends, retried = (phase if phase in REST else fresh), (phase if phase in REST - {Phase.STOPPED} else fresh)
    woken = phase if phase in GOING | REST - {Phase.FAILED} else fresh
    calls: list[tuple[Callable[[ChainState], object], Phase, bool]] = [
        (lambda state: state.wake(), woken, phase in GOING),
        (lambda state: state.ends_at(40), ends, False),
        (lambda state: (state.damaged.add("x"), state.forget_damage()), ends, False),
        (lambda state: state.stands(FromHole(FIRST.segment, GIVEN_UP, 1, frozenset())), ends, False),
        (lambda state: state.retry(9.0), retried, False),
        (lambda state: state.fail(), Phase.FAILED, False),
        (lambda state: state.stop(Stopped("y"), 5.0), Phase.STOPPED, False),
    ]
    for call, expected, keeps in calls:
        state = state_in(phase)
        call(state)
        assert (state.phase, bool(state.stretches or state.given_up)) == (expected, keeps)
        assert state.has_begun is (keeps if phase is Phase.OMITTING else phase is not Phase.BEGINNING)


def test_a_turn_leads_through_what_is_planned_and_counts_for_nothing_where_something_else_is() -> None:
    state = state_in(Phase.READY)
    state.position = 9
    rest = state.end_turn(FIRST, is_done=False)
    assert rest is state.stretches[0]
    assert rest.rows == SequenceRange(9, 11)
    assert state.end_turn(FIRST, is_done=True) is None
    assert (state.end_turn(rest, is_done=True), state.phase) == (None, Phase.READY)
    assert (state.end_turn(SECOND, is_done=True), state.phase) == (None, Phase.LOOKING)
    state.gives_up(GIVEN_UP)
    state.passes()
    assert (state.given_up, state.phase) == (None, Phase.LOOKING)
    state.ends_at(10)
    state.leads_on(FIRST.segment)
    assert (state.phase, state.stretches[0].rows) == (Phase.READY, SequenceRange(9, 10))


def test_a_stop_is_news_once_and_is_over_where_the_chain_goes_on_or_is_resumed() -> None:
    state = state_in(Phase.STOPPED)
    assert [state.stop(Stopped(why), 6.0) for why in ("x", "y")] == [False, True]
    assert not state.waits
    state.retry(9.0)
    assert (state.stopped is not None, state.retry_at, state.waits) == (True, 9.0, False)
    state.went_on()
    assert (state.stopped, state.retry_at, state.waits) == (None, float("inf"), True)
    state.pause()
    state.resume()
    assert state.phase is Phase.IDLE
