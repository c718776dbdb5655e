"""An archive, a server, and replays between them."""

from pathlib import Path
from typing import Any

from common.chain import Chain
from common.clock import SystemClock
from common.errors import FloeError
from common.nats.client import FloeClient
from common.service.progress import Progress
from common.tasks import Stop
from ingress.recovery.replay import Replay
from ingress.recovery.request import RecoveryParts, ReplayOptions, ReplayRequest, ReplayResult
from ingress.recovery.survey import ReplayPreview
from tests.support.basics import raises_code, unique
from tests.support.ingress import CHAIN, Archive, Centre, arrived, rows_of
from tests.support.servers import place

STEP_NS = 1_000_001  # between two messages of `rows_of`


class World:
    """An archive, a server, and replays between them."""

    def __init__(self, folder: Path, url: str, client: FloeClient) -> None:
        self.archive = Archive(folder / "store")
        self.centre = Centre(folder, self.archive, url)
        self.client = client
        self.target = unique("BACK")

    def fill(self, *ranges: tuple[int, int], chain: Chain = CHAIN, **fields: Any) -> None:
        for first, last in ranges:
            self.archive.put(rows_of(first, last, chain), chain=chain, **fields)

    async def make(self, *ranges: tuple[int, int], **config: Any) -> None:
        """Create the target, after segments of these ranges."""
        self.fill(*ranges)
        base = {"name": self.target, "subjects": [f"{self.target}.>"], "storage": "memory"}
        await place(self.client, {**base, "allow_atomic": True, "allow_batched": True, **config})

    def replay(self, options: ReplayOptions | None = None, **asked: Any) -> Replay:
        asked = {"site": "us-east", "feed": "NODES", "target": self.target, "prefix": self.target, **asked}
        settings = self.centre.settings()
        parts = RecoveryParts(self.archive.store, self.archive.documents, SystemClock(), Progress())
        return Replay(settings, ReplayRequest(**asked), options or ReplayOptions(), parts)

    async def run(self, options: ReplayOptions | None = None, **asked: Any) -> ReplayResult:
        work = self.replay(options, **asked)
        async with work.open_connection() as client:
            return await work.run(client, Stop())

    async def preview(self, **asked: Any) -> ReplayPreview:
        work = self.replay(**asked)
        async with work.open_connection() as client:
            return await work.preview(client)

    async def held(self) -> list[tuple[str, int]]:
        return [(str(each.chain), each.message.sequence) for each in await arrived(self.client, self.target)]

    async def sequences(self) -> list[int]:
        return [sequence for _, sequence in await self.held()]


async def refused(world: World, code: str, options: ReplayOptions | None = None, **asked: Any) -> FloeError:
    with raises_code(FloeError, code) as caught:
        await world.run(options, **asked)
    return caught.value
