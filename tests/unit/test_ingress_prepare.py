"""Preparation of rows: subjects, headers, sizes; messages that a target would refuse are found before an intent."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from common.archive.documents import ChainDocument, ChainStore
from common.archive.keys import Layout
from common.archive.segment import Message
from common.chain import Chain
from common.errors import DataError, FloeError, Unavailable
from common.nats.headers import Provenance
from common.objects.local import LocalObjects
from common.service.process import ThreadPool
from ingress.rows import prepare
from ingress.rows.decoder import RelayFlags
from ingress.rows.prepare import Prepared, Preparer, SubjectFilters, SubjectRule, TargetLimits
from tests.support.headers import escape
from tests.support.segments import batch_of, message

CHAIN = Chain("us-east", "NODES", 1, 2)
VERSION = b"NATS/1.0\r\n"
TTL = frozenset({b"nats-ttl"})


def preparer_of(
    most: int = 1 << 20,
    subjects: str = "fleet.>",
    line: bytes = b"",
    control: frozenset[bytes] = frozenset(),
    chain: Chain = CHAIN,
    **more: Any,
) -> Preparer:
    limits = TargetLimits(SubjectFilters([subjects]), most, **more)
    return Preparer(chain, SubjectRule(b"fleet"), limits, *([line] if line else []), active=control)


def prepared(*rows: Message, **more: Any) -> Prepared:
    return preparer_of(**more).prepare(batch_of(rows))


def refusal(result: Prepared) -> FloeError:
    assert result.problem is not None
    return result.problem


def ready(result: Prepared) -> list[tuple[bytes, bytes, bytes]]:
    return [] if result.batch is None else list(result.batch.messages(0, len(result.batch.sequences)))


def carried(result: Prepared) -> list[int]:
    return [] if result.batch is None else list(result.batch.sequences)


def block(*lines: bytes) -> bytes:
    return VERSION + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


@pytest.mark.parametrize("relay", [False, True])
@pytest.mark.parametrize("chain", [CHAIN, Chain("us", "a%d%b")])
def test_each_message_carries_its_provenance_as_the_headers_module_writes_it(chain: Chain, relay: bool) -> None:
    """Keep former hops as hops on a relay only, as the tests of the headers module require."""
    hop = escape(block(b"A: 1", b"Nats-TTL: 5m"), Provenance("city", "NODES", 0, 0, 41, 1), TTL)
    rows = [
        message(7),
        message(12, headers=block(b"A: 1", b"a:  2 ", b"Nats-TTL: 1h", b"Nats-Rollup: all")),
        message(13, headers=hop),
    ]
    preparer = preparer_of(chain=chain, control=TTL)
    preparer.is_relay = relay

    for row, found in zip(rows, ready(preparer.prepare(batch_of(rows))), strict=True):
        origin = Provenance(chain.site, chain.feed, chain.incarnation, chain.partition, row.sequence, row.timestamp_ns)
        tail = escape(row.headers, origin, TTL, relay=relay).removeprefix(VERSION)
        assert found == (b"fleet.nodes.one", tail, b"payload")


def test_rows_up_to_the_first_that_has_no_place_at_the_target_are_ready_and_the_way_out_is_a_command() -> None:
    preparer, rows = preparer_of(), [message(1), message(2), message(3, subject=b"a..b c"), message(4)]
    for _ in range(2):
        result = preparer.prepare(batch_of(rows))
        assert (carried(result), refusal(result).code) == ([1, 2], "E-SUBJECT")
        why = "at sequence 3: subject 'a..b c' becomes 'fleet.a.b c': it holds a space, tab, CR, LF or NUL"
        assert refusal(result).message == f"chain us-east/NODES/0001/2 stops {why}"
    assert "floe chain resume -c " in refusal(result).hint
    assert refusal(result).hint.endswith("us-east/NODES/0001/2 --sequence 4")

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
    assert error.message.endswith(f"the target takes {prepare.MAX_HEADER_BLOCK_BYTES}")


def test_a_message_above_what_is_archived_stops_the_chain_and_is_not_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingress.rows.prepare.MAX_PUBLISHED_BYTES", 1300)
    rows = [message(1), message(2, b"x" * 700), message(3, b"x" * 1100), message(4)]
    result = prepared(*rows, most=900, parks=True)

    assert (result.excluded, [each.message.sequence for each in result.oversize]) == ((2,), [2])
    assert "stops at sequence 3: it needs 13" in refusal(result).message
    assert refusal(result).hint.endswith("--sequence 4")
    assert "on_oversize" not in refusal(result).hint

    # An intent that holds it is finished unchanged.
    again = preparer_of()
    again.excluded = frozenset()
    assert again.prepare(batch_of(rows)).problem is None


def test_the_size_that_is_checked_is_never_less_than_what_is_sent() -> None:
    rows = [message(1), message(2**62, timestamp_ns=2**62), message(3 + 2**62, timestamp_ns=1, headers=block(b"A: 1"))]

    result = prepared(*rows)

    sizes = [end - begin for begin, end in pairwise([0, *result.batch.byte_ends])]
    for (_, tail, payload), size in zip(ready(result), sizes, strict=True):
        assert len(VERSION) + len(tail) + len(payload) + prepare.PUBLISHER_LINES_BYTES - 20 <= size


ACTING = [
    (b"Nats-TTL: 5m", b"nats-ttl", False, True),
    (b"Nats-TTL:   5m", b"nats-ttl", False, True),
    (b"Nats-TTL: 5m ", b"nats-ttl", False, False),
    (b"Nats-TTL: soon", b"nats-ttl", False, False),
    (b"Nats-TTL: 999999h", b"nats-ttl", False, True),
    (b"Nats-TTL: 9999999h", b"nats-ttl", False, False),  # hours that would overflow the server
    (b"Nats-Rollup: sub", b"nats-ttl", False, False),
    (b"Nats-Rollup: all", b"nats-rollup", False, True),
    (b"Nats-Rollup: sub", b"nats-rollup", True, True),
    (b"Nats-Rollup: all", b"nats-rollup", True, False),  # of all feeds that flow in
    (b"Nats-Rollup:  all", b"nats-rollup", True, False),
]


@pytest.mark.parametrize(("line", "control", "is_shared", "acts"), ACTING)
def test_what_acts_is_named_valid_and_harmless(line: bytes, control: bytes, is_shared: bool, acts: bool) -> None:
    [(_, tail, _)] = ready(prepared(message(1, headers=block(line)), control=frozenset({control}), is_shared=is_shared))

    assert (b"\r\n" + line + b"\r\n" in tail) is acts
    assert (b"\r\nFloe-Original: " + line + b"\r\n" in tail) is not acts


def test_one_more_line_follows_the_provenance_of_each_message() -> None:
    rows = batch_of([message(7), message(8, headers=block(b"A: 1"))])

    found, bare = (ready(preparer_of(line=line).prepare(rows)) for line in (b"Floe-Replay: x", b""))

    for (_, tail, _), (_, without, _) in zip(found, bare, strict=True):
        assert (tail.replace(b"Floe-Replay: x\r\n", b""), tail.split(b"\r\n")[1]) == (without, b"Floe-Replay: x")


def parking(*rows: Message, leaves_out: frozenset[int] | None = None) -> Prepared:
    preparer = preparer_of(2000, parks=True)
    preparer.excluded = leaves_out
    return preparer.prepare(batch_of(rows))


def test_messages_that_are_too_large_are_left_out_where_they_are_parked() -> None:
    large, block_too_large = message(2, b"x" * 3000), message(4, headers=block(*[b"A: " + b"v" * 90] * 700))
    result = parking(message(1), large, message(3), block_too_large, message(5))

    assert (carried(result), [bytes(payload) for _, _, payload in ready(result)]) == ([1, 3, 5], [b"payload"] * 3)
    assert (result.excluded, result.problem) == ((2, 4), None)
    assert [each.message for each in result.oversize] == [large, block_too_large]
    whats = [each.reason.removeprefix("the ").partition(" needs ")[0] for each in result.oversize]
    assert whats == ["message with its headers", "header block"]

    nothing = parking(large, replace(large, sequence=3))
    assert (nothing.batch, nothing.excluded, nothing.problem) == (None, (2, 3), None)


def test_a_subject_that_is_refused_stops_and_nothing_behind_it_is_parked() -> None:
    bad = message(3, b"x" * 3000, subject=b"a b")
    result = parking(message(1, b"x" * 3000), message(2), bad, message(4, b"x" * 3000))
    assert (refusal(result).code, result.excluded, carried(result)) == ("E-SUBJECT", (1,), [2])


def test_an_intent_leaves_out_exactly_what_it_names_for_any_limits() -> None:
    rows = [message(1), message(2), message(3, b"x" * 3000), message(4)]

    result = parking(*rows, leaves_out=frozenset({2}))
    assert (result.excluded, result.oversize, carried(result)) == ((2,), (), [1])
    assert refusal(result).code == "E-MSG-TOO-LARGE"

    result = parking(*rows, leaves_out=frozenset({3, 99}))
    assert (carried(result), result.excluded, result.problem) == ([1, 2, 4], (3,), None)


# Which streams are relays


async def test_a_chains_document_decides_it_and_without_a_good_one_nothing_is_guessed(tmp_path: Path) -> None:
    documents, threads = ChainStore(LocalObjects(tmp_path), Layout("data")), ThreadPool("test", 1)
    for partition, relay in ((0, True), (1, False)):
        chain, relays = Chain("city", "NODES", 0, partition), RelayFlags(documents, threads)
        with pytest.raises(Unavailable):
            await relays.is_relay(chain)
        documents.create_chain(chain, ChainDocument((), 2, 1, relay=relay))
        assert await asyncio.gather(relays.is_relay(chain), relays.is_relay(chain)) == [relay, relay]
        documents.objects.put(documents.layout.chain_document(chain), b"{}")
        assert await relays.is_relay(chain) is relay
        with pytest.raises(DataError):
            await RelayFlags(documents, threads).is_relay(chain)
    threads.close()


# Subjects: the rules of stream-replicator, publishable subjects, subjects that a stream takes


def test_prefix_then_remove_then_one_dot_for_two() -> None:
    targets = {
        (b"", b"", b"a.b"): b"a.b",
        (b"fleet", b"", b"a.b"): b"fleet.a.b",
        (b"fleet.", b"", b"a.b"): b"fleet.a.b",
        (b"", b"x", b"a.x.b.x.c"): b"a.b.c",
        (b"fleet", b"choria", b"choria.node"): b"fleet.node",
        (b"fleet", b"fleet.a.", b"a.b"): b"b",
        (b"fleet", b"", b"\xff\xfe"): b"fleet.\xff\xfe",
    }
    assert {each: SubjectRule(*each[:2]).apply(each[2]) for each in targets} == targets


def test_what_cannot_be_published_to_is_named_and_what_the_wire_can_carry_is_taken() -> None:
    wrong = {"empty": [b""], "space": [b"a b", b"a\r\nPUB x 0", b"a\tb", b"a\x00b"]}
    wrong |= {"empty token": [b".a", b"a.", b"a..b"], "3901 bytes": [b"a" * (prepare.MAX_SUBJECT_BYTES + 1)]}
    for why, subjects in wrong.items():
        assert [subject for subject in subjects if why not in prepare.subject_problem(subject)] == []
    taken = (b"a", b"a.b-c_d$", b"a*b.c>d", b"a.*.>", b"\x01.\xff.\xc3\xa4", b"x" * prepare.MAX_SUBJECT_BYTES)
    assert {subject: prepare.subject_problem(subject) for subject in taken} == dict.fromkeys(taken, "")


def test_a_stream_takes_what_one_of_its_subjects_matches_or_covers() -> None:
    accepting = SubjectFilters(["fleet.>", "a.*.c"])
    assert [subject in accepting for subject in (b"fleet.a", b"a.b.c", b"a.b")] == [True, True, False]
    assert [accepting.covers(p) for p in ("fleet.*.b", "a.b.c", "a.*.>", ">")] == [True, True, False, False]
