"""A model of streams: limits, retention, expected sequences, message ids, time to live, batches."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tests.sim.world import NS, World

if TYPE_CHECKING:
    from tests.sim.consumers import Consumer

LIMITS, INTEREST, WORK_QUEUE = "limits", "interest", "workqueue"
FILE_ROOM, MEMORY_ROOM, HEADER_ROOM = 30, 16, 4  # bytes of a stored message that are counted on top of its own
BATCH_TIMEOUT = 10.0  # seconds without a message until an atomic batch is dropped
DUPLICATES = 120 * NS  # nanoseconds of the duplicate window, if the stream sets none
MOST_FLOW = 100  # messages between two acknowledgements of a fast batch


class ApiRefusal(Exception):
    """An error of the API, with the fields of an answer."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(description)
        self.body = {"code": code, "err_code": err_code, "description": description}


Words = list[bytes]
Draft = tuple[bytes, Mapping[bytes, bytes], bytes | None, bytes]  # subject, headers by name, the block, payload


def matches(pattern: Words, words: Words) -> bool:
    for i, each in enumerate(pattern):
        if each == b">":
            return len(words) > i
        if i >= len(words) or (each != b"*" and each != words[i]):
            return False
    return len(pattern) == len(words)


def patterns_meet(one: Words, other: Words) -> bool:
    """Return true if a subject can match both patterns."""
    for mine, its in zip(one, other, strict=False):
        if b">" in (mine, its):
            return True
        if b"*" not in (mine, its) and mine != its:
            return False
    return len(one) == len(other)


def timestamp(ns: int) -> str:
    seconds, rest = divmod(ns, NS)
    return f"{_second(seconds)}.{rest:09d}Z"


@lru_cache(8)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


@lru_cache(64)
def parse_headers(block: bytes | None) -> Mapping[bytes, bytes]:
    """Return the first value of each header by its lower-case name."""
    found: dict[bytes, bytes] = {}
    for line in (block or b"").split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            found.setdefault(name.strip().lower(), value.strip())
    return found


def time_to_live(value: bytes) -> int:
    """Return the seconds that a message lives by its own header; 0: for ever. Raises ApiRefusal."""
    if value == b"never":
        return 0
    if (seconds := value.removesuffix(b"s")).isdigit():
        return int(seconds)
    raise ApiRefusal(400, 10165, "invalid per-message TTL")


@dataclass(slots=True)
class StoredMessage:
    """A stored message. `size`: as the stream counts it; `expires`: end of its own TTL, ns since 1970, 0: never."""

    sequence: int
    subject: bytes
    headers: bytes | None
    payload: bytes
    time_ns: int
    size: int = 0
    expires: int = 0


@dataclass(slots=True)
class FastState:
    """One fast batch as the server counts it."""

    every: int
    count: int = 0
    is_over: bool = False


@dataclass(slots=True)
class StagedBatch:
    """One atomic batch that is not committed yet."""

    messages: list[Draft] = field(default_factory=list)
    touched: float = 0.0


class StreamTap:
    """An observer of the messages of one stream."""

    def stored(self, message: StoredMessage) -> None:
        """Take a message that was stored, or dropped at once because nobody wants it."""

    def removed(self, message: StoredMessage, why: str) -> None:
        """Take a message that is gone: `limit`, `acknowledged`, `unwanted`, `deleted` or `lost`."""

    def restored(self, message: StoredMessage) -> None:
        """Take a message that a restore stored from an archive."""


class Stream:
    """One stream."""

    def __init__(self, world: World, config: dict[str, Any], tap: StreamTap | None = None) -> None:
        self.world, self.config, self.created, self.tap = world, config, world.time_ns(), tap or StreamTap()
        self.sequences: list[int] = []
        self.messages: dict[int, StoredMessage] = {}
        self.first = self.last = self.last_ns = self.size = 0
        self.by_subject: dict[bytes, list[int]] = {}
        self.consumers: dict[str, Consumer] = {}
        self.batches: dict[bytes, StagedBatch] = {}
        self.fast: dict[bytes, FastState] = {}
        self.ids: dict[bytes, tuple[int, int]] = {}  # by id of a message: sequence and time
        self.last_id = b""
        if (first := config.get("first_seq") or 0) > 1:
            self.first, self.last = first, first - 1
        self.configure(config)

    def configure(self, config: Mapping[str, Any]) -> None:
        """Replace the whole configuration."""
        self.config = dict(config)
        self.patterns = [each.encode().split(b".") for each in self.config.get("subjects", [])]
        self.enforce()

    @property
    def name(self) -> str:
        return str(self.config["name"])

    @property
    def retention(self) -> str:
        return str(self.config.get("retention") or LIMITS)

    def takes(self, words: Words) -> bool:
        return any(matches(each, words) for each in self.patterns)

    # Storing

    def check(self, subject: bytes, headers: Mapping[bytes, bytes], last: int) -> None:
        """Check the publisher's expectations. Raises ApiRefusal if one does not hold."""
        if (name := headers.get(b"nats-expected-stream")) is not None and name.decode() != self.name:
            raise ApiRefusal(400, 10060, "expected stream does not match")
        if (wanted := headers.get(b"nats-expected-last-sequence")) is not None and int(wanted) != last:
            raise ApiRefusal(400, 10071, f"wrong last sequence: {last}")
        if (identity := headers.get(b"nats-expected-last-msg-id")) is not None and identity != self.last_id:
            raise ApiRefusal(400, 10070, f"wrong last msg ID: {self.last_id.decode()}")
        if (wanted := headers.get(b"nats-expected-last-subject-sequence")) is not None:
            newest = self.by_subject.get(subject, [0])[-1]
            if int(wanted) != newest:
                raise ApiRefusal(400, 10071, f"wrong last sequence: {newest}")

    def permit(self, messages: Sequence[Draft]) -> None:
        """Check messages that arrive together. Raises ApiRefusal if the configuration does not allow them."""
        config, size, fresh = self.config, 0, 0
        for subject, named, headers, payload in messages:
            if 0 < (config.get("max_msg_size") or -1) < len(headers or b"") + len(payload):
                raise ApiRefusal(400, 10054, "message size exceeds maximum allowed")
            if (value := named.get(b"nats-ttl")) is not None:
                if not config.get("allow_msg_ttl"):
                    raise ApiRefusal(400, 10166, "per-message TTL is disabled")
                time_to_live(value)
            if (rollup := named.get(b"nats-rollup")) is not None:
                if not config.get("allow_rollup_hdrs"):
                    raise ApiRefusal(500, 10111, "rollup not permitted")
                if rollup not in (b"sub", b"all"):
                    raise ApiRefusal(500, 10111, f'rollup value invalid: "{rollup.decode()}"')
            size, fresh = size + self.size_of(subject, headers, payload), fresh + 1
            if (most := config.get("max_msgs_per_subject") or -1) > 0 and self.is_full_for(subject, most):
                if config.get("discard_new_per_subject"):
                    raise ApiRefusal(503, 10077, "maximum messages per subject exceeded")
                size, fresh = size - self.messages[self.by_subject[subject][0]].size, fresh - 1
        if config.get("discard") == "new" and fresh + (size > 0):
            if 0 < (config.get("max_msgs") or -1) < len(self.sequences) + fresh:
                raise ApiRefusal(503, 10077, "maximum messages exceeded")
            if 0 < (config.get("max_bytes") or -1) < self.size + size:
                raise ApiRefusal(503, 10077, "maximum bytes exceeded")

    def is_full_for(self, subject: bytes, most: int) -> bool:
        return len(self.by_subject.get(subject, ())) >= most

    def size_of(self, subject: bytes, headers: bytes | None, payload: bytes) -> int:
        own = len(subject) + len(headers or b"") + len(payload)
        if self.config.get("storage") == "memory":
            return own + MEMORY_ROOM
        return own + FILE_ROOM + (HEADER_ROOM if headers else 0)

    def known(self, identity: bytes) -> int:
        """Return the sequence of a message with this id in the duplicate window; 0 if there is none."""
        sequence, at = self.ids.get(identity, (0, 0))
        window = self.config.get("duplicate_window") or DUPLICATES
        return sequence if self.world.time_ns() - at < window else 0

    def append(self, subject: bytes, headers: bytes | None, payload: bytes) -> StoredMessage:
        self.last += 1
        self.last_ns = max(self.world.time_ns(), self.last_ns + 1)
        named, size = parse_headers(headers), self.size_of(subject, headers, payload)
        message = StoredMessage(self.last, subject, headers, payload, self.last_ns, size, self._expiry(named))
        self.last_id = named.get(b"nats-msg-id", b"")
        self.world.note(f"{self.name} stores {self.last} {subject.decode('utf-8', 'backslashreplace')}")
        self.tap.stored(message)
        if self.retention == INTEREST and not any(each.wants(message) for each in self.consumers.values()):
            if not self.sequences:
                self.first = self.last + 1
            self.tap.removed(message, "unwanted")
            return message
        self._hold(message)
        self._roll_up(subject, named.get(b"nats-rollup"))
        self._limit_subject(subject)
        self.enforce()
        return message

    def _hold(self, message: StoredMessage) -> None:
        self.messages[message.sequence] = message
        self.sequences.append(message.sequence)
        self.size += message.size
        self.by_subject.setdefault(message.subject, []).append(message.sequence)
        if len(self.sequences) == 1:
            self.first = message.sequence

    def put_back(self, sequence: int, subject: bytes, headers: bytes | None, payload: bytes, time_ns: int) -> None:
        """Store a message of an archive, in ascending order of sequences."""
        self.last, self.last_ns = sequence, time_ns
        size = self.size_of(subject, headers, payload)
        message = StoredMessage(
            sequence, subject, headers, payload, time_ns, size, self._expiry(parse_headers(headers))
        )
        self._hold(message)
        self.tap.restored(message)

    def _roll_up(self, subject: bytes, rollup: bytes | None) -> None:
        for each in [*(self.sequences if rollup == b"all" else self.by_subject[subject] if rollup else ())][:-1]:
            self.remove(each, "deleted")

    def _expiry(self, named: Mapping[bytes, bytes]) -> int:
        if not self.config.get("allow_msg_ttl") or (value := named.get(b"nats-ttl")) is None:
            return 0
        seconds = time_to_live(value)
        return self.last_ns + seconds * NS if seconds else 0

    def _limit_subject(self, subject: bytes) -> None:
        most = self.config.get("max_msgs_per_subject") or -1
        while 0 < most < len(self.by_subject.get(subject, ())):
            self.remove(self.by_subject[subject][0], "limit")

    def enforce(self) -> None:
        """Remove messages beyond the limits."""
        most, size = self.config.get("max_msgs") or -1, self.config.get("max_bytes") or -1
        while self.sequences and (0 < most < len(self.sequences) or 0 < size < self.size):
            self.remove(self.sequences[0], "limit")

    def expire(self) -> None:
        """Remove messages that are too old."""
        now = self.world.time_ns()
        if age := self.config.get("max_age") or 0:
            while self.sequences and self.messages[self.sequences[0]].time_ns <= now - age:
                self.remove(self.sequences[0], "limit")
        if self.config.get("allow_msg_ttl"):
            for each in [m for m in self.messages.values() if 0 < m.expires <= now]:
                self.remove(each.sequence, "limit")

    def remove(self, sequence: int, why: str) -> None:
        message = self.messages.pop(sequence)
        self.sequences.pop(bisect.bisect_left(self.sequences, sequence))
        self.size -= message.size
        same = self.by_subject[message.subject]
        same.remove(sequence)
        if not same:
            del self.by_subject[message.subject]
        self.first = self.sequences[0] if self.sequences else self.last + 1
        self.tap.removed(message, why)

    def lose_tail(self, after: int) -> int:
        """Lose all messages after sequence `after`, as a server that did not sync; return their number."""
        gone = [each for each in self.sequences if each > after]
        for sequence in reversed(gone):
            self.remove(sequence, "lost")
        self.last = min(self.last, after)
        self.first = self.sequences[0] if self.sequences else self.last + 1
        self.ids = {key: of for key, of in self.ids.items() if of[0] <= after}
        for consumer in self.consumers.values():
            consumer.rewind(after)
        return len(gone)

    def drop_batches(self) -> None:
        """Drop batches under way, as a restart or another leader does."""
        self.batches.clear()
        for each in self.fast.values():
            each.is_over = True

    # Interest

    def acknowledged(self, consumer: Consumer, sequences: list[int]) -> None:
        """Remove messages that were kept for the consumer only."""
        if self.retention == LIMITS:
            return
        for sequence in sequences:
            if (message := self.messages.get(sequence)) is None:
                continue
            if self.retention == WORK_QUEUE or not any(each.needs(message) for each in self.consumers.values()):
                self.remove(sequence, "acknowledged")

    def forget_consumer(self, name: str) -> Consumer:
        consumer = self.consumers.pop(name)
        if self.retention == INTEREST:
            for message in [*self.messages.values()]:
                if not any(each.needs(message) for each in self.consumers.values()):
                    self.remove(message.sequence, "unwanted")
        return consumer

    def from_sequence(self, sequence: int) -> Iterator[StoredMessage]:
        """Yield the messages from `sequence` on."""
        for at in self.sequences[bisect.bisect_left(self.sequences, sequence) :]:
            yield self.messages[at]


Answer = Callable[[dict[str, Any]], None]


def publish(
    stream: Stream, subject: bytes, reply: bytes, headers: bytes | None, payload: bytes, answer: Answer
) -> None:
    """Store a message as its headers ask, or refuse it, and answer."""
    stream.expire()
    named, name = parse_headers(headers), stream.name
    try:
        if reply.endswith(b".$FI"):
            _fast(stream, subject, reply, named, headers, payload, answer)
        elif (batch := named.get(b"nats-batch-id")) is not None:
            _atomic(stream, subject, named, headers, payload, batch, answer)
        else:
            if (wanted := named.get(b"nats-expected-last-sequence")) is not None:
                stream.check(subject, {b"nats-expected-last-sequence": wanted}, stream.last)
            if (key := named.get(b"nats-msg-id")) is not None and (before := stream.known(key)):
                answer({"stream": name, "seq": before, "duplicate": True})
                return
            stream.check(subject, named, stream.last)
            stream.permit([(subject, named, headers, payload)])
            message = stream.append(subject, headers, payload)
            if key is not None:
                stream.ids[key] = message.sequence, message.time_ns
            answer({"stream": name, "seq": message.sequence})
    except ApiRefusal as error:
        answer({"error": error.body, "stream": name, "seq": 0})


def _atomic(
    stream: Stream,
    subject: bytes,
    named: Mapping[bytes, bytes],
    headers: bytes | None,
    payload: bytes,
    batch: bytes,
    answer: Answer,
) -> None:
    if not stream.config.get("allow_atomic"):
        raise ApiRefusal(400, 10174, "atomic publish is disabled")
    if (numbered := named.get(b"nats-batch-sequence")) is None:
        raise ApiRefusal(400, 10175, "atomic publish sequence is missing")
    number, now = int(numbered), stream.world.now
    if number == 1:
        stream.batches[batch] = StagedBatch()
    staged = stream.batches.get(batch)
    if staged is None or len(staged.messages) != number - 1 or (number > 1 and now - staged.touched > BATCH_TIMEOUT):
        stream.batches.pop(batch, None)
        raise ApiRefusal(400, 10176, "atomic publish batch is incomplete")
    staged.messages.append((subject, named, headers, payload))
    staged.touched = now
    if named.get(b"nats-batch-commit") != b"1":
        answer({})
        return
    del stream.batches[batch]
    stream.check(staged.messages[0][0], staged.messages[0][1], stream.last)
    stream.permit(staged.messages)
    for each, _, block, body in staged.messages:
        stream.append(each, block, body)
    answer({"stream": stream.name, "seq": stream.last, "batch": batch.decode(), "count": number})


def _fast(
    stream: Stream,
    subject: bytes,
    reply: bytes,
    named: Mapping[bytes, bytes],
    headers: bytes | None,
    payload: bytes,
    answer: Answer,
) -> None:
    if not stream.config.get("allow_batched"):
        raise ApiRefusal(400, 10205, "batch publish is disabled")
    words = reply.split(b".")  # … batch, flow, gap, number, operation, $FI
    batch, flow, number, operation = words[-6], int(words[-5]), int(words[-3]), int(words[-2])
    if number == 1:
        stream.fast[batch] = FastState(max(1, min(flow, MOST_FLOW)))
        answer({"type": "ack", "seq": 0, "msgs": stream.fast[batch].every})
    state = stream.fast.get(batch)
    if state is None or state.is_over:
        raise ApiRefusal(400, 10208, "batch publish ID unknown")
    if state.count != number - 1:
        state.is_over = True
        answer({"type": "gap", "last_seq": state.count + 1, "seq": number})
        answer({"stream": stream.name, "seq": stream.last, "batch": batch.decode(), "count": state.count})
        return
    try:
        stream.check(subject, named, stream.last)
        stream.permit([(subject, named, headers, payload)])
    except ApiRefusal as error:
        state.is_over = True
        if not state.count:
            raise
        answer({"type": "err", "seq": number, "error": error.body})
        answer({"stream": stream.name, "seq": stream.last, "batch": batch.decode(), "count": state.count})
        return
    stream.append(subject, headers, payload)
    state.count = number
    if operation == 2:
        state.is_over = True
        answer({"stream": stream.name, "seq": stream.last, "batch": batch.decode(), "count": number})
    elif number % state.every == 0:
        answer({"type": "ack", "seq": number, "msgs": state.every})
