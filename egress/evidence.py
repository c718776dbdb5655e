"""Gathers what `egress.identity` judges: what the source holds in the places of archived messages."""

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from common.chain import Chain
from common.clock import Clock, parse_time
from common.errors import DataError, FloeError, Unavailable
from common.jetstream.api import StreamInfo, next_message, stream_info
from common.jetstream.client import FloeClient
from common.jetstream.pull import get_message
from common.segments.columns import messages
from common.segments.segment import Message, SegmentRef, Tip
from common.segments.unread import open_stretch
from common.sequences import SequenceRange, Stretch, choose, cover, preference
from common.service.logs import get_logger
from egress.archive import Archive
from egress.consumers import LIMITS, WORK_QUEUE
from egress.deps import Confirming, PartitionDeps
from egress.identity import (
    Acceptance,
    Evidence,
    HeldMessage,
    SourceStream,
    SourceVerdict,
    VerdictKind,
    Witness,
    judge_with,
)
from egress.incarnations import HighWaterMarks, Incarnation, older
from egress.partition import Position, position

log = get_logger("egress.evidence")


T = TypeVar("T")


TIPS_KEPT = 10_000
ABSENT_TIPS = 100  # tips that the source does not hold, after which a row of the archive is compared instead
PROBED = 20  # rows, one behind the other, that are looked for in the source
ROWS_KEPT = 1_000
ABSENT_ROWS = 100  # messages of the stream, one behind the other, that the archive has no row of


class IdentityProbe:
    """Compares the archive of one feed with its stream. Tips are read from the store once."""

    def __init__(self, deps: PartitionDeps) -> None:
        self._store, self._chains, self._threads = deps.store, deps.chains, deps.pools.io
        self._marks = HighWaterMarks(deps.state)
        self._stream, self._filter = deps.partition.stream, deps.partition.filter_subject
        self._tips: dict[str, Tip | None] = {}
        self._rows: dict[tuple[str, int], Tip | None] = {}

    async def examine(
        self, client: FloeClient, current: Incarnation, archive: Archive, received: Tip | None
    ) -> Evidence:
        """What the source says now; `received`: the tip of what was received and not archived yet.

        Raises Unavailable where source or store cannot be asked.
        """
        created, continued = current.stream.created, current.continued
        # What this history covers, whether or not this incarnation has covered anything yet.
        end = archive.end or (archive.first - 1 if continued else 0)
        if (info := await stream_info(client, self._stream)) is None:
            return Evidence(None, created, end)
        whole = source_of(info)
        source = await self._own(client, whole)
        tips = await self._witnesses(client, archive, source)
        if archive.end and _all_absent(tips):
            tips += await self._beside(client, current.siblings, end, source)
        if _all_absent(tips):
            tips += await self._before(client, continued, source)
        tips = [*await self._revenants(client, archive.newest), *tips]
        last = None if received is None else await self.compare(client, received, source)
        matches = any(w.held is HeldMessage.EQUAL for w in (*tips, *([last] if last else [])))
        # A history that continues another one under one `created` holds messages of both.
        is_theirs = not matches and source.created != created
        older = await self._matching(client, current.chain, archive.first, source) if is_theirs else None
        source = replace(whole, first_timestamp_ns=source.first_timestamp_ns)
        return Evidence(source, created, end, tuple(tips), last, older)

    async def _own(self, client: FloeClient, source: SourceStream) -> SourceStream:
        """The stream as it begins for this feed, where acknowledgements decide what is held.

        There the first message may be one that another partition has yet to take, older than all of ours.
        """
        if not self._filter or source.retention == "limits":
            return source
        if (found := await self.next(client, source.first)) is None:
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
        if (found := await self.next(client, silent.first)) is None or found.sequence > silent.last:
            return []
        return [Witness(Tip.of(found), HeldMessage.DIFFERENT)]

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

    async def _beside(
        self, client: FloeClient, siblings: Sequence[Chain], end: int, source: SourceStream
    ) -> list[Witness]:
        """Of the first other partition that has something to compare: of one stream, theirs is as good.

        What differs behind this one's end says nothing about it.
        """
        for chain in siblings:
            found = await self._walk(client, (await self._former(chain, end)).newest, source)
            telling = [
                witness
                for witness in found
                if witness.held is HeldMessage.EQUAL
                or (witness.held is HeldMessage.DIFFERENT and witness.tip.sequence <= end)
            ]
            if telling:
                return telling
        return []

    async def _before(self, client: FloeClient, continued: Sequence[Chain], source: SourceStream) -> list[Witness]:
        """Of the incarnation before, where this one has nothing to compare; newest first."""
        found: list[Witness] = []
        for chain in continued:
            found += await self._witnesses(client, await self._former(chain, source.first), source)
        return _newest_first(found)

    async def _matching(self, client: FloeClient, current: Chain, first: int, source: SourceStream) -> int | None:
        """The newest older incarnation of which a message is there, where this one has its own."""
        for chain in older(current):
            witnesses = await self._witnesses(client, await self._former(chain, source.first), source)
            if any(each.held is HeldMessage.EQUAL and each.tip.sequence >= first for each in witnesses):
                return chain.incarnation
        return None

    async def _former(self, chain: Chain, position: int) -> Archive:
        """What of a chain that nothing is put into any more reaches `position`."""
        archive = Archive(chain, 1, self._store, self._chains, self._marks, self._threads)
        await archive.reach(position)
        return archive

    async def _witnesses(self, client: FloeClient, archive: Archive, source: SourceStream) -> list[Witness]:
        """From the newest tip back to the first that is held; where that differs, the oldest held one too.

        Of one history whatever is older than an equal message is equal, so the oldest held one tells whether
        any is. Where tips do not tell, rows of the archive speak for them: the newest that is held where the
        newest tip is not, and the oldest where none is equal. Where the newest tip is equal, as it is but for
        streams that let single messages go, nothing is listed for all this.
        """
        found, row = await self._walk(client, archive.newest, source), list[Witness]()
        if found and found[0].held is HeldMessage.ABSENT:
            row = await self._newest_row(client, archive, source)
        if not any(witness.held is HeldMessage.EQUAL for witness in (*found, *row)):
            found = await self._walk(client, await archive.look_back(source.first), source)
        if found and found[-1].held is HeldMessage.DIFFERENT:
            oldest_first = sorted(await archive.at(source.first), key=lambda ref: ref.coverage)
            oldest = await self._walk(client, oldest_first, source)
            found += [witness for witness in oldest if witness.tip.sequence < found[-1].tip.sequence][-1:]
        found += row
        if not any(witness.held is HeldMessage.EQUAL for witness in found):
            found += await self._oldest_row(client, archive, source)
        return _newest_first(found)

    async def _walk(self, client: FloeClient, refs: Iterable[SegmentRef], source: SourceStream) -> list[Witness]:
        """The witnesses in the order of `refs`, up to the first that the source holds."""
        found: list[Witness] = []
        for ref in refs:
            if found and ref.coverage.last < source.first:
                continue  # no tip of these can be held
            if (tip := await self._tip(ref)) is None:
                continue
            found.append(await self.compare(client, tip, source))
            if found[-1].held is not HeldMessage.ABSENT or len(found) >= ABSENT_TIPS:
                break
        return found

    async def _newest_row(self, client: FloeClient, archive: Archive, source: SourceStream) -> list[Witness]:
        """The newest message that the source holds of what is archived, beside its row.

        An older tip that is equal says nothing of what came behind it. Of a sample, where few messages have
        rows, the newest of the last rows that is held.
        """
        message = await self._newest_held(client, source, min(source.last, archive.end))
        near = () if message is None else await archive.at(message.sequence)
        if message is None or (ref := choose(near, message.sequence)) is None:
            return []
        if (tip := await self._row(ref, message.sequence)) is not None:
            return [Witness(tip, _held(message, tip))]
        return await self._first_held(client, ref, await self._sequences(ref, ref.coverage, newest=True), source)

    async def _newest_held(self, client: FloeClient, source: SourceStream, end: int) -> Message | None:
        """The last message that the source holds up to `end`, found by halves; None if it holds none."""
        low, high, found = source.first - 1, end, None  # behind `high` none is held
        while low < high:
            middle = (low + high + 1) // 2
            if (message := await self.next(client, middle)) is None or message.sequence > high:
                high = middle - 1
            else:
                low, found = message.sequence, message
        return found

    async def _oldest_row(self, client: FloeClient, archive: Archive, source: SourceStream) -> list[Witness]:
        """The oldest row that the source holds, of the archive's first ones from the source's first on."""
        ref = choose(await archive.at(source.first), source.first)
        if ref is None or source.first_timestamp_ns is None:
            return []
        rows = SequenceRange(source.first, ref.coverage.last)
        return await self._first_held(client, ref, await self._sequences(ref, rows), source)

    async def _first_held(
        self, client: FloeClient, ref: SegmentRef, sequences: Iterable[int], source: SourceStream
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

    async def compare(self, client: FloeClient, tip: Tip, source: SourceStream) -> Witness:
        """The archived message `tip`, and what the stream holds in its place."""
        if not source.first <= tip.sequence <= source.last:
            return Witness(tip, HeldMessage.ABSENT)
        if (message := await get_message(client, self._stream, tip.sequence)) is None:
            return Witness(tip, HeldMessage.ABSENT)
        return Witness(tip, _held(message, tip))

    async def first_unlike(self, client: FloeClient, refs: Sequence[SegmentRef], source: SourceStream, end: int) -> int:
        """The first sequence from which on the stream holds what `refs`, up to `end`, do not.

        The stream's first where nothing agrees. Raises what the stream and the store raise, DataError for a
        damaged segment.
        """
        end = min(source.last, end)
        for stretch in reversed(cover(refs, source.first, end)) if end >= source.first else []:
            sequences = await self._threads.run(self._sequences_of, stretch)
            if (equal := await self._last_equal(client, stretch.segment, sequences, source)) is not None:
                return equal + 1
        return source.first

    def _sequences_of(self, stretch: Stretch[SegmentRef]) -> list[int]:
        """The sequences of the messages that the stretch holds."""
        with open_stretch(self._store, stretch) as reader:
            columns: list[Any] = [b.column("sequence") for b in reader.batches(stretch.rows, ["sequence"])]
            return [sequence for column in columns for sequence in column.to_pylist()]

    async def _last_equal(
        self, client: FloeClient, ref: SegmentRef, sequences: Sequence[int], source: SourceStream
    ) -> int | None:
        """The last of `sequences` whose message the stream holds as it was archived; None if none is."""
        low, high = -1, len(sequences)  # up to `low` equal or not held, from `high` on different or not held
        equal = None
        while high - low > 1:
            middle = (low + high) // 2
            if (place := await self._next_held(client, sequences, middle, high)) is None:
                high = middle
                continue
            tip = await self._threads.run(self.row, ref, sequences[place])
            held = HeldMessage.ABSENT if tip is None else (await self.compare(client, tip, source)).held
            if held is HeldMessage.DIFFERENT:
                high = middle
            else:
                low = place
                equal = sequences[place] if held is HeldMessage.EQUAL else equal
        return equal

    async def _next_held(self, client: FloeClient, sequences: Sequence[int], first: int, end: int) -> int | None:
        """The first place in first..end-1 of `sequences` whose message the stream holds; None if none is.

        The stream is asked for what it holds next, so a stretch that it let go of costs one question. Behind
        many messages that were archived without a row, as a sample leaves them out, it is given up.
        """
        place = first
        for _ in range(ABSENT_ROWS):
            found = await self.next(client, sequences[place]) if place < end else None
            place = end if found is None else bisect_left(sequences, found.sequence, place, end)
            if found is None or place == end:
                return None
            if sequences[place] == found.sequence:
                return place
        return None


def _all_absent(witnesses: Sequence[Witness]) -> bool:
    return all(witness.held is HeldMessage.ABSENT for witness in witnesses)


def _newest_first(witnesses: Iterable[Witness]) -> list[Witness]:
    return sorted(witnesses, key=lambda witness: witness.tip.sequence, reverse=True)


def _held(message: Message, tip: Tip) -> HeldMessage:
    return HeldMessage.EQUAL if Tip.of(message) == tip else HeldMessage.DIFFERENT


def source_of(info: StreamInfo) -> SourceStream:
    """The stream as identity sees it."""
    holds = info.messages > 0
    return SourceStream(
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


Answer = tuple[Evidence, SourceVerdict]


class Inquiry:
    """The questions about the stream of one partition of a feed. `acceptance`: what an operator accepted."""

    def __init__(self, deps: PartitionDeps) -> None:
        self._deps, self._threads = deps, deps.pools.io
        self._stream, self._filter = deps.partition.stream, deps.partition.filter_subject
        self._probe = IdentityProbe(deps)
        self._lost: tuple[SequenceRange, ...] = ()
        self.acceptance: Acceptance | None = None

    async def info(self) -> StreamInfo | None:
        """The stream, None if there is none."""
        return await stream_info(self._deps.client, self._stream)

    async def look(self, current: Incarnation, archive: Archive, received: Tip | None = None) -> Answer:
        """The verdict on one look at the stream, over the shared connection."""
        return await self._examine(self._deps.client, current, archive, received)

    async def judge(self, current: Incarnation, archive: Archive, received: Tip | None = None) -> Answer:
        """The verdict, confirmed where it has consequences."""
        answer = await self.look(current, archive, received)
        if answer[1].is_same:
            return answer
        log.warning("confirming", action="confirming", why=answer[1].why, **current.chain.log_context())
        return await confirm(
            lambda: self._deps.freshly(lambda c: self._examine(c, current, archive, received)),
            self._deps.clock,
            self._deps.tuning.confirming,
            harmless=lambda found: found[1].is_same,
            outline=lambda found: (found[1].kind, found[0].source and found[0].source.created),
        )

    async def _examine(
        self, client: FloeClient, current: Incarnation, archive: Archive, received: Tip | None
    ) -> Answer:
        evidence = await self._probe.examine(client, current, archive, received)
        source = evidence.source
        is_theirs = source is not None and source.created != evidence.created and evidence.older is None
        is_matched = any(tip.held is HeldMessage.EQUAL for tip in evidence.tips)
        if source is not None and is_theirs and not is_matched:
            # Of a work queue, and of a stream that forgets, no message is left to tell.
            number = await self._threads.run(self._made_for, current, source.created)
            evidence = replace(evidence, older=number)
        return evidence, judge_with(evidence, self.acceptance)

    def _made_for(self, current: Incarnation, created: str) -> int | None:
        """The newest older incarnation that was made for the stream created at `created`. Blocking."""
        for chain in older(current.chain):
            try:
                document = self._deps.chains.read_stream(chain)
            except DataError as error:
                log.warning("not read", action="history_unread", error=str(error), **chain.log_context())
                continue
            if document is not None and document.created == created:
                return chain.incarnation
        return None

    async def proposal(
        self, current: Incarnation, archive: Archive, evidence: Evidence, verdict: SourceVerdict
    ) -> int | None:
        """Where the next incarnation should begin so that nothing is missed and nothing archived twice.

        None where there is no stream or it cannot be told.
        """
        source = evidence.source
        if source is None or verdict.kind not in (VerdictKind.ROLLED_BACK, VerdictKind.FORKED, VerdictKind.UNKNOWN):
            return None if source is None else source.first
        unlike, client = self._probe.first_unlike, self._deps.client
        try:
            known = await self._threads.run(self._known_of, current, archive, source, evidence.older)
            return max([await unlike(client, refs, source, end) for refs, end in known])
        except FloeError as error:
            log.warning("no proposal", action="no_proposal", error=str(error), **archive.chain.log_context())
            return None

    def _known_of(
        self, current: Incarnation, archive: Archive, source: SourceStream, older: int | None
    ) -> list[tuple[list[SegmentRef], int]]:
        """The segments of the history that the stream belongs to, and where each chain of it ended."""
        if older is None and (archive.end or not current.continued):
            return [(archive.refs(source.first), archive.end)]
        number = current.chain.incarnation - 1 if older is None else older
        following = self._deps.chains.read_stream(replace(current.chain, incarnation=number + 1))
        ends = (following and following.previous) or {}
        chains = [replace(current.chain, incarnation=number, partition=partition) for partition in ends]
        listed = partial(self._deps.store.list, position=source.first)
        return [(listed(each), ends[each.partition]) for each in chains] or [([], 0)]

    async def place(self, archive: Archive, source: SourceStream) -> Position:
        """Where to read. Raises Stopped where an empty listing may hide an archive.

        Where acknowledged messages leave the stream, its first sequence says nothing of what it holds behind:
        a hole was archived once and acknowledged, so none of it is held. What comes before the first sequence
        may have been another partition's.
        """
        is_kept, source_first = source.retention == LIMITS, source.first
        if source.retention == WORK_QUEUE:
            archive.holes = await self._waiting_holes(archive, source_first)

        def found(first: int) -> Position:
            behind = first if is_kept else max(first, archive.end + 1)
            return position(archive.first, archive.end, archive.holes, behind)

        def is_hollow(first: int) -> bool:
            return (is_kept or not self._filter) and archive.is_hollow(first)

        def is_harmless(first: int) -> bool:
            return not is_hollow(first) and found(first).lost in ((), self._lost)

        if not is_harmless(source_first):
            source_first = await confirm(
                lambda: self._deps.freshly(self._first),
                self._deps.clock,
                self._deps.tuning.confirming,
                harmless=is_harmless,
                outline=lambda _: None,
            )
        if is_hollow(source_first):
            raise archive.hollow(source_first)
        place = found(source_first)
        while place.fills_hole and not await self._is_hole(archive, place):
            place = found(source_first)
        if place.lost and place.lost != self._lost:
            ranges = ", ".join(map(str, place.lost))
            context = archive.chain.log_context()
            log.error("holes that the source lost", action="holes_lost", ranges=ranges, **context)
        self._lost = place.lost
        return place

    async def _is_hole(self, archive: Archive, place: Position) -> bool:
        """Whether the hole is there still; where not, the archive knows it no more."""
        hole = next(hole for hole in archive.holes if place.first in hole)
        if (left := await archive.uncovered(hole)) == [hole]:
            return True
        archive.holes = tuple(sorted([*left, *(each for each in archive.holes if each != hole)]))
        return False

    async def _waiting_holes(self, archive: Archive, first: int) -> tuple[SequenceRange, ...]:
        """The holes that are known, and those among what was delivered and never acknowledged: what lies in
        one of them must not be, it is nowhere else.
        """
        client, end = self._deps.client, archive.end
        held = await next_message(client, self._stream, first, self._filter) if first <= end else None
        begin = max(held.sequence, archive.first) if held is not None else end + 1
        if begin > end:
            return archive.holes
        below = [SequenceRange(h.first, min(h.last, begin - 1)) for h in archive.holes if h.first < begin]
        return (*below, *await archive.uncovered(SequenceRange(begin, end)))

    async def first(self) -> int:
        """The stream's first sequence. Raises Unavailable where there is no stream."""
        return await self._first(self._deps.client)

    async def _first(self, client: FloeClient) -> int:
        if (info := await stream_info(client, self._stream)) is None:
            raise Unavailable(f"stream {self._stream} does not exist any more")
        return source_of(info).first
