"""Health of the process, and the pages that show it.

Threads answer requests, so also while the event loop hangs; no request reads NATS or the object store, and no
page shows the configuration.
"""

from __future__ import annotations

import errno
import http.client
import io
import json
import os
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from common.clock import Clock, SystemClock
from common.errors import ConfigError, FloeError, Unavailable
from common.logs import escape, get_logger
from common.metrics import REGISTRY, version
from common.nats.credentials import PEM_CERTIFICATE, show_expiry, tls_file_error
from common.observe import page
from common.settings.types import parse_listen, regular_file
from common.tasks import record_unexpected

if TYPE_CHECKING:
    from common.settings.egress import EgressMonitorSettings
    from common.settings.ingress import IngressMonitorSettings
    from common.settings.service import MonitorTlsSettings

    MonitorSettings = EgressMonitorSettings | IngressMonitorSettings

log = get_logger("common.monitor")

MAX_REQUEST_BYTES = 8192  # bytes of a request's head; bodies are not read
MAX_PARALLEL_REQUESTS = 16  # at the same time; a further one takes the place of the client that has been silent longest
RATE_INTERVAL_S = 30.0  # seconds at least between two answers that are kept for the rates on the page
EVICT_TIMEOUT_S = 1.0  # seconds for that client to leave; without a free place the further request is refused
REQUEST_TIMEOUT_S = 5.0  # seconds to send a request, and to take each part of the answer

HTML = "text/html; charset=utf-8"
Answer = tuple[int, str, bytes]  # HTTP status, content type, body


class HttpServer(ThreadingHTTPServer):
    """HTTP server that answers each request with `answer(path, accept)`, in a thread of its own."""

    daemon_threads = True
    block_on_close = False  # a scraper that never reads must not hold the shutdown
    allow_reuse_port = False
    request_queue_size = 64

    def __init__(
        self, address: tuple[str, int], answer: Callable[[str, str], Answer], tls: ServerTls | None = None
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.answer, self._tls, self._free = answer, tls, threading.BoundedSemaphore(MAX_PARALLEL_REQUESTS)
        # Clients without a request so far, by address, the oldest first. Copies, because TLS takes over the sockets.
        self._waiting_clients: dict[Any, socket.socket] = {}
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own method asks the name service for this host's name, which may take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False) and not self._evict_oldest_client():
            self.shutdown_request(request)
            return
        try:
            with self._lock:
                self._waiting_clients[client_address] = request.dup()
            super().process_request(request, client_address)
        except BaseException:  # no descriptor or no thread is left
            self.forget_silent(client_address)
            self._free.release()
            raise

    def _evict_oldest_client(self) -> bool:
        """Cut off the client that has been silent longest; return True if a place becomes free."""
        with self._lock:
            if (oldest := next(iter(self._waiting_clients), None)) is None:
                return False
            with closing(self._waiting_clients.pop(oldest)) as line:
                _close_socket(line)
        return self._free.acquire(timeout=EVICT_TIMEOUT_S)

    def forget_silent(self, client_address: Any) -> None:
        """Forget a silent client: its request has come, or it is gone."""
        with self._lock:
            if (line := self._waiting_clients.pop(client_address, None)) is not None:
                line.close()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            if self._tls is not None:
                request = self._tls.wrap(request)
            super().process_request_thread(request, client_address)
        except OSError:  # no handshake: the client does not speak TLS, or lacks the required certificate
            self.shutdown_request(request)
        finally:
            self.forget_silent(client_address)
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: a client that disconnected is not one."""


def _close_socket(connection: socket.socket) -> None:
    with suppress(OSError):  # it may have left, or run into its own limit, at this moment
        connection.shutdown(socket.SHUT_RDWR)


class ServerTls:
    """The monitor's side of TLS. Raises ConfigError if the files cannot be used at the start.

    Each connection checks the files for changes. New files that cannot be used are logged once, and the former ones
    stay in use.
    """

    def __init__(self, settings: MonitorTlsSettings) -> None:
        self._files = tuple(filter(None, (settings.cert, settings.key, settings.client_ca)))
        self._settings, self._lock, self._loaded_versions = settings, threading.Lock(), self._file_versions()
        self._context = self._load_context()
        show_expiry("monitor.tls.cert", settings.cert)

    def wrap(self, request: socket.socket) -> ssl.SSLSocket:
        """Return the connection once the handshake is done, within REQUEST_TIMEOUT_S seconds; else raise OSError."""
        with self._lock:
            if (versions := self._file_versions()) != self._loaded_versions:
                self._loaded_versions = versions
                self._renew()
        wrapped = self._context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        # Closed from outside, because a client may send its handshake byte by byte.
        late = threading.Timer(REQUEST_TIMEOUT_S, _close_socket, (wrapped,))
        late.daemon = True
        late.start()
        try:
            wrapped.settimeout(REQUEST_TIMEOUT_S)
            wrapped.do_handshake()
        except BaseException:
            wrapped.close()
            raise
        finally:
            late.cancel()
        return wrapped

    def _renew(self) -> None:
        try:
            self._context = self._load_context()
        except ConfigError as error:
            log.warning("certificate reload failed", action="certificate_reload_failed", error=str(error))
        else:
            log.info("certificate reloaded", action="certificate_reloaded", file=self._settings.cert)

    def _load_context(self) -> ssl.SSLContext:
        settings, context = self._settings, ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        files = f"cert {settings.cert} with key {settings.key}"
        try:
            context.load_cert_chain(regular_file(settings.cert), regular_file(settings.key))
            if settings.client_ca:
                files = f"client_ca {settings.client_ca}"
                context.load_verify_locations(regular_file(settings.client_ca))
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:  # SSLError is one
            raise tls_file_error(f"monitor.tls.{files}", error, "E-LISTEN") from None
        return context

    def _file_versions(self) -> list[tuple[int, int] | None]:
        return [_file_version(file) for file in self._files]


FETCH_TIMEOUT_S = 2.0  # seconds
CHECK_TIMEOUT_S = 10.0  # seconds for a monitor to answer a check


def fetch(settings: MonitorSettings, path: str, timeout: float = FETCH_TIMEOUT_S) -> str:
    """Return the answer to `path` of the process that serves `settings` on this host; blocking.

    With TLS only a server that shows the configured certificate is trusted, under any name; if clients need a
    certificate, the same one is shown. Raises Unavailable.
    """
    try:
        return _fetch(settings, path, timeout)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unavailable(f"monitor at {settings.listen}: {error}", hint="check that the service runs") from error


def fetch_status(settings: MonitorSettings, key: str, timeout: float = FETCH_TIMEOUT_S) -> dict[str, Any]:
    """Return /status of the process that serves `settings` on this host. Raises Unavailable, also if another program
    answers; ConfigError if the address, which the configuration names `key`, is empty.
    """
    if not settings.listen:
        raise ConfigError(f"{key}: expected an address to query, found none")
    found = None
    with suppress(ValueError):
        found = json.loads(fetch(settings, "/status", timeout))
    if not isinstance(found, dict) or "problems" not in found:
        raise Unavailable(f"monitor at {settings.listen}: expected the status of a Floe service, found something else")
    return found


def _fetch(settings: MonitorSettings, path: str, timeout: float) -> str:
    if (address := parse_listen(settings.listen)) is None:
        raise ValueError("expected an address, found none")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address[0], address[0])  # noqa: S104  (where it listens)
    tls, connection = settings.tls, http.client.HTTPConnection(host, address[1], timeout=timeout)
    if tls.cert:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if tls.client_ca:
            context.load_cert_chain(regular_file(tls.cert), regular_file(tls.key))
        connection = http.client.HTTPSConnection(host, address[1], timeout=timeout, context=context)
    with closing(connection):
        connection.connect()
        if isinstance(connection.sock, ssl.SSLSocket):
            own = PEM_CERTIFICATE.search(regular_file(tls.cert).read_text())
            if own is None or connection.sock.getpeercert(binary_form=True) != ssl.PEM_cert_to_DER_cert(own[0]):
                raise ssl.SSLError(f"a certificate other than {tls.cert} is shown")
        connection.request("GET", path, headers={"Accept": "text/plain;version=0.0.4"})
        return connection.getresponse().read().decode()


def _file_version(file: str) -> tuple[int, int] | None:
    """Return values that change when a file is written or replaced; None if it does not exist."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


class _Handler(BaseHTTPRequestHandler):
    server: HttpServer
    timeout = REQUEST_TIMEOUT_S
    server_version, sys_version = "floe", ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(io.BytesIO(_read_head(self.connection)))
        self.server.forget_silent(self.client_address)

    def do_GET(self) -> None:
        try:
            status, content_type, body = self.server.answer(self.path, self.headers.get("Accept", ""))
        except Exception as error:  # the server continues with the next request
            known = record_unexpected(error, "monitor", f"monitor {self.path.partition('?')[0]:.80}")
            status, content_type, body = 500, "text/plain; charset=utf-8", f"{known.as_text()}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        for name, value in page.PAGE_HEADERS.items() if content_type == HTML else ():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815  (the name that the server looks for)

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing: requests are not logged."""


def _read_head(connection: socket.socket) -> bytes:
    """Read the head of a request. Raises OSError if it takes over REQUEST_TIMEOUT_S or MAX_REQUEST_BYTES."""
    clock = SystemClock()
    deadline = clock.monotonic() + REQUEST_TIMEOUT_S
    head = b""
    while b"\r\n\r\n" not in head:
        connection.settimeout(max(0.01, deadline - clock.monotonic()))
        part = connection.recv(MAX_REQUEST_BYTES - len(head))  # 0 bytes once it is too long
        if not part:
            raise ConnectionError("not a request, or too long a one")
        head += part
    connection.settimeout(REQUEST_TIMEOUT_S)
    return head


BEAT_INTERVAL_S = 1.0  # seconds between two heartbeats of an event loop
MAX_BEAT_AGE_S = 30.0  # seconds without one before /healthz reports that the process hangs


class Health:
    """State of health of the process. The event loop writes it, the monitor's threads read it.

    `about`: the `service`, `site` and `instance` that /status and the page name.
    """

    def __init__(self, clock: Clock, **about: str) -> None:
        self._about = {**about, "host": socket.gethostname(), "started": clock.now()}
        self._clock, self._lock, self._beat = clock, threading.Lock(), clock.monotonic()
        self._not_ready: dict[str, str] = {}  # by part, the reason; empty if it is ready
        self._status: dict[str, Mapping[str, Any]] = {}
        self._coverage: dict[str, Mapping[str, Any]] = {}
        self._read = float("-inf")

    def beat(self) -> None:
        """Record that the event loop runs; call it every few seconds."""
        self._beat = self._clock.monotonic()

    async def keep_beating(self) -> None:
        """Beat for ever, as long as this task's event loop runs."""
        while True:
            self.beat()
            await self._clock.sleep(BEAT_INTERVAL_S)

    def beat_age(self) -> float:
        """Return the seconds since the last beat, or since the start."""
        return self._clock.monotonic() - self._beat

    def set_ready(self, component: str, ready: bool, reason: str = "") -> None:
        with self._lock:
            self._not_ready[component] = "" if ready else reason or "not ready"

    def not_ready_reason(self, component: str) -> str:
        """Return the reason why `component` is not ready; empty if it is, or has not reported."""
        with self._lock:
            return self._not_ready.get(component, "")

    def remove(self, component: str) -> None:
        """Remove `component`, which left this process: it is neither ready nor not, and has no status."""
        with self._lock:
            self._not_ready.pop(component, None)
            self._status.pop(component, None)

    def problems(self) -> list[str]:
        """Return `component: reason` for each part that is not ready, by name; empty if all are. "starting" before a
        report.
        """
        with self._lock:
            if not self._not_ready:
                return ["starting: no part has reported yet"]
            return [f"{part}: {reason}" for part, reason in sorted(self._not_ready.items()) if reason]

    def set_status(self, component: str, status: Mapping[str, Any]) -> None:
        """Set the status of `component` in /status: values that JSON can hold, no secrets, no payloads.

        A value may be a function that returns it each time the page is requested; it is called from any thread.
        """
        with self._lock:
            self._status[component] = dict(status)

    # Coverage, which is read from the store while somebody reads the page

    def record_reader(self) -> None:
        """Record that somebody reads the page."""
        self._read = self._clock.monotonic()

    def seconds_since_read(self) -> float:
        """Return the seconds since the page was read; infinite if it never was."""
        return self._clock.monotonic() - self._read

    def chains(self) -> list[str]:
        """Return the chains that the parts show, as `SITE/FEED/INCARNATION/PARTITION`."""
        with self._lock:
            parts = [*self._status.values()]
        names = [(part.get("chain"), *_value(part.get("chains", ()))) for part in parts]
        return sorted({name for each in names for name in each if name})

    def coverage(self) -> dict[str, Mapping[str, Any]]:
        """Return the last known coverage of each chain; see `common.observe.coverage`."""
        with self._lock:
            return dict(self._coverage)

    def set_coverage(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the coverage of all chains by `found`."""
        with self._lock:
            self._coverage = dict(found)

    def status(self) -> dict[str, Any]:
        problems = self.problems()
        with self._lock:
            parts = [*sorted(self._status.items())]
        return {
            "version": version(),
            **self._about,
            "time": self._clock.now(),
            "ready": not problems,
            "problems": problems,
            "heartbeat_age_seconds": round(self.beat_age(), 3),
            "parts": {part: {name: _value(value) for name, value in status.items()} for part, status in parts},
            "coverage": self.coverage(),
        }


def _value(value: Any) -> Any:
    return value() if callable(value) else value


class Monitor:
    """Server of /metrics /healthz /readyz /status and a status page on `listen`, such as `127.0.0.1:9464`.

    An empty `listen` serves nothing. Port 0 takes a free one; `port` returns it (0 while nothing is served).
    `pages`: others than those of `health`. `tls`: HTTPS only, if it names a certificate.
    """

    def __init__(
        self,
        listen: str,
        health: Health,
        registry: CollectorRegistry = REGISTRY,
        *,
        pages: Pages | None = None,
        tls: MonitorTlsSettings | None = None,
    ) -> None:
        self._listen, self._tls = listen, tls if tls and tls.cert else None
        self._pages = pages or Pages(health, registry)
        self._server: HttpServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        return 0 if self._server is None else int(self._server.server_address[1])

    def start(self) -> None:
        """Bind and serve. Raises Unavailable if the address is taken or not there yet, else ConfigError."""
        if (address := parse_listen(self._listen)) is None:
            return
        tls = ServerTls(self._tls) if self._tls else None
        try:
            self._server = HttpServer(address, self._pages.answer, tls)
        except OSError as error:
            raise _cannot_listen(self._listen, error) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="monitor", daemon=True
        )
        self._thread.start()

    def page_text(self, path: str) -> tuple[int, str]:
        """Return status and text of the page at `path`, even if nothing is served."""
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
    """Return Unavailable if another process has the address, which may be the one that this process replaces; also if
    this host has no such address, because after boot it may come later than the service. Else ConfigError.
    """
    reason = {
        errno.EADDRINUSE: "another process listens there",
        errno.EADDRNOTAVAIL: "this host has no such address",
        errno.EACCES: "this user may not listen there",
    }.get(error.errno or 0, error.strerror or str(error))
    kind = Unavailable if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL) else ConfigError
    return kind(
        f"monitor.listen: cannot listen on {listen}: {reason}",
        hint='choose another address, or "" for no monitor',
        code="E-LISTEN",
    )


class Pages:
    """The pages, by path; each is made from memory."""

    def __init__(self, health: Health, registry: CollectorRegistry) -> None:
        self._health, self._registry = health, registry
        self._shown: list[dict[str, Any]] = []  # the answers that are kept, at most two
        self._pages: dict[str, Callable[[str], Answer]] = {
            "/": self._page,
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/status": self._status,
        }

    def answer(self, path: str, accept: str) -> Answer:
        """Return the answer to a GET of `path` by a client that accepts `accept`.

        A program that shows coverage to a reader requests `/status?coverage`: it counts as a reader of the page.
        """
        name, _, query = path.partition("?")
        if name == "/" or query == "coverage":
            self._health.record_reader()
        found = self._pages.get(name)
        return found(accept) if found else text_answer(404, f"expected one of {' '.join(self._pages)}")

    def _metrics(self, accept: str) -> Answer:
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # a version that is no number
            encode, content_type = choose_encoder("")
        return 200, content_type, encode(self._registry)

    def _healthz(self, _accept: str) -> Answer:
        seconds = self._health.beat_age()
        age = f"the event loop last ran {seconds:.1f} s ago"
        return text_answer(200, f"ok: {age}") if seconds <= MAX_BEAT_AGE_S else text_answer(503, f"hangs: {age}")

    def _readyz(self, _accept: str) -> Answer:
        problems = [escape(problem) for problem in self._health.problems()]
        return text_answer(503, "\n".join(problems)) if problems else text_answer(200, "ready")

    def document(self) -> dict[str, Any]:
        return self._health.status()

    def _status(self, _accept: str) -> Answer:
        return 200, "application/json", _json(self.document())

    def document_for_reader(self) -> dict[str, Any]:
        """Return `document` for a reader of the page."""
        return self.document()

    def _page(self, _accept: str) -> Answer:
        document = self.document_for_reader()
        if self._shown and document["time"] < self._shown[-1]["time"]:  # the clock was set back
            self._shown = []
        if not self._shown or document["time"] - self._shown[-1]["time"] >= RATE_INTERVAL_S:
            self._shown = [*self._shown[-1:], document]
        return 200, HTML, page.render_page(document, self._pages, self._shown[0])


def text_answer(status: int, text: str) -> Answer:
    """Return the answer that is `text`, and the end of its line."""
    return status, "text/plain; charset=utf-8", f"{text}\n".encode()


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, default=str) + "\n").encode()
