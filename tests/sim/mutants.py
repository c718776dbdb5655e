"""Mistakes in the product that the worlds must find: each is one line that breaks one rule of the protocols.

They are made in the process of a simulation only. A mutant that no world finds means that an actor or an auditor is
missing, or that another check covers the line: `NOT_FOUND` names those, each with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import compaction.merge
import compaction.retention
import compaction.run
import egress.consumers
import egress.reader
import ingress.chains.search
import ingress.delivery
import ingress.publishers.fast
import ingress.publishers.publisher
import ingress.rows.prepare
import ingress.verdict.settle
from common.errors import OutcomeUnknown
from common.jetstream.api import delete_consumer
from common.jetstream.headers import Provenance
from common.jetstream.kv import KeyValue
from common.jetstream.lease import Lease
from common.jetstream.requests import WRONG_LAST_SEQUENCE, Requests
from common.objects.port import ObjectInfo
from common.segments.documents import ChainStore
from common.segments.store import SegmentStore
from common.sequences import MAX_SEQUENCE, SequenceRange, cover
from compaction.retention import Needs
from egress.acks import Acknowledging
from egress.archive import Archive
from egress.reader import Reader
from egress.uploader import Uploader
from ingress.checkpoint import Intent
from ingress.checkpoint_store import StateStore, Stored
from ingress.delivery import Delivery
from ingress.publishers.publisher import Replies
from tests.sim.streams import Stream

Change = Callable[[], None]
MUTANTS: dict[str, Change] = {}

#: Mutants that no world of the first 300 finds, and why.
NOT_FOUND: dict[str, str] = {
    "acknowledgement_of_any_batch": "each batch has an inbox of its own, so no other answer reaches it",
    "lease_never_ends": "rightly: leases save work and guard nothing (I9)",
}


def mutant(change: Change) -> Change:
    """List the mutant by its name; the docstring says which rule it breaks."""
    MUTANTS[change.__name__] = change
    return change


def apply(name: str) -> None:
    """Make the mistake `name` in this process. Raises KeyError where there is none of that name."""
    MUTANTS[name]()


def change(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put what `make` makes of the attribute in its place."""
    setattr(owner, name, make(getattr(owner, name)))


# Ingress: intent and checkpoint


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


# Ingress: publishing


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

    change(Replies, "judged", judging)


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
def acknowledgement_of_any_batch() -> None:
    """Whatever acknowledges something acknowledges the batch."""

    def judging(judge: Any) -> Any:
        def lax(payload: bytes, headers: bytes | None, expected: Any) -> Any:
            return None if b'"seq"' in payload and b'"error"' not in payload else judge(payload, headers, expected)

        return lax

    for module in (ingress.publishers.publisher, ingress.publishers.fast):
        change(module, "judge_ack", judging)


@mutant
def answers_mixed_up() -> None:
    """Two requests under way have the same inbox."""

    def opening(_open: Any) -> Any:
        def alike(self: Requests, subject: bytes, answer: Any) -> bytes:
            self._waiting[b"1"] = (subject, answer)
            return b"1"

        return alike

    change(Requests, "open", opening)


# Ingress: rows


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

    change(ingress.chains.search, "leading", lambda _: cover)


# Egress


@mutant
def acknowledged_before_the_put() -> None:
    """The source may drop messages before their segment is durable."""

    def putting(put: Any) -> Any:
        async def early(self: Uploader, spooled: Any) -> None:
            await self._persist(lambda: self._reader.acknowledge(spooled.footer.coverage.last))
            await put(self, spooled)

        return early

    change(Uploader, "put", putting)


@mutant
def acknowledged_too_far() -> None:
    """With a segment everything is acknowledged that was received."""

    def upto(acknowledge: Any) -> Any:
        async def everything(self: Acknowledging, _last: int) -> None:
            await acknowledge(self, MAX_SEQUENCE)

        return everything

    change(Acknowledging, "upto", upto)


@mutant
def mark_before_the_put() -> None:
    """The mark says that a segment is listed before it is durable."""

    def putting(put: Any) -> Any:
        async def early(self: Archive, spooled: Any) -> Any:
            await self._marks.raise_to(self.chain, spooled.footer.coverage.last)
            return await put(self, spooled)

        return early

    change(Archive, "put", putting)


@mutant
def lost_put_taken_for_done() -> None:
    """A put whose answer was lost counts as done, without reading back."""

    def trusting(self: SegmentStore, ref: Any, body: Any, metadata: Any, *, point: str) -> ObjectInfo:
        with suppress(OutcomeUnknown):
            self.objects.put_if_absent(ref.key, body, sha256=metadata["sha256"], metadata=metadata)
        return ObjectInfo(ref.key, ref.size, 0.0, "")

    change(SegmentStore, "put_verified", lambda _: trusting)


@mutant
def gap_in_deliveries_ignored() -> None:
    """Messages that the consumer sent and that never arrived count as received."""

    def parsing(parse: Any) -> Any:
        def lax(replies: Any, consumer: bytes, expected: int) -> Any:
            acks = parse(replies, consumer, expected)
            return replace(acks, contiguous=len(acks.sequences))

        return lax

    change(egress.reader, "parse_acks", parsing)


@mutant
def heartbeat_believed() -> None:
    """What an idle heartbeat has passed counts as received, whatever is still under way."""

    def beating(_on_heartbeat: Any) -> Any:
        def trusting(self: Reader, heartbeat: Any) -> None:
            self._target.passed(heartbeat.sequence)

        return trusting

    change(Reader, "_on_heartbeat", beating)


@mutant
def durable_deleted_first() -> None:
    """An interest stream has no durable of Floe while a session replaces its own."""

    def taking(take: Any) -> Any:
        async def hasty(client: Any, wanted: Any) -> Any:
            if wanted.is_durable:
                for name in await egress.consumers.ours(client, wanted):
                    await delete_consumer(client, wanted.stream, name)
            return await take(client, wanted)

        return hasty

    change(egress.reader, "take", taking)


@mutant
def redelivered_written_again() -> None:
    """What comes again below the position is handed on as if it were new."""

    def making(init: Any) -> Any:
        def careless(self: Reader, *more: Any, **named: Any) -> None:
            init(self, *more, **{**named, "first": 1})
            self._wanted = replace(self._wanted, first=named["first"])

        return careless

    change(Reader, "__init__", making)


@mutant
def read_on_behind_the_source() -> None:
    """A session begins at the end of the source, not behind the archive."""

    def filtering(ephemeral: Any) -> Any:
        def newest(wanted: Any) -> Any:
            return {k: v for k, v in ephemeral(wanted).items() if k != "opt_start_seq"} | {"deliver_policy": "new"}

        return newest

    change(egress.consumers, "ephemeral", filtering)


# Leases and keys


@mutant
def condition_of_a_key_left_out() -> None:
    """A key is written whatever its revision is."""

    def writing(write: Any) -> Any:
        async def unconditional(self: KeyValue, key: str, value: bytes, expected: int | None, *more: Any) -> Any:
            return await write(self, key, value, None, *more)

        return unconditional

    change(KeyValue, "_write", writing)


@mutant
def lease_never_ends() -> None:
    """Whoever once held a lease believes for ever that it is theirs (I9: it guards nothing)."""
    change(Lease, "is_usable", lambda _: lambda _self: True)


# Compaction and retention


@mutant
def merge_loses_a_row() -> None:
    """A merge leaves out the last row of a batch where there are several."""

    def uniting(union: Any) -> Any:
        def losing(segments: Any, open_segment: Any) -> Any:
            for batch in union(segments, open_segment):
                yield batch.slice(0, batch.num_rows - 1) if batch.num_rows > 1 else batch

        return losing

    change(compaction.merge, "union", uniting)


@mutant
def inputs_deleted_before_the_output() -> None:
    """The inputs of a merge go before what replaces them is durable."""

    def merging(merge: Any) -> Any:
        def hasty(store: SegmentStore, output: Any) -> Any:
            for ref in output.inputs[:-1]:
                store.delete(ref)
            return merge(store, output)

        return hasty

    change(compaction.run, "merge", merging)


@mutant
def retention_without_needs() -> None:
    """What targets still need is deleted by age."""
    change(compaction.retention, "read_needs", lambda _: lambda _chains, _sources: Needs())


@mutant
def coverage_of_a_merge_too_wide() -> None:
    """A merged segment accounts for sequences that its inputs do not."""

    def covering(merged_footer: Any) -> Any:
        def wide(output: Any, *more: Any) -> Any:
            footer = merged_footer(output, *more)
            wider = SequenceRange(footer.coverage.first, footer.coverage.last + 1)
            return replace(footer, coverage=wider)

        return wide

    change(compaction.merge, "merged_footer", covering)


@mutant
def floor_read_as_the_end() -> None:
    """The floor of a chain is raised one message too far."""

    def raising(raise_floor: Any) -> Any:
        def high(self: ChainStore, chain: Any, floor: int) -> Any:
            return raise_floor(self, chain, floor + 1)

        return high

    change(ChainStore, "raise_floor", raising)
