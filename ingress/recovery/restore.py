"""One restore: plan, check, fill a guarded stream, wait until it is at rest, compare, promote.

plan → checks → lease → leftover removed → filled under the guard → at rest → compared → archive has not grown
→ recorded → promoted

Until its promotion, the stream has a subject that no producer knows, and a marker in its metadata. So a crash at any
point leaves nothing, or a stream that the same command removes before it begins again. Any other stream of that name is
never changed. One restore of a name runs at a time: it holds a lease, and promotes only a stream with its own marker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import pyarrow as pa

from common.archive.captures import CapturedRestore, CaptureStore, server_hash
from common.chain import FEED_PATTERN
from common.clock import NS_PER_S, Backoff, doubling_delays, format_time, parse_time
from common.errors import ConfigError, FloeError, Refused, Stopped, Unavailable
from common.exits import EXIT_DIFFERENCES, choices
from common.failpoints import failpoint
from common.nats.api import INTEREST, StreamInfo, create_consumer, durable_config, durable_name_prefix, stream_info
from common.nats.client import FloeClient, connect
from common.nats.lease import new_owner, open_leases, optional_leases
from common.nats.protocol import ApiError
from common.nats.restore import ArchiveUpload
from common.sequences import MAX_SEQUENCE, SequenceRange
from common.settings.root import Settings
from common.settings.service import NatsSettings, ServiceSettings
from common.settings.types import format_count
from common.tasks import Stop, wait_for
from ingress.errors import is_transient
from ingress.recovery.fill import ROW_COLUMNS, ArchiveFiller, ArchiveWork, transfer_text
from ingress.recovery.guard import (
    RESTORE_FAILED,
    ROOM_CODE,
    RUNS_CODE,
    GuardedStream,
    PreflightResult,
    check_effects,
    dry_run,
    preflight,
    room_error,
    run_with_renewal,
    stopped_error,
)
from ingress.recovery.history import EXPIRED_CODE, repeat_command
from ingress.recovery.plan import RestorePlan, RestoreRequest, guarded_config, with_source_starts
from ingress.recovery.read_back import AtRest, Comparer, Comparison, SentRows, read_differences, wait_replicated
from ingress.recovery.request import RecoveryParts
from ingress.recovery.retention_filter import SourcedRow, limit_of
from ingress.recovery.stream_archive import ArchiveState, with_guard_subject

NAME_IN_USE = 10130  # error of a restore; also while the server still ends an earlier one, which it does not report
CONSUMER_REFUSED_TEXT = "error restoring consumer"  # in RESTORE_FAILED: permanent; any other text may be temporary
GREW_CODE = "E-RESTORE-GREW"
NAME_CHECKS = 3
ATTEMPTS = 5  # attempts from the beginning, if a server disappears or ends a restore
ATTEMPT_BACKOFF = doubling_delays(1.0, 15.0)  # seconds between attempts
EXPIRY_MARGIN_S = 60.0  # seconds; a message that `max_age` drops within them does not count as held


@dataclass(frozen=True, slots=True)
class RestoreTuning:
    """The timing of a restore. `name_check_span_s`: the seconds over which the name is checked."""

    name_check_span_s: float = 3.0
    at_rest: AtRest = field(default_factory=AtRest)


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The result of a restore. `rows`, `bytes`: sent, the bytes with the overhead of the form; `seconds`: in total;
    `format`: of the archive that was sent.

    `not_kept`: keys of the configuration of the stream and its consumers that this server does not keep, as text;
    `is_promoted`: the stream has its subjects; `finished_consumers`: the consumers that deliver again, of a stream that
    an earlier restore promoted.
    """

    plan: RestorePlan
    rows: int
    bytes: int
    seconds: float
    format: str
    comparison: Comparison
    created: str
    not_kept: tuple[str, ...] = ()
    is_promoted: bool = False
    finished_consumers: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        is_kept = not self.not_kept or self.plan.request.allow_lossy
        return 0 if self.comparison.is_same and is_kept else EXIT_DIFFERENCES

    def as_json(self) -> dict[str, Any]:
        found = self.comparison
        return {
            **self.plan.as_json(),
            "ok": self.exit_code == 0,
            "rows": self.rows,
            "sent_rows": self.rows,
            "sent_bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "format": self.format,
            "created": self.created,
            "verify": self.plan.request.verify,
            "read_back": found.rows_read,
            "copies": list(found.copies),
            "dropped_by_server": found.dropped,
            "differences": [*found.state_differences, *found.differences.examples],
            "not_kept": list(self.not_kept),
            "finished": list(self.finished_consumers),
        }

    def lines(self) -> Iterator[str]:
        if names := ", ".join(self.finished_consumers):
            yield f"stream {self.plan.name}: was brought back earlier; delivering again: {names}"
            return
        yield f"stream {self.plan.name}: {transfer_text('sent', self.rows, self.bytes, self.seconds)}"
        found = self.comparison
        yield from found.dropped_lines()
        copies = f" from each of {', '.join(found.copies)}" if found.copies else ""
        if found.is_same and self.plan.request.verify == "state":
            yield "the state is as planned; no message was read back"
        elif found.is_same:
            yield f"as in the archive: {found.rows_read:,} read back{copies}"
        else:
            yield f"NOT as archived, and not promoted: {found.differences.line()}"
            yield from found.state_differences
            yield from found.differences.examples
        if self.not_kept:
            how = "NOT as archived" if self.is_promoted else "NOT as archived, and not promoted without --allow-lossy"
            yield f"{how if self.exit_code else 'note'}: this nats-server does not keep all of the configuration"
            yield from self.not_kept


class Restore:
    """One request over one archive. `not_back`: streams that have to be back before one that sources from them.
    `returning`: those that the same run brings back, perhaps after this one, each with its last sequence.
    """

    def __init__(
        self, settings: Settings, request: RestoreRequest, parts: RecoveryParts, tuning: RestoreTuning | None = None
    ) -> None:
        self._settings, self._request, self._tuning = settings, request, tuning or RestoreTuning()
        self.not_back: Collection[str] = ()
        self.returning: Mapping[str, int] = {}
        _, documents, self._clock, self._progress = parts
        self._captures = CaptureStore(documents.layout, documents.objects)
        self._work, self._stop = ArchiveWork(request, parts, self._check_stop), Stop()
        self._started, self._printed_notes = self._clock.monotonic(), set[str]()
        self._owner = new_owner(settings.instance)
        self._guarded: GuardedStream | None = None  # of the current attempt

    @property
    def _role(self) -> Literal["egress", "ingress"]:
        return "egress" if self._settings.site == self._request.site else "ingress"

    @property
    def service(self) -> ServiceSettings:
        return self._settings.egress if self._role == "egress" else self._settings.ingress

    @asynccontextmanager
    async def open_connection(self, nats: NatsSettings | None = None) -> AsyncIterator[FloeClient]:
        """Connect to the server of egress if the configuration is that of the site, else to that of ingress. Close the
        threads with the connection. `nats`: another server.
        """
        nats = nats or self._settings.nats_for(self._role)
        name = f"floe restore {self._settings.instance}".strip()
        with closing(self):
            async with aclosing(await connect(nats, name=name, clock=self._clock)) as client:
                yield client

    def close(self) -> None:
        """Close the threads; of one that never had a connection, too."""
        self._work.close()

    async def plan(self) -> RestorePlan:
        """Return `ArchivedHistory.plan` with the requested subjects; print the progress if it takes long."""
        plan = await self._work.plan()
        self._request = plan.request
        if self._request.subjects:
            plan = replace(plan, config={**plan.config, "subjects": [*self._request.subjects]})
        return plan

    async def check(self, plan: RestorePlan) -> tuple[list[str], FloeError | None]:
        """Return, as text, the facts that only the server knows, and the error with which `run` would now end before it
        fills anything, None if it would fill. Nothing is written.
        """
        try:
            async with self.open_connection() as client:
                leases = optional_leases(client, self.service, self._owner, self._clock)
                notes = await dry_run(client, plan, leases)
                return [*notes, *(await self._examine_sources(client, plan))[1]], None
        except FloeError as error:
            return [], error

    # Run

    async def run(self, client: FloeClient, stop: Stop, confirmed: RestorePlan | None = None) -> RestoreReport:
        """Restore the stream, and promote it unless it differs. `confirmed`: a plan that an operator has confirmed.

        Raises ConfigError, Refused, Stopped, UsageError, DataError; Unavailable if it was stopped, or after several
        attempts.
        """
        self._stop = stop
        plan, agreed = confirmed or await self.plan(), confirmed.elsewhere if confirmed else ()
        self._note(() if confirmed else plan.notes)
        backoff = Backoff(None, ATTEMPT_BACKOFF)
        for attempt in range(ATTEMPTS):
            try:
                return await self._attempt(client, plan, agreed)
            except FloeError as error:
                if error.code == RUNS_CODE:
                    raise
                full = room_error(error, self._request, plan.name, is_clustered=client.is_clustered)
                # A cluster counts the leftover of an earlier attempt until all its servers have removed it.
                waits = (full is not None or error.code == ROOM_CODE) and attempt in range(1, 3) and client.is_clustered
                if full is not None and not waits:
                    raise full from error
                refused = error.err_code if isinstance(error, ApiError) else 0
                is_last = attempt == ATTEMPTS - 1
                if refused == RESTORE_FAILED and (is_last or CONSUMER_REFUSED_TEXT in error.message):
                    raise self._refused(error.message, plan) from error
                passes = waits or is_transient(error) or refused in (RESTORE_FAILED, NAME_IN_USE)
                if not passes or is_last or stop.is_set:
                    raise
                self._progress.print(f"starting again from the beginning in a moment: {error.message}")
                if await wait_for(stop, backoff.next_delay()):
                    raise
                await client.wait_up(60.0)
                if error.code in (GREW_CODE, EXPIRED_CODE):
                    plan = await self.plan()
        raise AssertionError("the last attempt raises")

    def _note(self, notes: Iterable[str]) -> None:
        for note in notes:
            if note not in self._printed_notes:
                self._printed_notes.add(note)
                self._progress.print(f"note: {note}")

    def _refused(self, reason: str, plan: RestorePlan) -> ConfigError:
        """Return the error for an archive that the server does not accept."""
        request, ends = self._request, list[tuple[str, str]]()
        if plan.consumers and request.promote and "consumer" in reason:
            without = repeat_command(replace(request, consumers=False))
            ends = [("or without its consumers; create those yourself", without)]
        return ConfigError(
            f"stream {plan.name}: the server does not accept it: {reason}",
            hint=choices(("restore on its own version of nats-server, or a newer one", repeat_command(request)), *ends),
            code="E-RESTORE-REFUSED",
        )

    async def _attempt(self, client: FloeClient, plan: RestorePlan, agreed: Collection[str]) -> RestoreReport:
        ready = await preflight(client, plan)
        sourced, notes = await self._examine_sources(client, ready.plan)
        if not ready.is_promoted:
            check_effects(plan, agreed)
        self._note((*ready.notes, *notes))
        ready = replace(ready, plan=replace(ready.plan, sourced=sourced))
        guarded = self._guarded = GuardedStream(client, ready.plan, self._clock, self._progress, self._stop)
        if not self._request.promote:  # a drill has a lease of its own, for a name that no one else uses
            return await self._restore(client, ready, guarded)
        replicas = self.service.kv_replicas or int(plan.config.get("num_replicas") or 1)
        leases = await open_leases(client, self.service, self._owner, self._clock, replicas=replicas)
        async with guarded.hold_lease(leases) as lease:
            work = self._finish_delivery(ready, guarded) if ready.is_promoted else self._restore(client, ready, guarded)
            return await run_with_renewal(lease, work)

    async def _examine_sources(self, client: FloeClient, plan: RestorePlan) -> tuple[dict[str, SourcedRow], list[str]]:
        """Return `plan.sourced`, with sequence 0 for each source that a restore has brought back: nats-server 2.15
        recognises a source by its creation time, and would not continue after a message that the stream holds. Return
        also, as text, the sources of which it takes all messages.

        Sources in another account or domain, or with a consumer of their own, are not examined. Raises Stopped for one
        that has to be back, Refused without the right to ask.
        """
        sourced, notes = dict(plan.sourced), list[str]()
        known = {name for each in plan.config.get("sources") or [] if FEED_PATTERN.fullmatch(name := str(each["name"]))}
        # The keys of sources that are not examined begin with more than the name.
        names = {key: name for key, row in sourced.items() if row.identity and (name := key.partition(" ")[0]) in known}
        restores = await asyncio.to_thread(list, self._work.history.restores({*names.values()})) if names else []
        for key, name in names.items():
            row, info = sourced[key], await stream_info(client, name)
            if (info is None or info.restore_marker) and name in self.returning and name not in self.not_back:
                start = min(row.source_sequence, self.returning[name])
                notes.append(f"source {name} comes back in the same run: continues after {start}")
                sourced[key] = row._replace(sequence=0, source_sequence=start)
                continue
            if info is None or info.restore_marker:
                notes.append(f"source {name} is not back: restored after this stream, its messages come twice on 2.15")
                if name in self.not_back:
                    raise Stopped(f"stream {plan.name}: {notes[-1]}", hint="restore it first", code="E-RESTORE-SOURCE")
                continue
            is_same = row.identity == server_hash(info.created)
            own = (each for of, since, each in restores if of == name and since <= row.timestamp_ns)
            found = next((each for each in own if each.has_created(info.created)), None)
            if found is not None and (found.seen or not is_same):  # another server of a cluster has another time
                # Sequences after the end of its restore are those of new messages.
                end = max(found.end, found.skipped_to) if row.timestamp_ns < parse_time(found.at) else MAX_SEQUENCE
                sourced[key] = row._replace(sequence=0, source_sequence=min(row.source_sequence, end))
            elif not is_same:
                notes.append(f"source {name} is not the archived stream: all its messages are taken on 2.15")
                del sourced[key]
        return sourced, notes

    async def _finish_delivery(self, ready: PreflightResult, guarded: GuardedStream) -> RestoreReport:
        names = tuple(await guarded.restore_delivery())
        took = self._clock.monotonic() - self._started
        report = RestoreReport(ready.plan, 0, 0, took, ready.writer.format, Comparison(), ready.plan.created)
        return replace(report, is_promoted=True, finished_consumers=names)

    async def _restore(self, client: FloeClient, ready: PreflightResult, guarded: GuardedStream) -> RestoreReport:
        plan, consumers = ready.plan, [consumer.name for consumer in ready.plan.consumers]
        # The name of a drill is random, so one check that it is free is enough.
        checks = NAME_CHECKS if self._request.promote else 1
        await guarded.remove_leftover(checks, self._tuning.name_check_span_s)
        try:
            expected, sent = await self._fill(client, ready, guarded.marker)
            failpoint("restore.filled")
            at_rest, check = self._tuning.at_rest, self._check_stop
            servers = await wait_replicated(client, plan.name, consumers, self._clock, at_rest, check)
            failpoint("restore.settled")
            await guarded.read_filled()
            comparison = await self._compare(client, plan, expected, servers)
            failpoint("restore.compared")
            await self._check_end(plan)
        except FloeError as error:
            try:
                await guarded.remove(guarded.marker)
            except ConfigError as other:  # another stream took its place: the cause
                raise other from error
            except FloeError:
                pass  # the next restore removes it
            raise
        filled = await guarded.read_filled()
        took = self._clock.monotonic() - self._started
        report = RestoreReport(plan, expected.rows, sent, took, ready.writer.format, comparison, filled.created)
        if self._request.promote:  # a drill compares these itself, with the positions
            report = replace(report, not_kept=tuple(await read_differences(client, plan, positions=False)))
        if not report.exit_code and self._request.promote:
            await self._work.threads.run(self._record, plan, filled)
            failpoint("restore.recorded")
            await self._create_egress_durables(client, plan)
            filled = await guarded.read_filled()
            not_kept = await guarded.promote(filled, self._final_config(plan, filled, expected.sourced))
            failpoint("restore.promoted")
            if any("deliver_subject" in each.config for each in plan.consumers):
                await guarded.restore_delivery()
            report = replace(report, not_kept=(*report.not_kept, *not_kept), is_promoted=True)
        return replace(report, seconds=self._clock.monotonic() - self._started)

    def _final_config(self, plan: RestorePlan, filled: StreamInfo, sent: Collection[int]) -> dict[str, Any]:
        """Return the final configuration: each source continues after a message that is certainly held, or begins after
        its newest archived one. A message that the server drops soon, or may drop as acknowledged, does not count.
        `sent`: the sequences of the newest messages of sources, as far as they were sent.
        """
        age = limit_of(plan.config, "max_age")
        since = int((self._clock.now() + EXPIRY_MARGIN_S) * NS_PER_S) - age if age else 0
        is_kept = plan.config.get("retention", "limits") == "limits" and filled.messages > 0

        def is_held(row: SourcedRow) -> bool:
            is_there = row.sequence in sent and row.sequence >= filled.first_sequence
            return is_kept and is_there and row.timestamp_ns > since

        return with_source_starts(plan.config, plan.sourced, is_held)

    # Filling

    async def _fill(self, client: FloeClient, ready: PreflightResult, marker: str) -> tuple[SentRows, int]:
        """Send the whole archive. Return the rows that were sent, and the number of bytes."""
        plan, writer, config = ready.plan, ready.writer, dict[str, Any]()

        def guarded(state: ArchiveState) -> Mapping[str, Any]:
            extent = f"first={state.first_sequence} end={plan.last_sequence} rows={state.messages}"
            config.update(guarded_config(plan.config, f"{marker} {extent} format={writer.format}"))
            return config

        filler = ArchiveFiller(plan, self._work, self._stop)
        consumers = [with_guard_subject(consumer, plan.name) for consumer in plan.consumers]
        begin = partial(ArchiveUpload.begin, client, plan.name, clock=self._clock)
        sent = await filler.run(begin, writer, guarded, consumers, client.max_payload)
        digests = filler.digests
        return SentRows(digests.blocks, digests.rows, plan.last_sequence, config, filler.sourced), sent

    def _check_stop(self) -> None:
        if self._stop.is_set:
            raise stopped_error(self._request)
        if self._guarded is not None:
            self._guarded.check_lease()

    # Afterwards

    async def _compare(
        self, client: FloeClient, plan: RestorePlan, expected: SentRows, servers: list[str]
    ) -> Comparison:
        def on_read(count: int) -> None:
            self._check_stop()
            text = f"read back {format_count(count, 'message')} of {expected.rows:,}"
            self._progress.update(text, self._clock.monotonic())

        def read_rows(rows: SequenceRange) -> Iterator[pa.RecordBatch]:
            return self._work.history.rows(plan, rows.first, ROW_COLUMNS, self._stop, rows.last)

        comparer = Comparer(client, plan.name, expected, read_rows, on_read)
        found = await comparer.run(self._request.verify, servers)
        return found if found.is_same else await comparer.run(self._request.verify, servers)

    async def _check_end(self, plan: RestorePlan) -> None:
        """Raise Unavailable if egress has meanwhile archived more of the lost stream: messages that it still held."""
        if not self._request.promote or self._request.is_in_the_past or plan.is_renamed:
            return
        if growth := await self._work.threads.run(self._work.history.growth, plan):
            hint = choices(("it begins again by itself, five times; then", repeat_command(self._request)))
            raise Unavailable(f"{growth}: egress has put the messages that it held", hint=hint, code=GREW_CODE)

    async def _create_egress_durables(self, client: FloeClient, plan: RestorePlan) -> None:
        """Create the durables of the egress of this configuration, so that an interest stream keeps every new message
        from promotion on: egress may read the stream only later.
        """
        if plan.config.get("retention") != INTEREST or plan.is_renamed or self._role != "egress":
            return
        site = self._settings.site
        for feed in self._settings.egress.feeds_of(plan.name):
            for number, subject in enumerate(feed.filters()):
                name = durable_name_prefix(site, feed.name, number)
                config = durable_config(name, INTEREST, plan.end + 1, subject, client.server_version)
                try:
                    await create_consumer(client, plan.name, config)
                except (ApiError, Refused) as error:
                    self._progress.print(
                        f"note: no consumer was created for egress ({error.message}): messages published before "
                        "egress reads the stream again are not kept for it"
                    )

    def _record(self, plan: RestorePlan, filled: StreamInfo) -> None:
        """Record for egress which stream this is: without messages it could not recognize the stream. Blocking."""
        if plan.is_renamed:
            return
        newest = plan.newest
        ends = {c.chain.partition: c.range.rows.last for c in plan.chains if c.chain.incarnation == newest.incarnation}
        at = format_time(int(self._clock.now() * NS_PER_S))
        seen = filled.time if filled.leader else ""
        skipped = plan.last_sequence if plan.last_sequence > plan.end else 0
        self._captures.put(newest, CapturedRestore(at, plan.end, filled.created, plan.created, ends, seen, skipped))
