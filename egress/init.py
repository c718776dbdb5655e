"""Setup by `floe egress init`: the buckets, and the durables of interest and work-queue streams."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import FloeError, Stopped
from common.exits import nats_command
from common.nats.api import INTEREST, LIMITS, StreamInfo, consumer_names, stream_info
from common.nats.client import FloeClient
from common.nats.kv import open_state
from common.nats.lease import new_owner, open_leases
from common.settings.root import Settings
from egress.account import all_feeds
from egress.advisories.advisory import loop_error
from egress.consumers import ReaderResetError, WantedMessages, create_durable, own_durables
from egress.partition import Partition, all_partitions, is_durable_of_site

CREATED, EXISTS, NOT_NEEDED, REFUSED = "made", "there", "not needed", "refused"


@dataclass(frozen=True, slots=True)
class SetupResult:
    """Outcome for one thing that egress needs: `result` is `made`, `there`, `not needed` or `refused`."""

    what: str
    name: str
    result: str
    stream: str = ""
    note: str = ""


async def set_up(client: FloeClient, settings: Settings) -> tuple[list[SetupResult], list[FloeError]]:
    parts = all_partitions(settings.site, await all_feeds(client, settings))
    streams = {name: await stream_info(client, name) for name in dict.fromkeys(partition.stream for partition in parts)}
    done = await _buckets(client, settings)
    problems: list[FloeError] = [_missing(name) for name, info in streams.items() if info is None]
    for partition in parts:
        if (info := streams[partition.stream]) is not None:
            try:
                done.append(await _durable(client, partition, info))
            except FloeError as error:
                done.append(SetupResult("durable", partition.durable, REFUSED, partition.stream, error.code))
                problems.append(error)
            if (loop := loop_error(partition, partition.chain, info)) is not None:
                subject = partition.settings.advisory.subject
                done.append(SetupResult("advisories", subject, REFUSED, partition.stream, loop.code))
                problems.append(loop)
    for name, info in streams.items():
        if info is not None:
            done += await _stale(client, settings.site, name, [each for each in parts if each.stream == name])
    return done, problems


def _missing(stream: str) -> Stopped:
    return Stopped(f"stream {stream} does not exist", hint="create it, then run this again", code="E-SOURCE-GONE")


async def _buckets(client: FloeClient, settings: Settings) -> list[SetupResult]:
    egress = settings.egress
    names = egress.lease_bucket, egress.state_bucket
    found = [await stream_info(client, f"KV_{name}") for name in names]
    await open_leases(client, egress, new_owner(settings.instance), client.clock)
    await open_state(client, egress)
    results = (CREATED if info is None else EXISTS for info in found)
    return [SetupResult("bucket", *each) for each in zip(names, results, strict=True)]


async def _durable(client: FloeClient, partition: Partition, info: StreamInfo) -> SetupResult:
    wanted = WantedMessages(partition, str(info.config.get("retention", LIMITS)))
    if not wanted.is_durable:
        return SetupResult("durable", partition.durable, NOT_NEEDED, info.name, "limits retention")
    if found := await own_durables(client, wanted):
        return SetupResult("durable", found[0], EXISTS, info.name)
    try:
        consumer = await create_durable(client, wanted)
    except ReaderResetError:  # a running egress replaced it just now
        return SetupResult("durable", partition.durable, EXISTS, info.name)
    return SetupResult("durable", consumer.name, CREATED, info.name, dropped_text(info))


def dropped_text(info: StreamInfo) -> str:
    """Describe the messages that an interest stream did not keep; empty if it shows none."""
    gone = min(info.first_sequence - 1, info.last_sequence)  # an empty stream begins after its last sequence
    if info.config.get("retention") != INTEREST or gone < 1:
        return ""
    return f"messages 1..{gone} were dropped before: no consumer needed them any more"


async def _stale(client: FloeClient, site: str, stream: str, parts: Sequence[Partition]) -> list[SetupResult]:
    """List durables of this site that no configured partition reads: an interest stream keeps messages for them."""
    names = [name for name in await consumer_names(client, stream) if is_durable_of_site(name, site)]
    why = "of no configured partition"
    return [
        SetupResult("durable", name, EXISTS, stream, f"{why}: {nats_command('consumer rm', stream, name)}")
        for name in names
        if not any(partition.partition_of(name) == partition.number for partition in parts)
    ]
