"""Sampled egress, killed again and again while its stream grows: rows and advisories as if nothing had been.

What is right is said by one fold over the log from beginning to end, in this process; an egress that nobody
disturbs must agree with it too.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from common.chain import Chain
from common.jetstream.api import create_stream
from common.jetstream.client import FloeClient
from common.segments.columns import Columns, columns
from common.segments.segment import Message
from common.segments.store import SegmentStore
from common.sequences import cover
from common.settings.egress import FeedSettings
from egress.advisories.advisory import Advisory, event_id, parse
from egress.sampling.sampler import Sampler
from egress.sampling.settings import Sampling
from infra.local.nats import NatsServer
from infra.oracle import read_stream
from tests.support.basics import soon, unique
from tests.support.egress import SITE, Bench, connected
from tests.support.egress_process import Process, processes

LAP = 12  # crash points over one log, so that none of its advisories is too late to be told

STEPS = (
    "sealed",
    "before_put",
    "after_put",
    "after_tail",
    "after_mark",
    "before_snapshot",
    "snapshot_put",
    "snapshot_read_back",
    "after_snapshot",
)

SAMPLED = {
    "inspect_field": "id",
    "inspect_duration": "2s",
    "warn_duration": "1s",
    "inspect_force_field": "force",
    "size_trigger": "40",
    "snapshot_interval": "1s",
    "segment": {"max_messages": 40, "max_age": "1s"},
}

Row = tuple[int, int, bytes, bytes | None, bytes, str | None]


@dataclass
class Tally:
    """What was done, and what came out, over all laps."""

    crashes: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        return {"crashes": dict(sorted(self.crashes.items())), **self.counts}


async def run(rounds: int, seed: int) -> dict[str, Any]:
    """Crash `rounds` times. Raises AssertionError where anything differs from the undisturbed run."""
    rng, tally = random.Random(seed), Tally()
    with NatsServer() as server:
        while (left := rounds - tally.crashes.total()) > 0:
            folder = Path(tempfile.mkdtemp(prefix="floe-sampling-"))
            try:
                await _lap(server.url, folder, min(LAP, left), rng, tally)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    return tally.as_json()


async def _lap(url: str, folder: Path, crashes: int, rng: random.Random, tally: Tally) -> None:
    """One log: a feed that crashes while it grows, and one that does not when it is complete."""
    client = await connected(url)
    try:
        lap = Lap(Bench(url, folder, client), rng, tally)
        await lap.begin()
        async with lap.growing():
            await lap.crash(crashes)
        await lap.complete()
        await lap.compare()
    finally:
        await client.aclose()


class Lap:
    """One stream, the crashing feed C over it, the undisturbed feed R."""

    def __init__(self, bench: Bench, rng: random.Random, tally: Tally) -> None:
        self.bench, self._rng, self._tally = bench, rng, tally
        self.stream = unique("SAMPLED")
        self.crashing, self.undisturbed = (self._feed(unique(name)) for name in ("C", "R"))

    def _feed(self, name: str) -> dict[str, Any]:
        advisory = {"subject": f"{name}.%s.%v", "reliable": True}
        return {"stream": self.stream, "name": name, "advisory": advisory, **SAMPLED}

    async def begin(self) -> None:
        await self.bench.make_stream(self.stream)
        for feed in (self.crashing, self.undisturbed):
            config = {"name": feed["name"], "subjects": [f"{feed['name']}.>"], "storage": "memory"}
            # Too short to help: what is sent twice would be stored twice.
            await create_stream(self.bench.client, {**config, "duplicate_window": 100_000_000})

    # The log

    @asynccontextmanager
    async def growing(self) -> Any:
        """Messages of 30 nodes, some of which fall silent for a while, for the length of a block."""
        done = asyncio.Event()
        load = asyncio.create_task(self._publish(done))
        try:
            yield
        finally:
            done.set()
            await load

    async def _publish(self, done: asyncio.Event) -> None:
        rng = random.Random(self._rng.random())
        silent: dict[int, int] = {}
        turn = 0
        while not done.is_set():
            turn += 1
            silent[rng.randrange(30)] = turn + rng.randrange(10, 40)
            nodes = [n for n in range(30) if silent.get(n, 0) <= turn and rng.random() < 0.5]
            await self.bench.publish(self.stream, [payload_of(rng, node) for node in nodes])
            await asyncio.sleep(0.1)

    # The feeds

    async def crash(self, times: int) -> None:
        """Start the crashing feed and kill it, so many times; then let it catch up and drain."""
        with processes() as started:
            for _ in range(times):
                await self._crash(started)
        self._tally.counts["laps"] += 1

    async def _crash(self, started: list[Process]) -> None:
        step, nth = self._rng.choice((*STEPS, "")), self._rng.randrange(1, 3)
        point = f"egress.{step}=kill@{nth}" if step else ""
        process = Process(self.bench, self.stream, failpoints=point, feeds=[self.crashing])
        started.append(process)
        try:
            code = await process.ended(self._rng.uniform(1.5, 3.5) if not step else 5.0)
            assert code == -signal.SIGKILL, f"exit code {code}\n{process.log.read_text()[-4000:]}"
            self._tally.crashes[step] += 1
        except subprocess.TimeoutExpired:
            await process.kill()
            self._tally.crashes["at a random moment"] += 1

    async def complete(self) -> None:
        """Let both feeds come to the end of the log and of all silence."""
        log: list[Message] = []
        await read_stream(self.bench.client, self.stream, log.append)
        self._log = columns_of(log)
        for feed in (self.crashing, self.undisturbed):
            expected = self._ids(feed)
            with processes() as started:
                started.append(Process(self.bench, self.stream, feeds=[feed]))
                await self.bench.archived_to(feed["name"], log[-1].sequence)
                await soon(partial(self._has, feed["name"], len(expected)))
                await started[0].drain()

    async def _has(self, name: str, count: int) -> bool:
        return await self.bench.last(name) >= count

    # What is right

    def _ids(self, feed: dict[str, Any]) -> Counter[str]:
        chain = Chain(SITE, feed["name"])
        return Counter(event_id(chain, advisory) for advisory in fold_of(feed, self._log)[1])

    async def compare(self) -> None:
        """Rows, ledger and advisories of both feeds against the fold."""
        for feed in (self.undisturbed, self.crashing):
            name = feed["name"]
            kept = rows_of(fold_of(feed, self._log)[0])
            assert self.rows(name) == kept, f"{name}: other rows"
            self.bench.check(name)
            left_out = len(self._log.sequences) - len(kept)
            assert self.bench.ledger(name) == {"sampled_out": left_out}, self.bench.ledger(name)
            told, expected = await told_in(self.bench.client, name), self._ids(feed)
            assert told == expected, f"{name}: {difference(told, expected)}"
        self._tally.counts["messages"] += len(self._log.sequences)
        self._tally.counts["rows"] += len(kept)
        self._tally.counts["advisories"] += expected.total()

    def rows(self, name: str) -> list[Row]:
        return rows_in(self.bench.store, self.bench.chain(name))


def fold_of(feed: dict[str, Any], log: Columns) -> tuple[Columns, list[Advisory]]:
    """What is kept and what is told by one fold over the whole log and the silence behind it."""
    sampling = Sampling.of(FeedSettings.model_validate(feed))
    assert sampling is not None
    sampler = Sampler(sampling)
    choices = sampler.fold(log)
    kept = log.chosen(choices.kept, choices.keys)
    return kept, [*choices.advisories, *sampler.advance(log.timestamps_ns[-1] + 10**12)]


def rows_in(store: SegmentStore, chain: Chain) -> list[Row]:
    """What the archive of a chain holds, in order."""
    found: list[Row] = []
    for stretch in cover(store.list(chain), 1):
        with store.open(stretch.segment, rows=stretch.rows) as reader:
            for batch in reader.batches(stretch.rows):
                keys = batch.column("sample_key").to_pylist()
                found += rows_of(replace(columns(batch), sample_keys=keys))
    return found


async def told_in(client: FloeClient, stream: str) -> Counter[str]:
    """How often each advisory is stored, by its id."""
    stored: list[Message] = []
    await read_stream(client, stream, stored.append)
    documents = [parse(message.payload) for message in stored]
    return Counter(document.event_id for document in documents if document is not None)


def rows_of(rows: Columns) -> list[Row]:
    """One tuple for each row."""
    lists = (rows.sequences, rows.timestamps_ns, rows.subjects, rows.headers, rows.payloads)
    return list(zip(*lists, rows.sample_keys or [], strict=True))


def columns_of(log: Sequence[Message]) -> Columns:
    """The log as lists."""
    return Columns(
        [message.sequence for message in log],
        [message.timestamp_ns for message in log],
        [message.subject for message in log],
        [message.headers for message in log],
        [message.payload for message in log],
    )


def difference(told: Counter[str], expected: Counter[str]) -> str:
    """How advisories differ from those that should be, in words."""
    twice = sum(count - 1 for count in told.values() if count > 1)
    lost, unexpected = expected.keys() - told.keys(), told.keys() - expected.keys()
    return f"{len(lost)} advisories lost, {twice} told twice, {len(unexpected)} unexpected"


def payload_of(rng: random.Random, node: int) -> bytes:
    """A document of one node; some name none, some are no JSON, some are forced."""
    chance = rng.random()
    if chance < 0.01:
        return b"no JSON"
    document = {"id": f"n{node}", "pad": "x" * rng.choice((0, 10, 60))}
    if chance < 0.02:
        del document["id"]
    return json.dumps({**document, "force": chance > 0.99}).encode()
