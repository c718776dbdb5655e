"""Puts finished segments, strictly one after the other, each only if it still may be put."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from common.clock import Backoff, Clock
from common.errors import LeaseLost, OutcomeUnknown, Unavailable
from common.failpoints import failpoint
from common.jetstream.lease import Lease
from common.segments.reader import SpooledSegment
from common.segments.segment import SegmentRef
from common.service.logs import get_logger
from common.tasks import Stop, wait_for
from egress.acks import ReaderResetError
from egress.archive import Archive
from egress.reader import Reader
from egress.report import FeedReport

T = TypeVar("T")

log = get_logger("egress.uploader")


class RetakeError(Exception):
    """The position must be taken from the listing again; the text says why."""


class Uploader:
    """Puts into one archive under a lease. `reader` says whether its history is in doubt.

    What cannot be reached is tried again until `ended` is set.
    """

    def __init__(
        self,
        archive: Archive,
        lease: Lease,
        reader: Reader,
        ended: Stop,
        report: FeedReport,
        clock: Clock,
        backoff: Backoff,
    ) -> None:
        self._archive, self._lease, self._reader, self._ended = archive, lease, reader, ended
        self._report, self._clock, self._backoff = report, clock, backoff
        self.puts = 0

    async def put(self, spooled: SpooledSegment) -> None:
        """Put, read back, announce, mark, acknowledge. Raises LeaseLost, RetakeError, ReaderResetError."""
        started = self._clock.monotonic()
        ref = await self._persist(lambda: self._put_checked(spooled))
        require(self._lease, self._archive)
        await self._persist(self._archive.write_tail)
        await self._persist(self._archive.raise_mark)
        self.puts += 1
        self._report.put(spooled, self._clock.monotonic() - started)
        log.info("segment put", action="segment_put", rows=spooled.footer.rows, **ref.log_context())
        await self._acknowledge(spooled.footer.coverage.last)

    async def _acknowledge(self, last: int) -> None:
        """Only now may the stream let go of it."""
        failpoint("egress.before_ack")
        await self._persist(lambda: self._reader.acknowledge(last))
        failpoint("egress.after_ack")

    async def _put_checked(self, spooled: SpooledSegment) -> SegmentRef:
        """Put what still belongs into this history, is not there yet, and is this instance's to put."""
        await self._reader.check()
        if await self._archive.is_covered(spooled.footer.coverage.first):
            raise RetakeError("another instance has covered it")
        if await self._archive.is_closed():
            raise closed(self._archive)
        require(self._lease, self._archive)
        return await self._archive.put(spooled)

    async def _persist(self, step: Callable[[], Awaitable[T]]) -> T:
        """Do the step until it is done or the session ends; then raises what the step raised last."""
        while True:
            try:
                result = await step()
            except LeaseLost:
                raise
            except (Unavailable, OutcomeUnknown) as error:
                self._report.waits(error)
                if await wait_for(self._ended, self._backoff.next()):
                    raise
            else:
                self._backoff.reset()
                self._report.works()
                return result


def closed(archive: Archive) -> ReaderResetError:
    """Why nothing is put any more: somebody began the next incarnation, of this source or of another one."""
    return ReaderResetError("closed", f"{archive.chain}: the next incarnation exists")


def require(lease: Lease, archive: Archive) -> None:
    """Raises LeaseLost unless the lease may be used."""
    if not lease.is_usable():
        raise LeaseLost(f"lease of {archive.chain}: not renewed in time")
