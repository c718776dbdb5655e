"""Existing tests in simulated time: one test is one process of a world, with the simulated nats-server behind
`nats_url`. Waits of a test and of the product pass at once; files are real.

A test that is marked `simulated` runs so; the commands that it runs are processes of the same world.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any, TypeVar

import common.cli
from common.tasks import run_until_fatal
from tests.sim import doors
from tests.sim.loop import SimLoop
from tests.sim.nats import SimNats
from tests.sim.strands import Carriers, SimExecutor, SimLock, is_outside
from tests.sim.world import Process, World

T = TypeVar("T")

PACKAGES = ("common", "egress", "ingress", "compaction", "infra", "tests")
APART = ("infra.local", "tests.sim")  # modules that start real servers, and the simulation
PORT = 4222
LONGEST = 600.0  # simulated seconds that one step of a test may take


class _Time(doors._Time):
    """`time` in a test: a sleep of its own thread moves the clock."""

    def sleep(self, seconds: float) -> None:
        world = doors.current()
        if is_outside(world):
            time.sleep(seconds)
        elif world.strand is not None:
            world.strand.sleep(seconds)
        else:
            world.now += seconds


TIME = _Time("time")
_run_async = common.cli.run_async


class TestProcess(Process):
    """The process of the test. Code between its turns, such as in fixtures, is its work too."""

    def turn(self) -> None:
        super().turn()
        self.world.current = self


class TestLoop(SimLoop):
    """The loop of the test, which turns the world."""

    _turns_world = False

    def __init__(self, process: TestProcess) -> None:
        super().__init__(process)
        self._pool = SimExecutor()

    def is_running(self) -> bool:
        return self._turns_world

    def run_until_complete(self, work: Any) -> Any:
        task = asyncio.ensure_future(work, loop=self)
        self._turns_world = True
        try:
            self._world.run(task.done, LONGEST)
        except BaseException:
            _Test.carriers = Carriers()  # strands left of this test must not meet the next one
            raise
        finally:
            self._turns_world = False
        return task.result()

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        pool: Any = executor or self._pool
        return asyncio.wrap_future(pool.submit(func, *args), loop=self)


class _Test:
    """The process of the test that runs now, and the threads of all tests."""

    process: TestProcess | None = None
    carriers = Carriers()


class Policy(asyncio.DefaultEventLoopPolicy):
    """An event loop policy that gives simulated tests a loop of their world."""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        if (process := _Test.process) is None:
            return super().new_event_loop()
        process.loop = loop = TestLoop(process)
        return loop


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` as a process of the world, in place of `common.cli.run_async`. A module that was first imported in a
    simulated test keeps this one, so without a world it is the real one.
    """
    if _Test.process is None:
        return _run_async(main)
    world = doors.current()
    strand = world.strand
    assert strand is not None, "a command on the loop of the test"
    process = world.spawn("command", lambda: run_until_fatal(main))
    process.task.add_done_callback(lambda _: world.at(0.0, strand.step))
    strand.wait()
    process.kill()
    result: T = process.task.result()
    return result


@contextmanager
def virtual() -> Iterator[None]:
    """Run the block as one process of a world with a server on PORT."""
    world = World(1, _Test.carriers)
    world.epoch = time.time()
    SimNats(world, PORT)
    process = TestProcess(world, "test", "test")
    world.processes.append(process)
    world.current = process
    with doors.entered(world):
        process.loop = TestLoop(process)
        doors.install_threads()
        for name, module in [*sys.modules.items()]:
            is_ours = name.partition(".")[0] in PACKAGES or name.startswith("test_")  # the latter have no package
            if is_ours and not name.startswith(APART):
                _replace_in(vars(module))
        _Test.process = process
        try:
            yield
        finally:
            _Test.process = None
            world.close()
            doors.uninstall()


def _replace_in(names: dict[str, Any]) -> None:
    if names.get("time") is time:
        doors.replace(names, "time", TIME)
    if getattr(names.get("run_async"), "__module__", "") == "common.cli":
        doors.replace(names, "run_async", run_async)
    if "_one_at_a_time" in names:
        doors.replace(names, "_one_at_a_time", SimLock())
