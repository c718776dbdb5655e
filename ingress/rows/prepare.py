"""From decoded rows to rows that may be published: subjects mapped, header blocks escaped, sizes known.

Everything that the target would refuse for good is found here, before an intent holds it: an open intent is
never replaced, so one bad row in it would stop every chain of the target.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from common.chain import Chain
from common.errors import Stopped
from common.jetstream.headers import Provenance, escaped_lines, parse_block
from common.segments.segment import decode_subject
from ingress.rows.blocks import Material
from ingress.rows.subjects import Accepting, SubjectRule, problem

# What a publisher puts before the provenance: version, expected sequence, batch id (of 32 bytes), batch
# sequence, commit.
PUBLISHER_LINES = 192
# nats-server keeps the length of a header block in 16 bits.
MAX_HEADER_BLOCK = 65_535
# Sequence, timestamp, the space between and the line's end, at their longest.
_NUMBERS = 44
# Subjects that never repeat must not fill the memory.
_MAX_REMEMBERED = 100_000

# Values that the server takes; a header with another value travels escaped, as if it might not act.
_ACTING_VALUES = {
    b"nats-ttl": re.compile(rb"never|[1-9]\d{0,8}[smh]?"),
    b"nats-rollup": re.compile(rb"sub|all"),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What the target takes.

    `max_message`: bytes of header block and payload together. `control_headers`: lower-case names of
    headers of the source that act again at the target.
    """

    accepting: Accepting
    max_message: int
    control_headers: frozenset[bytes] = frozenset()


@dataclass(frozen=True, slots=True)
class Prepared:
    """The leading rows that may be published (None where there are none), and why the next may not be."""

    material: Material | None
    problem: Stopped | None = None


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The first row that the target would refuse: its index, a code, and why."""

    row: int
    code: str
    why: str


@dataclass(frozen=True, slots=True)
class _Columns:
    """A batch as lists of equal length; the payloads, by far the most, stay where they are."""

    sequences: list[int]
    timestamps_ns: list[int]
    subjects: list[bytes]
    headers: list[bytes | None]
    lengths: list[int]
    payloads: Any


class Preparer:
    """Prepares the rows of one chain; used by one thread at a time.

    `relay`: the chain's stream was itself written by Floe, so its `Floe-Source` lines stay hops. To be set
    before the first row; elsewhere they travel escaped, and a forged one hides nothing.
    """

    def __init__(self, chain: Chain, rule: SubjectRule, shape: Shape) -> None:
        self._chain, self._rule, self._shape = chain, rule, shape
        self._origin = _origin(chain)
        self.relay = False
        self._mapped: dict[bytes, bytes] = {}

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        """The rows of `batch`, of the segment schema, up to the first that the target would refuse."""
        rows = _columns(batch)
        subjects, bad_subject = self._subjects(rows.subjects)
        tails = self._tails(rows)
        sizes, bad_size = self._sizes(rows.lengths, tails)
        refusal = min(filter(None, (bad_subject, bad_size)), key=lambda r: r.row, default=None)
        if refusal is None:
            return Prepared(self._material(rows, subjects, tails, sizes, len(sizes)))
        material = self._material(rows, subjects, tails, sizes, refusal.row) if refusal.row else None
        return Prepared(material, self._stopped(refusal, rows.sequences[refusal.row]))

    def _material(
        self,
        rows: _Columns,
        subjects: list[bytes],
        tails: list[bytes | None] | None,
        sizes: list[int],
        stop: int,
    ) -> Material:
        return Material(
            rows.sequences[:stop],
            rows.timestamps_ns[:stop],
            subjects[:stop],
            self._origin,
            tails and tails[:stop],
            rows.payloads[:stop],
            list(accumulate(sizes[:stop])),
        )

    def _stopped(self, refusal: _Refusal, sequence: int) -> Stopped:
        return Stopped(
            f"chain {self._chain} stops at sequence {sequence}: {refusal.why}",
            hint="change the target or the subject rules of this source; nothing behind it is carried",
            code=refusal.code,
        )

    # Subjects

    def _subjects(self, subjects: list[bytes]) -> tuple[list[bytes], _Refusal | None]:
        """The subjects at the target; what stands at a refused row and behind it means nothing."""
        known = self._mapped
        refused = {}
        for subject in set(subjects).difference(known):
            target = self._rule.apply(subject)
            if why := self._against(target):
                refused[subject] = (
                    f"subject {decode_subject(subject)!r} becomes {decode_subject(target)!r}: {why}"
                )
            known[subject] = target
        targets = [known[subject] for subject in subjects]
        refusal = None
        if refused:
            row = next(row for row, subject in enumerate(subjects) if subject in refused)
            refusal = _Refusal(row, "E-SUBJECT", refused[subjects[row]])
        if refused or len(known) > _MAX_REMEMBERED:
            known.clear()
        return targets, refusal

    def _against(self, target: bytes) -> str:
        """Why `target` cannot be published to; empty if it can."""
        if why := problem(target):
            return why
        return "" if target in self._shape.accepting else f"the target takes {self._shape.accepting}"

    # Header blocks

    def _tails(self, rows: _Columns) -> list[bytes | None] | None:
        """What stands behind the publisher's lines, for rows with headers; None if no row has any."""
        if not any(rows.headers):
            return None
        blocks = zip(rows.sequences, rows.timestamps_ns, rows.headers, strict=True)
        return [self._tail(sequence, time, block) if block else None for sequence, time, block in blocks]

    def _tail(self, sequence: int, timestamp_ns: int, block: bytes) -> bytes:
        acting = self._shape.control_headers
        if acting and not _may_act(block, acting):
            acting = frozenset()
        lines = escaped_lines(block, acting, relay=self.relay)
        return b"%b%d %d\r\n%b\r\n" % (self._origin, sequence, timestamp_ns, lines)

    # Sizes

    def _sizes(
        self, lengths: list[int], tails: list[bytes | None] | None
    ) -> tuple[list[int], _Refusal | None]:
        """Bytes of each row's payload and header block, never less than what will be sent."""
        bare = len(self._origin) + _NUMBERS + PUBLISHER_LINES
        if tails is None:
            sizes = [length + bare for length in lengths]
            return sizes, self._refuse(sizes, "message with its headers", self._shape.max_message)
        blocks = [bare if tail is None else len(tail) + PUBLISHER_LINES for tail in tails]
        sizes = [length + block for length, block in zip(lengths, blocks, strict=True)]
        refusals = (
            self._refuse(blocks, "header block", MAX_HEADER_BLOCK),
            self._refuse(sizes, "message with its headers", self._shape.max_message),
        )
        return sizes, min(filter(None, refusals), key=lambda r: r.row, default=None)

    @staticmethod
    def _refuse(sizes: list[int], what: str, most: int) -> _Refusal | None:
        if max(sizes) <= most:
            return None
        row = next(row for row, size in enumerate(sizes) if size > most)
        return _Refusal(
            row, "E-MSG-TOO-LARGE", f"the {what} needs {sizes[row]} bytes, the target takes {most}"
        )


def _columns(batch: pa.RecordBatch) -> _Columns:
    text, raw = batch.column("subject").cast(pa.binary()), batch.column("subject_raw")
    subjects: Any = text if raw.null_count == len(raw) else pc.coalesce(raw, text)
    payloads: Any = batch.column("payload")
    lists: list[Any] = [batch.column(name).to_pylist() for name in ("sequence", "timestamp_ns", "headers")]
    lengths: Any = pc.binary_length(payloads)
    return _Columns(lists[0], lists[1], subjects.to_pylist(), lists[2], lengths.to_pylist(), payloads)


def _origin(chain: Chain) -> bytes:
    """The `Floe-Source` line of `chain` up to the sequence: `{sequence} {timestamp_ns}` follow."""
    line = Provenance(chain.site, chain.feed, chain.incarnation, chain.partition, 1, 1).line()
    if not line.endswith(b" 1 1"):
        raise ValueError(f"provenance: expected it to end in sequence and timestamp, found {line!r}")
    return line.removesuffix(b"1 1")


def _may_act(block: bytes, acting: frozenset[bytes]) -> bool:
    """Whether the acting headers of `block` have values that the server takes."""
    for name, value in parse_block(block):
        form = _ACTING_VALUES.get(name.lower()) if name.lower() in acting else None
        if form is not None and not form.fullmatch(value.strip()):
            return False
    return True
