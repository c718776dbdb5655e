"""Compare a feed's archive with the living stream, row by row. Nothing in the stream or in the archive is changed.

The stream is read in pieces; a piece and its archived rows are compared by one digest, and row by row if that differs.
An archived row that the stream does not hold is removed if the stream's own state says so: it is before the stream's
first sequence, or among the deleted ones. Otherwise it is missing. So are sequences of the archive that no segment
covers, from the chain's beginning, or the floor that retention left, to the end that its documents name.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import chain as joined
from typing import Any

import numpy as np
import pyarrow as pa

from common.archive.catalog import first_sequence, select_chains
from common.archive.columns import batch_of, messages
from common.archive.documents import ComparedTo
from common.archive.scan import ChainArchive, Hole, OnProblem, Problem, Scan
from common.archive.segment import Message
from common.chain import Chain
from common.clock import NS_PER_S, format_time
from common.errors import DataError, Stopped
from common.exits import EXIT_DIFFERENCES
from common.metrics import gauge
from common.nats.api import StreamInfo, deleted_sequences, ready_stream_info
from common.nats.client import FloeClient
from common.nats.pull import StartAt, scan
from common.sequences import MAX_SEQUENCE, SequenceRange
from common.service.process import ThreadPool
from common.service.progress import format_share
from common.tasks import Stop
from ingress.recovery.history import selects_rows
from ingress.recovery.ranges import ArchivedSpan, by_incarnation, check_overlap
from ingress.recovery.read_back import MAX_EXAMPLES, Differences, digest_block, fingerprint, stream_info_json
from ingress.recovery.request import Pace, RecoveryParts, ReplayRequest

#: Sequences that are compared and recorded at a time; memory is 8 bytes for each that the stream does not hold.
RECORDED_SEQUENCES = 5_000_000
Batches = Iterator[pa.RecordBatch]
Pieces = AsyncGenerator[Sequence[Message]]
Missing = tuple[Sequence[int], dict[str, int]]  # rows, and further counts


compared_at = gauge("compare_last_run_timestamp_seconds", "When the last comparison ended, since 1970.")
differs = gauge("compare_differs", "1 if the last one found a difference.", ("site", "feed", "partition", "copy"))


@dataclass(frozen=True, slots=True)
class CompareRequest:
    """A comparison to make. `incarnation`, `partition` None: the newest, all of them. `mode`: `source`, `each-replica`
    or `target`.

    `first`, `last`: inclusive sequences, None for all. `since_last`: go on after the sequences that an earlier
    comparison of this mode found equal. `pace`: of the reading, None for as fast as possible.
    """

    site: str
    feed: str
    incarnation: int | None = None
    partition: int | None = None
    mode: str = "source"
    first: int | None = None
    last: int | None = None
    since_last: bool = False
    pace: Pace | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """The result for one chain on one copy of the stream. `server`: the replica that was read, empty for any; or the
    name of the target.

    `rows`: the range of the rows that were compared, and of the sequences that are missing in the archive.
    `differences`: `lost` are the missing rows and those sequences, `unexpected` the rows that are in the stream and not
    archived. `removed`: archived rows that the stream gave up: limits, deletion, acknowledgement. `left_out`: rows that
    the feed's sampling or `max_age` left out. `problems`: damage of the archive, as text. `apart`: further counts of a
    target.
    """

    chain: Chain
    server: str
    rows: SequenceRange
    differences: Differences
    removed: int = 0
    left_out: int = 0
    problems: tuple[str, ...] = ()
    apart: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_same(self) -> bool:
        return self.differences.is_empty and not self.problems

    def plus(self, other: Copy) -> Copy:
        """Return the result of both."""
        return replace(
            self,
            rows=SequenceRange(min(self.rows.first, other.rows.first), max(self.rows.last, other.rows.last)),
            differences=self.differences.plus(other.differences),
            removed=self.removed + other.removed,
            left_out=self.left_out + other.left_out,
            problems=(*self.problems, *other.problems)[:MAX_EXAMPLES],
            apart={name: count + other.apart[name] for name, count in self.apart.items()},
        )

    def as_json(self) -> dict[str, Any]:
        found = self.differences
        return {
            **self.chain.log_context(),
            "server": self.server,
            "first": self.rows.first,
            "last": self.rows.last,
            "same": found.found - found.altered - found.unexpected - self.left_out,
            "missing": found.lost,
            "altered": found.altered,
            "not_archived": found.unexpected,
            "removed": self.removed,
            "left_out": self.left_out,
            **self.apart,
            "examples": list(found.examples),
            "problems": list(self.problems),
        }

    def lines(self) -> Iterator[str]:
        found, values = self.differences, self.as_json()
        counts = ", ".join(f"{values[name]:,} {name.replace('_', ' ')}" for name in (*_COUNTS, *self.apart))
        on = f" on {self.server}" if self.server else ""
        word = "as archived" if self.is_same else "NOT as archived"
        yield f"{self.chain}{on}: {word}: {self.rows}: {values['same']:,} the same, {counts}"
        yield from (f"  {each}" for each in (*found.examples, *self.problems))


_COUNTS = ("missing", "altered", "not_archived", "removed", "left_out")


@dataclass(frozen=True, slots=True)
class CompareReport:
    """The results of all chains and copies. `feed`: the name that was given. `notes`: remarks for an operator.
    `finished`: False if it was stopped.
    """

    feed: str
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
            yield f"{self.feed}: nothing to compare"
        yield from (line for each in self.copies for line in each.lines())
        if not self.finished:
            yield "stopped before its end: --since-last continues"
        yield from (f"note: {note}" for note in self.notes)


def show_metrics(reports: Iterable[CompareReport], mode: str, now: float) -> None:
    """Set the metrics of comparisons that ended at `now`."""
    compared_at.set(now)
    for each in (copy for report in reports for copy in report.copies):
        chain = each.chain.site, each.chain.feed, each.chain.partition
        differs.labels(*chain, each.server or mode).set(not each.is_same)


class Tally:
    """The comparison of one range of a chain with one copy of the stream: pieces of it, in order. Blocking.

    `absent`: archived sequences that are not in the stream. `extra`: sequences in the stream that are not archived.
    """

    def __init__(self, archived: Batches) -> None:
        self._archived = archived
        self._held: pa.RecordBatch | None = None  # archived rows after the last piece
        self.absent, self.extra = array("q"), array("q")
        self.expected = self.found = self.altered = 0
        self.examples: list[str] = []

    def add(self, piece: Sequence[Message], last: int) -> None:
        """Compare the stream's messages after the previous piece and up to `last` with the archived rows there."""
        start = 0
        for batch in self._archived_up_to(last):
            newest = batch.column("sequence")[-1].as_py()
            end = bisect_right(piece, newest, lo=start, key=lambda message: message.sequence)
            self._compare(batch, piece[start:end])
            start = end
        self.found += len(piece) - start
        self.extra.extend(message.sequence for message in piece[start:])

    def _archived_up_to(self, last: int) -> Batches:
        """Yield the archived rows up to `last` that were not taken yet, none of them empty."""
        while (batch := self._held or next(self._archived, None)) is not None:
            count = int(np.searchsorted(batch.column("sequence").to_numpy(), last, side="right"))
            self._held = batch.slice(count) if count < batch.num_rows else None
            if count:
                yield batch.slice(0, count)
            if self._held is not None:
                return

    def _compare(self, batch: pa.RecordBatch, rows: Sequence[Message]) -> None:
        self.expected += batch.num_rows
        self.found += len(rows)
        if len(rows) == batch.num_rows and digest_block([batch_of(*rows)]) == digest_block([batch]):
            return
        held = {message.sequence: message for message in rows}
        for archived in messages(batch):
            if (message := held.pop(archived.sequence, None)) is None:
                self.absent.append(archived.sequence)
            elif fingerprint(archived) != fingerprint(message):
                self.altered += 1
                self.examples.append(f"{archived.sequence}: altered")
                del self.examples[MAX_EXAMPLES:]
        self.extra.extend(held)

    def differences(self, lost: str, absent: Sequence[int], added: str, extra: Sequence[int]) -> Differences:
        """Return the differences, of which the rows `absent` and `extra` are two; `lost`, `added`: words for them."""
        examples = [f"{each}: {lost}" for each in absent[:MAX_EXAMPLES]]
        examples += [f"{each}: {added}" for each in extra[:MAX_EXAMPLES]]
        few = tuple([*self.examples, *examples][:MAX_EXAMPLES])
        counts = self.expected, self.found, len(absent)
        return Differences(*counts, altered=self.altered, unexpected=len(extra), examples=few)


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
    return [int(each) for each in found[(found >= first) & ~np.isin(found, np.asarray([*deleted], np.int64))]]


def damage(problems: Iterable[Problem]) -> tuple[str, ...]:
    """Return, as text, the problems without the holes that no damage made."""
    return tuple(str(each) for each in problems if not isinstance(each, Hole) or each.causes)


def inside(sequences: Any, ranges: Iterable[SequenceRange]) -> Any:
    """Return for each of `sequences`, an ascending array, True if one of `ranges` holds it."""
    found = np.zeros(len(sequences), bool)
    for each in ranges:
        low, high = np.searchsorted(sequences, (each.first, each.last + 1))
        found[low:high] = True
    return found


class LivingComparison:
    """A comparison of the chains of a feed with their stream."""

    _may_repeat = False
    _apart: tuple[str, ...] = ()  # names of further counts

    def __init__(self, client: FloeClient, parts: RecoveryParts, threads: ThreadPool) -> None:
        self._client, self._threads = client, threads
        self._store, self._documents, self._clock, self._progress = parts
        self._notes: list[str] = []
        self._archived: list[ArchivedSpan] = []
        self._pace: Pace | None = None
        self._copy = ""

    async def run(self, request: CompareRequest, stop: Stop) -> CompareReport:
        """Compare until the end, or until `stop` is set.

        Raises UsageError for an unknown chain, and for bounds before or after the whole archive; Stopped for a stream
        that cannot be compared, DataError, and the errors of the servers.
        """
        named = (request.site, request.feed, request.incarnation, request.partition)
        feed = "/".join(str(each) for each in named if each is not None)
        chains = await self._threads.run(self._chains, feed)
        self._pace, self._copy = request.pace, request.mode
        info, copies = await self._open(chains[0]), list[Copy]()
        for server in await self._servers(info, request.mode):
            found = [await self._compare_chain(chain, info, server, request, stop) for chain in chains]
            copies += [each for each in found if each is not None]
        if not copies:
            first, last = request.first, request.last
            bounds = ReplayRequest(request.site, request.feed, "", from_sequence=first, to_sequence=last)
            check_overlap(bounds, (None, None), self._archived, ())
        return CompareReport(feed, info.name, tuple(copies), (*dict.fromkeys(self._notes),), finished=not stop.is_set)

    async def _open(self, chain: Chain) -> StreamInfo:
        """Return the stream to compare with."""
        document = await self._threads.run(self._documents.read_stream, chain)
        if document is None:
            raise DataError(f"{chain}: expected stream.json, found none", code="E-STATE-JSON")
        info = await self._comparable(str(document.config["name"]))
        if info.created != document.created:
            self._notes.append(f"the stream was created at {info.created}, the archived one at {document.created}")
        return info

    def _chains(self, feed: str) -> list[Chain]:
        return by_incarnation(select_chains(self._documents, feed))[-1]

    async def _comparable(self, name: str) -> StreamInfo:
        info = await ready_stream_info(self._client, name)
        if info is None:
            hint = "if it was lost, floe restore brings it back"
            raise Stopped(f"stream {name}: expected it on this server, found none", hint=hint, code="E-SOURCE-GONE")
        if info.config.get("retention") == "workqueue":
            raise Stopped(
                f"stream {name}: expected one that others may read, found a work queue",
                hint="its messages leave when they are acknowledged; check the archive with floe drill",
                code="E-COMPARE-QUEUE",
            )
        return info

    async def _servers(self, info: StreamInfo, mode: str) -> list[str]:
        if mode != "each-replica":
            return [info.name if mode == "target" else ""]
        cluster = (await stream_info_json(self._client, info.name)).get("cluster") or {}
        replicas = cluster.get("replicas") or []  # none on a single server, which has a leader all the same
        return [str(each["name"]) for each in replicas] + [str(cluster["leader"])] if replicas else [""]

    async def _compare_chain(
        self, chain: Chain, info: StreamInfo, server: str, request: CompareRequest, stop: Stop
    ) -> Copy | None:
        """Return the result of the chain on one copy; None if it has no rows to compare."""
        record = self._documents.compared(chain, self._copy if request.mode == "target" else server or self._copy)
        begin, last, lost = await self._threads.run(self._bounds, chain, request)
        if max(begin, request.first or 1) < info.first_sequence and begin <= last:
            self._notes.append(f"{chain}: the stream begins at {info.first_sequence}; rows before it are not compared")
        former = await self._threads.run(record.read)
        whole = lost[0].first - 1 if lost else MAX_SEQUENCE  # no segment is lost up to it
        reached = max(min(former.last, whole) if former else 0, info.first_sequence - 1, begin - 1)
        if request.since_last and reached >= last and not lost:
            self._notes.append(f"{chain}: equal up to {reached}, as of the last comparison, and not archived further")
        first = max(begin, info.first_sequence, request.first or 1, reached + 1 if request.since_last else 1)
        result = None
        if lost:
            examples = tuple(f"{each}: missing in the archive: no segment covers it" for each in lost[:MAX_EXAMPLES])
            counts = Differences(lost=sum(map(len, lost)), examples=examples)
            rows = SequenceRange(lost[0].first, lost[-1].last)
            result = Copy(chain, server, rows, counts, apart=dict.fromkeys(self._apart, 0))
        while first <= last and not stop.is_set:
            rows = SequenceRange(first, min(last, first + RECORDED_SEQUENCES - 1))
            found = await self._compare_rows(chain, info, server, rows, last, stop)
            reached = reached_after(reached, found)
            result = found if result is None else result.plus(found)
            at = format_time(round(self._clock.now() * NS_PER_S))
            await self._threads.run(record.replace, ComparedTo(min(reached, whole), at, result.is_same))
            first = found.rows.last + 1
        return result

    def _bounds(self, chain: Chain, request: CompareRequest) -> tuple[int, int, list[SequenceRange]]:
        """Return the first and the last sequence to compare, and the ranges that no segment covers although they are
        archived by the documents of the chain. Blocking.
        """
        # Before the listing: a segment is put before its tail. The floor is read after it: it rises before a deletion.
        ended, tail = self._documents.read_end(chain), self._documents.read_tail(chain) or 0
        archive = ChainArchive.listed(self._store, chain)
        end = max(archive.end, tail) if ended is None else ended
        first = first_sequence(self._documents, chain)
        self._archived += [ArchivedSpan(chain, SequenceRange(first, end))] if first <= end else []
        first, last = self._span(chain, first, end)
        low, high = max(first, request.first or 1), min(max(end, last), request.last or MAX_SEQUENCE)
        self._excused = self._given_up(chain, 1)
        return first, min(last, high), archive.holes(SequenceRange(low, high), self._excused) if low <= high else []

    def _span(self, _chain: Chain, first: int, end: int) -> tuple[int, int]:
        """Return the first and the last sequence that the copy received of an archive `first` to `end`. Blocking."""
        return first, end

    async def _compare_rows(
        self, chain: Chain, stream: StreamInfo, server: str, rows: SequenceRange, end: int, stop: Stop
    ) -> Copy:
        """Compare `rows`, or fewer if `stop` is set meanwhile. `end`: of all that will be compared."""
        problems, began = list[Problem](), self._clock.monotonic()
        archive = ChainArchive(self._store, chain)
        batches = self._expected(archive, problems.append, rows)
        first = await self._threads.run(next, batches, None)
        tally = Tally(joined([] if first is None else [first], batches))
        async with aclosing(self._pieces(chain, stream, server, rows, first)) as pieces:
            async for piece in pieces:
                await self._threads.run(tally.add, piece, piece[-1].sequence)
                self._show(chain, piece[-1].sequence, rows, end, began)
                await self._keep_pace(piece, stop)
                if stop.is_set:
                    rows = SequenceRange(rows.first, piece[-1].sequence)
                    break
        await self._threads.run(tally.add, (), rows.last)
        missing, apart = await self._missing(stream.name, rows, end, tally)
        extra = await self._threads.run(self._not_archived, archive, rows, tally.extra)
        differences = tally.differences("missing", missing, "not archived", extra)
        if apart and not self._may_repeat:
            differences = replace(differences, repeated=apart["repeated"], out_of_order=apart["out_of_order"])
        removed = len(tally.absent) - len(missing) - sum(apart.get(n, 0) for n in ("parked", "skipped", "out_of_order"))
        left_out = len(tally.extra) - len(extra)
        # Of a hole without damage the rows are compared: what the stream still has of it is not archived.
        damaged = damage(problems)[:MAX_EXAMPLES]
        return Copy(chain, server, rows, differences, removed, left_out, damaged, apart)

    def _expected(self, archive: ChainArchive, on_problem: OnProblem, rows: SequenceRange) -> Batches:
        """Return the archived rows as the stream must hold them. Blocking."""
        return Scan(archive, rows, on_problem).batches()

    async def _pieces(self, chain: Chain, stream: StreamInfo, server: str, rows: SequenceRange, _first: Any) -> Pieces:
        """Yield the stream's messages of `rows`, with the sequences of the archive. `_first`: the first archived rows.

        No piece is empty. The caller must close the generator.
        """
        document = await self._threads.run(self._documents.read_chain, chain)
        subject = document.filters[0] if document and document.filters else ""
        now = await ready_stream_info(self._client, stream.name)
        if now is not None and now.messages and now.last_sequence >= rows.first:
            start, until = StartAt(rows.first), min(rows.last, now.last_sequence)
            reading = scan(self._client, stream.name, start, until=until, subject=subject, server=server)
            async with aclosing(reading) as pieces:
                async for piece in pieces:
                    if piece:
                        yield piece

    async def _missing(self, stream: str, _rows: SequenceRange, _end: int, tally: Tally) -> Missing:
        """Return the absent ones of `_rows` that the stream must hold, and further counts. `_end`: of all rows."""
        return missing_of(tally.absent, *await self._read_deleted(stream)) if tally.absent else (), {}

    async def _read_deleted(self, stream: str) -> tuple[StreamInfo, list[int]]:
        if (answer := await deleted_sequences(self._client, stream)) is None:
            raise Stopped(f"stream {stream}: it was deleted while it was compared", code="E-SOURCE-GONE")
        return answer

    async def _keep_pace(self, piece: Sequence[Message], stop: Stop) -> None:
        sizes = [len(message.payload) + len(message.headers or b"") for message in piece] if self._pace else []
        while self._pace and sizes and (count := await self._pace.wait_admitted(sizes, self._clock, stop)):
            sizes = sizes[count:]

    def _not_archived(self, archive: ChainArchive, rows: SequenceRange, extra: Sequence[int]) -> Sequence[int]:
        """Return those of `extra`, ascending, that neither the feed left out nor an operator gave up. Blocking."""
        if not extra:
            return ()
        found = np.asarray(extra, np.int64)
        left_out = self._given_up(archive.chain, rows.first)
        for part in archive.covers(SequenceRange(extra[0], extra[-1])):
            low, high = np.searchsorted(found, (part.rows.first, part.rows.last + 1))
            if high > low and selects_rows(self._store, part.segment):
                left_out.append(part.rows)
        return [int(each) for each in found[~inside(found, left_out)]]

    def _given_up(self, chain: Chain, first: int) -> list[SequenceRange]:
        """Return the ranges that reach `first` whose rows need not be archived. Blocking."""
        return [each.range for each in self._documents.gaps(chain, position=first)]

    def _show(self, chain: Chain, sequence: int, rows: SequenceRange, end: int, began: float) -> None:
        now = self._clock.monotonic()
        share = format_share(sequence - rows.first + 1, end - rows.first + 1, now - began)
        self._progress.update(f"{chain}: compared up to {sequence:,} of {end:,}: {share}", now)
