"""A stream for advisories on a real server, and senders for it."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from common.chain import Chain
from common.clock import Clock, SystemClock
from common.metrics import REGISTRY
from common.nats.client import FloeClient
from common.nats.headers import header_value
from common.settings.egress import FeedSettings
from common.tasks import cancel
from egress.advisories.advisory import Advisory, AdvisoryDocument, AdvisoryEvent, parse_advisory
from egress.advisories.senders import AdvisorySender, sender_class
from egress.partition import Partition
from infra.oracle import read_stream
from tests.support.basics import metric_value, unique
from tests.support.servers import place

SECOND = 1_000_000_000
SITE = "US_EAST"


def now_ns() -> int:
    return time.time_ns()


def new(value: str, at: int = 0) -> Advisory:
    at = at or now_ns()
    return Advisory(AdvisoryEvent.NEW, value, at, at)


def news(count: int) -> list[Advisory]:
    """Return NEW advisories of so many values, a millisecond apart."""
    start = now_ns() - count * 1_000_000
    return [new(f"node{n}.example.net", start + n * 1_000_000) for n in range(count)]


@dataclass
class World:
    """Names that no other test uses. The stream takes `{prefix}.>`; the template is `{prefix}.%s.%v`."""

    client: FloeClient
    prefix: str = field(default_factory=lambda: unique("adv"))
    feed: str = field(default_factory=lambda: unique("FEED"))
    reliable: bool = True
    inspect_duration: str = "1h"
    template: str = "{prefix}.%s.%v"

    @property
    def stream(self) -> str:
        return f"S_{self.prefix}"

    @property
    def part(self) -> Partition:
        advisory = {"subject": self.template.replace("{prefix}", self.prefix), "reliable": self.reliable}
        sampled = {"inspect_field": "sender", "inspect_duration": self.inspect_duration, "advisory": advisory}
        return Partition(SITE, FeedSettings.model_validate({"stream": self.feed, **sampled}))

    async def make_stream(self, **config: Any) -> None:
        """Create the stream. By default its duplicate window is too short to help."""
        made = {"name": self.stream, "subjects": [f"{self.prefix}.>"], "storage": "memory", "retention": "limits"}
        await place(self.client, {**made, "duplicate_window": SECOND // 10, **config})

    async def delete_stream(self) -> None:
        await self.client.api(f"STREAM.DELETE.{self.stream}")

    def advisories(
        self,
        client: FloeClient | None = None,
        *,
        clock: Clock | None = None,
        may_send: Callable[[], bool] = lambda: True,
        **more: Any,
    ) -> AdvisorySender:
        given = self.part, Chain(SITE, self.feed), client or self.client, clock or SystemClock(), random.Random(1)
        return sender_class(self.part)(*given, may_send=may_send, **{"outbox": (), "ack_timeout_s": 0.5, **more})

    async def stored(self, foreign: int = 0) -> list[AdvisoryDocument]:
        """Return the stream's advisories, each checked against its header; beside them are `foreign` other messages."""
        found: list[AdvisoryDocument] = []
        others = 0

        def take(message: Any) -> None:
            nonlocal others
            document = parse_advisory(message.payload)
            if document is None:
                others += 1
                return
            assert header_value(message.headers, b"Nats-Msg-Id") == document.event_id.encode()
            found.append(document)

        await read_stream(self.client, self.stream, take)
        assert others == foreign
        return found

    async def count(self) -> int:
        return int((await self.client.api(f"STREAM.INFO.{self.stream}"))["state"]["messages"])

    def counted(self) -> Counter[str]:
        """Return the metric by result, over all events."""
        total: Counter[str] = Counter()
        for family in REGISTRY.collect():
            for each in family.samples if family.name == "floe_egress_advisories" else ():
                if each.labels["feed"] == self.feed:
                    total[each.labels["result"]] += int(each.value)
        return +total

    def gauge(self, name: str) -> float | None:
        return metric_value(f"floe_egress_advisories_{name}", {"site": SITE, "feed": self.feed, "partition": "0"})


@asynccontextmanager
async def running(advisories: AdvisorySender) -> AsyncIterator[AdvisorySender]:
    """Run the sender for the length of a block, then cancel it as suddenly as a task can be."""
    task = asyncio.create_task(advisories.run())
    try:
        yield advisories
        assert not task.done(), task
    finally:
        await cancel(task)
