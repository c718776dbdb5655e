"""Must hold: under any faults on the way into a target of three replicas, each message is in it once.

Six chains, two ingress instances, compaction and deletion all the time.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from common.archive.store import SegmentStore
from common.chain import Chain
from common.errors import FloeError
from common.nats.api import stream_info
from common.open import load_settings, open_chains, open_store
from common.tasks import Stop
from infra.oracle import Trace, prefix_subject, read_target_traces
from tests.scenarios.delivery_centre import CREATE, PREFIX, TARGET, Centre, centre
from tests.scenarios.delivery_faults import KINDS, Faults
from tests.scenarios.delivery_meter import Meter
from tests.scenarios.delivery_writer import Author, Writer
from tests.support.basics import soon
from tests.support.commands import run_floe
from tests.support.oracle import classes, compare_target

SITES, FEEDS = ("alpha", "beta"), ("ONE", "TWO", "THREE")
CHAINS = [Chain(site, feed) for site in SITES for feed in FEEDS]
SETTLE = 90.0  # seconds without progress after all faults have ended
# Messages a second, and seconds that lines hold each chunk back: a `single` waits for each message.
PACES = {"single": (150, 0.0)}
PACE = (1000, 0.03)
CALM = 2.0  # seconds in which nothing more may arrive
# Errors that may end an ingress under faults: a supervisor restarts it.
LATER = {75}


class Compactor:
    """Repeated runs of `floe compact` within a block: merging, and deleting merged inputs."""

    def __init__(self, config: Path, store: SegmentStore, chains: Sequence[Chain]) -> None:
        self.counts, self._stop = Counter[str](), Stop()
        self._config, self._store, self._chains = config, store, chains

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await self._task

    async def _run(self) -> None:
        while not self._stop.is_set:
            await asyncio.to_thread(self._once)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), 2.0)

    def _once(self) -> None:
        before = self._names()
        done = run_floe("compact", "-c", str(self._config), seconds=900)
        assert done.code == 0, done
        self.counts["compactions"] += 1
        self.counts["segments deleted"] += len(before - self._names())

    def _names(self) -> set[object]:
        return {ref.name for chain in self._chains for ref in self._store.list(chain)}


@dataclass(frozen=True, slots=True)
class Run:
    """A centre under faults, and the counters of the run."""

    centre: Centre
    meter: Meter
    faults: Faults
    compactor: Compactor
    writer: Writer

    def found(self, started: float) -> dict[str, Any]:
        """Return the facts of the run for an operator; `started`: monotonic seconds."""
        exits = sum((instance.exits for instance in self.centre.instances), Counter[int]())
        return {
            "seconds": round(time.monotonic() - started, 1),
            "faults": dict(sorted(self.faults.counts.items())),
            "acknowledgements lost": self.faults.acknowledgements_lost,
            **self.meter.totals(),
            "take-overs": self.meter.take_overs,
            "restarts by exit code": {str(code): count for code, count in exits.items()},
            "publishers": sorted(self.meter.publishers),
            **self.writer.counts,
            **self.compactor.counts,
        }


async def delivered(s3: Any, rng: random.Random, seconds: float, publisher: str) -> dict[str, Any]:
    """Check that all chains are exact in an R3 target. Raises AssertionError with the oracle's report otherwise."""
    started = time.monotonic()
    async with disturbed(s3, rng, seconds, publisher=publisher, create=CREATE) as (run, expected):
        await arrived(run.centre, sum(map(len, expected.values())))
        async with run.centre.client() as client:
            target = await read_target_traces(client, TARGET)
        compared = compare_target(expected, target.traces, target.foreign)
        found = {**run.found(started), **classes(compared), "messages": compared.expected}
        assert compared.is_ok, f"{compared.report()}\n{found}"
        require_faults(found)
    return found


@asynccontextmanager
async def disturbed(
    s3: Any,
    rng: random.Random,
    seconds: float,
    beside: Callable[[Centre], AbstractAsyncContextManager[None]] | None = None,
    **target: Any,
) -> AsyncIterator[tuple[Run, dict[Chain, Trace]]]:
    """Carry six chains into a target under faults for `seconds`; at the block all is healed and written.

    The block gets the run, and the expected messages of the target. `beside`: entered before ingress starts, and left
    behind the block. Behind the block the instances are drained.
    """
    rate, delay = PACES.get(target["publisher"], PACE)
    async with AsyncExitStack() as stack:
        at = await stack.enter_async_context(centre(s3.store(), SITES, FEEDS, delay, **target))
        settings = load_settings(str(at.config))
        segments, documents = open_store(settings), open_chains(settings)
        stack.callback(segments.close)
        authors = [Author(segments, documents, c, random.Random(rng.random()), prefix_subject(PREFIX)) for c in CHAINS]
        if beside is not None:
            await stack.enter_async_context(beside(at))
        for instance in at.instances:
            instance.service.start()
        meter = await stack.enter_async_context(Meter(at.instances))
        compactor = await stack.enter_async_context(Compactor(at.config, segments, CHAINS))
        faults = Faults(at, meter, rng)
        with Writer(authors, random.Random(rng.random()), rate) as writer:
            await soon(lambda: last_sequence(at), SETTLE, 0.3)
            await faults.run(seconds, lambda: compactor.counts["segments deleted"] > 0)
        yield Run(at, meter, faults, compactor, writer), writer.expected
        await _drained(at)


async def _drained(at: Centre) -> None:
    for instance in at.instances:
        code = await asyncio.to_thread(instance.service.drain)
        assert code == 0, f"{instance.name} ended with {code} on SIGTERM\n{instance.service.tail()}"
        exits = {code: count for code, count in instance.exits.items() if code not in LATER}
        assert not exits, f"{instance.name} ended by itself: {exits}\n{instance.service.tail()}"


async def arrived(at: Centre, count: int) -> None:
    """Wait until the target took so many messages, and then for a calm; the oracle names missing ones."""
    last, since = -1, time.monotonic()
    while time.monotonic() - since < SETTLE:
        at.supervise()
        before, last = last, await last_sequence(at)
        if last >= count and last == before:
            return
        if last > before:
            since = time.monotonic()
        await asyncio.sleep(CALM if last >= count else 0.3)


async def last_sequence(at: Centre) -> int:
    """Return how many messages the target ever took; 0 if it does not exist or its state cannot be read."""
    async with at.client() as client:
        with suppress(FloeError):
            info = await stream_info(client, TARGET)
            return info.last_sequence if info else 0
    return 0


def require_faults(found: Mapping[str, Any]) -> None:
    """Fail if a run broke nothing, or had no unclear outcome: it proves nothing."""
    missing = set(KINDS) - set(found["faults"])
    assert not missing, f"no faults of these kinds: {missing}"
    needed = "acknowledgements lost, unclear outcomes, take-overs, compactions, segments deleted, late segments"
    missing = {name for name in needed.split(", ") if not found[name]}
    assert not missing, f"expected {missing}, found none: {found}"
