"""Work-queue and interest streams, which let go of what is archived: egress killed, paused and cut off."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from common.chain import Chain
from common.jetstream.api import consumer_info, consumer_names, stream_info
from common.open import load_settings, open_chains, open_store
from common.segments.segment import Message, Reason
from common.tasks import Stop
from infra.acked import AckedPublisher
from infra.oracle import Comparison, Trace, archive_holes, archived, compare, total
from tests.scenarios.faults import Outcome
from tests.scenarios.judge import Verdict
from tests.scenarios.load import client_of, make_stream
from tests.scenarios.processes import Service
from tests.scenarios.world import World
from tests.support.commands import floe
from tests.support.proxies import TcpProxy

SITE = "alpha"
STREAMS = {"JOBS": "workqueue", "NEWS": "interest"}
PARTITIONS = 2
INSTANCES = 3
# What is neither in the archive nor anybody else's: nothing of the kind may be found.
LOSSES = (Reason.GONE_BEFORE_READ, Reason.DELETED, Reason.LOST, Reason.UNATTRIBUTED)


class Ledger:
    """What was published: the streams do not hold it for long. One trace for each chain."""

    def __init__(self) -> None:
        self._messages: dict[Chain, list[Message]] = {}

    def note(self, chain: Chain, sequence: int, subject: bytes, payload: bytes) -> None:
        """One message that the server has stored."""
        self._messages.setdefault(chain, []).append(Message(sequence, 0, subject, None, payload))

    @property
    def chains(self) -> list[Chain]:
        return sorted(self._messages)

    @property
    def count(self) -> int:
        return sum(map(len, self._messages.values()))

    def trace(self, chain: Chain, found: Trace) -> Trace:
        """What the archive must hold; the server alone knows the times, so they are taken from `found`."""
        trace = Trace.of(sorted(self._messages[chain], key=lambda message: message.sequence))
        times = dict(zip(found.sequences, found.timestamps, strict=True))
        for place, sequence in enumerate(trace.sequences):
            trace.timestamps[place] = times.get(sequence, 0)
        return trace


async def retention(s3: Any, rng: random.Random, seconds: float, rate: int = 400) -> Outcome:
    """No message is lost, none is archived twice, and in the end all are acknowledged (must hold 4)."""
    ledger, faults = Ledger(), Counter[str]()
    with World(s3, SITE) as world:
        url, started = world.sites[SITE].url, time.monotonic()
        async with client_of(url) as client:
            for stream, kept in STREAMS.items():
                await make_stream(client, stream, f"{SITE}.{stream}", retention=kept)
        async with AsyncExitStack() as stack:
            proxies = [await stack.enter_async_context(TcpProxy(world.sites[SITE].port)) for _ in range(INSTANCES)]
            configs = [_config(world, proxy.url, number) for number, proxy in enumerate(proxies)]
            await _initialised(configs[0])
            services = [world.egress(config, f"egress-{n}") for n, config in enumerate(configs)]
            stop = Stop()
            load = asyncio.create_task(_publish(url, ledger, rng, rate, stop))
            until = time.monotonic() + seconds
            while time.monotonic() < until or ledger.count < rate:
                await asyncio.sleep(rng.uniform(0.2, 1.2))
                number = rng.randrange(INSTANCES)
                await _disturb(services[number], proxies[number], rng, faults)
            stop.set()
            await load
            await _acknowledged(world, url)
            for service in services:
                code = await asyncio.to_thread(service.drain)
                assert code == 0, f"{service.name} ended with {code} on SIGTERM\n{service.tail()}"
        verdict = _judge(configs[0], ledger)
        if not verdict.ok:
            world.print_tails()
        return Outcome(verdict, time.monotonic() - started, faults)


def _config(world: World, url: str, number: int) -> Path:
    feeds = [
        {"stream": stream, "partitions": {"count": PARTITIONS, "subject": f"{SITE}.{stream}.{{partition}}.>"}}
        for stream in STREAMS
    ]
    egress = {"monitor": {"listen": ""}, "lease_ttl": "2s", "defaults": {"segment": world.segment}, "feeds": feeds}
    document = {"site": SITE, "nats": {"url": url}, "store": world.store(), "egress": egress}
    return world.write(f"egress-{number}", document)


async def _initialised(config: Path) -> None:
    """`floe egress init`, twice: before anything is published, and where everything is there."""
    for result in ("made", "there"):
        done = await floe("egress", "init", "-c", str(config), "--json")
        assert done.code == 0, done
        assert {each["result"] for each in done.json()} == {result}, done


async def _disturb(service: Service, proxy: TcpProxy, rng: random.Random, faults: Counter[str]) -> None:
    kind = rng.choice(("SIGKILL", "SIGSTOP", "cut", "cut"))
    faults[kind] += 1
    if kind == "SIGKILL":
        await asyncio.to_thread(service.kill)
    elif kind == "SIGSTOP":
        service.send(signal.SIGSTOP)
        await asyncio.sleep(rng.uniform(0.1, 4.0))
        service.send(signal.SIGCONT)
    elif rng.random() < 0.5:
        proxy.cut()
    else:
        proxy.cut_after("up", rng.randrange(20_000))  # among acknowledgements, as like as not
    service.start()


async def _publish(url: str, ledger: Ledger, rng: random.Random, rate: int, stop: Stop) -> None:
    async with client_of(url, "load") as client:
        while not stop.is_set:
            for stream in STREAMS:
                await _publish_some(client, stream, ledger, rng, max(1, rate // 20))
            await asyncio.sleep(0.1)


async def _publish_some(client: Any, stream: str, ledger: Ledger, rng: random.Random, count: int) -> None:
    sent: list[tuple[Chain, bytes, bytes]] = []

    def stored(number: int, sequence: int) -> None:
        chain, subject, payload = sent[number]
        ledger.note(chain, sequence, subject, payload)

    async with AckedPublisher(client, on_stored=stored) as publisher:
        for _ in range(count):
            partition = rng.randrange(PARTITIONS)
            subject = f"{SITE}.{stream}.{partition}.n{rng.randrange(9)}".encode()
            sent.append((Chain(SITE, stream, 0, partition), subject, rng.randbytes(rng.randrange(600))))
            await publisher.publish(subject, sent[-1][2], None)
        done = await publisher.settle()
    assert done.stored == count, done.line()


async def _acknowledged(world: World, url: str, seconds: float = 60) -> None:
    """Wait until the streams are empty and no durable has anything pending."""
    deadline = time.monotonic() + seconds
    async with client_of(url) as client:
        while True:
            found = {stream: await _pending(client, stream) for stream in STREAMS}
            if not any(found.values()):
                return
            if time.monotonic() > deadline:
                world.print_tails()
                raise AssertionError(f"not acknowledged within {seconds} s: {found}")
            for service in world.services:
                service.start()
            await asyncio.sleep(0.3)


async def _pending(client: Any, stream: str) -> str:
    """What is not acknowledged, in words; empty where nothing is."""
    info = await stream_info(client, stream)
    assert info is not None
    found = [f"{info.messages} messages"] if info.messages else []
    for name in await consumer_names(client, stream):
        consumer = await consumer_info(client, stream, name)
        if consumer is not None and consumer.ack_pending + consumer.pending:
            found.append(f"{name}: {consumer.ack_pending} + {consumer.pending}")
    return ", ".join(found)


def _judge(config: Path, ledger: Ledger) -> Verdict:
    """Nothing is carried on here, so the target stands for the archive once more."""
    settings = load_settings(str(config))
    store, chains = open_store(settings), open_chains(settings)
    compared: list[Comparison] = []
    segments = 0
    for chain in ledger.chains:
        assert archive_holes(store, chain) == [], f"{chain}: holes {archive_holes(store, chain)}"
        refs = store.list(chain)
        for ref in refs:
            footer = store.footer(ref)
            assert footer.is_balanced(), ref.key
            lost = {reason: footer.ledger.counts.get(reason, 0) for reason in LOSSES}
            assert not any(lost.values()), f"{ref.key}: {lost}"
        assert chains.read_tail(chain) == max(ref.coverage.last for ref in refs)
        found = Trace.of(archived(store, chain))
        compared.append(compare(ledger.trace(chain, found), found, name=f"{chain} archive"))
        segments += len(refs)
    whole = total(compared)
    return Verdict(whole, whole, segments)
