"""`memory.senders.1m`, `pause.snapshot`: a sampler that knows a million senders, in a process of its own."""

from __future__ import annotations

import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from bench.harness import REPEATS, Bench, Result
from common.chain import Chain
from common.objects.open import open_objects
from common.segments.layout import Layout
from common.segments.rows import Columns
from common.settings.egress import FeedSettings
from common.settings.store import StoreSettings
from egress.sampling.fold import Sampler
from egress.sampling.settings import Sampling
from egress.sampling.snapshot import Snapshot
from egress.sampling.snapshots import Snapshots

SENDERS = 1_000_000
BATCH = 1_000  # messages that the reader hands over at once
CHAIN = Chain("bench", "BENCH")


def settings() -> Sampling:
    feed = {
        "stream": "BENCH",
        "inspect_subject_token": -1,
        "inspect_duration": "1h",
        "size_trigger": "1K",
        "advisory": {"subject": "adv.%s"},
    }
    found = Sampling.of(FeedSettings.model_validate(feed))
    assert found is not None
    return found


def batch(start: int, order: list[int]) -> Columns:
    """The messages `start` and following of senders in a random order."""
    numbers = range(start, start + BATCH)
    subjects = [b"nodes.node%07d.site.example.net" % order[number % SENDERS] for number in numbers]
    times = [1_700_000_000_000_000_000 + number * 1000 for number in numbers]
    return Columns([n + 1 for n in numbers], times, subjects, [None] * BATCH, [b"x" * 1000] * BATCH)


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


class Gaps:
    """Folds batches one after the other, as the reader does, and notes the time between two of them."""

    def __init__(self, sampler: Sampler, order: list[int]) -> None:
        self._sampler, self._order, self._next = sampler, order, SENDERS
        self.longest = 0.0

    def run(self, is_over: threading.Event) -> float:
        """Until `is_over`; the longest time of one batch, in milliseconds."""
        longest = 0.0
        columns = batch(self._next, self._order)
        while not is_over.is_set():
            began = time.perf_counter()
            self._sampler.fold(columns)
            longest = max(longest, time.perf_counter() - began)
            self._next += BATCH
            columns = batch(self._next, self._order)
        return longest * 1000


def pause(sampler: Sampler, order: list[int], folder: Path) -> float:
    """The longest pause, in milliseconds: freezing, or a batch while another thread writes the snapshot."""
    objects = open_objects(StoreSettings.model_validate({"url": f"file://{folder}"}))
    snapshots, is_over = Snapshots(objects, Layout("data"), CHAIN), threading.Event()
    began = time.perf_counter()
    state = sampler.freeze()
    frozen = (time.perf_counter() - began) * 1000

    def write() -> None:
        snapshots.save(Snapshot(CHAIN, 7, "0" * 64, 1, state, ()), folder / "spool")
        is_over.set()

    thread = threading.Thread(target=write)
    thread.start()
    longest = Gaps(sampler, order).run(is_over)
    thread.join()
    return max(frozen, longest)


def child() -> None:
    """Measure both in this process; JSON on stdout."""
    order = list(range(SENDERS))
    random.Random(1).shuffle(order)
    sampler = Sampler(settings(), tracks=True)
    gc.collect()
    before = resident_mb()
    for start in range(0, SENDERS, BATCH):
        sampler.fold(batch(start, order))
    gc.collect()
    memory = resident_mb() - before
    assert sampler.values == SENDERS
    with tempfile.TemporaryDirectory(prefix="floe-bench-") as folder:
        pauses = [pause(sampler, order, Path(folder)) for _ in range(REPEATS)]
    print(json.dumps({"memory": memory, "pause": statistics.median(pauses)}))


def measured() -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.sampling"], capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


BENCHES = [
    Bench(
        "memory.senders.1m",
        "MB",
        "<= 400",
        lambda: Result("memory.senders.1m", round(measured()["memory"], 1), "MB"),
    ),
    Bench(
        "pause.snapshot",
        "ms",
        "<= 50",
        lambda: Result("pause.snapshot", round(measured()["pause"], 1), "ms"),
    ),
]

if __name__ == "__main__":
    child()
