"""MinIO itself notifies ingress of each segment: its bucket notifications through core NATS, without JetStream."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from common.errors import Unavailable
from common.nats.client import FloeClient
from common.objects.open import open_objects
from common.settings.root import StoreSettings
from infra.demo.world import PROJECT_FOLDER
from infra.local.s3 import MinIO, find_minio
from tests.integration.test_events import S3Archive, S3Centre, store_config
from tests.support import canaries
from tests.support.basics import PATIENCE, SharedS3, metric_value, soon, unique
from tests.support.ingress import PREFIX, check_exact, client_of, rows_of

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(find_minio() is None, reason="no minio: on the PATH, in FLOE_MINIO, or by `make minio`"),
]

ARN = "arn:minio:sqs::FLOE:nats"


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[FloeClient]:
    async with client_of(nats_url) as found:
        yield found


@pytest.fixture(scope="module")
def subject() -> str:
    return unique("minio")


@pytest.fixture(scope="module")
def notifying(nats_url: str, subject: str) -> Iterator[SharedS3]:
    """A MinIO that publishes to the server of ingress, as docs/guides/deploy-centre.md configures it."""
    environment = {
        "MINIO_NOTIFY_NATS_ENABLE_FLOE": "on",
        "MINIO_NOTIFY_NATS_ADDRESS_FLOE": urlsplit(nats_url).netloc,
        "MINIO_NOTIFY_NATS_SUBJECT_FLOE": subject,
        "MINIO_NOTIFY_NATS_JETSTREAM_FLOE": "off",
    }
    with MinIO(environment=environment) as server:
        canaries.note(server.secret_key)
        yield SharedS3(server)


def notify(s3: SharedS3, bucket: str) -> None:
    """Configure one notification for each segment in the bucket."""
    client = s3.client()
    rules = [{"Name": "prefix", "Value": f"{PREFIX}/"}, {"Name": "suffix", "Value": ".parquet"}]
    queue = {"QueueArn": ARN, "Events": ["s3:ObjectCreated:*"], "Filter": {"Key": {"FilterRules": rules}}}
    client.put_bucket_notification_configuration(
        Bucket=bucket, NotificationConfiguration={"QueueConfigurations": [queue]}
    )


def woke() -> float:
    return metric_value("floe_ingress_events_total", {"source": "nats", "result": "woke"}) or 0


async def test_a_segment_in_minio_wakes_ingress_long_before_its_poll(
    notifying: SharedS3, subject: str, nats_url: str, client: FloeClient, tmp_path: Path
) -> None:
    bucket = notifying.new_bucket()
    notify(notifying, bucket)
    store = store_config(notifying, bucket, notifying.endpoint_url)
    archive = S3Archive(store)
    archive.put(rows_of(1, 10))
    # It polls once an hour: later segments came by notification.
    centre = S3Centre(tmp_path, archive, store, nats_url, f"nats://{subject}")
    async with centre.running() as health:
        await centre.carried(client, 10)
        await soon(lambda: health.status()["parts"].get("events", {}).get("state") == "listening")
        for round_ in range(1, 4):
            before = woke()
            await asyncio.to_thread(archive.put, rows_of(round_ * 10 + 1, round_ * 10 + 10))
            await centre.carried(client, round_ * 10 + 10)
            await soon(lambda before=before: woke() > before)
        check_exact(await centre.carried(client, 40), archive, centre.prefix)


def test_make_minio_prints_settings_that_work_and_ends_with_a_signal() -> None:
    command = [sys.executable, "-m", "infra.local.s3"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=PROJECT_FOLDER)
    try:
        document = yaml.safe_load("".join(process.stdout.readline() for _ in range(6)))
        canaries.note(document["store"]["secret_access_key"])
        objects = open_objects(StoreSettings.model_validate(document["store"]))
        objects.put("k", b"1")
        assert objects.get("k") == b"1"
        process.terminate()
        assert process.wait(PATIENCE) == 0
        with pytest.raises(Unavailable):
            objects.get("k")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
