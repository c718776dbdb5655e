"""Retention: final deletion from the archive, by age and by size, feed by feed; data that a target still needs stays.

    list → plan → raise floor.json, read back → read the targets' positions again → delete the segments below

The plan is a pure function of a chain's cover, its rule and the targets' positions: leading stretches of the cover are
deleted while they are due; the last one stays. A segment is as old as its newest message, and never younger than its
object: a merge makes objects young, and a source's clock may be ahead. Both times must be before `keep_from`: the
clock may be behind too. Footers are read only of the segments that are deleted and of the first that stays; without
`keep_from`, an object that is old enough needs none.

A capture of the stream beside its messages is deleted if no restore of the remaining messages would take it.

Every step may be repeated, done twice or interrupted: the floor never falls, readers begin there, and the next run
deletes the segments that a killed run has left below it. A target that was moved back in between keeps the segments
that it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Any

from common.archive.captures import CaptureRef, CaptureStore
from common.archive.documents import ChainStore, TargetPositions
from common.archive.keys import CAPTURES
from common.archive.segment import Footer, SegmentRef
from common.archive.store import SegmentStore
from common.archive.table import SegmentTable
from common.chain import Chain
from common.clock import NS_PER_S
from common.errors import DataError
from common.failpoints import failpoint
from common.logs import get_logger
from common.sequences import MAX_SEQUENCE, Stretch, cover
from compaction.failures import Failure, noting

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RetentionRule:
    """Limits of one feed. `max_age`: seconds, `max_bytes`: stored; 0: no limit. `keep_from_ns`: no message from this
    time on (ns since 1970 UTC) is deleted, by its own time or by that of its object; None: no such time.
    """

    max_age: float = 0.0
    max_bytes: int = 0
    keep_from_ns: int | None = None

    @property
    def is_set(self) -> bool:
        return bool(self.max_age or self.max_bytes)


@dataclass(frozen=True, slots=True)
class TargetNeeds:
    """Needs of the targets of ingress. `positions`: the positions that they report. `sources`: by target, the
    `site/feed` that the configuration lets flow in. `unknown`: targets without known positions, and the reason:
    everything is kept for them.
    """

    positions: Sequence[TargetPositions] = ()
    sources: Mapping[str, Collection[str]] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)

    def earliest(self, chain: Chain, first: int) -> tuple[int, str]:
        """Return the sequence from which `chain`, which begins at `first`, is needed, and the target that needs it;
        MAX_SEQUENCE and an empty name if no target does.
        """
        found = [(0, target) for target in self.unknown]
        needs = ((p.needed_from(chain, first, self.sources.get(p.target, ())), p.target) for p in self.positions)
        found += [(need, target) for need, target in needs if need is not None]
        return min(found, default=(MAX_SEQUENCE, ""))


def read_needs(chains: ChainStore, sources: Mapping[str, Collection[str]]) -> TargetNeeds:
    """Read the positions of every target; `sources`: those of the configuration. Raises the errors of the store."""
    positions, unknown = list[TargetPositions](), dict[str, str]()
    for target in sorted({*chains.targets_with_positions(), *sources}):
        try:
            found = chains.read_positions(target)
        except DataError as error:
            unknown[target] = str(error)
            continue
        if found is None and target in sources:
            unknown[target] = "it has not reported its positions yet"
        elif found is not None:
            positions.append(found)
    return TargetNeeds(positions, sources, unknown)


def excess_bytes(held: Mapping[Chain, tuple[int, int]], max_bytes: int) -> dict[Chain, int]:
    """Return the stored bytes that each chain of a feed has too many: older incarnations give first, partitions of one
    in proportion to the bytes that they may give.

    `held`: by chain all of its bytes, and those of its last segment, which it keeps.
    """
    found, left = dict.fromkeys(held, 0), sum(size for size, _ in held.values()) - max_bytes
    for incarnation in sorted({chain.incarnation for chain in held}):
        may_go = {chain: size - last for chain, (size, last) in held.items() if chain.incarnation == incarnation}
        whole = sum(may_go.values())
        if (taken := min(left, whole)) > 0:
            found |= {chain: -(-taken * size // whole) for chain, size in may_go.items()}
            left -= taken
    return found


#: The time at which the newest message of a segment was published, in seconds since 1970 UTC.
NewestTimeOf = Callable[[SegmentRef], float]


@dataclass(frozen=True, slots=True)
class FloorPlan:
    """The plan of a chain. `floor`: the first sequence that stays. `held_bytes`: those that are due, but needed."""

    floor: int
    held_bytes: int = 0


def plan_floor(
    stretches: Iterable[Stretch[SegmentRef]],
    floor: int,
    rule: RetentionRule,
    now: float,
    excess: int,
    need: int,
    newest: NewestTimeOf,
) -> FloorPlan:
    """Plan the beginning of a chain after retention. Pure, except for `newest`.

    `stretches`: its cover from `floor` on, its present beginning. `now`: by the store's clock. `excess`: the bytes that
    it has too many. `need`: the first sequence that a target needs.
    """
    held = 0
    for stretch in _due(stretches, rule, now, excess, newest):
        if held or stretch.rows.last >= need:
            held += stretch.segment.size
        else:
            floor = stretch.rows.last + 1
    return FloorPlan(floor, held)


def _due(
    stretches: Iterable[Stretch[SegmentRef]], rule: RetentionRule, now: float, excess: int, newest: NewestTimeOf
) -> Iterator[Stretch[SegmentRef]]:
    expiry = now - rule.max_age
    keep_from = math.inf if rule.keep_from_ns is None else rule.keep_from_ns / NS_PER_S
    for stretch, _ in pairwise(stretches):  # the last one stays
        segment, when = stretch.segment, cache(partial(newest, stretch.segment))
        if excess <= 0 and not (rule.max_age and (segment.modified < expiry or when() < expiry)):
            return
        if segment.modified >= keep_from or (rule.keep_from_ns is not None and when() >= keep_from):
            return
        excess -= segment.size
        yield stretch


def unneeded_captures(captures: Sequence[CaptureRef], floor: int) -> list[CaptureRef]:
    """Return the `captures`, of one kind and the oldest first, that no restore of the remaining messages takes: a
    restore takes the newest at or below its last sequence, which is `floor` or a later one. Pure.
    """
    return [ref for ref in captures if ref.end <= floor][:-1]


@dataclass(frozen=True, slots=True)
class RetentionHold:
    """Stored bytes of `chain`, from sequence `first` on, that are due and stay because `target` needs them. `reason`:
    in words, if the reason is not its position.
    """

    chain: Chain
    target: str
    first: int
    size: int
    reason: str = ""


@dataclass(slots=True)
class RetentionReport:
    """The deletions of a run, or of a preview. `floors`: those that were raised."""

    expired: SegmentTable = field(default_factory=SegmentTable)
    captures: list[CaptureRef] = field(default_factory=list)
    floors: dict[Chain, int] = field(default_factory=dict)
    holds: list[RetentionHold] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def absorb(self, other: RetentionReport) -> None:
        self.expired.move_from(other.expired)
        self.captures += other.captures
        self.floors |= other.floors
        self.holds += other.holds
        self.failures += other.failures


@dataclass(frozen=True, slots=True)
class _ListedChain:
    """One chain as listed. `floor`: that of retention, 1 if it never ran; `first`: the beginning of the chain."""

    chain: Chain
    table: SegmentTable
    floor: int
    first: int

    def stretches(self) -> Iterator[Stretch[SegmentRef]]:
        for window in self.table.windows():
            yield from cover([r for r in self.table.iter_refs(window) if r.coverage.last >= self.first], self.first)

    def sizes(self) -> tuple[int, int]:
        """Return the stored bytes of the cover, and of its last segment; merged inputs not yet deleted do not count."""
        size = last = 0
        for stretch in self.stretches():
            last = stretch.segment.size
            size += last
        return size, last

    def below(self, floor: int) -> Iterator[SegmentRef]:
        """Yield all segments that end below `floor`; never one that reaches the chain's end."""
        limit = min(floor, self.table.end)
        return (self.table[place] for place in range(len(self.table)) if self.table.end_at(place) < limit)


class Retention:
    """Retention of one store. `rules`: by site and feed. `sources`: by target of the configuration, the `site/feed`
    that flow into it.
    """

    def __init__(
        self, store: SegmentStore, rules: Callable[[str, str], RetentionRule], sources: Mapping[str, Collection[str]]
    ) -> None:
        self._store, self._rules, self._sources = store, rules, sources
        self._documents = ChainStore(store.objects, store.layout)
        self._captures = CaptureStore(store.layout, store.objects)

    def apply(self, chains: Sequence[Chain], now: float, check: Callable[[], None]) -> RetentionReport:
        """Delete the due segments of `chains`, which are all of one feed. `now`: by the store's clock. `check`: called
        before each step, raises if the run is to stop.

        Raises the errors of the store if it cannot be listed.
        """
        planned, listed = self._plan(chains, now)
        report = RetentionReport(holds=planned.holds, failures=planned.failures)
        for hold in planned.holds:
            context: dict[str, Any] = {"target": hold.target, "first": hold.first, "bytes": hold.size}
            context |= {"error": hold.reason} if hold.reason else {}
            log.warning("retention held", action="retention_held", **context, **hold.chain.log_context())
        limits = {each.chain: each.floor for each in listed}
        for chain, floor in planned.floors.items():
            check()
            with noting(report.failures, f"floor of {chain}", chain):
                failpoint("compaction.floor")
                self._documents.raise_floor(chain, floor)  # returns once it was read back
                failpoint("compaction.after_floor")
                limits[chain] = report.floors[chain] = floor
                log.info("floor raised", action="floor_raised", floor=floor, **chain.log_context())
        for ref in self._find_captures(chains, limits, report):
            check()
            self._delete_capture(ref, report)
        if len(planned.expired):
            needs = read_needs(self._documents, self._sources)  # again: an operator may have moved a target back
            for each in listed:
                self._delete(each, min(limits[each.chain], needs.earliest(each.chain, each.first)[0]), check, report)
        return report

    def preview(self, chains: Sequence[Chain], now: float) -> RetentionReport:
        """Return the report that `apply` would give at `now`."""
        report, listed = self._plan(chains, now)
        floors = {each.chain: report.floors.get(each.chain, each.floor) for each in listed}
        report.captures = self._find_captures(chains, floors, report)
        return report

    def _plan(self, chains: Sequence[Chain], now: float) -> tuple[RetentionReport, list[_ListedChain]]:
        report, rule = RetentionReport(), self._rules(chains[0].site, chains[0].feed)
        if not rule.is_set:
            return report, []
        listed = [found for chain in chains if (found := self._list_chain(chain, report)) is not None]
        excess = excess_bytes({e.chain: e.sizes() for e in listed}, rule.max_bytes) if rule.max_bytes else {}
        needs = read_needs(self._documents, self._sources)
        for each in listed:
            chain, (need, target) = each.chain, needs.earliest(each.chain, each.first)
            plan = plan_floor(each.stretches(), each.first, rule, now, excess.get(chain, 0), need, self._newest)
            if plan.floor > each.first:
                report.floors[chain] = plan.floor
            report.expired.extend(each.below(min(report.floors.get(chain, each.floor), need)))
            if plan.held_bytes:
                reason = needs.unknown.get(target, "")
                report.holds.append(RetentionHold(chain, target, plan.floor, plan.held_bytes, reason))
        return report, listed

    def _list_chain(self, chain: Chain, report: RetentionReport) -> _ListedChain | None:
        """List a chain; None if a document cannot be read: nothing of the chain is touched."""
        try:
            document, floor = self._documents.read_chain(chain), self._documents.read_floor(chain)
        except DataError as error:
            report.failures.append(Failure.of(f"retention of {chain}", error, chain))
            return None
        begins = document.first if document else 1
        return _ListedChain(chain, self._store.table(chain), floor or 1, max(begins, floor or 1))

    def _delete(self, each: _ListedChain, limit: int, check: Callable[[], None], report: RetentionReport) -> None:
        deleted = 0
        for segment in each.below(limit):
            check()
            failpoint("compaction.expire")
            with noting(report.failures, f"delete of {segment.key}"):
                self._store.delete(segment)
                report.expired.extend([segment])
                deleted += 1
        if deleted:
            log.info("segments expired", action="segments_expired", segments=deleted, **each.chain.log_context())

    def _find_captures(
        self, chains: Sequence[Chain], floors: Mapping[Chain, int], report: RetentionReport
    ) -> list[CaptureRef]:
        """Return captures of incarnations in which a floor was raised; the lowest floor of the partitions counts, 1 for
        one that could not be listed.
        """
        found = list[CaptureRef]()
        for first in sorted({chain.with_partition(0) for chain in report.floors}):
            floor = min(floors.get(chain, 1) for chain in chains if chain.incarnation == first.incarnation)
            with noting(report.failures, f"captures of {first}", first):
                for kind in CAPTURES:
                    found += unneeded_captures(self._captures.list_captures(first, kind), floor)
        return found

    def _delete_capture(self, ref: CaptureRef, report: RetentionReport) -> None:
        with noting(report.failures, f"delete of {ref.key}"):
            self._store.objects.delete(ref.key)
            report.captures.append(ref)
            log.debug("capture expired", action="capture_expired", key=ref.key)

    def _newest(self, segment: SegmentRef) -> float:
        """Return the time by the segment's footer; the time at which it was stored, if the footer has none."""
        if not isinstance(footer := self._store.inspect(segment), Footer):
            return segment.modified
        tip = footer.tip.timestamp_ns if footer.tip else None
        times = [at for at in (footer.last_timestamp_ns, tip) if at is not None]
        return max(times) / NS_PER_S if times else segment.modified
