"""Notifications of the bucket about written objects, and their transports, SQS and NATS."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import unquote_plus

import msgspec

from common.archive.keys import Layout
from common.chain import Chain
from common.clock import Backoff, Clock, doubling_delays
from common.errors import FloeError
from common.logs import get_logger
from common.metrics import show_zeros
from common.nats.client import FloeClient
from common.objects.open import open_queue
from common.observe.monitor import Health
from common.settings.root import Settings
from common.tasks import PendingError, first_of, record_unexpected, report_errors
from ingress import metrics
from ingress.discovery.discovery import Discovery

if TYPE_CHECKING:
    from common.objects.sqs import ReceivedMessage, SqsQueue

log = get_logger(__name__)

T = TypeVar("T")

MAX_NOTIFICATION_BYTES = 1024 * 1024  # of a document; Amazon's queues accept no more, and a notification has 1 KB
MAX_ENVELOPES = 3  # envelopes around a document: SNS around EventBridge is two

_CREATED = ("ObjectCreated:", "s3:ObjectCreated:")
_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


class WrittenObject(NamedTuple):
    """An object that was written, by a notification. `keys`: its key, or several candidates, because some senders
    encode it.
    """

    bucket: str
    keys: tuple[str, ...]


def parse_notification(raw: bytes | str, envelopes: int = MAX_ENVELOPES) -> list[WrittenObject] | None:
    """Return the objects that the notification `raw` names as written; None if it is not a notification.

    At most `envelopes` envelopes are opened. Empty for a notification of something else: an object removed, a test of
    the queue.
    """
    if len(raw) > MAX_NOTIFICATION_BYTES:
        return None
    try:
        document = _DECODER.decode(raw)
    except (ValueError, RecursionError):  # not JSON
        return None
    if not isinstance(document, dict):
        return None
    if isinstance(document.get("Records"), list):
        return list(_of_records(document["Records"]))
    if isinstance(document.get("detail"), dict):  # of EventBridge
        bucket, key = _text(document, "detail", "bucket", "name"), _text(document, "detail", "object", "key")
        return [WrittenObject(bucket, (key,))] if document.get("detail-type") == "Object Created" else []
    if document.get("Event") == "s3:TestEvent":
        return []
    if isinstance(document.get("Message"), str) and envelopes:
        return parse_notification(document["Message"], envelopes - 1)
    return None


def _of_records(records: list[Any]) -> Iterator[WrittenObject]:
    for record in records:
        if _text(record, "eventName").startswith(_CREATED):
            bucket, key = _text(record, "s3", "bucket", "name"), _text(record, "s3", "object", "key")
            # Encoded as in a form: `+` for a space. Some servers write the key unencoded.
            yield WrittenObject(bucket, (unquote_plus(key), key))


def _text(value: Any, *path: str) -> str:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""


def chains_in(notice: list[WrittenObject], bucket: str, layout: Layout) -> set[Chain]:
    keys = (key for each in notice if each.bucket == bucket for key in each.keys)
    return {chain for key in keys if (chain := chain_of(key, layout)) is not None}


def chain_of(key: str, layout: Layout) -> Chain | None:
    """Return the chain to check after `key` was written: a segment, tail, `chain.json` or gap. None for other keys."""
    if (name := layout.parse_segment(key)) is not None:
        return name.chain
    folder, is_gap, _ = key.rpartition("/gaps/")
    return layout.parse_tail(key) or layout.parse_chain_document(f"{folder}/chain.json" if is_gap else key)


RECEIVE_PAUSES_S = doubling_delays(1.0, 60.0)  # seconds between attempts


STANDBY_PAUSE_S = 1.0  # seconds until the next check if notifications are of use here
EMPTY_RECEIVE_PAUSE_S = 0.1  # seconds after an empty receive: some servers do not wait as they are requested to


async def follow_queue(open_queue: Callable[[], SqsQueue], notified: NotificationHandler, clock: Clock) -> None:
    """Hand over every message of the queue, forever, and delete it from the queue afterwards.

    A message that is received at the shutdown is not deleted, and is delivered again to the next reader. Raises
    nothing: errors are logged and retried.
    """
    queue: SqsQueue | None = None
    pauses = Backoff(None, RECEIVE_PAUSES_S)
    while True:
        try:
            if not notified.is_active:
                await clock.sleep(STANDBY_PAUSE_S)
            elif queue is None:
                queue = await _run_in_thread(open_queue)
                messages = await _run_in_thread(partial(queue.receive, 0))  # at once, to check that it answers
                notified.record_listening()
                log.info("notifications connected", action="notifications_connected")
                await _take(messages, queue, notified, clock)
            else:
                await _take(await _run_in_thread(queue.receive), queue, notified, clock)
            pauses.reset()
        except Exception as error:
            queue = None
            if not isinstance(error, FloeError):
                record_unexpected(error, "events", "events of sqs")
            await _back_off(error, notified, pauses.next_delay(), clock)


async def _take(
    messages: Sequence[ReceivedMessage], queue: SqsQueue, notified: NotificationHandler, clock: Clock
) -> None:
    if not messages:
        await clock.sleep(EMPTY_RECEIVE_PAUSE_S)
        return
    for message in messages:
        notified.handle(message.body.encode(errors="replace"))
    if left := await _run_in_thread(partial(queue.delete, messages)):
        log.warning("notifications not deleted", action="notifications_not_deleted", count=left)


async def _back_off(error: Exception, notified: NotificationHandler, pause: float, clock: Clock) -> None:
    log.warning("notifications failed", action="notifications_failed", error=str(error), pause=pause)
    notified.record_failure(error.message if isinstance(error, FloeError) else str(error))
    await clock.sleep(pause)


async def _run_in_thread(call: Callable[[], T]) -> T:
    """Return the result of `call` in a thread of its own, for which a shutdown does not wait: a receive takes up to
    20 s.
    """
    done = Future[T]()
    done.set_running_or_notify_cancel()  # so that a cancelled wait leaves the thread its result

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="sqs", daemon=True).start()
    return await asyncio.wrap_future(done)


REFUSAL_CHECK_INTERVAL_S = 30.0  # seconds between two checks for a refusal of the subscription after a reconnect


async def follow_subject(client: FloeClient, subject: str, notified: NotificationHandler, clock: Clock) -> None:
    """Hand over every message on `subject`, forever.

    No queue group: each instance gets each message. Messages sent while the connection is down are lost, so
    discovery polls again after every reconnect. A refusal is logged and retried.
    """

    def sink(_subject: bytes, _reply: bytes, payload: bytes, _headers: bytes | None) -> None:
        notified.handle(payload)

    trouble = PendingError()
    forget = client.add_listener(report_errors(lambda up: notified.record_listening() if up else None, trouble.set))
    pauses = Backoff(None, RECEIVE_PAUSES_S)
    try:
        while True:
            try:
                subscription = await client.subscribe_raw(subject, sink, trouble.set)
                try:
                    pauses.reset()
                    log.info("notifications connected", action="notifications_connected", subject=subject)
                    notified.record_listening()
                    # Watch for a refusal by the server: permissions may change.
                    while (refused := client.permission_error(subject.encode())) is None:
                        await first_of(clock.sleep(REFUSAL_CHECK_INTERVAL_S), trouble.event.wait())
                        trouble.raise_if_set()
                    raise refused
                finally:
                    await subscription.unsubscribe()
            except FloeError as error:
                await _back_off(error, notified, pauses.next_delay(), clock)
    finally:
        forget()


class NotificationHandler:
    """Receiver of notifications, which wakes discovery. `source`: `nats` or `sqs`, for the metric."""

    def __init__(self, source: str, bucket: str, layout: Layout, discovery: Discovery, health: Health) -> None:
        self._source, self._bucket, self._layout = source, bucket, layout
        self._discovery, self._health = discovery, health
        if source:
            show_zeros("ingress_", source=source)

    @property
    def is_active(self) -> bool:
        """True if this process holds a target: a standby leaves the queue to the other instances."""
        return bool(self._discovery.targets)

    def handle(self, raw: bytes) -> None:
        """Take one document, of any content. Never raises."""
        if (notice := parse_notification(raw)) is None:
            self._count("spoiled")
        else:
            chains = chains_in(notice, self._bucket, self._layout)
            self._count("woke" if self._discovery.wake(chains) else "ignored")

    def record_listening(self) -> None:
        self._discovery.poll_due.set()
        self._health.set_status("events", {"source": self._source, "state": "listening"})

    def record_failure(self, reason: str) -> None:
        self._count("failed")
        self._health.set_status("events", {"source": self._source, "state": "failing", "why": reason})

    def _count(self, result: str) -> None:
        metrics.events.labels(self._source, result).inc()


async def follow(
    settings: Settings, client: FloeClient, layout: Layout, discovery: Discovery, health: Health, clock: Clock
) -> None:
    """Follow the source in `ingress.events`, forever; without one, wait forever.

    Raises nothing: a source that fails is retried, and polling continues meanwhile.
    """
    source, _, address = settings.ingress.events.partition("://")
    bucket = settings.store.url.removeprefix("s3://")
    notified = NotificationHandler(source, bucket, layout, discovery, health)
    if source == "nats":
        await follow_subject(client, address, notified, clock)
    elif source == "sqs":
        await follow_queue(partial(open_queue, address, settings.store), notified, clock)
    await asyncio.Event().wait()
