"""Reads the archive for the oracle, through the cover rule and in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

from common.chain import Chain
from common.segments.reader import messages
from common.segments.segment import Message
from common.segments.store import SegmentStore
from common.segments.unread import open_stretch
from common.sequences import SequenceRange, cover, holes


def archived(store: SegmentStore, chain: Chain, position: int = 1) -> Iterator[Message]:
    """The messages that the cover of `chain` holds from `position` on; holes are stepped over."""
    for stretch in cover(store.list(chain, position=position), position):
        with open_stretch(store, stretch) as reader:
            for batch in reader.batches(stretch.rows):
                yield from messages(batch)


def archive_holes(store: SegmentStore, chain: Chain) -> list[SequenceRange]:
    """The ranges between the first and the last covered sequence that no segment covers."""
    ranges = [ref.coverage for ref in store.list(chain)]
    if not ranges:
        return []
    return holes(ranges, SequenceRange(min(r.first for r in ranges), max(r.last for r in ranges)))
