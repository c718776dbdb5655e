"""Asks what the stream is and where to read it; what stops, mints or skips is asked again on fresh
connections.
"""

from __future__ import annotations

from common.errors import Unavailable
from common.jetstream.client import FloeClient
from common.jetstream.streams import StreamInfo, stream_info
from common.segments.segment import Tip
from common.sequences import SequenceRange
from common.service.logs import get_logger
from common.service.threads import Threads
from egress.archive import Archive
from egress.evidence import Examiner, Known, confirm, source_of
from egress.history import Incarnation, older
from egress.identity import Evidence, Verdict, judge
from egress.parts import Parts
from egress.position import Position, position
from egress.slices import Slice

Answer = tuple[Evidence, Verdict]

log = get_logger("egress.inquiry")


class Inquiry:
    """The questions about the stream of one partition of a feed."""

    def __init__(self, part: Slice, parts: Parts, threads: Threads) -> None:
        self._stream, self._parts = part.stream, parts
        self._examiner = Examiner(parts.store, part.stream, part.filter_subject, threads)
        self._lost: tuple[SequenceRange, ...] = ()

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
        known = Known(current.stream.created, archive.refs, older(current.chain), received)
        evidence = await self._examiner.examine(client, known)
        return evidence, judge(evidence)

    async def place(self, archive: Archive, source_first: int) -> Position:
        """Where to read. Raises Stopped where an empty listing may hide an archive."""
        coverages = [ref.coverage for ref in archive.refs]

        def found(first: int) -> Position:
            return position(archive.first, coverages, first)

        def is_harmless(first: int) -> bool:
            return not archive.is_hollow(first) and found(first).lost in ((), self._lost)

        if not is_harmless(source_first):
            source_first = await confirm(
                lambda: self._parts.freshly(self._first),
                self._parts.clock,
                self._parts.tuning.confirming,
                harmless=is_harmless,
                outline=lambda _: None,
            )
        if archive.is_hollow(source_first):
            raise archive.hollow(source_first)
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

    async def first(self) -> int:
        """The stream's first sequence. Raises Unavailable where there is no stream."""
        return await self._first(self._parts.client)

    async def _first(self, client: FloeClient) -> int:
        info = await stream_info(client, self._stream)
        if info is None:
            raise Unavailable(f"stream {self._stream} does not exist any more")
        return source_of(info).first
