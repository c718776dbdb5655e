"""An exact drill: restore the whole stream under a scratch name, compare everything, and remove it.

The stream keeps the guard of a restore. So no producer and no reader of the real stream reaches it, and its consumers
deliver to nobody. It is on the server that `floe restore` would choose, or on one that is started for the drill.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import SecretStr

from common.archive.documents import ChainStore
from common.archive.store import SegmentStore
from common.archive.writer import Spool
from common.clock import Clock
from common.errors import ConfigError, Unavailable
from common.exits import EXIT_DIFFERENCES, INSTALL_ALL
from common.nats.client import FloeClient
from common.nats.requests import ApiError
from common.service.process import ThreadPool
from common.service.progress import Progress
from common.settings.root import Settings
from common.settings.service import NatsSettings
from common.settings.types import duration_words, format_count, size_words
from common.tasks import Stop
from ingress.recovery.drill import SCRATCH_PREFIX, ScratchStreams, run_with_renewal
from ingress.recovery.plan import RestoreRequest
from ingress.recovery.preflight import room_error
from ingress.recovery.read_back import read_differences
from ingress.recovery.restore import Restore, RestoreReport, RestoreTuning

MAX_PAYLOAD_BYTES = 64 * 1024 * 1024  # bytes of a message, for a server that Floe starts: the maximum of nats-server
CONSUMER_CHECKS = 10  # checks of the consumers, a second apart: in a cluster their positions arrive late


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


@dataclass(frozen=True, slots=True)
class ExactReport:
    """The result of an exact drill. `differences`: those in the configuration and the consumers, as text."""

    restored: RestoreReport
    server: str
    differences: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        return EXIT_DIFFERENCES if self.differences or not self.restored.comparison.is_same else 0

    def as_json(self) -> dict[str, Any]:
        found = self.restored.as_json()
        return {
            **found,
            "ok": self.exit_code == 0,
            "server": self.server,
            "differences": [*found["differences"], *self.differences],
        }

    def lines(self) -> Iterator[str]:
        done, found = self.restored, self.restored.comparison
        request, consumers = done.plan.request, format_count(len(done.plan.consumers), "consumer")
        rate = f"{done.rows / max(done.seconds, 0.001):,.0f} msg/s"
        took = f"{size_words(done.bytes)} sent in {duration_words(done.seconds)}, {rate}"
        yield f"{request.site}/{request.feed}: {format_count(done.rows, 'message')}, {took}, on {self.server}"
        if self.exit_code == 0:
            yield f"as in the archive: {found.rows_read:,} read back, state, configuration, {consumers}"
        else:
            yield f"NOT as archived: {found.differences.line()}"
        yield from found.state_differences
        yield from found.differences.examples
        yield from self.differences
        if found.dropped:
            yield f"{format_count(found.dropped, 'message')} dropped by the server: limits, TTL, or acknowledged by all"


class ExactDrill:
    """One exact drill of a feed. `make_server`: None for the server that `floe restore` would choose."""

    def __init__(
        self,
        settings: Settings,
        request: RestoreRequest,
        store: SegmentStore,
        documents: ChainStore,
        clock: Clock,
        progress: Progress,
        make_server: LocalServerMaker | None = None,
    ) -> None:
        if make_server is not None:
            request = replace(request, replicas=1, server="local")
        self._request = replace(request, name=SCRATCH_PREFIX + secrets.token_hex(6), promote=False)
        self._settings, self._clock, self._progress, self._make_server = settings, clock, progress, make_server
        # The scratch name is random, so one check that it is free is enough.
        tuning = RestoreTuning(name_checks=1)
        self._restore = Restore(settings, self._request, store, documents, clock, progress, tuning)

    async def run(self, stop: Stop) -> ExactReport:
        """Run the drill. In every case, remove the stream, and the server that was started.

        Raises the errors of `Restore.run`, and Unavailable if `stop` is set before the end.
        """
        if self._make_server is None:
            async with self._restore.open_connection() as client:
                return await self._run_on_shared_server(client, stop)
        async with self._start_local_server(self._make_server) as nats, self._restore.open_connection(nats) as client:
            return await self._run_and_compare(client, stop, "a server of its own")

    async def _run_on_shared_server(self, client: FloeClient, stop: Stop) -> ExactReport:
        """Drill on a server that others use, under a lease: a stream without one is a leftover for the next drill."""
        scratch = ScratchStreams(client, self._restore.service, self._settings.instance, self._clock)
        try:
            for left in await scratch.remove_leftovers():
                self._progress.print(f"removed {left}, a leftover of an earlier drill")
            async with scratch.hold(self._request.name) as lease:
                return await run_with_renewal(lease, self._run_and_compare(client, stop, "the server"))
        except ApiError as error:  # for example of the lease bucket
            if (full := await room_error(client, error, self._request, self._request.name)) is None:
                raise
            raise full from error

    async def _run_and_compare(self, client: FloeClient, stop: Stop, server: str) -> ExactReport:
        restored = await self._restore.run(client, stop)
        differences = list[str]()
        for check in range(CONSUMER_CHECKS):
            if check:
                await self._clock.sleep(1.0)
            if not (differences := await read_differences(client, restored.plan)) or stop.is_set:
                break
        version = ".".join(map(str, client.server_version))
        return ExactReport(restored, f"{server}, nats-server {version}", tuple(differences))

    @asynccontextmanager
    async def _start_local_server(self, make: LocalServerMaker) -> AsyncIterator[NatsSettings]:
        """Start a server on loopback that only this process may use, and that ends with it."""
        folder, password = self._settings.spool_dir, secrets.token_urlsafe(24)
        with closing(Spool(Path(folder) if folder else None)) as spool:
            home = spool.new_folder()
            try:
                server = make(home, users={"floe": password}, max_payload=MAX_PAYLOAD_BYTES)
            except FileNotFoundError as error:
                raise ConfigError(str(error), hint=INSTALL_ALL, code="E-DRILL-SERVER") from error
            with closing(ThreadPool("drill", 1)) as threads, closing(server):
                self._progress.print(f"starting a nats-server in {home}")
                try:
                    await threads.run(server.start)
                except RuntimeError as error:
                    raise Unavailable(str(error), code="E-DRILL-SERVER") from error
                yield NatsSettings(url=(server.url,), user="floe", password=SecretStr(password))
