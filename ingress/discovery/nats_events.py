"""Notifications on a subject of NATS, as MinIO publishes them; through JetStream they come here as well."""

from __future__ import annotations

from common.clock import Clock, first_of
from common.errors import FloeError
from common.jetstream.client import FloeClient
from common.service.logs import get_logger
from common.tasks import Trouble, guarded
from ingress.discovery.listening import FIRST_PAUSE, Notifiable, longer

log = get_logger("ingress.discovery.nats")

CHECK_SPACING = 30.0  # seconds between two looks whether the subscription was refused after a reconnect


async def follow_subject(client: FloeClient, subject: str, notified: Notifiable, clock: Clock) -> None:
    """Hand over every message on `subject`, for ever.

    No queue group: each instance hears each message. What passes while the connection is down is lost; so
    `listening` is called again after every reconnect. A refusal is logged, and tried again.
    """

    def sink(_subject: bytes, _reply: bytes, payload: bytes, _headers: bytes | None) -> None:
        notified.take(payload)

    trouble = Trouble()
    forget = client.add_listener(guarded(lambda is_up: notified.listening() if is_up else None, trouble.tell))
    pause = FIRST_PAUSE
    try:
        while True:
            try:
                subscription = await client.subscribe_raw(subject, sink, trouble.tell)
                try:
                    pause = FIRST_PAUSE
                    log.info("listening", action="events", subject=subject)
                    notified.listening()
                    error = await _refused(client, subject, clock, trouble)
                finally:
                    await subscription.unsubscribe()
            except FloeError as raised:
                error = raised
            notified.failed(error.message)
            log.warning("no notifications", action="events_failed", error=str(error), pause=pause)
            await clock.sleep(pause)
            pause = longer(pause)
    finally:
        forget()


async def _refused(client: FloeClient, subject: str, clock: Clock, trouble: Trouble) -> FloeError:
    """What the server says against the subscription, once it does: rights may change. Raises `trouble`."""
    while (refused := client.refusal(subject.encode())) is None:
        await first_of(clock.sleep(CHECK_SPACING), trouble.told.wait())
        trouble.check()
    return refused
