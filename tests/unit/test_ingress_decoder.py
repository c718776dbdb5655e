"""Blocks that account for every sequence once, also when read again, within a budget of bytes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.archive import reader
from common.archive.guard import ParquetLimits
from common.archive.segment import Ledger, Reason, SegmentRef
from common.chain import Chain
from common.errors import DataError, FloeError, Stopped
from common.sequences import SequenceRange
from common.service.process import ThreadPool
from common.settings.ingress import TargetSettings
from common.tasks import Stop
from ingress.chains.chain_state import ChainRegistry
from ingress.chains.recall import Recall
from ingress.checkpoint import Checkpoint, Intent, IntentPiece, TargetState, from_json, to_json
from ingress.parked import ParkedStore
from ingress.rows.decoder import MAX_OPEN_SEGMENTS, Decoder, OpenSegments, RelayFlags
from ingress.rows.prepare import SubjectFilters, TargetLimits
from ingress.rows.rows import Block, ByteBudget, ReadyBlocks, Rows
from tests.support.basics import seeded, soon
from tests.support.ingress import CHAIN, Archive, piece
from tests.support.segments import message

SETTINGS = TargetSettings.model_validate({"stream": "T", "sources": [{"site": CHAIN.site, "feed": CHAIN.feed}]})
SMALL, LARGE = (
    TargetLimits(SubjectFilters([">"]), 1000, parks=True),
    TargetLimits(SubjectFilters([">"]), 1 << 20, parks=True),
)
NARROW, TIGHT = TargetLimits(SubjectFilters(["other.>"]), 1 << 20), TargetLimits(SubjectFilters([">"]), 1000)


@pytest.fixture
async def threads() -> AsyncIterator[ThreadPool]:
    threads = ThreadPool("test", 2)
    yield threads
    threads.close()


class Bench:
    """An archive and its readers: for the first time, and again for an open intent."""

    def __init__(self, folder: Path, threads: ThreadPool, budget: ByteBudget | None = None) -> None:
        self.archive, self.threads = Archive(folder), threads
        self.budget = budget or ByteBudget(1 << 30)
        self.parked = ParkedStore(self.archive.objects, self.archive.documents.layout, "T", "t0")
        self.decoder = Decoder(self.archive.store, threads, self.budget, self.parked.park)

    async def read(self, ref: SegmentRef, limits: TargetLimits = LARGE) -> tuple[list[Block], FloeError | None]:
        """Return all blocks of a segment up to the first problem."""
        blocks, preparer = list[Block](), ChainRegistry(SETTINGS, limits).preparer(CHAIN)
        problem = await self.decoder.read(self.decoder.open(ref, ref.coverage), preparer, blocks.append)
        return blocks, problem

    def recall(self, limits: TargetLimits = LARGE) -> Recall:
        registry, relays = ChainRegistry(SETTINGS, limits), RelayFlags(self.archive.documents, self.threads)
        return Recall(self.archive.store, self.threads, self.budget, registry, relays, self.parked)

    async def again(self, blocks: list[Block]) -> list[int]:
        """Return the rows of an intent over the blocks, after its state was stored and read back, for any size."""
        state = from_json("T", to_json("T", TargetState(Checkpoint(0, "t0"), Intent(0, tuple(Rows(blocks).pieces())))))
        rows = await self.recall().rows(state.intent, 0)
        return [rows.sequence(index) for index in range(rows.count)]


def carried(blocks: list[Block]) -> list[int]:
    return [s for block in blocks if block.batch for s in block.batch.sequences]


async def test_what_is_left_out_is_accounted_for_and_found_again(tmp_path: Path, threads: ThreadPool) -> None:
    rng = seeded()
    for number in range(6):
        bench = Bench(tmp_path / str(number), threads)
        last = rng.randint(1, 60)
        held = sorted(rng.sample(range(1, last + 1), rng.randint(1, last)))
        chance = rng.choice([0.05, 0.5, 1.0])
        large = [sequence for sequence in held if rng.random() < chance]
        rows = [message(s, b"L" * 2000 if s in large else b"x") for s in held]
        blocks, problem = await bench.read(bench.archive.put(rows, SequenceRange(1, last), batch_rows=7), SMALL)

        [piece] = Rows(blocks).pieces()
        assert (problem, piece.rows, list(piece.parked)) == (None, SequenceRange(1, last), large)
        assert [name.sequence for name in bench.parked.list_entries()] == large
        assert carried(blocks) == [s for s in held if s not in large]
        assert (bench.budget.used, await bench.again(blocks)) == (sum(block.size for block in blocks), carried(blocks))


async def test_an_open_intent_is_finished_from_the_segments_that_it_names(tmp_path: Path, threads: ThreadPool) -> None:
    """Read again with B's segment, 1..50 unread, twin A's from before the intent, and a third from after it."""
    bench = Bench(tmp_path, threads)
    archive, rows = bench.archive, [message(s) for s in range(1, 121)]
    unread: Any = {"ledger": Ledger({Reason.GONE_BEFORE_READ: 49}), "unread": SequenceRange(2, 50)}
    early = archive.put([rows[0], *rows[50:]], SequenceRange(1, 120), **unread)
    late = archive.put(rows[9:40], SequenceRange(5, 60), ledger=Ledger({Reason.DELETED: 25}))
    blocks, _ = await bench.read(early)
    assert [(piece.segment, str(piece.rows), piece.count) for piece in Rows(blocks).pieces()] == [
        (early.segment, "1..4", 1),
        (late.segment, "5..40", 31),
        (early.segment, "41..120", 70),
    ]

    archive.put(rows[:100], SequenceRange(1, 100))
    expected = [1, *range(10, 41), *range(51, 121)]
    assert await bench.again(blocks) == expected

    # The named segment is gone: its rows are in the cover, in `unread` of the segment that masks them.
    archive.put(rows[9:40], SequenceRange(5, 60), ledger=Ledger({Reason.DELETED: 25}), level=1)
    archive.store.delete(late)
    archive.store.delete(next(ref for ref in archive.store.list(CHAIN) if ref.coverage.last == 100))
    assert await bench.again(blocks) == expected


@pytest.mark.parametrize("gone", ["segment", "parked"])
async def test_a_message_out_of_turn_is_found_in_either_place(tmp_path: Path, threads: ThreadPool, gone: str) -> None:
    bench = Bench(tmp_path, threads)
    ref = bench.archive.put([message(s, b"L" * 2000 if s == 3 else b"x") for s in range(1, 6)])
    await bench.read(ref, SMALL)
    name = bench.parked.name(CHAIN, 3)
    block = await bench.recall().prepare_parked(name)
    bench.archive.objects.delete(ref.key if gone == "segment" else bench.parked.keys.key(name, "message"))

    rows = await bench.recall().rows(Intent(4, (block.piece,)), 0)

    ((_, _, payload),) = rows.messages(0, rows.count)
    assert (rows.sequence(0), bytes(payload)) == (3, b"L" * 2000)


@pytest.mark.parametrize(("limits", "code"), [(NARROW, "E-SUBJECT"), (TIGHT, "E-OVERSIZE-INTENT")])
async def test_a_row_that_is_taken_no_more_names_what_works(
    tmp_path: Path, threads: ThreadPool, limits: TargetLimits, code: str
) -> None:
    bench = Bench(tmp_path, threads)
    ref = bench.archive.put([message(s, b"L" * 2000 if s == 3 else b"x", subject=b"a.b") for s in range(1, 6)])

    with pytest.raises(Stopped) as stop:
        await bench.recall(limits).rows(Intent(0, (IntentPiece(ref.segment, ref.coverage, 5),)), 0)

    assert (stop.value.code, bench.budget.used) == (code, 0)
    # Neither moving nor resuming the chain helps while the intent is open.
    hint = stop.value.hint
    assert [part in hint for part in ("floe checkpoint set -c ", "--sequence", "chain resume")] == [True, False, False]
    assert hint.endswith("--target T --accept")


# Memory, and segments that stay open


class Open:
    """An open segment that keeps `held_bytes` between two turns."""

    def __init__(self, site: str, held_bytes: int = 1) -> None:
        self.segment: Any = SimpleNamespace(chain=Chain(site, "F"))
        self.held_bytes, self.is_closed = held_bytes, False

    def close(self) -> None:
        self.is_closed = True


def test_of_too_many_open_segments_one_of_the_site_with_most_is_closed_and_what_is_kept_of_another_plan() -> None:
    budget, sources = ByteBudget(2000), dict[str, Any]()
    kept = OpenSegments[Any](budget)
    for number, site in enumerate("aaaabbbbcc"):
        sources[f"{site}{number}"] = source = Open(site)
        kept.keep(f"{site}{number}", source, source)
    sources["b9"] = large = Open("b", 998)
    kept.keep("b9", large, large)
    assert len(kept.segments) == MAX_OPEN_SEGMENTS
    assert [name for name, source in sources.items() if source.is_closed] == ["a3", "b7", "b9"]
    assert kept.take("a0", "another plan") is None
    assert sources["a0"].is_closed
    budget.limit = 8
    kept.keep("c8", sources["c8"], sources["c8"])
    assert len(kept.segments) == 4
    kept.drop()
    assert (sources["a1"].is_closed, kept.segments) == (True, {})


async def read_turns(bench: Bench, ref: SegmentRef) -> list[Block]:
    """Return all blocks of a segment; their bytes are released at once, as if they were published."""
    blocks, source = list[Block](), bench.decoder.open(ref, ref.coverage)
    preparer = ChainRegistry(SETTINGS, LARGE).preparer(CHAIN)

    def emit(block: Block) -> None:
        blocks.append(block)
        bench.budget.release(block.size)

    while not source.is_done:
        assert await bench.decoder.turn(source, preparer, emit) is None
    await bench.decoder.close(source)
    assert bench.budget.used == 0
    return blocks


@pytest.fixture
def measured(tmp_path: Path, threads: ThreadPool, monkeypatch: pytest.MonkeyPatch) -> tuple[Bench, list[int]]:
    """Return a bench with a budget of 1 MiB, and the use of the budget before the text of each batch is expanded."""
    bench, used, real = Bench(tmp_path, threads, ByteBudget(1 << 20)), list[int](), reader._expand

    def expanded(*args: Any) -> Any:
        used.append(bench.budget.used)
        return real(*args)

    monkeypatch.setattr(reader, "_expand", expanded)
    return bench, used


async def test_nothing_is_decoded_before_its_bytes_are_free(measured: tuple[Bench, list[int]]) -> None:
    bench, used = measured
    ref = bench.archive.put([message(s, b"x" * 1000) for s in range(1, 1001)])
    await bench.budget.acquire(1 << 20)
    reading = asyncio.create_task(read_turns(bench, ref))
    await soon(bench.budget._turn.locked)
    assert used == []

    bench.budget.release(1 << 20)
    assert len(carried(await reading)) == 1000
    assert min(used) >= 1000 * 1000


async def test_a_repeated_text_is_expanded_within_the_budget_only(measured: tuple[Bench, list[int]]) -> None:
    """Expand 1,000 rows with one long subject from a file of some thousand bytes."""
    bench, used = measured
    ref = bench.archive.put([message(s, b"", subject=b"x" * 3_800) for s in range(1, 1001)])
    assert ref.size < 30_000
    assert len(carried(await read_turns(bench, ref))) == 1000
    assert min(used) >= 3 * 1000 * 3_800


async def test_a_message_that_is_too_large_is_not_damage_though_its_page_is_beyond_all_limits(
    tmp_path: Path, threads: ThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingress.rows.decoder.MAX_MESSAGE_BYTES", 1 << 20)
    monkeypatch.setattr("common.archive.reader.open_file.__defaults__", (ParquetLimits(row_group_bytes=35 << 20),))
    bench = Bench(tmp_path, threads)
    rows = [message(1), message(2), message(3, b"L" * (36 << 20)), message(4)]
    blocks, problem = await bench.read(bench.archive.put(rows, batch_rows=2))

    assert isinstance(problem, Stopped)
    assert (problem.code, "stops at sequence 3: it needs 377" in problem.message) == ("E-MSG-TOO-LARGE", True)
    assert [block.piece.rows.last for block in blocks] == [2]


async def test_segments_that_are_united_take_what_they_need_together(
    measured: tuple[Bench, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open thirty segments at the same time: they overlap in the unread range of one."""
    bench, used = measured
    rows, gone = [message(s, b"x" * 1000) for s in range(1, 301)], Ledger({Reason.GONE_BEFORE_READ: 299})
    early = bench.archive.put([rows[0]], SequenceRange(1, 300), ledger=gone, unread=SequenceRange(2, 300))
    for last in range(271, 301):
        bench.archive.put(rows[1:last], tail=False)
    assert carried(await read_turns(bench, early)) == list(range(1, 301))
    assert max(used) >= 30 * 270 * 1000

    monkeypatch.setattr("ingress.rows.decoder.MAX_DECODED_BYTES", 2_000_000)
    with pytest.raises(DataError, match="at most 2000000 bytes at a time"):
        await read_turns(bench, early)


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_whoever_asked_first_is_served_first_and_what_is_larger_than_the_budget_alone() -> None:
    budget, served = ByteBudget(100), list[str]()

    async def take(name: str, size: int) -> None:
        await budget.acquire(size)
        served.append(name)

    await budget.acquire(80)
    tasks = [asyncio.create_task(take(name, size)) for name, size in (("large", 60), ("small", 10), ("huge", 1000))]
    await turn()
    assert served == []
    budget.release(80)
    await turn()
    assert (served, budget.used) == (["large", "small"], 70)
    budget.release(70)
    await asyncio.gather(*tasks)
    assert (served[2:], budget.used) == (["huge"], 1000)
    budget.acquire_unchecked(50)  # waits for nothing
    budget.release(1050)
    assert budget.used == 0


async def test_an_intent_keeps_to_the_share_of_memory_that_is_set_last() -> None:
    ahead = ReadyBlocks(1 << 20)
    for number in (1, 2, 3):
        ahead.append(Block(piece(number, number), size=100))
    ahead.resize(1600)
    assert [(await ahead.take(Stop(), 0)).count for _ in range(2)] == [2, 1]


async def test_a_cancelled_wait_takes_nothing_and_holds_nobody_up() -> None:
    budget = ByteBudget(100)
    await budget.acquire(90)
    first, second = (asyncio.create_task(budget.acquire(size)) for size in (50, 10))
    await turn()
    first.cancel()
    await second
    assert budget.used == 100

    served = asyncio.create_task(budget.acquire(50))
    await turn()
    budget.release(100)
    served.cancel()  # just after it was served
    await asyncio.gather(served, return_exceptions=True)
    assert budget.used == 0


async def test_what_is_larger_than_a_budget_is_decoded_alone_in_the_process_and_gives_its_bytes_back() -> None:
    alone = asyncio.Lock()
    budgets = [ByteBudget(100, alone) for _ in range(3)]
    began, go_on = list[str](), asyncio.Event()

    async def decode(name: str, budget: ByteBudget, size: int, *, wait: bool = True) -> None:
        async with budget.reserve_for_decoding(size, wait=wait):
            began.append(name)
            await go_on.wait()

    works = [
        decode("large", budgets[0], 1000),
        decode("other large", budgets[1], 1000),
        decode("forced large", budgets[0], 500, wait=False),
        decode("fits", budgets[2], 100),
    ]
    tasks = [asyncio.create_task(work) for work in works]
    await turn()
    assert began == ["large", "fits"]
    go_on.set()
    await asyncio.gather(*tasks)

    assert began == ["large", "fits", "other large", "forced large"]
    assert [budget.used for budget in budgets] == [0, 0, 0]
    budget = budgets[0]
    with pytest.raises(ValueError, match="damaged"):
        async with budget.reserve_for_decoding(1000, wait=True):
            raise ValueError("damaged")
    assert budget.used == 0
    async with budget.reserve_for_decoding(1000, wait=True):
        assert budget.used == 1000
