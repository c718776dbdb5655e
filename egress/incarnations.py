"""Incarnations of a feed: the current one, and the creation of the first and the next.

A new incarnation is a high-water mark at 0 for each partition, a `stream.json`, and a `chain.json` for each partition,
put in that order and only if absent; existing ones count. `stream.json` holds the contents of every `chain.json`, so
that all hosts begin alike, and the next start completes an incarnation after a crash between the two. The marks come
first because the source may drop the beginning as soon as `stream.json` has fixed it: a mark distinguishes an archive
into which nothing was put from one that was lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from common.archive.documents import ChainDocument, ChainStart, ChainStore, StreamDocument
from common.chain import MAX_INCARNATION, Chain
from common.documents import JsonCodec
from common.errors import Stopped
from common.exits import believe_command, choices, import_command, repartition_command, resolve_command
from common.failpoints import failpoint
from common.logs import get_logger
from common.nats.api import StreamInfo
from common.nats.kv import KeyValue, KvDocument, state_key
from common.sequences import MAX_SEQUENCE
from egress.deps import PartitionDeps
from egress.partition import Partition, kv_error, partitions_of

log = get_logger(__name__)

First = Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCE)]


class End(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """End of a partition's coverage (`end` 0: nothing is covered), and its `first` in the next incarnation, which is of
    the stream created at `created`.
    """

    end: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)]
    first: First
    created: str


class EndDecision(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Decision of an operator to end the incarnation for the stream created at `created`.

    `first`: the beginnings of the partitions that cannot continue by themselves; the others begin after their ends.
    `continues_from`: of these partitions, as in StreamDocument, empty if nothing was compared; `continued`,
    `stream_first`: as there.
    """

    created: str
    first: dict[int, First]
    continues_from: dict[int, First] = {}
    continued: int | None = None
    stream_first: First | None = None


class NextStream(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Stream of the next incarnation, from STREAM.INFO. `first`: its first sequence, None if it was not recorded."""

    created: str
    config: dict[str, Any]
    first: First | None = None


class Closing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="format_version", tag=1):
    """Progress of closing. `next`: set once all partitions have their ends; nothing changes after that."""

    ends: dict[int, End] = {}
    decision: EndDecision | None = None
    next: NextStream | None = None

    def with_end(self, partition: int, end: End, count: int, stream: NextStream) -> Closing:
        if self.next is not None:
            return self
        ends = {**self.ends, partition: end}
        agree = all(number in ends and ends[number].created == stream.created for number in range(count))
        return msgspec.structs.replace(self, ends=ends, next=stream if agree else None)

    def without_end(self, partition: int) -> Closing:
        """Return a copy without the end of the partition, which reads on. Unchanged once the incarnation is closed."""
        if self.next is not None or partition not in self.ends:
            return self
        others = {number: end for number, end in self.ends.items() if number != partition}
        return msgspec.structs.replace(self, ends=others)

    def with_decision(self, decision: EndDecision) -> Closing:
        return self if self.next is not None else msgspec.structs.replace(self, decision=decision)

    def decision_for(self, created: str) -> EndDecision | None:
        """Return the decision; None unless it is about the stream created at `created`."""
        return self.decision if self.decision is not None and self.decision.created == created else None

    def missing(self, count: int, created: str) -> list[int]:
        return [n for n in range(count) if n not in self.ends or self.ends[n].created != created]


CLOSING = JsonCodec(Closing)
INCARNATION_INTERVAL_S = 3600.0  # seconds between two incarnations without an operator
MAX_FILTERS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Incarnation:
    """History of a stream for one partition, from the documents in the store."""

    chain: Chain
    stream: StreamDocument
    document: ChainDocument

    @property
    def chains(self) -> tuple[ChainDocument, ...]:
        return self.stream.chains or (self.document,)

    @property
    def siblings(self) -> tuple[Chain, ...]:
        numbers = [number for number in range(len(self.chains)) if number != self.chain.partition]
        return tuple(map(self.chain.with_partition, numbers))

    @property
    def continued(self) -> tuple[Chain, ...]:
        if not self.stream.continues or not self.chain.incarnation:
            return ()
        number = self.chain.incarnation - 1
        parts = sorted(self.stream.previous or {})
        return tuple(map(self.chain.with_incarnation(number).with_partition, parts))


class _MarkForm:
    """Encoding of a mark in the bucket."""

    def encode(self, end: int) -> bytes:
        return json.dumps({"end": end}).encode()

    def decode(self, raw: bytes) -> int:
        try:
            end = json.loads(raw)["end"]
        except (ValueError, TypeError, KeyError, RecursionError):
            end = None
        if not isinstance(end, int) or isinstance(end, bool) or end < 0:
            raise ValueError("expected an end, found none")
        return end


class HighWaterMarks:
    """High-water marks: the last sequence of a chain that was put and read back. No service lowers one.

    Methods raise DataError for an invalid value.
    """

    def __init__(self, state: KeyValue) -> None:
        self._state = state

    @staticmethod
    def key(chain: Chain) -> str:
        parts = (chain.site, chain.feed, f"{chain.incarnation:04d}", str(chain.partition))
        return state_key("egress", "mark", *parts)

    def _document(self, chain: Chain) -> KvDocument[int]:
        hint = f"to believe the listing instead:\n{believe_command(chain)}"
        return KvDocument(self._state, self.key(chain), _MarkForm(), kv_error(f"high-water mark of {chain}", hint))

    async def get(self, chain: Chain) -> int | None:
        """Return the mark; None if there is none."""
        return (await self._document(chain).get())[0]

    async def create(self, chain: Chain) -> int:
        """Write a mark of 0 unless there is one. Return the stored mark."""
        return 0 if await self._document(chain).create(0) is not None else await self.get(chain) or 0

    async def overwrite(self, chain: Chain, end: int) -> None:
        """Set the mark, even if that lowers it."""
        await self._document(chain).put(end)

    async def raise_to(self, chain: Chain, end: int) -> None:
        await self._document(chain).change(lambda found: end if found is None else max(found, end))


class Incarnations:
    """Incarnations of one partition of a feed."""

    def __init__(self, deps: PartitionDeps) -> None:
        self._partition, self._feed = deps.partition, deps.partition.chain
        self._chains, self._marks = deps.chains, HighWaterMarks(deps.state)
        self._threads, self._clock = deps.pools.io, deps.clock

    async def load(self) -> Incarnation | None:
        """Return the newest incarnation; None for a new feed. Raises Stopped if its partitions are not those of the
        configuration.
        """
        return await self._threads.run(self._load)

    def _load(self) -> Incarnation | None:
        number = newest_incarnation(self._chains, self._feed)
        return None if number is None else self._read(self._feed.with_incarnation(number))

    def _read(self, chain: Chain) -> Incarnation | None:
        """Return the incarnation; create its `chain.json` if a crash prevented that.

        None if there is only a `stream.json` of the first version: its partition has not begun.
        """
        stream, document = self._chains.read_stream(chain), self._chains.read_chain(chain)
        if stream is None:
            raise self._missing_error(chain)
        if stream.importing:
            raise self._import_error(chain)
        layout = stream.chains or self._layout_of_v1(chain, document)
        if not layout:
            return None
        self._check(chain, layout)
        if document is None:
            return self._create_chain(chain, stream, layout[chain.partition])
        self._check_own(chain, document)
        return Incarnation(chain, stream, document)

    def _layout_of_v1(self, chain: Chain, document: ChainDocument | None) -> tuple[ChainDocument, ...]:
        """Return the chains if `stream.json` does not name them: there was one partition then."""
        if document is None and chain.partition:
            document = self._chains.read_chain(chain.with_partition(0))
        if document is None and chain.incarnation:
            document = ChainDocument(self._partition.filters, 1, 1)
        return () if document is None else (document,)

    def _check(self, chain: Chain, layout: Sequence[ChainDocument]) -> None:
        """Raise Stopped (E-FILTERS) if the partitions are not those of the configuration."""
        configured = configured_layout(self._partition)
        if partition_layout(layout) != partition_layout(configured):
            raise Stopped(
                f"{chain}: begun with {layout_text(layout)}, configured with {layout_text(configured)}",
                hint="restore the former configuration, or stop egress and begin the next incarnation with this one:\n"
                + repartition_command(chain.feed),
                code="E-FILTERS",
            )

    def _check_own(self, chain: Chain, document: ChainDocument) -> None:
        expected = partition_layout(configured_layout(self._partition))[chain.partition]
        if partition_layout([document])[0] != expected:
            raise Stopped(
                f"{chain}: its chain.json contradicts stream.json",
                hint=f"move {self._chains.layout.chain_document(chain)} away: egress writes it again from stream.json "
                "and the configuration; or restore both objects",
                code="E-HISTORY",
            )

    def _missing_error(self, chain: Chain) -> Stopped:
        missing = self._chains.layout.stream_document(chain)
        return Stopped(
            f"{chain}: expected {missing} beside its chain.json, found none",
            hint="restore that object, and the feed continues by itself; or give the feed another `name`: "
            "it then begins as a new feed",
            code="E-HISTORY",
        )

    # Beginning

    async def begin_first(self, info: StreamInfo, first: int) -> Incarnation:
        """Make incarnation 0000 begin at `first`, or load the one that another instance made.

        Raises Stopped if its archive was lost.
        """
        starts, stream_first = ChainStart.of(configured_layout(self._partition, first)), max(1, info.first_sequence)
        document = StreamDocument(info.config, info.created, None, starts, stream_first=stream_first)
        found = await self._create_stream(self._feed, document)
        if found.chains:
            return await self._threads.run(self._loaded, self._feed)
        # In the first version, `stream.json` did not fix the beginning: `chain.json` does.
        own = document.chains[self._feed.partition]
        return await self._threads.run(self._create_chain, self._feed, found, own)

    # An import writes chain.json last: until then nobody else sees the chain

    async def begin_import(self, document: StreamDocument) -> Incarnation:
        """Make incarnation 0000 for an import, or continue one of the same backup. Raises Stopped if there is another,
        or its archive was lost.
        """
        found = await self._create_stream(self._feed, document)
        if found.importing != document.importing:
            raise self._import_error(self._feed)
        if found != document:  # the server made the scratch stream at another time
            await self._threads.run(self._chains.replace_stream, self._feed, document)
        return Incarnation(self._feed, document, document.chains[0])

    async def finish_import(self, current: Incarnation) -> None:
        await self._threads.run(self._create_chain, current.chain, current.stream, current.document)
        failpoint("import.visible")
        document = msgspec.structs.replace(current.stream, importing="")
        await self._threads.run(self._chains.replace_stream, current.chain, document)

    def _import_error(self, chain: Chain) -> Stopped:
        prefixes = self._chains.layout.stream_document(chain), self._chains.layout.incarnation_prefix(chain)
        return Stopped(
            f"{chain}: the import of a backup into this chain has not ended",
            hint=choices(
                (
                    "stop egress, and repeat the import of that backup, from its folder DIR",
                    import_command("DIR", chain),
                ),
                f"or remove {' and all below '.join(prefixes)}: nothing has read them",
            ),
            code="E-IMPORT-UNFINISHED",
        )

    async def _create_stream(self, chain: Chain, document: StreamDocument) -> StreamDocument:
        await self._begin_marks(chain, len(document.chains))
        failpoint("egress.before_stream_document")
        found = await self._threads.run(self._chains.create_stream, chain, document)
        failpoint("egress.after_stream_document")
        return found

    async def _begin_marks(self, chain: Chain, count: int) -> None:
        """Record for each partition of an incarnation that does not exist yet that nothing was put.

        If a document exists already, a missing mark was lost: it proves nothing. Raises Stopped if a mark records a put
        and there is still no `stream.json`: another instance writes it before its first put.
        """
        if await self._threads.run(self._has_document, chain):
            return
        parts = [chain.with_partition(number) for number in range(count)]
        ends = [(partition, await self._marks.create(partition)) for partition in parts]
        put = [(partition, end) for partition, end in ends if end]
        if put and not await self._threads.run(self._has_document, chain):
            raise self._lost_error(*put[0])

    def _has_document(self, chain: Chain) -> bool:
        if self._chains.read_stream(chain) is not None:
            return True
        listed = self._chains.chains(chain.site, chain.feed)
        return any(each.incarnation == chain.incarnation for each in listed)

    async def find_lost(self, chain: Chain) -> Stopped | None:
        """Return the error if something was put into a chain and no document of its incarnation exists any more.

        Raises DataError for an invalid mark.
        """
        if not (end := await self._marks.get(chain)) or await self._threads.run(self._has_document, chain):
            return None
        return self._lost_error(chain, end)

    def _lost_error(self, chain: Chain, end: int) -> Stopped:
        layout = self._chains.layout
        return Stopped(
            f"{chain}: a high-water mark at {end}, but neither {layout.stream_document(chain)} nor a chain.json",
            hint="restore the objects of the archive; or accept their loss, and the feed begins again:\n"
            + resolve_command(chain if chain.partition else chain.feed, "--believe-listing --all-incarnations"),
            code="E-EMPTY-ARCHIVE",
        )

    async def create_next(self, current: Incarnation, closing: Closing) -> Incarnation:
        """Make the incarnation after `current`, which `closing` has closed, or load it.

        Raises Stopped if it exists for another stream, or was lost.
        """
        stream, chain = closing.next, current.chain.next_incarnation()
        if stream is None:
            raise ValueError(f"{current.chain}: not closed")
        previous = {number: end.end for number, end in closing.ends.items()}
        layout = [msgspec.structs.replace(each, first=closing.ends[n].first) for n, each in enumerate(current.chains)]
        decision = closing.decision_for(stream.created) or EndDecision(stream.created, {}, stream_first=stream.first)
        # A partition that continues by itself is the same up to its end.
        joins = {n: decision.continues_from.get(n, end.first) for n, end in closing.ends.items()}
        more = False, joins if decision.continues_from else None, decision.continued, decision.stream_first
        document = StreamDocument(stream.config, stream.created, previous, ChainStart.of(layout), *more)
        await self.open_next(chain, document)
        return await self._threads.run(self._loaded, chain)

    async def open_next(self, chain: Chain, document: StreamDocument) -> None:
        """Create the next incarnation's documents. Raises Stopped if there is a `stream.json` of another stream."""
        found = await self._create_stream(chain, document)
        if (found.created, found.previous) == (document.created, document.previous):
            return
        if found.created == document.created:
            ends = {"expected": dict(document.previous or {}), "found": dict(found.previous or {})}
            log.warning("incarnation closed elsewhere", action="incarnation_conflicted", **ends, **chain.log_context())
            return
        raise Stopped(
            f"{chain}: expected the stream created at {found.created}, found one created at {document.created}",
            hint="two sites under one name? give one of them another `site`, or the feed another `name`; "
            "or continue with the incarnation after that one:\n" + resolve_command(chain.feed, "--new-incarnation"),
            code="E-INCARNATION",
        )

    async def check_interval(self, current: Chain, source_first: int) -> None:
        """Raise Stopped if the current incarnation was itself made less than an hour ago.

        `source_first`: first sequence of the stream, proposed to the operator as the beginning of the next one.
        """
        if current.incarnation == 0:
            return
        key = self._chains.layout.stream_document(current)
        info = await self._threads.run(self._chains.objects.head, key)
        left = INCARNATION_INTERVAL_S - (self._clock.now() - info.modified) if info else 0.0
        if left > 0:
            raise Stopped(
                f"{current}: the stream was recreated twice within an hour",
                hint="something keeps recreating it, or two sites share one name and each has a stream of this name; "
                f"the next incarnation begins by itself in {left:.0f} s, or at once:\n"
                + resolve_command(current.feed, f"--new-incarnation --from {source_first}"),
                code="E-MINT-INTERVAL",
            )

    def _loaded(self, chain: Chain) -> Incarnation:
        if (found := self._read(chain)) is None:
            raise self._missing_error(chain)
        return found

    def _create_chain(self, chain: Chain, stream: StreamDocument, document: ChainDocument) -> Incarnation:
        found = self._chains.create_chain(chain, document)
        failpoint("egress.after_chain_document")
        log.info("incarnation begun", action="incarnation_begun", first=found.first, **chain.log_context())
        self._check_own(chain, found)
        return Incarnation(chain, stream, found)


def newest_incarnation(chains: ChainStore, feed: Chain) -> int | None:
    """Return the newest incarnation that has a `stream.json` or a `chain.json`; None for a new feed."""
    listed = chains.chains(feed.site, feed.feed)
    newest = max((chain.incarnation for chain in listed), default=-1)
    following = min(newest + 1, MAX_INCARNATION)
    if chains.read_stream(feed.with_incarnation(following)) is not None:
        return following
    return None if newest < 0 else newest


def configured_layout(partition: Partition, first: int = 1) -> tuple[ChainDocument, ...]:
    parts, relay = partitions_of(partition.site, partition.settings), partition.settings.relay
    return tuple(ChainDocument(each.filters, len(parts), first, relay) for each in parts)


def partition_layout(layout: Sequence[ChainDocument]) -> list[tuple[tuple[str, ...], int, bool]]:
    return [(each.filters, each.partitions, each.relay) for each in layout]


def layout_text(layout: Sequence[ChainDocument]) -> str:
    relay = " as a relay" if layout[0].relay else ""
    return filters_text([each.filters[0] if each.filters else "" for each in layout]) + relay


def filters_text(filters: Sequence[str]) -> str:
    """Describe filters in words; an empty one means all subjects."""
    if len(filters) == 1:
        return f"the filter {filters[0]}" if filters[0] else "the whole stream"
    more = f" and {len(filters) - MAX_FILTERS_SHOWN} more" if len(filters) > MAX_FILTERS_SHOWN else ""
    return f"{len(filters)} partitions ({', '.join(filters[:MAX_FILTERS_SHOWN])}{more})"


def older_incarnations(current: Chain) -> Sequence[Chain]:
    return [current.with_incarnation(number) for number in reversed(range(current.incarnation))]


class Closings:
    """Closing of each incarnation. Methods raise the errors of the bucket, and DataError (E-STATE-KV)."""

    def __init__(self, state: KeyValue) -> None:
        self._state = state

    @staticmethod
    def key(chain: Chain) -> str:
        return state_key("egress", "end", chain.site, chain.feed, f"{chain.incarnation:04d}")

    def _document(self, chain: Chain) -> KvDocument[Closing]:
        hint = "to discard it, so that each partition records its end again, and you decide again:\n"
        error = kv_error(f"closing of {chain}", hint + believe_command(chain))
        return KvDocument(self._state, self.key(chain), CLOSING, error)

    async def get(self, chain: Chain) -> Closing:
        """Return the closing; an empty one if it has not begun."""
        return (await self._document(chain).get())[0] or Closing()

    async def change(self, chain: Chain, step: Callable[[Closing], Closing]) -> Closing:
        """Store the result of `step` for the current value; repeat if another instance was faster. Return the stored
        value.
        """

        def changed(found: Closing | None) -> Closing | None:
            made = step(found or Closing())
            return None if made == Closing() and found is None else made

        return await self._document(chain).change(changed) or Closing()
