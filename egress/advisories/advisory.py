"""Advisories in the format of stream-replicator: JSON, id, subject, message; and the check for advisory loops."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from common.chain import Chain
from common.clock import NS_PER_S
from common.errors import Stopped
from common.nats.api import StreamInfo, stream_info
from common.nats.client import FloeClient
from common.settings.egress import FeedSettings
from common.settings.types import EVENT_PLACEHOLDER, MAX_VALUE_BYTES, VALUE_PLACEHOLDER
from common.subjects import overlaps
from egress.partition import Partition


class AdvisoryEvent(StrEnum):
    """The events of a value, named as stream-replicator names them."""

    NEW = "new"
    TIMEOUT = "timeout"
    RECOVER = "recover"
    EXPIRE = "expire"


@dataclass(frozen=True, slots=True)
class Advisory:
    """One event of one value. All fields follow from the messages, so every instance finds the same advisories.

    `seen_ns`: the time at which the value was last seen, by message time: for NEW that of the message itself, for the
    others that of the message before the silence. `event_time_ns`: the time of the event: for NEW and RECOVER that of
    the message, for TIMEOUT `seen_ns` plus `warn_duration`, for EXPIRE `seen_ns` plus `inspect_duration`. Nanoseconds
    since 1970.
    """

    event: AdvisoryEvent
    value: str
    seen_ns: int
    event_time_ns: int


PROTOCOL = "io.choria.sr.v2.age_advisory"
KSUID_EPOCH = 1_400_000_000  # seconds since 1970, as its authors chose
KSUID_LENGTH = 27
MAX_KSUID_SECONDS = 2**32 - 1
BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class AdvisoryDocument(msgspec.Struct, frozen=True):
    """The published JSON document, with its keys in stream-replicator's order.

    `age`: seconds between `seen` and the event; Floe writes whole seconds. `seen`, `timestamp`: seconds since 1970.
    `replicator`: the site.
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
        """Return one line of UTF-8; code points that are not characters are escaped."""
        try:
            return _ENCODER.encode(self)
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can carry and UTF-8 cannot
            value = self.value.encode("utf-8", "backslashreplace").decode()
            return _ENCODER.encode(msgspec.structs.replace(self, value=value))


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(AdvisoryDocument)


def parse_advisory(payload: bytes) -> AdvisoryDocument | None:
    """Return the advisory in `payload`, Floe's or stream-replicator's; None for anything else."""
    try:
        document = _DECODER.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return document if document.protocol == PROTOCOL else None


def build_document(chain: Chain, inspect_field: str, advisory: Advisory) -> AdvisoryDocument:
    age_ns = max(0, advisory.event_time_ns - advisory.seen_ns)
    return AdvisoryDocument(
        protocol=PROTOCOL,
        event_id=event_id(chain, advisory),
        inspect_field=inspect_field,
        age=(age_ns + NS_PER_S // 2) // NS_PER_S,
        seen=advisory.seen_ns // NS_PER_S,
        replicator=chain.site,
        timestamp=advisory.event_time_ns // NS_PER_S,
        event=advisory.event.value,
        value=advisory.value,
    )


def key_name(feed: FeedSettings) -> str:
    """Return the name of the feed's sample key for documents: the JSON path, the header, `subject` or `subject.N`."""
    if feed.inspect_field or feed.inspect_header:
        return feed.inspect_field or feed.inspect_header
    token = feed.inspect_subject_token
    return f"subject.{token}" if token > 0 else "subject"


def event_id(chain: Chain, advisory: Advisory) -> str:
    """Return a KSUID: ids sort by the second of their event, and the other 16 bytes identify the advisory."""
    of_chain = (chain.site, chain.feed, chain.incarnation, chain.partition)
    of_event = (advisory.event.value, advisory.value, advisory.seen_ns, advisory.event_time_ns)
    digest = hashlib.sha256()
    for each in (*of_chain, *of_event):
        raw = str(each).encode("utf-8", "surrogatepass")
        # With the length, so that different lists of parts never give the same bytes.
        digest.update(b"%d:%b" % (len(raw), raw))
    return encode_ksuid(advisory.event_time_ns // NS_PER_S, digest.digest()[:16])


def encode_ksuid(seconds: int, payload: bytes) -> str:
    """Return the KSUID of a time (seconds since 1970, clamped to the four bytes of a KSUID) and 16 bytes."""
    since = min(max(0, seconds - KSUID_EPOCH), MAX_KSUID_SECONDS)
    number = int.from_bytes(since.to_bytes(4, "big") + payload, "big")
    digits = []
    for _ in range(KSUID_LENGTH):
        number, digit = divmod(number, 62)
        digits.append(BASE62[digit])
    return "".join(reversed(digits))


HASH_DIGITS = 32  # at the end, after a ~, of a value that was cut to MAX_VALUE

# Spaces of all kinds, control characters, wildcards, half surrogates; dots that would make an empty token.
_UNSAFE = re.compile(r"[\s\x00-\x20\x7f-\x9f*>%\ud800-\udfff]|^\.|\.$|(?<=\.)\.")
_PLACEHOLDERS = re.compile("%[sv]")
_COMPLETE_ESCAPES = re.compile(rb"(?:%[0-9A-F]{2}|[^%])*")


def subject_tokens(value: str) -> str:
    """Return `value` as tokens of a subject: never empty, no dot at either end, at most `MAX_VALUE_BYTES` bytes."""
    text = _UNSAFE.sub(_escape, value) or "%"
    raw = text.encode()
    if len(raw) <= MAX_VALUE_BYTES:
        return text
    digest = hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()[:HASH_DIGITS]
    room = raw[: MAX_VALUE_BYTES - HASH_DIGITS - 1]
    complete = _COMPLETE_ESCAPES.match(room)
    assert complete is not None
    return f"{complete[0].decode('utf-8', 'ignore')}~{digest}"


def _escape(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))


def advisory_subject(template: str, advisory: Advisory) -> str:
    replacements = {EVENT_PLACEHOLDER: advisory.event.value, VALUE_PLACEHOLDER: subject_tokens(advisory.value)}
    # Both in one pass: placeholders inside a value are not replaced.
    return _PLACEHOLDERS.sub(lambda match: replacements[match[0]], template)


def subject_filter(template: str) -> str:
    tokens: list[str] = []
    for token in template.split("."):
        if VALUE_PLACEHOLDER in token:
            return ".".join([*tokens, ">"])
        tokens.append("*" if EVENT_PLACEHOLDER in token else token)
    return ".".join(tokens)


def find_loop(template: str, subjects: Sequence[str], filter_subject: str) -> tuple[str, str] | None:
    """Return an advisory subject and a subject of the stream that can be the same, as filters; None if none can. Pure.

    `subjects`: those that the stream stores. `filter_subject`: those that are read; empty: all.
    """
    published = [subject_filter(template.replace(EVENT_PLACEHOLDER, event.value)) for event in AdvisoryEvent]
    # Three filters that overlap pairwise have a subject in common.
    read = [subject for subject in subjects if overlaps(subject, filter_subject)]
    for each in dict.fromkeys(published):
        for subject in read:
            if overlaps(each, subject) and overlaps(each, filter_subject):
                return each, subject
    return None


def loop_error(partition: Partition, chain: Chain, info: StreamInfo) -> Stopped | None:
    """Return an error if the advisories of `chain` would come back as messages of `partition`; None: no loop."""
    template = partition.settings.advisory.subject
    found = find_loop(template, info.config.get("subjects") or (), partition.filter_subject) if template else None
    if found is None:
        return None
    published, subject = found
    read = f"{subject}, of which {partition.filter_subject} is read" if partition.filter_subject else subject
    return Stopped(
        f"{chain}: advisories on {published} would be messages of stream {info.name} itself ({read}), "
        "and each would lead to others",
        hint="set another advisory.subject, which that stream does not take, or a filter_subject that excludes "
        f"{subject_filter(template)}",
        code="E-ADVISORY-LOOP",
    )


def raise_if_loop(partition: Partition, chain: Chain, info: StreamInfo) -> None:
    """Raise Stopped if there is a loop."""
    if (loop := loop_error(partition, chain, info)) is not None:
        raise loop


async def check_loop(partition: Partition, chain: Chain, client: FloeClient) -> None:
    info = await stream_info(client, partition.stream) if partition.settings.advisory.subject else None
    if info is not None:
        raise_if_loop(partition, chain, info)
