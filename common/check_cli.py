"""`floe check`: one line and an exit code of 0 to 3, for Nagios and similar tools; see docs/guides/monitoring.md."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import click

from common.cli import Duration, chains_argument, config_option, json_option, print_json
from common.clock import SystemClock
from common.errors import DataError, FloeError, Refused, UsageError
from common.logs import escape
from common.settings.types import format_count, format_duration

if TYPE_CHECKING:
    from common.archive.documents import ChainStore
    from common.archive.heartbeats import StoredHeartbeat
    from common.archive.store import SegmentStore
    from common.archive.table import SegmentTable
    from common.chain import Chain
    from common.observe.observation import Observation
    from common.settings.root import Settings

HANG_AFTER_S = 30.0  # seconds without a beat of the event loop that count as a hang
MAX_SHOWN = 3  # problems in a line; the number of the others follows
HOUR_S, DAY_S = 3600.0, 86_400.0
MIN_PARQUET_BYTES = 12  # bytes of the smallest possible Parquet file: its magic twice, and a length


Thresholds = tuple[float | None, float | None]  # of WARNING and CRITICAL, in seconds; None: the default


class CheckState(IntEnum):
    """The exit codes of a check."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


@dataclass(frozen=True, slots=True)
class PerformanceValue:
    """One value of the performance data; `unit` is `s`, `B` or none. `warning`, `critical`: as ranges of Nagios."""

    name: str
    value: float
    unit: str = ""
    warning: str = ""
    critical: str = ""

    def __str__(self) -> str:
        number = f"{self.value:.3f}".rstrip("0").rstrip(".")
        return f"{self.name}={number}{self.unit};{self.warning};{self.critical}".rstrip(";")


@dataclass(slots=True)
class CheckResult:
    """The result of a check. `ok_text`: the text if all is well; `problems`: the faults, of which the worst decides."""

    ok_text: str
    performance_data: list[PerformanceValue] = field(default_factory=list)
    problems: list[tuple[CheckState, str]] = field(default_factory=list)

    @property
    def state(self) -> CheckState:
        return max((state for state, _ in self.problems), default=CheckState.OK)

    def add_problem(self, state: CheckState, text: str) -> None:
        """Add a problem."""
        self.problems.append((state, text))

    def check_limit(self, text: str, value: float, warning: float, critical: float, *, at_least: bool = False) -> None:
        """Add a problem if `value` is above a limit, or with `at_least` below it."""
        for state, bound in ((CheckState.CRITICAL, critical), (CheckState.WARNING, warning)):
            if value < bound if at_least else value > bound:
                self.add_problem(state, text)
                return

    def check_process(self, document: Mapping[str, Any]) -> None:
        """Add the problems that `document`, /status of any process, shows."""
        if (age := float(document.get("heartbeat_age_seconds", 0))) > HANG_AFTER_S:
            self.add_problem(CheckState.CRITICAL, f"hangs: the event loop last ran {age:.0f} s ago")
        for problem in document["problems"]:
            self.add_problem(CheckState.WARNING, f"not ready: {problem}")

    def text(self) -> str:
        """Return the worst problems, else `ok_text`, in one line without `|`, which begins the performance data."""
        worst = [text for _, text in sorted(self.problems, key=lambda found: -found[0])]
        more = [f"and {len(worst) - MAX_SHOWN} more"] if len(worst) > MAX_SHOWN else []
        found = "; ".join([*worst[:MAX_SHOWN], *more]) or self.ok_text
        return escape(found.replace("\n", "; ").replace("|", "/"))

    def line(self) -> str:
        """Return `STATE - text | performance data`."""
        figures = " ".join(str(each) for each in self.performance_data if math.isfinite(each.value))
        return f"{self.state.name} - {self.text()}" + (f" | {figures}" if figures else "")


def thresholds(given: Thresholds, defaults: tuple[float, float], *, at_least: bool = False) -> tuple[float, float]:
    """Return WARNING and CRITICAL in seconds: as `given`, else the default, limited by the other one.

    Raises UsageError if a value would be CRITICAL before it is a WARNING. `at_least`: values have to stay above.
    """
    first, last = (max, min) if at_least else (min, max)
    warning, critical = given
    if warning is None:
        warning = defaults[0] if critical is None else first(defaults[0], critical)
    if critical is None:
        critical = last(defaults[1], warning)
    if first(warning, critical) != warning:
        side, limit, found = "least" if at_least else "most", format_duration(critical), format_duration(warning)
        raise UsageError(f"--warning: expected at {side} --critical, {limit}, found {found}")
    return warning, critical


class _CheckCommand(click.Command):
    """A command that reports a wrong command line as UNKNOWN, in a line like any check: 2 would be read as CRITICAL."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            text = error.format_message()
            if isinstance(error, click.MissingParameter):
                text = f"floe check: expected one of {', '.join(PARTS)}, found none"
            if error.ctx is not None:
                click.echo(error.ctx.get_usage(), err=True)
            click.echo(CheckResult("", problems=[(CheckState.UNKNOWN, f"E-USAGE: {text}")]).line())
            raise click.exceptions.Exit(CheckState.UNKNOWN) from None


#: Loaders of checks that only one part can make: `check PART` of `floe.PART_FUNCTIONS`.
PartChecks = Mapping[str, Callable[[], Callable[..., CheckResult]]]
PARTS = ("egress", "ingress", "archive", "compaction")


@click.command(cls=_CheckCommand)
@click.argument("part", type=click.Choice(PARTS))
@chains_argument
@click.option("--warning", type=Duration(), help="WARNING beyond this time.")
@click.option("--critical", type=Duration(), help="CRITICAL beyond this time.")
@json_option
@config_option
@click.pass_obj
def check(
    parts: PartChecks,
    part: str,
    what: str | None,
    warning: float | None,
    critical: float | None,
    as_json: bool,
    config: str,
) -> None:
    """Report the state of a part in one line, for Nagios and cron: exit 0, 1, 2 or 3.

    egress, ingress: asks the service that runs on this host, at `monitor.listen` of its section. CRITICAL if a chain or
    target waits for an operator, is beyond --critical, or the process hangs; WARNING if anything is not ready; UNKNOWN
    if there is no answer.

    archive: the end of each chain in the bucket, holes, damage, and the heartbeats of egress. Lists all segments, one
    request for each thousand, and reads the newest of each chain; only `floe segments verify` finds damage inside the
    others. The chains are those that the argument names, else those of the configuration, if any, else all.

    compaction: the segments that a run would merge now, as `floe compact --dry-run` lists them, and the results that
    the last runs left in the bucket. Without thresholds also WARNING a day, CRITICAL three days after the last success.

    \b
    part        the thresholds limit                               WARNING       CRITICAL
    egress      time until the source expires unarchived messages  1d            6h
    ingress     age of the oldest message that is not delivered    15m           1h
    archive     time since the last heartbeat of egress            1m            1h
    compaction  time since a merge was due and did not come        1d            3d

    \b
    Examples:
      floe check egress -c site.yaml --critical 12h
      floe check ingress -c central.yaml --warning 5m --critical 30m
      floe check archive -c central.yaml us-east/NODES
      floe check compaction -c central.yaml --warning 2d --critical 4d
    """
    try:
        result = _find(parts, part, config, (warning, critical), what)
    except FloeError as error:
        result = CheckResult("", problems=[(CheckState.UNKNOWN, f"{error.code}: {error.message}")])
    except KeyboardInterrupt:
        result = CheckResult("", problems=[(CheckState.UNKNOWN, "interrupted before the check was done")])
    except Exception as error:  # a monitor must receive any error as a state
        result = CheckResult("", problems=[(CheckState.UNKNOWN, f"{type(error).__name__}: {error}")])
    if as_json:
        figures = {each.name: each.value for each in result.performance_data if math.isfinite(each.value)}
        print_json({"state": result.state.name, "text": result.text(), "figures": figures})
    else:
        click.echo(result.line())
    sys.exit(result.state)


def _find(parts: PartChecks, part: str, config: str, given: Thresholds, what: str | None) -> CheckResult:
    """Check `part`. `given`: the thresholds of the command line. Raises UsageError for `what` of another part."""
    from common.open import load_settings

    if what is not None and part != "archive":
        raise UsageError(f"{what}: expected only with archive, found {part}")
    settings = load_settings(config, quiet=True)
    if part == "archive":
        return check_archive(settings, *thresholds(given, (60.0, HOUR_S)), what)
    return parts[f"check {part}"]()(settings, given)


def check_archive(settings: Settings, warning: float, critical: float, what: str | None) -> CheckResult:
    """Check the chains in the bucket that `what` names; None: those of the configuration, if any, else all.

    `warning`, `critical`: seconds since the last heartbeat of egress for a chain.
    """
    from common.archive.catalog import ChainName, configured_feeds, parse_chain_name, select_chains
    from common.observe.observation import Observation
    from common.open import open_for_view

    store, documents = open_for_view(settings)
    with closing(store):
        # Of a pattern, the archive knows the feeds.
        feeds = frozenset() if settings.egress.patterns else configured_feeds(settings)
        wanted = parse_chain_name(what) if what is not None else ChainName(settings.site or None)
        unread = ""
        try:
            heartbeats = _read_heartbeats(documents, SystemClock().now(), wanted.site)
        except Refused as error:
            heartbeats = {}
            unread = f"heartbeats cannot be read: {error.code}: {error.message}"
        if what is not None:
            chains = select_chains(documents, what, {*feeds, *((chain.site, chain.feed) for chain in heartbeats)})
        else:
            found = documents.chains(settings.site or None)
            chains = [each for each in found if not feeds or (each.site, each.feed) in feeds]
        checked = list[Observation]()
        for chain in chains:
            try:
                checked.append(_check(store, documents, chain, heartbeats.get(chain)))
            except DataError as error:  # of one chain: the others are checked all the same
                checked.append(Observation(chain=chain, damaged=(error.message,), egress=heartbeats.get(chain)))
        for chain in heartbeats.keys() - set(chains):  # a feed may stop before anything of it is archived
            stored, feed = heartbeats[chain], (chain.site, chain.feed)
            is_named = wanted.matches(*feed, chain.incarnation, chain.partition)
            is_meant = is_named and (what is not None or not feeds or feed in feeds)
            if is_meant and stored.heartbeat.state == "stopped":
                checked.append(Observation(chain=chain, egress=stored))
        result = judge_archive(checked, warning, critical)
        if unread and result.state is not CheckState.CRITICAL:
            result.add_problem(CheckState.UNKNOWN, unread)
        return result


# Contents of the bucket


def judge_archive(found: list[Observation], warning: float, critical: float) -> CheckResult:
    """Judge the bucket. `warning`, `critical`: seconds since the last heartbeat of a chain."""
    heartbeats = [(each.chain, each.egress) for each in found if each.egress is not None]
    ages = [stored.age for _, stored in heartbeats]
    left = [each.unarchived or 0 for each in found]
    result = CheckResult(f"{format_count(len(found), 'chain')}, {format_count(sum(left), 'sequence')} not archived", [
        PerformanceValue("chains", len(found)),
        PerformanceValue("holes", sum(len(each.missing) for each in found)),
        PerformanceValue("damaged", sum(len(each.damaged) for each in found)),
        PerformanceValue("not_archived", sum(left)),
        PerformanceValue("silent", max(ages, default=0.0), "s", f"{warning:.0f}", f"{critical:.0f}"),
    ])  # fmt: skip
    if not found:
        result.add_problem(CheckState.UNKNOWN, "no chain is archived")
    for each in found:
        for key in each.damaged:
            result.add_problem(CheckState.CRITICAL, f"damaged: {key}")
        if (age := each.recreated) is not None and age < DAY_S:
            result.add_problem(CheckState.WARNING, f"{each.chain}: the stream was recreated {age:.0f} s ago")
        if each.missing:
            result.add_problem(CheckState.CRITICAL, f"{each.chain}: {', '.join(each.missing[:MAX_SHOWN])} missing")
    for chain, stored in heartbeats:
        if stored.heartbeat.state == "stopped":
            result.add_problem(CheckState.CRITICAL, f"{chain}: stopped at its site: {stored.heartbeat.code}")
        result.check_limit(f"{chain}: no heartbeat for {stored.age:.0f} s", stored.age, warning, critical)
    return result


def _read_heartbeats(documents: ChainStore, now: float, site: str | None) -> dict[Chain, StoredHeartbeat]:
    """Return the heartbeats of a site, or of all, by chain with its incarnation. A stop that a live process reports
    counts over any other process of the same partition. Raises Refused without the permission to read them.
    """
    from common.archive.heartbeats import HEARTBEAT_OVERDUE_S, newest_by_partition
    from common.observe.observation import current_by_partition, read_heartbeats

    found = read_heartbeats(documents, now, site)
    stops = [each for each in found if each.heartbeat.state == "stopped" and each.age <= HEARTBEAT_OVERDUE_S]
    latest = {**current_by_partition(documents, found), **newest_by_partition(stops)}
    return {each.heartbeat.chain: each for each in latest.values()}


def _check(store: SegmentStore, documents: ChainStore, chain: Chain, egress: StoredHeartbeat | None) -> Observation:
    from common.archive.catalog import first_sequence
    from common.observe.observation import Observation
    from common.sequences import CoverageSet, SequenceRange

    # Before the listing: objects that are written meanwhile can only extend the coverage.
    tail, ended = documents.read_tail(chain) or 0, documents.read_end(chain)
    table, covered = store.table(chain), CoverageSet()
    first = first_sequence(documents, chain)  # after the listing: segments that retention deletes are no hole
    for ref in table:
        covered.add(ref.coverage)
    end = max(covered.end, tail) if ended is None else ended
    for gap in documents.gaps(chain) if end >= first else ():
        covered.add(gap.range)
    missing = covered.holes(SequenceRange(first, end)) if end >= first else []
    return Observation(
        chain=chain,
        archived=end,
        missing=tuple(map(str, missing)),
        damaged=tuple(_damaged_keys(store, table)),
        egress=egress,
        recreated=_recreation_age(documents, chain),
    )


def _recreation_age(documents: ChainStore, chain: Chain) -> float | None:
    stream = documents.read_stream(chain) if chain.incarnation and not documents.has_next_incarnation(chain) else None
    if stream is None or stream.continues:
        return None
    info = documents.objects.head(documents.layout.stream_document(chain))
    return info and max(0.0, SystemClock().now() - info.modified)


def _damaged_keys(store: SegmentStore, table: SegmentTable) -> Iterator[str]:
    """Yield the keys of objects too small for a segment, and of the newest segment if its footer is invalid."""
    from common.archive.guard import SegmentGone

    yield from (table[place].key for place in range(len(table)) if table.size_at(place) < MIN_PARQUET_BYTES)
    newest = max(range(len(table)), key=table.end_at, default=None)
    if newest is not None and table.size_at(newest) >= MIN_PARQUET_BYTES:
        found = store.inspect(table[newest])
        if isinstance(found, DataError) and not isinstance(found, SegmentGone):  # gone: merged meanwhile
            yield table[newest].key
