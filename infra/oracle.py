"""The comparison of source streams, archive and target streams, message by message.

Each place is read into a `Trace`: 24 bytes for each message of any size. `compare` then classifies the damage to
messages on the way: lost (at the start, in the middle, at the end), repeated, out of order, altered, unexpected.
`read_source_trace` and `read_target_traces` fill traces from streams, `archived_messages` reads the archive through the
cover rule.

Streams are read raw, byte for byte, through their own consumer. Memory holds one pull of messages at a time, and 24 to
32 bytes for each message read.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice, takewhile

from common.archive.catalog import span
from common.archive.columns import messages
from common.archive.segment import Message
from common.archive.store import SegmentStore
from common.archive.unread import open_stretch
from common.chain import Chain
from common.nats.client import FloeClient
from common.nats.headers import split_provenance
from common.nats.pull import for_each_message
from common.sequences import SequenceRange, cover, holes
from infra.publish import existing_stream

MAX_EXAMPLES = 5  # of each kind of damage

SubjectMap = Callable[[bytes], bytes]


def same_subject(subject: bytes) -> bytes:
    """Return `subject`: the mapping of a target that keeps subjects."""
    return subject


def prefix_subject(prefix: str) -> SubjectMap:
    """Return the mapping of a target with `subject_prefix: prefix`."""
    return lambda subject: prefix.encode() + b"." + subject


def fingerprint(subject: bytes, headers: bytes | None, payload: bytes) -> int:
    """Return a 64-bit hash of subject, raw header block and payload; no headers and an empty block differ."""
    digest = blake2b(digest_size=8)
    for part in (subject, headers, payload):
        digest.update(b"-" if part is None else b"%d:" % len(part))
        digest.update(part or b"")
    return int.from_bytes(digest.digest(), "big")


@dataclass(slots=True)
class Trace:
    """The messages of one chain in the order in which they were read.

    `last_accounted`: the greatest sequence that the reading accounts for, even if its message no longer exists.
    """

    sequences: array[int] = field(default_factory=lambda: array("Q"))
    timestamps: array[int] = field(default_factory=lambda: array("q"))
    fingerprints: array[int] = field(default_factory=lambda: array("Q"))
    raw_bytes: int = 0
    last_accounted: int = 0

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, message: Message, subject: bytes | None = None) -> None:
        subject = message.subject if subject is None else subject
        self.sequences.append(message.sequence)
        self.timestamps.append(message.timestamp_ns)
        self.fingerprints.append(fingerprint(subject, message.headers, message.payload))
        self.raw_bytes += len(subject) + len(message.headers or b"") + len(message.payload)
        self.last_accounted = max(self.last_accounted, message.sequence)

    @classmethod
    def of(cls, messages: Iterable[Message], subject: SubjectMap = same_subject) -> Trace:
        trace = cls()
        for message in messages:
            trace.add(message, subject(message.subject))
        return trace


@dataclass(frozen=True, slots=True)
class OracleResult:
    """The differences between the found and the expected messages; counts of messages.

    `gone`: found, but no longer held by the source, which does not count as damage. `left_out`: not found, in agreement
    with the archive's ledger. `examples`: a few lines that name sequences.
    """

    name: str = ""
    expected: int = 0
    found: int = 0
    lost_prefix: int = 0
    lost_middle: int = 0
    lost_postfix: int = 0
    repeated: int = 0
    out_of_order: int = 0
    altered: int = 0
    unexpected: int = 0
    gone: int = 0
    left_out: int = 0
    examples: tuple[str, ...] = ()

    @property
    def lost(self) -> int:
        """The number of messages that were expected and not found."""
        return self.lost_prefix + self.lost_middle + self.lost_postfix

    @property
    def is_ok(self) -> bool:
        return not (self.lost or self.repeated or self.out_of_order or self.altered or self.unexpected)

    def summary(self) -> str:
        more = f", unexpected {self.unexpected}" if self.unexpected else ""
        counts = f"lost {self.lost}, repeated {self.repeated}, out of order {self.out_of_order}"
        return f"{counts}, altered {self.altered}{more}"

    def report(self) -> str:
        return "\n".join((f"{self.name}: {self.summary()}" if self.name else self.summary(), *self.examples))


def compare(expected: Trace, found: Trace, *, name: str = "", may_be_gone: bool = False) -> OracleResult:
    """Compare the messages of `expected` with those that arrived in `found`.

    `expected` is in sequence order without repeats, as a stream is. `may_be_gone`: its source may have deleted
    messages after they were carried, so a found message up to `expected.last_accounted` that is not in `expected`
    counts as gone. Raises ValueError if `expected` is not in order.
    """
    return _TraceComparer(expected, found, name, may_be_gone).result()


def allow_left_out(comparison: OracleResult, left_out: int) -> OracleResult:
    """Return the comparison for exactly `left_out` messages that were left out on purpose.

    If another number is missing, the difference counts as lost.
    """
    missing = comparison.lost
    others = abs(missing - left_out)
    example = f"missing {missing}, expected {left_out} by the ledger"
    examples = (example, *comparison.examples) if others else ()
    return replace(
        comparison,
        lost_prefix=0,
        lost_middle=others,
        lost_postfix=0,
        left_out=min(missing, left_out),
        examples=examples,
    )


def sum_comparisons(comparisons: Iterable[OracleResult], name: str = "") -> OracleResult:
    result = OracleResult(name=name)
    counts = [key for key in OracleResult.__slots__ if key not in ("name", "examples")]
    for each in comparisons:
        sums = {key: getattr(result, key) + getattr(each, key) for key in counts}
        examples = tuple(f"{each.name}: {line}" if each.name else line for line in each.examples)
        result = replace(result, examples=result.examples + examples, **sums)
    return result


class _TraceComparer:
    """One pass over the found messages, with a mark for each expected message."""

    def __init__(self, expected: Trace, found: Trace, name: str, may_be_gone: bool) -> None:
        self._expected, self._found, self._name = expected, found, name
        self._may_be_gone = may_be_gone
        self._seen = bytearray(len(expected))
        self._unexpected: set[int] = set()
        self._counts = dict.fromkeys(("repeated", "out_of_order", "altered", "unexpected", "gone"), 0)
        self._examples: list[str] = []
        _require_order(expected)

    def result(self) -> OracleResult:
        greatest = 0
        for index, sequence in enumerate(self._found.sequences):
            if self._check(index, sequence) and sequence < greatest:
                self._note("out_of_order", f"sequence {sequence} came after {greatest}")
            greatest = max(greatest, sequence)
        prefix, middle, postfix = self._lost()
        return OracleResult(
            name=self._name,
            expected=len(self._expected),
            found=len(self._found),
            lost_prefix=prefix,
            lost_middle=middle,
            lost_postfix=postfix,
            examples=tuple(self._examples),
            **self._counts,
        )

    def _check(self, index: int, sequence: int) -> bool:
        """Check the found message at `index`. Return False if it is a repeat."""
        place = self._expected_index(sequence)
        if place is None:
            return self._check_unexpected(sequence)
        self._check_content(place, index, sequence)
        if self._seen[place]:
            self._note("repeated", f"sequence {sequence} came again")
            return False
        self._seen[place] = 1
        return True

    def _expected_index(self, sequence: int) -> int | None:
        place = bisect_left(self._expected.sequences, sequence)
        held = place < len(self._expected) and self._expected.sequences[place] == sequence
        return place if held else None

    def _check_unexpected(self, sequence: int) -> bool:
        if sequence in self._unexpected:
            self._note("repeated", f"sequence {sequence} came again")
            return False
        self._unexpected.add(sequence)
        if self._may_be_gone and sequence <= self._expected.last_accounted:
            self._counts["gone"] += 1
        else:
            self._note("unexpected", f"sequence {sequence} was never published")
        return True

    def _check_content(self, place: int, index: int, sequence: int) -> None:
        if self._expected.fingerprints[place] != self._found.fingerprints[index]:
            self._note("altered", f"sequence {sequence}: subject, headers or payload differ")
        elif self._expected.timestamps[place] != self._found.timestamps[index]:
            there, here = self._expected.timestamps[place], self._found.timestamps[index]
            self._note("altered", f"sequence {sequence}: timestamp {there} became {here}")

    def _lost(self) -> tuple[int, int, int]:
        """Return how many are lost at the start, in the middle, at the end; all at the end if nothing came at all."""
        lost = self._seen.count(0)
        if lost:
            missing = (
                sequence for sequence, seen in zip(self._expected.sequences, self._seen, strict=True) if not seen
            )
            self._examples += [f"lost: sequence {sequence}" for sequence in islice(missing, MAX_EXAMPLES)]
        if lost == len(self._seen):
            return 0, 0, lost
        prefix = sum(1 for _ in takewhile(lambda mark: not mark, self._seen))
        postfix = sum(1 for _ in takewhile(lambda mark: not mark, reversed(self._seen)))
        return prefix, lost - prefix - postfix, postfix

    def _note(self, kind: str, example: str) -> None:
        self._counts[kind] += 1
        if self._counts[kind] <= MAX_EXAMPLES:
            self._examples.append(f"{kind.replace('_', ' ')}: {example}")


def _require_order(trace: Trace) -> None:
    previous = 0
    for sequence in trace.sequences:
        if sequence <= previous:
            raise ValueError(f"expectation out of order: sequence {sequence} comes after {previous}")
        previous = sequence


async def read_source_trace(client: FloeClient, stream: str, subject: SubjectMap = same_subject) -> Trace:
    """Read a source stream into a trace. Raises ConfigError if the stream does not exist."""
    trace = Trace()
    trace.last_accounted = await read_stream(client, stream, lambda m: trace.add(m, subject(m.subject)))
    return trace


@dataclass(slots=True)
class TargetTraces:
    """The messages of a target stream, by chain, in the order in which they were stored.

    `delays`: milliseconds between a message's time at its source and its time in the target. `foreign`: messages
    without provenance.
    """

    traces: dict[Chain, Trace] = field(default_factory=dict)
    delays: dict[Chain, array[int]] = field(default_factory=dict)
    foreign: int = 0

    def add(self, message: Message) -> None:
        provenance, original = split_provenance(message.headers)
        if provenance is None:
            self.foreign += 1
            return
        chain = provenance.chain
        self.traces.setdefault(chain, Trace()).add(
            Message(provenance.sequence, provenance.timestamp_ns, message.subject, original, message.payload)
        )
        delay = (message.timestamp_ns - provenance.timestamp_ns) // 1_000_000
        self.delays.setdefault(chain, array("q")).append(delay)


async def read_target_traces(client: FloeClient, stream: str) -> TargetTraces:
    """Read a target stream into traces by chain. Raises ConfigError if the stream does not exist."""
    arrived = TargetTraces()
    await read_stream(client, stream, arrived.add)
    return arrived


async def read_stream(client: FloeClient, stream: str, take: Callable[[Message], None]) -> int:
    """Pass every message that the stream holds to `take`, in order; return the stream's last sequence.

    Raises ConfigError if the stream does not exist, and the errors of `for_each_message`.
    """
    info = await existing_stream(client, stream)
    if info.messages:
        await for_each_message(client, stream, info.last_sequence, take)
    return info.last_sequence


def archived_messages(store: SegmentStore, chain: Chain, position: int = 1) -> Iterator[Message]:
    """Yield the messages that the cover of `chain` holds from `position` on; holes are skipped."""
    for stretch in cover(store.list(chain, position=position), position):
        with open_stretch(store, stretch) as reader:
            for batch in reader.batches(stretch.rows):
                yield from messages(batch)


def archive_holes(store: SegmentStore, chain: Chain) -> list[SequenceRange]:
    """Return the ranges between the first and the last covered sequence that no segment covers."""
    refs = store.list(chain)
    whole = span(refs)
    return holes((ref.coverage for ref in refs), whole) if whole else []
