"""Tasks with an owner: waiting, ending, the handling of their errors, and the one signal that stops them."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

from common.clock import Backoff, Clock, doubling_delays
from common.errors import FloeError, OutcomeUnknown, Unavailable, UnexpectedError
from common.logs import get_logger
from common.metrics import counter, show_zeros

log = get_logger(__name__)

T = TypeVar("T")


class StopReason(StrEnum):
    """The reason why work ends."""

    SHUTDOWN = "shutdown"  # of the process
    GIVE_BACK = "give_back"  # of the lease, to the member that receives it next
    LEASE_LOST = "lease_lost"
    RESET = "reset"  # the work starts again from the beginning
    DECISION = "decision"  # an operator's


class Stop:
    """The one signal that work is to end, with its reason.

    The first reason stays, except GIVE_BACK, which leaves time and is replaced by any other. `parents`: signals of the
    callers; it is set with the first of them, for the same reason.
    """

    def __init__(self, *parents: Stop) -> None:
        self.reason: StopReason | None = None
        self._event = asyncio.Event()
        self._children: WeakSet[Stop] = WeakSet()
        for parent in parents:
            parent._children.add(self)
            if parent.reason is not None:
                self.set(parent.reason)

    @property
    def is_set(self) -> bool:
        return self.reason is not None

    def set(self, reason: StopReason = StopReason.SHUTDOWN) -> None:
        """Set the reason. Call it on the event loop only; without an event loop, from any thread."""
        if self.reason is None or (self.reason is StopReason.GIVE_BACK and reason is not self.reason):
            self.reason = reason
            self._event.set()
            for child in list(self._children):
                child.set(reason)

    def check(self) -> None:
        """Raise Unavailable if it is set: for work without an event loop."""
        if self.is_set:
            raise Unavailable("stopped by a signal before the end", hint="finished work stays; the next run continues")

    async def wait(self, seconds: float | None = None) -> bool:
        if not self.is_set:
            await first_of(self._event.wait(), seconds=seconds)
        return self.is_set


async def wait_for(event: asyncio.Event | Stop, seconds: float) -> bool:
    """Wait until `event` is set or `seconds` have passed; return True if it is set.

    Does not use `asyncio.wait_for`, which in Python 3.11 loses a cancellation that comes together with the event.
    """
    if not _is_set(event):
        await first_of(event.wait(), seconds=seconds)
    return _is_set(event)


def _is_set(event: asyncio.Event | Stop) -> bool:
    return event.is_set if isinstance(event, Stop) else event.is_set()


async def wait_result(future: asyncio.Future[T], seconds: float) -> T:
    """Return the result of `future`. Raises TimeoutError, and cancels it, if it does not come in `seconds`.

    Used instead of `asyncio.wait_for`, for the reason that `wait_for` gives.
    """
    try:
        await asyncio.wait((future,), timeout=seconds)
        if not future.done():
            raise TimeoutError
        return future.result()
    finally:
        future.cancel()


async def wait_done(work: asyncio.Future[Any], seconds: float, clock: Clock) -> bool:
    """Wait until `work` is done or `seconds` have passed by `clock`; return True if it is done. It is not cancelled."""
    pause = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait({work, pause}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        pause.cancel()
    return work.done()


async def first_of(*waits: Awaitable[object], seconds: float | None = None) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


P = ParamSpec("P")

CANCEL_RETRY_S = 0.5  # seconds until a task that has not ended is cancelled once more
RESTART_DELAYS_S = doubling_delays(1.0, 60.0)  # seconds until work that an error ended is restarted
MAX_TRACEBACK_CHARS = 4000  # characters; the end of a traceback names the place
BACKOFF_RESET_S = 60.0  # seconds of running, after which an error counts as the first again

#: Receives an error on behalf of its owner.
ReportError = Callable[[Exception], object]


#: The components that an error may end; `service`: the error had no owner.
COMPONENTS = (
    "account",
    "alive",
    "captures",
    "coverage",
    "decisions",
    "discovery",
    "events",
    "expiry",
    "feed",
    "flush",
    "heartbeats",
    "lease",
    "monitor",
    "rescue",
    "service",
    "sharing",
    "target",
    "unmatched",
    "walk",
    "worker",
)
unexpected = counter("unexpected_errors", "Unexpected errors, by the part that they ended.", ("part",), part=COMPONENTS)
show_zeros("unexpected_errors")


def record_unexpected(error: BaseException, component: str, work: str = "", **context: object) -> UnexpectedError:
    unexpected.labels(component).inc()
    known = UnexpectedError.wrap(error, work)
    # Not by exc_info: the log keeps tracebacks only of errors that are not FloeErrors, and the cause matters here.
    cause = known.__cause__ or error
    trace = "".join(traceback.format_exception(cause))
    context = {"component": component, "code": known.code, "error": known.message, **context}
    log.error(
        "unexpected error raised", action="unexpected_error_raised", traceback=trace[-MAX_TRACEBACK_CHARS:], **context
    )
    return known


def raise_fatal(error: BaseException) -> None:
    """Raise an error without an owner: it ends the service (`run_until_fatal`). Call it on the event loop."""
    context = {"message": "an error without an owner", "exception": error}
    asyncio.get_running_loop().call_exception_handler(context)


def report_errors(callback: Callable[P, None], report_error: ReportError) -> Callable[P, None]:
    """Wrap `callback` for other callers: its errors go to its owner by `report_error`, not to the caller."""

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            callback(*args, **kwargs)
        except Exception as error:
            report_error(error)

    return call


def spawn(work: Coroutine[Any, Any, None], report_error: ReportError, *, name: str) -> asyncio.Task[None]:
    """Start `work` as a task of its own: its error goes to its owner by `report_error`."""

    def on_end(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            report_error(error)

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(on_end)
    return task


class PendingError:
    """The error of a callback, kept until its owner, which waits for something else too, raises it.

    `event`: one that the owner waits for anyway, set with the first error; by default its own.
    """

    def __init__(self, event: asyncio.Event | None = None) -> None:
        self.event = event or asyncio.Event()
        self._error: Exception | None = None

    def set(self, error: Exception) -> None:
        """Keep `error` if it is the first, and set the event."""
        self._error = self._error or error
        self.event.set()

    def raise_if_set(self) -> None:
        if self._error is not None:
            raise self._error

    async def wait(self) -> None:
        """Wait until there is an error, then raise it."""
        await self.event.wait()
        self.raise_if_set()


async def restart_on_error(component: str, work: Callable[[], Coroutine[Any, Any, None]], clock: Clock) -> None:
    """Run `work` to its end; after an unexpected error, restart it after a pause that grows.

    Raises a FloeError that is not `UnexpectedError`: the caller handles it.
    """
    backoff = Backoff(None, RESTART_DELAYS_S)
    while True:
        began = clock.monotonic()
        try:
            await work()
            return
        except Exception as error:
            if isinstance(error, FloeError) and not isinstance(error, UnexpectedError):
                raise
            if clock.monotonic() - began >= BACKOFF_RESET_S:
                backoff.reset()
            pause = backoff.next_delay()
            record_unexpected(error, component, component, pause=pause)
        await clock.sleep(pause)


async def run_until_fatal(main: Coroutine[Any, Any, T]) -> T:
    """Run the main work of a process; an error without an owner cancels it, and is raised as UnexpectedError."""
    loop = asyncio.get_running_loop()
    orphan: asyncio.Future[BaseException] = loop.create_future()

    def keep(error: BaseException) -> None:
        if not orphan.done():
            record_unexpected(error, "service")
            orphan.set_result(error)

    def handle(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "transport" in context or isinstance(
            error, None | ConnectionError | TimeoutError | Unavailable | OutcomeUnknown
        ):
            log.warning("loop error raised", action="loop_error_raised", error=str(error or context.get("message")))
        else:
            # The garbage collector finds a task that was never awaited, and may run in any thread.
            loop.call_soon_threadsafe(keep, error)

    former = loop.get_exception_handler()
    loop.set_exception_handler(handle)
    task = asyncio.create_task(main, name="main")
    waits: list[asyncio.Future[Any]] = [task, orphan]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel(task)
        loop.set_exception_handler(former)
    if orphan.done():
        raise UnexpectedError.wrap(orphan.result())
    return task.result()


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel `tasks` and return when they have ended; drop the errors that they raise.

    Cancels more than once, because `asyncio.wait_for` of Python 3.11 loses a cancellation that comes together with the
    result that it waits for: the task continues.
    """
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=CANCEL_RETRY_S)
    for task in tasks:
        if not task.cancelled():
            task.exception()


async def run_until_stopped(stop: asyncio.Event | Stop, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`; None if `stop` is set first: `work` is then cancelled."""
    task = asyncio.create_task(work)
    try:
        await first_of(stop.wait(), asyncio.wait({task}))
        return task.result() if task.done() else None
    finally:
        await cancel(task)


async def warn_if_slow(work: Awaitable[T], seconds: float, warn: Callable[[], None]) -> T:
    """Return the result of `work`; call `warn`, once, if `work` is not done after `seconds`."""
    timer = asyncio.get_running_loop().call_later(seconds, warn)
    try:
        return await work
    finally:
        timer.cancel()


@asynccontextmanager
async def any_set(*events: asyncio.Event | Stop) -> AsyncIterator[Stop]:
    """Yield a new `Stop` that is set as soon as one of `events` is, while the block runs."""
    any_stop = Stop()

    async def pass_on(event: asyncio.Event | Stop) -> None:
        await event.wait()
        any_stop.set()

    if any(map(_is_set, events)):
        any_stop.set()
    tasks = [asyncio.create_task(pass_on(event), name="any_set") for event in events]
    try:
        yield any_stop
    finally:
        await cancel(*tasks)


async def run_all(*works: Coroutine[Any, Any, object]) -> None:
    """Run `works` side by side to their ends; the first that fails ends the others.

    Raises a BaseExceptionGroup of the errors. Unlike asyncio's TaskGroup, it cancels a task until the task has ended.
    """
    await _run_until(works, len(works))


async def run_with(main: Coroutine[Any, Any, object], *sides: Coroutine[Any, Any, object]) -> None:
    """Run `main` to its end, and the `sides` for as long; one of them that fails ends everything.

    Raises a BaseExceptionGroup of the errors.
    """
    await _run_until((main, *sides), 1)


async def _run_until(works: Sequence[Coroutine[Any, Any, object]], needed: int) -> None:
    tasks = [asyncio.create_task(work) for work in works]
    try:
        while not all(task.done() for task in tasks[:needed]) and not any(map(_error_of, tasks)):
            await asyncio.wait([t for t in tasks if not t.done()], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel(*tasks)
    if failures := [failure for failure in map(_error_of, tasks) if failure is not None]:
        raise BaseExceptionGroup("side by side", failures)


def _error_of(task: asyncio.Task[object]) -> BaseException | None:
    return None if not task.done() or task.cancelled() else task.exception()
