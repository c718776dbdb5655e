"""Setup by `floe egress init`: the buckets, and the durables of interest and work-queue streams."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import FloeError, Stopped
from common.jetstream.api import StreamInfo, consumer_names, stream_info
from common.jetstream.buckets import kv_replicas
from common.jetstream.client import FloeClient
from common.jetstream.durables import INTEREST, LIMITS
from common.jetstream.kv import KeyValue
from common.settings.root import Settings
from egress.acks import ReaderResetError
from egress.advisories.advisory import loop_of
from egress.consumers import WantedMessages, create, ours
from egress.partition import Partition, all_partitions, is_of_site

MADE, THERE, UNNEEDED, REFUSED = "made", "there", "not needed", "refused"


@dataclass(frozen=True, slots=True)
class Done:
    """Outcome for one thing that egress needs: `result` is `made`, `there`, `not needed` or `refused`."""

    what: str
    name: str
    result: str
    stream: str = ""
    note: str = ""


async def initialise(client: FloeClient, settings: Settings) -> tuple[list[Done], list[FloeError]]:
    parts = all_partitions(settings.site, settings.egress.feeds)
    streams = {name: await stream_info(client, name) for name in dict.fromkeys(partition.stream for partition in parts)}
    done = await _buckets(client, settings)
    problems: list[FloeError] = [_missing(name) for name, info in streams.items() if info is None]
    for partition in parts:
        if (info := streams[partition.stream]) is not None:
            try:
                done.append(await _durable(client, partition, info))
            except FloeError as error:
                done.append(Done("durable", partition.durable, REFUSED, partition.stream, error.code))
                problems.append(error)
            if (loop := loop_of(partition, partition.chain, info)) is not None:
                subject = partition.settings.advisory.subject
                done.append(Done("advisories", subject, REFUSED, partition.stream, loop.code))
                problems.append(loop)
    for name, info in streams.items():
        if info is not None:
            done += await _stale(client, settings.site, name, [each for each in parts if each.stream == name])
    return done, problems


def _missing(stream: str) -> Stopped:
    return Stopped(f"stream {stream} does not exist", hint="create it, then run this again", code="E-SOURCE-GONE")


async def _buckets(client: FloeClient, settings: Settings) -> list[Done]:
    egress = settings.egress
    done = []
    leases, state = (
        (egress.lease_bucket, egress.lease_ttl, egress.lease_bytes),
        (egress.state_bucket, None, egress.kv_max_bytes),
    )
    for bucket, ttl, size in (leases, state):
        was_there = await stream_info(client, f"KV_{bucket}") is not None
        await KeyValue(client, bucket, ttl=ttl, replicas=await kv_replicas(client, egress), max_bytes=size).ensure()
        done.append(Done("bucket", bucket, THERE if was_there else MADE))
    return done


async def _durable(client: FloeClient, partition: Partition, info: StreamInfo) -> Done:
    wanted = WantedMessages(partition, str(info.config.get("retention", LIMITS)))
    if not wanted.is_durable:
        return Done("durable", partition.durable, UNNEEDED, info.name, "limits retention")
    if found := await ours(client, wanted):
        return Done("durable", found[0], THERE, info.name)
    try:
        consumer = await create(client, wanted)
    except ReaderResetError:  # a running egress replaced it just now
        return Done("durable", partition.durable, THERE, info.name)
    return Done("durable", consumer.name, MADE, info.name, dropped(info))


def dropped(info: StreamInfo) -> str:
    """Describe the messages that an interest stream did not keep; empty if it shows none."""
    if info.config.get("retention") != INTEREST or not info.last_sequence:
        return ""
    if info.messages and info.first_sequence <= 1:
        return ""
    gone = info.last_sequence if not info.messages else info.first_sequence - 1
    return f"messages 1..{gone} were dropped before, as nobody wanted them any more"


async def _stale(client: FloeClient, site: str, stream: str, parts: Sequence[Partition]) -> list[Done]:
    """List durables of this site that no configured partition reads: an interest stream keeps messages for them."""
    names = [name for name in await consumer_names(client, stream) if is_of_site(name, site)]
    return [
        Done("durable", name, THERE, stream, f"of no configured slice: nats consumer rm {stream} {name}")
        for name in names
        if not any(partition.partition_of(name) == partition.number for partition in parts)
    ]
