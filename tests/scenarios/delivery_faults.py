"""Random faults of servers, instances and lines, which overlap; a quarter of the time there are none."""

import asyncio
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

from common.errors import FloeError
from common.nats.api import stream_info
from common.nats.client import FloeClient
from infra.local.nats import NatsServer
from tests.scenarios.delivery_centre import LEASE_SECONDS, TARGET, Centre, Instance
from tests.scenarios.delivery_meter import Meter, until

SERVERS = ("stepdown", "server SIGKILL", "server SIGSTOP")
INGRESS = ("ingress SIGKILL", "ingress SIGSTOP")
LINES = ("cut", "blackhole up", "blackhole down", "lost acknowledgements")
KINDS = (*SERVERS, *INGRESS, *LINES)

# Of a message or batch that the target stored; of a fast batch that continues.
ACKNOWLEDGEMENT = re.compile(rb'"stream": ?"%b"|"type": ?"ack"' % TARGET.encode())
STORM = (5.0, 9.0)  # seconds of faults, followed by a third of them without
LOST_WITHIN = 8.0  # seconds until somebody gets an acknowledgement in a storm
CALM_WITHIN = 90.0  # seconds for changes that take few on a quiet machine, while nothing else is broken
STARTED = 20.0  # seconds for an instance to start
PATIENCE = 4.0  # times the requested length, at most, until a run has proved something
AT_LEAST = 360.0  # seconds that a short run may take for the same


def deck(kinds: tuple[str, ...], rng: random.Random) -> Iterator[str]:
    """Yield kinds in random order; each comes once before any comes again."""
    while True:
        yield from rng.sample(kinds, len(kinds))


class Faults:
    """Faults at a centre. `counts`: how many faults of each kind were made.

    `acknowledgements_lost`: how many of a target's were lost, so that only the target can show if it stored them.
    """

    def __init__(self, centre: Centre, meter: Meter, rng: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self.acknowledgements_lost = 0
        self._centre, self._meter, self._rng = centre, meter, rng
        # Each has a source of its own, so that one seed gives one row of faults for each.
        self._parts = [
            (deck(kinds, random.Random(rng.random())), pause, make)
            for kinds, pause, make in (
                (SERVERS, (0.5, 3.0), self._trouble_server),
                (INGRESS, (0.5, 2.5), self._trouble_ingress),
                (LINES, (0.2, 2.0), self._trouble_line),
            )
        ]

    async def run(self, seconds: float, proved: Callable[[], bool]) -> None:
        """Make storms and calms in turn for `seconds`, longer until they have proved something; then heal. Faults
        without effect so far are then made in the calms.

        `proved`: true if all else that must have happened did.
        """
        started = time.monotonic()
        async with self._centre.client("faults") as client:
            while (spent := time.monotonic() - started) < seconds or not (self._has_proved() and proved()):
                if spent > max(AT_LEAST, PATIENCE * seconds):
                    return  # the judge of the run reports the missing parts
                begun = time.monotonic()
                end = begun + self._rng.uniform(*STORM)
                await asyncio.gather(*(self._storm(client, end, *part) for part in self._parts))
                await self._centre.heal()
                await self._up(*self._centre.instances)
                if spent >= seconds:
                    await self._provoke()
                await asyncio.sleep((time.monotonic() - begun) / 3)

    async def _provoke(self) -> None:
        """Make the faults without effect so far alone: in storms on a busy machine perhaps no instance can publish."""
        if not (self.acknowledgements_lost and self._meter.unclear):
            self.counts["lost acknowledgements"] += 1
            await self._lose_acknowledgements(CALM_WITHIN)
            await until(lambda: self._meter.unclear > 0, CALM_WITHIN)
        holder = next((each for each in self._centre.instances if each.name == self._meter.holder), None)
        if holder is not None and not self._meter.take_overs:
            self.counts["ingress SIGSTOP"] += 1
            holder.service.send(signal.SIGSTOP)
            try:
                await until(lambda: self._meter.take_overs > 0, CALM_WITHIN)
            finally:
                holder.service.send(signal.SIGCONT)

    def _has_proved(self) -> bool:
        """Return true if there was every kind of fault, unclear outcomes, and a takeover."""
        done = (self.acknowledgements_lost, self._meter.unclear, self._meter.take_overs)
        return set(self.counts) == set(KINDS) and all(done)

    async def _up(self, *instances: Instance) -> None:
        """Wait until they have started, so that there is something to break: a slow machine takes long."""
        await until(lambda: all(self._meter.answers(instance) for instance in instances), STARTED)

    async def _storm(
        self,
        client: FloeClient,
        until: float,
        kinds: Iterator[str],
        pause: tuple[float, float],
        make: Callable[[FloeClient, str], Awaitable[None]],
    ) -> None:
        """Make faults of one part, one after the other."""
        while time.monotonic() < until:
            await asyncio.sleep(self._rng.uniform(*pause))
            kind = next(kinds)
            await make(client, kind)
            self.counts[kind] += 1
            if make == self._trouble_ingress:  # other kinds follow while instances are killed for a while
                self._centre.supervise()

    # Servers: never two of three at once, since JetStream promises nothing then

    async def _trouble_server(self, client: FloeClient, kind: str) -> None:
        server = await self._server(client)
        if kind == "stepdown":
            with suppress(FloeError):  # there is no leader now, or its answer is lost with it
                await client.api(f"STREAM.LEADER.STEPDOWN.{TARGET}")
            return
        if kind == "server SIGKILL":
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(self._rng.uniform(0.1, 1.5))
            server.start(wait=False)
        else:
            server.pause()
            await asyncio.sleep(self._rng.uniform(0.5, 4.0))
            server.resume()
        await asyncio.to_thread(server.wait_ready, 60)

    async def _server(self, client: FloeClient) -> NatsServer:
        """Return the leader of the target, more often than not, if it is known; else any server."""
        with suppress(FloeError):
            info = await stream_info(client, TARGET)
            if info is not None and info.leader and self._rng.random() < 0.6:
                return self._centre.cluster.server(info.leader)
        return self._rng.choice(self._centre.cluster.servers)

    # Instances

    async def _trouble_ingress(self, client: FloeClient, kind: str) -> None:
        instance = self._victim()
        if kind == "ingress SIGKILL":
            await self._meter.look()
            await asyncio.to_thread(instance.service.kill)
            await asyncio.sleep(self._rng.uniform(0.0, 1.5) * LEASE_SECONDS)
            instance.service.start()
            await self._up(instance)
            return
        instance.service.send(signal.SIGSTOP)
        await asyncio.sleep(self._rng.uniform(1.1, 2.0) * LEASE_SECONDS)
        instance.service.send(signal.SIGCONT)

    def _victim(self) -> Instance:
        """Return the instance that holds the target, four times in five."""
        holder = next((i for i in self._centre.instances if i.name == self._meter.holder), None)
        return holder if holder and self._rng.random() < 0.8 else self._rng.choice(self._centre.instances)

    # Connections

    async def _trouble_line(self, client: FloeClient, kind: str) -> None:
        instance = self._victim()
        if kind == "cut":
            for proxy in instance.proxies:
                proxy.cut()
        elif kind == "lost acknowledgements":
            await self._lose_acknowledgements(LOST_WITHIN)
        else:
            for proxy in instance.proxies:
                proxy.blackhole(kind.removeprefix("blackhole "))
            await asyncio.sleep(self._rng.uniform(0.1, 4.0))
            instance.heal()

    async def _lose_acknowledgements(self, seconds: float) -> None:
        """Lose the next acknowledgement of any line, and reset its connection. The messages sent before it arrive.

        Every line waits for an acknowledgement: right now perhaps no instance can publish.
        """
        proxies = [proxy for instance in self._centre.instances for proxy in instance.proxies]
        lost = [asyncio.create_task(proxy.lose(ACKNOWLEDGEMENT).wait()) for proxy in proxies]
        done, _ = await asyncio.wait(lost, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        self.acknowledgements_lost += len(done)
        for proxy, task in zip(proxies, lost, strict=True):
            proxy.lose_nothing()
            task.cancel()
