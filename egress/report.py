"""Report of a feed: metrics, readiness and the status page."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from prometheus_client import Gauge

from common.chain import Chain
from common.clock import NS_PER_S, Clock, SystemClock
from common.errors import DataError, FloeError
from common.exits import command
from common.jetstream.api import StreamInfo, ask
from common.jetstream.client import FloeClient
from common.jetstream.lease import owner_text
from common.logs import get_logger
from common.metrics import begin
from common.segments.alive import STANDBY, ChainSign
from common.segments.documents import SnapshotRef
from common.segments.segment import UNREAD, Reason
from common.segments.writer import SpooledSegment
from common.service.monitor import Health
from common.service.process import Threads
from common.settings.types import counted
from common.subjects import matches
from common.tasks import told
from egress import metrics
from egress.builder import Close, OpenSegment
from egress.identity import Evidence, SourceVerdict, VerdictKind
from egress.partition import Partition

log = get_logger(__name__)


class SamplingReport:
    """Report of one chain's sampling."""

    def __init__(self, chain: Chain) -> None:
        self._labels = chain.site, chain.feed, str(chain.partition)
        self._chain = chain
        begin("egress_", "sampled", site=chain.site, feed=chain.feed, partition=str(chain.partition))

    def chose(self, missing: int, forced: int) -> None:
        metrics.sample_keys_missing.labels(*self._labels).inc(missing)
        metrics.forced_copies.labels(*self._labels).inc(forced)

    def tracks(self, values: int) -> None:
        metrics.tracked_values.labels(*self._labels).set(values)

    def written(self, ref: SnapshotRef, seconds: float) -> None:
        metrics.snapshots.labels(*self._labels, "written").inc()
        metrics.snapshot_seconds.labels(*self._labels).observe(seconds)
        stored = {"position": ref.position, "bytes": ref.size, "seconds": round(seconds, 3)}
        log.info("snapshot written", action="snapshot_written", **stored, **ref.log_context())

    def failed(self, position: int, error: FloeError | OSError) -> None:
        metrics.snapshots.labels(*self._labels, "failed").inc()
        code = error.code if isinstance(error, FloeError) else "E-SPOOL"
        context = {"position": position, "code": code, "error": str(error), **self._chain.log_context()}
        log.warning("snapshot not written", action="snapshot_failed", **context)


@dataclass(frozen=True, slots=True)
class Unmatched:
    """Messages that match no filter. `example`: one of their subjects, empty if there are none.

    `is_complete`: all subjects of the stream were checked.
    """

    messages: int = 0
    subjects: int = 0
    example: str = ""
    is_complete: bool = True

    def told(self) -> dict[str, Any]:
        return {"messages": self.messages, "subjects": self.subjects, "example": self.example}

    def __str__(self) -> str:
        least = "" if self.is_complete else "at least "
        such = "" if self.subjects == 1 else "such as "
        count = f"{least}{counted(self.messages, 'message')} on {counted(self.subjects, 'subject')}"
        return f"{count}, {such}{self.example},"


@dataclass(frozen=True, slots=True)
class LeftOut:
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
        self._since = self._clock.now()
        self._source_asked: float | None = None
        self._status: dict[str, Any] = {"site": feed.site, "stream": stream}
        self._failure, self._had_durable, self._is_stalled, self._has_looped = "", False, False, False
        self._failed_at, self._end_before, self._is_waiting = 0.0, 0, False
        self._held: FloeError | None = None
        self._left: Callable[[], float] = lambda: math.inf
        self._open: Callable[[], OpenSegment | None] = lambda: None
        self._status["open_segment"] = self._open_segment  # called when the page is requested
        begin("egress_", site=feed.site, feed=feed.feed, partition=str(feed.partition))
        for prefix in ("egress_", "segment_"):
            begin(prefix, site=feed.site, feed=feed.feed)
        metrics.expiry.labels(*self._labels).set_function(lambda: self._left())
        figures = (metrics.open_messages, "messages"), (metrics.open_bytes, "size"), (metrics.open_age, "age")
        for gauge, field in figures:
            gauge.labels(*self._labels).set_function(partial(self._figure, field))
        metrics.waiting.labels(*self._labels).set_function(lambda: float(self._is_waiting or self._is_cut_off()))
        of_chain = (metrics.stopped, metrics.lost, metrics.lease_held, metrics.unverified, metrics.put_done)
        for each in (*of_chain, metrics.damaged, metrics.stalled):
            self._set(each, 0)
        for reason in UNREAD:
            metrics.left_out.labels(*self._labels, reason.value)

    def _is_cut_off(self) -> bool:
        """True if the store is silent for a chain at work: that is known long before a call of the chain ends."""
        return self.works_on_chain and bool(self._health.why("objects"))

    def _set(self, gauge: Gauge, value: float) -> None:
        gauge.labels(*self._labels).set(value)

    def _log(self, level: str, event: str, **context: object) -> None:
        getattr(log, level)(event, **context, **self._chain.log_context())

    def _show(self, **found: object) -> None:
        self._status.update(found)
        self._health.set_status(self._part, self._status)

    def state(self, state: str, *, ready: bool, why: str = "", hint: str = "", code: str = "", **more: object) -> None:
        if (state, code) != (self._status.get("state"), self._status.get("code")):
            self._since = self._clock.now()
        self._health.set_ready(self._part, ready, why)
        self._show(state=state, why=why, hint=hint, code=code, **more)

    def standby(self, holder: str | None) -> None:
        self._set(metrics.lease_held, 0)
        self._left = lambda: math.inf  # the holder of the lease reports it
        if self._status.get("state") == "waiting":
            self._over()
        self._failure, self._is_waiting = "", False  # of a stopped chain: the holder reports it now
        self._show(holder=owner_text(holder or ""))
        self._stand_by()

    def _stand_by(self) -> None:
        if (held := self._held) is None:
            self.state(STANDBY, ready=True)
        else:
            self.state(STANDBY, ready=False, why=held.message, hint=held.hint, code=held.code)

    def holds(self, error: FloeError | None) -> None:
        """Report rows that were received, that a standby cannot put, and no process can read again; None: there are
        none.
        """
        if error is not None and str(error) != str(self._held):
            self._log("error", "held rows wait", action="held_waits", code=error.code, error=str(error))
        self._held = error
        if self._status.get("state") == STANDBY:
            self._stand_by()

    def working(self) -> None:
        self._set(metrics.lease_held, 1)
        self.state("starting", ready=False, why="starting", holder="this instance")

    def follow(self, chain: Chain) -> None:
        """Report on this incarnation from now on, including the errors that stop it."""
        self._chain = chain
        self._status.update(chain=str(chain), incarnation=chain.incarnation)
        self._set(metrics.incarnation, chain.incarnation)

    def recreated(self) -> None:
        """Count the next incarnation, which begins because the stream is another or was set back."""
        metrics.recreated.labels(*self._labels).inc()

    def reading(self, chain: Chain, first: int, end: int, begin: int = 1) -> None:
        """Report that messages are read from `first` on; everything before is accounted for. `end`: of the archive.

        `begin`: the first sequence of the chain; earlier messages of the stream need not be archived.
        """
        self.follow(chain)
        self._status.update(position=first, end=end, first=begin)
        self._end_before = end
        self._set(metrics.end_sequence, max(end, begin - 1))
        self._set(metrics.stopped, 0)
        self.works()
        self._log("info", "reading", action="reading", stream=self.stream, first=first, archived=end)

    def works(self) -> None:
        self._is_waiting = False
        self._over()
        self.state("reading", ready=True)

    def closing(self, missing: Sequence[int]) -> None:
        self._set(metrics.stopped, 0)
        self._is_waiting = False
        self._over()
        numbers = ", ".join(map(str, missing))
        self.state("closing", ready=True, why=f"waiting for partitions {numbers}")

    def waits(self, error: FloeError) -> None:
        self._is_waiting = True
        if self._is_new(error):
            self._log("warning", "waiting", action="waiting", code=error.code, error=str(error))
        self.state("waiting", ready=False, why=error.message, hint=error.hint, code=error.code)

    def stopped(self, error: FloeError) -> None:
        self._set(metrics.stopped, 1)
        if self._is_new(error):
            self._log("error", "chain stopped", action="chain_stopped", code=error.code, error=str(error))
        self.state("stopped", ready=False, why=error.message, hint=error.hint, code=error.code)

    def fails(self, error: BaseException) -> None:
        known = told(error, "feed", f"chain {self._chain}", **self._chain.log_context())
        self._is_new(known)
        self._set(metrics.stopped, 1)
        self.state("stopped", ready=False, why=known.message, hint=known.hint, code=known.code)

    def _is_new(self, error: FloeError) -> bool:
        """Note the error, which lasts until `_over`. Return True if it is new."""
        if not self._failure:
            self._failed_at = self._clock.monotonic()
        former, self._failure = self._failure, error.message
        return former != error.message

    def _over(self) -> None:
        if self._failure:
            seconds, trouble = round(self._clock.monotonic() - self._failed_at, 1), self._failure
            self._failure = ""
            self._log("info", "goes on", action="over", seconds=seconds, trouble=trouble)

    def doubt(self, reason: str, text: str) -> None:
        metrics.doubts.labels(*self._labels, reason).inc()
        self._log("info", "reader given up", action="doubt", reason=reason, error=text)
        self.state("checking", ready=False, why=text)

    def confirms(self, why: str) -> None:
        """Report that a possible stop is being confirmed; a stop that is in force remains shown."""
        if not self._health.why(self._part):
            self.state("checking", ready=False, why=why)

    def judged(self, evidence: Evidence, verdict: SourceVerdict) -> None:
        self._set(metrics.unverified, verdict.kind is VerdictKind.UNVERIFIED)
        if verdict.drifted and not self._status.get("drifted"):
            self._log("warning", "created drifted", action="created_drifted", error=verdict.why)
        self._set(metrics.drifted, verdict.drifted)
        self._status.update(verdict=verdict.kind.value, drifted=verdict.drifted)
        if evidence.source is not None:
            self.source(evidence.source.last, evidence.source.last_timestamp_ns)

    def source(self, last: int, last_timestamp_ns: int | None) -> None:
        self._source_asked, end = self._clock.now(), self._status.get("end") or 0
        # Sequences archived since that answer are in the stream too, unless it was rolled back.
        last, self._end_before = max(last, end) if last >= self._end_before else last, end
        self._set(metrics.source_sequence, last)
        self._set(metrics.source_asked, self._source_asked)
        if last_timestamp_ns is not None:
            self._set(metrics.source_timestamp, last_timestamp_ns / NS_PER_S)
        self._show(source_last=last)

    @property
    def works_on_chain(self) -> bool:
        return self._status.get("state") != STANDBY

    def sign(self) -> ChainSign:
        told, asked = self._status, self._source_asked
        ends = told.get("end"), told.get("source_last")
        said = told["state"], self._since, told["code"], told["why"], *ends, asked
        return ChainSign(*said, first=told.get("first"), chain=self._chain)

    def lost(self, sequences: int) -> None:
        self._set(metrics.lost, sequences)
        self._status.update(lost=sequences)

    def damaged(self, found: Mapping[str, str]) -> None:
        self._set(metrics.damaged, len(found))
        for key in found.keys() - self._status.get("damaged", {}).keys():
            away = command("segments quarantine", shlex.quote(key))
            hint = f"left out, and read again as far as the stream holds it; to put it away: {away}"
            self._log("error", "segment damaged", action="segment_damaged", key=key, error=found[key], hint=hint)
        self._show(damaged=dict(found))

    def stalled(self, pending: str, since: float) -> None:
        """Report that nothing moves for `since` seconds though something is `pending`; logged once, until it moves."""
        self._set(metrics.stalled, 1)
        if not self._is_stalled:
            self._is_stalled = True
            context = {"code": "E-STALLED", "pending": pending, "seconds": round(since)}
            self._log("error", "chain stalled", action="stalled", **context)
        why = f"{pending}, and nothing moves for {since:.0f} s"
        self.state("stalled", ready=False, why=why, code="E-STALLED")

    def moves(self) -> None:
        self._set(metrics.stalled, 0)
        if self._is_stalled:
            self._is_stalled = False
            self._log("info", "chain moves again", action="moves")
            if self._status.get("state") == "stalled":
                self.state("reading", ready=True)

    def opens(self, look: Callable[[], OpenSegment | None] = lambda: None) -> None:
        """Set the source of the open segment: `look` is called from any thread, at each request; by default there is
        none.
        """
        self._open = look

    def _open_segment(self) -> dict[str, Any] | None:
        found = self._open()
        return None if found is None else found.told()

    def _figure(self, field: str) -> float:
        return float(getattr(self._open(), field, 0))

    def expires(self, left: Callable[[], float]) -> None:
        """Set `left`: returns the seconds until the stream expires messages not archived; infinite if it does not."""
        self._left = left

    def unmatched(self, found: Unmatched) -> None:
        metrics.unmatched.labels(*self._labels[:2]).set(found.messages)
        known = self._status.get("unmatched", {"messages": 0, "subjects": 0})
        told = found.told()
        if found.subjects and found.subjects != known["subjects"]:
            context = {"complete": found.is_complete, **told}
            self._log("warning", "subjects that no partition takes", action="unmatched", **context)
        self._show(unmatched=told)

    def looped(self, count: int) -> None:
        if self._has_looped:
            return
        self._has_looped = True
        what = (
            "messages archived here came back: another site copies what it got from here. They are archived "
            "once and left out as looped, but each leaves one more copy in the stream"
        )
        hint = (
            "let no `sources` carry back what came from this site; where only Floe writes the stream, "
            "its feed is to say `relay: true`"
        )
        self._log("warning", what, action="looped", stream=self.stream, messages=count, hint=hint)

    def durable(self, lapsed: StreamInfo | None, first: int, *, has_begun: bool) -> None:
        """Report a new durable, to read from `first` on. `lapsed`: as in `Reader`; `has_begun`: something was archived
        before, so a durable should have existed.
        """
        has_begun, self._had_durable = has_begun or self._had_durable, True
        if lapsed is None:
            return
        gone = max(0, min(lapsed.first_sequence - 1, lapsed.last_sequence) - first + 1)
        hint = f"before anything is published the durable is made by {command('egress init')}"
        context = {"first": first, "last": lapsed.last_sequence, "gone": gone, "hint": hint}
        what = "an interest stream without a durable keeps nothing for this feed"
        self._log("error" if has_begun else "warning", what, action="interest_lapsed", **context)
        if has_begun:
            metrics.interest_lapsed.labels(*self._labels).inc()

    def sealed(self, spooled: SpooledSegment, why: Close) -> None:
        metrics.closed.labels(*self._labels, why.value).inc()
        coverage = str(spooled.footer.coverage)
        log.debug("segment sealed", action="segment_sealed", reason=why.value, coverage=coverage)

    def put(self, spooled: SpooledSegment, seconds: float) -> None:
        footer = spooled.footer
        metrics.segments.labels(*self._labels).inc()
        metrics.messages.labels(*self._labels).inc(footer.rows)
        metrics.raw_bytes.labels(*self._labels).inc(footer.raw_bytes)
        metrics.stored_bytes.labels(*self._labels).inc(spooled.size)
        metrics.put_seconds.labels(*self._labels).observe(seconds)
        self._set(metrics.put_done, self._clock.now())
        self._set(metrics.end_sequence, footer.coverage.last)
        for reason, count in footer.ledger.counts.items():
            metrics.left_out.labels(*self._labels, str(reason)).inc(count)
        if gone := footer.ledger.counts.get(Reason.GONE_FROM_HOLE):
            what = "a hole was filled, but the stream holds no more of it all; ingress stops there"
            self._log("warning", what, action="gone_from_hole", sequences=gone, range=str(footer.unread))
        if footer.last_timestamp_ns is not None:
            self._set(metrics.end_timestamp, footer.last_timestamp_ns / NS_PER_S)
        end, last = footer.coverage.last, self._status.get("source_last")
        if last is not None and last < end:  # that answer was older
            self._set(metrics.source_sequence, end)
            self._status["source_last"] = end
        self._show(position=end + 1, end=end)


LOOK_EVERY = 600.0  # seconds
MAX_SUBJECTS = 1_000_000  # subjects checked; further ones are not counted


async def look(
    client: FloeClient, stream: str, filters: Sequence[str], threads: Threads, within: str = ">"
) -> Unmatched:
    """Return the messages without a matching filter, of the first MAX_SUBJECTS subjects that match `within`.

    Raises Unavailable, DataError.
    """
    found, offset = Unmatched(), 0
    while offset < MAX_SUBJECTS:
        request = {"subjects_filter": within, "offset": offset}
        answer = await ask(client, f"STREAM.INFO.{stream}", request, timeout=30.0)
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


async def watch(partition: Partition, client: FloeClient, threads: Threads, report: FeedReport, clock: Clock) -> None:
    """Check now and every ten minutes, and update `report`, until cancelled.

    Only for partition 0 of a feed that is cut into partitions: a feed with a single filter wants no other subjects.
    """
    if partition.number or not partition.settings.is_partitioned:
        return
    try:
        while True:
            try:
                report.unmatched(await look(client, partition.stream, partition.settings.filters(), threads))
            except FloeError as error:
                log.info("subjects not looked at", action="unmatched_put_off", error=str(error))
            await clock.sleep(LOOK_EVERY)
    finally:
        report.unmatched(Unmatched())  # the next check reports it
