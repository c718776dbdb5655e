"""Snapshots are written behind what is put, one at a time, and nobody waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from common.chain import Chain
from common.errors import Unavailable
from common.service.process import Threads
from egress.report import SamplingReport
from egress.sampling.snapshot_store import Saving
from tests.support.basics import PATIENCE, soon
from tests.support.clock import ManualClock

CHAIN = Chain("site", "UNIT_SAVING")


class Store:
    """Snapshots that are only noted; `gate` holds writes up, `fails` makes them fail."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fails: list[Exception] = []

    def save(self, snapshot: Any) -> Any:
        assert self.gate.wait(PATIENCE)
        if self.fails:
            raise self.fails.pop()
        self.written.append(snapshot.position)
        return SimpleNamespace(position=snapshot.position, size=1, log_context=dict)


class Bench:
    def __init__(self) -> None:
        self.clock, self.store = ManualClock(), Store()
        self.threads = Threads("test-saving", 1)
        self.saving = Saving(
            self.store,  # type: ignore[arg-type]
            self.threads,
            self.clock,
            60.0,
            SamplingReport(CHAIN),
        )

    def hold(self, position: int, segments: int = 1) -> None:
        self.saving.hold(SimpleNamespace(position=position), segments)  # type: ignore[arg-type]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    running = asyncio.create_task(bench.saving.run())
    yield bench
    running.cancel()
    await asyncio.wait({running})
    bench.threads.close()


@pytest.mark.parametrize("asked", [False, True])
def test_due_once_the_interval_has_passed_or_somebody_asks_and_a_segment_was_closed(asked: bool) -> None:
    bench = Bench()
    assert not bench.saving.is_due(5)
    if asked:
        bench.saving.ask()
    else:
        bench.clock.advance(60)
    assert not bench.saving.is_due(0)
    assert bench.saving.is_due(1)
    bench.hold(10, segments=1)
    bench.clock.advance(0 if asked else 600)
    assert not bench.saving.is_due(9)


async def test_written_once_the_archive_reaches_it_or_at_once_where_it_has(bench: Bench) -> None:
    """Of a quiet feed nothing else is put that would say so."""
    bench.hold(10)
    bench.saving.covered(8)
    await asyncio.sleep(0.05)
    assert bench.store.written == []
    bench.saving.covered(9)
    await bench.saving.free()
    assert bench.store.written == [10]
    bench.saving.covered(50)
    await asyncio.sleep(0.05)
    assert bench.store.written == [10]
    bench.hold(20)
    await bench.saving.free()
    assert bench.store.written == [10, 20]


async def test_a_slow_write_holds_nobody_up_and_the_next_one_waits_its_turn(bench: Bench) -> None:
    bench.store.gate.clear()
    bench.hold(10)
    bench.saving.covered(20)
    bench.clock.advance(600)
    await soon(lambda: bench.threads.busy)
    bench.saving.covered(30)
    assert not bench.saving.is_due(9)
    bench.store.gate.set()
    await bench.saving.free()
    assert bench.saving.is_due(9)


@pytest.mark.parametrize("error", [Unavailable("the store is down"), OSError(28, "disk full")])
async def test_a_failed_write_is_dropped_and_the_next_one_comes_when_it_is_due(bench: Bench, error: Exception) -> None:
    bench.store.fails.append(error)
    bench.hold(10)
    bench.saving.covered(9)
    await bench.saving.free()
    assert not bench.saving.is_due(2)
    bench.clock.advance(60)
    assert bench.saving.is_due(2)
    bench.hold(20, segments=2)
    bench.saving.covered(19)
    await bench.saving.free()
    assert bench.store.written == [20]
