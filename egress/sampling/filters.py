"""The filters between reading and the builder: they leave out messages, and report the advisories of their keys.

Reasons for leaving out, in this order: looped, too old, sampled out. A message that is looped or too old never
reaches the sampler. Nor does one that claims to be a copy (`egress.loops`): it passes, and is compared before it is
written.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import accumulate

from common.jetstream.headers import REPLAY, SOURCE, hops, is_replayed
from common.segments.columns import Columns
from common.sequences import MAX_SEQUENCE
from egress.advisories.advisory import Advisory
from egress.advisories.senders import AdvisorySender
from egress.batch import LOOPED, SAMPLED_OUT, TOO_OLD, MessageBatch
from egress.builder import Builder
from egress.loops import Claims
from egress.sampling.sampler import SampledBatch, Sampler

# Maps "is kept" (1 or 0) to the code of a message, and its code to 1 if it is still undecided.
_FROM_CHOICE = bytes([SAMPLED_OUT, 0]) + bytes(254)
_IN_QUESTION = bytes([1]) + bytes(255)


@dataclass(eq=False)
class PreFilter:
    """The filter of a feed that has `max_age`, is a relay or is sampled.

    `site`: messages that came through it are left out if `relay` is true. `keep_ns`: messages older than this before
    the newest one seen are left out; 0 keeps all. `newest_ns`: the newest time seen so far, 0 if none was. `sampler`:
    None keeps all messages that the other filters pass. `claims`: finds the messages that the sampler does not get.
    `choices`: the sampler's result for the last batch, None if it was not called.
    """

    site: str
    _: KW_ONLY
    relay: bool = False
    keep_ns: int = 0
    newest_ns: int = 0
    sampler: Sampler | None = None
    claims: Claims | None = None
    choices: SampledBatch | None = field(init=False, default=None)

    def saw(self, timestamp_ns: int) -> bool:
        """Record that the source holds a message as new as this. True if `keep_ns` then leaves out all seen before."""
        older = self.newest_ns
        self.newest_ns = max(older, timestamp_ns)
        return bool(self.keep_ns) and timestamp_ns - self.keep_ns > older

    def sift(self, columns: Columns) -> MessageBatch:
        """Filter received messages, at least one, in sequence order and after those of the last call."""
        codes, self.choices = self._codes(columns), None
        if codes is None:
            return self._sampled(columns)
        rest = columns.chosen(codes.translate(_IN_QUESTION))
        if self.sampler is None or not rest:
            return MessageBatch(columns, codes, rest)
        sampled = self._sampled(rest)
        following = iter(sampled.codes)  # they take the places of zeros
        return MessageBatch(columns, bytearray(code or next(following) for code in codes), sampled.kept)

    def _codes(self, columns: Columns) -> bytearray | None:
        """Return a code for each message, nonzero if it is left out before sampling; None if all are zero."""
        old = self._too_old(columns)
        looped = self._looped(columns)
        if not old and not looped:
            return None
        codes = bytearray(len(columns))
        for places, code in ((old, TOO_OLD), (looped, LOOPED)):
            for place in places:
                codes[place] = code
        return codes

    def _looped(self, columns: Columns) -> list[int]:
        places: list[int] = []
        for place, block in enumerate(columns.headers if self.relay else ()):
            if block is not None and SOURCE in block:
                sites = [hop.site for hop in hops(block)]
                is_back = REPLAY in block and is_replayed(block) and sites[:1] == [self.site]
                if self.site in sites and not is_back:
                    places.append(place)
        return places

    def _too_old(self, columns: Columns) -> list[int]:
        times = columns.timestamps_ns
        before, self.newest_ns = self.newest_ns, max(self.newest_ns, max(times))
        if not self.keep_ns or min(times) >= self.newest_ns - self.keep_ns:
            return []
        newest = accumulate(times, max, initial=before)
        next(newest)
        pairs = enumerate(zip(times, newest, strict=True))
        return [place for place, (time, seen) in pairs if time < seen - self.keep_ns]

    def _sampled(self, columns: Columns) -> MessageBatch:
        if self.sampler is None:
            return MessageBatch.whole(columns)
        claiming = [] if self.claims is None else self.claims.places(columns)
        self.choices = choices = _around(self.sampler, columns, claiming)
        codes = bytes(choices.kept).translate(_FROM_CHOICE)
        return MessageBatch(columns, codes, columns.chosen(choices.kept, choices.keys))


def _around(sampler: Sampler, columns: Columns, claiming: list[int]) -> SampledBatch:
    if not claiming:
        return sampler.fold(columns)
    shown = bytearray(b"\1") * len(columns)
    for place in claiming:
        shown[place] = 0
    choices = sampler.fold(columns.chosen(shown))
    kept, keys = iter(choices.kept), iter(choices.keys)
    return replace(
        choices,
        kept=bytearray(next(kept) if each else 1 for each in shown),
        keys=[next(keys) if each else None for each in shown],
    )


class Tracking:
    """The reporter of the sampler's advisories, which also advances the sampler's time.

    `advisories`: None if the feed has none; then the passing of time only makes the sampler forget keys.
    `again_last`: a former session may have found the same advisories up to this sequence. `again_until_ns`: after it
    had folded in all messages up to `again_last`, that session may have advanced to this time; 0 if it had not.
    """

    def __init__(
        self, sampler: Sampler, advisories: AdvisorySender | None, again_last: int, again_until_ns: int = 0
    ) -> None:
        self._sampler, self._advisories = sampler, advisories
        self._again_last, self._again_until_ns, self._advanced_ns = again_last, again_until_ns, 0
        self.is_again = True

    def found(self, advisories: list[Advisory], *, again: bool = False) -> None:
        if self._advisories is not None and advisories:
            self._advisories.take(advisories, again=again or self.is_again)

    def reached(self, sequence: int) -> None:
        if self.is_again and sequence >= self._again_last:
            self.advance(max(self._sampler.watermark_ns, self._again_until_ns))
            self.is_again = False
            if self._advisories is not None:
                self._advisories.settle()

    def advance(self, now_ns: int, *, again: bool = False) -> None:
        """Advance the sampler to `now_ns`: no older message is still to come. `again`: as in `found`."""
        if now_ns > self._advanced_ns:
            self._advanced_ns = now_ns
            self.found(self._sampler.advance(now_ns), again=again)


class Sifting:
    """The filter stage of a feed that is not sampled, but has `max_age` or is a relay."""

    def __init__(self, builder: Builder, sieve: PreFilter) -> None:
        self._builder, self._sieve = builder, sieve

    def messages(self, columns: Columns) -> None:
        if not self._builder.is_done:
            self._builder.sifted(self._sieve.sift(columns))

    def passed(self, sequence: int) -> None:
        self._builder.passed(sequence)


@dataclass(frozen=True, slots=True)
class SampledStretch:
    """The sequences that a session of a sampled feed reads.

    `read_from`, `write_from`: messages between them are archived already, and are only folded in. `until`: the end of
    the hole that is filled, None without one. `source_newest_ns`: time of the newest message that the source holds;
    it counts for `max_age` only from `write_from` on, so that a second reading filters as the first did.
    """

    read_from: int
    write_from: int
    until: int | None = None
    source_newest_ns: int = 0


class SamplingStage:
    """The filter stage of a sampled feed.

    `on_writing`: called once, when writing begins; its argument is the result of `PreFilter.saw`: True if a time that
    no snapshot holds decides for `max_age`. `on_batch`: called before each batch that is written is filtered;
    `on_choices`: after that.
    """

    def __init__(
        self,
        builder: Builder,
        sieve: PreFilter,
        tracking: Tracking,
        stretch: SampledStretch,
        *,
        on_writing: Callable[[bool], None],
        on_batch: Callable[[], None],
        on_choices: Callable[[SampledBatch], None],
    ) -> None:
        self._builder, self._sieve, self._tracking, self._stretch = builder, sieve, tracking, stretch
        self._on_writing, self._on_batch, self._on_choices = on_writing, on_batch, on_choices
        self._until = MAX_SEQUENCE if stretch.until is None else stretch.until
        self._is_writing = False
        #: The last sequence folded in, or known to hold nothing to fold.
        self.end = stretch.read_from - 1

    def begin(self) -> None:
        """Start the stage. Call it once, before the first message."""
        self._reached(self.end)

    def messages(self, columns: Columns) -> None:
        if count := bisect_left(columns.sequences, self._stretch.write_from):
            self._sift(columns.part(0, count))
            self._reached(columns.sequences[count - 1])
            columns = columns.part(count, len(columns))
        if columns and not self._builder.is_done:
            self._write(columns)

    def passed(self, sequence: int) -> None:
        self._builder.passed(sequence)
        self._reached(max(self.end, min(sequence, self._until)))

    def _sift(self, columns: Columns) -> MessageBatch:
        sifted = self._sieve.sift(columns)
        if self._sieve.choices is not None:
            self._tracking.found(self._sieve.choices.advisories)
        return sifted

    def _write(self, columns: Columns) -> None:
        self._begin_writing()
        last = min(columns.sequences[-1], self._until)
        if inside := columns.part(0, bisect_right(columns.sequences, last)):
            self._on_batch()
            sifted = self._sift(inside)
            if self._sieve.choices is not None:
                self._on_choices(self._sieve.choices)
            self._builder.sifted(sifted)
        if last < columns.sequences[-1]:
            self._builder.passed(last)
        self._reached(last)

    def _reached(self, sequence: int) -> None:
        if sequence >= self._stretch.write_from - 1:
            self._begin_writing()
        self.end = sequence
        self._tracking.reached(sequence)

    def _begin_writing(self) -> None:
        if not self._is_writing:
            self._is_writing = True
            self.end = self._stretch.write_from - 1
            self._on_writing(self._sieve.saw(self._stretch.source_newest_ns))
