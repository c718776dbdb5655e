"""The reader's target of a feed that leaves messages out: everything is sifted, what is kept goes on.

A sampled feed is read from before its position on: what lies below is folded again, so that the sampler knows
what it knew, and goes no further.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from common.segments.columns import Columns
from egress.batch import part
from egress.builder import Builder
from egress.sampling.filters import Sieve
from egress.sampling.sampler import Choices
from egress.sampling.tracking import Tracking


class Sifting:
    """For a feed that is not sampled, but has `max_age` or is a relay."""

    def __init__(self, builder: Builder, sieve: Sieve) -> None:
        self._builder, self._sieve = builder, sieve

    def messages(self, columns: Columns) -> None:
        """The next messages."""
        if not self._builder.is_done:
            self._builder.sifted(self._sieve.sift(columns))

    def passed(self, sequence: int) -> None:
        """The consumer delivers no more up to `sequence`."""
        self._builder.passed(sequence)


@dataclass(frozen=True, slots=True)
class Stretch:
    """What a session of a sampled feed reads.

    `read_from`, `write_from`: what lies between them is archived, and is only folded. `until`: the end of the
    hole that is filled, None without one. `source_newest_ns`: time of the newest message that the source
    holds; it counts for `max_age` only from `write_from` on, so that reading again judges as the first
    reading did.
    """

    read_from: int
    write_from: int
    until: int | None = None
    source_newest_ns: int = 0


class Intake:
    """For a sampled feed.

    `on_writing`: called once, where writing begins, with whether messages are judged by a time that no
    snapshot knows. `on_batch`: called before each batch that is written; `on_choices`: behind it.
    """

    def __init__(
        self,
        builder: Builder,
        sieve: Sieve,
        tracking: Tracking,
        stretch: Stretch,
        *,
        on_writing: Callable[[bool], None],
        on_batch: Callable[[], None],
        on_choices: Callable[[Choices], None],
    ) -> None:
        self._builder, self._sieve, self._tracking, self._stretch = builder, sieve, tracking, stretch
        self._on_writing, self._on_batch, self._on_choices = on_writing, on_batch, on_choices
        self._is_writing = False
        self._end = stretch.read_from - 1

    @property
    def end(self) -> int:
        """The last sequence folded in, or known to hold nothing to fold."""
        return self._end

    def begin(self) -> None:
        """To be called once, before the first message."""
        self._reached(self._end)

    def messages(self, columns: Columns) -> None:
        """The next messages."""
        count = bisect_left(columns.sequences, self._stretch.write_from)
        if count:
            self._fold(part(columns, 0, count))
            columns = part(columns, count, len(columns.sequences))
        if columns.sequences and not self._builder.is_done:
            self._write(columns)

    def passed(self, sequence: int) -> None:
        """The consumer delivers no more up to `sequence`."""
        self._builder.passed(sequence)
        self._reached(max(self._end, self._inside(sequence)))

    def _inside(self, sequence: int) -> int:
        return sequence if self._stretch.until is None else min(sequence, self._stretch.until)

    def _fold(self, columns: Columns) -> None:
        """Take messages that are archived."""
        self._sieve.sift(columns)
        if self._sieve.choices is not None:
            self._tracking.found(self._sieve.choices.advisories)
        self._reached(columns.sequences[-1])

    def _write(self, columns: Columns) -> None:
        self._begin_writing()
        last = self._inside(columns.sequences[-1])
        inside = part(columns, 0, bisect_right(columns.sequences, last))
        if inside.sequences:
            self._sift(inside)
        if last < columns.sequences[-1]:
            self._builder.passed(last)
        self._reached(last)

    def _sift(self, columns: Columns) -> None:
        self._on_batch()
        sifted, choices = self._sieve.sift(columns), self._sieve.choices
        if choices is not None:
            self._tracking.found(choices.advisories)
            self._on_choices(choices)
        self._builder.sifted(sifted)

    def _reached(self, sequence: int) -> None:
        if sequence >= self._stretch.write_from - 1:
            self._begin_writing()
        self._end = sequence
        self._tracking.reached(sequence)

    def _begin_writing(self) -> None:
        if not self._is_writing:
            self._is_writing = True
            self._end = self._stretch.write_from - 1
            self._on_writing(self._sieve.saw(self._stretch.source_newest_ns))
