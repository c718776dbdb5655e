"""Coverage of the chains that a process shows, level by level, for readers of its status page."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing, suppress
from itertools import islice, takewhile
from typing import Any

from common.chain import Chain
from common.clock import Clock
from common.errors import FloeError
from common.logs import get_logger
from common.segments.documents import ChainStore, CompactionRuns, run_of
from common.segments.keys import parse
from common.segments.segment import SegmentRef
from common.segments.store import SegmentStore
from common.sequences import Covered, SequenceRange
from common.service.monitor import Health
from common.service.process import Threads
from common.tasks import Stop, again, unless, wait_for

log = get_logger("segments.coverage")

EVERY = 300.0  # seconds from the end of one scan to the next
GLANCE = 1.0  # seconds between two checks for a reader of the page
READ_FOR = 900.0  # seconds for which a page counts as read after a request
MOST_CHAINS = 100  # of a scan; further ones are not shown
MOST_SEGMENTS = 50_000  # of a chain in one scan: 50 requests
MOST_RANGES = 200  # of a level in the picture; closer ones are drawn as one


def summed(refs: Iterable[SegmentRef], now: float) -> dict[str, Any]:
    """Return the coverage of `refs`, of one chain, as /status shows it: for each level the number of segments, their
    bytes, the time of the newest put and the covered ranges; and the holes between all of them.

    `compacted`: the time at which the newest segment above level 0 was put, None if there is none; `at`: `now`. Times
    in seconds since 1970. Of more than MOST_RANGES ranges, those close together become one; `missing` is cut there.
    """
    refs = iter(refs)
    levels: dict[int, dict[str, Any]] = {}
    covered: dict[int, Covered] = {}
    whole = Covered()
    for ref in islice(refs, MOST_SEGMENTS):
        level = levels.setdefault(ref.level, {"segments": 0, "bytes": 0, "newest": 0.0})
        level["segments"] += 1
        level["bytes"] += ref.size
        level["newest"] = max(level["newest"], ref.modified)
        covered.setdefault(ref.level, Covered()).add(ref.coverage)
        whole.add(ref.coverage)
    is_complete = next(refs, None) is None
    if not levels:
        return {"at": now, "levels": {}, "is_complete": is_complete}
    span = SequenceRange(whole.stretches()[0].first, whole.end)
    missing = whole.holes(span)
    for number, level in levels.items():
        level["ranges"] = [[each.first, each.last] for each in _drawable(covered[number].stretches(), span)]
    return {
        "at": now,
        "first": span.first,
        "last": span.last,
        "holes": len(missing),
        "missing": [[each.first, each.last] for each in missing[:MOST_RANGES]],
        "compacted": max((level["newest"] for number, level in levels.items() if number), default=None),
        "levels": {str(number): levels[number] for number in sorted(levels)},
        "is_complete": is_complete,
    }


def _drawable(stretches: list[SequenceRange], span: SequenceRange) -> list[SequenceRange]:
    """Return `stretches`; if there are more than MOST_RANGES, with close neighbours merged into one."""
    if len(stretches) <= MOST_RANGES:
        return stretches
    near, found = len(span) // MOST_RANGES, stretches[:1]
    for each in stretches[1:]:
        if each.first - found[-1].last <= near:
            found[-1] = SequenceRange(found[-1].first, each.last)
        else:
            found.append(each)
    return found


class CoverageWatch:
    """Periodic scan of `store` that shows in `health` the coverage of its chains, while somebody reads the page."""

    def __init__(self, store: SegmentStore, health: Health, clock: Clock) -> None:
        self._store, self._health, self._clock = store, health, clock

    async def run(self, stop: Stop) -> None:
        """Scan until `stop` is set; restart after an unexpected error."""
        await again("coverage", lambda: self._watch(stop), self._clock)

    async def _watch(self, stop: Stop) -> None:
        looked = float("-inf")
        with closing(Threads("coverage", 1)) as threads:
            while not stop.is_set:
                now = self._clock.monotonic()
                if self._health.read_age() < READ_FOR and now - looked >= EVERY and self._health.chains():
                    await unless(stop, self.look(threads, stop))
                    looked = self._clock.monotonic()
                await wait_for(stop, GLANCE)

    async def look(self, threads: Threads, stop: Stop) -> None:
        """Scan all chains, up to MOST_CHAINS. If one cannot be listed, its former result stays."""
        found = self._health.coverage()
        names = self._health.chains()[:MOST_CHAINS]
        runs: CompactionRuns = {}
        with suppress(FloeError):
            runs = await threads.run(ChainStore(self._store.objects, self._store.layout).runs)
        for name in names:
            try:
                found[name] = await threads.run(self._of, name, runs, stop)
            except FloeError as error:
                log.info("coverage not looked at", action="coverage_failed", chain=name, error=str(error))
        self._health.set_coverage({name: found[name] for name in names if name in found})

    def _of(self, name: str, runs: CompactionRuns, stop: Stop) -> dict[str, Any]:
        site, feed, incarnation, partition = parse(name)
        chain = Chain(site, feed or "", incarnation or 0, partition or 0)
        pages = takewhile(lambda _: not stop.is_set, self._store.walk(chain))
        run = run_of(runs, chain)
        compaction = run and {"ended": run.ended, "code": run.code, "succeeded": run.succeeded}
        return {**summed((ref for page in pages for ref in page), self._clock.now()), "compaction": compaction}
