"""Verification of chains: find holes, damaged segments, and levels that disagree.

Shallow: the length and checksum of every segment, its footer (which balances, I7, and agrees with its key), the
coverage from the beginning of the chain to the end that its tail states, and the row counts of levels with equal
coverage. Deep: every byte of every segment is fetched and proved by its name; every row is read (under the checksum of
its page), in order and within its coverage, and compared with every other segment that has the same sequence.

A chain may have a million segments. One listing of it is kept as a table and checked window by window
(`common.archive.table`); facts about all of the chain are summed up. The content of segments is checked in groups:
segments that overlap are in one group, so that a group needs no other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from common.archive.captures import CaptureStore
from common.archive.catalog import leftover_remedies, ranges_after_end
from common.archive.documents import ChainStore, filled_hole_remedies, hole_remedies
from common.archive.guard import ForkError
from common.archive.keys import CAPTURES, MAX_LEVEL
from common.archive.segment import Footer, Reason, SegmentRef
from common.archive.store import SegmentGone, SegmentStore, quarantine_command
from common.archive.table import WINDOW_SEGMENTS, SegmentTable
from common.archive.unread import StretchReader, UnreadableSegment, open_stretch
from common.chain import Chain
from common.errors import DataError, SegmentCorrupt
from common.sequences import CoverageSet, SequenceRange, cover, holes
from compaction.compare import prove_by_reading
from compaction.merge import union
from compaction.plan import Supersession, blocks, find_supersessions
from compaction.run import in_parallel, late_rows_remedies

CONCURRENT_REQUESTS = 8
TAIL_ONLY_HINT = "only the tail names them: egress puts them soon, or its next segment corrects the tail"
GROUP_MAX_BYTES = 256 << 20  # of one group that is read deep, unless segments that overlap have more

T = TypeVar("T")
OnSegment = Callable[[SegmentRef, Footer], None]
OnListed = Callable[[Chain, int], None]

#: The finding that each kind of problem counts as, unless the problem names another.
FINDING_OF_KIND = {
    "hole": "missing",
    "gone": "missing",
    "late": "delayed",
    "damaged": "damaged",
    "document": "damaged",
    "rows": "divergent",
    "fork": "divergent",
    "behind": "divergent",
}
FINDINGS = ("found", "delayed", "missing", "damaged", "divergent", "contained", "foreign")


@dataclass(frozen=True, slots=True)
class VerifyProblem:
    """One problem. `kind`: hole, gone, late, damaged, rows, fork, document, behind.

    `hint`: the remedy. `rows`: its sequences, None if it concerns all of the chain. `finding_override`: the finding
    that it counts as, if its kind does not decide that.
    """

    kind: str
    text: str
    hint: str = ""
    rows: SequenceRange | None = None
    finding_override: str = ""

    @property
    def finding(self) -> str:
        return self.finding_override or FINDING_OF_KIND[self.kind]


@dataclass(slots=True)
class LevelReport:
    """The sound segments of one level. `size`: stored bytes. Another level may cover a hole in this one."""

    segments: int = 0
    size: int = 0
    covered: CoverageSet = field(default_factory=CoverageSet)


@dataclass(slots=True)
class ChainReport:
    """Findings in one chain. `coverage`: None without segments. `rows`: of all sound segments that were checked, so a
    merged row counts in each of them. `overlapping`: segments that share sequences with another one of their level,
    which costs space and is no fault. `contained`: segments that others may supersede, which is no fault either.
    `accepted`: holes that an operator has accepted. `foreign`: keys among those of the chain that are not Floe's.
    """

    chain: Chain
    coverage: SequenceRange | None = field(default=None, init=False)
    levels: dict[int, LevelReport] = field(default_factory=dict, init=False)
    rows: int = field(default=0, init=False)
    overlapping: int = field(default=0, init=False)
    contained: int = field(default=0, init=False)
    foreign: int = field(default=0, init=False)
    accepted: list[SequenceRange] = field(default_factory=list, init=False)
    problems: list[VerifyProblem] = field(default_factory=list, init=False)

    @property
    def segments(self) -> dict[int, int]:
        return {level: found.segments for level, found in self.levels.items()}

    @property
    def size(self) -> int:
        return sum(found.size for found in self.levels.values())

    def findings(self) -> dict[str, int]:
        """Return the count of each of FINDINGS: of segments, ranges, documents and keys."""
        counts = Counter(problem.finding for problem in self.problems)
        counts.update(found=sum(self.segments.values()), contained=self.contained, foreign=self.foreign)
        return {finding: counts[finding] for finding in FINDINGS}


def known_chains(chains: ChainStore) -> list[Chain]:
    """Return all chains with a trace: `chain.json`, a tail, or an end in `stream.json` of the next incarnation."""
    known = {*chains.chains(), *chains.list_tails()}
    waiting = {(chain.site, chain.feed, chain.incarnation) for chain in known if chain.incarnation}
    while waiting:
        site, feed, incarnation = waiting.pop()
        try:
            document = chains.read_stream(Chain(site, feed, incarnation))
        except DataError:
            continue  # reported as a problem of the chain
        ends = (document and document.previous) or {}
        before = {Chain(site, feed, incarnation - 1, partition) for partition, end in ends.items() if end}
        if lacking := before - known:
            # One represents all partitions without any object: a document may name a thousand.
            there = chains.partitions(min(lacking))
            before -= lacking - there - set(sorted(lacking - there)[:1])
        if incarnation > 1 and not before <= known:
            waiting.add((site, feed, incarnation - 1))
        known |= before
    return sorted(known)


def verify_chains(
    store: SegmentStore,
    chains: ChainStore,
    selected: Iterable[Chain],
    *,
    deep: bool = False,
    window: int = WINDOW_SEGMENTS,
    on_segment: OnSegment = lambda _segment, _footer: None,
    on_listed: OnListed = lambda _chain, _segments: None,
) -> list[ChainReport]:
    """Return a report of each selected chain. Raises the errors of the store; problems of the data are in the reports.

    Segments that are deleted meanwhile are skipped, if others account for them. `window`: the number of segments that
    are checked together at least. `on_segment`: called with each sound segment after its check.
    `on_listed`: called with each chain and the number of its segments, before the first of them is checked.
    """
    reports: list[ChainReport] = []

    def begin(chain: Chain) -> tuple[_Verification, SegmentTable]:
        verification = _Verification(store, chains, chain, on_segment, deep=deep)
        return verification, verification.begin()

    # Ahead of their turn, because a small chain mostly waits for its documents. A deep check takes too long for that.
    for verification, table in in_parallel(begin, selected, 1 if deep else CONCURRENT_REQUESTS):
        on_listed(verification.chain, len(table))
        for group in verification.groups(table, window):
            verification.check(group)
        reports.append(verification.finish())
    return reports


class _Verification:
    """Verification of one chain. `_cross_problems`: those that are reported after the others.

    `_after_end`: segments that reach beyond the end of the incarnation, `_end`. `_first`: the sequence at which the
    chain must begin, None if unknown; `_tail`: the end that its tail states, 0 if there is no tail. `_absent`: keys of
    missing documents. `_is_outdated`: a listed segment was gone.
    """

    def __init__(
        self, store: SegmentStore, chains: ChainStore, chain: Chain, on_segment: OnSegment, *, deep: bool
    ) -> None:
        self.chain, self._store, self._chains, self._deep = chain, store, chains, deep
        self._on_segment, self._report = on_segment, ChainReport(chain)
        self._cross_problems: list[VerifyProblem] = []
        self._accepted_in_groups: list[SequenceRange] = []
        self._accepted: list[SequenceRange] = []
        self._covered, self._after_end = CoverageSet(), SegmentTable()
        self._absent = list[str]()
        self._first: int | None = None
        self._end: int | None = None
        self._tail = self._other_partitions = 0
        self._is_outdated = False

    def begin(self) -> SegmentTable:
        """Read the documents; then list and return the segments."""
        # Before the listing: segments that are written meanwhile can only extend the coverage.
        self._read_documents()
        self._read_captures()
        table = self._store.table(self.chain)
        self._check_documents(bool(table))
        self._accepted = [gap.range for gap in self._chains.gaps(self.chain)]
        return table

    def groups(self, table: SegmentTable, window: int) -> Iterator[list[SegmentRef]]:
        """Return the segments in groups; no segment of another group overlaps any of a group."""
        for each in table.windows(window):
            group: list[SegmentRef] = []
            size = 0
            for block in blocks(table.iter_refs(each)):
                added = sum(segment.size for segment in block) if self._deep else 0
                if group and size + added > GROUP_MAX_BYTES:
                    yield group
                    group, size = [], 0
                group += block
                size += added
            if group:
                yield group

    # Documents and captures

    def _read_documents(self) -> None:
        chain, chains, layout = self.chain, self._chains, self._chains.layout
        self._tail = chains.read_tail(chain) or 0
        document = self._read(lambda: chains.read_chain(chain), layout.chain_document(chain))
        self._first = document.first if document else None
        self._end = self._read(lambda: chains.read_end(chain))
        if document is None and self._end:
            self._other_partitions = self._read(self._count_other_partitions) or 0
        # Without it the end of the previous incarnation is unknown, and no target starts this one.
        self._read(lambda: chains.read_stream(chain), layout.stream_document(chain) if chain.incarnation else "")

    def _count_other_partitions(self) -> int:
        """Return the number of other partitions of the incarnation that had an end above 0 and have no `chain.json`."""
        chain, chains = self.chain, self._chains
        following = chains.read_stream(chain.next_incarnation())
        known = {n for n, end in ((following and following.previous) or {}).items() if end}
        there = chains.chains(chain.site, chain.feed, chain.incarnation)
        return len(known - {each.partition for each in there} - {chain.partition})

    def _read_captures(self) -> None:
        """Read the newest capture of each kind, which a restore of everything takes; deep: every one."""
        captures = CaptureStore(self._chains.layout, self._chains.objects)
        for kind in () if self.chain.partition else CAPTURES:
            refs = captures.list_captures(self.chain, kind)
            for ref in refs if self._deep else refs[-1:]:
                self._read(partial(captures.read, ref))

    def _read(self, read: Callable[[], T | None], needed: str = "") -> T | None:
        """Return the result of `read`, or None after noting its DataError as a problem.

        `needed`: the key of a document that any chain with segments must have.
        """
        try:
            found = read()
        except DataError as error:
            self._report.problems.append(VerifyProblem("document", error.message, error.hint))
            return None
        if found is None and needed:
            self._absent.append(needed)
        return found

    def _check_documents(self, has_segments: bool) -> None:
        if has_segments or self._tail or self._end:
            for key in self._absent:
                hint = "put a good copy of it back: egress writes it only once, before the first segment"
                text = f"{key}: expected a document, found none"
                text += f", nor in {self._other_partitions} other partitions" if self._other_partitions else ""
                self._report.problems.append(VerifyProblem("document", text, hint, finding_override="missing"))

    # Segments

    def check(self, group: Sequence[SegmentRef]) -> None:
        """Check a group; the groups of one chain in their order. Raises the errors of the store."""
        footers = self._footers(group)
        sound = [segment for segment in group if segment.key in footers]
        self._add(sound)
        self._check_unread(sound, footers)
        self._check_levels(sound, footers)
        if self._deep:
            self._check_rows(sound)

    def _add(self, segments: Sequence[SegmentRef]) -> None:
        """Count sound segments. No other segment may overlap any of them."""
        reach: dict[int, int] = {}  # by level
        for segment in sorted(segments, key=lambda s: s.coverage):
            coverage, level = segment.coverage, self._report.levels.setdefault(segment.level, LevelReport())
            self._covered.add(coverage)
            level.covered.add(coverage)
            level.segments += 1
            level.size += segment.size
            self._report.overlapping += coverage.first <= reach.get(segment.level, 0)
            reach[segment.level] = max(reach.get(segment.level, 0), coverage.last)
            if self._end is not None and coverage.last > self._end:
                self._after_end.extend([segment])

    def _footers(self, group: Sequence[SegmentRef]) -> dict[str, Footer]:
        """Return the footers of sound segments, by key; note a problem for each damaged one."""
        footers: dict[str, Footer] = {}
        # Whole segments are read one after the other: each may need much memory.
        with ThreadPoolExecutor(1 if self._deep else CONCURRENT_REQUESTS) as pool:
            found = pool.map(partial(check_segment, self._store, deep=self._deep), group)
            for segment, footer in zip(group, found, strict=True):
                if isinstance(footer, Footer):
                    footers[segment.key] = footer
                    self._report.rows += footer.rows
                    self._on_segment(segment, footer)
                elif footer is not None:
                    self._report.problems.append(footer)
                else:
                    self._is_outdated = True
        return footers

    def _check_unread(self, segments: Sequence[SegmentRef], footers: dict[str, Footer]) -> None:
        """Check unread sequences: rows of them in other segments, and those of a filled hole that no segment has."""
        found = self._cross_problems
        for stretch in cover(segments, 1):
            if footers[stretch.segment.key].unread is None:
                continue
            try:
                with open_stretch(self._store, stretch, refs=segments) as reader:
                    found += _late_problems(reader, stretch.segment, self.chain)
                    found += self._gone_problems(reader)
            except SegmentGone:
                continue
            except SegmentCorrupt as error:  # in its pages, which only a deep check reads of all segments
                found.append(_damaged(stretch.segment, error))
            except ForkError as error:
                found.append(VerifyProblem("fork", error.message, error.hint, stretch.rows))

    def _gone_problems(self, reader: StretchReader) -> Iterator[VerifyProblem]:
        if reader.unread is None or not reader.footer.ledger.counts.get(Reason.GONE_FROM_HOLE):
            return
        left = holes(self._accepted, reader.unread)
        self._accepted_in_groups += holes(left, reader.unread)
        for rows in left:
            if missing := reader.max_missing(rows):
                text = f"{missing} of {rows} were gone from the source when the hole there was filled"
                yield VerifyProblem("gone", text, filled_hole_remedies(self.chain, rows), rows)

    def _check_levels(self, segments: Sequence[SegmentRef], footers: dict[str, Footer]) -> None:
        for supersession in find_supersessions(segments):
            below, [above, *others] = supersession.superseded, supersession.superseding
            self._report.contained += len(below)
            size, rows = sum(len(s.coverage) for s in below), sum(footers[s.key].rows for s in below)
            found = footers[above.key].rows
            # Late rows may have been united into it: of the sequences that those below had not read, and no others.
            unread = sum(footers[s.key].ledger.unread() for s in below)
            if others or size > len(above.coverage):
                continue  # they can be compared once another segment is gone
            if not (holes([s.coverage for s in below], above.coverage) or rows <= found <= rows + unread):
                text = f"{above.key}: expected {rows} rows as in the {len(below)} segments below it, found {found}"
                self._cross_problems.append(VerifyProblem("rows", text, rows=above.coverage))

    def _check_rows(self, segments: Sequence[SegmentRef]) -> None:
        for block in blocks(segments):
            within = SequenceRange(block[0].coverage.first, max(s.coverage.last for s in block))
            try:
                for _batch in union(block, self._store.open) if len(block) > 1 else ():
                    pass  # the union compares equal sequences of different segments
            except ForkError as error:
                hint = "\n".join([f"{error.hint}:", *map(quarantine_command, error.keys)])
                self._cross_problems.append(VerifyProblem("fork", error.message, hint, within))
            except UnreadableSegment as found:
                if not found.is_gone:  # it was sound when it was checked
                    self._cross_problems.append(VerifyProblem("damaged", found.error.message, rows=within))
        for supersession in find_supersessions(segments):
            self._cross_problems += self._missing_rows(supersession)

    def _missing_rows(self, supersession: Supersession) -> Iterator[VerifyProblem]:
        for part in supersession.parts(-(-len(supersession.superseded) // 2)):
            try:
                prove_by_reading(self._store, part)
            except DataError as error:
                if isinstance(error, SegmentGone):
                    continue
                if len(part.superseded) > 1:
                    yield from self._missing_rows(part)
                elif error.code != "E-FORK":  # reported above
                    late = "the next `floe compact` merges it with the segment that covers it"
                    hint = late if error.code == "E-ROWS-MISSING" else ""
                    yield VerifyProblem("rows", error.message, hint, part.superseded[0].coverage)

    # The whole chain

    def finish(self) -> ChainReport:
        """Return the report, after all groups were checked."""
        report = self._report
        # Read at the end: sequences that retention has deleted meanwhile are no hole.
        floor = self._read(lambda: self._chains.read_floor(self.chain))
        self._first = max(self._first, floor or 1) if self._first else floor
        if self._is_outdated:
            self._add_later()
        report.levels = dict(sorted(report.levels.items()))
        self._check_coverage()
        self._check_end()
        report.accepted += self._accepted_in_groups
        report.problems += self._cross_problems
        return report

    def _add_later(self) -> None:
        """Cover holes with sound segments that were put since the listing: they may replace those that are gone."""
        table = self._store.table(self.chain)
        left = self._covered.holes(SequenceRange(1, max(table.end, 1)))
        for segment in (s for s in table if any(s.coverage.overlaps(hole) for hole in left)):
            if isinstance(check_segment(self._store, segment, deep=self._deep), Footer):
                self._covered.add(segment.coverage)

    def _check_coverage(self) -> None:
        stretches = self._covered.stretches()
        last = max(self._covered.end, self._tail) if self._end is None else self._end
        first = self._first or (stretches[0].first if stretches else 1)
        if stretches:
            self._report.coverage = SequenceRange(stretches[0].first, stretches[-1].last)
        if last < first:
            return
        for hole in holes(stretches, SequenceRange(first, last)):
            left = holes(self._accepted, hole)
            self._report.accepted += holes(left, hole)
            for part in left:
                text = f"sequences {part} are in no readable segment"
                is_on_its_way = self._end is None and part.first > self._covered.end
                hint = TAIL_ONLY_HINT if is_on_its_way else hole_remedies(self.chain, part)
                override = "delayed" if is_on_its_way else ""
                self._report.problems.append(VerifyProblem("hole", text, hint, part, override))

    def _check_end(self) -> None:
        """Note segments after the end of the incarnation, which are not delivered; holes there are not faults."""
        for rows in ranges_after_end(self._covered.stretches(), self._end, self._accepted):
            count = sum(s.coverage.overlaps(rows) for s in self._after_end)
            text = f"sequences {rows}, in {count} segment{'' if count == 1 else 's'}, are after the end of the "
            text += f"incarnation, {self._end}: no target gets them"
            self._report.problems.append(VerifyProblem("behind", text, leftover_remedies(self.chain, rows), rows))


def check_segment(store: SegmentStore, segment: SegmentRef, *, deep: bool) -> Footer | VerifyProblem | None:
    """Return the footer, or a problem; None for a segment that is gone: the others show if its coverage is missing."""
    found = store.inspect(segment, deep=deep)
    if isinstance(found, Footer) and not deep and not store.is_intact(segment):
        if store.objects.head(segment.key) is None:  # deleted since its footer was read
            return None
        found = DataError(f"segment {segment.key}: expected bytes with the digest of its name, found others")
    if isinstance(found, Footer):
        return found
    return None if isinstance(found, SegmentGone) else _damaged(segment, found)


def _damaged(segment: SegmentRef, error: DataError) -> VerifyProblem:
    way = "put a good copy back; or quarantine it, with --yes if no other segment covers its sequences"
    return VerifyProblem("damaged", error.message, f"{way}:\n{quarantine_command(segment.key)}", segment.coverage)


def _late_problems(reader: StretchReader, segment: SegmentRef, chain: Chain) -> Iterator[VerifyProblem]:
    found: dict[SegmentRef, list[int]] = {}  # first, last and number of the rows that it has
    for part in reader.late_parts():
        first, last = (part.batch.column("sequence")[n].as_py() for n in (0, -1))
        before = found.get(part.segment, [first, last, 0])
        found[part.segment] = [before[0], last, before[2] + part.batch.num_rows]
    for other, (first, last, count) in found.items():
        rows = SequenceRange(first, last)
        text = f"{other.key} has {count} rows of {rows} that {segment.name} had not read: a target lacks them "
        text += "if its position was already past them when it came; "
        is_highest = max(other.level, segment.level) == MAX_LEVEL
        text += "level 9 is the last, they cannot be merged" if is_highest else "`floe compact` merges the two"
        yield VerifyProblem("late", text, late_rows_remedies(chain, rows), rows)
