"""Gathers what `egress.identity` judges: what the source holds in the places of archived messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from common.chain import Chain
from common.clock import Clock
from common.errors import DataError, Unavailable
from common.jetstream.api import StreamInfo, get_message, next_message, parse_time, stream_info
from common.jetstream.client import FloeClient
from common.segments.parquet import messages
from common.segments.segment import Message, SegmentRef, Tip
from common.segments.store import SegmentStore
from common.segments.unread import open_stretch
from common.sequences import SequenceRange, Stretch, choose, preference
from common.service.logs import get_logger
from common.service.threads import Threads
from egress.deps import Confirming
from egress.identity import Evidence, Held, Source, Witness
from egress.listing import at, reaching

T = TypeVar("T")

log = get_logger("egress.evidence")

NONE: frozenset[str] = frozenset()
TIPS_KEPT = 10_000
ABSENT_TIPS = 100  # tips that the source does not hold, after which a row of the archive is compared instead
PROBED = 20  # rows, one behind the other, that are looked for in the source
ROWS_KEPT = 1_000


class Archived(Protocol):
    """The segments of a chain, as far as they are asked for; see `egress.archive.Archive`."""

    @property
    def end(self) -> int: ...
    @property
    def newest(self) -> Sequence[SegmentRef]: ...
    async def look_back(self, least: int) -> Sequence[SegmentRef]: ...
    async def at(self, sequence: int) -> Sequence[SegmentRef]: ...


@dataclass(frozen=True, slots=True)
class _Former:
    """The segments of a chain that nothing is put into any more, as far as the stream holds it."""

    chain: Chain
    newest: Sequence[SegmentRef]
    store: SegmentStore
    threads: Threads

    @property
    def end(self) -> int:
        return max((ref.coverage.last for ref in self.newest), default=0)

    async def look_back(self, _least: int) -> Sequence[SegmentRef]:
        return self.newest

    async def at(self, sequence: int) -> Sequence[SegmentRef]:
        return await self.threads.run(at, self.store, self.chain, sequence, NONE)


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a chain's past.

    `created`: as `stream.json` has it. `archive`: the chain's segments. `older`: the chains of former
    incarnations, newest first. `received`: the tip of what was received and not archived yet. `first`: where
    the chain begins. `continued`: the chains of the incarnation before, where that is the same history.
    `siblings`: those of the other partitions.
    """

    created: str
    archive: Archived
    older: Sequence[Chain] = ()
    received: Tip | None = None
    first: int = 1
    continued: Sequence[Chain] = ()
    siblings: Sequence[Chain] = ()

    @property
    def end(self) -> int:
        """The last sequence covered, by this history; 0 if none is."""
        before = self.first - 1 if self.continued else 0
        return self.archive.end or before


class Examiner:
    """Compares the archive of one feed with its stream. Tips are read from the store once."""

    def __init__(self, store: SegmentStore, stream: str, filter_subject: str, threads: Threads) -> None:
        self._store, self._stream, self._threads = store, stream, threads
        self._filter = filter_subject
        self._tips: dict[str, Tip | None] = {}
        self._rows: dict[tuple[str, int], Tip | None] = {}

    async def examine(self, client: FloeClient, known: Known) -> Evidence:
        """What the source says now. Raises Unavailable where source or store cannot be asked."""
        info = await stream_info(client, self._stream)
        if info is None:
            return Evidence(None, known.created, known.end)
        whole = source_of(info)
        source = await self._own(client, whole)
        tips = await self._witnesses(client, known.archive, source)
        for others in (self._beside, self._before):
            if all(witness.held is Held.ABSENT for witness in tips):
                tips += await others(client, known, source)
        tips = [*await self._revenants(client, known.archive.newest), *tips]
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
        found = await self.next(client, source.first)
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
        found = await self.next(client, silent.first)
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

    async def next(self, client: FloeClient, sequence: int) -> Message | None:
        """The first message at or after `sequence` that the feed would get; None if there is none."""
        return await next_message(client, self._stream, sequence, self._filter)

    async def _beside(self, client: FloeClient, known: Known, source: Source) -> list[Witness]:
        """Of the first other partition that has something to compare: of one stream, theirs is as good.

        What differs behind this one's end says nothing about it.
        """
        for chain in known.siblings if known.archive.end else ():
            beside = await self._former(chain, known.end)
            found = await self._walk(client, beside.newest, source)
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
            found += await self._witnesses(client, await self._former(chain, source.first), source)
        return sorted(found, key=lambda witness: witness.tip.sequence, reverse=True)

    async def _matching_incarnation(self, client: FloeClient, known: Known, source: Source) -> int | None:
        """The newest older incarnation of which a message is there, where this one has its own."""
        for chain in known.older:
            witnesses = await self._witnesses(client, await self._former(chain, source.first), source)
            if any(each.held is Held.EQUAL and each.tip.sequence >= known.first for each in witnesses):
                return chain.incarnation
        return None

    async def _former(self, chain: Chain, position: int) -> _Former:
        """What of a chain reaches `position`."""
        view = await self._threads.run(reaching, self._store, chain, position, NONE)
        return _Former(chain, view.newest, self._store, self._threads)

    async def _witnesses(self, client: FloeClient, archive: Archived, source: Source) -> list[Witness]:
        """From the newest tip back to the first that is held; where that differs, the oldest held one too.

        Of one history whatever is older than an equal message is equal, so the oldest held one tells whether
        any is. Where tips do not tell, rows of the archive speak for them: the newest that is held where the
        newest tip is not, and the oldest where none is equal. Where the newest tip is equal, as it is but for
        streams that let single messages go, nothing is listed for all this.
        """
        found, row = await self._walk(client, archive.newest, source), list[Witness]()
        if found and found[0].held is Held.ABSENT:
            row = await self._newest_row(client, archive, source)
        if not any(witness.held is Held.EQUAL for witness in (*found, *row)):
            found = await self._walk(client, await archive.look_back(source.first), source)
        if found and found[-1].held is Held.DIFFERENT:
            oldest_first = sorted(await archive.at(source.first), key=lambda ref: ref.coverage)
            oldest = await self._walk(client, oldest_first, source)
            found += [witness for witness in oldest if witness.tip.sequence < found[-1].tip.sequence][-1:]
        found += row
        if not any(witness.held is Held.EQUAL for witness in found):
            found += await self._oldest_row(client, archive, source)
        return sorted(found, key=lambda witness: witness.tip.sequence, reverse=True)

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

    async def _newest_row(self, client: FloeClient, archive: Archived, source: Source) -> list[Witness]:
        """The newest message that the source holds of what is archived, beside its row.

        An older tip that is equal says nothing of what came behind it. Of a sample, where few messages have
        rows, the newest of the last rows that is held.
        """
        message = await self._newest_held(client, source, min(source.last, archive.end))
        near = () if message is None else await archive.at(message.sequence)
        if message is None or (ref := choose(near, message.sequence)) is None:
            return []
        tip = await self._row(ref, message.sequence)
        if tip is not None:
            return [Witness(tip, _held(message, tip))]
        return await self._first_held(
            client, ref, await self._sequences(ref, ref.coverage, newest=True), source
        )

    async def _newest_held(self, client: FloeClient, source: Source, end: int) -> Message | None:
        """The last message that the source holds up to `end`, found by halves; None if it holds none."""
        low, high, found = source.first - 1, end, None  # behind `high` none is held
        while low < high:
            middle = (low + high + 1) // 2
            message = await self.next(client, middle)
            if message is None or message.sequence > high:
                high = middle - 1
            else:
                low, found = message.sequence, message
        return found

    async def _oldest_row(self, client: FloeClient, archive: Archived, source: Source) -> list[Witness]:
        """The oldest row that the source holds, of the archive's first ones from the source's first on."""
        ref = choose(await archive.at(source.first), source.first)
        if ref is None or source.first_timestamp_ns is None:
            return []
        rows = SequenceRange(source.first, ref.coverage.last)
        return await self._first_held(client, ref, await self._sequences(ref, rows), source)

    async def _first_held(
        self, client: FloeClient, ref: SegmentRef, sequences: Iterable[int], source: Source
    ) -> list[Witness]:
        """The first of `sequences` that the source holds, beside the segment's row."""
        for sequence in sequences:
            if not source.first <= sequence <= source.last:
                continue
            if (message := await get_message(client, self._stream, sequence)) is None:
                continue
            tip = await self._row(ref, sequence)
            return [] if tip is None else [Witness(tip, _held(message, tip))]
        return []

    async def _sequences(self, ref: SegmentRef, rows: SequenceRange, *, newest: bool = False) -> list[int]:
        """Of the first rows of the segment within `rows`, or of the last, newest first; empty if damaged."""
        try:
            return await self._threads.run(self._read_sequences, ref, rows, newest)
        except DataError as error:
            log.warning("no row", action="no_tip", error=str(error), **ref.log_context())
            return []

    def _read_sequences(self, ref: SegmentRef, rows: SequenceRange, newest: bool) -> list[int]:
        found: list[int] = []
        with self._store.open_part(ref, rows=rows) as reader:
            for batch in reader.batches(rows, ["sequence"]):
                column: Any = batch.column("sequence")
                found = [*found, *column.to_pylist()][-PROBED if newest else 0 :]
                if not newest and len(found) >= PROBED:
                    break
        return found[::-1] if newest else found[:PROBED]

    async def _row(self, ref: SegmentRef, sequence: int) -> Tip | None:
        """As `row`, read once; None where it is damaged."""
        key = ref.key, sequence
        if key not in self._rows:
            if len(self._rows) >= ROWS_KEPT:
                self._rows.clear()
            try:
                self._rows[key] = await self._threads.run(self.row, ref, sequence)
            except DataError as error:
                log.warning("no row", action="no_tip", error=str(error), **ref.log_context())
                return None
        return self._rows[key]

    def row(self, ref: SegmentRef, sequence: int) -> Tip | None:
        """The archived message of that sequence, which the cover takes from `ref`; None if there is none.

        Blocking; raises DataError.
        """
        stretch = Stretch(ref, SequenceRange(sequence, sequence))
        with open_stretch(self._store.in_parts(), stretch) as reader:
            for batch in reader.batches():
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
        return Witness(tip, _held(message, tip))


def _held(message: Message, tip: Tip) -> Held:
    return Held.EQUAL if Tip.of(message) == tip else Held.DIFFERENT


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
