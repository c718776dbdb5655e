"""Heartbeats of the egress processes (`common.segments.alive`), as the running service knows them.

Four listings a minute, and a read of each object that has changed. A site counts as silent if its objects have not
changed for too long, by this host's monotonic clock; only the first check uses their age. Time in which the store
does not answer does not count: no site could write then either.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import Gauge

from common.chain import Chain
from common.clock import Clock
from common.errors import FloeError
from common.objects.port import ObjectInfo
from common.segments.alive import Alive, Sighting, newest
from common.segments.documents import ChainStore
from common.service.process import Threads
from ingress import metrics

MOST_READ = 1000  # objects that one check reads; the next check reads others
READ_AT_ONCE = 4

Shown = Mapping[tuple[str, ...], tuple[float, ...]]  # values of some gauges, by their labels


T = TypeVar("T")


def in_turn(items: Iterable[T], site: Callable[[T], str]) -> list[T]:
    """Return one item of each site, then the next of each, and so on; items of one site keep their order."""
    taken = Counter[str]()

    def turn(item: T) -> int:
        taken[site(item)] += 1
        return taken[site(item)]

    return sorted(items, key=turn)


@dataclass(slots=True)
class _Known:
    """One object. `moved`: the time of its last change, later by the time in which the store did not answer;
    `read_at`: the time of the last read; both in monotonic seconds. `seen_etag`: its ETag at that read.
    """

    info: ObjectInfo
    moved: float
    read_at: float = float("-inf")
    seen_etag: str = ""
    alive: Alive | None = None


class Sites:
    """The heartbeats under one layout. `silent_after`: seconds."""

    def __init__(self, documents: ChainStore, threads: Threads, clock: Clock, silent_after: float) -> None:
        self._documents, self._threads, self._clock = documents, threads, clock
        self.silent_after = silent_after
        self._known: dict[str, _Known] = {}
        self._unanswered_since: float | None = None
        self._sightings: dict[Chain, Sighting] = {}
        self._shown: dict[tuple[Gauge, ...], set[tuple[str, ...]]] = {}

    def of(self, chain: Chain) -> Sighting | None:
        """Return the last heartbeat of the partition of `chain`, for any incarnation; None if none is known."""
        return self._sightings.get(Chain(chain.site, chain.feed, 0, chain.partition))

    def is_silent(self, sighting: Sighting) -> bool:
        return sighting.age > self.silent_after

    async def look(self, pairs: Collection[tuple[str, str]]) -> None:
        """List once, and read the changed objects of the sites of `pairs`. Raises as the store does."""
        sites, began = {site for site, _ in pairs}, self._clock.monotonic()
        try:
            listed = await self._threads.run(self._documents.listed_alive)
        except FloeError:
            self._unanswered_since = self._unanswered_since or began
            raise
        now = self._clock.monotonic()
        if self._unanswered_since is not None:
            for known in self._known.values():
                known.moved += now - self._unanswered_since
            self._unanswered_since = None
        self._note([info for info in listed if self._site(info.key) in sites], now)
        changed = [known for known in self._known.values() if known.seen_etag != known.info.etag]
        changed = in_turn(sorted(changed, key=lambda known: known.read_at), lambda known: self._site(known.info.key))
        gate = asyncio.Semaphore(READ_AT_ONCE)
        await asyncio.gather(*(self._read(known, gate, now) for known in changed[:MOST_READ]))
        self._sightings = newest(
            Sighting(sign, known.info.modified, now - known.moved, known.alive.time)
            for known in self._known.values()
            if known.alive is not None
            for sign in known.alive.chains
        )
        self._show(pairs, now)
        metrics.alive_read.set(self._clock.now())

    def _site(self, key: str) -> str:
        name = self._documents.layout.parse_alive(key)
        return name[0] if name else ""

    def _note(self, listed: Iterable[ObjectInfo], now: float) -> None:
        former, self._known = self._known, {}
        for info in listed:
            if (known := former.get(info.key)) is None:
                known = _Known(info, now - max(0.0, self._clock.now() - info.modified))
            elif known.info.etag != info.etag:
                known.info, known.moved = info, now
            self._known[info.key] = known

    async def _read(self, known: _Known, gate: asyncio.Semaphore, now: float) -> None:
        async with gate:
            found = await self._threads.run(self._documents.read_alive, known.info.key)
        known.seen_etag, known.read_at = known.info.etag, now
        if found is not None:
            known.alive = found

    # Metrics

    def _show(self, pairs: Collection[tuple[str, str]], now: float) -> None:
        ages: dict[str, float] = {}
        times: dict[str, float] = {}
        for key, known in self._known.items():
            site, age = self._site(key), now - known.moved
            ages[site] = min(ages.get(site, age), age)
            times[site] = max(times.get(site, 0.0), known.info.modified)
        of_sites: Shown = {(site,): (age > self.silent_after, times[site]) for site, age in ages.items()}
        of_chains: Shown = {
            (chain.site, chain.feed, str(chain.partition)): (each.sign.state == "stopped", self.is_silent(each))
            for chain, each in self._sightings.items()
            if (chain.site, chain.feed) in pairs
        }
        self._set((metrics.site_silent, metrics.site_alive), of_sites)
        self._set((metrics.source_stopped, metrics.source_silent), of_chains)

    def _set(self, gauges: tuple[Gauge, ...], values: Shown) -> None:
        for labels, each in values.items():
            for gauge, value in zip(gauges, each, strict=True):
                gauge.labels(*labels).set(value)
        for gone in self._shown.get(gauges, set()) - values.keys():
            for gauge in gauges:
                gauge.remove(*gone)
        self._shown[gauges] = set(values)
