"""What becomes of a target after an error, and what its gauges say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from common.chain import Chain
from common.clock import SystemClock
from common.errors import (
    AnotherWriter,
    ConfigError,
    DataError,
    LeaseLost,
    OutcomeUnknown,
    Stopped,
    Unavailable,
)
from common.jetstream.requests import ApiError
from common.metrics import REGISTRY
from common.segments.keys import SegmentName
from common.sequences import SequenceRange
from common.service.monitor import Health
from common.settings.ingress import TargetSettings
from ingress.chains.chain_state import ChainRegistry, ChainState
from ingress.chains.plan import ChainPlan, Phase
from ingress.checkpoint import Intent, IntentPiece
from ingress.errors import ends_target, leading, passes_by_itself
from ingress.report import Lags, TargetReport
from ingress.rows.prepare import Accepting, Preparer, SubjectRule, TargetLimits
from ingress.rows.rows import Block
from tests.support.basics import unique

CHAIN = Chain("us-east", "NODES")


NO_PEERS = ApiError(400, 10005, "no suitable peers for placement")
TARGET, SOURCES = ConfigError("x", code="E-TARGET"), ConfigError("x", code="E-SOURCES")


def test_what_is_unreachable_passes_by_itself_and_a_stop_never_ends_a_target() -> None:
    for error in (Unavailable("x"), OutcomeUnknown("x"), LeaseLost("x"), ApiError(503, 0, "x"), NO_PEERS):
        assert passes_by_itself(error)
        assert not ends_target(error, was_checked=False)
    for error in (Stopped("x"), DataError("x")):
        assert not passes_by_itself(error)
        assert [ends_target(error, was_checked=each) for each in (True, False)] == [False, False]


def test_a_configuration_ends_a_target_only_where_it_never_worked_or_cannot_without_a_restart() -> None:
    assert [ends_target(TARGET, was_checked=each) for each in (False, True)] == [True, False]
    assert ends_target(SOURCES, was_checked=True)
    assert ends_target(AnotherWriter("x"), was_checked=True)


def test_of_several_errors_the_one_for_an_operator_leads() -> None:
    stop = Stopped("x")
    assert (
        leading(BaseExceptionGroup("", [Unavailable("a"), BaseExceptionGroup("", [stop, ValueError("bug")])])) is stop
    )


def chain_state(position: int, archived: int, plan: ChainPlan | None = None) -> ChainState:
    preparer = Preparer(CHAIN, SubjectRule(), TargetLimits(Accepting([">"]), 1024))
    found = ChainState(CHAIN, preparer, position, archived=archived)
    found.plan = plan or ChainPlan(Phase.IDLE)
    return found


def gauge(target: str, name: str) -> float | None:
    labels = {"target": target, "site": CHAIN.site, "feed": CHAIN.feed, "partition": "0"}
    return REGISTRY.get_sample_value(f"floe_ingress_{name}", labels)


def piece(first: int, last: int, count: int) -> IntentPiece:
    return IntentPiece(SegmentName(CHAIN, 0, SequenceRange(first, last), "0" * 16), SequenceRange(first, last), count)


def test_messages_are_counted_where_they_are_decoded_and_sequences_where_not() -> None:
    target = unique("T")
    lags = Lags(target)
    # Stored below 101; 101..200 in the open intent and 201..300 decoded hold 7 and 5; the rest: not yet.
    lags.measure(
        [chain_state(301, 1000)], {CHAIN: 101}, [Block(piece(201, 300, 5))], Intent(9, (piece(101, 200, 7),)), 50.0
    )
    assert gauge(target, "lag_sequences") == 900
    assert gauge(target, "lag_messages") == 712
    assert REGISTRY.get_sample_value("floe_ingress_intent_open", {"target": target}) == 1
    lags.forget()
    assert gauge(target, "lag_messages") is None


def test_the_lag_grows_while_nothing_is_carried_and_is_0_when_all_is() -> None:
    target = unique("T")
    lags = Lags(target)
    hole = ChainPlan(Phase.LATE, (), SequenceRange(101, 110), 1000.0)
    lags.measure([chain_state(101, 200, hole)], {CHAIN: 101}, [], None, 1030.0)
    assert (gauge(target, "lag_seconds"), gauge(target, "waiting_seconds")) == (30, 30)
    assert gauge(target, "late_sequences") == 10
    lags.measure([chain_state(101, 300, hole)], {CHAIN: 101}, [], None, 1090.0)
    assert gauge(target, "lag_seconds") == 90
    lags.measure([chain_state(301, 300)], {CHAIN: 301}, [], None, 1100.0)
    assert (gauge(target, "lag_seconds"), gauge(target, "late_sequences")) == (0, 0)
    lags.forget()


def test_the_lag_stays_until_another_instance_carries() -> None:
    target, clock = unique("T"), SystemClock()
    report = TargetReport(target, Health(clock), clock, owner="me")
    report.lags.measure([chain_state(101, 300)], {CHAIN: 101}, [], None, 1090.0)
    report.gives_back()
    for nobody in (None, "me"):
        report.standby(nobody)
        assert gauge(target, "lag_sequences") == 200
    asked = REGISTRY.get_sample_value("floe_ingress_lag_last_success_timestamp_seconds", {"target": target})
    assert asked == 1090
    report.standby("another")
    assert gauge(target, "lag_sequences") is None


def test_the_lag_of_rows_that_are_being_sent_is_theirs_and_exact_as_soon_as_a_time_is_known() -> None:
    target = unique("T")
    lags = Lags(target)
    sending = Intent(9, (piece(101, 200, 7),))
    lags.measure([chain_state(301, 300)], {CHAIN: 101}, [], sending, 1050.0, sending={CHAIN: 1000.0})
    assert gauge(target, "lag_seconds") == 50
    lags.forget()
    target = unique("T")
    lags = Lags(target)
    lags.measure([chain_state(101, 300)], {CHAIN: 101}, [], None, 1050.0)
    assert gauge(target, "lag_seconds") == 0
    late = ChainPlan(Phase.LATE, (), SequenceRange(101, 110), 1000.0)
    lags.measure([chain_state(101, 300, late)], {CHAIN: 101}, [], None, 1060.0)
    assert gauge(target, "lag_seconds") == 60
    lags.forget()


def test_the_lag_grows_while_the_store_cannot_be_read() -> None:
    """What was archived meanwhile nobody knows; 0 would say that all of it is carried."""
    target, state = unique("T"), chain_state(301, 300)
    lags = Lags(target)
    lags.notice(is_read=False, now=1000.0)
    lags.notice(is_read=False, now=1060.0)
    lags.measure([state], {CHAIN: 301}, [], None, 1060.0)
    assert gauge(target, "lag_seconds") == 60
    assert lags.of(state, {CHAIN: 301}, 1090.0) == 90
    lags.notice(is_read=True, now=1100.0)
    lags.measure([state], {CHAIN: 301}, [], None, 1100.0)
    assert gauge(target, "lag_seconds") == 0
    lags.forget()


def test_the_position_is_shown_before_anything_is_carried_and_where_it_was_set_back() -> None:
    target = unique("T")
    lags = Lags(target)
    late = ChainPlan(Phase.LATE, (), SequenceRange(1, 10), 1000.0)
    lags.measure([chain_state(1, 300, late)], {}, [], None, 1050.0)
    assert gauge(target, "position") == 1
    for at in (101, 51):
        lags.measure([chain_state(at, 300)], {CHAIN: at}, [], None, 1060.0)
        assert gauge(target, "position") == at
    lags.forget()
    assert gauge(target, "position") is None


def test_a_paused_chain_is_shown_as_paused() -> None:
    state = chain_state(101, 300)
    assert state.status({CHAIN: 101})["phase"] == "idle"
    state.pause()
    assert state.status({CHAIN: 101}).items() >= {"phase": "paused", "paused": True, "position": 101}.items()


def test_a_target_that_ends_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    target, clock = unique("T"), SystemClock()
    health = Health(clock)
    report = TargetReport(target, health, clock)
    with caplog.at_level("ERROR", logger="ingress.report"):
        report.ended(ConfigError(f"target {target}: wrong", code="E-TARGET"))
    assert len(caplog.records) == 1
    assert health.problems() == [f"target {target}: wrong"]


def test_the_publisher_is_told_once_and_again_after_another_instance_had_the_target(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = SystemClock()
    report = TargetReport(unique("T"), Health(clock), clock, owner="me")

    def told() -> int:
        return sum(record.name == "ingress.report" for record in caplog.records)

    with caplog.at_level("INFO", logger="ingress.report"):
        for _ in range(2):  # by the check at the start, and by who carries
            report.publishes("single", {"fast": "nats-server 2.10"})
        assert told() == 1
        report.publishes("fast", {})
        assert told() == 2
        report.standby("other")
        report.publishes("fast", {})
        assert told() == 3


def carried(chains: list[Chain], unready: str = "", *, is_settled: bool = True) -> tuple[str, Health]:
    """The name of a target that carries these, and what it reported."""
    target, clock = unique("T"), SystemClock()
    health = Health(clock)
    sources = [{"site": sorted({chain.site for chain in chains}), "feed": "NODES"}]
    settings = TargetSettings.model_validate({"stream": target, "sources": sources})
    registry = ChainRegistry(settings, TargetLimits(Accepting([">"]), 1024))
    assert all(registry.add(chain) for chain in chains)
    state = SimpleNamespace(checkpoint=SimpleNamespace(positions={}, target_sequence=0), intent=None)
    delivery: Any = SimpleNamespace(state=state, is_settled=is_settled, trouble="", unready=unready, sending_times={})
    prefetcher: Any = SimpleNamespace(chains=registry, positions={}, ahead=[])
    TargetReport(target, health, clock).carries(delivery, prefetcher)
    return target, health


def test_a_site_with_many_chains_hides_no_other_from_the_status() -> None:
    target, health = carried([*(Chain("a-site", "NODES", 0, partition) for partition in range(1100)), CHAIN])
    shown = health.status()["parts"][f"target {target}"]["chains"]
    assert len(shown) == 1000
    assert str(CHAIN) in shown


@pytest.mark.parametrize("why", ["", "compared with its state"])
def test_a_target_is_ready_where_nothing_speaks_against_it(why: str) -> None:
    target, health = carried([CHAIN], why, is_settled=False)
    assert health.problems() == ([f"target {target}: {why}"] if why else [])
