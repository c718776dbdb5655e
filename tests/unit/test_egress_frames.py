"""Replies and status frames as nats-server writes them."""

from __future__ import annotations

import pytest

from common.jetstream.protocol import ConsumerTrouble, Heartbeat, RequestOver, parse_acks, parse_status
from tests.support.basics import AckReply, parse_ack


def reply(sequence: int, number: int, *, consumer: str = "c1", domain: bool = False) -> bytes:
    front = "_.hash." if domain else ""
    end = ".token" if domain else ""
    return f"$JS.ACK.{front}S.{consumer}.1.{sequence}.{number}.{sequence * 10}.5{end}".encode()


@pytest.mark.parametrize(("front", "end"), [("", ""), ("_.hash.", ""), ("hub.hash.", ".token"), ("d.h.", ".a.b")])
def test_reads_sequences_and_times_of_both_layouts(front: str, end: str) -> None:
    replies = [f"$JS.ACK.{front}S.c1.1.{sequence}.{sequence - 4}.1{sequence}.5{end}".encode() for sequence in (7, 8)]
    assert parse_ack(replies[0]) == AckReply("S", "c1", 7, 3, 17, 5)
    acks = parse_acks(replies, b"c1", 3)
    assert (acks.sequences, acks.timestamps_ns, acks.contiguous) == ([7, 8], [17, 18], 2)


@pytest.mark.parametrize(("numbers", "contiguous"), [([3, 4, 6], 2), ([4, 5, 6], 0), ([3, 4, 5], 3), ([3, 3, 4], 1)])
def test_counts_only_messages_that_continue_the_consumer_sequence(numbers: list[int], contiguous: int) -> None:
    replies = [reply(10 + i, number) for i, number in enumerate(numbers)]
    assert parse_acks(replies, b"c1", 3).contiguous == contiguous


@pytest.mark.parametrize(
    "replies",
    [
        *([each] for each in (b"", b"_INBOX.x", b"$JS.ACK.S.c1.1.7.3", b"$JS.ACK.x.S.c1.1.7.3.70.5")),
        *([each] for each in (b"$JS.FC.S.c1.1.7.3.70.5", b"$JS.ACKS.S.c1.1.7.3.70.5", b"$JS.ACK.S.c1.1.x.3.70.5")),
        [reply(7, 3, consumer="other")],
        [reply(7, 3), reply(8, 4, consumer="other")],
        [reply(7, 3), reply(8, 4, domain=True)],
        [reply(7, 3), b"$JS.ACK.S.c1.1.x.4.70.5"],
        [reply(8, 3), reply(7, 4)],
    ],
)
def test_refuses_replies_of_another_form_or_consumer_or_out_of_order(replies: list[bytes]) -> None:
    with pytest.raises(ValueError, match=r"expected|reply|replies|sequences|invalid literal"):
        parse_acks(replies, b"c1", 3)


@pytest.mark.parametrize(
    ("block", "status"),
    [
        (b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 8\r\nNats-Last-Stream: 10\r\n\r\n", Heartbeat(8, 10)),
        (b"NATS/1.0 408 Request Timeout\r\nNats-Pending-Messages: 9\r\nNats-Pending-Bytes: 0\r\n\r\n", RequestOver(9)),
        (
            b"NATS/1.0 409 Message Size Exceeds MaxBytes\r\nNats-Pending-Messages: 4\r\n\r\n",
            RequestOver(4, too_small=True),
        ),
        (b"NATS/1.0 409 Exceeded MaxRequestBatch of 256\r\n\r\n", RequestOver(0, most=256)),
        (b"NATS/1.0 409 Exceeded MaxRequestBatch of 0\r\n\r\n", ConsumerTrouble("409 Exceeded MaxRequestBatch of 0")),
        (b"NATS/1.0 409 Consumer Deleted\r\n\r\n", ConsumerTrouble("409 Consumer Deleted")),
        (b"NATS/1.0 503\r\nNats-Subject: x\r\n\r\n", ConsumerTrouble("503")),
        (b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: x\r\n\r\n", ConsumerTrouble("100 Idle Heartbeat")),
        (b"NATS/1.0\r\n\r\n", ConsumerTrouble("an empty status")),
        (None, ConsumerTrouble("an empty status")),
    ],
)
def test_tells_status_frames_apart(block: bytes | None, status: object) -> None:
    assert parse_status(block) == status
