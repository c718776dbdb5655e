"""The incarnations of a feed: which one is current, how the first and the next come to be.

A new incarnation is two objects, `stream.json` then `chain.json`, both put only if absent; what is there
counts. A crash between them leaves an incarnation without a chain, which the next start completes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.chain import MAX_INCARNATION, Chain
from common.clock import Clock
from common.errors import Stopped
from common.failpoints import failpoint
from common.jetstream.streams import StreamInfo
from common.objects.port import ObjectStore
from common.segments.documents import ChainDocument, ChainStore, StreamDocument
from common.service.logs import get_logger
from common.service.threads import Threads

log = get_logger("egress.history")

MINT_INTERVAL = 3600.0  # seconds between two incarnations without an operator


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One history of a stream, as the store has it."""

    chain: Chain
    stream: StreamDocument
    document: ChainDocument


class History:
    """The incarnations of one feed (partition 0) of a site."""

    def __init__(
        self,
        feed: Chain,
        filters: tuple[str, ...],
        chains: ChainStore,
        objects: ObjectStore,
        threads: Threads,
        clock: Clock,
    ) -> None:
        self._feed, self._filters = feed, filters
        self._chains, self._objects, self._threads, self._clock = chains, objects, threads, clock

    async def load(self) -> Incarnation | None:
        """The newest incarnation; None for a new feed. Raises Stopped where it has other filters."""
        found = await self._threads.run(self._load)
        if found is not None and found.document.filters != self._filters:
            raise Stopped(
                f"{found.chain}: begun with filters {list(found.document.filters)}, "
                f"configured are {list(self._filters)}",
                hint="restore filter_subject, or give the feed another `name`",
                code="E-FILTERS",
            )
        return found

    def _load(self) -> Incarnation | None:
        listed = self._chains.chains(self._feed.site, self._feed.feed)
        numbers = [chain.incarnation for chain in listed if chain.partition == self._feed.partition]
        newest = max(numbers, default=-1)
        begun = self._begun(newest + 1)
        if begun is not None and newest >= 0:
            return self._create_chain(begun, 1)
        return None if newest < 0 else self._read(replace(self._feed, incarnation=newest))

    def _begun(self, number: int) -> Chain | None:
        """The chain of incarnation `number`, if that has a `stream.json`."""
        if number > MAX_INCARNATION:
            return None
        chain = replace(self._feed, incarnation=number)
        return None if self._chains.read_stream(chain) is None else chain

    def _read(self, chain: Chain) -> Incarnation:
        stream, document = self._chains.read_stream(chain), self._chains.read_chain(chain)
        if stream is None or document is None:
            missing = self._chains.layout.stream_document(chain)
            raise Stopped(
                f"{chain}: expected {missing} beside its chain.json, found none",
                hint="restore that object, or give the feed another `name`",
                code="E-HISTORY",
            )
        return Incarnation(chain, stream, document)

    async def begin(self, info: StreamInfo, first: int) -> Incarnation:
        """Make incarnation 0000 begin at `first`, or load what another instance has made of it."""
        document = StreamDocument(info.config, info.created)
        return await self._threads.run(self._create, self._feed, document, first)

    async def mint(self, current: Incarnation, info: StreamInfo, end: int) -> Incarnation:
        """Make the incarnation behind `current`, which ended at `end`, for the stream as `info` has it.

        Exactly that one: if it exists it must be of the same stream. Raises Stopped otherwise, or where the
        current one was itself made less than an hour ago.
        """
        return await self._threads.run(self._mint, current, info, end)

    def _mint(self, current: Incarnation, info: StreamInfo, end: int) -> Incarnation:
        chain = current.chain.next_incarnation()
        if self._chains.read_stream(chain) is None:
            self._check_interval(current.chain)
        document = StreamDocument(info.config, info.created, {current.chain.partition: end})
        minted = self._create(chain, document, 1)
        if minted.stream.created != info.created:
            raise Stopped(
                f"{chain}: made for the stream created at {minted.stream.created}, "
                f"found one created at {info.created}",
                hint="two sites under one name? give one of them another `site`, or the feed another `name`",
                code="E-INCARNATION",
            )
        if minted.stream.previous != document.previous:
            log.warning(
                "incarnation ended elsewhere", action="previous_differs", end=end, **chain.log_context()
            )
        return minted

    def _check_interval(self, current: Chain) -> None:
        if current.incarnation == 0:
            return
        info = self._objects.head(self._chains.layout.stream_document(current))
        left = MINT_INTERVAL - (self._clock.now() - info.modified) if info else 0.0
        if left > 0:
            raise Stopped(
                f"{current}: the stream was made anew twice within an hour",
                hint="something makes it again and again; "
                f"the next incarnation begins by itself in {left:.0f} s",
                code="E-MINT-INTERVAL",
            )

    def _create(self, chain: Chain, document: StreamDocument, first: int) -> Incarnation:
        self._chains.create_stream(chain, document)
        failpoint("egress.after_stream_document")
        return self._create_chain(chain, first)

    def _create_chain(self, chain: Chain, first: int) -> Incarnation:
        self._chains.create_chain(chain, ChainDocument(self._filters, 1, first))
        failpoint("egress.after_chain_document")
        log.info("incarnation begun", action="incarnation_begun", first=first, **chain.log_context())
        return self._read(chain)


def older(current: Chain) -> Sequence[Chain]:
    """The chains of the incarnations before `current`, newest first."""
    return [replace(current, incarnation=number) for number in reversed(range(current.incarnation))]
