"""Mistakes of ingress: intents, checkpoints, publishing, rows."""

from dataclasses import replace
from typing import Any

import ingress.chains.locate
import ingress.chains.plan
import ingress.delivery
import ingress.publishers.batches
import ingress.publishers.publisher
import ingress.rows.prepare
import ingress.verdict.settle
from common.errors import OutcomeUnknown
from common.nats.headers import Provenance
from common.nats.kv import KvDocument
from common.nats.protocol import WRONG_LAST_SEQUENCE_CODES, PendingRequests
from common.sequences import cover
from ingress.checkpoint import Intent, StateStore, StoredState
from ingress.delivery import Delivery
from ingress.publishers.batches import FastPublisher
from ingress.publishers.publisher import Replies
from tests.sim.mutants.registry import change, changing, mutant
from tests.sim.streams import Stream


@mutant
def intent_thrown_away() -> None:
    """A takeover begins again behind the checkpoint, though an intent is open."""

    @changing(Delivery, "_adopt")
    def forgetful(adopt: Any, self: Delivery, stored: StoredState) -> None:
        state = stored.state
        adopt(self, stored if state is None else StoredState(replace(state, intent=None), stored.revision))


@mutant
def intent_taken_for_done() -> None:
    """A takeover counts the rows of an open intent as stored."""

    async def done(_self: Delivery, intent: Intent) -> int:
        return intent.base

    change(Delivery, "_publish_rest", lambda _: done)


@mutant
def intent_not_stored() -> None:
    """Rows are published before their intent is durable."""

    @changing(StateStore, "save")
    async def lazy(save: Any, self: StateStore, state: Any, revision: int) -> StoredState | None:
        if state.intent is not None:
            return StoredState(state, revision)
        return await save(self, state, revision)  # type: ignore[no-any-return]


@mutant
def state_written_unconditionally() -> None:
    """The state is replaced even if another write came in between."""

    async def overwrite(self: KvDocument[Any], body: bytes, _revision: int) -> int | None:
        return await self._bucket.put(self.key, body)

    change(KvDocument, "_write", lambda _: overwrite)


@mutant
def lost_save_taken_for_done() -> None:
    """A save with a lost answer counts as done, without reading it back."""

    async def trusting(self: KvDocument[Any], value: Any, revision: int) -> int | None:
        try:
            return await self._write(self._codec.encode(value), revision)
        except OutcomeUnknown:
            return revision + 1

    change(KvDocument, "update", lambda _: trusting)


@mutant
def position_one_too_far() -> None:
    """A closed intent moves the positions of its chains one message too far."""

    @changing(ingress.delivery, "close_intent")
    def skipping(advanced: Any, state: Any, base: int | None = None) -> Any:
        closed = advanced(state, base)
        positions = {chain: at + 1 for chain, at in closed.checkpoint.positions.items()}
        return replace(closed, checkpoint=replace(closed.checkpoint, positions=positions))


@mutant
def rows_sent_again_after_a_doubt() -> None:
    """After an unclear outcome all rows are sent again from the first, behind the messages of the target."""

    @changing(ingress.verdict.settle.TargetReconciler, "settle")
    async def doubtful(settle: Any, self: Any, known: StoredState, rows: Any) -> Any:
        settled = await settle(self, known, rows)
        return replace(settled, base=settled.base + settled.stored, stored=0) if rows is not None else settled


@mutant
def one_more_counted_as_stored() -> None:
    """After an unclear outcome one row more counts as stored than the target holds."""

    @changing(ingress.verdict.settle.TargetReconciler, "settle")
    async def generous(settle: Any, self: Any, known: StoredState, rows: Any) -> Any:
        settled = await settle(self, known, rows)
        more = rows is not None and settled.stored < rows.count
        return replace(settled, base=settled.base - 1, stored=settled.stored + 1) if more else settled


@mutant
def foreign_messages_counted_as_rows() -> None:
    """In a shared target, every message behind the base counts as a row of the intent."""

    @changing(ingress.verdict.settle.SharedTargetReconciler, "settle")
    async def trusting(settle: Any, self: Any, known: StoredState, rows: Any) -> Any:
        settled, intent = await settle(self, known, rows), known.existing.intent
        if intent is None:
            return settled
        last = settled.base + settled.stored
        return replace(settled, base=intent.base, stored=min(intent.count, last - intent.base))


@mutant
def expected_sequence_left_out() -> None:
    """Rows are published without their expected last sequence."""

    @changing(Stream, "check")
    def lax(check: Any, self: Stream, subject: bytes, headers: Any, last: int) -> None:
        check(self, subject, {k: v for k, v in headers.items() if k != b"nats-expected-last-sequence"}, last)


@mutant
def silence_taken_for_an_acknowledgement() -> None:
    """A missing acknowledgement counts as a positive one."""

    @changing(FastPublisher, "_end")
    @changing(Replies, "wait_for_ack")
    async def trusting(judged: Any, *more: Any) -> Any:
        unclear = await judged(*more)
        return None if unclear is not None and not unclear.err_code else unclear


@mutant
def refusal_taken_for_done() -> None:
    """A refusal because of another last sequence counts as stored already."""

    def judging(refusal: Any) -> Any:
        def trusting(error: Any) -> Any:
            unclear = refusal(error)
            return None if unclear.err_code in WRONG_LAST_SEQUENCE_CODES else unclear

        return trusting

    for module in (ingress.publishers.publisher, ingress.publishers.batches):
        change(module, "refused", judging)


@mutant
def answers_mixed_up() -> None:
    """Two requests under way have the same inbox."""

    @changing(PendingRequests, "add")
    def alike(_open: Any, self: PendingRequests, subject: bytes, answer: Any) -> bytes:
        self._waiting[b"1"] = (subject, answer)
        return b"1"


@mutant
def headers_left_to_act() -> None:
    """Headers of a copy act at the target as they did at the source."""

    @changing(ingress.rows.prepare, "escape_lines")
    def bare(_escaped: Any, block: bytes | None, *_: Any, **__: Any) -> bytes:
        return b"" if block is None else b"".join(e + b"\r\n" for e in block.split(b"\r\n")[1:] if e)


@mutant
def repeated_headers_dropped() -> None:
    """Of a repeated header only the first line comes back."""

    @changing(ingress.rows.prepare, "escape_lines")
    def dropping(escaped: Any, block: bytes | None, *more: Any, **named: Any) -> bytes:
        lines = escaped(block, *more, **named).split(b"\r\n")[:-1]
        return b"".join(each + b"\r\n" for each in dict.fromkeys(lines))


@mutant
def time_in_seconds() -> None:
    """The time of a message comes back without its nanoseconds."""

    @changing(Provenance, "line")
    def rounded(line: Any, self: Provenance) -> bytes:
        whole: bytes = line(replace(self, timestamp_ns=self.timestamp_ns // 1_000_000_000 * 1_000_000_000))
        return whole


@mutant
def cover_skips_a_hole() -> None:
    """A reader continues behind a hole as if nothing were missing."""

    change(ingress.chains.plan, "leading_stretches", lambda _: cover)


@mutant
def rows_of_former_positions_kept() -> None:
    """A process that finds another state continues with its prepared rows."""

    @changing(Delivery, "_adopt")
    def stubborn(_adopt: Any, self: Delivery, stored: StoredState) -> None:
        self._stored = stored


@mutant
def segment_read_from_its_beginning() -> None:
    """All rows of a segment that begins below the position are taken."""

    def reading(planning: Any) -> Any:
        def whole(*more: Any) -> Any:
            plan = planning(*more)
            return replace(plan, stretches=tuple(replace(each, rows=each.segment.coverage) for each in plan.stretches))

        return whole

    for module in (ingress.chains.plan, ingress.chains.locate):
        change(module, "plan_chain", reading)
