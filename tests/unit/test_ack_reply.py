"""Sequence and time of a message come from its reply subject, in both layouts."""

from __future__ import annotations

import pytest

from common.clock import parse_time
from common.jetstream.protocol import parse_acks
from tests.support.basics import AckReply, parse_ack

EXPECTED = AckReply("ORDERS", "floe_1", 100, 97, 1_700_000_000_123_456_789, 5)
TAIL = b"ORDERS.floe_1.1.100.97.1700000000123456789.5"


@pytest.mark.parametrize(
    "reply",
    [
        b"$JS.ACK." + TAIL,
        b"$JS.ACK._.hash." + TAIL,
        b"$JS.ACK.hub.hash." + TAIL + b".token",
        b"$JS.ACK.d.h." + TAIL + b".a.b",
    ],
    ids=["v1", "v2", "v2 with token", "v2 with more"],
)
def test_reads_both_layouts(reply: bytes):
    assert parse_ack(reply) == EXPECTED
    acks = parse_acks([reply], b"floe_1", 97)
    assert (acks.sequences, acks.timestamps_ns, acks.contiguous) == ([100], [EXPECTED.timestamp_ns], 1)


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"_INBOX.x",
        b"$JS.ACK.S.C.1.2.3.4",
        b"$JS.ACK.x." + TAIL,
        b"$JS.ACK.S.C.1.x.3.4.5",
        b"$JS.FC.S.C.1.2.3.4.5",
        b"$JS.ACKS.S.C.1.2.3.4.5",
    ],
)
def test_refuses_other_replies(reply: bytes):
    with pytest.raises(ValueError, match=r"expected \$JS\.ACK|invalid literal"):
        parse_ack(reply)
    with pytest.raises(ValueError, match=r"expected \$JS\.ACK|invalid literal"):
        parse_acks([reply], b"C", 3)


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("2023-11-14T22:13:20.123456789Z", 1_700_000_000_123_456_789),
        ("2023-11-14T22:13:20.1Z", 1_700_000_000_100_000_000),
        ("2023-11-15T00:13:20+02:00", 1_700_000_000_000_000_000),
        ("1969-12-31T23:59:59.5Z", -500_000_000),
        ("0001-01-01T00:00:00Z", -62_135_596_800_000_000_000),
    ],
)
def test_reads_times_to_the_nanosecond(text: str, nanoseconds: int):
    assert parse_time(text) == nanoseconds


@pytest.mark.parametrize("text", ["", "2023-11-14", "2023-11-14T22:13:20", "2023-02-30T00:00:00Z"])
def test_refuses_other_times(text: str):
    with pytest.raises(ValueError):
        parse_time(text)
