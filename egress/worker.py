"""One feed's chain, from the listing to the last put: decide what the stream is, take the position, read,
again.

Start, repair and take-over are one path. What a session leaves behind on a doubt is kept until the stream is
judged: the same, then it is thrown away and read again; another one or gone, then it is put into the history
that it came from, before that history is closed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from common.clock import wait_for
from common.errors import LeaseLost, Stopped
from common.jetstream.lease import Lease
from common.jetstream.streams import StreamInfo
from common.segments.parquet import SpooledSegment
from common.segments.segment import Tip
from common.service.logs import get_logger
from egress.archive import Archive, Marks
from egress.backoff import Backoff
from egress.history import History, Incarnation
from egress.identity import Evidence, Kind, Source, Verdict
from egress.inquiry import Inquiry
from egress.parts import Parts, Pools
from egress.putting import RetakeError, require
from egress.reader import DoubtError
from egress.report import FeedReport, stopped_error
from egress.session import Session
from egress.slices import Slice
from egress.start import first_sequence, is_set
from egress.tasks import unless

log = get_logger("egress.worker")

# Seconds. Where the line is cut more often than segments are due, nothing would ever be stored: the first
# segment behind a cut is closed after half the time that the line held, but not sooner than this.
MIN_HURRY = 1.0


@dataclass(frozen=True, slots=True)
class Held:
    """What was received of a chain through a reader that is in doubt: sealed, not put. Each goes as it is
    put.
    """

    archive: Archive
    sealed: deque[SpooledSegment]
    received: Tip | None


class Worker:
    """Freezes one partition of a feed.

    `run` may be called again after whatever it raised; it goes on from the listing.
    """

    def __init__(self, part: Slice, parts: Parts, pools: Pools, report: FeedReport) -> None:
        self._slice, self._parts, self._pools, self._report = part, parts, pools, report
        self._chain = part.chain
        self._history = History(self._chain, part.filters, parts.chains, parts.objects, pools.io, parts.clock)
        self._inquiry = Inquiry(part, parts, pools.io)
        self._marks = Marks(parts.state)
        self._backoff = Backoff(parts.rng)
        self._held: Held | None = None
        self._hurry: float | None = None
        self._has_begun = False

    async def run(self, lease: Lease, stop: asyncio.Event) -> None:
        """Freeze until `stop` is set and everything is put.

        Raises Stopped where only an operator can go on, LeaseLost, Unavailable and others for the caller to
        wait.
        """
        await self._parts.state.ensure()
        while not stop.is_set() or self._held is not None:
            await self._round(lease, stop)

    async def _round(self, lease: Lease, stop: asyncio.Event) -> None:
        """Judge, then read; once `stop` is set, only what is held back is still put where it belongs."""
        current = await self._current()
        archive = await self._open_archive(current)
        if self._held is not None and self._held.archive.chain != current.chain:
            self._discard_held()
        judged = await self._judge(current, archive, stop)
        if judged is None:
            return
        evidence, verdict = judged
        self._report.judged(evidence, verdict)
        if verdict.is_same and evidence.source is not None:
            self._discard_held()
            if not stop.is_set():
                await self._read(current, archive, evidence.source, lease, stop)
        elif verdict.kind in (Kind.RECREATED, Kind.GONE):
            await self._put_held(lease)
            await self._succeed(current, evidence, verdict)
        else:
            raise stopped_error(verdict, current.chain, self._slice.stream)

    async def _judge(
        self, current: Incarnation, archive: Archive, stop: asyncio.Event
    ) -> tuple[Evidence, Verdict] | None:
        """None where `stop` came first and nothing is held back that would depend on the answer."""
        if self._held is not None:
            return await self._inquiry.judge(current, archive, self._held.received)
        return await unless(stop, self._inquiry.judge(current, archive))

    # What is there

    async def _current(self) -> Incarnation:
        """The newest incarnation; the first one is made if there is none."""
        found = await self._history.load()
        if found is None:
            info = await self._inquiry.info()
            if info is None:
                raise Stopped(
                    f"{self._chain}: stream {self._slice.stream} does not exist",
                    hint="create it: the feed then begins by itself",
                    code="E-SOURCE-GONE",
                )
            check_retention(info)
            first = await first_sequence(self._parts.client, info, self._slice.settings, self._parts.clock)
            found = await self._history.begin(info, first)
        elif is_set(self._slice.settings) and not self._has_begun:
            log.info(
                "start keys ignored, the feed has begun", action="start_ignored", **self._chain.log_context()
            )
        self._has_begun = True
        return found

    async def _open_archive(self, current: Incarnation) -> Archive:
        parts = self._parts
        floor = await self._pools.io.run(parts.chains.read_floor, current.chain)
        first = max(current.document.first, floor or 0)
        archive = Archive(current.chain, first, parts.store, parts.chains, self._marks, self._pools.io)
        await archive.load()
        return archive

    # Another history

    async def _put_held(self, lease: Lease) -> None:
        """Put what was received through a reader of the history that has ended, into that history."""
        while self._held is not None and self._held.sealed:
            require(lease, self._held.archive)
            await self._put_one(self._held.archive, self._held.sealed[0])
            self._held.sealed.popleft().path.unlink(missing_ok=True)
        self._held = None

    async def _put_one(self, archive: Archive, spooled: SpooledSegment) -> None:
        if await archive.is_covered(spooled.footer.coverage.first):
            return
        ref = await archive.put(spooled)
        await archive.write_tail()
        await archive.raise_mark()
        log.info("held segment put", action="held_put", **ref.log_context())

    def _discard_held(self) -> None:
        for spooled in self._held.sealed if self._held else ():
            spooled.path.unlink(missing_ok=True)
        self._held = None

    async def _succeed(self, current: Incarnation, evidence: Evidence, verdict: Verdict) -> None:
        """Begin the next incarnation, if there is a stream to begin it with and the feed wants that."""
        if evidence.source is None or self._slice.settings.on_recreated == "halt":
            raise stopped_error(verdict, current.chain, self._slice.stream)
        info = await self._inquiry.info()
        if info is None or info.created != evidence.source.created:
            return
        check_retention(info)
        archive = await self._open_archive(current)
        minted = await self._history.mint(current, info, max(archive.end, archive.first - 1))
        log.warning("stream recreated", action="recreated", why=verdict.why, **minted.chain.log_context())

    # Reading

    async def _read(
        self, current: Incarnation, archive: Archive, source: Source, lease: Lease, stop: asyncio.Event
    ) -> None:
        """One session, from the position on."""
        place = await unless(stop, self._inquiry.place(archive, source.first))
        if place is None:
            return
        await archive.mend()
        self._report.lost(sum(map(len, place.lost)))
        session = Session(
            self._parts,
            self._slice,
            self._pools,
            self._report,
            self._inquiry,
            lease,
            archive,
            current,
            source,
            place,
            self._hurry,
        )
        await self._run_session(session, archive, stop)

    async def _run_session(self, session: Session, archive: Archive, stop: asyncio.Event) -> None:
        started = self._parts.clock.monotonic()
        try:
            await session.run(stop)
        except RetakeError as retake:
            log.info("position taken again", action="retake", reason=str(retake), **self._chain.log_context())
            await self._pause(session, stop)
        except DoubtError as doubt:
            self._report.doubt(doubt.reason, str(doubt))
            self._held = Held(archive, await session.seal(), session.received)
            lasted = self._parts.clock.monotonic() - started
            self._hurry = None if session.puts else max(MIN_HURRY, min(lasted, self._hurry or lasted) / 2)
            await self._pause(session, stop)
        except LeaseLost:
            # Whoever holds the lease reads it again; if the stream is gone by then, this is the last copy.
            self._held = Held(archive, await session.seal(), session.received)
            raise
        finally:
            await session.close()

    async def _pause(self, session: Session, stop: asyncio.Event) -> None:
        """Wait before the next session where this one stored nothing."""
        if session.puts:
            self._backoff.reset()
        else:
            await wait_for(stop, self._backoff.next())


def check_retention(info: StreamInfo) -> None:
    """Raises Stopped where reading would take messages away from others."""
    retention = info.config.get("retention", "limits")
    if retention != "limits":
        raise Stopped(
            f"stream {info.name}: expected limits retention, found {retention}",
            hint="this version freezes streams with limits retention only",
            code="E-RETENTION",
        )
