"""Header blocks: what is escaped, what acts, what a reader gets back."""

from __future__ import annotations

import pytest

from common.chain import Chain
from common.jetstream.headers import Provenance, build_block, header, hops, parse_block, restore, status
from tests.support.headers import escape

HERE = Provenance("us-east", "NODE_DATA", 0, 3, 42, 1_700_000_000_000_000_001)
SOURCE = b"Floe-Source: us-east NODE_DATA 0000 3 42 1700000000000000001"


def block(*lines: bytes) -> bytes:
    return b"".join([b"NATS/1.0\r\n", *(line + b"\r\n" for line in lines), b"\r\n"])


def test_a_message_without_headers_gets_its_provenance_alone_and_an_empty_block_is_told_from_none():
    assert escape(None, HERE) == block(SOURCE)
    assert escape(block(), HERE) == block(SOURCE, b"Floe-Original:")
    for original in (None, block()):
        assert restore(escape(original, HERE)) == (HERE, original)


def test_headers_that_act_or_that_are_floes_travel_escaped_in_any_case():
    acting = (b"Nats-Rollup: sub", b"NATS-msg-id:x", b"floe-source: forged")
    escaped = escape(block(b"A: 1", *acting, b"A: 2"), HERE, first_lines=(b"Nats-Batch-Id: b",))
    own = (b"Nats-Batch-Id: b", SOURCE, b"A: 1")
    assert escaped == block(*own, *(b"Floe-Original: " + line for line in acting), b"A: 2")
    assert restore(escaped) == (HERE, block(b"A: 1", *acting, b"A: 2"))


def test_named_control_headers_act_again():
    original = block(b"Nats-TTL: 5s", b"Nats-Msg-Id: x", b"Floe-Original: y")
    escaped = escape(original, HERE, frozenset({b"nats-ttl", b"floe-original"}))
    assert escaped == block(
        SOURCE, b"Nats-TTL: 5s", b"Floe-Original: Nats-Msg-Id: x", b"Floe-Original: Floe-Original: y"
    )
    assert restore(escaped) == (HERE, original)


@pytest.mark.parametrize(
    "odd",
    [
        *(b"", b"garbage", b"NATS/1.0\r\n", b"NATS/1.0 503 No Responders\r\n\r\n"),
        b"NATS/1.0\r\nA: 1\nNats-Rollup: all\r\n\r\n",
        b"NATS/1.0\r\nA: 1\rNats-Rollup: all\r\n\r\n",
        b"NATS/1.0\r\nA: 1\r\n\r\nNats-Rollup: all\r\n\r\n",
        b"NATS/1.0\r\nA: 1\r\n\n\r\n",
    ],
)
def test_what_some_reader_could_take_for_other_headers_travels_as_text(odd: bytes):
    escaped = escape(odd, HERE)
    assert [name for name, _ in parse_block(escaped)] == [b"Floe-Source", b"Floe-Block"]
    assert b"Rollup" not in escaped
    assert restore(escaped) == (HERE, odd)


def test_malformed_lines_pass_as_they_are():
    original = block(b"no colon", b": no name", b"  spaced : x  ", b"caf\xe9: \xff\x00", b"A:")
    assert restore(escape(original, HERE)) == (HERE, original)
    assert escape(original, HERE).endswith(original.removeprefix(b"NATS/1.0\r\n"))


def test_a_control_header_that_acted_at_a_relay_acts_no_further_unless_named():
    first = escape(block(b"Nats-TTL: 5s"), HERE, frozenset({b"nats-ttl"}), (b"Nats-Expected-Last-Sequence: 8",))
    further = escape(first, HERE, relay=True)
    assert (b"Last-Sequence: 8" in further, b"\r\nFloe-Original: Nats-TTL: 5s\r\n" in further) == (False, True)
    assert b"\r\nNats-TTL: 5s\r\n" in escape(first, HERE, frozenset({b"nats-ttl"}), relay=True)


def test_a_message_that_nobody_escaped_is_given_back_as_it_is():
    damaged, forged = block(SOURCE, b"Floe-Block: not base64!"), block(SOURCE, b"A: 1")
    for plain in (None, b"", b"garbage", block(), block(b"A: 1"), block(b"A: 1", SOURCE), damaged):
        assert restore(plain) == (None, plain)
        assert plain is damaged or hops(plain) == []
    there = Provenance("b", "F", 0, 0, 1, 1)
    assert hops(escape(forged, there)) == [there], "where the stream is no relay, a forged one is no hop"


@pytest.mark.parametrize("line", [b"", b"a b 0 0 1", b"a b 0 0 1 x", b"\xff b 0 0 1 1", b"a b 0 0 -1 1"])
def test_a_provenance_that_cannot_be_read_is_none(line: bytes):
    plain = block(b"Floe-Source: " + line, b"A: 1")
    assert restore(plain) == (None, plain)


def test_provenance_names_its_chain():
    assert HERE.chain == Chain("us-east", "NODE_DATA", 0, 3)
    assert Provenance.parse(HERE.line()) == Provenance.parse(HERE.line().removeprefix(b"Floe-Source: ")) == HERE


def test_values_are_as_the_publisher_gave_them_and_a_header_is_found_in_any_case():
    parsed = parse_block(block(b"A: 1", b"a:2", b"A:  3 ", b"B", b"C:", b"D: x: y"))
    assert parsed == [(b"A", b"1"), (b"a", b"2"), (b"A", b" 3 "), (b"B", b""), (b"C", b""), (b"D", b"x: y")]
    assert header(block(b"X: 1", b"nats-TTL:  5s ", b"Nats-TTL: 6s"), b"Nats-TTL") == b"5s"
    assert header(block(b"X: 1"), b"Y") is header(None, b"Y") is None


def test_reads_status_lines():
    beat = b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Stream: 7\r\n\r\n"
    assert (status(beat), header(beat, b"nats-last-stream")) == ((100, b"Idle Heartbeat"), b"7")
    assert status(b"NATS/1.0 503\r\n\r\n") == (503, b"")
    assert [status(other) for other in (None, b"", block(), block(b"A: 1"), b"NATS/1.0 x\r\n\r\n")] == [None] * 5


@pytest.mark.parametrize("line", [b"", b"A: 1\r\nNats-Rollup: all", b"A: \n", b"A: \r"])
def test_builds_no_block_with_a_line_break_in_a_line(line: bytes):
    with pytest.raises(ValueError, match="expected text without CR and LF"):
        build_block([line])
