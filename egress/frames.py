"""What a consumer sends to an inbox: messages with `$JS.ACK` replies, and status frames without. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import lt

_ACK = (b"$JS", b"ACK")


@dataclass(frozen=True, slots=True)
class Places:
    """At which words of a reply its values stand: the layout with or without a domain (ADR-15)."""

    words: int
    consumer: int
    sequence: int
    consumer_sequence: int
    timestamp: int


def places(reply: bytes) -> Places:
    """The layout of `reply`, the same for all messages of one consumer.

    Raises ValueError for what is no such reply.
    """
    words = reply.split(b".")
    if tuple(words[:2]) == _ACK and len(words) == 9:
        return Places(9, 3, 5, 6, 7)
    if tuple(words[:2]) == _ACK and len(words) >= 11:
        return Places(len(words), 5, 7, 8, 9)
    raise ValueError(f"reply {reply!r:.200}: expected $JS.ACK with 9, or 11 and more, words")


@dataclass(frozen=True, slots=True)
class Acks:
    """What the replies of consecutive messages say; `contiguous` of them continue the consumer's sequence."""

    sequences: list[int]
    timestamps_ns: list[int]
    contiguous: int


def parse_acks(replies: Sequence[bytes], consumer: bytes, expected: int) -> Acks:
    """Sequences and times of the messages with `replies`, the first of which `consumer` should have numbered
    `expected`.

    All at once, because it runs for every message. Raises ValueError for a reply of another form or consumer.
    """
    count, layout = len(replies), places(replies[0])
    # A stream's and a consumer's name hold no dot, so the words of all replies can be split in one go.
    words = b".".join(replies).split(b".")
    step = layout.words
    if len(words) != step * count or words[layout.consumer :: step].count(consumer) != count:
        raise ValueError(f"replies such as {replies[0]!r:.200}: expected all of consumer {consumer.decode()}")
    sequences = list(map(int, words[layout.sequence :: step]))
    numbers = list(map(int, words[layout.consumer_sequence :: step]))
    timestamps = list(map(int, words[layout.timestamp :: step]))
    if not all(map(lt, sequences, sequences[1:])):
        raise ValueError(f"sequences {sequences[0]}..{sequences[-1]}: expected them to ascend")
    return Acks(sequences, timestamps, _contiguous(numbers, expected))


def _contiguous(numbers: list[int], expected: int) -> int:
    if numbers[0] == expected and numbers == list(range(expected, expected + len(numbers))):
        return len(numbers)
    return next(i for i, number in enumerate(numbers) if number != expected + i)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """An idle heartbeat: the consumer had sent `consumer_sequence` messages when it had passed `sequence`."""

    consumer_sequence: int
    sequence: int


@dataclass(frozen=True, slots=True)
class RequestOver:
    """A pull request ended with `undelivered` messages to go; `too_small`: the next message did not fit."""

    undelivered: int
    too_small: bool = False


@dataclass(frozen=True, slots=True)
class ConsumerTrouble:
    """The consumer or its leader is gone, or refuses to deliver; `text` is the server's."""

    text: str


Status = Heartbeat | RequestOver | ConsumerTrouble


def parse_status(block: bytes | None) -> Status:
    """The meaning of a status frame's header block."""
    first, *rest = (block or b"").split(b"\r\n")
    text = first.removeprefix(b"NATS/1.0").strip().decode("utf-8", "backslashreplace")
    values = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in rest)
    }
    if text.startswith("100"):
        number, sequence = values.get(b"nats-last-consumer"), values.get(b"nats-last-stream")
        if number is not None and sequence is not None and number.isdigit() and sequence.isdigit():
            return Heartbeat(int(number), int(sequence))
    undelivered = values.get(b"nats-pending-messages", b"")
    if undelivered.isdigit() and text[:3] in ("408", "409"):
        return RequestOver(int(undelivered), "Exceeds MaxBytes" in text)
    return ConsumerTrouble(text or "an empty status")
