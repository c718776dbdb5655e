"""One chain's place in the object store, and its high-water mark in the state bucket.

The listing says what is archived; the mark is there to catch a listing that shows less than was put once.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from common.chain import Chain
from common.errors import DataError, Stopped, Unavailable
from common.failpoints import failpoint
from common.jetstream.kv import KeyValue, state_key
from common.segments.documents import ChainStore
from common.segments.segment import SegmentRef
from common.segments.store import SegmentStore
from common.segments.writer import SpooledSegment
from common.sequences import extends
from common.service.logs import get_logger
from common.service.threads import Threads
from egress.position import end_of
from egress.resolve.hints import believe_listing

if TYPE_CHECKING:
    from egress.history import Incarnation
    from egress.parts import Parts

log = get_logger("egress.archive")


class Marks:
    """High-water marks: the last sequence of a chain that was put and read back. No service lowers one."""

    def __init__(self, state: KeyValue) -> None:
        self._state = state

    @staticmethod
    def key(chain: Chain) -> str:
        """Where the mark of a chain stands."""
        parts = (chain.site, chain.feed, f"{chain.incarnation:04d}", str(chain.partition))
        return state_key("egress", "mark", *parts)

    @staticmethod
    def value(end: int) -> str:
        """What the key holds for a mark at `end`."""
        return json.dumps({"end": end})

    @property
    def bucket(self) -> str:
        return self._state.bucket

    async def get(self, chain: Chain) -> int | None:
        """The mark; None if there is none. Raises DataError for a value that is none."""
        entry = await self._state.get(self.key(chain))
        return None if entry is None else self._parse(chain, entry.value)

    async def set(self, chain: Chain, end: int) -> None:
        """Have the mark at `end`, whatever it was."""
        await self._state.put(self.key(chain), self.value(end).encode())

    async def raise_to(self, chain: Chain, end: int) -> None:
        """Have the mark at `end` or above."""

        def raised(found: bytes | None) -> bytes | None:
            is_there = found is not None and self._parse(chain, found) >= end
            return None if is_there else self.value(end).encode()

        await self._state.change(self.key(chain), raised)

    def _parse(self, chain: Chain, value: bytes) -> int:
        try:
            end = json.loads(value)["end"]
        except (ValueError, TypeError, KeyError, RecursionError):
            end = None
        if not isinstance(end, int) or isinstance(end, bool) or end < 0:
            raise DataError(
                f"high-water mark of {chain}: expected an end, found {value!r:.60}",
                hint=f"to believe the listing instead: {believe_listing(chain)}",
                code="E-STATE-KV",
            )
        return end


class Archive:
    """What is archived of one chain, and the steps by which more is."""

    def __init__(
        self,
        chain: Chain,
        first: int,
        store: SegmentStore,
        chains: ChainStore,
        marks: Marks,
        threads: Threads,
    ) -> None:
        self.chain, self.first = chain, first
        self.refs: list[SegmentRef] = []
        self._mark: int | None = None
        self._store, self._chains, self._marks, self._threads = store, chains, marks, threads

    @classmethod
    async def of(cls, current: Incarnation, parts: Parts, marks: Marks, threads: Threads) -> Archive:
        """The archive of an incarnation, not listed yet; retention may have moved its beginning."""
        floor = await threads.run(parts.chains.read_floor, current.chain)
        first = max(current.document.first, floor or 0)
        return cls(current.chain, first, parts.store, parts.chains, marks, threads)

    @property
    def end(self) -> int:
        """The last sequence covered; 0 if none is."""
        return end_of(ref.coverage for ref in self.refs)

    async def load(self) -> None:
        """List the chain. Raises Unavailable, E-LISTING, where the listing shows less than was put."""
        self.refs = await self._threads.run(self._store.list, self.chain)
        self._mark = await self._marks.get(self.chain)
        if self._mark is not None and self._mark >= self.first and self.end < self._mark:
            raise Unavailable(
                f"listing of {self.chain}: expected to reach the high-water mark {self._mark}, "
                f"found its end at {self.end}",
                hint="asked again until it does; if the objects are lost, " + believe_listing(self.chain),
                code="E-LISTING",
            )

    def is_hollow(self, source_first: int) -> bool:
        """Whether an empty listing may hide what was archived: no mark says that nothing was, and the source
        no longer holds everything from the chain's beginning on."""
        return not self.refs and self._mark is None and source_first > self.first

    def hollow(self, source_first: int) -> Stopped:
        """The error where it may."""
        return Stopped(
            f"{self.chain}: no segment and no high-water mark, and the source holds {source_first} on, "
            f"while the chain begins at {self.first}",
            hint=f"restore the objects; if nothing was ever archived, {believe_listing(self.chain)}",
            code="E-EMPTY-ARCHIVE",
        )

    async def mend(self) -> None:
        """Bring a mark or a tail up to the end that a crash has left behind."""
        end = max(self.end, self.first - 1)
        if self._mark is None or self._mark < end:
            await self._marks.raise_to(self.chain, end)
            self._mark = end
        if self.refs and await self._threads.run(self._chains.read_tail, self.chain) != self.end:
            await self._threads.run(self._chains.write_tail, self.chain, self.end)

    async def is_covered(self, sequence: int) -> bool:
        """Whether a segment that egress wrote covers `sequence`, by a listing from there."""
        refs = await self._threads.run(self._store.list, self.chain, position=sequence, level=0)
        return any(extends(ref.coverage, sequence) for ref in refs)

    # The order in which a segment is put: the object, read back; then the tail, by which readers notice it;
    # then the mark, which says that the listing must show it. A crash in between leaves a tail or a mark
    # behind: `mend`.

    async def put(self, spooled: SpooledSegment) -> SegmentRef:
        """Put the segment and read it back. May be called again after any error."""
        failpoint("egress.before_put")
        ref = await self._threads.run(self._store.put, spooled)
        self.refs.append(ref)
        failpoint("egress.after_put")
        return ref

    async def write_tail(self) -> None:
        """Let the tail say where coverage ends."""
        await self._threads.run(self._chains.write_tail, self.chain, self.end)
        failpoint("egress.after_tail")

    async def raise_mark(self) -> None:
        """Raise the high-water mark to where coverage ends."""
        await self._marks.raise_to(self.chain, self.end)
        failpoint("egress.after_mark")
