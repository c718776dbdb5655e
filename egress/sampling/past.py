"""How far back the archive is to be read, so that whatever could still matter to a sampler is seen again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from common.chain import Chain
from common.errors import SegmentCorrupt
from common.segments.documents import ChainStore
from common.segments.faults import SegmentGone
from common.segments.segment import Footer, SegmentRef
from common.segments.store import SegmentStore
from common.sequences import Stretch, cover
from common.service.logs import get_logger

T = TypeVar("T")

log = get_logger("egress.sampling")


@dataclass(frozen=True, slots=True)
class Reach:
    """`first`: the first sequence to read, None where no row counts. `is_whole`: whether older rows are known
    not to count; if not, what came before the chain may count too."""

    first: int | None
    is_whole: bool


class _DamagedError(Exception):
    """A segment that cannot be read: what else covers its rows is looked at instead."""

    def __init__(self, ref: SegmentRef) -> None:
        super().__init__(ref.key)
        self.ref = ref


class Past:
    """The rows of one chain up to `last`, by the cover of `refs`. Blocking."""

    def __init__(self, store: SegmentStore, refs: Sequence[SegmentRef], last: int) -> None:
        self._store, self._usable, self._last = store, list(refs), last
        self._footers: dict[str, Footer] = {}

    def newest_ns(self) -> int:
        """The time of the last message examined; 0 if there is none."""
        return self._around_damage(self._newest_ns)

    def since(self, horizon_ns: int) -> Reach:
        """From where on rows are as young as `horizon_ns`. Footers tell; few segments are opened."""
        return self._around_damage(lambda stretches: self._since(stretches, horizon_ns))

    def _around_damage(self, look: Callable[[list[Stretch[SegmentRef]]], T]) -> T:
        while True:
            try:
                return look(cover(self._usable, 1, self._last) if self._last >= 1 else [])
            except _DamagedError as error:
                self._usable.remove(error.ref)

    def _newest_ns(self, stretches: list[Stretch[SegmentRef]]) -> int:
        for stretch in reversed(stretches):
            times = _times(self._footer(stretch.segment))
            if times:
                return max(times)
        return 0

    def _since(self, stretches: list[Stretch[SegmentRef]], horizon_ns: int) -> Reach:
        first = None
        for stretch in reversed(stretches):
            footer = self._footer(stretch.segment)
            # What the segment did not read others may have; how young that is no footer of it tells.
            unread = footer.unread and footer.unread.intersection(stretch.rows)
            if _times(footer) and max(_times(footer)) < horizon_ns:
                return Reach(first, True)
            first = unread.first if unread else first
            if not _times(footer) or footer.first_timestamp_ns is None:
                continue  # nothing was examined for it, or nothing was kept
            within = Reach(stretch.rows.first, False)
            if footer.first_timestamp_ns < horizon_ns:
                within = self._within(stretch, horizon_ns)
            first = min([r for r in (within.first, unread and unread.first) if r], default=first)
            if within.is_whole:
                return Reach(first, True)
        return Reach(first, False)

    def _footer(self, ref: SegmentRef) -> Footer:
        if ref.key not in self._footers:
            with _named(ref):
                self._footers[ref.key] = self._store.footer(ref)
        return self._footers[ref.key]

    def _within(self, stretch: Stretch[SegmentRef], horizon_ns: int) -> Reach:
        """As `since`, inside one stretch, which may hold young rows only though its segment does not.

        Row groups are looked at from the end on, their times only.
        """
        first = None
        with _named(stretch.segment), self._store.open(stretch.segment) as reader:
            for group in reversed(reader.row_groups):
                rows = stretch.rows.intersection(group.range)
                if rows is None:
                    continue
                found, is_all = _young(reader.batches(rows, ["sequence", "timestamp_ns"]), horizon_ns)
                first = first if found is None else found
                if not is_all:
                    return Reach(first, True)
        return Reach(first, False)


@contextmanager
def _named(ref: SegmentRef) -> Iterator[None]:
    """Say which segment it is that cannot be read."""
    try:
        yield
    except (SegmentCorrupt, SegmentGone) as error:
        log.warning("segment left out", action="left_out", error=str(error), **ref.log_context())
        raise _DamagedError(ref) from error


def continued(store: SegmentStore, chain: Chain) -> dict[Chain, int]:
    """Where the chains of the incarnation before ended, if it froze the same stream as `chain`'s; else empty.

    So it is after `floe egress repartition`; a stream that was made again is another one.
    """
    if chain.incarnation == 0:
        return {}
    former = replace(chain, incarnation=chain.incarnation - 1)
    chains = ChainStore(store.objects, store.layout)
    now, then = chains.read_stream(chain), chains.read_stream(former)
    if now is None or then is None or not (now.continues or now.created == then.created):
        return {}
    return {replace(former, partition=n): end for n, end in sorted((now.previous or {}).items())}


def _times(footer: Footer) -> list[int]:
    """The times of the last message examined and of the last row, as far as there are any."""
    tip = footer.tip.timestamp_ns if footer.tip else None
    return [time for time in (tip, footer.last_timestamp_ns) if time is not None]


def _young(batches: Iterable[pa.RecordBatch], horizon_ns: int) -> tuple[int | None, bool]:
    """The first sequence as young as `horizon_ns`, None if none is; and whether it is the very first."""
    is_all = True
    for batch in batches:
        young = pc.greater_equal(batch.column("timestamp_ns"), pa.scalar(horizon_ns, pa.int64()))
        index = pc.index(young, pa.scalar(True)).as_py()
        if index >= 0:
            return batch.column("sequence")[index].as_py(), is_all and index == 0
        is_all = False
    return None, is_all
