"""Heartbeats of the egress processes (`common.archive.heartbeats`), as the running service knows them.

Four listings a minute, and reads of objects that have changed: at most half of all objects a minute, if they are many.
A site counts as silent if its objects have not changed for too long, by this host's monotonic clock; only the first
check uses their age. Time in which the store does not answer does not count: no site could write then either.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import Gauge

from common.archive.documents import ChainStore
from common.archive.heartbeats import HeartbeatObject, StoredHeartbeat
from common.chain import Chain
from common.clock import Clock
from common.errors import FloeError
from common.objects.port import ObjectInfo
from common.observe.observation import current_by_partition
from common.service.process import ThreadPool
from ingress import metrics

MIN_READS_PER_CHECK, MAX_READS_PER_CHECK = 25, 250  # objects that one check reads: an eighth, within these bounds
PARALLEL_HEARTBEAT_READS = 4

Shown = Mapping[tuple[str, ...], tuple[float, ...]]  # values of some gauges, by their labels


T = TypeVar("T")


def interleave_by_site(items: Iterable[T], site: Callable[[T], str]) -> list[T]:
    """Return one item of each site, then the next of each, and so on; items of one site keep their order."""
    taken = Counter[str]()

    def turn(item: T) -> int:
        taken[site(item)] += 1
        return taken[site(item)]

    return sorted(items, key=turn)


@dataclass(slots=True)
class _Known:
    """One object of `site`. `changed_at`: the time of its last change, later by the time in which the store did not
    answer; `read_at`: the time of the last read; both in monotonic seconds. `read_etag`: its ETag at that read.
    """

    site: str
    info: ObjectInfo
    changed_at: float
    read_at: float = float("-inf")
    read_etag: str = ""
    alive: HeartbeatObject | None = None


class Heartbeats:
    """The heartbeats under one layout. `silent_after`: seconds."""

    def __init__(self, documents: ChainStore, threads: ThreadPool, clock: Clock, silent_after: float) -> None:
        self._documents, self._threads, self._clock = documents, threads, clock
        self.silent_after = silent_after
        self._known: dict[str, _Known] = {}
        self._unanswered_since: float | None = None
        self._heartbeats: dict[Chain, StoredHeartbeat] = {}
        self._shown: dict[tuple[Gauge, ...], Shown] = {}

    def heartbeat_of(self, chain: Chain) -> StoredHeartbeat | None:
        """Return the last heartbeat of the partition of `chain`, for any incarnation; None if none is known."""
        return self._heartbeats.get(Chain(chain.site, chain.feed, 0, chain.partition))

    def is_silent(self, heartbeat: StoredHeartbeat) -> bool:
        return heartbeat.age > self.silent_after

    def archived_ends(self) -> Iterator[tuple[Chain, int]]:
        """Yield the chains of which egress knows the archive, each with the end of its coverage."""
        found = (stored.heartbeat for stored in self._heartbeats.values())
        return ((each.chain, each.end) for each in found if each.end)

    async def read(self, pairs: Collection[tuple[str, str]]) -> None:
        """List once, and read the changed objects of the sites of `pairs`. Raises as the store does."""
        sites, began = {site for site, _ in pairs}, self._clock.monotonic()
        try:
            listed = await self._threads.run(self._documents.list_heartbeats)
        except FloeError:
            self._unanswered_since = self._unanswered_since or began
            raise
        now = self._clock.monotonic()
        if self._unanswered_since is not None:
            for known in self._known.values():
                known.changed_at += now - self._unanswered_since
            self._unanswered_since = None
        self._update_known(listed, sites, now)
        changed = [known for known in self._known.values() if known.read_etag != known.info.etag]
        changed = interleave_by_site(sorted(changed, key=lambda k: k.read_at), lambda k: k.site)
        gate = asyncio.Semaphore(PARALLEL_HEARTBEAT_READS)
        count = min(MAX_READS_PER_CHECK, max(MIN_READS_PER_CHECK, len(self._known) // 8))  # the next check reads others
        await asyncio.gather(*(self._read(known, gate, now) for known in changed[:count]))
        heartbeats = [
            StoredHeartbeat(heartbeat, known.info.modified, now - known.changed_at, known.alive.time)
            for known in self._known.values()
            if known.alive is not None
            for heartbeat in known.alive.chains
        ]
        self._heartbeats = await self._threads.run(current_by_partition, self._documents, heartbeats)
        self._show(pairs, now)
        metrics.heartbeats_read.set(self._clock.now())

    def _site(self, key: str) -> str:
        name = self._documents.layout.parse_heartbeat(key)
        return name[0] if name else ""

    def _update_known(self, listed: Iterable[ObjectInfo], sites: Collection[str], now: float) -> None:
        former, self._known = self._known, {}
        for info in listed:
            if (known := former.get(info.key)) is None:
                known = _Known(self._site(info.key), info, now - max(0.0, self._clock.now() - info.modified))
            elif known.info.etag != info.etag:
                known.info, known.changed_at = info, now
            if known.site in sites:
                self._known[info.key] = known

    async def _read(self, known: _Known, gate: asyncio.Semaphore, now: float) -> None:
        async with gate:
            found = await self._threads.run(self._documents.read_heartbeat, known.info.key)
        known.read_etag, known.read_at = known.info.etag, now
        if found is not None:
            known.alive = found

    # Metrics

    def _show(self, pairs: Collection[tuple[str, str]], now: float) -> None:
        ages: dict[str, float] = {}
        times: dict[str, float] = {}
        for known in self._known.values():
            site, age = known.site, now - known.changed_at
            ages[site] = min(ages.get(site, age), age)
            times[site] = max(times.get(site, 0.0), known.info.modified)
        of_sites: Shown = {(site,): (age > self.silent_after, times[site]) for site, age in ages.items()}
        stopped, silent = Counter[str](), Counter[str]()
        for chain, each in self._heartbeats.items():
            if (chain.site, chain.feed) in pairs:
                stopped[chain.site] += each.heartbeat.state == "stopped"
                silent[chain.site] += self.is_silent(each)
        self._set((metrics.site_silent, metrics.site_heartbeat), of_sites)
        self._set((metrics.source_stopped, metrics.source_silent), {(s,): (stopped[s], silent[s]) for s in stopped})

    def _set(self, gauges: tuple[Gauge, ...], values: Shown) -> None:
        shown = self._shown.get(gauges, {})
        for labels, each in values.items():
            for gauge, value in zip(gauges, each, strict=True) if shown.get(labels) != each else ():
                gauge.labels(*labels).set(value)
        for gone in shown.keys() - values.keys():
            for gauge in gauges:
                gauge.remove(*gone)
        self._shown[gauges] = values
