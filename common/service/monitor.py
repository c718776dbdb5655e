"""Health of the process, and the pages that show it.

They are answered from threads, so also when the event loop hangs; no request reads NATS or the object store,
and no page shows the configuration.
"""

from __future__ import annotations

import errno
import html
import io
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from common.clock import Clock, SystemClock
from common.errors import ConfigError, FloeError, Unavailable
from common.logs import escaped
from common.metrics import REGISTRY, version
from common.settings.types import parse_listen
from common.tasks import told

MAX_REQUEST = 8192  # bytes of a request's head; bodies are not read
MAX_REQUESTS = 16  # answered at the same time; further ones are turned away
REQUEST_TIMEOUT = 5.0  # seconds to send a request, and to take each part of the answer

Answer = tuple[int, str, bytes]  # HTTP status, content type, body


class HttpServer(ThreadingHTTPServer):
    """Answers each request with `answer(path, accept)`, in a thread of its own."""

    daemon_threads = True
    block_on_close = False  # a scraper that never reads must not hold the shutdown
    allow_reuse_port = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], answer: Callable[[str, str], Answer]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.answer, self._free = answer, threading.BoundedSemaphore(MAX_REQUESTS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own asks the name service for this host's name, which may take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is its own affair."""


class _Handler(BaseHTTPRequestHandler):
    server: HttpServer
    timeout = REQUEST_TIMEOUT
    server_version, sys_version = "floe", ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(io.BytesIO(_read_head(self.connection)))

    def do_GET(self) -> None:
        try:
            status, content_type, body = self.server.answer(self.path, self.headers.get("Accept", ""))
        except Exception as error:  # the server goes on with the next request
            known = told(error, "monitor", f"monitor {self.path.partition('?')[0]:.80}")
            status, content_type, body = 500, "text/plain; charset=utf-8", f"{known.line()}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815  (the name that the server looks for)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def _read_head(connection: socket.socket) -> bytes:
    """The head of a request, all of it within REQUEST_TIMEOUT seconds and MAX_REQUEST bytes; else OSError."""
    clock = SystemClock()
    deadline = clock.monotonic() + REQUEST_TIMEOUT
    head = b""
    while b"\r\n\r\n" not in head:
        connection.settimeout(max(0.01, deadline - clock.monotonic()))
        part = connection.recv(MAX_REQUEST - len(head))  # 0 bytes once it is too long
        if not part:
            raise ConnectionError("not a request, or too long a one")
        head += part
    connection.settimeout(REQUEST_TIMEOUT)
    return head


BEAT = 1.0  # seconds between two heartbeats of an event loop
MAX_BEAT_AGE = 30.0  # seconds without one before /healthz says so


class Health:
    """What the process knows of itself. The event loop writes, the monitor's threads read."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._lock, self._beat = clock, threading.Lock(), clock.monotonic()
        self._not_ready: dict[str, str] = {}  # by part, why; empty where it is ready
        self._status: dict[str, Mapping[str, Any]] = {}

    def beat(self) -> None:
        """The event loop turns; to be called every few seconds."""
        self._beat = self._clock.monotonic()

    async def keep_beating(self) -> None:
        """Beat for ever, as long as this task's event loop turns."""
        while True:
            self.beat()
            await self._clock.sleep(BEAT)

    def beat_age(self) -> float:
        """Seconds since the last beat, or since the start."""
        return self._clock.monotonic() - self._beat

    def set_ready(self, part: str, ready: bool, why: str = "") -> None:
        """Whether `part` ("nats", "objects", a chain) works, and `why` not."""
        with self._lock:
            self._not_ready[part] = "" if ready else why or "not ready"

    def forget(self, part: str) -> None:
        """`part` is no longer this process's: it is neither ready nor not, and has no status."""
        with self._lock:
            self._not_ready.pop(part, None)
            self._status.pop(part, None)

    def problems(self) -> list[str]:
        """`part: why` for each part that is not ready, by name; empty when all are."""
        with self._lock:
            if not self._not_ready:
                return ["starting: nothing has reported yet"]
            return [f"{part}: {why}" for part, why in sorted(self._not_ready.items()) if why]

    def set_status(self, part: str, status: Mapping[str, Any]) -> None:
        """What /status shows for `part`: values that JSON holds, no secrets, no payloads."""
        with self._lock:
            self._status[part] = dict(status)

    def status(self) -> dict[str, Any]:
        """What /status answers."""
        problems = self.problems()
        with self._lock:
            parts = dict(sorted(self._status.items()))
        return {
            "version": version(),
            "ready": not problems,
            "problems": problems,
            "heartbeat_age_seconds": round(self.beat_age(), 3),
            "parts": parts,
        }


class Monitor:
    """Serves /metrics /healthz /readyz /status and a status page on `listen`, such as `127.0.0.1:9464`.

    An empty `listen` serves nothing. Port 0 takes a free one; `port` tells which (0 while nothing is served).
    `pages`: others than those of `health`.
    """

    def __init__(
        self, listen: str, health: Health, registry: CollectorRegistry = REGISTRY, *, pages: Pages | None = None
    ) -> None:
        self._listen = listen
        self._pages = pages or Pages(health, registry)
        self._server: HttpServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        return 0 if self._server is None else int(self._server.server_address[1])

    def start(self) -> None:
        """Bind and serve. Raises Unavailable where the address is taken, ConfigError where it cannot be."""
        if (address := parse_listen(self._listen)) is None:
            return
        try:
            self._server = HttpServer(address, self._pages.answer)
        except OSError as error:
            raise _cannot_listen(self._listen, error) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="monitor", daemon=True
        )
        self._thread.start()

    def says(self, path: str) -> tuple[int, str]:
        """Status and text of the page at `path`, whether or not anything is served."""
        status, _, body = self._pages.answer(path, "")
        return status, body.decode()

    def close(self) -> None:
        """Stop serving; no error if nothing is served."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._server = self._thread = None


def _cannot_listen(listen: str, error: OSError) -> FloeError:
    """Unavailable where another process is in the way, which may be the one that this one follows."""
    reason = {
        errno.EADDRINUSE: "another process listens there",
        errno.EADDRNOTAVAIL: "this host has no such address",
        errno.EACCES: "this user may not listen there",
    }.get(error.errno or 0, error.strerror or str(error))
    kind = Unavailable if error.errno == errno.EADDRINUSE else ConfigError
    return kind(
        f"monitor.listen: cannot listen on {listen}: {reason}",
        hint='choose another address, or "" for none',
        code="E-LISTEN",
    )


class Pages:
    """The pages, by path; each is made from memory."""

    def __init__(self, health: Health, registry: CollectorRegistry) -> None:
        self._health, self._registry = health, registry
        self._pages: dict[str, Callable[[str], Answer]] = {
            "/": self._page,
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/status": self._status,
        }

    def answer(self, path: str, accept: str) -> Answer:
        """The answer to a GET of `path` by a client that takes `accept`."""
        page = self._pages.get(path.partition("?")[0])
        return page(accept) if page else _text(404, f"expected one of {' '.join(self._pages)}")

    def _metrics(self, accept: str) -> Answer:
        encode, content_type = choose_encoder(accept)
        return 200, content_type, encode(self._registry)

    def _healthz(self, _accept: str) -> Answer:
        seconds = self._health.beat_age()
        age = f"the event loop turned {seconds:.1f} s ago"
        return _text(200, f"ok: {age}") if seconds <= MAX_BEAT_AGE else _text(503, f"hangs: {age}")

    def _readyz(self, _accept: str) -> Answer:
        problems = [escaped(problem) for problem in self._health.problems()]
        return _text(503, "\n".join(problems)) if problems else _text(200, "ready")

    def document(self) -> dict[str, Any]:
        """What /status and the status page show."""
        return self._health.status()

    def _status(self, _accept: str) -> Answer:
        return 200, "application/json", _json(self.document())

    def _page(self, _accept: str) -> Answer:
        status = html.escape(_json(self.document()).decode())
        links = " ".join(f'<a href="{path}">{path}</a>' for path in self._pages)
        page = f"<!doctype html><meta charset=utf-8><title>Floe</title><p>{links}</p><pre>{status}</pre>\n"
        return 200, "text/html; charset=utf-8", page.encode()


def _text(status: int, text: str) -> Answer:
    return status, "text/plain; charset=utf-8", f"{text}\n".encode()


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, default=str) + "\n").encode()
