"""Discovery of chains and their growth in the store, for all targets of the process.

Four loops. One lists `tails/` periodically, which shows the chains that have grown. One checks the chains that
notifications name, and no others. One lists the documents of all chains every few minutes. One reads the heartbeats
of egress four times a minute. Only the content of the store is replayed: a lost, repeated, forged or late
notification costs a check or a poll.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from common.archive.documents import ChainStore
from common.archive.keys import FeedId, suggestion
from common.chain import Chain
from common.clock import Clock
from common.errors import FloeError
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
CHAIN_LISTING_INTERVAL_S = 300.0  # seconds between two listings of the chains' documents
PARALLEL_CHAIN_LISTINGS = 2  # of these at the same time: a poll must find a free thread
TICK_INTERVAL_S = 10.0  # seconds at most between two checks of chains that wait
NOTIFICATION_INTERVAL_S = 0.05  # seconds between two checks after notifications: a thousand in a second cause twenty
MAX_TAILS_PER_POLL = 2000  # tails that one poll reads, of all sites in turn; the next poll reads others
MAX_UNKNOWN_CHAINS = 64  # unknown chains that one check takes from notifications; the next poll finds the others


class Discovery:
    """Reader of the store, and of `sites`, for all targets of this process. `poll_interval`: seconds."""

    def __init__(
        self,
        documents: ChainStore,
        threads: ThreadPool,
        clock: Clock,
        health: Health,
        poll_interval: float,
        sites: Heartbeats | None = None,
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
        self._notified: set[Chain] = set()
        self._notified_unknown: set[Chain] = set()
        self.has_polled = False
        self._errors: dict[str, str] = {}  # the last error of each kind of check
        self.poll_due = asyncio.Event()  # poll at once: notifications may have been lost
        self._check_due, self.listing_due, self._heartbeats_due = asyncio.Event(), asyncio.Event(), asyncio.Event()

    # For targets

    def add(self, target: Prefetcher) -> None:
        self.targets.append(target)
        pairs = {*target.pairs()}
        self._pairs |= pairs
        for pair in target.pairs():
            self._targets_by_pair.setdefault(pair, []).append(target)
        self._notify_targets((chain for chain in self._known if (chain.site, chain.feed) in pairs), [target])
        for event in (self.poll_due, self.listing_due, self._heartbeats_due):
            event.set()

    def remove(self, target: Prefetcher) -> None:
        self.targets.remove(target)
        for pair in target.pairs():
            self._targets_by_pair[pair].remove(target)
        self._pairs = frozenset(pair for pair, targets in self._targets_by_pair.items() if targets)

    # For notifications; on the event loop

    def wake(self, chains: Iterable[Chain]) -> bool:
        """Check these chains at once. Return True if any of them may flow into a target of this process."""
        wanted = [chain for chain in chains if (chain.site, chain.feed) in self._pairs]
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
                await self._error_of("alive", self.sites.read(self._pairs))
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
        etags = await warn_if_slow(self._threads.run(self._documents.tail_etags), POLL_TIMEOUT_S, self._report_slow)

        async def read(chain: Chain) -> None:
            end = await self._threads.run(self._documents.read_tail, chain)
            self._etags.pop(chain, None)
            self._known[chain], self._etags[chain] = end, etags[chain]  # at the end: the next poll reads others first
            self._notify_targets([chain], self.targets)

        wanted = {chain for chain in etags if (chain.site, chain.feed) in self._pairs}
        gone = sorted(chain for chain in self._etags if (chain.site, chain.feed) in self._pairs and chain not in etags)
        reason = f"the archive of {gone[0]} and {len(gone) - 1} more is gone from the bucket" if gone else ""
        self._health.set_ready("archive", not gone, reason.replace(" and 0 more", ""))
        changed = [chain for chain, etag in self._etags.items() if chain in wanted and etags[chain] != etag]
        new = [chain for chain in etags if chain in wanted and chain not in self._etags]
        chains = interleave_by_site([*new, *changed], lambda chain: chain.site)
        if any(chain not in self._etags for chain in chains[MAX_TAILS_PER_POLL:]):
            self.poll_due.set()
        answers = await asyncio.gather(*map(read, chains[:MAX_TAILS_PER_POLL]), return_exceptions=True)
        # One site's documents may be refused; if every tail is refused, that will not change.
        self.has_polled = self.has_polled or not answers or None in answers
        await self._tick()
        for failed in (answer for answer in answers if answer is not None):
            raise failed

    async def list_chains(self) -> None:
        """List all chains, also those without a tail: a crash may happen between a segment and its tail."""
        # Targets may be added during the listings.
        gate, pairs = asyncio.Semaphore(PARALLEL_CHAIN_LISTINGS), self._pairs

        async def read(site: str, feed: str) -> list[Chain]:
            async with gate:
                return await self._threads.run(self._documents.chains, site, feed)

        reads = (read(site, feed) for site, feed in sorted(pairs))
        answers = await asyncio.gather(*reads, return_exceptions=True)
        found = [chain for answer in answers if not isinstance(answer, BaseException) for chain in answer]
        await self._add_chains(found)
        for failed in (answer for answer in answers if isinstance(answer, BaseException)):
            raise failed
        await self._warn_missing(pairs)

    async def _warn_missing(self, pairs: frozenset[FeedId]) -> None:
        missing = pairs - {(chain.site, chain.feed) for chain in self._known}
        new, self._missing = missing - self._missing, missing
        tails = await self._threads.run(self._documents.tail_etags) if new else ()
        names = {f"{chain.site}/{chain.feed}" for chain in tails}
        for site, feed in sorted(new):
            hint = suggestion(f"{site}/{feed}", names)
            log.warning("source missing", action="source_missing", site=site, feed=feed, hint=hint)
        self._show_missing()

    def _show_missing(self) -> None:
        self._missing, self._found = self._missing - self._found, set()
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
        await self._add_chains(chain for chain, is_there in zip(new, exist, strict=True) if is_there)

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
        self._notify_targets(new, self.targets)
        if new:
            await self._tick()

    async def _tick(self) -> None:
        if self._found:
            self._show_missing()
        failed: FloeError | None = None
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
