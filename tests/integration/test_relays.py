"""Messages that pass several sites: each site leaves its hop, and no message returns."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from common.archive.documents import ChainDocument, StreamDocument
from common.archive.segment import Ledger, Message
from common.chain import Chain
from common.clock import NS_PER_S
from common.nats.api import create_stream, query, stored_message, stream_info
from common.nats.client import FloeClient
from common.nats.headers import Provenance, build_block, parse_provenances, split_provenance
from common.nats.kv import KeyValue
from common.sequences import SequenceRange
from infra.local.nats import NatsServer
from infra.oracle import archived_messages
from ingress.checkpoint import Checkpoint, Intent, IntentPiece, StateStore, TargetState
from tests.support.basics import soon, unique
from tests.support.egress import Bench, bench_of
from tests.support.headers import escape
from tests.support.ingress import Archive, Centre
from tests.support.segments import message

pytestmark = [pytest.mark.servers, pytest.mark.simulated]


class World:
    """One server and one bucket, with sites that run egress and ingress."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.client: FloeClient = bench.client

    @asynccontextmanager
    async def egress(self, site: str, *feeds: dict[str, Any]) -> AsyncIterator[None]:
        bench = replace(self.bench, lease_bucket=unique("L"), state_bucket=unique("S"))
        running = bench.start(bench.settings(*feeds).model_copy(update={"site": site}))
        try:
            yield
            await running.drain()
        finally:
            await running.crash()

    def centre(self, stream: str, *sources: dict[str, Any]) -> Centre:
        archive = Archive(self.bench.root / "bucket")
        create = {"subjects": [f"{stream}.>"]}
        return Centre(self.bench.root, archive, self.bench.url, stream=stream, create=create, sources=list(sources))

    async def holds(self, stream: str, count: int) -> list[Message]:
        """The messages of the stream, once it holds `count`."""

        async def enough() -> bool:
            info = await stream_info(self.client, stream)
            return info is not None and info.messages >= count

        await soon(enough)
        return await self.messages(stream)

    async def messages(self, stream: str) -> list[Message]:
        info = await stream_info(self.client, stream)
        return [
            stored_message(await query(self.client, f"STREAM.MSG.GET.{stream}", {"seq": sequence}))
            for sequence in range(info.first_sequence, info.last_sequence + 1)
        ]

    def rows(self, site: str, feed: str) -> list[Message]:
        return list(archived_messages(self.bench.store, Chain(site, feed)))

    def ledger(self, site: str, feed: str) -> dict[str, int]:
        store, total = self.bench.store, Ledger()
        for ref in store.list(Chain(site, feed)):
            total = total.plus(store.footer(ref).ledger)
        return total.to_json()


@pytest.fixture
async def world(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[World]:
    async with bench_of(nats_server.url, tmp_path) as bench:
        yield World(bench)


HEADERS = [
    None,
    build_block([b"A: 1", b"a:  2 ", b"A: 1"]),
    build_block([b"Nats-Msg-Id: %d", b"Nats-Schedule-Ttl: 1s"]),
    build_block([b"Floe-Source: region FLEET 0000 0 7 1700000000000000001"]),
    b"NATS/1.0\r\n\r\n",
]


async def test_a_tree_of_sampled_relays_brings_each_sender_once_in_the_period_of_each_level(world: World) -> None:
    """Five minutes, half an hour and an hour of a fleet, as one, six and twelve seconds."""
    (region_s, centre_s), senders = (6, 12), ("a", "b", "c")
    nodes, fleet, all_ = unique("NODES"), unique("FLEET"), unique("ALL")
    await world.bench.make_stream(nodes)

    def sampled(stream: str, period: int, **keys: Any) -> dict[str, Any]:
        return {"stream": stream, "inspect_field": "sender", "inspect_duration": f"{period}s", **keys}

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(world.egress("city", sampled(nodes, region_s)))
        region = world.centre(fleet, {"site": "city", "feed": nodes, "subject_prefix": fleet})
        await stack.enter_async_context(region.running())
        for number in range(26):
            for sender, block in zip(senders, HEADERS[number % 3 :], strict=False):
                row = json.dumps({"sender": sender, "n": number}).encode()
                await world.bench.publish(nodes, [row], headers=block and block.replace(b"%d", row))
            await asyncio.sleep(1)
            if number == 0:
                await world.holds(fleet, len(senders))
                await stack.enter_async_context(world.egress("region", sampled(fleet, centre_s, relay=True)))
                centre = world.centre(all_, {"site": "region", "feed": fleet, "subject_prefix": all_})
                await stack.enter_async_context(centre.running())
        published, *levels = [await world.holds(stream, len(senders)) for stream in (nodes, fleet, all_)]

    for read, found, period in zip((published, levels[0]), levels, (region_s, centre_s), strict=True):
        kept = {parse_provenances(each.headers)[0].sequence for each in found}
        for sender in senders:
            last = -inf
            for each in (each for each in read[: max(kept)] if json.loads(each.payload)["sender"] == sender):
                silent_s = each.timestamp_ns / NS_PER_S - last
                # A sender's own period is shorter by up to a tenth, so that senders do not come in step.
                assert silent_s > 0.89 * period if each.sequence in kept else silent_s < period
                last = each.timestamp_ns / NS_PER_S if each.sequence in kept else last
    for at_centre in levels[1]:
        newest, oldest = parse_provenances(at_centre.headers)
        original = published[oldest.sequence - 1]
        assert (newest.site, newest.feed) == ("region", fleet)
        assert oldest == Provenance("city", nodes, 0, 0, original.sequence, original.timestamp_ns)
        assert split_provenance(at_centre.headers)[1] == original.headers
        assert (at_centre.payload, at_centre.subject) == (original.payload, f"{all_}.{fleet}.{nodes}.a".encode())


@pytest.mark.parametrize("is_relay", [True, False], ids=["relays", "one of the two sampled"])
async def test_two_sites_that_copy_each_other_carry_each_message_once_or_round_once_without_relay(
    world: World, caplog: pytest.LogCaptureFixture, is_relay: bool
) -> None:
    """Either side copies everything that the other has, messages from here included."""
    streams = {"a": (unique("AT_A"), unique("ALL_A")), "b": (unique("AT_B"), unique("ALL_B"))}
    (ours, all_a), (theirs, all_b) = streams.values()
    copied = {"relay": True} if is_relay else {"inspect_field": "id", "inspect_duration": "1h"}

    async def publish(numbers: range) -> None:
        for site, (stream, _) in streams.items():
            await world.bench.publish(stream, (b'{"id": "%s%d"}' % (site.encode(), n) for n in numbers))

    for stream in (ours, theirs):
        await world.bench.make_stream(stream)
    await publish(range(10))
    async with AsyncExitStack() as stack:
        at_a = world.centre(all_a, {"site": "b", "feed": [theirs, all_b], "subject_prefix": all_a})
        for centre in (at_a, world.centre(all_b, {"site": "a", "feed": [ours, all_a], "subject_prefix": all_b})):
            await stack.enter_async_context(centre.running())
        for _, stream in streams.values():
            await soon(lambda: stream_info(world.client, stream))  # noqa: B023
        again = {"stream": all_a, "relay": True} if is_relay else {"stream": all_a}
        await stack.enter_async_context(world.egress("a", {"stream": ours}, again))
        await stack.enter_async_context(world.egress("b", {"stream": theirs}, {"stream": all_b, **copied}))
        # A message that loops again precedes the one published last, which loops too.
        for count in (10, 11):
            for site, (_, stream) in streams.items():
                await world.holds(stream, count * (2 if is_relay else 3))
                await soon(lambda: world.ledger(site, stream).get("looped") == count)  # noqa: B023
            if count == 10:
                await publish(range(10, 11))
        found = {site: await world.messages(stream) for site, (_, stream) in streams.items()}

    ids = [b'{"id": "%s%d"}' % (each.encode(), n) for each in streams for n in range(11)]
    for site, messages in found.items():
        back = [] if is_relay else [each for each in ids if each[8:9] != site.encode()]
        assert sorted(message.payload for message in messages) == sorted(ids + back)
    trails = {tuple(hop.site for hop in parse_provenances(message.headers)) for message in found["a"]}
    assert not is_relay or trails == {("b",), ("b", "a")}
    logged = [record.msg for record in caplog.records if "looped" in str(record.msg)]
    assert {each["feed"] for each in logged} == (set() if is_relay else {all_a, all_b})
    assert all("relay: true" in each["hint"] for each in logged)


async def test_only_rows_in_the_source_or_the_archive_are_left_out_as_looped(world: World) -> None:
    """A forged hop hides nothing but a copy of archived messages."""
    bench, nodes = world.bench, unique("NODES")
    await bench.make_stream(nodes)
    await bench.publish(nodes, [b"one", b"two", b"three", b"four", b"gone"])
    async with world.egress("city", {"stream": nodes}):
        await soon(lambda: len(world.rows("city", nodes)) == 5)
    originals = await world.messages(nodes)
    for sequence in (2, 5):
        await bench.client.api(f"STREAM.MSG.DELETE.{nodes}", {"seq": sequence})
    hop = {each.sequence: Provenance("city", nodes, 0, 0, each.sequence, each.timestamp_ns) for each in originals}
    back = Provenance("there", "ALL", 0, 0, 1, 1)
    replayed = build_block([hop[1].line(), b"Floe-Replay: 3f0c9a1be27d4455"])
    looped = [
        (b"one", escape(None, hop[1])),
        (b"one", escape(escape(None, hop[1]), back)),
        (b"two", escape(escape(None, hop[2]), back)),  # only the archive has it
        (b"three", escape(escape(escape(None, hop[3]), back), back)),
    ]
    kept = [
        (b"one", escape(None, hop[3])),
        (b"two", escape(None, hop[1])),
        (b"gone?", escape(None, hop[5])),
        (b"one", replayed),
        (b"one", escape(None, replace(hop[1], timestamp_ns=1))),
        (b"one", escape(None, replace(hop[1], incarnation=1))),
        (b"one", escape(None, replace(hop[1], sequence=99))),
        (b"gone", escape(None, replace(hop[5], partition=3))),  # of a chain that archived nothing
    ]
    for looped_one, kept_one in zip([*looped, *looped], kept, strict=True):
        for payload, block in (looped_one, kept_one):
            await bench.publish(nodes, [payload], headers=block)

    async with world.egress("city", {"stream": nodes}):
        await soon(lambda: len(world.rows("city", nodes)) == 5 + len(kept))

    assert [(row.payload, row.headers) for row in world.rows("city", nodes)[5:]] == kept
    assert world.ledger("city", nodes) == {"looped": 8}


async def test_hops_stay_if_another_process_finishes_an_intent(world: World) -> None:
    """A second publication must have the very same bytes: `chain.json` is read again."""
    archive, target = Archive(world.bench.root / "bucket"), unique("T")
    chain, origin = Chain("region", unique("FLEET")), Provenance("city", "NODES", 0, 0, 9, 9)
    archive.documents.create_stream(chain, StreamDocument({"name": chain.feed}, "t0", None))
    archive.documents.create_chain(chain, ChainDocument((), 1, 1, relay=True))
    block = escape(build_block([b"A: 1"]), origin)
    ref = archive.put([message(n, b"x", headers=block) for n in range(1, 6)], chain=chain)
    centre = world.centre(target, {"site": "region", "feed": chain.feed, "subject_prefix": target})
    await create_stream(world.client, {"name": target, "subjects": [f"{target}.>"], "allow_atomic": True})
    info = await stream_info(world.client, target)
    bucket = await KeyValue(world.client, centre.state_bucket).ensure()
    state = TargetState(Checkpoint(0, info.created), Intent(0, (IntentPiece(ref.segment, SequenceRange(1, 5), 5),)))
    assert await StateStore(bucket, target).save(state, 0)

    async with centre.running():
        found = await world.holds(target, 5)

    assert [[hop.site for hop in parse_provenances(each.headers)] for each in found] == [["region", "city"]] * 5
