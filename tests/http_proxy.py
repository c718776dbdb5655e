"""An HTTP proxy in front of an S3 server that answers as a bad network, a bad proxy or a bad store would.

    with FaultProxy(s3.endpoint_url) as proxy:
        proxy.on("put", drop_after_apply(), key=r"\\.parquet$", times=1)

Requests and answers are held in memory whole, so bodies should stay below a few hundred MiB.
"""

from __future__ import annotations

import http.client
import re
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import parse_qs, unquote, urlsplit

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "expect"}
_OPERATIONS = {
    ("POST", "uploads"): "create_upload",
    ("PUT", "partNumber"): "part",
    ("POST", "uploadId"): "complete",
    ("DELETE", "uploadId"): "abort",
    ("GET", "list-type"): "list",
}


@dataclass(frozen=True)
class Answer:
    """What goes back to the client. `length`: announced as Content-Length, None announces none."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    length: int | None

    def with_body(self, body: bytes) -> Answer:
        return replace(self, body=body, length=len(body))


@dataclass
class Exchange:
    """One request: `operation` is a verb of the port, or `part create_upload complete abort bucket`."""

    operation: str
    key: str
    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    upstream: tuple[str, int]

    def forward(self) -> Answer:
        """The server's answer."""
        connection = http.client.HTTPConnection(*self.upstream, timeout=120)
        try:
            connection.putrequest(self.method, self.target, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers:
                connection.putheader(name, value)
            connection.endheaders(self.body or None)
            response = connection.getresponse()
            headers = [(n, v) for n, v in response.getheaders() if n.lower() not in _HOP_BY_HOP]
            length = response.getheader("Content-Length")
            body = response.read()
            return Answer(response.status, headers, body, len(body) if length is None else int(length))
        finally:
            connection.close()


# A fault makes the answer to an exchange; None closes the connection without one.
Fault = Callable[[Exchange], Answer | None]


@dataclass
class Rule:
    """Where a fault strikes: `times` matching requests from the `nth` on; all of them if None."""

    operation: str
    fault: Fault
    key: re.Pattern[str]
    nth: int
    times: int | None
    seen: int = 0

    def strikes(self, exchange: Exchange) -> bool:
        if self.operation != exchange.operation or not self.key.search(exchange.key):
            return False
        self.seen += 1
        return self.seen >= self.nth and (self.times is None or self.seen < self.nth + self.times)


@dataclass
class FaultProxy:
    """Forwards to the S3 server at `upstream_url`, but for what `on` says.

    `calls`: operation and key of each request. `tls`: serve https with this certificate.
    """

    upstream_url: str
    tls: ssl.SSLContext | None = None
    calls: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        if self.tls:
            self._server.socket = self.tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self._server.server_address[1]}"

    def on(
        self, operation: str, fault: Fault, *, key: str = "", nth: int = 1, times: int | None = None
    ) -> None:
        """Apply `fault` to matching requests; `key` is a regular expression searched in the key."""
        self._rules.append(Rule(operation, fault, re.compile(key), nth, times))

    def clear(self) -> None:
        """Forget all rules and calls."""
        self._rules = []
        self.calls.clear()

    def count(self, operation: str) -> int:
        """How many requests of this kind came."""
        return sum(1 for called, _ in self.calls if called == operation)

    def answer(self, exchange: Exchange) -> Answer | None:
        with self._lock:
            self.calls.append((exchange.operation, exchange.key))
            rules = [rule for rule in self._rules if rule.strikes(exchange)]
        return rules[0].fault(exchange) if rules else exchange.forward()


def refuse(status: int, code: str, message: str = "told by the proxy", extra: str = "") -> Fault:
    """An S3 error instead of the work."""
    xml = f"<Error><Code>{code}</Code><Message>{message}</Message>{extra}</Error>".encode()
    return say(status, xml, "application/xml")


def say(status: int, body: bytes, content_type: str = "text/html") -> Fault:
    """Any answer instead of the work."""
    return lambda _: Answer(status, [("Content-Type", content_type)], body, len(body))


def html() -> Fault:
    """200 and a page, as a captive portal or a wrong port answers."""
    return say(200, b"<!DOCTYPE html><html><body>Please sign in.</body></html>")


def drop() -> Fault:
    """The connection closes instead of the work."""
    return lambda _: None


def drop_after_apply() -> Fault:
    """The work is done and its answer lost."""
    return lambda exchange: (exchange.forward(), None)[1]


def fail_after_apply(status: int = 500, code: str = "InternalError") -> Fault:
    """The work is done and the answer says that it is not."""
    return lambda exchange: (exchange.forward(), refuse(status, code)(exchange))[1]


def truncate(keep: int, *, announced: bool = True) -> Fault:
    """The first `keep` bytes of the body; `announced`: under the length of all, else under none."""

    def cut(exchange: Exchange) -> Answer:
        answer = exchange.forward()
        return replace(answer, body=answer.body[:keep], length=len(answer.body) if announced else None)

    return cut


def change_body(change: Callable[[bytes], bytes]) -> Fault:
    """The answer with another body."""

    def changed(exchange: Exchange) -> Answer:
        answer = exchange.forward()
        return answer.with_body(change(answer.body))

    return changed


def flip_bit(position: int) -> Fault:
    """The answer with one bit of the byte at `position` flipped."""
    return change_body(lambda body: body[:position] + bytes([body[position] ^ 1]) + body[position + 1 :])


def delay(seconds: float) -> Fault:
    """The work, later."""

    def wait(exchange: Exchange) -> Answer:
        time.sleep(seconds)
        return exchange.forward()

    return wait


def _handler_of(proxy: FaultProxy) -> type[BaseHTTPRequestHandler]:
    address = urlsplit(proxy.upstream_url)
    upstream = (str(address.hostname), int(address.port or 80))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            answer = proxy.answer(self._exchange())
            if answer is None:
                self.close_connection = True
            else:
                self._send(answer)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

        def _exchange(self) -> Exchange:
            path, _, query = self.path.partition("?")
            bucket, _, key = path.lstrip("/").partition("/")
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = [(n, v) for n, v in self.headers.items() if n.lower() not in _HOP_BY_HOP]
            operation = _operation(self.command, query) if bucket and (key or query) else "bucket"
            return Exchange(operation, unquote(key), self.command, self.path, headers, body, upstream)

        def _send(self, answer: Answer) -> None:
            self.send_response_only(answer.status)
            for name, value in answer.headers:
                if name.lower() != "content-length":
                    self.send_header(name, value)
            if answer.length is not None:
                self.send_header("Content-Length", str(answer.length))
            self.close_connection = self.close_connection or answer.length != len(answer.body)
            if self.command == "HEAD":
                self.close_connection = False
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def _operation(method: str, query: str) -> str:
    names = parse_qs(query, keep_blank_values=True)
    for (known, name), operation in _OPERATIONS.items():
        if method == known and name in names:
            return operation
    return method.lower()
