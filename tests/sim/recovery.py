"""An operator's work on an archive: `floe restore` after a disaster, `floe replay`, repeated until it is done."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.archive.documents import ChainStore
from common.archive.keys import Layout
from common.archive.store import SegmentStore
from common.clock import SystemClock
from common.errors import FloeError
from common.service.progress import Progress
from common.settings.root import Settings
from common.tasks import Stop
from ingress.recovery.plan import RestoreRequest
from ingress.recovery.replay import Replay
from ingress.recovery.request import RecoveryParts, ReplayOptions, ReplayRequest
from ingress.recovery.restore import Restore
from tests.sim import api
from tests.sim.actors import Member
from tests.sim.auditor import Broken, PublisherLog, SourceTap, TargetAuditor
from tests.sim.nats import SimNats
from tests.sim.store import SimObjects
from tests.sim.world import World

HAPPENS = 8.0, 30.0  # seconds
NOTICED = 1.0, 15.0  # seconds until the operator acts
AGAIN = 3.0  # seconds until the command is pasted again
WHOLE = "E-RESTORE-LOSSY"  # never the error for a complete archive


@dataclass(frozen=True)
class Archive:
    """The place of an archive, as a command finds it in its configuration."""

    settings: Settings
    objects: SimObjects
    folder: Path

    @contextmanager
    def opened(self) -> Iterator[tuple[SegmentStore, ChainStore]]:
        layout = Layout(self.settings.store.prefix)
        with closing(SegmentStore(self.objects, layout, spool_dir=self.folder)) as store:
            yield store, ChainStore(self.objects, layout)


def pasting(
    world: World, name: str, is_due: Callable[[], bool], paste: Callable[[Archive], Awaitable[None]], archive: Archive
) -> Member:
    """Return an operator that repeats a command while `is_due`."""

    async def main(_health: object) -> None:
        clock = SystemClock()
        while True:
            await clock.sleep(AGAIN)
            if is_due():
                await paste(archive)

    return Member(world, name, main)


class Disaster:
    """The loss and restore of a stream of `site`. `may_happen`: asked before; `is_over`: it is restored, and in use."""

    def __init__(self, nats: SimNats, tap: SourceTap, stream: str, site: str, may_happen: Callable[[], bool]) -> None:
        self._nats, self._tap, self._stream, self._site, self._may_happen = nats, tap, stream, site, may_happen
        self._rng, self._is_noticed, self.is_over, self.tries = nats.world.chance("disaster"), False, False, 0

    @property
    def world(self) -> World:
        return self._nats.world

    def begin(self) -> None:
        self.world.at(self._rng.uniform(*HAPPENS), self._happen)

    def _happen(self) -> None:
        if not (self._nats.is_up and self._stream in self._nats.streams and self._may_happen()):
            self.world.at(1.0, self._happen)
            return
        self.world.note("the stream is lost")
        self._tap.changed(self._nats.streams[self._stream].messages.values(), [], 0)
        api.answer(self._nats, ["STREAM", "DELETE", self._stream], {})
        self.world.at(self._rng.uniform(*NOTICED), lambda: setattr(self, "_is_noticed", True))

    def operator(self, settings: Settings, objects: SimObjects, folder: Path) -> Member:
        """Return an operator that repeats the command until the restore is complete."""

        archive = Archive(settings, objects, folder)
        return pasting(self.world, "restore", lambda: self._is_noticed and not self.is_over, self._restore, archive)

    async def _restore(self, archive: Archive) -> None:
        request = RestoreRequest(self._site, self._stream)
        self.tries += 1
        try:
            with archive.opened() as (store, documents):
                work = Restore(archive.settings, request, RecoveryParts(store, documents, SystemClock(), Progress()))
                async with work.open_connection() as client:
                    report = await work.run(client, Stop())
        except FloeError as error:
            self.world.note(f"restore: {error.code}")
            if error.code == WHOLE:
                raise Broken(f"the archive holds all, and the restore says: {error}") from error
            if error.code == "E-RESTORE-EXISTS" and self._is_back():
                self.is_over = True
            return
        if report.exit_code or not self._is_back():
            raise Broken("\n".join([f"restore ended with {report.exit_code}", *report.lines()]))
        self.is_over = True

    def _is_back(self) -> bool:
        """Return true if the stream has its own subjects: a killed restore may have been complete."""
        stream = self._nats.streams.get(self._stream)
        return stream is not None and stream.config["subjects"][0].startswith(self._stream)


class Replays:
    """A replay of the end of the archive of `stream` into another one. It begins once every partition has a segment.
    `archived`: by chain, the last sequence in a segment; `is_over`: the command has reported the end.
    """

    STREAM, PREFIX = "BACK", "b"

    def __init__(
        self, nats: SimNats, log: PublisherLog, stream: str, site: str, archived: Callable[[], dict[str, int]]
    ) -> None:
        self.world, self._log, self._stream, self._site, self._archived = nats.world, log, stream, site, archived
        self.target = TargetAuditor(log, f"{self.PREFIX}.".encode())
        nats.taps[self.STREAM] = self.target
        self._rng, self._range, self.is_over = nats.world.chance("replays"), range(0), False

    def begin(self, nats: SimNats, parts: int) -> None:
        """Choose the range, once there is something to replay."""
        ends = self._archived()
        if len(ends) < parts or max(ends.values()) < 2:
            self.world.at(1.0, lambda: self.begin(nats, parts))
            return
        flags = {"allow_atomic": True, "allow_batched": True} if self._rng.random() < 0.7 else {}
        config = {"name": self.STREAM, "subjects": [f"{self.PREFIX}.>"], **flags}
        api.answer(nats, ["STREAM", "CREATE", self.STREAM], config)
        last = min(ends.values())
        self._range = range(self._rng.randint(1, last), last + 1)

    def operator(self, settings: Settings, objects: SimObjects, folder: Path) -> Member:
        """Return an operator that repeats the command until the replay is finished."""

        archive = Archive(settings, objects, folder)
        return pasting(self.world, "replay", lambda: bool(self._range) and not self.is_over, self._replay, archive)

    async def _replay(self, archive: Archive) -> None:
        first, last = self._range[0], self._range[-1]
        request = ReplayRequest(
            self._site, self._stream, self.STREAM, from_sequence=first, to_sequence=last, prefix=self.PREFIX
        )
        try:
            with archive.opened() as (store, documents):
                parts = RecoveryParts(store, documents, SystemClock(), Progress())
                work = Replay(archive.settings, request, ReplayOptions(), parts)
                async with work.open_connection() as client:
                    self.is_over = (await work.run(client, Stop())).finished
        except FloeError as error:
            self.world.note(f"replay: {error.code}")

    def wrong(self) -> set[int]:
        """Return the numbers of missing messages of the range, and of foreign ones that arrived."""
        wanted = {
            each.number
            for each in self._log.all
            if each.sequence in self._range and each.chain.startswith("partition ")
        }
        return wanted ^ self.target.seen
