"""Where a stream and an archive of it part: the first sequence that the archive does not have of the stream.

Of one history, whatever is older than an equal message is equal: so the place is searched by halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.jetstream.client import FloeClient
from common.segments.segment import SegmentRef
from common.segments.store import SegmentStore
from common.sequences import Stretch, cover
from common.service.threads import Threads
from egress.evidence import Examiner
from egress.identity import Held, Source

ABSENT_ROWS = 100  # that the stream does not hold, one behind the other, after which they count as different


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
    with store.open(stretch.segment, rows=stretch.rows) as reader:
        columns: list[Any] = [batch.column("sequence") for batch in reader.batches(stretch.rows)]
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
    low, high = -1, len(sequences)  # up to `low` equal, from `high` on different
    while high - low > 1:
        middle = (low + high) // 2
        held, place = Held.ABSENT, middle
        while held is Held.ABSENT and place < min(high, middle + ABSENT_ROWS):
            tip = await threads.run(examiner.row, ref, sequences[place])
            held = Held.ABSENT if tip is None else (await examiner.compare(client, tip, source)).held
            place += 1
        if held is Held.EQUAL:
            low = place - 1
        else:
            high = middle
    return sequences[low] if low >= 0 else None
