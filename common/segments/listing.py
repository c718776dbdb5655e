"""Segments and messages as commands print them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from common.chain import Chain
from common.clock import NS_PER_S
from common.segments.archive import span
from common.segments.columns import messages
from common.segments.documents import ChainStore
from common.segments.segment import Message, Reason, SegmentRef, decode_subject, encode_bytes
from common.segments.store import SegmentStore
from common.sequences import SequenceRange, cover, holes
from common.service.text import escaped
from common.settings.units import format_duration

_MILLISECOND = 1_000_000


@dataclass(frozen=True, slots=True)
class Listed:
    """A segment in a listing, and which of its rows are taken from it."""

    ref: SegmentRef
    rows: SequenceRange

    @property
    def is_trimmed(self) -> bool:
        """Whether it also holds rows that are taken from another segment."""
        return self.rows != self.ref.coverage

    def path(self, url: str) -> str:
        """Where other engines find it."""
        return f"{url.removeprefix('file://').rstrip('/')}/{self.ref.key}"

    def as_json(self, url: str) -> dict[str, object]:
        ref = self.ref
        return {
            "chain": str(ref.chain),
            "level": ref.level,
            "first": ref.coverage.first,
            "last": ref.coverage.last,
            "take_first": self.rows.first,
            "take_last": self.rows.last,
            "bytes": ref.size,
            "modified": timestamp(int(ref.modified) * NS_PER_S),
            "name": ref.name,
            "key": ref.key,
            "path": self.path(url),
        }


def listed(refs: Sequence[SegmentRef]) -> list[Listed]:
    """Every segment, by level and end."""
    return [Listed(ref, ref.coverage) for ref in refs]


def covered(refs: Sequence[SegmentRef]) -> list[Listed]:
    """The segments of the cover, ascending."""
    return [Listed(stretch.segment, stretch.rows) for stretch in cover(refs, 1)]


def describe_segment(store: SegmentStore, ref: SegmentRef) -> dict[str, Any]:
    """The footer of one segment and what the store says of the object. Raises SegmentCorrupt."""
    with store.open(ref) as reader:
        footer = json.loads(reader.footer.to_json())
        groups = [
            {"first": g.range.first, "last": g.range.last, "rows": g.rows, "raw_bytes": g.raw_bytes}
            for g in reader.row_groups
        ]
    modified = timestamp(int(ref.modified) * NS_PER_S)
    return {"key": ref.key, "bytes": ref.size, "modified": modified, **footer, "row_groups": groups}


def describe_chain(store: SegmentStore, chains: ChainStore, chain: Chain) -> dict[str, Any]:
    """What is there of one chain: documents, segments by level, holes."""
    refs = store.list(chain)
    whole = span(refs)
    document, stream = chains.read_chain(chain), chains.read_stream(chain)
    missing = holes((ref.coverage for ref in refs), whole) if whole else []
    return {
        "chain": str(chain),
        "begins": document.first if document else None,
        "filters": list(document.filters) if document else None,
        "partitions": document.partitions if document else None,
        "created": stream.created if stream else None,
        "previous": dict(stream.previous) if stream and stream.previous else None,
        "floor": chains.read_floor(chain),
        "tail": chains.read_tail(chain),
        "first": whole.first if whole else None,
        "last": whole.last if whole else None,
        "levels": {
            level: {"segments": len(at), "bytes": sum(ref.size for ref in at)}
            for level in sorted({ref.level for ref in refs})
            if (at := [ref for ref in refs if ref.level == level])
        },
        "holes": [str(hole) for hole in missing],
    }


def lines(found: Mapping[str, Any]) -> list[tuple[str, object]]:
    """`found` as rows of field and value, nested fields with their path."""
    rows: list[tuple[str, object]] = []
    for name, value in found.items():
        if isinstance(value, Mapping):
            rows += [(f"{name}.{inner}", each) for inner, each in lines(value)]
        elif isinstance(value, list):
            rows += lines({f"{name}[{i}]": each for i, each in enumerate(value)})
        else:
            rows.append((name, value))
    return rows


def readable(found: Mapping[str, Any]) -> dict[str, Any]:
    """`found`, of a segment or a chain, for people: times and durations as they are written, and the share
    that was sampled out.
    """
    shown = _without_nanoseconds(found)
    if found.get("sampling") is not None:
        left_out = found["ledger"].get(Reason.SAMPLED_OUT.value, 0)
        total = found["rows"] + left_out
        shown["sampled out"] = f"{left_out:,} of {total:,} ({100 * left_out // max(1, total)} %)"
    return shown


def _as_written(name: str, nanoseconds: int) -> str:
    if name.endswith("timestamp_ns"):
        return timestamp(nanoseconds)
    is_exact = nanoseconds % _MILLISECOND == 0 and 0 <= nanoseconds < 2**63
    return format_duration(nanoseconds / NS_PER_S) if is_exact else f"{nanoseconds}ns"


def _without_nanoseconds(found: Mapping[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for key, value in found.items():
        name = str(key)  # a level or a partition is a number
        if isinstance(value, Mapping):
            shown[name] = _without_nanoseconds(value)
        elif name.endswith("_ns") and (value is None or isinstance(value, int)):
            shown[name.removesuffix("_ns")] = value if value is None else _as_written(name, value)
        else:
            shown[name] = value
    return shown


def message_lines(batch: pa.RecordBatch, *, as_json: bool) -> Iterator[str]:
    """One line for each message."""
    for message in messages(batch):
        yield json.dumps(_as_json(message)) if as_json else _as_text(message)


def _as_json(message: Message) -> dict[str, object]:
    return {
        "sequence": message.sequence,
        "timestamp": timestamp(message.timestamp_ns),
        **_json_bytes("subject", message.subject),
        **_json_bytes("headers", message.headers),
        **_json_bytes("payload", message.payload),
    }


def _json_bytes(name: str, raw: bytes | None) -> dict[str, object]:
    if raw is None:
        return {name: None}
    try:
        return {name: raw.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": encode_bytes(raw)}


def _as_text(message: Message) -> str:
    headers = "-" if message.headers is None else _text_bytes(message.headers)
    subject = escaped(decode_subject(message.subject))
    return "\t".join(
        (
            str(message.sequence),
            timestamp(message.timestamp_ns),
            subject,
            headers,
            _text_bytes(message.payload),
        )
    )


def _text_bytes(raw: bytes) -> str:
    try:
        return escaped(raw.decode())
    except UnicodeDecodeError:
        return encode_bytes(raw)


def timestamp(nanoseconds: int) -> str:
    """RFC 3339 UTC with nanoseconds where there are any; the bare number for years that it does not have."""
    seconds, rest = divmod(nanoseconds, NS_PER_S)
    try:
        text = datetime.fromtimestamp(seconds, UTC).isoformat().removesuffix("+00:00")
    except (ValueError, OverflowError, OSError):
        return str(nanoseconds)
    return f"{text}.{rest:09d}Z" if rest else f"{text}Z"
