"""A store that refuses conditions: claims decide who creates a document, and a copy begins once for all."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from common.archive.documents import ChainDocument, ChainStore
from common.nats.client import FloeClient
from common.nats.kv import BucketClaims, KeyValue
from ingress.chains.sources import FeedStart
from tests.support import proxies
from tests.support.basics import PATIENCE, SharedS3
from tests.support.egress import Bench
from tests.support.ingress import CHAIN, Archive, Centre, check_exact, rows_of
from tests.support.stores import FaultyStore, refusing_conditions


@dataclass(frozen=True)
class BehindProxy(SharedS3):
    """The shared server, through a proxy."""

    url: str = ""

    @property
    def endpoint_url(self) -> str:
        return self.url


@pytest.fixture
def bare(s3: SharedS3, nats_url: str, tmp_path: Path, client: FloeClient) -> Iterator[Bench]:
    """Egress of one site, over a server that refuses every condition."""
    with proxies.refusing_conditions(proxies.FaultProxy(s3.endpoint_url), 501) as proxy:
        yield Bench(nats_url, tmp_path, client, s3=BehindProxy(s3.server, proxy.url))


async def test_a_paused_writer_puts_what_another_claimed(bare: Bench) -> None:
    """Paused behind its check of the store: before its claim, and between claim and put."""
    state = await KeyValue(bare.client, bare.state_bucket).ensure()
    for number, verb in enumerate(("claim", "put")):
        reached, resumed = Event(), Event()

        def pausing(real: Any, *args: Any, reached: Event = reached, resumed: Event = resumed, **options: Any) -> Any:
            reached.set()
            assert resumed.wait(PATIENCE)
            return real(*args, **options)

        chain = bare.chain(f"F{number}")
        arbiter: Any = BucketClaims(state)
        slow_claims = FaultyStore(arbiter).on("claim", pausing) if verb == "claim" else arbiter
        objects = FaultyStore(bare.objects).on("put", pausing) if verb == "put" else bare.objects
        slow = ChainStore(objects, bare.chains.layout, slow_claims)
        first = asyncio.create_task(asyncio.to_thread(slow.create_chain, chain, ChainDocument((), 1, 5)))
        assert await asyncio.to_thread(reached.wait, PATIENCE)
        quick = ChainStore(bare.objects, bare.chains.layout, arbiter)
        second = await asyncio.to_thread(quick.create_chain, chain, ChainDocument((), 1, 6))
        resumed.set()
        assert await first == second == quick.read_chain(chain)
        assert second.first == (6 if verb == "claim" else 5)
    assert await KeyValue(bare.client, bare.state_bucket).keys("claims.") == []


async def test_a_claim_is_taken_again_if_the_answer_is_lost(bare: Bench) -> None:
    arbiter = BucketClaims(await KeyValue(bare.client, bare.state_bucket).ensure())
    claim, again = await asyncio.to_thread(lambda: [arbiter.claim("a key", body) for body in (b"mine", b"yours")])
    assert (claim, claim[0]) == (again, b"mine")
    await asyncio.to_thread(arbiter.settle, "a key", claim[1] + 1)  # another's
    assert len(await KeyValue(bare.client, bare.state_bucket).keys("claims.")) == 1
    await asyncio.to_thread(arbiter.settle, "a key", claim[1])
    assert await KeyValue(bare.client, bare.state_bucket).keys("claims.") == []


async def test_a_copy_begins_once_for_all_and_a_gap_is_passed_and_written_down(
    centre: Centre, client: FloeClient, archive: Archive
) -> None:
    for first in (1, 21):
        archive.put(rows_of(first, first + 9))
    archive.documents = ChainStore(refusing_conditions(archive.objects), archive.documents.layout)
    source = {"start_sequence": 8, "on_lost": "skip", "lost_segment_timeout": "1s"}
    centre.target_settings["sources"][0] |= source  # type: ignore[index]
    async with centre.running():
        await centre.carried(client, 13)
    raw = archive.objects.get(archive.documents.layout.start_document(centre.target, CHAIN.site, CHAIN.feed))
    assert FeedStart.from_json(raw).sequence == 8
    [gap] = archive.documents.skipped_gaps(centre.target, CHAIN)
    assert (str(gap.range), await KeyValue(client, centre.state_bucket).keys("claims.")) == ("11..20", [])
    archive.rows[CHAIN] = [*rows_of(8, 10), *rows_of(21, 30)]
    archive.put(rows_of(31, 40))
    async with centre.running():
        check_exact(await centre.carried(client, 23), archive, centre.prefix)
