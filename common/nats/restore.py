"""Upload of an archive to the server that restores a stream; and a server of Floe's own on loopback, for one command.

The upload is a bounded number of bytes ahead of the server's answers. The server ends a restore after
`SERVER_IDLE_LIMIT_S` seconds without a byte. So, while the upload waits for more of the archive, it sends the bytes
that it holds back, or, of an archive that is sent in whole frames, one that readers skip.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, Protocol

from pydantic import SecretStr

from common.archive.writer import Spool
from common.clock import Clock
from common.errors import ConfigError, Unavailable
from common.exits import INSTALL_ALL
from common.nats.api import check_token
from common.nats.client import FloeClient, RawSubscription, frame
from common.nats.headers import parse_status_line
from common.nats.protocol import NO_RESPONDERS_CODE, api_answer
from common.service.process import ThreadPool
from common.service.progress import Progress
from common.settings.service import NatsSettings
from common.tasks import PendingError, wait_done, wait_for

KEEP_ALIVE_FRAME = b"\x99\x04\x00\x00idle"  # a frame that readers skip
WINDOW_BYTES = 8 * 1024 * 1024  # bytes that are sent and not answered; more would block the routes of a cluster
MESSAGE_BYTES = 512 * 1024  # bytes of a message, at most
PROTOCOL_BYTES = 1024  # bytes of a message that are not payload
BEGIN_TIMEOUT_S = 30.0  # seconds for the server to begin
FIRST_PIECE_TIMEOUT_S = 4.0  # seconds for the first bytes to reach the server
SERVER_IDLE_LIMIT_S = 5.0  # seconds without a byte after which the server ends a restore
KEEP_ALIVE_INTERVAL_S = 2.0  # seconds after the last byte until the next is sent, at most
ANSWER_TIMEOUT_S = 60.0  # seconds without an answer before an error
FINISH_TIMEOUT_S = 1800.0  # seconds for the server to make the stream from the archive


class ArchiveUpload:
    """The upload of one archive; created by `begin`, closed by `aclose`. `sent`: bytes sent so far.

    `in_frames`: each piece consists of whole frames, so that another may come between two of them.
    """

    def __init__(self, client: FloeClient, stream: str, subject: str, clock: Clock, *, in_frames: bool = True) -> None:
        self._client, self._stream, self._subject, self._clock = client, stream, subject.encode(), clock
        self._filler = KEEP_ALIVE_FRAME if in_frames else b""
        self._last_sent, self._longest_pause = clock.monotonic(), 0.0
        self._size = min(MESSAGE_BYTES, client.max_payload - PROTOCOL_BYTES)
        self._buffer, self._unanswered_sizes, self._unanswered_bytes, self.sent = b"", deque[int](), 0, 0
        self._answered = asyncio.Event()
        self._pending_error, self._generation = PendingError(self._answered), client.generation
        self._inbox, self._subscription = client.new_inbox(), RawSubscription(client)

    @classmethod
    async def begin(
        cls, client: FloeClient, stream: str, request: Mapping[str, Any], clock: Clock, *, in_frames: bool = True
    ) -> ArchiveUpload:
        """Ask the server to restore the stream: `request` has its `config` and `state`. Raises ApiError if the server
        refuses, also because the stream exists.
        """
        answer = await client.api(f"STREAM.RESTORE.{check_token(stream)}", {**request}, timeout=BEGIN_TIMEOUT_S)
        upload = cls(client, stream, str(answer["deliver_subject"]), clock, in_frames=in_frames)
        upload._subscription = await client.subscribe_raw(upload._inbox, upload._on_answer, upload._pending_error.set)
        return upload

    async def send(self, piece: bytes) -> None:
        """Send the next piece of the archive; wait while too many bytes are not answered.

        Raises ApiError if the server ended the restore, Unavailable if it is gone, Refused without the right.
        """
        unsent = self._buffer + piece
        rest = len(unsent) - len(unsent) % self._size
        for start in range(0, rest, self._size):
            await self._send_message(unsent[start : start + self._size])
        self._buffer = unsent[rest:]
        await self._keep_alive()

    async def wait_for(self, work: asyncio.Future[Any]) -> bool:
        """Wait for the work that makes the next piece, at most until `KEEP_ALIVE_INTERVAL_S` seconds after the last
        byte, and keep the restore alive. Return True if the work is done. Raises the errors of `send`.
        """
        until_due = self._last_sent + KEEP_ALIVE_INTERVAL_S - self._clock.monotonic()
        await wait_done(work, until_due if until_due > 0 else KEEP_ALIVE_INTERVAL_S, self._clock)
        await self._keep_alive()
        return work.done()

    async def _keep_alive(self) -> None:
        """Send something if nothing was sent for `KEEP_ALIVE_INTERVAL_S` seconds, unless the window of unanswered bytes
        is full: then the server has enough bytes.
        """
        held_back = self._buffer or self._filler
        is_due = held_back and self._clock.monotonic() >= self._last_sent + KEEP_ALIVE_INTERVAL_S
        if is_due and self._unanswered_bytes + len(held_back) <= WINDOW_BYTES:
            self._buffer = held_back
            await self._flush()
        self._check()

    async def finish(self) -> None:
        """Mark the end of the archive, and wait until the server has made the stream. Raises the errors of `send`."""
        await self._flush()
        await self._wait_for_window(0)
        answer, _ = await self._client.request_raw(self._subject, b"", timeout=FINISH_TIMEOUT_S)
        api_answer(f"the restore of {self._stream}", answer)

    async def aclose(self) -> None:
        await self._subscription.unsubscribe()

    async def _flush(self) -> None:
        if self._buffer:
            await self._send_message(self._buffer)
            self._buffer = b""

    async def _send_message(self, piece: bytes) -> None:
        if not self.sent:
            await self._send_first(piece)
            return
        await self._wait_for_window(WINDOW_BYTES - len(piece))
        self._client.send(frame(self._subject, piece, None, self._inbox.encode()))
        self._count_sent(piece)
        self._unanswered_sizes.append(len(piece))
        self._unanswered_bytes += len(piece)

    def _count_sent(self, piece: bytes) -> None:
        now = self._clock.monotonic()
        if not self._unanswered_sizes:  # else the server still had bytes
            self._longest_pause = max(self._longest_pause, now - self._last_sent)
        self._last_sent = now
        self.sent += len(piece)

    async def _send_first(self, piece: bytes) -> None:
        """Send the first piece, and retry until a server receives it: in a cluster, the answer with its subject may
        arrive before the subscription that routes this subject.
        """
        deadline = self._clock.monotonic() + FIRST_PIECE_TIMEOUT_S
        while True:
            self._check()
            try:
                answer, _ = await self._client.request_raw(self._subject, piece, timeout=ANSWER_TIMEOUT_S)
                break
            except Unavailable as error:
                if error.code != NO_RESPONDERS_CODE:
                    raise
                if self._clock.monotonic() > deadline:
                    raise self._gone_error() from None
            await self._clock.sleep(0.05)
        if answer:
            api_answer(f"the restore of {self._stream}", answer)
        self._count_sent(piece)

    async def _wait_for_window(self, most: int) -> None:
        """Wait until at most `most` bytes are not answered. Raises Unavailable if no answer arrives for
        `ANSWER_TIMEOUT_S` s.
        """
        self._check()
        deadline = self._clock.monotonic() + ANSWER_TIMEOUT_S
        while self._unanswered_bytes > most:
            self._answered.clear()
            before = self._unanswered_bytes
            await wait_for(self._answered, 1.0)
            self._check()
            if self._unanswered_bytes < before:
                deadline = self._clock.monotonic() + ANSWER_TIMEOUT_S
            elif self._clock.monotonic() > deadline:
                raise Unavailable(f"restore of {self._stream}: no answer of the server for {ANSWER_TIMEOUT_S:g} s")

    def _check(self) -> None:
        self._pending_error.raise_if_set()
        if (refused := self._client.permission_error(self._subject)) is not None:
            raise refused
        if self._client.generation != self._generation or not self._client.is_up:
            raise Unavailable(f"restore of {self._stream}: the connection was lost")

    def _on_answer(self, _subject: bytes, _reply: bytes, payload: bytes, headers: bytes | None) -> None:
        self._answered.set()
        if parse_status_line(headers) is not None:
            raise self._gone_error()
        if payload:
            api_answer(f"the restore of {self._stream}", payload)
        if self._unanswered_sizes:
            self._unanswered_bytes -= self._unanswered_sizes.popleft()

    def _gone_error(self) -> Unavailable:
        pause = self._longest_pause if self.sent else self._clock.monotonic() - self._last_sent
        if pause < SERVER_IDLE_LIMIT_S:
            return Unavailable(f"restore of {self._stream}: the server that restored it is gone")
        return Unavailable(
            f"restore of {self._stream}: the server ended it: no byte reached it for {pause:.1f} s, and it waits "
            f"{SERVER_IDLE_LIMIT_S:g} s",
            hint="check the load of this host, and its connection to the server",
        )


MAX_PAYLOAD_BYTES = 64 * 1024 * 1024  # bytes of a message: the maximum of nats-server


class LocalServer(Protocol):
    """A nats-server that Floe starts."""

    @property
    def url(self) -> str: ...

    def start(self) -> None:
        """Start the server and return when JetStream is ready. Raises RuntimeError."""

    def close(self) -> None:
        """Stop the process that `start` started, and no other."""


#: Makes a server that stores everything in one folder. Its arguments are the folder, `users` (passwords by name) and
#: `max_payload`. Raises FileNotFoundError if the program is not installed.
LocalServerMaker = Callable[..., LocalServer]


@asynccontextmanager
async def start_local_server(
    make: LocalServerMaker, spool_dir: str, progress: Progress, code: str
) -> AsyncIterator[NatsSettings]:
    """Yield the connection to a server that ends with this block, or with the process. `spool_dir`: holds its folder,
    which a later command removes if this process is killed; empty: the system's temporary folder. `code`: of
    the errors.

    Raises ConfigError if the program is not installed, Unavailable if it does not start, or the disk is full.
    """
    password = secrets.token_urlsafe(24)
    with closing(Spool(Path(spool_dir) if spool_dir else None)) as spool:
        home = spool.new_folder()
        try:
            server = make(home, users={"floe": password}, max_payload=MAX_PAYLOAD_BYTES)
        except FileNotFoundError as error:
            raise ConfigError(str(error), hint=INSTALL_ALL, code=code) from error
        with closing(ThreadPool("local-server", 1)) as threads, closing(server):
            progress.print(f"starting a nats-server in {home}")
            try:
                await threads.run(server.start)
            except RuntimeError as error:
                raise Unavailable(str(error), code=code) from error
            yield NatsSettings(url=(server.url,), user="floe", password=SecretStr(password))
