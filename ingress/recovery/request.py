"""The request for a replay: a checked value, with a canonical form that distinguishes two requests; and its pace."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

from common.archive.catalog import unknown_name_error
from common.archive.documents import HOLE_HINT, ChainStore, accept_command
from common.archive.store import SegmentStore
from common.chain import Chain
from common.clock import NS_PER_S, Clock, parse_time
from common.errors import UsageError
from common.exits import EXIT_RETRY_LATER, choices, floe_command, name_argument, nats_command, option_words
from common.sequences import SequenceRange
from common.service.progress import Progress
from common.settings.types import duration_words, format_count, format_duration, is_filter, is_subject, parse_size
from common.tasks import Stop, wait_for


class RecoveryParts(NamedTuple):
    """The archive that a command reads, its clock and its progress."""

    store: SegmentStore
    documents: ChainStore
    clock: Clock
    progress: Progress


@dataclass(frozen=True, slots=True)
class ReplayRequest:
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
        if set("{}") & set(self.prefix) or (self.prefix and not is_subject(self.prefix)):
            expected = "expected a subject without wildcards and braces"
            raise UsageError(f"--subject-prefix: {expected}, found {self.prefix!r}")
        if self.from_sequence and self.to_sequence and self.from_sequence > self.to_sequence:
            most = f"--to-sequence {self.to_sequence}"
            raise UsageError(f"--from-sequence: expected at most {most}, found {self.from_sequence}")
        if len(times) == 2 and times[0] >= times[1]:
            raise UsageError(f"--since: expected before --until {self.to_time}, found {self.from_time}")

    @property
    def has_sequence_bounds(self) -> bool:
        return bool(self.from_sequence or self.to_sequence)

    def moments(self, now: float) -> tuple[int | None, int | None]:
        """Return the begin (inclusive) and the end (exclusive) in ns since 1970, at `now` (seconds); None: no bound.

        Raises UsageError if the begin is not before the end.
        """

        def moment(text: str, seconds_ago: float) -> int | None:
            if seconds_ago:
                return int((now - seconds_ago) * NS_PER_S)
            return _time("", text) if text else None

        begin, end = moment(self.from_time, self.since), moment(self.to_time, self.until)
        if begin is not None and end is not None and begin >= end:
            first, last = self.bounds("from_time", "since"), self.bounds("to_time", "until")
            raise UsageError(f"{first}: expected a beginning before {last}")
        return begin, end

    def bounds(self, *names: str) -> str:
        """Return the given options among these keys, as they were typed."""
        typed = {
            name: format_duration(value) if isinstance(value, float) else value
            for name in names
            if (value := getattr(self, name))
        }
        return " ".join(f"{_option(name)} {value}" for name, value in typed.items())

    def chains(self, known: Sequence[Chain]) -> list[Chain]:
        """Return the requested chains of `known`, by incarnation and partition. `known`: every chain if none is of the
        feed.

        A range of sequences without an incarnation is one of the newest incarnation. Raises UsageError if there are no
        such chains.
        """
        feed = [c for c in known if (c.site, c.feed) == (self.site, self.feed)]
        if not feed:
            raise unknown_name_error({(c.site, c.feed) for c in known}, self.site, self.feed)
        newest = max(c.incarnation for c in feed)
        wanted = newest if self.incarnation is None and self.has_sequence_bounds else self.incarnation
        found = [c for c in feed if wanted in (None, c.incarnation) and self.partition in (None, c.partition)]
        if not found:
            known_keys = sorted(f"{c.incarnation:04d}/{c.partition}" for c in feed)
            wanted_keys = [] if wanted is None else [f"incarnation {wanted}"]
            wanted_keys += [] if self.partition is None else [f"partition {self.partition}"]
            name = f"{self.site}/{self.feed}"
            raise UsageError(f"{name}: expected one of {', '.join(known_keys[:20])}, found {', '.join(wanted_keys)}")
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
    def from_json(cls, document: dict[str, Any]) -> ReplayRequest:
        """Parse a request. Raises TypeError, UsageError."""
        return cls(**{**document, "subjects": tuple(document.get("subjects", ()))})

    @property
    def digest(self) -> str:
        """16 hex digits, equal for equal requests, regardless of the order of subjects."""
        document = {**self.to_json(), "subjects": sorted(set(self.subjects))}
        canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def arguments(self) -> str:
        given = {
            OPTION_NAMES.get(name, name): format_duration(value) if name in ("since", "until") else value
            for name, value in self.to_json().items()
            if name not in ("site", "feed", "incarnation", "partition")
        }
        named = name_argument(self.site, self.feed, self.incarnation, self.partition)
        return " ".join([named, *option_words(given)])


OPTION_NAMES = {"prefix": "subject_prefix", "from_time": "since", "to_time": "until", "subjects": "subject"}


def _option(name: str) -> str:
    return f"--{OPTION_NAMES.get(name, name).replace('_', '-')}"


def _time(option: str, text: str) -> int:
    try:
        return parse_time(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


BURST_S = 0.25  # seconds of the rate that may be sent at once after a pause
MAX_WAIT_S = 0.5  # seconds until the next check of the pace


@dataclass
class Pace:
    """A token bucket of `rate` messages a second; with `counts_bytes`, of bytes of payloads and header blocks. One
    message may take it below zero, so that even a huge message can be sent.
    """

    rate: float
    counts_bytes: bool = False
    tokens: float = field(default=0.0, init=False)
    refilled_at: float | None = field(default=None, init=False)

    def admit(self, now: float, sizes: Sequence[int]) -> tuple[int, float]:
        """Return how many of the next messages may be sent at `now` (monotonic seconds); if none, also the seconds to
        wait. These messages count as sent. `sizes`: the bytes of each message, not empty.
        """
        costs = sizes if self.counts_bytes else [1] * min(len(sizes), int(self.rate * BURST_S) + 1)
        first, before = self.refilled_at is None, now if self.refilled_at is None else self.refilled_at
        self.tokens, self.refilled_at = min(self.rate * BURST_S, self.tokens + self.rate * (now - before)), now
        if self.tokens <= 0 and not first:
            return 0, min(MAX_WAIT_S, max(0.001, (min(1, self.rate * BURST_S) - self.tokens) / self.rate))
        count = max(1, bisect_right(list(accumulate(costs)), self.tokens))
        self.tokens -= sum(costs[:count])
        return count, 0.0

    async def wait_admitted(self, sizes: Sequence[int], clock: Clock, stop: Stop) -> int:
        """Wait until some of the next messages may be sent, and return how many, as `admit`; 0 once `stop` is set."""
        while not stop.is_set:
            count, wait = self.admit(clock.monotonic(), sizes)
            if count:
                return count
            await wait_for(stop, wait)
        return 0


def pace_of(rate: str) -> Pace | None:
    """Return the pace of `--rate`; None: as fast as the target accepts. Raises UsageError."""
    if not rate:
        return None
    number, value = rate.removesuffix("/s"), 0
    with suppress(ValueError):
        value = parse_size(number)
    if not rate.endswith("/s") or value <= 0:
        raise UsageError(f"--rate: expected messages such as 5000/s or bytes such as 20M/s, found {rate!r:.40}")
    return Pace(value, counts_bytes=not number.isdigit())


# Options without a value.
FLAG_OPTIONS = ("create", "append", "allow_lossy", "skip_holes", "again")


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The options of one replay. `again`: begin from the start, regardless of the record of a former replay. `pace`:
    None for as fast as possible; `pace_arguments`: its options, to repeat them.
    """

    create: bool = False
    append: bool = False
    allow_lossy: bool = False
    skip_holes: bool = False
    again: bool = False
    pace: Pace | None = None
    pace_arguments: tuple[str, ...] = ()

    def arguments(self) -> Iterator[str]:
        yield from option_words({name: getattr(self, name) for name in FLAG_OPTIONS})
        yield from self.pace_arguments


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of a replay. `finished`: all is stored; `was_done`: by an earlier run. `rows`: messages stored by all
    its runs; `rows_now`, `bytes`, `seconds`: of this run.
    """

    request: ReplayRequest
    finished: bool
    was_done: bool
    rows: int
    rows_now: int
    bytes: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.rows_now / self.seconds if self.seconds > 0 else 0.0

    @property
    def exit_code(self) -> int:
        return 0 if self.finished else EXIT_RETRY_LATER

    def as_json(self) -> dict[str, Any]:
        values = {name: value for name, value in asdict(self).items() if name != "request"}
        rounded = {"seconds": round(self.seconds, 3), "rows_per_second": round(self.rate)}
        return {"target": self.request.target, **values, **rounded}

    def lines(self) -> Iterator[str]:
        route = f"{self.request.site}/{self.request.feed} into {self.request.target}"
        count = f"{format_count(self.rows, 'message')} of {route}"
        took = f"{self.rows_now:,} in {duration_words(self.seconds)}, {self.rate:,.0f} msg/s"
        if self.was_done:
            yield f"done before: {count}; --again replays them again"
        elif self.finished:
            yield f"done: {count} ({took})"
        else:
            yield f"not finished: {count} ({took}); the same command continues"


MAX_SHOWN_HOLES = 10  # holes


@dataclass(frozen=True, slots=True)
class ReplayHints:
    """The commands of one replay, for hints. `options`: those of its command line; each command repeats them."""

    request: ReplayRequest
    options: ReplayOptions = field(default_factory=ReplayOptions)

    def _with(self, **changes: Any) -> ReplayHints:
        return replace(self, request=replace(self.request, **changes))

    def command(self, *more: str) -> str:
        return floe_command("replay", self.request.arguments(), *dict.fromkeys([*self.options.arguments(), *more]))

    def restart_hint(self, before: str = "") -> str:
        return choices((f"{before}empty the target, and begin again", self.purge_command, self.command("--again")))

    def not_created_hint(self, *, is_taken: bool) -> str:
        if not is_taken:
            return choices(("solve the problem that the server names, and run the same command again", self.command()))
        apart = f"{self.request.target}_ALL"
        apart += "_2" if self.request.prefix == apart else ""
        below = self._with(prefix=apart, into_source=False)
        taken = "another stream takes these subjects, and no second one can; replay below a new prefix"
        return choices((taken, below.command()))

    @property
    def purge_command(self) -> str:
        return nats_command("stream purge", self.request.target, "--force")

    def source_hint(self, name: str) -> str:
        """Return the hint for a target that is not the source. `name`: the source of the feed; empty: not known."""
        words, other = f"replay into {self.request.target}, which is another stream", self._with(into_source=False)
        if not name:
            return choices((words, other.command()))
        return choices(("replay into the source", self._with(target=name).command()), (f"or {words}", other.command()))

    def hole_hint(self, chain: Chain, holes: tuple[SequenceRange, ...]) -> str:
        given_up = [accept_command(chain, hole) for hole in holes[:MAX_SHOWN_HOLES]]
        last = "only if no copy is left, accept them as a gap for all targets"
        skip = (f"{HOLE_HINT}; or continue without them", self.command("--skip-holes"))
        return choices(skip, (last, *given_up))

    def refused_hint(self, code: str) -> str:
        name, again = self.request.target, self.command()
        if code == "E-SUBJECT":
            edit = nats_command("stream edit", name, "--subjects", "SUBJECTS")
            other = f"{self.request.target}_ALL"
            wide = self._with(target=other, prefix=other, into_source=False).command("--create")
            everything = "or replay into a stream that takes all subjects below a prefix"
            return choices(("let the target accept it, and continue", edit, again), (everything, wide))
        edit = nats_command("stream edit", name, "--max-msg-size=-1", "--force")
        raised = "raise the target's limit, or max_payload of its server, and continue"
        return choices((raised, edit, again))
