"""The small HTTP server of the monitor: GET and HEAD, one request a connection, limited in time and size."""

from __future__ import annotations

import io
import socket
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from common.clock import SystemClock
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
        self.answer = answer
        self._free = threading.BoundedSemaphore(MAX_REQUESTS)
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
