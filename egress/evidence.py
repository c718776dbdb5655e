"""Evidence for `egress.identity`: the messages that the source holds at the sequences of archived messages."""

from bisect import bisect_left
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from common.archive.captures import CaptureStore, outside_effects
from common.archive.columns import messages
from common.archive.reader import SegmentReader
from common.archive.segment import Message, SegmentRef, Tip
from common.archive.unread import StretchReader, open_stretch
from common.chain import Chain
from common.clock import parse_time
from common.errors import DataError, FloeError, Unavailable
from common.logs import get_logger
from common.nats.api import LIMITS, WORK_QUEUE, StreamInfo, next_message, ready_stream_info, stream_info
from common.nats.client import FloeClient
from common.nats.pull import get_message
from common.sequences import SequenceRange, Stretch, choose_segment, cover, preference
from egress.archive import Archive
from egress.deps import EgressDeps, PartitionDeps
from egress.identity import (
    Evidence,
    HeldMessage,
    IdentityRecord,
    SourceStream,
    SourceVerdict,
    VerdictKind,
    Witness,
    is_any_equal,
    judge_with,
    remember,
)
from egress.incarnations import HighWaterMarks, Incarnation, older_incarnations
from egress.partition import Position, next_position

log = get_logger(__name__)


T = TypeVar("T")
Query = Callable[[FloeClient], Awaitable[T]]


CACHED_TIPS = 10_000  # tips and rows kept in memory
MAX_ABSENT_TIPS = 100  # tips that the source does not hold, after which a row of the archive is compared instead
PROBE_ROWS = 20  # consecutive rows to look up in the source
MAX_ABSENT_ROWS = 100  # consecutive messages of the stream without a row in the archive, after which a search ends


class ArchivedMessages:
    """Tips and rows of segments, each read from the store once."""

    def __init__(self, deps: PartitionDeps) -> None:
        self._store, self._threads = deps.store, deps.pools.io
        self._known: dict[tuple[str, int], Tip | None] = {}

    async def tip(self, ref: SegmentRef) -> Tip | None:
        """Return the tip of a segment; None if no message was examined. Raises DataError."""
        return await self._cached((ref.key, 0), self._store.tip, ref)

    async def row(self, ref: SegmentRef, sequence: int) -> Tip | None:
        """Return the archived message of that sequence, which the cover takes from `ref`; None if there is none.

        Raises DataError.
        """
        return await self._cached((ref.key, sequence), self._row, ref, sequence)

    async def _cached(self, key: tuple[str, int], read: Callable[..., Tip | None], *of: object) -> Tip | None:
        if key not in self._known:
            if len(self._known) >= CACHED_TIPS:
                self._known.clear()
            self._known[key] = await self._threads.run(read, *of)
        return self._known[key]

    def _row(self, ref: SegmentRef, sequence: int) -> Tip | None:
        stretch = Stretch(ref, SequenceRange(sequence, sequence))
        with open_stretch(self._store.with_partial_reads(), stretch) as reader:
            for batch in reader.batches():
                return next((Tip.of(message) for message in messages(batch)), None)
        return None

    async def sequences(self, stretch: Stretch[SegmentRef]) -> list[int]:
        """Return the sequences of the messages in the stretch. Raises DataError."""

        def read() -> list[int]:
            with open_stretch(self._store, stretch) as reader:
                return list(_sequences(reader, stretch.rows))

        return await self._threads.run(read)

    async def probe(self, ref: SegmentRef, rows: SequenceRange, *, newest: bool = False) -> list[int]:
        """Return the sequences of the first rows within `rows`, or of the last, newest first. Raises DataError."""

        def read() -> list[int]:
            with self._store.open_part(ref, rows=rows) as reader:
                found = _sequences(reader, rows)
                return [*deque(found, PROBE_ROWS)][::-1] if newest else [*islice(found, PROBE_ROWS)]

        return await self._threads.run(read)


def _sequences(reader: SegmentReader | StretchReader, rows: SequenceRange) -> Iterator[int]:
    for batch in reader.batches(rows, ["sequence"]):
        column: Any = batch.column("sequence")
        yield from column.to_pylist()


class StreamComparison:
    """Comparison of the stream with the archive, over `client`. `source`: the state of the stream at that moment.

    Each tip is compared once: a message that is deleted meanwhile cannot hide that it differed.
    """

    def __init__(
        self, deps: PartitionDeps, archived: ArchivedMessages, client: FloeClient, source: SourceStream
    ) -> None:
        self._deps, self._archived, self._client, self.source = deps, archived, client, source
        self._stream, self._filter = deps.partition.stream, deps.partition.filter_subject
        self._compared: dict[Tip, Witness] = {}

    async def narrow_to_filter(self) -> None:
        """Let the stream begin at this feed's first message, if acknowledgements decide which messages it holds.

        The stream's first message may be one that another partition has not received yet, older than all of ours.
        """
        if self._filter and self.source.retention != LIMITS:
            found, behind = await self._next(self.source.first), self.source.last + 1
            first, at = (behind, None) if found is None else (found.sequence, found.timestamp_ns)
            self.source = replace(self.source, first=first, first_timestamp_ns=at)

    async def _next(self, sequence: int) -> Message | None:
        """Return the first message at or after `sequence` that the feed would receive; None if there is none."""
        return await next_message(self._client, self._stream, sequence, self._filter)

    async def _message(self, sequence: int) -> Message | None:
        is_within = self.source.first <= sequence <= self.source.last
        return await get_message(self._client, self._stream, sequence) if is_within else None

    async def compare(self, tip: Tip) -> Witness:
        if tip not in self._compared:
            self._compared[tip] = _witness(tip, await self._message(tip.sequence))
        return self._compared[tip]

    async def tips(self, archive: Archive, current: Incarnation, end: int) -> list[Witness]:
        found = await self._witnesses(archive)
        if archive.end and _all_absent(found):
            found += await self._sibling_witnesses(current.siblings, end)
        if _all_absent(found):  # nothing to compare in this incarnation; the one before it may have something
            former = [await self._older_archive(chain, self.source.first) for chain in current.continued]
            found += _newest_first([witness for each in former for witness in await self._witnesses(each)])
        return [*await self._unexpected_messages(archive.newest), *found]

    async def _unexpected_messages(self, refs: Sequence[SegmentRef]) -> list[Witness]:
        """Find a message at the end of the newest segment's coverage, after its tip: the consumer found none there.

        A message cannot appear there later, unless the stream was set back and written again.
        """
        if (newest := max(refs, key=preference, default=None)) is None:
            return []
        try:
            tip = await self._archived.tip(newest)
        except DataError:
            return []
        first, last = newest.coverage.first if tip is None else tip.sequence + 1, newest.coverage.last
        if first > last or (found := await self._next(first)) is None or found.sequence > last:
            return []
        return [Witness(Tip.of(found), HeldMessage.DIFFERENT)]

    async def _sibling_witnesses(self, siblings: Sequence[Chain], end: int) -> list[Witness]:
        """Return the witnesses of the first other partition with something to compare: it is the same stream, so its
        messages prove as much.

        A difference after this partition's end proves nothing about it.
        """
        for chain in siblings:
            held = [w for w in await self._compare_tips((await self._older_archive(chain, end)).newest) if w.is_held]
            if decisive := [w for w in held if w.held is HeldMessage.EQUAL or w.tip.sequence <= end]:
                return decisive
        return []

    async def matching_incarnation(self, current: Chain, first: int) -> int | None:
        """Return the newest older incarnation with a message in the stream at or after `first`; None if none has."""
        for chain in older_incarnations(current):
            witnesses = await self._witnesses(await self._older_archive(chain, self.source.first))
            if any(each.held is HeldMessage.EQUAL and each.tip.sequence >= first for each in witnesses):
                return chain.incarnation
        return None

    async def _older_archive(self, chain: Chain, position: int) -> Archive:
        deps = self._deps
        archive = Archive(chain, 1, deps.store, deps.chains, HighWaterMarks(deps.state), deps.pools)
        await archive.load_from(position)
        return archive

    async def _witnesses(self, archive: Archive) -> list[Witness]:
        """Return the witnesses from the newest tip back to the first that is held, and the oldest held one if that
        differs.

        In one history, everything older than an equal message is equal, so the oldest held tip shows if any is equal.
        If tips do not decide, rows of the archive do: the newest held row if the newest tip is not held, and the oldest
        held row if nothing is equal. If the newest tip is equal, nothing is listed for this. It is equal except in
        streams that drop single messages.
        """
        found = await self._compare_tips(archive.newest)
        row = await self._newest_row(archive) if found and not found[0].is_held else []
        if not is_any_equal([*found, *row]):
            found = await self._compare_tips(await archive.load_older(self.source.first))
        if found and found[-1].held is HeldMessage.DIFFERENT:
            oldest_first = sorted(await archive.segments_at(self.source.first), key=lambda ref: ref.coverage)
            oldest = await self._compare_tips(oldest_first)
            found += [witness for witness in oldest if witness.tip.sequence < found[-1].tip.sequence][-1:]
        found += row
        if not is_any_equal(found):
            found += await self._oldest_row(archive)
        return _newest_first(found)

    async def _compare_tips(self, refs: Iterable[SegmentRef]) -> list[Witness]:
        """Return the witnesses in the order of `refs`, up to the first that the source holds.

        A segment has none if no message of it was examined, if a merge replaced it, or if it is damaged.
        """
        found: list[Witness] = []
        for ref in refs:
            if found and ref.coverage.last < self.source.first:
                continue  # the source can hold no tip of these
            if (tip := await _none_if_damaged("tip", ref, self._archived.tip(ref))) is None:
                continue
            found.append(await self.compare(tip))
            if found[-1].is_held or len(found) >= MAX_ABSENT_TIPS:
                break
        return found

    async def _newest_row(self, archive: Archive) -> list[Witness]:
        """Return the newest archived message that the source holds, compared with its row.

        An older tip that is equal proves nothing about later messages. In a sample few messages have rows, so the
        newest held message of the last rows is compared instead.
        """
        message = await self._newest_held(min(self.source.last, archive.end))
        near = () if message is None else await archive.segments_at(message.sequence)
        if message is None or (ref := choose_segment(near, message.sequence)) is None:
            return []
        tip = await self._row(ref, message.sequence)
        return [_witness(tip, message)] if tip else await self._first_held(ref, ref.coverage, newest=True)

    async def _newest_held(self, end: int) -> Message | None:
        """Return the last message that the source holds up to `end`, by bisection; None if it holds none."""
        low, high, found = self.source.first - 1, end, None  # no message is held from `high` + 1 to `end`
        while low < high:
            middle = (low + high + 1) // 2
            if (message := await self._next(middle)) is None or message.sequence > high:
                high = middle - 1
            else:
                low, found = message.sequence, message
        return found

    async def _oldest_row(self, archive: Archive) -> list[Witness]:
        ref = choose_segment(await archive.segments_at(self.source.first), self.source.first)
        if ref is None or self.source.first_timestamp_ns is None:
            return []
        return await self._first_held(ref, SequenceRange(self.source.first, ref.coverage.last))

    async def _first_held(self, ref: SegmentRef, rows: SequenceRange, *, newest: bool = False) -> list[Witness]:
        for sequence in await _none_if_damaged("row", ref, self._archived.probe(ref, rows, newest=newest)) or ():
            if (message := await self._message(sequence)) is not None:
                tip = await self._row(ref, sequence)
                return [] if tip is None else [_witness(tip, message)]
        return []

    async def _row(self, ref: SegmentRef, sequence: int) -> Tip | None:
        return await _none_if_damaged("row", ref, self._archived.row(ref, sequence))

    async def first_difference(self, refs: Sequence[SegmentRef], end: int) -> int | None:
        """Return the first sequence at which the stream may differ from `refs`, up to `end`: the one after the last
        equal.

        None if nothing is equal. Raises the errors of the stream and the store, DataError for a damaged segment.
        """
        first, end = self.source.first, min(self.source.last, end)
        for stretch in reversed(cover(refs, first, end)) if end >= first else []:
            sequences = await self._archived.sequences(stretch)
            if (equal := await self._last_equal(stretch.segment, sequences)) is not None:
                return equal + 1
        return None

    async def _last_equal(self, ref: SegmentRef, sequences: Sequence[int]) -> int | None:
        low, high = -1, len(sequences)  # up to `low` equal or not held, from `high` on different or not held
        equal = None
        while high - low > 1:
            middle = (low + high) // 2
            if (index := await self._next_held(sequences, middle, high)) is None:
                high = middle
                continue
            tip = await self._archived.row(ref, sequences[index])
            held = HeldMessage.ABSENT if tip is None else (await self.compare(tip)).held
            if held is HeldMessage.DIFFERENT:
                high = middle
            else:
                low = index
                equal = sequences[index] if held is HeldMessage.EQUAL else equal
        return equal

    async def _next_held(self, sequences: Sequence[int], first: int, end: int) -> int | None:
        """Return the first index in first..end-1 of `sequences` at which the stream holds the message; None if there is
        none.

        The stream is queried for its next message, so a stretch that it dropped costs one query. The search ends after
        many messages that were archived without a row, as in a sample.
        """
        index = first
        for _ in range(MAX_ABSENT_ROWS):
            found = await self._next(sequences[index]) if index < end else None
            index = end if found is None else bisect_left(sequences, found.sequence, index, end)
            if found is None or index == end:
                return None
            if sequences[index] == found.sequence:
                return index
        return None


async def _none_if_damaged(part: str, ref: SegmentRef, reading: Awaitable[T]) -> T | None:
    """Return the result of `reading`; None also if the segment is damaged, which is logged."""
    try:
        return await reading
    except DataError as error:
        log.warning("segment not read", action="segment_unread", part=part, error=str(error), **ref.log_context())
        return None


def _all_absent(witnesses: Sequence[Witness]) -> bool:
    return not any(witness.is_held for witness in witnesses)


def _newest_first(witnesses: Iterable[Witness]) -> list[Witness]:
    return sorted(witnesses, key=lambda witness: witness.tip.sequence, reverse=True)


def _witness(tip: Tip, message: Message | None) -> Witness:
    if message is None:
        return Witness(tip, HeldMessage.ABSENT)
    return Witness(tip, HeldMessage.EQUAL if Tip.of(message) == tip else HeldMessage.DIFFERENT)


def source_of(info: StreamInfo) -> SourceStream:
    first, last, retention = max(1, info.first_sequence), info.last_sequence, str(info.config.get("retention", LIMITS))
    at = parse_time(info.time) if info.time else None
    if not info.messages:
        return SourceStream(info.created, first, last, retention=retention, server_time_ns=at)
    times = parse_time(info.first_timestamp), parse_time(info.last_timestamp)
    return SourceStream(info.created, first, last, *times, retention, at, info.deleted)


async def confirm(
    deps: EgressDeps, query: Query[T], is_acceptable: Callable[[T], bool], key: Callable[[T], Hashable]
) -> T:
    """Return the answer that `query`, on a fresh connection each time, gives repeatedly. Equal answers have one
    `key`.

    A harmless answer is accepted at once, because nothing is stopped, created or skipped for it. The others need
    agreement over time: the STREAM.INFO of a deposed leader is stale. Raises Unavailable if answers keep changing.
    """
    answers: list[T] = []
    confirming = deps.tuning.confirming
    for attempt in range(confirming.attempts):
        if attempt:
            await deps.clock.sleep(confirming.span / (confirming.times - 1))
        answer = await deps.with_fresh_client(query)
        if is_acceptable(answer):
            return answer
        if answers and key(answers[-1]) != key(answer):
            answers = []
        answers.append(answer)
        if len(answers) == confirming.times:
            return answer
    raise Unavailable(
        "the answers about the stream keep changing",
        hint="nothing to do: egress repeats the check; if this persists, the leader of the stream keeps changing, "
        "or something keeps recreating the stream",
        code="E-SOURCE-UNSTABLE",
    )


Judgement = tuple[Evidence, SourceVerdict]


class Proposal(NamedTuple):
    """Beginning of the next incarnation at which nothing is missed and nothing archived twice.

    `is_agreed`: the message before is as archived, and so is everything before that message in one history.
    """

    first: int
    is_agreed: bool = False


class IdentityCheck:
    """Queries about the stream of one partition of a feed. `record`: what is known of its stream."""

    def __init__(self, deps: PartitionDeps) -> None:
        self._deps, self._threads, self._archived = deps, deps.pools.io, ArchivedMessages(deps)
        self._stream, self._filter = deps.partition.stream, deps.partition.filter_subject
        self._lost: tuple[SequenceRange, ...] = ()
        self._captures = CaptureStore(deps.chains.layout, deps.chains.objects)
        self._outside_effects: dict[Chain, bool] = {}
        # The last comparison with an equal message: the state of both sides, the evidence, and `first_timestamp_ns`.
        self._compared: tuple[tuple[object, ...], Evidence, int | None] | None = None
        self.record: IdentityRecord | None = None

    async def stream_info(self) -> StreamInfo | None:
        """Return the state of the stream, None if there is none. Raises Unavailable while it is being restored."""
        return await ready_stream_info(self._deps.client, self._stream)

    async def source(self, client: FloeClient | None = None) -> SourceStream:
        """Return the present state of the stream. Raises Unavailable if there is no stream."""
        if (info := await stream_info(client or self._deps.client, self._stream)) is None:
            raise Unavailable(f"stream {self._stream} does not exist any more")
        return source_of(info)

    async def first_sequence(self, client: FloeClient | None = None) -> int:
        """Return the first sequence of the stream. Raises Unavailable if there is no stream."""
        return (await self.source(client)).first

    async def is_gone(self) -> bool:
        """True if there is nothing to read: no stream, or one that is being restored. One check; raises the errors of
        the server.
        """
        info = await stream_info(self._deps.client, self._stream)
        return info is None or bool(info.restore_marker)

    async def can_read_again(self, received: Tip, first: int) -> bool:
        """True if the stream still holds the messages received, from `first` up to this tip. One check.

        False also while it is being restored. Raises the errors of the server.
        """
        if (info := await stream_info(self._deps.client, self._stream)) is None or info.restore_marker:
            return False
        source = source_of(info)
        comparison = StreamComparison(self._deps, self._archived, self._deps.client, source)
        return source.first <= first and (await comparison.compare(received)).held is HeldMessage.EQUAL

    async def judge_confirmed(
        self, current: Incarnation, archive: Archive, received: Tip | None, on_unconfirmed: Callable[[str], None]
    ) -> Judgement:
        """Return evidence and verdict; `on_unconfirmed` is called with the reason if the verdict has to be confirmed
        first.
        """
        answer = await self.judge_once(current, archive, received)
        if answer[1].is_same:
            return answer
        if any(witness.held is HeldMessage.DIFFERENT for witness in answer[0].tips):
            self.record = remember(self.record, *answer)  # a stale answer can lack messages, not alter one
        on_unconfirmed(reason := answer[1].reason)
        log.warning("verdict questioned", action="verdict_questioned", error=reason, **current.chain.log_context())
        return await confirm(
            self._deps,
            partial(self.judge_once, current, archive, received),
            is_acceptable=lambda found: found[1].is_same,
            key=lambda found: (found[1].kind, found[0].source and found[0].source.created),
        )

    async def judge_once(
        self, current: Incarnation, archive: Archive, received: Tip | None = None, client: FloeClient | None = None
    ) -> Judgement:
        """Return evidence and verdict of one comparison, over the shared connection unless another one is given.

        `received`: the tip of the messages received and not archived yet. Raises Unavailable if source or store cannot
        be reached.
        """
        evidence = await self._gather(client or self._deps.client, current, archive, received)
        verdict = judge_with(evidence, self.record)
        if not verdict.is_same and evidence.source is not None and evidence.source.created != evidence.created:
            verdict = await self._threads.run(self._as_restored, current.chain, evidence, verdict)
        return evidence, verdict

    def _affects_others(self, chain: Chain) -> bool:
        """True if a restore of the stream has effects elsewhere, by its captures, read once while it is gone."""
        if chain not in self._outside_effects:
            found = False
            with suppress(DataError):  # a restore reports it
                config, held = self._captures.config(chain), self._captures.consumers(chain)
                durable = [each.config for each in (held.consumers if held else ()) if each.config.get("durable_name")]
                pushed = {str(each["durable_name"]): "" for each in durable if each.get("deliver_subject")}
                found = any(outside_effects(chain.feed, config.config if config else {}, pushed))
            self._outside_effects = {chain: found}
        return self._outside_effects[chain]

    def _as_restored(self, chain: Chain, evidence: Evidence, verdict: SourceVerdict) -> SourceVerdict:
        """Accept a stream that `floe restore` made, if its limits left no archived message; else return `verdict`."""
        restored = self._captures.restored(chain)
        if restored is None or evidence.source is None or not restored.has_created(evidence.source.created):
            return verdict
        # A partition without an end had no segment at the restore, and may have covered nothing.
        end = restored.ends.get(chain.partition, min(restored.end, evidence.end))
        found = judge_with(evidence, IdentityRecord(evidence.source.created, end))
        return replace(found, reason=f"restored from the archive: {found.reason}") if found.is_same else verdict

    async def _gather(
        self, client: FloeClient, current: Incarnation, archive: Archive, received: Tip | None
    ) -> Evidence:
        created = current.stream.created
        # The coverage of this history, even if this incarnation has covered nothing yet.
        end = archive.end or (archive.first - 1 if current.continued else 0)
        if (info := await ready_stream_info(client, self._stream)) is None:
            affects_others = await self._threads.run(self._affects_others, current.chain)
            return Evidence(None, created, end, affects_others=affects_others)
        source = source_of(info)
        # A stream in the same state holds the same messages: an idle feed need not ask for them again.
        state = replace(info, time=""), archive.chain, archive.first, end, archive.newest[:1], received
        if self._compared is not None and self._compared[0] == state and client is self._deps.client:
            return replace(self._compared[1], source=replace(source, first_timestamp_ns=self._compared[2]))
        comparison = StreamComparison(self._deps, self._archived, client, source)
        await comparison.narrow_to_filter()
        tips = await comparison.tips(archive, current, end)
        last, number = None if received is None else await comparison.compare(received), None
        is_before = archive.end > 0 and source.last < archive.first
        if (source.created != created or is_before) and not is_any_equal(tips):
            # A history that continues another one under one `created` holds messages of both.
            if last is None or last.held is not HeldMessage.EQUAL:
                number = await comparison.matching_incarnation(current.chain, 1 if is_before else archive.first)
            if number is None and source.created != created:
                # A work queue, and a stream that drops messages, may hold none that could prove it.
                number = await self._threads.run(self._incarnation_created_for, current, source.created)
        source = replace(source, first_timestamp_ns=comparison.source.first_timestamp_ns)
        found = Evidence(source, created, end, tuple(tips), last, number, is_before)
        self._compared = (state, found, source.first_timestamp_ns) if is_any_equal(tips) else None
        return found

    def _incarnation_created_for(self, current: Incarnation, created: str) -> int | None:
        for chain in older_incarnations(current.chain):
            try:
                document = self._deps.chains.read_stream(chain)
            except DataError as error:
                log.warning("document not read", action="document_unread", error=str(error), **chain.log_context())
                continue
            if document is not None and document.created == created:
                return chain.incarnation
        return None

    async def proposal(
        self, current: Incarnation, archive: Archive, evidence: Evidence, verdict: SourceVerdict
    ) -> Proposal | None:
        """Return the proposed beginning; None if there is no stream or the beginning is not known."""
        source = evidence.source
        if source is None or verdict.kind not in (VerdictKind.ROLLED_BACK, VerdictKind.FORKED, VerdictKind.UNKNOWN):
            return None if source is None else Proposal(source.first)
        comparison = StreamComparison(self._deps, self._archived, self._deps.client, source)
        try:
            known = await self._threads.run(self._comparable_segments, current, archive, source, evidence.older_match)
            found = [at for refs, end in known if (at := await comparison.first_difference(refs, end)) is not None]
            return Proposal(max(found, default=source.first), bool(found))
        except FloeError as error:
            log.warning("proposal failed", action="proposal_failed", error=str(error), **archive.chain.log_context())
            return None

    def _comparable_segments(
        self, current: Incarnation, archive: Archive, source: SourceStream, older: int | None
    ) -> list[tuple[list[SegmentRef], int]]:
        if older is None and (archive.end or not current.continued):
            return [(archive.refs(source.first), archive.end)]
        number = current.chain.incarnation - 1 if older is None else older
        following = self._deps.chains.read_stream(current.chain.with_incarnation(number + 1))
        ends = (following and following.previous) or {}
        chains = [*map(current.chain.with_incarnation(number).with_partition, ends)]
        listed = partial(self._deps.store.list, position=source.first)
        return [(listed(each), ends[each.partition]) for each in chains] or [([], 0)]

    async def find_position(self, archive: Archive, source: SourceStream) -> Position:
        """Return the position. Raises Stopped if an empty listing may hide an archive.

        If acknowledged messages leave the stream, its first sequence proves nothing about the later ones: a hole was
        archived once and acknowledged, so none of it is held. Messages before the first sequence may have been another
        partition's.
        """
        is_kept, source_first = source.retention == LIMITS, source.first
        if source.retention == WORK_QUEUE:
            archive.holes = await self._unacknowledged_holes(archive, source_first)

        def found(first: int) -> Position:
            behind = first if is_kept else max(first, archive.end + 1)
            return next_position(archive.first, archive.end, archive.holes, behind)

        def may_be_wiped(first: int) -> bool:
            return (is_kept or not self._filter) and archive.may_be_wiped(first)

        def is_acceptable(first: int) -> bool:
            return not may_be_wiped(first) and found(first).lost in ((), self._lost)

        if not is_acceptable(source_first):
            source_first = await confirm(self._deps, self.first_sequence, is_acceptable, key=lambda _: None)
        if may_be_wiped(source_first):
            raise archive.wiped_error(source_first)
        position = found(source_first)
        while position.fills_hole and not await self._is_hole(archive, position):
            position = found(source_first)
        if position.lost and position.lost != self._lost:
            ranges = ", ".join(map(str, position.lost))
            log.error("holes lost by the source", action="holes_lost", ranges=ranges, **archive.chain.log_context())
        self._lost = position.lost
        return position

    async def _is_hole(self, archive: Archive, position: Position) -> bool:
        """True if the hole still exists; otherwise remove it from the archive's holes."""
        hole = next(hole for hole in archive.holes if position.first in hole)
        if (left := await archive.uncovered(hole)) == [hole]:
            return True
        archive.holes = tuple(sorted([*left, *(each for each in archive.holes if each != hole)]))
        return False

    async def _unacknowledged_holes(self, archive: Archive, first: int) -> tuple[SequenceRange, ...]:
        """Return the known holes, and those among the messages that were delivered and never acknowledged: messages in
        them must not be acknowledged, because there is no other copy.
        """
        client, end = self._deps.client, archive.end
        held = await next_message(client, self._stream, first, self._filter) if first <= end else None
        begin = max(held.sequence, archive.first) if held is not None else end + 1
        if begin > end:
            return archive.holes
        below = [SequenceRange(h.first, min(h.last, begin - 1)) for h in archive.holes if h.first < begin]
        return (*below, *await archive.uncovered(SequenceRange(begin, end)))
