"""Mistakes of egress, of leases and of keys."""

from __future__ import annotations

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
from egress.acks import Acknowledger
from egress.archive import Archive
from egress.consumers import WantedMessages
from egress.reader import Reader
from egress.uploader import Uploader
from tests.sim.mutants.registry import change, mutant


@mutant
def acknowledged_before_the_put() -> None:
    """The source may drop messages before their segment is durable."""

    def putting(put: Any) -> Any:
        async def early(self: Uploader, spooled: Any) -> None:
            await self._retry(lambda: self._reader.acknowledge(spooled.footer.coverage.last))
            await put(self, spooled)

        return early

    change(Uploader, "put", putting)


@mutant
def acknowledged_too_far() -> None:
    """With a segment, every received message is acknowledged."""

    def upto(acknowledge: Any) -> Any:
        async def everything(self: Acknowledger, _last: int) -> None:
            await acknowledge(self, MAX_SEQUENCE)

        return everything

    change(Acknowledger, "acknowledge_up_to", upto)


@mutant
def mark_before_the_put() -> None:
    """The mark covers a segment before it is durable."""

    def putting(put: Any) -> Any:
        async def early(self: Archive, spooled: Any) -> Any:
            await self._marks.raise_to(self.chain, spooled.footer.coverage.last)
            return await put(self, spooled)

        return early

    change(Archive, "put", putting)


@mutant
def lost_put_taken_for_done() -> None:
    """A put with a lost answer counts as done, without reading it back."""

    def trusting(_self: SegmentStore, ref: Any, _sha256: str) -> ObjectInfo:
        return ObjectInfo(ref.key, ref.size, 0.0, "")

    change(SegmentStore, "_read_back", lambda _: trusting)


@mutant
def gap_in_deliveries_ignored() -> None:
    """Messages that the consumer sent and that never arrived count as received."""

    def parsing(parse: Any) -> Any:
        def lax(replies: Any, consumer: bytes, expected: int) -> Any:
            acks = parse(replies, consumer, expected)
            return replace(acks, contiguous=len(acks.sequences))

        return lax

    change(egress.reader, "parse_replies", parsing)


@mutant
def heartbeat_believed() -> None:
    """Messages up to the sequence of an idle heartbeat count as received, even if they are still under way."""

    def beating(_on_heartbeat: Any) -> Any:
        def trusting(self: Reader, heartbeat: Any) -> None:
            self._target.skip_to(heartbeat.sequence)

        return trusting

    change(Reader, "_on_heartbeat", beating)


@mutant
def durable_deleted_first() -> None:
    """An interest stream has no durable of Floe while a session replaces its own."""

    def taking(take: Any) -> Any:
        async def hasty(client: Any, wanted: Any) -> Any:
            if wanted.is_durable:
                for name in await egress.consumers.own_durables(client, wanted):
                    await delete_consumer(client, wanted.stream, name)
            return await take(client, wanted)

        return hasty

    change(egress.reader, "open_consumer", taking)


@mutant
def redelivered_written_again() -> None:
    """A redelivery below the position is handled as a new message."""

    def making(init: Any) -> Any:
        def careless(self: Reader, *more: Any, **named: Any) -> None:
            init(self, *more, **{**named, "first": 1})
            self._wanted = replace(self._wanted, first=named["first"])

        return careless

    change(Reader, "__init__", making)


@mutant
def read_on_behind_the_source() -> None:
    """A session begins at the end of the source, not behind the archive."""

    def filtering(ephemeral: Any) -> Any:
        def newest(wanted: Any) -> Any:
            return {k: v for k, v in ephemeral(wanted).items() if k != "opt_start_seq"} | {"deliver_policy": "new"}

        return newest

    change(egress.consumers, "ephemeral", filtering)


@mutant
def condition_of_a_key_left_out() -> None:
    """A key is written without a condition on its revision."""

    def writing(write: Any) -> Any:
        async def unconditional(self: KeyValue, key: str, value: bytes, expected: int | None, *more: Any) -> Any:
            return await write(self, key, value, None, *more)

        return unconditional

    change(KeyValue, "_write", writing)


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
