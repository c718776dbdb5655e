"""Blocks account for every sequence once: carried, left out, or without a row; and are found again so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.errors import Stopped
from common.segments.segment import Ledger, Reason
from common.sequences import SequenceRange
from common.service.process import Threads
from common.settings.ingress import TargetSettings
from ingress.chains.chain_state import ChainRegistry
from ingress.chains.recall import Recall
from ingress.checkpoint import Checkpoint, Intent, IntentPiece, TargetState
from ingress.checkpoint_store import from_json, to_json
from ingress.parked import ParkedStore
from ingress.rows.decoder import Decoder, Relays
from ingress.rows.prepare import Accepting, TargetLimits
from ingress.rows.rows import Block, ByteBudget, Rows
from tests.support.basics import seeded
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
        assert await decoder.read(ref, SequenceRange(1, last), preparer, blocks.append) is None

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
    await decoder.read(early, early.coverage, registry.preparer(CHAIN), blocks.append)
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
        await Decoder(archive.store, threads, ByteBudget(1 << 30), parked.park).read(
            ref, SequenceRange(1, 5), ChainRegistry(SETTINGS, SMALL).preparer(CHAIN), lambda _: None
        )
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
