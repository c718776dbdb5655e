"""The phases of a chain against a model: whatever is called in whatever order, the phase is one that the
table in `ChainState` names, and what belongs to a phase is there in that phase only.
"""

from __future__ import annotations

import random
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
from tests.support.basics import seeded

CHAIN = Chain("us-east", "NODES")
REST = (Phase.FAILED, Phase.STOPPED, Phase.PAUSED)
PLANNED = (Phase.IDLE, Phase.LATE, Phase.LOST, Phase.DAMAGED, Phase.DONE)


def segment(first: int, last: int) -> SegmentRef:
    name = SegmentName(CHAIN, 0, SequenceRange(first, last), "0" * 16)
    return SegmentRef(name, Layout().segment(name), 1, 100.0)


class Model:
    """What the table says, kept beside a real state."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.begin_anew(rng.choice([0, 7]))

    def begin_anew(self, position: int) -> None:
        preparer = Preparer(CHAIN, SubjectRule(), TargetLimits(Accepting([">"]), 1024))
        self.state = ChainState(CHAIN, preparer, position)
        self.phase = Phase.LOOKING if position else Phase.BEGINNING
        self.has_begun, self.is_stopped, self.left = position > 0, False, 0

    def fresh(self) -> Phase:
        return Phase.LOOKING if self.has_begun else Phase.BEGINNING

    def replanned(self) -> None:
        self.has_begun = self.has_begun and self.phase is not Phase.OMITTING
        self.left = 0
        if self.phase not in REST:
            self.phase = self.fresh()

    # What may happen in any phase

    def fail(self) -> None:
        self.state.fail()
        self.replanned()
        self.phase = Phase.FAILED

    def stop(self) -> None:
        is_new = self.state.stop(Stopped("x"), 5.0)
        assert is_new is not self.is_stopped
        self.replanned()
        self.phase, self.is_stopped = Phase.STOPPED, True

    def retry(self) -> None:
        self.state.retry(9.0)
        self.phase = Phase.LOOKING if self.phase is Phase.STOPPED else self.phase
        self.replanned()

    def end(self) -> None:
        end = self.rng.choice([None, 50, 60])
        is_news = end != self.state.end
        self.state.ends_at(end)
        if is_news:
            self.replanned()

    def damage(self) -> None:
        self.state.damaged.add("x")
        self.state.forget_damage()
        self.replanned()
        assert self.state.look_everywhere

    def went_on(self) -> None:
        self.state.went_on()
        self.is_stopped = False
        assert self.state.retry_at == float("inf")

    def wake(self) -> None:
        self.state.wake()
        if self.phase not in (
            Phase.READY, Phase.OMITTING, Phase.PASSING, Phase.STOPPED, Phase.PAUSED,
        ):  # fmt: skip
            self.phase = self.fresh()

    def pause(self) -> None:
        self.begin_anew(self.state.position if self.has_begun else 0)  # as the registry renews it
        self.state.pause()
        self.phase = Phase.PAUSED

    def resume(self) -> None:
        self.state.resume()
        self.phase = Phase.IDLE

    # What happens in some phases only, because a turn does it

    def begin(self) -> None:
        first = self.rng.randint(1, 9)
        start = first + self.rng.choice([0, 3])
        self.state.begins(first, start)
        self.has_begun, self.phase = True, Phase.OMITTING if start > first else Phase.LOOKING

    def look(self) -> None:
        phase = self.rng.choice([Phase.READY, *PLANNED])
        at = self.state.position
        refs = [segment(at, at + 4), segment(at + 5, at + 9)][: self.rng.choice([1, 2])]
        stretches = tuple(Stretch(ref, ref.coverage) for ref in refs) if phase is Phase.READY else ()
        hole = SequenceRange(at, at) if phase in (Phase.LATE, Phase.LOST, Phase.DAMAGED) else None
        self.state.looked(ChainPlan(phase, stretches, hole), 3.0)
        self.phase, self.left = phase, len(stretches)

    def read(self) -> None:
        stretch = self.state.stretches[0]
        self.state.position = stretch.rows.last + 1
        assert self.state.end_turn(stretch, is_done=True) is None
        self.left -= 1
        self.phase = Phase.READY if self.left else Phase.LOOKING

    def read_a_part(self) -> None:
        stretch = self.state.stretches[0]
        self.state.position = stretch.rows.last  # the last row is left
        rest = self.state.end_turn(stretch, is_done=False)
        assert rest is self.state.stretches[0]
        assert rest.rows == SequenceRange(stretch.rows.last, stretch.rows.last)
        assert self.state.end_turn(stretch, is_done=False) is None, "something else is planned by now"

    def stand(self) -> None:
        at = self.state.position
        self.state.stands(FromHole(segment(at, at + 4), SequenceRange(at, at + 1), 1, frozenset()))
        self.replanned()

    def pass_on(self) -> None:
        assert self.state.given_up is not None
        self.state.position = self.state.given_up.last + 1
        self.state.passes()
        self.phase = Phase.LOOKING

    def decide(self) -> None:
        is_over = self.state.end is not None and self.state.end < self.state.position  # then no segment leads on
        if is_over or self.rng.random() < 0.5:
            self.state.gives_up(SequenceRange(self.state.position, self.state.position + 2))
            self.phase = Phase.PASSING
        else:
            self.state.leads_on(segment(self.state.position, self.state.position + 2))
            self.phase, self.left = Phase.READY, 1

    def step(self) -> None:
        anywhere: list[Callable[[], None]] = [self.end, self.damage, self.wake]
        if self.phase is not Phase.PAUSED and self.rng.random() < 0.05:
            anywhere = [self.pause]
        in_a_turn: dict[Phase, list[Callable[[], None]]] = {
            Phase.BEGINNING: [self.begin, self.fail, self.stop],
            Phase.LOOKING: [self.look, self.look, self.fail, self.stop],
            Phase.READY: [self.read, self.read, self.read_a_part, self.stand, self.fail, self.stop, self.went_on],
            Phase.OMITTING: [self.pass_on, self.fail],
            Phase.PASSING: [self.pass_on],
            Phase.LATE: [self.decide, self.went_on],
            Phase.LOST: [self.decide, self.stop],
            Phase.DAMAGED: [self.decide, self.stop],
            Phase.IDLE: [self.went_on],
            Phase.DONE: [self.went_on],
            Phase.STOPPED: [self.retry],
            Phase.FAILED: [self.retry],
            Phase.PAUSED: [self.resume, self.resume, self.retry],
        }
        self.rng.choice([*anywhere, *in_a_turn.get(self.phase, [])])()
        self.check()

    def check(self) -> None:
        state, phase = self.state, self.phase
        assert state.phase is phase
        assert state.has_begun is self.has_begun
        assert (state.given_up is not None) is (phase in (Phase.OMITTING, Phase.PASSING))
        assert len(state.stretches) == self.left
        assert bool(state.stretches) is (phase is Phase.READY)
        assert (state.stopped is not None) is self.is_stopped
        assert state.may_run is (phase not in (Phase.STOPPED, Phase.PAUSED))
        assert state.goes_on is (phase in (Phase.READY, Phase.OMITTING, Phase.PASSING))
        assert not state.is_done or state.position > (state.end or 0)
        if phase is Phase.STOPPED:
            assert state.retry_at == 5.0
        if phase in (Phase.STOPPED, Phase.PAUSED):
            assert not state.waits
        elif not self.is_stopped and phase in (
            Phase.BEGINNING, Phase.LATE, Phase.LOST, Phase.DAMAGED, Phase.FAILED,
        ):  # fmt: skip
            assert state.waits, "nothing else would have it looked at soon"


def test_the_phase_is_what_the_table_says() -> None:
    rng, seen = seeded(), set()
    for number in range(400):  # some phases are rare
        if number >= 20 and seen == set(Phase):
            break
        model = Model(random.Random(rng.random()))
        for _ in range(400):
            model.step()
            seen.add(model.phase)
    assert seen == set(Phase)


@pytest.mark.parametrize("call", ["ends_at", "forget_damage", "replan"])
@pytest.mark.parametrize("phase", REST)
def test_planning_anew_ends_no_rest(phase: Phase, call: str) -> None:
    state = Model(seeded()).state
    state.damaged.add("x")
    state.phase = phase
    getattr(state, call)(*([40] if call == "ends_at" else []))

    assert state.phase is phase
