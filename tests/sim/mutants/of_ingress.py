"""Mistakes of ingress: intents, checkpoints, publishing, rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ingress.chains.plan
import ingress.delivery
import ingress.publishers.fast
import ingress.publishers.publisher
import ingress.rows.prepare
import ingress.verdict.settle
from common.jetstream.headers import Provenance
from common.jetstream.requests import WRONG_LAST_SEQUENCE, Requests
from common.sequences import cover
from ingress.checkpoint import Intent
from ingress.checkpoint_store import StateStore, Stored
from ingress.delivery import Delivery
from ingress.publishers.fast import FastPublisher
from ingress.publishers.publisher import Replies
from tests.sim.mutants.registry import change, mutant
from tests.sim.streams import Stream


@mutant
def intent_thrown_away() -> None:
    """Who takes over begins anew behind the checkpoint, though an intent is open."""

    def adopting(adopt: Any) -> Any:
        def forgetful(self: Delivery, stored: Stored) -> None:
            state = stored.state
            adopt(self, stored if state is None else Stored(replace(state, intent=None), stored.revision))

        return forgetful

    change(Delivery, "_adopt", adopting)


@mutant
def intent_taken_for_done() -> None:
    """Who takes over counts the rows of an open intent as stored."""

    async def done(_self: Delivery, intent: Intent) -> int:
        return intent.base

    change(Delivery, "_publish_rest", lambda _: done)


@mutant
def intent_not_stored() -> None:
    """Rows are published before their intent is durable."""

    def saving(save: Any) -> Any:
        async def lazy(self: StateStore, state: Any, revision: int) -> Stored | None:
            if state.intent is not None:
                return Stored(state, revision)
            return await save(self, state, revision)  # type: ignore[no-any-return]

        return lazy

    change(StateStore, "save", saving)


@mutant
def state_written_unconditionally() -> None:
    """The state is replaced whatever is stored meanwhile."""

    async def overwrite(self: StateStore, value: bytes, _revision: int) -> int | None:
        return await self._bucket.put(self._key, value)  # type: ignore[attr-defined,no-any-return]

    change(StateStore, "_write", lambda _: overwrite)


@mutant
def lost_save_taken_for_done() -> None:
    """A save whose answer was lost counts as done, without reading."""

    async def trusting(_self: StateStore, state: Any, _value: bytes, revision: int) -> Stored | None:
        return Stored(state, revision + 1)

    change(StateStore, "_settle", lambda _: trusting)


@mutant
def position_one_too_far() -> None:
    """A closed intent moves the positions of its chains one message too far."""

    def advancing(advanced: Any) -> Any:
        def skipping(state: Any, base: int | None = None) -> Any:
            closed = advanced(state, base)
            positions = {chain: at + 1 for chain, at in closed.checkpoint.positions.items()}
            return replace(closed, checkpoint=replace(closed.checkpoint, positions=positions))

        return skipping

    change(ingress.delivery, "close_intent", advancing)


@mutant
def rows_sent_again_after_a_doubt() -> None:
    """After an unclear outcome everything is sent again from the beginning, behind what the target holds."""

    def settling(settle: Any) -> Any:
        async def doubtful(self: Any, known: Stored, rows: Any) -> Any:
            settled = await settle(self, known, rows)
            return replace(settled, base=settled.base + settled.stored, stored=0) if rows is not None else settled

        return doubtful

    change(ingress.verdict.settle.Reconciler, "settle", settling)


@mutant
def one_more_counted_as_stored() -> None:
    """After an unclear outcome one row more counts as stored than the target holds."""

    def settling(settle: Any) -> Any:
        async def generous(self: Any, known: Stored, rows: Any) -> Any:
            settled = await settle(self, known, rows)
            more = rows is not None and settled.stored < rows.count
            return replace(settled, base=settled.base - 1, stored=settled.stored + 1) if more else settled

        return generous

    change(ingress.verdict.settle.Reconciler, "settle", settling)


@mutant
def foreign_messages_counted_as_rows() -> None:
    """In a target that others share, whatever stands behind the base counts as rows of the intent."""

    def settling(settle: Any) -> Any:
        async def trusting(self: Any, known: Stored, rows: Any) -> Any:
            settled, intent = await settle(self, known, rows), known.there.intent
            if intent is None:
                return settled
            last = settled.base + settled.stored
            return replace(settled, base=intent.base, stored=min(intent.count, last - intent.base))

        return trusting

    change(ingress.verdict.settle.SharedSettler, "settle", settling)


@mutant
def expected_sequence_left_out() -> None:
    """Rows go out without the sequence that they are expected behind."""

    def checking(check: Any) -> Any:
        def lax(self: Stream, subject: bytes, headers: Any, last: int) -> None:
            check(self, subject, {k: v for k, v in headers.items() if k != b"nats-expected-last-sequence"}, last)

        return lax

    change(Stream, "check", checking)


@mutant
def silence_taken_for_an_acknowledgement() -> None:
    """An acknowledgement that never came counts as one."""

    def judging(judged: Any) -> Any:
        async def trusting(self: Replies, reply: Any, expected: Any, timeout: float) -> Any:
            unclear = await judged(self, reply, expected, timeout)
            return None if unclear is not None and not unclear.err_code else unclear

        return trusting

    def ending(end: Any) -> Any:
        async def trusting(self: FastPublisher, batch: Any) -> Any:
            unclear = await end(self, batch)
            return None if unclear is not None and not unclear.err_code else unclear

        return trusting

    change(Replies, "judged", judging)
    change(FastPublisher, "_end", ending)


@mutant
def refusal_taken_for_done() -> None:
    """A refusal because of another last sequence counts as stored already."""

    def judging(refusal: Any) -> Any:
        def trusting(error: Any) -> Any:
            unclear = refusal(error)
            return None if unclear.err_code in WRONG_LAST_SEQUENCE else unclear

        return trusting

    for module in (ingress.publishers.publisher, ingress.publishers.fast):
        change(module, "refusal", judging)


@mutant
def answers_mixed_up() -> None:
    """Two requests under way have the same inbox."""

    def opening(_open: Any) -> Any:
        def alike(self: Requests, subject: bytes, answer: Any) -> bytes:
            self._waiting[b"1"] = (subject, answer)
            return b"1"

        return alike

    change(Requests, "open", opening)


@mutant
def headers_left_to_act() -> None:
    """Headers of a copy act at the target as they did at the source."""

    def escaping(_escaped: Any) -> Any:
        def bare(block: bytes | None, *_: Any, **__: Any) -> bytes:
            return b"" if block is None else b"".join(e + b"\r\n" for e in block.split(b"\r\n")[1:] if e)

        return bare

    change(ingress.rows.prepare, "escaped_lines", escaping)


@mutant
def repeated_headers_dropped() -> None:
    """Of a header that is repeated only the first comes back."""

    def escaping(escaped: Any) -> Any:
        def dropping(block: bytes | None, *more: Any, **named: Any) -> bytes:
            lines = escaped(block, *more, **named).split(b"\r\n")[:-1]
            return b"".join(each + b"\r\n" for each in dict.fromkeys(lines))

        return dropping

    change(ingress.rows.prepare, "escaped_lines", escaping)


@mutant
def time_in_seconds() -> None:
    """The time of a message comes back without its nanoseconds."""

    def writing(line: Any) -> Any:
        def rounded(self: Provenance) -> bytes:
            whole: bytes = line(replace(self, timestamp_ns=self.timestamp_ns // 1_000_000_000 * 1_000_000_000))
            return whole

        return rounded

    change(Provenance, "line", writing)


@mutant
def cover_skips_a_hole() -> None:
    """A reader goes on behind a hole as if nothing were missing."""

    change(ingress.chains.plan, "leading", lambda _: cover)


@mutant
def rows_of_former_positions_kept() -> None:
    """Who finds another state goes on with the rows that it had made ready before."""

    def adopting(_adopt: Any) -> Any:
        def stubborn(self: Delivery, stored: Stored) -> None:
            self._known = stored

        return stubborn

    change(Delivery, "_adopt", adopting)


@mutant
def segment_read_from_its_beginning() -> None:
    """Of a segment that begins below the position all rows are taken."""

    def reading(leading: Any) -> Any:
        def whole(*more: Any) -> Any:
            return [replace(each, rows=each.segment.coverage) for each in leading(*more)]

        return whole

    change(ingress.chains.plan, "leading", reading)
