"""A site that lost a stream, and restores it."""

import json
from typing import Any

from common.archive.captures import CapturedConfig, CapturedConsumers, CapturedDeletions, CaptureStore, deleted_ranges
from common.archive.segment import Message
from common.clock import SystemClock, format_time
from common.nats.api import list_consumers, query, stream_info
from common.nats.client import frame
from common.nats.pull import for_each_message
from common.service.progress import Progress
from common.settings.root import Settings
from common.tasks import Stop
from egress.captures import captured_consumers
from infra.publish import delete_message, publish_awkward
from ingress.recovery.plan import RestorePlan, RestoreRequest
from ingress.recovery.read_back import AtRest
from ingress.recovery.request import RecoveryParts
from ingress.recovery.restore import Restore, RestoreReport, RestoreTuning
from tests.support.basics import PATIENCE, seeded, soon, unique
from tests.support.egress import SITE, Bench

QUICK = RestoreTuning(
    name_check_span_s=0.2, at_rest=AtRest(answers=3, span_s=0.5, stall_timeout_s=60.0, consumers_timeout_s=20.0)
)


async def awkward(bench: Bench, count: int = 1500, **config: Any) -> str:
    """A stream with gaps, a purged beginning, a deleted tail, odd headers, odd subjects and empty payloads."""
    stream, rng = await bench.make_stream(unique("R"), storage="file", **config), seeded()
    await publish_awkward(bench.client, stream, f"{stream}.odd", rng, 300, deleted_share=0, max_message_bytes=4000)
    await bench.publish(stream, [rng.randbytes(n % 300) for n in range(await bench.last(stream), count)])
    await bench.client.api(f"STREAM.PURGE.{stream}", {"seq": 101})
    for sequence in [*rng.sample(range(200, count - 1), 30), count - 1, count]:
        await delete_message(bench.client, stream, sequence)
    return stream


async def archived(bench: Bench, stream: str) -> int:
    """Archive and capture all of the stream, and return its last sequence."""
    last = await bench.last(stream)
    await bench.freeze({"stream": stream})
    await capture(bench, stream, last)
    return last


async def contents(bench: Bench, stream: str) -> list[Message]:
    """Return all messages of the stream, as the server has them."""
    found = list[Message]()
    info = await query(bench.client, f"STREAM.INFO.{stream}")
    if info["state"]["messages"]:
        await for_each_message(bench.client, stream, info["state"]["last_seq"], found.append)
    return found


async def state(bench: Bench, stream: str) -> dict[str, Any]:
    """Return the bounds and counts of a stream, which identify its state."""
    found = (await query(bench.client, f"STREAM.INFO.{stream}"))["state"]
    return {name: found.get(name, 0) for name in ("messages", "first_seq", "last_seq", "num_deleted")}


async def config(bench: Bench, stream: str) -> dict[str, Any]:
    """Return the configuration, without the server's additions to its metadata."""
    found = dict((await query(bench.client, f"STREAM.INFO.{stream}"))["config"])
    found["metadata"] = {k: v for k, v in (found.get("metadata") or {}).items() if not k.startswith("_nats.")}
    return found


async def positions(bench: Bench, stream: str) -> dict[str, tuple[int, ...]]:
    """Return the delivered sequence and the ack floor of each consumer."""
    return {
        each["name"]: (*(each[k][s] for k in ("delivered", "ack_floor") for s in ("consumer_seq", "stream_seq")),)
        for each in await list_consumers(bench.client, stream)
    }


async def consume(bench: Bench, stream: str, consumer: str, count: int, acked: int | None = None) -> list[bytes]:
    """Take the next messages of a pull consumer, and acknowledge the first `acked`, all if it is None; return
    their payloads.
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
    """Write a capture of a stream now, as egress does."""
    store, chain = CaptureStore(bench.chains.layout, bench.objects), bench.chain(stream)
    listed = captured_consumers(await list_consumers(bench.client, stream))
    info = await query(bench.client, f"STREAM.INFO.{stream}", {"deleted_details": True})
    at, ts = format_time(int(SystemClock().now() * 1e9)), info["ts"]
    store.put(chain, CapturedConfig(at, end, info["created"], info["config"], ts=ts))
    store.put(chain, CapturedConsumers(at, end, listed, ts=ts))
    if deletions:
        first, last = info["state"]["first_seq"], info["state"]["last_seq"]
        deleted = deleted_ranges(info["state"].get("deleted") or [])
        store.put(chain, CapturedDeletions(at, end, first, last, deleted, ts=ts))


def settings(bench: Bench, feed: str, keys: dict[str, Any] | None = None) -> Settings:
    """Return settings with a bucket of leases of their own: work in a busy process may be late. `keys`: of the feed."""
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
    """Return a restore. `nats`: connection settings beside the address; `keys`: of the feed."""
    found = settings(bench, feed, keys)
    if nats is not None:
        document = {"site": SITE, "store": bench.store_config, "nats": {"url": bench.url, **nats}}
        found = Settings.model_validate(document | {"egress": {"feeds": [{"stream": feed}]}})
    request = RestoreRequest(SITE, feed, **asked)
    return Restore(found, request, RecoveryParts(bench.store, bench.chains, SystemClock(), Progress()), tuning)


async def restored(bench: Bench, feed: str, **asked: Any) -> RestoreReport:
    work = restore(bench, feed, **asked)
    async with work.open_connection() as client:
        return await work.run(client, Stop())


async def comes_back(bench: Bench, feed: str, before: list[Message], **asked: Any) -> RestoreReport:
    """Lose the stream of that name, if it is there, restore it, and check that it holds `before` again."""
    if await stream_info(bench.client, feed) is not None:
        await bench.delete_stream(feed)
    report = await restored(bench, feed, **asked)
    assert report.exit_code == 0, [*report.lines()]
    assert await contents(bench, feed) == before
    return report


async def planned(bench: Bench, feed: str, **asked: Any) -> RestorePlan:
    return await restore(bench, feed, **asked).plan()
