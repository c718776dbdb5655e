"""A nats-server on loopback that Floe starts for one command, and that only this process may use."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Protocol

from pydantic import SecretStr

from common.archive.writer import Spool
from common.errors import ConfigError, Unavailable
from common.exits import INSTALL_ALL
from common.service.process import ThreadPool
from common.service.progress import Progress
from common.settings.service import NatsSettings

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
