"""Mistakes of egress, of leases and of keys."""

from dataclasses import replace
from typing import Any

import egress.consumers
import egress.reader
from common.archive.documents import ChainStore
from common.archive.store import SegmentStore
from common.nats.api import delete_consumer
from common.nats.kv import KeyValue
from common.nats.lease import Lease
from common.objects.port import ObjectInfo
from common.sequences import MAX_SEQUENCE
from egress.archive import Archive
from egress.consumers import Acknowledger, WantedMessages
from egress.reader import Reader
from egress.uploader import Uploader
from tests.sim.mutants.registry import change, changing, mutant


@mutant
def acknowledged_before_the_put() -> None:
    """The source may drop messages before their segment is durable."""

    @changing(Uploader, "put")
    async def early(put: Any, self: Uploader, spooled: Any) -> None:
        await self._retry(lambda: self._reader.acknowledge(spooled.footer.coverage.last, lambda: None))
        await put(self, spooled)


@mutant
def acknowledged_too_far() -> None:
    """With a segment, every received message is acknowledged."""

    @changing(Acknowledger, "acknowledge_up_to")
    async def everything(acknowledge: Any, self: Acknowledger, _last: int) -> None:
        await acknowledge(self, MAX_SEQUENCE)


@mutant
def mark_before_the_put() -> None:
    """The mark covers a segment before it is durable."""

    @changing(Archive, "put")
    async def early(put: Any, self: Archive, spooled: Any) -> Any:
        await self._marks.raise_to(self.chain, spooled.footer.coverage.last)
        return await put(self, spooled)


@mutant
def lost_put_taken_for_done() -> None:
    """A put with a lost answer counts as done, without reading it back."""

    def trusting(_self: SegmentStore, ref: Any, _sha256: str) -> ObjectInfo:
        return ObjectInfo(ref.key, ref.size, 0.0, "")

    change(SegmentStore, "_read_back", lambda _: trusting)


@mutant
def gap_in_deliveries_ignored() -> None:
    """Messages that the consumer sent and that never arrived count as received."""

    @changing(egress.reader, "parse_replies")
    def lax(parse: Any, replies: Any, consumer: bytes, expected: int) -> Any:
        acks = parse(replies, consumer, expected)
        return replace(acks, contiguous=len(acks.sequences))


@mutant
def heartbeat_believed() -> None:
    """Messages up to the sequence of an idle heartbeat count as received, even if they are still under way."""

    @changing(Reader, "_on_heartbeat")
    def trusting(_on_heartbeat: Any, self: Reader, heartbeat: Any) -> None:
        self._target.skip_to(heartbeat.sequence)


@mutant
def durable_deleted_first() -> None:
    """An interest stream has no durable of Floe while a session replaces its own."""

    @changing(egress.reader, "open_consumer")
    async def hasty(take: Any, client: Any, wanted: Any) -> Any:
        if wanted.is_durable:
            for name in await egress.consumers.own_durables(client, wanted):
                await delete_consumer(client, wanted.stream, name)
        return await take(client, wanted)


@mutant
def redelivered_written_again() -> None:
    """A redelivery below the position is handled as a new message."""

    @changing(Reader, "__init__")
    def careless(init: Any, self: Reader, *more: Any, **named: Any) -> None:
        init(self, *more, **{**named, "first": 1})
        self._wanted = replace(self._wanted, first=named["first"])


@mutant
def read_on_behind_the_source() -> None:
    """A session begins at the end of the source, not behind the archive."""

    @changing(egress.consumers, "ephemeral")
    def newest(ephemeral: Any, wanted: Any) -> Any:
        return {k: v for k, v in ephemeral(wanted).items() if k != "opt_start_seq"} | {"deliver_policy": "new"}


@mutant
def condition_of_a_key_left_out() -> None:
    """A key is written without a condition on its revision."""

    @changing(KeyValue, "_write")
    async def unconditional(
        write: Any, self: KeyValue, key: str, value: bytes, expected: int | None, *more: Any
    ) -> Any:
        return await write(self, key, value, None, *more)


@mutant
def lease_never_ends() -> None:
    """A process that once held a lease uses it for ever (I9: it guards nothing)."""
    change(Lease, "is_usable", lambda _: lambda _self: True)


@mutant
def filter_left_out() -> None:
    """Each partition reads the messages of all partitions."""
    change(WantedMessages, "filtering", lambda _: property(lambda _self: {}))


@mutant
def tail_never_written() -> None:
    """No tail shows readers that a chain has grown."""
    change(ChainStore, "write_tail", lambda _: lambda _self, _chain, _end: None)


@mutant
def acknowledgements_never_sent() -> None:
    """Archived messages are not acknowledged: they stay in a work queue."""

    async def silent(_self: Acknowledger, _last: int) -> None: ...

    change(Acknowledger, "acknowledge_up_to", lambda _: silent)
