"""Compares what came back with what the archive holds, message by message: pure."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from hashlib import blake2b

from common.segments.segment import Message

MAX_EXAMPLES = 5


@dataclass(slots=True)
class Trail:
    """The messages of one chain in the order in which they were read: 16 bytes each."""

    sequences: array[int] = field(default_factory=lambda: array("Q"))
    prints: array[int] = field(default_factory=lambda: array("Q"))

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, message: Message) -> None:
        """Note the next message."""
        self.sequences.append(message.sequence)
        self.prints.append(fingerprint(message))


def fingerprint(message: Message) -> int:
    """64 bits over time, subject, header block and payload; no headers and an empty block differ."""
    digest = blake2b(b"%d:" % message.timestamp_ns, digest_size=8)
    for part in (message.subject, message.headers, message.payload):
        digest.update(b"-" if part is None else b"%d:" % len(part))
        digest.update(part or b"")
    return int.from_bytes(digest.digest(), "big")


@dataclass(frozen=True, slots=True)
class Differences:
    """Counts of messages. `unexpected`: found, and not in the archive. `examples`: a few lines."""

    expected: int = 0
    found: int = 0
    lost: int = 0
    repeated: int = 0
    out_of_order: int = 0
    altered: int = 0
    unexpected: int = 0
    examples: tuple[str, ...] = ()

    @property
    def none(self) -> bool:
        """Whether everything came back as it was."""
        return not (self.lost or self.repeated or self.out_of_order or self.altered or self.unexpected)

    def plus(self, other: Differences) -> Differences:
        """The sums, and some examples of both."""
        return Differences(
            self.expected + other.expected,
            self.found + other.found,
            self.lost + other.lost,
            self.repeated + other.repeated,
            self.out_of_order + other.out_of_order,
            self.altered + other.altered,
            self.unexpected + other.unexpected,
            (*self.examples, *other.examples)[:MAX_EXAMPLES],
        )

    def line(self) -> str:
        return (
            f"lost {self.lost:,}, repeated {self.repeated:,}, out of order {self.out_of_order:,}, "
            f"altered {self.altered:,}, unexpected {self.unexpected:,}"
        )


def compare(expected: Trail, found: Trail, name: str = "") -> Differences:
    """What became of the messages `expected` (ascending, each once) on the way to `found`."""
    seen, newest, examples = bytearray(len(expected)), 0, []
    counts = dict.fromkeys(("repeated", "out_of_order", "altered", "unexpected"), 0)
    for sequence, print_ in zip(found.sequences, found.prints, strict=True):
        place = bisect_left(expected.sequences, sequence)
        wrong = ""
        if place == len(expected) or expected.sequences[place] != sequence:
            wrong = "unexpected"
        elif seen[place]:
            wrong = "repeated"
        else:
            seen[place] = 1
            if sequence < newest:
                wrong = "out_of_order"
            elif expected.prints[place] != print_:
                wrong = "altered"
        newest = max(newest, sequence)
        if wrong:
            counts[wrong] += 1
            examples.append(f"{name} {sequence}: {wrong.replace('_', ' ')}")
            del examples[MAX_EXAMPLES:]
    lost = [sequence for sequence, there in zip(expected.sequences, seen, strict=True) if not there]
    examples += [f"{name} {sequence}: lost" for sequence in lost[:MAX_EXAMPLES]]
    return Differences(
        len(expected),
        len(found),
        len(lost),
        counts["repeated"],
        counts["out_of_order"],
        counts["altered"],
        counts["unexpected"],
        tuple(examples[:MAX_EXAMPLES]),
    )
