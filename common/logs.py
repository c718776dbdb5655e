"""Logs: structlog over the standard library, one line for each event, to stderr.

JSON or text, the same keys in both: `ts` (RFC 3339 UTC, milliseconds), `level`, `logger`, `event` (a short
constant text), then the fields of the event, among them `action` to search by. Libraries (nats, boto3) take
the same path, at warning and above even if Floe logs more: below it botocore prints the data that it signs with.
Payloads, headers and secrets are never logged.
"""

import json
import logging
import os
import queue
import re
import sys
import traceback
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from typing import Any, TextIO

import structlog
from structlog.stdlib import BoundLogger, ProcessorFormatter

from common.errors import FloeError
from common.metrics import counter

QUEUE_LINES = 10_000  # lines in the queue; beyond it lines are dropped and counted
FLUSH_TIMEOUT_S = 1.0  # seconds

dropped_lines = counter("log_lines_dropped", "Log lines dropped because the log is read too slowly")


class LineHandler(QueueHandler):
    """Handler that formats in the caller's thread and writes in a thread of its own. `dropped`: lines lost so far."""

    def __init__(self, stream: TextIO, capacity: int = QUEUE_LINES) -> None:
        self._lines: queue.Queue[Any] = queue.Queue(capacity)
        super().__init__(self._lines)
        self.dropped, self._writer = 0, _Writer(stream, self)
        self._writer.start()

    def prepare(self, record: logging.LogRecord) -> str:
        return self.format(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802
        """Drop the line: the queue is full, or a value's str() failed; neither must fail the service."""
        self.drop()

    def drop(self) -> None:
        self.dropped += 1
        dropped_lines.inc()

    def flush(self) -> None:
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, FLUSH_TIMEOUT_S)

    def close(self) -> None:
        self.flush()
        with suppress(queue.Full):
            self._writer.enqueue_sentinel()
        super().close()


class _Writer(QueueListener):
    """Writer of the lines of a handler; it reports the number of dropped lines."""

    def __init__(self, stream: TextIO, handler: LineHandler) -> None:
        super().__init__(handler.queue)
        self._stream, self._handler, self._reported = stream, handler, 0
        # Bypass Python's buffer: a thread stuck in its lock would keep the interpreter from ending.
        self._descriptor: int | None = None
        with suppress(OSError, ValueError, AttributeError):
            self._descriptor = stream.fileno()

    def handle(self, record: Any) -> None:
        if lines := self._handler.dropped - self._reported:
            self._reported += lines
            text = f"log lines dropped: {lines}"
            notice = logging.LogRecord("common.logs", logging.WARNING, "", 0, text, None, None)
            self._write(self._handler.format(notice))
        self._write(record)

    def _write(self, line: str) -> None:
        try:
            if self._descriptor is None:
                self._stream.write(line + "\n")
                self._stream.flush()
                return
            data = line.encode("utf-8", "backslashreplace") + b"\n"
            while data:
                data = data[os.write(self._descriptor, data) :]
        except (OSError, ValueError):
            self._handler.drop()


def escape(text: str) -> str:
    """Return `text` with control characters and line ends escaped: data cannot forge lines or move the cursor."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


MAX_URL_CHARS = 100  # characters; only the host of a longer URL is kept
_URL = re.compile(r"""(https?://[^/\s"'?]+)[^\s"']*""")
MAX_VALUE_CHARS = 4096  # characters of one value; longer ones are cut, so that no event floods the log

RESERVED_KEYS = {"ts", "level", "logger", "event"}  # keys that every line has

Event = MutableMapping[str, Any]

_names: set[str] = set()
_always: dict[str, Any] = {}
_level = logging.NOTSET
_handler: LineHandler | None = None

# Set at import: without this, structlog alone would print to stdout until `configure` is called, if it ever is.
structlog.configure(
    processors=[structlog.stdlib.filter_by_level, ProcessorFormatter.wrap_for_formatter],
    logger_factory=structlog.stdlib.LoggerFactory(),
    wrapper_class=BoundLogger,
    cache_logger_on_first_use=True,
)


def get_logger(name: str) -> BoundLogger:
    _names.add(name)
    logging.getLogger(name).setLevel(_level)
    logger: BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def configure(level: str = "info", format: str = "auto", *, instance: str = "", stream: TextIO | None = None) -> None:
    """Log from `level` up, as `format` (`json`, `text`, `plain`, `auto`), to `stream` (default: stderr).

    `plain`: a line for people, without time and logger. `auto`: `text` on a terminal, else `json`.

    `instance`, if given, is in every line. May be called again: the last call wins.
    """
    global _handler
    stream = stream or sys.stderr
    if format == "auto":
        format = "text" if stream.isatty() else "json"
    remove_handler()
    _handler = LineHandler(stream)
    render = {"text": _as_text, "plain": _as_plain_line}.get(format, _as_json)
    _handler.setFormatter(ProcessorFormatter(processors=[lambda _, _name, event: render(_arrange(event, instance))]))
    logging.getLogger().addHandler(_handler)
    set_level(level)


def remove_handler() -> None:
    global _handler
    if _handler is not None:
        logging.getLogger().removeHandler(_handler)
        _handler.close()
        _handler = None
    set_level("notset")


def set_level(level: str) -> None:
    """Log from `level` up from now on; everything else stays as configured. `notset`: log everything."""
    global _level
    _level = getattr(logging, level.upper())
    for name in _names:
        logging.getLogger(name).level = _level
    logging.getLogger().setLevel(max(_level, logging.WARNING))  # clears the caches of all loggers


def add_fields(**fields: Any) -> None:
    """Add these fields to every line from now on, also to the lines of libraries."""
    _always.update(fields)


def flush() -> None:
    """Wait until the lines so far are written, FLUSH_TIMEOUT_S seconds at most."""
    if _handler is not None:
        _handler.flush()


def _arrange(event: Event, instance: str) -> dict[str, Any]:
    record: logging.LogRecord = event.pop("_record")
    event.pop("_from_structlog", None)
    at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    line = {
        "ts": at.replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": _loggable(event.pop("event", "")),
    }
    if instance:
        line["instance"] = instance
    line.update(_always)
    _explain(event)
    # An event must not change the keys that every line has: such a field keeps its value under another key.
    return line | {(f"{key}_" if key in RESERVED_KEYS else key): _loggable(value) for key, value in event.items()}


def _explain(event: Event) -> None:
    """Replace `exc_info` by error and error_type; an error that is not a FloeError keeps its traceback."""
    if (info := event.pop("exc_info", None)) is True:
        info = sys.exc_info()
    error = info[1] if isinstance(info, tuple) else info
    if not isinstance(error, BaseException):
        return
    event.setdefault("error", str(error))
    event.setdefault("error_type", type(error).__name__)
    if not isinstance(error, FloeError):
        event["traceback"] = "".join(traceback.format_exception(error))


def _loggable(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _loggable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_loggable(item) for item in value]
    text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
    if len(text) > MAX_URL_CHARS:
        text = _URL.sub(lambda found: found[0] if len(found[0]) <= MAX_URL_CHARS else f"{found[1]}/…", text)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}… ({len(text)} characters)"


def _as_json(line: dict[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":"))  # ASCII: every control character is escaped


def _as_text(line: dict[str, Any]) -> str:
    at, level, name, event = (line.pop(key) for key in ("ts", "level", "logger", "event"))
    fields = "".join(f"  {key}={_as_field(value)}" for key, value in line.items())
    return escape(f"{at} {level.upper():7} {name}: {event}{fields}")


def _as_plain_line(line: dict[str, Any]) -> str:
    left_out = {"ts", "level", "logger", "event", "action", "instance"} | _always.keys()
    fields = "".join(f"  {key}={_as_field(value)}" for key, value in line.items() if key not in left_out)
    return escape(f"{line['level']}: {line['event']}{fields}")


def _as_field(value: Any) -> str:
    if isinstance(value, str) and value and value.isprintable() and not set(value) & set(' ="'):
        return value
    return json.dumps(value, ensure_ascii=False)
