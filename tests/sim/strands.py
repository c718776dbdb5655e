"""Blocking calls in simulated time: each has a thread, at most one of which runs while the world waits.

A call of the store, or a pause, returns control to the world until its answer is due. So two calls of one process, or
of several, interleave at each of their requests, as the seed has it. A process can be killed or paused within one.
"""

from __future__ import annotations

import asyncio
import faulthandler
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, ParamSpec, TypeVar

from tests.sim.world import Killed, Process, World

P = ParamSpec("P")
T = TypeVar("T")

STUCK = 60.0  # most real seconds of one step of a strand


class Carriers:
    """Threads that carry strands, one after the other; they outlive the worlds of a run."""

    def __init__(self) -> None:
        self._idle: list[_Carrier] = []
        self.back = _gate()

    def carry(self, work: Callable[[], None]) -> _Carrier:
        """Return a thread that does `work` once it is released."""
        carrier = self._idle.pop() if self._idle else _Carrier(self)
        carrier.work = work
        return carrier

    def release(self, carrier: _Carrier) -> None:
        """Run the thread until it waits again, or has ended."""
        carrier.go.release()
        if not self.back.acquire(timeout=STUCK):
            faulthandler.dump_traceback()
            raise AssertionError("a strand waits for something outside of the world")
        if carrier.work is None:
            self._idle.append(carrier)


def _gate() -> threading.Lock:
    """Return a closed lock: one thread opens it for another."""
    gate = threading.Lock()
    gate.acquire()
    return gate


class _Carrier:
    def __init__(self, carriers: Carriers) -> None:
        self.go, self._carriers = _gate(), carriers
        self.work: Callable[[], None] | None = None
        self.thread = threading.Thread(target=self._run, name="strand", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            self.go.acquire()
            if self.work is not None:
                self.work()
            self.work = None
            self._carriers.back.release()

    def wait(self) -> None:
        """Let the world continue until it releases this thread again. Called in the thread."""
        self._carriers.back.release()
        self.go.acquire()


class Strand:
    """One blocking call of a process."""

    def __init__(self, process: Process, work: Callable[[], None]) -> None:
        self.process, self._world = process, process.world
        self._carrier = process.world.carriers.carry(lambda: self._run(work))
        process.strands.append(self)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            if self.process.alive:
                work()
        except Killed:
            pass
        finally:
            self.process.strands.remove(self)

    def step(self) -> None:
        """Run until it waits again. Called by the world."""
        self.process.when_running(self._step)

    def _step(self) -> None:
        world, before = self._world, (self._world.current, self._world.strand)
        world.current, world.strand = self.process, self
        try:
            world.carriers.release(self._carrier)
        finally:
            world.current, world.strand = before

    def wait(self) -> None:
        """Wait until the world steps it. Raises Killed if the process is dead by then. Called in the strand."""
        self._carrier.wait()
        if not self.process.alive:
            raise Killed

    @property
    def is_here(self) -> bool:
        """False in every other thread."""
        return self._carrier.thread is threading.current_thread()

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`. Called in the strand."""
        self._world.at(seconds, self.step)
        self.wait()

    def unwind(self) -> None:
        """End a call of a dead process."""
        self._step()


def is_outside(world: World) -> bool:
    """Return true if the world does not control this thread: a test or a command started it, or left it behind.

    Its work takes real time, and returns no control to the world.
    """
    is_strand = world.strand is not None and world.strand.is_here
    return not is_strand and threading.current_thread() is not threading.main_thread()


def begin(process: Process, work: Callable[[], None], delay: float) -> Strand:
    """Start a blocking call in `delay` seconds."""
    strand = Strand(process, work)
    process.world.at(delay, strand.step)
    return strand


class SimExecutor:
    """A ThreadPoolExecutor with strands as threads, at most `workers` at once.

    Used from within a strand, it does the work at once: a pool of a pool adds nothing to the order of requests.
    """

    world: World  # of the current run

    def __init__(self, max_workers: int | None = None, thread_name_prefix: str = "") -> None:
        self._workers, self._running = max_workers or 8, 0
        self._queue: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._rng = self.world.chance(f"threads/{thread_name_prefix}/{self.world.turns}")

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        process = self.world.current
        if self.world.strand is not None or is_outside(self.world):
            future.set_running_or_notify_cancel()
            _settle(future, lambda: fn(*args, **kwargs))
            return future
        assert process is not None, "a blocking call of nobody"
        self._queue.append((future, lambda: fn(*args, **kwargs)))
        self._start(process)
        return future

    def _start(self, process: Process) -> None:
        while self._queue and self._running < self._workers:
            future, call = self._queue.pop(0)
            if not future.set_running_or_notify_cancel():
                continue
            self._running += 1

            def work(future: Future[Any] = future, call: Callable[[], Any] = call) -> None:
                _settle(future, call)
                self._running -= 1
                self._start(process)

            begin(process, work, self._rng.uniform(0.0002, 0.004))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel calls that have not begun, if asked to."""
        if cancel_futures:
            for future, _ in self._queue:
                future.cancel()

    def __enter__(self) -> SimExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _settle(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        result = call()
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result)


class LoopCall(Generic[T]):
    """A blocking call's request to the event loop of its process, for which it waits."""

    world: World

    def __init__(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self._task = loop.create_task(work)
        self.cancel = self._task.cancel

    def result(self, timeout: float) -> T:
        """Return its result. Raises TimeoutError after `timeout` seconds."""
        strand, end = self.world.strand, self.world.now + timeout
        assert strand is not None, "the event loop would wait for itself"
        while not self._task.done():
            if self.world.now >= end:
                raise TimeoutError
            strand.sleep(0.002)
        return self._task.result()


class SimLock:
    """A lock between strands of one process. A strand that waits for it lets the world continue."""

    world: World

    def __init__(self) -> None:
        self._is_taken = False

    def acquire(self) -> bool:
        while self._is_taken:
            if is_outside(self.world):
                time.sleep(0.0005)
                continue
            strand = self.world.strand
            assert strand is not None, "the event loop would be blocked by a lock"
            strand.sleep(0.0005)
        self._is_taken = True
        return True

    def release(self) -> None:
        self._is_taken = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
