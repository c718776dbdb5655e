"""What a feed tells about itself: metrics, readiness and the status page."""

from __future__ import annotations

from typing import Any

from common.chain import Chain
from common.errors import FloeError, Stopped
from common.segments.parquet import SpooledSegment
from common.service.logs import get_logger
from common.service.monitor import Health
from egress import metrics
from egress.builder import Close
from egress.identity import Evidence, Kind, Source, Verdict

log = get_logger("egress.feed")

NANOSECONDS = 1_000_000_000


class FeedReport:
    """The report of one feed's chain."""

    def __init__(self, feed: Chain, stream: str, health: Health) -> None:
        self._labels = feed.site, feed.feed, str(feed.partition)
        self._part = f"egress {feed.feed}" + (f"/{feed.partition}" if feed.partition else "")
        self._health = health
        self._chain = feed
        self._status: dict[str, Any] = {"stream": stream}
        self._failure = ""
        for each in (metrics.stopped, metrics.waiting, metrics.lost, metrics.lease_held, metrics.unverified):
            each.labels(*self._labels).set(0)

    def state(self, state: str, *, ready: bool, why: str = "", hint: str = "") -> None:
        """Show what the feed is doing; `why` where it is not ready."""
        self._status.update(state=state, why=why, hint=hint)
        self._health.set_ready(self._part, ready, why)
        self._health.set_status(self._part, self._status)

    def standby(self, holder: str | None) -> None:
        """Another instance works on the chain."""
        metrics.lease_held.labels(*self._labels).set(0)
        self._status.update(holder=holder or "")
        self.state("standby", ready=True)

    def working(self) -> None:
        """This instance holds the lease."""
        metrics.lease_held.labels(*self._labels).set(1)
        self._status.update(holder="this instance")
        self.state("starting", ready=False, why="starting")

    def reading(self, chain: Chain, first: int, end: int) -> None:
        """Messages are read from `first` on; the archive ends at `end`."""
        self._chain = chain
        self._status.update(incarnation=chain.incarnation, position=first, end=end)
        metrics.incarnation.labels(*self._labels).set(chain.incarnation)
        metrics.end_sequence.labels(*self._labels).set(end)
        metrics.stopped.labels(*self._labels).set(0)
        self.works()

    def works(self) -> None:
        """Whatever was asked was answered."""
        metrics.waiting.labels(*self._labels).set(0)
        self._failure = ""
        self.state("reading", ready=True)

    def waits(self, error: FloeError) -> None:
        """A server cannot be reached; it is tried again."""
        metrics.waiting.labels(*self._labels).set(1)
        if error.message != self._failure:
            self._failure = error.message
            log.warning(
                "waiting", action="waiting", code=error.code, error=str(error), **self._chain.log_context()
            )
        self.state("waiting", ready=False, why=error.message, hint=error.hint)

    def stopped(self, error: FloeError) -> None:
        """The chain waits for an operator."""
        metrics.stopped.labels(*self._labels).set(1)
        if error.message != self._failure:
            self._failure = error.message
            log.error(
                "chain stopped",
                action="chain_stopped",
                code=error.code,
                error=str(error),
                **self._chain.log_context(),
            )
        self.state("stopped", ready=False, why=error.message, hint=error.hint)

    def doubt(self, reason: str, text: str) -> None:
        """A reader was given up."""
        metrics.doubts.labels(*self._labels, reason).inc()
        log.info("reader given up", action="doubt", reason=reason, text=text, **self._chain.log_context())
        self.state("checking", ready=False, why=text)

    def judged(self, evidence: Evidence, verdict: Verdict) -> None:
        """The stream was compared with the archive."""
        metrics.unverified.labels(*self._labels).set(verdict.kind is Kind.UNVERIFIED)
        if verdict.drifted and not self._status.get("drifted"):
            log.warning(
                "created drifted", action="created_drifted", why=verdict.why, **self._chain.log_context()
            )
        metrics.drifted.labels(*self._labels).set(verdict.drifted)
        self._status.update(verdict=verdict.kind.value, drifted=verdict.drifted)
        if evidence.source is not None:
            self._seen(evidence.source)
        self._health.set_status(self._part, self._status)

    def _seen(self, source: Source) -> None:
        metrics.source_sequence.labels(*self._labels).set(source.last)
        if source.last_timestamp_ns is not None:
            metrics.source_timestamp.labels(*self._labels).set(source.last_timestamp_ns / NANOSECONDS)
        self._status.update(source_last=source.last)

    def lost(self, sequences: int) -> None:
        """So many sequences under existing coverage are in neither archive nor stream."""
        metrics.lost.labels(*self._labels).set(sequences)
        self._status.update(lost=sequences)

    def sealed(self, spooled: SpooledSegment, why: Close) -> None:
        """A segment was finished in the spool."""
        metrics.closed.labels(*self._labels, why.value).inc()
        log.debug(
            "segment sealed", action="segment_sealed", reason=why.value, coverage=str(spooled.footer.coverage)
        )

    def put(self, spooled: SpooledSegment, seconds: float) -> None:
        """A segment was put, read back and announced."""
        footer = spooled.footer
        metrics.segments.labels(*self._labels).inc()
        metrics.messages.labels(*self._labels).inc(footer.rows)
        metrics.raw_bytes.labels(*self._labels).inc(footer.raw_bytes)
        metrics.stored_bytes.labels(*self._labels).inc(spooled.size)
        metrics.put_seconds.labels(*self._labels).observe(seconds)
        metrics.end_sequence.labels(*self._labels).set(footer.coverage.last)
        for reason, count in footer.ledger.counts.items():
            metrics.left_out.labels(*self._labels, reason.value).inc(count)
        if footer.last_timestamp_ns is not None:
            metrics.end_timestamp.labels(*self._labels).set(footer.last_timestamp_ns / NANOSECONDS)
        self._status.update(end=footer.coverage.last)
        self._health.set_status(self._part, self._status)


def stopped_error(verdict: Verdict, chain: Chain, stream: str) -> Stopped:
    """Why the chain stops on a verdict, with the choices that there are."""
    where = f"{chain}: stream {stream}"
    other_feed = "or freeze what it is now as a feed of its own: give this one another `name`"
    code, hint = {
        Kind.GONE: ("E-SOURCE-GONE", "make the stream again: then its next incarnation begins"),
        Kind.RECREATED: ("E-RECREATED", "set on_recreated: continue to begin its next incarnation"),
        Kind.ROLLED_BACK: ("E-ROLLED-BACK", f"restore the stream to where it was; {other_feed}"),
        Kind.FORKED: ("E-FORKED", f"bring back the stream that was archived last; {other_feed}"),
    }.get(
        verdict.kind, ("E-IDENTITY", f"compare it with the archive (floe segments ls {chain}); {other_feed}")
    )
    return Stopped(f"{where} is {verdict.kind.value.replace('_', ' ')}: {verdict.why}", hint=hint, code=code)
