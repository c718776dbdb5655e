"""Concurrent tasks that always end, even if a cancellation is swallowed on the way."""

import asyncio
import gc
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common import tasks
from common.cli import run_async
from common.errors import Stopped, Unavailable, UnexpectedError
from common.observe.monitor import MAX_PARALLEL_REQUESTS
from common.service.process import ThreadPool, count_running_calls
from common.tasks import Stop, StopReason, report_errors, run_all, run_with, spawn, unexpected, wait_for, wait_result
from egress.deps import PROCESS_THREADS, FeedExecutor, ProcessThreads, SharedThreads
from tests.support.basics import PATIENCE, cancelled, counted, raises_code, soon
from tests.support.clock import ManualClock
from tests.support.stores import no_room

ROOT = Path(__file__).parents[2]


async def swallows(times: int, ended: Stop) -> None:
    """Continue after so many cancellations, as code over `asyncio.wait_for` of Python 3.11 may."""
    try:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if times == 0:
                    raise
                times -= 1
    finally:
        ended.set()


async def fails(after: float = 0.01) -> None:
    await asyncio.sleep(after)
    raise ValueError("failed")


async def test_sides_end_with_the_main_work_even_where_they_lose_a_cancellation() -> None:
    ended = Stop()
    await asyncio.wait_for(run_with(asyncio.sleep(0.01), swallows(1, ended)), PATIENCE)
    assert ended.is_set


async def test_a_side_that_comes_to_its_end_does_not_end_the_main_work_and_one_that_fails_does() -> None:
    done = []

    async def main() -> None:
        await asyncio.sleep(0.05)
        done.append(1)

    await run_with(main(), asyncio.sleep(0))
    assert done == [1]
    await run_all(asyncio.sleep(0.01), asyncio.sleep(0.02))
    for group in (run_with, run_all):
        ended = Stop()
        with pytest.raises(BaseExceptionGroup) as caught:
            await asyncio.wait_for(group(swallows(1, ended), fails()), PATIENCE)
        assert ended.is_set
        assert [str(error) for error in caught.value.exceptions] == ["failed"]


async def test_a_cancelled_group_leaves_nothing_running() -> None:
    ended = Stop()
    task = asyncio.create_task(run_all(swallows(0, ended), asyncio.sleep(60)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set


async def test_a_cancellation_that_comes_together_with_the_result_is_not_lost() -> None:
    for wait in ("event", "future"):
        event, future = asyncio.Event(), asyncio.get_running_loop().create_future()
        task = asyncio.create_task(wait_for(event, 60) if wait == "event" else wait_result(future, 60))
        await asyncio.sleep(0.01)
        event.set()
        future.set_result(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_within_raises_in_time_and_cancels_what_it_waited_for() -> None:
    future = asyncio.get_running_loop().create_future()
    with pytest.raises(TimeoutError):
        await wait_result(future, 0.01)
    assert future.cancelled()


# Errors of tasks that are not awaited


async def breaks() -> None:
    no_room()


def in_a_task_nobody_awaits(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.create_task(breaks())  # noqa: RUF006
    loop.call_later(0.01, gc.collect)


WAYS: dict[str, Callable[[asyncio.AbstractEventLoop], object]] = {
    "soon": lambda loop: loop.call_soon(no_room),
    "later": lambda loop: loop.call_later(0.001, no_room),
    "from a thread": lambda loop: loop.run_in_executor(None, loop.call_soon_threadsafe, no_room),
    "when done": lambda loop: asyncio.create_task(asyncio.sleep(0)).add_done_callback(no_room),
    "in a task": in_a_task_nobody_awaits,
    "to nobody": lambda loop: tasks.raise_fatal(MemoryError("no room")),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_error_without_an_owner_ends_the_service(way: str) -> None:
    count = counted(unexpected.labels("service"))

    async def service() -> None:
        WAYS[way](asyncio.get_running_loop())
        await asyncio.sleep(60)

    with raises_code(UnexpectedError, "E-UNEXPECTED", 1, match="MemoryError: no room"):
        run_async(service())
    assert counted(unexpected.labels("service")) == count + 1


@pytest.mark.parametrize("error", [ConnectionResetError("gone"), Unavailable("away"), TimeoutError("late")])
def test_an_error_of_a_transport_ends_nothing(error: Exception) -> None:
    def cut() -> None:
        raise error

    async def service() -> str:
        loop = asyncio.get_running_loop()
        loop.call_soon(cut)
        loop.call_exception_handler({"message": "fatal", "exception": ValueError("b"), "transport": object()})
        loop.call_exception_handler({"message": "a task was destroyed"})
        await asyncio.sleep(0.01)
        return "goes on"

    assert run_async(service()) == "goes on"


def test_the_owner_of_a_callback_or_a_task_knows() -> None:
    async def service() -> list[str]:
        found: list[Exception] = []
        report_errors(no_room, found.append)()
        await asyncio.wait({spawn(breaks(), found.append, name="x")})
        ended = spawn(asyncio.sleep(60), found.append, name="y")
        await asyncio.sleep(0)
        await cancelled(ended)
        return list(map(str, found))

    assert run_async(service()) == ["no room", "no room"]


async def test_what_an_error_ended_begins_again_after_pauses_that_grow() -> None:
    clock, began = ManualClock(), []

    async def work() -> None:
        began.append(clock.monotonic())
        if len(began) == 4:
            clock.advance(60)  # it ran for a while: its failure counts as the first
        if len(began) < 6:
            no_room()

    async def stops() -> None:
        raise Stopped("an operator has to look")

    with pytest.raises(Stopped):
        await tasks.restart_on_error("expiry", stops, clock)
    count = counted(unexpected.labels("expiry"))
    await tasks.restart_on_error("expiry", work, clock)
    assert (began, counted(unexpected.labels("expiry"))) == ([0, 1, 3, 7, 68, 70], count + 5)


def test_errors_of_every_component_are_counted_from_zero() -> None:
    texts = [path.read_text() for folder in ("common", "egress", "ingress") for path in (ROOT / folder).rglob("*.py")]
    found = {name for text in texts for name in re.findall(r'restart_on_error\(\s*"(\w+)"', text)}
    assert {"account", "events"} <= found <= {*tasks.COMPONENTS}


def test_a_group_is_named_by_its_defect() -> None:
    inner = ExceptionGroup("inner", [Unavailable("a"), KeyError("x")])
    found = UnexpectedError.wrap(ExceptionGroup("group", [Unavailable("b"), inner]), "chain s/f")
    assert found.message == "chain s/f: KeyError: 'x'"
    assert isinstance(found.__cause__, KeyError)


async def test_a_stop_keeps_its_first_reason_and_is_waited_for_no_longer_than_asked() -> None:
    stop = Stop()
    assert (stop.is_set, stop.reason) == (False, None)
    assert not await stop.wait(0.01)
    asyncio.get_running_loop().call_later(0.01, stop.set, StopReason.RESET)
    assert await stop.wait(PATIENCE)
    stop.set()
    assert (stop.is_set, stop.reason) == (True, StopReason.RESET)
    other = Stop()
    other.set()
    assert (await other.wait(), other.reason) == (True, StopReason.SHUTDOWN)


async def test_a_child_stops_with_its_parents_for_their_reason_and_never_stops_them() -> None:
    service, lease = Stop(), Stop()
    child = Stop(service, lease)
    grandchild, child_of_its_own = Stop(child), Stop(service)
    child_of_its_own.set(StopReason.DECISION)
    assert not service.is_set
    lease.set(StopReason.GIVE_BACK)
    assert (child.reason, grandchild.reason) == (StopReason.GIVE_BACK, StopReason.GIVE_BACK)
    service.set(StopReason.SHUTDOWN)
    # Giving back a lease leaves time, so a reason that leaves none replaces it.
    assert (child.reason, child_of_its_own.reason) == (StopReason.SHUTDOWN, StopReason.DECISION)
    assert Stop(child).reason is StopReason.SHUTDOWN


async def test_a_child_that_nobody_needs_any_more_is_forgotten() -> None:
    parent = Stop()
    child = weakref.ref(Stop(parent))
    gc.collect()
    assert child() is None
    parent.set()


# Blocking calls in threads


@pytest.fixture(params=[False, True], ids=["own", "shared"])
def threads(request: pytest.FixtureRequest) -> Iterator[ThreadPool]:
    pool = ThreadPool(executor=FeedExecutor(SharedThreads("test", 1))) if request.param else ThreadPool("test", 1)
    yield pool
    pool.close()


async def test_the_event_loop_turns_while_a_call_runs_which_cancelling_idle_does_not_cancel(threads: ThreadPool):
    before, release = count_running_calls(), threading.Event()
    call = asyncio.create_task(threads.run(release.wait, PATIENCE))
    await soon(lambda: threads.busy)
    await soon(lambda: count_running_calls() == before + 1)
    idle = asyncio.create_task(threads.wait_idle())
    await asyncio.sleep(0)
    await cancelled(idle)
    release.set()
    assert await call
    await soon(lambda: count_running_calls() == before)


async def test_idle_waits_for_a_call_whose_await_was_cancelled(threads: ThreadPool):
    # Given a cancelled upload that still runs
    release, done = threading.Event(), threading.Event()

    def upload() -> None:
        release.wait(PATIENCE)
        done.set()
        raise OSError("nobody is there to see it")

    call = asyncio.create_task(threads.run(upload))
    await soon(lambda: threads.busy)
    await cancelled(call)
    assert call.cancelled()
    # When a task waits for the pool
    idle = asyncio.create_task(threads.wait_idle())
    await asyncio.sleep(0.05)
    assert not idle.done()
    release.set()
    await idle
    # Then the upload has ended
    assert (done.is_set(), threads.busy) == (True, 0)


@pytest.mark.parametrize("is_closed", [False, True])
async def test_a_call_that_ends_before_a_thread_is_free_never_runs(threads: ThreadPool, is_closed: bool):
    release, ran = threading.Event(), threading.Event()
    first = asyncio.create_task(threads.run(release.wait, 10))
    await soon(lambda: threads.busy)
    second = asyncio.create_task(threads.run(ran.set))
    await asyncio.sleep(0)
    threads.close() if is_closed else second.cancel()
    await asyncio.wait_for(asyncio.wait({second}), PATIENCE)
    release.set()
    await first
    await threads.wait_idle()
    assert not ran.is_set()


async def test_hundreds_of_feeds_share_few_threads_and_one_that_hangs_stops_no_other() -> None:
    before, shared, release = threading.active_count(), ProcessThreads(), threading.Event()
    pools = [shared.pools() for _ in range(500)]
    hung = [asyncio.create_task(each.io.run(release.wait, PATIENCE)) for each in pools[:10] for _ in range(9)]
    await asyncio.sleep(0)
    calls = [pool.run(int) for each in pools[10:] for pool in (each.io, each.io, each.large_puts, each.encoder)]
    await asyncio.wait_for(asyncio.gather(*calls), PATIENCE)
    assert threading.active_count() - before <= PROCESS_THREADS <= 64 - MAX_PARALLEL_REQUESTS - 6  # the others
    assert not any(call.done() for call in hung)
    hung.pop().cancel()
    release.set()
    assert all(await asyncio.gather(*hung))
    await asyncio.gather(*(each.idle() for each in pools))
    shared.close()


def test_a_thread_that_never_returns_does_not_keep_the_command_from_ending():
    script = """
import asyncio, sys, threading
import click, floe
from common.cli import run_command
from common.service.process import ThreadPool

@floe.cli.command("hang")
@run_command
async def hang():
    call = asyncio.create_task(ThreadPool("t", 1).run(threading.Event().wait))
    await asyncio.sleep(0.1)
    call.cancel()
    return 75

floe.COMMANDS["hang"] = floe.Entry("__main__:hang", "")
sys.argv = ["floe", "hang"]
floe.main()
"""
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", script], cwd=root, timeout=PATIENCE, check=False, capture_output=True)
    assert (ended.returncode, ended.stderr) == (75, b"")
