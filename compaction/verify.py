"""Walks a chain and tells what is wrong with it: holes, damaged segments, levels that disagree.

Shallow: every segment's length and checksum, its footer (which balances, I7, and agrees with its key), the
coverage from where the chain begins to where its tail says it ends, and the row counts of levels that cover
the same. Deep: every row of every segment is read, in order and within its coverage, and compared with
every other segment that has the same sequence.

A chain may have a million segments. One listing of it is kept as a table, and looked at window by window
(`common.segments.table`); what must be known of all of it is added up.
"""

from __future__ import annotations

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
from common.segments.quarantine import quarantine_command
from common.segments.segment import Footer, Reason, SegmentRef
from common.segments.store import SegmentGone, SegmentStore
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
    """One thing that is wrong. `kind`: hole, gone, late, damaged, rows, fork, document, behind.

    `hint`: what to do.
    """

    kind: str
    text: str
    hint: str = ""


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
    problems: list[VerifyProblem] = field(default_factory=list)


class _Sound:
    """What is known of all segments that are what they should be. `behind`: those that reach behind the end
    of the incarnation, `end`.
    """

    def __init__(self, end: int | None) -> None:
        self.end = end
        self.covered = Covered()
        self.behind = SegmentTable()

    def add(self, segments: Sequence[SegmentRef], report: ChainReport) -> None:
        """Account for the segments of a window, and count them in `report`."""
        for segment in sorted(segments, key=lambda s: s.coverage):
            self.covered.add(segment.coverage)
            report.segments[segment.level] = report.segments.get(segment.level, 0) + 1
            report.size += segment.size
            if self.end is not None and segment.coverage.last > self.end:
                self.behind.extend([segment])
        report.overlapping += _overlapping(segments)


def verify_chain(
    store: SegmentStore, chains: ChainStore, chain: Chain, *, deep: bool = False, window: int = WINDOW
) -> ChainReport:
    """Look at one chain. Raises what the store raises; what is wrong with the data is in the report.

    Segments that are deleted meanwhile are passed over, where others account for them. `window`: how many are
    looked at together at least.
    """
    report = ChainReport(chain)
    # Before the listing: what is written meanwhile can only make the coverage reach further.
    bounds = _documents(chains, report)
    end = _reading(report, lambda: chains.read_end(chain))
    table = store.table(chain)
    accepted = [gap.range for gap in chains.gaps(chain)]
    sound, found = _Sound(end), ChainReport(chain)
    for places in table.windows(window):
        segments = [table[place] for each in places for place in each]
        footers = _sound(store, segments, report, deep=deep)
        segments = [s for s in segments if s.key in footers]
        sound.add(segments, report)
        _check_unread(store, segments, footers, accepted, found)
        _check_levels(segments, footers, found)
        if deep:
            _check_rows(store, segments, found)
    report.segments = dict(sorted(report.segments.items()))
    _check_coverage(store, sound, bounds, accepted, report)
    _check_end(sound, accepted, report)
    report.accepted += found.accepted
    report.problems += found.problems
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
        report.problems.append(VerifyProblem("document", error.message))
        return None


def _sound(
    store: SegmentStore, segments: Sequence[SegmentRef], report: ChainReport, *, deep: bool
) -> dict[str, Footer]:
    """The footers of the segments that are what they should be, by key; a problem for each other one."""
    footers: dict[str, Footer] = {}
    # Whole segments are read one after the other: each may need much memory.
    with ThreadPoolExecutor(1 if deep else REQUESTS_AT_ONCE) as pool:
        found = pool.map(partial(check_segment, store, deep=deep), segments)
        for segment, footer in zip(segments, found, strict=True):
            if isinstance(footer, Footer):
                footers[segment.key] = footer
            elif footer is not None:
                report.problems.append(footer)
    return footers


def check_segment(store: SegmentStore, segment: SegmentRef, *, deep: bool) -> Footer | VerifyProblem | None:
    """None for a segment that is gone: whether its coverage is missed is judged by the others."""
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


def _check_coverage(
    store: SegmentStore,
    sound: _Sound,
    bounds: tuple[int | None, int | None],
    accepted: Sequence[SequenceRange],
    report: ChainReport,
) -> None:
    first, tail = bounds
    stretches = sound.covered.stretches()
    last = max(sound.covered.end, tail or 0) if sound.end is None else sound.end
    first = first or (stretches[0].first if stretches else 1)
    if stretches:
        report.coverage = SequenceRange(stretches[0].first, stretches[-1].last)
    if last < first:
        return
    for hole in holes(stretches, SequenceRange(first, last)):
        left = holes(accepted, hole)
        report.accepted += holes(left, hole)
        text = "sequences {} are in no segment that can be read"
        report.problems += [
            VerifyProblem("hole", text.format(part), _brought_back(store, report.chain, part))
            for part in left
        ]


def _brought_back(store: SegmentStore, chain: Chain, hole: SequenceRange) -> str:
    """What to do about a hole; first, where a versioned bucket still has the segment, remove the marker."""
    hidden = deleted_segments(store, chain, hole)
    found = "".join(
        f"a delete marker hides {each.key}, of which version {each.version} exists: "
        f"remove the marker, version {each.marker}, to have it back; "
        for each in hidden[:SHOWN]
    )
    return found + way_out(chain, hole)


def deleted_segments(store: SegmentStore, chain: Chain, hole: SequenceRange) -> list[HiddenObject]:
    """Segments of the lowest level that cover some of `hole` and are behind a delete marker."""
    if not isinstance(store.objects, Versioned):
        return []
    layout = store.layout
    after = layout.start_after(chain, 0, hole.first)
    hidden = store.objects.hidden(layout.segments_prefix(chain, 0), start_after=after)
    named = [(each, layout.parse_segment(each.key)) for each in hidden]
    return [each for each, name in named if name is not None and name.coverage.overlaps(hole)]


def _check_end(sound: _Sound, accepted: Sequence[SequenceRange], report: ChainReport) -> None:
    """What lies behind the end of the incarnation, which nobody delivers; holes there are no fault."""
    for rows in behind(sound.covered.stretches(), sound.end, accepted):
        count = sum(s.coverage.overlaps(rows) for s in sound.behind)
        segments_text = f"{count} segment{'' if count == 1 else 's'}"
        text = f"sequences {rows}, in {segments_text}, lie behind the end of the incarnation, {sound.end}: "
        text += "nobody delivers them"
        report.problems.append(VerifyProblem("behind", text, ways_on(report.chain, rows)))


def _check_unread(
    store: SegmentStore,
    segments: Sequence[SegmentRef],
    footers: dict[str, Footer],
    accepted: Sequence[SequenceRange],
    report: ChainReport,
) -> None:
    """What others have of what a segment of the cover did not read, and what of a filled hole nobody has."""
    for stretch in cover(segments, 1):
        if footers[stretch.segment.key].unread is None:
            continue
        try:
            with open_stretch(store, stretch, refs=segments) as reader:
                report.problems += _late(reader, stretch.segment, report.chain)
                report.problems += _gone(reader, accepted, report)
        except SegmentGone:
            continue
        except Forked as error:
            report.problems.append(VerifyProblem("fork", error.message, error.hint))


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


def _gone(
    reader: StretchReader, accepted: Sequence[SequenceRange], report: ChainReport
) -> Iterator[VerifyProblem]:
    if reader.unread is None or not reader.footer.ledger.counts.get(Reason.GONE_FROM_HOLE):
        return
    left = holes(accepted, reader.unread)
    report.accepted += holes(left, reader.unread)
    for rows in left:
        if missing := reader.still_missing(rows):
            text = f"{missing} of {rows} were gone from the source when the hole there was filled"
            yield VerifyProblem("gone", text, way_out_filled(report.chain, rows))


def _check_levels(segments: Sequence[SegmentRef], footers: dict[str, Footer], report: ChainReport) -> None:
    """Where segments lie side by side below one that covers exactly the same: the same number of rows."""
    for supersession in contained(segments):
        below, [above, *others] = supersession.superseded, supersession.superseding
        is_same = not others and sum(len(s.coverage) for s in below) == len(above.coverage)
        if is_same and not holes([s.coverage for s in below], above.coverage):
            rows = sum(footers[s.key].rows for s in below)
            if rows != footers[above.key].rows:
                text = f"{above.key}: expected {rows} rows as in the {len(below)} segments below it, found "
                report.problems.append(VerifyProblem("rows", f"{text}{footers[above.key].rows}"))


def _overlapping(segments: Sequence[SegmentRef]) -> int:
    count = 0
    for level in {s.level for s in segments}:
        reach = 0
        for segment in sorted((s for s in segments if s.level == level), key=lambda s: s.coverage):
            count += segment.coverage.first <= reach
            reach = max(reach, segment.coverage.last)
    return count


def _check_rows(store: SegmentStore, segments: Sequence[SegmentRef], report: ChainReport) -> None:
    for block in blocks(segments):
        try:
            for _batch in union(block.segments, store.open) if len(block.segments) > 1 else ():
                pass  # equal sequences of different segments are compared as they are united
        except DataError as error:
            away = "\n".join(map(quarantine_command, error.keys)) if isinstance(error, Forked) else ""
            report.problems.append(
                VerifyProblem("fork", error.message, f"{error.hint}:\n{away}" if away else "")
            )
    for supersession in contained(segments):
        report.problems += _missing_rows(store, supersession)


def _missing_rows(store: SegmentStore, supersession: Supersession) -> Iterator[VerifyProblem]:
    for part in supersession.parts(-(-len(supersession.superseded) // 2)):
        try:
            prove_by_reading(store, part)
        except SegmentGone:
            continue
        except DataError as error:
            if len(part.superseded) > 1:
                yield from _missing_rows(store, part)
            elif error.code != "E-FORK":  # those were named above
                late = "the next `floe compact` merges it with what contains it"
                yield VerifyProblem("rows", error.message, late if error.code == "E-ROWS-MISSING" else "")
