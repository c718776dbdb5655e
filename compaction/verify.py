"""Walks a chain and tells what is wrong with it: holes, damaged segments, levels that disagree.

Shallow: every segment's length and checksum, its footer (which balances, I7, and agrees with its key), the
coverage from where the chain begins to where its tail says it ends, and the row counts of levels that cover
the same. Deep: every row of every segment is read, in order and within its coverage, and compared with
every other segment that has the same sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from common.chain import Chain
from common.errors import DataError
from common.segments.documents import ChainStore
from common.segments.segment import Footer, SegmentRef
from common.segments.store import SegmentGone, SegmentStore
from common.sequences import SequenceRange, holes
from compaction.compare import prove_by_reading
from compaction.supersede import Supersession, contained
from compaction.union import union

REQUESTS_AT_ONCE = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as it must be. `kind`: hole, damaged, rows, fork, document."""

    kind: str
    text: str


@dataclass(slots=True)
class ChainReport:
    """What was found in one chain. `coverage`: None without segments. `overlapping`: segments that share
    sequences with another one of their level, which costs space and is no fault. `accepted`: holes that an
    operator has given up, which are no fault either."""

    chain: Chain
    coverage: SequenceRange | None = None
    segments: dict[int, int] = field(default_factory=dict)
    size: int = 0
    overlapping: int = 0
    accepted: list[SequenceRange] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def verify_chain(store: SegmentStore, chains: ChainStore, chain: Chain, *, deep: bool = False) -> ChainReport:
    """Look at one chain. Raises what the store raises; what is wrong with the data is in the report.

    Segments that are deleted meanwhile are passed over, where others account for them.
    """
    report = ChainReport(chain)
    # Before the listing: what is written meanwhile can only make the coverage reach further.
    bounds = _documents(chains, report)
    segments = store.list(chain)
    footers = _sound(store, segments, report, deep=deep)
    sound = [s for s in segments if s.key in footers]
    report.segments = _by_level(sound)
    report.size = sum(s.size for s in sound)
    report.overlapping = _overlapping(sound)
    _check_coverage(sound, bounds, [gap.range for gap in chains.gaps(chain)], report)
    _check_levels(sound, footers, report)
    if deep:
        _check_rows(store, sound, report)
    return report


def _documents(chains: ChainStore, report: ChainReport) -> tuple[int | None, int | None]:
    """Where the chain must begin and where its tail says it ends; None where nothing says so."""
    tail = chains.read_tail(report.chain)
    document = _reading(report, lambda: chains.read_chain(report.chain))
    floor = _reading(report, lambda: chains.read_floor(report.chain))
    return (max(document.first, floor or 1) if document else floor), tail


def _reading(report: ChainReport, read: Callable[[], T]) -> T | None:
    try:
        return read()
    except DataError as error:
        report.problems.append(Problem("document", error.message))
        return None


def _sound(
    store: SegmentStore, segments: Sequence[SegmentRef], report: ChainReport, *, deep: bool
) -> dict[str, Footer]:
    """The footers of the segments that are what they should be, by key; a problem for each other one."""
    if deep:
        found = {s.key: _check_deep(store, s) for s in segments}
    else:
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            checks = pool.map(partial(_check_shallow, store), segments)
            found = dict(zip((s.key for s in segments), checks, strict=True))
    report.problems += [problem for problem in found.values() if isinstance(problem, Problem)]
    return {key: footer for key, footer in found.items() if isinstance(footer, Footer)}


def _check_shallow(store: SegmentStore, segment: SegmentRef) -> Footer | Problem | None:
    def check() -> Footer:
        footer = store.footer(segment)
        if not store.is_intact(segment):
            raise DataError(f"segment {segment.key}: expected the bytes that its name promises, found others")
        return footer

    return _checked(check)


def _check_deep(store: SegmentStore, segment: SegmentRef) -> Footer | Problem | None:
    def check() -> Footer:
        with store.open(segment) as reader:
            for _batch in reader.batches():
                pass  # the reader checks order, range, counts and page checksums as it goes
            return reader.footer

    return _checked(check)


def _checked(check: Callable[[], Footer]) -> Footer | Problem | None:
    """None for a segment that is gone: whether its coverage is missed is judged by the others."""
    try:
        return check()
    except SegmentGone:
        return None
    except DataError as error:
        return Problem("damaged", error.message)


def _by_level(segments: Sequence[SegmentRef]) -> dict[int, int]:
    return {level: sum(s.level == level for s in segments) for level in sorted({s.level for s in segments})}


def _check_coverage(
    segments: Sequence[SegmentRef],
    bounds: tuple[int | None, int | None],
    accepted: Sequence[SequenceRange],
    report: ChainReport,
) -> None:
    first, tail = bounds
    ranges = [s.coverage for s in segments]
    last = max([r.last for r in ranges] + [tail or 0])
    first = first or min((r.first for r in ranges), default=1)
    if ranges:
        report.coverage = SequenceRange(min(r.first for r in ranges), max(r.last for r in ranges))
    if last < first:
        return
    for hole in holes(ranges, SequenceRange(first, last)):
        left = holes(accepted, hole)
        report.accepted += holes(left, hole)
        text = "sequences {} are in no segment that can be read"
        report.problems += [Problem("hole", text.format(part)) for part in left]


def _check_levels(segments: Sequence[SegmentRef], footers: dict[str, Footer], report: ChainReport) -> None:
    """Where segments lie side by side below one that covers exactly the same: the same number of rows."""
    for supersession in contained(segments):
        below, [above, *others] = supersession.superseded, supersession.superseding
        is_same = not others and sum(len(s.coverage) for s in below) == len(above.coverage)
        if is_same and not holes([s.coverage for s in below], above.coverage):
            rows = sum(footers[s.key].rows for s in below)
            if rows != footers[above.key].rows:
                text = f"{above.key}: expected {rows} rows as in the {len(below)} segments below it, found "
                report.problems.append(Problem("rows", f"{text}{footers[above.key].rows}"))


def _overlapping(segments: Sequence[SegmentRef]) -> int:
    count = 0
    for level in {s.level for s in segments}:
        reach = 0
        for segment in sorted((s for s in segments if s.level == level), key=lambda s: s.coverage):
            count += segment.coverage.first <= reach
            reach = max(reach, segment.coverage.last)
    return count


def _check_rows(store: SegmentStore, segments: Sequence[SegmentRef], report: ChainReport) -> None:
    for block in _blocks(segments):
        try:
            for _batch in union(block, store.open):
                pass  # equal sequences of different segments are compared as they are united
        except DataError as error:
            report.problems.append(Problem("fork", error.message))
    for supersession in contained(segments):
        report.problems += _missing_rows(store, supersession)


def _missing_rows(store: SegmentStore, supersession: Supersession) -> Iterator[Problem]:
    for part in supersession.parts(-(-len(supersession.superseded) // 2)):
        try:
            prove_by_reading(store, part)
        except SegmentGone:
            continue
        except DataError as error:
            if len(part.superseded) > 1:
                yield from _missing_rows(store, part)
            elif error.code != "E-FORK":  # those were named above
                yield Problem("rows", error.message)


def _blocks(segments: Sequence[SegmentRef]) -> Iterator[list[SegmentRef]]:
    """The segments of all levels that are connected by overlaps, where they are more than one."""
    block: list[SegmentRef] = []
    reach = 0
    for segment in sorted(segments, key=lambda s: s.coverage):
        if segment.coverage.first > reach:
            if len(block) > 1:
                yield block
            block = []
        block.append(segment)
        reach = max(reach, segment.coverage.last)
    if len(block) > 1:
        yield block
