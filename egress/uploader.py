"""Upload of finished segments, strictly one after the other, each only if it may still be put."""

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from common.archive.segment import SegmentRef, Tip
from common.archive.store import Check
from common.archive.writer import SpooledSegment
from common.clock import Backoff
from common.errors import LeaseLost, OutcomeUnknown, Unavailable
from common.failpoints import failpoint
from common.logs import get_logger
from common.nats.lease import Lease
from common.sequences import SequenceRange
from common.tasks import Stop, wait_for
from egress.archive import Archive
from egress.consumers import ReaderResetError
from egress.deps import PartitionDeps
from egress.reader import Reader

T = TypeVar("T")
Permit = Callable[[], Awaitable[Check]]

log = get_logger(__name__)


class StalePositionError(Exception):
    """Error if the position must be taken from the listing again; the text names the reason."""


class Uploader:
    """Uploader into one archive, under a lease. `reader` is checked before each put, because its history may be in
    doubt.

    An unreachable server or store is retried until `ended` is set. `put_count`: the number of segments put; `last_put`:
    the last sequence of the newest of them, 0 before.
    """

    def __init__(self, deps: PartitionDeps, archive: Archive, lease: Lease, reader: Reader, ended: Stop) -> None:
        self._archive, self._reader, self._ended = archive, reader, ended
        self._check_lease = partial(require_lease, lease, archive)
        self._report, self._clock, self._backoff = deps.report, deps.clock, Backoff(deps.rng)
        self.put_count, self.last_put = 0, 0

    async def put(self, spooled: SpooledSegment) -> None:
        """Put, read back, write tail and mark, acknowledge. Raises LeaseLost, StalePositionError, ReaderResetError."""
        started = self._clock.monotonic()
        ref = await self._retry(lambda: self._put_checked(spooled))
        self._check_lease()
        await self._retry(self._archive.write_tail)
        await self._retry(self._archive.raise_mark)
        self.put_count, self.last_put = self.put_count + 1, spooled.footer.coverage.last
        seconds = self._clock.monotonic() - started
        self._report.record_put(spooled, seconds, self._archive.end)
        stored = {**stored_context(spooled), "seconds": round(seconds, 3)}
        log.info("segment put", action="segment_put", **stored, **ref.log_context())
        failpoint("egress.before_ack")
        self._check_lease()
        await self._retry(lambda: self._reader.acknowledge(spooled.footer.coverage.last, self._check_lease))
        failpoint("egress.after_ack")

    async def _put_checked(self, spooled: SpooledSegment) -> SegmentRef:
        await self._reader.check()
        if await self._archive.is_covered(spooled.footer.coverage.first):
            raise StalePositionError("another instance has covered the range")
        if await self._archive.has_successor():
            raise closed_error(self._archive)
        return await self._archive.put(spooled, self._check_lease)

    async def _retry(self, step: Callable[[], Awaitable[T]]) -> T:
        """Repeat the step until it succeeds. Once the session ends, raise the last error of the step."""
        while True:
            try:
                result = await step()
            except LeaseLost:
                raise
            except (Unavailable, OutcomeUnknown) as error:
                self._report.set_waiting(error)
                if await wait_for(self._ended, self._backoff.next_delay()):
                    raise
            else:
                self._backoff.reset()
                self._report.set_working()
                return result


@dataclass(frozen=True, slots=True)
class UnputSegments:
    """Sealed segments of one history, not put; `received`: the tip of the last message received."""

    archive: Archive
    sealed: deque[SpooledSegment]
    received: Tip | None

    @property
    def rows(self) -> int:
        return sum(spooled.footer.rows for spooled in self.sealed)

    @property
    def coverage(self) -> SequenceRange:
        """Sequences that they cover. There must be a segment."""
        return SequenceRange(self.sealed[0].footer.coverage.first, self.sealed[-1].footer.coverage.last)

    async def put(self, lease: Lease) -> None:
        """Put them all. Raises LeaseLost."""
        check = partial(require_lease, lease, self.archive)

        async def permit() -> Check:
            return check

        while self.sealed:
            check()
            await self.put_first(permit)

    async def put_first(self, permit: Permit) -> None:
        """Put the first into the history that it came from, and remove it. There must be one.

        `permit`: called right before the put, raises if there must be none, and returns a check to repeat before each
        attempt. If that history has ended meanwhile, all are dropped: they would not be delivered.
        """
        if await self.archive.has_successor():
            await self.log_and_discard()
            return
        await self._put_one(self.sealed[0], permit)
        self.sealed.popleft().path.unlink(missing_ok=True)

    async def _put_one(self, spooled: SpooledSegment, permit: Permit) -> None:
        coverage = spooled.footer.coverage
        if conflicting := await self.archive.count_conflicting(spooled):
            # Beside the messages in the archive under the same sequences they would be two histories in one.
            self._log_dropped([coverage], conflicting)
            return
        # Another instance may have put only its beginning, and there is no other copy of the rest.
        if await self.archive.is_covered(coverage.first) and not await self.archive.uncovered(coverage):
            return
        ref = await self.archive.put(spooled, await permit())
        await self.archive.write_tail()
        await self.archive.raise_mark()
        log.info("held segment put", action="held_segment_put", **stored_context(spooled), **ref.log_context())

    async def is_archived(self) -> bool:
        for spooled in self.sealed:
            if await self.archive.uncovered(spooled.footer.coverage) or await self.archive.count_conflicting(spooled):
                return False
        return True

    async def log_and_discard(self) -> None:
        """Discard the segments though they are not read again, and log the ranges that are archived nowhere."""
        for spooled in self.sealed:
            missing = await self.archive.uncovered(spooled.footer.coverage)
            if missing and (rows := spooled.footer.rows):
                self._log_dropped(missing, rows)
        self.discard()

    def _log_dropped(self, ranges: list[SequenceRange], rows: int) -> None:
        context = {"ranges": ", ".join(map(str, ranges)), "rows": rows, **self.archive.chain.log_context()}
        log.error("held rows dropped", action="held_rows_dropped", **context)

    def discard(self) -> None:
        while self.sealed:
            self.sealed.popleft().path.unlink(missing_ok=True)


def stored_context(spooled: SpooledSegment) -> dict[str, int]:
    coverage = spooled.footer.coverage
    return {"rows": spooled.footer.rows, "bytes": spooled.size, "first": coverage.first, "last": coverage.last}


def log_unarchived(archive: Archive, first: int, last: int, **more: int) -> None:
    """Log the sequences that this process received and ends without having put."""
    hint = "the next start archives them, if the stream still holds them; if the stream is gone, they are lost"
    context = {**more, "first": first, "last": last, **archive.chain.log_context()}
    log.error("received rows not archived", action="rows_unarchived", hint=hint, **context)


def closed_error(archive: Archive) -> ReaderResetError:
    return ReaderResetError("closed", f"{archive.chain}: the next incarnation exists")


def require_lease(lease: Lease, archive: Archive) -> None:
    """Raise LeaseLost unless the lease may be used."""
    if not lease.is_usable():
        raise LeaseLost(f"lease of {archive.chain}: not renewed in time")
