"""Values of a segment: message, ledger, tip, footer and reference.

The footer is JSON in the Parquet key-value metadata under `floe.segment`; readers treat it as untrusted.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from common.archive.keys import SegmentName
from common.chain import Chain
from common.documents import check_depth
from common.errors import SegmentCorrupt
from common.sequences import SequenceRange

FORMAT_VERSION = 1
FOOTER_KEY = b"floe.segment"


@dataclass(frozen=True, slots=True)
class Message:
    """One JetStream message, byte for byte (I6).

    `timestamp_ns`: nanoseconds since 1970 UTC. `headers`: the raw header block
    (`NATS/1.0\\r\\n…\\r\\n\\r\\n`), or None if the message has none. `payload`: may be empty, never None.
    """

    sequence: int
    timestamp_ns: int
    subject: bytes
    headers: bytes | None
    payload: bytes


class Reason(StrEnum):
    """The reason why a covered sequence has no row (I7)."""

    SAMPLED_OUT = "sampled_out"
    TOO_OLD = "too_old"
    LOOPED = "looped"
    NOT_MATCHED = "not_matched"
    DELETED = "deleted"
    GONE_BEFORE_READ = "gone_before_read"
    GONE_FROM_HOLE = "gone_from_hole"
    LOST = "lost"
    UNATTRIBUTED = "unattributed"


# For sequences with messages that the segment's writer may never have received: other segments may have them.
UNREAD_REASONS = (Reason.GONE_BEFORE_READ, Reason.GONE_FROM_HOLE)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The number of covered sequences without a row, by reason; reasons with 0 are left out.

    A reason from a newer Floe is plain text, and counts like any other.
    """

    counts: Mapping[Reason | str, int] = field(default_factory=dict)

    def total(self) -> int:
        return sum(self.counts.values())

    def unread(self) -> int:
        return sum(self.counts.get(reason, 0) for reason in UNREAD_REASONS)

    def plus(self, other: Ledger) -> Ledger:
        reasons = {*self.counts, *other.counts}
        return Ledger({r: self.counts.get(r, 0) + other.counts.get(r, 0) for r in sorted(reasons)})

    def to_json(self) -> dict[str, int]:
        return {str(reason): count for reason, count in sorted(self.counts.items()) if count}


@dataclass(frozen=True, slots=True)
class Tip:
    """The last message examined for a segment: it distinguishes one history of a stream from another.

    `digest`: 32 hex digits of a SHA-256 over subject, headers and payload.
    """

    sequence: int
    timestamp_ns: int
    digest: str

    @classmethod
    def of(cls, message: Message) -> Tip:
        return cls(message.sequence, message.timestamp_ns, message_digest(message))

    def to_text(self) -> str:
        """Return `sequence:timestamp_ns:digest`, the form in object metadata: at most 73 bytes."""
        return f"{self.sequence}:{self.timestamp_ns}:{self.digest}"

    @classmethod
    def from_text(cls, text: str) -> Tip:
        """Parse the text of `to_text`. Raises ValueError."""
        sequence, timestamp_ns, digest = text.split(":")
        if len(digest) != 32:
            raise ValueError(f"tip {text!r}: expected 32 hex digits, found {len(digest)}")
        return cls(int(sequence), int(timestamp_ns), digest)


def message_digest(message: Message) -> str:
    """Return 32 hex digits over subject, headers and payload, each with its length, so that none runs into the next."""
    digest = hashlib.sha256()
    for part in (message.subject, message.headers, message.payload):
        digest.update(b"-" if part is None else len(part).to_bytes(8, "big"))
        digest.update(part or b"")
    return digest.hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class MergeInputs:
    """The segments that a merge read: their number, and one SHA-256 over their sorted names."""

    count: int
    digest: str

    @classmethod
    def of(cls, names: list[str]) -> MergeInputs:
        return cls(len(names), hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class Footer:
    """The footer of a segment.

    `raw_bytes`: of subjects, header blocks and payloads. `first_timestamp_ns`, `last_timestamp_ns`: of the
    first and the last row, None without rows. `tip`: None if no message was examined. `sampling`: the
    settings by which messages were left out, None for a whole copy; `sampling_digest`: a SHA-256 over them,
    empty for a whole copy. `inputs`: None at level 0. `unread`: the least range with every sequence that the
    ledger counts as `gone_before_read` or `gone_from_hole`, None without any. Other segments may hold the rows
    of these sequences, and a reader of this one takes them from there (`common.archive.unread`).
    """

    chain: Chain
    level: int
    coverage: SequenceRange
    rows: int
    ledger: Ledger
    raw_bytes: int
    first_timestamp_ns: int | None
    last_timestamp_ns: int | None
    tip: Tip | None
    writer: str
    sampling: Mapping[str, Any] | None = None
    sampling_digest: str = ""
    inputs: MergeInputs | None = None
    unread: SequenceRange | None = None
    format_version: int = FORMAT_VERSION

    def is_balanced(self) -> bool:
        """True if rows and ledger together account for the coverage (I7)."""
        return self.rows + self.ledger.total() == len(self.coverage)

    def has_valid_unread(self) -> bool:
        """True if `unread` agrees with the ledger (I7): None if that counts no unread sequences, else covered and large
        enough for all of them.
        """
        count = self.ledger.unread()
        if self.unread is None:
            return count == 0
        return 0 < count <= len(self.unread) and self.coverage.encloses(self.unread)

    def to_json(self) -> bytes:
        document = {
            "format_version": self.format_version,
            **self.chain.log_context(),
            "level": self.level,
            **asdict(self.coverage),
            "rows": self.rows,
            "ledger": self.ledger.to_json(),
            "raw_bytes": self.raw_bytes,
            "first_timestamp_ns": self.first_timestamp_ns,
            "last_timestamp_ns": self.last_timestamp_ns,
            "tip": self.tip and self.tip.to_text(),
            "sampling": self.sampling,
            "sampling_digest": self.sampling_digest,
            "writer": self.writer,
            "inputs": self.inputs and asdict(self.inputs),
            **({"unread": [self.unread.first, self.unread.last]} if self.unread else {}),
        }
        return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Footer:
        """Parse a footer. Raises SegmentCorrupt, naming the field, if `raw` is not a footer that this version reads."""
        try:
            check_depth(raw)
            document = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise SegmentCorrupt(f"footer floe.segment: expected JSON, found {raw[:40]!r}") from error
        if not isinstance(document, dict):
            raise SegmentCorrupt(f"footer floe.segment: expected an object, found {type(document).__name__}")
        get = partial(_field, document)
        if (version := get("format_version", int)) != FORMAT_VERSION:
            text = f"footer format_version: expected {FORMAT_VERSION}, found {version}"
            raise SegmentCorrupt(text, hint="read it with a newer Floe", code="E-SEG-VERSION")
        try:
            return cls._of(get)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise SegmentCorrupt(f"footer floe.segment: {error}") from error

    @classmethod
    def _of(cls, get: Callable[..., Any]) -> Footer:
        tip, inputs = get("tip", str, optional=True), get("inputs", dict, optional=True)
        coverage, ledger = SequenceRange(get("first", int), get("last", int)), _ledger(get("ledger", dict))
        return cls(
            chain=Chain(get("site", str), get("feed", str), get("incarnation", int), get("partition", int)),
            level=get("level", int),
            coverage=coverage,
            rows=get("rows", int),
            ledger=ledger,
            raw_bytes=get("raw_bytes", int),
            first_timestamp_ns=get("first_timestamp_ns", int, optional=True),
            last_timestamp_ns=get("last_timestamp_ns", int, optional=True),
            tip=None if tip is None else Tip.from_text(tip),
            sampling=get("sampling", dict, optional=True),
            sampling_digest=get("sampling_digest", str),
            writer=get("writer", str),
            inputs=None if inputs is None else MergeInputs(int(inputs["count"]), str(inputs["digest"])),
            unread=_unread(get("unread", list, optional=True), coverage, ledger),
        )


def _field(document: Mapping[str, Any], name: str, kind: type, *, optional: bool = False) -> Any:
    if (value := document.get(name)) is None and optional:
        return None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise SegmentCorrupt(f"footer {name}: expected {kind.__name__}, found {value!r:.60}")
    return value


def _unread(bounds: list[Any] | None, coverage: SequenceRange, ledger: Ledger) -> SequenceRange | None:
    if bounds is None:
        # Written before footers had `unread`: the sequences may be anywhere in the coverage.
        return coverage if ledger.unread() else None
    if len(bounds) != 2 or not all(type(bound) is int for bound in bounds):
        raise ValueError(f"unread: expected two sequences, found {bounds!r:.60}")
    return SequenceRange(*bounds)


def _ledger(counts: Mapping[str, Any]) -> Ledger:
    for reason, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ValueError(f"ledger {reason}: expected a count, found {count!r:.60}")
    return Ledger({_REASONS.get(reason, reason): count for reason, count in counts.items()})


_REASONS = {reason.value: reason for reason in Reason}


class SegmentRef(NamedTuple):  # created in a third of the time of a frozen dataclass
    """A segment in the store.

    `size`: stored bytes. `modified`: seconds since 1970 UTC by the *store's* clock; the age of an object
    comes from here and never from a footer.
    """

    segment: SegmentName
    key: str
    size: int
    modified: float

    @property
    def chain(self) -> Chain:
        return self.segment.chain

    @property
    def level(self) -> int:
        return self.segment.level

    @property
    def coverage(self) -> SequenceRange:
        return self.segment.coverage

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    def log_context(self) -> dict[str, object]:
        # `level` is the level of a log line.
        return {**self.chain.log_context(), "segment_level": self.level, "segment": self.name}


def decode_subject(subject: bytes) -> str:
    """Return `subject` for people: UTF-8, other bytes as `\\xNN`."""
    return subject.decode("utf-8", "backslashreplace")


def encode_bytes(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
