"""Gathers what `egress.identity` judges: what the source holds in the places of archived messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from common.chain import Chain
from common.clock import Clock
from common.errors import DataError, Unavailable
from common.jetstream.client import FloeClient
from common.jetstream.streams import (
    StreamInfo,
    get_message,
    next_message,
    parse_time,
    stream_info,
)
from common.segments.parquet import messages
from common.segments.segment import Message, SegmentRef, Tip
from common.segments.store import SegmentStore
from common.sequences import SequenceRange, choose, preference
from common.service.logs import get_logger
from common.service.threads import Threads
from egress.identity import Evidence, Held, Source, Witness
from egress.parts import Confirming

T = TypeVar("T")

log = get_logger("egress.evidence")

TIPS_KEPT = 10_000
ABSENT_TIPS = 100  # tips that the source does not hold, after which a row of the archive is compared instead


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a chain's past.

    `created`: as `stream.json` has it. `refs`: the chain's segments. `older`: the chains of former
    incarnations, newest first. `received`: the tip of what was received and not archived yet. `first`: where
    the chain begins. `continued`: the chains of the incarnation before, where that is the same history.
    `siblings`: those of the other partitions.
    """

    created: str
    refs: Sequence[SegmentRef]
    older: Sequence[Chain] = ()
    received: Tip | None = None
    first: int = 1
    continued: Sequence[Chain] = ()
    siblings: Sequence[Chain] = ()

    @property
    def end(self) -> int:
        """The last sequence covered, by this history; 0 if none is."""
        before = self.first - 1 if self.continued else 0
        return max((ref.coverage.last for ref in self.refs), default=before)


class Examiner:
    """Compares the archive of one feed with its stream. Tips are read from the store once."""

    def __init__(self, store: SegmentStore, stream: str, filter_subject: str, threads: Threads) -> None:
        self._store, self._stream, self._threads = store, stream, threads
        self._filter = filter_subject
        self._tips: dict[str, Tip | None] = {}

    async def examine(self, client: FloeClient, known: Known) -> Evidence:
        """What the source says now. Raises Unavailable where source or store cannot be asked."""
        info = await stream_info(client, self._stream)
        if info is None:
            return Evidence(None, known.created, known.end)
        whole = source_of(info)
        source = await self._own(client, whole)
        tips = await self._witnesses(client, known.refs, source)
        for others in (self._beside, self._before):
            if all(witness.held is Held.ABSENT for witness in tips):
                tips += await others(client, known, source)
        tips = [*await self._revenants(client, known.refs), *tips]
        received = None if known.received is None else await self.compare(client, known.received, source)
        matches = any(w.held is Held.EQUAL for w in (*tips, *([received] if received else [])))
        # A history that continues another one under one `created` holds messages of both.
        is_theirs = not matches and source.created != known.created
        older = await self._matching_incarnation(client, known, source) if is_theirs else None
        source = replace(whole, first_timestamp_ns=source.first_timestamp_ns)
        return Evidence(source, known.created, known.end, tuple(tips), received, older)

    async def _own(self, client: FloeClient, source: Source) -> Source:
        """The stream as it begins for this feed, where acknowledgements decide what is held.

        There the first message may be one that another partition has yet to take, older than all of ours.
        """
        if not self._filter or source.retention == "limits":
            return source
        found = await self._next(client, source.first)
        if found is None:
            return replace(source, first=source.last + 1, first_timestamp_ns=None)
        return replace(source, first=found.sequence, first_timestamp_ns=found.timestamp_ns)

    async def _revenants(self, client: FloeClient, refs: Sequence[SegmentRef]) -> list[Witness]:
        """A message at the end of the newest segment, where the consumer passed and found none.

        What was not there cannot come back: the stream was set back and written again.
        """
        newest = max(refs, key=preference, default=None)
        silent = None if newest is None else await self._silent_end(newest)
        if silent is None:
            return []
        found = await self._next(client, silent.first)
        if found is None or found.sequence > silent.last:
            return []
        return [Witness(Tip.of(found), Held.DIFFERENT)]

    async def _silent_end(self, ref: SegmentRef) -> SequenceRange | None:
        """What the segment covers behind the last message examined for it; None: nothing, or unknown."""
        try:
            tip = await self._read_tip(ref)
        except DataError:
            return None
        first = ref.coverage.first if tip is None else tip.sequence + 1
        return SequenceRange(first, ref.coverage.last) if first <= ref.coverage.last else None

    async def _next(self, client: FloeClient, sequence: int) -> Message | None:
        """The first message at or after `sequence` that the feed would get; None if there is none."""
        return await next_message(client, self._stream, sequence, self._filter)

    async def _beside(self, client: FloeClient, known: Known, source: Source) -> list[Witness]:
        """Of the first other partition that has something to compare: of one stream, theirs is as good.

        What differs behind this one's end says nothing about it.
        """
        for chain in known.siblings if known.refs else ():
            refs = await self._threads.run(self._store.list, chain, position=known.end)
            found = await self._walk(client, sorted(refs, key=lambda ref: ref.coverage, reverse=True), source)
            telling = [
                witness
                for witness in found
                if witness.held is Held.EQUAL
                or (witness.held is Held.DIFFERENT and witness.tip.sequence <= known.end)
            ]
            if telling:
                return telling
        return []

    async def _before(self, client: FloeClient, known: Known, source: Source) -> list[Witness]:
        """Of the incarnation before, where this one has nothing to compare; newest first."""
        found: list[Witness] = []
        for chain in known.continued:
            refs = await self._threads.run(self._store.list, chain, position=source.first)
            found += await self._witnesses(client, refs, source)
        return sorted(found, key=lambda witness: witness.tip.sequence, reverse=True)

    async def _matching_incarnation(self, client: FloeClient, known: Known, source: Source) -> int | None:
        """The newest older incarnation of which a message is there, where this one has its own."""
        for chain in known.older:
            refs = await self._threads.run(self._store.list, chain, position=source.first)
            witnesses = await self._witnesses(client, refs, source)
            if any(each.held is Held.EQUAL and each.tip.sequence >= known.first for each in witnesses):
                return chain.incarnation
        return None

    async def _witnesses(
        self, client: FloeClient, refs: Sequence[SegmentRef], source: Source
    ) -> list[Witness]:
        """From the newest tip back to the first that is held; where that differs, the oldest held one too.

        Of one history whatever is older than an equal message is equal, so the oldest held tip tells whether
        any is.
        """
        newest_first = sorted(refs, key=lambda ref: ref.coverage, reverse=True)
        found = await self._walk(client, newest_first, source)
        if found and found[-1].held is Held.DIFFERENT:
            oldest = await self._walk(client, reversed(newest_first), source)
            found += [witness for witness in oldest if witness.tip.sequence < found[-1].tip.sequence][-1:]
        elif not any(witness.held is Held.EQUAL for witness in found):
            found += await self._row_witness(client, refs, source)
        return found

    async def _walk(self, client: FloeClient, refs: Iterable[SegmentRef], source: Source) -> list[Witness]:
        """The witnesses in the order of `refs`, up to the first that the source holds."""
        found: list[Witness] = []
        for ref in refs:
            if found and ref.coverage.last < source.first:
                continue  # no tip of these can be held
            tip = await self._tip(ref)
            if tip is None:
                continue
            found.append(await self.compare(client, tip, source))
            if found[-1].held is not Held.ABSENT or len(found) >= ABSENT_TIPS:
                break
        return found

    async def _row_witness(
        self, client: FloeClient, refs: Sequence[SegmentRef], source: Source
    ) -> list[Witness]:
        """The source's first message against the archive's row: where all tips were deleted one by one."""
        ref = choose(refs, source.first)
        if ref is None or source.first_timestamp_ns is None:
            return []
        try:
            tip = await self._threads.run(self.row, ref, source.first)
        except DataError as error:
            log.warning("no row", action="no_tip", error=str(error), **ref.log_context())
            return []
        return [] if tip is None else [await self.compare(client, tip, source)]

    def row(self, ref: SegmentRef, sequence: int) -> Tip | None:
        """The archived message of that sequence; None if the segment has none. Blocking; raises DataError."""
        with self._store.open(ref) as reader:
            for batch in reader.batches(SequenceRange(sequence, sequence)):
                return next((Tip.of(message) for message in messages(batch)), None)
        return None

    async def _tip(self, ref: SegmentRef) -> Tip | None:
        """None where no message was examined, where a merge replaced the segment, or where it is damaged."""
        try:
            return await self._read_tip(ref)
        except DataError as error:
            log.warning("no tip", action="no_tip", error=str(error), **ref.log_context())
            return None

    async def _read_tip(self, ref: SegmentRef) -> Tip | None:
        """None where no message was examined. Raises DataError."""
        if ref.key not in self._tips:
            if len(self._tips) >= TIPS_KEPT:
                self._tips.clear()
            self._tips[ref.key] = await self._threads.run(self._store.tip, ref)
        return self._tips[ref.key]

    async def compare(self, client: FloeClient, tip: Tip, source: Source) -> Witness:
        """The archived message `tip`, and what the stream holds in its place."""
        if not source.first <= tip.sequence <= source.last:
            return Witness(tip, Held.ABSENT)
        message = await get_message(client, self._stream, tip.sequence)
        if message is None:
            return Witness(tip, Held.ABSENT)
        return Witness(tip, Held.EQUAL if Tip.of(message) == tip else Held.DIFFERENT)


def source_of(info: StreamInfo) -> Source:
    """The stream as identity sees it."""
    holds = info.messages > 0
    return Source(
        info.created,
        max(1, info.first_sequence),
        info.last_sequence,
        parse_time(info.first_timestamp) if holds else None,
        parse_time(info.last_timestamp) if holds else None,
        str(info.config.get("retention", "limits")),
        parse_time(info.time) if info.time else None,
    )


async def confirm(
    ask: Callable[[], Awaitable[T]],
    clock: Clock,
    confirming: Confirming,
    *,
    harmless: Callable[[T], bool],
    outline: Callable[[T], Hashable],
) -> T:
    """The answer that `ask`, on a fresh connection each time, gives again and again; equal ones have one
    `outline`.

    A harmless answer is taken at once, because nothing is stopped, minted or skipped for it. The others need
    agreement over time: the STREAM.INFO of a deposed leader is stale. Raises Unavailable where answers keep
    changing.
    """
    answers: list[T] = []
    for attempt in range(confirming.attempts):
        if attempt:
            await clock.sleep(confirming.span / (confirming.times - 1))
        answer = await ask()
        if harmless(answer):
            return answer
        if answers and outline(answers[-1]) != outline(answer):
            answers = []
        answers.append(answer)
        if len(answers) == confirming.times:
            return answer
    raise Unavailable(
        "the stream answers differently each time it is asked",
        hint="nothing to do, it is asked again by itself; where it stays so, a leader changes all the time, "
        "or something makes the stream again and again",
        code="E-UNSURE",
    )
