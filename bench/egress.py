"""Benchmarks `egress.unsampled`, `egress.sampled.*`, `memory.egress`: a source stream to segments in the store."""

import time

from bench.harness import Bench, Figure, paired
from bench.place import STREAM, BenchPlace, archive_end, documents, fill, peak_mb, place, raw_read, run, store_of, until

COUNT = 400_000
SENDERS = 50_000
HOUR = 12 * SENDERS  # messages of senders that publish every five minutes; one in twelve is copied
SAMPLED = {"inspect_field": "sender", "inspect_duration": "1h", "size_trigger": "1K", "segment": {"max_age": "1s"}}


def freeze(at: BenchPlace) -> tuple[float, float]:
    """Return the messages per second from the first stored segment to the last, and the peak resident size in MB.

    The time before the first segment is left out, with the start of the process: a service runs for months.
    """
    config = at.config(at.s3.new_bucket())
    store = store_of(config)
    service = at.service("egress", "egress", "run", "-c", str(config))
    started = until(lambda: archive_end(store) > 0, service)
    first = archive_end(store)
    ended = until(lambda: archive_end(store) >= COUNT, service)
    peak = peak_mb(service)
    assert service.drain(is_known_to_work=True) == 0, service.tail()
    return (COUNT - first) / (ended - started), peak


def unsampled() -> Figure:
    with place() as at:
        run(fill(at.nats.url, STREAM, COUNT))
        return paired(
            "egress.unsampled",
            "msg/s",
            floor=lambda: run(raw_read(at.nats.url, STREAM, COUNT)),
            value=lambda: freeze(at)[0],
        )


def memory() -> Figure:
    with place() as at:
        run(fill(at.nats.url, STREAM, COUNT))
        return Figure("memory.egress", freeze(at)[1], "MB")


def freeze_sampled(at: BenchPlace, count: int) -> float:
    """Return the messages per second between two segments: from the end of the first to that of the last but one.

    Segments close by age, so all of them are late by the same second; the last one waits for messages that do not come.
    """
    config = at.config(at.s3.new_bucket(), SAMPLED)
    store = store_of(config)
    service = at.service("egress", "egress", "run", "-c", str(config))
    seen: list[tuple[int, float]] = []

    def moved() -> bool:
        end = archive_end(store)
        if end and (not seen or end != seen[-1][0]):
            seen.append((end, time.perf_counter()))
        return end >= count

    until(moved, service)
    assert service.drain(is_known_to_work=True) == 0, service.tail()
    (first, started), (last, ended) = seen[0], seen[-2]
    return (last - first) / (ended - started)


def sampled(name: str, size: int, count: int) -> Figure:
    with place() as at:
        run(fill(at.nats.url, STREAM, count, documents(size, SENDERS)))
        return paired(
            name,
            "msg/s",
            floor=lambda: run(raw_read(at.nats.url, STREAM, count, size)),
            value=lambda: freeze_sampled(at, count),
        )


BENCHES = [
    Bench("egress.unsampled", "msg/s", "ratio >= 0.3", unsampled),
    Bench("egress.sampled.1k", "msg/s", "ratio >= 0.3", lambda: sampled("egress.sampled.1k", 1_000, 2 * HOUR)),
    Bench("egress.sampled.14k", "msg/s", "ratio >= 0.3", lambda: sampled("egress.sampled.14k", 14_000, HOUR)),
    Bench("memory.egress", "MB", "<= 300", memory),
]
