"""Blocks account for every sequence once: carried, left out, or without a row; and are found again so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.chain import Chain
from common.errors import DataError, Stopped
from common.segments import reader
from common.segments.parquet_guard import ParquetLimits
from common.segments.segment import Ledger, Reason, SegmentRef
from common.sequences import SequenceRange
from common.service.process import Threads
from common.settings.ingress import TargetSettings
from ingress.chains.chain_state import ChainRegistry
from ingress.chains.recall import Recall
from ingress.checkpoint import Checkpoint, Intent, IntentPiece, TargetState
from ingress.checkpoint_store import from_json, to_json
from ingress.parked import ParkedStore
from ingress.rows.decoder import KEPT, Decoder, KeptOpen, Relays
from ingress.rows.prepare import Accepting, TargetLimits
from ingress.rows.rows import Block, ByteBudget, Rows
from tests.support.basics import seeded, soon
from tests.support.ingress import CHAIN, Archive
from tests.support.segments import message

SETTINGS = TargetSettings.model_validate({"stream": "T", "sources": [{"site": CHAIN.site, "feed": CHAIN.feed}]})
SMALL, LARGE = (TargetLimits(Accepting([">"]), 1000, parks=True), TargetLimits(Accepting([">"]), 1 << 20, parks=True))
NARROW = TargetLimits(Accepting(["other.>"]), 1 << 20)


@pytest.fixture
async def threads() -> AsyncIterator[Threads]:
    threads = Threads("test", 2)
    yield threads
    threads.close()


async def test_what_is_left_out_is_accounted_for_and_found_again_by_other_limits(
    tmp_path: Path, threads: Threads
) -> None:
    rng = seeded()
    for number in range(12):
        archive = Archive(tmp_path / str(number))
        last = rng.randint(1, 60)
        held = sorted(rng.sample(range(1, last + 1), rng.randint(1, last)))
        chance = rng.choice([0.05, 0.5, 1.0])
        large = [sequence for sequence in held if rng.random() < chance]
        ref = archive.put(
            [message(s, b"L" * 2000 if s in large else b"x") for s in held], SequenceRange(1, last), batch_rows=7
        )
        parked = ParkedStore(archive.objects, archive.documents.layout, "T", "t0")
        budget, blocks = ByteBudget(1 << 30), list[Block]()
        decoder = Decoder(archive.store, threads, budget, parked.park)

        preparer = ChainRegistry(SETTINGS, SMALL).preparer(CHAIN)
        assert await decoder.read(decoder.begin(ref, SequenceRange(1, last)), preparer, blocks.append) is None

        pieces = Rows(blocks).pieces()
        assert [(pieces[0].rows.first, pieces[-1].rows.last, len(pieces))] == [(1, last, 1)]
        assert list(pieces[0].left_out) == large
        assert [name.sequence for name in parked.entries()] == large
        carried = [s for block in blocks if block.batch for s in block.batch.sequences]
        assert carried == [s for s in held if s not in large]
        assert budget.used == sum(block.size for block in blocks)

        # The same intent, read back and carried by somebody for whom nothing is too large.
        state = from_json("T", to_json("T", TargetState(Checkpoint(0, "t0"), Intent(0, tuple(pieces)))))
        assert state.intent is not None
        relays = Relays(archive.documents, threads)
        recall = Recall(archive.store, threads, ByteBudget(1 << 30), ChainRegistry(SETTINGS, LARGE), relays, parked)
        rows = await recall.rows(state.intent, 0)
        assert [rows.sequence(index) for index in range(rows.count)] == carried


async def test_an_open_intent_is_finished_from_the_segments_that_it_names(tmp_path: Path, threads: Threads) -> None:
    """B did not read 1..50; twin A's segment had come when the intent was made, and a third comes after."""
    archive = Archive(tmp_path)
    gone, relays = Ledger({Reason.GONE_BEFORE_READ: 49}), Relays(archive.documents, threads)
    rows = [message(s) for s in range(1, 121)]
    early = archive.put([rows[0], *rows[50:]], SequenceRange(1, 120), ledger=gone, unread=SequenceRange(2, 50))
    late = archive.put(rows[9:40], SequenceRange(5, 60), ledger=Ledger({Reason.DELETED: 25}))
    decoder, blocks = Decoder(archive.store, threads, ByteBudget(1 << 30)), list[Block]()
    registry = ChainRegistry(SETTINGS, LARGE)
    await decoder.read(decoder.begin(early, early.coverage), registry.preparer(CHAIN), blocks.append)
    pieces = Rows(blocks).pieces()
    assert [(piece.segment, str(piece.rows), piece.count) for piece in pieces] == [
        (early.segment, "1..4", 1),
        (late.segment, "5..40", 31),
        (early.segment, "41..120", 70),
    ]

    archive.put(rows[:100], SequenceRange(1, 100))
    state = from_json("T", to_json("T", TargetState(Checkpoint(0, "t0"), Intent(0, tuple(pieces)))))
    assert state.intent is not None
    recall = Recall(archive.store, threads, ByteBudget(1 << 30), registry, relays)
    expected = [1, *range(10, 41), *range(51, 121)]
    found = await recall.rows(state.intent, 0)
    assert [found.sequence(index) for index in range(found.count)] == expected

    # Gone by its name, its rows are where the cover has them: behind `unread` of what masks them.
    archive.put(rows[9:40], SequenceRange(5, 60), ledger=Ledger({Reason.DELETED: 25}), level=1)
    archive.store.delete(late)
    archive.store.delete(next(ref for ref in archive.store.list(CHAIN) if ref.coverage.last == 100))
    found = await recall.rows(state.intent, 0)
    assert [found.sequence(index) for index in range(found.count)] == expected


async def test_a_message_out_of_turn_is_found_where_archive_or_parked_object_is_gone(
    tmp_path: Path, threads: Threads
) -> None:
    for gone in ("segment", "parked"):
        archive = Archive(tmp_path / gone)
        ref = archive.put([message(s, b"L" * 2000 if s == 3 else b"x") for s in range(1, 6)])
        parked = ParkedStore(archive.objects, archive.documents.layout, "T", "t0")
        decoder, preparer = (
            Decoder(archive.store, threads, ByteBudget(1 << 30), parked.park),
            ChainRegistry(SETTINGS, SMALL).preparer(CHAIN),
        )
        await decoder.read(decoder.begin(ref, SequenceRange(1, 5)), preparer, lambda _: None)
        relays = Relays(archive.documents, threads)
        recall = Recall(archive.store, threads, ByteBudget(1 << 30), ChainRegistry(SETTINGS, LARGE), relays, parked)
        block = await recall.again(parked.name(CHAIN, 3))
        archive.objects.delete(ref.key if gone == "segment" else parked.keys.key(parked.name(CHAIN, 3), "message"))

        rows = await recall.rows(Intent(4, (block.piece,)), 0)

        assert [rows.sequence(index) for index in range(rows.count)] == [3]
        ((_, _, payload),) = rows.messages(0, 1)
        assert bytes(payload) == b"L" * 2000


async def test_a_row_of_an_open_intent_that_the_target_takes_no_more_names_what_works(
    tmp_path: Path, threads: Threads
) -> None:
    archive = Archive(tmp_path)
    ref = archive.put([message(s, b"L" * 2000 if s == 3 else b"x", subject=b"a.b") for s in range(1, 6)])
    intent = Intent(0, (IntentPiece(ref.segment, ref.coverage, 5),))
    for shape, code in ((TargetLimits(Accepting([">"]), 1000), "E-OVERSIZE-INTENT"), (NARROW, "E-SUBJECT")):
        budget = ByteBudget(1 << 30)
        relays = Relays(archive.documents, threads)
        recall = Recall(archive.store, threads, budget, ChainRegistry(SETTINGS, shape), relays)

        with pytest.raises(Stopped) as stop:
            await recall.rows(intent, 0)

        assert stop.value.code == code
        assert "floe checkpoint set -c " in stop.value.hint
        assert stop.value.hint.endswith("--target T --accept --yes")
        # Neither moving the chain nor looking at it again helps while the intent is open.
        assert "--sequence" not in stop.value.hint
        assert "chain resume" not in stop.value.hint
        assert budget.used == 0


# Memory, and segments that stay open


class Kept:
    """An open segment that holds `held` bytes between two turns."""

    def __init__(self, site: str, held: int = 1) -> None:
        self.segment: Any = SimpleNamespace(chain=Chain(site, "F"))
        self.held, self.is_closed = held, False

    def close(self) -> None:
        self.is_closed = True


def test_of_too_many_open_segments_one_of_the_site_with_most_is_closed() -> None:
    kept, sources = KeptOpen[str](1000), {}
    for number, site in enumerate("aaaabbbbcc"):
        sources[f"{site}{number}"] = source = Kept(site)
        kept.keep(f"{site}{number}", source, source)  # type: ignore[arg-type]
    assert len(kept.kept) == KEPT
    assert [name for name, source in sources.items() if source.is_closed] == ["a3", "b7"]

    large = Kept("b", 998)
    kept.keep("b9", large, large)  # type: ignore[arg-type]
    assert large.is_closed
    assert len(kept.kept) == KEPT


def test_what_is_kept_of_another_plan_is_closed() -> None:
    kept, source, other = KeptOpen[str](1000), Kept("a"), Kept("a")
    kept.keep("one", "plan", source)  # type: ignore[arg-type]
    kept.keep("two", "plan", other)  # type: ignore[arg-type]
    plan = "".join(["pl", "an"])
    assert kept.take("one", plan) is None
    assert source.is_closed
    kept.drop()
    assert (other.is_closed, kept.kept) == (True, {})


async def read_turns(archive: Archive, threads: Threads, budget: ByteBudget, ref: SegmentRef) -> list[Block]:
    """All blocks of a segment; their bytes are given back at once, as if they were published."""
    decoder, blocks = Decoder(archive.store, threads, budget), list[Block]()
    source, preparer = decoder.begin(ref, ref.coverage), ChainRegistry(SETTINGS, LARGE).preparer(CHAIN)

    def emit(block: Block) -> None:
        blocks.append(block)
        budget.give(block.size)

    while not source.is_done:
        assert await decoder.turn(source, preparer, emit) is None
    await decoder.close(source)
    assert budget.used == 0
    return blocks


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> tuple[ByteBudget, list[int]]:
    """A budget of 1 MiB, and what is taken of it whenever a batch was decoded and its text is to be expanded."""
    budget, used, real = ByteBudget(1 << 20), list[int](), reader._expanded

    def expanded(*args: Any) -> Any:
        used.append(budget.used)
        return real(*args)

    monkeypatch.setattr(reader, "_expanded", expanded)
    return budget, used


async def test_nothing_is_decoded_before_its_bytes_are_free(
    tmp_path: Path, threads: Threads, used: tuple[ByteBudget, list[int]]
) -> None:
    (budget, decoded), archive = used, Archive(tmp_path)
    ref = archive.put([message(s, b"x" * 1000) for s in range(1, 1001)])
    await budget.take(1 << 20)
    reading = asyncio.create_task(read_turns(archive, threads, budget, ref))
    await soon(lambda: budget._waiting)
    assert decoded == []

    budget.give(1 << 20)
    blocks = await reading
    assert min(decoded) >= 1000 * 1000
    assert sum(block.piece.count for block in blocks) == 1000


async def test_a_text_that_every_row_repeats_is_expanded_within_the_budget_only(
    tmp_path: Path, threads: Threads, used: tuple[ByteBudget, list[int]]
) -> None:
    """1,000 rows with one long subject: a file of some thousand bytes."""
    (budget, decoded), archive = used, Archive(tmp_path)
    ref = archive.put([message(s, b"", subject=b"x" * 3_800) for s in range(1, 1001)])
    assert ref.size < 30_000
    blocks = await read_turns(archive, threads, budget, ref)
    assert sum(block.piece.count for block in blocks) == 1000
    assert min(decoded) >= 3 * 1000 * 3_800


async def test_a_message_that_is_too_large_is_not_damage_though_its_page_is_beyond_all_limits(
    tmp_path: Path, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingress.rows.decoder.MAX_MESSAGE_BYTES", 1 << 20)
    monkeypatch.setattr("common.segments.reader.open_file.__defaults__", (ParquetLimits(row_group_bytes=35 << 20),))
    archive, blocks = Archive(tmp_path), list[Block]()
    rows = [message(1), message(2), message(3, b"L" * (36 << 20)), message(4)]
    ref = archive.put(rows, batch_rows=2)
    decoder, preparer = (
        Decoder(archive.store, threads, ByteBudget(1 << 30)),
        ChainRegistry(SETTINGS, LARGE).preparer(CHAIN),
    )

    problem = await decoder.read(decoder.begin(ref, ref.coverage), preparer, blocks.append)

    assert isinstance(problem, Stopped)
    assert problem.code == "E-MSG-TOO-LARGE"
    assert "stops at sequence 3: it needs 377" in problem.message
    assert [block.piece.rows.last for block in blocks] == [2]


async def test_segments_that_are_united_take_what_they_need_together(
    tmp_path: Path, threads: Threads, used: tuple[ByteBudget, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty segments overlap in what one did not read: all of them are open at the same time."""
    (budget, decoded), archive = used, Archive(tmp_path)
    rows, gone = [message(s, b"x" * 1000) for s in range(1, 301)], Ledger({Reason.GONE_BEFORE_READ: 299})
    early = archive.put([rows[0]], SequenceRange(1, 300), ledger=gone, unread=SequenceRange(2, 300))
    for last in range(271, 301):
        archive.put(rows[1:last], tail=False)
    blocks = await read_turns(archive, threads, budget, early)
    assert [s for block in blocks if block.batch for s in block.batch.sequences] == list(range(1, 301))
    assert max(decoded) >= 30 * 270 * 1000

    monkeypatch.setattr("ingress.rows.decoder.MOST_DECODED", 2_000_000)
    with pytest.raises(DataError, match="at most 2000000 bytes at a time"):
        await read_turns(archive, threads, budget, early)
