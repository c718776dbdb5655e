"""The JSON of an advisory, as stream-replicator publishes it, and the id that follows from its content."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

from common.chain import Chain
from common.clock import NS_PER_S
from common.settings.egress import FeedSettings
from egress.advisories.event import Advisory

PROTOCOL = "io.choria.sr.v2.age_advisory"
KSUID_EPOCH = 1_400_000_000  # seconds since 1970, as its authors chose
KSUID_LENGTH = 27
MAX_KSUID_SECONDS = 2**32 - 1
BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class Document(msgspec.Struct, frozen=True):
    """What is published, key by key in stream-replicator's order.

    `age`: seconds between `seen` and the moment of the event, whole ones where Floe wrote it. `seen`,
    `timestamp`: seconds since 1970. `replicator`: the site.
    """

    protocol: str
    event_id: str
    inspect_field: str
    age: int | float
    seen: int
    replicator: str
    timestamp: int
    event: str
    value: str

    def to_json(self) -> bytes:
        """One line of UTF-8; what is no character travels escaped."""
        try:
            return _ENCODER.encode(self)
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can carry and UTF-8 cannot
            return _ENCODER.encode(msgspec.structs.replace(self, value=_as_utf8(self.value).decode()))


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Document)


def parse(payload: bytes) -> Document | None:
    """The advisory that `payload` is, Floe's or stream-replicator's; None for anything else."""
    try:
        document = _DECODER.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return document if document.protocol == PROTOCOL else None


@dataclass(frozen=True, slots=True)
class Writer:
    """Makes the documents of one chain."""

    chain: Chain
    inspect_field: str

    def document(self, advisory: Advisory) -> Document:
        """The same for the same advisory, whoever finds it and whenever."""
        age_ns = max(0, advisory.moment_ns - advisory.seen_ns)
        return Document(
            protocol=PROTOCOL,
            event_id=event_id(self.chain, advisory),
            inspect_field=self.inspect_field,
            age=(age_ns + NS_PER_S // 2) // NS_PER_S,
            seen=advisory.seen_ns // NS_PER_S,
            replicator=self.chain.site,
            timestamp=advisory.moment_ns // NS_PER_S,
            event=advisory.event.value,
            value=advisory.value,
        )


def inspect_field(feed: FeedSettings) -> str:
    """What the feed is sampled by, as documents name it: the JSON path, the header, or `subject` or
    `subject.N`.
    """
    if feed.inspect_field or feed.inspect_header:
        return feed.inspect_field or feed.inspect_header
    token = feed.inspect_subject_token
    return f"subject.{token}" if token > 0 else "subject"


def event_id(chain: Chain, advisory: Advisory) -> str:
    """A KSUID: ids sort by the second of their moment, and the rest says which advisory it is."""
    parts = (
        chain.site,
        chain.feed,
        str(chain.incarnation),
        str(chain.partition),
        advisory.event.value,
        advisory.value,
        str(advisory.seen_ns),
        str(advisory.moment_ns),
    )
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        # With its length, so that no two lists of parts give the same bytes.
        digest.update(b"%d:%b" % (len(raw), raw))
    return ksuid(advisory.moment_ns // NS_PER_S, digest.digest()[:16])


def ksuid(seconds: int, payload: bytes) -> str:
    """The KSUID of a time (since 1970, cut to what four bytes hold) and 16 bytes."""
    since = min(max(0, seconds - KSUID_EPOCH), MAX_KSUID_SECONDS)
    number = int.from_bytes(since.to_bytes(4, "big") + payload, "big")
    digits = []
    for _ in range(KSUID_LENGTH):
        number, digit = divmod(number, 62)
        digits.append(BASE62[digit])
    return "".join(reversed(digits))


def _as_utf8(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")
