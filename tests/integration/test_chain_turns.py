"""Fair turns, holes at the edges, and wrong hints: a prefetcher over a real archive, without a server."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from common.archive.columns import SCHEMA, raw_size
from common.archive.documents import ChainDocument
from common.archive.guard import MAX_MESSAGE_BYTES
from common.archive.segment import Footer, Ledger, SegmentRef
from common.archive.store import SegmentStore
from common.archive.writer import SpooledSegment
from common.chain import Chain
from common.clock import SystemClock
from common.objects.port import body_size, sha256_of
from common.sequences import SequenceRange
from common.service.process import ThreadPool
from common.settings.ingress import TargetSettings
from common.tasks import Stop
from ingress.chains.chain_state import ChainRegistry, Turn
from ingress.chains.prefetch import Prefetcher
from ingress.checkpoint import Gap, IntentPiece, advance_positions
from ingress.rows.decoder import CHUNK_ROWS, MAX_OPEN_SEGMENTS, TURN_ROWS, OpenSegments
from ingress.rows.prepare import SubjectFilters, TargetLimits
from ingress.rows.rows import Block, ReadyBlocks
from tests.support.basics import PATIENCE, soon
from tests.support.ingress import CHAIN, Archive, rows_of
from tests.support.segments import forge

LATER = CHAIN.next_incarnation()
PARTS = [CHAIN, Chain("us-east", "NODES", 0, 1)]
BIG = Chain("big", "NODES")
SMALL = [Chain(f"s{n}", "NODES") for n in range(9)]


class Centre:
    """A target that takes all ready batches of a prefetcher, and remembers them as stored."""

    def __init__(
        self, archive: Archive, memory: int = 1 << 28, largest: int = 1 << 20, parks: bool = False, **source: Any
    ) -> None:
        entry = {"site": ["us-east", BIG.site, *(chain.site for chain in SMALL)], "feed": "NODES", **source}
        settings = TargetSettings.model_validate({"stream": "FLEET", "sources": [entry]})
        registry = ChainRegistry(settings, TargetLimits(SubjectFilters([">"]), largest, parks=parks))
        self.threads = ThreadPool("test", 4)
        self.archive, self.stored = archive, dict[Chain, int]()
        self.order: list[tuple[Chain, int]] = []  # messages by chain, block by block
        where = archive.store, archive.documents, self.threads
        self.prefetcher = Prefetcher(registry, *where, SystemClock(), ReadyBlocks(memory))

    @asynccontextmanager
    async def running(self, *, is_known: bool = True) -> AsyncIterator[Centre]:
        if is_known:
            self.prefetcher.reset(self.stored)
        tasks = [asyncio.create_task(self.prefetcher.run()), asyncio.create_task(self._carry())]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.threads.wait_idle()
            self.prefetcher.open_segments.drop()
            self.threads.close()

    def messages_of(self, chain: Chain, until: int | None = None) -> int:
        """The number of the chain's messages among the first `until` blocks."""
        return sum(count for each, count in self.order[:until] if each == chain)

    async def _carry(self) -> None:
        while True:
            if (rows := await self.prefetcher.take(Stop(), 1.0)) is None:
                continue
            self.stored = advance_positions(self.stored, rows.pieces())
            pieces = [block.piece for block in rows.blocks]
            self.order += [(each.chain, each.count) for each in pieces if not isinstance(each.segment, Gap)]
            self.prefetcher.release(rows)
            self.prefetcher.record_stored(self.stored)
            await asyncio.sleep(0)

    async def look(self) -> None:
        """Add each chain with its tail, then tick, as discovery does."""
        for chain in self.archive.documents.chains():
            self.prefetcher.add_chain(chain, self.archive.documents.read_tail(chain))
        await self.prefetcher.tick()

    async def reaches(self, positions: Mapping[Chain, int], seconds: float = PATIENCE) -> None:
        async def there() -> bool:
            await self.look()
            return all(self.stored.get(chain) == at for chain, at in positions.items())

        await soon(there, seconds, every=0.05)


def empty_messages(count: int, size: int = 0) -> pa.Table:
    """Messages 1 to `count`, each of `size` bytes: a few thousand bytes when written."""
    sequences = pa.array(range(1, count + 1), pa.int64())
    times = pc.multiply(sequences, 1000)
    given = {
        "sequence": sequences,
        "timestamp": pc.divide(times, 1000).cast(SCHEMA.field("timestamp").type),
        "timestamp_ns": times,
        "subject": pa.repeat("nodes.one", count),
        "payload": pa.repeat(pa.scalar(bytes(size), pa.binary()), count),
    }
    return pa.Table.from_arrays([given.get(each.name, pa.nulls(count, each.type)) for each in SCHEMA], schema=SCHEMA)


def put_forged(archive: Archive, chain: Chain, table: pa.Table) -> SegmentRef:
    """Put a segment as a hostile site could make it: valid, and in as few bytes as possible."""
    times, count = table["timestamp_ns"], table.num_rows
    raw, first, last = raw_size(table.combine_chunks().to_batches()[0]), times[0].as_py(), times[-1].as_py()
    footer = Footer(chain, 0, SequenceRange(1, count), count, Ledger({}), raw, first, last, None, "tests")
    archive.begin(chain)
    path = archive.store.new_spool()
    forge(path, table, footer)
    ref = archive.store.put(SpooledSegment(path, footer, body_size(path), sha256_of(path)))
    path.unlink()
    archive.documents.write_tail(chain, count)
    return ref


async def test_partitions_that_never_existed_stop_the_incarnation_in_one_line(archive: Archive) -> None:
    archive.put(rows_of(1, 10))
    archive.put(rows_of(1, 20, SMALL[0]), chain=SMALL[0])
    archive.begin(LATER, previous={0: 10, 1: 0, **dict.fromkeys(range(2, 1024), 5)})
    archive.put(rows_of(1, 5, LATER), chain=LATER)
    async with Centre(archive).running() as centre:
        await centre.reaches({CHAIN: 11, SMALL[0]: 21})
        await soon(lambda: centre.prefetcher.chains.get(LATER).stopped is not None)

    error = centre.prefetcher.chains.get(LATER).stopped
    assert error.code == "E-STATE-JSON"
    assert error.message.endswith("that have a chain.json, found 2, 3, 4, 5, 6 and 1017 more without one")
    assert len(error.message) < 300
    assert error.hint.endswith("NODES/0001/0 --sequence 1")
    assert LATER not in centre.stored


async def test_partitions_that_are_found_late_are_waited_for(archive: Archive) -> None:
    archive.put(rows_of(1, 10))
    archive.begin(LATER, previous={0: 10, 1: 3})
    archive.put(rows_of(1, 5, LATER), chain=LATER)
    archive.put(rows_of(1, 3, PARTS[1]), chain=PARTS[1])
    async with Centre(archive).running() as centre:
        for chain in (CHAIN, LATER):  # a listing from before the partition existed
            centre.prefetcher.add_chain(chain)
        await centre.prefetcher.tick()
        await soon(lambda: PARTS[1] in {state.chain for state in centre.prefetcher.chains})
        assert centre.prefetcher.chains.get(LATER).stopped is None
        await centre.reaches({CHAIN: 11, PARTS[1]: 4, LATER: 6})


async def test_partitions_above_the_count_stop_alone(archive: Archive, caplog: pytest.LogCaptureFixture) -> None:
    archive.put(rows_of(1, 10))
    forged = [Chain("us-east", "NODES", 0, partition) for partition in range(7, 27)]
    for chain in forged:
        archive.documents.create_chain(chain, ChainDocument((), 7, 1))
        archive.put(rows_of(1, 5, chain), chain=chain)
    async with Centre(archive).running() as centre:
        await centre.reaches({CHAIN: 11})
        states = [centre.prefetcher.chains.get(chain) for chain in forged]
        await soon(lambda: all(state.stopped for state in states))

    message = "incarnation 0000 of us-east/NODES: expected partitions below 7, found others"
    assert {(state.stopped.code, state.stopped.message) for state in states} == {("E-STATE-JSON", message)}
    assert caplog.text.count("chain_stopped") == 1
    assert not centre.stored.keys() & set(forged)


async def test_documents_of_one_site_delay_no_other(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile, go_on, waited = BIG.next_incarnation(), threading.Event(), threading.Event()
    archive.put(rows_of(1, 5, BIG), chain=BIG)
    archive.begin(hostile, previous={0: 5})
    archive.put(rows_of(1, 5, hostile), chain=hostile)
    for chain in SMALL:
        archive.put(rows_of(1, 5, chain), chain=chain)
    real = archive.documents.read_stream

    def read(chain: Chain) -> Any:
        if chain.site == BIG.site and not go_on.wait(PATIENCE):
            waited.set()
        return real(chain)

    monkeypatch.setattr(archive.documents, "read_stream", read)
    async with Centre(archive).running() as centre:
        await centre.reaches(dict.fromkeys(SMALL, 6))
        assert not waited.is_set()
        assert not centre.stored.keys() & {BIG, hostile}  # their ends are not known yet
        go_on.set()
        await centre.reaches({BIG: 6, hostile: 6})


async def test_a_chain_that_waits_for_others_gets_no_turn_before_they_have_ended(archive: Archive) -> None:
    """Otherwise a thousand such chains would take a thousand turns for each intent that is closed."""
    prefetcher = Centre(archive).prefetcher
    prefetcher.reset({})
    for chain in (CHAIN, LATER):
        prefetcher.add_chain(chain)
    prefetcher.chains.set_previous_ends(LATER, {0: 10})
    state = prefetcher.chains.get(LATER)
    state.begin_obstacle = prefetcher.chains.obstacle(LATER)

    prefetcher.record_stored({CHAIN: 5})
    assert (state.turn, state.begin_obstacle != "") == (Turn.NONE, True)
    prefetcher.record_stored({CHAIN: 11})
    assert state.turn is Turn.QUEUED


async def test_chains_of_a_source_that_comes_back_continue_after_the_open_intent(archive: Archive) -> None:
    prefetcher = Centre(archive).prefetcher
    prefetcher.reset({})
    prefetcher.add_chain(CHAIN, 20)
    prefetcher.ahead.append(Block(IntentPiece(Gap(CHAIN), SequenceRange(1, 10), 0)))
    await prefetcher.take(Stop(), PATIENCE)
    for site, positions in ((BIG.site, []), (CHAIN.site, [11])):
        target = {"stream": "FLEET", "sources": [{"site": site, "feed": "NODES"}]}
        prefetcher.change_sources(TargetSettings.model_validate(target))
        prefetcher.add_chain(CHAIN, 20)
        assert [each.position for each in prefetcher.chains] == positions
        assert prefetcher.chains.preparer(CHAIN)
        assert prefetcher.chains.source_names == (f"{site}/NODES",)


# One site never delays the others


async def test_a_live_site_is_carried_beside_an_honest_backlog(archive: Archive) -> None:
    """Merged segments, as the archive holds them after an outage of the centre."""
    backlog = [Chain(BIG.site, "NODES", 0, partition) for partition in range(4)]
    for chain in backlog:
        archive.put(rows_of(1, 50_000, chain), chain=chain, level=2)
    live, delays = SMALL[0], list[int]()
    async with Centre(archive, 1 << 20).running() as centre:
        for first in range(1, 101, 10):
            before = sum(map(centre.messages_of, backlog))
            archive.put(rows_of(first, first + 9, live), chain=live)
            centre.prefetcher.add_chain(live, first + 9)
            await centre.reaches({live: first + 10})
            place = [index for index, (chain, _) in enumerate(centre.order) if chain == live][-1]
            delays.append(sum(centre.messages_of(chain, place) for chain in backlog) - before)
        await centre.reaches(dict.fromkeys(backlog, 50_001))
    # The ready batches, and the turns that had begun: never all of the backlog.
    assert max(delays) <= 100_000, delays


async def test_a_turn_resumes_in_the_same_open_segment(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    chains = [Chain(BIG.site, "NODES", 0, partition) for partition in range(14)]
    for chain in chains:
        put_forged(archive, chain, empty_messages(4 * TURN_ROWS - 5))
    opened, kept = Counter[tuple[Chain, bool]](), list[int]()
    real, keep = SegmentStore.open, OpenSegments.keep

    def open_counted(store: SegmentStore, ref: SegmentRef, **options: Any) -> Any:
        opened[ref.chain, store._partial] += 1
        return real(store, ref, **options)

    def keep_counted(each: OpenSegments[Any], *args: Any) -> None:
        keep(each, *args)
        kept.append(len(each.segments))

    monkeypatch.setattr(SegmentStore, "open", open_counted)
    monkeypatch.setattr(OpenSegments, "keep", keep_counted)
    async with Centre(archive).running() as centre:
        await centre.reaches(dict.fromkeys(chains, 4 * TURN_ROWS - 4))
    # Eight stay open; the others are opened again, and only the parts that are read are fetched then.
    assert max(kept) == MAX_OPEN_SEGMENTS
    assert {chain: opened[chain, False] for chain in chains} == dict.fromkeys(chains, 1)
    assert sum(opened[chain, True] for chain in chains) < 3 * len(chains) * 3 / 4
    assert {count for chain, count in centre.order} <= set(range(CHUNK_ROWS + 1))


# Memory


POOLS: list[pa.MemoryPool] = []  # leftovers of a test are freed into the pool that they came from


@contextmanager
def counted_pool() -> Iterator[pa.MemoryPool]:
    """A pool that counts the allocations of pyarrow within the block."""
    before = pa.default_memory_pool()
    POOLS.append(pool := pa.proxy_memory_pool(before))
    pa.set_memory_pool(pool)
    try:
        yield pool
    finally:
        pa.set_memory_pool(before)


async def test_messages_above_64_mib_stop_their_chains_before_they_are_decoded(archive: Archive) -> None:
    chains = SMALL[:2]
    for chain in chains:
        put_forged(archive, chain, empty_messages(1, MAX_MESSAGE_BYTES + 4096))
    archive.put(rows_of(1, 200, BIG), chain=BIG)
    with counted_pool() as pool:
        async with Centre(archive, largest=1 << 30, parks=True).running() as centre:
            await centre.reaches({BIG: 201})
            states = [centre.prefetcher.chains.get(chain) for chain in chains]
            await soon(lambda: all(state.stopped for state in states))
    for state in states:
        assert (state.stopped.code, state.damaged) == ("E-MSG-TOO-LARGE", set())
        assert f"{state.chain.site}/NODES/0000/0 --sequence 2" in str(state.stopped.hint)
    assert centre.stored == {BIG: 201}
    assert pool.max_memory() < 32 << 20, "nothing of them is decoded"
