"""Discovery of chains and their growth in the store, for all targets of the process.

Four loops. One lists `tails/` periodically, which shows the chains that have grown. One checks the chains that
notifications name, and no others. One lists the documents of all chains every few minutes. One reads the heartbeats
of egress four times a minute. Only the content of the store is replayed: a lost, repeated, forged or late
notification costs a check or a poll.

A chain is listed where its tail differs from the position, or something else shows that more is archived. A tail may
be missing: egress died between a segment and its tail. So each chain is listed by a schedule too.
"""

import asyncio
import heapq
import math
import zlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from weakref import WeakSet

from common.archive.catalog import FeedId, suggestion
from common.archive.documents import ChainStore, KnownTail
from common.chain import Chain
from common.clock import Clock
from common.errors import FloeError, Refused
from common.logs import get_logger
from common.observe.monitor import Health
from common.service.process import ThreadPool
from common.tasks import first_of, report_errors, run_all, warn_if_slow
from ingress import metrics
from ingress.chains.prefetch import Prefetcher
from ingress.discovery.sites import Heartbeats, interleave_by_site
from ingress.errors import is_transient, most_important_error

log = get_logger(__name__)

HEARTBEAT_READ_INTERVAL_S = 15.0  # seconds between two reads of the heartbeats
POLL_TIMEOUT_S = 15.0  # seconds without an answer to a poll until the store counts as unreachable
CHAIN_LISTING_INTERVAL_S = 600.0  # seconds between two listings of the chains' documents
PARALLEL_CHAIN_LISTINGS = 2  # of these at the same time: a poll must find a free thread
MAX_FEED_LISTINGS = 5  # feeds that are listed one by one, if one listing of all documents takes no fewer requests
DOCUMENTS_PER_CHAIN = 3  # estimated, for that comparison
TICK_INTERVAL_S = 10.0  # seconds at most between two checks of chains that wait
NOTIFICATION_INTERVAL_S = 0.05  # seconds between two checks after notifications: a thousand in a second cause twenty
MAX_TAILS_PER_POLL = 2000  # tails that one poll reads, of all sites in turn; the next poll reads others
MAX_SUGGESTIONS = 20  # missing sources of one listing with a hint: each is compared with all names, on the event loop
MAX_UNKNOWN_CHAINS = 64  # unknown chains that one check takes from notifications; the next poll finds the others
FOLLOW_INTERVAL_S = 300.0  # seconds until a chain is listed again for an end that only a heartbeat names
TAILS_RECORD_INTERVAL_S = 60.0  # seconds between two records of the tails that a target knows, at least
SEARCH_INTERVAL_S = 6 * 3600.0  # seconds within which each chain is listed although nothing shows a change
FULL_SEARCH_EVERY = 12  # of these listings, one lists all levels
MISSED_SEARCH_S = 300.0  # seconds before a chain becomes known in which no process may have listed it: a take-over


class ListingSchedule:
    """Times at which each chain is listed although nothing shows a change, with at most `requests_per_second`.

    They depend on the chain's name and the wall clock: so they are spread over the interval, and a restart moves none.
    """

    def __init__(self, clock: Clock, requests_per_second: float) -> None:
        self._clock, self._rate, self._known = clock, requests_per_second, set[Chain]()
        self._due: list[tuple[float, int, Chain]] = []  # a heap: monotonic time, number of the listing, chain
        self._budget, self._budgeted_at = 0.0, clock.monotonic()

    def add(self, chains: Iterable[Chain]) -> None:
        for chain in chains:
            if chain not in self._known:
                self._known.add(chain)
                spread = zlib.crc32(str(chain).encode()) / 2**32 * SEARCH_INTERVAL_S * FULL_SEARCH_EVERY
                now = self._clock.now()
                number = math.floor((now - MISSED_SEARCH_S - spread) / SEARCH_INTERVAL_S) + 1
                wait = spread + number * SEARCH_INTERVAL_S - now
                heapq.heappush(self._due, (self._clock.monotonic() + wait, number, chain))

    def take_due(self, pairs: Collection[FeedId]) -> Iterator[tuple[Chain, bool]]:
        """Yield the chains of `pairs` to list now, those that wait longest first; True: on all levels."""
        now = self._clock.monotonic()
        self._budget = min(self._budget + (now - self._budgeted_at) * self._rate, self._rate * TICK_INTERVAL_S)
        self._budgeted_at = now
        while self._due and self._due[0][0] <= now and self._budget > 0:
            at, number, chain = self._due[0]
            passed = math.floor((now - at) / SEARCH_INTERVAL_S) + 1
            heapq.heapreplace(self._due, (at + passed * SEARCH_INTERVAL_S, number + passed, chain))
            if (chain.site, chain.feed) in pairs:
                is_full = (number - 1) // FULL_SEARCH_EVERY < (number + passed - 1) // FULL_SEARCH_EVERY
                self._budget -= 2 if is_full else 1
                yield chain, is_full


class Discovery:
    """Reader of the store, and of `sites`, for all targets of this process. `poll_interval`: seconds;
    `requests_per_second`: listings at most of chains without a sign of change.
    """

    def __init__(
        self,
        documents: ChainStore,
        threads: ThreadPool,
        clock: Clock,
        health: Health,
        poll_interval: float,
        sites: Heartbeats | None = None,
        requests_per_second: float = 5.0,
    ) -> None:
        self._documents, self._threads, self.sites = documents, threads, sites
        self._clock, self._health, self._poll_interval = clock, health, poll_interval
        self.targets: list[Prefetcher] = []  # the targets with their lease in this process
        self._pairs: frozenset[FeedId] = frozenset()
        self._targets_by_pair: dict[FeedId, list[Prefetcher]] = {}
        self._known: dict[Chain, int | None] = {}
        self._missing: frozenset[FeedId] = frozenset()
        self._found: set[FeedId] = set()  # since `missing` was shown
        self._etags: dict[Chain, str] = {}
        self._tails_listed = 0  # by the last poll
        self._polled: frozenset[FeedId] = frozenset()  # the feeds of which the last poll listed the tails
        self._unread: set[Chain] = set()  # chains with a tail that is to be read
        self._offered = WeakSet[Prefetcher]()  # targets with patterns that have seen the tails of a poll
        self._recalled = WeakSet[Prefetcher]()  # targets of which the recorded tails were read
        self._unrecorded: set[FeedId] = set()  # feeds with tails that were read since the last record
        self._recorded_at = float("-inf")
        self._claims: dict[Chain, int] = {}  # ends that heartbeats name, above those in the tails
        self._followed: dict[Chain, tuple[int, float]] = {}  # those for which the chain was listed, and when
        self._schedule = ListingSchedule(clock, requests_per_second)
        self._notified: set[Chain] = set()
        self._notified_unknown: set[Chain] = set()
        self.has_polled = False
        self._errors: dict[str, str] = {}  # the last error of each kind of check
        self.poll_due = asyncio.Event()  # poll at once: notifications may have been lost
        self._check_due, self.listing_due, self._heartbeats_due = asyncio.Event(), asyncio.Event(), asyncio.Event()

    # For targets

    def add(self, target: Prefetcher) -> None:
        self.targets.append(target)
        self.update(target, frozenset())
        if target.chains.patterns:
            target.chains.on_known_positions = partial(self._poll_again, target)

    def update(self, target: Prefetcher, former: Collection[FeedId]) -> None:
        """Follow the pairs that `target` has now, and no longer those of `former` that it lacks."""
        self._unassign(target, {*former}.difference(target.pairs()))
        self._assign(target, {*target.pairs()}.difference(former))
        self.poll_due.set()  # which makes the listing of chains due, if it finds that feeds are new
        self._heartbeats_due.set()

    def _poll_again(self, target: Prefetcher) -> None:
        self._recalled.discard(target)
        self.poll_due.set()

    def _assign(self, target: Prefetcher, pairs: Collection[FeedId]) -> None:
        for pair in pairs:
            self._targets_by_pair.setdefault(pair, []).append(target)
        self._pairs |= {*pairs}
        # An earlier attempt may have ended before it delivered what a heartbeat named.
        self._followed = {c: found for c, found in self._followed.items() if (c.site, c.feed) not in pairs}
        self._notify_targets((chain for chain in self._known if (chain.site, chain.feed) in pairs), [target])

    def _offer(self, chains: Iterable[Chain], targets: Iterable[Prefetcher]) -> None:
        """Let the patterns of `targets` take the feeds of these chains, which are in the store."""
        feeds = {(chain.site, chain.feed) for chain in chains} if (targets := [*targets]) else frozenset[FeedId]()
        for target in targets:
            try:
                taken = target.chains.take_feeds(feeds)
            except Exception as error:  # it ends this target, and no other
                target.record_error(error)
                continue
            if taken:
                self._assign(target, {*taken})
                # Found by the tails: only of the first ones all documents are listed at once.
                self._polled |= {*taken} if target in self._offered else frozenset()
            if target.chains.positions is not None:
                self._offered.add(target)

    def remove(self, target: Prefetcher) -> None:
        self.targets.remove(target)
        self._unassign(target, target.pairs())

    def _unassign(self, target: Prefetcher, pairs: Collection[FeedId]) -> None:
        for pair in pairs:
            self._targets_by_pair[pair].remove(target)
        self._pairs = frozenset(pair for pair, targets in self._targets_by_pair.items() if targets)

    # For notifications; on the event loop

    def wake(self, chains: Iterable[Chain]) -> bool:
        """Check these chains at once. Return True if any of them may flow into a target of this process."""
        offered = [target.chains.patterns for target in self.targets if target in self._offered]
        wanted = [
            chain
            for chain in chains
            if (pair := (chain.site, chain.feed)) in self._pairs or any(each.may_take(pair) for each in offered)
        ]
        for chain in wanted:
            if chain in self._known:
                self._notified.add(chain)
            elif len(self._notified_unknown) < MAX_UNKNOWN_CHAINS:
                self._notified_unknown.add(chain)
        if wanted:
            self._check_due.set()
        return bool(wanted)

    # The loops

    async def run(self) -> None:
        """Run the loops. A store that does not answer, or refuses, is retried. If it has refused since the first poll,
        that error is raised.
        """
        try:
            await run_all(self._poll_loop(), self._notified_loop(), self._list_chains_loop(), self._heartbeat_loop())
        except BaseExceptionGroup as errors:
            raise most_important_error(errors) from None

    async def _poll_loop(self) -> None:
        while True:
            # Clear it first: a request during the poll may come too late for it.
            self.poll_due.clear()
            await self._poll_once(self.poll)
            await self._error_of("tails", self.record_tails())
            due = self._clock.monotonic() + self._poll_interval
            while not self.poll_due.is_set() and (rest := due - self._clock.monotonic()) > 0:
                await first_of(self.poll_due.wait(), self._clock.sleep(min(rest, TICK_INTERVAL_S)))
                if rest > TICK_INTERVAL_S and not self.poll_due.is_set():
                    await self._poll_once(self._tick)

    async def _poll_once(self, work: Callable[[], Awaitable[None]]) -> None:
        error = await self._error_of("poll", work())
        if error is not None and not (self.has_polled or is_transient(error)):
            raise error
        self._health.set_ready("store", error is None, error.message if error else "")
        if self.targets:  # else nothing was read
            metrics.store_reachable.set(error is None)
            if error is None:
                metrics.store_answered.set(self._clock.now())

    def _report_slow(self) -> None:
        self._health.set_ready("store", False, f"no answer to a poll for {POLL_TIMEOUT_S:.0f} s")
        metrics.store_reachable.set(0)

    async def _notified_loop(self) -> None:
        while True:
            await self._check_due.wait()
            self._check_due.clear()
            await self._error_of("notifications", self._check_notified())
            await self._clock.sleep(NOTIFICATION_INTERVAL_S)

    async def _list_chains_loop(self) -> None:
        while True:
            self.listing_due.clear()
            error = await self._error_of("chains", self.list_chains())
            await first_of(self.listing_due.wait(), seconds=TICK_INTERVAL_S if error else CHAIN_LISTING_INTERVAL_S)

    async def _heartbeat_loop(self) -> None:
        while True:
            self._heartbeats_due.clear()
            if self._pairs and self.sites:
                await self._error_of("alive", self._read_heartbeats(self.sites))
            await first_of(self._heartbeats_due.wait(), seconds=HEARTBEAT_READ_INTERVAL_S)

    async def _error_of(self, check: str, work: Awaitable[None]) -> FloeError | None:
        try:
            await work
        except FloeError as error:
            if self._errors.get(check) != str(error):
                self._errors[check] = str(error)
                log.warning("store check failed", action="store_check_failed", check=check, error=str(error))
            return error
        if (former := self._errors.pop(check, None)) is not None:
            log.info("store check recovered", action="store_check_recovered", check=check, trouble=former)
        return None

    # Checks; each raises as the store does

    async def poll(self) -> None:
        if not self.targets:
            return
        claims, self._claims = self._claims, {}
        etags = await warn_if_slow(self._threads.run(self._documents.tail_etags), POLL_TIMEOUT_S, self._report_slow)

        async def read(chain: Chain) -> None:
            try:
                end = await self._threads.run(self._documents.read_tail, chain)
            finally:
                self._unread.discard(chain)
            self._etags.pop(chain, None)  # at the end: the next poll reads others first
            self._unrecorded.add((chain.site, chain.feed))
            self._learn({chain: (etags[chain], end)})
            if end is None:  # an invalid tail says nothing
                self.wake([chain])

        self._offer(etags, [target for target in self.targets if target.chains.patterns])
        pairs = self._pairs  # targets may be added from here on
        wanted = {chain for chain in etags if (chain.site, chain.feed) in pairs}
        gone = sorted(chain for chain in self._etags if (chain.site, chain.feed) in pairs and chain not in etags)
        reason = f"the archive of {gone[0]} and {len(gone) - 1} more is gone from the bucket" if gone else ""
        self._health.set_ready("archive", not gone, reason.replace(" and 0 more", ""))
        self.wake(chain for chain in gone if self._etags[chain])
        self._etags.update(dict.fromkeys(gone, ""))
        changed = [chain for chain, etag in self._etags.items() if chain in wanted and etags[chain] != etag]
        new = [chain for chain in etags if chain in wanted and chain not in self._etags]
        if new and (known := await self._recall()):
            self._learn({c: tail for c in new if (tail := known.get(c)) is not None and tail.etag == etags[c]})
            new = [chain for chain in new if chain not in self._etags]
        self._tails_listed, self._unread = len(etags), {*new, *changed}
        if pairs - self._polled:
            self.listing_due.set()
        self._polled = pairs
        chains = interleave_by_site([*new, *changed], lambda chain: chain.site)
        if any(chain not in self._etags for chain in chains[MAX_TAILS_PER_POLL:]):
            self.poll_due.set()
        answers = await asyncio.gather(*map(read, chains[:MAX_TAILS_PER_POLL]), return_exceptions=True)
        # One site's documents may be refused; if every tail is refused, that will not change.
        self.has_polled = self.has_polled or not answers or None in answers
        self._follow(claims)
        await self._tick()
        for failed in (answer for answer in answers if answer is not None):
            raise failed

    def _learn(self, tails: Mapping[Chain, tuple[str, int | None]]) -> None:
        """Adopt tails, each with its ETag and the end in it, for all targets."""
        for chain, (etag, end) in tails.items():
            self._known[chain], self._etags[chain] = end, etag
        self._schedule.add(tails)
        self._notify_targets(tails, self.targets)

    async def _recall(self) -> Mapping[Chain, KnownTail]:
        """Read the tails that processes before this one recorded, for the targets that are new here."""
        found: dict[Chain, KnownTail] = {}
        for target in [each for each in self.targets if each not in self._recalled]:
            with suppress(Refused):
                found |= await self._threads.run(self._documents.read_known_tails, target.name)
            self._recalled.add(target)
        return found

    async def record_tails(self) -> None:
        """Record the tails of the targets with new ones, so that the next process need not read them again."""
        now = self._clock.monotonic()
        if not self._unrecorded or self._unread or now - self._recorded_at < TAILS_RECORD_INTERVAL_S:
            return
        self._recorded_at = now
        for target in [each for each in self.targets if not self._unrecorded.isdisjoint(each.pairs())]:
            pairs = {*target.pairs()}
            known = ((c, etag, self._known[c]) for c, etag in self._etags.items() if (c.site, c.feed) in pairs)
            tails = {chain: KnownTail(etag, end) for chain, etag, end in known if end is not None}
            await self._threads.run(self._documents.write_known_tails, target.name, tails)
        self._unrecorded.clear()

    async def _read_heartbeats(self, sites: Heartbeats) -> None:
        await sites.read(self._pairs)
        ends = sites.archived_ends()
        self._claims = {chain: end for chain, end in ends if end > (self._known.get(chain) or 0)}

    def _follow(self, claims: Mapping[Chain, int]) -> None:
        """Check the chains of which egress named an end, before the tails were listed, that no tail shows."""
        for chain, end in claims.items():
            is_shown = (self._known.get(chain) or 0) >= end or chain in self._unread
            followed, at = self._followed.get(chain, (0, 0.0))
            if not is_shown and (followed != end or self._clock.monotonic() - at >= FOLLOW_INTERVAL_S):
                self._followed[chain] = end, self._clock.monotonic()
                self.wake([chain])

    async def list_chains(self) -> None:
        """List all chains, also those without a tail: a crash may happen between a segment and its tail."""
        # Targets may be added during the listings. Before a poll, every chain would count as one without a tail.
        gate, pairs = asyncio.Semaphore(PARALLEL_CHAIN_LISTINGS), self._pairs & self._polled

        async def read(site: str | None, feed: str | None) -> list[Chain]:
            async with gate:
                return await self._threads.run(self._documents.chains, site, feed)

        offered = [target for target in self.targets if target in self._offered]
        is_whole = bool(offered) or len(pairs) > MAX_FEED_LISTINGS + self._tails_listed * DOCUMENTS_PER_CHAIN // 1000
        reads = [read(None, None)] if is_whole else [read(site, feed) for site, feed in sorted(pairs)]
        answers = await asyncio.gather(*reads, return_exceptions=True)
        found = [chain for answer in answers if not isinstance(answer, BaseException) for chain in answer]
        self._offer(found, offered)
        pairs = self._pairs & self._polled if offered else pairs
        found = [chain for chain in found if (chain.site, chain.feed) in pairs]
        await self._add_chains(chain for chain in found if chain not in self._unread)
        for failed in (answer for answer in answers if isinstance(answer, BaseException)):
            raise failed
        await self._warn_missing(pairs, found)

    async def _warn_missing(self, pairs: frozenset[FeedId], found: Collection[Chain]) -> None:
        missing = pairs - {(chain.site, chain.feed) for chain in (*found, *self._known)}
        new, self._missing = missing - self._missing, missing
        tails = await self._threads.run(self._documents.tail_etags) if new else ()
        names = {f"{chain.site}/{chain.feed}" for chain in tails}
        for number, (site, feed) in enumerate(sorted(new)):
            hint = suggestion(f"{site}/{feed}", names) if number < MAX_SUGGESTIONS else ""
            log.warning("source missing", action="source_missing", site=site, feed=feed, hint=hint)
        self._show_missing()

    def _show_missing(self) -> None:
        self._missing, self._found = (self._missing - self._found) & self._pairs, set()
        if self._missing:
            self._health.set_status("sources", {"missing": ["/".join(pair) for pair in sorted(self._missing)]})
        else:
            self._health.remove("sources")

    async def _check_notified(self) -> None:
        notified, self._notified, new, self._notified_unknown = self._notified, set(), self._notified_unknown, set()
        for target in self.targets:
            wake = report_errors(target.wake, target.record_error)
            for chain in notified:
                wake(chain)
        exist = await asyncio.gather(*(self._exists(chain) for chain in new))
        found = [chain for chain, is_there in zip(new, exist, strict=True) if is_there]
        self._offer(found, [target for target in self.targets if target in self._offered])
        await self._add_chains(chain for chain in found if (chain.site, chain.feed) in self._pairs)

    async def _exists(self, chain: Chain) -> bool:
        key = self._documents.layout.chain_document(chain)
        try:
            return await self._threads.run(self._documents.objects.head, key) is not None
        except FloeError as error:
            log.info("notification deferred", action="notification_deferred", error=str(error), **chain.log_context())
            return False

    async def _add_chains(self, chains: Iterable[Chain]) -> None:
        new = [chain for chain in chains if chain not in self._known]
        self._known.update(dict.fromkeys(new))
        self._schedule.add(new)
        self._notify_targets(new, self.targets)
        if new:
            await self._tick()

    async def _tick(self) -> None:
        if self._found or not self._missing <= self._pairs:
            self._show_missing()
        failed: FloeError | None = None
        for chain, everywhere in self._schedule.take_due(self._pairs):
            for target in self.targets:
                report_errors(target.search, target.record_error)(chain, everywhere=everywhere)
        for target in list(self.targets):
            try:
                await target.tick()
            except FloeError as error:
                failed = failed or error
            except Exception as error:  # it ends this target, and no other
                target.record_error(error)
        if failed is not None:
            raise failed

    def _notify_targets(self, chains: Iterable[Chain], targets: list[Prefetcher]) -> None:
        for chain in chains:
            if (pair := (chain.site, chain.feed)) in self._missing:
                self._found.add(pair)
            for target in self._targets_by_pair.get(pair, ()):
                if target in targets:
                    report_errors(target.add_chain, target.record_error)(chain, self._known[chain])
