"""Drills: bring a stream back under a scratch name, compare it with the archive, and remove it.

`Drill` replays a part of the archive, and compares row by row. `ExactDrill` restores the whole stream, and compares
everything; its stream keeps the guard of a restore, so no producer and no reader of the real stream reaches it, and its
consumers deliver to nobody. It is on the server that `floe restore` would choose, or on one started for the drill. A
scratch stream is held by a lease while in use.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from common.archive.scan import ChainArchive, Problem, Scan
from common.clock import Clock
from common.errors import FloeError, LeaseLost, Stopped, Unavailable
from common.exits import EXIT_DIFFERENCES, choices, floe_command
from common.logs import get_logger
from common.nats.api import RESTORE_PREFIX, SCRATCH_PREFIX, create_stream, delete_stream, query, stream_info
from common.nats.client import FloeClient
from common.nats.kv import BucketDeleted, KeyValue, state_key
from common.nats.lease import Leases, new_owner, open_leases
from common.nats.protocol import ApiError
from common.nats.pull import StartAt
from common.nats.restore import LocalServerMaker, start_local_server
from common.service.progress import Progress
from common.settings.root import Settings
from common.settings.service import ServiceSettings
from common.settings.types import duration_words, format_count, size_words
from common.tasks import Stop
from ingress.recovery.delivered import DeliveredRows, as_stored
from ingress.recovery.fill import transfer_text
from ingress.recovery.guard import room_error, run_with_renewal
from ingress.recovery.living import Tally, damage
from ingress.recovery.plan import RestoreRequest
from ingress.recovery.ranges import ChainRange, ReplayPlan, by_incarnation
from ingress.recovery.read_back import Differences, read_differences
from ingress.recovery.replay import Replay
from ingress.recovery.request import RecoveryParts, ReplayOptions, ReplayRequest, ReplayResult
from ingress.recovery.restore import Restore, RestoreReport
from ingress.recovery.survey import known_chains
from ingress.recovery.target import StoredReplay, receipt_key

log = get_logger(__name__)

T = TypeVar("T")

SCRATCH_SUBJECT_ROOT = "_floe_drill"
DEFAULT_SEQUENCES = 10_000  # the range of a drill without bounds
SCRATCH_SLACK_BYTES = 64 * 1024 * 1024  # bytes of the scratch stream above the messages


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


class ScratchStreams:
    """The scratch streams of one server. `settings`: of the service that the buckets belong to."""

    def __init__(
        self, client: FloeClient, settings: ServiceSettings, instance: str, clock: Clock, progress: Progress
    ) -> None:
        self._client, self._settings, self._clock, self._progress = client, settings, clock, progress
        self._owner = new_owner(instance)

    async def run(self, stream: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Remove the leftovers of former drills; return the result of `work`, which may create the stream.

        A lease marks the stream as in use meanwhile. Its loss ends the work, because the next drill then takes the
        stream for a leftover. The stream and its state are removed in every case. Raises Unavailable, LeaseLost, and
        the errors of `work`.
        """
        leases = await self.remove_leftovers()
        if (lease := await leases.acquire(state_key("drill", stream))) is None:
            raise Unavailable(f"drill {stream}: another one has this name")
        try:
            lost = LeaseLost(f"drill {stream}: its lease was lost", hint="run the same command again")
            return await run_with_renewal(lease, work(), lost)
        finally:
            await self._remove(stream)
            await lease.release()

    async def remove_leftovers(self) -> Leases:
        """Remove the streams that former drills left, also exact ones, and print their names. Return the leases."""
        leases, names = await open_leases(self._client, self._settings, self._owner, self._clock), list[str]()
        for subject in (f"{SCRATCH_SUBJECT_ROOT}.>", f"{RESTORE_PREFIX}>"):
            answer = await query(self._client, "STREAM.NAMES", {"subject": subject})
            names += [str(name) for name in answer.get("streams") or [] if str(name).startswith(SCRATCH_PREFIX)]
        for name in names:
            if await leases.get_owner(state_key("drill", name)) is None:
                await self._remove(name)
                self._progress.print(f"removed {name}, a leftover of an earlier drill")
        return leases

    async def _remove(self, stream: str) -> None:
        try:
            await delete_stream(self._client, stream)
            state = KeyValue(self._client, self._settings.state_bucket)
            with suppress(BucketDeleted):
                if await state.get(receipt_key(stream)) is not None:
                    await state.delete(receipt_key(stream))
        except FloeError as error:
            log.warning("scratch stream kept", action="scratch_stream_kept", stream=stream, error=str(error))


# A drill by a replay


@dataclass(frozen=True, slots=True)
class DrillReport:
    """The result of a drill. `full_replay_seconds`: the time of a replay of the whole feed at this rate, None if
    nothing was replayed. `problems`: errors while the archive was read. `notes`: remarks on the plan, for an operator.
    """

    result: ReplayResult
    plan: ReplayPlan
    differences: Differences
    full_replay_seconds: float | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        return 0 if self.differences.is_empty and not self.plan.holes and not self.problems else EXIT_DIFFERENCES

    def as_json(self) -> dict[str, Any]:
        found = self.differences
        return {
            "ok": self.exit_code == 0,
            "request": self.result.request.to_json(),
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
        result, feed = self.result, f"{self.result.request.site}/{self.result.request.feed}"
        took = f"{duration_words(result.seconds)}, {result.rate:,.0f} msg/s"
        yield f"{feed}: {format_count(self.differences.found, 'message')}, {size_words(result.bytes)} in {took}"
        yield f"{'as in the archive' if self.exit_code == 0 else 'NOT as archived'}: {self.differences.line()}"
        yield from self.differences.examples
        yield from self.problems
        yield from (f"hole: {hole.chain} {hole.rows}" for hole in self.plan.holes[:10])
        yield from (f"note: {note}" for note in self.notes)
        if self.full_replay_seconds is not None:
            yield f"the whole feed would take about {duration_words(self.full_replay_seconds)}"


def _stopped_error() -> Unavailable:
    return Unavailable("the drill was stopped before its end", hint="run the same command again")


class Drill:
    """One drill, with a scratch stream of its own."""

    def __init__(self, settings: Settings, parts: RecoveryParts, storage: str = "file") -> None:
        self._settings, self._parts, self._storage = settings, parts, storage
        self._store, self._documents, self._clock, self._progress = parts
        number = secrets.token_hex(6)
        self._stream, self._prefix = f"{SCRATCH_PREFIX}{number}", f"{SCRATCH_SUBJECT_ROOT}.{number}"

    async def run(self, request: ReplayRequest, stop: Stop) -> DrillReport:
        """Drill `request`, whatever its target and its prefix.

        Raises Unavailable if `stop` is set before the end. The scratch stream is removed in every case.
        """
        request = replace(request, target=self._stream, prefix=self._prefix)
        request = await asyncio.to_thread(self._with_bounds, request)
        options = ReplayOptions(allow_lossy=True, skip_holes=True)
        work = Replay(self._settings, request, options, self._parts)
        try:
            async with work.open_connection() as client:
                return await self._run_scratch(work, client, stop)
        except Stopped as error:
            # Its commands name the scratch stream, which is gone by now.
            again = floe_command("drill", replace(request, target="", prefix="").arguments())
            error.hint = choices(("solve the problem that the message names, and drill again", again))
            raise

    async def _run_scratch(self, work: Replay, client: FloeClient, stop: Stop) -> DrillReport:
        preview = await work.preview(client)
        plan = preview.plan

        async def main() -> DrillReport:
            most = 2 * plan.raw_bytes + 1024 * plan.rows + SCRATCH_SLACK_BYTES
            await create_stream(client, scratch_config(self._stream, self._prefix, self._storage, most))
            result = await work.run(client, stop)
            former = await work.load_former(client)
            if not result.finished or not isinstance(former, StoredReplay):
                raise _stopped_error()
            total = await self._compare(work, client, former.receipt.ranges, problems := list[Problem](), stop)
            # The plan reports holes without damage; accepted ones do not count.
            full = await work.threads.run(self._full_replay_seconds, work.request, plan, result)
            return DrillReport(result, plan, total, full, damage(problems), preview.notes)

        scratch = ScratchStreams(client, work.service, self._settings.instance, self._clock, self._progress)
        return await scratch.run(self._stream, main)

    def _with_bounds(self, request: ReplayRequest) -> ReplayRequest:
        """Return `request`, for the last `DEFAULT_SEQUENCES` sequences if it has no bounds. Blocking."""
        if any((request.has_sequence_bounds, request.from_time, request.to_time, request.since, request.until)):
            return request
        newest = by_incarnation(request.chains(known_chains(self._documents, request)))[-1]
        if not (end := max(ChainArchive.listed(self._store, chain).end for chain in newest)):
            return request
        first = max(1, end - DEFAULT_SEQUENCES + 1)
        return replace(request, incarnation=newest[0].incarnation, from_sequence=first)

    async def _compare(
        self, work: Replay, client: FloeClient, ranges: tuple[ChainRange, ...], problems: list[Problem], stop: Stop
    ) -> Differences:
        """Compare the scratch stream with the archive, which is read by another code path than the replay. Raises
        Unavailable after a stop.
        """
        if (info := await stream_info(client, self._stream)) is None:
            raise Unavailable(f"scratch stream {self._stream} is gone")
        total, prefix, call = Differences(), self._prefix.encode() + b".", work.threads.run
        for each in ranges:
            document = await call(self._documents.read_chain, each.chain)
            archive = ChainArchive(self._store.with_partial_reads(), each.chain)  # as the replay reads
            batches = Scan(archive, each.rows, problems.append).batches()
            is_relay = document is not None and document.relay
            tally = Tally(as_stored(batches, lambda subject: prefix + subject, is_relay=is_relay))
            arrivals = DeliveredRows(each.chain, each.rows, info.last_sequence)
            async with aclosing(arrivals.read(client, self._stream, StartAt(1))) as pieces:
                async for piece in pieces:
                    if stop.is_set:
                        raise _stopped_error()
                    await call(tally.add, piece, piece[-1].sequence)
                    read = format_count(total.found + tally.found, "message")
                    self._progress.update(f"compared {read} of {info.messages:,}", self._clock.monotonic())
            await call(tally.add, (), each.rows.last)
            late, absent = arrivals.late, {*tally.absent}
            disordered = absent.intersection(late)
            found = tally.differences("lost", sorted(absent - disordered), "unexpected", tally.extra)
            total = total.plus(
                replace(
                    found,
                    found=found.found + len(late),
                    repeated=len(late) - len(disordered),
                    out_of_order=len(disordered),
                    examples=tuple(f"{each.chain} {text}" for text in found.examples),
                )
            )
        foreign = info.messages - total.found  # Floe did not write them
        return replace(total, found=info.messages, unexpected=total.unexpected + foreign)

    def _full_replay_seconds(self, request: ReplayRequest, plan: ReplayPlan, result: ReplayResult) -> float | None:
        drilled = sum(p.stretch.segment.size * p.rows / max(1, p.footer.rows) for p in plan.parts)
        if not drilled:
            return None
        chains = self._documents.chains(request.site, request.feed)
        archives = [ChainArchive.listed(self._store, chain) for chain in chains]
        whole = sum(each.segment.size for archive in archives for each in archive.covers())
        return result.seconds * whole / drilled


# An exact drill: a restore of the whole stream

CONSUMER_CHECKS = 10  # checks of the consumers, a second apart: in a cluster their positions arrive late


@dataclass(frozen=True, slots=True)
class ExactReport:
    """The result of an exact drill. `differences`: those in the configuration and the consumers, as text."""

    restored: RestoreReport
    server: str
    differences: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        return EXIT_DIFFERENCES if self.differences or not self.restored.comparison.is_same else 0

    def as_json(self) -> dict[str, Any]:
        found = self.restored.as_json()
        return {
            **found,
            "ok": self.exit_code == 0,
            "server": self.server,
            "differences": [*found["differences"], *self.differences],
        }

    def lines(self) -> Iterator[str]:
        done, found = self.restored, self.restored.comparison
        request, consumers = done.plan.request, format_count(len(done.plan.consumers), "consumer")
        sent = transfer_text("sent", done.rows, done.bytes, done.seconds)
        yield f"{request.site}/{request.feed}: {sent}, on {self.server}"
        if self.exit_code == 0:
            yield f"as in the archive: {found.rows_read:,} read back, state, configuration, {consumers}"
        else:
            yield f"NOT as archived: {found.differences.line()}"
        yield from found.state_differences
        yield from found.differences.examples
        yield from self.differences
        yield from found.dropped_lines()


class ExactDrill:
    """One exact drill of a feed. `make_server`: None for the server that `floe restore` would choose."""

    def __init__(
        self,
        settings: Settings,
        request: RestoreRequest,
        parts: RecoveryParts,
        make_server: LocalServerMaker | None = None,
    ) -> None:
        if make_server is not None:
            request = replace(request, replicas=1, server="local")
        self._request = replace(request, name=SCRATCH_PREFIX + secrets.token_hex(6), promote=False)
        self._settings, self._make_server = settings, make_server
        self._clock, self._progress = parts.clock, parts.progress
        self._restore = Restore(settings, self._request, parts)

    async def run(self, stop: Stop) -> ExactReport:
        """Run the drill. In every case, remove the stream, and the server that was started.

        Raises the errors of `Restore.run`, and Unavailable if `stop` is set before the end.
        """
        if self._make_server is None:
            async with self._restore.open_connection() as client:
                return await self._run_on_shared_server(client, stop)
        folder = self._settings.spool_dir
        running = start_local_server(self._make_server, folder, self._progress, "E-DRILL-SERVER")
        async with running as nats, self._restore.open_connection(nats) as client:
            return await self._run_and_compare(client, stop, "a server of its own")

    async def _run_on_shared_server(self, client: FloeClient, stop: Stop) -> ExactReport:
        """Drill on a server that others use, under a lease: a stream without one is a leftover for the next drill."""
        scratch = ScratchStreams(client, self._restore.service, self._settings.instance, self._clock, self._progress)
        try:
            return await scratch.run(self._request.name, lambda: self._run_and_compare(client, stop, "the server"))
        except ApiError as error:  # for example of the lease bucket
            if full := room_error(error, self._request, self._request.name, is_clustered=client.is_clustered):
                raise full from error
            raise

    async def _run_and_compare(self, client: FloeClient, stop: Stop, server: str) -> ExactReport:
        restored = await self._restore.run(client, stop)
        differences = list[str]()
        for check in range(CONSUMER_CHECKS):
            if check:
                await self._clock.sleep(1.0)
            if not (differences := await read_differences(client, restored.plan)) or stop.is_set:
                break
        version = ".".join(map(str, client.server_version))
        return ExactReport(restored, f"{server}, nats-server {version}", tuple(differences))
