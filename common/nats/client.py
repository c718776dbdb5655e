"""A NATS connection that sends and receives raw messages and reconnects without end.

A subclass of nats-py's `Client`. Floe cannot use how that client parses, retries and closes: its public API drops
repeated headers and strips values, one subject that is not UTF-8 ends its read loop while `is_connected` stays true,
most `-ERR` lines close it for good, and closing a dead connection waits for its unsent bytes. The methods overridden
here are internals, so the dependency is pinned to one minor version, and `tests/unit/test_nats_pin.py` fails when that
version changes.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import ssl
from asyncio import Future
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from nats import errors
from nats.aio.client import Client, Srv
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport

from common.clock import Backoff, Clock, SystemClock, doubling_delays
from common.errors import ConfigError, OutcomeUnknown, Refused, Unavailable
from common.logs import get_logger
from common.metrics import counter, gauge
from common.nats import credentials
from common.nats.credentials import Credential, error_text
from common.nats.protocol import (
    NO_RESPONDERS_CODE,
    ApiError,
    FrameParser,
    PendingRequests,
    RawAnswer,
    Sink,
    WireError,
    api_answer,
    check_subject,
    frame,
)
from common.settings.service import API_PREFIX, NatsSettings
from common.tasks import ReportError, raise_fatal, report_errors, wait_for, wait_result

__all__ = ["ApiError", "FloeClient", "RawSubscription", "Sink", "connect", "frame"]

log = get_logger(__name__)

connections = gauge("nats_connected", "Connections of this process to NATS that are up.")
reconnects = counter("nats_reconnects", "Connections to NATS that were lost and re-established.")

PING_INTERVAL_S = 10.0  # seconds; a dead connection is noticed within twice that
READ_BYTES = 256 * 1024  # bytes of one read
RECONNECT_MIN_S, RECONNECT_MAX_S = 0.1, 2.0  # seconds between attempts, before jitter
RECONNECT_RESET_S = 1.0  # seconds; losing a connection that lasted this long resets the backoff
CLOSE_TIMEOUT_S = 2.0  # seconds for the server to take the bytes that are still buffered
SUBSCRIBE_TIMEOUT_S = 5.0  # seconds
MAX_REFUSALS = 1000  # subjects with a remembered refusal
NO_RESPONDERS_STATUS = b"NATS/1.0 503"

_PERMISSION_VIOLATION = re.compile(r'Permissions Violation for (?:Publish|Subscription) to "([^"]*)"')


async def connect(
    settings: NatsSettings,
    *,
    name: str,
    clock: Clock | None = None,
    rng: random.Random | None = None,
    ping_interval: float = PING_INTERVAL_S,
) -> FloeClient:
    """Connect, trying all servers for `settings.connect_timeout` seconds; the client then reconnects by itself.

    `name`: the name that the server shows for this connection. Raises Unavailable if no server answers in time, Refused
    if the credential or certificate is refused, ConfigError for TLS that cannot work and for a server without headers.
    """
    clock, rng, settings = clock or SystemClock(), rng or random.SystemRandom(), credentials.apply_context(settings)
    auth = credentials.load_credential(settings, clock)
    if settings.tls.files.ca or settings.tls.files.cert:  # otherwise there is nothing to check, and it costs 50 ms
        credentials.tls_context(settings)
    if settings.tls.insecure:
        log.warning("nats certificate unverified", action="tls_unverified")
    servers = rng.sample(settings.url, len(settings.url))
    deadline = clock.monotonic() + settings.connect_timeout
    backoff = Backoff(None, doubling_delays(RECONNECT_MIN_S, settings.connect_timeout))
    while True:
        client = FloeClient(settings, auth, clock=clock, rng=rng, ping_interval=ping_interval)
        timeout, secret = max(0.2, (deadline - clock.monotonic()) / min(2, len(servers))), auth.secret_from_file
        try:
            await client.open(servers, name, timeout)
            if not client.has_headers:
                raise headers_disabled_error()
            return client
        except BaseException as error:
            cause = client.tls_cause(error)
            await client.aclose()
            problem = credentials.connect_error(cause, servers[0], auth, settings)
            if isinstance(problem, Refused) and problem.code == "E-NATS-AUTH" and auth.reread() != secret:
                continue
            pause = backoff.next_delay()
            if not isinstance(problem, Unavailable) or clock.monotonic() + pause >= deadline:
                raise problem from None
        await clock.sleep(pause)
        servers = servers[1:] + servers[:1]


def headers_disabled_error() -> ConfigError:
    return ConfigError(
        "nats-server: expected one that supports headers, found `headers: false`",
        hint="remove no_header_support from its configuration",
        code="E-NATS-HEADERS",
    )


class RawSubscription:
    """A subscription that passes its messages to a sink, or several such subscriptions; it survives reconnects."""

    def __init__(self, client: FloeClient, *sids: int) -> None:
        self._client, self._sids = client, sids

    def merge(self, other: RawSubscription) -> RawSubscription:
        """Return this subscription and another one on the same connection as one, to be ended together."""
        return RawSubscription(self._client, *self._sids, *other._sids)

    async def unsubscribe(self) -> None:
        """End the subscription: no message reaches the sink any more."""
        for sid in self._sids:
            self._client.drop_subscription(sid)


class _Transport(TcpTransport):
    def writelines(self, payload: list[bytes]) -> None:
        # In Python 3.12.0 to 3.12.8, 3.13.0 and 3.13.1 `writelines` applies no back pressure (CVE-2024-12254).
        cast(Any, self)._io_writer.write(b"".join(payload))


class FloeClient(Client):
    """A NATS connection, made by `connect` and closed by `aclose`.

    `generation` rises with each attempt to reconnect, before any message of the new connection reaches a sink: answers
    to requests of an earlier generation may be lost. Until all subscriptions exist again, `is_up` is False and `send`
    raises Unavailable.
    """

    def __init__(
        self, settings: NatsSettings, auth: Credential, *, clock: Clock, rng: random.Random, ping_interval: float
    ) -> None:
        super().__init__()
        self.generation, self.clock, self._settings, self._auth = 0, clock, settings, auth
        self._backoff = Backoff(rng, doubling_delays(RECONNECT_MIN_S * 2, RECONNECT_MAX_S))
        self._interval, self.api_prefix = ping_interval, settings.api_prefix
        self._sinks: dict[bytes, Sink] = {}
        self._owners: dict[bytes, ReportError] = {}
        parser = FrameParser(self._sinks, self._on_message, self._on_line, self._on_sink_error)
        self._ps, self._requests, self._inbox = cast(Any, parser), PendingRequests(), b""
        self._listeners: dict[Callable[[bool], None], None] = {}  # in order
        self._refusals: dict[bytes, str] = {}
        self._optional: set[bytes] = set()
        self._up, self._received, self._up_since, self._last_error = asyncio.Event(), 0, 0.0, ""

    # The public interface

    @property
    def is_up(self) -> bool:
        return self._up.is_set() and self.is_connected

    @property
    def server_version(self) -> tuple[int, int, int]:
        text = str(self._server_info.get("version", "")).partition("-")[0]
        major, minor, patch = [*map(int, re.findall(r"\d+", text)), 0, 0, 0][:3]
        return major, minor, patch

    @property
    def has_headers(self) -> bool:
        return self._server_info.get("headers") is True

    @property
    def is_clustered(self) -> bool:
        """True if the connected server is part of a cluster."""
        return bool(self._server_info.get("cluster"))

    async def wait_up(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the connection; return `is_up`."""
        return self.is_up or (await wait_for(self._up, timeout) and self.is_up)

    def add_listener(self, listener: Callable[[bool], None]) -> Callable[[], None]:
        """Call `listener` with False when the connection is lost, and with True when it is up again.

        It must not raise: that would end the service. Returns a function that removes it; closing the client removes
        all.
        """
        listening = report_errors(listener, raise_fatal)
        self._listeners[listening] = None
        return lambda: self._listeners.pop(listening, None)

    def send(self, frames: bytes) -> None:
        """Buffer bytes made by `frame`; they are written soon. Raises Unavailable while `is_up` is False.

        The buffer is unbounded: a caller that sends much awaits `flush_writes` now and then. Frames that are still
        buffered when the connection is lost are dropped, never sent later.
        """
        if not self.is_up:
            raise Unavailable("the NATS connection is down")
        assert self._flush_queue is not None
        self._pending.append(frames)
        self._pending_data_size += len(frames)
        if self._flush_queue.empty():
            self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())

    async def flush_writes(self) -> None:
        """Wait until the operating system has all frames that were sent, however long that takes.

        Raises Unavailable if the connection was lost meanwhile; it is then unknown which frames arrived.
        """
        generation = self.generation
        if self.is_up:
            assert self._flush_queue is not None
            written = asyncio.get_running_loop().create_future()
            await self._flush_queue.put(written)
            await written
        if generation != self.generation or not self.is_up:
            raise Unavailable("the NATS connection was lost while writing")

    async def request_raw(
        self, subject: bytes, payload: bytes, headers: bytes | None = None, *, timeout: float
    ) -> RawAnswer:
        """Send one message and return the payload and the header block of the answer.

        Raises Unavailable if nothing was sent or no one listens on the subject, Refused without the permission,
        OutcomeUnknown if the message was sent and no answer came within `timeout` seconds or before the connection was
        lost, ValueError for a message that the wire cannot carry. A message that is too large for the server is not
        sent (Unavailable): it would end the connection, and another server may take it.
        """
        if not await self.wait_up(timeout):
            raise Unavailable("the NATS connection is down")
        subject_text = subject.decode("utf-8", "backslashreplace")
        if (size := len(payload) + len(headers or b"")) > self._max_payload:
            reason = f"expected at most {self._max_payload} bytes (max_payload of its server), found {size}"
            raise Unavailable(f"message to {subject_text}: {reason}", code="E-NATS-PAYLOAD")
        waiter: Future[RawAnswer] = asyncio.get_running_loop().create_future()
        token = self._requests.add(subject, waiter)
        try:
            self.send(frame(subject, payload, headers, self._inbox + token))
            answer, block = await wait_result(waiter, timeout)
        except TimeoutError:
            raise OutcomeUnknown(f"no answer to {subject_text} within {timeout:g} s") from None
        finally:
            self._requests.remove(token)
        if not answer and (block or b"").startswith(NO_RESPONDERS_STATUS):
            hint = "check that JetStream is enabled for this account, and that the stream exists"
            raise Unavailable(f"no server answers {subject_text}", hint=hint, code=NO_RESPONDERS_CODE)
        return answer, block

    async def api(self, name: str, request: dict[str, Any] | None = None, *, timeout: float = 5.0) -> dict[str, Any]:
        """Send a request to the JetStream API, `name` without `$JS.API.`, and return the document in the answer.

        Raises ApiError if JetStream refuses, otherwise as `request_raw`.
        """
        subject = self.api_subject(name)
        payload = b"" if request is None else json.dumps(request).encode()
        answer, _ = await self.request_raw(subject.encode(), payload, timeout=timeout)
        return api_answer(subject, answer)

    def api_subject(self, name: str) -> str:
        """Return the subject of the JetStream API call `name`, such as `CONSUMER.MSG.NEXT.S.C`, in this domain."""
        return f"{self.api_prefix}.{name}"

    async def subscribe_raw(self, subject: str, sink: Sink, report_error: ReportError = raise_fatal) -> RawSubscription:
        """Pass every message on `subject` to `sink`, from the read loop, status messages included.

        If the sink raises, the subscription ends and its owner gets the error through `report_error`; without an owner
        the service ends. Returns when the server has accepted the subscription. Raises Refused without the permission,
        Unavailable if the connection stays down, ValueError for an invalid subject.
        """
        check_subject(subject.encode())
        if not await self.wait_up(SUBSCRIBE_TIMEOUT_S):
            raise Unavailable("the NATS connection is down")
        self._refusals.pop(subject.encode(), None)
        self._sid += 1
        sid = self._sid
        self._sinks[b"%d" % sid], self._owners[b"%d" % sid] = sink, report_error
        self._subs[sid] = Subscription(self, sid, subject)  # from now on, reconnects send it again
        self.send(b"SUB %b  %d\r\n" % (subject.encode(), sid))
        confirmed = await self.round_trip(SUBSCRIBE_TIMEOUT_S)
        if (refused := self.permission_error(subject.encode())) is not None or not confirmed:
            self.drop_subscription(sid)
            raise refused or Unavailable(f"the server did not confirm the subscription to {subject}")
        return RawSubscription(self, sid)

    def drop_subscription(self, sid: int) -> None:
        self._sinks.pop(b"%d" % sid, None)
        self._owners.pop(b"%d" % sid, None)
        if self._subs.pop(sid, None) is not None and self.is_up:
            self.send(b"UNSUB %d\r\n" % sid)

    def allow_refusal(self, *subjects: str) -> None:
        """Log a refusal of `subjects` no more as an error: the caller works without that permission."""
        self._optional.update(subject.encode() for subject in subjects)

    def permission_error(self, subject: bytes) -> Refused | None:
        """Return the server's refusal of `subject` to this connection, or None if there was none."""
        if (text := self._refusals.get(subject)) is None:
            return None
        # Only the words before the quoted subject become lower case: case is significant in a subject.
        text = re.sub(r'^[^"]*', lambda words: words[0].lower(), text)
        return Refused(text, hint=f"grant it to {self._auth.label}", code="E-NATS-PERMISSION")

    async def aclose(self) -> None:
        """Give the server up to `CLOSE_TIMEOUT_S` seconds to take the buffered bytes, then close.

        Waiting requests end with OutcomeUnknown. Cancelled, it closes at once.
        """
        try:
            await self.round_trip(CLOSE_TIMEOUT_S)
        finally:
            self._stop_tasks()
            self._abort()
            self._mark_down("the connection was closed")
            self._listeners.clear()
            with suppress(Exception):
                await asyncio.wait_for(self.close(), CLOSE_TIMEOUT_S)
            self._status = Client.CLOSED
        await self.clock.sleep(0)

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # Connecting

    async def open(self, servers: list[str], name: str, timeout: float) -> None:
        """Make one attempt at the first of `servers`; after that, reconnect to any of them without end."""
        self._public_nkey = self._auth.public_nkey or None
        await super().connect(
            servers,
            name=name,
            allow_reconnect=False,
            connect_timeout=cast(int, timeout),
            dont_randomize=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=cast(int, RECONNECT_MIN_S),
            inbox_prefix=self._settings.inbox_prefix or "_INBOX",
            tls_handshake_first=self._settings.tls.handshake_first,
            error_cb=self._on_error,
            reconnected_cb=self._on_reconnected,
            pending_size=0,
            **self._auth.options,
        )
        self.options.update(allow_reconnect=True, connect_timeout=self._settings.connect_timeout)
        self._mark_up()
        self._inbox = self.new_inbox().encode() + b"."
        await self.subscribe_raw((self._inbox + b"*").decode(), self._requests.sink)

    def tls_cause(self, error: BaseException) -> BaseException:
        """Return the TLS error of the transport if `error` only reports that the connection was lost meanwhile."""
        reader = getattr(self._transport, "_io_reader", None)
        found = reader.exception() if reader is not None else None
        return found if isinstance(error, OSError) and isinstance(found, ssl.SSLError) else error

    @property
    def ssl_context(self) -> ssl.SSLContext:
        return credentials.tls_context(self._settings)

    async def _select_next_server(self) -> None:
        self._abort()
        if self._current_server is not None:
            await self.clock.sleep(self._backoff.next_delay())
        server = self._server_pool.pop(0)
        self._server_pool.append(server)
        self._current_server = server
        await self._connect_to_server(server)

    async def _connect_to_server(self, s: Srv) -> None:
        s.last_attempt = self.clock.monotonic()
        self._transport = cast(Any, _Transport)()
        await self._wire.connect(s.uri, READ_BYTES, self.options["connect_timeout"])
        if self.is_closed:  # in Python 3.11 `wait_for` forgets a cancellation that comes together with its result
            raise asyncio.CancelledError

    async def _process_connect_init(self) -> None:
        self._stop_tasks()
        self._ps.reset()
        self._refusals.clear()
        self.generation += 1
        await super()._process_connect_init()
        if not self.is_connected:
            raise errors.Error("nats: the server did not answer the first PING")

    def _stop_tasks(self) -> None:
        for task in (self._reading_task, self._ping_interval_task, self._flusher_task):
            if task is not None and task is not asyncio.current_task():
                task.cancel()

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and info.get("tls_available") and credentials.wants_tls(self._settings):
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)
        # A server sends INFO on open connections when its configuration changes.
        self._max_payload = info.get("max_payload", self._max_payload)

    def _connect_command(self) -> bytes:
        """Return the CONNECT line, with the credential. By now TLS is up, or the connection stays plaintext."""
        writer = self._wire._io_writer
        if writer.get_extra_info("ssl_object") is None:
            if credentials.wants_tls(self._settings):
                raise ssl.SSLError("the server offers no TLS")
            is_exposed = self._auth.is_secret and not self._settings.allow_plaintext
            if is_exposed and not credentials.is_loopback(writer.get_extra_info("peername")):
                assert self._current_server is not None
                raise credentials.plaintext_error(credentials.host(self._current_server.uri.geturl()), self._auth)
        return super()._connect_command()

    @property
    def _wire(self) -> Any:
        return self._transport

    # Staying connected

    async def _read_loop(self) -> None:
        generation, wire = self.generation, self._wire
        try:
            while generation == self.generation and not self.is_closed and not self.is_reconnecting:
                if not (data := await wire.read(READ_BYTES)):
                    raise errors.UnexpectedEOF
                self._received += len(data)
                await self._ps.parse(data)
        except Exception as error:
            if generation == self.generation:
                await self._process_op_err(error)

    async def _flusher(self) -> None:
        try:
            await super()._flusher()
        except Exception as error:  # otherwise nothing would be written any more, while messages still arrive
            await self._process_op_err(error)

    async def _ping_interval(self) -> None:
        """Reconnect if the server no longer answers, and if this watchdog itself fails: nothing else would notice."""
        try:
            while True:
                await self.clock.sleep(self._interval)
                received = self._received
                if not await self.round_trip(self._interval * 0.8) and self._received == received:
                    raise errors.StaleConnectionError
        except Exception as error:
            await self._process_op_err(error)

    async def _process_op_err(self, e: Exception) -> None:
        if self.is_closed or self.is_reconnecting:
            return
        expected = isinstance(e, (OSError, errors.Error, WireError))
        trace = {} if expected else {"exc_info": e}
        log.warning("nats connection lost", action="connection_lost", error=error_text(e), **trace)
        try:
            self._mark_down("the connection was lost")
            await super()._process_op_err(e)
        except Exception as failure:  # nothing else would reconnect, and no one awaits the calling task
            raise_fatal(failure)

    async def _attempt_reconnect(self) -> None:
        while not self.is_closed:
            self._abort()
            try:
                await super()._attempt_reconnect()
                return
            except Exception as error:  # nats-py's own reconnecting ends for good at an error it does not expect
                await self._on_error(error)
                self._status = Client.RECONNECTING

    async def _on_reconnected(self) -> None:
        reconnects.inc()
        self._mark_up()

    def _mark_up(self) -> None:
        assert self._current_server is not None
        server = credentials.host(self._current_server.uri.geturl())
        log.info("nats connection opened", action="connection_opened", server=server)
        self._up_since, self._last_error = self.clock.monotonic(), ""
        if not self._up.is_set():
            connections.inc()
        self._up.set()
        self._notify_listeners(True)

    def _mark_down(self, reason: str) -> None:
        if (was_up := self._up.is_set()) and self.clock.monotonic() - self._up_since >= RECONNECT_RESET_S:
            self._backoff.reset()
        self._up.clear()
        self._pending, self._pending_data_size = [], 0
        while self._flush_queue is not None and not self._flush_queue.empty():
            _settle(self._flush_queue.get_nowait(), None)
        for pong in self._pongs:
            _settle(pong, False)
        self._pongs.clear()
        self._requests.fail(OutcomeUnknown(f"{reason} before the answer came"))
        if was_up:
            connections.dec()
            self._notify_listeners(False)

    def _notify_listeners(self, is_up: bool) -> None:
        for listener in list(self._listeners):
            listener(is_up)

    def _abort(self) -> None:
        """Drop the socket at once: an orderly close of a dead connection waits for its unsent bytes.

        It does not wait for the socket to close either; nats-py would wait for ever after a failed TLS handshake.
        """
        if (writer := getattr(self._transport, "_io_writer", None)) is not None:
            writer.transport.abort()
        self._transport = None

    async def round_trip(self, timeout: float) -> bool:
        """Send a PING after all buffered bytes; return True if it is answered within `timeout` seconds."""
        pong: Future[bool] = asyncio.get_running_loop().create_future()
        try:
            self.send(b"PING\r\n")
            self._pongs.append(pong)
            return await wait_result(pong, timeout)
        except (TimeoutError, Unavailable):
            return False

    # Messages and lines from the server

    async def _on_line(self, line: bytes) -> None:
        word, _, rest = line.partition(b" ")
        if word == b"PING":
            await self._process_ping()
        elif word == b"PONG":
            await self._process_pong()
        elif word == b"INFO":
            await self._process_info(json.loads(rest))
        elif word == b"-ERR":
            await self._on_server_error(rest.decode("utf-8", "replace").strip(" '"))
        elif word != b"+OK":
            raise WireError(f"expected a line of the NATS protocol, found {line!r:.80}")

    async def _on_message(
        self, sid: bytes, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None
    ) -> None:
        try:
            await self._process_msg(int(sid), subject, reply, payload, cast(bytes, headers))
        except (ValueError, IndexError) as error:
            log.warning("message dropped", action="message_dropped", subject=repr(subject), error=error_text(error))

    def _on_sink_error(self, sid: bytes, error: Exception) -> None:
        """Drop the subscription and pass the error to its owner; the connection stays, since it serves other sinks."""
        report_error = self._owners.get(sid, raise_fatal)
        self.drop_subscription(int(sid))
        report_error(error)

    async def _process_pong(self) -> None:
        if self._pongs:
            _settle(self._pongs.pop(0), True)
        self._pings_outstanding = 0

    async def _on_server_error(self, text: str) -> None:
        if (violation := _PERMISSION_VIOLATION.match(text)) is None:
            await self._process_op_err(errors.Error(text))
            return
        subject = violation[1].encode()
        sent = self._sent_subject(subject)
        if subject not in self._refusals:
            level = log.debug if {subject, sent} & self._optional else log.error
            level("nats permission refused", action="permission_refused", error=text)
        if len(self._refusals) >= MAX_REFUSALS:
            self._refusals.clear()
        self._refusals[subject] = self._refusals[sent] = text
        if (refused := self.permission_error(subject)) is not None:
            self._requests.fail(refused, None if subject == self._inbox + b"*" else subject)
            self._requests.fail(refused, sent)

    def _sent_subject(self, subject: bytes) -> bytes:
        """Return the subject as it was sent. A server inside the domain reports it without the domain's part."""
        prefix = self.api_prefix.encode()
        is_api = subject.startswith(API_PREFIX.encode() + b".")
        return prefix + (subject.removeprefix(API_PREFIX.encode()) if is_api else b"." + subject)

    async def _on_error(self, error: Exception) -> None:
        """Report a failed attempt to connect: once for each new reason, not twice a second for an hour."""
        text = error_text(error)
        if credentials.is_auth_error(text):
            self._auth.reread()  # for the next attempt
        is_first_connect = not self.options["allow_reconnect"]  # `connect` raises its error
        level = log.debug if is_first_connect or text == self._last_error else log.warning
        self._last_error = text
        level("nats connection failed", action="connection_failed", error=text)


def _settle(future: Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)
