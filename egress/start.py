"""Where a new feed begins: resolved once, into `chain.json`."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta

from common.clock import Clock
from common.jetstream.api import StreamInfo, create_consumer, delete_consumer
from common.jetstream.client import FloeClient
from common.sequences import MAX_SEQUENCE
from common.settings.start import StartSettings


def is_set(start: StartSettings) -> bool:
    """Whether any of the start keys says something."""
    return bool(start.start_sequence or start.start_time or start.start_delta or start.start_at_end)


async def first_sequence(client: FloeClient, info: StreamInfo, start: StartSettings, clock: Clock) -> int:
    """The sequence at which a new feed of the stream begins; without start keys, the first it holds.

    A start before the first message held begins there: what was gone before the feed existed is not missed.
    """
    held = max(1, info.first_sequence)
    if start.start_at_end:
        return min(info.last_sequence + 1, MAX_SEQUENCE)
    if start.start_sequence:
        return max(held, start.start_sequence)
    moment = _moment(start, clock)
    return held if moment is None else max(held, await _at(client, info.name, moment))


def _moment(start: StartSettings, clock: Clock) -> str | None:
    if start.start_time:
        return start.start_time
    if not start.start_delta:
        return None
    then = datetime.fromtimestamp(clock.now(), UTC) - timedelta(seconds=start.start_delta)
    return then.isoformat().replace("+00:00", "Z")


async def _at(client: FloeClient, stream: str, moment: str) -> int:
    """The first sequence stored at or after `moment`: where the server places a consumer that begins then."""
    config = {
        "name": f"floe-start-{secrets.token_hex(8)}",
        "deliver_policy": "by_start_time",
        "opt_start_time": moment,
        "ack_policy": "none",
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": 10_000_000_000,
    }
    consumer = await create_consumer(client, stream, config)
    await delete_consumer(client, stream, consumer.name)
    return consumer.stream_sequence + 1
