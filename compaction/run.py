"""One run of compaction: list, plan, merge, prove, tombstone, delete after the grace; then the snapshots.

Every step may be repeated, doubled or cut off; what a run finds half done it takes up where it is:

    put, not proved        the inputs are found contained in the output, proved, tombstoned
    proved, no tombstone   as above: the proof is made again
    tombstoned             deleted once the grace is over, if what replaces them is intact
    deleted in part        the rest is deleted; the tombstone goes when a later run sees nothing of it listed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from common.chain import Chain
from common.errors import DataError, FloeError, Refused
from common.failpoints import failpoint
from common.segments.documents import ChainStore
from common.segments.segment import SegmentRef
from common.segments.snapshots import SnapshotRef
from common.segments.store import SegmentStore
from common.service.logs import get_logger
from compaction.failures import Failure
from compaction.merge import Merged
from compaction.plan import Output, Policy, plan
from compaction.snapshots import Pruning
from compaction.supersede import Supersession, contained, made_by
from compaction.tombstones import Tombstones, condemned, deletable, done, valid
from compaction.work import Prover, Runner, merge_one

log = get_logger("compaction.run")

LISTINGS_AT_ONCE = 8
SEGMENTS_OF_A_TOMBSTONE = 10_000  # about 1 MB
ROUNDS = 3  # of planning again because of segments that were damaged or gone

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which chains and levels to compact; None selects all. `level`: the one that is read."""

    site: str | None = None
    feed: str | None = None
    partition: int | None = None
    level: int | None = None


@dataclass(slots=True)
class Report:
    """What a run did."""

    merged: list[Merged] = field(default_factory=list)
    tombstones: list[str] = field(default_factory=list)
    deleted: list[SegmentRef] = field(default_factory=list)
    pruned: list[SnapshotRef] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Survey:
    """What is to be done in one chain. `going`, `outdated`: what may be deleted now."""

    chain: Chain
    outputs: tuple[Output, ...]
    leftovers: tuple[Supersession, ...]
    going: tuple[SegmentRef, ...]
    problems: tuple[Failure, ...]
    outdated: tuple[SnapshotRef, ...] = ()


class Compaction:
    """Compacts the chains of one store by `policies`. `grace`: seconds; None: nothing is deleted."""

    def __init__(
        self,
        store: SegmentStore,
        policies: Sequence[Policy],
        grace: float | None,
        runner: Runner,
        prover: Prover,
    ) -> None:
        self._store = store
        self._chains = ChainStore(store.objects, store.layout)
        self._tombstones = Tombstones(store.objects, store.layout)
        self._policies, self._grace = policies, grace
        self._pruning = Pruning(store, grace) if grace is not None else None
        self._runner, self._prover = runner, prover

    def preview(self, selection: Selection) -> list[Survey]:
        """What a run would begin with. It writes nothing but the object that tells the store's time."""
        try:
            now = self._tombstones.now()
        except Refused:
            now = 0.0  # a credential that may only read: the youngest object of each chain is its time
        chains = self._selected(selection)
        surveys = self._surveys(chains, selection, now, frozenset())
        return _at_once(lambda survey: self._with_outdated(survey, now), surveys)

    def _with_outdated(self, survey: Survey, now: float) -> Survey:
        if self._pruning is None:
            return survey
        due = self._pruning.due(survey.chain, now)
        return replace(survey, outdated=tuple(due.refs), problems=(*survey.problems, *due.failures))

    def run(self, selection: Selection) -> Report:
        """Do all that is due. Raises what the store raises when it cannot even be listed."""
        report = Report()
        chains = self._selected(selection)
        damaged = self._work(chains, selection, frozenset(), report)
        if self._grace is not None:
            found = self._delete(chains, self._grace, report)
            if found - damaged:
                # What a damaged output was made of is still there: merged again, it is put right.
                self._work(chains, selection, damaged | found, report)
            self._prune(chains, report)
        report.failures = list(dict.fromkeys(report.failures))
        failpoint("compaction.done")
        return report

    def _work(
        self, chains: Sequence[Chain], selection: Selection, damaged: frozenset[str], report: Report
    ) -> frozenset[str]:
        """Plan, merge, prove and tombstone; again where segments were gone or damaged. All damaged ones."""
        for round_number in range(1, ROUNDS + 1):
            surveys = self._surveys(chains, selection, self._tombstones.now(), damaged)
            failures = self._merge_and_prove(surveys, report)
            report.failures += [f for f in failures if not f.is_stale or round_number == ROUNDS]
            found = frozenset(key for failure in failures for key in failure.damaged)
            if not any(f.is_stale for f in failures) and found <= damaged:
                break
            damaged |= found
            log.info("planning again", action="plan_again", failures=len(failures), damaged=len(damaged))
        return damaged

    # Deciding

    def _selected(self, selection: Selection) -> list[Chain]:
        chains = self._chains.chains(selection.site, selection.feed)
        return [c for c in chains if selection.partition in (None, c.partition)]

    def _surveys(
        self, chains: Sequence[Chain], selection: Selection, now: float, damaged: frozenset[str]
    ) -> list[Survey]:
        policies = [p for p in self._policies if selection.level in (None, p.from_)]
        return _at_once(lambda chain: self._survey(chain, policies, now, damaged), chains)

    def _survey(
        self, chain: Chain, policies: Sequence[Policy], now: float, damaged: frozenset[str]
    ) -> Survey:
        segments = self._store.list(chain)
        standing, problems = self._tombstones.list(chain)
        failpoint("compaction.list")
        now = now or max((s.modified for s in segments), default=0.0)
        buried = condemned(valid(segments, standing))
        sound = [s for s in segments if s.key not in damaged]
        outputs = [o for policy in policies for o in plan(sound, policy, now)]
        going = deletable(segments, standing, now, self._grace) if self._grace is not None else []
        failpoint("compaction.plan")
        return Survey(
            chain,
            tuple(outputs),
            tuple(contained([s for s in sound if s.key not in buried])),
            tuple(s for _, may_go in going for s in may_go),
            tuple(Failure.of(f"tombstones of {chain}", problem) for problem in problems),
        )

    # Doing

    def _merge_and_prove(self, surveys: Iterable[Survey], report: Report) -> list[Failure]:
        surveys = list(surveys)
        failures = [problem for survey in surveys for problem in survey.problems]
        outputs = sorted((o for s in surveys for o in s.outputs), key=lambda o: o.size, reverse=True)
        if outputs:
            total = sum(output.size for output in outputs)
            log.info("merging", action="merge_started", outputs=len(outputs), bytes=total)
        results = self._runner.map(merge_one, outputs) if outputs else []
        merged = [result for result in results if isinstance(result, Merged)]
        report.merged += merged
        failures += [result for result in results if isinstance(result, Failure)]
        supersessions = [made_by(m.ref, m.output.inputs) for m in merged]
        supersessions += [leftover for survey in surveys for leftover in survey.leftovers]
        return failures + list(self._prove(supersessions, report))

    def _prove(self, supersessions: list[Supersession], report: Report) -> Iterator[Failure]:
        failpoint("compaction.verify")
        while supersessions:
            verdicts = self._prover.prove(supersessions)
            doubtful: list[Supersession] = []
            for supersession, failure in zip(supersessions, verdicts, strict=True):
                if failure is None:
                    # Only now: everything that the tombstone names was found in what replaces it.
                    for part in supersession.parts(SEGMENTS_OF_A_TOMBSTONE):
                        report.tombstones.append(self._tombstones.put(part))
                        failpoint("compaction.tombstone")
                elif _may_hold_in_part(supersession, failure):
                    doubtful += supersession.parts(-(-len(supersession.superseded) // 2))
                else:
                    yield failure
            supersessions = doubtful

    def _delete(self, chains: Sequence[Chain], grace: float, report: Report) -> frozenset[str]:
        """Delete what may go; the keys of replacing segments that are damaged."""
        now = self._tombstones.now()
        failpoint("compaction.grace")
        failures: list[Failure] = []
        for deleted, problems in _at_once(lambda chain: self._delete_in(chain, now, grace), chains):
            report.deleted += deleted
            failures += problems
        report.failures += failures
        return frozenset(key for failure in failures for key in failure.damaged)

    def _delete_in(self, chain: Chain, now: float, grace: float) -> tuple[list[SegmentRef], list[Failure]]:
        standing, _problems = self._tombstones.list(chain)
        if not standing:
            return [], []
        segments = self._store.list(chain)
        deleted: list[SegmentRef] = []
        failures: list[Failure] = []
        for stone, going in deletable(segments, standing, now, grace):
            damaged = [s for s in stone.tombstone.superseding if not self._store.is_intact(s)]
            failures += [_not_intact(s) for s in damaged]
            for segment in () if damaged else going:
                failpoint("compaction.delete_some")
                failure = _attempt(f"delete of {segment.key}", partial(self._store.delete, segment))
                failures += [failure] if failure else []
                deleted += [] if failure else [segment]
        for stone in done(segments, standing):
            self._tombstones.delete(stone)
        if deleted:
            log.info("inputs deleted", action="inputs_deleted", **chain.log_context(), segments=len(deleted))
        return deleted, failures

    def _prune(self, chains: Sequence[Chain], report: Report) -> None:
        """Clear away snapshots of samplers."""
        if self._pruning is None:
            return
        now, pruning = self._tombstones.now(), self._pruning
        for pruned in _at_once(lambda chain: pruning.prune(chain, now), chains):
            report.pruned += pruned.refs
            report.failures += pruned.failures


def _at_once(work: Callable[[U], T], items: Sequence[U]) -> list[T]:
    """`work` of each chain, several at once: it mostly waits for the store."""
    with ThreadPoolExecutor(LISTINGS_AT_ONCE) as pool:
        return list(pool.map(work, items))


def _may_hold_in_part(supersession: Supersession, failure: Failure) -> bool:
    """Whether one late segment may be keeping others, found contained along with it, from being proved."""
    is_about_data = failure.exit_code == DataError.exit_code and not failure.damaged and not failure.is_stale
    return is_about_data and not supersession.exact and len(supersession.superseded) > 1


def _attempt(what: str, action: Callable[[], None]) -> Failure | None:
    try:
        action()
    except FloeError as error:
        return Failure.of(what, error)
    return None


def _not_intact(segment: SegmentRef) -> Failure:
    error = DataError(
        f"segment {segment.key} replaces others and does not read back as its name says",
        hint="nothing that it replaces was deleted; those are merged again",
        code="E-READ-BACK",
    )
    failure = Failure.of(f"deletion in {segment.chain}", error)
    return replace(failure, damaged=frozenset({segment.key}))
