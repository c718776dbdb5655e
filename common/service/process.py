"""Signals and threads of a process: requests to stop, work to wait for, and messages to its supervisor.

The first SIGTERM or SIGINT makes the service drain, the second ends the process at once. SIGHUP ends nothing: it
calls the functions in `hangups`, such as reading secrets again. SIGQUIT ends nothing either: it logs the stack of every
task and every thread. Nor does SIGUSR1: if no `on_signal` handles it, a log line reports that.
"""

import asyncio
import contextvars
import functools
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from common.clock import Clock
from common.logs import escaped, get_logger
from common.settings.types import read_all_again
from common.tasks import Stop, end, orphaned, told, watched

log = get_logger(__name__)


SIGNALS = (signal.SIGTERM, signal.SIGINT)


#: Called one after the other when SIGHUP comes: on the event loop of a service, or in a thread without a loop.
hangups: list[Callable[[], None]] = [read_all_again]

_taken: set[int] = set()  # signals that an `on_signal` handles now

#: Called when SIGQUIT comes, before the tasks and threads of this process are logged.
quits: list[Callable[[], None]] = []


def exit_at_once(number: int) -> None:
    """End the process at the second signal, with 143 for SIGTERM, 130 for SIGINT."""
    os._exit(128 + number)


@contextmanager
def _handling(handlers: Mapping[signal.Signals, Any], afterwards: Any = None) -> Iterator[None]:
    """Handle signals by `handlers` within the block, then as before, or by `afterwards`. Outside the main thread,
    which alone receives signals, nothing is handled.
    """
    here = threading.current_thread() is threading.main_thread()
    former = {number: signal.signal(number, handler) for number, handler in handlers.items() if here}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler if afterwards is None else afterwards)


@asynccontextmanager
async def stop_on_signals(
    second: Callable[[int], None] = exit_at_once, *, deaf_afterwards: bool = False
) -> AsyncIterator[Stop]:
    """Yield a `Stop` that the first SIGTERM or SIGINT sets. Each further one calls `second` with its number.

    SIGHUP calls `hangups`, SIGQUIT logs tasks and threads. On leaving, the former handlers are back; with
    `deaf_afterwards` signals are ignored from then on: a process that has done its work ends with its own exit code.
    Outside the main thread, which alone receives signals, it is never set.
    """
    stop, loop = Stop(), asyncio.get_running_loop()
    received: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        # A plain handler, not the loop's own: the second signal must work while the loop is blocked. And not
        # the default action, which process 1 of a container does not have.
        received.append(number)
        if len(received) > 1:
            second(number)
        else:
            loop.call_soon_threadsafe(_ask, stop, number)

    handlers: dict[signal.Signals, Any] = dict.fromkeys(SIGNALS, on_signal)
    handlers[signal.SIGHUP] = lambda *_: loop.call_soon_threadsafe(_hang_up)
    handlers[signal.SIGQUIT] = lambda *_: _dump_beside(loop)
    if signal.SIGUSR1 not in _taken:
        handlers[signal.SIGUSR1] = lambda *_: loop.call_soon_threadsafe(_tell_not_taken)
    with _handling(handlers, signal.SIG_IGN if deaf_afterwards else None):
        yield stop


@contextmanager
def on_signal(number: signal.Signals, call: Callable[[], object]) -> Iterator[None]:
    """Call `call` on the event loop for each signal `number` within the block; ignore the signal afterwards, so that it
    does not kill a process that ends. Outside the main thread nothing is handled.
    """
    loop = asyncio.get_running_loop()
    with _handling({number: lambda *_: loop.call_soon_threadsafe(call)}, signal.SIG_IGN):
        _taken.add(number)
        try:
            yield
        finally:
            _taken.discard(number)


@contextmanager
def stop_asked(cancel: Callable[[], None] = lambda: None) -> Iterator[Stop]:
    """Yield a `Stop` as `stop_on_signals` does, for a command without an event loop.

    The command calls `Stop.check` at points at which it can stop. `cancel` is called once, in a thread, when the
    first signal comes.
    """
    asked = Stop()

    def beside(work: Callable[[], None], name: str) -> None:
        # Not in the handler: the code that it interrupts may hold the very lock that the work needs.
        threading.Thread(target=work, name=name, daemon=True).start()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if asked.is_set:
            exit_at_once(number)
        asked.set()
        beside(lambda: (_tell_stop(number), cancel()), "stopping")  # type: ignore[arg-type,func-returns-value]

    handlers: dict[signal.Signals, Any] = dict.fromkeys(SIGNALS, on_signal)
    handlers[signal.SIGHUP] = lambda *_: beside(_hang_up, "hangup")
    handlers[signal.SIGQUIT] = lambda *_: _dump_beside(None)
    handlers[signal.SIGUSR1] = lambda *_: beside(_tell_not_taken, "not-taken")
    with _handling(handlers):
        yield asked


def _tell_stop(number: int) -> None:
    log.info("stopping", action="stop_asked", signal=signal.Signals(number).name)


def _tell_not_taken() -> None:
    log.warning("SIGUSR1: only egress takes it", action="signal_not_taken", signal="SIGUSR1")


def _dump_beside(loop: asyncio.AbstractEventLoop | None) -> None:
    """Log tasks and threads from a thread of its own, which works even if the loop is blocked."""
    threading.Thread(target=_dump, args=(loop,), name="dump", daemon=True).start()


def _dump(loop: asyncio.AbstractEventLoop | None) -> None:
    for call in quits:
        call()
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name()) if loop else []
    frames, here = sys._current_frames(), threading.get_ident()
    threads = [(each.name, frames.get(each.ident or 0)) for each in threading.enumerate() if each.ident != here]
    # A warning, so that it is logged even if little is: an operator requested it.
    log.warning("tasks and threads", action="dump", tasks=len(tasks), threads=len(threads))
    for task in tasks:
        log.warning("task", action="dump_task", task=task.get_name(), stack=_awaiting(task.get_coro()))
    for name, frame in threads:
        stack = reversed(traceback.extract_stack(frame)) if frame else ()
        log.warning("thread", action="dump_thread", thread=name, stack=[_place(each) for each in stack])


def _awaiting(work: Any) -> list[str]:
    """Return the type of a last awaitable without a frame, if there is one, then the frames, innermost first."""
    places: list[str] = []
    while (frame := getattr(work, "cr_frame", None) or getattr(work, "gi_frame", None)) is not None:
        code = frame.f_code
        places.append(f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}")
        work = getattr(work, "cr_await", None) or getattr(work, "gi_yieldfrom", None)
    return [*([str(type(work).__name__)] if work is not None else []), *reversed(places)]


def _place(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno} {frame.name}"


def _hang_up() -> None:
    log.info("hangup, going on", action="hangup", read_again=len(hangups))
    for call in hangups:
        try:
            call()
        except Exception as error:  # the service continues with the former values
            told(error, "service", "hangup")


def _ask(stop: Stop, number: int) -> None:
    _tell_stop(number)
    stop.set()


TELL = 2.0  # seconds between two checks for news to the service manager
MAX_STATUS = 300  # characters


class SystemdNotifier:
    """Notifier of the service manager, as in sd_notify(3): `Type=notify` and its watchdog.

    `says`: returns status and text of the monitor's page at a path; may take seconds, so it is called in a thread.
    Without NOTIFY_SOCKET in `environment` nothing is sent. The watchdog is not fed if WATCHDOG_PID is another process.
    """

    def __init__(
        self, says: Callable[[str], tuple[int, str]], clock: Clock, environment: Mapping[str, str] = os.environ
    ) -> None:
        self._says, self._clock, self._told = says, clock, ""
        address = environment.get("NOTIFY_SOCKET", "")
        # `@` begins an abstract name, `/` a file; anything else is no socket of this kind.
        self._address = "\0" + address[1:] if address[:1] == "@" else address if address[:1] == "/" else ""
        is_mine = environment.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
        microseconds = environment.get("WATCHDOG_USEC", "")
        self._watchdog = int(microseconds) / 1e6 if is_mine and microseconds.isdecimal() else 0.0

    @asynccontextmanager
    async def while_running(self, stop: Stop) -> AsyncIterator[None]:
        """Report ready now, stopping once `stop` is set, alive as long as /healthz is 200 and this event loop runs."""
        if not self._address:
            yield
            return
        threads = Threads("notify", 1)
        hangups.insert(0, self._reloading)
        hangups.append(self._ready)
        self._ready()
        telling = watched(self._tell(stop, threads), orphaned, name="notify")
        try:
            yield
        finally:
            hangups.remove(self._reloading)
            hangups.remove(self._ready)
            await end(telling)
            await threads.idle()
            threads.close()

    async def _tell(self, stop: Stop, threads: "Threads") -> None:
        pause, asked = min(TELL, self._watchdog / 4 or TELL), False
        while True:
            if stop.is_set and not asked:
                asked = True
                self._send("STOPPING=1", "STATUS=draining")
            elif words := await threads.run(self._news, stop.is_set):
                self._send(*words)
            await (self._clock.sleep(pause) if asked else stop.wait(pause))

    def _news(self, is_stopping: bool) -> list[str]:
        words = ["WATCHDOG=1"] if self._watchdog and self._says("/healthz")[0] == 200 else []
        if not is_stopping:
            status = escaped("; ".join(self._says("/readyz")[1].splitlines()))[:MAX_STATUS]
            if status != self._told:
                self._told = status
                words.append(f"STATUS={status}")
        return words

    def _ready(self) -> None:
        self._send("READY=1", f"MAINPID={os.getpid()}")

    def _reloading(self) -> None:
        self._send("RELOADING=1", f"MONOTONIC_USEC={int(self._clock.monotonic() * 1e6)}")

    def _send(self, *words: str) -> None:
        """Send without waiting: a service manager that does not read must not block the event loop."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
                line.sendto("\n".join(words).encode(), socket.MSG_DONTWAIT, self._address)
        except OSError as error:
            log.debug("not notified", action="notify_failed", words=words, error=str(error))


P = ParamSpec("P")
T = TypeVar("T")

_running: set[Future[Any]] = set()  # calls of all pools, including pools that were dropped


class Threads:
    """A pool of `workers` threads. Cancelling an awaited call does not stop its thread: `idle` waits for it.

    So a lease must not be released before `idle` returns: an upload may still be running.
    """

    def __init__(self, name: str, workers: int) -> None:
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix=name)
        self._calls: set[Future[Any]] = set()

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `fn(*args, **kwargs)` in a thread with the task's context variables; return or raise as it does.

        If cancelled while it waits for a free thread, `fn` is never called.
        """
        context = contextvars.copy_context()
        call = self._executor.submit(context.run, functools.partial(fn, *args, **kwargs))
        for calls in (self._calls, _running):
            calls.add(call)
            call.add_done_callback(calls.discard)
        return await asyncio.wrap_future(call)

    @property
    def busy(self) -> int:
        return len(self._calls)

    async def idle(self) -> None:
        """Return when no call is running, including calls with a cancelled await."""
        while calls := set(self._calls):
            # asyncio.wait cancels nothing when it is cancelled itself.
            await asyncio.wait({_settled(call) for call in calls})

    def close(self) -> None:
        """Take no more calls and drop those that have not begun; do not wait for running ones."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _settled(call: Future[Any]) -> asyncio.Future[Any]:
    waiter: asyncio.Future[Any] = asyncio.wrap_future(call)
    # The caller that awaited it has seen its error; here it only shows that the call ended.
    waiter.add_done_callback(lambda done: done.cancelled() or done.exception())
    return waiter


def busy_threads() -> int:
    """Return the number of calls that still run in all pools: after the end of the event loop, abandoned ones."""
    return len(_running)
