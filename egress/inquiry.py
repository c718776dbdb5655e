"""Asks what the stream is and where to read it; what stops, mints or skips is asked again on fresh
connections.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from common.errors import DataError, FloeError, Unavailable
from common.jetstream.api import StreamInfo, next_message, stream_info
from common.jetstream.client import FloeClient
from common.segments.segment import SegmentRef, Tip
from common.sequences import SequenceRange
from common.service.logs import get_logger
from common.service.threads import Threads
from egress.archive import Archive
from egress.consumers import LIMITS, WORK_QUEUE
from egress.deps import Parts
from egress.evidence import Examiner, Known, confirm, source_of
from egress.identity import Evidence, Held, Kind, Source, Verdict
from egress.incarnations import Incarnation, older
from egress.partition import Slice
from egress.position import Position, position
from egress.resolve.acceptance import Acceptance, judge_with
from egress.resolve.fork import first_unlike

Answer = tuple[Evidence, Verdict]

log = get_logger("egress.inquiry")


class Inquiry:
    """The questions about the stream of one partition of a feed. `acceptance`: what an operator accepted."""

    def __init__(self, part: Slice, parts: Parts, threads: Threads) -> None:
        self._stream, self._filter, self._parts = part.stream, part.filter_subject, parts
        self._examiner = Examiner(parts.store, part.stream, part.filter_subject, threads)
        self._lost: tuple[SequenceRange, ...] = ()
        self._threads = threads
        self.acceptance: Acceptance | None = None

    async def info(self) -> StreamInfo | None:
        """The stream, None if there is none."""
        return await stream_info(self._parts.client, self._stream)

    async def look(self, current: Incarnation, archive: Archive, received: Tip | None = None) -> Answer:
        """The verdict on one look at the stream, over the shared connection."""
        return await self._examine(self._parts.client, current, archive, received)

    async def judge(self, current: Incarnation, archive: Archive, received: Tip | None = None) -> Answer:
        """The verdict, confirmed where it has consequences."""
        answer = await self.look(current, archive, received)
        if answer[1].is_same:
            return answer
        log.warning("confirming", action="confirming", why=answer[1].why, **current.chain.log_context())
        return await confirm(
            lambda: self._parts.freshly(lambda c: self._examine(c, current, archive, received)),
            self._parts.clock,
            self._parts.tuning.confirming,
            harmless=lambda found: found[1].is_same,
            outline=lambda found: (found[1].kind, found[0].source and found[0].source.created),
        )

    async def _examine(
        self, client: FloeClient, current: Incarnation, archive: Archive, received: Tip | None
    ) -> Answer:
        known = Known(
            current.stream.created,
            archive,
            older(current.chain),
            received,
            archive.first,
            current.continued,
            current.siblings,
        )
        evidence = await self._examiner.examine(client, known)
        source = evidence.source
        is_theirs = source is not None and source.created != evidence.created and evidence.older is None
        if source is not None and is_theirs and not any(tip.held is Held.EQUAL for tip in evidence.tips):
            # Of a work queue, and of a stream that forgets, no message is left to tell.
            number = await self._threads.run(self._made_for, current, source.created)
            evidence = replace(evidence, older=number)
        return evidence, judge_with(evidence, self.acceptance)

    def _made_for(self, current: Incarnation, created: str) -> int | None:
        """The newest older incarnation that was made for the stream created at `created`. Blocking."""
        for chain in older(current.chain):
            try:
                document = self._parts.chains.read_stream(chain)
            except DataError as error:
                log.warning("not read", action="history_unread", error=str(error), **chain.log_context())
                continue
            if document is not None and document.created == created:
                return chain.incarnation
        return None

    async def proposal(
        self, current: Incarnation, archive: Archive, evidence: Evidence, verdict: Verdict
    ) -> int | None:
        """Where the next incarnation should begin so that nothing is missed and nothing archived twice.

        None where there is no stream or it cannot be told.
        """
        source = evidence.source
        if source is None or verdict.kind not in (Kind.ROLLED_BACK, Kind.FORKED, Kind.UNKNOWN):
            return None if source is None else source.first
        ask = self._parts.client, self._examiner, self._parts.store, self._threads
        try:
            known = await self._threads.run(self._known_of, current, archive, source, evidence.older)
            return max([await first_unlike(*ask, refs, source, end) for refs, end in known])
        except FloeError as error:
            log.warning("no proposal", action="no_proposal", error=str(error), **archive.chain.log_context())
            return None

    def _known_of(
        self, current: Incarnation, archive: Archive, source: Source, older: int | None
    ) -> list[tuple[list[SegmentRef], int]]:
        """The segments of the history that the stream belongs to, and where each chain of it ended."""
        if older is None and (archive.end or not current.continued):
            return [(archive.refs(source.first), archive.end)]
        number = current.chain.incarnation - 1 if older is None else older
        following = self._parts.chains.read_stream(replace(current.chain, incarnation=number + 1))
        ends = (following and following.previous) or {}
        chains = [replace(current.chain, incarnation=number, partition=part) for part in ends]
        listed = partial(self._parts.store.list, position=source.first)
        return [(listed(each), ends[each.partition]) for each in chains] or [([], 0)]

    async def place(self, archive: Archive, source: Source) -> Position:
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
                lambda: self._parts.freshly(self._first),
                self._parts.clock,
                self._parts.tuning.confirming,
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
            log.error(
                "holes that the source lost",
                action="holes_lost",
                ranges=ranges,
                **archive.chain.log_context(),
            )
        self._lost = place.lost
        return place

    async def _is_hole(self, archive: Archive, place: Position) -> bool:
        """Whether the hole is there still; where not, the archive knows it no more."""
        hole = next(hole for hole in archive.holes if place.first in hole)
        left = await archive.uncovered(hole)
        if left == [hole]:
            return True
        archive.holes = tuple(sorted([*left, *(each for each in archive.holes if each != hole)]))
        return False

    async def _waiting_holes(self, archive: Archive, first: int) -> tuple[SequenceRange, ...]:
        """The holes that are known, and those among what was delivered and never acknowledged: what lies in
        one of them must not be, it is nowhere else.
        """
        client, end = self._parts.client, archive.end
        held = await next_message(client, self._stream, first, self._filter) if first <= end else None
        begin = max(held.sequence, archive.first) if held is not None else end + 1
        if begin > end:
            return archive.holes
        below = [SequenceRange(h.first, min(h.last, begin - 1)) for h in archive.holes if h.first < begin]
        return (*below, *await archive.uncovered(SequenceRange(begin, end)))

    async def first(self) -> int:
        """The stream's first sequence. Raises Unavailable where there is no stream."""
        return await self._first(self._parts.client)

    async def _first(self, client: FloeClient) -> int:
        info = await stream_info(client, self._stream)
        if info is None:
            raise Unavailable(f"stream {self._stream} does not exist any more")
        return source_of(info).first
