"""Comparison of messages: those that an archive holds with those that were found, by sequence and fingerprint."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from hashlib import blake2b

from common.archive.segment import Message

MAX_EXAMPLES = 5


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
