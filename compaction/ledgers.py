"""The footer of a merged segment: what its inputs say, summed up so that it balances (I7)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from common.segments.segment import UNREAD, Footer, Inputs, Ledger, Reason, SegmentRef, Tip
from common.sequences import SequenceRange, Stretch, cover, preference
from common.service.version import version
from compaction.plan import Output
from compaction.rows import Values, count_up_to


class Tally:
    """Counts rows by the stretch of the inputs' cover that they lie in.

    `late`: how many rows, at most, one input has that another had not read, and between which sequences;
    known with the ledger. `footers`: the inputs' (by key), each at the latest when rows of its coverage are
    added.
    """

    def __init__(self, output: Output, footers: Mapping[str, Footer]) -> None:
        coverage = output.coverage
        self.stretches: list[Stretch[SegmentRef]] = cover(output.inputs, coverage.first, coverage.last)
        self.rows = [0] * len(self.stretches)
        self.late: tuple[int, SequenceRange] | None = None
        self._footers = footers
        self._unread: dict[int, _Gaps] = {}
        self._index = 0

    def add(self, sequences: Values) -> None:
        """Count rows, which ascend from call to call and lie in the coverage."""
        while len(sequences):
            last = self.stretches[self._index].rows.last
            inside = len(sequences) if sequences[-1].as_py() <= last else count_up_to(sequences, last)
            self.rows[self._index] += inside
            if (gaps := self._gaps(self._index)) is not None:
                gaps.add(sequences.slice(0, inside))
            sequences = sequences.slice(inside)
            self._index += bool(len(sequences))

    def _gaps(self, index: int) -> _Gaps | None:
        """What is missing of what the stretch's segment did not read; None where it read all of it."""
        if index not in self._unread:
            stretch = self.stretches[index]
            unread = self._footers[stretch.segment.key].unread
            within = unread and unread.intersection(stretch.rows)
            if within is None:
                return None
            self._unread[index] = _Gaps(within)
        return self._unread[index]

    def ledger(self) -> tuple[Ledger, SequenceRange | None]:
        """Why the sequences without a row have none, and where those are that are still gone."""
        total, unread = Ledger(), None
        for index, (stretch, rows) in enumerate(zip(self.stretches, self.rows, strict=True)):
            found, gaps = self._footers[stretch.segment.key], self._gaps(index)
            ledger = _without_row(len(stretch.rows) - rows, found, gaps)
            total = total.plus(ledger)
            if gaps is not None:
                self._note_late(gaps.within, min(found.ledger.unread(), len(gaps.within)) - ledger.unread())
            if gaps is not None and ledger.unread():
                here = gaps.hull()
                unread = SequenceRange((unread or here).first, here.last)
        return total, unread

    def _note_late(self, within: SequenceRange, count: int) -> None:
        if count > 0:
            before, begin = self.late or (0, within)
            self.late = before + count, SequenceRange(begin.first, within.last)


class _Gaps:
    """Which sequences of `within` have no row. Rows are added in ascending order."""

    def __init__(self, within: SequenceRange) -> None:
        self.within, self._next = within, within.first
        self._first = self._last = self._missing = 0

    def add(self, sequences: Values) -> None:
        first, last = (count_up_to(sequences, n) for n in (self.within.first - 1, self.within.last))
        for sequence in sequences.slice(first, last - first).to_pylist():
            self._miss(sequence - 1)
            self._next = sequence + 1

    def _miss(self, last: int) -> None:
        if self._next <= last:
            self._first, self._last = self._first or self._next, last
            self._missing += last - self._next + 1
            self._next = last + 1

    @property
    def missing(self) -> int:
        """How many; all rows are added."""
        self._miss(self.within.last)
        return self._missing

    def hull(self) -> SequenceRange:
        """From the first to the last of them; some are missing, and all rows are added."""
        self._miss(self.within.last)
        return SequenceRange(self._first, self._last)


def _without_row(missing: int, footer: Footer, gaps: _Gaps | None) -> Ledger:
    """The part of an input's ledger that belongs to `missing` sequences of a stretch of it, where it can be
    told; else `unattributed`.

    A ledger counts sequences and does not name them. What is gone lies in `unread`; a row that another input
    has there is gone no more. Of the others it can be told when all that the input lacks lies in the stretch,
    or when everything it lacks has one reason.
    """
    ledger = footer.ledger
    others = Ledger({r: count for r, count in ledger.counts.items() if count and r not in UNREAD})
    gone = Ledger()
    if gaps is not None and footer.unread is not None:
        is_all_gone = ledger.unread() == len(footer.unread) or not others.counts
        gone = _gone(gaps.missing if is_all_gone else min(gaps.missing, ledger.unread()), ledger)
    rest = missing - gone.total()
    if rest == others.total():
        return gone.plus(others)
    if len(others.counts) == 1 and rest < others.total():
        return gone.plus(Ledger(dict.fromkeys(others.counts, rest) if rest else {}))
    return gone.plus(Ledger({Reason.UNATTRIBUTED: rest} if rest else {}))


def _gone(count: int, ledger: Ledger) -> Ledger:
    """`count` of the sequences that `ledger` counts as gone; the worse of two reasons where either may be."""
    reasons: dict[Reason | str, int] = {r: ledger.counts[r] for r in UNREAD if ledger.counts.get(r)}
    if not count:
        return Ledger()
    if sum(reasons.values()) == count:
        return Ledger(reasons)
    return Ledger({next(iter(reasons)) if len(reasons) == 1 else Reason.GONE_FROM_HOLE: count})


def merged_footer(output: Output, footers: Mapping[str, Footer], tally: Tally) -> Footer:
    """The footer of `output`; raw bytes and timestamps are the writer's to fill in.

    It holds no time and no host, so that two jobs, or one that is run again, write the same bytes.
    """
    sampling, sampling_digest = _sampling(footers.values())
    ledger, unread = tally.ledger()
    return Footer(
        chain=output.chain,
        level=output.level,
        coverage=output.coverage,
        rows=sum(tally.rows),
        ledger=ledger,
        raw_bytes=0,
        first_timestamp_ns=None,
        last_timestamp_ns=None,
        tip=_tip(output.inputs, footers),
        writer=f"floe {version()} compaction",
        sampling=sampling,
        sampling_digest=sampling_digest,
        inputs=Inputs.of([s.name for s in output.inputs]),
        unread=unread,
    )


def _tip(inputs: Sequence[SegmentRef], footers: Mapping[str, Footer]) -> Tip | None:
    """The tip of the input that reaches furthest and has one; None where no message was examined for any."""
    furthest = sorted(inputs, key=preference, reverse=True)
    return next((tip for s in furthest if (tip := footers[s.key].tip)), None)


def _sampling(footers: Iterable[Footer]) -> tuple[Mapping[str, Any] | None, str]:
    """The settings that left messages out: of all inputs alike, or `{"merged": {digest: settings}}`.

    The key of a whole copy is the empty digest. A merge of sampled and whole segments is a sampled one (I8).
    """
    found: dict[str, Any] = {}
    for footer in footers:
        parts = (footer.sampling or {}).get("merged")
        found |= parts if isinstance(parts, dict) else {footer.sampling_digest: footer.sampling}
    if len(found) == 1:
        [(digest, settings)] = found.items()
        return settings, digest
    return {"merged": found}, hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()
