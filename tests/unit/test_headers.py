"""Header blocks: escaping, headers that act, values that a reader gets back, and messages that claim to be copies."""

import pytest

from common.archive.columns import Columns
from common.chain import Chain
from common.nats import headers
from common.nats.headers import Provenance, build_block, header_value, parse_status_line, split_provenance
from egress.loops import MAX_CLAIMS, LoopMarkers
from tests.support.headers import escape

HERE = Provenance("us-east", "NODE_DATA", 0, 3, 42, 1_700_000_000_000_000_001)
SOURCE = b"Floe-Source: us-east NODE_DATA 0000 3 42 1700000000000000001"


def block(*lines: bytes) -> bytes:
    return b"".join([b"NATS/1.0\r\n", *(line + b"\r\n" for line in lines), b"\r\n"])


def test_headers_that_act_or_that_are_floes_travel_escaped_in_any_case():
    acting = (b"Nats-Rollup: sub", b"NATS-msg-id:x", b"floe-source: forged")
    escaped = escape(block(b"A: 1", *acting, b"A: 2"), HERE, first_lines=(b"Nats-Batch-Id: b",))
    own = (b"Nats-Batch-Id: b", SOURCE, b"A: 1")
    assert escaped == block(*own, *(b"Floe-Original: " + line for line in acting), b"A: 2")
    assert split_provenance(escaped) == (HERE, block(b"A: 1", *acting, b"A: 2"))


def test_named_control_headers_act_again():
    original = block(b"Nats-TTL: 5s", b"Nats-Msg-Id: x", b"Floe-Original: y")
    escaped = escape(original, HERE, frozenset({b"nats-ttl", b"floe-original"}))
    assert escaped == block(
        SOURCE, b"Nats-TTL: 5s", b"Floe-Original: Nats-Msg-Id: x", b"Floe-Original: Floe-Original: y"
    )
    assert split_provenance(escaped) == (HERE, original)


def test_a_control_header_that_acted_at_a_relay_acts_no_further_unless_named():
    first = escape(block(b"Nats-TTL: 5s"), HERE, frozenset({b"nats-ttl"}), (b"Nats-Expected-Last-Sequence: 8",))
    further = escape(first, HERE, relay=True)
    assert (b"Last-Sequence: 8" in further, b"\r\nFloe-Original: Nats-TTL: 5s\r\n" in further) == (False, True)
    assert b"\r\nNats-TTL: 5s\r\n" in escape(first, HERE, frozenset({b"nats-ttl"}), relay=True)


def test_a_message_that_nobody_escaped_is_given_back_as_it_is():
    damaged, forged = block(SOURCE, b"Floe-Block: not base64!"), block(SOURCE, b"A: 1")
    for plain in (None, b"", b"garbage", block(), block(b"A: 1"), block(b"A: 1", SOURCE), damaged):
        assert split_provenance(plain) == (None, plain)
        assert plain is damaged or headers.parse_provenances(plain) == []
    there = Provenance("b", "F", 0, 0, 1, 1)
    assert headers.parse_provenances(escape(forged, there)) == [there], (
        "where the stream is no relay, a forged one is no hop"
    )


@pytest.mark.parametrize("line", [b"", b"a b 0 0 1", b"a b 0 0 1 x", b"\xff b 0 0 1 1", b"a b 0 0 -1 1"])
def test_a_provenance_that_cannot_be_read_is_none(line: bytes):
    plain = block(b"Floe-Source: " + line, b"A: 1")
    assert split_provenance(plain) == (None, plain)


def test_values_are_as_the_publisher_gave_them_and_a_header_is_found_in_any_case():
    parsed = headers.parse_block(block(b"A: 1", b"a:2", b"A:  3 ", b"B", b"C:", b"D: x: y"))
    assert parsed == [(b"A", b"1"), (b"a", b"2"), (b"A", b" 3 "), (b"B", b""), (b"C", b""), (b"D", b"x: y")]
    assert header_value(block(b"X: 1", b"nats-TTL:  5s ", b"Nats-TTL: 6s"), b"Nats-TTL") == b"5s"
    assert header_value(block(b"X: 1"), b"Y") is header_value(None, b"Y") is None


def test_reads_status_lines():
    beat = b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Stream: 7\r\n\r\n"
    assert (parse_status_line(beat), header_value(beat, b"nats-last-stream")) == ((100, b"Idle Heartbeat"), b"7")
    assert parse_status_line(b"NATS/1.0 503\r\n\r\n") == (503, b"")
    assert [parse_status_line(other) for other in (None, b"", block(), block(b"A: 1"), b"NATS/1.0 x\r\n\r\n")] == [
        None
    ] * 5


@pytest.mark.parametrize("line", [b"", b"A: 1\r\nNats-Rollup: all", b"A: \n", b"A: \r"])
def test_builds_no_block_with_a_line_break_in_a_line(line: bytes):
    with pytest.raises(ValueError, match="expected text without CR and LF"):
        build_block([line])


OURS = Provenance("here", "FEED", 2, 1, 7, 1_700_000_000_000_000_001)
THEIRS = Provenance("there", "FEED", 0, 0, 9, 1_700_000_000_000_000_002)
CLAIMS = LoopMarkers(Chain("here", "FEED", 2, 0))
REPLAYED = b"Floe-Replay: 3f0c9a1be27d4455"


HOPS = [
    escape(None, OURS),
    escape(build_block([b"A: 1"]), OURS, first_lines=(b"Nats-Expected-Last-Sequence: 41",)),
    escape(escape(escape(None, OURS), THEIRS), THEIRS),
    escape(escape(None, OURS), THEIRS, relay=True),
    # The mark of a replay at another site, or of an older one here, is not beside the newest hop.
    escape(build_block([OURS.line(), REPLAYED]), THEIRS),
]


@pytest.mark.parametrize("block", HOPS)
def test_a_hop_of_this_feed_is_found_however_deep_it_was_escaped(block: bytes) -> None:
    assert [CLAIMS.claims_of(sequence, block) for sequence in (8, 7, 6)] == [[OURS], [], []]  # older messages only


WITHOUT_CLAIMS = [
    escape(None, THEIRS),
    *(escape(None, Provenance("here", feed, 2, 1, 7, 1)) for feed in ("OTHER", "FEED2")),
    escape(None, Provenance("here", "FEED", 1, 1, 7, 1)),
    escape(None, Provenance("here", "FEED", 2, 1, 0, 1)),
    build_block([OURS.line(), REPLAYED]),
    build_block([b"X: " + OURS.line()]),
    build_block([OURS.line() + b" 1"]),
    *(build_block([OURS.line().replace(b" 7 ", number)]) for number in (b" x ", b" " + b"7" * 5000 + b" ")),
    build_block([b"floe-source:" + OURS.line().partition(b":")[2]]),
    b"",
]


@pytest.mark.parametrize("block", WITHOUT_CLAIMS)
def test_what_names_no_older_message_of_this_feed_claims_nothing(block: bytes) -> None:
    assert CLAIMS.claims_of(8, block) == []


def test_a_few_of_a_thousand_forged_hops_are_asked_about() -> None:
    hops = [Provenance("here", "FEED", 2, 0, sequence, 1).line() for sequence in range(1, 1_000)]
    assert [claim.sequence for claim in CLAIMS.claims_of(5_000, build_block(hops))] == [*range(1, MAX_CLAIMS + 1)]


def test_the_places_of_a_batch_are_those_that_claim_something() -> None:
    blocks = [None, escape(None, OURS), build_block([b"A: 1"]), escape(None, THEIRS), escape(None, OURS)]
    count = len(blocks)
    assert CLAIMS.indexes(Columns([5, 6, 8, 9, 10], [1] * count, [b"s"] * count, blocks, [b"x"] * count)) == [4]
    assert CLAIMS.indexes(Columns([1], [1], [b"s"], [None], [b"x"])) == []
