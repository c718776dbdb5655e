"""Parked messages: their keys, their bytes, and the conditions of their delivery."""

from collections.abc import AsyncIterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.archive.keys import Layout, SegmentName
from common.archive.segment import Message
from common.chain import Chain
from common.errors import DataError, Unavailable
from common.nats.kv import KvEntry
from common.objects.local import LocalObjects
from common.objects.port import ObjectInfo
from common.sequences import SequenceRange
from common.service.process import ThreadPool
from common.tasks import Stop
from ingress.chains.sources import Pause, Pauses
from ingress.checkpoint import Checkpoint, Intent, IntentPiece, ParkedNames, StateStore, TargetState, to_json
from ingress.parked import ParkedKeys, ParkedName, ParkedState, ParkedStore, count_waiting, from_bytes, to_bytes
from ingress.redelivery import FULL_LISTING_INTERVAL_S, ParkedSource, Retries
from ingress.rows.prepare import Oversize
from ingress.rows.rows import Block, PreparedBatch, Rows
from tests.support.basics import PATIENCE
from tests.support.segments import message

CHAIN = Chain("us-east", "NODES", 1, 2)
CREATED = "2026-01-02T03:04:05.123456789Z"
WHY = "the message needs 30 bytes, the target takes 10"

feeds = st.text(min_size=1, max_size=8).filter(lambda t: not set(t) & set(" .*>/\\\t\r\n\f\0") and t.isprintable())
chains = st.builds(Chain, st.sampled_from(["us-east", "a_b"]), feeds, st.integers(0, 9999), st.integers(0, 65535))
times = st.text("0123456789TZ:-.", min_size=1, max_size=30)
names = st.builds(ParkedName, chains, st.integers(1, 2**63 - 1), times)


@given(names, st.integers(1, 9999))
def test_a_listing_returns_what_the_keys_hold(name: ParkedName, number: int) -> None:
    keys = ParkedKeys(Layout("p"), "FLEET")
    made = [keys.key(name, "message"), keys.key(name, "left_out"), keys.key(name, "asked", number)]
    listing = [ObjectInfo(key, 7, 5.0, "") for key in [*made, f"{keys.folder(name)}other", f"{keys.prefix}x/y"]]

    ((found, entry),) = keys.parse_entries(listing).items()

    assert (found, entry.size, entry.since, entry.asked, entry.state) == (name, 7, 5.0, number, ParkedState.REQUESTED)
    assert made[0].startswith(keys.created_prefix(name.created))


def test_the_state_follows_from_the_names_alone() -> None:
    for marks, state, waits in (
        ("message asked-0001", ParkedState.PENDING, 0),
        ("message left_out", ParkedState.PARKED, 1),
        ("message left_out asked-0001", ParkedState.REQUESTED, 1),
        ("message left_out asked-0001 answered-0001", ParkedState.PARKED, 1),
        ("message left_out asked-0001 answered-0001 asked-0002", ParkedState.REQUESTED, 1),
        ("message left_out asked-0001 delivered", ParkedState.DELIVERED, 0),
    ):
        keys, name = ParkedKeys(Layout(), "FLEET"), ParkedName(CHAIN, 7, CREATED)
        listing = [ObjectInfo(keys.folder(name) + mark, 1, 0.0, "") for mark in marks.split()]

        entries = keys.parse_entries(listing)

        assert entries[name].state is state
        assert count_waiting(entries) == waits


blocks = st.one_of(st.none(), st.binary(max_size=40))


@given(st.binary(max_size=40), blocks, st.binary(max_size=60), st.integers(0, 2**63 - 1))
def test_a_message_comes_back_as_it_was(subject: bytes, headers: Any, payload: bytes, timestamp_ns: int) -> None:
    row = Message(7, timestamp_ns, subject, headers, payload)

    assert from_bytes("k", to_bytes(CHAIN, row), CHAIN, 7) == row


@given(st.data())
def test_a_corrupt_object_or_another_message_in_its_place_is_never_taken(data: st.DataObject) -> None:
    raw = to_bytes(CHAIN, message(7, b"payload", headers=b"NATS/1.0\r\nA: 1\r\n\r\n"))
    at = data.draw(st.integers(raw.index(b"\n") + 1, len(raw) - 1))
    corrupt = data.draw(st.sampled_from([raw[:at], raw + b"x", raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]]))

    with pytest.raises(DataError, match="expected a parked message"):
        from_bytes("k", corrupt, CHAIN, 7)
    for chain, sequence in ((CHAIN, 8), (Chain("us-east", "NODES"), 7)):
        with pytest.raises(DataError, match="expected version 1"):
            from_bytes("k", raw, chain, sequence)


@pytest.fixture
def parked(tmp_path: Path) -> ParkedStore:
    return ParkedStore(LocalObjects(tmp_path), Layout("p"), "FLEET", CREATED)


def test_what_is_parked_twice_is_the_same_object(parked: ParkedStore) -> None:
    for takes in (10, 20):
        parked.park(CHAIN, Oversize(message(7), f"the message needs 30 bytes, the target takes {takes}"))

    ((name, entry),) = parked.list_entries().items()
    assert parked.read(name) == message(7)
    assert parked.read_reason(entry) == WHY


class Forgetful(LocalObjects):
    """A store that confirms a put but keeps other bytes, `lies` times."""

    lies = 0

    def put(self, key: str, body: Any, **options: Any) -> None:
        self.lies -= 1
        super().put(key, b"other" if self.lies >= 0 else body, **({} if self.lies >= 0 else options))


@pytest.mark.parametrize("lies", [2, 3])
def test_nothing_is_left_out_before_the_store_gives_it_back(tmp_path: Path, lies: int) -> None:
    objects = Forgetful(tmp_path)
    objects.lies = lies
    parked = ParkedStore(objects, Layout(), "FLEET", CREATED)
    with pytest.raises(Unavailable, match="never read back") if lies == 3 else nullcontext():
        left_out(parked, 7)
        assert parked.read(parked.name(CHAIN, 7)) == message(7)


class FakePrefetcher:
    """A prefetcher that returns the offered items."""

    def __init__(self, recall: Any = None) -> None:
        self.recall, self.released, self.ready = recall, 0, list[Block]()

    def offer(self, block: Block) -> None:
        self.ready.append(block)

    async def take(self, _stop: Stop, _seconds: float) -> Rows | None:
        rows, self.ready = self.ready, []
        return Rows(rows) if rows else None

    def release(self, rows: Rows) -> None:
        self.released += rows.size

    def reset(self, _positions: Mapping[Chain, int]) -> None:
        self.ready = []


class World:
    """The clock, the recall and the pauses of a `Retries`."""

    def __init__(self) -> None:
        self.now, self.pauses, self.failing, self.tried = 0.0, Pauses(), set[int](), list[int]()

    def monotonic(self) -> float:
        return self.now

    async def read(self) -> Pauses:
        return self.pauses

    async def reshape(self) -> None: ...

    async def prepare_parked(self, name: ParkedName) -> Block:
        self.tried.append(name.sequence)
        if name.sequence in self.failing:
            raise Unavailable("chain.json is gone")
        return again(name.sequence)


def retries_of(parked: ParkedStore, threads: ThreadPool) -> tuple[Retries, World]:
    editor: Any = World()
    source = ParkedSource(FakePrefetcher(editor), parked, threads)  # type: ignore[arg-type]
    return Retries(parked, source, threads, editor, editor.reshape, editor), editor


def again(sequence: int) -> Block:
    """Return a parked message that is retried."""
    rows = SequenceRange(sequence, sequence)
    batch = PreparedBatch([sequence], [1], [b"a"], b"O: ", None, pa.array([b"x"], pa.binary()), [10])
    return Block(IntentPiece(SegmentName(CHAIN, 0, rows, "0" * 16), rows, 1, is_retry=True), batch, 100)


@pytest.fixture
async def threads() -> AsyncIterator[ThreadPool]:
    threads = ThreadPool("parked", 2)
    yield threads
    threads.close()


async def test_only_what_was_left_out_and_not_delivered_may_go_and_each_once(parked: Any, threads: ThreadPool) -> None:
    prefetcher = FakePrefetcher()
    source = ParkedSource(prefetcher, parked, threads)  # type: ignore[arg-type]
    parked.park(CHAIN, Oversize(message(7), WHY))
    left_out(parked, 5, 6)
    parked.mark_delivered(parked.name(CHAIN, 6))
    for sequence in (5, 6, 7, 5):
        source.offer(again(sequence))

    rows = await source.take(Stop(), 1.0)

    assert ([block.piece.rows.first for block in rows.blocks], prefetcher.released) == ([5], 300)
    await source.before_close(Intent(0, tuple(rows.pieces())))
    assert parked.list_entries()[parked.name(CHAIN, 5)].state is ParkedState.DELIVERED
    assert source.offered_bytes == 0
    source.offer(again(5))
    assert (await source.take(Stop(), 1.0), prefetcher.released) == (None, 400)

    # A message that a reset drops may be offered again.
    source.offer(again(5))
    assert parked.name(CHAIN, 5) in source.offered
    source.reset({})
    assert parked.name(CHAIN, 5) not in source.offered
    assert await source.take(Stop(), 1.0) is None


async def test_marks_are_put_side_by_side(parked: ParkedStore) -> None:
    """Put marks concurrently: an intent may leave out thousands, and stays open until all are marked."""
    threads, together = ThreadPool("parked", 8), Barrier(8)
    parked.mark_left_out = lambda _name: together.wait(PATIENCE) and None  # type: ignore[method-assign]
    piece = IntentPiece(SegmentName(CHAIN, 0, SequenceRange(1, 9), "0" * 16), SequenceRange(1, 9), 0)
    source = ParkedSource(FakePrefetcher(), parked, threads)  # type: ignore[arg-type]
    await source.before_close(Intent(0, (replace(piece, parked=tuple(range(1, 9))),)))
    threads.close()


class Counting(LocalObjects):
    """A store that counts listings of more than one message."""

    listings = 0

    def list(self, prefix: str, **options: Any) -> list[ObjectInfo]:
        self.listings += not prefix.endswith("0007/") and not prefix.endswith("0008/")
        return super().list(prefix, **options)


def left_out(parked: ParkedStore, *sequences: int) -> None:
    for sequence in sequences:
        parked.park(CHAIN, Oversize(message(sequence), WHY))
        parked.mark_left_out(parked.name(CHAIN, sequence))


async def test_what_nobody_asks_for_is_not_listed_again_and_again(tmp_path: Path, threads: ThreadPool) -> None:
    objects = Counting(tmp_path)
    parked = ParkedStore(objects, Layout("p"), "FLEET", CREATED)
    left_out(parked, 7, 8)
    retries, editor = retries_of(parked, threads)
    editor.pauses = Pauses({CHAIN: Pause("2026-01-01T00:00:00Z")})

    for _ in range(3):
        await retries.check()
    assert objects.listings == 1
    parked.request_retry(*parked.list_entries().values())
    before = objects.listings
    for _ in range(3):
        await retries.check()
    assert (objects.listings, editor.tried) == (before + 1, [])  # paused
    editor.pauses = Pauses()
    await retries.check()
    assert (objects.listings, editor.tried) == (before + 1, [7, 8])
    editor.now += FULL_LISTING_INTERVAL_S
    await retries.check()
    assert objects.listings == before + 2


async def test_one_message_that_cannot_be_tried_keeps_no_other_waiting(parked: Any, threads: Any, caplog: Any) -> None:
    left_out(parked, 7, 8)
    retries, editor = retries_of(parked, threads)
    editor.failing = {7}
    parked.request_retry(*parked.list_entries().values())
    for _ in range(3):
        await retries.check()
    assert (editor.tried, caplog.text.count("parked retry deferred")) == ([7, 8, 7, 7], 1)


async def test_messages_are_kept_under_the_name_of_the_stored_state(parked: ParkedStore) -> None:
    """Use the stored name: a restarted server may report another creation time, and an operator may restart a chain."""
    state = TargetState(Checkpoint(9, "drifted", {}, parked=ParkedNames("t9", ((CHAIN, 5),))))

    class Bucket:
        async def get(self, key: str) -> KvEntry:
            return KvEntry(to_json("FLEET", state), 3)

    await StateStore(Bucket(), "FLEET", parked.adopt_state).load()  # type: ignore[arg-type]
    left_out(parked, 4, 5)

    assert [name.created for name in parked.list_entries()] == ["t9", "t9+1"]
    parked.names = ParkedNames("t9", ((CHAIN, 4), (CHAIN, 5)))
    assert parked.list_entries() == {}  # carried again: messages parked before do not count
    assert not parked.may_be_delivered(parked.name(CHAIN, 5))
