"""Preparation of decoded rows for publishing: subjects are mapped, header blocks escaped, sizes computed.

A subject comes from a file in a bucket: no part of it reaches a socket before it is checked here.

All rows that the target would refuse permanently are found here, before an intent holds them: an open intent is never
replaced, so one bad row in it would stop every chain of the target.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from common.archive.columns import messages, subject_bytes
from common.archive.guard import MAX_MESSAGE_BYTES, MIB
from common.archive.segment import Message, decode_subject
from common.chain import Chain
from common.errors import Stopped
from common.exits import checkpoint_command, choices, position_command, resume_command
from common.nats.headers import Provenance, escape_lines, parse_block
from common.settings.ingress import SourceSettings
from common.subjects import Transform, compile_transform, covers, matches, overlaps
from ingress.rows.rows import PreparedBatch

# Bytes that would end or split the control line of the protocol. A server accepts everything else, even wildcards:
# a source may hold `a.*` as the subject of a message.
_UNSAFE = re.compile(rb"[\x00\t\n\r ]")
MAX_SUBJECT_BYTES = 3900  # bytes: with reply and sizes it must fit the control line, 4096 by default


@dataclass(frozen=True, slots=True)
class SubjectRule:
    """Rule that puts `prefix` and a dot before the subject, then removes every occurrence of `remove`. Each step
    collapses `..` to one dot, as stream-replicator does. With both empty, the subject is unchanged.
    """

    prefix: bytes = b""
    remove: bytes = b""

    def apply(self, subject: bytes) -> bytes:
        if self.prefix:
            subject = (self.prefix + b"." + subject).replace(b"..", b".")
        if self.remove:
            subject = subject.replace(self.remove, b"").replace(b"..", b".")
        return subject

    @property
    def pattern(self) -> str | None:
        """A filter that matches every result, `{prefix}.>`; None if a removed text may touch the prefix."""
        kept = (self.prefix + b".").replace(b"..", b".")
        ends = (kept[at:] for at in range(len(kept)))
        if b"" in kept[:-1].split(b".") or (self.remove and self.remove in kept):
            return None
        if self.remove and any(self.remove.startswith(end) for end in ends):
            return None
        return kept.decode() + ">"


Rule = SubjectRule | Transform


def rule_of(source: SourceSettings, chain: Chain) -> Rule:
    wanted = source.subject_transform
    if wanted.source:
        return compile_transform(wanted.source, wanted.destination)
    prefix = source.prefix_of(chain.site, chain.feed, chain.incarnation, chain.partition)
    return SubjectRule(prefix.encode(), source.subject_remove.encode())


def patterns_of(source: SourceSettings) -> list[str] | None:
    """Return filters that together match every subject of the source's chains; None if they are not known.

    A removed text may touch the number of an incarnation or a partition, or a name: then they are not known.
    """
    if source.subject_transform.source:
        wanted = source.subject_transform
        made = compile_transform(wanted.source, wanted.destination).pattern
        return None if made is None else [made]
    may_touch = re.search(r"\d", source.subject_remove) or (source.subject_remove and source.is_pattern)
    if may_touch and any("*" in prefix.split(".") for prefix in source.prefix_patterns()):
        return None
    prefixes = {source.prefix_of(*pair, 0, 0).encode() for pair in product(source.site, source.feed)}
    if any(SubjectRule(prefix, source.subject_remove.encode()).pattern is None for prefix in prefixes):
        return None
    return [f"{prefix}.>".replace("..", ".") for prefix in source.prefix_patterns()]


def subject_problem(subject: bytes) -> str:
    """Return the reason why `subject` cannot be published to; empty if it can."""
    if not subject:
        return "it is empty"
    if len(subject) > MAX_SUBJECT_BYTES:
        return f"it has {len(subject)} bytes, expected at most {MAX_SUBJECT_BYTES}"
    if _UNSAFE.search(subject):
        return "it holds a space, tab, CR, LF or NUL"
    if b"" in subject.split(b"."):
        return "it has an empty token"
    return ""


@dataclass(frozen=True, slots=True)
class SubjectFilters:
    """The subjects of a stream, wildcards included."""

    patterns: Sequence[str]

    def __contains__(self, subject: bytes) -> bool:
        return ">" in self.patterns or any(matches(pattern, subject) for pattern in self.patterns)

    def covers(self, pattern: str) -> bool:
        return any(covers(mine, pattern) for mine in self.patterns)

    def overlaps(self, pattern: str) -> bool:
        return any(overlaps(mine, pattern) for mine in self.patterns)

    def __str__(self) -> str:
        return ", ".join(self.patterns)


@dataclass(frozen=True, slots=True)
class Oversize:
    """A message that is too large for the target, and the reason."""

    message: Message
    reason: str


@dataclass(frozen=True, slots=True)
class RowProblem:
    """The first row that the target would refuse: its index, a code, and the reason."""

    row: int
    code: str
    reason: str


class RowRefused(Stopped):
    """A row that the target would refuse permanently; `reason` does not name the row."""

    def __init__(self, chain: Chain, sequence: int, refusal: RowProblem, hint: str) -> None:
        message = f"chain {chain} stops at sequence {sequence}: {refusal.reason}"
        super().__init__(message, hint=hint, code=refusal.code)
        self.reason = refusal.reason


def rows_above(subject: str, sizes: list[int], limit: int) -> dict[int, str]:
    """Return the rows above `limit` (bytes), ascending, each with the reason. `subject`: the part of a row that `sizes`
    gives the bytes of.
    """
    if max(sizes) <= limit:
        return {}
    above = ((row, size) for row, size in enumerate(sizes) if size > limit)
    return {row: f"the {subject} needs {size} bytes, the target takes {limit}" for row, size in above}


def without_sequences(batch: pa.RecordBatch, sequences: tuple[int, ...]) -> pa.RecordBatch:
    if not sequences:
        return batch
    column: Any = batch.column("sequence")
    mask: Any = pc.invert(pc.is_in(column, value_set=pa.array(sequences, pa.int64())))
    return batch.filter(mask)


def row_remedies(chain: Chain, target: str, code: str, sequence: int) -> str:
    resume, skip = resume_command(target, chain), position_command(target, chain, sequence + 1)
    if code == "E-SUBJECT":
        repair, change = "let the target accept the subject", "change the subject rules of this source"
    else:
        repair, change = "raise max_payload or the target's max_msg_size", "set `on_oversize: park`"
    recheck = f"{repair}, then check it at once"
    return choices((recheck, resume), (f"or {change}, and start ingress again; or skip it", skip))


def oversize_remedies(target: str) -> str:
    """Return the hint for a row of the open intent that is too large: the intent is finished unchanged."""
    return choices(
        "connect to a server with the former max_payload, or raise it and the target's max_msg_size again: "
        "delivery continues by itself",
        (
            "or drop the rest of the intent, so that the chain stops or parks instead",
            checkpoint_command(target, "--accept"),
        ),
    )


# Bytes of the lines that a publisher puts before the provenance: version, expected sequence, batch id (of 32 bytes),
# batch sequence, commit.
PUBLISHER_LINES_BYTES = 192
# nats-server keeps the length of a header block in 16 bits.
MAX_HEADER_BLOCK_BYTES = 65_535
# The largest message, with the lines that Floe adds to it.
MAX_PUBLISHED_BYTES = MAX_MESSAGE_BYTES + MIB
# Sequence, timestamp, the space between them and the line's end, at their longest.
_NUMBERS_BYTES = 44
_MESSAGE = "message with its headers"
# Subjects that never repeat must not fill the memory.
_MAX_CACHED_SUBJECTS = 100_000

# Values that the server accepts; a header with another value is escaped, as if it were not allowed to act.
# Hours and minutes are bounded: the server refuses values that overflow its nanoseconds.
_ACTING_VALUES = {
    b"nats-ttl": re.compile(rb" *(never|[1-9]\d{0,8}s?|[1-9]\d{0,7}m|[1-9]\d{0,5}h)"),
    b"nats-rollup": re.compile(rb" *(sub|all)"),
}
# `all` would delete the messages of other sources in the target.
_SHARED_VALUES = _ACTING_VALUES | {b"nats-rollup": re.compile(rb" *sub")}


@dataclass(frozen=True, slots=True)
class TargetLimits:
    """Limits of a target.

    `max_message`: bytes of header block and payload together. `parks`: a message that is too large is parked instead
    of stopping its chain. `target`: the stream's name, for messages to operators. `max_payload`: of the server from
    which `max_message` was computed. `is_shared`: several feeds flow into it.
    """

    subjects: SubjectFilters
    max_message: int
    parks: bool = False
    target: str = "TARGET"
    max_payload: int = 0
    is_shared: bool = True


@dataclass(frozen=True, slots=True)
class Prepared:
    """The leading rows that may be published (None if there are none), and the problem of the next one.

    `excluded`: sequences before that row which are in no batch, ascending. `oversize`: messages among them that
    are to be parked before a piece leaves them out.
    """

    batch: PreparedBatch | None
    problem: RowRefused | None = None
    excluded: tuple[int, ...] = ()
    oversize: tuple[Oversize, ...] = ()

    @property
    def has_rows(self) -> bool:
        return self.batch is not None or bool(self.excluded)


@dataclass(frozen=True, slots=True)
class _Columns:
    """A batch as lists of equal length; the payloads, by far the largest part, are not copied."""

    sequences: list[int]
    timestamps_ns: list[int]
    subjects: list[bytes]
    headers: list[bytes | None]
    lengths: list[int]
    payloads: Any


class Preparer:
    """Preparation of the rows of one chain; used by one thread at a time.

    `extra`: one more header line for each message, without its CR LF, after the provenance. `is_relay`: the chain's
    stream was itself written by Floe, so its `Floe-Source` lines remain hops. It is to be set before the first row; in
    other chains such lines are escaped, and a forged one hides nothing. `active`: lower-case names of the source's
    headers that take effect at the target. `excluded`: exactly these sequences are left out, independent of the
    limits (None: messages that are too large, if the limits park them).
    """

    def __init__(
        self, chain: Chain, rule: Rule, limits: TargetLimits, extra: bytes = b"", active: frozenset[bytes] = frozenset()
    ) -> None:
        self._active_headers, self._values = active, _SHARED_VALUES if limits.is_shared else _ACTING_VALUES
        self._chain, self._rule, self._target, self._origin = chain, rule, limits, origin_prefix(chain)
        self._extra = extra + b"\r\n" if extra else b""
        self.is_relay = False
        self.excluded: frozenset[int] | None = None
        self._mapped: dict[bytes, bytes] = {}

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        """Prepare the rows of `batch`, of the segment schema, up to the first that the target would refuse."""
        if self.excluded is None:
            return self._prepared(batch, parks=self._target.parks)
        found = batch.column("sequence").to_pylist()
        return self._without(batch, tuple(sequence for sequence in found if sequence in self.excluded))

    def _without(
        self, batch: pa.RecordBatch, excluded: tuple[int, ...], oversize: tuple[Oversize, ...] = ()
    ) -> Prepared:
        kept = without_sequences(batch, excluded)
        rest = self._prepared(kept, parks=False) if kept.num_rows else Prepared(None)
        return Prepared(rest.batch, rest.problem, excluded, oversize)

    def _prepared(self, batch: pa.RecordBatch, *, parks: bool) -> Prepared:
        rows = _columns(batch)
        subjects, refusal = self._subjects(rows.subjects)
        tails = self._header_tails(rows)
        sizes, above = self._sizes(rows.lengths, tails)
        huge = next((row for row, size in enumerate(sizes) if size > MAX_PUBLISHED_BYTES), len(sizes))
        stop = min(huge, len(sizes) if refusal is None else refusal.row)
        if parks and (parked := [row for row in sorted(above) if row < stop]):
            # Prepare again without them: this is rare, and costs nothing in the usual case.
            oversize = tuple(Oversize(next(messages(batch.slice(row, 1))), above[row]) for row in parked)
            return self._without(batch, tuple(each.message.sequence for each in oversize), oversize)
        if above and (refusal is None or min(above) < refusal.row):
            refusal = RowProblem(min(above), "E-MSG-TOO-LARGE", above[min(above)])
        if refusal is None:
            return Prepared(self._batch(rows, subjects, tails, sizes, len(sizes)))
        ready = self._batch(rows, subjects, tails, sizes, refusal.row) if refusal.row else None
        sequence = rows.sequences[refusal.row]
        if refusal.row == huge:
            return Prepared(ready, self.too_large(sequence, sizes[huge]))
        hint = row_remedies(self._chain, self._target.target, refusal.code, sequence)
        return Prepared(ready, RowRefused(self._chain, sequence, refusal, hint))

    def _batch(
        self, rows: _Columns, subjects: list[bytes], tails: list[bytes | None] | None, sizes: list[int], stop: int
    ) -> PreparedBatch:
        return PreparedBatch(
            rows.sequences[:stop],
            rows.timestamps_ns[:stop],
            subjects[:stop],
            self._origin,
            tails and tails[:stop],
            rows.payloads[:stop],
            list(accumulate(sizes[:stop])),
            b"\r\n%b\r\n" % self._extra,
            max(sizes[:stop]),
        )

    def too_large(self, sequence: int, size: int) -> RowRefused:
        """Return the problem of a message that is too large for any target. `size`: its bytes."""
        skip = position_command(self._target.target, self._chain, sequence + 1)
        refusal = RowProblem(0, "E-MSG-TOO-LARGE", f"it needs {size} bytes, expected at most {MAX_MESSAGE_BYTES}")
        return RowRefused(self._chain, sequence, refusal, choices(("keep a copy of it elsewhere, and skip it", skip)))

    # Subjects

    def _subjects(self, subjects: list[bytes]) -> tuple[list[bytes], RowProblem | None]:
        known = self._mapped
        refused = {}
        for subject in set(subjects).difference(known):
            target = self._rule.apply(subject)
            if not (reason := subject_problem(target)) and target not in self._target.subjects:
                reason = f"the target takes {self._target.subjects}"
            if reason:
                refused[subject] = f"subject {decode_subject(subject)!r} becomes {decode_subject(target)!r}: {reason}"
            known[subject] = target
        targets = [known[subject] for subject in subjects]
        refusal = None
        if refused:
            row = next(row for row, subject in enumerate(subjects) if subject in refused)
            refusal = RowProblem(row, "E-SUBJECT", refused[subjects[row]])
        if refused or len(known) > _MAX_CACHED_SUBJECTS:
            known.clear()
        return targets, refusal

    # Header blocks

    def _header_tails(self, rows: _Columns) -> list[bytes | None] | None:
        """Return everything after the publisher's lines, for rows with headers; None if no row has any."""
        if not any(rows.headers):
            return None
        # Senders repeat header blocks: each one is escaped once.
        lines = {block: self._lines(block) for block in set(rows.headers) if block}
        origin, blocks = self._origin, zip(rows.sequences, rows.timestamps_ns, rows.headers, strict=True)
        return [
            b"%b%d %d\r\n%b" % (origin, sequence, timestamp_ns, lines[block]) if block else None
            for sequence, timestamp_ns, block in blocks
        ]

    def _lines(self, block: bytes) -> bytes:
        if (active := self._active_headers) and not self._has_valid_values(block):
            active = frozenset()
        return b"%b%b\r\n" % (self._extra, escape_lines(block, active, relay=self.is_relay))

    def _has_valid_values(self, block: bytes) -> bool:
        forms = {name: form for name, form in self._values.items() if name in self._active_headers}
        lines = ((name.lower(), value) for name, value in parse_block(block))
        return all(name not in forms or forms[name].fullmatch(value) for name, value in lines)

    # Sizes

    def _sizes(self, lengths: list[int], tails: list[bytes | None] | None) -> tuple[list[int], dict[int, str]]:
        """Return the bytes of each row's payload and header block, never less than will be sent; and the rows that are
        above a limit of the target, each with the reason.
        """
        # An open intent is finished unchanged: only the target's own limit applies to its rows.
        cap = min(self._target.max_message, MAX_PUBLISHED_BYTES) if self.excluded is None else self._target.max_message
        bare = len(self._origin) + _NUMBERS_BYTES + PUBLISHER_LINES_BYTES + len(self._extra)
        if tails is None:
            sizes = [length + bare for length in lengths]
            return sizes, rows_above(_MESSAGE, sizes, cap)
        blocks = [bare if tail is None else len(tail) + PUBLISHER_LINES_BYTES for tail in tails]
        sizes = [length + block for length, block in zip(lengths, blocks, strict=True)]
        return sizes, rows_above(_MESSAGE, sizes, cap) | rows_above("header block", blocks, MAX_HEADER_BLOCK_BYTES)


def _columns(batch: pa.RecordBatch) -> _Columns:
    payloads: Any = batch.column("payload")
    lists: list[Any] = [batch.column(name).to_pylist() for name in ("sequence", "timestamp_ns", "headers")]
    lengths: Any = pc.binary_length(payloads)
    return _Columns(lists[0], lists[1], subject_bytes(batch).to_pylist(), lists[2], lengths.to_pylist(), payloads)


def origin_prefix(chain: Chain) -> bytes:
    """Return the `Floe-Source` line of `chain` up to the sequence: `{sequence} {timestamp_ns}` follow."""
    line = Provenance(chain.site, chain.feed, chain.incarnation, chain.partition, 1, 1).line()
    if not line.endswith(b" 1 1"):
        raise ValueError(f"provenance: expected it to end in sequence and timestamp, found {line!r}")
    return line.removesuffix(b"1 1")
