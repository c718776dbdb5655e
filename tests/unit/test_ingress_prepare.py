"""Rows are made ready, and what the target would refuse is found before an intent holds it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.chain import Chain
from common.errors import FloeError
from common.jetstream.headers import Provenance, restore
from common.segments.segment import Message
from ingress.rows.prepare import (
    MAX_HEADER_BLOCK,
    PUBLISHER_LINES,
    Accepting,
    Prepared,
    Preparer,
    SubjectRule,
    TargetLimits,
)
from ingress.rows.rows import PreparedBatch
from tests.support.headers import escape
from tests.support.segments import batch_of, message

CHAIN = Chain("us-east", "NODES", 1, 2)
VERSION = b"NATS/1.0\r\n"


def preparer_of(most: int = 1 << 20, subjects: str = "fleet.>", line: bytes = b"", **more: Any) -> Preparer:
    limits = TargetLimits(Accepting([subjects]), most, **more)
    return Preparer(CHAIN, SubjectRule(b"fleet"), limits, *([line] if line else []))


def prepared(
    *rows: Message, most: int = 1 << 20, control: frozenset[bytes] = frozenset(), is_shared: bool = False
) -> Prepared:
    shape = TargetLimits(Accepting(["fleet.>"]), most, is_shared=is_shared)
    return Preparer(CHAIN, SubjectRule(b"fleet"), shape, acting=control).prepare(batch_of(rows))


def refusal(result: Prepared) -> FloeError:
    assert result.problem is not None
    return result.problem


def ready(batch: PreparedBatch | None) -> list[tuple[bytes, bytes, bytes]]:
    return [] if batch is None else list(batch.messages(0, len(batch.sequences)))


def carried(result: Prepared) -> list[int]:
    return [] if result.batch is None else list(result.batch.sequences)


def block(*lines: bytes) -> bytes:
    return VERSION + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


def test_each_message_carries_its_provenance_as_the_headers_module_writes_it() -> None:
    rows = [message(7), message(12, headers=block(b"A: 1", b"a:  2 ", b"Nats-Rollup: all"))]

    found = ready(prepared(*rows).batch)

    for row, (subject, tail, payload) in zip(rows, found, strict=True):
        origin = Provenance("us-east", "NODES", 1, 2, row.sequence, row.timestamp_ns)
        assert (subject, payload) == (b"fleet.nodes.one", b"payload")
        assert VERSION + tail == escape(row.headers, origin)
        assert restore(VERSION + tail) == (origin, row.headers)


def test_rows_up_to_the_first_that_has_no_place_at_the_target_are_ready_and_the_way_out_is_a_command() -> None:
    preparer, rows = preparer_of(), [message(1), message(2), message(3, subject=b"a..b c"), message(4)]
    for _ in range(2):
        result = preparer.prepare(batch_of(rows))
        assert (carried(result), refusal(result).code) == ([1, 2], "E-SUBJECT")
        assert refusal(result).message == (
            "chain us-east/NODES/0001/2 stops at sequence 3: subject 'a..b c' becomes 'fleet.a.b c': "
            "it holds a space, tab, CR, LF or NUL"
        )
    assert "floe chain resume -c " in refusal(result).hint
    assert "--site us-east --feed NODES --incarnation 1 --partition 2 --sequence 4 --yes" in refusal(result).hint

    result = preparer_of(subjects="other.>").prepare(batch_of([message(1)]))
    assert result.batch is None
    assert refusal(result).message.endswith("'nodes.one' becomes 'fleet.nodes.one': the target takes other.>")


def test_what_is_too_large_is_named_with_both_sizes_and_of_several_problems_the_first() -> None:
    result = prepared(message(1, b"x" * 500), message(2, b"x" * 2000), message(3, subject=b"a b"), most=2000)
    assert (carried(result), refusal(result).code) == ([1], "E-MSG-TOO-LARGE")
    assert "sequence 2: the message with its headers needs 2270 " in refusal(result).message
    assert refusal(result).message.endswith("bytes, the target takes 2000")

    lines = [b"Nats-X%d: 1" % number for number in range(3000)]
    error = refusal(prepared(message(1), message(2, headers=block(*lines))))
    assert "the header block needs" in error.message
    assert error.message.endswith(f"the target takes {MAX_HEADER_BLOCK}")


@pytest.mark.parametrize("parks", [False, True])
def test_a_message_above_what_is_archived_stops_the_chain_and_is_not_parked(
    monkeypatch: pytest.MonkeyPatch, parks: bool
) -> None:
    monkeypatch.setattr("ingress.rows.prepare.MOST_CARRIED", 1300)
    rows = [message(1), message(2, b"x" * 700), message(3, b"x" * 1100), message(4)]
    limits = TargetLimits(Accepting([">"]), 900, parks=parks, target="FLEET")
    preparer = Preparer(CHAIN, SubjectRule(), limits)

    result = preparer.prepare(batch_of(rows))

    assert result.problem is not None
    if parks:
        assert (result.left_out, "stops at sequence 3: it needs 13" in result.problem.message) == ((2,), True)
        assert [each.message.sequence for each in result.oversize] == [2]
        assert "--sequence 4 --yes" in result.problem.hint
        assert "on_oversize" not in result.problem.hint
    else:
        assert "stops at sequence 2: the message with its headers needs" in result.problem.message

    # An intent that holds it is finished as it stands.
    again = Preparer(CHAIN, SubjectRule(), TargetLimits(Accepting([">"]), 1 << 20))
    again.leaves_out = frozenset()
    assert again.prepare(batch_of(rows)).problem is None


def test_the_size_that_is_checked_is_never_less_than_what_is_sent() -> None:
    rows = [message(1), message(2**62, timestamp_ns=2**62), message(3 + 2**62, timestamp_ns=1, headers=block(b"A: 1"))]

    batch = prepared(*rows).batch

    assert batch is not None
    before = 0
    for (_, tail, payload), end in zip(ready(batch), batch.ends, strict=True):
        assert len(VERSION) + len(tail) + len(payload) + PUBLISHER_LINES - 20 <= end - before
        before = end


def test_a_control_header_acts_only_with_a_value_that_the_server_takes() -> None:
    control = frozenset({b"nats-ttl"})
    good = message(1, headers=block(b"Nats-TTL: 5m", b"Nats-Rollup: sub"))
    bad = message(2, headers=block(b"Nats-TTL: soon"))

    acting, escaped = [tail for _, tail, _ in ready(prepared(good, bad, control=control).batch)]

    assert b"\r\nNats-TTL: 5m\r\n" in acting
    assert b"\r\nFloe-Original: Nats-Rollup: sub\r\n" in acting
    assert b"\r\nFloe-Original: Nats-TTL: soon\r\n" in escaped


def test_a_site_and_a_feed_with_a_percent_sign_are_only_text() -> None:
    chain = Chain("us", "a%d%b")
    preparer = Preparer(chain, SubjectRule(), TargetLimits(Accepting([">"]), 1 << 20))

    ((_, tail, _),) = ready(preparer.prepare(batch_of([message(5)])).batch)

    assert tail.startswith(b"Floe-Source: us a%d%b 0000 0 5 ")


def test_one_more_line_stands_behind_the_provenance_of_each_message() -> None:
    rows = batch_of([message(7), message(8, headers=block(b"A: 1"))])

    found, bare = (ready(preparer_of(line=line).prepare(rows).batch) for line in (b"Floe-Replay: x", b""))

    for (_, tail, _), (_, without, _) in zip(found, bare, strict=True):
        assert tail.replace(b"Floe-Replay: x\r\n", b"") == without
        assert tail.split(b"\r\n")[1] == b"Floe-Replay: x"


def parking(*rows: Message, leaves_out: frozenset[int] | None = None) -> Prepared:
    preparer = preparer_of(2000, parks=True)
    preparer.leaves_out = leaves_out
    return preparer.prepare(batch_of(rows))


def test_messages_that_are_too_large_are_left_out_where_they_are_parked() -> None:
    large, block_too_large = message(2, b"x" * 3000), message(4, headers=block(*[b"A: " + b"v" * 90] * 700))
    result = parking(message(1), large, message(3), block_too_large, message(5))

    assert carried(result) == [1, 3, 5]
    assert [bytes(payload) for _, _, payload in ready(result.batch)] == [b"payload"] * 3
    assert (result.left_out, result.problem) == ((2, 4), None)
    assert [each.message for each in result.oversize] == [large, block_too_large]
    whats = [each.why.removeprefix("the ").partition(" needs ")[0] for each in result.oversize]
    assert whats == ["message with its headers", "header block"]

    nothing = parking(large, replace(large, sequence=3))
    assert (nothing.batch, nothing.left_out, nothing.problem) == (None, (2, 3), None)


def test_a_subject_that_is_refused_stops_and_nothing_behind_it_is_parked() -> None:
    bad = message(3, b"x" * 3000, subject=b"a b")
    result = parking(message(1, b"x" * 3000), message(2), bad, message(4, b"x" * 3000))
    assert (refusal(result).code, result.left_out, carried(result)) == ("E-SUBJECT", (1,), [2])


def test_an_intent_leaves_out_exactly_what_it_says_whatever_the_limits_are() -> None:
    rows = [message(1), message(2), message(3, b"x" * 3000), message(4)]

    result = parking(*rows, leaves_out=frozenset({2}))
    assert (result.left_out, result.oversize, carried(result)) == ((2,), (), [1])
    assert refusal(result).code == "E-MSG-TOO-LARGE"

    result = parking(*rows, leaves_out=frozenset({3, 99}))
    assert (carried(result), result.left_out, result.problem) == ([1, 2, 4], (3,), None)


def test_hours_and_minutes_that_would_overflow_the_server_travel_as_text() -> None:
    control = frozenset({b"nats-ttl"})
    for value, acts in [(b"999999h", True), (b"9999999h", False), (b"5m ", False), (b"  5m", True)]:
        row = message(1, headers=block(b"Nats-TTL: " + value))
        ((_, tail, _),) = ready(prepared(row, control=control).batch)
        assert (b"\r\nNats-TTL:" in tail) is acts


@pytest.mark.parametrize(
    ("value", "is_shared", "acts"),
    [(b"sub", False, True), (b"all", False, True), (b"sub", True, True), (b"all", True, False), (b" all", True, False)],
)
def test_a_rollup_of_everything_acts_only_where_one_feed_flows_in(value: bytes, is_shared: bool, acts: bool) -> None:
    row = message(1, headers=block(b"Nats-Rollup: " + value))
    found = ready(prepared(row, control=frozenset([b"nats-rollup"]), is_shared=is_shared).batch)

    [(_, headers, _)] = found
    assert (b"\r\nNats-Rollup: " + value + b"\r\n" in headers) is acts
    assert (b"\r\nFloe-Original: Nats-Rollup: " + value + b"\r\n" in headers) is not acts
