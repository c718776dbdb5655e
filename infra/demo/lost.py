"""The loss of a site in the demo: its server goes with everything on it, and its streams are restored."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from common.chain import Chain
from common.clock import Clock
from common.errors import FloeError
from common.nats.api import create_consumer, list_consumers, query, stream_info
from common.nats.client import FloeClient, frame
from common.open import open_chains, open_store
from common.settings import loader
from common.settings.types import format_count
from infra.demo.world import ADVISORIES, AWKWARD, NODES, SITES, DemoWorld, run_command
from infra.oracle import read_stream
from ingress.recovery.read_back import fingerprint

LOST_SITE = SITES[0]
UNSAMPLED_FEEDS = (AWKWARD, ADVISORIES)  # feeds that are not sampled: they are restored exactly
CONSUMER_NAME, ACKED_MESSAGES = "billing", 100  # it acknowledges so many before the server is lost
NEW_MESSAGES = 5  # messages that are published after the restore
SITE_TIMEOUT_S = 30.0  # seconds
ARCHIVE_POLL_S = 0.2  # seconds


@dataclass(frozen=True, slots=True)
class StreamState:
    """The state of a stream: its messages in five fields, bounds and counts, configuration, and consumer positions."""

    rows: dict[int, int] = field(repr=False)
    state: Mapping[str, Any]
    config: Mapping[str, Any]
    consumers: Mapping[str, Any]

    def differences(self, other: StreamState, name: str) -> list[str]:
        wrong = sorted({sequence for sequence, _ in self.rows.items() ^ other.rows.items()})
        problems = [f"{name}: {len(wrong)} lost, altered or unexpected: {wrong[:5]}"] if wrong else []
        pairs = ((part, getattr(self, part), getattr(other, part)) for part in ("state", "config", "consumers"))
        return problems + [f"{name}: expected the {part} {a}, found {b}" for part, a, b in pairs if a != b]


async def read_state(client: FloeClient, stream: str) -> StreamState:
    rows = dict[int, int]()
    await read_stream(client, stream, lambda message: rows.update({message.sequence: fingerprint(message)}))
    info = await query(client, f"STREAM.INFO.{stream}")
    metadata = {k: v for k, v in (info["config"].get("metadata") or {}).items() if not k.startswith("_nats.")}
    return StreamState(
        rows,
        {name: info["state"].get(name, 0) for name in ("messages", "bytes", "first_seq", "last_seq", "num_deleted")},
        {**info["config"], "metadata": metadata},
        {
            each["name"]: [each[place][of] for place in ("delivered", "ack_floor") for of in _SEQUENCES]
            for each in await list_consumers(client, stream)
            if each["config"].get("durable_name")
        },
    )


_SEQUENCES = ("consumer_seq", "stream_seq")


async def create_reader(client: FloeClient, clock: Clock) -> None:
    """Create a consumer at the site, read up to `ACKED_MESSAGES` messages with it, and acknowledge them."""
    await create_consumer(client, AWKWARD, {"durable_name": CONSUMER_NAME, "ack_policy": "explicit"})
    replies, inbox = list[bytes](), client.new_inbox()
    subscription = await client.subscribe_raw(inbox, lambda _s, reply, _p, _h: replies.append(reply))
    request = json.dumps({"batch": ACKED_MESSAGES, "expires": int(SITE_TIMEOUT_S * 1e9), "no_wait": True}).encode()
    client.send(frame(f"$JS.API.CONSUMER.MSG.NEXT.{AWKWARD}.{CONSUMER_NAME}".encode(), request, None, inbox.encode()))
    async with asyncio.timeout(SITE_TIMEOUT_S):
        while len(replies) < ACKED_MESSAGES and all(replies):  # the end of a shorter stream has no reply subject
            await clock.sleep(0.02)
    await subscription.unsubscribe()
    for reply in filter(None, replies):
        await client.request_raw(reply, b"+ACK", timeout=SITE_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class SiteRestore:
    """The result of the restore. `restored`: messages by chain; `archived_since`: those archived since, by chain;
    `text`: a sentence for the view; `problems`: all differences from the state before the loss.
    """

    restored: Mapping[Chain, int]
    archived_since: Mapping[Chain, int]
    text: str
    problems: Sequence[str] = ()


async def lose_and_restore(
    world: DemoWorld, clients: dict[str, FloeClient], connect: Callable[[str], Awaitable[FloeClient]], clock: Clock
) -> SiteRestore:
    """Remove the site's server, restore its streams, and compare them. The site's egress must be drained.

    The site gets a new client in `clients`. Raises FloeError if a part fails.
    """
    client = clients[LOST_SITE]
    before = {stream: await read_state(client, stream) for stream in UNSAMPLED_FEEDS}
    server, started = world.sites[LOST_SITE], clock.monotonic()
    await client.aclose()
    await asyncio.to_thread(server.stop)
    shutil.rmtree(server.folder)
    server.folder.mkdir()
    await asyncio.to_thread(server.start)
    clients[LOST_SITE] = client = await connect(server.url)
    if await stream_info(client, AWKWARD) is not None:
        raise FloeError(f"nats-server {LOST_SITE}: expected an empty one, found stream {AWKWARD}", code="E-DEMO")
    await asyncio.gather(*(_restore(world, stream) for stream in (*UNSAMPLED_FEEDS, NODES)))
    seconds = clock.monotonic() - started
    after = {stream: await read_state(client, stream) for stream in UNSAMPLED_FEEDS}
    problems = [
        text
        for name in UNSAMPLED_FEEDS
        for text in before[name].differences(after[name], f"{LOST_SITE}/{name} restored")
    ]
    problems += [] if after[AWKWARD].consumers else [f"{LOST_SITE}/{AWKWARD} restored: expected a consumer, found none"]
    sampled = await stream_info(client, NODES)
    restored = {Chain(LOST_SITE, name): len(after[name].rows) for name in UNSAMPLED_FEEDS}
    restored[Chain(LOST_SITE, NODES)] = sampled.messages if sampled else 0
    problems += await _check_archiving(world, client, after[AWKWARD].state["last_seq"], clock)
    exact, consumers = sum(restored[Chain(LOST_SITE, name)] for name in UNSAMPLED_FEEDS), len(after[AWKWARD].consumers)
    text = (
        f"{LOST_SITE} lost its server: {exact:,} messages of {' and '.join(UNSAMPLED_FEEDS)} and "
        f"{format_count(consumers, 'consumer')} are "
        f"as they were after {seconds:.1f} s; of {NODES}, which is sampled, the archived messages are back"
    )
    return SiteRestore(restored, {Chain(LOST_SITE, AWKWARD): NEW_MESSAGES}, text, problems)


async def _restore(world: DemoWorld, stream: str) -> None:
    lossy = ("--allow-lossy",) if stream == NODES else ()
    command = "floe", "restore", "-c", str(world.site_config(LOST_SITE)), f"{LOST_SITE}/{stream}", "--yes", "--json"
    await run_command(world.folder, f"restore {stream}", *command, *lossy)


async def _check_archiving(world: DemoWorld, client: FloeClient, last: int, clock: Clock) -> list[str]:
    """Return the problems if egress does not archive new messages after those it had: publishes some and runs it."""
    for number in range(NEW_MESSAGES):
        answer, _ = await client.request_raw(
            f"{AWKWARD.lower()}.after.{number}".encode(), b"after the loss", timeout=10.0
        )
        if json.loads(answer).get("seq") != last + 1 + number:
            return [f"{LOST_SITE}/{AWKWARD} restored: expected sequence {last + 1 + number}, found {answer.decode()}"]
    assert world.services is not None, "the services were started before"
    service = world.services.egress[LOST_SITE]
    service.start()
    settings, deadline = loader.load(str(world.central_config)), clock.monotonic() + SITE_TIMEOUT_S
    with closing(open_store(settings)) as store:
        while (end := store.table(Chain(LOST_SITE, AWKWARD)).end) < last + NEW_MESSAGES:
            service.raise_if_ended()
            if clock.monotonic() > deadline:
                break
            await clock.sleep(ARCHIVE_POLL_S)
    await service.drain()
    begun = sorted(chain for chain in open_chains(settings).chains() if chain.site == LOST_SITE and chain.incarnation)
    problems = [f"{chain}: expected no other incarnation" for chain in begun]
    if end != last + NEW_MESSAGES:
        problems.append(
            f"{LOST_SITE}/{AWKWARD} restored: expected the archive to end at {last + NEW_MESSAGES}, found {end}"
        )
    return problems
