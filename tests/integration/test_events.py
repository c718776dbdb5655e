"""The sources of notifications, NATS and SQS: deliveries, deletions and retries."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from common.archive.documents import ChainStore
from common.archive.keys import Layout
from common.archive.store import SegmentStore
from common.chain import Chain
from common.clock import SystemClock
from common.errors import FloeError, Refused
from common.nats.client import FloeClient, frame
from common.objects.open import open_objects
from common.objects.s3 import S3Account
from common.objects.sqs import SqsQueue
from common.settings.root import StoreSettings
from common.tasks import unexpected
from infra.local.nats import NatsServer
from ingress.discovery import notifications
from ingress.discovery.notifications import follow_queue, follow_subject
from tests.support.basics import PATIENCE, SharedS3, counted, metric_value, soon, unique
from tests.support.ingress import CHAIN, PREFIX, Archive, Centre, check_exact, client_of, count_in, rows_of
from tests.support.servers import CREDENTIALS, Notifying, SqsServer, notification
from tests.support.stores import FaultyStore
from tests.unit.test_notices import TEST_EVENT, amazon, segment_key, sns

pytestmark = [pytest.mark.servers, pytest.mark.simulated]


class Recorder:
    """A handler that records notifications."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.listened = 0
        self.failures: list[str] = []
        self.is_active = True

    def handle(self, raw: bytes) -> None:
        self.taken.append(raw)

    def record_listening(self) -> None:
        self.listened += 1

    def record_failure(self, reason: str) -> None:
        self.failures.append(reason)


@asynccontextmanager
async def beside(work: Any) -> AsyncIterator[None]:
    """Run `work` as long as the block; it must not end before."""
    task = asyncio.create_task(work)
    try:
        yield
        assert not task.done(), task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait_for(task, PATIENCE)


# SQS


@pytest.fixture(scope="module")
def sqs() -> Iterator[SqsServer]:
    with SqsServer() as server:
        yield server


def queue_of(server: SqsServer, name: str) -> Callable[[], SqsQueue]:
    account = S3Account("test", "test", "us-east-1", server.url)
    return lambda: SqsQueue(name, account)


async def test_messages_are_handed_over_and_deleted_garbage_among_them(sqs: SqsServer) -> None:
    name, recorder = sqs.new_queue(), Recorder()
    bodies = [json.dumps({"Records": [amazon(f"k{n}")]}) for n in range(22)]
    bodies += ["garbage", json.dumps(TEST_EVENT), json.dumps(sns({"Records": [amazon("k")]}))]
    await asyncio.to_thread(sqs.send, name, *bodies)

    async with beside(follow_queue(queue_of(sqs, name), recorder, SystemClock())):
        await soon(lambda: len(recorder.taken) >= len(bodies))
        await soon(lambda: sqs.left_in(name) == 0)

    assert sorted(recorder.taken) == sorted(body.encode() for body in bodies)
    assert (recorder.listened, recorder.failures) == (1, [])


async def test_a_queue_that_is_missing_is_asked_for_again_and_so_is_one_that_goes_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notifications, "RECEIVE_PAUSES_S", (0.1, 0.2))
    name, recorder = unique("late"), Recorder()
    with SqsServer() as server:
        async with beside(follow_queue(queue_of(server, name), recorder, SystemClock())):
            await soon(lambda: recorder.failures)
            assert "NonExistentQueue" in recorder.failures[0] or "QueueDoesNotExist" in recorder.failures[0]
            server.new_queue(name)
            await asyncio.to_thread(server.send, name, "a")
            await soon(lambda: recorder.taken == [b"a"])

            before = len(recorder.failures)
            server.stop()
            await soon(lambda: len(recorder.failures) > before)
            await asyncio.to_thread(server.start)
            server.new_queue(name)
            await asyncio.to_thread(server.send, name, "b")
            await soon(lambda: recorder.taken == [b"a", b"b"])


async def test_a_notification_that_fails_is_reported_and_its_queue_read_again(
    sqs: SqsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading does not end, and no untaken notification is deleted."""
    monkeypatch.setattr(notifications, "RECEIVE_PAUSES_S", (0.1, 0.2))
    name, recorder, count = sqs.new_queue(), Recorder(), counted(unexpected.labels("events"))
    fails = ["once"]

    def take(raw: bytes) -> None:
        if fails:
            raise MemoryError(f"no room {fails.pop()}")
        recorder.taken.append(raw)

    monkeypatch.setattr(recorder, "handle", take)
    await asyncio.to_thread(sqs.send, name, "a")
    async with beside(follow_queue(queue_of(sqs, name), recorder, SystemClock())):
        await soon(lambda: recorder.failures == ["no room once"])
        await asyncio.to_thread(sqs.send, name, "b")
        await soon(lambda: b"b" in recorder.taken)
    assert counted(unexpected.labels("events")) == count + 1


async def test_a_standby_leaves_the_queue_to_the_others(sqs: SqsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications, "STANDBY_PAUSE_S", 0.05)
    # A message received by a call that ends is visible again after a second.
    name, standby, carrying = sqs.new_queue(VisibilityTimeout="1"), Recorder(), Recorder()
    standby.is_active = False
    async with beside(follow_queue(queue_of(sqs, name), standby, SystemClock())):
        await asyncio.to_thread(sqs.send, name, *map(str, range(20)))
        async with beside(follow_queue(queue_of(sqs, name), carrying, SystemClock())):
            # One that is deleted too late comes again.
            await soon(lambda: len({*carrying.taken}) == 20)
        assert standby.taken == []

        standby.is_active = True
        await asyncio.to_thread(sqs.send, name, "taken over")
        await soon(lambda: b"taken over" in standby.taken)


def test_a_whole_address_names_the_region_and_the_queue(sqs: SqsServer) -> None:
    queue = SqsQueue("sqs.eu-west-1.amazonaws.com/123456789012/floe", S3Account("a", "b", "us-east-1"))
    assert (queue.region, queue.address()) == ("eu-west-1", "https://sqs.eu-west-1.amazonaws.com/123456789012/floe")


# NATS


async def test_each_instance_gets_each_message_and_listens_again_after_a_reconnect(tmp_path: Path) -> None:
    recorder = [Recorder(), Recorder()]
    with NatsServer(tmp_path / "nats") as server:
        async with client_of(server.url) as one, client_of(server.url) as other:
            clock = SystemClock()

            async def subscribed() -> None:
                """Wait until the server has the subscription."""
                for each in (one, other):
                    await soon(partial(each.round_trip, 5.0))

            async with (
                beside(follow_subject(one, "minio.*", recorder[0], clock)),
                beside(follow_subject(other, "minio.*", recorder[1], clock)),
            ):
                await soon(lambda: all(each.listened for each in recorder))
                await subscribed()
                one.send(frame(b"minio.events", b"a"))
                await soon(lambda: all(each.taken == [b"a"] for each in recorder))

                server.kill()
                await soon(lambda: not one.is_up and not other.is_up)
                server.start()
                await soon(lambda: all(each.listened >= 2 for each in recorder))
                await subscribed()
                one.send(frame(b"minio.events", b"b"))
                await soon(lambda: all(each.taken == [b"a", b"b"] for each in recorder))


async def test_a_refused_subscription_is_retried_and_shown(client: FloeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications, "RECEIVE_PAUSES_S", (0.05, 0.1))
    recorder = Recorder()
    subscribe, refusals = client.subscribe_raw, [Refused("no right"), FloeError("away")]

    async def refusing(*args: Any) -> Any:
        if refusals:
            raise refusals.pop(0)
        return await subscribe(*args)

    monkeypatch.setattr(client, "subscribe_raw", refusing)
    async with beside(follow_subject(client, unique("s"), recorder, SystemClock())):
        await soon(lambda: recorder.listened)
    assert recorder.failures == ["no right", "away"]


# The whole service: segments arrive by notifications alone, even if some are lost or forged


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

    def listings(self) -> int:
        """The number of listings of the chain's segments."""
        prefix = Layout(PREFIX).segments_prefix(CHAIN, 0)
        return sum(call == ("list", prefix) for call in list(self.counted.keys))

    async def is_left_alone(self) -> bool:
        """True if nobody lists the chain for a second: twenty times the pause between two polls."""
        before = self.listings()
        await asyncio.sleep(1)
        return self.listings() == before


class S3Centre(Centre):
    """A centre that reads a bucket and polls once an hour."""

    def __init__(self, folder: Path, archive: S3Archive, store: dict[str, Any], url: str, events: str) -> None:
        super().__init__(folder, archive, url)
        self._store, self._events = store, events

    def document(self, **ingress: Any) -> dict[str, Any]:
        document = super().document(**{"poll_interval": "1h", "events": self._events, **ingress})
        return {**document, "store": {**self._store, "prefix": PREFIX}}


def store_config(s3: SharedS3, bucket: str, endpoint_url: str) -> dict[str, Any]:
    return {**s3.store(bucket), "endpoint_url": endpoint_url}


def notified(result: str) -> float:
    return metric_value("floe_ingress_events_total", {"source": "nats", "result": result}) or 0


@pytest.mark.real
async def test_segments_arrive_by_notifications_alone_and_a_lost_one_by_the_next(
    s3: SharedS3, nats_url: str, client: FloeClient, tmp_path: Path
) -> None:
    bucket, subject = s3.new_bucket(), unique("minio")
    direct = store_config(s3, bucket, s3.endpoint_url)
    with Notifying(s3.endpoint_url, nats_url, subject) as notifying:
        archive = S3Archive(store_config(s3, bucket, notifying.url), direct)
        archive.quiet.put(rows_of(1, 10))
        centre = S3Centre(tmp_path, archive, direct, nats_url, f"nats://{subject}")
        # A target whose lease expires on a busy machine lists when it begins again.
        async with centre.running(lease_ttl="1m") as health:
            await centre.carried(client, 10)
            await soon(lambda: health.status()["parts"].get("events", {}).get("state") == "listening")

            before = notified("woke")
            await asyncio.to_thread(archive.put, rows_of(11, 20))
            await centre.carried(client, 20)
            # Both notifications, of the segment and of the tail, are handled, and so are the listings that they cause.
            await soon(lambda: notified("woke") >= before + 2)
            await soon(archive.is_left_alone)
            assert archive.listings() > 0

            # A lost notification: no listing, no row. Then a forged one: it makes ingress list, and all arrives.
            await asyncio.to_thread(archive.quiet.put, rows_of(21, 30))
            assert await archive.is_left_alone()
            assert await count_in(client, centre.target) == 20
            forged = json.dumps(notification(bucket, segment_key())).encode()
            before = notified("woke")
            for _ in range(100):
                client.send(frame(subject.encode(), forged))
                client.send(frame(subject.encode(), b"[" * 5000))
            check_exact(await centre.carried(client, 30), archive, centre.prefix)
            await soon(lambda: notified("woke") >= before + 100 and notified("spoiled") >= 100)

            # A chain that is not known yet.
            other = Chain("eu-west", "NODES")
            await asyncio.to_thread(archive.put, rows_of(1, 5, other), chain=other)
            check_exact(await centre.carried(client, 35), archive, centre.prefix)


@pytest.mark.real
async def test_a_service_that_listens_to_a_queue_carries(
    s3: SharedS3, sqs: SqsServer, nats_url: str, client: FloeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, name = s3.new_bucket(), sqs.new_queue()
    config = store_config(s3, bucket, s3.endpoint_url)
    archive = S3Archive(config)
    archive.put(rows_of(1, 10))
    centre = S3Centre(tmp_path, archive, config, nats_url, f"sqs://{name}")
    monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", sqs.url)
    for key in ("aws_access_key_id", "aws_secret_access_key"):
        monkeypatch.setenv(key.upper(), CREDENTIALS[key])
    async with centre.running():
        await centre.carried(client, 10)
        ref = archive.put(rows_of(11, 20))
        await asyncio.to_thread(sqs.send, name, json.dumps({"Records": [amazon(ref.key, bucket=bucket)]}))
        check_exact(await centre.carried(client, 20), archive, centre.prefix)
        await soon(lambda: sqs.left_in(name) == 0)
