"""A drill: a part of the archive is replayed into a scratch stream, read back and compared."""

from __future__ import annotations

import asyncio
import secrets
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from common.chain import Chain
from common.clock import Clock
from common.errors import Stopped, Unavailable
from common.jetstream.api import stream_info
from common.jetstream.client import FloeClient
from common.jetstream.headers import restore
from common.segments.archive import read_cover
from common.segments.documents import ChainStore
from common.segments.parquet import messages
from common.segments.segment import Message
from common.segments.store import SegmentStore
from common.sequences import cover
from common.service.pasting import command, ways
from common.service.threads import Threads
from common.settings.root import Settings
from common.settings.units import format_duration
from common.tasks import beside
from ingress.errors import leading
from ingress.replay.compare import Differences, Trail, compare
from ingress.replay.options import Options, Result
from ingress.replay.outlook import former_of
from ingress.replay.plan import ChainRange, Plan
from ingress.replay.progress import Teller, size_text
from ingress.replay.reading import read_all
from ingress.replay.receipt import Remembered
from ingress.replay.replay import Replay
from ingress.replay.request import Request
from ingress.replay.scratch import NAME, ROOT, Scratch
from ingress.replay.survey import known_chains

LAST_SEQUENCES = 10_000  # what is drilled without bounds
SLACK = 64 * 1024 * 1024  # bytes of the scratch stream above the messages
DIFFERENCES = 3


@dataclass(frozen=True, slots=True)
class Report:
    """What a drill found. `full_seconds`: what a replay of the whole feed would take at this rate, None where
    nothing was replayed. `problems`: lines of reading the archive."""

    request: Request
    result: Result
    plan: Plan
    differences: Differences
    full_seconds: float | None
    problems: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return 0 if self.differences.none and not self.plan.holes and not self.problems else DIFFERENCES

    def as_json(self) -> dict[str, Any]:
        found = self.differences
        return {
            "ok": self.exit_code == 0,
            "request": self.request.to_json(),
            "rows": found.found,
            "bytes": self.result.bytes,
            "seconds": round(self.result.seconds, 3),
            "rows_per_second": round(self.result.rate),
            "full_restore_seconds": self.full_seconds and round(self.full_seconds, 3),
            "expected": found.expected,
            "lost": found.lost,
            "repeated": found.repeated,
            "out_of_order": found.out_of_order,
            "altered": found.altered,
            "unexpected": found.unexpected,
            "examples": list(found.examples),
            "holes": self.plan.as_json()["holes"],
            "problems": list(self.problems),
        }

    def lines(self) -> Iterator[str]:
        result, feed = self.result, f"{self.request.site}/{self.request.feed}"
        took = f"{format_duration(round(result.seconds, 1))}, {result.rate:,.0f} msg/s"
        yield f"{feed}: {self.differences.found:,} messages, {size_text(result.bytes)} in {took}"
        yield f"{'as in the archive' if self.exit_code == 0 else 'NOT WELL'}: {self.differences.line()}"
        yield from self.differences.examples
        yield from self.problems
        yield from (f"hole: {hole.chain} {hole.rows}" for hole in self.plan.holes[:10])
        if self.full_seconds is not None:
            yield f"the whole feed would take about {format_duration(round(self.full_seconds, 1))}"


_FOREIGN = Chain("unknown", "unknown")  # messages of the scratch stream that Floe did not write


class Drill:
    """One drill, with a scratch stream of its own."""

    def __init__(
        self,
        settings: Settings,
        store: SegmentStore,
        documents: ChainStore,
        clock: Clock,
        teller: Teller,
        storage: str = "file",
    ) -> None:
        self._settings, self._store, self._documents = settings, store, documents
        self._clock, self._teller, self._storage = clock, teller, storage
        number = secrets.token_hex(6)
        self.stream, self.prefix = f"{NAME}{number}", f"{ROOT}.{number}"
        self._threads = Threads("drill", 2)

    async def run(self, request: Request, stop: asyncio.Event) -> Report:
        """Drill `request`, whose target and prefix are `stream` and `prefix`.

        Raises Unavailable where `stop` is set before the end. The scratch stream is removed whatever happens.
        """
        request = await self._threads.run(self._bounded, request)
        options = Options(allow_lossy=True, skip_holes=True)
        work = Replay(
            self._settings, request, options, self._store, self._documents, self._clock, self._teller
        )
        try:
            async with work.connected() as client:
                return await self._drilled(work, client, stop)
        except Stopped as error:
            # Its commands name the scratch stream, which is gone by now.
            error.hint = ways(("mend what the message names, and drill again", self._again(request)))
            raise
        finally:
            self._threads.close()

    def _again(self, request: Request) -> str:
        words = shlex.split(request.words())
        for option, value in (("--target", self.stream), ("--subject-prefix", self.prefix)):
            at = words.index(option)
            assert words[at + 1] == value
            del words[at : at + 2]
        return command("drill", shlex.join(words))

    async def _drilled(self, work: Replay, client: FloeClient, stop: asyncio.Event) -> Report:
        scratch = Scratch(client, work.service, self._settings.instance, self._clock)
        for name in await scratch.sweep():
            self._teller.say(f"removed {name}, which a former drill left")
        plan = (await work.outlook(client)).found.plan
        reports: list[Report] = []

        async def main() -> None:
            most = 2 * plan.raw_bytes + 1024 * plan.rows + SLACK
            await scratch.make(self.stream, self.prefix, self._storage, most)
            reports.append(await self._compared(work, client, plan, stop))

        async with scratch.claimed(self.stream) as lease:
            try:
                await beside(main(), lease.keep())
            except BaseExceptionGroup as errors:
                raise leading(errors) from None
        return reports[0]

    async def _compared(self, work: Replay, client: FloeClient, plan: Plan, stop: asyncio.Event) -> Report:
        result = await work.run(client, stop)
        former = await former_of(client, work.service.state_bucket, self.stream)
        if not result.finished or not isinstance(former, Remembered) or stop.is_set():
            raise Unavailable("the drill was stopped before its end", hint="give the same command again")
        found = await self._found(client)
        ranges, problems = former.receipt.ranges, list[str]()
        expected = await self._threads.run(self._expected, ranges, problems)
        total = Differences()
        for chain in sorted({*expected, *found}):
            one = compare(expected.get(chain, Trail()), found.get(chain, Trail()), str(chain))
            total = total.plus(one)
        # Holes are told by the plan, those that are accepted are none.
        told = tuple(line for line in problems if not line.startswith("no segment covers"))
        full = await self._threads.run(self._full_seconds, work.request, plan, result)
        return Report(work.request, result, plan, total, full, told)

    def _bounded(self, request: Request) -> Request:
        """`request`; the last sequences where it has no bounds. Blocking."""
        if any((request.by_sequence, request.from_time, request.to_time, request.since)):
            return request
        chains = request.chains(known_chains(self._documents, request))
        newest = [chain for chain in chains if chain.incarnation == chains[-1].incarnation]
        ends = [ref.coverage.last for chain in newest for ref in self._store.list(chain)]
        if not ends:
            return request
        first = max(1, max(ends) - LAST_SEQUENCES + 1)
        return replace(request, incarnation=newest[0].incarnation, from_sequence=first)

    # What came back, and what should have

    async def _found(self, client: FloeClient) -> dict[Chain, Trail]:
        info = await stream_info(client, self.stream)
        if info is None:
            raise Unavailable(f"scratch stream {self.stream} is gone")
        trails: dict[Chain, Trail] = {}
        strip = len(self.prefix) + 1

        def take(stored: Message) -> None:
            origin, headers = restore(stored.headers)
            if origin is None:
                trails.setdefault(_FOREIGN, Trail()).add(stored)
                return
            message = Message(
                origin.sequence, origin.timestamp_ns, stored.subject[strip:], headers, stored.payload
            )
            trails.setdefault(origin.chain, Trail()).add(message)

        await read_all(client, info, take)
        return trails

    def _expected(self, ranges: tuple[ChainRange, ...], problems: list[str]) -> dict[Chain, Trail]:
        """By another way through the archive than the replay took. Blocking."""
        trails: dict[Chain, Trail] = {}
        for each in ranges:
            trail = trails.setdefault(each.chain, Trail())
            document = self._documents.read_chain(each.chain)
            relay = document is not None and document.relay
            refs = self._store.list(each.chain, position=each.rows.first)
            for batch in read_cover(self._store, refs, each.rows, problems.append):
                for message in messages(batch):
                    # Former hops of a relay stand among those that the replay adds.
                    trail.add(replace(message, headers=restore(message.headers)[1]) if relay else message)
        return trails

    def _full_seconds(self, request: Request, plan: Plan, result: Result) -> float | None:
        """By stored bytes: what the whole feed has over what was replayed. Blocking."""
        drilled = sum(p.stretch.segment.size * p.rows / max(1, p.footer.rows) for p in plan.parts)
        if not drilled:
            return None
        chains = self._documents.chains(request.site, request.feed)
        whole = sum(s.segment.size for chain in chains for s in cover(self._store.list(chain), 1))
        return result.seconds * whole / drilled
