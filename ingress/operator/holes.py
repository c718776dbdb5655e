"""Holes of a chain in the archive, for operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from common.archive.catalog import first_sequence
from common.archive.documents import ChainStore, filled_hole_remedies
from common.archive.guard import SegmentGone
from common.archive.scan import ChainArchive
from common.archive.segment import Reason, SegmentRef
from common.archive.store import SegmentStore
from common.archive.unread import open_stretch
from common.chain import Chain
from common.clock import format_unix
from common.errors import DataError, UsageError
from common.sequences import SequenceRange, Stretch, cover, holes
from ingress.chains.plan import Phase, first_position, plan_from_contents
from ingress.errors import hole_hint


@dataclass(frozen=True, slots=True)
class ArchivedCover:
    """The listed segments of one chain, and its accepted gaps. `first`: the first sequence that is checked; `end`: the
    end of its coverage, or of its incarnation if that is greater; 0 if there is none. `incarnation_end`: the last
    sequence of its incarnation; None if that has not ended.
    """

    archive: ChainArchive
    accepted: Sequence[SequenceRange]
    first: int
    end: int
    incarnation_end: int | None = None

    def holes(self) -> Iterator[ChainHole]:
        if self.end < self.first:
            return
        for rows in self.archive.holes(SequenceRange(self.first, self.end)):
            behind = [ref for ref in self.archive.refs if ref.coverage.first > rows.last]
            nearest = min(behind, key=lambda ref: ref.coverage, default=None)
            since = min((ref.modified for ref in behind), default=None)
            yield ChainHole(self.archive.chain, rows, since, nearest, tuple(holes(self.accepted, rows)))


@dataclass(frozen=True, slots=True)
class ChainHole:
    """Sequences that no segment covers. `waiting_since`: the earliest time at which a segment after them was stored, by
    the store's clock; None if there is none. `next_segment`: the next segment. `unaccepted`: the parts that no operator
    has accepted. `kind`: "hole"; "gone" if segments cover them and lack some of the sequences that were lost there; or
    "damaged", with the keys of the segments that would cover them.
    """

    chain: Chain
    rows: SequenceRange
    waiting_since: float | None
    next_segment: SegmentRef | None
    unaccepted: tuple[SequenceRange, ...]
    kind: str = "hole"
    damaged: tuple[str, ...] = ()

    def remedies(self) -> list[str]:
        if self.kind == "gone":
            return [filled_hole_remedies(self.chain, part) for part in self.unaccepted]
        return [hole_hint(self.chain, part, self.damaged) for part in self.unaccepted]

    def row(self) -> dict[str, object]:
        is_open = "no" if self.unaccepted == (self.rows,) else "in part"
        return {
            "chain": str(self.chain),
            **self.chain.log_context(),
            "first": self.rows.first,
            "last": self.rows.last,
            "kind": self.kind,
            "since": format_unix(self.waiting_since),
            "behind": None if self.next_segment is None else str(self.next_segment.coverage),
            "accepted": is_open if self.unaccepted else "yes",
        }


def read_cover(store: SegmentStore, documents: ChainStore, chain: Chain, position: int | None = None) -> ArchivedCover:
    """List the coverage of `chain` from `position` on (None: from its beginning). Blocking.

    Raises DataError for an invalid document, else as the store does.
    """
    if position is None:
        first = first_sequence(documents, chain)
    else:  # below the floor there is no hole, for any target
        first = first_position(position, documents.read_floor(chain))
    archive, ended = ChainArchive.listed(store, chain, first), documents.read_end(chain)
    end = max(ended or 0, archive.end)  # the tail is a hint: coverage that it alone claims does not exist
    accepted = [gap.range for gap in documents.gaps(chain, position=first)]
    return ArchivedCover(archive, accepted, first, end, ended)


def find_blocking_hole(store: SegmentStore, archived: ArchivedCover) -> ChainHole | None:
    """Return the hole at which ingress blocks although a segment covers the position by name: some of a filled hole is
    gone, or the segment is damaged. None if neither is so. Blocking.
    """
    chain, accepted = archived.archive.chain, archived.accepted
    found = plan_from_contents(store, chain, archived.first, archived.incarnation_end, accepted)
    plan = found.plan
    if plan.hole is None or not (found.incomplete_fill or plan.phase is Phase.DAMAGED):
        return None
    hole = ChainHole(chain, plan.hole, plan.waiting_since, None, tuple(holes(accepted, plan.hole)))
    if found.incomplete_fill is not None:
        return replace(hole, next_segment=found.incomplete_fill.segment, kind="gone")
    return replace(hole, kind="damaged", damaged=found.damaged)


def check_acceptable(store: SegmentStore, archived: ArchivedCover, gap: SequenceRange) -> list[str]:
    """Check that `gap` may be accepted. Return the reasons why segments that cover parts of it do not count.

    Raises UsageError if it reaches beyond the end of coverage, or if a sound segment covers a part of it, unless that
    segment filled a hole and the part was gone; else as the store does. Blocking: reads the segments that cover it.
    Nothing is replayed after the end of its incarnation, so any gap there may be accepted.
    """
    if gap.last > archived.end:
        ends = f"which ends at {archived.end}" if archived.end else f"which does not reach {archived.first}"
        raise UsageError(f"{gap}: expected an end within the coverage, {ends}: later segments may still arrive")
    if archived.incarnation_end is not None and gap.first > archived.incarnation_end:
        return []
    problems = {ref: _problem(store, ref) for ref in archived.archive.overlapping(gap)}
    sound = [ref for ref, problem in problems.items() if problem is None]
    for stretch in cover(sound, gap.first, gap.last):
        if not _is_incomplete_fill(store, stretch, archived.archive.refs):
            ref = stretch.segment
            raise UsageError(f"{gap}: expected no segment there, found {ref.coverage} in {ref.key}")
    return [problem for problem in problems.values() if problem is not None]


def _is_incomplete_fill(store: SegmentStore, stretch: Stretch[SegmentRef], refs: Sequence[SegmentRef]) -> bool:
    """True if ingress blocks here because a hole was filled and some of its lost sequences are still missing."""
    with open_stretch(store, stretch, refs=refs) as reader:
        is_filled = bool(reader.footer.ledger.counts.get(Reason.GONE_FROM_HOLE))
        return is_filled and reader.unread == stretch.rows and reader.max_missing(stretch.rows) > 0


def check_unambiguous(store: SegmentStore, documents: ChainStore, chain: Chain, gap: SequenceRange) -> None:
    """Raise UsageError if an earlier incarnation has a hole in `gap`, too: the number alone does not show which one is
    meant. Blocking.
    """
    for each in documents.chains(chain.site, chain.feed):
        if each.partition != chain.partition or each.incarnation >= chain.incarnation:
            continue
        found = read_cover(store, documents, each).holes()
        if any(part.overlaps(gap) for hole in found for part in hole.unaccepted):
            raise UsageError(
                f"{gap}: incarnation {chain.incarnation:04d} of {chain.site}/{chain.feed} is the newest, and "
                f"{each.incarnation:04d} has a hole there, too",
                hint=f"name one: {each} or {chain}",
            )


def _problem(store: SegmentStore, ref: SegmentRef) -> str | None:
    """Return the reason why the segment cannot be replayed; None if it can."""
    if not store.is_intact(ref):
        return f"{ref.key}: the bytes do not match the name"
    found = store.inspect(ref, deep=True)
    if isinstance(found, SegmentGone):
        return f"{ref.key}: gone"
    return found.message if isinstance(found, DataError) else None
