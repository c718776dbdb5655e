"""A drill: replay a part of the archive into a scratch stream, read it back and compare it."""

from __future__ import annotations

import secrets
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from hashlib import blake2b
from typing import Any, TypeVar

from common.archive.columns import messages
from common.archive.documents import ChainStore
from common.archive.scan import ChainArchive, Hole, Problem, Scan
from common.archive.segment import Message
from common.archive.store import SegmentStore
from common.chain import Chain
from common.clock import Clock
from common.errors import FloeError, Stopped, Unavailable
from common.exits import EXIT_DIFFERENCES, choices, floe_command
from common.logs import get_logger
from common.nats.api import RESTORE_PREFIX, create_stream, delete_stream, query, stream_info
from common.nats.buckets import open_leases
from common.nats.client import FloeClient
from common.nats.headers import split_provenance
from common.nats.kv import BucketDeleted, KeyValue, state_key
from common.nats.lease import Lease, Leases, new_owner
from common.nats.pull import for_each_message
from common.service.process import ThreadPool
from common.service.progress import Progress
from common.settings.root import Settings
from common.settings.service import ServiceSettings
from common.settings.types import duration_words, format_count, size_words
from common.tasks import Stop, run_with
from ingress.errors import most_important_error
from ingress.recovery.ranges import ChainRange, ReplayPlan
from ingress.recovery.receipt import StoredReplay, receipt_key
from ingress.recovery.replay import Replay
from ingress.recovery.request import ReplayOptions, ReplayRequest, ReplayResult
from ingress.recovery.survey import known_chains

log = get_logger(__name__)

T = TypeVar("T")


MAX_EXAMPLES = 5


@dataclass(slots=True)
class MessageTrail:
    """The messages of one chain in the order in which they were read: 16 bytes each."""

    sequences: array[int] = field(default_factory=lambda: array("Q"))
    fingerprints: array[int] = field(default_factory=lambda: array("Q"))

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, message: Message) -> None:
        self.sequences.append(message.sequence)
        self.fingerprints.append(fingerprint(message))


def fingerprint(message: Message) -> int:
    """Return 64 bits over time, subject, header block and payload; no headers and an empty block differ."""
    digest = blake2b(b"%d:" % message.timestamp_ns, digest_size=8)
    for part in (message.subject, message.headers, message.payload):
        digest.update(b"-" if part is None else b"%d:" % len(part))
        digest.update(part or b"")
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


def compare_trails(expected: MessageTrail, found: MessageTrail, name: str = "") -> Differences:
    """Compare the messages `expected` (ascending, each once) with those that were `found`."""
    seen, newest, examples = bytearray(len(expected)), 0, []
    counts = dict.fromkeys(("repeated", "out_of_order", "altered", "unexpected"), 0)
    for sequence, print_ in zip(found.sequences, found.fingerprints, strict=True):
        place = bisect_left(expected.sequences, sequence)
        wrong = ""
        if place == len(expected) or expected.sequences[place] != sequence:
            wrong = "unexpected"
        elif seen[place]:
            wrong = "repeated"
        else:
            seen[place] = 1
            if sequence < newest:
                wrong = "out_of_order"
            elif expected.fingerprints[place] != print_:
                wrong = "altered"
        newest = max(newest, sequence)
        if wrong:
            counts[wrong] += 1
            examples.append(f"{name} {sequence}: {wrong.replace('_', ' ')}")
            del examples[MAX_EXAMPLES:]
    lost = [sequence for sequence, is_found in zip(expected.sequences, seen, strict=True) if not is_found]
    examples += [f"{name} {sequence}: lost" for sequence in lost[:MAX_EXAMPLES]]
    return Differences(len(expected), len(found), len(lost), **counts, examples=tuple(examples[:MAX_EXAMPLES]))


SCRATCH_PREFIX = "FLOE_DRILL_"
SCRATCH_SUBJECT_ROOT = "_floe_drill"


def scratch_config(stream: str, prefix: str, storage: str, most_bytes: int) -> dict[str, object]:
    return {
        "name": stream,
        "description": "scratch of floe drill; may be deleted",
        "subjects": [f"{prefix}.>"],
        "storage": storage,
        "num_replicas": 1,
        "retention": "limits",
        "discard": "new",
        "max_bytes": most_bytes,
        "allow_direct": True,
        "allow_atomic": True,
        "allow_batched": True,
    }


async def run_with_renewal(lease: Lease, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; renew the lease meanwhile. Raises the most important error of both. A lost lease
    does not end `work`.
    """
    results = list[T]()

    async def main() -> None:
        results.append(await work)

    try:
        await run_with(main(), lease.run_renewals())
    except BaseExceptionGroup as errors:
        raise most_important_error(errors) from None
    return results[0]


class ScratchStreams:
    """The scratch streams of one server. `settings`: of the service that the buckets belong to."""

    def __init__(self, client: FloeClient, settings: ServiceSettings, instance: str, clock: Clock) -> None:
        self._client, self._settings, self._clock = client, settings, clock
        self._owner = new_owner(instance)

    @asynccontextmanager
    async def hold(self, stream: str) -> AsyncIterator[Lease]:
        """Hold the lease that marks the stream as in use. Remove the stream and its state at the end."""
        if (lease := await (await self._leases()).acquire(state_key("drill", stream))) is None:
            raise Unavailable(f"drill {stream}: another one has this name")
        try:
            yield lease
        finally:
            await self.remove(stream)
            await lease.release()

    async def remove(self, stream: str) -> None:
        try:
            await delete_stream(self._client, stream)
            state = KeyValue(self._client, self._settings.state_bucket)
            with suppress(BucketDeleted):
                if await state.get(receipt_key(stream)) is not None:
                    await state.delete(receipt_key(stream))
        except FloeError as error:
            log.warning("scratch stream kept", action="scratch_stream_kept", stream=stream, error=str(error))

    async def remove_leftovers(self) -> list[str]:
        """Remove the streams that former drills left, also exact ones. Return their names."""
        leases, names = await self._leases(), list[str]()
        for subject in (f"{SCRATCH_SUBJECT_ROOT}.>", f"{RESTORE_PREFIX}>"):
            answer = await query(self._client, "STREAM.NAMES", {"subject": subject})
            names += [str(name) for name in answer.get("streams") or [] if str(name).startswith(SCRATCH_PREFIX)]
        left = [name for name in names if await leases.get_owner(state_key("drill", name)) is None]
        for name in left:
            await self.remove(name)
        return left

    async def _leases(self) -> Leases:
        return await open_leases(self._client, self._settings, self._owner, self._clock)


DEFAULT_SEQUENCES = 10_000  # the range of a drill without bounds
SCRATCH_SLACK_BYTES = 64 * 1024 * 1024  # bytes of the scratch stream above the messages


@dataclass(frozen=True, slots=True)
class DrillReport:
    """The result of a drill. `full_replay_seconds`: the time of a replay of the whole feed at this rate, None if
    nothing was replayed. `problems`: errors while the archive was read. `notes`: remarks on the plan, for an operator.
    """

    request: ReplayRequest
    result: ReplayResult
    plan: ReplayPlan
    differences: Differences
    full_replay_seconds: float | None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return 0 if self.differences.is_empty and not self.plan.holes and not self.problems else EXIT_DIFFERENCES

    def as_json(self) -> dict[str, Any]:
        found = self.differences
        return {
            "ok": self.exit_code == 0,
            "request": self.request.to_json(),
            "rows": found.found,
            "bytes": self.result.bytes,
            "seconds": round(self.result.seconds, 3),
            "rows_per_second": round(self.result.rate),
            "full_restore_seconds": self.full_replay_seconds and round(self.full_replay_seconds, 3),
            **{name: value for name, value in asdict(found).items() if name != "found"},
            "holes": self.plan.as_json()["holes"],
            "problems": list(self.problems),
            "notes": list(self.notes),
        }

    def lines(self) -> Iterator[str]:
        result, feed = self.result, f"{self.request.site}/{self.request.feed}"
        took = f"{duration_words(result.seconds)}, {result.rate:,.0f} msg/s"
        yield f"{feed}: {format_count(self.differences.found, 'message')}, {size_words(result.bytes)} in {took}"
        yield f"{'as in the archive' if self.exit_code == 0 else 'NOT as archived'}: {self.differences.line()}"
        yield from self.differences.examples
        yield from self.problems
        yield from (f"hole: {hole.chain} {hole.rows}" for hole in self.plan.holes[:10])
        yield from (f"note: {note}" for note in self.notes)
        if self.full_replay_seconds is not None:
            yield f"the whole feed would take about {duration_words(self.full_replay_seconds)}"


_FOREIGN = Chain("unknown", "unknown")  # messages of the scratch stream that Floe did not write


class Drill:
    """One drill, with a scratch stream of its own."""

    def __init__(
        self,
        settings: Settings,
        store: SegmentStore,
        documents: ChainStore,
        clock: Clock,
        progress: Progress,
        storage: str = "file",
    ) -> None:
        self._settings, self._store, self._documents = settings, store, documents
        self._clock, self._progress, self._storage = clock, progress, storage
        number = secrets.token_hex(6)
        self.stream, self.prefix = f"{SCRATCH_PREFIX}{number}", f"{SCRATCH_SUBJECT_ROOT}.{number}"
        self._threads = ThreadPool("drill", 2)

    async def run(self, request: ReplayRequest, stop: Stop) -> DrillReport:
        """Drill `request`; its target and prefix are `stream` and `prefix`.

        Raises Unavailable if `stop` is set before the end. The scratch stream is removed in every case.
        """
        request = await self._threads.run(self._with_bounds, request)
        options = ReplayOptions(allow_lossy=True, skip_holes=True)
        work = Replay(self._settings, request, options, self._store, self._documents, self._clock, self._progress)
        try:
            async with work.open_connection() as client:
                return await self._run_scratch(work, client, stop)
        except Stopped as error:
            # Its commands name the scratch stream, which is gone by now.
            again = floe_command("drill", replace(request, target="", prefix="").arguments())
            error.hint = choices(("solve the problem that the message names, and drill again", again))
            raise
        finally:
            self._threads.close()

    async def _run_scratch(self, work: Replay, client: FloeClient, stop: Stop) -> DrillReport:
        scratch = ScratchStreams(client, work.service, self._settings.instance, self._clock)
        for name in await scratch.remove_leftovers():
            self._progress.print(f"removed {name}, a leftover of an earlier drill")
        preview = await work.preview(client)
        plan, notes = preview.plan, preview.notes

        async def main() -> DrillReport:
            most = 2 * plan.raw_bytes + 1024 * plan.rows + SCRATCH_SLACK_BYTES
            await create_stream(client, scratch_config(self.stream, self.prefix, self._storage, most))
            return replace(await self._replay_and_compare(work, client, plan, stop), notes=notes)

        async with scratch.hold(self.stream) as lease:
            return await run_with_renewal(lease, main())

    async def _replay_and_compare(self, work: Replay, client: FloeClient, plan: ReplayPlan, stop: Stop) -> DrillReport:
        result = await work.run(client, stop)
        former = await work.load_former(client)
        if not result.finished or not isinstance(former, StoredReplay) or stop.is_set:
            raise Unavailable("the drill was stopped before its end", hint="run the same command again")
        found = await self._read_scratch(client)
        ranges, problems = former.receipt.ranges, list[Problem]()
        expected = await self._threads.run(self._read_archive, ranges, problems)
        compared = (compare_trails(expected[chain], found[chain], str(chain)) for chain in sorted({*expected, *found}))
        total = reduce(Differences.plus, compared, Differences())
        # The plan reports holes without damage; accepted ones do not count.
        reported = tuple(str(each) for each in problems if not isinstance(each, Hole) or each.causes)
        full = await self._threads.run(self._full_replay_seconds, work.request, plan, result)
        return DrillReport(work.request, result, plan, total, full, reported)

    def _with_bounds(self, request: ReplayRequest) -> ReplayRequest:
        """Return `request`, for the last `DEFAULT_SEQUENCES` sequences if it has no bounds. Blocking."""
        if any((request.has_sequence_bounds, request.from_time, request.to_time, request.since, request.until)):
            return request
        chains = request.chains(known_chains(self._documents, request))
        newest = [chain for chain in chains if chain.incarnation == chains[-1].incarnation]
        if not (end := max(ChainArchive.listed(self._store, chain).end for chain in newest)):
            return request
        first = max(1, end - DEFAULT_SEQUENCES + 1)
        return replace(request, incarnation=newest[0].incarnation, from_sequence=first)

    # Messages found, and messages expected

    async def _read_scratch(self, client: FloeClient) -> defaultdict[Chain, MessageTrail]:
        if (info := await stream_info(client, self.stream)) is None:
            raise Unavailable(f"scratch stream {self.stream} is gone")
        trails, strip = defaultdict[Chain, MessageTrail](MessageTrail), len(self.prefix) + 1

        read = 0

        def take(stored: Message) -> None:
            nonlocal read
            read += 1
            self._print_progress(f"read back {format_count(read, 'message')} of {info.messages:,}", read)
            origin, headers = split_provenance(stored.headers)
            if origin is None:
                trails[_FOREIGN].add(stored)
                return
            subject = stored.subject[strip:]
            trails[origin.chain].add(Message(origin.sequence, origin.timestamp_ns, subject, headers, stored.payload))

        if info.messages:
            await for_each_message(client, info.name, info.last_sequence, take)
        return trails

    def _read_archive(
        self, ranges: tuple[ChainRange, ...], problems: list[Problem]
    ) -> defaultdict[Chain, MessageTrail]:
        """Read the messages of the archive, by another code path than the replay. Blocking."""
        trails, read = defaultdict[Chain, MessageTrail](MessageTrail), 0
        for each in ranges:
            document = self._documents.read_chain(each.chain)
            relay = document is not None and document.relay
            archive = ChainArchive(self._store.with_partial_reads(), each.chain)  # as the replay reads
            for batch in Scan(archive, each.rows, problems.append).batches():
                read += batch.num_rows
                self._print_progress(f"read {format_count(read, 'message')} of the archive to compare", 0)
                for message in messages(batch):
                    # Earlier hops of a relay are mixed with those that the replay adds.
                    kept = replace(message, headers=split_provenance(message.headers)[1]) if relay else message
                    trails[each.chain].add(kept)
        return trails

    def _print_progress(self, text: str, count: int) -> None:
        if count % 1000 == 0:
            self._progress.update(text, self._clock.monotonic())

    def _full_replay_seconds(self, request: ReplayRequest, plan: ReplayPlan, result: ReplayResult) -> float | None:
        drilled = sum(p.stretch.segment.size * p.rows / max(1, p.footer.rows) for p in plan.parts)
        if not drilled:
            return None
        chains = self._documents.chains(request.site, request.feed)
        archives = [ChainArchive.listed(self._store, chain) for chain in chains]
        whole = sum(each.segment.size for archive in archives for each in archive.covers())
        return result.seconds * whole / drilled
