"""Publishers of many messages to a stream: one counts the acknowledgement of each, one makes awkward messages with it.

Every message carries a reply subject of its own, so acknowledgements are counted exactly and in any order. The number
in flight is bounded: a server that falls behind slows the publisher instead of dropping messages.

The awkward messages are the same again for the same random source. Each kind is a message that nats-server 2.15 stores
and that a careless copier loses, repeats, alters, or makes act a second time; it is a function from `Context` to
`AwkwardMessage`. Kinds in `REQUIRED_SETTINGS` are stored only by a stream with that setting. The stream also gets the
same message id far apart, sequences deleted after they were stored, and a few subjects repeatedly, so that a limit per
subject leaves holes.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from common.clock import NS_PER_S, Clock, SystemClock
from common.errors import ConfigError, Unavailable
from common.nats.api import StreamInfo, stream_info
from common.nats.client import ApiError, FloeClient, RawSubscription, frame
from common.nats.headers import build_block
from common.nats.pull import get_message
from common.tasks import wait_for

MAX_UNACKED = 4096  # messages in flight
ACK_TIMEOUT_S = 10.0  # seconds without any acknowledgement until those in flight count as unknown
FLUSH_BYTES = 256 * 1024  # bytes queued between two waits for the socket

Frame = Callable[[bytes, bytes, bytes | None, bytes | None], bytes]
OnStored = Callable[[int, int], None]  # number of the message (0 is the first published), its sequence


@dataclass(slots=True)
class PublishCounts:
    """The outcomes of the messages. `unknown`: neither acknowledged nor refused in time."""

    sent: int = 0
    stored: int = 0
    duplicates: int = 0
    unknown: int = 0
    bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def summary(self) -> str:
        refused = "".join(f"; refused {count}: {reason}" for reason, count in self.refused.most_common(3))
        more = f", {self.duplicates} duplicates" * bool(self.duplicates) + f", {self.unknown} unknown" * bool(
            self.unknown
        )
        return f"{self.sent:,} sent, {self.stored:,} stored{more}{refused}"


class AckedPublisher:
    """The publisher. Use `async with AckedPublisher(client) as publisher`; the exit waits for messages in flight.

    `published`: set it before the first message to counts that several publishers share.
    """

    def __init__(self, client: FloeClient, *, window: int = MAX_UNACKED, on_stored: OnStored | None = None) -> None:
        self.published = PublishCounts()
        self._client, self._window, self._on_stored = client, window, on_stored
        self._inbox = client.new_inbox().encode() + b"."
        self._in_flight: set[int] = set()
        self._queued = 0
        self._progress = asyncio.Event()
        self._subscription: RawSubscription | None = None

    async def __aenter__(self) -> AckedPublisher:
        self._subscription = await self._client.subscribe_raw(self._inbox.decode() + "*", self._on_ack)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            await self.wait_for_acks()
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    async def publish(
        self, subject: bytes, payload: bytes, headers: bytes | None = None, *, build_frame: Frame = frame
    ) -> int:
        """Send one message when there is room; return its number. Raises the errors of `build_frame` (ValueError)."""
        number = self.published.sent
        data = build_frame(subject, payload, headers, self._inbox + b"%d" % number)
        while len(self._in_flight) >= self._window:
            await self._wait_for_ack()
        await self._send(data)
        self._in_flight.add(number)
        self.published.sent += 1
        self.published.bytes += len(payload) + len(headers or b"")
        self._queued += len(data)
        if self._queued >= FLUSH_BYTES:
            await self.flush()
        return number

    async def flush(self) -> None:
        """Write the queued bytes to the socket. Raises Unavailable if the connection stays lost."""
        self._queued = 0
        try:
            await self._client.flush_writes()
        except Unavailable:
            await self._wait_for_reconnect()

    async def wait_for_acks(self) -> PublishCounts:
        await self.flush()
        while self._in_flight:
            await self._wait_for_ack()
        return self.published

    async def _send(self, data: bytes) -> None:
        try:
            self._client.send(data)
        except Unavailable:
            await self._wait_for_reconnect()
            self._client.send(data)

    async def _wait_for_reconnect(self) -> None:
        """Count the messages in flight as unknown, and wait for the connection. Raises Unavailable if it stays lost."""
        self._mark_unknown()
        if not await self._client.wait_up(ACK_TIMEOUT_S):
            raise Unavailable(f"the NATS connection was lost and not restored within {ACK_TIMEOUT_S:g} s")

    async def _wait_for_ack(self) -> None:
        await self.flush()
        self._progress.clear()
        if self._in_flight and not await wait_for(self._progress, ACK_TIMEOUT_S):
            self._mark_unknown()

    def _mark_unknown(self) -> None:
        self.published.unknown += len(self._in_flight)
        self._in_flight.clear()

    def _on_ack(self, subject: bytes, _reply: bytes, payload: bytes, _headers: bytes | None) -> None:
        number = int(subject[len(self._inbox) :])
        if number not in self._in_flight:  # already counted as unknown
            return
        self._in_flight.remove(number)
        self._progress.set()
        ack = json.loads(payload) if payload else {}
        if "error" in ack:
            self.published.refused[ack["error"].get("description", "without a reason")] += 1
        elif "seq" not in ack:
            self.published.refused["no stream has this subject"] += 1
        elif ack.get("duplicate"):
            self.published.duplicates += 1
        else:
            self.published.stored += 1
            if self._on_stored:
                self._on_stored(number, ack["seq"])


MAX_HEADERS = 65_535  # bytes of a header block; nats-server refuses more, even if max_payload is greater
LONG_VALUE = 32 * 1024  # leaves room for the provenance line below MAX_HEADERS


@dataclass(frozen=True, slots=True)
class AwkwardMessage:
    """A message to publish; `headers` is the raw block, None for none."""

    kind: str
    subject: bytes
    headers: bytes | None
    payload: bytes


@dataclass(frozen=True, slots=True)
class Context:
    """The input of a kind. `number`: the index of the message, unique among all."""

    root: bytes
    stream: bytes
    number: int
    max_payload: int
    rng: random.Random

    def text(self) -> bytes:
        return b'{"number":%d,"noise":"%s"}' % (self.number, self.rng.randbytes(8).hex().encode())

    def subject(self, *tokens: bytes) -> bytes:
        return b".".join((self.root, *tokens))


def unchecked_frame(subject: bytes, payload: bytes, headers: bytes | None = None, reply: bytes | None = None) -> bytes:
    """Return the same as `frame`, with any `headers`: other clients do not check them either."""
    if headers is None:
        return frame(subject, payload, None, reply)
    size = len(headers)
    words = subject + b" " + reply if reply else subject
    return b"HPUB %b %d %d\r\n%b%b\r\n" % (words, size, size + len(payload), headers, payload)


Kind = Callable[[Context], AwkwardMessage]
KINDS: dict[str, Kind] = {}
RARE_KINDS: set[str] = set()  # large ones: once in several rounds
REQUIRED_SETTINGS: dict[str, str] = {}  # the stream setting without which the server refuses the kind


def _add_kind(name: str, make: Callable[[Context], tuple[bytes, bytes | None, bytes]]) -> None:
    def kind(context: Context) -> AwkwardMessage:
        return AwkwardMessage(name, *make(context))

    KINDS[name] = kind


def _add_headers(name: str, *lines: bytes, payload: bytes | None = None, needs: str = "") -> None:
    """Add a kind made of header lines. In them `%d` is the message's number, `%s` the stream's name, `%r` the root."""

    def make(context: Context) -> tuple[bytes, bytes | None, bytes]:
        values = {b"%d": b"%d" % context.number, b"%s": context.stream, b"%r": context.root}
        filled = []
        for line in lines:
            for mark, value in values.items():
                line = line.replace(mark, value)
            filled.append(line)
        body = context.text() if payload is None else payload
        return context.subject(b"headers", name.encode(), b"%d" % context.number), build_block(filled), body

    _add_kind(name, make)
    if needs:
        REQUIRED_SETTINGS[name] = needs


def _add_block(name: str, headers: bytes) -> None:
    _add_kind(name, lambda context: (context.subject(b"blocks"), headers, context.text()))


def _add_subject(name: str, *tokens: bytes) -> None:
    _add_kind(name, lambda context: (context.subject(*tokens), None, context.text()))


# Payloads
_add_kind("no_headers", lambda c: (c.subject(b"plain"), None, c.text()))
_add_kind("nothing_at_all", lambda c: (c.subject(b"plain"), None, b""))
_add_kind("empty_block", lambda c: (c.subject(b"plain"), build_block([]), c.text()))
_add_kind("empty_block_and_payload", lambda c: (c.subject(b"plain"), build_block([]), b""))
_add_kind("binary_payload", lambda c: (c.subject(b"plain"), None, c.rng.randbytes(c.rng.randint(1, 512))))
_add_kind(
    "protocol_payload", lambda c: (c.subject(b"plain"), build_block([b"A: 1"]), b"\r\nPUB x 1\r\ny\r\n-ERR 'z'\r\n")
)
_add_kind("maximal_payload", lambda c: (c.subject(b"large"), None, c.rng.randbytes(c.max_payload)))
_add_kind("maximal_with_headers", lambda c: _maximal_with_headers(c))
RARE_KINDS |= {"maximal_payload", "maximal_with_headers"}

# Header blocks
_add_headers("headers_only", b"A: %d", payload=b"")
_add_headers("repeated", b"A: 1", b"B: x", b"A: 2", b"A: 1")
_add_headers("mixed_case", b"Key: 1", b"KEY: 2", b"key: 3")
_add_headers("empty_values", b"A:", b"B: ", b"C:   ", payload=b"")
_add_headers("spaces", b"A:  before", b"B: after  ", b"C:\ttab\t", b"D:none", b"E: a: b:c")
_add_headers("binary_values", b"A: \xff\xfe\xfd", b"B: caf\xe9", b"C: \x00\x01\x7f", b"D: \xc3\xa9\xe2\x82\xac")
_add_headers("odd_names", b"with space: 1", b"caf\xc3\xa9: 2", b"\xff: 3", b": no name", b"$%&: 4")
_add_headers("long_value", b"A: " + b"v" * LONG_VALUE)
_add_headers("many", *[b"K%d: v" % i for i in range(1000)])
_add_headers("traced", b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
RARE_KINDS |= {"long_value", "many"}

# Invalid blocks, of clients that build their own; the server stores any content of the announced length
_add_block("block_without_end", b"NATS/1.0\r\nA: 1\r\n")
_add_block("block_without_lines", b"NATS/1.0")
_add_block("block_of_another_protocol", b"HTTP/1.1 200 OK\r\nNats-Marker-Reason: x\r\n\r\n")
_add_block("block_with_empty_line", b"NATS/1.0\r\nA: 1\r\n\r\nB: 2\r\n\r\n")
_add_block("block_with_lone_line_feed", b"NATS/1.0\r\nA: 1\nNats-Rollup: all\r\n\r\n")
_add_block("block_with_lone_return", b"NATS/1.0\r\nA: 1\rB: 2\r\n\r\n")
_add_block("block_without_colon", b"NATS/1.0\r\nNats-Rollup\r\nA\r\n\r\n")

# Subjects
_add_subject("subject_not_utf8", b"\xff\xfe\x80")
_add_subject("subject_latin1", b"caf\xe9")
_add_subject("subject_utf8", "žluťoučký.✓".encode())
_add_subject("subject_control", b"\x01\x7f")
_add_subject("subject_long", b"x" * 2000)
_add_subject("subject_deep", *[b"t"] * 100)
_add_subject("subject_dollar", b"$JS", b"API", b"INFO")
_add_subject("subject_star_token", b"*")  # stored; in a message's subject it is not a wildcard
_add_subject("subject_full_wildcard", b">")
_add_subject("subject_star_inside", b"a*b>c")
_add_kind("few_subjects", lambda c: (c.subject(b"limited", b"%d" % c.rng.randrange(3)), None, c.text()))

# Headers that a JetStream server obeys: stored once, they must not act again anywhere
_add_headers("msg_id", b"Nats-Msg-Id: %r-%d")
_add_headers("msg_id_lower", b"nats-msg-id: fixed")
_add_headers("msg_id_long", b"Nats-Msg-Id: %d" + b"i" * 10_000)
_add_headers("msg_id_twice", b"Nats-Msg-Id: %r-a%d", b"Nats-Msg-Id: fixed")
_add_kind("msg_id_again", lambda c: _msg_id_again(c))
_add_headers("expected_stream", b"Nats-Expected-Stream: %s")
_add_headers("expected_none", b"Nats-Expected-Last-Subject-Sequence: 0")
_add_headers(
    "expected_none_elsewhere",
    b"Nats-Expected-Last-Subject-Sequence: 0",
    b"Nats-Expected-Last-Subject-Sequence-Subject: %r.never.%d",
)
_add_headers("rollup_lower", b"nats-rollup: all")  # not a rollup: the server knows one spelling only
_add_headers("kv_delete", b"KV-Operation: DEL", payload=b"")
_add_headers("kv_purge", b"KV-Operation: PURGE", payload=b"")
_add_headers("marker", b"Nats-Marker-Reason: MaxAge", payload=b"")
_add_headers("schedule_parts", b"Nats-Schedule-Target: x", b"Nats-Schedule-TTL: 5s", b"Nats-Schedule-Source: y")
_add_headers("counter_sources", b'Nats-Counter-Sources: {"a":{"b":"1"}}')
_add_headers("api_level", b"Nats-Required-Api-Level: 99")
_add_headers("batch_parts", b"Nats-Batch-Sequence: 7", b"Nats-Batch-Commit: 1")
_add_headers("trace_dest", b"Nats-Trace-Dest: nobody.listens.here")
_add_headers("delivery", b"Nats-Stream: S", b"Nats-Sequence: 5", b"Nats-Last-Sequence: 4", b"Nats-Num-Pending: 1")
_add_headers("consumer", b"Nats-Last-Consumer: 1", b"Nats-Last-Stream: 1", b"Nats-Consumer-Stalled: x")
_add_headers("rollup_subject", b"Nats-Rollup: sub", needs="allow_rollup_hdrs")
_add_kind("rollup_again", lambda c: (c.subject(b"limited", b"0"), build_block([b"Nats-Rollup: sub"]), c.text()))
REQUIRED_SETTINGS["rollup_again"] = "allow_rollup_hdrs"
_add_headers("ttl", b"Nats-TTL: 1h", needs="allow_msg_ttl")
_add_headers("ttl_never", b"Nats-TTL: never", needs="allow_msg_ttl")
_add_headers(
    "schedule_once",
    b"Nats-Schedule: @at 2099-01-01T00:00:00Z",
    b"Nats-Schedule-Target: %r.scheduled.%d",
    needs="allow_msg_schedules",
)
_add_headers(
    "schedule_daily", b"Nats-Schedule: @daily", b"Nats-Schedule-Target: %r.daily.%d", needs="allow_msg_schedules"
)
_add_headers(
    "batch_of_one", b"Nats-Batch-Id: %r-%d", b"Nats-Batch-Sequence: 1", b"Nats-Batch-Commit: 1", needs="allow_atomic"
)

# Floe's own headers, forged by a publisher
_add_headers("forged_source", b"Floe-Source: evil NODES 0 0 1 1", b"A: 1")
_add_headers("forged_original", b"Floe-Original: Nats-Rollup: all", b"Floe-Original:", b"floe-original: x")
_add_headers("forged_replay", b"floe-replay: 1", b"FLOE-SOURCE: x", b"Floe-Anything: y")


def _maximal_with_headers(context: Context) -> tuple[bytes, bytes | None, bytes]:
    headers = build_block([b"A: 1", b"Nats-Msg-Id: %s-max%d" % (context.root, context.number)])
    return context.subject(b"large"), headers, b"p" * (context.max_payload - len(headers))


def _msg_id_again(context: Context) -> tuple[bytes, bytes | None, bytes]:
    """Make a message with one of four ids: dropped as a duplicate within the stream's window, stored again after it."""
    again = b"Nats-Msg-Id: %s-again%d" % (context.root, context.rng.randrange(4))
    return context.subject(b"again"), build_block([again]), context.text()


ROUNDS_BETWEEN_RARE = 8
DELETED_SHARE = 0.03
MAX_DUPLICATE_WINDOW_S = (
    2.0  # seconds; for a duplicate window up to this long, publishing pauses once until it has passed
)


@dataclass(frozen=True, slots=True)
class AwkwardReport:
    """The outcomes of the messages. `stored`: how many of each kind. `deleted`: sequences that were deleted again."""

    published: PublishCounts
    stored: Counter[str]
    deleted: tuple[int, ...]


def awkward_messages(
    rng: random.Random, *, root: str, stream: str, count: int, max_payload: int, config: Mapping[str, Any]
) -> Iterator[AwkwardMessage]:
    """Yield `count` messages below the subject `root`: all kinds that a stream with `config` stores, shuffled."""
    kinds = [name for name in KINDS if name not in REQUIRED_SETTINGS or config.get(REQUIRED_SETTINGS[name])]
    number = turn = 0
    while number < count:
        names = [name for name in kinds if name not in RARE_KINDS or turn % ROUNDS_BETWEEN_RARE == 0]
        for name in rng.sample(names, len(names))[: count - number]:
            yield KINDS[name](Context(root.encode(), stream.encode(), number, max_payload, rng))
            number += 1
        turn += 1


async def publish_awkward(
    client: FloeClient,
    stream: str,
    subject_root: str,
    rng: random.Random,
    count: int,
    *,
    deleted_share: float = DELETED_SHARE,
    max_message_bytes: int | None = None,
    clock: Clock | None = None,
) -> AwkwardReport:
    """Publish `count` awkward messages into `stream`, and delete some of them again.

    The stream must take `{subject_root}.>`. `max_message_bytes`: of the largest ones, headers included; by default the
    most that the server takes, and then the server of a target must take more. Raises ConfigError if the stream does
    not exist.
    """
    config = (await existing_stream(client, stream)).config
    made = awkward_messages(
        rng,
        root=subject_root,
        stream=stream,
        count=count,
        max_payload=max_message_bytes or client.max_payload,
        config=config,
    )
    kinds: list[str] = []
    sequences: dict[int, int] = {}
    async with AckedPublisher(client, window=256, on_stored=sequences.__setitem__) as publisher:
        for message in made:
            if len(kinds) == count // 2:
                await _wait_for_duplicate_window(publisher, config, clock or SystemClock())
            kinds.append(message.kind)
            await publisher.publish(message.subject, message.payload, message.headers, build_frame=unchecked_frame)
        published = await publisher.wait_for_acks()
    deleted = await _delete_some(client, stream, sorted(sequences.values()), rng, deleted_share)
    return AwkwardReport(published, Counter(kinds[number] for number in sequences), deleted)


async def existing_stream(client: FloeClient, stream: str) -> StreamInfo:
    """Return the stream's state and configuration. Raises ConfigError if it does not exist."""
    if (info := await stream_info(client, stream)) is None:
        raise ConfigError(f"stream {stream}: expected to exist, found none")
    return info


async def _wait_for_duplicate_window(publisher: AckedPublisher, config: Mapping[str, Any], clock: Clock) -> None:
    """Wait until the window has passed, if it is short enough, so that the second half's repeated ids are stored."""
    window = config.get("duplicate_window", 0) / NS_PER_S
    if window <= MAX_DUPLICATE_WINDOW_S:
        await publisher.wait_for_acks()
        await clock.sleep(window * 2.5)  # the server forgets ids only once in a window


async def _delete_some(
    client: FloeClient, stream: str, sequences: list[int], rng: random.Random, share: float
) -> tuple[int, ...]:
    wanted, deleted = int(len(sequences) * share), list[int]()
    for sequence in rng.sample(sequences, len(sequences)):
        if len(deleted) == wanted:
            break
        if await delete_message(client, stream, sequence):
            deleted.append(sequence)
    return tuple(sorted(deleted))


async def delete_message(client: FloeClient, stream: str, sequence: int) -> bool:
    """Delete a message. Return False if a limit or a rollup deleted it first."""
    try:
        await client.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence, "no_erase": True})
    except ApiError as error:
        # The server's number for it depends on the position of the message and on the kind of store.
        if await get_message(client, stream, sequence) is not None:
            raise error from None
        return False
    return True
