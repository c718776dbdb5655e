"""What was received of a chain through a reader that is in doubt: kept until the stream is judged."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from common.jetstream.lease import Lease
from common.segments.parquet import SpooledSegment
from common.segments.segment import Tip
from common.service.logs import get_logger
from egress.archive import Archive
from egress.uploader import require

log = get_logger("egress.held")


@dataclass(frozen=True, slots=True)
class Held:
    """Sealed segments of one history, not put; `received`: the tip of the last message received."""

    archive: Archive
    sealed: deque[SpooledSegment]
    received: Tip | None

    async def put(self, lease: Lease) -> None:
        """Put them into the history that they came from; each goes as it is put. Raises LeaseLost.

        Into one that has ended meanwhile nothing is put: nobody would deliver it.
        """
        while self.sealed:
            require(lease, self.archive)
            if await self.archive.is_closed():
                await self.drop()
                return
            await self._put_one(self.sealed[0])
            self.sealed.popleft().path.unlink(missing_ok=True)

    async def _put_one(self, spooled: SpooledSegment) -> None:
        coverage = spooled.footer.coverage
        # Another instance may have put a beginning of it alone, and there is no other copy of the rest.
        if await self.archive.is_covered(coverage.first) and not await self.archive.uncovered(coverage):
            return
        ref = await self.archive.put(spooled)
        await self.archive.write_tail()
        await self.archive.raise_mark()
        log.info("held segment put", action="held_put", **ref.log_context())

    async def drop(self) -> None:
        """Throw them away, though they are not read again; says what is archived nowhere."""
        for spooled in self.sealed:
            missing = await self.archive.uncovered(spooled.footer.coverage)
            if missing and (rows := spooled.footer.rows):
                ranges, chain = ", ".join(map(str, missing)), self.archive.chain
                context = {"ranges": ranges, "rows": rows, **chain.log_context()}
                log.error("held rows dropped", action="held_dropped", **context)
        self.discard()

    def discard(self) -> None:
        """Throw them away: they are read again."""
        for spooled in self.sealed:
            spooled.path.unlink(missing_ok=True)
