"""Notifications of the bucket, through NATS or SQS: they wake discovery, and carry nothing by themselves."""

from __future__ import annotations

import asyncio

from common.clock import Clock
from common.jetstream.client import FloeClient
from common.objects.open import open_queue
from common.segments.keys import Layout
from common.service.metrics import begin
from common.service.monitor import Health
from common.settings.root import Settings
from ingress import metrics
from ingress.discovery.discovery import Discovery
from ingress.discovery.nats_events import follow_subject
from ingress.discovery.notices import chains_in, written
from ingress.discovery.notifications import follow_queue


class Notified:
    """Takes notifications as they come and wakes discovery. `source`: `nats` or `sqs`, for the metric."""

    def __init__(
        self, source: str, bucket: str, layout: Layout, discovery: Discovery, health: Health
    ) -> None:
        self._source, self._bucket, self._layout = source, bucket, layout
        self._discovery, self._health = discovery, health
        if source:
            begin("ingress_", source=source)

    @property
    def is_wanted(self) -> bool:
        """Whether this process carries anything: one that stands by leaves the queue to the others."""
        return self._discovery.is_listened_to

    def take(self, raw: bytes) -> None:
        """One document, of whatever content. Never raises."""
        notice = written(raw)
        if notice is None:
            self._count("spoiled")
        else:
            chains = chains_in(notice, self._bucket, self._layout)
            self._count("woke" if self._discovery.wake(chains) else "ignored")

    def listening(self) -> None:
        """From now on notifications come; what came before may be lost."""
        self._discovery.look_soon()
        self._health.set_status("events", {"source": self._source, "state": "listening"})

    def failed(self, why: str) -> None:
        """Notifications do not come; polling goes on."""
        self._count("failed")
        self._health.set_status("events", {"source": self._source, "state": "failing", "why": why})

    def _count(self, result: str) -> None:
        metrics.events.labels(self._source, result).inc()


async def follow(
    settings: Settings,
    client: FloeClient,
    layout: Layout,
    discovery: Discovery,
    health: Health,
    clock: Clock,
) -> None:
    """Follow what `ingress.events` names, for ever; where it names nothing, wait for ever.

    Raises nothing: a source that fails is tried again, and polling goes on meanwhile.
    """
    source, _, address = settings.ingress.events.partition("://")
    bucket = settings.store.url.removeprefix("s3://")
    notified = Notified(source, bucket, layout, discovery, health)
    if source == "nats":
        await follow_subject(client, address, notified, clock)
    elif source == "sqs":
        await follow_queue(lambda: open_queue(address, settings.store), notified)
    await asyncio.Event().wait()
