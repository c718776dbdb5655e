"""A TCP proxy on loopback that breaks connections in the ways networks do.

It runs in the event loop of the test. Faults act on the connections that are open and on those that come.
"""

from __future__ import annotations

import asyncio
import http.client
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from infra.local.process import free_port
from tests.support.basics import SharedS3

CHUNK = 65536
BOTH = ("up", "down")


@dataclass
class _Pair:
    """One client connection and its connection to the server."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class TcpProxy:
    """`async with TcpProxy(port) as proxy:` listens on `proxy.port`; "up" is towards the server, "down" back.

    `blackhole` swallows the bytes of a direction while connections stay open; `delay` holds each chunk back
    for that many seconds; `cut_after` resets a connection once so many bytes went in a direction (0: off);
    `lose` resets a connection instead of passing on a chunk that matches.
    """

    def __init__(self, target_port: int) -> None:
        self.port = free_port()
        self.accepted = 0
        self.passed = {"up": 0, "down": 0}
        self.delay = 0.0
        self._target = target_port
        self._blackhole: set[str] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._cut_after = {"up": 0, "down": 0}
        self._loses: re.Pattern[bytes] | None = None
        self._lost = asyncio.Event()
        self._pairs: list[_Pair] = []
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    async def __aenter__(self) -> TcpProxy:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()

    async def listen(self) -> None:
        """Accept connections (again)."""
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=CHUNK)

    async def refuse(self) -> None:
        """Reset open connections and accept none until `listen`."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()
        await asyncio.sleep(0)

    def blackhole(self, *directions: str) -> None:
        """Swallow bytes in these directions (both, if none is named) until `heal`."""
        self._blackhole.update(directions or BOTH)

    def stall(self) -> None:
        """Read nothing any more, so that the writers' buffers fill, until `heal`."""
        self._flowing.clear()

    def cut_after(self, direction: str, size: int) -> None:
        """Reset the connections when `size` more bytes went in `direction`; the bytes up to there arrive."""
        self._cut_after[direction] = self.passed[direction] + size

    def lose(self, pattern: re.Pattern[bytes]) -> asyncio.Event:
        """Lose the next chunk from the server that matches, and reset its connection. The event is set then."""
        self._loses, self._lost = pattern, asyncio.Event()
        return self._lost

    def lose_nothing(self) -> None:
        """End `lose` without a match."""
        self._loses = None

    def heal(self) -> None:
        """End all faults; connections that were made to swallow or to stall are reset."""
        swallowed = bool(self._blackhole) or not self._flowing.is_set()
        self._flowing.set()
        self._blackhole.clear()
        self._cut_after = {"up": 0, "down": 0}
        self.delay, self._loses = 0.0, None
        if swallowed:
            self.cut()

    def cut(self) -> None:
        """Reset (RST) every open connection, at both ends."""
        for pair in [*self._pairs]:
            self._drop(pair)

    async def _accept(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            answers, server = await asyncio.open_connection("127.0.0.1", self._target, limit=CHUNK)
        except OSError:
            _reset(client)
            return
        pair = _Pair(client, server)
        self._pairs.append(pair)
        pair.tasks = [
            asyncio.create_task(self._pump(reader, server, "up", pair)),
            asyncio.create_task(self._pump(answers, client, "down", pair)),
        ]

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, direction: str, pair: _Pair
    ) -> None:
        with suppress(OSError):
            while data := await source.read(CHUNK):
                await self._flowing.wait()
                if self.delay:
                    await asyncio.sleep(self.delay)
                if direction in self._blackhole:
                    continue
                if direction == "down" and self._loses and self._loses.search(data):
                    self._loses = None
                    self._lost.set()
                    break
                limit = self._cut_after[direction]
                if limit and self.passed[direction] + len(data) >= limit:
                    self._cut_after[direction] = 0
                    await self._pass(sink, direction, data[: limit - self.passed[direction]])
                    await asyncio.sleep(0.02)  # bytes that were passed on arrive before the reset
                    break
                await self._pass(sink, direction, data)
        if direction not in self._blackhole and pair in self._pairs:
            self._drop(pair)

    async def _pass(self, sink: asyncio.StreamWriter, direction: str, data: bytes) -> None:
        self.passed[direction] += len(data)
        sink.write(data)
        await sink.drain()

    def _drop(self, pair: _Pair) -> None:
        self._pairs.remove(pair)
        for task in pair.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        for writer in (pair.client, pair.server):
            _reset(writer)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, as a crashed host or an impatient firewall does."""
    connection = writer.get_extra_info("socket")
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


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
    """The answer to the client. `length`: announced as Content-Length, None announces none."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    length: int | None

    def with_body(self, body: bytes) -> Answer:
        return replace(self, body=body, length=len(body))


@dataclass
class Exchange:
    """One request: `operation` is a verb of the port, or `part create_upload complete abort versions bucket`."""

    operation: str
    key: str
    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    upstream: tuple[str, int]

    def forward(self) -> Answer:
        """Return the server's answer."""
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
    """The requests of a fault: `times` matching ones from the `nth` on; all of them if None."""

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
    """A proxy of the S3 server at `upstream_url`, with the faults of `on`.

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

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self._server.server_address[1]}"

    def on(self, operation: str, fault: Fault, *, key: str = "", nth: int = 1, times: int | None = None) -> FaultProxy:
        """Apply `fault` to matching requests; `key` is a regular expression searched in the key."""
        self._rules.append(Rule(operation, fault, re.compile(key), nth, times))
        return self

    def clear(self) -> None:
        """Forget all rules and calls."""
        self._rules = []
        self.calls.clear()

    def count(self, operation: str) -> int:
        """Return the number of requests of this kind."""
        return sum(1 for called, _ in self.calls if called == operation)

    def answer(self, exchange: Exchange) -> Answer | None:
        with self._lock:
            self.calls.append((exchange.operation, exchange.key))
            rules = [rule for rule in self._rules if rule.strikes(exchange)]
        return rules[0].fault(exchange) if rules else exchange.forward()


def refuse(status: int, code: str, message: str = "told by the proxy", extra: str = "") -> Fault:
    """Answer with an S3 error instead of the work."""
    xml = f"<Error><Code>{code}</Code><Message>{message}</Message>{extra}</Error>".encode()
    return raw(status, xml, "application/xml")


def refuse_conditions(status: int) -> Fault:
    """Refuse as a store without conditional writes: 501, as Alibaba's and Backblaze's, or 400."""
    code = "NotImplemented" if status == 501 else "InvalidArgument"
    refused = refuse(status, code, "A header you provided implies functionality that is not implemented")

    def fault(exchange: Exchange) -> Answer | None:
        is_conditional = any(name.lower() in ("if-none-match", "if-match") for name, _ in exchange.headers)
        return refused(exchange) if is_conditional else exchange.forward()

    return fault


def refusing_conditions(proxy: FaultProxy, status: int) -> FaultProxy:
    """Return `proxy`, which refuses each write with a condition from now on."""
    for operation in ("put", "put_if_absent", "put_if_match", "complete"):
        proxy.on(operation, refuse_conditions(status))
    return proxy


def raw(status: int, body: bytes, content_type: str = "text/html") -> Fault:
    """Answer anything instead of the work."""
    return lambda _: Answer(status, [("Content-Type", content_type)], body, len(body))


def html() -> Fault:
    """Answer 200 and a page, as a captive portal or a wrong port does."""
    return raw(200, b"<!DOCTYPE html><html><body>Please sign in.</body></html>")


def drop() -> Fault:
    """Close the connection instead of the work."""
    return lambda _: None


def drop_after_apply() -> Fault:
    """Do the work and lose its answer."""
    return lambda exchange: (exchange.forward(), None)[1]


def fail_after_apply(status: int = 500) -> Fault:
    """Do the work and answer with an error."""
    return lambda exchange: (exchange.forward(), refuse(status, "InternalError")(exchange))[1]


def truncate(keep: int, *, announced: bool = True) -> Fault:
    """Answer the first `keep` bytes of the body; `announced`: under the length of all, else under none."""

    def cut(exchange: Exchange) -> Answer:
        answer = exchange.forward()
        return replace(answer, body=answer.body[:keep], length=len(answer.body) if announced else None)

    return cut


def change_body(change: Callable[[bytes], bytes]) -> Fault:
    """Answer with another body."""

    def changed(exchange: Exchange) -> Answer:
        answer = exchange.forward()
        return answer.with_body(change(answer.body))

    return changed


def delay(seconds: float) -> Fault:
    """Do the work later."""

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


@asynccontextmanager
async def silent_store(s3: SharedS3, folder: Path, **sections: object) -> AsyncIterator[tuple[str, TcpProxy]]:
    """Write a configuration for a store that takes connections and never answers; `sections` are beside `store`."""
    async with TcpProxy(urlsplit(s3.endpoint_url).port or 0) as line:
        line.blackhole()
        store = {**s3.store(), "endpoint_url": f"http://127.0.0.1:{line.port}"}
        config = folder / "central.yaml"
        config.write_text(yaml.safe_dump({"store": store, **sections}))
        config.chmod(0o600)
        yield str(config), line
