"""A centre of three servers with two ingress instances, each behind connections of its own that can break."""

import asyncio
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from common.nats.client import FloeClient, connect
from common.settings.service import NatsSettings
from common.settings.types import parse_duration
from infra.local.nats import NatsCluster
from infra.local.process import free_port
from tests.scenarios.processes import Service
from tests.support.proxies import TcpProxy

TARGET, PREFIX = "FLEET", "fleet"
LEASE_TTL = "3s"
LEASE_SECONDS = parse_duration(LEASE_TTL)
REPLICAS = 3
CREATE = {"replicas": REPLICAS, "storage": "file", "subjects": [f"{PREFIX}.>"]}

POLICY = {
    "engine": "local",
    "delete_grace": "1s",
    "allow_short_times": True,
    "levels": [
        {"from": 0, "to": 1, "min_age": "1s", "max_wait": "2s", "min_count": 2, "max_count": 5, "min_size": "1M"},
        {"from": 1, "to": 2, "min_age": "1s", "max_wait": "2s", "min_count": 2, "max_count": 4, "min_size": "1M"},
    ],
}


@dataclass(slots=True)
class Instance:
    """One ingress process. `proxies`: its connections, one for each server of the centre.

    `delay`: seconds that its lines hold each chunk back, so that something is under way when they break.
    """

    service: Service
    proxies: list[TcpProxy]
    monitor: str
    delay: float
    exits: Counter[int] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        return self.service.name

    def supervise(self) -> None:
        """Restart it after its end, as a supervisor does; each end by itself is counted."""
        if not self.service.runs():
            code = self.service.wait(1)
            if code != -signal.SIGKILL:
                self.exits[code] += 1
            self.service.start()

    def heal(self) -> None:
        """Restore its connections, with their delay."""
        for proxy in self.proxies:
            proxy.heal()
            proxy.delay = self.delay


@dataclass(slots=True)
class Centre:
    """The parts of a run. `config`: of an operator, with connections that nobody breaks."""

    folder: Path
    cluster: NatsCluster
    instances: list[Instance]
    config: Path

    @asynccontextmanager
    async def client(self, name: str = "test") -> AsyncIterator[FloeClient]:
        """Open a connection past the proxies, to any server that is up."""
        settings = NatsSettings(url=tuple(self.cluster.urls), connect_timeout=30)
        async with aclosing(await connect(settings, name=name)) as client:
            yield client

    def supervise(self) -> None:
        """Restart instances that ended by themselves."""
        for instance in self.instances:
            instance.supervise()

    async def heal(self) -> None:
        """Heal all: all servers run and agree, all connections are whole, all instances run."""
        for server in self.cluster.servers:
            server.resume()
            server.start(wait=False)
        for instance in self.instances:
            instance.heal()
        self.supervise()
        await asyncio.to_thread(self.cluster.wait_ready, 60)


@asynccontextmanager
async def centre(
    store: Mapping[str, Any], sites: Sequence[str], feeds: Sequence[str], delay: float, **target: Any
) -> AsyncIterator[Centre]:
    """Run a centre, with ingress not started yet; `target`: more keys of the target.

    If the block fails the logs stay, and a line names their folder.
    """
    folder = Path(tempfile.mkdtemp(prefix="floe-delivery-"))
    cluster = NatsCluster(REPLICAS, max_payload=2 * 1024 * 1024, advertise=False)
    instances: list[Instance] = []
    kept = False
    try:
        async with AsyncExitStack() as stack:
            await asyncio.to_thread(cluster.start)
            sources = [{"site": list(sites), "feed": list(feeds), "subject_prefix": PREFIX}]
            entry = {"stream": TARGET, "sources": sources, **target}
            for number in (1, 2):
                proxies = [await stack.enter_async_context(TcpProxy(s.port)) for s in cluster.servers]
                name, monitor = f"ingress-{number}", f"127.0.0.1:{free_port()}"
                config = write_config(folder, name, [proxy.url for proxy in proxies], monitor, store, entry)
                service = Service(folder, name, "ingress", "run", "-c", str(config))
                instances.append(Instance(service, proxies, monitor, delay))
                instances[-1].heal()
            config = write_config(folder, "operator", cluster.urls, "", store, entry)
            yield Centre(folder, cluster, instances, config)
    except BaseException:
        kept = True
        print(f"logs: {folder}\n" + "\n".join(instance.service.tail() for instance in instances))
        raise
    finally:
        for instance in instances:
            instance.service.kill()
        await asyncio.to_thread(cluster.close)
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


def write_config(
    folder: Path, name: str, urls: Sequence[str], monitor: str, store: Mapping[str, Any], entry: Mapping[str, Any]
) -> Path:
    """Write a configuration; those of all instances are the same but for their addresses."""
    path = folder / f"{name}.yaml"
    nats, times = {"url": list(urls), "connect_timeout": "3s"}, {"lease_ttl": LEASE_TTL, "poll_interval": "1s"}
    ingress = {"monitor": {"listen": monitor}, **times, "targets": [dict(entry)]}
    document = {"instance": name, "nats": nats, "store": dict(store), "ingress": ingress, "compaction": POLICY}
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    path.chmod(0o600)
    return path
