"""Compare a feed's archive with a target of ingress, row by row. Nothing in the target or in the archive is changed.

A row is recognized by its `Floe-Source`; the rows of a chain are in the target in their order. Of the rows that are
absent, each message that the target's own limits may have removed in that range explains one, the oldest first; the
others are missing.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from common.archive.columns import columns_of, messages, record_batch
from common.archive.scan import ChainArchive, OnProblem
from common.archive.segment import Message
from common.chain import Chain
from common.clock import NS_PER_S, parse_time
from common.errors import Stopped
from common.nats.api import LIMITS, StreamInfo, next_message
from common.nats.client import FloeClient
from common.nats.headers import split_provenance
from common.nats.kv import Bucket
from common.nats.pull import StartAt, scan
from common.sequences import SequenceRange
from common.settings.ingress import TargetSettings
from ingress.chains.sources import StartResolver
from ingress.checkpoint import Checkpoint, StateStore, TargetState
from ingress.parked import ParkedStore
from ingress.recovery.living import Batches, LivingComparison, Missing, Pieces, Tally, inside
from ingress.recovery.read_back import MAX_EXAMPLES, fingerprint
from ingress.recovery.retention_filter import limit_of
from ingress.rows.prepare import SubjectRule, origin_prefix, rule_of
from ingress.verdict.verdict import Finding, TargetErrors, judge, read_target

MAX_CACHED_SUBJECTS = 100_000
EARLIER_NS = 3600 * NS_PER_S  # a target is read from this long before the first row: clocks may differ


def as_stored(batches: Batches, map_subject: Callable[[bytes], bytes], *, is_relay: bool) -> Batches:
    """Yield archived rows with the subjects that they have in a target. Blocking.

    `is_relay`: earlier hops are left out, because they are mixed with those that Floe added.
    """
    subject_of = lru_cache(MAX_CACHED_SUBJECTS)(map_subject)
    for batch in batches:
        rows = columns_of(batch)
        headers = [split_provenance(each)[1] for each in rows.headers] if is_relay else rows.headers
        subjects = [*map(subject_of, rows.subjects)]
        yield record_batch(rows.sequences, rows.timestamps_ns, subjects, headers, rows.payloads)


def removable(config: Mapping[str, Any], oldest: int, others: int) -> int:
    """Return how many messages a stream of this configuration may have removed by itself, of those that it no longer
    holds: `oldest` before its first one, and `others` between two.

    Age, number and size remove the oldest only; with `discard: new`, number and size remove none.
    """
    of_oldest = ("max_age",) if config.get("discard") == "new" else ("max_age", "max_msgs", "max_bytes")
    of_others = "max_msgs_per_subject", "allow_msg_ttl", "allow_rollup_hdrs"
    if config.get("retention") != LIMITS or any(limit_of(config, key) for key in of_others):
        return oldest + others
    return oldest if any(limit_of(config, key) for key in of_oldest) else 0


class DeliveredRows:
    """The rows of a range of a chain in a stream that Floe has filled up to sequence `filled`.

    `newest`: the last row found, before the range if none was; `after`, `behind`: the stream's sequences of the nearest
    row before and after the range; `late`: the sequences of rows that came again, or after a later row.
    """

    def __init__(self, chain: Chain, rows: SequenceRange, filled: int) -> None:
        self.chain, self._origin, self._rows, self._filled = chain, origin_prefix(chain), rows, filled
        self.late, self._fingerprints = array("q"), array("Q")
        self.newest, self.after, self.behind = rows.first - 1, 0, filled + 1

    async def read(self, client: FloeClient, stream: str, start: StartAt, subject: str = "") -> Pieces:
        """Yield `rows_of` all messages from `start` on. No piece is empty. The caller must close the generator."""
        async with aclosing(scan(client, stream, start, until=self._filled, subject=subject)) as pieces:
            async for piece in pieces:
                if found := [*self.rows_of(piece)]:
                    yield found
                if self.behind <= self._filled:
                    return

    def rows_of(self, piece: Sequence[Message]) -> Iterator[Message]:
        """Yield the rows among the next messages of the stream, each with its sequence and time at the source."""
        for message in piece:
            is_near = self._origin in (message.headers or b"")
            its, headers = split_provenance(message.headers) if is_near else (None, None)
            if its is None or not its.line().startswith(self._origin):
                continue
            if its.sequence > self._rows.last:
                self.behind = message.sequence
                return
            row = Message(its.sequence, its.timestamp_ns, message.subject, headers, message.payload)
            if its.sequence > self.newest:
                self.newest = its.sequence
                yield row
            elif its.sequence < self._rows.first:
                self.after = message.sequence if self.newest < self._rows.first else self.after
            else:
                self.late.append(its.sequence)
                self._fingerprints.append(fingerprint(row))

    def altered(self, read: Callable[[SequenceRange], Batches]) -> Iterator[int]:
        """Yield the sequences of `late` rows that differ from the archived ones, which `read` returns. Blocking."""
        order = np.argsort(self.late)
        late, prints = np.asarray(self.late)[order], np.asarray(self._fingerprints)[order]
        for batch in read(SequenceRange(int(late[0]), int(late[-1]))) if len(late) else ():
            low, high = (np.searchsorted(late, batch.column("sequence"), side) for side in ("left", "right"))
            for row, place in zip(messages(batch.filter(low < high)), np.flatnonzero(low < high), strict=True):
                if any(prints[low[place] : high[place]] != np.uint64(fingerprint(row))):
                    yield row.sequence


class TargetComparison(LivingComparison):
    """A comparison with `target`. `states`: the bucket with the states of ingress; `parts`: as of the base."""

    _checkpoint: Checkpoint
    _apart = ("parked", "skipped", "out_of_order", "repeated", "waiting")

    def __init__(self, target: TargetSettings, states: Bucket, *parts: Any) -> None:
        super().__init__(*parts)
        self._target, self._states, self._name = target, states, target.stream

    async def _open(self, _chain: Chain) -> StreamInfo:
        """Return the target. Raises Stopped if it is not the stream that ingress has filled."""
        state = (await StateStore(self._states, self._name).load()).state
        reading = await read_target(self._client, self._name)
        if reading is None or (state is None and reading.last_sequence):
            raise TargetErrors(self._name).no_checkpoint(reading)
        state = state or TargetState(Checkpoint(0, reading.created))
        if (verdict := judge(state, reading)).finding is Finding.RECREATED:
            raise TargetErrors(self._name).error(verdict, [reading])
        info, self._checkpoint = await self._comparable(self._name), state.checkpoint
        self._filled = min(state.checkpoint.target_sequence, info.last_sequence)
        self._copy = f"target {self._name} {info.created}"
        return replace(info, first_sequence=1)  # its sequences are not those of the chain

    def _span(self, chain: Chain, first: int, end: int) -> tuple[int, int]:
        documents, positions = self._documents, self._checkpoint.positions
        source = self._target.source_of(chain.site, chain.feed)
        assert source is not None, "only targets with such a source are compared"
        behind = positions.get(chain, 1)
        if chain in positions:
            starts = StartResolver(self._name, self._store, documents, self._clock)
            first = starts.resolve(chain, source, first, None, positions) or behind
        else:
            self._notes.append(f"{chain}: ingress has not begun to deliver it to {self._name}")
        names, repeats = self._checkpoint.parked_names, self._checkpoint.parked
        is_again = repeats is not None and any(each in (None, chain) for each, _ in repeats.repeats)
        self._may_repeat = is_again or self._target.delivery != "exactly_once"
        entries = ParkedStore(documents.objects, documents.layout, self._name, names).list_entries().items()
        self._parked = [each.sequence for each, entry in entries if each.chain == chain and entry.is_passed]
        self._waiting = max(0, end - behind + 1)
        rule, document = rule_of(source, chain), documents.read_chain(chain)
        # A transform leaves subjects that it does not match as they are.
        self._rule, self._filter = rule, rule.pattern or "" if isinstance(rule, SubjectRule) else ""
        self._is_relay = document is not None and document.relay
        return first, behind - 1

    def _given_up(self, chain: Chain, first: int) -> list[SequenceRange]:
        """Return also the ranges that the target skipped, and those of segments in quarantine."""
        documents, layout = self._documents, self._documents.layout
        prefix, found = layout.quarantine_prefix(), super()._given_up(chain, first)
        found += [each.range for each in documents.skipped_gaps(self._name, chain, position=first)]
        for info in documents.objects.list(prefix):
            name = layout.parse_segment(layout.root + info.key[len(prefix) :].partition("/")[2])
            found += [name.coverage] if name is not None and name.chain == chain else []
        return found

    def _expected(self, archive: ChainArchive, on_problem: OnProblem, rows: SequenceRange) -> Batches:
        return as_stored(super()._expected(archive, on_problem, rows), self._rule.apply, is_relay=self._is_relay)

    def _pieces(self, chain: Chain, _stream: StreamInfo, _server: str, rows: SequenceRange, first: Any) -> Pieces:
        self._arrivals = DeliveredRows(chain, rows, self._filled)
        self._begin = 0 if first is None else first.column("timestamp_ns")[0].as_py()
        start = StartAt(time_ns=self._begin - EARLIER_NS) if rows.first > 1 else StartAt(1)
        return self._arrivals.read(self._client, self._name, start, self._filter)

    async def _missing(self, stream: str, rows: SequenceRange, end: int, tally: Tally) -> Missing:
        arrivals, found = self._arrivals, np.asarray(tally.absent, np.int64)
        read = partial(self._expected, ChainArchive(self._store, arrivals.chain), lambda _: None)
        altered = await self._threads.run(list, arrivals.altered(read))
        tally.found, tally.altered = tally.found + len(altered), tally.altered + len(altered)
        tally.examples += [f"{each}: altered" for each in altered[:MAX_EXAMPLES]]
        is_parked = np.isin(found, self._parked)
        is_late = np.isin(found, arrivals.late) & ~is_parked
        is_skipped = inside(found, self._excused) & ~is_parked & ~is_late
        rest = found[~(is_late | is_parked | is_skipped)]
        counts = {"parked": int(is_parked.sum()), "skipped": int(is_skipped.sum()), "out_of_order": int(is_late.sum())}
        counts["repeated"] = int((~np.isin(arrivals.late, self._parked)).sum()) - counts["out_of_order"]
        counts["waiting"] = self._waiting if rows.last == end else 0
        if not len(rest):
            return (), counts
        info, deleted = await self._read_deleted(stream)
        first = info.first_sequence if info.messages else info.last_sequence + 1
        after, behind = arrivals.after, arrivals.behind
        if info.messages and parse_time(info.first_timestamp) < self._begin:
            after = max(after, first - 1)  # messages removed before the first one are older than these rows
        oldest, others = max(0, min(behind, first) - 1 - after), sum(after < each < behind for each in deleted)
        missing = rest[(gone := removable(info.config, oldest, others)) :].tolist()
        is_bare = len(rest) > oldest + others and arrivals.newest < rows.first and info.messages and self._filter
        if is_bare and await next_message(self._client, stream, 1, self._filter) is None:
            raise Stopped(
                f"target {stream}: expected the rows on {self._filter}, found no message there",
                hint="it was filled with other settings of the source: compare with those",
                code="E-COMPARE-TARGET",
            )
        if missing and oldest + others > gone:
            self._notes.append(f"{stream}: rows may be missing because somebody purged or deleted them: no limit did")
        return missing, counts
