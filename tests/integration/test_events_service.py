"""The whole service listens: segments arrive by notifications alone, whatever becomes of some of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.chain import Chain
from common.jetstream.client import FloeClient, frame
from common.metrics import REGISTRY
from common.objects.open import open_objects
from common.segments.documents import ChainStore
from common.segments.keys import Layout
from common.segments.store import SegmentStore
from common.settings.root import StoreSettings
from tests.scenarios.processes import Service
from tests.support.basics import SharedS3, soon, unique
from tests.support.ingress import CHAIN, PREFIX, Archive, Centre, check_exact, count_in, rows_of
from tests.support.servers import CREDENTIALS, Notifying, SqsServer, notification
from tests.support.stores import FaultyStore
from tests.unit.test_notices import amazon, segment_key

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def sqs() -> Iterator[SqsServer]:
    with SqsServer() as server:
        yield server


class S3Archive(Archive):
    """An archive in a bucket. `quiet`: the same bucket without notifications."""

    def __init__(self, store: dict[str, Any], quiet: dict[str, Any] | None = None) -> None:
        self.folder = Path()
        self.counted = FaultyStore(open_objects(StoreSettings.model_validate(store)))
        self.objects = self.counted  # type: ignore[assignment]
        self.store = SegmentStore(self.objects, Layout(PREFIX))
        self.documents = ChainStore(self.objects, Layout(PREFIX))
        self.rows = {}
        self.quiet = None if quiet is None else S3Archive(quiet)
        if self.quiet is not None:
            self.quiet.rows = self.rows

    def looks(self) -> int:
        """How often segments of the chain were listed."""
        prefix = Layout(PREFIX).segments_prefix(CHAIN, 0)
        return sum(call == ("list", prefix) for call in list(self.counted.keys))

    async def is_left_alone(self) -> bool:
        """Whether nobody looks at the chain for a second: twenty times what lies between two looks."""
        before = self.looks()
        await asyncio.sleep(1)
        return self.looks() == before


class S3Centre(Centre):
    """Reads a bucket, and polls once an hour."""

    def __init__(self, folder: Path, archive: S3Archive, store: dict[str, Any], url: str, events: str) -> None:
        super().__init__(folder, archive, url)
        self._store, self._events = store, events

    def document(self, **ingress: Any) -> dict[str, Any]:
        document = super().document(**{"poll_interval": "1h", "events": self._events, **ingress})
        return {**document, "store": {**self._store, "prefix": PREFIX}}


def store_config(s3: SharedS3, bucket: str, endpoint_url: str) -> dict[str, Any]:
    return {
        "url": f"s3://{bucket}",
        "endpoint_url": endpoint_url,
        "access_key_id": s3.access_key,
        "secret_access_key": s3.secret_key,
    }


def counted(result: str) -> float:
    return REGISTRY.get_sample_value("floe_ingress_events_total", {"source": "nats", "result": result}) or 0


async def test_segments_arrive_by_notifications_alone_and_a_lost_one_by_the_next(
    s3: SharedS3, nats_url: str, client: FloeClient, tmp_path: Path
) -> None:
    bucket, subject = s3.new_bucket(), unique("minio")
    direct = store_config(s3, bucket, s3.endpoint_url)
    with Notifying(s3.endpoint_url, nats_url, subject) as notifying:
        archive = S3Archive(store_config(s3, bucket, notifying.url), direct)
        assert archive.quiet is not None
        archive.quiet.put(rows_of(1, 10))
        centre = S3Centre(tmp_path, archive, direct, nats_url, f"nats://{subject}")
        async with centre.running() as health:
            await centre.carried(client, 10)
            await soon(lambda: health.status()["parts"].get("events", {}).get("state") == "listening")

            before = counted("woke")
            await asyncio.to_thread(archive.put, rows_of(11, 20))
            await centre.carried(client, 20)
            # Both notifications, of the segment and of the tail, and the looks that they cause are over.
            await soon(lambda: counted("woke") >= before + 2)
            await soon(archive.is_left_alone)
            assert archive.looks() > 0

            # Lost: nobody looks, nothing arrives. Then a forged one: it makes ingress look, and all arrives.
            await asyncio.to_thread(archive.quiet.put, rows_of(21, 30))
            assert await archive.is_left_alone()
            assert await count_in(client, centre.target) == 20
            forged = json.dumps(notification(bucket, segment_key())).encode()
            before = counted("woke")
            for _ in range(100):
                client.send(frame(subject.encode(), forged))
                client.send(frame(subject.encode(), b"[" * 5000))
            check_exact(await centre.carried(client, 30), archive, centre.prefix)
            await soon(lambda: counted("woke") >= before + 100)
            assert counted("spoiled") >= 100

            # A chain that nobody has heard of.
            other = Chain("eu-west", "NODES")
            await asyncio.to_thread(archive.put, rows_of(1, 5, other), chain=other)
            check_exact(await centre.carried(client, 35), archive, centre.prefix)


async def test_a_service_that_listens_to_a_queue_carries_and_drains_at_once(
    s3: SharedS3, sqs: SqsServer, nats_url: str, client: FloeClient, tmp_path: Path
) -> None:
    bucket, name = s3.new_bucket(), sqs.new_queue()
    config = store_config(s3, bucket, s3.endpoint_url)
    archive = S3Archive(config)
    archive.put(rows_of(1, 10))
    centre = S3Centre(tmp_path, archive, config, nats_url, f"sqs://{name}")
    environment = {
        "AWS_ENDPOINT_URL_SQS": sqs.url,
        "AWS_ACCESS_KEY_ID": CREDENTIALS["aws_access_key_id"],
        "AWS_SECRET_ACCESS_KEY": CREDENTIALS["aws_secret_access_key"],
    }
    service = Service(tmp_path, "ingress", "ingress", "run", "-c", str(centre.write()), env=environment)
    service.start()
    try:
        await centre.carried(client, 10)
        ref = archive.put(rows_of(11, 20))
        await asyncio.to_thread(sqs.send, name, json.dumps({"Records": [amazon(ref.key, bucket=bucket)]}))
        check_exact(await centre.carried(client, 20), archive, centre.prefix)
        await soon(lambda: sqs.left_in(name) == 0)

        assert await asyncio.to_thread(service.drain, 15) == 0
    finally:
        service.kill()
