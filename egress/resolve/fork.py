"""Where a stream and an archive of it part: the first sequence that the archive does not have of the stream.

Of one history, whatever is older than an equal message is equal: so the place is searched by halves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from common.jetstream.client import FloeClient
from common.segments.segment import SegmentRef
from common.segments.store import SegmentStore
from common.segments.unread import open_stretch
from common.sequences import Stretch, cover
from common.service.threads import Threads
from egress.evidence import Examiner
from egress.identity import Held, Source

ABSENT_ROWS = 100  # messages of the stream, one behind the other, that the archive has no row of


async def first_unlike(
    client: FloeClient,
    examiner: Examiner,
    store: SegmentStore,
    threads: Threads,
    refs: Sequence[SegmentRef],
    source: Source,
    end: int,
) -> int:
    """The first sequence from which on the stream holds what `refs`, up to `end`, do not.

    The stream's first where nothing agrees.

    Raises what the stream and the store raise, DataError for a damaged segment.
    """
    end = min(source.last, end)
    for stretch in reversed(cover(refs, source.first, end)) if end >= source.first else []:
        sequences = await threads.run(_sequences, store, stretch)
        equal = await _last_equal(client, examiner, threads, stretch.segment, sequences, source)
        if equal is not None:
            return equal + 1
    return source.first


def _sequences(store: SegmentStore, stretch: Stretch[SegmentRef]) -> list[int]:
    """The sequences of the messages that the stretch holds."""
    with open_stretch(store, stretch) as reader:
        columns: list[Any] = [b.column("sequence") for b in reader.batches(stretch.rows, ["sequence"])]
        return [sequence for column in columns for sequence in column.to_pylist()]


async def _last_equal(
    client: FloeClient,
    examiner: Examiner,
    threads: Threads,
    ref: SegmentRef,
    sequences: Sequence[int],
    source: Source,
) -> int | None:
    """The last of `sequences` whose message the stream holds as it was archived; None if it holds none so."""
    low, high = -1, len(sequences)  # up to `low` equal or not held, from `high` on different or not held
    equal = None
    while high - low > 1:
        middle = (low + high) // 2
        place = await _next_held(client, examiner, sequences, middle, high)
        if place is None:
            high = middle
            continue
        tip = await threads.run(examiner.row, ref, sequences[place])
        held = Held.ABSENT if tip is None else (await examiner.compare(client, tip, source)).held
        if held is Held.DIFFERENT:
            high = middle
        else:
            low = place
            equal = sequences[place] if held is Held.EQUAL else equal
    return equal


async def _next_held(
    client: FloeClient, examiner: Examiner, sequences: Sequence[int], first: int, end: int
) -> int | None:
    """The first place in first..end-1 of `sequences` whose message the stream holds; None if there is none.

    The stream is asked for what it holds next, so a stretch that it let go of costs one question. Behind
    many messages that were archived without a row, as a sample leaves them out, it is given up.
    """
    place = first
    for _ in range(ABSENT_ROWS):
        found = await examiner.next(client, sequences[place]) if place < end else None
        place = end if found is None else bisect_left(sequences, found.sequence, place, end)
        if found is None or place == end:
            return None
        if sequences[place] == found.sequence:
            return place
    return None
