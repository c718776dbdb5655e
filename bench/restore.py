"""Benchmarks `restore.*`, `export.200`, `compare.source`, `memory.restore`: an archive to a stream, or a backup.

`restore.encode`: rows to the restore format of nats-server 2.15; `restore.encode_files`: to that of 2.10 to 2.14, with
a hash of each row.
"""

import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import aclosing, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from timeit import timeit
from typing import Any

import pyarrow as pa
from uvloop import run

from bench.harness import (
    CHAIN,
    REPEATS,
    STREAM,
    Bench,
    BenchEnvironment,
    BenchResult,
    archive_chain,
    bench_environment,
    connect_bench,
    documents,
    fill_stream,
    measure_paired,
    measure_raw_read,
    memory_mb,
    open_bench_store,
)
from common.archive.columns import record_batch
from common.archive.documents import StreamDocument
from common.archive.segment import Message
from common.clock import SystemClock
from common.nats.api import stream_info
from common.nats.restore import ArchiveUpload
from common.open import load_settings, open_chains
from common.service.process import ThreadPool
from common.service.progress import Progress
from common.tasks import Stop
from ingress.recovery.files_form import archive_writer
from ingress.recovery.fill import ROW_COLUMNS, Export
from ingress.recovery.history import ArchivedHistory
from ingress.recovery.living import CompareRequest, LivingComparison
from ingress.recovery.plan import RestorePlan, RestoreRequest, guarded_config
from ingress.recovery.request import RecoveryParts
from ingress.recovery.restore import Restore
from ingress.recovery.stream_archive import ArchiveState
from tests.support.basics import unique

ROWS_BY_PAYLOAD_BYTES = {200: 800_000, 1000: 300_000}  # by bytes of payload
SEGMENT_MESSAGES = 50_000  # messages
FIRST_TIME_NS = 1_795_000_000_000_000_000  # ns
SUBJECTS, COMPARE_REQUEST = 1000, CompareRequest(CHAIN.site, STREAM)
SERVER_VERSION = "2.15.1"  # of requirements.lock
CREATED = "2026-11-24T09:00:00Z"
CONFIG = {"name": STREAM, "subjects": [f"{STREAM}.>"], "retention": "limits", "storage": "file", "num_replicas": 1}


def archive_stream(at: BenchEnvironment, size: int) -> Path:
    """Archive the stream in a new bucket; return the configuration of its site."""
    config = at.config(at.s3.new_bucket())
    body, stream = documents(size, SEGMENT_MESSAGES), StreamDocument(CONFIG, CREATED, None)

    def make(sequence: int) -> Message:
        subject = b"%s.%d" % (STREAM.encode(), sequence % SUBJECTS)
        return Message(sequence, FIRST_TIME_NS + sequence * 1000, subject, None, body(sequence)[:size])

    archive_chain(config, CHAIN, stream, make, ROWS_BY_PAYLOAD_BYTES[size], SEGMENT_MESSAGES)
    return config


def parts_of(config: Path) -> RecoveryParts:
    return RecoveryParts(open_bench_store(config), open_chains(load_settings(str(config))), SystemClock(), Progress())


def request() -> RestoreRequest:
    return RestoreRequest(CHAIN.site, STREAM, name=unique("R"), verify="state", promote=False)


async def measure_restore(config: Path, size: int) -> float:
    """Return the seconds from the first read of the store to the server's last answer, with the counts compared."""
    restore_request, parts = request(), parts_of(config)
    parts.store.list(CHAIN), parts.documents.read_stream(CHAIN)  # clients of the store are made at their first use
    work = Restore(load_settings(str(config)), restore_request, parts)
    async with work.open_connection() as client:
        started = time.perf_counter()
        report = await work.run(client, Stop())
        elapsed = time.perf_counter() - started
        assert (report.exit_code, report.rows) == (0, ROWS_BY_PAYLOAD_BYTES[size]), [*report.lines()]
        await client.api(f"STREAM.DELETE.{restore_request.name}")
    return elapsed


class PreparedUpload:
    """The bytes that a restore sends, in memory: the floor is sending them alone."""

    def __init__(self, config: Path, version: str) -> None:
        self._request = request()
        plan, batches = run(self._read(config))
        self.config = guarded_config(plan.config, "bench")
        writer = archive_writer(plan.name, version)
        first, last = plan.time_range_ns
        state = ArchiveState(plan.rows, plan.bytes, plan.begin, first, plan.end, last)
        self.state = {"messages": plan.rows, "bytes": plan.bytes, "first_seq": plan.begin, "last_seq": plan.end}
        self.pieces = [*writer.encode_head(self.config, plan.created, state, ())]
        for batch in batches:
            self.pieces += writer.encode_rows(batch)
        self.pieces += writer.encode_tail()

    async def _read(self, config: Path) -> tuple[RestorePlan, Iterator[Any]]:
        history = ArchivedHistory(self._request, parts_of(config), threads := ThreadPool("bench", 2))
        plan = await history.plan()
        threads.close()
        return plan, history.rows(plan, plan.begin, ROW_COLUMNS, Stop())

    async def measure_upload(self, url: str) -> float:
        """Send the bytes; return the seconds until the server has created the stream."""
        client, name = await connect_bench(url), self._request.name
        request = {"config": self.config, "state": self.state}
        started = time.perf_counter()
        async with aclosing(await ArchiveUpload.begin(client, name, request, SystemClock())) as upload:
            for piece in self.pieces:
                await upload.send(piece)
            await upload.finish()
        elapsed = time.perf_counter() - started
        info = await stream_info(client, name)
        assert info is not None
        assert info.messages == self.state["messages"]
        await client.api(f"STREAM.DELETE.{name}")
        await client.aclose()
        return elapsed


def bench_restore(size: int, amount: float) -> BenchResult:
    """Measure a restore beside sending the same bytes from memory. `amount`: of the unit, in one restore."""
    with bench_environment() as at:
        config = archive_stream(at, size)
        archive = PreparedUpload(config, SERVER_VERSION)
        return measure_paired(
            floor=lambda: amount / run(archive.measure_upload(at.nats.url)),
            value=lambda: amount / run(measure_restore(config, size)),
        )


async def measure_export(config: Path, folder: Path) -> float:
    """Return the messages per second from the first read of the store until the backup is on the disk."""
    work = Export(replace(request(), directory=str(folder), promote=True), parts_of(config), Stop())
    started = time.perf_counter()
    return (await work.run(await work.plan())).rows / (time.perf_counter() - started)


def bench_export() -> BenchResult:
    """Measure an export beside writing the same bytes from memory."""
    with bench_environment() as at:
        config, file = archive_stream(at, 200), at.folder / "floor"
        write = partial(file.write_bytes, b"".join(PreparedUpload(config, SERVER_VERSION).pieces))
        return measure_paired(
            floor=lambda: ROWS_BY_PAYLOAD_BYTES[200] / timeit(write, number=1),
            value=lambda: run(measure_export(config, at.folder / unique("B"))),
        )


async def measure_compare(url: str, config: Path) -> float:
    """Return the messages per second of a comparison with the stream, which holds what is archived."""
    client, started = await connect_bench(url), time.perf_counter()
    with closing(ThreadPool("bench", 1)) as threads:
        report = await LivingComparison(client, parts_of(config), threads).run(COMPARE_REQUEST, Stop())
    elapsed = time.perf_counter() - started
    await client.aclose()
    assert report.copies[0].as_json()["same"] == ROWS_BY_PAYLOAD_BYTES[200], [*report.lines()]
    return ROWS_BY_PAYLOAD_BYTES[200] / elapsed


def bench_compare() -> BenchResult:
    """Measure a comparison of an archive with its stream beside the raw reader of the stream."""
    with bench_environment() as at:
        config, url = archive_stream(at, 200), at.nats.url
        assert at.service("restore", "restore", "-c", str(config), f"{CHAIN.site}/{STREAM}", "--yes").wait(600) == 0
        return measure_paired(
            floor=lambda: run(measure_raw_read(url, STREAM, ROWS_BY_PAYLOAD_BYTES[200], 200)),
            value=lambda: run(measure_compare(url, config)),
        )


def bench_memory() -> BenchResult:
    """Measure the peak of the command `floe restore`, which also reads everything back."""
    with bench_environment() as at:
        config, peak = archive_stream(at, 1000), 0.0
        service = at.service("restore", "restore", "-c", str(config), f"{CHAIN.site}/{STREAM}", "--yes")
        while service.runs():
            with suppress(StopIteration, OSError):  # the process has just ended
                peak = max(peak, memory_mb("VmHWM", service.pid))
            time.sleep(0.02)
        assert service.wait(10) == 0, service.tail()
        return BenchResult(peak)


def _nats(at: BenchEnvironment, *words: str) -> float:
    started = time.perf_counter()
    subprocess.run(["nats", "-s", at.nats.url, "stream", *words], check=True, capture_output=True)
    return ROWS_BY_PAYLOAD_BYTES[200] / (time.perf_counter() - started)


def measure_nats_cli(operation: str) -> BenchResult:
    """Measure the command `nats`: a backup of the same stream, or its restore."""
    with bench_environment() as at:
        body, folder = documents(200, SEGMENT_MESSAGES), str(at.folder / "backup")
        run(fill_stream(at.nats.url, STREAM, ROWS_BY_PAYLOAD_BYTES[200], lambda number: body(number)[:200]))
        rates = {"backup": _nats(at, "backup", STREAM, folder, "--no-progress")}
        _nats(at, "rm", STREAM, "-f")
        rates["restore"] = _nats(at, "restore", folder, "--no-progress")
        return BenchResult(round(rates[operation], 1))


# Rows to the bytes from which nats-server restores a stream, on one core

ENCODED_MESSAGES, BATCH_MESSAGES = 400_000, 20_000
MESSAGE_BYTES = 200  # bytes of a message: subject, headers and payload
HEADERS = b"NATS/1.0\r\nContent-Type: text\r\n\r\n"


def batches() -> Iterator[pa.RecordBatch]:
    """Yield the rows: every fourth message has headers, and some sequences are missing."""
    rng = random.Random(3)
    sequence = 5000
    for _ in range(0, ENCODED_MESSAGES, BATCH_MESSAGES):
        sequences = [sequence := sequence + 1 + (rng.random() < 0.02) for _ in range(BATCH_MESSAGES)]
        subjects = [b"node.%05d.data" % (number % 1000) for number in sequences]
        headers = [None if number % 4 else HEADERS for number in sequences]
        payloads = [
            rng.randbytes(MESSAGE_BYTES - len(s) - len(h or b"")) for s, h in zip(subjects, headers, strict=True)
        ]
        times = [FIRST_TIME_NS + number * 1_234_567 for number in sequences]
        yield record_batch(sequences, times, subjects, headers, payloads)


def encode(version: str) -> BenchResult:
    """Measure messages per second of CPU time, which other processes on the machine do not lengthen."""
    rows = list(batches())
    last = rows[-1].column("sequence")[-1].as_py()
    total = ENCODED_MESSAGES * MESSAGE_BYTES
    state = ArchiveState(ENCODED_MESSAGES, total, 5001, FIRST_TIME_NS, last + 5, FIRST_TIME_NS)

    def once() -> float:
        writer = archive_writer("BENCH", version)
        started = time.process_time()
        size = sum(map(len, writer.encode_head({"name": "BENCH"}, "2026-01-01T00:00:00Z", state, [])))
        size += sum(len(piece) for batch in rows for piece in writer.encode_rows(batch))
        size += sum(map(len, writer.encode_tail()))
        assert size > total, size
        return ENCODED_MESSAGES / (time.process_time() - started)

    return BenchResult(round(statistics.median(once() for _ in range(REPEATS))))


BENCHES = [
    Bench("restore.200", "msg/s", "ratio >= 0.8", partial(bench_restore, 200, ROWS_BY_PAYLOAD_BYTES[200])),
    Bench("restore.1k", "MB/s", "ratio >= 0.8", partial(bench_restore, 1000, ROWS_BY_PAYLOAD_BYTES[1000] * 1000 / 1e6)),
    Bench("restore.encode", "msg/s", "value >= 500,000", partial(encode, SERVER_VERSION)),
    Bench("restore.encode_files", "msg/s", "value >= 200,000", partial(encode, "2.14.6")),
    Bench("export.200", "msg/s", "value >= 400,000", bench_export),
    Bench("compare.source", "msg/s", "ratio >= 0.55", bench_compare),
    Bench("memory.restore", "MB", "<= 300", bench_memory),
]
NATS_CLI = ("backup", "restore") if shutil.which("nats") else ()
BENCHES += [Bench(f"restore.nats_{each}", "msg/s", "reported", partial(measure_nats_cli, each)) for each in NATS_CLI]
