"""The streams of an account: those that feeds archive, those that patterns match, those that need no archive, and the
rest.
"""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from common.nats.api import BUCKET_KEY, RESTORE_KEY, StreamInfo
from common.settings.root import Settings
from common.subjects import common_name, name_matches
from egress.account import AccountStream, plan_account, uncovered_text

COPY = b"NATS/1.0\r\nFloe-Source: eu S 0000 0 9 1700000000000000000\r\n\r\n"
REPLAYED = COPY[:-2] + b"Floe-Replay: 3f0c9a1be27d4455\r\n\r\n"


def stream(name: str = "S", messages: int = 1, headers: bytes | None = None, **config: Any) -> AccountStream:
    info = StreamInfo(name, "2026-01-01T00:00:00Z", {"name": name, **config}, 1, messages, messages, "", "", "")
    return AccountStream(name, info, headers)


def settings(*feeds: dict[str, Any], **egress: Any) -> Settings:
    document = {"site": "eu", "store": {"url": "s3://floe"}, "egress": {"feeds": [*feeds], **egress}}
    return Settings.model_validate(document)


EXEMPT = (
    *map(stream, ("ORDERS", "TMP_1", "KV_FLOE_STATE", "KV_OURS", "FLOE_DRILL_1", "$MQTT_sess")),
    *(stream("KV_THEIRS", metadata={BUCKET_KEY: "leases"}), stream(metadata={RESTORE_KEY: "x"})),
    *(stream(mirror={"name": "ORDERS"}), stream(headers=COPY)),
)
OTHERS = stream(), stream("KV_CONFIG"), stream("OBJ_FILES"), stream("TMP")


@pytest.mark.parametrize("found", [*EXEMPT, *OTHERS, stream(retention="workqueue"), AccountStream("S"), stream("O")])
def test_a_stream_is_archived_by_a_pattern_or_uncovered_unless_it_needs_no_archive(found: AccountStream) -> None:
    own, rest = {"stream": "ORDERS", "name": "O"}, {"not_archived": "TMP_*", "lease_bucket": "OURS"}
    plain = plan_account([found], settings(own, **rest))
    assert (plain.feeds, [*plain.uncovered]) == ({}, [found.name] if found not in EXEMPT else [])
    matching = plan_account([found], settings(own, {"streams": "*", "max_age": "1h"}, **rest))
    assert [*matching.feeds] == [found.name] * (found in OTHERS)
    assert [*matching.uncovered] == [found.name] * (found not in (*EXEMPT, *OTHERS))
    for feed in matching.feeds.values():
        assert (feed.name, feed.stream, feed.max_age, feed.filters()) == (found.name, found.name, 3600, ("",))


ENTRIES = [
    (stream(retention="workqueue"), {}, False, "retention workqueue"),
    (stream(retention="workqueue"), {"retention": ["limits", "workqueue"]}, True, None),
    (stream(), {"retention": ["workqueue"]}, False, "retention limits"),
    (stream(headers=COPY), {"relay": True}, True, None),
    (stream(headers=REPLAYED), {}, True, None),
    (stream(mirror={"name": "X"}), {"mirrors": True}, True, None),
    (stream("$MQTT_msgs"), {"streams": ["*", "$MQTT_m*"]}, True, None),
    (stream("A"), {"except": "A"}, False, None),
    (stream("A_1"), {"streams": ["B", "A_*"], "except": ["A_2"]}, True, None),
    (stream("N"), {}, False, "a feed of another stream has this name"),
    (AccountStream("S"), {}, False, "its retention is not known"),
    (stream(messages=0), {}, False, None),  # a target of Floe may begin like this
    (stream(messages=0, retention="interest"), {"retention": ["interest"]}, True, None),
]


@pytest.mark.parametrize(("found", "entry", "is_taken", "reason"), ENTRIES)
def test_an_entry_decides_what_its_patterns_take(
    found: AccountStream, entry: dict[str, Any], is_taken: bool, reason: str | None
) -> None:
    plan = plan_account([found], settings({"stream": "X", "name": "N"}, {"streams": "*", **entry}))
    assert (bool(plan.feeds), plan.uncovered.get(found.name)) == (is_taken, reason)


BAD_ENTRIES = [
    ([{"streams": "*"}, {"streams": "KV_*"}], r"feeds\.1\.streams: .* '\*' of feeds\.0 and 'KV_\*' of feeds\.1, as"),
    (
        [{"streams": "A*"}, {"stream": "X"}, {"streams": ["C", "*B"]}],
        "'A.' of feeds.0 and '.B' of feeds.2, as for 'AB'",
    ),
    ([{"streams": "A"}, {"streams": "A"}], "as for 'A'"),
    ([{"streams": "*", "except": "KV_*"}, {"streams": "KV_*"}], ""),
    ([{"streams": "A*", "except": ["A*C", "A*BB"]}, {"streams": ["*CC", "*BB"]}], ""),
    ([{"streams": "A*"}, {"streams": "*B", "except": "A?B"}], "as for 'AB'"),
    ([{"streams": "AB"}, {"streams": "*B"}, {"stream": "AB"}], ""),
    ([{"streams": "*", "name": "N"}], "name: expected none with streams"),
    ([{"streams": "*", "partitions": ["a"]}], "partitions: expected none with streams"),
    ([{"streams": "*", "stream": "S"}], r"1 validation error for Settings\n\S+\n  stream: expected none with streams"),
    ([{"stream": "S", "except": "T"}], "except: expected streams with it"),
    (
        [{"streams": []}],
        r"1 validation error for Settings\n\S+\n  streams: expected at least one pattern, found an empty",
    ),
    ([{"streams": "a.b"}], "expected a stream name, with"),
    ([{"streams": "*", "retention": []}], "retention: expected at least one entry"),
]


@pytest.mark.parametrize(("entries", "problem"), BAD_ENTRIES)
def test_entries_that_match_one_stream_and_keys_that_do_not_fit_are_refused(
    entries: list[dict[str, Any]], problem: str
) -> None:
    if not problem:
        settings(*entries)
        return
    with pytest.raises(ValidationError, match=problem):
        settings(*entries)


PATTERN, NAME = st.text("ab*?[", min_size=1, max_size=6), st.text("abA?[", min_size=1, max_size=7)


@given(st.lists(PATTERN, min_size=1, max_size=3), st.lists(PATTERN, max_size=3), NAME)
def test_a_common_name_is_found_exactly_if_there_is_one(included: list[str], excluded: list[str], name: str) -> None:
    def is_common(each: str) -> bool:
        has = [name_matches(pattern, each) for pattern in (*included, *excluded)]
        expressions = [re.escape(pattern).replace(r"\*", ".*") for pattern in (*included, *excluded)]
        assert has == [re.fullmatch(expression, each) is not None for expression in expressions]
        return all(has[: len(included)]) and not any(has[len(included) :])

    found = common_name(included, excluded)
    assert is_common(found) if found is not None else not is_common(name)


def test_many_uncovered_streams_are_shown_as_a_bounded_text() -> None:
    part = {"uncovered_streams": 22, "uncovered": ["A", "B"]}
    assert uncovered_text({"account (worker 1)": part}) == "22 streams in no feed: A, B and 20 more"
    assert uncovered_text({"account": {"uncovered": "not known"}}) == uncovered_text({}) == ""
