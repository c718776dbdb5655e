"""`floe state`: lists the values that the samplers of a site know, from their last snapshots."""

import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import click

from common.archive.documents import SnapshotRef
from common.archive.store import SegmentStore
from common.chain import Chain
from common.cli import ParsedType, RequestedTime, config_command, resolve_time, since_option
from common.clock import NS_PER_S, SystemClock, format_time
from common.errors import DataError, FloeError
from common.logs import escape
from common.open import load_settings, open_for_view
from common.settings.egress import FeedSettings
from common.settings.root import Settings
from egress.context import parse_feed
from egress.sampling.key_table import KnownKey, Notice, SamplerState
from egress.sampling.settings import SamplingSettings
from egress.sampling.snapshot import Snapshot
from egress.sampling.snapshot_store import SnapshotStore

_TIME_WIDTH = len("2026-11-20T10:00:00.000000000Z")
_LINES_PER_WRITE = 1000


@dataclass(frozen=True, slots=True)
class ValueFilter:
    """A filter of values: those that match `pattern` (None: all), were last seen at `since_ns` or later, and, if
    `silent_ns` is not None, were last seen before it or are known to be silent.

    Values last seen at `expired_ns` or before have expired, like those with a reported expiry: they are unknown.
    """

    pattern: re.Pattern[str] | None = None
    since_ns: int = 0
    silent_ns: int | None = None
    expired_ns: int = 0

    def matches(self, known: KnownKey) -> bool:
        if known.seen_ns < self.since_ns:
            return False
        if self.silent_ns is not None and not (known.notice or known.seen_ns < self.silent_ns):
            return False
        return self.pattern is None or self.pattern.search(known.value) is not None


class SelectedValues:
    """The values of `state` that `value_filter` matches, sorted by name; a million of them take some 100 MB.

    `known_count`: how many values the state knows; `expired_count`: how many more have expired.
    """

    def __init__(self, state: SamplerState, value_filter: ValueFilter) -> None:
        self._values: list[str] = []
        self._times = array("q")  # seen, copied, due of each
        self._sizes, self._notices = array("Q"), bytearray()
        self.known_count = self.expired_count = 0
        for known in state.iter_keys():
            # These keys are only waiting to be forgotten.
            if known.notice == Notice.EXPIRE or known.seen_ns <= value_filter.expired_ns:
                self.expired_count += 1
                continue
            self.known_count += 1
            if value_filter.matches(known):
                self._values.append(known.value)
                self._times.extend((known.seen_ns, known.copied_ns, known.due_ns))
                self._sizes.append(known.size)
                self._notices.append(known.notice)

    def __len__(self) -> int:
        return len(self._values)

    def count_seen_by(self, time_ns: int) -> int:
        return sum(seen <= time_ns for seen in self._times[::3])

    def __iter__(self) -> Iterator[KnownKey]:
        for n in sorted(range(len(self._values)), key=self._values.__getitem__):
            seen, copied, due = self._times[3 * n : 3 * n + 3]
            yield KnownKey(self._values[n], seen, copied, due, self._sizes[n], Notice(self._notices[n]))


def format_value(_chain: Chain, known: KnownKey) -> str:
    return escape(known.value)


def _format_row(chain: Chain, known: KnownKey) -> str:
    advised = known.notice.name.lower() if known.notice else "-"
    times = f"{format_time(known.seen_ns):{_TIME_WIDTH}}  {format_time(known.copied_ns):{_TIME_WIDTH}}"
    return f"{chain}  {times}  {known.size:10}  {advised:7}  {escape(known.value)}"


def _format_json(chain: Chain, known: KnownKey) -> str:
    return json.dumps(
        {
            "chain": str(chain),
            "value": known.value,
            "seen": format_time(known.seen_ns),
            "copied": format_time(known.copied_ns),
            "due": format_time(known.due_ns),
            "size": known.size,
            "advised": known.notice.name.lower() if known.notice else None,
        }
    )


def _parse_pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"expected a regular expression, found {text!r:.60}: {error}") from None


@click.command()
@click.argument("value", required=False, type=ParsedType("regular expression", re.Pattern, _parse_pattern))
@click.option("--feed", metavar="FEED|SITE/FEED[/INC[/PART]]", help="Only this feed, or this chain of it.")
@since_option
@click.option("--silent", is_flag=True, help="Only values silent for longer than warn_duration, and not yet expired.")
@click.option("--values", "is_values", is_flag=True, help="Print the values only.")
@config_command
def state(
    config: str,
    value: re.Pattern[str] | None,
    feed: str | None,
    since: RequestedTime | None,
    silent: bool,
    is_values: bool,
    as_json: bool,
) -> int:
    """List the values that the samplers of a site know: when each was last seen and copied, and its last advisory.

    VALUE is a regular expression that is searched for in the values; with --since, only values seen from then on. The
    newest snapshot of each chain is read from the store; stderr shows its last sequence, its age, and the end of the
    archive. With --json: one object a line.

    Values that had expired at the snapshot are no longer known, and not listed. Those that have expired since are
    listed, and stderr counts them. A feed writes no snapshot while it is quiet; `floe egress flush` makes it
    write one.

    \b
    Example: floe state -c site.yaml 'node-1[0-9]' --feed NODE_DATA --silent
    """
    settings = load_settings(config, quiet=True)
    now = SystemClock().now()
    since_ns = resolve_time(now, since) or 0
    failures: list[FloeError] = []
    store, documents = open_for_view(settings)
    format_line = format_value if is_values else _format_json if as_json else _format_row
    is_headed = format_line is not _format_row
    feed_name, incarnation, partition = parse_feed(settings, feed) if feed else (None, None, None)
    for each in _sampled_feeds(settings, feed_name):
        warn_ns = sampling.warn_ns if (sampling := SamplingSettings.from_feed(each)) else 0
        chains = documents.chains(settings.site, each.name)
        newest = max((chain.incarnation for chain in chains), default=0) if incarnation is None else incarnation
        for chain in chains:
            is_selected = chain.incarnation == newest and partition in (None, chain.partition)
            found = newest_snapshot(store, chain, failures) if is_selected else None
            if found is None:
                continue
            state = found[1].state
            silent_ns = state.watermark_ns - warn_ns if silent else None
            expired_ns = state.watermark_ns - state.duration_ns
            selected = SelectedValues(state, ValueFilter(value, since_ns, silent_ns, expired_ns))
            _print_summary(*found, selected, now, documents.read_tail(chain))
            if not is_headed:
                times = f"{'seen':{_TIME_WIDTH}}  {'copied':{_TIME_WIDTH}}"
                click.echo(f"{'chain':{len(str(chain))}}  {times}  {'size':>10}  {'advised':7}  value")
                is_headed = True
            lines = (format_line(chain, known) for known in selected)
            while block := list(islice(lines, _LINES_PER_WRITE)):
                click.echo("\n".join(block))
    store.close()
    for error in failures:
        click.echo(error.as_text(), err=True)
    return failures[0].exit_code if failures else 0


def _print_summary(ref: SnapshotRef, found: Snapshot, selected: SelectedValues, now: float, tail: int | None) -> None:
    """Print the summary of a chain to stderr. `tail`: the last sequence of the archive, None if it is unknown."""
    text = (
        f"{ref.chain}: {len(selected)} of {selected.known_count} values, as of sequence {ref.position - 1}; "
        f"the snapshot is {max(0.0, now - ref.modified):.0f} s old"
    )
    if tail is not None:
        text += f"; the archive continues to {tail}" if tail >= ref.position else ", and the archive ends there"
    if selected.expired_count:
        text += f"; expired by then and not listed: {selected.expired_count}"
    if late := selected.count_seen_by(round(now * NS_PER_S) - found.state.duration_ns):
        text += f"; expired since then, unless seen again: {late}"
    click.echo(text, err=True)


def _sampled_feeds(settings: Settings, feed: str | None) -> list[FeedSettings]:
    """Return the sampled feeds, or `feed` alone. Raises UsageError if `feed` is not one of them."""
    known = (*settings.egress.feeds, *settings.egress.feeds_of(feed or ""))
    sampled = [each for each in dict.fromkeys(known) if each.sampling_key]
    found = [each for each in sampled if feed in (None, each.name)]
    if not found and feed is None:
        click.echo("no feed is sampled", err=True)
    elif not found:
        names = ", ".join(each.name for each in sampled) or "none"
        raise click.UsageError(f"--feed {feed}: expected a sampled feed ({names})")
    return found


def newest_snapshot(
    store: SegmentStore, chain: Chain, failures: list[FloeError], *, is_quiet: bool = False
) -> tuple[SnapshotRef, Snapshot] | None:
    """Return the newest readable snapshot; None if there is none, said on stderr unless `is_quiet`. If there are
    snapshots and none is readable, the first error is added to `failures`.
    """
    snapshots = SnapshotStore(store, chain)
    if not (refs := snapshots.list()) and not is_quiet:
        click.echo(f"{chain}: no snapshot yet", err=True)
    problems: list[FloeError] = []
    for ref in refs:
        try:
            snapshot = snapshots.read(ref)
        except DataError as error:
            problems.append(error)
        else:
            for problem in problems:
                click.echo(problem.as_text(), err=True)
            return ref, snapshot
    failures.extend(problems[:1])
    return None
