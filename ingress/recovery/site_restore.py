"""Restore or drill all streams of a site: one feed for each stream, and the sources of a stream before the stream."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from common.clock import parse_time
from common.errors import FloeError, UsageError
from common.exits import EXIT_DIFFERENCES, EXIT_RETRY_LATER
from common.service.progress import Progress
from common.settings.root import Settings
from common.tasks import Stop
from ingress.recovery.drill import ExactDrill, ExactReport
from ingress.recovery.plan import RestorePlan, RestoreRequest
from ingress.recovery.request import RecoveryParts
from ingress.recovery.restore import Restore, RestoreReport

PARALLEL_RESTORES = 16  # most of the time of a small one is waiting: each name is watched for seconds before it is used
PARALLEL_LARGE = 4  # each fills one stream, with four threads of its own
LARGE_BYTES = 64 * 2**20
BACK_STATES = ("restored", "planned", "there")
EXISTS_CODE = "E-RESTORE-EXISTS"


@dataclass(frozen=True, slots=True)
class StreamOutcome:
    """The outcome of one stream. `state`: `restored`, `drilled`, `planned`, `there` (a stream of that name exists),
    `skipped` (no feed holds all of it, or it had no message at the point in time), `differs`, `failed` or `stopped`.
    `text`: the reason, empty if none is needed. `report`: the plan of a planned one. `hint`: the next step.
    """

    feed: str
    stream: str
    state: str
    text: str = ""
    code: int = 0
    report: RestoreReport | ExactReport | RestorePlan | None = None
    hint: str = ""

    def as_json(self) -> dict[str, Any]:
        found, named = self.report.as_json() if self.report else None, {"feed": self.feed, "stream": self.stream}
        return {**named, "state": self.state, "reason": self.text, "hint": self.hint, "report": found}

    def lines(self) -> Iterator[str]:
        yield f"{self.state:8}  {self.stream}  (feed {self.feed})" + (f": {self.text}" if self.text else "")
        yield from (f"  {line}" for line in self.hint.splitlines())
        if self.report is not None and self.state in ("planned", "differs"):
            yield from (f"  {line}" for line in self.report.lines())


@dataclass(frozen=True, slots=True)
class SiteReport:
    """The outcomes of all streams of a site, by stream."""

    site: str
    outcomes: tuple[StreamOutcome, ...]

    @property
    def exit_code(self) -> int:
        """0 if every stream is back or was there; else that of the first failure, or 3: one differs or was skipped."""
        return next((each.code for each in self.outcomes if each.state in ("failed", "stopped")), 0) or max(
            (each.code for each in self.outcomes), default=0
        )

    def as_json(self) -> dict[str, Any]:
        found = [each.as_json() for each in self.outcomes]
        return {"ok": self.exit_code == 0, "site": self.site, "streams": found}

    def lines(self) -> Iterator[str]:
        for each in self.outcomes:
            yield from each.lines()
        counts = Counter(each.state for each in self.outcomes)
        yield f"site {self.site}: " + (
            ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "none"
        )


def choose_feeds(
    plans: Iterable[RestorePlan], created_ns: Mapping[str, int]
) -> tuple[list[RestorePlan], list[RestorePlan]]:
    """Return for each stream the plan of the feed that holds all of it and reaches furthest, and of the streams that no
    feed holds whole the lossy plan with most messages. Both by stream. `created_ns`: the creation of each stream.
    """
    by_stream = defaultdict[str, list[RestorePlan]](list)
    for plan in plans:
        # A feed that ended before is of an earlier stream of the name.
        if max(parse_time(plan.created), plan.time_range_ns[1]) >= created_ns[plan.name]:
            by_stream[plan.name].append(plan)
    best = [
        max(some, key=lambda plan: (not plan.lossy, bool(plan.lossy) and plan.rows, plan.end))
        for _, some in sorted(by_stream.items())
    ]
    return [plan for plan in best if not plan.lossy], [plan for plan in best if plan.lossy]


def in_waves(plans: Sequence[RestorePlan]) -> list[list[RestorePlan]]:
    """Return the plans in the order of work: no stream of a wave has a source in a later one, unless in a circle."""
    waves, left = list[list[RestorePlan]](), {plan.name: plan for plan in plans}
    while left:
        ready = [plan for plan in left.values() if not (_sources(plan.config) & left.keys()) - {plan.name}]
        waves.append(ready or [*left.values()])
        left = {name: plan for name, plan in left.items() if plan not in waves[-1]}
    return waves


def _sources(config: Mapping[str, Any]) -> set[str]:
    """Return the names of the streams that one with this configuration sources from, on the same server."""
    return {str(each.get("name")) for each in config.get("sources") or [] if not each.get("external")}


class NamedProgress(Progress):
    """The progress of one of several streams: each line begins with the name of its stream."""

    def __init__(self, name: str, shared: Progress) -> None:
        super().__init__(is_terminal=False)
        self.name, self._shared = name, shared

    def print(self, text: str) -> None:
        self._shared.print(f"{self.name}: {text}")

    def update(self, text: str, at: float) -> None:
        self._shared.update(f"{self.name}: {text}", at)


class WholeSiteRestore:
    """One request for all feeds of a site. `make_drill`: makes the drill of a request, if the streams are drilled, one
    after another, and not restored.
    """

    def __init__(
        self,
        settings: Settings,
        request: RestoreRequest,
        parts: RecoveryParts,
        make_drill: Callable[[RestoreRequest], ExactDrill] | None = None,
    ) -> None:
        self._settings, self._request, self._parts, self._make_drill = settings, request, parts, make_drill
        self._restores: dict[str, Restore] = {}  # by feed
        self._outcomes: dict[str, StreamOutcome] = {}  # by stream; by feed if its stream is not known
        self._not_back = set[str]()  # streams, as far as known
        self._returning: dict[str, int] = {}  # the last sequence of each stream with a plan

    async def plan(self) -> list[RestorePlan]:
        """Return the plans of all streams that can come back whole; note the others as skipped or failed. Raises
        UsageError for a site without an archive.
        """
        documents = self._parts.documents
        chains = await asyncio.to_thread(documents.chains, self._request.site)
        feeds = sorted({chain.feed for chain in chains})
        if not feeds:
            known = sorted({chain.site for chain in await asyncio.to_thread(documents.chains)})
            found = ", ".join(known) or "none"
            raise UsageError(f"{self._request.site}: expected a site with an archive, found {found}")
        plans, skipped, creations = list[RestorePlan](), list[StreamOutcome](), list[tuple[str, int]]()
        for feed in feeds:
            request = replace(self._request, feed=feed, promote=self._make_drill is None)
            progress = NamedProgress(feed, self._parts.progress)
            work = self._restores[feed] = Restore(self._settings, request, self._parts._replace(progress=progress))
            work.not_back, work.returning = self._not_back, self._returning
            try:
                plans.append(plan := await work.plan())
                progress.name = plan.name
                creations.append((plan.name, parse_time(plan.created)))
            except UsageError as error:  # of the point in time: the stream had no message yet
                newest = max(chain for chain in chains if chain.feed == feed)
                document = await asyncio.to_thread(documents.read_stream, newest)
                name = str(document.config["name"]) if document else feed
                if document and (at := parse_time(document.created)) <= (self._request.to_time_ns or 0):
                    creations.append((name, at))
                skipped.append(StreamOutcome(feed, name, "skipped", error.message, EXIT_DIFFERENCES, hint=error.hint))
            except FloeError as error:
                self._note(StreamOutcome(feed, feed, "failed", error.message, error.exit_code, hint=error.hint))
        whole, lossy = choose_feeds(plans, dict(sorted(creations)))  # the last creation of each stream
        for outcome in (each for each in skipped if each.stream not in {plan.name for plan in (*whole, *lossy)}):
            self._note(outcome)  # no other feed had it then
        for plan in lossy:
            if self._request.allow_lossy:
                whole.append(plan)
            else:
                reason = "; ".join(plan.lossy[:3])
                self._note(StreamOutcome(plan.request.feed, plan.name, "skipped", reason, EXIT_DIFFERENCES))
        self._returning.update((plan.name, plan.last_sequence) for plan in whole)
        return whole

    async def check(self, plans: Sequence[RestorePlan]) -> SiteReport:
        """Ask the server what would become of each plan; nothing is written."""
        for plan in (plan for wave in in_waves(plans) for plan in wave):
            notes, refused = await self._restores[plan.request.feed].check(plan)
            feed, size = plan.request.feed, f"{plan.rows:,} messages up to sequence {plan.end}"
            shown = replace(plan, notes=(*plan.notes, *notes))
            planned = StreamOutcome(feed, plan.name, "planned", size, report=shown)
            self._note(self._refused(plan, refused) if refused else planned)
        return self._report()

    async def run(self, plans: Sequence[RestorePlan], stop: Stop, *, is_confirmed: bool) -> SiteReport:
        """Restore the streams, some at a time, until all are done or `stop` is set. The same again continues with those
        that are not back. `is_confirmed`: an operator has confirmed the plans with their effects elsewhere.
        """
        gate, large = asyncio.Semaphore(1 if self._make_drill else PARALLEL_RESTORES), asyncio.Semaphore(PARALLEL_LARGE)

        async def in_turn(plan: RestorePlan) -> None:
            async with large if plan.bytes > LARGE_BYTES else nullcontext(), gate:
                await self._run_one(plan, stop, plan if is_confirmed else None)

        for wave in in_waves(plans):
            await asyncio.gather(*map(in_turn, wave))
        return self._report()

    async def _run_one(self, plan: RestorePlan, stop: Stop, confirmed: RestorePlan | None) -> None:
        if stop.is_set:
            self._note(StreamOutcome(plan.request.feed, plan.name, "stopped", "not begun", EXIT_RETRY_LATER))
            return
        report: RestoreReport | ExactReport
        try:
            if self._make_drill is not None:
                report = await self._make_drill(plan.request).run(stop)
            else:
                work = self._restores[plan.request.feed]
                async with work.open_connection() as client:
                    report = await work.run(client, stop, confirmed)
        except FloeError as error:
            self._note(self._refused(plan, error))
            return
        state = "differs" if report.exit_code else "drilled" if self._make_drill else "restored"
        outcome = StreamOutcome(plan.request.feed, plan.name, state, "", report.exit_code, report)
        rows = report.as_json()["rows"]
        self._note(replace(outcome, text=f"{rows:,} messages" if rows else plan.empty_text))
        self._parts.progress.print(next(outcome.lines()))

    def _refused(self, plan: RestorePlan, error: FloeError) -> StreamOutcome:
        if error.code == EXISTS_CODE:
            return StreamOutcome(plan.request.feed, plan.name, "there", error.message)
        reason = f"[{error.code}] {error.message}"
        return StreamOutcome(plan.request.feed, plan.name, "failed", reason, error.exit_code, hint=error.hint)

    def _note(self, outcome: StreamOutcome) -> None:
        self._outcomes[outcome.stream] = outcome
        (self._not_back.discard if outcome.state in BACK_STATES else self._not_back.add)(outcome.stream)

    def _report(self) -> SiteReport:
        return SiteReport(self._request.site, tuple(each for _, each in sorted(self._outcomes.items())))

    def close(self) -> None:
        with ExitStack() as stack:
            for each in self._restores.values():
                stack.enter_context(closing(each))
