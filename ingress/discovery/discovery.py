"""Discovery of chains and their growth in the store, for all targets of the process.

Four loops. One lists `tails/` periodically, which shows the chains that have grown. One checks the chains that
notifications name, and no others. One lists the documents of all chains every few minutes. One reads the heartbeats
of egress four times a minute. Only the content of the store is replayed: a lost, repeated, forged or late
notification costs a check or a poll.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from common.chain import Chain
from common.clock import Clock
from common.errors import FloeError
from common.logs import get_logger
from common.segments.documents import ChainStore
from common.segments.keys import Pair, suggestion
from common.service.monitor import Health
from common.service.process import Threads
from common.tasks import first_of, guarded, together, told_late
from ingress import metrics
from ingress.chains.prefetch import Prefetcher
from ingress.discovery.sites import Sites, in_turn
from ingress.errors import leading, passes_by_itself

log = get_logger(__name__)

LOOK_AT_SITES = 15.0  # seconds between two reads of the heartbeats
LATE = 15.0  # seconds without an answer to a poll until the store counts as unreachable
LOOK_UP_ALL = 300.0  # seconds between two listings of the chains' documents
LOOK_UPS = 2  # of these at the same time: a poll must find a free thread
TICK = 10.0  # seconds at most between two checks of chains that wait
SPACING = 0.05  # seconds between two checks after notifications: a thousand in a second cause twenty
MOST_TAILS = 2000  # tails that one poll reads, of all sites in turn; the next poll reads others
MOST_NEW = 64  # unknown chains that one check takes from notifications; the next poll finds the others


class Discovery:
    """Reader of the store, and of `sites`, for all targets of this process. `poll_interval`: seconds."""

    def __init__(
        self,
        documents: ChainStore,
        threads: Threads,
        clock: Clock,
        health: Health,
        poll_interval: float,
        sites: Sites | None = None,
    ) -> None:
        self._documents, self._threads, self.sites = documents, threads, sites
        self._clock, self._health, self._poll_interval = clock, health, poll_interval
        self.listeners: list[Prefetcher] = []  # the targets with their lease in this process
        self._pairs: frozenset[tuple[str, str]] = frozenset()
        self._known: dict[Chain, int | None] = {}
        self._missing: frozenset[Pair] = frozenset()
        self._etags: dict[Chain, str] = {}
        self._woken: set[Chain] = set()
        self._new: set[Chain] = set()
        self.has_worked = False
        self._told: dict[str, str] = {}  # the last error of each kind of check
        self.soon = asyncio.Event()  # poll at once: notifications may have been lost
        self._at_once, self.anew, self._new_sites = asyncio.Event(), asyncio.Event(), asyncio.Event()

    # For targets

    def add(self, listener: Prefetcher) -> None:
        self.listeners.append(listener)
        self._pairs |= {*listener.pairs()}
        self._tell(self._known, [listener])
        for event in (self.soon, self.anew, self._new_sites):
            event.set()

    def remove(self, listener: Prefetcher) -> None:
        self.listeners.remove(listener)
        self._pairs = frozenset(pair for listener in self.listeners for pair in listener.pairs())

    # For notifications; on the event loop

    def wake(self, chains: Iterable[Chain]) -> bool:
        """Check these chains at once. Return True if any of them may flow into a target of this process."""
        wanted = [chain for chain in chains if (chain.site, chain.feed) in self._pairs]
        for chain in wanted:
            if chain in self._known:
                self._woken.add(chain)
            elif len(self._new) < MOST_NEW:
                self._new.add(chain)
        if wanted:
            self._at_once.set()
        return bool(wanted)

    # The loops

    async def run(self) -> None:
        """Run the loops. A store that does not answer, or refuses, is retried. If it has refused since the first poll,
        that error is raised.
        """
        try:
            await together(self._poll(), self._follow(), self._look_up(), self._look_at_sites())
        except BaseExceptionGroup as errors:
            raise leading(errors) from None

    async def _poll(self) -> None:
        while True:
            # Clear it first: a request during the poll may come too late for it.
            self.soon.clear()
            await self._poll_once(self.look)
            due = self._clock.monotonic() + self._poll_interval
            while not self.soon.is_set() and (rest := due - self._clock.monotonic()) > 0:
                await first_of(self.soon.wait(), self._clock.sleep(min(rest, TICK)))
                if rest > TICK and not self.soon.is_set():
                    await self._poll_once(self._tick)

    async def _poll_once(self, look: Callable[[], Awaitable[None]]) -> None:
        error = await self._error_of("poll", look())
        if error is not None and not (self.has_worked or passes_by_itself(error)):
            raise error
        self._health.set_ready("store", error is None, error.message if error else "")
        if self.listeners:  # else nothing was read
            metrics.store_reachable.set(error is None)
            if error is None:
                metrics.store_answered.set(self._clock.now())

    def _late(self) -> None:
        self._health.set_ready("store", False, f"no answer to a poll for {LATE:.0f} s")
        metrics.store_reachable.set(0)

    async def _follow(self) -> None:
        while True:
            await self._at_once.wait()
            self._at_once.clear()
            await self._error_of("notifications", self._look_at_named())
            await self._clock.sleep(SPACING)

    async def _look_up(self) -> None:
        while True:
            self.anew.clear()
            error = await self._error_of("chains", self.look_up_all())
            await first_of(self.anew.wait(), seconds=TICK if error else LOOK_UP_ALL)

    async def _look_at_sites(self) -> None:
        while True:
            self._new_sites.clear()
            if self._pairs and self.sites:
                await self._error_of("alive", self.sites.look(self._pairs))
            await first_of(self._new_sites.wait(), seconds=LOOK_AT_SITES)

    async def _error_of(self, what: str, look: Awaitable[None]) -> FloeError | None:
        try:
            await look
        except FloeError as error:
            if self._told.get(what) != str(error):
                self._told[what] = str(error)
                log.warning("store not readable", action="store_error", look=what, error=str(error))
            return error
        if (former := self._told.pop(what, None)) is not None:
            log.info("store readable again", action="over", look=what, trouble=former)
        return None

    # Checks; each raises as the store does

    async def look(self) -> None:
        if not self.listeners:
            return
        etags = await told_late(self._threads.run(self._documents.tails), LATE, self._late)

        async def read(chain: Chain) -> None:
            end = await self._threads.run(self._documents.read_tail, chain)
            self._etags.pop(chain, None)
            self._known[chain], self._etags[chain] = end, etags[chain]  # at the end: the next poll reads others first
            self._tell([chain], self.listeners)

        wanted = {chain for chain in etags if (chain.site, chain.feed) in self._pairs}
        gone = sorted(chain for chain in self._etags if (chain.site, chain.feed) in self._pairs and chain not in etags)
        why = f"the archive of {gone[0]} and {len(gone) - 1} more is gone from the bucket" if gone else ""
        self._health.set_ready("archive", not gone, why.replace(" and 0 more", ""))
        changed = [chain for chain, etag in self._etags.items() if chain in wanted and etags[chain] != etag]
        new = [chain for chain in etags if chain in wanted and chain not in self._etags]
        chains = in_turn([*new, *changed], lambda chain: chain.site)
        if any(chain not in self._etags for chain in chains[MOST_TAILS:]):
            self.soon.set()
        answers = await asyncio.gather(*map(read, chains[:MOST_TAILS]), return_exceptions=True)
        # One site's documents may be refused; if every tail is refused, that will not change.
        self.has_worked = self.has_worked or not answers or None in answers
        await self._tick()
        for failed in (answer for answer in answers if answer is not None):
            raise failed

    async def look_up_all(self) -> None:
        """List all chains, also those without a tail: a crash may happen between a segment and its tail."""
        gate, pairs = asyncio.Semaphore(LOOK_UPS), self._pairs  # targets may be added during the listings

        async def read(site: str, feed: str) -> list[Chain]:
            async with gate:
                return await self._threads.run(self._documents.chains, site, feed)

        reads = (read(site, feed) for site, feed in sorted(pairs))
        answers = await asyncio.gather(*reads, return_exceptions=True)
        found = [chain for answer in answers if not isinstance(answer, BaseException) for chain in answer]
        await self._add_chains(found)
        for failed in (answer for answer in answers if isinstance(answer, BaseException)):
            raise failed
        await self._tell_missing(pairs)

    async def _tell_missing(self, pairs: frozenset[Pair]) -> None:
        missing = pairs - {(chain.site, chain.feed) for chain in self._known}
        new, self._missing = missing - self._missing, missing
        tails = await self._threads.run(self._documents.tails) if new else ()
        names = {f"{chain.site}/{chain.feed}" for chain in tails}
        for site, feed in sorted(new):
            hint, what = suggestion(f"{site}/{feed}", names), "nothing archived of a feed of `sources`"
            log.warning(what, action="source_missing", site=site, feed=feed, hint=hint)
        self._show_missing()

    def _show_missing(self) -> None:
        if self._missing:
            self._health.set_status("sources", {"missing": ["/".join(pair) for pair in sorted(self._missing)]})
        else:
            self._health.forget("sources")

    async def _look_at_named(self) -> None:
        woken, self._woken, new, self._new = self._woken, set(), self._new, set()
        for listener in self.listeners:
            wake = guarded(listener.wake, listener.fails)
            for chain in woken:
                wake(chain)
        exist = await asyncio.gather(*(self._exists(chain) for chain in new))
        await self._add_chains(chain for chain, is_there in zip(new, exist, strict=True) if is_there)

    async def _exists(self, chain: Chain) -> bool:
        key = self._documents.layout.chain_document(chain)
        try:
            return await self._threads.run(self._documents.objects.head, key) is not None
        except FloeError as error:
            log.info("left to the next poll", action="event_unread", error=str(error), **chain.log_context())
            return False

    async def _add_chains(self, chains: Iterable[Chain]) -> None:
        new = [chain for chain in chains if chain not in self._known]
        self._known.update(dict.fromkeys(new))
        self._tell(new, self.listeners)
        if new:
            await self._tick()

    async def _tick(self) -> None:
        failed: FloeError | None = None
        for listener in list(self.listeners):
            try:
                await listener.tick()
            except FloeError as error:
                failed = failed or error
            except Exception as error:  # it ends this target, and no other
                listener.fails(error)
        if failed is not None:
            raise failed

    def _tell(self, chains: Iterable[Chain], listeners: list[Prefetcher]) -> None:
        for chain in chains:
            if (pair := (chain.site, chain.feed)) in self._missing:
                self._missing -= {pair}
                self._show_missing()
            for listener in listeners:
                guarded(listener.found, listener.fails)(chain, self._known[chain])
