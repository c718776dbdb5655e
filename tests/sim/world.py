"""The simulated world: one clock, one heap of events, one root seed, and the processes that live in it.

Each process is an event loop of its own (`tests.sim.loop`) with blocking calls in strands (`tests.sim.strands`). The
world takes one step at a time: an event that is due, or a turn of one process that is ready, chosen by the seed. The
clock moves only if no process is ready.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

    from tests.sim.loop import SimLoop
    from tests.sim.network import Link, Listener
    from tests.sim.strands import Carriers, Strand

EPOCH = 1_800_000_000  # seconds since 1970 at which every world begins
NS = 1_000_000_000
MIN_STEP = 1e-6  # least seconds that the clock moves
TURN = 5e-6  # seconds of a turn: else a timer could stay a rounding error ahead, and its loop spin for ever
LAST_EVENTS = 50


class Deadlock(AssertionError):
    """The world can make no further step."""


class Overdue(AssertionError):
    """The condition of a run that did not become true in time."""


class Killed(BaseException):
    """The end of the running call of a process that was killed in the middle."""


class Trace:
    """A digest of the events of a world, and the last of them in words."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8)
        self.last: deque[str] = deque(maxlen=LAST_EVENTS)
        self.count, self.is_closed = 0, False

    def add(self, now: float, event: str) -> None:
        if self.is_closed:
            return
        line = f"{now:11.6f} {event}"
        self._digest.update(line.encode())
        self.last.append(line)
        self.count += 1

    def digest(self) -> str:
        return self._digest.hexdigest()


class World:
    """The world of one seed."""

    def __init__(self, seed: int, carriers: Carriers) -> None:
        self.seed, self.now, self.turns, self.trace = seed, 0.0, 0, Trace()
        self.epoch: float = EPOCH
        self._rng, self._numbers = self.chance("world"), count()
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self.processes: list[Process] = []
        self.graveyard: list[Process] = []
        self.listeners: dict[int, Listener] = {}
        self.current: Process | None = None  # the process of the current turn or strand
        self.strand: Strand | None = None  # the blocking call that runs now
        self.arriving: tuple[Link | None, float] = None, 0.0  # the link of the last packet, and when it was sent
        self.full_disks = set[str]()  # hosts
        self.carriers = carriers

    def chance(self, name: str) -> random.Random:
        """Return a separate random source for `name`: choices of one part do not move those of another."""
        return random.Random(f"{self.seed}/{name}")

    def time_ns(self) -> int:
        return round(self.epoch * NS) + round(self.now * NS)

    def note(self, event: str) -> None:
        self.trace.add(self.now, event)

    def at(self, delay: float, call: Callable[[], object]) -> None:
        """Call `call` in `delay` seconds."""
        heapq.heappush(self._events, (self.now + max(0.0, delay), next(self._numbers), call))

    def spawn(self, name: str, main: Callable[[], Coroutine[Any, Any, Any]], *, host: str = "") -> Process:
        """Start a process on `host` (empty: one of its own) that runs `main` to its end."""
        from tests.sim.loop import SimLoop

        process = Process(self, name, host or name)
        process.loop = SimLoop(process)
        self.processes.append(process)
        process.task = process.loop.create_task(main())
        self.note(f"{name} starts")
        return process

    def run(self, until: Callable[[], bool], limit: float) -> None:
        """Run until `until` holds. Raises Overdue after `limit` seconds, Deadlock if nothing can happen any more."""
        end, events = self.now + limit, self._events
        while not until():
            now, ready = self.now, []
            if events and events[0][0] <= now:
                heapq.heappop(events)[2]()
                continue
            for each in self.processes:  # for each turn of all worlds, so without a call
                if ((loop := each.loop).queue or ((timers := loop.timers) and timers[0] <= now)) and not each.paused:
                    ready.append(each)
            if ready:
                self.turns += 1
                (self._rng.choice(ready) if len(ready) > 1 else ready[0]).turn()
                self.now += TURN
                continue
            times = [at for each in self.processes if not each.paused and (at := each.loop.next_time()) is not None]
            times += [at for at, _, _ in events[:1]]
            if not times:
                raise Deadlock(f"nothing will ever happen again, at {self.now:.3f} s")
            self.now = max(self.now + MIN_STEP, min(times))
            if self.now > end:
                raise Overdue(f"not reached within {limit:g} simulated seconds")

    def close(self) -> None:
        """End every process without a line in the trace; waiting strands are unwound: their threads are needed."""
        self.trace.is_closed = True
        for each in [*self.processes]:
            each.kill()
        for strand in [each for process in self.graveyard for each in process.strands]:
            strand.unwind()


class Process:
    """One process of a host: its loop, its connections, its blocking calls, and if it is alive and runs.

    `skew`: how many seconds its host's wall clock is ahead.
    """

    loop: SimLoop
    task: asyncio.Task[Any]

    def __init__(self, world: World, name: str, host: str) -> None:
        self.world, self.name, self.host, self.skew = world, name, host, 0.0
        self.number = 1000 + len(world.processes) + len(world.graveyard)
        self.alive, self.paused = True, False
        self.links: list[Link] = []
        self.strands: list[Strand] = []
        self.errors: list[dict[str, Any]] = []
        self._held: list[Callable[[], object]] = []

    @property
    def runs(self) -> bool:
        return self.alive and not self.paused

    def turn(self) -> None:
        self.world.current = self
        try:
            self.loop.turn()
        finally:
            self.world.current = None

    def when_running(self, call: Callable[[], object]) -> None:
        """Call `call` now, or once the process is resumed; never if it is dead."""
        if self.paused:
            self._held.append(call)
        elif self.alive:
            call()

    def kill(self) -> None:
        """Kill it (SIGKILL): none of its code runs any more, not even `finally`; the kernel resets its connections."""
        if not self.alive:
            return
        self.alive = False
        self.world.note(f"{self.name} is killed")
        for link in self.links:
            link.abandon()
        self.world.processes.remove(self)
        self.world.graveyard.append(self)

    def pause(self) -> None:
        """Pause it (SIGSTOP)."""
        if self.runs:
            self.paused = True
            self.world.note(f"{self.name} is paused")

    def resume(self) -> None:
        """Resume it (SIGCONT)."""
        if self.alive and self.paused:
            self.paused = False
            self.world.note(f"{self.name} is resumed")
            held, self._held = self._held, []
            for call in held:
                self.world.at(0.0, lambda call=call: self.when_running(call))  # type: ignore[misc]
