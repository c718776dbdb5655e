"""Targets and states as faults leave them, made by hand, for the tests of what becomes of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from common.clock import SystemClock
from common.jetstream.api import create_consumer, create_stream, parse_ack, stream_info
from common.jetstream.client import FloeClient, frame
from common.jetstream.headers import Provenance, escape, restore
from common.segments.segment import Message, SegmentRef
from common.service.monitor import Health
from common.tasks import Stop
from ingress.checkpoint import Checkpoint, IntentPiece, TargetState, open_intent
from tests.ingress_world import CHAIN, Arrived, Centre, arrived
from tests.support import PATIENCE, soon


async def make(client: FloeClient, centre: Centre, **config: Any) -> str:
    """The target; its creation time."""
    subjects = [f"{centre.target}.>"]
    info = await create_stream(
        client, {"name": centre.target, "subjects": subjects, "allow_atomic": True, **config}
    )
    return info.created


async def store(client: FloeClient, centre: Centre, rows: Sequence[Message], **headers: Any) -> None:
    """Store rows in the target as ingress would."""
    for row in rows:
        where = Provenance(CHAIN.site, CHAIN.feed, 0, 0, row.sequence, row.timestamp_ns)
        subject = centre.prefix + row.subject
        await client.request_raw(subject, row.payload, escape(row.headers, where, **headers), timeout=5)


async def foreign(client: FloeClient, centre: Centre, block: bytes | None = None) -> None:
    """A message of somebody else, acknowledged."""
    await client.request_raw(f"{centre.target}.foreign".encode(), b"x", block, timeout=5)


async def left_open(
    client: FloeClient, centre: Centre, ref: SegmentRef, created: str, base: int = 0
) -> TargetState:
    """What a killed instance leaves: an intent over the whole segment, after `base`; returns the state."""
    positions = {CHAIN: ref.coverage.first} if base else {}
    state = TargetState(Checkpoint(base, created, positions))
    opened = open_intent(state, [IntentPiece(ref.segment, ref.coverage, len(ref.coverage))])
    assert await (await centre.state(client)).save(opened, 0) is not None
    return opened


async def change(client: FloeClient, centre: Centre, **fields: Any) -> None:
    """Change fields of the stored checkpoint, as a restored copy of the bucket would."""
    keeper = await centre.state(client)
    stored = await keeper.load()
    assert stored.state is not None
    state = replace(stored.state, checkpoint=replace(stored.state.checkpoint, **fields))
    assert await keeper.save(state, stored.revision) is not None


async def put_back(client: FloeClient, centre: Centre, state: TargetState) -> None:
    """Restore an old copy of the state."""
    keeper = await centre.state(client)
    assert await keeper.save(state, (await keeper.load()).revision) is not None


async def closed_at(client: FloeClient, centre: Centre, sequence: int) -> TargetState:
    """The state once it is closed at that target sequence."""

    async def closed() -> TargetState | None:
        state = (await (await centre.state(client)).load()).state
        is_there = state and not state.intent and state.checkpoint.target_sequence == sequence
        return state if is_there else None

    found = await soon(closed)
    assert found is not None
    return found


@asynccontextmanager
async def service(centre: Centre, **ingress: Any) -> AsyncIterator[Health]:
    """The service in this process, whatever it ends with."""
    health, stop = Health(SystemClock()), Stop()
    task = asyncio.create_task(centre.run(stop, health, **ingress))
    try:
        yield health
        assert not task.done(), task
    finally:
        stop.set()
        await asyncio.wait({task}, timeout=PATIENCE)
        if not task.cancelled():
            task.exception()


async def stop_of(centre: Centre, health: Health, seconds: float = PATIENCE) -> dict[str, Any]:
    """What /status says once the target waits for an operator: why, hint and code."""

    def found() -> dict[str, Any] | None:
        status = centre.status(health)
        return status if status.get("state") == "stopped" else None

    status = await soon(found, seconds)
    assert status is not None
    return status


def sequences(messages: Sequence[Arrived]) -> list[int]:
    """Which rows of the chain arrived, in the order in which they stand there."""
    return [each.message.sequence for each in messages if each.provenance and each.chain == CHAIN]


async def stands(client: FloeClient, centre: Centre, wanted: list[int], seconds: float = PATIENCE) -> None:
    """Wait until the rows of the chain in the target are exactly these, in this order."""

    async def found() -> list[int]:
        info = await stream_info(client, centre.target)
        held = info.messages if info else 0
        return sequences(await arrived(client, centre.target)) if held >= len(wanted) else []

    try:
        await soon(lambda: _equal(found, wanted), seconds, every=0.1)
    except AssertionError:
        assert await found() == wanted


async def _equal(found: Any, wanted: list[int]) -> bool:
    return await found() == wanted


@dataclass
class Consumer:
    """Consumes a work queue as it fills, and remembers what it saw."""

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
        provenance, _ = restore(headers)
        assert parse_ack(reply).stream == self.stream
        self.seen.append(provenance.sequence if provenance else 0)
        self.client.send(frame(reply, b"+ACK"))
