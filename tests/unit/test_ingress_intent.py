"""The intent and the checkpoint: transitions, their stored form, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from common.chain import Chain
from common.errors import OutcomeUnknown, Stopped
from common.jetstream.kv import KvEntry
from common.sequences import SequenceRange
from ingress import checkpoint
from ingress.checkpoint import Checkpoint, CheckpointConflict, Ending, Intent, IntentPiece, TargetState, open_intent
from ingress.checkpoint_store import StateStore, from_json, to_json
from tests.support.ingress import CHAIN, OTHER, piece

A, B = CHAIN, OTHER


def state(positions: dict[Chain, int] | None = None, sequence: int = 0) -> TargetState:
    return TargetState(Checkpoint(sequence, "t0", positions or {}))


def test_an_intent_begins_after_the_checkpoint_and_closing_it_is_the_next_checkpoint() -> None:
    pieces = [piece(11, 20, 4), piece(1, 5, 5, B)]
    opened = open_intent(state({A: 11}, 100), pieces)
    closed = checkpoint.close_intent(opened)

    assert opened.intent == Intent(100, tuple(pieces))
    assert (opened.intent.count, opened.expected_sequence, closed.expected_sequence) == (9, 109, 109)
    assert closed.checkpoint == Checkpoint(109, "t0", {A: 21, B: 6}, ending=Ending(B, SequenceRange(1, 5)))


def test_a_checkpoint_ends_with_the_last_message_of_the_last_piece_that_has_one() -> None:
    closed = checkpoint.close_intent(open_intent(state({A: 11}, 100), [piece(11, 20, 4), piece(1, 5, 0, B)]))
    again = checkpoint.close_intent(open_intent(closed, [piece(21, 30, 0)]))

    assert closed.checkpoint.ending == again.checkpoint.ending == Ending(A, SequenceRange(11, 20))
    assert from_json("T", to_json("T", again)) == again


def test_each_message_is_found_in_its_piece_and_the_ends_of_those_that_are_stored() -> None:
    pieces = (piece(1, 3), piece(4, 9, 0), piece(1, 2, 2, B))
    intent, first, last = Intent(100, pieces), (0, pieces[0]), (3, pieces[2])

    assert [intent.piece_at(index) for index in range(5)] == [first, first, first, last, last]
    with pytest.raises(IndexError):
        intent.piece_at(5)
    assert [list(intent.ends(stored)) for stored in (2, 4)] == [[], [103]]
    assert intent.ends(5) == {103: pieces[0], 105: pieces[2]}


@pytest.mark.parametrize(
    ("before", "pieces", "why"),
    [
        (open_intent(state(), [piece(1, 5)]), [piece(6, 9)], "no open intent, found one after sequence 0"),
        (state({A: 11}), [piece(10, 20)], "us-east/NODES/0000/0: expected rows from 11, got 10"),
        (state({A: 11}), [piece(12, 20)], "us-east/NODES/0000/0: expected rows from 11, got 12"),
        (state(), [piece(1, 5), piece(7, 9)], "expected rows from 6, got 7"),
    ],
)
def test_an_intent_continues_what_is_there(before: TargetState, pieces: list[IntentPiece], why: str) -> None:
    with pytest.raises(CheckpointConflict, match=why):
        open_intent(before, pieces)


def test_an_intent_without_messages_moves_positions_only_and_none_cannot_be_closed() -> None:
    assert checkpoint.close_intent(open_intent(state({A: 1}, 7), [piece(1, 500, 0)])) == state({A: 501}, 7)
    with pytest.raises(CheckpointConflict, match="expected an open intent, found none"):
        checkpoint.close_intent(state())


def test_neighbours_of_one_segment_become_one_piece() -> None:
    pieces = [piece(1, 3), piece(4, 9, 0), piece(1, 2, 2, B), piece(10, 12), piece(13, 14, digest="1")]

    assert checkpoint.merged(pieces) == [piece(1, 9, 3), piece(1, 2, 2, B), piece(10, 12), piece(13, 14, digest="1")]


def test_the_stored_form_comes_back_as_it_was_and_says_whether_others_may_stand_in_the_intent() -> None:
    before = state({A: 11, Chain("a", "b", 3, 7): 2**63 - 1}, 100)
    opened = open_intent(before, [piece(11, 20, 4)])
    shared = open_intent(before, [piece(11, 20)], 130, is_shared=True)

    for each in (state(), opened, shared):
        assert from_json("FLEET", to_json("FLEET", each)) == each
    assert b"shared" not in to_json("T", opened)
    assert checkpoint.share_intent(opened) == replace(opened, intent=replace(opened.intent, is_shared=True))
    with pytest.raises(CheckpointConflict):
        checkpoint.share_intent(state())


def test_a_full_intent_over_a_thousand_chains_stays_far_below_what_a_message_may_hold() -> None:
    chains = [Chain(f"site-{n:04d}", "NODE_DATA_OF_THE_FLEET") for n in range(1000)]
    full = open_intent(state(dict.fromkeys(chains, 1)), [piece(1, 9, chain=chain) for chain in chains])

    assert len(to_json("FLEET", full)) < 256 * 1024


def stored(**changes: Any) -> bytes:
    document = json.loads(to_json("FLEET", open_intent(state({A: 11}), [piece(11, 20)])))
    return json.dumps({**document, **changes}).encode()


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "Expecting value"),
        (b"[]", "expected an object, found list"),
        (b"[" * 100_000, "recursion"),
        (stored(version=2), "version: expected 1, found 2"),
        (stored(target="OTHER"), "target: expected FLEET, found 'OTHER'"),
        (stored(target_sequence=-1), "target_sequence: expected a number from 0, found -1"),
        (stored(target_created=None), "target_created: expected text, found None"),
        (stored(positions={"a/..": 1}), "feed '..'"),
        (stored(positions={"us/NODES": True}), "position: expected a number from 0, found True"),
        (stored(intent={"base": 0, "rows": [["us/N", "0/9-1-xyz", 1, 9, 9]]}), "digest 'xyz'"),
        (stored(intent={"base": 0, "rows": [["us/N", f"0/9-1-{'0' * 16}", 1, 10, 9]]}), "inside 1..9"),
        (stored(intent={"base": 0, "rows": [["us/N", f"0/9-1-{'0' * 16}", 1, 9, 10]]}), "at most 9 of 1..9, found 10"),
        (stored(intent={"base": 0, "rows": [["us/N"]]}), "missing 4 required"),
        (stored(positions={"us-east/NODES": 12}), "expected rows from 12, got 11"),
    ],
)
def test_a_spoiled_state_stops_the_target_and_says_why(raw: bytes, why: str) -> None:
    with pytest.raises(Stopped, match="stored state of target FLEET cannot be read") as caught:
        from_json("FLEET", raw)

    assert why in caught.value.message
    assert caught.value.code == "E-STATE-KV"


# The state in its bucket


class Bucket:
    """A bucket whose answers get lost before or after the write, in the order of `fates`."""

    def __init__(self, *fates: str) -> None:
        self.entry: KvEntry | None = None
        self.fates = list(fates)

    async def get(self, key: str) -> KvEntry | None:
        return self.entry

    async def create(self, key: str, value: bytes) -> int | None:
        return await self.update(key, value, 0)

    async def update(self, key: str, value: bytes, revision: int) -> int | None:
        fate = self.fates.pop(0)
        if fate == "lost" or revision != (self.entry.revision if self.entry else 0):
            if fate == "done":
                return None
            raise OutcomeUnknown("lost")
        self.entry = KvEntry(value, revision + 1)
        if fate == "unanswered":
            raise OutcomeUnknown("unanswered")
        return revision + 1


@pytest.mark.parametrize("fate", ["done", "lost", "unanswered"])
async def test_a_lost_answer_is_settled_by_reading(fate: str) -> None:
    store = StateStore(Bucket(fate, "done"), "key", "FLEET")
    assert (await store.load()).state is None
    saved = await store.save(state({A: 5}), 0)
    assert (saved.revision, saved.state, await store.load()) == (1, state({A: 5}), saved)


@pytest.mark.parametrize("fate", ["done", "lost"])
async def test_a_state_that_somebody_else_changed_is_not_overwritten(fate: str) -> None:
    store = StateStore(Bucket("done", fate, "done"), "key", "FLEET")
    await store.save(state({A: 5}), 0)

    assert await store.save(state({A: 6}), 0) is None
    assert (await store.load()).state == state({A: 5})
