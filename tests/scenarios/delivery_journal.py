"""The stored messages of a target by sequence, as a consumer saw them that reads while the target forgets."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import suppress

from common.archive.segment import Message
from common.chain import Chain
from common.errors import FloeError
from common.nats.api import create_consumer
from common.nats.client import FloeClient, frame
from common.nats.headers import split_provenance
from common.nats.protocol import ApiError
from infra.oracle import Trace
from tests.support.basics import parse_ack

BATCH = 500
PULL = json.dumps({"batch": BATCH, "expires": 10**9}).encode()
LOSES = 97  # one acknowledgement in so many is lost
ACK_WAIT = 5  # seconds until a redelivery


class Journal:
    """One entry for each target sequence. `changed`: those under which two different messages were seen."""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[Chain | None, Message]] = {}  # the chain, and the message as it was there
        self.changed: list[int] = []
        self.counts: Counter[str] = Counter()

    def note(self, sequence: int, subject: bytes, headers: bytes | None, payload: bytes) -> None:
        """Record that the target holds, or held, this message under this sequence."""
        provenance, original = split_provenance(headers)
        where = (provenance.sequence, provenance.timestamp_ns) if provenance else (0, 0)
        entry = provenance and provenance.chain, Message(*where, subject, original, payload)
        if self.entries.setdefault(sequence, entry) != entry:
            self.changed.append(sequence)

    def traces(self) -> dict[Chain, Trace]:
        """Return the messages of each chain in the order of the target."""
        traces: dict[Chain, Trace] = {}
        for sequence in sorted(self.entries):
            chain, message = self.entries[sequence]
            if chain is not None:
                traces.setdefault(chain, Trace()).add(message)
        return traces

    @property
    def foreign(self) -> int:
        """Return the number of messages without provenance."""
        return sum(entry[0] is None for entry in self.entries.values())

    def unseen(self, last: int) -> int:
        """Return how many target sequences up to `last` nobody has seen."""
        return last - sum(1 for sequence in self.entries if sequence <= last)


class Consumer:
    """A durable consumer with explicit acknowledgements, over a connection of its own, within a block.

    A redelivery (its acknowledgement was lost) is counted, and must be the same message.
    """

    def __init__(self, client: FloeClient, stream: str, journal: Journal) -> None:
        self._client, self._stream, self._journal = client, stream, journal
        self._inbox = client.new_inbox().encode()
        self._missing, self._seen = 0, asyncio.Event()

    async def __aenter__(self) -> Consumer:
        limits = {"ack_wait": ACK_WAIT * 10**9, "max_ack_pending": 20_000}
        config = {"durable_name": "READER", "ack_policy": "explicit", "deliver_policy": "all", **limits}
        with suppress(ApiError):  # the first request made it, and its answer was lost
            await create_consumer(self._client, self._stream, config)
        self._subscription = await self._client.subscribe_raw(self._inbox.decode(), self._sink)
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._subscription.unsubscribe()

    async def _run(self) -> None:
        """Pull for ever. A lost pull is made again when it would have expired."""
        subject = self._client.api_subject(f"CONSUMER.MSG.NEXT.{self._stream}.READER").encode()
        while True:
            self._missing = BATCH
            with suppress(FloeError):
                self._client.send(frame(subject, PULL, None, self._inbox))
            with suppress(TimeoutError):
                async with asyncio.timeout(1.5):
                    while self._missing > 0:
                        self._seen.clear()
                        await self._seen.wait()

    def _sink(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        self._seen.set()
        if reply.startswith(b"$JS.ACK."):
            sequence = parse_ack(reply).stream_sequence
            is_known = sequence in self._journal.entries
            self._journal.counts["delivered again"] += is_known
            self._journal.note(sequence, subject, headers, payload)
            self._missing -= 1
            if not is_known and sequence % LOSES == 0:
                return  # an acknowledgement that is lost
            # Acknowledged behind its entry: the consumer has seen every message that a work queue drops.
            with suppress(FloeError):
                self._client.send(frame(reply, b"+ACK", None, None))
        elif (headers or b"").startswith(b"NATS/1.0 4"):
            self._missing = 0
