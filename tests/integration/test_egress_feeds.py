"""Feeds from limits-retention streams, against a real server: what is archived, how it is accounted for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.egress_bench import Bench, connected
from tests.support import soon, unique


@pytest.fixture
async def bench(nats_url: str, tmp_path: Path) -> AsyncIterator[Bench]:
    client = await connected(nats_url)
    yield Bench(nats_url, tmp_path, client)
    await client.aclose()


async def test_every_message_is_archived_once_and_the_tail_and_mark_say_so(bench: Bench) -> None:
    stream = await bench.make_stream(unique("T"))
    await bench.publish(stream, (b"%d" % i for i in range(2_500)))
    async with bench.egress({"stream": stream, "segment": {"max_messages": 1_000}}) as running:
        await bench.archived_to(stream, 2_500)
        await soon(lambda: running.state(stream) == "reading")
    await bench.same(stream, stream)
    assert [len(ref.coverage) for ref in bench.refs(stream)] == [1_000, 1_000, 500]
    assert bench.chains.read_tail(bench.chain(stream)) == 2_500
    assert await bench.mark(stream) == 2_500
