"""The holes of a chain as the archive shows them, for operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.chain import Chain
from common.errors import FloeError, UsageError
from common.segments.documents import ChainStore
from common.segments.faults import SegmentGone
from common.segments.gaps import AcceptedGap
from common.segments.listing import timestamp
from common.segments.segment import SegmentRef
from common.segments.store import SegmentStore
from common.sequences import SequenceRange, holes
from ingress.chains.plan import first_position

_SECOND = 1_000_000_000  # nanoseconds


@dataclass(frozen=True, slots=True)
class Archived:
    """What there is of one chain. `first`: where it is looked at from; `end`: the end of its coverage, which
    is that of its incarnation where that has ended, 0 where there is none.
    """

    chain: Chain
    segments: Sequence[SegmentRef]
    accepted: Sequence[AcceptedGap]
    first: int
    end: int

    def holes(self) -> list[Hole]:
        """Its holes, ascending."""
        if self.end < self.first:
            return []
        found = holes((ref.coverage for ref in self.segments), SequenceRange(self.first, self.end))
        return [self._hole(each) for each in found]

    def _hole(self, rows: SequenceRange) -> Hole:
        behind = [ref for ref in self.segments if ref.coverage.first > rows.last]
        nearest = min(behind, key=lambda ref: ref.coverage, default=None)
        left = holes((gap.range for gap in self.accepted), rows)
        return Hole(self.chain, rows, min((r.modified for r in behind), default=None), nearest, tuple(left))


@dataclass(frozen=True, slots=True)
class Hole:
    """Sequences that no segment covers. `since`: when the first segment behind them was stored, by the
    store's clock; None where none is. `behind`: the segment that comes next. `left`: what nobody accepted.
    """

    chain: Chain
    rows: SequenceRange
    since: float | None
    behind: SegmentRef | None
    left: tuple[SequenceRange, ...]

    @property
    def accepted(self) -> str:
        if not self.left:
            return "yes"
        return "no" if self.left == (self.rows,) else "in part"

    def row(self) -> dict[str, object]:
        return {
            **self.chain.log_context(),
            "first": self.rows.first,
            "last": self.rows.last,
            "since": None if self.since is None else timestamp(int(self.since) * _SECOND),
            "behind": None if self.behind is None else str(self.behind.coverage),
            "accepted": self.accepted,
        }


def look_up(
    store: SegmentStore, documents: ChainStore, chain: Chain, position: int | None = None
) -> Archived:
    """What there is of `chain` from `position` on (None: from where it begins). Blocking.

    Raises DataError for a document that is not what it must be, and what the store raises.
    """
    first = position or _first(documents, chain)
    segments = store.list(chain, position=first)
    ends = [ref.coverage.last for ref in segments]
    end = max([*ends, documents.read_tail(chain) or 0, _end(documents, chain)])
    return Archived(chain, segments, documents.gaps(chain, position=first), first, end)


def _first(documents: ChainStore, chain: Chain) -> int:
    document = documents.read_chain(chain)
    return first_position(document.first if document else 1, documents.read_floor(chain))


def _end(documents: ChainStore, chain: Chain) -> int:
    """Where the incarnation ended; 0 where it has not."""
    following = documents.read_stream(chain.next_incarnation())
    previous: Mapping[int, int] = (following.previous if following else None) or {}
    return previous.get(chain.partition, 0)


@dataclass(frozen=True, slots=True)
class Acceptable:
    """A gap that may be accepted. `damaged`: why segments that cover parts of it do not count."""

    gap: SequenceRange
    damaged: tuple[str, ...] = ()


def check(store: SegmentStore, archived: Archived, gap: SequenceRange) -> Acceptable:
    """Whether `gap` may be given up. Raises UsageError where a sound segment covers a part of it, or where it
    reaches beyond the end of coverage; what the store raises. Blocking: segments that cover it are read.
    """
    if gap.last > archived.end:
        raise UsageError(
            f"{gap}: expected an end within the coverage, which ends at {archived.end}: "
            "what comes behind may still be on its way"
        )
    damaged = []
    for ref in archived.segments:
        if not ref.coverage.overlaps(gap):
            continue
        problem = _problem(store, ref)
        if problem is None:
            raise UsageError(f"{gap}: expected no segment there, found {ref.coverage} in {ref.key}")
        damaged.append(problem)
    return Acceptable(gap, tuple(damaged))


def _problem(store: SegmentStore, ref: SegmentRef) -> str | None:
    """Why the segment cannot be carried; None where it can."""
    try:
        if not store.is_intact(ref):
            return f"{ref.key}: not the bytes that its name promises"
        with store.open(ref) as reader:
            for _batch in reader.batches():
                pass  # the reader checks order, range, counts and page checksums as it goes
    except SegmentGone:
        return f"{ref.key}: gone"
    except FloeError as error:
        if error.exit_code != 3:
            raise
        return error.message
    return None
