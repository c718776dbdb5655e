"""What a check makes of what it is told: the four states, the line, the performance data."""

from __future__ import annotations

import math
from typing import Any

import pytest

from common.chain import Chain
from common.check_cli import (
    CheckedChain,
    CheckFigure,
    CheckResult,
    CheckState,
    judge_archive,
    judge_egress,
    judge_ingress,
    thresholds,
)
from common.errors import UsageError
from common.segments.alive import ChainSign, Sighting
from tests.support.basics import cases

CHAIN = Chain("us-east", "NODES")


def test_a_threshold_that_is_not_given_gives_way_and_inverted_ones_are_refused() -> None:
    most = {(None, None): (900, 3600), (60, 120): (60, 120), (60, 60): (60, 60), (None, 60): (60, 60)}
    least = {(None, None): (3600, 900), (120, 60): (120, 60), (None, 7200): (7200, 7200), (60, None): (60, 60)}
    most[7200, None] = (7200, 7200)
    assert {given: thresholds(given, (900, 3600), at_least=False) for given in most} == most
    assert {given: thresholds(given, (3600, 900), at_least=True) for given in least} == least
    for given, at_least, side in (((120, 60), False, "most"), ((60, 120), True, "least")):
        with pytest.raises(UsageError, match=f"--warning: expected at {side} --critical, [12]m, found [12]m"):
            thresholds(given, (1, 1), at_least=at_least)


OK, WARNING, CRITICAL, UNKNOWN = CheckState


def egress(problems: tuple[str, ...] = (), age: float = 0.1, **feed: Any) -> dict[str, Any]:
    part = {"stream": "NODES", "state": "reading", "code": "", "end": 90, "source_last": 100, **feed}
    parts = {"egress NODES": part, "egress sharing": {"owner": "me", "held": []}}
    return {"parts": parts, "problems": list(problems), "heartbeat_age_seconds": age}


@cases(
    "document, expiry, state, said",
    (egress(), math.inf, OK, "1 chain, 10 sequences not archived"),
    (egress(end=0, first=15, source_last=14), math.inf, OK, "1 chain, 0 sequences not archived"),
    (egress(), 80_000, WARNING, "expires in 80000 s"),
    (egress(), 20_000, CRITICAL, "expires in 20000 s"),
    (egress(state="stopped", code="E-FORKED"), math.inf, CRITICAL, ": E-FORKED"),
    (egress(("nats data: the connection is down",)), math.inf, WARNING, "not ready: nats data"),
    (egress(age=45.0), math.inf, CRITICAL, "hangs"),
)
def test_egress(document: dict[str, Any], expiry: float, state: CheckState, said: str) -> None:
    for found in (document, {**document, "parts": {}, "workers": {"0": document}}):
        result = judge_egress(found, expiry, 86_400, 21_600)
        assert result.state is state
        assert said in result.line().partition(" | ")[0]


def ingress(target: dict[str, Any] | None = None, problems: tuple[str, ...] = (), **chain: Any) -> dict[str, Any]:
    state = {"position": 5, "archived": 9, "phase": "ready", "lag_seconds": 3, **chain}
    part = {"state": "carrying", "chains": {str(CHAIN): state}, **(target or {})}
    return {"parts": {"target FLEET": part}, "problems": list(problems), "heartbeat_age_seconds": 0}


@cases(
    "document, state, said",
    (ingress(), OK, "1 target, 1 chain, 3 s behind"),
    (ingress(lag_seconds=1000), WARNING, "us-east/NODES/0000/0 into target FLEET: 1000 s behind"),
    (ingress(stopped="why", code="E-LOST"), CRITICAL, "stopped: us-east/NODES/0000/0 into target FLEET: E-LOST"),
    (ingress({"state": "stopped", "code": "E-TARGET-GONE", "chains": {}}), CRITICAL, "E-TARGET-GONE"),
    (ingress(problems=("store: away",)), WARNING, "not ready: store: away"),
    (ingress(source={"state": "stopped", "code": "E-FORKED"}), CRITICAL, "at its site: E-FORKED"),
    (ingress(source={"state": "reading", "code": ""}), OK, "3 s behind"),
)
def test_ingress(document: dict[str, Any], state: CheckState, said: str) -> None:
    result = judge_ingress(document, 900, 3600)

    assert result.state is state
    assert said in result.line()


def chain(age: float | None = 10.0, state: str = "reading", **fields: Any) -> CheckedChain:
    sign = ChainSign(state, 0.0, "E-FORKED" if state == "stopped" else "", "", 90, 100, 0.0, chain=CHAIN)
    sighting = None if age is None else Sighting(sign, 0.0, age, 0.0)
    return CheckedChain(CHAIN, end=90, egress=sighting, **fields)


@cases(
    "found, state, said",
    ([chain()], OK, "1 chain, 10 sequences not archived"),
    ([chain(None)], OK, "1 chain, 0 sequences not archived"),
    ([chain(400)], WARNING, "no sign of life for 400 s"),
    ([chain(state="stopped")], CRITICAL, "stopped at its site: E-FORKED"),
    ([chain(missing=("4..7",))], CRITICAL, "4..7 missing"),
    ([chain(damaged=("a/b.parquet",))], CRITICAL, "damaged: a/b.parquet"),
    ([], UNKNOWN, "nothing is archived"),
    ([chain(recreated=3600.0)], WARNING, "us-east/NODES/0000/0: the stream was made again 3600 s ago"),
    ([chain(recreated=90_000.0)], OK, "1 chain"),
)
def test_archive(found: list[CheckedChain], state: CheckState, said: str) -> None:
    result = judge_archive(found, 300, 3600)

    assert result.state is state
    assert said in result.line()


def test_the_line_has_one_bar_and_no_line_ends_whatever_is_said() -> None:
    figures = [CheckFigure("a", 1), CheckFigure("b", 2.5, "s", "3", "4"), CheckFigure("c", math.inf, "s")]
    result = CheckResult("fine", figures)
    assert result.line() == "OK - fine | a=1 b=2.5s;3;4"
    for number in range(5):
        result.add(WARNING, f"{number}: a|b\nc")
    result.add(CRITICAL, "worst")

    assert result.line() == "CRITICAL - worst; 0: a/b; c; 1: a/b; c; and 3 more | a=1 b=2.5s;3;4"
