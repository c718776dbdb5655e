"""Read a chain from its archive: across all levels, each row once, without the damaged segments."""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from common.archive.documents import ChainStore, accept_command, chain_arguments
from common.archive.guard import SegmentGone
from common.archive.keys import MAX_LEVEL, FeedId, filter_chains, parse_chain_name, parse_chain_of_feed, resolve_chain
from common.archive.segment import SegmentRef
from common.archive.store import SegmentStore
from common.archive.unread import StretchReader, open_stretch
from common.chain import Chain
from common.errors import Refused, SegmentCorrupt, UsageError
from common.exits import floe_command
from common.sequences import MAX_SEQUENCE, SequenceRange, Stretch, cover, holes

Report = Callable[[str], None]
T = TypeVar("T")


def select_chains(chains: ChainStore, text: str | None, feeds: Collection[FeedId] = ()) -> list[Chain]:
    """Return the chains that `SITE[/FEED[/INCARNATION[/PARTITION]]]` names; None means all.

    `feeds`: those of the configuration, which may have no archive yet. A chain that is named in full needs no
    `chain.json` if it has a segment. Raises UsageError, with the names that exist, for one that does not.
    """
    if text is None:
        return chains.chains()
    site, feed, incarnation, partition = parse_chain_name(text)
    if feed is not None and None not in (incarnation, partition):
        chain = Chain(site, feed, incarnation or 0, partition or 0)
        prefixes = (chains.layout.segments_prefix(chain, level) for level in range(MAX_LEVEL + 1))
        if any(chains.objects.list(prefix, limit=1) for prefix in prefixes):
            return [chain]
    return match_chains(chains, site, feed, lambda c: filter_chains(c, feeds, site, feed, incarnation, partition))


def find_chain(chains: ChainStore, text: str, feeds: Collection[FeedId] = ()) -> Chain:
    """Return the chain that `SITE/FEED[/INCARNATION[/PARTITION]]` names; without an incarnation, the newest.

    Raises UsageError as `select_chains`, and if several partitions match.
    """
    site, feed, incarnation, partition = parse_chain_of_feed(text)
    if None not in (incarnation, partition) and (found := select_chains(chains, text, feeds)):
        return found[0]
    return match_chains(chains, site, feed, lambda c: resolve_chain(c, feeds, site, feed, incarnation, partition))


def find_incarnation(chains: ChainStore, text: str, feeds: Collection[FeedId] = ()) -> Chain:
    """Return partition 0 of the incarnation that `SITE/FEED[/INCARNATION]` names; of the newest, if none is named.

    Raises UsageError as `select_chains`, and if a partition is named.
    """
    site, feed, incarnation, partition = parse_chain_of_feed(text)
    if partition is not None:
        raise UsageError(f"{text:.80}: expected SITE/FEED[/INCARNATION], found a partition")
    found = match_chains(chains, site, feed, lambda c: filter_chains(c, feeds, site, feed, incarnation))
    return Chain(site, feed, max((chain.incarnation for chain in found), default=incarnation or 0))


def match_chains(chains: ChainStore, site: str | None, feed: str | None, find: Callable[[Collection[Chain]], T]) -> T:
    """Return the result of `find` for the chains of a site or feed. If it finds none, its error lists all chains."""
    try:
        return find(chains.chains(site, feed))
    except UsageError as error:
        try:
            known = chains.chains()
        except Refused:  # the credential is for one site only
            raise error from None
        return find(known)


def chain_ends(chains: ChainStore, newest: Chain) -> dict[Chain, int]:
    """Return the chains of the stream up to the incarnation of `newest`, each with the last of its sequences that
    counts: all of that incarnation (MAX_SEQUENCE), and those of the earlier ones that it continues. Blocking.

    Raises the errors of the store, and DataError for an invalid document.
    """
    known, found, number = chains.chains(newest.site, newest.feed), dict[Chain, int](), newest.incarnation
    of = {chain: MAX_SEQUENCE for chain in known if chain.incarnation == number}
    while of:
        found |= of
        document = chains.read_stream(replace(newest, incarnation=number, partition=0))
        former = number - 1 if document is None or document.continued is None else document.continued
        if document is None or not document.join_sequences or not 0 <= former < number:
            break
        own = {chain.partition: end for chain, end in of.items()}
        reach = {part: min(own.get(part, MAX_SEQUENCE), at - 1) for part, at in document.join_sequences.items()}
        before = chains.read_stream(replace(newest, incarnation=former, partition=0))
        cuts = [[each.filters for each in found.chains] for found in (document, before) if found is not None]
        if len({*reach.values()}) > 1 and cuts[0] != cuts[-1]:
            break  # the end of one partition implies nothing about others with other subjects
        least, number = min(reach.values()), former
        ends = {chain: reach.get(chain.partition, least) for chain in known if chain.incarnation == former}
        of = {chain: end for chain, end in ends.items() if end > 0}
    return found


def span(refs: Sequence[SegmentRef]) -> SequenceRange | None:
    """Return the range from the first to the last sequence that `refs` cover, holes included; None without segments."""
    if not refs:
        return None
    return SequenceRange(min(r.coverage.first for r in refs), max(r.coverage.last for r in refs))


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """Prefetch of segments by the threads of `pool`: at most `count` segments for one reader, and `size` stored bytes,
    or one larger segment.
    """

    pool: Executor
    size: int
    count: int = 8

    def has_room(self, fetched: Iterable[SegmentRef], more: SegmentRef) -> bool:
        sizes = [ref.size for ref in fetched]
        return not sizes or (len(sizes) < self.count and sum(sizes) + more.size <= self.size)


def _open_ahead(
    store: SegmentStore, stretches: Sequence[Stretch[SegmentRef]], refs: Sequence[SegmentRef], ahead: ReadAhead | None
) -> Generator[tuple[Stretch[SegmentRef], Callable[[], StretchReader]]]:
    """Yield each stretch with a function that opens it: close the reader that it returns. The next ones are fetched
    `ahead`.
    """
    if ahead is None:
        yield from ((stretch, partial(open_stretch, store, stretch, refs=refs)) for stretch in stretches)
        return
    waiting, fetched = deque(stretches), deque[tuple[Stretch[SegmentRef], Future[StretchReader]]]()
    try:
        while waiting or fetched:
            while waiting and ahead.has_room((each.segment for each, _ in fetched), waiting[0].segment):
                stretch = waiting.popleft()
                fetched.append((stretch, ahead.pool.submit(open_stretch, store, stretch, refs=refs)))
            yield fetched[0][0], fetched[0][1].result
            fetched.popleft()
    finally:
        for _, future in fetched:
            if not future.cancel():
                future.add_done_callback(lambda done: done.exception() or done.result().close())  # type: ignore[func-returns-value]


def read_cover(
    store: SegmentStore,
    refs: Sequence[SegmentRef],
    within: SequenceRange,
    report: Report,
    columns: Sequence[str] | None = None,
    ahead: ReadAhead | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of `within` by the cover of `refs`, in sequence order, each once. `columns` must contain
    `sequence`; None: all.

    A segment that is damaged or gone is reported and left out, and its rows are read from others that cover them. A
    range that no segment covers is reported and skipped.
    """
    usable, position = list(refs), within.first
    while position <= within.last:
        with closing(_open_ahead(store, cover(usable, position, within.last), usable, ahead)) as opened:
            for stretch, open_it in opened:
                if stretch.rows.first > position:
                    report(f"no segment covers {SequenceRange(position, stretch.rows.first - 1)}")
                position = stretch.rows.first
                try:
                    with open_it() as reader:
                        for batch in reader.batches(columns=columns):
                            yield batch
                            position = batch.column("sequence")[-1].as_py() + 1
                except (SegmentCorrupt, SegmentGone) as error:
                    report(str(error))
                    usable.remove(stretch.segment)
                    break
                position = stretch.rows.last + 1
            else:
                break
    if position <= within.last:
        report(f"no segment covers {SequenceRange(position, within.last)}")


SKEW_MARGIN_NS = 60_000_000_000
_LISTING_ATTEMPTS = 3  # compaction may delete a segment after it was listed
_TIME_COLUMNS = ("sequence", "timestamp_ns")


def search(
    store: SegmentStore, chain: Chain, moment_ns: int, position: int = 1, attempts: int = _LISTING_ATTEMPTS
) -> tuple[int | None, int]:
    """Return the sequence of the first row at or after `moment_ns` (ns since 1970 UTC), among the segments that reach
    `position` only; and the position for the next search. The position is for a search after the chain has grown, if
    nothing was found: earlier segments are not listed again.

    None: all rows of the archive are earlier, or there are none. If damaged segments lie right before that row, return
    the first sequence that they hide: a reader from there on finds the damage. Blocking. Raises SegmentGone if segments
    vanish repeatedly, and the errors of the store.
    """
    timeline = Timeline(store, store.list(chain, position=position), position)
    try:
        return timeline.start_sequence_at(moment_ns, only_damage=True), timeline.next_position
    except SegmentGone:
        if attempts <= 1:
            raise
    return search(store, chain, moment_ns, position, attempts - 1)


@dataclass(frozen=True, slots=True)
class _Times:
    """The first and last time in one segment, inclusive; without rows, the time of its last examined message.

    `is_mixed`: some of the rows come from other segments, because this one did not read them.
    """

    first: int
    last: int
    has_rows: bool
    is_mixed: bool = False


class Timeline:
    """The segments `refs` of one chain by time, from sequence `first` on. Keeps the times it has read. Blocking."""

    def __init__(self, store: SegmentStore, refs: Iterable[SegmentRef], first: int = 1) -> None:
        self._store, self._usable, self._first = store, list(refs), first
        self._listed = len(self._usable)
        self._times: dict[str, _Times | None] = {}

    def first_sequence_at(self, moment_ns: int) -> int | None:
        """Return the sequence of the first row at or after `moment_ns`, without the damaged segments; None if there is
        none. Raises SegmentGone for a segment that no longer exists.
        """
        while True:
            try:
                return self._first_sequence_at(cover(self._usable, self._first), moment_ns)
            except _DamagedSegmentError as damaged:
                self._usable.remove(damaged.ref)

    def start_sequence_at(self, moment_ns: int, *, only_damage: bool = False) -> int | None:
        """Return the same as `first_sequence_at`; but if messages are missing right before that row, the first of
        these, which may be as late. `only_damage`: only if some segments could not be read.
        """
        if (found := self.first_sequence_at(moment_ns)) is None or (only_damage and len(self._usable) == self._listed):
            return found
        timed = self.last_timed_stretch(found)
        assert timed is not None, "it was found by the time of its row"
        stretch, (least, _) = timed
        before = self.last_timed_stretch(stretch.rows.first - 1)
        start = before[0].rows.last + 1 if before else self._first
        return start if least >= moment_ns and start < stretch.rows.first else found

    def last_timed_stretch(self, upto: int) -> tuple[Stretch[SegmentRef], tuple[int, int]] | None:
        """Return the last stretch of the cover up to sequence `upto` that holds times, and these; None if none does."""
        refs = list(self._usable)
        while found := cover(refs, self._first, upto)[-1:]:
            if (times := self.times_or_none(found[0].segment)) is not None:
                return found[0], times
            refs.remove(found[0].segment)
        return None

    @property
    def next_position(self) -> int:
        return max((ref.coverage.last + 1 for ref in self._usable), default=self._first)

    def times_or_none(self, ref: SegmentRef) -> tuple[int, int] | None:
        """Return the least and the greatest timestamp (ns) in a segment; None if it holds no times or is damaged."""
        try:
            times = self._times_of(ref)
        except _DamagedSegmentError:
            return None
        return None if times is None else (times.first, times.last)

    def between(
        self, begin: int | None, end: int | None, last: int = MAX_SEQUENCE, margin_ns: int = SKEW_MARGIN_NS
    ) -> list[Stretch[SegmentRef]]:
        """Return the stretches of the cover up to sequence `last` that may hold rows of `begin` <= time < `end` (ns;
        None: no such bound), ascending.

        The result is complete as long as no message is more than `margin_ns` earlier than one before it in the chain.
        Stretches that only a damaged segment covers are always included. Raises SegmentGone as `first_sequence_at`.
        """
        all_refs = list(self._usable)
        while True:
            stretches = cover(self._usable, self._first, last)
            try:
                first, end_index = 0, len(stretches)
                if begin is not None:
                    first = self._bisect(stretches, lambda times: times.last >= begin)
                    first = self._step_back(stretches, first, begin - margin_ns)
                if end is not None:
                    end_index = self._bisect(stretches, lambda times: times.first >= end + margin_ns)
                break
            except _DamagedSegmentError as damaged:
                self._usable.remove(damaged.ref)
        taken = stretches[first:end_index]
        if len(all_refs) > len(self._usable):
            for hole in holes([each.rows for each in stretches], SequenceRange(self._first, last)):
                taken += cover(all_refs, hole.first, hole.last)
        return sorted(taken, key=lambda each: each.rows)

    def is_at_edge(self, ref: SegmentRef, begin: int | None, end: int | None) -> bool:
        """True if the times of the segment were looked up, and not all are in `begin` <= time < `end`."""
        if (times := self._times.get(ref.key)) is None:
            return False
        return (begin is not None and times.first < begin) or (end is not None and times.last >= end)

    def _first_sequence_at(self, stretches: list[Stretch[SegmentRef]], moment_ns: int) -> int | None:
        begin = self._bisect(stretches, lambda times: times.last >= moment_ns)
        begin = self._step_back(stretches, begin, moment_ns - SKEW_MARGIN_NS)
        for stretch in stretches[begin:]:
            if (times := self._times_of(stretch.segment)) is None or not times.has_rows or times.last < moment_ns:
                continue
            if (sequence := self._row_sequence(stretch, moment_ns)) is not None:
                return sequence
        return None

    def _bisect(self, stretches: list[Stretch[SegmentRef]], is_reached: Callable[[_Times], bool]) -> int:
        """Return the first index from which on `is_reached` is true for all stretches with times. It must be false for
        all before.
        """
        low, high = 0, len(stretches)
        while low < high:
            middle = probe = (low + high) // 2
            while probe < high and self._times_of(stretches[probe].segment) is None:
                probe += 1
            times = self._times_of(stretches[probe].segment) if probe < high else None
            if times is None or is_reached(times):
                high = middle
            else:
                low = probe + 1
        return low

    def _step_back(self, stretches: list[Stretch[SegmentRef]], begin: int, earliest_ns: int) -> int:
        while begin > 0:
            times = self._times_of(stretches[begin - 1].segment)
            if times is not None and times.last < earliest_ns:
                break
            begin -= 1
        return begin

    def _times_of(self, ref: SegmentRef) -> _Times | None:
        """Return the times of a segment; None if it holds none, because no message was examined for it."""
        if ref.key not in self._times:
            try:
                self._times[ref.key] = self._read(ref)
            except SegmentCorrupt:
                raise _DamagedSegmentError(ref) from None
        return self._times[ref.key]

    def _read(self, ref: SegmentRef) -> _Times | None:
        with self._store.open_part(ref) as reader:
            times = reader.timestamp_bounds()
            mixed = self._mixed_times(ref, reader.footer.unread) if reader.footer.unread else []
            if found := [*times, *mixed]:
                return _Times(min(low for low, _ in found), max(high for _, high in found), True, bool(mixed))
            tip = reader.footer.tip
            return None if tip is None else _Times(tip.timestamp_ns, tip.timestamp_ns, False)

    def _mixed_times(self, ref: SegmentRef, unread: SequenceRange) -> list[tuple[int, int]]:
        with open_stretch(self._store.with_partial_reads(), Stretch(ref, unread), refs=self._usable) as reader:
            batches = reader.batches(columns=_TIME_COLUMNS) if reader.others else ()
            columns: list[list[Any]] = [batch.column("timestamp_ns").to_pylist() for batch in batches]
            return [(min(times), max(times)) for times in columns]

    def _row_sequence(self, stretch: Stretch[SegmentRef], moment_ns: int) -> int | None:
        times = self._times_of(stretch.segment)
        try:
            if times is not None and times.is_mixed:
                with open_stretch(self._store.with_partial_reads(), stretch, refs=self._usable) as whole:
                    found = (_first_row_sequence(batch, moment_ns) for batch in whole.batches(columns=_TIME_COLUMNS))
                    return next((sequence for sequence in found if sequence is not None), None)
            with self._store.open_part(stretch.segment) as reader:
                for group, (_, last) in zip(reader.row_groups, reader.timestamp_bounds(), strict=True):
                    rows = group.range.intersection(stretch.rows)
                    if last < moment_ns or rows is None:
                        continue
                    for batch in reader.batches(rows, _TIME_COLUMNS):
                        if (sequence := _first_row_sequence(batch, moment_ns)) is not None:
                            return sequence
        except SegmentCorrupt:
            raise _DamagedSegmentError(stretch.segment) from None
        return None


class _DamagedSegmentError(Exception):
    """Failure to read the segment `ref`."""

    def __init__(self, ref: SegmentRef) -> None:
        super().__init__(ref.key)
        self.ref = ref


def _first_row_sequence(batch: pa.RecordBatch, moment_ns: int) -> int | None:
    late = pc.greater_equal(batch.column("timestamp_ns"), pa.scalar(moment_ns, pa.int64()))
    row: int = pc.index(late, True).as_py()
    sequence: int | None = batch.column("sequence")[row].as_py() if row >= 0 else None
    return sequence


def ranges_after_end(
    coverages: Iterable[SequenceRange], end: int | None, accepted: Iterable[SequenceRange] = ()
) -> list[SequenceRange]:
    """Return the covered ranges after `end` without the `accepted` gaps, ascending.

    `end`: the last sequence of the ended incarnation, None while it has not ended.
    """
    ranges = list(coverages)
    last = max((each.last for each in ranges), default=0)
    if end is None or last <= end:
        return []
    whole = SequenceRange(min(end + 1, MAX_SEQUENCE), last)
    return holes([*holes(ranges, whole), *accepted], whole)


def replay_command(chain: Chain, rows: SequenceRange) -> str:
    stream = shlex.quote(f"{chain.feed}_{chain.incarnation:04d}")
    bounds = f"--from-sequence {rows.first} --to-sequence {rows.last}"
    target = f"--target {stream} --subject-prefix {stream}"
    return floe_command("replay", chain_arguments(chain), bounds, target, "--create --append")


def leftover_remedies(chain: Chain, rows: SequenceRange) -> str:
    return (
        f"replay them into a stream of their own:\n{replay_command(chain, rows)}\n"
        f"or accept them as a gap; the segments stay:\n{accept_command(chain, rows)}"
    )
