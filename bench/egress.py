"""`egress.unsampled` and `memory.egress`: a source stream to segments in the store."""

from __future__ import annotations

from bench.floors import fill, raw_read
from bench.harness import Bench, Result, paired
from bench.place import STREAM, Place, archive_end, peak_mb, place, run, store_of, until

COUNT = 400_000


def freeze(at: Place) -> tuple[float, float]:
    """Messages a second from the first stored segment to the last, and the peak resident size in MB.

    From the first segment on, so that the start of the process is left out: a service runs for months.
    """
    config = at.config(at.s3.new_bucket())
    store = store_of(config)
    service = at.service("egress", "egress", "run", "-c", str(config))
    started = until(lambda: archive_end(store) > 0, service)
    first = archive_end(store)
    ended = until(lambda: archive_end(store) >= COUNT, service)
    peak = peak_mb(service)
    assert service.drain() == 0, service.tail()
    return (COUNT - first) / (ended - started), peak


def unsampled() -> Result:
    with place() as at:
        run(fill(at.nats.url, STREAM, COUNT))
        return paired(
            "egress.unsampled",
            "msg/s",
            floor=lambda: run(raw_read(at.nats.url, STREAM, COUNT)),
            value=lambda: freeze(at)[0],
        )


def memory() -> Result:
    with place() as at:
        run(fill(at.nats.url, STREAM, COUNT))
        return Result("memory.egress", freeze(at)[1], "MB")


BENCHES = [
    Bench("egress.unsampled", "msg/s", "ratio >= 0.25", unsampled),
    Bench("memory.egress", "MB", "<= 300", memory),
]
