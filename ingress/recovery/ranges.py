"""The plan of a replay, and its progress: pure values computed from coverage, footers, holes and positions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from common.archive.segment import UNREAD_REASONS, Footer, Ledger, Reason, SegmentRef
from common.chain import Chain
from common.clock import NS_PER_S, format_unix
from common.errors import UsageError
from common.sequences import MAX_SEQUENCE, SequenceRange, Stretch, cover, holes
from common.settings.types import duration_words, format_count, size_words
from ingress.recovery.request import ReplayRequest

# Reasons for the absence of a message that nobody chose to delete.
LOSSY_REASONS = (Reason.SAMPLED_OUT, Reason.TOO_OLD, *UNREAD_REASONS, Reason.LOST)


def by_incarnation(chains: Iterable[Chain]) -> list[list[Chain]]:
    """Return the chains of one feed in a list for each incarnation, ascending."""
    return [[*own] for _, own in groupby(sorted(chains), lambda chain: chain.incarnation)]


@dataclass(frozen=True, slots=True)
class ChainRange:
    """The sequences of one chain that are to be replayed."""

    chain: Chain
    rows: SequenceRange


@dataclass(frozen=True, slots=True)
class ReplayPart:
    """A stretch that will be read, and the footer of its segment.

    `missing_sequences`: an upper bound for the unread sequences of this segment that no other segment has either; None
    if no other segment covers any of them.
    """

    stretch: Stretch[SegmentRef]
    footer: Footer
    missing_sequences: int | None = None

    @property
    def is_exact(self) -> bool:
        return self.missing_sequences is None and self.stretch.rows.encloses(self.stretch.segment.coverage)

    @property
    def rows(self) -> int:
        """Its messages; an upper bound if only a part is wanted, or if other segments may hold some of them."""
        return min(self.row_count, len(self.stretch.rows))

    @property
    def row_count(self) -> int:
        return self.footer.rows + self.footer.ledger.unread() - self.ledger.unread()

    @property
    def ledger(self) -> Ledger:
        if self.missing_sequences is None:
            return self.footer.ledger
        counts, left = dict(self.footer.ledger.counts), self.missing_sequences
        for reason in UNREAD_REASONS:
            counts[reason] = min(counts.get(reason, 0), left)
            left -= counts[reason]
        return Ledger({reason: count for reason, count in counts.items() if count})

    @property
    def raw_bytes(self) -> int:
        """Bytes of subjects, headers and payloads; a proportional share if only a part is wanted."""
        return self.footer.raw_bytes * self.rows // max(1, self.footer.rows)


@dataclass(frozen=True, slots=True)
class ReplayChain:
    """One chain. `holes`: sequences that no segment covers; `accepted`: the holes within accepted gaps."""

    range: ChainRange
    parts: tuple[ReplayPart, ...]
    holes: tuple[SequenceRange, ...] = ()
    accepted: tuple[SequenceRange, ...] = ()

    @property
    def chain(self) -> Chain:
        return self.range.chain

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """All chains, in the order in which they are replayed. `is_filtered`: by subjects."""

    chains: tuple[ReplayChain, ...]
    is_filtered: bool = False

    @property
    def parts(self) -> list[ReplayPart]:
        return [part for chain in self.chains for part in chain.parts]

    @property
    def rows(self) -> int:
        return sum(chain.rows for chain in self.chains)

    @property
    def is_exact(self) -> bool:
        return not self.is_filtered and all(part.is_exact for part in self.parts)

    @property
    def raw_bytes(self) -> int:
        return sum(part.raw_bytes for part in self.parts)

    @property
    def bytes_to_read(self) -> int:
        """Stored bytes. An upper bound: if only a part of a segment is wanted, only some row groups are read."""
        return sum(part.stretch.segment.size for part in self.parts)

    @property
    def holes(self) -> list[ChainRange]:
        return [ChainRange(c.chain, hole) for c in self.chains for hole in c.holes if hole not in c.accepted]

    @property
    def accepted(self) -> list[ChainRange]:
        return [ChainRange(c.chain, hole) for c in self.chains for hole in c.accepted]

    @property
    def ledger(self) -> Ledger:
        total = Ledger()
        for part in self.parts:
            total = total.plus(part.ledger)
        return total

    @property
    def missing_messages(self) -> int:
        """Messages that the archive does not hold and that were not deleted, in the segments that are read."""
        return sum(self.ledger.counts.get(reason, 0) for reason in LOSSY_REASONS)

    @property
    def is_lossy(self) -> bool:
        return bool(self.missing_messages) or any(part.footer.sampling is not None for part in self.parts)

    @property
    def time_range_ns(self) -> tuple[int, int] | None:
        """The times (ns) of the first and the last message of the segments; None without messages."""
        return time_range(self.parts)

    def as_json(self) -> dict[str, Any]:
        row_count = sum(part.row_count for part in self.parts)
        return {
            "rows": self.rows,
            "exact": self.is_exact,
            "raw_bytes": self.raw_bytes,
            "bytes_to_read": self.bytes_to_read,
            "segments": len(self.parts),
            "first_timestamp_ns": self.time_range_ns and self.time_range_ns[0],
            "last_timestamp_ns": self.time_range_ns and self.time_range_ns[1],
            "lossy": self.is_lossy,
            "kept": row_count,
            "of": row_count + self.missing_messages,
            "ledger": self.ledger.to_json(),
            "holes": [range_json(hole) for hole in self.holes],
            "accepted_gaps": [range_json(hole) for hole in self.accepted],
            "chains": [{**range_json(c.range), "rows": c.rows, "segments": len(c.parts)} for c in self.chains],
        }


def time_range(parts: Iterable[ReplayPart]) -> tuple[int, int] | None:
    footers = [part.footer for part in parts]
    first = [each.first_timestamp_ns for each in footers if each.first_timestamp_ns is not None]
    last = [each.last_timestamp_ns for each in footers if each.last_timestamp_ns is not None]
    return (min(first), max(last)) if first and last else None


def period_text(first_ns: int, last_ns: int) -> str:
    return f"from {format_unix(first_ns // NS_PER_S)} to {format_unix(last_ns // NS_PER_S)}"


def range_json(each: ChainRange) -> dict[str, Any]:
    return {**each.chain.log_context(), "first": each.rows.first, "last": each.rows.last}


def split_range(
    refs: Iterable[SegmentRef], rows: SequenceRange, accepted: Sequence[SequenceRange]
) -> tuple[list[Stretch[SegmentRef]], list[SequenceRange], list[SequenceRange]]:
    """Return the cover of `rows`, its holes, and the holes that lie within accepted gaps.

    A hole that is accepted in part counts as several.
    """
    found = cover(refs, rows.first, rows.last)
    covered = [stretch.rows for stretch in found]
    left = holes([*covered, *accepted], rows)
    given_up = holes([*covered, *left], rows)
    return found, sorted([*left, *given_up]), given_up


def clip_range(begin: int, covered: int, end: int | None, first: int | None, last: int | None) -> SequenceRange | None:
    """Return the sequences to replay of a chain that begins at `begin` and is covered up to `covered` (0: not at all);
    None if there are none.

    `end`: the end of its incarnation, None if it has not ended; no later sequence is ever replayed. `first`, `last`:
    the requested bounds.
    """
    low = max(begin, first or 1)
    high = min(covered if last is None else last, covered, MAX_SEQUENCE if end is None else end)
    return SequenceRange(low, high) if low <= high else None


TimeBounds = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class ArchivedSpan:
    """The archived part of a chain: sequences, and the times (ns, inclusive) of the first and the last message (None:
    not known from its segments).
    """

    chain: Chain
    rows: SequenceRange
    first_ns: int | None = None
    last_ns: int | None = None


def check_overlap(
    request: ReplayRequest, moments: TimeBounds, archive: Sequence[ArchivedSpan], deleted_notes: Sequence[str]
) -> None:
    """Raise UsageError if the bounds of `request` are before or after the whole archive. `deleted_notes`: lines about
    requested sequences that retention deleted.

    A range without messages inside the archive is permitted, and so is an archive that is still empty.
    """
    if archive and not any(_overlaps(request, moments, each) for each in archive):
        bounds = request.bounds("from_sequence", "from_time", "since", "to_sequence", "to_time", "until")
        raise UsageError(
            f"{bounds}: expected a range that meets the archive of {_archive_text(archive)}",
            hint="; ".join([*deleted_notes, "check the dates and the zone; without bounds everything is taken"]),
        )


def _overlaps(request: ReplayRequest, moments: TimeBounds, held: ArchivedSpan) -> bool:
    begin, end = moments
    too_late = (request.from_sequence or 1) > held.rows.last
    too_early = request.to_sequence is not None and request.to_sequence < held.rows.first
    too_new = begin is not None and held.last_ns is not None and begin > held.last_ns
    too_old = end is not None and held.first_ns is not None and end <= held.first_ns
    return not (too_late or too_early or too_new or too_old)


def _archive_text(held: Sequence[ArchivedSpan]) -> str:
    chain, rows = held[0].chain, [each.rows for each in held]
    numbers = [each.chain.incarnation for each in held]
    incarnations = " to ".join(f"{number:04d}" for number in sorted({min(numbers), max(numbers)}))
    first = [each.first_ns for each in held if each.first_ns is not None]
    last = [each.last_ns for each in held if each.last_ns is not None]
    times = f", {period_text(min(first), max(last))}" if first and last else ""
    chain_text = f"{chain.site}/{chain.feed} (incarnation {incarnations})"
    return f"{chain_text}: sequences {min(r.first for r in rows)} to {max(r.last for r in rows)}{times}"


class ReplayProgress:
    """The progress of a replay of `ranges` since its chains were at `positions`, with `rows` messages stored."""

    def __init__(self, ranges: Sequence[ChainRange], positions: Mapping[Chain, int], rows: int) -> None:
        self._ranges, self._first_rows = ranges, rows
        self._first_sequences = sum(self._done(positions).values())

    def _done(self, positions: Mapping[Chain, int]) -> dict[ChainRange, int]:
        """Return the number of sequences of each range that are accounted for."""
        ends = {each: min(positions.get(each.chain, 0), each.rows.last + 1) for each in self._ranges}
        return {each: max(0, end - each.rows.first) for each, end in ends.items()}

    def line(self, positions: Mapping[Chain, int], rows: int, size: int, seconds: float) -> str:
        """Describe the progress after `seconds`. `rows`: messages stored; `size`: bytes of the messages of this run."""
        done, total = self._done(positions), sum(len(each.rows) for each in self._ranges)
        sequences = sum(done.values())
        moved = sequences - self._first_sequences
        left = "-"
        if moved > 0 and seconds > 0:
            left = duration_words(round((total - sequences) * seconds / moved))
        rate = (rows - self._first_rows) / seconds if seconds > 0 else 0
        chain = next((each.chain for each in reversed(self._ranges) if done[each]), None)
        place = f", {chain} at {positions[chain] - 1:,}" if chain else ""
        share = sequences / total if total else 1.0
        stored = f"{share:4.0%}  {format_count(rows, 'message')}, {size_words(size)}"
        return f"{stored}, {rate:,.0f} msg/s, {left} left{place}"
