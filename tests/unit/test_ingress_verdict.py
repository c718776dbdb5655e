"""The intent and the checkpoint: transitions, stored form, and the verdict from the target's last message."""

import json
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.chain import Chain
from common.errors import FloeError, OtherWriter, Stopped
from common.sequences import SequenceRange
from ingress import checkpoint
from ingress.checkpoint import (
    Checkpoint,
    Intent,
    LastMessage,
    StateConflict,
    StoredState,
    TargetState,
    from_json,
    open_intent,
    to_json,
)
from ingress.verdict import verdict as judging
from ingress.verdict.settle import SharedTargetReconciler, TargetReconciler
from ingress.verdict.verdict import Doubt, Finding, IntentVerdict, NoOrigin, Origin, Sent, TargetReading, judge
from tests.support.ingress import CHAIN, OTHER, piece, reading

A, B, INTS = CHAIN, OTHER, st.sampled_from([0, 2, 10])


def state(positions: dict[Chain, int] | None = None, sequence: int = 0) -> TargetState:
    return TargetState(Checkpoint(sequence, "t0", positions or {}))


def test_an_intent_begins_after_the_checkpoint_and_closing_it_is_the_next_checkpoint() -> None:
    pieces = [piece(11, 20, 4), piece(1, 5, 5, B)]
    opened = open_intent(state({A: 11}, 100), pieces)
    closed = checkpoint.close_intent(opened)

    assert opened.intent == Intent(100, tuple(pieces))
    assert (opened.intent.count, opened.expected_sequence, closed.expected_sequence) == (9, 109, 109)
    assert closed.checkpoint == Checkpoint(109, "t0", {A: 21, B: 6}, last_message=LastMessage(B, SequenceRange(1, 5)))


def test_a_checkpoint_ends_with_the_last_message_of_the_last_piece_that_has_one() -> None:
    closed = checkpoint.close_intent(open_intent(state({A: 11}, 100), [piece(11, 20, 4), piece(1, 5, 0, B)]))
    again = checkpoint.close_intent(open_intent(closed, [piece(21, 30, 0)]))

    assert closed.checkpoint.last_message == again.checkpoint.last_message == LastMessage(A, SequenceRange(11, 20))
    assert from_json("T", to_json("T", again)) == again


def test_the_ends_of_the_pieces_that_are_stored_are_found() -> None:
    pieces = (piece(1, 3), piece(4, 9, 0), piece(1, 2, 2, B))
    found = [Intent(100, pieces).pieces_by_end(stored) for stored in (2, 4, 5)]
    assert found == [{}, {103: pieces[0]}, {103: pieces[0], 105: pieces[2]}]


def test_an_intent_continues_what_is_there() -> None:
    for before, pieces, why in (
        (open_intent(state(), [piece(1, 5)]), [piece(6, 9)], "no open intent, found one after sequence 0"),
        (state({A: 11}), [piece(10, 20)], "us-east/NODES/0000/0: expected rows from 11, found 10"),
        (state({A: 11}), [piece(12, 20)], "us-east/NODES/0000/0: expected rows from 11, found 12"),
        (state(), [piece(1, 5), piece(7, 9)], "expected rows from 6, found 7"),
    ):
        with pytest.raises(StateConflict, match=why):
            open_intent(before, pieces)


def test_an_intent_without_messages_moves_positions_only_and_none_cannot_be_closed() -> None:
    assert checkpoint.close_intent(open_intent(state({A: 1}, 7), [piece(1, 500, 0)])) == state({A: 501}, 7)
    with pytest.raises(StateConflict, match="expected an open intent, found none"):
        checkpoint.close_intent(state())


def test_neighbours_of_one_segment_become_one_piece() -> None:
    pieces = [piece(1, 3), piece(4, 9, 0), piece(1, 2, 2, B), piece(10, 12), piece(13, 14, digest="1")]

    assert checkpoint.merge_pieces(pieces) == [piece(1, 9, 3), piece(1, 2, 2, B), piece(10, 12), pieces[-1]]


def test_the_stored_form_comes_back_as_it_was_and_shows_if_others_may_share_the_intent() -> None:
    before = state({A: 11, Chain("a", "b", 3, 7): 2**63 - 1}, 100)
    before = replace(before, checkpoint=replace(before.checkpoint, writers=("b", "a")))
    opened = open_intent(before, [piece(11, 20, 4)])
    shared = open_intent(before, [piece(11, 20)], 130, is_shared=True)

    for each in (state(), opened, shared):
        assert from_json("FLEET", to_json("FLEET", each)) == each
    assert b"shared" not in to_json("T", opened)
    assert checkpoint.share_intent(opened) == replace(opened, intent=replace(opened.intent, is_shared=True))
    with pytest.raises(StateConflict):
        checkpoint.share_intent(state())


@given(st.lists(st.sets(st.builds(Chain, st.sampled_from(["a", "a-b"]), st.sampled_from(["N", "É"]), INTS, INTS))))
def test_each_step_stores_the_chains_in_order_and_other_characters_escaped(steps: list[set[Chain]]) -> None:
    current = state({A: 11})
    for step in steps:
        at = current.checkpoint.positions
        current = checkpoint.close_intent(open_intent(current, [piece(n := at.get(c, 5), n, 1, c) for c in step]))
        in_order = {str(chain): at for chain, at in sorted(current.checkpoint.positions.items())}
        raw = to_json("T", current)
        assert raw == json.dumps({**json.loads(raw), "positions": in_order}, separators=(",", ":")).encode()
        assert from_json("T", raw) == current


def test_a_full_intent_over_a_thousand_chains_stays_far_below_what_a_message_may_hold() -> None:
    chains = [Chain(f"site-{n:04d}", "NODE_DATA_OF_THE_FLEET") for n in range(1000)]
    full = open_intent(state(dict.fromkeys(chains, 1)), [piece(1, 9, chain=chain) for chain in chains])

    assert len(to_json("FLEET", full)) < 256 * 1024


def stored(**changes: Any) -> bytes:
    document = json.loads(to_json("FLEET", open_intent(state({A: 11}), [piece(11, 20)])))
    return json.dumps({**document, **changes}).encode()


def test_a_corrupt_state_stops_the_target_and_is_named() -> None:
    for raw, why in (
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
        (stored(positions={"us-east/NODES": 12}), "expected rows from 12, found 11"),
    ):
        with pytest.raises(Stopped, match="stored state of target FLEET cannot be read") as caught:
            from_json("FLEET", raw)

        assert why in caught.value.message
        assert caught.value.code == "E-STATE-KV"


# Evidence in the target


CLOSED = TargetState(Checkpoint(100, "t0", {A: 11, B: 5}))
OPEN = open_intent(CLOSED, [piece(11, 20, 4), piece(5, 9, 5, B)])


@pytest.mark.parametrize("stored", [1, 4, 9])
def test_a_row_that_nobody_can_read_counts_only_where_something_explains_it(stored: int) -> None:
    """Consider a purge up to a sequence beyond the end: it moves the last sequence, and nothing was stored."""
    gone, known = reading(100 + stored, forgets=False), IntentVerdict(Finding.STORED, stored)
    assert judge(OPEN, reading(100 + stored)) == known
    found = judge(OPEN, gone)
    assert (found.finding, found.doubt) == (Finding.UNREAD, Doubt(0, stored, 9))
    # An empty target alone proves nothing, nor do rows acknowledged, read, or accepted by an operator.
    for state in (OPEN, CLOSED):
        assert judge(state, reading(100, forgets=False)) == IntentVerdict(Finding.STORED, 0)
    assert judge(OPEN, gone, sent=Sent(stored)) == known
    assert judge(OPEN, gone, sent=Sent(stored - 1)).finding is Finding.UNREAD
    at = OPEN.intent.piece_at(stored - 1)[1]
    assert judge(OPEN, reading(100 + stored, Origin(at.chain, at.rows.last), forgets=False)) == known
    assert judge(replace(OPEN, checkpoint=replace(CLOSED.checkpoint, foreign_upto=100 + stored)), gone) == known


@pytest.mark.parametrize("forgets", [False, True])
def test_what_the_process_that_sends_never_sent_is_not_ours(forgets: bool) -> None:
    found = judge(OPEN, reading(106, forgets=forgets), sent=Sent(2, 5))
    ahead = IntentVerdict(Finding.AHEAD, detail="last sequence: expected at most 105, found 106")
    assert (found, found.doubt) == (ahead, Doubt(2, 6, 9))
    assert judge(OPEN, reading(105), sent=Sent(2, 5)) == IntentVerdict(Finding.STORED, 5)
    # Another instance sent it: then it can be read, or the lease was lost.
    assert judge(OPEN, reading(106, Origin(B, 6)), sent=Sent(2, 5)) == IntentVerdict(Finding.STORED, 6)
    assert judge(OPEN, reading(106), sent=Sent(2, None)) == IntentVerdict(Finding.STORED, 6)


def test_what_was_sent_is_remembered_of_one_intent_only() -> None:
    sending = judging.Sending()
    sending.open(7)
    assert (sending.sent_of(7), sending.sent_of(8)) == (Sent(0, 0), None)
    before = sending.begin()
    assert sending.sent_of(7) == Sent(0, None)  # any of them may be on its way
    sending.end(before, 3, 5)
    assert sending.sent_of(7) == Sent(3, 5)
    sending.record_settled(7, 4)
    sending.end(sending.begin(), 4, 0)
    assert sending.sent_of(7) == Sent(4, 5)
    sending.record_settled(9, 2)  # taken over
    assert sending.sent_of(9) == Sent(2, None)


def test_a_last_message_that_the_intent_puts_there_agrees_and_another_one_is_a_reason_to_stop() -> None:
    ours = [(101, Origin(A, 11)), (104, Origin(A, 20)), (105, Origin(B, 5)), (109, Origin(B, 9)), (100, Origin(B, 4))]
    for last, origin in ours:
        assert judge(OPEN, reading(last, origin)).finding is Finding.STORED, (last, origin)
    others = [(104, NoOrigin.FOREIGN), (104, Origin(B, 5)), (105, Origin(A, 20)), (104, Origin(A, 21))]
    for last, tail in [*others, (100, Origin(A, 11)), (100, NoOrigin.FOREIGN)]:
        assert judge(OPEN, reading(last, tail)).finding is Finding.FOREIGN, (last, tail)
    # If the exact sequence is known, it must match.
    assert judge(OPEN, reading(102, Origin(A, 13)), 13).finding is Finding.STORED
    other = "message 102 is us-east/NODES/0000/0 13, expected us-east/NODES/0000/0 14"
    assert judge(OPEN, reading(102, Origin(A, 13)), 14) == IntentVerdict(Finding.FOREIGN, detail=other)


@pytest.mark.parametrize("base", [100, 130])
@pytest.mark.parametrize("stored", [0, 4, 9])
def test_an_intent_that_others_may_share_is_never_counted(base: int, stored: int) -> None:
    """Change `exclusive: false` to `true` while it is open: messages after the checkpoint may be of others."""
    pieces = [piece(11, 20, 4), piece(5, 9, 5, B)]
    shared = open_intent(CLOSED, pieces, base, is_shared=True)

    assert judge(shared, reading(base + stored)).finding is Finding.MIXED
    assert judge(shared, reading(base + 9, Origin(B, 9))).finding is Finding.MIXED
    # It does not vouch for another stream either.
    assert judge(shared, reading(base + 9, Origin(B, 9), "t1")).finding is Finding.RECREATED
    # A state of a version that did not record its target.
    assert judge(open_intent(CLOSED, pieces, 130), reading(130)).finding is Finding.MIXED


def test_a_target_beyond_the_intent_before_the_checkpoint_or_created_at_another_time_is_recognised() -> None:
    assert judge(OPEN, reading(110)).finding is Finding.AHEAD
    assert judge(CLOSED, reading(101, Origin(A, 11))).finding is Finding.AHEAD
    behind = IntentVerdict(Finding.BEHIND, detail="last sequence: expected at least 100, found 99")
    assert judge(OPEN, reading(99)) == behind
    assert judge(OPEN, reading(0, created="t1")).finding is Finding.RECREATED
    assert judge(OPEN, reading(105, created="t1")).finding is Finding.RECREATED
    assert judge(OPEN, None).finding is Finding.GONE


def test_a_shared_target_that_is_gone_made_again_or_set_back_stops() -> None:
    looks = (None, reading(0, created="t1"), reading(105, created="t1"), reading(99), reading(105))
    found = [judging.judge_shared(CLOSED, look, set()).finding for look in looks]
    assert found == [Finding.GONE, Finding.RECREATED, Finding.RECREATED, Finding.BEHIND, Finding.STORED]
    assert judging.judge_shared(CLOSED, looks[2], {"t1"}).finding is Finding.STORED, "known to be the same stream"


def test_a_message_of_ours_in_its_place_vouches_for_a_creation_time_that_drifted() -> None:
    assert judge(OPEN, reading(105, Origin(B, 5), "t1")) == IntentVerdict(Finding.STORED, 5)
    assert judge(CLOSED, reading(100, Origin(A, 10), "t1")).finding is Finding.STORED
    assert judge(CLOSED, reading(100, Origin(A, 11), "t1")).finding is Finding.RECREATED
    # At or below `begins` it vouches for nothing.
    begun = TargetState(Checkpoint(100, "t0", {A: 11}, foreign_upto=100))
    assert judge(begun, reading(100, NoOrigin.FOREIGN)).finding is Finding.STORED
    assert judge(begun, reading(100, Origin(A, 10), "t1")).finding is Finding.RECREATED


def test_a_checkpoint_knows_which_message_it_ends_with() -> None:
    """Compare an old copy of the state with a target refilled in another order, to the same length."""
    ended = TargetState(Checkpoint(100, "t0", {A: 51, B: 51}, last_message=LastMessage(B, SequenceRange(41, 50))))

    assert judge(ended, reading(100, Origin(B, 45))).finding is Finding.STORED
    assert judge(ended, reading(100, Origin(B, 20), "t1")).finding is Finding.RECREATED
    other = "message 100 is us-east/NODES/0000/0 40, expected eu-west/NODES/0000/0 41..50"
    assert judge(ended, reading(100, Origin(A, 40))) == IntentVerdict(Finding.FOREIGN, detail=other)


def test_the_ends_of_the_pieces_before_the_last_message_must_be_ours_too_and_the_newest_of_ours_is_stored() -> None:
    """Let the last message agree by chance: two ingresses with a state bucket each, on one target."""
    intent = open_intent(CLOSED, [piece(11, 15, 5), piece(5, 9, 5, B), piece(16, 20, 5)]).intent
    first, last = Origin(A, 15), Origin(A, 20)

    assert judging.piece_contradiction(intent, {105: first, 110: NoOrigin.GONE, 115: last}) is None
    other = judging.piece_contradiction(intent, {105: first, 110: Origin(Chain("eu-west", "OTHER"), 9)})
    why = "message 110 is eu-west/OTHER/0000/0 9, expected eu-west/NODES/0000/0 5..9"
    assert other == IntentVerdict(Finding.FOREIGN, detail=why)
    assert judging.piece_contradiction(intent, {105: NoOrigin.FOREIGN}).finding is Finding.FOREIGN
    read = {105: first, 110: Origin(B, 9), 111: first, 112: NoOrigin.GONE, 113: NoOrigin.FOREIGN}
    assert judging.least_stored(intent, read) == 10
    assert judging.least_stored(intent, {107: NoOrigin.GONE, 99: Origin(A, 10)}) == 0


def test_which_streams_may_drop_their_last_message() -> None:
    stays = {"max_msgs": 5, "max_msgs_per_subject": 1, "max_bytes": 10**7, "allow_msg_ttl": True}
    goes = ({"retention": "workqueue"}, {"retention": "interest"}, {"max_age": 10**9}, {"max_bytes": 1000})
    assert [judging.may_drop_last(config, frozenset(), 2**20) for config in (stays, *goes)] == [False, *[True] * 4]
    assert judging.may_drop_last({"allow_msg_ttl": True}, frozenset({b"nats-ttl"}), 2**20)


class Staged:
    """A target with one answer after the other, and the other dependencies of a reconciler. `origin`: of any message
    that is read by its sequence.
    """

    origin: Origin | NoOrigin = NoOrigin.GONE

    def __init__(self, *lasts: int) -> None:
        self.lasts, self.asked, self.reasons, self.states = lasts, 0, list[str](), []
        self.reconciler = TargetReconciler(judging.TargetErrors("FLEET"), self, self, self, self)

    async def read(self) -> TargetReading:
        self.asked += 1
        return reading(self.lasts[min(self.asked, len(self.lasts)) - 1], NoOrigin.FOREIGN)

    read_fresh = read

    async def read_origins(self, places: Collection[int]) -> dict[int, Origin | NoOrigin]:
        return dict.fromkeys(places, self.origin)

    async def describe(self, place: int) -> str:
        return f"message {place} has subject 'x'"

    async def load(self) -> StoredState:
        return StoredState(self.states.pop(0) if self.states else CLOSED, 1)

    async def sleep(self, seconds: float) -> None:
        self.reasons.append(self.reconciler.pending_reason)

    def is_usable(self) -> bool:
        return True

    def monotonic(self) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("lasts", "code", "asked"),
    [((101, 103, 103, 103), 1, 4), ((103, 103, 103), 1, 3), ((101, 103, 105), 4, 3), ((103, 103, 104), 4, 3)],
)
async def test_only_what_moved_since_the_last_check_still_moves(lasts: tuple[int, ...], code: int, asked: int) -> None:
    staged = Staged(*lasts)
    with pytest.raises(FloeError) as raised:
        await staged.reconciler.settle(StoredState(CLOSED, 1), None)
    assert (raised.value.exit_code, raised.value.code, staged.asked) == (code, "E-TARGET-SHARED", asked)
    assert isinstance(raised.value, OtherWriter) is (code == 4)
    why = "target FLEET: the target is ahead of its stored state: last sequence: expected at most 100, found "
    assert raised.value.message.startswith(why)
    assert "message 101 has subject 'x'" in raised.value.message
    assert len(staged.reasons) == asked - 1
    assert all(each.startswith("checked again before it stops: ") for each in staged.reasons)


@pytest.mark.parametrize("stored", [CLOSED, None])  # by another instance meanwhile
async def test_a_target_with_messages_and_no_state_is_checked_three_times(stored: TargetState | None) -> None:
    staged = Staged(103)
    staged.states = [None, None, stored]
    with nullcontext() if stored else pytest.raises(Stopped, match="found last sequence 103 and no checkpoint"):
        assert (await staged.reconciler.load_first())[0].state == CLOSED
    assert staged.asked == 3


class MadeAgain(Staged):
    """A stream of another creation time."""

    async def read(self) -> TargetReading:
        return reading(105, created="t1")

    read_fresh = read


@pytest.mark.parametrize("origin", [Origin(A, 10), Origin(A, 11), NoOrigin.FOREIGN, NoOrigin.GONE])
async def test_only_a_row_of_ours_vouches_for_a_shared_target_created_anew(origin: Origin | NoOrigin) -> None:
    staged = MadeAgain()
    staged.origin = origin
    settler = staged.reconciler = SharedTargetReconciler(judging.TargetErrors("FLEET"), staged, staged, staged, staged)
    with nullcontext() if origin == Origin(A, 10) else pytest.raises(Stopped, match="created: expected t0, found t1"):
        assert await settler.settle(StoredState(CLOSED, 1), None) == judging.Settled(105, 0)


async def test_an_intent_without_rows_that_is_taken_over_ends_at_the_end_of_a_shared_target() -> None:
    staged, gap = Staged(105), checkpoint.IntentPiece(checkpoint.Gap(A), SequenceRange(11, 20), 0)
    settler = SharedTargetReconciler(judging.TargetErrors("FLEET"), staged, staged, staged, staged)
    opened = open_intent(CLOSED, [gap], 103, is_shared=True)
    assert await settler.settle(StoredState(opened, 1), None) == judging.Settled(105, 0)
