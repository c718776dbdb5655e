"""Coverage of the chains that a process shows, level by level, for readers of its status page."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing, suppress
from itertools import islice, takewhile
from typing import Any

from common.archive.documents import ChainStore, CompactionRuns, run_of
from common.archive.segment import SegmentRef
from common.archive.store import SegmentStore
from common.chain import Chain
from common.clock import Clock
from common.errors import FloeError
from common.logs import get_logger
from common.observe.monitor import Health
from common.sequences import CoverageSet, SequenceRange
from common.service.process import ThreadPool
from common.tasks import Stop, restart_on_error, run_until_stopped, wait_for

log = get_logger("segments.coverage")

COVERAGE_INTERVAL_S = 300.0  # seconds from the end of one scan to the next
READER_POLL_S = 1.0  # seconds between two checks for a reader of the page
READER_TIMEOUT_S = 900.0  # seconds for which a page counts as read after a request
MAX_SCANNED_CHAINS = 100  # of a scan; further ones are not shown
MAX_SCANNED_SEGMENTS = 50_000  # of a chain in one scan: 50 requests
MAX_DRAWN_RANGES = 200  # of a level in the picture; closer ones are drawn as one


def sum_coverage(refs: Iterable[SegmentRef], now: float) -> dict[str, Any]:
    """Return the coverage of `refs`, of one chain, as /status shows it: for each level the number of segments, their
    bytes, the time of the newest put and the covered ranges; and the holes between all of them.

    `compacted`: the time at which the newest segment above level 0 was put, None if there is none; `at`: `now`. Times
    in seconds since 1970. Of more than MAX_DRAWN_RANGES ranges, those close together become one; `missing` is cut
    there.
    """
    refs = iter(refs)
    levels: dict[int, dict[str, Any]] = {}
    covered: dict[int, CoverageSet] = {}
    whole = CoverageSet()
    for ref in islice(refs, MAX_SCANNED_SEGMENTS):
        level = levels.setdefault(ref.level, {"segments": 0, "bytes": 0, "newest": 0.0})
        level["segments"] += 1
        level["bytes"] += ref.size
        level["newest"] = max(level["newest"], ref.modified)
        covered.setdefault(ref.level, CoverageSet()).add(ref.coverage)
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
        "missing": [[each.first, each.last] for each in missing[:MAX_DRAWN_RANGES]],
        "compacted": max((level["newest"] for number, level in levels.items() if number), default=None),
        "levels": {str(number): levels[number] for number in sorted(levels)},
        "is_complete": is_complete,
    }


def _drawable(stretches: list[SequenceRange], span: SequenceRange) -> list[SequenceRange]:
    """Return `stretches`; if there are more than MAX_DRAWN_RANGES, with close neighbours merged into one."""
    if len(stretches) <= MAX_DRAWN_RANGES:
        return stretches
    near, found = len(span) // MAX_DRAWN_RANGES, stretches[:1]
    for each in stretches[1:]:
        if each.first - found[-1].last <= near:
            found[-1] = SequenceRange(found[-1].first, each.last)
        else:
            found.append(each)
    return found


class CoverageScanner:
    """Periodic scan of `store` that shows in `health` the coverage of its chains, while somebody reads the page."""

    def __init__(self, store: SegmentStore, health: Health, clock: Clock) -> None:
        self._store, self._health, self._clock = store, health, clock

    async def run(self, stop: Stop) -> None:
        """Scan until `stop` is set; restart after an unexpected error."""
        await restart_on_error("coverage", lambda: self._watch(stop), self._clock)

    async def _watch(self, stop: Stop) -> None:
        scanned = float("-inf")
        with closing(ThreadPool("coverage", 1)) as threads:
            while not stop.is_set:
                now = self._clock.monotonic()
                is_read = self._health.seconds_since_read() < READER_TIMEOUT_S
                if is_read and now - scanned >= COVERAGE_INTERVAL_S and self._health.chains():
                    await run_until_stopped(stop, self.scan(threads, stop))
                    scanned = self._clock.monotonic()
                await wait_for(stop, READER_POLL_S)

    async def scan(self, threads: ThreadPool, stop: Stop) -> None:
        """Scan all chains, up to MAX_SCANNED_CHAINS. If one cannot be listed, its former result stays."""
        found = self._health.coverage()
        names = self._health.chains()[:MAX_SCANNED_CHAINS]
        runs: CompactionRuns = {}
        with suppress(FloeError):
            runs = await threads.run(ChainStore(self._store.objects, self._store.layout).runs)
        for name in names:
            try:
                found[name] = await threads.run(self._chain_coverage, name, runs, stop)
            except FloeError as error:
                log.info("coverage scan deferred", action="coverage_deferred", chain=name, error=str(error))
        self._health.set_coverage({name: found[name] for name in names if name in found})

    def _chain_coverage(self, name: str, runs: CompactionRuns, stop: Stop) -> dict[str, Any]:
        chain = Chain.parse(name)
        pages = takewhile(lambda _: not stop.is_set, self._store.walk(chain))
        run = run_of(runs, chain)
        compaction = run and {"ended": run.ended, "code": run.code, "succeeded": run.succeeded}
        return {**sum_coverage((ref for page in pages for ref in page), self._clock.now()), "compaction": compaction}
