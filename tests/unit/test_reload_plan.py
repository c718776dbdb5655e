"""The plan of a reload: entries that start, end or are replaced, and keys that are refused."""

from functools import partial, reduce
from typing import Any

import pytest

from common.service.reload import ReloadPlan, plan_entries
from common.settings.root import Settings
from common.settings.types import merge
from egress.partition import next_feed, plan_feeds
from ingress.service import plan_targets

BASE = {"store": {"url": "s3://floe"}, "site": "s", "nats": {"url": "nats://a:1"}}
A, B, T = FEEDS = ({"stream": "A"}, {"stream": "B", "max_age": "1h"}, {"streams": "T*", "relay": True})
FAST = {"segment": {"max_age": "9s"}}
X, Y = ({"site": ["a", "b"], "feed": "F"}, {"site": "c", "feed": ["F", "G"], "lost_segment_timeout": "1h"})
AF, BF, DF = ({"site": site, "feed": "F"} for site in "abd")


def feeds(*entries: dict[str, Any], **egress: Any) -> dict[str, Any]:
    return {"egress": {"feeds": [*entries], **egress}}


def targets(*sources: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"ingress": {"targets": [{"stream": "X", "sources": [*sources], **keys}, {"stream": "Y", "sources": [AF]}]}}


def settings(*parts: dict[str, Any]) -> Settings:
    return Settings.model_validate(reduce(merge, parts, BASE))


def plan(now: dict[str, Any], planner: Any = None) -> ReloadPlan:
    before = feeds(*FEEDS), targets(X, Y)
    planner = planner or (partial(plan_feeds, matched=("T1", "T2")) if "egress" in now else plan_targets)
    return planner(settings(*before), settings(*before, now))


@pytest.mark.parametrize(
    ("now", "started", "ended", "replaced"),
    [
        (feeds(A, T, {**B, "name": "C"}), "C", "B", ""),
        (feeds({**A, **FAST}, B, T), "", "", "A"),
        (feeds(*FEEDS, defaults=FAST), "", "", "A B T1 T2 streams T*"),
        (feeds(A, B, {**T, "except": "T2"}), "", "T2", "streams T*"),
        (feeds(*FEEDS, {"stream": "T1", "relay": True}), "", "", "T1"),
        (feeds(B, T, {"streams": "A*"}), "streams A*", "", "A"),
        (feeds(A, B, {"streams": "*", "relay": True}), "streams *", "streams T*", ""),
        (feeds(*FEEDS, not_archived="T1"), "", "T1", ""),
        (targets(Y, BF, AF), "", "", ""),
        (targets(X, Y, DF), "X: d/F", "", ""),
        (targets({**AF, "feed": ["F", "G"]}, Y), "X: a/G", "X: b/F", ""),
        (targets(X, {**Y, "lost_segment_timeout": "2h"}), "", "", "X"),
        (targets(X, Y, {**DF, "control_headers": ["Nats-TTL"]}), "", "", "X"),
        (targets(AF), "", "", "X"),  # alone, it may use rollups of the whole target
        (targets(X, Y, stream="Z"), "Z", "X", ""),
    ],
)
def test_entries_start_end_or_are_replaced(now: Any, started: str, ended: str, replaced: str) -> None:
    found = plan(now)
    assert [*map(" ".join, (found.started, found.ended, found.replaced))] == [started, ended, replaced]
    assert (found.refused, found.taken) == ({}, ("egress.not_archived",) if "not_archived" in str(now) else ())
    assert ("\nfloe checkpoint " in found.hint) is ("X" in ended)


@pytest.mark.parametrize(
    ("now", "refused"),
    [
        (feeds({**A, "filter_subject": "a"}, T), {"egress.feeds[A].filter_subject": ("", "a")}),
        (feeds({**A, "partitions": ["a", "b"]}), {"egress.feeds[A].partitions": ("an entry", "('a', 'b')")}),
        (feeds(A, B, {"streams": "T*"}), {"egress.feeds[T*].relay": ("True", "False")}),
        (feeds(T, {"stream": "T1"}), {"egress.feeds[T*].relay": ("True", "False")}),
        ({**targets(X), "nats": {"url": "nats://b:1"}}, {"nats.url": ("('nats://a:1',)", "('nats://b:1',)")}),
        ({"log": {"level": "debug"}, "store": {"prefix": "p"}}, {"store.prefix": ("data", "p")}),
    ],
)
def test_a_refused_key_leaves_no_other_change(now: Any, refused: dict[str, Any]) -> None:
    assert plan(now) == ReloadPlan(refused)


def test_keys_of_other_roles_are_of_no_interest_and_a_command_takes_over_only_the_level_of_its_log() -> None:
    now = {"log": {"level": "debug"}, "compaction": {"delete": False}, "egress": {"workers": 2}}
    assert plan(now, plan_targets) == plan({"log": now["log"]}, plan_entries) == ReloadPlan(taken=("log.level",))
    assert plan(now, plan_entries).refused.keys() == {"compaction.delete"}


def test_the_next_listing_decides_where_another_pattern_may_leave_a_stream_out() -> None:
    def follows(before: dict[str, Any], now: dict[str, Any]) -> bool:
        return next_feed(settings(feeds(before)), settings(feeds(now)), "T1") is not None

    mirrors, named = {"streams": "T*", "mirrors": True}, {"stream": "T1"}
    assert [follows(T, mirrors), follows(mirrors, named)] == [True] * 2
    assert [follows(mirrors, T), follows(named, mirrors), follows(mirrors, A)] == [False] * 3
