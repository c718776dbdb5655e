"""A chain read as its archive: over all levels, each row once, around what is damaged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

import pyarrow as pa

from common.chain import Chain
from common.errors import Refused, SegmentCorrupt, UsageError
from common.segments.documents import ChainStore
from common.segments.faults import SegmentGone
from common.segments.keys import MAX_LEVEL
from common.segments.naming import Pair, chosen, one, parse
from common.segments.segment import SegmentRef
from common.segments.store import SegmentStore
from common.segments.unread import open_stretch
from common.sequences import SequenceRange, cover

Report = Callable[[str], None]
T = TypeVar("T")


def select_chains(chains: ChainStore, text: str | None, feeds: Collection[Pair] = ()) -> list[Chain]:
    """The chains that `SITE[/FEED[/INCARNATION[/PARTITION]]]` means, all for None.

    `feeds`: of the configuration, of which nothing need be archived. One that is named in full need not have
    a `chain.json`. Raises UsageError for what is not there, with the names that are.
    """
    if text is None:
        return chains.chains()
    site, feed, incarnation, partition = parse(text)
    if feed is not None and None not in (incarnation, partition):
        chain = Chain(site, feed, incarnation or 0, partition or 0)
        if _has_segments(chains, chain):
            return [chain]
    return among(chains, site, feed, lambda known: chosen(known, feeds, site, feed, incarnation, partition))


def find_chain(chains: ChainStore, text: str, feeds: Collection[Pair] = ()) -> Chain:
    """The chain that `SITE/FEED[/INCARNATION[/PARTITION]]` means; without one, of the newest incarnation.

    Raises UsageError as `select_chains`, and where several partitions may be meant.
    """
    site, feed, incarnation, partition = parse(text)
    if feed is None:
        raise UsageError(f"chain {text!r}: expected SITE/FEED[/INCARNATION[/PARTITION]]")
    if None not in (incarnation, partition):
        return select_chains(chains, text, feeds)[0]
    return among(chains, site, feed, lambda known: one(known, feeds, site, feed, incarnation, partition))


def among(
    chains: ChainStore, site: str | None, feed: str | None, find: Callable[[Collection[Chain]], T]
) -> T:
    """What `find` finds among the chains of a site or feed; where that is nothing, its error knows of all."""
    try:
        return find(chains.chains(site, feed))
    except UsageError as error:
        try:
            known = chains.chains()
        except Refused:  # a credential of one site
            raise error from None
        return find(known)


def _has_segments(chains: ChainStore, chain: Chain) -> bool:
    prefixes = (chains.layout.segments_prefix(chain, level) for level in range(MAX_LEVEL + 1))
    return any(chains.objects.list(prefix, limit=1) for prefix in prefixes)


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
                with open_stretch(store, stretch, refs=usable) as reader:
                    for batch in reader.batches():
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
