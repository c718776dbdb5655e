"""One run of compaction: list, plan, merge, prove, tombstone, delete after the grace; then the snapshots.

Every step may be repeated, doubled or cut off; what a run finds half done it takes up where it is:

    put, not proved        the inputs are found contained in the output, proved, tombstoned
    proved, no tombstone   as above: the proof is made again
    tombstoned             deleted once the grace is over, if what replaces them is intact
    deleted in part        the rest is deleted; the tombstone goes when a later run sees nothing of it listed

A chain may have a million segments. One listing of it is kept as a table; references are made window by
window, and a round works in batches, so that no more of them are held at once than one batch needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

from common.chain import Chain
from common.errors import DataError, FloeError, Refused, SegmentCorrupt
from common.failpoints import failpoint
from common.objects.port import ObjectInfo
from common.segments.documents import ChainStore, SnapshotRef, carry_late
from common.segments.segment import SegmentRef
from common.segments.store import SegmentStore
from common.segments.table import WINDOW, SegmentTable
from common.service.logs import get_logger
from compaction.compare import prove_by_reading
from compaction.failures import Failure
from compaction.merge import Merged, merge
from compaction.plan import Output, Planner, Policy, unite
from compaction.supersede import Reported, Supersession, contained, made_by
from compaction.tombstones import Pruning, TombstoneIndex, Tombstones

log = get_logger("compaction.run")


I = TypeVar("I")  # noqa: E741
R = TypeVar("R")


class Runner(Protocol):
    """Somewhere to work."""

    def map(self, work: Callable[[SegmentStore, I], R], items: Sequence[I]) -> list[R]:
        """What `work` answers for each item, in their order; the first items are begun first."""
        ...


class Prover(Protocol):
    """Proves I5, by other code than wrote the segments."""

    def prove(self, supersessions: Sequence[Supersession]) -> list[Failure | None]:
        """For each of them None where every superseded row was found, else why it was not."""
        ...


class LocalRunner:
    """This process, one item after the other."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store

    def map(self, work: Callable[[SegmentStore, I], R], items: Sequence[I]) -> list[R]:
        results = []
        for number, item in enumerate(items, 1):
            results.append(work(self._store, item))
            log.info("item done", action="item_done", work=work.__name__, item=number, of=len(items))
        return results


class ReadingProver:
    """Reads both sides again and compares them row by row."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def prove(self, supersessions: Sequence[Supersession]) -> list[Failure | None]:
        return self._runner.map(prove_one, supersessions)


def merge_one(store: SegmentStore, output: Output) -> Merged | Failure:
    """Make one output."""
    try:
        merged = merge(store, output)
    except FloeError as error:
        return Failure.of(
            f"merge of {output.coverage} of {output.chain} to level {output.level}", error, output.chain
        )
    log.info("segment merged", action="segment_merged", **output.log_context(), rows=merged.rows)
    return merged


def prove_one(store: SegmentStore, supersession: Supersession) -> Failure | None:
    """Prove one supersession by reading."""
    try:
        prove_by_reading(store, supersession)
    except FloeError as error:
        return unproved(store, supersession, error)
    return None


def unproved(store: SegmentStore, supersession: Supersession, error: FloeError) -> Failure:
    """The failure of a proof, and which of the superseding segments are damaged in the store."""
    first, last = supersession.superseded[0], supersession.superseding[-1]
    count = len(supersession.superseded)
    failure = Failure.of(
        f"proof of {first.chain}: {count} segments by {last.name} of level {last.level}", error, first.chain
    )
    if not isinstance(error, SegmentCorrupt):
        return failure
    damaged = frozenset(s.key for s in supersession.superseding if not store.is_intact(s))
    return replace(failure, damaged=damaged)


LISTINGS_AT_ONCE = 8
SEGMENTS_OF_A_TOMBSTONE = 10_000  # about 1 MB
BATCH = 30_000  # segments that are read in one batch of merges and proofs at least, where there are as many
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
    """What a run did. `told`: those of `failures` that an earlier run has told."""

    merged: list[Merged] = field(default_factory=list)
    tombstones: list[str] = field(default_factory=list)
    deleted: SegmentTable = field(default_factory=SegmentTable)
    pruned: list[SnapshotRef] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    told: list[Failure] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ChainSurvey:
    """What is to be done in one chain, or in one window of it. `in_use`: keys of segments that contain some
    of `leftovers` and that an earlier survey of the same listing merges. `going`, `outdated`: what may be
    deleted now, which only a preview works out.
    """

    chain: Chain
    outputs: tuple[Output, ...] = ()
    leftovers: tuple[Supersession, ...] = ()
    going: tuple[SegmentRef, ...] = ()
    problems: tuple[Failure, ...] = ()
    outdated: tuple[SnapshotRef, ...] = ()
    in_use: frozenset[str] = frozenset()

    @property
    def segments(self) -> int:
        """How many a run has to read, or thereabouts."""
        return sum(len(o.inputs) for o in self.outputs) + sum(len(s.superseded) for s in self.leftovers)


@dataclass(frozen=True, slots=True)
class ListedChain:
    """What one chain's listings showed. `problems`: with objects among the tombstones."""

    chain: Chain
    segments: SegmentTable
    tombstones: TombstoneIndex
    problems: tuple[Failure, ...]


class Compaction:
    """Compacts the chains of one store by `policies`. `grace`: seconds; None: nothing is deleted.

    `window`, `batch`: how many segments are looked at together, and read in one batch, at least.
    """

    def __init__(
        self,
        store: SegmentStore,
        policies: Sequence[Policy],
        grace: float | None,
        runner: Runner,
        prover: Prover,
        *,
        window: int = WINDOW,
        batch: int = BATCH,
    ) -> None:
        self._store, self._window, self._batch = store, window, batch
        self._chains = ChainStore(store.objects, store.layout)
        self._tombstones = Tombstones(store.objects, store.layout)
        self._reported = Reported(store.objects, store.layout)
        self._policies, self._grace = policies, grace
        self._pruning = Pruning(store, grace) if grace is not None else None
        self._runner, self._prover = runner, prover

    def preview(self, selection: Selection) -> list[ChainSurvey]:
        """What a run would begin with, chain by chain; all of it at once in memory.

        It writes nothing but the object that tells the store's time.
        """
        try:
            now = self._tombstones.now()
        except Refused:
            now = 0.0  # a credential that may only read: the youngest object of each chain is its time
        chains = self._selected(selection)
        return _at_once(lambda chain: self._foretold(chain, selection, now), chains)

    def _foretold(self, chain: Chain, selection: Selection, now: float) -> ChainSurvey:
        listed = self._listed(chain)
        surveys = list(self._survey(listed, selection, now, frozenset()))
        whole = ChainSurvey(
            chain,
            tuple(output for survey in surveys for output in survey.outputs),
            tuple(leftover for survey in surveys for leftover in survey.leftovers),
            problems=listed.problems,
        )
        if self._grace is None or self._pruning is None:
            return whole
        going = listed.tombstones.deletable(now or listed.segments.newest, self._grace)
        due = self._pruning.due(chain, now)
        return replace(
            whole,
            going=tuple(segment for each in going for segment in each.superseded),
            outdated=tuple(due.refs),
            problems=(*whole.problems, *due.failures),
        )

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
        # A run over one level does not meet what is wrong with others.
        self._remember(chains if selection.level is None else [], report)
        failpoint("compaction.done")
        return report

    def _work(
        self, chains: Sequence[Chain], selection: Selection, damaged: frozenset[str], report: Report
    ) -> frozenset[str]:
        """Plan, merge, prove and tombstone; again where segments were gone or damaged. All damaged ones."""
        for round_number in range(1, ROUNDS + 1):
            now, failures = self._tombstones.now(), []
            for surveys in self._batches(chains, selection, now, damaged):
                failures += self._merge_and_prove(surveys, report)
            report.failures += [f for f in failures if not f.is_stale or round_number == ROUNDS]
            found = frozenset(key for failure in failures for key in failure.damaged)
            if not any(f.is_stale for f in failures) and found <= damaged:
                break
            damaged |= found
            log.info("planning again", action="plan_again", failures=len(failures), damaged=len(damaged))
        return damaged

    def told(self, failures: Iterable[Failure]) -> list[Failure]:
        """Those of `failures` that an earlier run has told."""
        return self._reported.told(failures)

    def _remember(self, chains: Sequence[Chain], report: Report) -> None:
        """Tell what was told before from what is new; without that memory all of it is new."""
        try:
            report.told = self._reported.told(report.failures)
            self._reported.remember(chains, report.failures)
        except FloeError as error:
            report.failures.append(Failure.of("memory of what was told", error))

    # Deciding

    def _selected(self, selection: Selection) -> list[Chain]:
        chains = self._chains.chains(selection.site, selection.feed)
        return [c for c in chains if selection.partition in (None, c.partition)]

    def _batches(
        self, chains: Sequence[Chain], selection: Selection, now: float, damaged: frozenset[str]
    ) -> Iterator[list[ChainSurvey]]:
        """What is to be done in all chains, some of it at a time: enough for many executors."""
        batch: list[ChainSurvey] = []
        count = 0
        for listed in _ahead(self._listed, chains):
            for survey in self._survey(listed, selection, now, damaged):
                batch.append(survey)
                count += survey.segments
                if count >= self._batch:
                    yield batch
                    batch.clear()  # before the next is gathered: the caller still has the list
                    count = 0
        yield batch

    def _listed(self, chain: Chain) -> ListedChain:
        segments = self._store.table(chain)
        index, problems = self._index(chain, segments, self._tombstones.names(chain))
        failpoint("compaction.list")
        return ListedChain(chain, segments, index, tuple(problems))

    def _index(
        self, chain: Chain, segments: SegmentTable, names: Iterable[ObjectInfo]
    ) -> tuple[TombstoneIndex, list[Failure]]:
        """What the tombstones say of `segments`, and what objects beside them are none; one at a time."""
        index, problems = TombstoneIndex(segments), []
        for info in names:
            try:
                stone = self._tombstones.read(chain, info)
            except DataError as error:
                problems.append(_unsound(chain, info.key, error))
            else:
                if stone is not None:
                    index.add(stone)
        return index, problems

    def _survey(
        self, listed: ListedChain, selection: Selection, now: float, damaged: frozenset[str]
    ) -> Iterator[ChainSurvey]:
        """What is to be done in one chain, window by window; pure."""
        chain, segments, buried = listed.chain, listed.segments, listed.tombstones.buried()
        policies = [p for p in self._policies if selection.level in (None, p.from_)]
        planners = [Planner(policy, now or segments.newest) for policy in policies]
        held: list[list[Supersession]] = []
        merged: set[str] = set()  # inputs of the merges so far, of those by which something held is contained
        for window in segments.windows(self._window):
            refs = [(place, segments[place]) for places in window for place in places]
            sound = [(place, ref) for place, ref in refs if ref.key not in damaged]
            outputs = [o for planner in planners for o in planner.add([ref for _, ref in sound])]
            held.append(contained([ref for place, ref in sound if not buried[place]]))
            # What is contained in an input of a merge waits for that merge: see `_unite`. So it is held back,
            # with all of its window, while a group is open that a later window may make an output of.
            open_ = {ref.key for planner in planners for ref in planner.open}
            ready = [found for found in held if not _is_in(open_, found)]
            held = [found for found in held if _is_in(open_, found)]
            in_use = frozenset(merged)
            # The same window may have had a merge too, which is over when the rest of it is taken up.
            merged.update(s.key for output in outputs for s in output.inputs)
            merged &= {above.key for found in held for s in found for above in s.superseding}
            failpoint("compaction.plan")
            yield ChainSurvey(
                chain, tuple(outputs), tuple(s for found in ready for s in found), in_use=in_use
            )
        outputs = [output for planner in planners for output in planner.end()]
        left = tuple(s for found in held for s in found)
        yield ChainSurvey(chain, tuple(outputs), left, problems=listed.problems, in_use=frozenset(merged))

    # Doing

    def _merge_and_prove(self, surveys: Sequence[ChainSurvey], report: Report) -> list[Failure]:
        outputs = [output for survey in surveys for output in survey.outputs]
        supersessions, failures = self._merge(outputs, report)
        supersessions += [leftover for survey in surveys for leftover in survey.leftovers]
        refused = self._prove(supersessions, report)
        late = [(s, f) for s, f in refused if _is_late(s, f)]
        failures += [f for s, f in refused if not _is_late(s, f)]
        in_use = {s.key for output in outputs for s in output.inputs}.union(*(s.in_use for s in surveys))
        return [
            *(problem for survey in surveys for problem in survey.problems),
            *failures,
            *self._unite(late, in_use, report),
        ]

    def _unite(
        self, late: Sequence[tuple[Supersession, Failure]], in_use: AbstractSet[str], report: Report
    ) -> list[Failure]:
        """Merge late segments that have rows of their own with what contains them, and prove it.

        `in_use`: keys of inputs of this round's merges. What is contained in one of these waits for the next
        round: two outputs of one level that both hold it could hide each other's rows.
        """
        ready = [s for s, _ in late if in_use.isdisjoint(above.key for above in s.superseding)]
        outputs = unite(ready)
        taken = {s.key for output in outputs for s in output.inputs}
        left = [
            failure if supersession in ready else replace(failure, is_stale=True)
            for supersession, failure in late
            if supersession.superseded[0].key not in taken
        ]
        supersessions, failures = self._merge(outputs, report)
        return left + failures + [failure for _, failure in self._prove(supersessions, report)]

    def _merge(self, outputs: Sequence[Output], report: Report) -> tuple[list[Supersession], list[Failure]]:
        """Make `outputs`, the largest first: what each of them supersedes, and what failed."""
        if not outputs:
            return [], []
        total = sum(output.size for output in outputs)
        log.info("merging", action="merge_started", outputs=len(outputs), bytes=total)
        outputs = sorted(outputs, key=lambda o: o.size, reverse=True)
        results = self._runner.map(merge_one, outputs)
        merged = [result for result in results if isinstance(result, Merged)]
        report.merged += merged
        failures = [result for result in results if isinstance(result, Failure)]
        failures += [failure for m in merged if (failure := _came_late(m))]
        both = zip(results, outputs, strict=True)
        return [made_by(m.ref, output.inputs) for m, output in both if isinstance(m, Merged)], failures

    def _prove(self, supersessions: list[Supersession], report: Report) -> list[tuple[Supersession, Failure]]:
        """Prove them and write tombstones for those that hold; the others, with the reason."""
        failpoint("compaction.verify")
        refused = []
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
                    refused.append((supersession, failure))
            supersessions = doubtful
        return refused

    def _delete(self, chains: Sequence[Chain], grace: float, report: Report) -> frozenset[str]:
        """Delete what may go; the keys of replacing segments that are damaged."""
        now = self._tombstones.now()
        failpoint("compaction.grace")
        failures: list[Failure] = []
        for deleted, problems in _at_once(lambda chain: self._delete_in(chain, now, grace), chains):
            report.deleted.absorb(deleted)
            failures += problems
        report.failures += failures
        return frozenset(key for failure in failures for key in failure.damaged)

    def _delete_in(self, chain: Chain, now: float, grace: float) -> tuple[SegmentTable, list[Failure]]:
        names, deleted = self._tombstones.names(chain), SegmentTable()
        if not names:
            return deleted, []
        index, _problems = self._index(chain, self._store.table(chain), names)
        failures: list[Failure] = []
        for stone in index.deletable(now, grace):
            damaged = [s for s in stone.superseding if not self._store.is_intact(s)]
            failures += [_not_intact(s) for s in damaged]
            for segment in () if damaged else stone.superseded:
                failpoint("compaction.delete_some")
                failure = _attempt(f"delete of {segment.key}", partial(self._store.delete, segment))
                failures += [failure] if failure else []
                deleted.extend([] if failure else [segment])
        for key in index.done():
            self._tombstones.delete(key)
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


def _ahead(work: Callable[[U], T], items: Iterable[U]) -> Iterator[T]:
    """As `_at_once`, where no more results are kept than are worked on at once."""
    with ThreadPoolExecutor(LISTINGS_AT_ONCE) as pool:
        running: deque[Future[T]] = deque()
        for item in items:
            running.append(pool.submit(work, item))
            if len(running) >= LISTINGS_AT_ONCE:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def _is_in(keys: AbstractSet[str], supersessions: Iterable[Supersession]) -> bool:
    """Whether any of `supersessions` is by a segment among `keys`."""
    return any(above.key in keys for s in supersessions for above in s.superseding)


def _may_hold_in_part(supersession: Supersession, failure: Failure) -> bool:
    """Whether one late segment may be keeping others, found contained along with it, from being proved."""
    is_about_data = failure.exit_code == DataError.exit_code and not failure.damaged and not failure.is_stale
    return is_about_data and not supersession.exact and len(supersession.superseded) > 1


def _came_late(merged: Merged) -> Failure | None:
    """What is to be told of rows that another segment had not read: a target may have passed them by then."""
    if merged.late is None:
        return None
    chain, (count, rows) = merged.ref.chain, merged.late
    error = DataError(
        f"{count} rows of {rows} came with a segment that was put later than one that had not read them; "
        "they are united now; a target whose position was behind them when they came does not hold them",
        hint=carry_late(chain, rows),
        code="E-LATE-ROWS",
    )
    return Failure.of(f"merge of {merged.ref.coverage} of {chain}", error, chain)


def _is_late(supersession: Supersession, failure: Failure) -> bool:
    """Whether it is one segment with a row that what contains it has not: it arrived behind the merge."""
    is_one = not supersession.exact and len(supersession.superseded) == 1
    return is_one and failure.code == "E-ROWS-MISSING"


def _unsound(chain: Chain, key: str, error: FloeError) -> Failure:
    """An object among the tombstones of `chain` that is none."""
    return replace(Failure.of(f"tombstones of {chain}", error, chain), suspects=(key,))


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
    failure = Failure.of(f"deletion in {segment.chain}", error, segment.chain)
    return replace(failure, damaged=frozenset({segment.key}))
