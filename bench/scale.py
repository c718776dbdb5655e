"""Benchmarks of many chains in one ingress, and of many feeds in one egress.

`scale.*`: 2,500 sites of 4 feeds flow into 20 targets, 10,000 chains, from an archive in a folder. One process of
ingress begins with a small segment a chain (`start`), rests (`idle`), delivers while one chain in a hundred gets a
segment each second (`moving`), is scraped and asked (`metrics`, `status`), is killed while a second one waits
(`takeover`), and starts again with nothing new (`restart`). `scale.1k.*`: the same with 1,000 chains; `scale.s3.*`: on
an S3 server, behind a proxy that holds back each 64 KiB for 12.5 ms each way. `python -m bench.scale [CHAINS…]`
measures fleets of these sizes, and draws the figures in docs/evidence/scale.json against the number of chains.

Processor time is that of the process of ingress, all threads included. Requests are calls of the store; a call that
lists more than 1,000 keys counts as its pages, as S3 charges it.

`scale.feeds.*`: one egress with 500 feeds of small streams.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path

import yaml
from uvloop import run

from bench.harness import Bench, BenchResult, connect_bench, memory_mb
from common.archive.documents import ChainDocument, ChainStore, StreamDocument
from common.archive.heartbeats import ChainHeartbeat, HeartbeatObject
from common.archive.segment import Message
from common.archive.store import LIST_PAGE_SEGMENTS, SegmentStore
from common.chain import Chain
from common.nats.api import create_stream, stream_info
from common.nats.client import FloeClient
from common.open import load_settings, open_chains, open_store
from infra.local.nats import NatsServer
from infra.local.process import free_port
from infra.local.s3 import SeaweedFS
from tests.scenarios.processes import Service
from tests.support.basics import SharedS3, soon
from tests.support.proxies import TcpProxy
from tests.support.segments import message, write_segment

FEEDS, TARGETS = ("A", "B", "C", "D"), 20
START_TIMEOUT_S, SETTLE_S, IDLE_S, MOVING_S = 1800, 30, 60, 60  # seconds
MOVING_SHARE = 0.01  # of the chains, each second
FEED_COUNT, FEED_MESSAGES = 500, 20
LINE_DELAY_S = 0.0125  # seconds, each way
USD_PER_LIST, USD_PER_GET, MONTH_S = 0.005 / 1000, 0.0004 / 1000, 30 * 86_400


def processor_seconds(pid: int) -> float:
    """Return the processor time that the process has taken so far, in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def write_config(folder: Path, nats_url: str, **sections: object) -> Path:
    """Write a configuration whose store is a folder in `folder`, unless it has another, and make that."""
    store, log = {"url": f"file://{folder}/store"}, {"level": "warning"}
    config = folder / "floe.yaml"
    config.touch(0o600)
    config.write_text(yaml.safe_dump({"nats": {"url": nats_url}, "store": store, "log": log, **sections}))
    (folder / "store").mkdir()
    return config


class ChainFleet:
    """An archive of `chains` chains in a folder, the site of each of which reports to be idle."""

    def __init__(self, folder: Path, chains: int, nats_url: str, s3: Mapping[str, str] | None = None) -> None:
        sites = [f"site-{number:05d}" for number in range(chains // len(FEEDS))]
        self.chains = [Chain(site, feed) for site in sites for feed in FEEDS]
        self.ends, self._sites, self.port = dict.fromkeys(self.chains, 0), sites, free_port()
        targets = [
            {
                "stream": f"T{n}",
                "create": {"replicas": 1, "storage": "file", "subjects": [f"t{n}.>"]},
                "sources": [{"site": part, "feed": [*FEEDS], "subject_prefix": f"t{n}"}],
            }
            for n in range(TARGETS)
            if (part := sites[n::TARGETS])
        ]
        self.targets = [target["stream"] for target in targets]
        ingress = {"monitor": {"listen": f"127.0.0.1:{self.port}"}, "targets": targets}
        self.config = write_config(folder, nats_url, ingress=ingress, **({"store": s3} if s3 else {}))
        settings = load_settings(str(self.config))
        self._documents: ChainStore = open_chains(settings)
        self._store: SegmentStore = open_store(settings)
        if s3:  # ingress reaches it by the line, this process without
            self.config.write_text(self.config.read_text().replace(s3["endpoint_url"], _open_line(s3["endpoint_url"])))

    def fill(self) -> None:
        """Archive one message of each chain, and a heartbeat of each site."""
        for chain in self.chains:
            self._documents.create_stream(chain, StreamDocument({"name": chain.feed}, "t0", None))
            self._documents.create_chain(chain, ChainDocument((), 1, 1))
            self.append(chain)
        for site in self._sites:
            self.beat(site)

    def append(self, chain: Chain) -> Message:
        """Archive one message more, with the time as its payload, and write the tail; return the message."""
        self.ends[chain] = end = self.ends[chain] + 1
        path, row = self._store.new_spool(), message(end, str(time.time()).encode(), subject=b"nodes.a")
        self._store.put(write_segment(path, [row], chain=chain))
        path.unlink()
        self._documents.write_tail(chain, end)
        return row

    def beat(self, site: str) -> None:
        """Write the heartbeat of a site, as its egress does every 30 seconds."""
        now = time.time()
        chains = [
            ChainHeartbeat("archiving", now, end=(end := self.ends[chain]), source_last=end, first=1, chain=chain)
            for chain in (Chain(site, feed) for feed in FEEDS)
        ]
        self._documents.write_heartbeat("egress", HeartbeatObject(site, "egress", now, tuple(chains)))

    async def live(self, seconds: float, rate: float) -> None:
        """Let `rate` chains grow each second, and all sites write their heartbeats."""
        began, grown, beats = time.monotonic(), 0.0, 0.0
        while (elapsed := time.monotonic() - began) < seconds:
            while grown < elapsed * rate:
                self.append(self.chains[int(grown * 7919) % len(self.chains)])  # a prime: all targets in turn
                grown += 1
                await asyncio.sleep(0)
            while beats < elapsed * len(self._sites) / 30:
                self.beat(self._sites[int(beats) % len(self._sites)])
                beats += 1
            await asyncio.sleep(0.02)

    def requests(self) -> dict[str, float]:
        """Return the calls of the store so far by kind, from the metrics of ingress; the size and time of a scrape."""
        began = time.perf_counter()
        text = urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=120).read().decode()
        found = {"seconds": time.perf_counter() - began, "mb": len(text) / 1e6}
        for line in text.splitlines():
            if line.startswith("floe_store_requests_total{"):
                kind = line.partition('op="')[2].partition('"')[0]
                found[kind] = found.get(kind, 0) + float(line.rpartition(" ")[2])
        return found


def _open_line(endpoint_url: str) -> str:
    """Open a slow line to an address, on an event loop of its own, and return the address of its other end."""
    loop, line = asyncio.new_event_loop(), TcpProxy(int(endpoint_url.rpartition(":")[2]))
    line.delay = LINE_DELAY_S
    threading.Thread(target=loop.run_forever, daemon=True).start()
    asyncio.run_coroutine_threadsafe(line.listen(), loop).result()
    return f"http://127.0.0.1:{line.port}"


class Arrivals:
    """The seconds from archiving each message to its arrival at a consumer of its target, since `clear`."""

    def __init__(self, client: FloeClient) -> None:
        self._client, self.seconds = client, list[float]()

    async def follow(self, targets: list[str]) -> None:
        for target in targets:
            inbox = self._client.new_inbox()
            await self._client.subscribe_raw(inbox, self._sink)
            config = {"deliver_subject": inbox, "ack_policy": "none", "deliver_policy": "new"}
            await self._client.api(f"CONSUMER.CREATE.{target}", {"stream_name": target, "config": config})

    def _sink(self, _subject: bytes, _reply: bytes, payload: bytes, _headers: bytes | None) -> None:
        self.seconds.append(time.time() - float(payload))

    def p99(self) -> float:
        return statistics.quantiles(self.seconds, n=100)[-1] if len(self.seconds) > 1 else 0.0


async def count_stored(client: FloeClient, targets: list[str]) -> int:
    infos = [await stream_info(client, target) for target in targets]
    return sum(info.messages for info in infos if info)


@cache
def measure_fleet(chains: int, *, on_s3: bool = False) -> dict[str, float]:
    """Return the figures of a fleet of `chains` chains, by name."""
    s3 = SeaweedFS() if on_s3 else nullcontext()
    with tempfile.TemporaryDirectory(prefix="floe-bench-") as folder, NatsServer() as nats, s3 as server:
        fleet = ChainFleet(Path(folder), chains, nats.url, SharedS3(server).store() if server else None)
        fleet.fill()
        return run(_measure_fleet(Path(folder), fleet, nats.url))


async def _measure_fleet(folder: Path, fleet: ChainFleet, url: str) -> dict[str, float]:
    client, count, found = await connect_bench(url), len(fleet.chains), dict[str, float]()
    arrivals = Arrivals(client)

    def start(name: str) -> Service:
        return Service(folder, name, "ingress", "run", "-c", str(fleet.config)).start()

    async def during(service: Service, work: Awaitable[None]) -> float:
        before = processor_seconds(service.pid)
        await work
        return processor_seconds(service.pid) - before

    async def delivered(service: Service) -> None:
        async def is_delivered() -> bool:
            assert service.runs(), service.tail()
            return await count_stored(client, fleet.targets) >= sum(fleet.ends.values())

        await soon(is_delivered, seconds=START_TIMEOUT_S, every=1.0)

    service = start("first")
    await delivered(service)
    found["start"] = processor_seconds(service.pid)
    found["start.requests"] = _sum(fleet.requests()) / count
    await fleet.live(SETTLE_S, 0)
    before = fleet.requests()
    found["idle"] = 100 * await during(service, fleet.live(IDLE_S, 0)) / IDLE_S
    used = {kind: at - before.get(kind, 0) for kind, at in fleet.requests().items()}
    # A poll lists all tails in one call.
    pages = used["list"] + (count / LIST_PAGE_SEGMENTS - 1) * IDLE_S / 10
    found["idle.list"], found["memory"] = pages / IDLE_S, memory_mb("VmRSS", service.pid)
    usd = (pages + used.get("put", 0)) * USD_PER_LIST + (used.get("get", 0) + used.get("head", 0)) * USD_PER_GET
    found["idle.usd"] = usd * MONTH_S / IDLE_S
    await arrivals.follow(fleet.targets)
    archived, before = sum(fleet.ends.values()), fleet.requests()
    found["moving"] = 100 * await during(service, fleet.live(MOVING_S, MOVING_SHARE * count)) / MOVING_S
    await delivered(service)
    moved = _sum(fleet.requests()) - _sum(before) - _sum(used)
    found["moving.requests"] = each = moved / (sum(fleet.ends.values()) - archived)
    found["moving.p99"] = arrivals.p99()
    scrape = fleet.requests()
    found["metrics.mb"], found["metrics.s"] = scrape["mb"], scrape["seconds"]
    began = time.perf_counter()
    words = [sys.executable, "-m", "floe", "status", "-c", str(fleet.config), "--json"]
    subprocess.run(words, stdout=subprocess.DEVNULL, check=False)
    found["status"] = time.perf_counter() - began
    fleet.config.write_text(fleet.config.read_text().replace(str(fleet.port), port := str(free_port())))
    fleet.port, second = int(port), start("second")
    await fleet.live(SETTLE_S, 0)
    arrivals.seconds.clear()
    before, archived = fleet.requests(), sum(fleet.ends.values())
    service.kill()
    await fleet.live(MOVING_S, MOVING_SHARE / 10 * count)
    await delivered(second)
    found["takeover.p99"] = arrivals.p99()
    of_messages = each * (sum(fleet.ends.values()) - archived)
    found["takeover.requests"] = (_sum(fleet.requests()) - _sum(before) - of_messages) / count
    second.kill()
    await asyncio.sleep(16)  # its leases have run out
    third = start("third")
    await fleet.live(MOVING_S, 0)
    found["restart"], found["restart.requests"] = processor_seconds(third.pid), _sum(fleet.requests()) / count
    third.kill()
    await client.aclose()
    return found


def _sum(requests: dict[str, float]) -> float:
    return sum(at for kind, at in requests.items() if kind not in ("mb", "seconds"))


def feeds_config(folder: Path, url: str, streams: list[str], port: int) -> Path:
    """Write the configuration of an egress that archives `streams`; its monitor listens on `port`."""
    feeds = [{"stream": stream, "segment": {"max_age": "5s"}} for stream in streams]
    egress = {"monitor": {"listen": f"127.0.0.1:{port}"}, "feeds": feeds}
    return write_config(folder, url, site="bench", egress=egress)


@cache
def measure_feeds() -> dict[str, float]:
    """Return the figures of one egress with `FEED_COUNT` feeds: seconds until ready, threads, MB, % of a core idle."""
    with tempfile.TemporaryDirectory(prefix="floe-bench-") as folder, NatsServer() as nats:
        return run(_measure_feeds(Path(folder), nats.url))


async def _measure_feeds(folder: Path, url: str) -> dict[str, float]:
    client, streams, port = await connect_bench(url), [f"S{n}" for n in range(FEED_COUNT)], free_port()
    for stream in streams:
        await create_stream(client, {"name": stream, "subjects": [f"{stream}.>"], "storage": "file"})
    config = feeds_config(folder, url, streams, port)
    began, service = time.monotonic(), Service(folder, "egress", "egress", "run", "-c", str(config)).start()

    def is_ready() -> bool:
        assert service.runs(), service.tail()
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5).status == 200
        except OSError:
            return False

    await soon(lambda: asyncio.to_thread(is_ready), seconds=START_TIMEOUT_S, every=0.5)
    found = {"ready": time.monotonic() - began}
    await asyncio.sleep(SETTLE_S)
    before = processor_seconds(service.pid)
    await asyncio.sleep(IDLE_S)
    found["idle"] = 100 * (processor_seconds(service.pid) - before) / IDLE_S
    threads = Path(f"/proc/{service.pid}/status").read_text().partition("Threads:")[2].split()[0]
    found["threads"], found["memory"] = float(threads), memory_mb("VmRSS", service.pid)
    service.kill()
    await client.aclose()
    return found


def _figure(measure: Callable[[], dict[str, float]], name: str) -> BenchResult:
    return BenchResult(round(measure()[name], 3))


FLEETS = {"scale": (10_000, False), "scale.1k": (1_000, False), "scale.s3": (1_000, True)}
FLEET_FIGURES = {
    "start": ("s", "<= 60"), "start.requests": ("a chain", "<= 5"),
    "idle": ("% of a core", "<= 5"), "idle.list": ("LIST/s", "<= 2"), "idle.usd": ("US$/month", "<= 50"),
    "memory": ("MB", "<= 450"),
    "moving": ("% of a core", "<= 50"), "moving.p99": ("s", "<= 22"), "moving.requests": ("a message", ""),
    "metrics.mb": ("MB", "<= 4.5"), "metrics.s": ("s", "<= 1.2"), "status": ("s", "<= 2"),
    "takeover.p99": ("s", "<= 35"), "takeover.requests": ("a chain", "<= 0.2"),
    "restart": ("s", "<= 20"), "restart.requests": ("a chain", "<= 0.2"),
}  # fmt: skip
FEED_FIGURES = {
    "ready": ("s", "<= 30"),
    "idle": ("% of a core", "<= 5"),
    "threads": ("", "<= 64"),
    "memory": ("MB", "<= 250"),
}
BENCHES = [
    *(
        Bench(f"{prefix}.{name}", *figure, partial(_figure, partial(measure_fleet, chains, on_s3=on_s3), name))
        for prefix, (chains, on_s3) in FLEETS.items()
        for name, figure in FLEET_FIGURES.items()
    ),
    *(
        Bench(f"scale.feeds.{name}", *figure, partial(_figure, measure_feeds, name))
        for name, figure in FEED_FIGURES.items()
    ),
]

EVIDENCE = Path(__file__).parents[1] / "docs" / "evidence" / "scale.json"
PLOT = """<g transform="translate({x},{y})"><text y="-9">{name}: {value:.3g} {unit}</text>
<path d="M0 0V70H150" fill="none" stroke="#999"/><polyline points="{points}" fill="none" stroke="#06c"/>
<text y="84">0</text><text x="150" y="84" text-anchor="end">{most:,} chains</text></g>
"""


def report(fleets: Mapping[int, Mapping[str, float]], plots: Path) -> None:
    """Write a plot of each figure against the chains as SVG, and print a table with the part of one chain in each.

    `fleets`: the figures, by number of chains.
    """
    drawn, counts = "", sorted(fleets)
    for number, (name, (unit, _)) in enumerate(FLEET_FIGURES.items()):
        values, (x, y) = [fleets[count][name] for count in counts], (number % 4 * 220 + 20, number // 4 * 125 + 30)
        heights = {count: 70 - 70 * fleets[count][name] / (max(values) or 1) for count in counts}
        points = " ".join(f"{count / counts[-1] * 150:.0f},{height:.0f}" for count, height in heights.items())
        drawn += PLOT.format(x=x, y=y, name=name, value=values[-1], unit=unit, points=points, most=counts[-1])
        each = (values[-1] - values[0]) / (counts[-1] - counts[0])
        print("|", " | ".join([f"`{name}`, {unit}", *(f"{value:.3g}" for value in values), f"{each:.1e}"]), "|")
    plots.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" width="860" height="500" font-size="11">{drawn}</svg>\n')


if __name__ == "__main__":
    measured = json.loads(EVIDENCE.read_text()) if EVIDENCE.exists() else {}
    measured |= {size: {k: round(v, 4) for k, v in measure_fleet(int(size)).items()} for size in sys.argv[1:]}
    EVIDENCE.write_text(json.dumps(measured, indent=1) + "\n")
    report({int(size): figures for size, figures in measured.items()}, EVIDENCE.parents[1] / "images" / "scale.svg")
