"""A centre of one server, with as many ingress instances as wanted, and the judge of its target."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.chain import Chain
from common.jetstream.api import stream_info
from common.jetstream.client import FloeClient
from infra.local.nats import NatsServer
from infra.local.process import free_port
from infra.oracle import Comparison, Trace, target_traces
from tests.scenarios.delivery_centre import PREFIX, TARGET, Instance, write_config
from tests.scenarios.load import client_of
from tests.scenarios.processes import Service
from tests.support.oracle import compare_target

CREATE = {"replicas": 1, "storage": "file", "subjects": [f"{PREFIX}.>"]}


@dataclass(slots=True)
class SingleCentre:
    """What a run works on. `config`: of an operator."""

    folder: Path
    server: NatsServer
    instances: list[Instance]
    config: Path

    async def stored(self) -> int:
        """How many messages the target ever took; 0 while it does not exist."""
        async with self.client() as client:
            info = await stream_info(client, TARGET)
            return info.last_sequence if info else 0

    @asynccontextmanager
    async def client(self) -> AsyncIterator[FloeClient]:
        """A connection of the run's own."""
        async with client_of(self.server.url) as client:
            yield client

    async def arrived(self, count: int, seconds: float) -> bool:
        """Whether the target took so many messages within so many seconds."""
        deadline = time.monotonic() + seconds
        async with self.client() as client:
            while time.monotonic() < deadline:
                info = await stream_info(client, TARGET)
                if info is not None and info.last_sequence >= count:
                    return True
                await asyncio.sleep(0.2)
        return False

    async def judge(self, expected: Mapping[Chain, Trace], seconds: float = 60) -> Comparison:
        """Wait until as much has arrived as is expected, and a little longer; then compare."""
        await self.arrived(sum(map(len, expected.values())), seconds)
        await asyncio.sleep(1.0)
        async with self.client() as client:
            target = await target_traces(client, TARGET)
        return compare_target(expected, target.traces, target.foreign)

    async def drain(self) -> None:
        """End all instances; each must end well."""
        for instance in self.instances:
            code = await asyncio.to_thread(instance.service.drain)
            assert code == 0, f"{instance.name} ended with {code} on SIGTERM\n{instance.service.tail()}"


@asynccontextmanager
async def single_centre(
    store: Mapping[str, Any], sites: Sequence[str], feeds: Sequence[str], instances: int = 1, **target: Any
) -> AsyncIterator[SingleCentre]:
    """A centre whose ingress is not started yet.

    Where the block fails the logs stay, and a line says where.
    """
    folder = Path(tempfile.mkdtemp(prefix="floe-centre-"))
    server = NatsServer(folder / "nats", name="central", max_payload=2 * 1024 * 1024)
    sources = [{"site": list(sites), "feed": list(feeds), "subject_prefix": PREFIX}]
    entry = {"stream": TARGET, "sources": sources, "create": CREATE, **target}
    found: list[Instance] = []
    for number in range(1, instances + 1):
        monitor = f"127.0.0.1:{free_port()}"
        config = write_config(folder, f"ingress-{number}", [server.url], monitor, store, entry)
        service = Service(folder, f"ingress-{number}", "ingress", "run", "-c", str(config))
        found.append(Instance(service, [], monitor))
    operator = write_config(folder, "operator", [server.url], "", store, entry)
    kept = False
    try:
        await asyncio.to_thread(server.start)
        yield SingleCentre(folder, server, found, operator)
    except BaseException:
        kept = True
        print(f"logs: {folder}\n" + "\n".join(instance.service.tail() for instance in found))
        raise
    finally:
        for instance in found:
            instance.service.kill()
        server.close()
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
