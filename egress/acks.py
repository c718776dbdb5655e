"""Acknowledgement of the messages that a durable consumer delivers.

Only sequences are kept, eight bytes each. The replies of one consumer differ in the stream sequence and the consumer
sequence, and the consumer sequence follows from the order of delivery. A sent acknowledgement is never assumed to have
arrived: the consumer is queried until the server has applied it.
"""

import asyncio
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import count

from common.errors import OutcomeUnknown
from common.nats.api import ConsumerInfo, consumer_info
from common.nats.client import FloeClient
from common.nats.protocol import reply_layout
from common.sequences import SequenceRange, holes
from egress.memory import MemoryAccount
from egress.partition import Position

RESET_REASONS = (
    "closed", "consumer_gone", "consumer_taken", "gap", "identity", "malformed", "reconnect", "redelivered",
    "silent", "stalled", "stream_changed", "unreachable",
)  # fmt: skip


class ReaderResetError(Exception):
    """Error if the consumer or its stream may have changed; `reason` is one of REASONS, for metrics."""

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
        self._unacknowledged = 0
        self._head = self._tail = b""
        self._generation, self._is_permitted, self._lock = client.generation, False, asyncio.Lock()

    @property
    def unacknowledged(self) -> int:
        return self._unacknowledged

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
                await self._wait_until_applied(self._number + ranges[-1].stop - 1, self._unacknowledged + remaining)
            self._drop(size)
            self._unacknowledged += remaining

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
        raise ReaderResetError("consumer_gone", "the consumer does not exist any more")
    return info


def is_settled(info: ConsumerInfo, number: int, remaining: int) -> bool:
    delivered = info.consumer_sequence >= number
    if info.ack_floor >= number or (delivered and not info.ack_pending):
        return True
    return remaining > 0 and delivered and info.ack_pending <= remaining + info.consumer_sequence - number


def _ends(reply: bytes) -> tuple[bytes, bytes]:
    begin, words = reply_layout(reply)[1], reply.split(b".")
    return b".".join(words[: begin + 3]) + b".", b"." + b".".join(words[begin + 5 :])
