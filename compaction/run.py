"""One run of compaction: retention; list, plan, merge, prove, tombstone, delete after the grace; then the snapshots.

Every step may be repeated, done twice or interrupted. A run continues unfinished work in its present state:

    put, not proved        the inputs are found contained in the output, proved, tombstoned
    proved, no tombstone   as above: the proof is made again
    tombstoned             deleted once the grace is over, if the replacing segments are intact
    deleted in part        the rest is deleted; a later run deletes the tombstone once none of its segments is listed

A chain may have a million segments. One listing of it is kept as a table; references are made window by window, and a
round works in batches, so that no more of them are held at once than one batch needs.
"""

from __future__ import annotations

import shlex
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from typing import TYPE_CHECKING, Protocol, TypeVar

from common.archive.documents import ChainStore, SnapshotRef, chain_arguments, list_snapshots
from common.archive.segment import SegmentRef
from common.archive.store import SegmentStore
from common.archive.table import WINDOW_SEGMENTS, SegmentTable
from common.archive.unread import UnreadableSegment, open_stretch
from common.chain import Chain
from common.clock import SystemClock
from common.errors import DataError, FloeError, SegmentCorrupt
from common.exits import floe_command
from common.failpoints import failpoint
from common.logs import get_logger
from common.objects.port import ObjectInfo
from common.sequences import SequenceRange, cover
from compaction.compare import DeletionProof, prove_by_reading
from compaction.failures import Failure, KnownFailures, noting
from compaction.merge import MergedSegment, merge
from compaction.plan import (
    Block,
    Output,
    Planner,
    Supersession,
    blocks,
    find_supersessions,
    supersession_of_merge,
    unite,
    unsuperseded_overlaps,
)
from compaction.retention import Retention, RetentionReport
from compaction.spark import ItemLog
from compaction.tombstones import TombstoneIndex, TombstoneStore, outdated_snapshots

if TYPE_CHECKING:
    from common.settings.root import LevelSettings

log = get_logger(__name__)

T = TypeVar("T")
R = TypeVar("R")

CONCURRENT_LISTINGS = 8
SEGMENTS_PER_DELETION = 256  # that one task proves and deletes; each task reads the sequences of those that stay
SEGMENTS_PER_THREAD = 8  # that one thread deletes: handing one to a thread costs more than deleting it from a folder
SEGMENTS_PER_TOMBSTONE = 10_000  # about 1 MB
BATCH_SEGMENTS = 30_000  # segments that one batch of merges and proofs reads at least, if there are as many
PLANNING_ROUNDS = 3  # rounds of planning at most, repeated because of segments that were damaged or gone


class Runner(Protocol):
    """A place to run work: this process, or Spark."""

    def map(self, work: Callable[[SegmentStore, T], R], items: Sequence[T]) -> list[R]:
        """Return the result of `work` for each item, in their order; the first items are started first."""


#: Single segments with a row that their containing segments lack, each with the failure of its proof.
LateSegments = list[tuple[Supersession, Failure]]
Deleted = tuple[list[SegmentRef], list[Failure]]


class LocalRunner:
    """Runner in this process, one item after the other. `check`: called before each, raises if the run is to stop."""

    def __init__(self, store: SegmentStore, *, check: Callable[[], None] = lambda: None) -> None:
        self._store, self._check = store, check

    def map(self, work: Callable[[SegmentStore, T], R], items: Sequence[T]) -> list[R]:
        results, item_log = [], ItemLog(work.__name__, items, SystemClock())
        with closing(item_log):
            for number, item in enumerate(items):
                self._check()
                results.append(work(self._store, item))
                item_log.add_done(number)
        return results


def merge_output(store: SegmentStore, output: Output) -> MergedSegment | Failure:
    clock = SystemClock()
    began = clock.monotonic()
    try:
        merged = merge(store, output)
    except (FloeError, UnreadableSegment) as error:
        work = f"merge of {output.coverage} of {output.chain} to level {output.level}"
        return Failure.of(work, error, output.chain)
    done = {"rows": merged.rows, "stored_bytes": merged.ref.size, "seconds": round(clock.monotonic() - began, 3)}
    log.info("segment merged", action="segment_merged", **output.log_context(), **done)
    return merged


def prove_rows(store: SegmentStore, supersession: Supersession) -> Failure | None:
    """Prove a supersession. Return the failure, with the superseding segments that are damaged in the store; None if
    the proof holds.
    """
    try:
        prove_by_reading(store, supersession)
        return None
    except FloeError as error:
        chain, last = supersession.superseded[0].chain, supersession.superseding[-1]
        work = f"proof of {chain}: {len(supersession.superseded)} segments by {last.name} of level {last.level}"
        failure = Failure.of(work, error, chain)
        if not isinstance(error, SegmentCorrupt):
            return failure
        return replace(failure, damaged=frozenset(s.key for s in supersession.superseding if not store.is_intact(s)))


@dataclass(frozen=True, slots=True)
class Deletion:
    """Segments to delete, ascending. `needs_proof`: only after their rows were found in the superseding ones."""

    superseded: Sequence[SegmentRef]
    superseding: Sequence[SegmentRef]
    needs_proof: bool


def delete_superseded(store: SegmentStore, deletion: Deletion, check: Callable[[], None] = lambda: None) -> Deleted:
    """Delete the segments. Return those that were deleted, ascending, and the failures of those that stay.

    `check`: called before each proof, raises if the run is to stop.
    """
    deleted: list[SegmentRef] = []
    failures: list[Failure] = []

    def try_step(step: Callable[[SegmentRef], None], segment: SegmentRef) -> bool:
        try:
            step(segment)
            return True
        except FloeError as error:
            failures.append(Failure.of(f"delete of {segment.key}", error, segment.chain))
            return False

    def is_proved(segment: SegmentRef) -> bool:
        check()
        failpoint("compaction.delete_some")
        return not deletion.needs_proof or try_step(proof.check, segment)

    def delete(group: Sequence[SegmentRef]) -> list[SegmentRef]:
        return [segment for segment in group if try_step(store.delete, segment)]

    with closing(DeletionProof(store, deletion.superseding)) as proof:
        # A few are deleted as soon as they are proved: the next run need not repeat the proofs of a stopped one.
        for gone in in_parallel(delete, batched(filter(is_proved, deletion.superseded), SEGMENTS_PER_THREAD)):
            deleted += gone
    return deleted, failures


@dataclass(frozen=True, slots=True)
class Selection:
    """Selection of chains and levels to compact; None selects all. `level`: the level that is read."""

    site: str | None = None
    feed: str | None = None
    partition: int | None = None
    level: int | None = None
    incarnation: int | None = None

    def includes(self, chain: Chain) -> bool:
        """True if a chain of the selected site and feed is selected."""
        return self.incarnation in (None, chain.incarnation) and self.partition in (None, chain.partition)


@dataclass(slots=True)
class RunReport:
    """Result of a run. `known_failures`: those of `failures` that an earlier run has reported. `chain_count`,
    `level_count`: the numbers of selected chains, and of levels of the policy.
    """

    chain_count: int = field(default=0, init=False, compare=False)
    level_count: int = field(default=0, init=False, compare=False)
    retention: RetentionReport = field(default_factory=RetentionReport)
    merged: list[MergedSegment] = field(default_factory=list)
    tombstones: list[str] = field(default_factory=list)
    deleted: SegmentTable = field(default_factory=SegmentTable)
    pruned: list[SnapshotRef] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    known_failures: list[Failure] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ChainSurvey:
    """The work to do in one chain, or in one window of it. `in_use`: keys of segments that contain some of `unproved`
    and that an earlier survey of the same listing merges. `deletable`, `snapshots`: segments and snapshots that may
    be deleted now; only a preview fills these.
    """

    chain: Chain
    outputs: tuple[Output, ...] = ()
    unproved: tuple[Supersession, ...] = ()
    problems: tuple[Failure, ...] = ()
    in_use: frozenset[str] = frozenset()
    deletable: tuple[SegmentRef, ...] = ()
    snapshots: tuple[SnapshotRef, ...] = ()

    @property
    def segments(self) -> int:
        return sum(len(o.inputs) for o in self.outputs) + sum(len(s.superseded) for s in self.unproved)


class Compaction:
    """Compaction of the chains of one store by `policies`. `grace`: seconds; None: nothing is deleted.

    `runner`: runs merges, and then proofs, which read both sides again. `prove_deletions`: a segment is deleted only
    after its sequences were found in the segments that stay. `window`, `batch`: the number of segments, at least, that
    are planned together, and that are read in one batch. `check`: called between steps, raises if the run is to stop:
    completed work stays, and the next run continues.
    """

    def __init__(
        self,
        store: SegmentStore,
        policies: Sequence[LevelSettings],
        grace: float | None,
        runner: Runner,
        *,
        prove_deletions: bool = True,
        window: int = WINDOW_SEGMENTS,
        batch: int = BATCH_SEGMENTS,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._policies, self._grace = store, policies, grace
        self._runner, self._window, self._batch, self._check = runner, window, batch, check
        self._prove_deletions = prove_deletions
        self._chains = ChainStore(store.objects, store.layout)
        self._tombstones = TombstoneStore(store.objects, store.layout)
        self.known_failures = KnownFailures(store.objects, store.layout)
        self._report = RunReport()

    def run(self, selection: Selection, retention: Retention | None = None) -> RunReport:
        """Do all work that is due. Raises the errors of the store if it cannot even be listed.

        `retention`: None: only merged segments are deleted; the same without a grace, and for parts of feeds.
        """
        chains = self._select(selection)
        self._report = RunReport()
        self._report.chain_count, self._report.level_count = len(chains), len(self._select_policies(selection))
        if retention is not None and self._may_expire(selection):
            now, retained = self._tombstones.now(), self._report.retention
            for each in in_parallel(lambda feed: retention.apply(feed, now, self._check), _by_feed(chains)):
                retained.absorb(each)
            self._report.failures += retained.failures
        damaged = self._plan_and_merge(chains, selection, frozenset())
        if self._grace is not None:
            found = self._delete(chains, self._grace)
            if found - damaged:
                # The inputs of a damaged output still exist: merging them again repairs it.
                self._plan_and_merge(chains, selection, damaged | found)
            self._prune(chains, self._grace)
        self._report.failures = list(dict.fromkeys(self._report.failures))
        # A run over one level does not see the problems of the other levels, one over a part of a feed not retention's.
        sees_retention = retention is None or self._grace is None or self._may_expire(selection)
        self._split_known_failures(chains if selection.level is None and sees_retention else [])
        failpoint("compaction.done")
        return self._report

    def _plan_and_merge(self, chains: Sequence[Chain], selection: Selection, damaged: frozenset[str]) -> frozenset[str]:
        """Plan, merge, prove and tombstone; repeat if segments were gone or damaged. Return all damaged keys."""
        for round_number in range(1, PLANNING_ROUNDS + 1):
            now, failures = self._tombstones.now(), []
            for surveys in self._batches(chains, selection, now, damaged):
                self._check()
                outputs = [output for survey in surveys for output in survey.outputs]
                late, failed = self._merge(outputs, [left for survey in surveys for left in survey.unproved])
                in_use = {s.key for o in outputs for s in o.inputs}.union(*(s.in_use for s in surveys))
                failures += [problem for survey in surveys for problem in survey.problems]
                failures += failed + self._unite(late, in_use)
            self._report.failures += [f for f in failures if not f.is_stale or round_number == PLANNING_ROUNDS]
            found = frozenset(key for failure in failures for key in failure.damaged)
            if not any(f.is_stale for f in failures) and found <= damaged:
                break
            damaged |= found
            log.info("planning repeated", action="planning_repeated", failures=len(failures), damaged=len(damaged))
        return damaged

    # List and plan

    def _select(self, selection: Selection) -> list[Chain]:
        chains = self._chains.chains(selection.site, selection.feed)
        return [chain for chain in chains if selection.includes(chain)]

    def _batches(
        self, chains: Sequence[Chain], selection: Selection, now: float, damaged: frozenset[str]
    ) -> Iterator[list[ChainSurvey]]:
        batch: list[ChainSurvey] = []
        count = 0
        for chain, listed in zip(chains, in_parallel(self._list_chain, chains), strict=True):
            for survey in self._survey(chain, listed, selection, now, damaged):
                batch.append(survey)
                count += survey.segments
                if count >= self._batch:
                    yield batch
                    batch.clear()  # before the next one is gathered: the caller still has the list
                    count = 0
        yield batch

    def _list_chain(self, chain: Chain) -> TombstoneIndex:
        listed = self._index(chain, self._store.table(chain), self._tombstones.names(chain))
        failpoint("compaction.list")
        return listed

    def _index(self, chain: Chain, segments: SegmentTable, names: Iterable[ObjectInfo]) -> TombstoneIndex:
        index = TombstoneIndex(segments)
        for info in names:
            try:
                if (stone := self._tombstones.read(chain, info.key)) is not None:
                    index.add(stone, info.key, info.modified)
            except DataError as error:
                index.problems.append(replace(Failure.of(f"tombstones of {chain}", error, chain), suspects=(info.key,)))
        return index

    def _select_policies(self, selection: Selection) -> list[LevelSettings]:
        return [policy for policy in self._policies if selection.level in (None, policy.from_)]

    def _survey(
        self, chain: Chain, listed: TombstoneIndex, selection: Selection, now: float, damaged: frozenset[str]
    ) -> Iterator[ChainSurvey]:
        segments, buried = listed.segments, listed.superseded_mask()
        planners = [Planner(policy, now) for policy in self._select_policies(selection)]
        held: list[list[Supersession]] = []
        until = max((planner.old_before for planner in planners), default=0.0)
        merged: set[str] = set()  # inputs of the merges so far that contain a segment in `held`
        for window in segments.windows(self._window):
            found = list(blocks(ref for ref in segments.iter_refs(window) if ref.key not in damaged))
            # Nearly all segments overlap no other and need no comparison: only the rest is compared.
            several = [block for block in found if len(block) > 1]
            outputs = unite(self._late(several), until)
            taken = {s.key for output in outputs for s in output.inputs}
            outputs += [o for planner in planners for o in planner.add(found, taken)]
            condemned = {segments[place].key for places in window for place in places if buried[place]}
            held.append(find_supersessions([s for block in several for s in block if s.key not in condemned]))
            # A segment that an input of a merge contains waits for that merge: see `_unite`. So it is held back, with
            # all of its window, while a group is open that a later window may turn into an output.
            open_ = {ref.key for planner in planners for ref in planner.open_segments}
            ready = tuple(s for each in held if not _is_in(open_, each) for s in each)
            held = [each for each in held if _is_in(open_, each)]
            in_use = frozenset(merged)
            # A merge of the same window is also done by the time its held-back segments are processed.
            merged.update(s.key for output in outputs for s in output.inputs)
            merged &= {above.key for each in held for s in each for above in s.superseding}
            failpoint("compaction.plan")
            yield ChainSurvey(chain, tuple(outputs), ready, in_use=in_use)
        outputs = [output for planner in planners for output in planner.end()]
        left = tuple(s for each in held for s in each)
        yield ChainSurvey(chain, tuple(outputs), left, tuple(listed.problems), frozenset(merged))

    def _late(self, found: Iterable[Block]) -> Iterator[list[SegmentRef]]:
        """Yield groups of segments that overlap in part: one that had not read some rows, with those that have them."""
        store = self._store.with_partial_reads(always=True)  # of most, the footer is enough
        for block in unsuperseded_overlaps(found):
            for stretch in cover(block, 1):
                # Unreadable or forked segments are reported at their merge or verification.
                with suppress(DataError), open_stretch(store, stretch, refs=block) as reader:
                    others = {part.segment.key: part.segment for part in reader.late_parts()}
                    if others:
                        yield [stretch.segment, *others.values()]

    # Merge

    def _merge(self, outputs: Sequence[Output], unproved: Sequence[Supersession]) -> tuple[LateSegments, list[Failure]]:
        """Make `outputs`, the largest first; prove them and `unproved`. Return the late segments and the failures."""
        supersessions: list[Supersession] = []
        failures: list[Failure] = []
        if outputs:
            log.info("merges started", action="merge_started", outputs=len(outputs), bytes=sum(o.size for o in outputs))
            outputs = sorted(outputs, key=lambda o: o.size, reverse=True)
        for output, result in zip(outputs, self._runner.map(merge_output, outputs) if outputs else (), strict=True):
            if isinstance(result, Failure):
                failures.append(result)
                continue
            self._report.merged.append(result)
            supersessions.append(supersession_of_merge(result.ref, output.inputs))
            if result.late is not None:
                failures.append(_late_rows_failure(result.ref, *result.late))
        late, refused = self._prove([*supersessions, *unproved])
        return late, failures + refused

    def _unite(self, late: LateSegments, in_use: AbstractSet[str]) -> list[Failure]:
        """Merge late segments that have rows of their own with the segments that contain them, and prove it.

        `in_use`: keys of inputs of this round's merges. A segment that one of these contains waits for the next round:
        two outputs of one level that both hold it could hide each other's rows.
        """
        ready = [s for s, _ in late if in_use.isdisjoint(above.key for above in s.superseding)]
        outputs = unite((*s.superseded, *s.superseding) for s in ready)
        taken = {s.key for output in outputs for s in output.inputs}
        left = [
            failure if supersession in ready else replace(failure, is_stale=True)
            for supersession, failure in late
            if supersession.superseded[0].key not in taken
        ]
        still_late, failures = self._merge(outputs, [])
        return left + failures + [failure for _, failure in still_late]

    # Prove and tombstone

    def _prove(self, supersessions: list[Supersession]) -> tuple[LateSegments, list[Failure]]:
        """Write tombstones for those that hold. Return the late segments, and the failures of the others."""
        failpoint("compaction.verify")
        late: LateSegments = []
        refused: list[Failure] = []
        while supersessions:
            self._check()
            doubtful: list[Supersession] = []
            for supersession, failure in zip(supersessions, self._runner.map(prove_rows, supersessions), strict=True):
                count, is_contained = len(supersession.superseded), not supersession.is_exact
                if failure is None:
                    # Only now: all rows of the segments that the tombstone names were found in the superseding ones.
                    for part in supersession.parts(SEGMENTS_PER_TOMBSTONE):
                        self._report.tombstones.append(self._tombstones.put(part))
                        failpoint("compaction.tombstone")
                elif is_contained and count > 1 and _is_about_rows(failure):
                    # One late segment may prevent the proof of the others.
                    doubtful += supersession.parts(-(-count // 2))
                elif is_contained and count == 1 and failure.code == "E-ROWS-MISSING":
                    late.append((supersession, failure))
                else:
                    refused.append(failure)
            supersessions = doubtful
        return late, refused

    # Delete

    def _delete(self, chains: Sequence[Chain], grace: float) -> frozenset[str]:
        """Delete superseded segments after the grace. Return the keys of damaged superseding segments: those that they
        supersede are not deleted.
        """
        now = self._tombstones.now()
        failpoint("compaction.grace")
        damaged: set[str] = set()
        waiting: list[Deletion] = []
        for due, failures in in_parallel(lambda chain: self._find_due(chain, now, grace), chains):
            self._report.failures += failures
            damaged.update(key for failure in failures for key in failure.damaged)
            waiting += due
            if len(waiting) * SEGMENTS_PER_DELETION >= self._batch:
                self._delete_proved(waiting)
                waiting.clear()
        self._delete_proved(waiting)
        return frozenset(damaged)

    def _find_due(self, chain: Chain, now: float, grace: float) -> tuple[list[Deletion], list[Failure]]:
        due: list[Deletion] = []
        failures: list[Failure] = []
        if names := self._tombstones.names(chain):
            index = self._index(chain, self._store.table(chain), names)
            for stone in index.deletable(now, grace):
                if damaged := [s for s in stone.superseding if not self._store.is_intact(s)]:
                    failures += [_not_intact_failure(s) for s in damaged]
                else:
                    groups = batched(sorted(stone.superseded, key=lambda s: s.coverage), SEGMENTS_PER_DELETION)
                    due += [Deletion(group, stone.superseding, self._prove_deletions) for group in groups]
            for key in index.finished_keys():
                self._store.objects.delete(key)
        return due, failures

    def _delete_proved(self, deletions: Sequence[Deletion]) -> None:
        # For a few, starting Spark takes longer than the work.
        is_much = sum(len(each.superseded) for each in deletions) > SEGMENTS_PER_DELETION
        runner = self._runner if is_much else LocalRunner(self._store, check=self._check)
        counts: Counter[Chain] = Counter()

        def delete_here(store: SegmentStore, deletion: Deletion) -> Deleted:
            return delete_superseded(store, deletion, self._check)

        work = delete_here if isinstance(runner, LocalRunner) else delete_superseded
        for deleted, failures in runner.map(work, deletions) if deletions else ():
            self._report.deleted.extend(deleted)
            self._report.failures += failures
            counts.update(segment.chain for segment in deleted)
        for chain, count in counts.items():
            log.info("inputs deleted", action="inputs_deleted", **chain.log_context(), segments=count)

    # The snapshots of samplers

    def _prune(self, chains: Sequence[Chain], grace: float) -> None:
        now = self._tombstones.now()
        for pruned, failures in in_parallel(lambda chain: self._prune_in(chain, now, grace), chains):
            self._report.pruned += pruned
            self._report.failures += failures

    def _prune_in(self, chain: Chain, now: float, grace: float) -> tuple[list[SnapshotRef], list[Failure]]:
        due, failures = self._find_outdated(chain, now, grace)
        pruned: list[SnapshotRef] = []
        try:
            for ref in due:
                failpoint("compaction.delete_snapshot")
                self._store.objects.delete(ref.key)
                pruned.append(ref)
        except FloeError as error:
            failures.append(Failure.of(f"delete of {ref.key}", error))
        if pruned:
            log.info("snapshots pruned", action="snapshots_pruned", **chain.log_context(), snapshots=len(pruned))
        return pruned, failures

    def _find_outdated(self, chain: Chain, now: float, grace: float) -> tuple[list[SnapshotRef], list[Failure]]:
        try:
            refs = list_snapshots(self._store.objects, self._store.layout, chain)
        except FloeError as error:
            return [], [Failure.of(f"snapshots of {chain}", error)]
        return outdated_snapshots(refs, now, grace), []

    def _may_expire(self, selection: Selection) -> bool:
        return self._grace is not None and {selection.partition, selection.level, selection.incarnation} == {None}

    # Report

    def preview(self, selection: Selection, now: float, expired: frozenset[str] = frozenset()) -> list[ChainSurvey]:
        """Return the work that a run would begin with, chain by chain, all of it in memory. It writes nothing.
        `now`: by the host's clock, because the store's is read by a put. `expired`: keys of segments that the run's
        retention would have deleted before.
        """
        return list(in_parallel(lambda chain: self._preview(chain, selection, now, expired), self._select(selection)))

    def preview_retention(self, selection: Selection, retention: Retention | None, now: float) -> RetentionReport:
        """Return the report of the deletions that retention would make in a run; nothing is written. `now`: as for
        `preview`.
        """
        found = RetentionReport()
        if retention is not None and self._may_expire(selection):
            for each in in_parallel(lambda feed: retention.preview(feed, now), _by_feed(self._select(selection))):
                found.absorb(each)
        return found

    def _preview(self, chain: Chain, selection: Selection, now: float, expired: frozenset[str]) -> ChainSurvey:
        listed = self._list_chain(chain)
        surveys = list(self._survey(chain, listed, selection, now, expired))
        outputs = tuple(output for survey in surveys for output in survey.outputs)
        unproved = tuple(leftover for survey in surveys for leftover in survey.unproved)
        found = ChainSurvey(chain, outputs, unproved, tuple(listed.problems))
        if self._grace is None:
            return found
        due = listed.deletable(now, self._grace)
        deletable = tuple(segment for each in due for segment in each.superseded)
        snapshots, failures = self._find_outdated(chain, now, self._grace)
        return replace(found, problems=(*found.problems, *failures), deletable=deletable, snapshots=tuple(snapshots))

    def _split_known_failures(self, chains: Sequence[Chain]) -> None:
        """Separate failures that were reported before from new ones; if the records cannot be read, all are new."""
        report = self._report
        with noting(report.failures, "record of reported problems"):
            report.known_failures = self.known_failures.known(report.failures)
            self.known_failures.update(chains, report.failures)


def in_parallel(work: Callable[[T], R], items: Iterable[T], most: int = CONCURRENT_LISTINGS) -> Iterator[R]:
    """Yield the result of `work` for each item, in order, up to `most` in parallel: it mostly waits for the store.

    At most as many results are held as items are processed at once.
    """
    with ThreadPoolExecutor(most) as pool:
        running: deque[Future[R]] = deque()
        for item in items:
            running.append(pool.submit(work, item))
            if len(running) >= most:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield `items` in lists of `size`, the last one perhaps shorter."""
    rest = iter(items)
    return iter(lambda: list(islice(rest, size)), [])


def _by_feed(chains: Sequence[Chain]) -> list[list[Chain]]:
    """Return `chains`, ascending, grouped by feed."""
    return [list(group) for _, group in groupby(chains, key=lambda chain: (chain.site, chain.feed))]


def _is_in(keys: AbstractSet[str], supersessions: Iterable[Supersession]) -> bool:
    return any(above.key in keys for s in supersessions for above in s.superseding)


def _is_about_rows(failure: Failure) -> bool:
    return failure.exit_code == DataError.exit_code and not failure.damaged and not failure.is_stale


def late_rows_remedies(chain: Chain, rows: SequenceRange) -> str:
    bounds = f"--from-sequence {rows.first} --to-sequence {rows.last}"
    target = shlex.quote(f"{chain.feed}_LATE")
    replay = floe_command("replay", chain_arguments(chain), bounds, f"--target {target} --subject-prefix late --create")
    return (
        "deliver them to a target that lacks them by `floe checkpoint set`, which reports how many "
        f"messages the target then holds twice; or replay them into another stream:\n{replay}"
    )


def _late_rows_failure(ref: SegmentRef, count: int, rows: SequenceRange) -> Failure:
    error = DataError(
        f"{count} rows of {rows} came with a segment that was put after one that had not read them; "
        "they are merged now; a target lacks them if its position was already past them when they came",
        hint=late_rows_remedies(ref.chain, rows),
        code="E-LATE-ROWS",
    )
    return Failure.of(f"merge of {ref.coverage} of {ref.chain}", error, ref.chain)


def _not_intact_failure(segment: SegmentRef) -> Failure:
    error = DataError(
        f"segment {segment.key} replaces others, but the bytes read back do not match its name",
        hint="no replaced segment was deleted; they are merged again",
        code="E-READ-BACK",
    )
    return replace(Failure.of(f"deletion in {segment.chain}", error, segment.chain), damaged=frozenset({segment.key}))
