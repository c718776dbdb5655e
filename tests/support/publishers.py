"""Rows, streams and publishers for the contract of publishers, and the check of the target afterwards."""

import asyncio
from collections.abc import Sequence
from typing import Any

from common.archive.columns import record_batch
from common.archive.keys import SegmentName
from common.chain import Chain
from common.errors import FloeError
from common.nats.api import StreamInfo, create_stream, stream_info
from common.nats.client import FloeClient
from common.sequences import SequenceRange
from ingress.checkpoint import IntentPiece
from ingress.publishers.batches import PUBLISHERS
from ingress.publishers.publisher import Publisher, Replies
from ingress.rows.prepare import Preparer, SubjectFilters, SubjectRule, TargetLimits
from ingress.rows.rows import Block, Rows
from tests.support.basics import answered, soon, unique
from tests.support.ingress import Arrived, arrived
from tests.support.segments import START_NS

CHAIN = Chain("us-east", "NODES")
IN_BLOCK = 700  # so that batches span blocks
HEADERS = b"NATS/1.0\r\nNats-Msg-Id: same\r\n\r\n"  # would act if it were not escaped


async def new_stream(client: FloeClient, **config: Any) -> str:
    """Create a stream that takes all kinds of batches, unless `config` overrides it; return its name."""
    name = unique("T")
    batches = {"allow_atomic": True, "allow_batched": True}
    await create_stream(client, {"name": name, "subjects": [f"{name}.>"], **batches, **config})
    return name


async def publisher(
    kind: str, client: FloeClient, stream: str, ack_timeout: float = 5.0, *, exclusive: bool = True
) -> Publisher:
    replies = await Replies.open(client)
    return PUBLISHERS[kind](client, stream, replies, exclusive=exclusive, ack_timeout=ack_timeout)


def rows_for(stream: str, count: int, size: int | Sequence[int] = 20, first: int = 1) -> Rows:
    """Return the rows of sequences `first` and on; `size`: of their payloads, in turn, beside the number."""
    sizes = [size] if isinstance(size, int) else size
    preparer = Preparer(CHAIN, SubjectRule(stream.encode()), TargetLimits(SubjectFilters([">"]), 1 << 24))
    last = first + count - 1
    blocks = []
    for begin in range(first, last + 1, IN_BLOCK):
        taken = list(range(begin, min(last, begin + IN_BLOCK - 1) + 1))
        batch = record_batch(
            taken, [START_NS + s for s in taken], [b"a.%d" % (s % 9) for s in taken],
            [HEADERS if s % 3 else None for s in taken], [payload_of(s, sizes) for s in taken],
        )  # fmt: skip
        name = SegmentName(CHAIN, 0, SequenceRange(first, last), "0" * 16)
        piece = IntentPiece(name, SequenceRange(taken[0], taken[-1]), len(taken))
        blocks.append(Block(piece, preparer.prepare(batch).batch))
    return Rows(blocks)


def payload_of(sequence: int, sizes: Sequence[int]) -> bytes:
    """Return a payload that differs for each sequence, except that one of a single byte has only 256 values."""
    size = sizes[sequence % len(sizes)]
    return bytes([sequence % 256]) if size == 1 else b"%d|" % sequence + b"x" * size


async def last_of(client: FloeClient, stream: str) -> int:
    """Return the last sequence, as soon as a leader reports it."""

    async def look() -> StreamInfo | None:
        info = await answered(lambda: stream_info(client, stream), FloeError)
        return info if info and info.leader is not None else None

    found = await soon(look)
    assert found is not None
    return found.last_sequence


async def carry(
    sender: Publisher, rows: Rows, client: FloeClient, stream: str, base: int = 0, *, twin: bool = False
) -> int:
    """Publish until everything is stored, reading after every unclear outcome; return the number of these.

    It settles as ingress does, only without its waiting: rows count as stored if the target holds them. `twin`:
    somebody else sends the same rows, and may be further on.
    """
    stored = unclear = 0
    while stored < rows.count:
        outcome = await sender.publish(rows, base, stored)
        assert stored <= outcome.stored <= rows.count
        before, stored = stored, outcome.stored
        if outcome.unclear is not None:
            unclear += 1
            assert twin or unclear < 200, outcome.unclear
            await soon(lambda: sender.client.is_up)  # type: ignore[attr-defined]
            last = await last_of(client, stream)
            assert twin or last <= base + rows.count, "more than the rows stands behind the base"
            stored = max(stored, min(rows.count, last - base))
            if stored == before:  # as if the stream has no leader for a while
                await asyncio.sleep(0.1)
    return unclear


async def check(client: FloeClient, stream: str, count: int, size: int | Sequence[int] = 20) -> None:
    """Check that the target holds exactly the rows 1 .. count, each in its place, each as it was."""
    found = await arrived(client, stream)
    assert [message.sequence for message in found] == list(range(1, count + 1))
    for message in found:
        check_row(stream, message, message.sequence, size)


def check_row(stream: str, found: Arrived, sequence: int, size: int | Sequence[int] = 20) -> None:
    """Check that `found` is the row of this sequence."""
    assert found.provenance is not None, f"foreign at {found.sequence}"
    assert (found.provenance.sequence, found.message.timestamp_ns) == (sequence, START_NS + sequence)
    assert found.subject == b"%b.a.%d" % (stream.encode(), sequence % 9)
    assert found.message.headers == (HEADERS if sequence % 3 else None)
    assert found.message.payload == payload_of(sequence, [size] if isinstance(size, int) else size)


async def quiet(client: FloeClient, stream: str) -> int:
    """Return the last sequence once it has not moved for half a second."""
    last, since = -1, 0.0
    loop = asyncio.get_running_loop()
    while True:
        found = await last_of(client, stream)
        if found != last:
            last, since = found, loop.time()
        elif loop.time() - since >= 0.5:
            return last
        await asyncio.sleep(0.05)
