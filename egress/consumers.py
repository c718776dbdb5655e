"""Consumer that a session reads through, by the retention of its stream, and acknowledgement of what it delivers.

| retention | consumer | acknowledges |
|---|---|---|
| limits | ephemeral, in memory, from the position on | nothing |
| work queue | durable, of all messages in the queue | each message |
| interest | durable, from the first message not acknowledged, or from the position | all up to a message |

A durable that survived would deliver new messages before those that were delivered and not acknowledged. So each
session replaces it, and delivery begins again, in order. On an interest stream the next durable is created before the
former one is deleted, so that the stream never stops keeping messages for Floe. A work queue allows one consumer for
each subject, so there the former one is deleted first. Each durable has a fresh name: a paused instance that wakes up
cannot pull from its successor's.

Of the messages to acknowledge only sequences are kept, eight bytes each. The replies of one consumer differ in the
stream sequence and the consumer sequence, and the consumer sequence follows from the order of delivery. A sent
acknowledgement is never assumed to have arrived: the consumer is queried until the server has applied it.
"""

import asyncio
import secrets
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from common.clock import NS_PER_S, format_time
from common.errors import OutcomeUnknown, Stopped
from common.exits import nats_command
from common.nats.api import (
    INTEREST,
    LIMITS,
    WORK_QUEUE,
    ConsumerInfo,
    StreamInfo,
    consumer_info,
    consumer_names,
    create_consumer,
    create_ephemeral_consumer,
    delete_consumer,
    durable_config,
    ready_stream_info,
)
from common.nats.client import FloeClient
from common.nats.protocol import ApiError, reply_layout
from common.sequences import MAX_SEQUENCE, SequenceRange, holes
from common.settings.egress import FeedSettings
from common.settings.service import StartSettings
from common.subjects import overlaps
from egress.memory import MemoryAccount
from egress.partition import Partition, Position, partitions_of


async def first_sequence(client: FloeClient, info: StreamInfo, start: StartSettings) -> int:
    """Return the sequence at which a new feed of the stream begins; without start keys, the first it holds.

    A start before the first message held begins there: messages that were gone before the feed existed are not missing.
    """
    held = max(1, info.first_sequence)
    if start.start_at_end:
        return min(info.last_sequence + 1, MAX_SEQUENCE)
    if start.start_sequence:
        return max(held, start.start_sequence)
    moment = start.start_time
    if not moment and start.start_delta:
        moment = format_time(round((client.clock.now() - start.start_delta) * NS_PER_S))
    return max(held, await _first_at_time(client, info.name, moment)) if moment else held


async def _first_at_time(client: FloeClient, stream: str, moment: str) -> int:
    config = {
        "name": f"floe-start-{secrets.token_hex(8)}",
        "deliver_policy": "by_start_time",
        "opt_start_time": moment,
        "ack_policy": "none",
        "mem_storage": True,
        "inactive_threshold": 10_000_000_000,
    }
    consumer = await create_ephemeral_consumer(client, stream, config)
    await delete_consumer(client, stream, consumer.name)
    return consumer.stream_sequence + 1


CONFLICT_ERR_CODES = (10099, 10100)  # the work queue already has a consumer for these subjects
HOLDING_DESCRIPTION = "Floe egress; keeps messages until it is known which stream this is"


@dataclass(frozen=True, slots=True)
class WantedMessages:
    """Messages to read: those of `partition`, from a stream of that `retention`.

    `first`: the sequence to read from, if the retention leaves the choice. On an interest stream, messages
    that a former durable did not acknowledge come before that, but not before `begin`. `inactive`: seconds until the
    server drops an idle ephemeral.
    """

    partition: Partition
    retention: str
    first: int = 1
    begin: int = 1
    inactive: float = 300.0

    @property
    def stream(self) -> str:
        return self.partition.stream

    @property
    def is_durable(self) -> bool:
        return self.retention != LIMITS

    @property
    def filtering(self) -> dict[str, str]:
        return {"filter_subject": self.partition.filter_subject} if self.partition.filter_subject else {}

    def is_own_durable(self, name: str) -> bool:
        return self.partition.partition_of(name) == self.partition.number

    def is_former_durable(self, name: str) -> bool:
        partition = self.partition.partition_of(name)
        return partition is not None and partition >= len(self.partition.settings.filters())


def ephemeral(wanted: WantedMessages) -> dict[str, Any]:
    return {
        "name": f"floe-{secrets.token_hex(8)}",
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": wanted.first,
        "ack_policy": "none",
        "replay_policy": "instant",
        "inactive_threshold": int(wanted.inactive * NS_PER_S),
        "mem_storage": True,
        "num_replicas": 1,
        **wanted.filtering,
    }


def durable(wanted: WantedMessages, version: tuple[int, int, int]) -> dict[str, Any]:
    name, filter_subject = wanted.partition.durable, wanted.partition.filter_subject
    return durable_config(name, wanted.retention, wanted.first, filter_subject, version)


async def open_consumer(client: FloeClient, wanted: WantedMessages) -> tuple[ConsumerInfo, list[str]]:
    """Create a consumer to read through; on an interest stream and a work queue it replaces the partition's former
    ones. Return it with the names of those, except the ones that `ensure_durable` created.

    Raises ReaderResetError if another instance was faster, Stopped if the stream does not allow it, else as
    `create_consumer`.
    """
    if not wanted.is_durable:
        return await create_ephemeral_consumer(client, wanted.stream, ephemeral(wanted)), []
    names = await consumer_names(client, wanted.stream)
    own, former = list(filter(wanted.is_own_durable, names)), list(filter(wanted.is_former_durable, names))
    if wanted.retention == INTEREST:
        found = [await consumer_info(client, wanted.stream, name) for name in own]
        known = [info for info in found if info is not None]
        own = [info.name for info in known]
        consumer = await create_durable(client, replace(wanted, first=first_of_durable(wanted, known)))
        if former or any(filter_subjects(info.config) != [wanted.partition.filter_subject] for info in known):
            # Before a repartition, one durable kept messages for several of today's partitions.
            await ensure_all_durables(client, wanted.partition)
        await _delete(client, wanted, own + former)
        own = [info.name for info in known if info.config.get("description") != HOLDING_DESCRIPTION]
    else:
        await _delete(client, wanted, own + former)
        consumer = await create_durable(client, wanted)
    return consumer, own


def first_of_durable(wanted: WantedMessages, former: Sequence[ConsumerInfo]) -> int:
    """Return the first sequence of an interest stream's durable: `wanted.first`, or an earlier one that follows the
    acknowledgements of a former durable.

    Servers before 2.15 keep for ever any message after these and before a new durable. It is therefore delivered to the
    new durable, and acknowledged by it.
    """
    if not former:
        return wanted.first
    return min(wanted.first, max(wanted.begin, *(info.acknowledged + 1 for info in former)))


async def ensure_all_durables(client: FloeClient, partition: Partition) -> None:
    """Create the missing durables of all partitions of the feed, on an interest stream."""
    names = await consumer_names(client, partition.stream)
    for each in partitions_of(partition.site, partition.settings):
        wanted = WantedMessages(each, INTEREST)
        if not any(map(wanted.is_own_durable, names)):
            await create_durable(client, wanted)


async def ensure_durable(client: FloeClient, partition: Partition) -> None:
    """Make an interest stream without a durable of the partition keep messages for it from now on.

    Called before the stream is judged, which takes time, and if the chain stops until an operator decides: a recreated
    stream would drop the messages published meanwhile. Raises Stopped if the pattern that matched the stream takes no
    stream of its retention.
    """
    info = await ready_stream_info(client, partition.stream)
    if info is not None:
        check_retention(info, partition.settings)
    if info is None or info.config.get("retention") != INTEREST:
        return
    wanted = WantedMessages(partition, INTEREST)
    if not await own_durables(client, wanted):
        await create_durable(client, wanted, description=HOLDING_DESCRIPTION)


async def own_durables(client: FloeClient, wanted: WantedMessages) -> list[str]:
    return [name for name in await consumer_names(client, wanted.stream) if wanted.is_own_durable(name)]


async def delete_stray_durables(
    client: FloeClient, wanted: WantedMessages, current: str, check_lease: Callable[[], None]
) -> None:
    """Delete durables of the partition other than `current`: a paused instance created them when it woke up, and an
    interest stream would keep messages for them for ever.

    If this instance is the one that was paused, they are its successor's. So nothing is deleted if `current` is gone
    (ReaderResetError) or the lease is (the error of `check_lease`).
    """
    names = await own_durables(client, wanted)
    if current not in names:
        raise consumer_gone_error()
    for name in names:
        if name != current:
            check_lease()
            await delete_consumer(client, wanted.stream, name)


async def _delete(client: FloeClient, wanted: WantedMessages, names: list[str]) -> None:
    for name in names:
        await delete_consumer(client, wanted.stream, name)


async def create_durable(client: FloeClient, wanted: WantedMessages, **changes: str) -> ConsumerInfo:
    """Create a durable, beside others, with `changes` of its configuration. Raises as `open_consumer`."""
    config = {**durable(wanted, client.server_version), **changes}
    try:
        consumer = await create_consumer(client, wanted.stream, config)
    except ApiError as error:
        if error.err_code in CONFLICT_ERR_CODES:
            raise await _conflict_error(client, wanted) from None
        raise
    if refusal := limits_error(wanted, consumer.config):
        await delete_consumer(client, wanted.stream, consumer.name)
        raise refusal
    return consumer


def limits_error(wanted: WantedMessages, config: dict[str, Any]) -> Stopped | None:
    """Return the error for a durable that cannot be read through as the server made it (`config`): the stream limits
    consumers. None if it can.
    """
    limits = {"inactive_threshold": 0, "max_ack_pending": -1}
    for key, expected in limits.items():
        found = config.get(key, expected)
        # A work queue keeps its messages regardless of its consumer.
        is_harmless = key == "inactive_threshold" and wanted.retention == WORK_QUEUE
        if found != expected and not is_harmless:
            return Stopped(
                f"stream {wanted.stream}: its consumer_limits set {key} to {found}, expected {expected}",
                hint=f"remove {key}: the durable has to outlive a stop of egress, and to have any number of "
                "messages not acknowledged",
                code="E-RETENTION",
            )
    return None


async def _conflict_error(client: FloeClient, wanted: WantedMessages) -> Exception:
    subject = wanted.partition.filter_subject
    for name in await consumer_names(client, wanted.stream):
        info = await consumer_info(client, wanted.stream, name)
        if info is None or not any(overlaps(subject, each) for each in filter_subjects(info.config)):
            continue
        if wanted.partition.partition_of(name) is not None:
            return ReaderResetError("consumer_taken", f"{name} belongs to another instance or to former partitions")
        return Stopped(
            f"work queue {wanted.stream}: consumer {name} takes messages that {wanted.partition.durable} needs",
            hint="a work queue gives each message to one consumer: archive other subjects, or remove that consumer:\n"
            + nats_command("consumer rm", wanted.stream, name),
            code="E-RETENTION",
        )
    return ReaderResetError("consumer_taken", "the conflicting consumer no longer exists")


def filter_subjects(config: dict[str, Any]) -> list[str]:
    """Return the filters of a consumer; an empty one matches all subjects."""
    return list(config.get("filter_subjects") or [config.get("filter_subject", "")])


def check_retention(info: StreamInfo, feed: FeedSettings) -> None:
    """Raise Stopped if the feed's pattern takes no stream of this retention: to archive it would empty its queue."""
    found = str(info.config.get("retention", LIMITS))
    if feed.streams and found not in feed.retention:
        expected = f"expected retention {' or '.join(feed.retention)} by the pattern {feed.pattern}"
        raise Stopped(
            f"stream {info.name}: {expected}, found {found}",
            hint=f"add {info.name} to `except` of that entry; or add {found} to its `retention`: archived messages are "
            "then acknowledged, so removed from the stream",
            code="E-RETENTION",
        )


def check_start(info: StreamInfo, start: StartSettings) -> None:
    """Raise Stopped if a feed would begin in the middle of a work queue: no consumer would ever take the messages
    before, and acknowledging them would discard them.
    """
    if info.config.get("retention") == WORK_QUEUE and start.is_set:
        raise Stopped(
            f"stream {info.name}: expected no start_… key for a work queue, which is read from its beginning",
            hint="remove the key; to remove messages that are not needed:\n"
            + nats_command("stream purge", info.name, "--seq", "SEQ"),
            code="E-RETENTION",
        )


RESET_REASONS = (
    "closed", "consumer_gone", "consumer_taken", "gap", "identity", "malformed", "reconnect", "redelivered",
    "silent", "stalled", "stream_changed", "unreachable",
)  # fmt: skip


class ReaderResetError(Exception):
    """Error if the consumer or its stream may have changed; `reason` is one of RESET_REASONS, for metrics."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


ENTRY_BYTES = 8  # bytes kept for each message
ACKS_PER_WRITE = 2000  # acknowledgements in one write
ACK_TIMEOUT_S = 10.0  # seconds without progress until the acknowledgements that were sent count as lost
ACK_POLL_PAUSES_S = (0.01, 0.02, 0.05, 0.1, 0.2)  # seconds between two queries; the last one repeats


def archived_ranges(first: int, position: Position) -> tuple[SequenceRange, ...]:
    """Return the sequences below the position that a segment accounts for, in a chain that begins at `first`.

    The stream need not keep them. Sequences in a hole are left out.
    """
    if position.first <= first:
        return ()
    return tuple(holes(position.lost, SequenceRange(first, position.first - 1)))


class Acknowledger:
    """Acknowledgements to `consumer`: one for each message, or one for all up to a message if its policy is `all`.

    `archived`: the sequences before `first` that may be acknowledged. From `first` on, all messages up to the
    argument of `acknowledge_up_to` are acknowledged. `account`: charged for the sequences that are kept.
    `unacknowledged`: the number of messages delivered before `first` that may not be acknowledged, so stay pending.
    """

    def __init__(
        self,
        client: FloeClient,
        stream: str,
        consumer: ConsumerInfo,
        account: MemoryAccount,
        *,
        first: int,
        archived: Sequence[SequenceRange] = (),
    ) -> None:
        self._client, self._stream, self._consumer, self._clock = client, stream, consumer, client.clock
        self._account, self._first, self._archived = account, first, tuple(archived)
        self._acks_all = consumer.config.get("ack_policy") == "all"
        self._sequences = array("q")
        self._number = 1  # consumer sequence of the first one kept
        self.unacknowledged = 0
        self._head = self._tail = b""
        self._generation, self._is_permitted, self._lock = client.generation, False, asyncio.Lock()

    def record_delivered(self, reply: bytes, sequences: Sequence[int]) -> None:
        """Record the next messages of the consumer. `reply`: the reply subject of any of them."""
        if not self._head:
            self._head, self._tail = _ends(reply)
        self._sequences.extend(sequences)
        self._account.charge(ENTRY_BYTES * len(sequences))

    async def acknowledge_up_to(self, last: int) -> None:
        """Acknowledge the messages delivered up to `last`, and return once the server has applied it.

        Raises Unavailable, OutcomeUnknown (it may be called again), ReaderResetError if the consumer or the connection
        is gone, Refused without the right to acknowledge.
        """
        async with self._lock:
            size = bisect_right(self._sequences, last)
            ranges = self._index_ranges(size)
            remaining = size - sum(map(len, ranges))
            if not size:
                return
            if ranges:
                if not self._is_permitted:
                    await self._check_permission(ranges[0])
                await self._send(ranges)
                await self._wait_until_applied(self._number + ranges[-1].stop - 1, self.unacknowledged + remaining)
            self._drop(size)
            self.unacknowledged += remaining

    def _index_ranges(self, size: int) -> list[range]:
        kept = self._sequences
        found = [range(bisect_left(kept, a.first), min(size, bisect_right(kept, a.last))) for a in self._archived]
        return [indexes for indexes in (*found, range(bisect_left(kept, self._first), size)) if indexes]

    def _drop(self, size: int) -> None:
        del self._sequences[:size]
        self._number += size
        self._account.release(ENTRY_BYTES * size)

    async def _send(self, ranges: Sequence[range]) -> None:
        for indexes in [ranges[-1][-1:]] if self._acks_all else ranges:
            for start in range(0, len(indexes), ACKS_PER_WRITE):
                self._client.send(self.frames_of(indexes[start : start + ACKS_PER_WRITE]))
                await self._client.flush_writes()

    def frames_of(self, indexes: range) -> bytes:
        head, tail = b"PUB " + self._head, self._tail + b" 4\r\n+ACK\r\n"
        chosen, numbers = self._sequences[indexes.start : indexes.stop], count(self._number + indexes.start)
        return b"".join([b"%b%d.%d%b" % (head, each, next(numbers), tail) for each in chosen])

    async def _check_permission(self, indexes: range) -> None:
        """Send one acknowledgement and raise Refused if it is not permitted, before a million are sent."""
        self._client.send(self.frames_of(indexes[:1]))
        await current_consumer(self._client, self._stream, self._consumer)
        number = self._number + indexes.start
        subject = b"%b%d.%d%b" % (self._head, self._sequences[indexes.start], number, self._tail)
        if refused := self._client.permission_error(subject):
            raise refused
        self._is_permitted = True

    async def _wait_until_applied(self, number: int, remaining: int) -> None:
        """Wait until nothing up to the consumer sequence `number` is pending, except `remaining` messages."""
        pauses, lowest, since = iter(ACK_POLL_PAUSES_S), None, self._clock.monotonic()
        while True:
            if self._client.generation != self._generation:
                raise ReaderResetError("reconnect", "the connection was lost while acknowledging")
            info = await current_consumer(self._client, self._stream, self._consumer)
            if is_settled(info, number, remaining):
                return
            if lowest is None or info.ack_floor > lowest:
                lowest, since = info.ack_floor, self._clock.monotonic()
            if self._clock.monotonic() - since > ACK_TIMEOUT_S:
                raise OutcomeUnknown(
                    f"consumer {info.name} of {self._stream}: expected message {number} acknowledged, "
                    f"found {info.ack_pending} pending from {info.ack_floor + 1} on"
                )
            await self._clock.sleep(next(pauses, ACK_POLL_PAUSES_S[-1]))


async def current_consumer(client: FloeClient, stream: str, consumer: ConsumerInfo) -> ConsumerInfo:
    """Return the present state of `consumer`. Raises ReaderResetError if none with its creation time exists."""
    info = await consumer_info(client, stream, consumer.name)
    if info is None or info.created != consumer.created:
        raise consumer_gone_error()
    return info


def consumer_gone_error() -> ReaderResetError:
    return ReaderResetError("consumer_gone", "the consumer does not exist any more")


def is_settled(info: ConsumerInfo, number: int, remaining: int) -> bool:
    delivered = info.consumer_sequence >= number
    if info.ack_floor >= number or (delivered and not info.ack_pending):
        return True
    return remaining > 0 and delivered and info.ack_pending <= remaining + info.consumer_sequence - number


def _ends(reply: bytes) -> tuple[bytes, bytes]:
    begin, words = reply_layout(reply)[1], reply.split(b".")
    return b".".join(words[: begin + 3]) + b".", b"." + b".".join(words[begin + 5 :])
