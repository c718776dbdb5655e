"""Benchmarks of egress: a stream, or a backup of one, to segments in the store; and a sampler with a million senders.

The sampler runs in a process of its own.
"""

import gc
import json
import random
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

from uvloop import run

from bench.harness import (
    CHAIN,
    REPEATS,
    STREAM,
    Bench,
    BenchEnvironment,
    BenchResult,
    archived_end,
    bench_environment,
    documents,
    fill_stream,
    measure_paired,
    measure_raw_read,
    memory_mb,
    open_bench_store,
    run_in_child,
    wait_until,
)
from common.archive.columns import Columns
from common.archive.keys import Layout
from common.archive.store import SegmentStore
from common.objects.open import open_objects
from common.settings.egress import FeedSettings
from common.settings.root import StoreSettings
from egress.sampling.keys import SamplingSettings
from egress.sampling.sampler import Sampler
from egress.sampling.snapshot import Snapshot, SnapshotStore
from tests.scenarios.processes import Service

MESSAGE_COUNT = 400_000
SENDER_COUNT = 50_000
HOUR_MESSAGES = 12 * SENDER_COUNT  # messages of senders that publish every five minutes; one in twelve is copied
SAMPLED = {"inspect_field": "sender", "inspect_duration": "1h", "size_trigger": "1K", "segment": {"max_age": "1s"}}


def measure_archiving(at: BenchEnvironment, config: Path | None = None) -> tuple[float, float]:
    """Return the messages per second from the first stored segment to the last, and the peak resident size in MB.

    The time before the first segment is left out, with the start of the process: a service runs for months.
    """
    config = config or at.config(at.s3.new_bucket())
    service = at.service("egress", "egress", "run", "-c", str(config))
    rate = measure_segments(config, service)
    peak = memory_mb("VmHWM", service.pid)
    assert service.drain(is_known_to_work=True) == 0, service.tail()
    return rate, peak


def measure_segments(config: Path, service: Service) -> float:
    store = open_bench_store(config)
    started = wait_until(lambda: archived_end(store) > 0, service)
    first = archived_end(store)
    ended = wait_until(lambda: archived_end(store) >= MESSAGE_COUNT, service)
    return (MESSAGE_COUNT - first) / (ended - started)


def measure_import(at: BenchEnvironment, backup: str) -> float:
    """Return the messages per second as `measure_archiving` does: without the restore of the backup by a server."""
    config = at.config(at.s3.new_bucket())
    service = at.service("import", "import", "-c", str(config), backup, f"{CHAIN.site}/{STREAM}")
    rate = measure_segments(config, service)
    assert service.wait(60) == 0, service.tail()
    return rate


def bench_import() -> BenchResult:
    """Measure an import beside egress of the same messages."""
    with bench_environment() as at:
        run(fill_stream(at.nats.url, STREAM, MESSAGE_COUNT, lambda number: b"%0200d" % number))
        config, backup = at.config(at.s3.new_bucket()), str(at.folder / "backup")
        measure_archiving(at, config)
        export = at.service("export", "export", "-c", str(config), f"{CHAIN.site}/{STREAM}", backup)
        assert export.wait(60) == 0, export.tail()
        return measure_paired(floor=lambda: measure_archiving(at)[0], value=lambda: measure_import(at, backup))


def bench_unsampled() -> BenchResult:
    with bench_environment() as at:
        run(fill_stream(at.nats.url, STREAM, MESSAGE_COUNT))
        return measure_paired(
            floor=lambda: run(measure_raw_read(at.nats.url, STREAM, MESSAGE_COUNT)),
            value=lambda: measure_archiving(at)[0],
        )


def bench_memory() -> BenchResult:
    with bench_environment() as at:
        run(fill_stream(at.nats.url, STREAM, MESSAGE_COUNT))
        return BenchResult(measure_archiving(at)[1])


def measure_sampled(at: BenchEnvironment, count: int) -> float:
    """Return the messages per second between two segments: from the end of the first to that of the last but one.

    Segments close by age, so all of them are late by the same second; the last one waits for messages that do not come.
    """
    config = at.config(at.s3.new_bucket(), SAMPLED)
    store, service = open_bench_store(config), at.service("egress", "egress", "run", "-c", str(config))
    seen: list[tuple[int, float]] = []

    def moved() -> bool:
        end = archived_end(store)
        if end and (not seen or end != seen[-1][0]):
            seen.append((end, time.perf_counter()))
        return end >= count

    wait_until(moved, service)
    assert service.drain(is_known_to_work=True) == 0, service.tail()
    (first, started), (last, ended) = seen[0], seen[-2]
    return (last - first) / (ended - started)


def bench_sampled(size: int, count: int) -> BenchResult:
    with bench_environment() as at:
        run(fill_stream(at.nats.url, STREAM, count, documents(size, SENDER_COUNT)))
        return measure_paired(
            floor=lambda: run(measure_raw_read(at.nats.url, STREAM, count, size)),
            value=lambda: measure_sampled(at, count),
        )


MEMORY_SENDER_COUNT = 1_000_000
BATCH_MESSAGES = 1_000  # messages that the reader hands over at once


def sampling_settings() -> SamplingSettings:
    feed = {
        "stream": "BENCH",
        "inspect_subject_token": -1,
        "inspect_duration": "1h",
        "size_trigger": "1K",
        "advisory": {"subject": "adv.%s"},
    }
    found = SamplingSettings.from_feed(FeedSettings.model_validate(feed))
    assert found is not None
    return found


def fleet_batch(start: int, order: list[int]) -> Columns:
    numbers = range(start, start + BATCH_MESSAGES)
    subjects = [b"nodes.node%07d.site.example.net" % order[number % MEMORY_SENDER_COUNT] for number in numbers]
    times = [1_700_000_000_000_000_000 + number * 1000 for number in numbers]
    return Columns([n + 1 for n in numbers], times, subjects, [None] * BATCH_MESSAGES, [b"x" * 1000] * BATCH_MESSAGES)


def longest_fold_ms(sampler: Sampler, batches: list[Columns], is_over: threading.Event) -> float:
    """Fold in batches as the reader does, until `is_over`; return the longest time between two, in ms."""
    longest, number, before = 0.0, 0, time.perf_counter()
    while not is_over.is_set():
        sampler.fold(batches[number % len(batches)])
        number, now = number + 1, time.perf_counter()
        longest, before = max(longest, now - before), now
    return longest * 1000


def measure_pause(sampler: Sampler, batches: list[Columns], folder: Path) -> float:
    """Return the longest pause in ms: for the freeze, or for a batch while another thread writes the snapshot."""
    objects = open_objects(StoreSettings.model_validate({"url": f"file://{folder}"}))
    store, is_over = SegmentStore(objects, Layout("data"), spool_dir=folder), threading.Event()
    began = time.perf_counter()
    state = sampler.freeze()
    frozen = (time.perf_counter() - began) * 1000

    def write() -> None:
        SnapshotStore(store, CHAIN).save(Snapshot(CHAIN, 7, "0" * 64, 1, state, ()))
        is_over.set()

    thread = threading.Thread(target=write)
    thread.start()
    longest = longest_fold_ms(sampler, batches, is_over)
    thread.join()
    return max(frozen, longest)


def run_child() -> None:
    """Measure both in this process; JSON on stdout."""
    order = list(range(MEMORY_SENDER_COUNT))
    random.Random(1).shuffle(order)
    sampler = Sampler(sampling_settings(), makes_advisories=True)
    gc.collect()
    before = memory_mb("VmRSS")
    for start in range(0, MEMORY_SENDER_COUNT, BATCH_MESSAGES):
        sampler.fold(fleet_batch(start, order))
    gc.collect()
    memory = memory_mb("VmRSS") - before
    assert sampler.value_count == MEMORY_SENDER_COUNT
    with tempfile.TemporaryDirectory(prefix="floe-bench-") as folder:
        batches = [fleet_batch(MEMORY_SENDER_COUNT + number * BATCH_MESSAGES, order) for number in range(100)]
        longest = max(measure_pause(sampler, batches, Path(folder)) for _ in range(REPEATS))
    print(json.dumps({"memory": memory, "pause": longest}))


BENCHES = [
    Bench("egress.unsampled", "msg/s", "ratio >= 0.3", bench_unsampled),
    Bench("egress.sampled.1k", "msg/s", "ratio >= 0.3", partial(bench_sampled, 1_000, 2 * HOUR_MESSAGES)),
    Bench("egress.sampled.14k", "msg/s", "ratio >= 0.3", partial(bench_sampled, 14_000, HOUR_MESSAGES)),
    Bench("import.200", "msg/s", "ratio >= 0.8", bench_import),
    Bench("memory.egress", "MB", "<= 300", bench_memory),
    Bench("memory.senders.1m", "MB", "<= 400", lambda: BenchResult(round(run_in_child("bench.egress")["memory"], 1))),
    Bench("pause.snapshot", "ms", "<= 50", lambda: BenchResult(round(run_in_child("bench.egress")["pause"], 1))),
]

if __name__ == "__main__":
    run_child()
