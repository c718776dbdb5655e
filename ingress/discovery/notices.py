"""What notifications of a bucket say: which objects were written. Pure, and trusts nobody.

Understood are the documents of Amazon S3 and of those that write the same (MinIO, Ceph), those of
EventBridge, and both wrapped by SNS. Whoever may write to the subject or the queue may write anything: a
document is read up to a size, never raises, and says only where to look.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote_plus

import msgspec

from common.chain import Chain
from common.segments.keys import Layout

MAX_BYTES = 1024 * 1024  # of a document; Amazon's queues take no more, and a notification has 1 KB
MAX_WRAPPINGS = 3  # envelopes around a document: SNS around EventBridge is two

_CREATED = ("ObjectCreated:", "s3:ObjectCreated:")
_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


class Written(NamedTuple):
    """An object that was written, as a notification says. `keys`: it, or what it may be: some encode it."""

    bucket: str
    keys: tuple[str, ...]


def written(raw: bytes) -> list[Written] | None:
    """The objects that the notification `raw` says were written; None for what is no notification.

    Empty for a notification of something else: an object removed, a test of the queue.
    """
    if len(raw) > MAX_BYTES:
        return None
    return _written(raw, MAX_WRAPPINGS)


def chains_in(notice: list[Written], bucket: str, layout: Layout) -> set[Chain]:
    """The chains of which something new was written to `bucket`; none for objects that say nothing new."""
    keys = (key for each in notice if each.bucket == bucket for key in each.keys)
    return {chain for key in keys if (chain := chain_of(key, layout)) is not None}


def chain_of(key: str, layout: Layout) -> Chain | None:
    """The chain that has to be looked at when `key` was written: a segment, a tail, `chain.json`, a gap."""
    name = layout.parse_segment(key)
    if name is not None:
        return name.chain
    folder, is_gap, _ = key.rpartition("/gaps/")
    return layout.parse_tail(key) or layout.parse_chain_document(f"{folder}/chain.json" if is_gap else key)


def _written(raw: bytes | str, wrappings: int) -> list[Written] | None:
    document = _decoded(raw)
    if not isinstance(document, dict):
        return None
    if isinstance(document.get("Records"), list):
        return list(_of_records(document["Records"]))
    if isinstance(document.get("detail"), dict):
        return list(_of_event_bridge(document))
    if document.get("Event") == "s3:TestEvent":
        return []
    if isinstance(document.get("Message"), str) and wrappings:
        return _written(document["Message"], wrappings - 1)
    return None


def _decoded(raw: bytes | str) -> Any:
    """None for what is no JSON."""
    try:
        return _DECODER.decode(raw)
    except (ValueError, RecursionError):
        return None


def _of_records(records: list[Any]) -> Iterator[Written]:
    for record in records:
        if _text(record, "eventName").startswith(_CREATED):
            bucket, key = _text(record, "s3", "bucket", "name"), _text(record, "s3", "object", "key")
            # As in a form: `+` for a space. Some servers write the key as it is.
            yield Written(bucket, (unquote_plus(key), key))


def _of_event_bridge(document: Mapping[str, Any]) -> Iterator[Written]:
    if document.get("detail-type") == "Object Created":
        bucket, key = _text(document, "detail", "bucket", "name"), _text(document, "detail", "object", "key")
        yield Written(bucket, (key,))


def _text(value: Any, *path: str) -> str:
    """The text at `path`; empty where there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""
