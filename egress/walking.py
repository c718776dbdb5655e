"""Walks a chain's whole listing in the background, for the holes below the high-water mark.

A session begins at the mark and lists nothing before it, so what was lost there shows nowhere else. Whoever
holds a chain's lease walks it once and then every six hours, a page at a time and slowly; no page is kept.
"""

from __future__ import annotations

import asyncio
import threading

from common.clock import Clock, first_of
from common.errors import FloeError
from common.sequences import Covered, SequenceRange
from common.service.logs import get_logger
from common.service.threads import Threads
from egress.archive import Archive
from egress.deps import Pace

log = get_logger("egress.walking")


class _Progress:
    """One walk, as far as it has come."""

    def __init__(self, archive: Archive) -> None:
        self.end = archive.end
        self.covered = Covered()
        self._pages = archive.pages()
        self._lock = threading.Lock()  # a call that nobody awaits any more may still be under way

    def step(self) -> bool:
        """Take the next page; False where there is none. Blocking."""
        with self._lock:
            page = next(self._pages, None)
            for ref in page or ():
                self.covered.add(ref.coverage)
            return page is not None


class Walk:
    """The walks of one partition. `news`: set when one has ended, for whoever reads; `holes`: what it found,
    ascending, looked at twice.
    """

    def __init__(self, threads: Threads, clock: Clock, pace: Pace) -> None:
        self._threads, self._clock, self._pace = threads, clock, pace
        self._archive: Archive | None = None
        self._progress: _Progress | None = None
        self._turned = asyncio.Event()
        self._due = 0.0  # by the monotonic clock
        self.news = asyncio.Event()
        self.holes: tuple[SequenceRange, ...] = ()

    def follow(self, archive: Archive) -> None:
        """Walk this archive from now on; tell it what is known."""
        if self._archive is None or self._archive.chain != archive.chain:
            self.holes, self._progress, self._due = (), None, 0.0
            self._turned.set()
        self._archive = archive
        self.tell(archive)

    def tell(self, archive: Archive) -> None:
        """Let the archive know the holes that the last walk found."""
        known = Covered()
        for hole in (*archive.holes, *self.holes):
            known.add(hole)
        archive.holes = tuple(known.stretches())

    async def run(self) -> None:
        """Until cancelled; called again, it goes on where it was. What cannot be listed is put off."""
        while True:
            self._turned.clear()
            left = self._due - self._clock.monotonic()
            if self._archive is None or left > 0:
                await first_of(self._turned.wait(), seconds=max(left, self._pace.check))
                continue
            chain = self._archive.chain
            try:
                await self._walk(self._archive)
                pause = self._pace.walk
            except FloeError as error:
                log.info("walk put off", action="walk_put_off", error=str(error))
                pause = self._pace.walk_again
            except Exception:
                self._progress = None  # its listing has ended
                raise
            if self._archive.chain == chain:
                self._progress = None
                self._due = self._clock.monotonic() + pause

    async def _walk(self, archive: Archive) -> None:
        progress = self._progress = self._progress or _Progress(archive)
        while await self._threads.run(progress.step):
            await self._clock.sleep(self._pace.page)
        await archive.begin_at_floor()
        found: list[SequenceRange] = []
        for hole in _holes(progress, archive.first):
            # Again, because a listing in pages is none of one moment.
            found += await archive.uncovered(hole)
        if self._archive is not None and self._archive.chain == archive.chain:
            self.holes = tuple(found)
            self.news.set()


def _holes(progress: _Progress, first: int) -> list[SequenceRange]:
    """Those from `first` on that the walk passed."""
    if progress.end < first:
        return []
    return progress.covered.holes(SequenceRange(first, progress.end))
