"""Heartbeats, their use by the centre and by a check: the ones that count, the four states, the line."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

from common.archive import heartbeats
from common.archive.heartbeats import ChainHeartbeat, HeartbeatObject, StoredHeartbeat, drop_outdated, process_name
from common.chain import Chain
from common.check_cli import CheckResult, CheckState, PerformanceValue, judge_archive, thresholds
from common.errors import UsageError
from common.objects.port import ObjectInfo
from common.observe.observation import Observation
from egress.cli import check_egress, judge_egress
from ingress.cli import judge_ingress
from ingress.operator.status import by_incarnation

CHAIN = Chain("us-east", "NODES", 2)
PARTITION = Chain("us-east", "NODES")


def heartbeat(state: str = "reading", **fields: Any) -> ChainHeartbeat:
    return ChainHeartbeat(state, fields.pop("since", 900.0), chain=fields.pop("chain", CHAIN), **fields)


def sighting(
    made: ChainHeartbeat, modified: float = 1000.0, age: float = 10.0, time: float = 1000.0
) -> StoredHeartbeat:
    return StoredHeartbeat(made, modified, age, time)


def status_of(made: ChainHeartbeat | None = None, **fields: Any) -> Observation:
    egress = made and sighting(made, age=fields.pop("age", 10.0), time=fields.pop("time", 1000.0))
    known = {"target": "T", "chain": CHAIN, "archived": 50, "position": 51}
    return Observation(**known, egress=egress, silent_after=300.0, **fields)


def test_it_comes_back_as_it_was_and_later_versions_may_add_fields() -> None:
    alive = HeartbeatObject(
        "us-east", "a/b/1/2", 1000.5, (heartbeat("stopped", code="E-X", why="…", end=7, source_last=9), heartbeat())
    )
    assert HeartbeatObject.from_json(alive.to_json()) == alive

    later = json.loads(alive.to_json())
    later["new"] = later["chains"][0]["new"] = {"x": 1}
    assert HeartbeatObject.from_json(json.dumps(later).encode()) == alive


def test_what_is_not_one_is_refused() -> None:
    document = json.loads(HeartbeatObject("us-east", "o", 1.0, ()).to_json())
    chain = {"feed": "F", "partition": 0, "incarnation": 0, "state": "s", "since": 1}
    chains = [{"chains": [chain | wrong]} for wrong in ({"feed": "a b"}, {"partition": -1}, {"end": -1})]
    for change in ({"format_version": 2}, {"time": "now"}, *chains):
        with pytest.raises(ValueError, match=r"expected|Expected"):
            HeartbeatObject.from_json(json.dumps(document | change).encode())
    assert HeartbeatObject.from_json(json.dumps(document | {"chains": [chain]}).encode()).chains


def test_names_stay_and_objects_of_processes_that_never_came_back_are_not_read_and_a_dead_site_is() -> None:
    assert [process_name("h"), process_name("h", "a"), process_name("h", "a", 1)] == ["h", "h.a", "h.a.1"]
    live, old = (
        ObjectInfo("a", 1, 10 * heartbeats.HEARTBEAT_EXPIRY_S, "e"),
        ObjectInfo("b", 1, 8 * heartbeats.HEARTBEAT_EXPIRY_S, "e"),
    )
    assert drop_outdated([("s", live), ("s", old), ("dead", old)]) == [live, old]
    assert drop_outdated([("s", old), ("s", live)]) == [live]


def test_the_newest_process_that_has_a_chain_counts() -> None:
    dead = sighting(heartbeat("stopped"), modified=10)
    taken, standby = sighting(heartbeat("reading"), modified=20), sighting(heartbeat("standby"), modified=30)
    for found, counts in (([standby, dead], dead), ([taken, standby, dead], taken), ([standby], standby)):
        assert heartbeats.newest_by_partition(found) == {PARTITION: counts}


def test_what_is_not_archived_is_counted() -> None:
    found = {
        (heartbeat(end=50, source_last=597), 2, 50): 547,
        (heartbeat(end=50, source_last=40), 2, 50): 0,
        (heartbeat(end=50), 2, 50): None,
        # It has begun the next incarnation, and the centre does not know that yet.
        (heartbeat(end=5, source_last=9), 1, 1000): 4,
        # The chain begins after messages that the stream had before: they need not be archived.
        (heartbeat(end=0, source_last=597, first=598), 2, 0): 0,
        (heartbeat(end=600, source_last=610, first=598), 2, 0): 10,
        # It stopped before it determined its incarnation.
        (heartbeat(chain=PARTITION, source_last=597), 2, 50): 547,
    }
    assert {each: each[0].unarchived_count(*each[1:]) for each in found} == found


def test_the_source_is_at_least_as_far_as_its_archive_unless_it_was_rolled_back() -> None:
    found = {
        (heartbeat(end=50, source_last=597), 2, 80): 597,
        (heartbeat(end=50, source_last=50), 2, 80): 80,  # archived since the source was asked
        (heartbeat(end=50, source_last=40), 2, 80): 40,  # rolled back, and recognised
        (heartbeat(end=50, source_last=50), 1, 80): 50,  # of another history
        (heartbeat(end=50), 2, 50): None,
    }
    assert {each: each[0].last_known_sequence(*each[1:]) for each in found} == found


def test_a_heartbeat_counts_for_the_newest_incarnation() -> None:
    seen, ahead = sighting(heartbeat(chain=PARTITION)), sighting(heartbeat())
    assert by_incarnation([PARTITION, CHAIN], {PARTITION: seen}) == {CHAIN: seen}
    assert (by_incarnation([PARTITION], {PARTITION: ahead}), by_incarnation([CHAIN], {})) == ({CHAIN: ahead}, {})


ALARMS = [
    (None, {}, None, False),
    (heartbeat(), {}, "reading", False),
    (heartbeat(), {"age": 46.0}, "overdue", False),
    (heartbeat(), {"age": 301.0}, "silent", True),
    (heartbeat("stopped", code="E-FORKED"), {"age": 46.0}, "stopped E-FORKED", True),
    (heartbeat("waiting", since=900.0), {}, "waiting", False),
    (heartbeat("waiting", since=600.0), {}, "waiting", True),
    (heartbeat("standby", since=1.0), {}, "standby", False),
    (heartbeat(), {"state": "late", "lag_seconds": 200.0}, "reading", False),
    (heartbeat(), {"state": "late", "lag_seconds": 400.0}, "reading", True),
    (heartbeat(), {"state": "lost"}, "reading", True),
    (None, {"state": "stopped"}, None, True),
]


@pytest.mark.parametrize(("made", "fields", "state", "alarm"), ALARMS)
def test_what_is_stopped_or_late_or_silent_for_long_is_an_alarm(
    made: ChainHeartbeat | None, fields: dict[str, Any], state: str | None, alarm: bool
) -> None:
    found = status_of(made, **fields)
    assert (found.egress_state, found.needs_operator) == (state, alarm)


def test_a_threshold_by_default_yields_to_a_given_one_and_inverted_are_refused() -> None:
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
    part["holder"] = "this instance"
    parts = {"egress NODES": part, "sharing": {"owner": "me", "held": []}}
    return {"parts": parts, "problems": list(problems), "heartbeat_age_seconds": age}


def with_uncovered(document: dict[str, Any]) -> dict[str, Any]:
    account = {"streams": 5, "uncovered_streams": 2, "uncovered": ["A", "B"]}
    return {**document, "parts": {**document["parts"], "account": account}}


EGRESS_RESULTS = [
    (egress(), math.inf, OK, "1 chain, 10 sequences not archived"),
    (egress(end=0, first=15, source_last=14), math.inf, OK, "1 chain, 0 sequences not archived"),
    (egress(), 80_000, WARNING, "expires in 80000 s"),
    (egress(), 20_000, CRITICAL, "expires in 20000 s"),
    (egress(state="stopped", code="E-FORKED"), math.inf, CRITICAL, ": E-FORKED"),
    (egress(("nats data: the connection is down",)), math.inf, WARNING, "not ready: nats data"),
    (egress(age=45.0), math.inf, CRITICAL, "hangs"),
    (with_uncovered(egress()), math.inf, WARNING, "2 streams in no feed: A, B"),
]


@pytest.mark.parametrize(("document", "expiry", "state", "shown"), EGRESS_RESULTS)
def test_egress(document: dict[str, Any], expiry: float, state: CheckState, shown: str) -> None:
    idle = {"parts": {"egress NODES": {"stream": "NODES", "state": "waiting"}}}  # NATS does not answer it
    for found in (document, {**document, "parts": {}, "workers": {"0": document, "1": idle}}):
        result = judge_egress(found, expiry, 86_400, 21_600)
        assert result.state is state
        assert shown in result.line().partition(" | ")[0]


def test_the_time_that_a_source_has_left_is_read_for_a_feed_of_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = 'floe_egress_expiry_seconds{feed="A}"} 5.0\nfloe_egress_expiry_seconds{feed="B"} +Inf\n'
    monkeypatch.setattr("common.observe.monitor.fetch_status", lambda *_: egress())
    monkeypatch.setattr("common.observe.monitor.fetch", lambda *_: metrics)
    settings: Any = SimpleNamespace(egress=SimpleNamespace(monitor=None))
    assert "expires in 5 s" in check_egress(settings, (None, None)).line()


def ingress(target: dict[str, Any] | None = None, problems: tuple[str, ...] = (), **chain: Any) -> dict[str, Any]:
    state = {"position": 5, "archived": 9, "phase": "ready", "lag_seconds": 3, **chain}
    part = {"state": "carrying", "chains": {str(PARTITION): state}, **(target or {})}
    return {"parts": {"target FLEET": part}, "problems": list(problems), "heartbeat_age_seconds": 0}


INGRESS_RESULTS = [
    (ingress(), OK, "1 target, 1 chain, 3 s behind"),
    (ingress(lag_seconds=1000), WARNING, "us-east/NODES/0000/0 into target FLEET: 1000 s behind"),
    (ingress(stopped="why", code="E-LOST"), CRITICAL, "stopped: us-east/NODES/0000/0 into target FLEET: E-LOST"),
    (ingress({"state": "stopped", "code": "E-TARGET-GONE", "chains": {}}), CRITICAL, "E-TARGET-GONE"),
    (ingress(problems=("store: away",)), WARNING, "not ready: store: away"),
    (ingress(source={"state": "stopped", "code": "E-FORKED"}), CRITICAL, "at its site: E-FORKED"),
    (ingress(source={"state": "reading", "code": ""}), OK, "3 s behind"),
    (ingress({"untaken_feeds": 2, "untaken": ["a/B: x"]}), CRITICAL, "target FLEET: 2 feeds not delivered: a/B: x"),
]


@pytest.mark.parametrize(("document", "state", "shown"), INGRESS_RESULTS)
def test_ingress(document: dict[str, Any], state: CheckState, shown: str) -> None:
    result = judge_ingress(document, 900, 3600)
    assert (result.state, shown in result.line()) == (state, True)


def chain(age: float | None = 10.0, state: str = "reading", **fields: Any) -> Observation:
    heartbeat = ChainHeartbeat(state, 0.0, "E-FORKED" if state == "stopped" else "", "", 90, 100, 0.0, chain=PARTITION)
    sighting = None if age is None else StoredHeartbeat(heartbeat, 0.0, age, 0.0)
    return Observation(chain=PARTITION, archived=90, egress=sighting, **fields)


ARCHIVE_RESULTS = [
    ([chain()], OK, "1 chain, 10 sequences not archived"),
    ([chain(None)], OK, "1 chain, 0 sequences not archived"),
    ([chain(400)], WARNING, "no heartbeat for 400 s"),
    ([chain(state="stopped")], CRITICAL, "stopped at its site: E-FORKED"),
    ([chain(missing=("4..7",))], CRITICAL, "4..7 missing"),
    ([chain(damaged=("a/b.parquet",))], CRITICAL, "damaged: a/b.parquet"),
    ([], UNKNOWN, "no chain is archived"),
    ([chain(recreated=3600.0)], WARNING, "us-east/NODES/0000/0: the stream was recreated 3600 s ago"),
    ([chain(recreated=90_000.0)], OK, "1 chain"),
]


@pytest.mark.parametrize(("found", "state", "shown"), ARCHIVE_RESULTS)
def test_archive(found: list[Observation], state: CheckState, shown: str) -> None:
    result = judge_archive(found, 300, 3600)
    assert (result.state, shown in result.line()) == (state, True)


def test_the_line_has_one_bar_and_no_line_ends_with_any_text() -> None:
    figures = [
        PerformanceValue("a", 1),
        PerformanceValue("b", 2.5, "s", "3", "4"),
        PerformanceValue("c", math.inf, "s"),
    ]
    result = CheckResult("fine", figures)
    assert result.line() == "OK - fine | a=1 b=2.5s;3;4"
    for number in range(5):
        result.add_problem(WARNING, f"{number}: a|b\nc")
    result.add_problem(CRITICAL, "worst")

    assert result.line() == "CRITICAL - worst; 0: a/b; c; 1: a/b; c; and 3 more | a=1 b=2.5s;3;4"
