"""A centre of one server with one ingress, and the judge of its target."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.chain import Chain
from common.jetstream.client import FloeClient
from infra.local.nats import NatsServer
from infra.oracle import Comparison, Trace, target_traces
from tests.scenarios.delivery_centre import PREFIX, TARGET, write_config
from tests.scenarios.load import client_of
from tests.scenarios.processes import Service
from tests.support.ingress import count_in
from tests.support.oracle import compare_target

CREATE = {"replicas": 1, "storage": "file", "subjects": [f"{PREFIX}.>"]}


@dataclass(slots=True)
class SingleCentre:
    """What a run works on: the ingress, and its configuration."""

    server: NatsServer
    ingress: Service
    config: Path

    def client(self) -> AbstractAsyncContextManager[FloeClient]:
        """A connection of the run's own."""
        return client_of(self.server.url)

    async def stored(self) -> int:
        """How many messages the target holds, which lets go of none; 0 while it does not exist."""
        async with self.client() as client:
            return await count_in(client, TARGET)

    async def arrived(self, count: int, seconds: float) -> bool:
        """Whether the target took so many messages within so many seconds."""
        deadline = time.monotonic() + seconds
        while (is_late := await self.stored() < count) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        return not is_late

    async def judge(self, expected: Mapping[Chain, Trace], seconds: float = 60) -> Comparison:
        """Wait until as much has arrived as is expected, and a little longer; then compare."""
        await self.arrived(sum(map(len, expected.values())), seconds)
        await asyncio.sleep(1.0)
        async with self.client() as client:
            target = await target_traces(client, TARGET)
        return compare_target(expected, target.traces, target.foreign)

    async def drain(self) -> None:
        """End ingress, which must end well."""
        code = await asyncio.to_thread(self.ingress.drain)
        assert code == 0, f"ingress ended with {code} on SIGTERM\n{self.ingress.tail()}"


@asynccontextmanager
async def single_centre(
    store: Mapping[str, Any], sites: Sequence[str], feeds: Sequence[str], **target: Any
) -> AsyncIterator[SingleCentre]:
    """A centre whose ingress is not started yet.

    Where the block fails the logs stay, and a line says where.
    """
    folder = Path(tempfile.mkdtemp(prefix="floe-centre-"))
    server = NatsServer(folder / "nats", name="central", max_payload=2 * 1024 * 1024)
    sources = [{"site": list(sites), "feed": list(feeds), "subject_prefix": PREFIX}]
    entry = {"stream": TARGET, "sources": sources, "create": CREATE, **target}
    config = write_config(folder, "ingress", [server.url], "", store, entry)
    ingress = Service(folder, "ingress", "ingress", "run", "-c", str(config))
    try:
        await asyncio.to_thread(server.start)
        yield SingleCentre(server, ingress, config)
    except BaseException:
        print(f"logs: {folder}\n{ingress.tail()}")
        raise
    finally:
        ingress.kill()
        server.close()
    shutil.rmtree(folder, ignore_errors=True)
