"""Awkward messages against a real server: every kind is stored, and comes back byte for byte."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from common.jetstream.api import create_stream
from common.jetstream.client import FloeClient, connect
from common.jetstream.headers import Provenance
from common.segments.segment import Message
from common.settings.service import NatsSettings
from infra.acked import AckedPublisher
from infra.awkward import KINDS, MAX_HEADERS, NEEDS, awkward_messages, publish_awkward
from infra.awkward import delete as delete
from infra.oracle import compare, read_stream, source_trace, target_traces
from tests.support.basics import seeded, unique
from tests.support.headers import escape

pytestmark = pytest.mark.servers

FEATURES: dict[str, Any] = dict.fromkeys(NEEDS.values(), True)
WINDOW = {"duplicate_window": 200_000_000}  # nanoseconds


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[FloeClient]:
    async with aclosing(await connect(NatsSettings(url=(nats_url,)), name="test_awkward")) as client:
        yield client


async def make_stream(client: FloeClient, **config: Any) -> tuple[str, str]:
    """A stream and the subject that it takes all below of."""
    stream = unique("AWKWARD")
    root = stream.lower()
    await create_stream(client, {"name": stream, "subjects": [f"{root}.>"], "storage": "file", **WINDOW, **config})
    return stream, root


async def test_a_message_that_a_limit_has_taken_is_not_counted_as_deleted(client: FloeClient) -> None:
    """The server says so in two ways: below its first sequence, and between others."""
    for storage in ("file", "memory"):
        stream, root = await make_stream(client, max_msgs_per_subject=1, storage=storage)
        async with AckedPublisher(client) as publisher:
            for subject in ("a", "b", "c", "c", "d", "a"):
                await publisher.publish(f"{root}.{subject}".encode(), b"x", None)
            await publisher.settle()
        assert [await delete(client, stream, sequence) for sequence in range(1, 7)] == [
            False, True, False, True, True, True
        ]  # fmt: skip
        assert not await delete(client, stream, 4)


async def test_every_kind_is_stored_and_comes_back_from_a_target_byte_for_byte_and_acts_on_nothing(
    client: FloeClient,
) -> None:
    """The headers of `common.jetstream.headers` alone, without segments between."""
    stream, root = await make_stream(client, **FEATURES)
    report = await publish_awkward(client, stream, root, seeded(), 2 * len(KINDS), deleted_share=0)
    assert (set(report.stored), report.published.refused, report.published.unknown) == (set(KINDS), {}, 0)
    target, prefix = await make_stream(client, **FEATURES)

    mapped = f"{prefix}.".encode()
    source = await source_trace(client, stream, lambda subject: mapped + subject)
    left_out = await copy(client, stream, mapped)
    arrived = await target_traces(client, target)

    (trace,) = arrived.traces.values()
    result = compare(source, trace)
    assert arrived.foreign == 0
    assert (result.lost, result.repeated, result.out_of_order, result.altered) == (left_out, 0, 0, 0), result.report()


async def copy(client: FloeClient, stream: str, mapped: bytes) -> int:
    """Carry the stream as ingress would; how many became too large for a target with the same limits."""
    messages: list[Message] = []
    await read_stream(client, stream, messages.append)
    left_out = 0
    async with AckedPublisher(client) as publisher:
        for one in messages:
            provenance = Provenance("site", stream, 0, 0, one.sequence, one.timestamp_ns)
            headers = escape(one.headers, provenance)
            if len(headers) > MAX_HEADERS or len(headers) + len(one.payload) > client.max_payload:
                left_out += 1
                continue
            await publisher.publish(mapped + one.subject, one.payload, headers)
        published = await publisher.settle()
    assert published.stored == len(messages) - left_out, published.line()
    return left_out


# The fleet emulator


def test_the_same_seed_makes_the_same_messages() -> None:
    made = [
        list(awkward_messages(random.Random(n), root="r", stream="S", count=200, max_payload=2048, config=FEATURES))
        for n in (3, 3, 4)
    ]
    assert made[0] == made[1] != made[2]
