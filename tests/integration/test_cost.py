"""The formula of costs (`docs/guides/`), compared with the requests that an S3 server gets in a day of hourly segments.

Only the requests of messages and segments are computed; the number of periodic requests is taken from the actual ones,
because the day is over in seconds.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.archive.captures import CaptureStore
from common.archive.keys import Layout
from common.nats.client import FloeClient
from common.objects.open import open_objects
from common.settings.root import Settings, StoreSettings
from compaction.run import Compaction, LocalRunner, Selection
from tests.integration.test_store_conditions import BehindProxy
from tests.support.basics import SharedS3, soon, unique
from tests.support.compaction import Archive as Merging
from tests.support.compaction import TestPolicy
from tests.support.cost import Requests, compaction, egress, ingress, with_tables
from tests.support.egress import QUICK, SITE, Bench
from tests.support.ingress import Archive, Centre, count_in
from tests.support.proxies import FaultProxy
from tests.support.stores import FaultyStore

SEGMENTS = 24


class FarArchive(Archive):
    """The archive of `bench`, through `proxy`. `asked`: the requests to its store."""

    def __init__(self, bench: Bench, proxy: FaultProxy, folder: Path) -> None:
        super().__init__(folder)
        self.objects: Any = opened(bench, proxy)
        self.store.objects = self.documents.objects = self.objects

    def asked(self, verb: str, key: str) -> int:
        return sum(1 for of, about in self.objects.keys if of == verb and key in about)


class HurriedCentre(Centre):
    """A centre that polls five times a second."""

    def settings(self, **more: Any) -> Settings:
        settings = super().settings(**more)
        return settings.model_copy(update={"ingress": settings.ingress.model_copy(update={"poll_interval": 0.2})})


def opened(bench: Bench, proxy: FaultProxy) -> FaultyStore:
    return FaultyStore(open_objects(StoreSettings.model_validate({**bench.store_config, "endpoint_url": proxy.url})))


def got(proxy: FaultProxy) -> Requests:
    """The requests that the server received through `proxy`."""
    return Requests.of(Counter(operation for operation, _ in proxy.calls))


def about(proxy: FaultProxy, operation: str, key: str) -> int:
    return sum(1 for of, asked in proxy.calls if of == operation and key in asked)


@pytest.fixture
def proxies(s3: SharedS3) -> Iterator[tuple[FaultProxy, FaultProxy, FaultProxy]]:
    with ExitStack() as stack:
        yield tuple(stack.enter_context(FaultProxy(s3.endpoint_url)) for _ in range(3))  # type: ignore[misc]


@pytest.mark.timing  # a request that is sent twice on a busy machine is one too many
async def test_a_day_takes_the_requests_of_the_formula(
    proxies: tuple[FaultProxy, FaultProxy, FaultProxy], s3: SharedS3, nats_url: str, tmp_path: Path, client: FloeClient
):
    at_egress, at_ingress, at_compaction = proxies
    bench = Bench(nats_url, tmp_path, client, s3=BehindProxy(s3.server, at_egress.url))
    stream = await bench.make_stream("COST")
    archive = FarArchive(bench, at_ingress, tmp_path / "far")
    sources = [{"site": SITE, "feed": stream}]
    centre = HurriedCentre(tmp_path, archive, nats_url, sources=sources, create={"subjects": [f"{stream}_FAR.>"]})
    sources[0]["subject_prefix"] = f"{stream}_FAR"
    tuning = replace(QUICK, intervals=replace(QUICK.intervals, check=0.05, consumers_capture=0.1))
    pushed = {"durable_name": "app", "name": "app", "deliver_subject": unique("APP"), "ack_policy": "none"}
    await client.subscribe_raw(pushed["deliver_subject"], lambda *_message: None)
    await client.api(f"CONSUMER.DURABLE.CREATE.{stream}.app", {"stream_name": stream, "config": pushed})
    captures = CaptureStore(Layout("data"), bench.objects)

    async def hour(number: int) -> None:
        """Close, put and carry a segment, and wait for a check of egress."""
        await bench.publish(stream, [b"x"] * 10)
        tip = f"{number * 10 + 10:020d}-"
        await soon(lambda: about(at_egress, "head", tip) == 2)

        async def is_there() -> bool:
            return await count_in(client, centre.target) == number * 10 + 10

        await soon(is_there)

    def egress_sent() -> Requests:
        checks = about(at_egress, "head", "stream.json") - SEGMENTS
        return egress(SEGMENTS, checks, captures=about(at_egress, "put", "/consumers/"))

    def ingress_sent() -> Requests:
        return ingress(
            SEGMENTS,
            polls=archive.asked("list", "/tails/"),
            parked=archive.asked("head", "/parked/"),
            sites=archive.asked("list", "/alive/"),
            lookups=archive.asked("list", "/_floe/site="),
            positions=archive.asked("put", "positions.json") + archive.asked("put", "tails.json"),
        )

    def is_captured(last: int) -> bool:
        found = captures.consumers(bench.chain(stream))
        return found is not None and found.consumers[0].delivered_stream == last

    feed = {"stream": stream, "capture_consumers": "1s", "segment": {"max_messages": 10, "max_age": "1h"}}
    async with bench.egress(feed, tuning=tuning), centre.running():
        for number in range(2):
            await hour(number)
        polls = archive.asked("list", "/tails/")
        await soon(lambda: archive.asked("list", "/tails/") > polls + 2)
        at_egress.clear()
        at_ingress.clear()
        archive.objects.keys.clear()
        for number in range(2, SEGMENTS + 2):
            await hour(number)
        # A request that is under way is counted in one place and not in the other.
        await soon(lambda: got(at_egress) == egress_sent())
        await soon(lambda: got(at_ingress) == ingress_sent())
        assert about(at_egress, "put", "/consumers/") > 0
        await soon(lambda: is_captured(SEGMENTS * 10 + 20))
        at_egress.clear()
        await soon(lambda: len(at_egress.calls) >= 10)
        assert {operation for operation, _ in at_egress.calls} == {"head", "get"}, "between segments only checks"

    merging = Merging(tmp_path / "merging", opened(bench, at_compaction))
    policy = TestPolicy(min_age=0, max_wait=-1, min_count=10, min_size=10**9, max_size=10**9)

    def run(grace: float) -> Requests:
        at_compaction.clear()
        Compaction(merging.store, [policy], grace, LocalRunner(merging.store)).run(Selection())
        return got(at_compaction)

    chain = bench.chain(stream)
    inputs = len(merging.listed(chain))
    probe = Requests(put=1)  # once in each process: tests if the server verifies checksums
    merged = run(3600)
    whole = compaction(1, 1, inputs, 1, existing=0.5, buried=1)  # its output is read once
    # Inputs go when the grace is over, and are not read then: the output has a message at each of their sequences.
    assert merged == whole + probe + Requests(get=-inputs - 2, delete=-inputs, head=-1)
    assert run(3600) == compaction(1, 1, 0, 0, existing=1, buried=1)
    assert run(0) == compaction(1, 1, 0, 0, existing=1, buried=1) + Requests(get=1, delete=inputs - 1, head=1)
    assert len(merging.listed(chain)) == 2, "the segment with the greatest end stays until there is a newer one"


def test_the_tables_of_the_page_follow_the_formula():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "retention-and-cost.md").read_text()
    assert with_tables(page) == page, "python -m tests.support.cost docs/guides/retention-and-cost.md"
