"""Signals and threads of a process: requests to stop, work to wait for, and messages to its supervisor.

The first SIGTERM or SIGINT makes the service drain, the second ends the process at once. SIGHUP ends nothing: it calls
the functions in `on_hangup`, such as reading secrets again. SIGQUIT ends nothing either: it logs the stack of every
task and every thread. Nor does SIGUSR1: if no `handle_signal` handles it, a log line reports that.
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
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from common.clock import Clock
from common.logs import escape, get_logger
from common.settings.types import reread_all_secrets
from common.tasks import Stop, cancel, raise_fatal, record_unexpected, spawn

log = get_logger(__name__)


SIGNALS = (signal.SIGTERM, signal.SIGINT)


#: Called one after the other when SIGHUP comes: on the event loop of a service, or in a thread without a loop.
on_hangup: list[Callable[[], None]] = [reread_all_secrets]

_handled_signals: set[int] = set()  # signals that an `handle_signal` handles now

#: Called when SIGQUIT comes, before the tasks and threads of this process are logged.
on_quit: list[Callable[[], None]] = []


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
    second: Callable[[int], None] = exit_at_once, *, ignore_afterwards: bool = False
) -> AsyncIterator[Stop]:
    """Yield a `Stop` that the first SIGTERM or SIGINT sets. Each further one calls `second` with its number.

    SIGHUP calls `on_hangup`, SIGQUIT logs tasks and threads. On leaving, the former handlers are back; with
    `ignore_afterwards` signals are ignored from then on: a process that has done its work ends with its own exit code.
    Outside the main thread, which alone receives signals, it is never set.
    """
    stop, loop = Stop(), asyncio.get_running_loop()
    received: list[int] = []

    def on_stop(number: int, _frame: FrameType | None) -> None:
        # A plain handler, not the loop's own: the second signal must work while the loop is blocked. And not
        # the default action, which process 1 of a container does not have.
        received.append(number)
        if len(received) > 1:
            second(number)
        else:
            loop.call_soon_threadsafe(_request_stop, stop, number)

    handlers: dict[signal.Signals, Any] = dict.fromkeys(SIGNALS, on_stop)
    handlers[signal.SIGHUP] = lambda *_: loop.call_soon_threadsafe(_hang_up)
    handlers[signal.SIGQUIT] = lambda *_: _start_dump(loop)
    if signal.SIGUSR1 not in _handled_signals:
        handlers[signal.SIGUSR1] = lambda *_: loop.call_soon_threadsafe(_log_unhandled)
    with _handling(handlers, signal.SIG_IGN if ignore_afterwards else None):
        yield stop


@contextmanager
def handle_signal(number: signal.Signals, call: Callable[[], object]) -> Iterator[None]:
    """Call `call` on the event loop for each signal `number` within the block; ignore the signal afterwards, so that it
    does not kill a process that ends. Outside the main thread nothing is handled.
    """
    loop = asyncio.get_running_loop()
    with _handling({number: lambda *_: loop.call_soon_threadsafe(call)}, signal.SIG_IGN):
        _handled_signals.add(number)
        try:
            yield
        finally:
            _handled_signals.discard(number)


@contextmanager
def stop_on_signals_sync(interrupt: Callable[[], None] = lambda: None) -> Iterator[Stop]:
    """Yield a `Stop` as `stop_on_signals` does, for a command without an event loop.

    The command calls `Stop.check` at points at which it can stop. `interrupt` is called once, in a thread, when the
    first signal comes.
    """
    stop = Stop()

    def start_thread(work: Callable[[], None], name: str) -> None:
        # Not in the handler: the code that it interrupts may hold the very lock that the work needs.
        threading.Thread(target=work, name=name, daemon=True).start()

    def on_stop(number: int, _frame: FrameType | None) -> None:
        if stop.is_set:
            exit_at_once(number)
        stop.set()
        start_thread(lambda: (_log_stop(number), interrupt()), "stopping")  # type: ignore[arg-type,func-returns-value]

    handlers: dict[signal.Signals, Any] = dict.fromkeys(SIGNALS, on_stop)
    handlers[signal.SIGHUP] = lambda *_: start_thread(_hang_up, "hangup")
    handlers[signal.SIGQUIT] = lambda *_: _start_dump(None)
    handlers[signal.SIGUSR1] = lambda *_: start_thread(_log_unhandled, "not-taken")
    with _handling(handlers):
        yield stop


def _log_stop(number: int) -> None:
    log.info("stop requested", action="stop_requested", signal=signal.Signals(number).name)


def _log_unhandled() -> None:
    log.warning("signal ignored", action="signal_ignored", signal="SIGUSR1", hint="only egress handles SIGUSR1")


def _start_dump(loop: asyncio.AbstractEventLoop | None) -> None:
    """Log tasks and threads from a thread of its own, which works even if the loop is blocked."""
    threading.Thread(target=_dump_stacks, args=(loop,), name="dump", daemon=True).start()


def _dump_stacks(loop: asyncio.AbstractEventLoop | None) -> None:
    for call in on_quit:
        call()
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name()) if loop else []
    frames, here = sys._current_frames(), threading.get_ident()
    threads = [(each.name, frames.get(each.ident or 0)) for each in threading.enumerate() if each.ident != here]
    # A warning, so that it is logged even if little is: an operator requested it.
    log.warning("stacks dumped", action="stacks_dumped", tasks=len(tasks), threads=len(threads))
    for task in tasks:
        log.warning("task dumped", action="task_dumped", task=task.get_name(), stack=_await_chain(task.get_coro()))
    for name, frame in threads:
        stack = reversed(traceback.extract_stack(frame)) if frame else ()
        log.warning("thread dumped", action="thread_dumped", thread=name, stack=[_place(each) for each in stack])


def _await_chain(work: Any) -> list[str]:
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
    log.info("hangup received", action="hangup_received", read_again=len(on_hangup))
    for call in on_hangup:
        try:
            call()
        except Exception as error:  # the service continues with the former values
            record_unexpected(error, "service", "hangup")


def _request_stop(stop: Stop, number: int) -> None:
    _log_stop(number)
    stop.set()


NOTIFY_INTERVAL_S = 2.0  # seconds between two checks for news to the service manager
MAX_STATUS_CHARS = 300  # characters


class SystemdNotifier:
    """Notifier of the service manager, as in sd_notify(3): `Type=notify` and its watchdog.

    `page`: returns status and text of the monitor's page at a path; may take seconds, so it is called in a thread.
    Without NOTIFY_SOCKET in `environment` nothing is sent. The watchdog is not fed if WATCHDOG_PID is another process.
    """

    def __init__(
        self, page: Callable[[str], tuple[int, str]], clock: Clock, environment: Mapping[str, str] = os.environ
    ) -> None:
        self._page, self._clock, self._last_status = page, clock, ""
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
        threads = ThreadPool("notify", 1)
        on_hangup.insert(0, self._reloading)
        on_hangup.append(self._ready)
        self._ready()
        notifying = spawn(self._notify(stop, threads), raise_fatal, name="notify")
        try:
            yield
        finally:
            on_hangup.remove(self._reloading)
            on_hangup.remove(self._ready)
            await cancel(notifying)
            await threads.wait_idle()
            threads.close()

    async def _notify(self, stop: Stop, threads: "ThreadPool") -> None:
        pause, is_stop_sent = min(NOTIFY_INTERVAL_S, self._watchdog / 4 or NOTIFY_INTERVAL_S), False
        while True:
            if stop.is_set and not is_stop_sent:
                is_stop_sent = True
                self._send("STOPPING=1", "STATUS=draining")
            elif words := await threads.run(self._changed_fields, stop.is_set):
                self._send(*words)
            await (self._clock.sleep(pause) if is_stop_sent else stop.wait(pause))

    def _changed_fields(self, is_stopping: bool) -> list[str]:
        words = ["WATCHDOG=1"] if self._watchdog and self._page("/healthz")[0] == 200 else []
        if not is_stopping:
            status = escape("; ".join(self._page("/readyz")[1].splitlines()))[:MAX_STATUS_CHARS]
            if status != self._last_status:
                self._last_status = status
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
            log.debug("notification failed", action="notification_failed", words=words, error=str(error))


P = ParamSpec("P")
T = TypeVar("T")

_running_calls: set[Future[Any]] = set()  # calls of all pools, including pools that were dropped


class ThreadPool:
    """A pool of `workers` threads. Cancelling an awaited call does not stop its thread: `wait_idle` waits for it.

    So a lease must not be released before `wait_idle` returns: an upload may still be running. `executor`: runs the
    calls instead of threads of its own.
    """

    def __init__(self, name: str = "", workers: int = 1, executor: Executor | None = None) -> None:
        self._executor = executor or ThreadPoolExecutor(workers, thread_name_prefix=name)
        self._calls: set[Future[Any]] = set()

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `fn(*args, **kwargs)` in a thread with the task's context variables; return or raise as it does.

        If cancelled while it waits for a free thread, `fn` is never called.
        """
        context = contextvars.copy_context()
        call = self._executor.submit(context.run, functools.partial(fn, *args, **kwargs))
        for calls in (self._calls, _running_calls):
            calls.add(call)
            call.add_done_callback(calls.discard)
        return await asyncio.wrap_future(call)

    @property
    def busy(self) -> int:
        return len(self._calls)

    async def wait_idle(self) -> None:
        """Return when no call is running, including calls with a cancelled await."""
        while calls := set(self._calls):
            # asyncio.wait cancels nothing when it is cancelled itself.
            await asyncio.wait({wait_ended(call) for call in calls})

    def close(self) -> None:
        """Take no more calls and drop those that have not begun; do not wait for running ones."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def wait_ended(call: Future[Any]) -> asyncio.Future[Any]:
    """Return a future that is done when `call` is, without a need to look at its error."""
    waiter: asyncio.Future[Any] = asyncio.wrap_future(call)
    # The caller that awaited it has seen its error; here it only shows that the call ended.
    waiter.add_done_callback(lambda done: done.cancelled() or done.exception())
    return waiter


def count_running_calls() -> int:
    """Return the number of calls that still run in all pools: after the end of the event loop, abandoned ones."""
    return len(_running_calls)
