"""Former hops stay hops only where `chain.json` says that the stream was written by Floe."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.chain import Chain
from common.errors import DataError, Unavailable
from common.jetstream.headers import Provenance, hops, restore
from common.objects.local import LocalObjects
from common.segments.documents import ChainDocument, ChainStore
from common.segments.keys import Layout
from common.service.process import Threads
from ingress.rows.decoder import Relays
from ingress.rows.prepare import Accepting, Preparer, SubjectRule, TargetLimits
from tests.support.headers import escape
from tests.support.segments import batch_of, message

CITY, REGION = Chain("city", "NODES"), Chain("region", "FLEET", 0, 1)
ORIGIN = Provenance("city", "NODES", 0, 0, 41, 1_700_000_000_000_000_001)
PUBLISHED = b"NATS/1.0\r\nA: 1\r\nNats-Rollup: all\r\n\r\n"


def carried(block: bytes | None, *, relay: bool, control: frozenset[bytes] = frozenset()) -> bytes:
    """The header block at the target, of a message with the header block `block` at the source."""
    preparer = Preparer(REGION, SubjectRule(), TargetLimits(Accepting([">"]), 1 << 20), acting=control)
    preparer.relay = relay
    batch = preparer.prepare(batch_of([message(7, headers=block)])).batch
    assert batch is not None
    [(_, tail, _)] = batch.messages(0, 1)
    return b"NATS/1.0\r\n" + tail


def test_the_newest_hop_stands_first_a_third_adds_one_line_and_what_was_published_comes_back() -> None:
    found = carried(escape(PUBLISHED, ORIGIN, first_lines=(b"Nats-Expected-Last-Sequence: 5",)), relay=True)
    assert [(hop.site, hop.sequence) for hop in hops(found)] == [("region", 7), ("city", 41)]
    assert restore(found)[1] == PUBLISHED
    assert b"Nats-Expected" not in found
    assert b"\r\nNats-Rollup" not in found

    twice = carried(carried(escape(PUBLISHED, ORIGIN), relay=True), relay=True)
    assert [hop.site for hop in hops(twice)] == ["region", "region", "city"]
    assert restore(twice)[1] == PUBLISHED


@pytest.mark.parametrize(
    ("block", "relay"), [(b"NATS/1.0\r\n" + ORIGIN.line() + b"\r\nA: 1\r\n\r\n", False), (PUBLISHED, True)]
)
def test_a_forged_hop_on_a_stream_that_is_no_relay_and_what_others_published_into_one_is_text(
    block: bytes, relay: bool
) -> None:
    found = carried(block, relay=relay)
    assert [hop.site for hop in hops(found)] == ["region"]
    assert restore(found)[1] == block


def test_control_headers_that_acted_at_the_first_hop_act_at_the_second() -> None:
    control = frozenset([b"nats-ttl"])
    first = escape(b"NATS/1.0\r\nNats-TTL: 5m\r\n\r\n", ORIGIN, control)

    assert b"\r\nNats-TTL: 5m\r\n" in carried(first, relay=True, control=control)
    assert b"\r\nFloe-Original: Nats-TTL: 5m\r\n" in carried(first, relay=True)


@pytest.fixture
def documents(tmp_path: Path) -> ChainStore:
    return ChainStore(LocalObjects(tmp_path), Layout("data"))


@pytest.mark.parametrize("relay", [True, False])
async def test_the_document_says_it_and_is_read_once(documents: ChainStore, relay: bool, tmp_path: Path) -> None:
    documents.create_chain(CITY, ChainDocument((), 1, 1, relay=relay))
    threads = Threads("test", 1)
    relays = Relays(documents, threads)

    assert await asyncio.gather(relays.of(CITY), relays.of(CITY)) == [relay, relay]
    for path in tmp_path.rglob("chain.json"):
        path.unlink()
    assert await relays.of(CITY) is relay
    threads.close()


async def test_without_a_good_document_nothing_is_guessed(documents: ChainStore) -> None:
    threads = Threads("test", 1)

    with pytest.raises(Unavailable):
        await Relays(documents, threads).of(CITY)
    documents.objects.put(documents.layout.chain_document(CITY), b"{}")
    with pytest.raises(DataError):
        await Relays(documents, threads).of(CITY)
    threads.close()
