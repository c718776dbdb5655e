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
from common.jetstream.api import ask, create_consumer, list_consumers, stream_info
from common.jetstream.client import FloeClient, frame
from common.open import open_chains, open_store
from common.settings import loader
from common.settings.types import counted
from infra.demo.world import ADVISORIES, AWKWARD, NODES, SITES, World, run_command
from infra.oracle import read_stream
from ingress.replay.drill import Trail, compare

SITE = SITES[0]
WHOLE = (AWKWARD, ADVISORIES)  # feeds that are not sampled: they are restored exactly
READER, READ = "billing", 100  # a consumer, and how many messages it acknowledges before the server is lost
AFTER = 5  # messages that are published after the restore
ARRIVAL_TIMEOUT = 30.0  # seconds
TICK = 0.2


@dataclass(frozen=True, slots=True)
class Look:
    """The state of a stream: its messages in five fields, bounds and counts, configuration, and consumer positions."""

    trail: Trail = field(repr=False)
    state: Mapping[str, Any]
    config: Mapping[str, Any]
    consumers: Mapping[str, Any]

    def differences(self, other: Look, name: str) -> list[str]:
        found = compare(self.trail, other.trail, name)
        problems = [] if found.none else [f"{name}: {found.line()}", *found.examples]
        pairs = ((what, getattr(self, what), getattr(other, what)) for what in ("state", "config", "consumers"))
        return problems + [f"{name}: expected the {what} {a}, found {b}" for what, a, b in pairs if a != b]


async def look(client: FloeClient, stream: str) -> Look:
    trail = Trail()
    await read_stream(client, stream, trail.add)
    info = await ask(client, f"STREAM.INFO.{stream}")
    metadata = {k: v for k, v in (info["config"].get("metadata") or {}).items() if not k.startswith("_nats.")}
    return Look(
        trail,
        {name: info["state"].get(name, 0) for name in ("messages", "bytes", "first_seq", "last_seq", "num_deleted")},
        {**info["config"], "metadata": metadata},
        {
            each["name"]: [each[place][of] for place in ("delivered", "ack_floor") for of in _SEQUENCES]
            for each in await list_consumers(client, stream)
            if each["config"].get("durable_name")
        },
    )


_SEQUENCES = ("consumer_seq", "stream_seq")


async def read_some(client: FloeClient, clock: Clock) -> None:
    """Create a consumer at the site, read up to `READ` messages with it, and acknowledge them."""
    await create_consumer(client, AWKWARD, {"durable_name": READER, "ack_policy": "explicit"})
    replies, inbox = list[bytes](), client.new_inbox()
    subscription = await client.subscribe_raw(inbox, lambda _s, reply, _p, _h: replies.append(reply))
    request = json.dumps({"batch": READ, "expires": int(ARRIVAL_TIMEOUT * 1e9), "no_wait": True}).encode()
    client.send(frame(f"$JS.API.CONSUMER.MSG.NEXT.{AWKWARD}.{READER}".encode(), request, None, inbox.encode()))
    async with asyncio.timeout(ARRIVAL_TIMEOUT):
        while len(replies) < READ and all(replies):  # the end of a shorter stream has no reply subject
            await clock.sleep(0.02)
    await subscription.unsubscribe()
    for reply in filter(None, replies):
        await client.request_raw(reply, b"+ACK", timeout=ARRIVAL_TIMEOUT)


@dataclass(frozen=True, slots=True)
class LostSite:
    """The result of the restore. `restored`: messages by chain; `later`: those archived since, by chain; `text`: a
    sentence for the view; `problems`: all differences from the state before the loss.
    """

    restored: Mapping[Chain, int]
    later: Mapping[Chain, int]
    text: str
    problems: Sequence[str] = ()


async def lose_and_restore(
    world: World, clients: dict[str, FloeClient], connect: Callable[[str], Awaitable[FloeClient]], clock: Clock
) -> LostSite:
    """Remove the site's server, restore its streams, and compare them. The site's egress must be drained.

    The site gets a new client in `clients`. Raises FloeError if a part fails.
    """
    client = clients[SITE]
    before = {stream: await look(client, stream) for stream in WHOLE}
    server, started = world.sites[SITE], clock.monotonic()
    await client.aclose()
    await asyncio.to_thread(server.stop)
    shutil.rmtree(server.folder)
    server.folder.mkdir()
    await asyncio.to_thread(server.start)
    clients[SITE] = client = await connect(server.url)
    if await stream_info(client, AWKWARD) is not None:
        raise FloeError(f"nats-server {SITE}: expected an empty one, found stream {AWKWARD}", code="E-DEMO")
    await asyncio.gather(*(_restore(world, stream) for stream in (*WHOLE, NODES)))
    seconds = clock.monotonic() - started
    after = {stream: await look(client, stream) for stream in WHOLE}
    problems = [text for name in WHOLE for text in before[name].differences(after[name], f"{SITE}/{name} restored")]
    problems += [] if after[AWKWARD].consumers else [f"{SITE}/{AWKWARD} restored: expected a consumer, found none"]
    sampled = await stream_info(client, NODES)
    restored = {Chain(SITE, name): len(after[name].trail) for name in WHOLE}
    restored[Chain(SITE, NODES)] = sampled.messages if sampled else 0
    problems += await _go_on(world, client, after[AWKWARD].state["last_seq"], clock)
    exact, consumers = sum(restored[Chain(SITE, name)] for name in WHOLE), len(after[AWKWARD].consumers)
    text = (
        f"{SITE} lost its server: {exact:,} messages of {' and '.join(WHOLE)} and {counted(consumers, 'consumer')} are "
        f"as they were after {seconds:.1f} s; of {NODES}, which is sampled, what was archived"
    )
    return LostSite(restored, {Chain(SITE, AWKWARD): AFTER}, text, problems)


async def _restore(world: World, stream: str) -> None:
    lossy = ("--allow-lossy",) if stream == NODES else ()
    command = ("floe", "restore", "-c", str(world.site_config(SITE)), f"{SITE}/{stream}", "--yes", "--json", *lossy)
    await run_command(world.folder, f"restore {stream}", *command)


async def _go_on(world: World, client: FloeClient, last: int, clock: Clock) -> list[str]:
    """Return the problems if egress does not archive new messages after those it had: publishes some and runs it."""
    for number in range(AFTER):
        answer, _ = await client.request_raw(
            f"{AWKWARD.lower()}.after.{number}".encode(), b"after the loss", timeout=10.0
        )
        if json.loads(answer).get("seq") != last + 1 + number:
            return [f"{SITE}/{AWKWARD} restored: expected sequence {last + 1 + number}, found {answer.decode()}"]
    assert world.services is not None, "the services were started before"
    service = world.services.egress[SITE]
    service.start()
    settings, deadline = loader.load(str(world.central_config)), clock.monotonic() + ARRIVAL_TIMEOUT
    with closing(open_store(settings)) as store:
        while (end := max(ref.coverage.last for ref in store.list(Chain(SITE, AWKWARD)))) < last + AFTER:
            service.check()
            if clock.monotonic() > deadline:
                break
            await clock.sleep(TICK)
    await service.drain()
    begun = sorted(chain for chain in open_chains(settings).chains() if chain.site == SITE and chain.incarnation)
    problems = [f"{chain}: expected no other incarnation" for chain in begun]
    if end != last + AFTER:
        problems.append(f"{SITE}/{AWKWARD} restored: expected the archive to end at {last + AFTER}, found {end}")
    return problems
