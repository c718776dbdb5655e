"""Store of a target's parked messages in the object store; blocking, safe to call from several threads.

Ingress may put and get objects under `_floe/ingress/{target}/` and deletes none. A request by an operator is written
there with the operator's own credentials.
"""

import base64
import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from common.archive.documents import Document
from common.archive.keys import Layout, decode, encode
from common.archive.segment import Message
from common.chain import Chain
from common.errors import DataError
from common.failpoints import failpoint
from common.logs import get_logger
from common.objects.port import ObjectInfo, ObjectStore
from common.sequences import MAX_SEQUENCE
from ingress import metrics
from ingress.checkpoint import ParkedNames, TargetState
from ingress.rows.decoder import MAX_DECODED_BYTES
from ingress.rows.prepare import Oversize

log = get_logger(__name__)


_KEY = re.compile(
    r"(?P<created>[^/]+)/(?P<site>[^/]+)/(?P<feed>[^/]+)/(?P<incarnation>[0-9]{4})"
    r"/(?P<partition>0|[1-9][0-9]{0,4})/(?P<sequence>[0-9]{20})"
    r"/(?P<what>message|left_out|delivered|(?P<turn>asked|answered)-(?P<number>[0-9]{4}))"
)


class ParkedState(StrEnum):
    """The state of a parked message, as its objects show it."""

    PENDING = "pending"  # stored, but its chain has not passed it: it may still be delivered in turn
    PARKED = "parked"
    REQUESTED = "asked for"
    DELIVERED = "delivered"


@dataclass(frozen=True, slots=True, order=True)
class ParkedName:
    """Identity of a parked message: its chain and sequence, for the target stream of time `created`."""

    chain: Chain
    sequence: int
    created: str


@dataclass(slots=True)
class ParkedEntry:
    """The objects of one parked message in a listing. `size`, `since` (seconds since 1970): of the message's object;
    `asked`: number of the last request by an operator; `answered`: number of the last request that was answered.
    """

    name: ParkedName
    size: int = 0
    since: float = 0.0
    has_message: bool = False
    is_passed: bool = False
    is_delivered: bool = False
    asked: int = 0
    answered: int = 0

    @property
    def state(self) -> ParkedState:
        if self.is_delivered:
            return ParkedState.DELIVERED
        if not self.is_passed:
            return ParkedState.PENDING
        return ParkedState.REQUESTED if self.asked > self.answered else ParkedState.PARKED


@dataclass(frozen=True, slots=True)
class ParkedKeys:
    """The keys of one target's parked messages."""

    layout: Layout
    target: str

    @property
    def prefix(self) -> str:
        return f"{self.layout.ingress_prefix(self.target)}parked/"

    def created_prefix(self, created: str) -> str:
        return f"{self.prefix}{encode(created)}/"

    @property
    def request_marker(self) -> str:
        return f"{self.prefix}retry-requested"

    def folder(self, name: ParkedName) -> str:
        chain = name.chain
        parts = f"{encode(chain.site)}/{encode(chain.feed)}/{chain.incarnation:04d}/{chain.partition}"
        return f"{self.created_prefix(name.created)}{parts}/{name.sequence:020d}/"

    def key(self, name: ParkedName, part: str, number: int | None = None) -> str:
        """Return the key of an object. `part`: message, left_out, delivered; asked and answered have a `number`."""
        return f"{self.folder(name)}{part}" + ("" if number is None else f"-{number:04d}")

    def parse_entries(self, listing: Iterable[ObjectInfo]) -> dict[ParkedName, ParkedEntry]:
        found: dict[ParkedName, ParkedEntry] = {}
        for info in listing:
            match = _KEY.fullmatch(info.key.removeprefix(self.prefix))
            name = match and _name(match)
            if match and name:
                _note(found.setdefault(name, ParkedEntry(name)), match, info)
        return dict(sorted(found.items()))


def _note(entry: ParkedEntry, match: re.Match[str], info: ObjectInfo) -> None:
    if match["what"] == "message":
        entry.has_message, entry.size, entry.since = True, info.size, info.modified
    elif match["what"] == "left_out":
        entry.is_passed = True
    elif match["what"] == "delivered":
        entry.is_delivered = True
    else:
        setattr(entry, match["turn"], max(int(match["number"]), getattr(entry, match["turn"])))


def _name(match: re.Match[str]) -> ParkedName | None:
    site, feed, created = (decode(match[part]) for part in ("site", "feed", "created"))
    sequence = int(match["sequence"])
    if site is None or feed is None or created is None or not 1 <= sequence <= MAX_SEQUENCE:
        return None
    try:
        chain = Chain(site, feed, int(match["incarnation"]), int(match["partition"]))
    except ValueError:
        return None
    return ParkedName(chain, sequence, created)


def count_waiting(entries: Mapping[ParkedName, ParkedEntry]) -> int:
    return sum(entry.state in (ParkedState.PARKED, ParkedState.REQUESTED) for entry in entries.values())


PARKED_VERSION = 1
MAX_HEADER_LINE_BYTES = 64 * 1024
MAX_PARKED_BYTES = MAX_DECODED_BYTES + MAX_HEADER_LINE_BYTES  # a message is decoded before it is parked


def to_bytes(chain: Chain, message: Message) -> bytes:
    body = (message.headers or b"") + message.payload
    line = {
        "version": PARKED_VERSION,
        "chain": str(chain),
        "sequence": message.sequence,
        "timestamp_ns": message.timestamp_ns,
        "subject": base64.b64encode(message.subject).decode(),
        "headers": None if message.headers is None else len(message.headers),
        "payload": len(message.payload),
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    return json.dumps(line, separators=(",", ":")).encode() + b"\n" + body


def from_bytes(key: str, raw: bytes, chain: Chain, sequence: int) -> Message:
    """Parse an object. Raises DataError (E-PARKED) if it does not hold the message that `key` names."""
    first, _, body = raw.partition(b"\n")
    try:
        return _message(json.loads(first[:MAX_HEADER_LINE_BYTES]), body, chain, sequence)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{key}: expected a parked message, found something else: {error}",
            hint="put the object back from a copy of the bucket; until then the message cannot be delivered",
            code="E-PARKED",
        ) from error


def _message(line: dict[str, Any], body: bytes, chain: Chain, sequence: int) -> Message:
    found = (line["version"], line["chain"], line["sequence"])
    if found != (PARKED_VERSION, str(chain), sequence):
        raise ValueError(f"expected version {PARKED_VERSION}, chain {chain}, sequence {sequence}, found {found}")
    size = line["headers"]
    if (size or 0) + line["payload"] != len(body) or hashlib.sha256(body).hexdigest() != line["sha256"]:
        raise ValueError(f"expected the bytes that were written, found {len(body)} different ones")
    headers = None if size is None else body[:size]
    subject = base64.b64decode(line["subject"], validate=True)
    return Message(sequence, int(line["timestamp_ns"]), subject, headers, body[size or 0 :])


class ParkedStore:
    """The parked messages of `target`, under the names in its present state. Every method raises as the store does.

    `names` is set again whenever another state is adopted.
    """

    def __init__(self, objects: ObjectStore, layout: Layout, target: str, names: ParkedNames | str) -> None:
        self.target = target
        self.names = ParkedNames(names) if isinstance(names, str) else names
        self.keys, self._objects = ParkedKeys(layout, target), objects

    def adopt_state(self, state: TargetState) -> None:
        self.names = state.checkpoint.parked_names

    # Parking

    def park(self, chain: Chain, oversize: Oversize) -> None:
        """Store a message durably and read it back. The same message may be put several times."""
        message = oversize.message
        document, body = self._document(self.name(chain, message.sequence), "message"), to_bytes(chain, message)
        if document.holds(body):
            return
        failpoint("ingress.before_park")
        document.put(body, {"why": oversize.reason})
        failpoint("ingress.after_park")
        metrics.parked_messages.labels(self.target).inc()
        context = {"target": self.target, "sequence": message.sequence, "error": oversize.reason}
        log.warning("message parked", action="message_parked", **context, **chain.log_context())

    def name(self, chain: Chain, sequence: int) -> ParkedName:
        return ParkedName(chain, sequence, self.names.name_for(chain, sequence))

    # Marks

    def mark_left_out(self, name: ParkedName) -> None:
        self._document(name, "left_out").put(b"{}")

    def mark_delivered(self, name: ParkedName) -> None:
        """Mark the message as delivered: after its intent's rows are stored, before the intent is closed."""
        self._document(name, "delivered").put(b"{}")

    def refuse_retry(self, entry: ParkedEntry, reason: str) -> None:
        body = json.dumps({"why": reason}).encode()
        self._document(entry.name, "answered", entry.asked).replace(body)

    def request_retry(self, *entries: ParkedEntry) -> None:
        for entry in entries:
            self._document(entry.name, "asked", entry.answered + 1).put(b"{}")
        # After the requests: a reader that finds the new marker also finds them.
        self._objects.put(self.keys.request_marker, secrets.token_hex(16).encode())

    def request_etag(self) -> str:
        """Return the ETag of the request marker, which changes with each request; empty if there was none."""
        info = self._objects.head(self.keys.request_marker)
        return "" if info is None else info.etag

    def may_be_delivered(self, name: ParkedName) -> bool:
        """True if its chain has passed without the message, and it was not delivered since.

        Both marks are written before the state moves, so the answer holds for the state that was loaded before the
        call.
        """
        head = self._objects.head
        return head(self.keys.key(name, "left_out")) is not None and head(self.keys.key(name, "delivered")) is None

    # Reading

    def list_entries(self, *, all_targets: bool = False) -> dict[ParkedName, ParkedEntry]:
        """Return all parked messages that count now; `all_targets`: also those of earlier streams of the same name."""
        if all_targets:
            return self.keys.parse_entries(self._objects.list(self.keys.prefix))
        found: dict[ParkedName, ParkedEntry] = {}
        for name in self.names.all_names():
            found |= self.keys.parse_entries(self._objects.list(self.keys.created_prefix(name)))
        return {name: found[name] for name in sorted(found) if name == self.name(name.chain, name.sequence)}

    def read_entry(self, name: ParkedName) -> ParkedEntry:
        return self.keys.parse_entries(self._objects.list(self.keys.folder(name))).get(name, ParkedEntry(name))

    def read(self, name: ParkedName) -> Message | None:
        """Read a message; None if it is not there. Raises DataError (E-PARKED) if it is damaged."""
        document = self._document(name, "message")
        raw = document.read()
        return None if raw is None else from_bytes(document.key, raw, name.chain, name.sequence)

    def read_reason(self, entry: ParkedEntry) -> str:
        if entry.answered:
            raw = self._objects.get(self.keys.key(entry.name, "answered", entry.answered), length=MAX_HEADER_LINE_BYTES)
            try:
                return str(json.loads(raw or b"{}").get("why", ""))
            except (ValueError, AttributeError):
                return ""
        info = self._objects.head(self.keys.key(entry.name, "message"))
        return "" if info is None else info.metadata.get("why", "")

    def _document(self, name: ParkedName, part: str, number: int | None = None) -> Document[bytes]:
        return Document(self._objects, self.keys.key(name, part, number), bytes, bytes, max_bytes=MAX_PARKED_BYTES)
