"""SIGTERM and SIGINT: the first asks the service to drain, the second ends the process at once.

SIGHUP ends nothing: it calls what `hangups` holds, such as reading secrets again.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import FrameType

from common.service.logs import get_logger
from common.settings.secret_file import read_all_again
from common.tasks import told

SIGNALS = (signal.SIGTERM, signal.SIGINT)

log = get_logger("common.shutdown")

#: Called on the event loop, one after the other, when SIGHUP comes while a service runs.
hangups: list[Callable[[], None]] = [read_all_again]


def exit_at_once(number: int) -> None:
    """What the second signal does: 143 after SIGTERM, 130 after SIGINT."""
    os._exit(128 + number)


@asynccontextmanager
async def stop_on_signals(
    second: Callable[[int], None] = exit_at_once, *, deaf_afterwards: bool = False
) -> AsyncIterator[asyncio.Event]:
    """An event that the first SIGTERM or SIGINT sets. Each further one calls `second` with its number.

    SIGHUP calls `hangups`. To be entered in the main thread. On leaving, the former handlers are back; with
    `deaf_afterwards` signals are ignored from then on: a process that has done its work ends with its own
    exit code.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    received: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        # A plain handler, not the loop's own: the second signal must work while the loop is blocked. And not
        # the default action, which process 1 of a container does not have.
        received.append(number)
        if len(received) > 1:
            second(number)
        else:
            loop.call_soon_threadsafe(_ask, stop, number)

    def on_hangup(_number: int, _frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(_hang_up)

    former = {number: signal.signal(number, on_signal) for number in SIGNALS}
    former[signal.SIGHUP] = signal.signal(signal.SIGHUP, on_hangup)
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_IGN if deaf_afterwards else handler)


def _hang_up() -> None:
    log.info("hangup, going on", action="hangup", read_again=len(hangups))
    for call in hangups:
        try:
            call()
        except Exception as error:  # the service goes on with what it had
            told(error, "service", "hangup")


def _ask(stop: asyncio.Event, number: int) -> None:
    log.info("stopping", action="stop_asked", signal=signal.Signals(number).name)
    stop.set()
