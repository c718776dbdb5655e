"""An archive made by hand and a centre that carries it, for the tests of ingress."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from common.archive.documents import ChainDocument, ChainStore, StreamDocument
from common.archive.keys import Layout, SegmentName
from common.archive.segment import Message, SegmentRef
from common.archive.store import SegmentStore
from common.chain import Chain
from common.clock import SystemClock
from common.errors import FloeError, OutcomeUnknown, Stopped, Unavailable
from common.nats.api import create_consumer, create_stream, query, stored_message, stream_info
from common.nats.client import FloeClient, frame
from common.nats.headers import Provenance, split_provenance
from common.nats.kv import KeyValue
from common.nats.protocol import ApiError
from common.objects.local import LocalObjects
from common.observe.monitor import Health
from common.sequences import SequenceRange
from common.settings.loader import load
from common.settings.root import Settings
from common.tasks import Stop
from ingress.checkpoint import Checkpoint, IntentPiece, StateStore, TargetState, open_intent
from ingress.service import Controller
from ingress.target import IngressTuning
from ingress.verdict.verdict import NoOrigin, Origin, TargetReading
from tests.support.basics import PATIENCE, parse_ack, soon, unique
from tests.support.headers import escape
from tests.support.segments import message, write_segment
from tests.support.servers import connected

CHAIN, OTHER = Chain("us-east", "NODES"), Chain("eu-west", "NODES")
PREFIX = "data"
QUICK = IngressTuning(confirm_interval_s=0.1, target_recheck_s=0.3, parked_check_interval_s=0.3, chain_recheck_s=1.0)


class Archive:
    """A store in a folder, with chains in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects = LocalObjects(folder)
        self.store = SegmentStore(self.objects, Layout(PREFIX))
        self.documents = ChainStore(self.objects, Layout(PREFIX))
        self.rows: dict[Chain, list[Message]] = {}

    def begin(self, chain: Chain = CHAIN, first: int = 1, previous: dict[int, int] | None = None) -> None:
        """Write the documents of a chain."""
        self.documents.create_stream(chain, StreamDocument({"name": chain.feed}, "t0", previous))
        self.documents.create_chain(chain, ChainDocument((), chain.partition + 1, first))

    def put(
        self,
        rows: Sequence[Message],
        coverage: SequenceRange | None = None,
        chain: Chain = CHAIN,
        *,
        tail: bool = True,
        **fields: Any,
    ) -> SegmentRef:
        """Put one segment, record its rows as expected in the target, and write the tail."""
        if self.documents.read_chain(chain) is None:
            self.begin(chain)
        path = self.store.new_spool()
        ref = self.store.put(write_segment(path, rows, coverage, chain=chain, **fields))
        path.unlink()
        if fields.get("level", 0) == 0:
            self.rows.setdefault(chain, []).extend(rows)
        if tail:
            self.documents.write_tail(chain, max(ref.coverage.last, self.documents.read_tail(chain) or 0))
        return ref


def rows_of(first: int, last: int, chain: Chain = CHAIN, size: int = 20) -> list[Message]:
    """Return messages of all sequences first..last, each with a payload of its own."""
    return [
        message(s, f"{chain}|{s}|".encode().ljust(size, b"x"), subject=b"nodes.%d" % (s % 7))
        for s in range(first, last + 1)
    ]


def piece(first: int, last: int, count: int | None = None, chain: Chain = CHAIN, digest: str = "0") -> IntentPiece:
    """Return a piece of a segment of 1 to 1000. Without `count`, each of its sequences has a message."""
    name = SegmentName(chain, 0, SequenceRange(1, 1000), digest * 16)
    return IntentPiece(name, SequenceRange(first, last), last - first + 1 if count is None else count)


def reading(last: int, tail: Origin | NoOrigin = NoOrigin.GONE, created: str = "t0", *, forgets: bool = True):
    """Return a reading of the target: its last sequence, and the origin of that message."""
    return TargetReading(last, created, tail, forgets)


@dataclass(frozen=True)
class Arrived:
    """One message of the target."""

    sequence: int
    subject: bytes
    provenance: Provenance | None
    message: Message

    @property
    def chain(self) -> Chain:
        assert self.provenance is not None
        return self.provenance.chain


async def arrived(client: FloeClient, stream: str) -> list[Arrived]:
    """Return all messages of the target."""
    info = await stream_info(client, stream)
    if info is None:
        return []
    gate = asyncio.Semaphore(64)

    async def read(sequence: int) -> Arrived | None:
        async with gate:
            return await _read(client, stream, sequence)

    sequences = range(info.first_sequence, info.last_sequence + 1)
    return [found for found in await asyncio.gather(*map(read, sequences)) if found]


async def _read(client: FloeClient, stream: str, sequence: int) -> Arrived | None:
    try:
        stored = stored_message(await query(client, f"STREAM.MSG.GET.{stream}", {"seq": sequence}, timeout=PATIENCE))
    except ApiError:
        return None
    provenance, headers = split_provenance(stored.headers)
    rest = stored.subject, headers, stored.payload
    origin = provenance and Message(provenance.sequence, provenance.timestamp_ns, *rest)
    return Arrived(sequence, stored.subject, provenance, origin or stored)


async def count_in(client: FloeClient, stream: str) -> int:
    """Return the number of messages in the target; 0 if it does not exist, or its state cannot be read now."""
    try:
        info = await stream_info(client, stream)
    except (Unavailable, OutcomeUnknown):
        return 0
    return 0 if info is None else info.messages


def check_exact(messages: Sequence[Arrived], archive: Archive, prefix: bytes = b"") -> None:
    """Check that each row is there once, in order within its chain, byte for byte."""
    for chain, rows in archive.rows.items():
        got = [each.message for each in messages if each.provenance and each.chain == chain]
        want = [
            Message(m.sequence, m.timestamp_ns, prefix + m.subject, m.headers, m.payload)
            for m in sorted(rows, key=lambda m: m.sequence)
        ]
        assert ([m.sequence for m in got], got) == ([m.sequence for m in want], want)
    assert len(messages) == sum(len(rows) for rows in archive.rows.values())


class Centre:
    """A configuration of ingress over an archive and a server, with one target."""

    def __init__(self, folder: Path, archive: Archive, url: str, **target: Any) -> None:
        self.folder, self.archive, self.url, self.urls = folder, archive, url, [url]
        self.target: str = target.pop("stream", None) or unique("FLEET")
        name = unique("b")
        self.lease_bucket, self.state_bucket = f"L_{name}", f"S_{name}"
        self.target_settings = {
            "stream": self.target,
            "create": {"subjects": [f"{self.target}.>"]},
            "sources": [{"site": ["us-east", "eu-west"], "feed": ["NODES"], "subject_prefix": self.target}],
            **target,
        }

    def having(self, **target: Any) -> Centre:
        """Return a copy with these keys of its target."""
        self.target_settings |= target
        return self

    def document(self, **ingress: Any) -> dict[str, Any]:
        """Return the configuration; `ingress` overrides keys of that section."""
        own = {"lease_bucket": self.lease_bucket, "state_bucket": self.state_bucket, "targets": [self.target_settings]}
        ingress = {"monitor": {"listen": ""}, "lease_ttl": "2s", "poll_interval": "1s", **own, **ingress}
        store = {"url": f"file://{self.archive.folder}", "prefix": PREFIX}
        return {"nats": {"url": self.urls}, "store": store, "ingress": ingress}

    def write(self, **ingress: Any) -> Path:
        """Write the configuration to a file; return its path."""
        path = self.folder / f"{unique('c')}.yaml"
        path.write_text(yaml.safe_dump(self.document(**ingress), sort_keys=False))
        path.chmod(0o600)
        return path

    def settings(self, **ingress: Any) -> Settings:
        """Return the configuration as it is loaded."""
        return load(str(self.write(**ingress)))

    @property
    def prefix(self) -> bytes:
        """The prefix of each subject in the target."""
        return f"{self.target}.".encode()

    @asynccontextmanager
    async def running(self, **ingress: Any) -> AsyncIterator[Health]:
        """Run the service in this process, and drain it at the end."""
        health, stop, task = self.started(**ingress)
        try:
            yield health
        finally:
            stop.set()
            await asyncio.wait_for(task, PATIENCE)

    def started(self, **ingress: Any) -> tuple[Health, Stop, asyncio.Task[None]]:
        """Start the service; return its health, its stop, and its task."""
        health, stop = Health(SystemClock()), Stop()
        return health, stop, asyncio.create_task(self.run(stop, health, **ingress))

    async def run(self, stop: Stop | None = None, health: Health | None = None, **ingress: Any) -> None:
        """Run the service until `stop`, or until it ends by itself."""
        store, clock = SegmentStore(self.archive.objects, Layout(PREFIX)), SystemClock()
        args = self.settings(**ingress), store, self.archive.documents, health or Health(clock), clock
        self.service = Controller(*args, tuning=QUICK)
        await self.service.run(stop or Stop())

    async def ending(self, **ingress: Any) -> FloeError:
        """Return the error that ends the service, or as Stopped the one that stops only the target."""
        health, stop, task = self.started(**ingress)
        try:
            await soon(lambda: task.done() or self.status(health).get("state") == "stopped")
            found = self.status(health)
        finally:
            stop.set()
            await asyncio.wait({task}, timeout=PATIENCE)
        if (raised := task.exception()) is not None:
            assert isinstance(raised, FloeError), raised
            return raised
        return Stopped(found["why"], hint=found["hint"], code=found["code"])

    def status(self, health: Health) -> dict[str, Any]:
        """Return the entry of the target in /status."""
        return dict(health.status()["parts"].get(f"target {self.target}", {}))

    async def state(self, client: FloeClient) -> StateStore:
        """Return the store of the target's state."""
        bucket = await KeyValue(client, self.state_bucket).ensure()
        return StateStore(bucket, self.target)

    async def carried(self, client: FloeClient, count: int, seconds: float = PATIENCE) -> list[Arrived]:
        """Return the messages of the target once it holds `count` of them."""

        async def enough() -> bool:
            return await count_in(client, self.target) >= count

        await soon(enough, seconds)
        return await arrived(client, self.target)


@asynccontextmanager
async def client_of(*urls: str, name: str = "test", **settings: Any) -> AsyncIterator[FloeClient]:
    """Open a connection of the test's own."""
    async with aclosing(await connected(urls, name, **settings)) as client:
        yield client


async def make(client: FloeClient, centre: Centre, **config: Any) -> str:
    """Create the target; return its creation time."""
    subjects = [f"{centre.target}.>"]
    info = await create_stream(client, {"name": centre.target, "subjects": subjects, "allow_atomic": True, **config})
    return info.created


async def update(client: FloeClient, centre: Centre, **config: Any) -> None:
    """Change the configuration of the target."""
    info = await stream_info(client, centre.target)
    assert info is not None
    await client.api(f"STREAM.UPDATE.{centre.target}", {**info.config, **config})


async def store(client: FloeClient, centre: Centre, rows: Sequence[Message], **headers: Any) -> None:
    """Store rows in the target as ingress would."""
    for row in rows:
        where = Provenance(CHAIN.site, CHAIN.feed, 0, 0, row.sequence, row.timestamp_ns)
        subject = centre.prefix + row.subject
        await client.request_raw(subject, row.payload, escape(row.headers, where, **headers), timeout=PATIENCE)


async def foreign(client: FloeClient, centre: Centre) -> None:
    """Publish a foreign message; wait for its acknowledgement."""
    await client.request_raw(f"{centre.target}.foreign".encode(), b"x", timeout=PATIENCE)


async def left_open(client: FloeClient, centre: Centre, ref: SegmentRef, created: str, base: int = 0) -> TargetState:
    """Leave an intent over the whole segment, after `base`, as a killed instance does; return the state."""
    state = TargetState(Checkpoint(base, created, {CHAIN: ref.coverage.first} if base else {}))
    opened = open_intent(state, [IntentPiece(ref.segment, ref.coverage, len(ref.coverage))])
    assert await (await centre.state(client)).save(opened, 0) is not None
    return opened


async def change(client: FloeClient, centre: Centre, **fields: Any) -> None:
    """Change fields of the stored checkpoint, as a restored copy of the bucket would."""
    states = await centre.state(client)
    stored = await states.load()
    assert stored.state is not None
    state = replace(stored.state, checkpoint=replace(stored.state.checkpoint, **fields))
    assert await states.save(state, stored.revision) is not None


async def put_back(client: FloeClient, centre: Centre, state: TargetState) -> None:
    """Restore an old copy of the state."""
    states = await centre.state(client)
    assert await states.save(state, (await states.load()).revision) is not None


async def closed_at(client: FloeClient, centre: Centre, sequence: int) -> TargetState:
    """Return the state once it is closed at that target sequence."""

    async def closed() -> TargetState | None:
        state = (await (await centre.state(client)).load()).state
        is_there = state and not state.intent and state.checkpoint.target_sequence == sequence
        return state if is_there else None

    found = await soon(closed)
    assert found is not None
    return found


@asynccontextmanager
async def service(centre: Centre, **ingress: Any) -> AsyncIterator[Health]:
    """Run the service in this process; its error at the end is ignored."""
    health, stop, task = centre.started(**ingress)
    try:
        yield health
        assert not task.done(), task
    finally:
        stop.set()
        await asyncio.wait({task}, timeout=PATIENCE)
        if not task.cancelled():
            task.exception()


async def stop_of(centre: Centre, health: Health) -> dict[str, Any]:
    """Return the entry of the target in /status once it waits for an operator: why, hint and code."""

    await soon(lambda: centre.status(health).get("state") == "stopped")
    return centre.status(health)


def sequences(messages: Sequence[Arrived]) -> list[int]:
    """Return the sequences of the chain's rows that arrived, in the order of the target."""
    return [each.message.sequence for each in messages if each.provenance and each.chain == CHAIN]


async def holds(client: FloeClient, centre: Centre, wanted: list[int]) -> None:
    """Wait until the rows of the chain in the target are exactly these, in this order."""

    async def found() -> list[int]:
        info = await stream_info(client, centre.target)
        held = info.messages if info else 0
        return sequences(await arrived(client, centre.target)) if held >= len(wanted) else []

    async def is_equal() -> bool:
        return await found() == wanted

    try:
        await soon(is_equal, every=0.1)
    except AssertionError:
        assert await found() == wanted


@dataclass
class Consumer:
    """A consumer that reads a work queue as it fills, and records the sequences."""

    client: FloeClient
    stream: str
    seen: list[int] = field(default_factory=list)

    async def start(self) -> None:
        """Consume from now on, for as long as the connection lasts."""
        inbox = self.client.new_inbox()
        await self.client.subscribe_raw(inbox, self._sink)
        await create_consumer(self.client, self.stream, {"durable_name": "C", "ack_policy": "explicit"})
        subject = self.client.api_subject(f"CONSUMER.MSG.NEXT.{self.stream}.C").encode()
        request = json.dumps({"batch": 1000, "expires": 60 * 10**9}).encode()
        self.client.send(frame(subject, request, None, inbox.encode()))

    def _sink(self, _subject: bytes, reply: bytes, _payload: bytes, headers: bytes | None) -> None:
        if not reply.startswith(b"$JS.ACK"):
            return
        provenance, _ = split_provenance(headers)
        assert parse_ack(reply).stream == self.stream
        self.seen.append(provenance.sequence if provenance else 0)
        self.client.send(frame(reply, b"+ACK"))
