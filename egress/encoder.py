"""From what the builder emits to finished segments in the spool, in the feed's encoder thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from common.failpoints import failpoint
from common.segments.parquet import SpooledSegment
from common.sequences import SequenceRange
from common.service.threads import Threads
from egress.builder import Close, Emitted, Piece
from egress.draft import Draft
from egress.ledger import before_first_gap, gaps, gone_before_read
from egress.memory import Account
from egress.report import FeedReport

QUEUE_BYTES = 24 * 2**20  # of memory waiting to be encoded; more would not make anything faster
AHEAD = 2  # finished segments waiting in the spool, the one being put included; then encoding waits


# Which of the sequences that were not received the source holds no more.
AskGone = Callable[[Sequence[SequenceRange]], Awaitable[Sequence[SequenceRange]]]


class Encoder:
    """Encodes in order. `sealed`: the finished segments, oldest first; whoever put one removes it.

    `source_first` is asked for the source's first sequence once for each piece with gaps. `fills_hole`: the
    segments stand under existing coverage: what was archived once may be gone from the source now. What lies
    below its first sequence is not covered again; of a gap above, `gone` says what the source holds no more.
    `without_looped`: a piece as it is to be encoded; None: as it comes.
    """

    def __init__(
        self,
        thread: Threads,
        account: Account,
        report: FeedReport,
        make_draft: Callable[[], Draft],
        source_first: Callable[[], Awaitable[int]],
        gone: AskGone,
        *,
        fills_hole: bool,
        without_looped: Callable[[Piece], Awaitable[Piece]] | None = None,
    ) -> None:
        self._without_looped = without_looped
        self._thread, self._account, self._report, self._gone = thread, account, report, gone
        self._make_draft, self._source_first, self._fills_hole = make_draft, source_first, fills_hole
        self._outbox: deque[Emitted] = deque()
        self._queued = 0
        self._draft: Draft | None = None
        self._draft_charge = 0
        self._is_cut = False
        self._is_torn = False
        self.sealed: deque[SpooledSegment] = deque()
        self.wake = asyncio.Event()
        self.on_sealed = asyncio.Event()

    def emit(self, item: Emitted) -> None:
        """Take the builder's next item."""
        if self._is_cut:
            return
        self._queued += item.memory if isinstance(item, Piece) else 0
        self._outbox.append(item)
        self.wake.set()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be encoded."""
        return not self._outbox

    @property
    def is_ahead(self) -> bool:
        """Whether enough finished segments wait to be put."""
        return len(self.sealed) >= AHEAD

    @property
    def has_room(self) -> bool:
        """Whether more should be read."""
        return self._queued < QUEUE_BYTES

    async def next(self) -> bool:
        """Encode the next item; False where the segment was ended because the source moved on in a hole."""
        item = self._outbox[0]
        if isinstance(item, Piece) and self._without_looped is not None:
            item = await self._without_looped(item)
        first = await self._source_first() if isinstance(item, Piece) and item.missing else 1
        from_hole: Sequence[SequenceRange] = ()
        if self._fills_hole and isinstance(item, Piece) and item.missing:
            from_hole = () if gone_before_read(item, first) else await self._gone(list(gaps(item)))
        # Only now: what raises above must not lose the piece. What raises below has: what follows it would
        # cover its sequences without its rows.
        self._outbox.popleft()
        self._is_torn = True
        goes_on = await self._encode(item, first, from_hole)
        self._is_torn = False
        return goes_on

    async def _encode(self, item: Emitted, first: int, from_hole: Sequence[SequenceRange]) -> bool:
        if isinstance(item, Close):
            await self._finish(item)
            return True
        self._queued -= item.memory
        if self._fills_hole and gone_before_read(item, first):
            await self._cut(item)
            return False
        await self._add(item, first, from_hole)
        self._account.release(item.memory)
        return True

    async def all(self) -> None:
        """Encode everything that was emitted; nothing more behind a piece that was lost to an error."""
        while self._outbox and not self._is_torn and await self.next():
            pass

    def close(self) -> None:
        """Drop what is not finished, and remove what is from the spool."""
        self._outbox.clear()
        if self._draft is not None:
            self._draft.abort()
        for spooled in self.sealed:
            spooled.path.unlink(missing_ok=True)

    async def _cut(self, piece: Piece) -> None:
        """End the segment before the first gap, and drop whatever comes behind it."""
        leading = before_first_gap(piece)
        if leading is not None:
            await self._add(leading, 1)
        if self._draft is not None:
            await self._finish(Close.HOLE)
        self._outbox.clear()
        self._is_cut = True

    async def _add(self, piece: Piece, source_first: int, from_hole: Sequence[SequenceRange] = ()) -> None:
        if self._draft is None:
            self._draft = await self._thread.run(self._make_draft)
        await self._thread.run(self._draft.add, piece, source_first, from_hole)
        self._charge_draft(self._draft.held)

    async def _finish(self, why: Close) -> None:
        assert self._draft is not None, "a segment closes behind its pieces"
        spooled = await self._thread.run(self._draft.finish)
        self._draft = None
        self._charge_draft(0)
        failpoint("egress.sealed")
        self.sealed.append(spooled)
        self._report.sealed(spooled, why)
        self.on_sealed.set()

    def _charge_draft(self, held: int) -> None:
        more, self._draft_charge = held - self._draft_charge, held
        if more < 0:
            self._account.release(-more)
        else:
            self._account.charge(more)
