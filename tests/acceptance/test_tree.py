"""City, region, centre: the configurations of the docs, with the region's processes killed in between."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from common.chain import Chain
from common.clock import SystemClock
from common.jetstream.api import ask, create_stream, stored_message, stream_info
from common.jetstream.client import FloeClient, frame
from common.jetstream.headers import build_block, hops, restore
from common.open import open_chains, open_store
from common.segments.segment import Ledger, Message
from common.service.monitor import Health
from common.settings.loader import load
from common.tasks import Stop
from egress.service import EgressService as Egress
from infra.local.nats import NatsServer
from ingress.service import Controller
from tests.scenarios.processes import Service
from tests.support.basics import PATIENCE, seeded, soon
from tests.support.egress import QUICK
from tests.support.ingress import client_of, count_in

pytestmark = [pytest.mark.servers, pytest.mark.soak]

DOCS = Path(__file__).parents[2] / "docs" / "ingress.md"
REGIONS = {"eu": ["lyon", "turin"], "us": ["austin", "boston"]}
CITIES = {city: region for region, cities in REGIONS.items() for city in cities}
WAVES, WAVE = 6, 50  # messages of each city
HEADERS = [
    None,
    build_block([b"A: 1", b"a:  2 ", b"A: 1"]),
    build_block([b"Nats-Msg-Id: %d", b"Nats-Schedule-Ttl: 1s"]),
    build_block([b"Floe-Source: eu REGION 0 0 7 1700000000000000001", b"Floe-Original: Nats-TTL: 1s"]),
]


class Tree:
    """The servers and the configurations of all levels, over one folder as the bucket."""

    def __init__(self, folder: Path, servers: dict[str, NatsServer]) -> None:
        self.folder, self.servers = folder, servers
        section = DOCS.read_text().partition("## Trees")[2].partition("\n## ")[0]
        self._city, self._region, self._central = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)

    def city(self, name: str) -> Path:
        return self._write(name, self._city.replace("lyon", name))

    def region(self, name: str) -> Path:
        text = self._region.replace("eu", name).replace("lyon, turin", ", ".join(REGIONS[name]))
        return self._write(name, text)

    def centre(self) -> Path:
        return self._write("centre", self._central)

    def below(self, city: str) -> Path:
        """A city that freezes its own stream, and what the centre sends down to it."""
        down = """
ingress:
  poll_interval: 10s
  targets:
    - stream: BACK
      create: {subjects: ["back.>"]}
      sources: [{site: centre, feed: FLEET, subject_prefix: back}]
"""
        text = self._city.replace("lyon", city).replace(
            "[{stream: NODES}]", "[{stream: NODES}, {stream: BACK, relay: true}]"
        )
        return self._write(city, text + down)

    def _write(self, name: str, text: str) -> Path:
        text = text.replace(f"nats://nats.{name}:4222", self.servers[name].url)
        text = text.replace("s3://floe", f"file://{self.folder / 'bucket'}").replace("10s", "1s")
        path = self.folder / f"{name}.yaml"
        path.touch(mode=0o600)
        path.write_text(
            re.sub(r"^(ingress|egress):$", r"\1:\n  monitor: {listen: ''}\n  lease_ttl: 2s", text, flags=re.M)
        )
        return path

    def ledger(self, chain: Chain) -> dict[str, int]:
        store, total = open_store(load(str(self.city("lyon")))), Ledger()
        for ref in store.list(chain):
            total = total.plus(store.footer(ref).ledger)
        return total.to_json()


@pytest.fixture
def tree(tmp_path: Path) -> Iterable[Tree]:
    servers = {name: NatsServer(tmp_path / f"nats-{name}") for name in (*CITIES, *REGIONS, "centre")}
    try:
        for server in servers.values():
            server.start()
        yield Tree(tmp_path, servers)
    finally:
        for server in servers.values():
            server.close()


@asynccontextmanager
async def egress(config: Path) -> AsyncIterator[None]:
    """Egress in this process, drained at the end."""
    stop, clock = Stop(), SystemClock()
    task = asyncio.create_task(Egress(load(str(config)), QUICK, clock, Health(clock), stop).run())
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(task, PATIENCE)


@asynccontextmanager
async def ingress(config: Path) -> AsyncIterator[None]:
    """Ingress in this process, drained at the end."""
    stop, clock, settings = Stop(), SystemClock(), load(str(config))
    controller = Controller(settings, open_store(settings), open_chains(settings), Health(clock), clock)
    task = asyncio.create_task(controller.run(stop))
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(task, PATIENCE)


async def published(client: FloeClient, city: str, wave: int) -> None:
    """One wave of a city's messages, stored in order."""
    for number in range(wave * WAVE, (wave + 1) * WAVE):
        block = HEADERS[number % len(HEADERS)]
        block = block and block.replace(b"%d", b"%d" % number)
        client.send(frame(b"nodes.%d" % (number % 3), f"{city} {number}".encode(), block))
    await soon(lambda: holds(client, "NODES", (wave + 1) * WAVE))


async def holds(client: FloeClient, stream: str, count: int) -> bool:
    return await count_in(client, stream) >= count


async def messages(client: FloeClient, stream: str) -> list[Message]:
    info = await stream_info(client, stream)
    assert info is not None
    read = (ask(client, f"STREAM.MSG.GET.{stream}", {"seq": n}) for n in range(1, info.last_sequence + 1))
    return [stored_message(answer) for answer in await asyncio.gather(*read)]


async def test_each_message_of_each_city_reaches_the_centre_once_and_in_order(tree: Tree) -> None:
    rng = seeded()
    processes = [
        Service(tree.folder, f"{role}-{region}", role, "run", "-c", str(tree.region(region)))
        for region in REGIONS
        for role in ("ingress", "egress")
    ]
    async with AsyncExitStack() as stack:
        clients = {}
        for name, server in tree.servers.items():
            clients[name] = await stack.enter_async_context(client_of(server.url))
        for city in CITIES:
            await create_stream(clients[city], {"name": "NODES", "subjects": ["nodes.>"]})
        try:
            for process in processes:
                process.start()
            await stack.enter_async_context(ingress(tree.centre()))
            below = tree.below("lyon")
            await stack.enter_async_context(ingress(below))
            for stream, where in (("FLEET", "centre"), ("BACK", "lyon")):
                await soon(lambda: stream_info(clients[where], stream))  # noqa: B023
            for config in (below, tree.centre(), *(tree.city(city) for city in CITIES if city != "lyon")):
                await stack.enter_async_context(egress(config))

            victims = [*processes, *processes]  # each is killed twice
            rng.shuffle(victims)
            for wave in range(WAVES):
                await asyncio.gather(*(published(clients[city], city, wave) for city in CITIES))
                for victim in victims[wave * len(victims) // WAVES : (wave + 1) * len(victims) // WAVES]:
                    await asyncio.sleep(rng.uniform(0.2, 1.0))
                    victim.kill()
                    victim.start()

            count = len(CITIES) * WAVES * WAVE
            await soon(lambda: holds(clients["centre"], "FLEET", count))
            await soon(lambda: holds(clients["lyon"], "BACK", count))
            back = Chain("lyon", "BACK")
            own, others = WAVES * WAVE, count - WAVES * WAVE
            await soon(lambda: tree.ledger(back).get("looped", 0) >= own)
            sources = {city: await messages(clients[city], "NODES") for city in CITIES}
            found = await messages(clients["centre"], "FLEET")
        except BaseException:
            print(*(process.tail() for process in processes), sep="\n")
            raise
        finally:
            for process in processes:
                process.kill()

    assert len(found) == count
    for city, region in CITIES.items():
        arrived = [each for each in found if hops(each.headers)[-1].site == city]
        check(arrived, sources[city], city, region)
    assert tree.ledger(back) == {"looped": own}
    rows = sum(open_store(load(str(below))).footer(ref).rows for ref in open_store(load(str(below))).list(back))
    assert rows == others


def check(arrived: list[Message], published: list[Message], city: str, region: str) -> None:
    """What arrived from a city is what it published, in its order, with both hops, escaped once."""
    assert [hops(each.headers)[-1].sequence for each in arrived] == [m.sequence for m in published]
    for each, original in zip(arrived, published, strict=True):
        newest, oldest = hops(each.headers)
        assert (newest.site, newest.feed) == (region, "REGION")
        assert (oldest.chain, oldest.timestamp_ns) == (Chain(city, "NODES"), original.timestamp_ns)
        assert each.subject == b"fleet.region." + region.encode() + b"." + original.subject
        assert each.payload == original.payload
        assert restore(each.headers)[1] == original.headers
        assert each.headers is not None
        ids = re.findall(rb"(?m)^.*Nats-Msg-Id.*$", each.headers)
        assert ids == [b"Floe-Original: Nats-Msg-Id: %d\r" % (original.sequence - 1)] * len(ids)
        assert len(ids) == (original.headers is not None and b"Nats-Msg-Id" in original.headers)
