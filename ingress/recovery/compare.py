"""Comparison of messages: those that an archive holds with those that were found, by sequence and fingerprint."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import asdict, dataclass, field
from hashlib import blake2b

from common.archive.segment import Message

MAX_EXAMPLES = 5


@dataclass(slots=True)
class MessageTrail:
    """The messages of one chain in the order in which they were read: 16 bytes each."""

    sequences: array[int] = field(default_factory=lambda: array("Q"))
    fingerprints: array[int] = field(default_factory=lambda: array("Q"))

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, message: Message) -> None:
        self.sequences.append(message.sequence)
        self.fingerprints.append(fingerprint(message))


def fingerprint(message: Message) -> int:
    """Return 64 bits over time, subject, header block and payload; no headers and an empty block differ."""
    digest = blake2b(b"%d:" % message.timestamp_ns, digest_size=8)
    for part in (message.subject, message.headers, message.payload):
        digest.update(b"-" if part is None else b"%d:" % len(part))
        digest.update(part or b"")
    return int.from_bytes(digest.digest(), "big")


@dataclass(frozen=True, slots=True)
class Differences:
    """Counts of messages. `unexpected`: found, but not in the archive. `examples`: a few lines."""

    expected: int = 0
    found: int = 0
    lost: int = 0
    repeated: int = 0
    out_of_order: int = 0
    altered: int = 0
    unexpected: int = 0
    examples: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.lost or self.repeated or self.out_of_order or self.altered or self.unexpected)

    def plus(self, other: Differences) -> Differences:
        ours, theirs = asdict(self), asdict(other)
        sums = {name: ours[name] + theirs[name] for name in ours}
        return Differences(**{**sums, "examples": sums["examples"][:MAX_EXAMPLES]})

    def line(self) -> str:
        return (
            f"lost {self.lost:,}, repeated {self.repeated:,}, out of order {self.out_of_order:,}, "
            f"altered {self.altered:,}, unexpected {self.unexpected:,}"
        )


def compare_trails(expected: MessageTrail, found: MessageTrail, name: str = "") -> Differences:
    """Compare the messages `expected` (ascending, each once) with those that were `found`."""
    seen, newest, examples = bytearray(len(expected)), 0, []
    counts = dict.fromkeys(("repeated", "out_of_order", "altered", "unexpected"), 0)
    for sequence, print_ in zip(found.sequences, found.fingerprints, strict=True):
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
            elif expected.fingerprints[place] != print_:
                wrong = "altered"
        newest = max(newest, sequence)
        if wrong:
            counts[wrong] += 1
            examples.append(f"{name} {sequence}: {wrong.replace('_', ' ')}")
            del examples[MAX_EXAMPLES:]
    lost = [sequence for sequence, is_found in zip(expected.sequences, seen, strict=True) if not is_found]
    examples += [f"{name} {sequence}: lost" for sequence in lost[:MAX_EXAMPLES]]
    return Differences(len(expected), len(found), len(lost), **counts, examples=tuple(examples[:MAX_EXAMPLES]))
