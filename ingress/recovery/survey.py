"""Survey the archive for a request: find its chains and sequences, the segments that hold them, and the holes.

Nothing is written. Only footers are read, and the sequences and times of rows if a time bound or a segment with unread
sequences needs them. A listing is repeated if compaction has removed a segment that it named.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from common.archive.documents import ChainStore, Floor, StreamDocument
from common.archive.scan import RELIST_ATTEMPTS, ChainArchive, vanishing_error, with_current_listing
from common.archive.segment import SegmentRef
from common.archive.store import SegmentStore
from common.archive.times import Timeline
from common.archive.unread import UnreadableSegment, open_stretch, reading
from common.chain import Chain
from common.clock import Clock
from common.errors import DataError, SegmentCorrupt, Stopped
from common.exits import choices, verify_command
from common.nats.api import StreamInfo
from common.sequences import SequenceRange, Stretch, cover, holes
from common.service.process import ThreadPool
from common.settings.types import format_count, size_words
from ingress.recovery.ranges import (
    ArchivedSpan,
    ChainRange,
    ReplayChain,
    ReplayPart,
    ReplayPlan,
    TimeBounds,
    check_overlap,
    clip_range,
    period_text,
    split_range,
)
from ingress.recovery.request import ReplayHints, ReplayRequest
from ingress.recovery.source import hole_error, retention_error
from ingress.recovery.target import (
    StoredReplay,
    StreamTemplate,
    UnreadableReplay,
    other_replay_error,
    unreadable_replay_error,
)


class SegmentTimes:
    """The times of the segments `refs` of a chain that begins at `begins`. Blocking; raises SegmentGone.

    `covered`: the last sequence that a segment covers; 0 without segments.
    """

    def __init__(self, store: SegmentStore, refs: Sequence[SegmentRef], begins: int) -> None:
        self._store, self._refs, self._begins = store, list(refs), begins
        self._timeline = Timeline(store, refs, begins)
        self.covered = max((ref.coverage.last for ref in refs), default=0)

    def between(self, moments: TimeBounds) -> tuple[int, int] | None:
        """Return the first and last sequence from the first moment (inclusive) to the second (exclusive); None if there
        is none.
        """
        begin_ns, end_ns = moments
        first, last = self._begins, self.covered
        if begin_ns is not None:
            first = self._from(begin_ns)
        if end_ns is not None and (found := self._timeline.first_sequence_at(end_ns)) is not None:
            last = found - 1
        return (first, last) if first <= last else None

    def extent(self) -> TimeBounds:
        """Return the least and the greatest time (ns) in the archive; None: not known."""
        begin = next((stretch.rows.first for stretch in cover(self._refs, self._begins)), 0)
        first, last = self._timeline.last_timed_stretch(begin), self._timeline.last_timed_stretch(self.covered)
        first_ns = first and first[1][0]
        if last is None or last[0].rows.last < self.covered:
            return first_ns, None
        stretch, (_, newest) = last
        tip = None  # the last message that was examined; it need not have become a row
        with suppress(SegmentCorrupt):
            tip = self._store.footer(stretch.segment).tip
        return first_ns, max(newest, tip.timestamp_ns if tip else 0)

    @property
    def last_ns(self) -> int | None:
        """The greatest time (ns) of the last segment with messages; None without one."""
        last = self._timeline.last_timed_stretch(self.covered)
        return last and last[1][1]

    def _from(self, moment_ns: int) -> int:
        """Return the first sequence that may be at or after the moment; one after the end if there is none."""
        found = self._timeline.start_sequence_at(moment_ns)
        last = None if found else self._timeline.last_timed_stretch(self.covered)
        return found or (last[0].rows.last + 1 if last else self._begins)


REPORT_SEGMENTS = 64  # segments that are examined between two reports of progress
OnSurveyProgress = Callable[[Chain, int, int], None]  # chain, segments of it that were examined, segments to examine


def known_chains(documents: ChainStore, request: ReplayRequest) -> list[Chain]:
    """Return the chains of the feed; if it has none, all chains. Blocking."""
    return documents.chains(request.site, request.feed) or documents.chains()


class ReplaySurvey:
    """A survey of one archive for `request`, at this time. `notes`: remarks for an operator, before the replay."""

    def __init__(
        self, store: SegmentStore, documents: ChainStore, threads: ThreadPool, clock: Clock, request: ReplayRequest
    ) -> None:
        self._store, self._documents, self._threads, self._clock = store, documents, threads, clock
        self._request = request
        self.progress: OnSurveyProgress = lambda *_: None
        self.counts_lost_end = True  # of an ended incarnation, as a hole
        self._moments: TimeBounds = (None, None)
        self._deleted_notes: list[str] = []  # lines about requested sequences that retention deleted
        self.notes: list[str] = []

    async def run(self) -> tuple[ReplayPlan, StreamDocument | None]:
        """Return the plan, and the document of the source stream. Raises UsageError, errors of the store, DataError if
        segments that replace damaged ones are damaged too, Unavailable if segments vanish again and again.
        """
        request = self._request
        chains = request.chains(await self._threads.run(known_chains, self._documents, request))
        stream = await self._threads.run(self._documents.read_stream, chains[-1])
        self._moments = request.moments(self._clock.now())
        if request.has_sequence_bounds and request.incarnation is None and chains[-1].incarnation:
            newest = f"{chains[-1].incarnation:04d}"
            self.notes.append(f"sequences are those of incarnation {newest}, the newest")
        ranges = [await self._range(chain) for chain in chains]
        self.notes += self._deleted_notes
        archive = [held for held, _ in ranges if held is not None]
        check_overlap(request, self._moments, archive, self._deleted_notes)
        plans = [await self._plan_chain(each) for _, each in ranges if each is not None]
        return ReplayPlan(tuple(plans), bool(request.subjects)), stream

    # Sequences

    async def _range(self, chain: Chain) -> tuple[ArchivedSpan | None, ChainRange | None]:
        """Return the archived part of the chain, and the requested range of it. None: nothing."""
        request, moments = self._request, self._moments
        is_bounded = request.has_sequence_bounds or moments != (None, None)
        begins, ends, floor = await self._bounds(chain)
        if ends is not None and request.incarnation is not None and (request.from_sequence or 0) > ends:
            self.notes.append(f"{chain} ended at {ends}: the requested range was put into it after that")
            ends = None

        def look_up(refs: list[SegmentRef]) -> tuple[int, TimeBounds, tuple[int, int] | None]:
            timing = SegmentTimes(self._store, refs, begins)
            if not is_bounded:
                return timing.covered, (None, None), None
            return timing.covered, timing.extent(), timing.between(moments)

        covered, times, timed = await self._threads.run(with_current_listing, self._store, chain, look_up)
        rows = clip_range(begins, covered, ends, None, None)
        held = None if rows is None else ArchivedSpan(chain, rows, *times)
        begin_ns, first_ns = moments[0], times[0]
        if floor and begin_ns is not None and first_ns is not None and begin_ns >= first_ns:
            floor = None  # no deleted sequence is requested
        if floor and (request.from_sequence or 1) < floor.first:
            self._deleted_notes.append(f"{chain}: {floor}")
        first, last = request.from_sequence, request.to_sequence
        if timed is not None:
            first, last = max(first or 1, timed[0]), min(last or timed[1], timed[1])
        elif is_bounded:
            return held, None
        if request.from_sequence is not None and request.from_sequence < begins:
            self.notes.append(f"the archive of {chain} begins at {begins}")
        if request.to_sequence is not None and request.to_sequence > (archived := min(covered, ends or covered)):
            self.notes.append(f"the archive of {chain} ends at {archived}")
        if ends and self.counts_lost_end and moments == (None, None):
            covered = max(covered, ends)
        rows = clip_range(begins, covered, ends, first, last)
        return held, None if rows is None else ChainRange(chain, rows)

    async def _bounds(self, chain: Chain) -> tuple[int, int | None, Floor | None]:
        """Return the begin of the chain, the end of its incarnation (None: it has not ended), and its floor (None:
        retention deleted nothing).
        """
        call = self._threads.run
        document, floor, end = await asyncio.gather(
            call(self._documents.read_chain, chain),
            call(self._documents.floor, chain),
            call(self._documents.read_end, chain),
        )
        first = 1 if document is None else document.first
        if floor is None or floor.first <= first:
            return first, end, None
        return floor.first, end, floor

    # Segments

    async def _plan_chain(self, each: ChainRange) -> ReplayChain:
        """Plan one chain. Raises DataError if segments are damaged again and again, Unavailable if they vanish."""
        lost, damaged = set[str](), dict[str, SegmentRef]()
        found = await self._threads.run(self._documents.gaps, each.chain)
        gaps = [gap.range for gap in found]
        for _ in range(RELIST_ATTEMPTS):
            listed = await self._threads.run(ChainArchive.listed, self._store, each.chain, each.rows.first)
            usable = [ref for ref in listed.refs if ref.key not in lost]
            stretches, missing, accepted = split_range(usable, each.rows, gaps)
            parts = list[ReplayPart | UnreadableSegment]()
            for begin in range(0, len(stretches), REPORT_SEGMENTS):
                some = stretches[begin : begin + REPORT_SEGMENTS]
                self.progress(each.chain, begin, len(stretches))
                parts += await asyncio.gather(*(self._threads.run(_read_part, self._store, s, usable) for s in some))
            wrong = {part.segment.key: part for part in parts if isinstance(part, UnreadableSegment)}
            floor = await self._threads.run(self._documents.floor, each.chain) if missing and not wrong else None
            if floor is not None and missing[0].first < floor.first:  # raised after the survey began
                raise retention_error(each.chain, floor)
            if not wrong:
                sound = tuple(part for part in parts if isinstance(part, ReplayPart))
                unread = [rows for part in sound for rows in _lost_unread(part, usable, gaps, damaged.values())]
                # Two damaged segments may hide the same sequences: the complement of the complement has each once.
                open_ = holes(
                    holes([*(hole for hole in missing if hole not in accepted), *unread], each.rows), each.rows
                )
                return ReplayChain(each, sound, tuple(sorted([*open_, *accepted])), tuple(accepted))
            lost |= wrong.keys()
            damaged |= {key: part.segment for key, part in wrong.items() if not part.is_gone}
            self.notes += [f"damaged or gone, left out: {key}" for key in sorted(wrong)]
        is_gone = any(part.is_gone for part in wrong.values())
        raise vanishing_error(each.chain) if is_gone else damaged_error(each.chain, damaged)


def _read_part(
    store: SegmentStore, stretch: Stretch[SegmentRef], refs: Sequence[SegmentRef]
) -> ReplayPart | UnreadableSegment:
    """Return the part with its footer; or a segment that cannot be read, if one is needed for it. Blocking; reads rows
    only if others of `refs` may hold the unread sequences of the segment.
    """
    try:
        with reading(stretch.segment):
            footer = store.footer(stretch.segment)
            unread = footer.unread and footer.unread.intersection(stretch.rows)
            others = (ref for ref in refs if ref.key != stretch.segment.key)
            if unread is None or not any(ref.coverage.overlaps(unread) for ref in others):
                return ReplayPart(stretch, footer)
            with open_stretch(store, stretch, refs=refs) as reader:
                missing = reader.max_missing(stretch.rows)
                return reader.left_out[0] if reader.left_out else ReplayPart(stretch, footer, missing)
    except UnreadableSegment as found:
        return found


def _lost_unread(
    part: ReplayPart, usable: Sequence[SegmentRef], gaps: Sequence[SequenceRange], damaged: Iterable[SegmentRef]
) -> Iterator[SequenceRange]:
    """Yield the unread sequences of a part that only damaged segments may hold."""
    if (unread := part.footer.unread and part.footer.unread.intersection(part.stretch.rows)) is not None:
        others = [ref.coverage for ref in usable if ref.key != part.stretch.segment.key]
        for within in filter(None, (ref.coverage.intersection(unread) for ref in damaged)):
            yield from holes([*others, *gaps], within)


def damaged_error(chain: Chain, keys: Collection[str]) -> DataError:
    shown = ", ".join(sorted(keys)[:10]) + (f" and {len(keys) - 10} more" if len(keys) > 10 else "")
    return DataError(
        f"chain {chain}: expected undamaged segments, found only damaged ones: {shown}",
        hint=choices(("restore the objects; to list all damaged ones", verify_command(f"{chain.site}/{chain.feed}"))),
        code="E-SEG-CORRUPT",
    )


MAX_SHOWN_LINES = 10  # chains and holes


@dataclass(frozen=True, slots=True)
class ReplayPreview:
    """A preview of the replay of `request`. `stream`: the document of the source. `info`: the target, None if it is
    missing; `template`: its configuration if it is made. `former`: the last replay into it.
    """

    request: ReplayRequest
    plan: ReplayPlan
    stream: StreamDocument | None
    info: StreamInfo | None
    template: StreamTemplate | None
    former: StoredReplay | UnreadableReplay | None
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        former = self.former.receipt if isinstance(self.former, StoredReplay) else None
        info, template = self.info, self.template
        return {
            "request": self.request.to_json(),
            "plan": self.plan.as_json(),
            "target": info and {"messages": info.messages, "last_sequence": info.last_sequence},
            "create": template and {"config": template.config, "left_out": list(template.left_out)},
            "former": former and {"request": former.request.to_json(), "finished": bool(former.finished)},
            "notes": list(self.notes),
        }

    def lines(self) -> Iterator[str]:
        plan, request = self.plan, self.request
        most = "" if plan.is_exact else "at most "
        yield f"{request.site}/{request.feed} into {request.target}: {most}{format_count(plan.rows, 'message')}"
        to_read = f"to read: {most}{size_words(plan.bytes_to_read)} of {format_count(len(plan.parts), 'segment')}"
        yield f"{most}{size_words(plan.raw_bytes)}; {to_read}"
        if plan.time_range_ns:
            yield f"{period_text(*plan.time_range_ns)} in these segments"
        for chain in plan.chains[:MAX_SHOWN_LINES]:
            parts = format_count(len(chain.parts), "segment")
            yield f"  {chain.chain}  {chain.range.rows}  {format_count(chain.rows, 'message')} in {parts}"
        if len(plan.chains) > MAX_SHOWN_LINES:
            yield f"  and {format_count(len(plan.chains) - MAX_SHOWN_LINES, 'more chain')}"
        yield from self._missing_lines()
        yield from self._target_lines()
        yield from (f"note: {note}" for note in self.notes)

    def _missing_lines(self) -> Iterator[str]:
        plan = self.plan
        if not plan.chains:
            yield "the archive has nothing in this range"
        if plan.is_lossy:
            yield f"a copy, not a backup (--allow-lossy): {lossy_text(plan)}"
        for name, found in (("hole (--skip-holes)", plan.holes), ("accepted gap", plan.accepted)):
            for hole in found[:MAX_SHOWN_LINES]:
                yield f"{name}: {hole.chain} {hole.rows}"
            if len(found) > MAX_SHOWN_LINES:
                yield f"{name}: {len(found) - MAX_SHOWN_LINES} more"

    def _target_lines(self) -> Iterator[str]:
        name, info, template = self.request.target, self.info, self.template
        if info is not None:
            held = f"holds {info.messages:,} messages up to sequence {info.last_sequence:,}"
            yield f"target {name} {held if info.messages else 'is empty'}"
        elif template is None:
            yield f"target {name} is missing, and there is no stream.json to create it from"
        else:
            config = ", ".join(f"{key} {value}" for key, value in template.config.items() if key != "name")
            yield f"target {name} is missing; --create creates it with {config}"
            if template.left_out:
                yield f"it would be created without {', '.join(template.left_out)} of the source"
        if isinstance(self.former, UnreadableReplay):
            yield f"the record of the last replay into it cannot be read: {self.former.reason}"
        elif self.former is not None:
            receipt = self.former.receipt
            done = "finished" if receipt.finished else "not finished"
            yield f"the last replay into it is {done}: {receipt.request.arguments()}"


def resumable_replay(hints: ReplayHints, former: StoredReplay | UnreadableReplay | None) -> StoredReplay | None:
    """Return the former replay of the same request, finished or to be continued; None to begin.

    Raises Stopped if another replay is not finished, or if its record cannot be read.
    """
    if former is None or hints.options.again:
        return None
    if isinstance(former, UnreadableReplay):
        raise unreadable_replay_error(hints, former.reason)
    receipt = former.receipt
    if receipt.request.digest == hints.request.digest:
        return former
    if receipt.finished:
        return None
    raise other_replay_error(hints, receipt)


def check_plan(plan: ReplayPlan, hints: ReplayHints) -> None:
    """Raise Stopped if the archive holds less than the request, and no option allows that."""
    if plan.holes and not hints.options.skip_holes:
        chain = plan.holes[0].chain
        raise hole_error(hints, chain, *(hole.rows for hole in plan.holes if hole.chain == chain))
    if plan.is_lossy and not hints.options.allow_lossy:
        raise Stopped(
            f"the archive of this range is a copy, not a backup: {lossy_text(plan)}",
            hint=choices(("replay a complete feed; or the messages that exist", hints.command("--allow-lossy"))),
            code="E-REPLAY-LOSSY",
        )


def lossy_text(plan: ReplayPlan) -> str:
    """Describe the archived share of the published messages: `kept 1,204 of 9,800 messages (sampled_out 8,596)`."""
    kept = sum(part.row_count for part in plan.parts)
    counts = [f"{name} {count:,}" for name, count in plan.ledger.to_json().items()]
    return f"kept {kept:,} of {kept + plan.missing_messages:,} messages ({', '.join(counts) or 'sampled'})"
