"""The streams of an account: those that feeds archive, those that need no archive, and the rest."""

from typing import Any

import pytest

from common.nats.api import BUCKET_KEY, RESTORE_KEY, StreamInfo
from common.settings.root import Settings
from common.subjects import name_matches
from egress.account import AccountStream, find_uncovered, uncovered_text


def stream(name: str = "S", messages: int = 1, *, is_copy: bool = False, **config: Any) -> AccountStream:
    info = StreamInfo(name, "2026-01-01T00:00:00Z", {"name": name, **config}, 1, messages, messages, "", "", "")
    return AccountStream(name, info, is_copy)


def settings(*feeds: dict[str, Any], **egress: Any) -> Settings:
    return Settings.model_validate(
        {"site": "eu", "store": {"url": "s3://floe"}, "egress": {"feeds": [*feeds], **egress}}
    )


@pytest.mark.parametrize(
    ("found", "is_uncovered"),
    [
        (stream(), True),
        (stream("KV_CONFIG"), True),
        (stream("OBJ_FILES"), True),
        (stream(retention="workqueue"), True),
        (AccountStream("S"), True),  # it may not be inspected
        (stream("ORDERS"), False),
        (stream("TMP_1"), False),
        (stream("KV_FLOE_STATE"), False),
        (stream("KV_OURS"), False),
        (stream("KV_THEIRS", metadata={BUCKET_KEY: "leases"}), False),
        (stream(metadata={RESTORE_KEY: "x"}), False),
        (stream("FLOE_DRILL_1"), False),
        (stream("$MQTT_sess"), False),
        (stream(mirror={"name": "ORDERS"}), False),
        (stream(is_copy=True), False),
    ],
)
def test_a_stream_is_uncovered_unless_a_feed_has_it_or_it_needs_no_archive(
    found: AccountStream, is_uncovered: bool
) -> None:
    configured = settings({"stream": "ORDERS", "name": "O"}, not_archived="TMP_*", lease_bucket="OURS")
    assert find_uncovered([found], configured) == [found.name] * is_uncovered


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("*", ("", "A", "KV_a?[x]"), ()),
        ("A", ("A",), ("", "a", "AA")),
        ("TMP_*", ("TMP_", "TMP_1"), ("TMP", "1TMP_")),
        ("*_DLQ", ("_DLQ", "A_DLQ"), ("A_DLQ_",)),
        ("a*a", ("aa", "aba"), ("a", "ab")),
        ("a*b*c", ("abc", "axbxc", "abcbc"), ("ac", "acb", "bac")),
        ("*x*x*", ("xx", "axbxc"), ("x",)),
        ("a?[b]", ("a?[b]",), ("axb",)),
    ],
)
def test_only_a_star_is_special_in_a_pattern(pattern: str, matching: tuple[str, ...], others: tuple[str, ...]) -> None:
    assert [name for name in (*matching, *others) if name_matches(pattern, name)] == [*matching]


def test_many_uncovered_streams_are_shown_as_a_bounded_text() -> None:
    part = {"uncovered_streams": 22, "uncovered": ["A", "B"]}
    assert uncovered_text({"account (worker 1)": part}) == "22 streams in no feed: A, B and 20 more"
    assert uncovered_text({"account": {"uncovered": "not known"}}) == uncovered_text({}) == ""
