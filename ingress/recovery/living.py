"""Compare a feed's archive with the living stream, row by row. Nothing in the stream or in the archive is changed.

The stream is read in pieces; a piece and its archived rows are compared by one digest, and row by row if that differs.
An archived row that the stream does not hold is removed if the stream's own state says so: it is before the stream's
first sequence, or among the deleted ones. Otherwise it is missing.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from common.archive.catalog import select_chains
from common.archive.columns import batch_of, messages
from common.archive.documents import ChainStore, ComparedTo
from common.archive.scan import ChainArchive, Hole, Problem, Scan
from common.archive.segment import Message
from common.archive.store import SegmentStore
from common.chain import Chain
from common.clock import NS_PER_S, Clock, format_time
from common.errors import DataError, Stopped
from common.exits import EXIT_DIFFERENCES
from common.nats.api import StreamInfo, check_token, deleted_sequences, query, ready_stream_info
from common.nats.client import FloeClient
from common.nats.pull import StartAt, scan
from common.sequences import MAX_SEQUENCE, SequenceRange
from common.service.process import ThreadPool
from common.service.progress import Progress, format_share
from common.tasks import Stop
from ingress.recovery.compare import MAX_EXAMPLES, Differences, fingerprint
from ingress.recovery.history import selects_rows
from ingress.recovery.read_back import digest_block, normalize

#: Sequences that are compared and recorded at a time; memory is 8 bytes for each that the stream does not hold.
RECORDED_SEQUENCES = 5_000_000
MODES = ("source", "each-replica")


@dataclass(frozen=True, slots=True)
class CompareRequest:
    """A comparison to make. `incarnation`, `partition` None: the newest, all of them. `mode`: one of MODES.

    `first`, `last`: inclusive sequences, None for all. `since_last`: go on after the sequences that an earlier
    comparison of this mode found equal.
    """

    site: str
    feed: str
    incarnation: int | None = None
    partition: int | None = None
    mode: str = "source"
    first: int | None = None
    last: int | None = None
    since_last: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """The result for one chain on one copy of the stream. `server`: the replica that was read, empty for any.

    `differences`: `lost` are the missing rows, `unexpected` those that are in the stream and not archived. `removed`:
    archived rows that the stream gave up: limits, deletion, acknowledgement. `left_out`: rows that the feed's sampling
    or `max_age` left out. `problems`: holes and damage of the archive, as text.
    """

    chain: Chain
    server: str
    rows: SequenceRange
    differences: Differences
    removed: int = 0
    left_out: int = 0
    problems: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        return self.differences.is_empty and not self.problems

    def plus(self, other: Copy) -> Copy:
        """Return the result of both; `other` is of the rows that follow."""
        return replace(
            self,
            rows=SequenceRange(self.rows.first, other.rows.last),
            differences=self.differences.plus(other.differences),
            removed=self.removed + other.removed,
            left_out=self.left_out + other.left_out,
            problems=(*self.problems, *other.problems)[:MAX_EXAMPLES],
        )

    def as_json(self) -> dict[str, Any]:
        found = self.differences
        return {
            **self.chain.log_context(),
            "server": self.server,
            "first": self.rows.first,
            "last": self.rows.last,
            "same": found.expected - self.removed - found.lost - found.altered,
            "missing": found.lost,
            "altered": found.altered,
            "not_archived": found.unexpected,
            "removed": self.removed,
            "left_out": self.left_out,
            "examples": list(found.examples),
            "problems": list(self.problems),
        }

    def lines(self) -> Iterator[str]:
        found, values = self.differences, self.as_json()
        counts = ", ".join(f"{values[name]:,} {name.replace('_', ' ')}" for name in (*_COUNTS, "removed", "left_out"))
        on = f" on {self.server}" if self.server else ""
        word = "as archived" if self.is_same else "NOT as archived"
        yield f"{self.chain}{on}: {word}: {self.rows}: {values['same']:,} the same, {counts}"
        yield from (f"  {each}" for each in (*found.examples, *self.problems))


_COUNTS = ("missing", "altered", "not_archived")


@dataclass(frozen=True, slots=True)
class CompareReport:
    """The results of all chains and copies. `notes`: remarks for an operator. `finished`: False if it was stopped."""

    stream: str
    copies: tuple[Copy, ...]
    notes: tuple[str, ...]
    finished: bool = True

    @property
    def exit_code(self) -> int:
        return 0 if all(each.is_same for each in self.copies) else EXIT_DIFFERENCES

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": self.exit_code == 0,
            "finished": self.finished,
            "stream": self.stream,
            "copies": [each.as_json() for each in self.copies],
            "notes": list(self.notes),
        }

    def lines(self) -> Iterator[str]:
        if not self.copies:
            yield f"{self.stream}: nothing to compare"
        yield from (line for each in self.copies for line in each.lines())
        if not self.finished:
            yield "stopped before its end: --since-last continues"
        yield from (f"note: {note}" for note in self.notes)


class _ArchivedRows:
    """The archived rows of a range, taken in order in slices up to a sequence. Blocking."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches, self._held = batches, None

    _held: pa.RecordBatch | None

    def up_to(self, last: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows up to `last` that were not taken yet, none of them empty."""
        while (batch := self._held or next(self._batches, None)) is not None:
            count = int(np.searchsorted(batch.column("sequence").to_numpy(), last, side="right"))
            self._held = batch.slice(count) if count < batch.num_rows else None
            if count:
                yield batch.slice(0, count)
            if self._held is not None:
                return


class Tally:
    """The comparison of one range of a chain with one copy of the stream: pieces of it, in order. Blocking.

    `absent`: archived sequences that are not in the stream. `extra`: sequences in the stream that are not archived.
    """

    def __init__(self, archived: Iterator[pa.RecordBatch]) -> None:
        self._archived = _ArchivedRows(archived)
        self.absent, self.extra = array("q"), array("q")
        self.expected = self.found = self.altered = 0
        self.examples: list[str] = []

    def add(self, piece: Sequence[Message], last: int) -> None:
        """Compare the stream's messages after the previous piece and up to `last` with the archived rows there."""
        start = 0
        for batch in self._archived.up_to(last):
            newest = batch.column("sequence")[-1].as_py()
            end = bisect_right(piece, newest, lo=start, key=_sequence)
            self._compare(batch, piece[start:end])
            start = end
        self._add_extra(piece[start:])

    def _compare(self, batch: pa.RecordBatch, rows: Sequence[Message]) -> None:
        self.expected += batch.num_rows
        self.found += len(rows)
        if len(rows) == batch.num_rows and digest_block([batch_of(*rows)]) == digest_block([batch]):
            return
        held = {message.sequence: message for message in rows}
        for archived in messages(batch):
            if (message := held.pop(archived.sequence, None)) is None:
                self.absent.append(archived.sequence)
            elif fingerprint(normalize(archived)) != fingerprint(normalize(message)):
                self.altered += 1
                self.examples.append(f"{archived.sequence}: altered")
                del self.examples[MAX_EXAMPLES:]
        self.extra.extend(held)

    def _add_extra(self, rows: Sequence[Message]) -> None:
        self.found += len(rows)
        self.extra.extend(message.sequence for message in rows)


def _sequence(message: Message) -> int:
    return message.sequence


def reached_after(reached: int, found: Copy) -> int:
    """Return the last sequence up to which everything was found equal. `reached`: that of before `found`.

    It falls where a difference is found below it, and stays where rows between the two were not compared.
    """
    if found.rows.first > reached + 1:
        return reached
    return max(reached, found.rows.last) if found.is_same else found.rows.first - 1


def missing_of(absent: Sequence[int], info: StreamInfo, deleted: Iterable[int]) -> list[int]:
    """Return the sequences of `absent` that the stream must hold by its state."""
    first = info.first_sequence if info.messages else info.last_sequence + 1
    found = np.asarray(absent, np.int64)
    kept = found[(found >= first) & ~np.isin(found, np.asarray([*deleted], np.int64))]
    return [int(each) for each in kept]


class LivingComparison:
    """A comparison of the chains of a feed with their stream."""

    def __init__(
        self,
        client: FloeClient,
        store: SegmentStore,
        documents: ChainStore,
        threads: ThreadPool,
        clock: Clock,
        progress: Progress,
    ) -> None:
        self._client, self._threads, self._clock, self._progress = client, threads, clock, progress
        self._store, self._documents = store, documents
        self._notes: list[str] = []

    async def run(self, request: CompareRequest, stop: Stop) -> CompareReport:
        """Compare until the end, or until `stop` is set.

        Raises UsageError for an unknown chain, Stopped for a stream that cannot be compared, DataError, and the errors
        of the servers.
        """
        chains = await self._threads.run(self._chains, request)
        document = await self._threads.run(self._documents.read_stream, chains[0])
        if document is None:
            raise DataError(f"{chains[0]}: expected stream.json, found none", code="E-STATE-JSON")
        name = str(document.config["name"])
        info = await self._comparable(name)
        if info.created != document.created:
            self._notes.append(f"the stream was created at {info.created}, the archived one at {document.created}")
        copies = list[Copy]()
        for server in await self._servers(info, request.mode):
            found = [await self._compare_chain(chain, info, server, request, stop) for chain in chains]
            copies += [each for each in found if each is not None]
        return CompareReport(name, tuple(copies), tuple(self._notes), finished=not stop.is_set)

    def _chains(self, request: CompareRequest) -> list[Chain]:
        parts = (request.site, request.feed, request.incarnation, request.partition)
        found = select_chains(self._documents, "/".join(str(each) for each in parts if each is not None))
        return [each for each in found if each.incarnation == found[-1].incarnation]

    async def _comparable(self, name: str) -> StreamInfo:
        info = await ready_stream_info(self._client, name)
        if info is None:
            raise Stopped(
                f"stream {name}: expected it on this server, found none",
                hint="if it was lost, floe restore brings it back",
                code="E-SOURCE-GONE",
            )
        if info.config.get("retention") == "workqueue":
            raise Stopped(
                f"stream {name}: expected one that others may read, found a work queue",
                hint="its messages leave when they are acknowledged; check the archive with floe drill",
                code="E-COMPARE-QUEUE",
            )
        return info

    async def _servers(self, info: StreamInfo, mode: str) -> list[str]:
        if mode == "source":
            return [""]
        cluster = (await query(self._client, f"STREAM.INFO.{check_token(info.name)}")).get("cluster") or {}
        replicas = cluster.get("replicas") or []  # none on a single server, which has a leader all the same
        return [str(each["name"]) for each in replicas] + [str(cluster["leader"])] if replicas else [""]

    async def _compare_chain(
        self, chain: Chain, info: StreamInfo, server: str, request: CompareRequest, stop: Stop
    ) -> Copy | None:
        """Return the result of the chain on one copy; None if it has no rows to compare."""
        record = self._documents.compared(chain, server or request.mode)
        begin, last = await self._threads.run(self._bounds, chain, request)
        if max(begin, request.first or 1) < info.first_sequence and begin <= last:
            self._notes.append(f"{chain}: the stream begins at {info.first_sequence}; rows before it are not compared")
        former = await self._threads.run(record.read)
        reached = max(former.last if former else 0, info.first_sequence - 1, begin - 1)
        if request.since_last and reached >= last:
            self._notes.append(f"{chain}: equal up to {reached}, as of the last comparison, and not archived further")
        first = max(begin, info.first_sequence, request.first or 1, reached + 1 if request.since_last else 1)
        result = None
        while first <= last and not stop.is_set:
            rows = SequenceRange(first, min(last, first + RECORDED_SEQUENCES - 1))
            found = await self._compare_rows(chain, info.name, server, rows, last, stop)
            reached = reached_after(reached, found)
            result = found if result is None else result.plus(found)
            at = format_time(round(self._clock.now() * NS_PER_S))
            await self._threads.run(record.replace, ComparedTo(reached, at, result.is_same))
            first = found.rows.last + 1
        return result

    def _bounds(self, chain: Chain, request: CompareRequest) -> tuple[int, int]:
        """Return the first sequence that is archived, and the last one to compare. Blocking."""
        covers = (archive := ChainArchive.listed(self._store, chain)).covers()
        return (covers[0].rows.first if covers else 1), min(request.last or MAX_SEQUENCE, archive.end)

    async def _compare_rows(
        self, chain: Chain, stream: str, server: str, rows: SequenceRange, end: int, stop: Stop
    ) -> Copy:
        """Compare `rows`, or fewer if `stop` is set meanwhile. `end`: of all that will be compared."""
        document = await self._threads.run(self._documents.read_chain, chain)
        subject = document.filters[0] if document and document.filters else ""
        problems = list[Problem]()
        archive = ChainArchive(self._store, chain)
        tally, began = Tally(Scan(archive, rows, problems.append).batches()), self._clock.monotonic()
        now = await ready_stream_info(self._client, stream)
        if now is not None and now.messages and now.last_sequence >= rows.first:
            start, until = StartAt(rows.first), min(rows.last, now.last_sequence)
            reading = scan(self._client, stream, start, until=until, subject=subject, server=server)
            async with aclosing(reading) as pieces:
                async for piece in pieces:
                    if piece:
                        await self._threads.run(tally.add, piece, piece[-1].sequence)
                        self._show(chain, piece[-1].sequence, rows, end, began)
                        if stop.is_set:
                            rows = SequenceRange(rows.first, piece[-1].sequence)
                            break
        await self._threads.run(tally.add, (), rows.last)
        missing: Sequence[int] = ()
        if tally.absent:
            if (answer := await deleted_sequences(self._client, stream)) is None:
                raise Stopped(f"stream {stream}: it was deleted while it was compared", code="E-SOURCE-GONE")
            missing = missing_of(tally.absent, *answer)
        extra = await self._threads.run(self._not_archived, archive, rows, tally.extra)
        examples = [*tally.examples, *(f"{each}: missing" for each in missing[:MAX_EXAMPLES])]
        examples += [f"{each}: not archived" for each in extra[:MAX_EXAMPLES]]
        counts = tally.expected, tally.found, len(missing)
        few = tuple(examples[:MAX_EXAMPLES])
        differences = Differences(*counts, altered=tally.altered, unexpected=len(extra), examples=few)
        removed, left_out = len(tally.absent) - len(missing), len(tally.extra) - len(extra)
        # Of a hole without damage the rows are compared: what the stream still has of it is not archived.
        damaged = [str(each) for each in problems if not isinstance(each, Hole) or each.causes]
        return Copy(chain, server, rows, differences, removed, left_out, tuple(damaged[:MAX_EXAMPLES]))

    def _not_archived(self, archive: ChainArchive, rows: SequenceRange, extra: Sequence[int]) -> Sequence[int]:
        """Return those of `extra`, ascending, that neither the feed left out nor an operator gave up. Blocking."""
        if not extra:
            return ()
        found, is_left_out = np.asarray(extra, np.int64), np.zeros(len(extra), bool)
        left_out = [each.range for each in self._documents.gaps(archive.chain, position=rows.first)]
        for part in archive.covers(SequenceRange(extra[0], extra[-1])):
            low, high = np.searchsorted(found, (part.rows.first, part.rows.last + 1))
            if high > low and selects_rows(self._store, part.segment):
                left_out.append(part.rows)
        for each in left_out:
            low, high = np.searchsorted(found, (each.first, each.last + 1))
            is_left_out[low:high] = True
        return [int(each) for each in found[~is_left_out]]

    def _show(self, chain: Chain, sequence: int, rows: SequenceRange, end: int, began: float) -> None:
        now = self._clock.monotonic()
        share = format_share(sequence - rows.first + 1, end - rows.first + 1, now - began)
        self._progress.update(f"{chain}: compared up to {sequence:,} of {end:,}: {share}", now)
