"""A feed of several partitions as one: what all its chains together hold, against what the stream holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from common.chain import Chain
from common.jetstream.kv import KeyValue
from common.segments.segment import Message
from common.sequences import cover, is_gapless
from egress.feed import lease_key
from egress.incarnations import Closings
from infra.oracle import Trace, archived, compare, read_stream
from tests.egress_bench import SITE, Bench
from tests.support import PATIENCE, soon


@dataclass(frozen=True)
class Partitioned:
    """The partitions of one feed on a bench."""

    bench: Bench
    feed: str
    count: int

    def chain(self, partition: int, incarnation: int = 0) -> Chain:
        return Chain(SITE, self.feed, incarnation, partition)

    def end(self, partition: int, incarnation: int = 0) -> int:
        """Where coverage ends; 0 without any."""
        refs = self.bench.store.list(self.chain(partition, incarnation))
        return max((ref.coverage.last for ref in refs), default=0)

    async def archived_to(self, last: int, incarnation: int = 0, seconds: float = PATIENCE) -> None:
        """Wait until every partition's coverage reaches `last`."""
        await soon(lambda: all(self.end(p, incarnation) >= last for p in range(self.count)), seconds)

    def messages(self, incarnation: int = 0, count: int | None = None) -> list[Message]:
        """Of all partitions, in sequence order; a repeated one stands twice."""
        chains = [self.chain(p, incarnation) for p in range(count or self.count)]
        found = [m for chain in chains for m in archived(self.bench.store, chain)]
        return sorted(found, key=lambda message: message.sequence)

    def ends(self, incarnation: int = 0) -> dict[int, int]:
        return {p: self.end(p, incarnation) for p in range(self.count)}

    def previous(self, incarnation: int) -> dict[int, int] | None:
        """What `stream.json` of the incarnation says of the one before."""
        document = self.bench.chains.read_stream(self.chain(0, incarnation))
        return None if document is None or document.previous is None else dict(document.previous)

    def check(self, incarnation: int = 0) -> None:
        """Each partition accounts once for every sequence from its first on; segments balance."""
        for partition in range(self.count):
            chain = self.chain(partition, incarnation)
            document = self.bench.chains.read_chain(chain)
            assert document is not None, chain
            refs = self.bench.store.list(chain)
            stretches = cover(refs, document.first)
            assert is_gapless(stretch.rows for stretch in stretches), chain
            assert not stretches or stretches[0].rows.first == document.first, chain
            for ref in refs:
                assert self.bench.store.footer(ref).is_balanced()

    async def same(self, stream: str, incarnation: int = 0, first: int = 1) -> None:
        """Fails unless the partitions together hold exactly what the stream holds from `first` on."""
        self.check(incarnation)
        source = Trace()

        def take(message: Message) -> None:
            if message.sequence >= first:
                source.add(message)

        source.through = await read_stream(self.bench.client, stream, take)
        found = compare(source, Trace.of(self.messages(incarnation)), may_be_gone=False)
        assert found.ok, found.report()

    # Playing another instance

    async def closings(self) -> Closings:
        return Closings(await KeyValue.open(self.bench.client, self.bench.state_bucket))

    @asynccontextmanager
    async def away(self, partition: int, ttl: float = 2.0) -> AsyncIterator[None]:
        """Another instance, which does nothing, holds the lease of the partition."""
        bucket = await KeyValue.open(self.bench.client, self.bench.lease_bucket, ttl=ttl)
        key = lease_key(self.chain(partition))
        revision = await bucket.create(key, b"another")
        assert revision is not None

        async def keep() -> None:
            current = revision
            while current is not None:
                await asyncio.sleep(ttl / 4)
                current = await bucket.update(key, b"another", current)

        keeping = asyncio.create_task(keep())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.wait({keeping})
            await bucket.delete(key)


async def publish_over(bench: Bench, stream: str, subjects: Sequence[str], count: int, text: str) -> None:
    """Publish `count` messages, the subjects taking turns."""
    for number, subject in enumerate(subjects):
        mine = [f"{text} {i}".encode() for i in range(count) if i % len(subjects) == number]
        await bench.publish(stream, mine, subject=subject)


def feed_of(stream: str, count: int = 3, **keys: Any) -> dict[str, Any]:
    """A feed cut by a template."""
    return {
        "stream": stream,
        "partitions": {"count": count, "subject": f"{stream}.{{partition}}.>"},
        **keys,
    }
