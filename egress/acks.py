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
from common.jetstream.api import ConsumerInfo, consumer_info
from common.jetstream.client import FloeClient
from common.jetstream.protocol import layout
from common.sequences import SequenceRange, holes
from egress.memory import MemoryAccount
from egress.partition import Position

REASONS = (
    "closed", "consumer_gone", "consumer_taken", "gap", "identity", "malformed", "reconnect", "redelivered",
    "silent", "stalled", "stream_changed", "unreachable",
)  # fmt: skip


class ReaderResetError(Exception):
    """Error if the consumer or its stream may have changed; `reason` is one of REASONS, for metrics."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


ENTRY = 8  # bytes kept for each message
AT_ONCE = 2000  # acknowledgements in one write
PATIENCE = 10.0  # seconds without progress until the acknowledgements that were sent count as lost
PAUSES = (0.01, 0.02, 0.05, 0.1, 0.2)  # seconds between two queries; the last one repeats


def archived(first: int, place: Position) -> tuple[SequenceRange, ...]:
    """Return the sequences below the position that a segment accounts for, in a chain that begins at `first`.

    The stream need not keep them. Sequences in a hole are left out.
    """
    if place.first <= first:
        return ()
    return tuple(holes(place.lost, SequenceRange(first, place.first - 1)))


class Acknowledging:
    """Acknowledgements to `consumer`: one for each message, or one for all up to a message if its policy is `all`.

    `archived`: the sequences before `first` that may be acknowledged. From `first` on, all messages up to the argument
    of `upto` are acknowledged. `account`: charged for the sequences that are kept.
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
        self._whole = consumer.config.get("ack_policy") == "all"
        self._kept = array("q")
        self._number = 1  # consumer sequence of the first one kept
        self._left = 0
        self._head = self._tail = b""
        self._generation, self._is_permitted, self._lock = client.generation, False, asyncio.Lock()

    @property
    def left(self) -> int:
        return self._left

    def delivered(self, reply: bytes, sequences: Sequence[int]) -> None:
        """Record the next messages of the consumer. `reply`: the reply subject of any of them."""
        if not self._head:
            self._head, self._tail = _ends(reply)
        self._kept.extend(sequences)
        self._account.charge(ENTRY * len(sequences))

    async def upto(self, last: int) -> None:
        """Acknowledge the messages delivered up to `last`, and return once the server has applied it.

        Raises Unavailable, OutcomeUnknown (it may be called again), ReaderResetError if the consumer or the connection
        is gone, Refused without the right to acknowledge.
        """
        async with self._lock:
            size = bisect_right(self._kept, last)
            stretches = self._stretches(size)
            left = size - sum(map(len, stretches))
            if not size:
                return
            if stretches:
                if not self._is_permitted:
                    await self._probe(stretches[0])
                await self._send(stretches)
                await self._settle(self._number + stretches[-1].stop - 1, self._left + left)
            self._drop(size)
            self._left += left

    def _stretches(self, size: int) -> list[range]:
        kept = self._kept
        found = [range(bisect_left(kept, a.first), min(size, bisect_right(kept, a.last))) for a in self._archived]
        return [stretch for stretch in (*found, range(bisect_left(kept, self._first), size)) if stretch]

    def _drop(self, size: int) -> None:
        del self._kept[:size]
        self._number += size
        self._account.release(ENTRY * size)

    async def _send(self, stretches: Sequence[range]) -> None:
        for stretch in [stretches[-1][-1:]] if self._whole else stretches:
            for start in range(0, len(stretch), AT_ONCE):
                self._client.send(self.frames_of(stretch[start : start + AT_ONCE]))
                await self._client.flush_writes()

    def frames_of(self, stretch: range) -> bytes:
        head, tail = b"PUB " + self._head, self._tail + b" 4\r\n+ACK\r\n"
        chosen, numbers = self._kept[stretch.start : stretch.stop], count(self._number + stretch.start)
        return b"".join([b"%b%d.%d%b" % (head, each, next(numbers), tail) for each in chosen])

    async def _probe(self, stretch: range) -> None:
        """Send one acknowledgement and raise Refused if it is not permitted, before a million are sent."""
        self._client.send(self.frames_of(stretch[:1]))
        await self._info()
        number = self._number + stretch.start
        subject = b"%b%d.%d%b" % (self._head, self._kept[stretch.start], number, self._tail)
        if refused := self._client.refusal(subject):
            raise refused
        self._is_permitted = True

    async def _settle(self, number: int, left: int) -> None:
        """Wait until nothing up to the consumer sequence `number` is pending, except `left` messages that remain."""
        pauses, lowest, since = iter(PAUSES), None, self._clock.monotonic()
        while True:
            if self._client.generation != self._generation:
                raise ReaderResetError("reconnect", "the connection was lost while acknowledging")
            info = await self._info()
            if is_settled(info, number, left):
                return
            if lowest is None or info.ack_floor > lowest:
                lowest, since = info.ack_floor, self._clock.monotonic()
            if self._clock.monotonic() - since > PATIENCE:
                raise OutcomeUnknown(
                    f"consumer {info.name} of {self._stream}: expected message {number} acknowledged, "
                    f"found {info.ack_pending} pending from {info.ack_floor + 1} on"
                )
            await self._clock.sleep(next(pauses, PAUSES[-1]))

    async def _info(self) -> ConsumerInfo:
        info = await consumer_info(self._client, self._stream, self._consumer.name)
        if info is None or info.created != self._consumer.created:
            raise ReaderResetError("consumer_gone", "the consumer does not exist any more")
        return info


def is_settled(info: ConsumerInfo, number: int, left: int) -> bool:
    delivered = info.consumer_sequence >= number
    if info.ack_floor >= number or (delivered and not info.ack_pending):
        return True
    return left > 0 and delivered and info.ack_pending <= left + info.consumer_sequence - number


def _ends(reply: bytes) -> tuple[bytes, bytes]:
    begin, words = layout(reply)[1], reply.split(b".")
    return b".".join(words[: begin + 3]) + b".", b"." + b".".join(words[begin + 5 :])
