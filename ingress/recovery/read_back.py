"""Compare a restored stream with the rows that were sent: wait until it is at rest, then read back each replica.

A digest over all five fields is kept for each 10,000 rows that were sent, or for fewer large ones (`Digests`). If a
digest differs, the rows of that block are read from the archive again, and compared one by one.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa

from common.archive.captures import CapturedConsumer
from common.archive.columns import batch_of, messages
from common.archive.segment import Message
from common.clock import Clock
from common.errors import Stopped, Unavailable
from common.nats.api import check_token, list_consumers, query
from common.nats.client import FloeClient
from common.nats.headers import header_value
from common.nats.pull import StartAt, scan
from common.sequences import SequenceRange
from common.settings.types import format_count
from ingress.recovery.plan import RestorePlan, guarded_config, own_metadata
from ingress.recovery.retention_filter import limit_of
from ingress.recovery.stream_archive import raw_columns, with_guard_subject

DIGEST_ROWS = 10_000  # the most rows of one digest
DIGEST_BYTES = 8 * 1024 * 1024  # bytes of one digest; approximate, because rows are added in batches
SAMPLED_BLOCKS = 20  # blocks that `--verify sample` reads back
MAX_EXAMPLES = 5  # lines about single messages that differ


def fingerprint(message: Message) -> int:
    """Return 64 bits over time, subject, header block and payload. No headers and an empty block are the same: the
    server does not distinguish them.
    """
    digest = blake2b(b"%d:" % message.timestamp_ns, digest_size=8)
    for part in (message.subject, message.headers or b"", message.payload):
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return int.from_bytes(digest.digest(), "big")


@dataclass(frozen=True, slots=True)
class Differences:
    """Counts of messages. `unexpected`: found, but not in the archive. `examples`: a few lines."""

    expected: int = 0
    found: int = 0
    lost: int = 0
    repeated: int = 0
    out_of_order: int = 0
    altered: int = 0
    unexpected: int = 0
    examples: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.lost or self.repeated or self.out_of_order or self.altered or self.unexpected)

    def plus(self, other: Differences) -> Differences:
        ours, theirs = asdict(self), asdict(other)
        sums = {name: ours[name] + theirs[name] for name in ours}
        return Differences(**{**sums, "examples": sums["examples"][:MAX_EXAMPLES]})

    def line(self) -> str:
        return (
            f"lost {self.lost:,}, repeated {self.repeated:,}, out of order {self.out_of_order:,}, "
            f"altered {self.altered:,}, unexpected {self.unexpected:,}"
        )


@dataclass(frozen=True, slots=True)
class DigestBlock:
    """A block of rows: the sequences of its first and its last row, the number of rows, and their digest."""

    first: int
    last: int
    rows: int
    digest: bytes


@dataclass
class Digests:
    """The digests of the rows that are added, in ascending order; call `close` after the last row.

    `is_compared`: False if no row will be read back; the blocks then have an empty digest.
    """

    is_compared: bool = True
    blocks: list[DigestBlock] = field(default_factory=list)
    rows: int = 0
    _held: list[pa.RecordBatch] = field(default_factory=list)
    _count: int = 0
    _size: int = 0

    def add(self, batch: pa.RecordBatch) -> None:
        self.rows += batch.num_rows
        while batch.num_rows:
            part = batch.slice(0, DIGEST_ROWS - self._count)
            batch = batch.slice(part.num_rows)
            self._held.append(part)
            self._count += part.num_rows
            self._size += part.nbytes
            if self._count == DIGEST_ROWS or self._size >= DIGEST_BYTES:
                self.close()

    def close(self) -> None:
        if self._held:
            self.blocks.append(digest_block(self._held, is_compared=self.is_compared))
        self._held, self._count, self._size = [], 0, 0


def digest_block(batches: Sequence[pa.RecordBatch], *, is_compared: bool = True) -> DigestBlock:
    """Return the block of at least one row. The digest does not depend on the division into batches.

    `is_compared`: as in `Digests`.
    """
    if not is_compared:
        first, last = batches[0].column("sequence")[0].as_py(), batches[-1].column("sequence")[-1].as_py()
        return DigestBlock(first, last, sum(batch.num_rows for batch in batches), b"")
    digest, parts = blake2b(digest_size=16), [raw_columns(batch) for batch in batches]
    for part in parts:
        digest.update(part.sequence.tobytes())
    for part in parts:
        digest.update(part.timestamp_ns.tobytes())
    for name in ("subject", "headers", "payload"):
        columns = [getattr(part, name) for part in parts]
        for column in columns:
            digest.update(np.diff(_offsets(column)).astype(np.int64).tobytes())
        for column in columns:
            offsets = _offsets(column)
            if len(column) and offsets[-1] > offsets[0]:
                digest.update(memoryview(column.buffers()[2])[int(offsets[0]) : int(offsets[-1])])
    sequences = [part.sequence for part in parts]
    count = sum(map(len, sequences))
    return DigestBlock(int(sequences[0][0]), int(sequences[-1][-1]), count, digest.digest())


def _offsets(column: Any) -> Any:
    kind = np.int64 if pa.types.is_large_binary(column.type) else np.int32
    return np.frombuffer(column.buffers()[1], kind)[column.offset : column.offset + len(column) + 1]


# Waiting until the stream is at rest


async def stream_info_json(client: FloeClient, stream: str) -> dict[str, Any]:
    return await query(client, f"STREAM.INFO.{check_token(stream)}")


@dataclass(frozen=True, slots=True)
class AtRest:
    """Conditions for a stream at rest. `answers`: consecutive answers, over at least `span_s` seconds, that report all
    replicas as current; `stall_timeout_s`: seconds without progress before an error; `consumers_timeout_s`: seconds
    for consumers to appear.
    """

    answers: int = 5
    span_s: float = 10.0
    stall_timeout_s: float = 600.0
    consumers_timeout_s: float = 30.0


async def wait_replicated(
    client: FloeClient,
    stream: str,
    consumers: Sequence[str],
    clock: Clock,
    conditions: AtRest,
    check_stop: Callable[[], None],
) -> list[str]:
    """Wait until all replicas hold the stream and all `consumers` exist. Return the servers that hold the stream, none
    if it has no replicas.

    The first answers of a cluster may wrongly report all replicas as current. Raises Unavailable if the stream does not
    come to rest, Stopped if consumers do not appear, and the errors of `check_stop`, called between answers.
    """
    good, lags, moved = 0, -1, clock.monotonic()
    while True:
        info = await stream_info_json(client, stream)
        cluster, wanted = info.get("cluster") or {}, int(info["config"].get("num_replicas") or 1) - 1
        replicas = cluster.get("replicas") or []  # also empty if the server has not started its group yet
        behind = [each for each in replicas if not each.get("current") or each.get("lag") or each.get("offline")]
        good = 0 if behind or len(replicas) < wanted or (replicas and not cluster.get("leader")) else good + 1
        if not (replicas or wanted) or good >= conditions.answers:
            break
        if (lag := sum(int(each.get("lag") or 0) for each in behind)) != lags:
            lags, moved = lag, clock.monotonic()
        if clock.monotonic() > moved + conditions.stall_timeout_s:
            names = ", ".join(str(each.get("name")) for each in behind) or f"{wanted - len(replicas)} missing or"
            raise Unavailable(f"stream {stream}: expected replicas that catch up, found {names} behind")
        check_stop()
        await clock.sleep(conditions.span_s / (conditions.answers - 1))
    await _wait_for_consumers(client, stream, consumers, clock, conditions)
    return [str(cluster["leader"]), *(str(each["name"]) for each in replicas)] if replicas else []


async def _wait_for_consumers(
    client: FloeClient, stream: str, consumers: Sequence[str], clock: Clock, conditions: AtRest
) -> None:
    deadline = clock.monotonic() + conditions.consumers_timeout_s
    while absent := sorted({*consumers} - {str(each.get("name")) for each in await list_consumers(client, stream)}):
        if clock.monotonic() > deadline:
            raise Stopped(
                f"stream {stream}: expected {format_count(len(consumers), 'consumer')}, missing: {', '.join(absent)}",
                hint="run the same command again; or use --no-consumers, and create them by hand",
                code="E-RESTORE-CONSUMERS",
            )
        await clock.sleep(min(1.0, conditions.consumers_timeout_s / 10))


# Comparing

ReadRows = Callable[[SequenceRange], Iterator[pa.RecordBatch]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a comparison. `rows_read`: rows read back from each copy; `copies`: the servers of the copies that
    were read, none if there is only one copy.

    `dropped`: rows that the server does not hold because of its configuration: limits, TTL, acknowledged by all.
    `state_differences`: those in the state of the stream, as text.
    """

    rows_read: int = 0
    copies: tuple[str, ...] = ()
    dropped: int = 0
    differences: Differences = field(default_factory=Differences)
    state_differences: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        return self.differences.is_empty and not self.state_differences

    def dropped_lines(self) -> Iterator[str]:
        """Yield a line about the dropped rows; none if there are none."""
        if self.dropped:
            yield f"{format_count(self.dropped, 'message')} dropped by the server: limits, TTL, or acknowledged by all"


@dataclass(frozen=True, slots=True)
class SentRows:
    """The rows that were sent: their blocks, their number, the last sequence; `config`: of the guarded stream.

    `sourced`: the sequences of the newest messages of sources among them.
    """

    blocks: Sequence[DigestBlock]
    rows: int
    end: int
    config: Mapping[str, Any]
    sourced: Collection[int] = ()

    @property
    def first(self) -> int:
        return self.blocks[0].first if self.blocks else self.end + 1

    def may_drop_oldest(self) -> bool:
        """True if the server may drop the oldest messages."""
        return any(limit_of(self.config, key) for key in ("max_msgs", "max_bytes"))

    def may_drop_acknowledged(self) -> bool:
        """True if the server may drop acknowledged messages."""
        return bool(self.config.get("retention", "limits") != "limits")


def state_differences(expected: SentRows, state: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences of STREAM.INFO's `state` from the rows that were sent, as text."""
    if (last := int(state.get("last_seq", 0))) != expected.end:
        yield f"expected the last sequence {expected.end}, found {last}"
    count, first = int(state.get("messages", 0)), int(state.get("first_seq", 0))
    may_lack = expected.may_drop_oldest() or expected.may_drop_acknowledged()
    if count > expected.rows:
        yield f"expected {format_count(expected.rows, 'message')}, found {count:,}"
    if count and (first < expected.first or (count == expected.rows and first != expected.first)):
        yield f"expected the first sequence {expected.first}, found {first}"
    deleted = int(state.get("num_deleted") or 0)
    if count == expected.rows and count and not may_lack and deleted != expected.end - first + 1 - count:
        yield f"expected {expected.end - first + 1 - count:,} deleted, found {deleted:,}"


class Comparer:
    """A comparer that reads a stream back. `read_rows`: returns the archived rows of a range, also those that the
    retention filter removed; `on_read`: receives the number of rows read back so far.
    """

    def __init__(
        self, client: FloeClient, stream: str, expected: SentRows, read_rows: ReadRows, on_read: Callable[[int], None]
    ) -> None:
        self._client, self._stream, self._expected = client, stream, expected
        self._read_rows, self._on_read = read_rows, on_read

    async def run(self, verify: str, servers: Sequence[str]) -> Comparison:
        """Compare the stream. `verify`: `full`, which reads the copies of all `servers`, `sample` or `state`."""
        state = (await stream_info_json(self._client, self._stream))["state"]
        wrong = tuple(state_differences(self._expected, state))
        if verify == "state" or wrong:
            lacking = self._expected.rows - (held := int(state.get("messages", 0)))
            may_drop = self._expected.may_drop_oldest() or self._expected.may_drop_acknowledged()
            if lacking and not (may_drop or self._expected.config.get("allow_msg_ttl")):
                wrong += (f"expected {format_count(self._expected.rows, 'message')}, found {held:,}",)
            return Comparison(dropped=max(0, lacking), state_differences=wrong)
        if verify == "sample":
            blocks, found = self._expected.blocks, Comparison()
            step = max(1, len(blocks) // SAMPLED_BLOCKS)
            for block in dict.fromkeys([*blocks[::step], *blocks[-1:]]):  # each once
                found = _add(found, await self._compare_copy("", [block]))
            return found
        results = [await self._compare_copy(server, self._expected.blocks) for server in servers or [""]]
        return _first_difference(results, tuple(servers))

    async def _compare_copy(self, server: str, blocks: Sequence[DigestBlock]) -> Comparison:
        if not blocks:
            return Comparison()
        result, position = Comparison(), 0
        async for block, rows in self._read(server, blocks):
            position += len(rows)
            self._on_read(position)
            result = _add(result, await self._compare_block(block, rows))
        return result

    async def _read(
        self, server: str, blocks: Sequence[DigestBlock]
    ) -> AsyncIterator[tuple[DigestBlock, list[Message]]]:
        """Yield each block with the messages of the stream up to its end and after the end of the previous block."""
        held, start = list[Message](), StartAt(blocks[0].first if len(blocks) == 1 else 1)
        async with aclosing(scan(self._client, self._stream, start, until=blocks[-1].last, server=server)) as pieces:
            for block in blocks:
                while not held or held[-1].sequence <= block.last:
                    if (piece := await anext(pieces, None)) is None:
                        break
                    held += piece
                count = bisect_right(held, block.last, key=lambda message: message.sequence)
                yield block, held[:count]
                del held[:count]

    async def _compare_block(self, block: DigestBlock, rows: list[Message]) -> Comparison:
        if rows and digest_block([batch_of(*rows)]) == block:
            return Comparison(rows_read=len(rows), differences=Differences(expected=block.rows, found=len(rows)))
        return await asyncio.to_thread(self._compare_rows, block, rows)

    def _compare_rows(self, block: DigestBlock, rows: list[Message]) -> Comparison:
        found = {message.sequence: message for message in rows}
        same, altered, expiring, examples = 0, 0, 0, list[str]()
        first = min(block.first, rows[0].sequence) if rows else block.first
        for batch in self._read_rows(SequenceRange(first, block.last)):
            for sent in messages(batch):
                if (held := found.pop(sent.sequence, None)) is None:
                    expiring += header_value(sent.headers, b"Nats-TTL") is not None
                elif fingerprint(sent) == fingerprint(held):
                    same += 1
                else:
                    altered += 1
                    examples.append(f"{sent.sequence}: altered")
        examples += [f"{sequence}: unexpected" for sequence in list(found)[:MAX_EXAMPLES]]
        lost = max(0, block.rows - same - altered)
        may_lack = lost if self._expected.may_drop_acknowledged() else min(lost, expiring)
        if self._expected.may_drop_oldest() and (not rows or rows[0].sequence > block.first):
            may_lack = lost  # limits drop the oldest messages
        if lost > may_lack:
            examples.append(f"{block.first}..{block.last}: {lost - may_lack} lost")
        repeated = max(0, same + altered - block.rows)  # the filter removed them, but the stream holds them
        if repeated:
            examples.append(f"{block.first}..{block.last}: {repeated} that were deleted")
        differences = Differences(
            block.rows,
            len(rows),
            lost - may_lack,
            altered=altered,
            unexpected=len(found) + repeated,
            examples=tuple(examples[:MAX_EXAMPLES]),
        )
        return Comparison(rows_read=len(rows), dropped=may_lack, differences=differences)


def _add(one: Comparison, other: Comparison) -> Comparison:
    differences = one.differences.plus(other.differences)
    return Comparison(one.rows_read + other.rows_read, one.copies, one.dropped + other.dropped, differences)


def _first_difference(results: Sequence[Comparison], servers: tuple[str, ...]) -> Comparison:
    """Return the result of the first copy that differs, else of the last; `dropped` is the maximum of all copies."""
    found = next((each for each in results if not each.is_same), results[-1])
    return replace(found, copies=servers, dropped=max(each.dropped for each in results))


# Configuration and consumers


async def read_differences(client: FloeClient, plan: RestorePlan, *, positions: bool = True) -> list[str]:
    """Return the differences of the guarded stream's configuration and consumers from the plan, as text. `positions`:
    compare the positions of consumers too, and report consumers that are not in the plan.
    """
    info = await stream_info_json(client, plan.name)
    config, first = info["config"], int(info["state"].get("first_seq") or 0)
    expected = guarded_config(plan.config, "")
    found = [f"configuration: {text}" for text in config_differences(expected, config)]
    found_consumers = {str(each["name"]): each for each in await list_consumers(client, plan.name)}
    for consumer in plan.consumers:
        if (state := found_consumers.pop(consumer.name, None)) is None:
            found.append(f"consumer {consumer.name}: expected, but missing")
            continue
        texts = [*config_differences(with_guard_subject(consumer, plan.name).config, state.get("config") or {})]
        texts += _position_differences(consumer, state, first) if positions else ()
        found += [f"consumer {consumer.name}: {text}" for text in texts]
    return [*found, *(f"consumer {name}: not expected" for name in found_consumers if positions)]


def config_differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Yield, as text, the keys of `expected` that have another value in `found`, for example because the server does
    not know them. An empty value may be absent. Metadata keys of the server and of a restore are not compared.
    """
    for key, value in expected.items():
        ours, theirs = value, found.get(key)
        if key == "metadata":
            ours, theirs = own_metadata(ours), own_metadata(theirs)
        if not _is_equal_or_extended(ours, theirs):
            yield f"expected {key} {ours!r:.100}, found {theirs!r:.100}"


def _is_equal_or_extended(ours: Any, theirs: Any) -> bool:
    """True if the values are equal, apart from keys that a newer server adds within `theirs`."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping | None):
        return all(_is_equal_or_extended(value, (theirs or {}).get(key)) for key, value in ours.items())
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_is_equal_or_extended, ours, theirs))
    return bool(ours == theirs or not (ours or theirs))


def _position_differences(consumer: CapturedConsumer, state: Mapping[str, Any], first: int) -> Iterator[str]:
    for key, count, sequence in (
        ("delivered", consumer.delivered_consumer, consumer.delivered_stream),
        ("ack_floor", consumer.ack_floor_consumer, consumer.ack_floor_stream),
    ):
        position = state.get(key) or {}
        found = int(position.get("consumer_seq", 0)), int(position.get("stream_seq", 0))
        # The server moves a position before the first message up to that message, and may restart its count there.
        moved = max(sequence, first - 1)
        if found not in ((count, sequence), (count, moved), (0 if sequence < moved else count, moved)):
            yield f"expected {key} {sequence} (as {count}), found {found[1]} (as {found[0]})"
    if pending := int(state.get("num_ack_pending") or 0):
        yield f"expected 0 delivered and not acknowledged, found {pending}"
