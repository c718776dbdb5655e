"""The filters between reading and the builder: they leave out messages, and report the advisories of their keys.

Reasons for leaving out, in this order: looped, too old, sampled out. A message that is looped or too old never
reaches the sampler. Nor does one that claims to be a copy (`egress.loops`): it passes, and is compared before it is
written.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import accumulate

from common.archive.columns import Columns
from common.nats.headers import REPLAY_HEADER, SOURCE_HEADER, is_replayed, parse_provenances
from common.sequences import MAX_SEQUENCE
from egress.advisories.advisory import Advisory
from egress.advisories.senders import AdvisorySender
from egress.builder import CODE_LOOPED, CODE_SAMPLED_OUT, CODE_TOO_OLD, MessageBatch, SegmentBuilder
from egress.loops import LoopMarkers
from egress.partition import Position
from egress.sampling.sampler import SampledBatch, Sampler

# Maps "is kept" (1 or 0) to the code of a message, and its code to 1 if it is still undecided.
_CODE_OF_KEPT = bytes([CODE_SAMPLED_OUT, 0]) + bytes(254)
_UNDECIDED = bytes([1]) + bytes(255)


@dataclass(eq=False)
class FeedFilter:
    """The filter of a feed that has `max_age`, is a relay or is sampled.

    `site`: messages that came through it are left out if `relay` is true. `max_age_ns`: messages older than this before
    the newest one seen are left out; 0 keeps all. `newest_ns`: the newest time seen so far, 0 if none was. `sampler`:
    None keeps all messages that the other filters pass. `loop_markers`: finds those that the sampler does not get.
    `sampled`: the sampler's result for the last batch, None if it was not called.
    """

    site: str
    _: KW_ONLY
    relay: bool = False
    max_age_ns: int = 0
    newest_ns: int = 0
    sampler: Sampler | None = None
    loop_markers: LoopMarkers | None = None
    sampled: SampledBatch | None = field(init=False, default=None)

    def observe_source_time(self, timestamp_ns: int) -> bool:
        """Record that the source holds a message as new as this. True if `max_age_ns` leaves out all seen before."""
        older = self.newest_ns
        self.newest_ns = max(older, timestamp_ns)
        return bool(self.max_age_ns) and timestamp_ns - self.max_age_ns > older

    def filter(self, columns: Columns) -> MessageBatch:
        """Filter received messages, at least one, in sequence order and after those of the last call."""
        codes, self.sampled = self._reject_codes(columns), None
        if codes is None:
            return self._apply_sampler(columns)
        rest = columns.select(codes.translate(_UNDECIDED))
        if self.sampler is None or not rest:
            return MessageBatch(columns, codes, rest)
        sampled = self._apply_sampler(rest)
        following = iter(sampled.codes)  # they take the places of zeros
        return MessageBatch(columns, bytearray(code or next(following) for code in codes), sampled.kept)

    def _reject_codes(self, columns: Columns) -> bytearray | None:
        """Return a code for each message, nonzero if it is left out before sampling; None if all are zero."""
        old = self._too_old_rows(columns)
        looped = self._looped_rows(columns)
        if not old and not looped:
            return None
        codes = bytearray(len(columns))
        for rows, code in ((old, CODE_TOO_OLD), (looped, CODE_LOOPED)):
            for row in rows:
                codes[row] = code
        return codes

    def _looped_rows(self, columns: Columns) -> list[int]:
        rows: list[int] = []
        for row, block in enumerate(columns.headers if self.relay else ()):
            if block is not None and SOURCE_HEADER in block:
                sites = [hop.site for hop in parse_provenances(block)]
                is_back = REPLAY_HEADER in block and is_replayed(block) and sites[:1] == [self.site]
                if self.site in sites and not is_back:
                    rows.append(row)
        return rows

    def _too_old_rows(self, columns: Columns) -> list[int]:
        times = columns.timestamps_ns
        before, self.newest_ns = self.newest_ns, max(self.newest_ns, max(times))
        if not self.max_age_ns or min(times) >= self.newest_ns - self.max_age_ns:
            return []
        newest = accumulate(times, max, initial=before)
        next(newest)
        pairs = enumerate(zip(times, newest, strict=True))
        return [row for row, (time, seen) in pairs if time < seen - self.max_age_ns]

    def _apply_sampler(self, columns: Columns) -> MessageBatch:
        if self.sampler is None:
            return MessageBatch.keep_all(columns)
        claiming_rows = [] if self.loop_markers is None else self.loop_markers.indexes(columns)
        self.sampled = sampled = _fold_without_claims(self.sampler, columns, claiming_rows)
        codes = bytes(sampled.kept).translate(_CODE_OF_KEPT)
        return MessageBatch(columns, codes, columns.select(sampled.kept, sampled.keys))


def _fold_without_claims(sampler: Sampler, columns: Columns, claiming_rows: list[int]) -> SampledBatch:
    if not claiming_rows:
        return sampler.fold(columns)
    shown = bytearray(b"\1") * len(columns)
    for row in claiming_rows:
        shown[row] = 0
    sampled = sampler.fold(columns.select(shown))
    kept, keys = iter(sampled.kept), iter(sampled.keys)
    return replace(
        sampled,
        kept=bytearray(next(kept) if each else 1 for each in shown),
        keys=[next(keys) if each else None for each in shown],
    )


class AdvisoryTracker:
    """The reporter of the sampler's advisories, which also advances the sampler's time.

    `advisories`: None if the feed has none; then the passing of time only makes the sampler forget keys.
    `reread_last`: a former session may have found the same advisories up to this sequence. `reread_until_ns`: after it
    had folded in all messages up to `reread_last`, that session may have advanced to this time; 0 if it had not.
    """

    def __init__(
        self, sampler: Sampler, advisories: AdvisorySender | None, reread_last: int, reread_until_ns: int = 0
    ) -> None:
        self._sampler, self._advisories = sampler, advisories
        self._reread_last, self._reread_until_ns, self._advanced_ns = reread_last, reread_until_ns, 0
        self.is_rereading = True

    def report(self, advisories: list[Advisory], *, may_be_sent: bool = False) -> None:
        if self._advisories is not None and advisories:
            self._advisories.enqueue(advisories, may_be_sent=may_be_sent or self.is_rereading)

    def advance_sequence(self, sequence: int) -> None:
        if self.is_rereading and sequence >= self._reread_last:
            self.advance(max(self._sampler.watermark_ns, self._reread_until_ns))
            self.is_rereading = False
            if self._advisories is not None:
                self._advisories.finish_reread()

    def advance(self, now_ns: int, *, may_be_sent: bool = False) -> None:
        """Advance the sampler to `now_ns`: no older message is still to come. `may_be_sent`: as in `report`."""
        if now_ns > self._advanced_ns:
            self._advanced_ns = now_ns
            self.report(self._sampler.advance(now_ns), may_be_sent=may_be_sent)


class FilterStage:
    """The filter stage of a feed that is not sampled, but has `max_age` or is a relay."""

    def __init__(self, builder: SegmentBuilder, feed_filter: FeedFilter) -> None:
        self._builder, self._feed_filter = builder, feed_filter

    def add_messages(self, columns: Columns) -> None:
        if not self._builder.is_done:
            self._builder.add_batch(self._feed_filter.filter(columns))

    def skip_to(self, sequence: int) -> None:
        self._builder.skip_to(sequence)


class SamplingStage:
    """The filter stage of a sampled feed, which writes from `position` on.

    `read_from`: messages from there up to the position are archived already, and are only folded in. `on_writing`:
    called once, when writing begins. `on_batch`: called before each batch that is written is filtered; `on_sampled`:
    after that.
    """

    def __init__(
        self,
        builder: SegmentBuilder,
        feed_filter: FeedFilter,
        tracker: AdvisoryTracker,
        position: Position,
        *,
        read_from: int,
        on_writing: Callable[[], None],
        on_batch: Callable[[], None],
        on_sampled: Callable[[SampledBatch], None],
    ) -> None:
        self._builder, self._feed_filter, self._tracker = builder, feed_filter, tracker
        self._on_writing, self._on_batch, self._on_sampled = on_writing, on_batch, on_sampled
        self._write_from, self._is_writing = position.first, False
        self._until = MAX_SEQUENCE if position.until is None else position.until
        #: The last sequence folded in, or known to hold nothing to fold.
        self.last_sequence = read_from - 1

    def begin(self) -> None:
        """Start the stage. Call it once, before the first message."""
        self._advance(self.last_sequence)

    def add_messages(self, columns: Columns) -> None:
        if count := bisect_left(columns.sequences, self._write_from):
            self._filter(columns.part(0, count))
            self._advance(columns.sequences[count - 1])
            columns = columns.part(count, len(columns))
        if columns and not self._builder.is_done:
            self._write(columns)

    def skip_to(self, sequence: int) -> None:
        self._builder.skip_to(sequence)
        self._advance(max(self.last_sequence, min(sequence, self._until)))

    def _filter(self, columns: Columns) -> MessageBatch:
        batch = self._feed_filter.filter(columns)
        if self._feed_filter.sampled is not None:
            self._tracker.report(self._feed_filter.sampled.advisories)
        return batch

    def _write(self, columns: Columns) -> None:
        self._begin_writing()
        last = min(columns.sequences[-1], self._until)
        if inside := columns.part(0, bisect_right(columns.sequences, last)):
            self._on_batch()
            batch = self._filter(inside)
            if self._feed_filter.sampled is not None:
                self._on_sampled(self._feed_filter.sampled)
            self._builder.add_batch(batch)
        if last < columns.sequences[-1]:
            self._builder.skip_to(last)
        self._advance(last)

    def _advance(self, sequence: int) -> None:
        if sequence >= self._write_from - 1:
            self._begin_writing()
        self.last_sequence = sequence
        self._tracker.advance_sequence(sequence)

    def _begin_writing(self) -> None:
        if not self._is_writing:
            self._is_writing = True
            self.last_sequence = self._write_from - 1
            self._on_writing()
