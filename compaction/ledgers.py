"""The footer of a merged segment: what its inputs say, summed up so that it balances (I7)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from common.segments.segment import Footer, Inputs, Ledger, Reason, SegmentRef, Tip
from common.sequences import Stretch, cover, preference
from common.service.version import version
from compaction.plan import Output
from compaction.rows import Values, count_up_to


class Tally:
    """Counts rows by the stretch of the inputs' cover that they lie in."""

    def __init__(self, output: Output) -> None:
        coverage = output.coverage
        self.stretches: list[Stretch[SegmentRef]] = cover(output.inputs, coverage.first, coverage.last)
        self.rows = [0] * len(self.stretches)
        self._index = 0

    def add(self, sequences: Values) -> None:
        """Count rows, which ascend from call to call and lie in the coverage."""
        while len(sequences):
            last = self.stretches[self._index].rows.last
            inside = len(sequences) if sequences[-1].as_py() <= last else count_up_to(sequences, last)
            self.rows[self._index] += inside
            sequences = sequences.slice(inside)
            self._index += bool(len(sequences))

    def ledger(self, footers: Mapping[str, Footer]) -> Ledger:
        """Why the sequences without a row have none, by the inputs' `footers` (by key)."""
        total = Ledger()
        for stretch, rows in zip(self.stretches, self.rows, strict=True):
            total = total.plus(_without_row(stretch, rows, footers[stretch.segment.key].ledger))
        return total


def _without_row(stretch: Stretch[SegmentRef], rows: int, ledger: Ledger) -> Ledger:
    """The part of an input's `ledger` that belongs to `stretch`, where it can be told; else `unattributed`.

    A ledger counts sequences and does not name them. It can be told when all that the input lacks lies in the
    stretch, or when everything it lacks has one reason.
    """
    missing = len(stretch.rows) - rows
    reasons = [reason for reason, count in ledger.counts.items() if count]
    if missing == ledger.total():
        return ledger
    if len(reasons) == 1 and missing < ledger.total():
        return Ledger({reasons[0]: missing})
    return Ledger({Reason.UNATTRIBUTED: missing})


def merged_footer(output: Output, footers: Mapping[str, Footer], tally: Tally) -> Footer:
    """The footer of `output`; raw bytes and timestamps are the writer's to fill in.

    It holds no time and no host, so that two jobs, or one that is run again, write the same bytes.
    """
    sampling, sampling_digest = _sampling(footers.values())
    return Footer(
        chain=output.chain,
        level=output.level,
        coverage=output.coverage,
        rows=sum(tally.rows),
        ledger=tally.ledger(footers),
        raw_bytes=0,
        first_timestamp_ns=None,
        last_timestamp_ns=None,
        tip=_tip(output.inputs, footers),
        writer=f"floe {version()} compaction",
        sampling=sampling,
        sampling_digest=sampling_digest,
        inputs=Inputs.of([s.name for s in output.inputs]),
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
