"""The runbook of a lost source: made again, replayed into, frozen again as the next incarnation."""

from __future__ import annotations

import pytest

from common.chain import Chain
from common.clock import SystemClock
from common.jetstream.headers import hops, restore
from common.segments.archive import read_cover
from common.segments.columns import messages
from common.segments.segment import Message
from common.sequences import SequenceRange
from common.service.progress import Teller
from common.tasks import Stop
from ingress.replay.replay import Replay
from ingress.replay.request import ReplayOptions, Request
from tests.support.basics import soon, unique
from tests.support.egress import SITE, Bench

pytestmark = [pytest.mark.servers, pytest.mark.simulated]


def rows(bench: Bench, chain: Chain) -> list[Message]:
    """What the archive holds of the chain."""
    refs = bench.store.list(chain)
    last = max((ref.coverage.last for ref in refs), default=0)
    if not last:
        return []
    problems: list[str] = []
    found = read_cover(bench.store, refs, SequenceRange(1, last), problems.append)
    kept = [m for batch in found for m in messages(batch)]
    assert problems == []
    return kept


@pytest.mark.parametrize("relay", [False, True])
async def test_a_lost_source_comes_back_and_is_frozen_again(bench: Bench, relay: bool) -> None:
    name = unique("NODES")
    feed = {"stream": name, "relay": relay}
    settings = bench.settings(feed)
    await bench.make_stream(name)
    await bench.publish(name, (b"%d" % n for n in range(300)))
    running = bench.start(settings)
    await soon(lambda: len(rows(bench, Chain(SITE, name))) == 300)
    await running.drain()
    before = rows(bench, Chain(SITE, name))

    await bench.client.api(f"STREAM.DELETE.{name}")
    request = Request(SITE, name, name, into_source=True)
    work = Replay(settings, request, ReplayOptions(create=True), bench.store, bench.chains, SystemClock(), Teller())
    async with work.connected() as client:
        result = await work.run(client, Stop())
    assert (result.finished, result.rows) == (True, 300)

    running = bench.start(settings)
    following = Chain(SITE, name, 1)
    try:
        await soon(lambda: len(rows(bench, following)) == 300)
    finally:
        await running.drain()
    for old, new in zip(before, rows(bench, following), strict=True):
        assert (new.subject, new.payload, new.sequence) == (old.subject, old.payload, old.sequence)
        assert hops(new.headers)[0].timestamp_ns == old.timestamp_ns
        assert restore(new.headers)[1] == old.headers
