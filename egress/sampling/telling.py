"""What a sampled feed tells about itself."""

from __future__ import annotations

from common.chain import Chain
from common.errors import FloeError
from common.segments.snapshots import SnapshotRef
from common.service.logs import get_logger
from common.service.metrics import begin
from egress import metrics
from egress.sampling.sampler import Choices

log = get_logger("egress.sampling")


class SamplingReport:
    """The report of one chain's sampling."""

    def __init__(self, chain: Chain) -> None:
        self._labels = chain.site, chain.feed, str(chain.partition)
        self._chain = chain
        begin("egress_", "sampled", site=chain.site, feed=chain.feed, partition=str(chain.partition))

    def chose(self, choices: Choices) -> None:
        """A batch was sampled."""
        metrics.sample_keys_missing.labels(*self._labels).inc(choices.missing)
        metrics.forced_copies.labels(*self._labels).inc(choices.forced)

    def tracks(self, values: int) -> None:
        """So many values are known."""
        metrics.tracked_values.labels(*self._labels).set(values)

    def written(self, ref: SnapshotRef, seconds: float) -> None:
        """A snapshot was encoded, put and read back."""
        metrics.snapshots.labels(*self._labels, "written").inc()
        metrics.snapshot_seconds.labels(*self._labels).observe(seconds)
        log.info("snapshot written", action="snapshot_written", **ref.log_context())

    def failed(self, position: int, error: FloeError | OSError) -> None:
        """A snapshot could not be written; the next one that is due is tried."""
        metrics.snapshots.labels(*self._labels, "failed").inc()
        log.warning(
            "snapshot not written",
            action="snapshot_failed",
            position=position,
            code=error.code if isinstance(error, FloeError) else "E-SPOOL",
            error=str(error),
            **self._chain.log_context(),
        )
