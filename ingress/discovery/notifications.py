"""Notifications in a queue of SQS, received in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from common.errors import FloeError
from common.objects.sqs import Received
from common.service.logs import get_logger
from common.tasks import guarded, told
from ingress.discovery.listening import FIRST_PAUSE, Notifiable, longer

log = get_logger("ingress.discovery.sqs")

UNWANTED_PAUSE = 1.0  # seconds until it is asked again whether notifications are of use here
EMPTY_PAUSE = 0.1  # seconds after a receive that gave nothing: some servers do not wait as they are asked to
TAKE_TIMEOUT = 10.0  # seconds for the event loop to take what was received


class Queue(Protocol):
    """A queue (`common.objects.sqs.SqsQueue`)."""

    def receive(self, wait: int = ...) -> list[Received]: ...
    def delete(self, messages: Sequence[Received]) -> int: ...


async def follow_queue(open_queue: Callable[[], Queue], notified: Notifiable) -> None:
    """Hand over every message of the queue, for ever, and delete it from the queue afterwards.

    Nobody waits for the thread at the end: a receive waits up to 20 s. What it receives then is not deleted,
    and comes again to whoever asks next. Nothing raises: what fails is logged and tried again.
    """
    receiver = _Receiver(open_queue, notified, asyncio.get_running_loop())
    threading.Thread(target=receiver.run, name="sqs", daemon=True).start()
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        receiver.stop.set()


class _Receiver:
    """What the thread does, until `stop` is set."""

    def __init__(
        self, open_queue: Callable[[], Queue], notified: Notifiable, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.stop = threading.Event()
        self._open_queue, self._notified, self._loop = open_queue, notified, loop
        self._queue: Queue | None = None

    def run(self) -> None:
        pause = FIRST_PAUSE
        while not self.stop.is_set():
            try:
                if self._notified.is_wanted:
                    self._receive()
                else:
                    self.stop.wait(UNWANTED_PAUSE)
                pause = FIRST_PAUSE
            except Exception as error:
                if self.stop.is_set():
                    return
                self._queue = None
                self._failed(error, pause)
                self.stop.wait(pause)
                pause = longer(pause)

    def _receive(self) -> None:
        if self._queue is None:
            self._queue = self._open_queue()
            messages = self._queue.receive(0)  # at once, to know whether it answers
            self._on_loop(self._notified.listening)
            log.info("listening", action="events")
        else:
            messages = self._queue.receive()
        if not messages:
            self.stop.wait(EMPTY_PAUSE)
        elif not self.stop.is_set():
            self._on_loop(lambda: self._take(messages))
            if left := self._queue.delete(messages):
                log.warning("notifications come again", action="events_not_deleted", count=left)

    def _take(self, messages: Sequence[Received]) -> None:
        for message in messages:
            self._notified.take(message.body.encode(errors="replace"))

    def _failed(self, error: Exception, pause: float) -> None:
        why = error.message if isinstance(error, FloeError) else str(error)
        if not isinstance(error, FloeError | TimeoutError):
            told(error, "events", "events of sqs")
        log.warning("no notifications", action="events_failed", error=str(error), pause=pause)
        with suppress(Exception):  # it is told of already
            self._on_loop(lambda: self._notified.failed(why))

    def _on_loop(self, call: Callable[[], None]) -> None:
        """Have `call` made on the event loop, and wait until it was. Raises TimeoutError, and what it raises:
        this thread takes notifications again after a pause, the loop would only end.
        """
        done = threading.Event()
        failed: list[Exception] = []

        def make() -> None:
            guarded(call, failed.append)()
            done.set()

        try:
            self._loop.call_soon_threadsafe(make)
        except RuntimeError:  # the loop has ended
            self.stop.set()
        else:
            if not done.wait(TAKE_TIMEOUT) and not self.stop.is_set():
                raise TimeoutError(f"the event loop took nothing for {TAKE_TIMEOUT} s")
            if failed:
                raise failed[0]
