"""Positions of `spark.readStream.format("floe")` in the chains, and the cover that a batch reads between two of them.

A stream has a *position* in each chain: the first sequence that it has not read. A batch reads the cover from there up
to the first hole that is not accepted; other chains continue. Sequences below a position that arrive later are not
read, neither by this stream nor by ingress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from common.archive.catalog import first_sequence
from common.archive.documents import ChainStore, accepted_part, hole_remedies
from common.archive.scan import ChainArchive
from common.archive.segment import SegmentRef
from common.archive.store import LIST_PAGE_SEGMENTS, SegmentStore
from common.archive.times import search
from common.chain import Chain
from common.clock import Clock
from common.errors import DataError, Refused
from common.logs import get_logger
from common.sequences import MAX_SEQUENCE, SequenceRange, Stretch
from compaction.source_options import ReadOptions

log = get_logger(__name__)

# The content of Spark's checkpoint, as JSON: by the name of a chain, the first sequence that is not read yet; and
# `format_version`. Empty: the query is new.
Positions = dict[str, int]
FORMAT = {"format_version": 1}

T = TypeVar("T")
R = TypeVar("R")

CONCURRENT_LISTINGS = 8
RELIST_INTERVAL_S = 300.0  # seconds after which a chain is listed even if its tail did not change


def map_in_threads(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return the result of `work` for each item, in order; it mostly waits for the store."""
    with ThreadPoolExecutor(CONCURRENT_LISTINGS) as pool:
        return list(pool.map(work, items))


@dataclass(frozen=True, slots=True)
class _NextPart:
    """The next part of a chain for a stream: stretches without a hole that counts, the position after them, and that
    after the last listed segment (`end`). `hole`: the hole that stops the chain, None if there is none.
    """

    stretches: Sequence[Stretch[SegmentRef]]
    position: int
    end: int
    hole: SequenceRange | None = None


class ArchiveStream:
    """Start and batch limits of a stream over the selected chains. Blocking; used by one thread at a time."""

    def __init__(self, store: SegmentStore, options: ReadOptions, clock: Clock) -> None:
        self._store, self._options, self._clock = store, options, clock
        self._chains = ChainStore(store.objects, store.layout)
        self._idle: dict[Chain, tuple[int, str, float]] = {}  # position, ETag of the tail, time of the listing
        self._ahead: dict[str, _NextPart] = {}  # from the last call of `latest`
        self._is_bounded, self._turn = False, 0
        self._targets: Positions | None = None  # once bounded: the end of each chain
        self._logged_holes: dict[Chain, SequenceRange] = {}

    def limit_to_present(self) -> None:
        """Limit `latest` to the data that its next call finds."""
        self._is_bounded, self._targets = True, None

    def latest(self, start: Mapping[str, int], rows: int | None = None, segments: int | None = None) -> Positions:
        """Return the positions that a batch from `start` may reach; `start` itself if there is nothing to read.

        `rows`, `segments`: the limit over all chains together, None for no limit. A chain that is not in `start` only
        gets its first position in this batch; the next one reads it. Raises UsageError for names that do not exist,
        DataError for positions of another format, or if retention deleted the next sequences, unless the options skip
        them.
        """
        if (version := {**FORMAT, **start}["format_version"]) != FORMAT["format_version"]:
            raise DataError(f"checkpoint: expected positions of format 1, found {version}", hint="use a newer Floe")
        chains, tails = self._options.selected(self._chains), self._tails()
        known = [chain for chain in chains if str(chain) in start]
        new = [chain for chain in chains if str(chain) not in start]
        begun = dict(zip(map(str, new), map_in_threads(self._first if start else self._start, new), strict=True))
        is_first = self._is_bounded and self._targets is None
        limit = LIST_PAGE_SEGMENTS if (rows or segments) and not is_first else None
        parts = map_in_threads(lambda chain: self._next(chain, start[str(chain)], tails.get(chain, ""), limit), known)
        self._ahead = {str(chain): part for chain, part in zip(known, parts, strict=True)}
        if is_first:
            found = map_in_threads(lambda name: self._list_next_part(Chain.parse(name), begun[name], None), begun)
            seen = {**self._ahead, **dict(zip(begun, found, strict=True))}
            self._targets = {name: each.position for name, each in seen.items()}
        if (targets := self._targets) is not None:
            begun = {name: position for name, position in begun.items() if name in targets}
            self._ahead = {name: _cut_before(each, targets.get(name, 0)) for name, each in self._ahead.items()}
        self._turn += 1
        ahead = {name: each for name, each in self._ahead.items() if each.position > start[name]}
        reached = share_limit(ahead, rows, segments, self._turn)
        return dict(sorted({**start, **reached, **begun, **FORMAT}.items()))

    def ends(self) -> Positions:
        """Return the position after the last segment of each chain, as the last call of `latest` found it."""
        return {name: each.end for name, each in sorted(self._ahead.items())}

    def stretches(self, start: Mapping[str, int], end: Mapping[str, int]) -> list[Stretch[SegmentRef]]:
        """Return the stretches that account for the sequences from `start` up to, not including, `end`, each once.

        Raises DataError if a planned sequence is no longer covered.
        """
        parts = [
            (Chain.parse(name), SequenceRange(start[name], behind - 1))
            for name, behind in sorted(end.items())
            if start.get(name, behind) < behind and name not in FORMAT
        ]
        return [stretch for found in map_in_threads(lambda part: self._between(*part), parts) for stretch in found]

    def _between(self, chain: Chain, rows: SequenceRange) -> list[Stretch[SegmentRef]]:
        seen = self._ahead.get(str(chain))
        known = ChainArchive(self._store, chain, [each.segment for each in seen.stretches] if seen else ())
        if not known.holes(rows):
            return known.covers(rows)
        listed = ChainArchive.listed(self._store, chain, rows.first)
        missing = listed.holes(rows)
        if all(self._skippable_part(chain, hole) == hole for hole in missing):
            return listed.covers(rows)
        raise DataError(
            f"chain {chain}: expected segments that cover {missing[0]} of a planned batch, found none",
            hint=hole_remedies(chain, missing[0]),
        )

    def _tails(self) -> dict[Chain, str]:
        with suppress(Refused):  # a credential of one site may not list tails: then every chain is listed
            return self._chains.tail_etags()
        return {}

    def _first(self, chain: Chain) -> int:
        return first_sequence(self._chains, chain)

    def _start(self, chain: Chain) -> int:
        options, position = self._options, self._first(chain)
        if options.stream.from_latest:
            # A copy of a bucket may have the tail but not yet the segments.
            places = (max(position, self._chains.read_tail(chain) or 0), position)
            end = next(filter(None, (ChainArchive.listed(self._store, chain, at).end for at in places)), position - 1)
            return end + 1
        if options.row_filter.begin is not None:
            found, behind = search(self._store, chain, options.row_filter.begin, position)
            position = max(position, behind if found is None else found)
        return max(position, options.rows.first)

    def _next(self, chain: Chain, position: int, tail: str, limit: int | None) -> _NextPart:
        idle = self._idle.get(chain)
        now = self._clock.monotonic()
        if tail and idle is not None and idle[:2] == (position, tail) and now < idle[2] + RELIST_INTERVAL_S:
            return _NextPart((), position, position)
        found = self._list_next_part(chain, position, limit)
        if not found.stretches and found.hole is None and (self._chains.read_tail(chain) or 0) < position:
            self._idle[chain] = (position, tail, now)
        self._log_hole_once(chain, found.hole)
        return found

    def _log_hole_once(self, chain: Chain, hole: SequenceRange | None) -> None:
        """Log a hole that stops the chain, once."""
        if hole is None:
            self._logged_holes.pop(chain, None)
        elif self._logged_holes.get(chain) != hole:
            self._logged_holes[chain] = hole
            context = {"hole": str(hole), "hint": hole_remedies(chain, hole), **chain.log_context()}
            log.warning("chain blocked", action="chain_blocked", **context)

    def _list_next_part(self, chain: Chain, position: int, limit: int | None) -> _NextPart:
        """Return the next part of `chain`. `limit`: the number of segments to list of each level, None for all."""
        archive = ChainArchive.listed(self._store, chain, position, limit=limit)
        ends: dict[int, list[int]] = {}
        for ref in archive.refs:
            ends.setdefault(ref.level, []).append(ref.coverage.last)
        # Segments of a level that are not listed end after the listed ones.
        last = min((max(each) for each in ends.values() if limit and len(each) >= limit), default=MAX_SEQUENCE)
        taken: list[Stretch[SegmentRef]] = []
        end, hole = max(position, archive.end + 1), None
        for stretch in archive.covers(SequenceRange(position, last)):
            if stretch.rows.first > position:
                if last < MAX_SEQUENCE:
                    return self._list_next_part(chain, position, None)  # unlisted segments may cover it
                hole = SequenceRange(position, stretch.rows.first - 1)
                if (passed := self._skippable_part(chain, hole)) is not None:
                    position = passed.last + 1
                if passed != hole:
                    hole = SequenceRange(position, hole.last)
                    break
                hole = None
            taken.append(stretch)
            position = stretch.rows.last + 1
        return _NextPart(taken, position, end, hole)

    def _skippable_part(self, chain: Chain, hole: SequenceRange) -> SequenceRange | None:
        """Return the leading part of `hole` that is accepted, or deleted by retention; None if there is none.

        Raises DataError if retention deleted its first sequence and the options do not skip that.
        """
        first = hole.first
        if (floor := self._chains.read_floor(chain) or 0) > first:
            if not self._options.stream.skips_expired:
                raise DataError(
                    f"chain {chain}: expected sequence {first}, found that retention deleted those before {floor}",
                    hint="begin a new query with another checkpoint, or set option on_expired=skip",
                )
            first = min(floor, hole.last + 1)
        if first > hole.last:
            return hole
        gaps = [gap.range for gap in self._chains.gaps(chain, position=first)]
        accepted = accepted_part(SequenceRange(first, hole.last), gaps)
        last = accepted.last if accepted else first - 1
        return SequenceRange(hole.first, last) if last >= hole.first else None


def _cut_before(ahead: _NextPart, position: int) -> _NextPart:
    """Return the part of `ahead` before `position`."""
    if ahead.position <= position:
        return ahead
    parts = [(s, s.rows.intersection(SequenceRange(1, position - 1))) for s in ahead.stretches] if position > 1 else []
    return _NextPart([Stretch(s.segment, rows) for s, rows in parts if rows is not None], position, ahead.end)


def share_limit(ahead: Mapping[str, _NextPart], rows: int | None, segments: int | None, turn: int) -> Positions:
    """Return the position that each chain reaches so that together they stay within `rows` (covered sequences, so that
    there are never more rows) or `segments`; at least one chain advances. None: no limit.

    The limit is divided equally; a part that one chain does not need goes to the others. More chains than that take
    turns.
    """
    if (left := rows or segments) is None:
        return {name: each.position for name, each in ahead.items()}
    needed = {name: sum(_cost(s, rows) for s in each.stretches) for name, each in ahead.items()}
    order = sorted(ahead, key=lambda name: (needed[name], name))
    if left < len(order):
        first = turn * left % len(order)
        order = order[first:] + order[:first]
    reached: Positions = {}
    for count, name in zip(range(len(order), 0, -1), order, strict=True):
        share = max(1, left // count) if left else 0
        reached[name], cost = _reach_with_share(ahead[name], share, rows)
        left -= cost
    return {name: position for name, position in reached.items() if position}


def _cost(stretch: Stretch[SegmentRef], rows: int | None) -> int:
    return len(stretch.rows) if rows else 1


def _reach_with_share(ahead: _NextPart, share: int, rows: int | None) -> tuple[int, int]:
    """Return the position that `share` reaches, 0 for none, and its cost. Only a first stretch is cut."""
    position = spent = 0
    for stretch in ahead.stretches:
        if spent + (cost := _cost(stretch, rows)) > share:
            if not spent and share:
                return stretch.rows.first + share, share
            return position, spent
        position, spent = stretch.rows.last + 1, spent + cost
    return ahead.position if share or not ahead.stretches else 0, spent
