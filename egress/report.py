"""Report of a feed: metrics, readiness and the status page."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from prometheus_client import Gauge

from common.archive.documents import SnapshotRef
from common.archive.heartbeats import STANDBY, ChainHeartbeat
from common.archive.segment import Reason
from common.archive.store import quarantine_command
from common.archive.writer import SpooledSegment
from common.chain import Chain
from common.clock import NS_PER_S, Clock, SystemClock, parse_time
from common.errors import DataError, FloeError
from common.exits import floe_command
from common.logs import get_logger
from common.metrics import remove_series, show_zeros
from common.nats.api import RESTORING_CODE, StreamInfo, query
from common.nats.client import FloeClient
from common.nats.lease import format_owner
from common.observe.monitor import Health
from common.service.process import ThreadPool
from common.settings.types import format_count
from common.subjects import matches
from common.tasks import record_unexpected
from egress import metrics
from egress.builder import ClosedBy, OpenSegment
from egress.identity import CODES, Evidence, SourceVerdict, VerdictKind
from egress.partition import THIS_INSTANCE, Partition

log = get_logger(__name__)

SOURCE_GONE_CODE = CODES[VerdictKind.GONE]
DELETED = "deleted"  # state of a chain whose stream was deleted on purpose


class SamplingReport:
    """Report of one chain's sampling."""

    def __init__(self, chain: Chain) -> None:
        self._labels = chain.site, chain.feed, str(chain.partition)
        self._chain = chain
        show_zeros("egress_", "sampled", site=chain.site, feed=chain.feed, partition=str(chain.partition))

    def count_choices(self, missing: int, forced: int) -> None:
        metrics.sample_keys_missing.labels(*self._labels).inc(missing)
        metrics.forced_copies.labels(*self._labels).inc(forced)

    def set_tracked(self, values: int) -> None:
        metrics.tracked_values.labels(*self._labels).set(values)

    def record_snapshot(self, ref: SnapshotRef, seconds: float) -> None:
        metrics.snapshots.labels(*self._labels, "written").inc()
        metrics.snapshot_seconds.labels(*self._labels).observe(seconds)
        stored = {"position": ref.position, "bytes": ref.size, "seconds": round(seconds, 3)}
        log.info("snapshot written", action="snapshot_written", **stored, **ref.log_context())

    def record_failure(self, position: int, error: FloeError | OSError) -> None:
        metrics.snapshots.labels(*self._labels, "failed").inc()
        code = error.code if isinstance(error, FloeError) else "E-SPOOL"
        context = {"position": position, "code": code, "error": str(error), **self._chain.log_context()}
        log.warning("snapshot failed", action="snapshot_failed", **context)


@dataclass(frozen=True, slots=True)
class Unmatched:
    """Messages that match no filter. `example`: one of their subjects, empty if there are none.

    `is_complete`: all subjects of the stream were checked.
    """

    messages: int = 0
    subjects: int = 0
    example: str = ""
    is_complete: bool = True

    def as_dict(self) -> dict[str, Any]:
        return {"messages": self.messages, "subjects": self.subjects, "example": self.example}

    def __str__(self) -> str:
        least = "" if self.is_complete else "at least "
        such = "" if self.subjects == 1 else "such as "
        count = f"{least}{format_count(self.messages, 'message')} on {format_count(self.subjects, 'subject')}"
        return f"{count}, {such}{self.example},"


@dataclass(frozen=True, slots=True)
class NewlyUnmatched:
    """Messages that match the old filter `filter_subject` (empty: all), and no new one."""

    filter_subject: str
    found: Unmatched

    def __str__(self) -> str:
        verb = "belongs" if self.found.messages == 1 else "belong"
        return f"{self.filter_subject or '>'}: {self.found} {verb} to no partition any more"


def unmatched(subjects: Mapping[str, int], filters: Sequence[str]) -> Unmatched:
    left = {each: count for each, count in subjects.items() if not any(matches(taken, each) for taken in filters)}
    return Unmatched(sum(left.values()), len(left), min(left, default=""))


class FeedReport:
    """Report of one feed's chain."""

    def __init__(self, feed: Chain, stream: str, health: Health, clock: Clock | None = None) -> None:
        self._labels = feed.site, feed.feed, str(feed.partition)
        self._part = f"egress {feed.feed}" + (f"/{feed.partition}" if feed.partition else "")
        self._health, self._chain, self.stream = health, feed, stream
        self._clock = clock or SystemClock()
        self._source_asked: float | None = None
        self._status: dict[str, Any] = {"site": feed.site, "stream": stream, "since": self._clock.now()}
        self._failure, self._had_durable, self._is_stalled, self._has_looped = "", False, False, False
        self._failed_at, self._end_before, self._is_waiting = 0.0, 0, False
        self._held: FloeError | None = None
        self._is_as_archived = True
        self.deleted_at_ns = 0  # the time of the announcement; 0: none
        self._seconds_left: Callable[[], float] = lambda: math.inf
        self._open: Callable[[], OpenSegment | None] = lambda: None
        self._status["open_segment"] = self._open_segment  # called when the page is requested
        show_zeros("egress_", site=feed.site, feed=feed.feed, partition=str(feed.partition))
        show_zeros("segment_", site=feed.site, feed=feed.feed)
        metrics.expiry.labels(*self._labels).set_function(lambda: self._seconds_left())
        figures = (metrics.open_messages, "messages"), (metrics.open_bytes, "size"), (metrics.open_age, "age")
        for gauge, field in figures:
            gauge.labels(*self._labels).set_function(partial(self._figure, field))
        metrics.waiting.labels(*self._labels).set_function(lambda: float(self._is_waiting or self._is_store_silent()))
        self._set(metrics.put_done, 0)
        self._reset_gauges()

    def _reset_gauges(self) -> None:
        """Set the gauges that only the holder of the lease reports to 0."""
        of_source = metrics.source_gone, metrics.unverified, metrics.drifted
        for each in (metrics.lease_held, metrics.stopped, metrics.stalled, metrics.lost, metrics.damaged, *of_source):
            self._set(each, 0)

    def _is_store_silent(self) -> bool:
        """True if the store is silent for a chain at work: that is known long before a call of the chain ends."""
        return self.works_on_chain and bool(self._health.not_ready_reason("objects"))

    def _set(self, gauge: Gauge, value: float) -> None:
        gauge.labels(*self._labels).set(value)

    def _log(self, level: str, event: str, **context: object) -> None:
        getattr(log, level)(event, **context, **self._chain.log_context())

    def _show(self, **found: object) -> None:
        self._status.update(found)
        self._health.set_status(self._part, self._status)

    def set_state(
        self, state: str, *, ready: bool, reason: str = "", hint: str = "", code: str = "", **more: object
    ) -> None:
        if (state, code) != (self._status.get("state"), self._status.get("code")):
            self._status["since"] = self._clock.now()
        self._health.set_ready(self._part, ready, reason)
        self._show(state=state, why=reason, hint=hint, code=code, **more)

    def _show_error(self, state: str, error: FloeError) -> None:
        self.set_state(state, ready=False, reason=error.message, hint=error.hint, code=error.code)

    def set_standby(self, holder: str | None) -> None:
        self._reset_gauges()
        self._is_stalled = False
        self._seconds_left = lambda: math.inf  # the holder of the lease reports it
        if self._status.get("state") == "waiting":
            self._log_recovery()
        self._failure, self._is_waiting = "", False  # of a stopped chain: the holder reports it now
        self._show(holder=format_owner(holder or ""))
        self._show_standby()

    def _show_standby(self) -> None:
        if (held := self._held) is None:
            self.set_state(STANDBY, ready=True)
        else:
            self._show_error(STANDBY, held)

    def set_held(self, error: FloeError | None) -> None:
        """Report rows that were received, that a standby cannot put, and no process can read again; None: there are
        none.
        """
        if error is not None and str(error) != str(self._held):
            self._log("error", "received rows held", action="rows_held", code=error.code, error=str(error))
        self._held = error
        if self._status.get("state") == STANDBY:
            self._show_standby()

    def set_starting(self) -> None:
        self._set(metrics.lease_held, 1)
        self.set_state("starting", ready=False, reason="starting", holder=THIS_INSTANCE)

    def follow(self, chain: Chain) -> None:
        """Report on this incarnation from now on, including the errors that stop it."""
        self._chain = chain
        self._status.update(chain=str(chain), incarnation=chain.incarnation)
        self._set(metrics.incarnation, chain.incarnation)

    def count_recreated(self) -> None:
        """Count the next incarnation, which begins because the stream is another or was set back."""
        metrics.recreated.labels(*self._labels).inc()

    def set_reading(self, chain: Chain, first: int, end: int, begin: int = 1) -> None:
        """Report that messages are read from `first` on; everything before is accounted for. `end`: of the archive.

        `begin`: the first sequence of the chain; earlier messages of the stream need not be archived.
        """
        self.follow(chain)
        self._status.update(position=first, end=end, first=begin)
        self._end_before = end
        self._set(metrics.end_sequence, max(end, begin - 1))
        self._set(metrics.stopped, 0)
        self.set_working()
        self._log("info", "reading begun", action="reading_begun", stream=self.stream, first=first, archived=end)

    def set_working(self) -> None:
        self._is_waiting = False
        self._log_recovery()
        self.set_state("reading", ready=True)

    def set_closing(self, missing: Sequence[int]) -> None:
        self._set(metrics.stopped, 0)
        self._is_waiting = False
        self._log_recovery()
        numbers = ", ".join(map(str, missing))
        self.set_state("closing", ready=True, reason=f"waiting for partitions {numbers}")

    def set_waiting(self, error: FloeError) -> None:
        self._is_waiting = True
        if self._is_new(error):
            self._log("warning", "service not reached", action="chain_waiting", code=error.code, error=str(error))
        self._show_error("waiting", error)

    def announce_deletion(self, at_ns: int) -> None:
        """Record that the stream was deleted on purpose: without it, the chain is not stopped. An announcement for a
        stream that was gone before, or that a restore fills, is of another deletion, and is ignored.
        """
        if self._status.get("code") not in (SOURCE_GONE_CODE, RESTORING_CODE):
            self.deleted_at_ns = at_ns

    @property
    def is_deleted(self) -> bool:
        """True if this process works on the chain, and found the stream gone after its deletion was announced."""
        return self._status.get("state") == DELETED

    @property
    def bounds(self) -> tuple[int, int, int | None]:
        """The first sequence of the chain, the last archived one (0: none), and the stream's last known one. None: not
        known, or another history's than the archive's.
        """
        last = self._status.get("source_last") if self._is_as_archived else None
        return self._status.get("first") or 1, self._status.get("end") or 0, last

    def remove(self) -> None:
        """Remove everything that was reported: the feed has left this process."""
        self._health.remove(self._part)
        labels = dict(zip(metrics.CHAIN, self._labels, strict=True))
        remove_series(labels)
        if labels.pop("partition") == "0":  # which leaves with its feed, or begins again
            remove_series(labels, but="partition")

    def set_stopped(self, error: FloeError) -> None:
        is_gone = error.code == SOURCE_GONE_CODE
        if is_gone and self.deleted_at_ns:
            self._set(metrics.stopped, 0)
            self.set_state(DELETED, ready=True, reason="the stream was deleted")
            return
        self._set(metrics.source_gone, is_gone)
        self._set_stopped()
        if self._is_new(error):
            self._log("error", "chain stopped", action="chain_stopped", code=error.code, error=str(error))
        self._show_error("stopped", error)

    def record_failure(self, error: BaseException) -> None:
        known = record_unexpected(error, "feed", f"chain {self._chain}", **self._chain.log_context())
        self._is_new(known)
        self._set_stopped()
        self._show_error("stopped", known)

    def _set_stopped(self) -> None:
        self._is_waiting = False
        self._set(metrics.stopped, 1)

    def _is_new(self, error: FloeError) -> bool:
        """Note the error, which lasts until `_log_recovery`. Return True if it is new."""
        if not self._failure:
            self._failed_at = self._clock.monotonic()
        former, self._failure = self._failure, error.message
        return former != error.message

    def _log_recovery(self) -> None:
        if self._failure:
            seconds, trouble = round(self._clock.monotonic() - self._failed_at, 1), self._failure
            self._failure = ""
            self._log("info", "chain recovered", action="chain_recovered", seconds=seconds, trouble=trouble)

    def record_reset(self, reason: str, text: str) -> None:
        metrics.resets.labels(*self._labels, reason).inc()
        self._log("info", "reader reset", action="reader_reset", reason=reason, error=text)
        self.set_state("checking", ready=False, reason=text)

    def set_checking(self, reason: str) -> None:
        """Report that a possible stop is being confirmed; a stop or deletion that is in force remains shown."""
        if not self._health.not_ready_reason(self._part) and not self.is_deleted:
            self.set_state("checking", ready=False, reason=reason)

    def record_verdict(self, evidence: Evidence, verdict: SourceVerdict) -> None:
        self._set(metrics.unverified, verdict.kind is VerdictKind.UNVERIFIED)
        if verdict.has_drifted and not self._status.get("drifted"):
            self._log("warning", "created drifted", action="created_drifted", error=verdict.reason)
        self._set(metrics.drifted, verdict.has_drifted)
        self._status.update(verdict=verdict.kind.value, drifted=verdict.has_drifted)
        if evidence.source is not None:
            if (evidence.source.server_time_ns or math.inf) >= self.deleted_at_ns:
                self.deleted_at_ns = 0  # it was made again
            self._is_as_archived = verdict.is_same
            self._set(metrics.source_gone, 0)
            self.record_source(evidence.source.last, evidence.source.last_timestamp_ns)
        else:
            with suppress(ValueError):
                if parse_time(evidence.created) >= self.deleted_at_ns:
                    self.deleted_at_ns = 0  # of an earlier stream
            self.record_end(evidence.end)

    def record_end(self, end: int) -> None:
        """Record the end of the archive of a chain that is not read; 0: nothing of it is archived."""
        self._set(metrics.end_sequence, end)
        self._show(end=end)

    def record_source(self, last: int, last_timestamp_ns: int | None) -> None:
        self._source_asked, end = self._clock.now(), self._status.get("end") or 0
        # Sequences archived since that answer are in the stream too, unless it was rolled back.
        last, self._end_before = max(last, end) if last >= self._end_before else last, end
        self._set(metrics.source_sequence, last)
        self._set(metrics.source_asked, self._source_asked)
        if last_timestamp_ns is not None:
            self._set(metrics.source_timestamp, last_timestamp_ns / NS_PER_S)
        self._show(source_last=last)

    def needs_source(self, seconds: float) -> bool:
        """True if a chain at work has not recorded the state of its stream for `seconds`."""
        return self.works_on_chain and self._clock.now() - (self._source_asked or 0.0) >= seconds

    @property
    def works_on_chain(self) -> bool:
        return self._status.get("state") != STANDBY

    def heartbeat(self) -> ChainHeartbeat:
        status, asked_at = self._status, self._source_asked
        ends = status.get("end"), status.get("source_last")
        known = status["state"], status["since"], status["code"], status["why"], *ends, asked_at
        return ChainHeartbeat(*known, first=status.get("first"), chain=self._chain)

    def set_lost(self, sequences: int) -> None:
        self._set(metrics.lost, sequences)
        self._status.update(lost=sequences)

    def set_damaged(self, found: Mapping[str, str]) -> None:
        self._set(metrics.damaged, len(found))
        for key in found.keys() - self._status.get("damaged", {}).keys():
            hint = f"read again if the stream still holds it; to quarantine it: {quarantine_command(key, '--yes')}"
            self._log("error", "segment damaged", action="segment_damaged", key=key, error=found[key], hint=hint)
        self._show(damaged=dict(found))

    def set_stalled(self, pending: str, since: float) -> None:
        """Report that nothing moves for `since` seconds though something is `pending`; logged once, until it moves."""
        self._set(metrics.stalled, 1)
        if not self._is_stalled:
            self._is_stalled = True
            context = {"code": "E-STALLED", "pending": pending, "seconds": round(since)}
            self._log("error", "chain stalled", action="chain_stalled", **context)
        reason = f"{pending}; no progress for {since:.0f} s"
        self.set_state("stalled", ready=False, reason=reason, code="E-STALLED")

    def set_moving(self) -> None:
        self._set(metrics.stalled, 0)
        if self._is_stalled:
            self._is_stalled = False
            self._log("info", "stall recovered", action="stall_recovered")
            if self._status.get("state") == "stalled":
                self.set_state("reading", ready=True)

    def set_open_segment(self, source: Callable[[], OpenSegment | None] = lambda: None) -> None:
        """Set the source of the open segment: `source` is called from any thread, at each request; by default there is
        none.
        """
        self._open = source

    def _open_segment(self) -> dict[str, Any] | None:
        found = self._open()
        return None if found is None else found.as_dict()

    def _figure(self, field: str) -> float:
        return float(getattr(self._open(), field, 0))

    def set_expiry(self, left: Callable[[], float]) -> None:
        """Set `left`: returns the seconds until the stream expires messages not archived; infinite if it does not."""
        self._seconds_left = left

    def set_unmatched(self, found: Unmatched) -> None:
        metrics.unmatched.labels(*self._labels[:2]).set(found.messages)
        known = self._status.get("unmatched", {"messages": 0, "subjects": 0})
        fields = found.as_dict()
        if found.subjects and found.subjects != known["subjects"]:
            context = {"complete": found.is_complete, **fields}
            self._log("warning", "subjects not matched by any partition", action="subjects_unmatched", **context)
        self._show(unmatched=fields)

    def warn_looped(self, count: int) -> None:
        if self._has_looped:
            return
        self._has_looped = True
        hint = (
            "messages archived here came back: another site sends back its copies. They are archived once and left "
            "out as looped, but each leaves one more copy in the stream: let no `sources` bring back messages of this "
            "site; if only Floe writes the stream, set `relay: true` on its feed"
        )
        context = {"stream": self.stream, "messages": count, "hint": hint}
        self._log("warning", "looped messages found", action="messages_looped", **context)

    def record_durable(self, lapsed: StreamInfo | None, first: int, *, has_begun: bool) -> None:
        """Report a new durable, to read from `first` on. `lapsed`: as `interest_lapse` of `Reader`; `has_begun`:
        something was archived before, so a durable should have existed.
        """
        has_begun, self._had_durable = has_begun or self._had_durable, True
        if lapsed is None:
            return
        gone = max(0, min(lapsed.first_sequence - 1, lapsed.last_sequence) - first + 1)
        created_by = f"create the durable before the first message with {floe_command('egress init')}"
        hint = f"an interest stream without a durable keeps no message for this feed: {created_by}"
        context = {"first": first, "last": lapsed.last_sequence, "gone": gone, "hint": hint}
        self._log("error" if has_begun else "warning", "interest lapsed", action="interest_lapsed", **context)
        if has_begun:
            metrics.interest_lapsed.labels(*self._labels).inc()

    def count_sealed(self, spooled: SpooledSegment, reason: ClosedBy) -> None:
        metrics.closed.labels(*self._labels, reason.value).inc()
        coverage = str(spooled.footer.coverage)
        log.debug("segment sealed", action="segment_sealed", reason=reason.value, coverage=coverage)

    def record_put(self, spooled: SpooledSegment, seconds: float, end: int) -> None:
        """Record a put that took `seconds`. `end`: of the archive with it; later than its own if it fills a hole."""
        footer, covered, last = spooled.footer, spooled.footer.coverage.last, self._status.get("source_last")
        metrics.segments.labels(*self._labels).inc()
        metrics.messages.labels(*self._labels).inc(footer.rows)
        metrics.raw_bytes.labels(*self._labels).inc(footer.raw_bytes)
        metrics.received_bytes.labels(*self._labels).inc(footer.raw_bytes + sum(spooled.left_out_bytes.values()))
        for left, size in spooled.left_out_bytes.items():
            metrics.left_out_bytes.labels(*self._labels, left.value).inc(size)
        metrics.stored_bytes.labels(*self._labels).inc(spooled.size)
        metrics.put_seconds.labels(*self._labels).observe(seconds)
        self._set(metrics.put_done, self._clock.now())
        self._set(metrics.end_sequence, end)
        for reason, count in footer.ledger.counts.items():
            metrics.left_out.labels(*self._labels, str(reason)).inc(count)
        if gone := footer.ledger.counts.get(Reason.GONE_FROM_HOLE):
            context = {"sequences": gone, "range": str(footer.unread), "hint": "the rest is lost: ingress stops there"}
            self._log("warning", "hole filled in part", action="hole_unfilled", **context)
        if footer.last_timestamp_ns is not None and covered == end:
            self._set(metrics.end_timestamp, footer.last_timestamp_ns / NS_PER_S)
        if last is not None and last < covered:  # that answer was older
            self._set(metrics.source_sequence, covered)
            self._status["source_last"] = covered
        self._show(position=covered + 1, end=end)


UNMATCHED_INTERVAL_S = 600.0  # seconds
MAX_SUBJECTS = 1_000_000  # subjects checked; further ones are not counted


async def find_unmatched(
    client: FloeClient, stream: str, filters: Sequence[str], threads: ThreadPool, within: str = ">"
) -> Unmatched:
    """Return the messages without a matching filter, of the first MAX_SUBJECTS subjects that match `within`.

    Raises Unavailable, DataError.
    """
    found, offset = Unmatched(), 0
    while offset < MAX_SUBJECTS:
        request = {"subjects_filter": within, "offset": offset}
        answer = await query(client, f"STREAM.INFO.{stream}", request, timeout=30.0)
        page = (answer.get("state") or {}).get("subjects") or {}
        if not isinstance(page, dict):
            raise DataError(f"STREAM.INFO of {stream}: expected subjects, found {page!r:.40}")
        if not page:
            return found
        more = await threads.run(unmatched, page, filters)
        count, subjects = found.messages + more.messages, found.subjects + more.subjects
        found = Unmatched(count, subjects, found.example or more.example)
        offset += len(page)
    return replace(found, is_complete=False)


async def watch_unmatched(
    partition: Partition, client: FloeClient, threads: ThreadPool, report: FeedReport, clock: Clock
) -> None:
    """Check now and every ten minutes, and update `report`, until cancelled.

    Only for partition 0 of a feed that is cut into partitions: a feed with a single filter wants no other subjects.
    """
    if partition.number or not partition.settings.is_partitioned:
        return
    try:
        while True:
            try:
                found = await find_unmatched(client, partition.stream, partition.settings.filters(), threads)
                report.set_unmatched(found)
            except FloeError as error:
                log.info("unmatched subjects check deferred", action="unmatched_check_deferred", error=str(error))
            await clock.sleep(UNMATCHED_INTERVAL_S)
    finally:
        report.set_unmatched(Unmatched())  # the next check reports it
