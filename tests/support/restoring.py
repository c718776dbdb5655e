"""A site that lost a stream, and brings it back."""

from __future__ import annotations

import json
from typing import Any

from common.clock import SystemClock, format_time
from common.jetstream.api import ask, list_consumers, stream_info
from common.jetstream.client import frame
from common.jetstream.pull import read_through
from common.segments.captures import (
    CapturedConfig,
    CapturedConsumers,
    CapturedDeletions,
    CaptureStore,
    deleted_ranges,
)
from common.segments.segment import Message
from common.service.progress import Teller
from common.settings.root import Settings
from common.tasks import Stop
from egress.captures import captured_consumers
from ingress.restore.compare import Settling
from ingress.restore.plan import RestorePlan, RestoreRequest
from ingress.restore.restore import Restore, RestoreReport, RestoreTuning
from tests.support.basics import PATIENCE, soon
from tests.support.egress import SITE, Bench

QUICK = RestoreTuning(looks=3, look_span=0.2, settling=Settling(answers=3, span=0.5, patience=60.0, consumers=20.0))


async def contents(bench: Bench, stream: str) -> list[Message]:
    """All messages of the stream, as the server has them."""
    found = list[Message]()
    info = await ask(bench.client, f"STREAM.INFO.{stream}")
    if info["state"]["messages"]:
        await read_through(bench.client, stream, info["state"]["last_seq"], found.append)
    return found


async def state(bench: Bench, stream: str) -> dict[str, Any]:
    """What identifies the state of a stream: its bounds and counts."""
    found = (await ask(bench.client, f"STREAM.INFO.{stream}"))["state"]
    return {name: found.get(name, 0) for name in ("messages", "first_seq", "last_seq", "num_deleted")}


async def config(bench: Bench, stream: str) -> dict[str, Any]:
    """The configuration, without what the server adds to its metadata."""
    found = dict((await ask(bench.client, f"STREAM.INFO.{stream}"))["config"])
    found["metadata"] = {k: v for k, v in (found.get("metadata") or {}).items() if not k.startswith("_nats.")}
    return found


async def positions(bench: Bench, stream: str) -> dict[str, tuple[int, ...]]:
    """Delivered and ack floor of each consumer."""
    return {
        each["name"]: (*(each[k][s] for k in ("delivered", "ack_floor") for s in ("consumer_seq", "stream_seq")),)
        for each in await list_consumers(bench.client, stream)
    }


async def consume(bench: Bench, stream: str, consumer: str, count: int, acked: int | None = None) -> list[bytes]:
    """Take the next messages of a pull consumer, and acknowledge the first `acked`, all where it is None; their
    payloads.
    """
    found, client = list[tuple[bytes, bytes]](), bench.client

    def sink(_subject: bytes, reply: bytes, payload: bytes, _headers: bytes | None) -> None:
        if reply:
            found.append((reply, payload))

    inbox = client.new_inbox()
    subscription = await client.subscribe_raw(inbox, sink)
    request = json.dumps({"batch": count, "expires": int(PATIENCE * 1e9)}).encode()
    subject = client.api_subject(f"CONSUMER.MSG.NEXT.{stream}.{consumer}").encode()
    client.send(frame(subject, request, None, inbox.encode()))
    await soon(lambda: len(found) >= count)
    await subscription.unsubscribe()
    for reply, _ in found[:acked]:
        await client.request_raw(reply, b"+ACK", timeout=PATIENCE)
    return [payload for _, payload in found]


async def capture(bench: Bench, stream: str, end: int, *, deletions: bool = False) -> None:
    """What egress captures of a stream, right now."""
    store, chain = CaptureStore(bench.chains.layout, bench.objects), bench.chain(stream)
    listed = captured_consumers(await list_consumers(bench.client, stream))
    info = await ask(bench.client, f"STREAM.INFO.{stream}", {"deleted_details": True})
    at, ts = format_time(int(SystemClock().now() * 1e9)), info["ts"]
    store.put(chain, CapturedConfig(at, end, info["created"], info["config"], ts=ts))
    store.put(chain, CapturedConsumers(at, end, listed, ts=ts))
    if deletions:
        first, last = info["state"]["first_seq"], info["state"]["last_seq"]
        deleted = deleted_ranges(info["state"].get("deleted") or [])
        store.put(chain, CapturedDeletions(at, end, first, last, deleted, ts=ts))


def settings(bench: Bench, feed: str, keys: dict[str, Any] | None = None) -> Settings:
    """With a bucket of leases of their own: what runs within a busy process may be late. `keys`: of the feed."""
    return bench.settings(
        {"stream": feed, **(keys or {})}, lease_bucket=f"{bench.lease_bucket}_RESTORE", lease_ttl="10s"
    )


def restore(
    bench: Bench,
    feed: str,
    nats: dict[str, Any] | None = None,
    tuning: RestoreTuning = QUICK,
    keys: dict[str, Any] | None = None,
    **asked: Any,
) -> Restore:
    """`nats`: how to connect, beside the address; `keys`: of the feed."""
    found = settings(bench, feed, keys)
    if nats is not None:
        document = {"site": SITE, "store": bench.store_config, "nats": {"url": bench.url, **nats}}
        found = Settings.model_validate(document | {"egress": {"feeds": [{"stream": feed}]}})
    request = RestoreRequest(SITE, feed, **asked)
    return Restore(found, request, bench.store, bench.chains, SystemClock(), Teller(), tuning)


async def restored(bench: Bench, feed: str, **asked: Any) -> RestoreReport:
    work = restore(bench, feed, **asked)
    async with work.connected() as client:
        return await work.run(client, Stop())


async def comes_back(bench: Bench, feed: str, before: list[Message], **asked: Any) -> RestoreReport:
    """Lose the stream of that name, if it is there, and restore it: it holds `before` again."""
    if await stream_info(bench.client, feed) is not None:
        await bench.delete_stream(feed)
    report = await restored(bench, feed, **asked)
    assert report.exit_code == 0, [*report.lines()]
    assert await contents(bench, feed) == before
    return report


async def planned(bench: Bench, feed: str, **asked: Any) -> RestorePlan:
    return await restore(bench, feed, **asked).plan()
