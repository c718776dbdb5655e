"""Walks a chain and tells what is wrong with it: holes, damaged segments, levels that disagree.

Shallow: every segment's length and checksum, its footer (which balances, I7, and agrees with its key), the
coverage from where the chain begins to where its tail says it ends, and the row counts of levels that cover
the same. Deep: every row of every segment is read, in order and within its coverage, and compared with
every other segment that has the same sequence.

A chain may have a million segments. One listing of it is kept as a table, and looked at window by window
(`common.segments.table`); what must be known of all of it is added up.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from common.chain import Chain
from common.errors import DataError
from common.objects.port import HiddenObject, Versioned
from common.segments.archive import behind, ways_on
from common.segments.documents import ChainStore, carry_late, way_out, way_out_filled
from common.segments.parquet_guard import Forked
from common.segments.segment import Footer, Reason, SegmentRef
from common.segments.store import SegmentGone, SegmentStore, quarantine_command
from common.segments.table import WINDOW, SegmentTable
from common.segments.unread import StretchReader, open_stretch
from common.sequences import Covered, SequenceRange, cover, holes
from compaction.compare import prove_by_reading
from compaction.plan import blocks
from compaction.supersede import Supersession, contained
from compaction.union import union

REQUESTS_AT_ONCE = 8
SHOWN = 5  # hidden segments of one hole

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class VerifyProblem:
    """One problem. `kind`: hole, gone, late, damaged, rows, fork, document, behind.

    `hint`: what to do.
    """

    kind: str
    text: str
    hint: str = ""


@dataclass(slots=True)
class ChainReport:
    """What was found in one chain. `coverage`: None without segments. `rows`: of all sound segments, a merged
    row in each of them. `overlapping`: segments that share sequences with another one of their level, which
    costs space and is no fault. `accepted`: holes that an operator has given up, which are no fault either."""

    chain: Chain
    coverage: SequenceRange | None = None
    segments: dict[int, int] = field(default_factory=dict)
    size: int = 0
    rows: int = 0
    overlapping: int = 0
    accepted: list[SequenceRange] = field(default_factory=list)
    problems: list[VerifyProblem] = field(default_factory=list)


def verify_chain(
    store: SegmentStore,
    chains: ChainStore,
    chain: Chain,
    *,
    deep: bool = False,
    window: int = WINDOW,
    tell: Callable[[SegmentRef, Footer], None] | None = None,
) -> ChainReport:
    """Raises what the store raises; problems of the data are in the report.

    Segments that are deleted meanwhile are passed over, where others account for them. `window`: how many are
    looked at together at least. `tell`: called with each sound segment once it was looked at.
    """
    return _Verification(store, chain, tell).run(chains, window, deep=deep)


class _Verification:
    """One chain being looked at. `_found`: problems that are reported after those of its documents
    and single segments.

    `_behind`: segments that reach behind the end of the incarnation, `_end`.
    """

    def __init__(self, store: SegmentStore, chain: Chain, tell: Callable[[SegmentRef, Footer], None] | None) -> None:
        self._store, self._chain, self._report, self._tell = store, chain, ChainReport(chain), tell
        self._found: list[VerifyProblem] = []
        self._accepted_in_windows: list[SequenceRange] = []
        self._accepted: list[SequenceRange] = []
        self._covered, self._behind = Covered(), SegmentTable()
        self._end: int | None = None

    def run(self, chains: ChainStore, window: int, *, deep: bool) -> ChainReport:
        # Before the listing: what is written meanwhile can only make the coverage reach further.
        tail = chains.read_tail(self._chain)
        document = self._read(lambda: chains.read_chain(self._chain))
        self._end = self._read(lambda: chains.read_end(self._chain))
        table = self._store.table(self._chain)
        self._accepted = [gap.range for gap in chains.gaps(self._chain)]
        for places in table.windows(window):
            segments = [table[place] for each in places for place in each]
            footers = self._footers(segments, deep=deep)
            segments = [s for s in segments if s.key in footers]
            self._add(segments)
            self._check_unread(segments, footers)
            self._check_levels(segments, footers)
            if deep:
                self._check_rows(segments)
        report = self._report
        report.segments = dict(sorted(report.segments.items()))
        floor = self._read(lambda: chains.read_floor(self._chain))  # at the end: what retention deleted is no hole
        first = max(document.first, floor or 1) if document else floor
        self._check_coverage(first, tail or 0)
        self._check_end()
        report.accepted += self._accepted_in_windows
        report.problems += self._found
        return report

    def _read(self, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except DataError as error:
            self._report.problems.append(VerifyProblem("document", error.message))
            return None

    # One window

    def _footers(self, segments: Sequence[SegmentRef], *, deep: bool) -> dict[str, Footer]:
        """The footers of sound segments, by key; a problem is noted for each other segment."""
        footers: dict[str, Footer] = {}
        # Whole segments are read one after the other: each may need much memory.
        with ThreadPoolExecutor(1 if deep else REQUESTS_AT_ONCE) as pool:
            found = pool.map(partial(check_segment, self._store, deep=deep), segments)
            for segment, footer in zip(segments, found, strict=True):
                if isinstance(footer, Footer):
                    footers[segment.key] = footer
                    self._report.rows += footer.rows
                    if self._tell is not None:
                        self._tell(segment, footer)
                elif footer is not None:
                    self._report.problems.append(footer)
        return footers

    def _add(self, segments: Sequence[SegmentRef]) -> None:
        report = self._report
        reach: dict[int, int] = {}  # by level
        for segment in sorted(segments, key=lambda s: s.coverage):
            self._covered.add(segment.coverage)
            report.overlapping += segment.coverage.first <= reach.get(segment.level, 0)
            reach[segment.level] = max(reach.get(segment.level, 0), segment.coverage.last)
            report.segments[segment.level] = report.segments.get(segment.level, 0) + 1
            report.size += segment.size
            if self._end is not None and segment.coverage.last > self._end:
                self._behind.extend([segment])

    def _check_unread(self, segments: Sequence[SegmentRef], footers: dict[str, Footer]) -> None:
        """What others have of what a segment did not read, and what of a filled hole no segment has."""
        for stretch in cover(segments, 1):
            if footers[stretch.segment.key].unread is None:
                continue
            try:
                with open_stretch(self._store, stretch, refs=segments) as reader:
                    self._found += _late(reader, stretch.segment, self._chain)
                    self._found += self._gone(reader)
            except SegmentGone:
                continue
            except Forked as error:
                self._found.append(VerifyProblem("fork", error.message, error.hint))

    def _gone(self, reader: StretchReader) -> Iterator[VerifyProblem]:
        if reader.unread is None or not reader.footer.ledger.counts.get(Reason.GONE_FROM_HOLE):
            return
        left = holes(self._accepted, reader.unread)
        self._accepted_in_windows += holes(left, reader.unread)
        for rows in left:
            if missing := reader.still_missing(rows):
                text = f"{missing} of {rows} were gone from the source when the hole there was filled"
                yield VerifyProblem("gone", text, way_out_filled(self._chain, rows))

    def _check_levels(self, segments: Sequence[SegmentRef], footers: dict[str, Footer]) -> None:
        for supersession in contained(segments):
            below, [above, *others] = supersession.superseded, supersession.superseding
            is_same = not others and sum(len(s.coverage) for s in below) == len(above.coverage)
            if is_same and not holes([s.coverage for s in below], above.coverage):
                rows, found = sum(footers[s.key].rows for s in below), footers[above.key].rows
                if rows != found:
                    text = f"{above.key}: expected {rows} rows as in the {len(below)} segments below it, "
                    self._found.append(VerifyProblem("rows", f"{text}found {found}"))

    def _check_rows(self, segments: Sequence[SegmentRef]) -> None:
        for block in blocks(segments):
            try:
                for _batch in union(block, self._store.open) if len(block) > 1 else ():
                    pass  # equal sequences of different segments are compared as they are united
            except DataError as error:
                away = "\n".join(map(quarantine_command, error.keys)) if isinstance(error, Forked) else ""
                hint = f"{error.hint}:\n{away}" if away else ""
                self._found.append(VerifyProblem("fork", error.message, hint))
        for supersession in contained(segments):
            self._found += _missing_rows(self._store, supersession)

    # All of it

    def _check_coverage(self, first: int | None, tail: int) -> None:
        """`first`: where the chain must begin, None where that is not known; `tail`: where its tail says it ends, 0
        where there is none.
        """
        stretches = self._covered.stretches()
        last = max(self._covered.end, tail) if self._end is None else self._end
        first = first or (stretches[0].first if stretches else 1)
        if stretches:
            self._report.coverage = SequenceRange(stretches[0].first, stretches[-1].last)
        if last < first:
            return
        for hole in holes(stretches, SequenceRange(first, last)):
            left = holes(self._accepted, hole)
            self._report.accepted += holes(left, hole)
            for part in left:
                text = f"sequences {part} are in no segment that can be read"
                hint = _brought_back(self._store, self._chain, part)
                self._report.problems.append(VerifyProblem("hole", text, hint))

    def _check_end(self) -> None:
        """What lies behind the end of the incarnation is not delivered; holes there are not faults."""
        for rows in behind(self._covered.stretches(), self._end, self._accepted):
            count = sum(s.coverage.overlaps(rows) for s in self._behind)
            text = f"sequences {rows}, in {count} segment{'' if count == 1 else 's'}, lie behind the end of the "
            text += f"incarnation, {self._end}: nobody delivers them"
            self._report.problems.append(VerifyProblem("behind", text, ways_on(self._chain, rows)))


def check_segment(store: SegmentStore, segment: SegmentRef, *, deep: bool) -> Footer | VerifyProblem | None:
    """None for a segment that is gone: the others show whether its coverage is missing."""
    try:
        if deep:
            with store.open(segment) as reader:
                for _batch in reader.batches():
                    pass  # the reader checks order, range, counts and page checksums as it goes
                return reader.footer
        footer = store.footer(segment)
        if not store.is_intact(segment):
            raise DataError(f"segment {segment.key}: expected the bytes that its name promises, found others")
        return footer
    except SegmentGone:
        return None
    except DataError as error:
        away = quarantine_command(segment.key)
        return VerifyProblem("damaged", error.message, f"put a good copy back, or put it away:\n{away}")


def _brought_back(store: SegmentStore, chain: Chain, hole: SequenceRange) -> str:
    """What to do about a hole. If a versioned bucket still has a segment of the lowest level that covers some of it,
    removing its delete marker comes first.
    """
    layout, hidden = store.layout, list[HiddenObject]()
    if isinstance(store.objects, Versioned):
        after = layout.start_after(chain, 0, hole.first)
        hidden = store.objects.hidden(layout.segments_prefix(chain, 0), start_after=after)
        named = [(each, layout.parse_segment(each.key)) for each in hidden]
        hidden = [each for each, name in named if name is not None and name.coverage.overlaps(hole)]
    found = "".join(
        f"a delete marker hides {each.key}, of which version {each.version} exists: "
        f"remove the marker, version {each.marker}, to have it back; "
        for each in hidden[:SHOWN]
    )
    return found + way_out(chain, hole)


def _late(reader: StretchReader, segment: SegmentRef, chain: Chain) -> Iterator[VerifyProblem]:
    found: dict[str, list[int]] = {}  # first, last and number of the rows that a segment has
    for part in reader.parts(reader.unread, ("sequence",)) if reader.others else ():
        if part.segment.key != segment.key:
            first, last = (part.batch.column("sequence")[n].as_py() for n in (0, -1))
            before = found.get(part.segment.key, [first, last, 0])
            found[part.segment.key] = [before[0], last, before[2] + part.batch.num_rows]
    for key, (first, last, count) in found.items():
        rows = SequenceRange(first, last)
        text = f"{key} has {count} rows of {rows} that {segment.name} had not read: a target whose position "
        text += "was behind them when it came does not hold them; the next `floe compact` unites the two"
        yield VerifyProblem("late", text, carry_late(chain, rows))


def _missing_rows(store: SegmentStore, supersession: Supersession) -> Iterator[VerifyProblem]:
    for part in supersession.parts(-(-len(supersession.superseded) // 2)):
        try:
            prove_by_reading(store, part)
        except SegmentGone:
            continue
        except DataError as error:
            if len(part.superseded) > 1:
                yield from _missing_rows(store, part)
            elif error.code != "E-FORK":  # damaged ones were reported above
                late = "the next `floe compact` merges it with what contains it"
                yield VerifyProblem("rows", error.message, late if error.code == "E-ROWS-MISSING" else "")
