"""Benchmarks `memory.senders.1m`, `pause.snapshot`: a sampler with a million senders, in a process of its own."""

import gc
import json
import random
import tempfile
import threading
import time
from pathlib import Path

from bench.harness import REPEATS, Bench, BenchResult, memory_mb, run_in_child
from common.archive.columns import Columns
from common.archive.keys import Layout
from common.archive.store import SegmentStore
from common.chain import Chain
from common.objects.open import open_objects
from common.settings.egress import FeedSettings
from common.settings.root import StoreSettings
from egress.sampling.keys import SamplingSettings
from egress.sampling.sampler import Sampler
from egress.sampling.snapshot import Snapshot, SnapshotStore

SENDER_COUNT = 1_000_000
BATCH_MESSAGES = 1_000  # messages that the reader hands over at once
CHAIN = Chain("bench", "BENCH")


def settings() -> SamplingSettings:
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


def batch(start: int, order: list[int]) -> Columns:
    numbers = range(start, start + BATCH_MESSAGES)
    subjects = [b"nodes.node%07d.site.example.net" % order[number % SENDER_COUNT] for number in numbers]
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
    order = list(range(SENDER_COUNT))
    random.Random(1).shuffle(order)
    sampler = Sampler(settings(), makes_advisories=True)
    gc.collect()
    before = memory_mb("VmRSS")
    for start in range(0, SENDER_COUNT, BATCH_MESSAGES):
        sampler.fold(batch(start, order))
    gc.collect()
    memory = memory_mb("VmRSS") - before
    assert sampler.value_count == SENDER_COUNT
    with tempfile.TemporaryDirectory(prefix="floe-bench-") as folder:
        batches = [batch(SENDER_COUNT + number * BATCH_MESSAGES, order) for number in range(100)]
        longest = max(measure_pause(sampler, batches, Path(folder)) for _ in range(REPEATS))
    print(json.dumps({"memory": memory, "pause": longest}))


BENCHES = [
    Bench("memory.senders.1m", "MB", "<= 400", lambda: BenchResult(round(run_in_child("bench.sampling")["memory"], 1))),
    Bench("pause.snapshot", "ms", "<= 50", lambda: BenchResult(round(run_in_child("bench.sampling")["pause"], 1))),
]

if __name__ == "__main__":
    run_child()
