"""A parked message as bytes: a line of JSON, then the header block, then the payload.

The bytes follow from the message alone, so a twin that parks it too writes the same ones.
"""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from common.chain import Chain
from common.errors import DataError
from common.segments.keys import DIGEST_LENGTH
from common.segments.segment import Message

VERSION = 1
MAX_LINE = 64 * 1024


def to_bytes(chain: Chain, message: Message) -> bytes:
    """The object of `message`."""
    body = (message.headers or b"") + message.payload
    line = {
        "version": VERSION,
        "chain": str(chain),
        "sequence": message.sequence,
        "timestamp_ns": message.timestamp_ns,
        "subject": base64.b64encode(message.subject).decode(),
        "headers": None if message.headers is None else len(message.headers),
        "payload": len(message.payload),
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    return json.dumps(line, separators=(",", ":")).encode() + b"\n" + body


def digest_of(chain: Chain, message: Message) -> str:
    """16 hex digits over the object of `message`: what a piece names where a segment stands else."""
    return hashlib.sha256(to_bytes(chain, message)).hexdigest()[:DIGEST_LENGTH]


def from_bytes(key: str, raw: bytes, chain: Chain, sequence: int) -> Message:
    """What `to_bytes` wrote. Raises DataError (E-PARKED) where it is not the message that `key` names."""
    first, _, body = raw.partition(b"\n")
    try:
        return _message(json.loads(first[:MAX_LINE]), body, chain, sequence)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{key}: expected a parked message, found something else: {error}",
            hint="put the object back from a copy of the bucket; until then the message cannot be delivered",
            code="E-PARKED",
        ) from error


def _message(line: dict[str, Any], body: bytes, chain: Chain, sequence: int) -> Message:
    found = (line["version"], line["chain"], line["sequence"])
    if found != (VERSION, str(chain), sequence):
        raise ValueError(f"expected version {VERSION}, chain {chain}, sequence {sequence}, found {found}")
    size = line["headers"]
    if (size or 0) + line["payload"] != len(body) or hashlib.sha256(body).hexdigest() != line["sha256"]:
        raise ValueError(f"expected the bytes that were written, found {len(body)} others")
    headers = None if size is None else body[:size]
    subject = base64.b64decode(line["subject"], validate=True)
    return Message(sequence, int(line["timestamp_ns"]), subject, headers, body[size or 0 :])
