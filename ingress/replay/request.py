"""The request for a replay: a checked value, with a canonical form that distinguishes two requests."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from common.chain import Chain
from common.clock import NS_PER_S, parse_time
from common.errors import UsageError
from common.exits import command, ways
from common.segments.documents import BEFORE_GIVING_UP, accept_command
from common.segments.keys import unknown
from common.sequences import SequenceRange
from common.settings.types import format_duration, is_filter
from ingress.replay.pace import Pace
from ingress.verdict.settle import LOOK_SPACING


@dataclass(frozen=True, slots=True)
class Request:
    """The messages to replay, and their target.

    `incarnation`, `partition`: None for all that the range touches. `from_time`, `to_time`: as they were typed, with a
    zone; `to_time` is exclusive, `to_sequence` inclusive. `since`, `until`: the same in seconds before now, 0 for none.
    `subjects`: filters of NATS, empty for all. `prefix`: put before each subject, with a dot. `into_source`: the target
    is the stream that the feed was frozen from. Raises UsageError if keys contradict each other.
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
    until: float = 0.0

    def __post_init__(self) -> None:
        for bounds in (("from_sequence", "from_time", "since"), ("to_sequence", "to_time", "until")):
            if len(given := [name for name in bounds if getattr(self, name)]) > 1:
                raise UsageError(f"expected one of {' and '.join(map(_option, given))}, found both")
        times = [_time(_option(n), text) for n in ("from_time", "to_time") if (text := getattr(self, n))]
        for subject in self.subjects:
            if not is_filter(subject):
                raise UsageError(f"--subject: expected a filter such as nodes.*.temperature, found {subject!r}")
        if set("{}") & set(self.prefix):
            raise UsageError(f"--subject-prefix: expected the text itself, without braces, found {self.prefix!r}")
        if self.from_sequence and self.to_sequence and self.from_sequence > self.to_sequence:
            most = f"--to-sequence {self.to_sequence}"
            raise UsageError(f"--from-sequence: expected at most {most}, found {self.from_sequence}")
        if len(times) == 2 and times[0] >= times[1]:
            raise UsageError(f"--from-time: expected before --to-time {self.to_time}, found {self.from_time}")

    @property
    def by_sequence(self) -> bool:
        return bool(self.from_sequence or self.to_sequence)

    def is_behind(self, end: int) -> bool:
        return self.incarnation is not None and (self.from_sequence or 0) > end

    def moments(self, now: float) -> tuple[int | None, int | None]:
        """Return the begin (inclusive) and the end (exclusive) in ns since 1970, at `now` (seconds); None: no bound.

        Raises UsageError if the begin is not before the end.
        """
        begin = _time("", self.from_time) if self.from_time else None
        if self.since:
            begin = int((now - self.since) * NS_PER_S)
        end = _time("", self.to_time) if self.to_time else None
        if self.until:
            end = int((now - self.until) * 1_000_000_000)
        if begin is not None and end is not None and begin >= end:
            first, last = self.bounds("from_time", "since"), self.bounds("to_time", "until")
            raise UsageError(f"{first}: expected a begin before {last}")
        return begin, end

    def bounds(self, *names: str) -> str:
        """Return the given options among these keys, as they were typed."""
        said = {
            name: format_duration(value) if isinstance(value, float) else value
            for name in names
            if (value := getattr(self, name))
        }
        return " ".join(f"{_option(name)} {value}" for name, value in said.items())

    def chains(self, known: Sequence[Chain]) -> list[Chain]:
        """Return the requested chains of `known`, by incarnation and partition. `known`: every chain if none is of the
        feed.

        A range of sequences without an incarnation is one of the newest incarnation. Raises UsageError if there are no
        such chains.
        """
        feed = [c for c in known if (c.site, c.feed) == (self.site, self.feed)]
        if not feed:
            raise unknown({(c.site, c.feed) for c in known}, self.site, self.feed)
        newest = max(c.incarnation for c in feed)
        wanted = newest if self.incarnation is None and self.by_sequence else self.incarnation
        found = [c for c in feed if wanted in (None, c.incarnation) and self.partition in (None, c.partition)]
        if not found:
            there = sorted(f"{c.incarnation:04d}/{c.partition}" for c in feed)
            asked = [] if wanted is None else [f"incarnation {wanted}"]
            asked += [] if self.partition is None else [f"partition {self.partition}"]
            where = f"{self.site}/{self.feed}"
            raise UsageError(f"{where}: expected one of {', '.join(there[:20])}, found {', '.join(asked)}")
        return sorted(found, key=lambda c: (c.incarnation, c.partition))

    # Forms of the request

    def to_json(self) -> dict[str, Any]:
        numbers = ("incarnation", "partition")  # 0 is a value of these
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if value or (name in numbers and value is not None)
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Request:
        """Parse a request. Raises TypeError, UsageError."""
        return cls(**{**document, "subjects": tuple(document.get("subjects", ()))})

    @property
    def digest(self) -> str:
        """16 hex digits, equal for equal requests, regardless of the order of subjects."""
        document = {**self.to_json(), "subjects": sorted(set(self.subjects))}
        canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def words(self) -> str:
        words: list[str] = []
        for name, value in self.to_json().items():
            if name in ("since", "until"):
                words += [_option(name), format_duration(value)]
            elif name == "subjects":
                words += [word for subject in value for word in ("--subject", shlex.quote(subject))]
            elif value is True:
                words.append(_option(name))
            else:
                words += [_option(name), shlex.quote(str(value))]
        return " ".join(words)


def _option(name: str) -> str:
    named = {"prefix": "subject-prefix", "since": "from-time", "until": "to-time"}
    return f"--{named.get(name, name).replace('_', '-')}"


def _time(option: str, text: str) -> int:
    try:
        return parse_time(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


# Options without a value.
FLAGS = ("create", "append", "allow_lossy", "skip_holes", "again")


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The options of one replay. `again`: begin from the start, regardless of the record of a former replay. `pace`:
    None for as fast as possible.

    `paced`: the options of the pace, to repeat them. `look_spacing`: seconds between the three reads of the target that
    confirm a verdict.
    """

    create: bool = False
    append: bool = False
    allow_lossy: bool = False
    skip_holes: bool = False
    again: bool = False
    pace: Pace | None = None
    paced: tuple[str, ...] = ()
    look_spacing: float = LOOK_SPACING

    def words(self) -> Iterator[str]:
        for name in FLAGS:
            if getattr(self, name):
                yield f"--{name.replace('_', '-')}"
        yield from self.paced


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of a replay. `finished`: all is stored; `was_done`: by an earlier run. `rows`: messages stored by all
    its runs; `rows_now`, `bytes`, `seconds`: of this run.
    """

    finished: bool
    was_done: bool
    target: str
    rows: int
    rows_now: int
    bytes: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.rows_now / self.seconds if self.seconds > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": round(self.seconds, 3), "rows_per_second": round(self.rate)}


SHOWN = 10  # holes


@dataclass(frozen=True, slots=True)
class Advice:
    """The commands of one replay, for hints. `options`: those of its command line; each command repeats them."""

    request: Request
    options: ReplayOptions = field(default_factory=ReplayOptions)

    def _of(self, **changes: Any) -> Advice:
        return replace(self, request=replace(self.request, **changes))

    def same(self, *more: str) -> str:
        return command("replay", self.request.words(), *dict.fromkeys([*self.options.words(), *more]))

    def anew(self, before: str = "") -> str:
        return ways((f"{before}empty the target, and begin anew", self.empty, self.same("--again")))

    def not_created(self, *, is_taken: bool) -> str:
        if not is_taken:
            return ways(("mend what the server names, and give the same command again", self.same()))
        apart = f"{self.request.target}_ALL"
        apart += "_2" if self.request.prefix == apart else ""
        below = self._of(prefix=apart, into_source=False)
        taken = "another stream takes these subjects, and no second one can; replay below a prefix of its own"
        return ways((taken, below.same()))

    @property
    def empty(self) -> str:
        return f"nats stream purge {shlex.quote(self.request.target)} --force"

    def source(self, name: str) -> str:
        """Return the hint for a target that is not the source. `name`: the source of the feed; empty: not known."""
        words, other = f"replay into {self.request.target}, which is another stream", self._of(into_source=False)
        if not name:
            return ways((words, other.same()))
        return ways(("replay into the source", self._of(target=name).same()), (f"or {words}", other.same()))

    def holes(self, chain: Chain, holes: tuple[SequenceRange, ...]) -> str:
        given_up = [accept_command(chain, hole) for hole in holes[:SHOWN]]
        last = "only when nobody has them any more, give them up for all targets"
        skip = (f"{BEFORE_GIVING_UP}; or go on without them", self.same("--skip-holes"))
        return ways(skip, (last, *given_up))

    def refused(self, code: str) -> str:
        name, again = shlex.quote(self.request.target), self.same()
        if code == "E-SUBJECT":
            edit = f"nats stream edit {name} --subjects SUBJECTS"
            other = f"{self.request.target}_ALL"
            wide = self._of(target=other, prefix=other, into_source=False).same("--create")
            everything = "or replay into a stream that takes everything below a prefix"
            return ways(("let the target take it, and go on", edit, again), (everything, wide))
        edit = f"nats stream edit {name} --max-msg-size=-1 --force"
        raised = "raise the target's limit, or max_payload of its server, and go on"
        return ways((raised, edit, again))
