"""Writes log lines from a thread of its own: a full pipe or a terminal that stands still stops no service."""

from __future__ import annotations

import logging
import os
import queue
import threading
from contextlib import suppress
from typing import TextIO

from common.service.metrics import counter

CAPACITY = 10_000  # lines waiting; beyond it lines are dropped and counted
FLUSH_TIMEOUT = 1.0  # seconds

dropped_lines = counter("log_lines_dropped", "Log lines dropped because nobody reads the log fast enough")


class LineHandler(logging.Handler):
    """Formats in the caller's thread, writes in its own. `dropped`: lines lost so far."""

    def __init__(self, stream: TextIO, capacity: int = CAPACITY) -> None:
        super().__init__()
        self._stream = stream
        self._descriptor = _descriptor(stream)
        self._lines: queue.Queue[str | threading.Event | None] = queue.Queue(capacity)
        self._told = 0
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._drop()
        except Exception:  # a value whose str() fails must not fail the service
            self._drop()

    def flush(self) -> None:
        """Wait until the lines so far are written; FLUSH_TIMEOUT at most."""
        written = threading.Event()
        with suppress(queue.Full):
            self._lines.put(written, timeout=FLUSH_TIMEOUT)
            written.wait(FLUSH_TIMEOUT)

    def close(self) -> None:
        """Write what waits (as `flush`) and end the thread."""
        with suppress(queue.Full):
            self._lines.put_nowait(None)
            self._thread.join(FLUSH_TIMEOUT)
        super().close()

    def _drop(self) -> None:
        self.dropped += 1
        dropped_lines.inc()

    def _run(self) -> None:
        while (item := self._lines.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            else:
                self._tell_dropped()
                self._write(item)

    def _tell_dropped(self) -> None:
        if (dropped := self.dropped) == self._told:
            return
        lines = dropped - self._told
        self._told = dropped
        record = logging.LogRecord(
            "common.logs", logging.WARNING, "", 0, "log lines dropped: %d", (lines,), None
        )
        self._write(self.format(record))

    def _write(self, line: str) -> None:
        try:
            if self._descriptor is None:
                self._stream.write(line + "\n")
                self._stream.flush()
            else:
                _write_all(self._descriptor, line.encode("utf-8", "backslashreplace") + b"\n")
        except (OSError, ValueError):
            self._drop()


def _descriptor(stream: TextIO) -> int | None:
    # Past Python's buffer: a thread stuck in its lock would keep the interpreter from ending.
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
