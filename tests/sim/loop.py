"""The event loop of one process under the simulated clock: no selector, no socket, no thread."""

import asyncio
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable
from contextvars import Context
from itertools import count
from typing import Any

from tests.sim.network import Link, SimServer
from tests.sim.world import Process


class SimTask(asyncio.Task[Any]):
    """A task with its number as its hash: sets of tasks have one order in every run."""

    def __init__(self, *args: Any, number: int, **kwargs: Any) -> None:
        self._number = number  # before the task registers itself in a set
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class SimFuture(asyncio.Future[Any]):
    """A future with its number as its hash."""

    _number = 0

    def __hash__(self) -> int:
        return self._number


class SimLoop(asyncio.BaseEventLoop):
    """The event loop of one process. The world turns it; a turn stops midway if the process dies or is paused."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[Any]
    _timer_cancelled_count: int

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process, self._world, self._numbers = process, process.world, count(1)
        self.queue, self.timers = self._ready, self._scheduled
        self._rng = process.world.chance(f"loop/{process.number}")
        self.set_exception_handler(lambda _loop, context: process.errors.append(context))
        self.set_task_factory(self._new_task)

    def __del__(self) -> None:
        """Give no warning: the loop holds nothing that could be left open."""

    def _new_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> SimTask:
        return SimTask(work, loop=loop, number=next(self._numbers), **options)

    def create_future(self) -> asyncio.Future[Any]:
        future = SimFuture(loop=self)
        future._number = next(self._numbers)
        return future

    def time(self) -> float:
        return self._world.now

    def is_running(self) -> bool:
        return True

    def close(self) -> None:
        """Close it: nothing runs on it any more."""
        self._ready.clear()
        self._scheduled.clear()
        vars(self)["_closed"] = True

    def next_time(self) -> float | None:
        """Return the time of the next timer."""
        while self._scheduled and self._scheduled[0]._cancelled:
            self._drop_timer()
        return self._scheduled[0]._when if self._scheduled else None

    def _drop_timer(self) -> asyncio.TimerHandle:
        handle: asyncio.TimerHandle = heapq.heappop(self._scheduled)
        handle._scheduled = False  # type: ignore[attr-defined]
        if handle.cancelled():
            self._timer_cancelled_count -= 1
        return handle

    def turn(self) -> None:
        """Run all calls that are due now."""
        while self._scheduled and (self._scheduled[0]._cancelled or self._scheduled[0]._when <= self._world.now):
            handle = self._drop_timer()
            if not handle.cancelled():
                self._ready.append(handle)
        events._set_running_loop(self)
        try:
            for _ in range(len(self._ready)):
                ready = self._ready.popleft()
                if not ready._cancelled:
                    ready._run()
                if not self._process.runs:
                    break
        finally:
            events._set_running_loop(None)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """Connect to a listener of the world. Raises ConnectionRefusedError if there is none."""
        await asyncio.sleep(self._rng.uniform(0.0001, 0.002))
        server = self._world.listeners.get(port)
        if server is None or not server.is_up:
            raise ConnectionRefusedError(111, f"connect to {host}:{port} refused")
        protocol = protocol_factory()
        link = Link(self._world, self._process, protocol, server, port)
        protocol.connection_made(link.transport)
        server.accept(link)
        return link.transport, protocol

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """Listen at `port` of the world."""
        self._world.listeners[port] = server = SimServer(self._process, protocol_factory)
        return server
