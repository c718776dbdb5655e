"""A chain read as its archive: over all levels, each row once, around what is damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from common.chain import Chain
from common.errors import SegmentCorrupt, UsageError
from common.segments.documents import ChainStore
from common.segments.faults import SegmentGone
from common.segments.segment import SegmentRef
from common.segments.store import SegmentStore
from common.sequences import SequenceRange, Stretch, cover

Report = Callable[[str], None]


def select_chains(chains: ChainStore, text: str | None) -> list[Chain]:
    """The chains that `SITE[/FEED[/INCARNATION[/PARTITION]]]` means, all for None; raises UsageError.

    One that is named in full need not have a `chain.json`.
    """
    if text is None:
        return chains.chains()
    parts = text.split("/")
    try:
        if len(parts) == 4:
            return [Chain.parse(text)]
        wanted = [*parts[:2], *(int(part) for part in parts[2:])]
        if len(parts) > 4 or not all(parts):
            raise ValueError("expected SITE[/FEED[/INCARNATION[/PARTITION]]]")
    except ValueError as error:
        raise UsageError(f"chain {text!r}: {error}") from error
    found = chains.chains(*parts[:2])
    return [c for c in found if [c.site, c.feed, c.incarnation][: len(wanted)] == wanted]


def span(refs: Sequence[SegmentRef]) -> SequenceRange | None:
    """From the first to the last sequence that `refs` cover, holes included; None without segments."""
    if not refs:
        return None
    return SequenceRange(min(r.coverage.first for r in refs), max(r.coverage.last for r in refs))


def read_cover(
    store: SegmentStore, refs: Sequence[SegmentRef], within: SequenceRange, report: Report
) -> Iterator[pa.RecordBatch]:
    """The rows of `within` by the cover of `refs`, in sequence order, each once.

    A segment that is damaged or gone is left out and reported, and what else covers its rows is read; a
    stretch that nothing covers is reported and stepped over.
    """
    usable, position = list(refs), within.first
    while position <= within.last:
        for stretch in cover(usable, position, within.last):
            if stretch.rows.first > position:
                report(f"no segment covers {SequenceRange(position, stretch.rows.first - 1)}")
            position = stretch.rows.first
            try:
                for batch in _rows(store, stretch):
                    yield batch
                    position = batch.column("sequence")[-1].as_py() + 1
            except (SegmentCorrupt, SegmentGone) as error:
                report(str(error))
                usable.remove(stretch.segment)
                break
            position = stretch.rows.last + 1
        else:
            break
    if position <= within.last:
        report(f"no segment covers {SequenceRange(position, within.last)}")


def _rows(store: SegmentStore, stretch: Stretch[SegmentRef]) -> Iterator[pa.RecordBatch]:
    with store.open(stretch.segment, rows=stretch.rows) as reader:
        yield from reader.batches()
