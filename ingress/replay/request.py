"""What an operator asks to be replayed: a value, checked, with a canonical form that tells two apart."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from common.chain import Chain
from common.errors import UsageError
from common.segments.naming import unknown
from common.settings.types import is_filter
from common.settings.units import format_duration, parse_time


@dataclass(frozen=True, slots=True)
class Request:
    """Which messages, and where to.

    `incarnation`, `partition` None: all that the range touches. `from_time`, `to_time`: as they were typed,
    with a zone; `to_time` is exclusive, `to_sequence` inclusive. `since`: seconds before now, 0 for none.
    `subjects`: filters of NATS, none for all. `prefix`: put before each subject, with a dot. `into_source`:
    the target is the stream that the feed was frozen from. Raises UsageError where keys contradict.
    """

    site: str
    feed: str
    target: str
    incarnation: int | None = None
    partition: int | None = None
    from_sequence: int | None = None
    from_time: str = ""
    since: float = 0.0
    to_sequence: int | None = None
    to_time: str = ""
    subjects: tuple[str, ...] = ()
    prefix: str = ""
    into_source: bool = False

    def __post_init__(self) -> None:
        begins = [n for n in ("from_sequence", "from_time", "since") if getattr(self, n)]
        ends = [n for n in ("to_sequence", "to_time") if getattr(self, n)]
        for names in (begins, ends):
            if len(names) > 1:
                raise UsageError(f"expected one of {' and '.join(map(_option, names))}, found both")
        for name in ("from_time", "to_time"):
            if text := getattr(self, name):
                _time(_option(name), text)
        for subject in self.subjects:
            if not is_filter(subject):
                raise UsageError(
                    f"--subject: expected a filter such as nodes.*.temperature, found {subject!r}"
                )
        self._check_order()

    def _check_order(self) -> None:
        if self.from_sequence and self.to_sequence and self.from_sequence > self.to_sequence:
            most = f"--to-sequence {self.to_sequence}"
            raise UsageError(f"--from-sequence: expected at most {most}, found {self.from_sequence}")
        if self.from_time and self.to_time and _time("", self.from_time) >= _time("", self.to_time):
            raise UsageError(f"--from-time: expected before --to-time {self.to_time}, found {self.from_time}")

    @property
    def by_sequence(self) -> bool:
        """Whether a bound is a sequence, which means something in one incarnation only."""
        return bool(self.from_sequence or self.to_sequence)

    def is_behind(self, end: int) -> bool:
        """Whether it asks, by its number, for what an incarnation has behind `end`, where it ended."""
        return self.incarnation is not None and (self.from_sequence or 0) > end

    def moments(self, now: float) -> tuple[int | None, int | None]:
        """From (inclusive) and to (exclusive) in ns since 1970, at `now` (seconds); None: no such bound.

        Raises UsageError where `since` begins at or behind `to_time`.
        """
        begin = _time("", self.from_time) if self.from_time else None
        if self.since:
            begin = int((now - self.since) * 1_000_000_000)
        end = _time("", self.to_time) if self.to_time else None
        if begin is not None and end is not None and begin >= end:
            raise UsageError(
                f"--since {format_duration(self.since)}: expected a begin before --to-time {self.to_time}"
            )
        return begin, end

    def chains(self, known: Sequence[Chain]) -> list[Chain]:
        """Those of `known` that are asked for, by incarnation and partition; without any of the feed, `known`
        are all there are.

        By sequences without an incarnation: of the newest. Raises UsageError where there are none.
        """
        feed = [c for c in known if (c.site, c.feed) == (self.site, self.feed)]
        if not feed:
            raise unknown({(c.site, c.feed) for c in known}, self.site, self.feed)
        newest = max(c.incarnation for c in feed)
        wanted = newest if self.incarnation is None and self.by_sequence else self.incarnation
        found = [c for c in feed if wanted in (None, c.incarnation) and self.partition in (None, c.partition)]
        if not found:
            there = sorted(f"{c.incarnation:04d}/{c.partition}" for c in feed)
            raise UsageError(
                f"{self.site}/{self.feed}: expected one of {', '.join(there[:20])}, "
                f"found incarnation {wanted}, partition {self.partition}"
            )
        return sorted(found, key=lambda c: (c.incarnation, c.partition))

    # Its forms

    def to_json(self) -> dict[str, Any]:
        """What is not a default."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value not in (None, "", 0.0, (), False)
            or (name in ("incarnation", "partition") and value == 0)
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Request:
        """What `to_json` made. Raises TypeError, UsageError."""
        return cls(**{**document, "subjects": tuple(document.get("subjects", ()))})

    @property
    def digest(self) -> str:
        """16 hex digits that are equal for equal requests, whatever the order of subjects."""
        document = {**self.to_json(), "subjects": sorted(set(self.subjects))}
        canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def words(self) -> str:
        """The options that say the same, for a command to paste."""
        words: list[str] = []
        for name, value in self.to_json().items():
            if name == "since":
                words += ["--since", format_duration(value)]
            elif name == "subjects":
                words += [word for subject in value for word in ("--subject", shlex.quote(subject))]
            elif value is True:
                words.append(_option(name))
            else:
                words += [_option(name), shlex.quote(str(value))]
        return " ".join(words)


def _option(name: str) -> str:
    return "--subject-prefix" if name == "prefix" else f"--{name.replace('_', '-')}"


def _time(option: str, text: str) -> int:
    try:
        return parse_time(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error
