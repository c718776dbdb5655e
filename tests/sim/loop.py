"""The event loop of one process under the simulated clock: no selector, no socket, no thread."""

import asyncio
import heapq
from asyncio import events
from collections import deque
from contextvars import Context, copy_context
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


class SimHandle(asyncio.Handle):
    """A call that is due, without a record for debugging: there are millions."""

    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: Any, context: Context | None) -> None:
        self._context = copy_context() if context is None else context
        self._callback, self._args, self._loop = callback, args, loop
        self._cancelled, self._repr, self._source_traceback = False, None, None


class Due(float):
    """The time of a call, which a heap compares without a Python call. `handle`: of the call."""

    __slots__ = ("handle",)
    handle: SimHandle


class SimLoop(asyncio.BaseEventLoop):
    """The event loop of one process. The world turns it; a turn stops midway if the process dies or is paused."""

    def __init__(self, process: Process) -> None:
        self._process, self._world, self._numbers = process, process.world, count(1)
        self.queue, self.timers = deque[SimHandle](), list[Due]()
        super().__init__()
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
        self.queue.clear()
        self.timers.clear()
        vars(self)["_closed"] = True

    def next_time(self) -> float | None:
        """Return the time of the next timer."""
        while self.timers and self.timers[0].handle._cancelled:
            heapq.heappop(self.timers)
        return self.timers[0] if self.timers else None

    def turn(self) -> None:
        """Run all calls that are due now."""
        timers, queue, process, now = self.timers, self.queue, self._process, self._world.now
        while timers and (timers[0] <= now or timers[0].handle._cancelled):
            if not (handle := heapq.heappop(timers).handle)._cancelled:
                queue.append(handle)
        events._set_running_loop(self)
        try:
            for _ in range(len(queue)):
                ready = queue.popleft()
                if not ready._cancelled:
                    ready._run()
                if process.paused or not process.alive:
                    break
        finally:
            events._set_running_loop(None)

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> SimHandle:  # type: ignore[override]
        self.queue.append(handle := SimHandle(callback, args, self, context))
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> SimHandle:
        due = Due(when)
        due.handle = SimHandle(callback, args, self, context)
        heapq.heappush(self.timers, due)
        return due.handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

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
