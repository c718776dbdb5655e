"""`floe state`: what the samplers of a site know, as of their last snapshots."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING

import click

from common.clock import NS_PER_S
from common.service.cli import (
    Duration,
    config_option,
    json_option,
    load_settings,
    open_chains,
    open_store,
    run_command,
)

if TYPE_CHECKING:
    from common.chain import Chain
    from common.errors import FloeError
    from common.segments.documents import ChainStore
    from common.segments.snapshots import SnapshotRef
    from common.segments.store import SegmentStore
    from common.settings.egress import FeedSettings
    from common.settings.root import Settings
    from egress.sampling.listing import Selection
    from egress.sampling.snapshot import Snapshot
    from egress.sampling.state import Known

_LINES_AT_ONCE = 1000


class Pattern(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """A regular expression, as re.Pattern."""

    name = "regular expression"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> re.Pattern[str]:
        try:
            return re.compile(str(value))
        except (re.error, RecursionError, OverflowError) as error:
            self.fail(f"expected a regular expression, found {str(value)!r:.60}: {error}", param, ctx)


@click.command()
@click.argument("value", required=False, type=Pattern())
@click.option("--feed", help="Only this feed.")
@click.option("--since", type=Duration(), metavar="DURATION", help="Only values seen as lately as this.")
@click.option(
    "--silent", is_flag=True, help="Only values silent for longer than warn_duration, and not yet expired."
)
@click.option("--values", "is_values", is_flag=True, help="Print the values only.")
@json_option
@config_option
@run_command
def state(
    config: str,
    value: re.Pattern[str] | None,
    feed: str | None,
    since: float | None,
    silent: bool,
    is_values: bool,
    as_json: bool,
) -> int:
    """List what the samplers of a site know: each value, when it was seen and copied last, what was told.

    VALUE is a regular expression that is looked for in the values. The newest snapshot of each chain is read
    from the store; stderr says how old it is. With --json: one object a line.

    Values that had expired by then are not known any more, and not listed; those that have expired since are,
    and stderr counts them. A feed writes no snapshot while it is quiet.

    Example: floe state -c site.yaml 'node-1[0-9]' --feed NODE_DATA --silent
    """
    from common.clock import SystemClock
    from egress.sampling.listing import Selection
    from egress.sampling.settings import Sampling

    settings = load_settings(config, quiet=True)
    now = SystemClock().now()
    since_ns = 0 if since is None else round((now - since) * NS_PER_S)
    failures: list[FloeError] = []
    store = open_store(settings)
    printing = _Printing(is_values, as_json)
    for each in _sampled(settings, feed):
        warn_ns = sampling.warn_ns if (sampling := Sampling.of(each)) else 0
        for chain in _newest(open_chains(settings, store.objects), settings.site, each.name):
            found = _read(store, chain, failures)
            if found is not None:
                knew = found[1].state
                silent_ns = knew.watermark_ns - warn_ns if silent else None
                expired_ns = knew.watermark_ns - knew.duration_ns
                printing.print(*found, Selection(value, since_ns, silent_ns, expired_ns), now)
    store.close()
    for error in failures:
        click.echo(error.line(), err=True)
    return failures[0].exit_code if failures else 0


class _Printing:
    """Prints the values of one chain after the other."""

    def __init__(self, is_values: bool, as_json: bool) -> None:
        self._is_values, self._as_json = is_values, as_json
        self._is_headed = is_values or as_json

    def print(self, ref: SnapshotRef, snapshot: Snapshot, selection: Selection, now: float) -> None:
        from egress.sampling import listing

        chosen = listing.Values(snapshot.state, selection)
        age = max(0.0, now - ref.modified)
        text = (
            f"{ref.chain}: {len(chosen)} of {chosen.known} values, as of sequence {ref.position - 1}; "
            f"the snapshot is {age:.0f} s old"
        )
        if chosen.expired:
            text += f"; expired by then and not listed: {chosen.expired}"
        if late := chosen.last_seen_by(round(now * NS_PER_S) - snapshot.state.duration_ns):
            text += f"; expired since then, unless seen again: {late}"
        click.echo(text, err=True)
        if not self._is_headed:
            click.echo(listing.header(len(str(ref.chain))))
            self._is_headed = True
        lines = map(self._form(str(ref.chain)), chosen)
        while block := list(islice(lines, _LINES_AT_ONCE)):
            click.echo("\n".join(block))

    def _form(self, chain: str) -> Callable[[Known], str]:
        from egress.sampling import listing

        if self._is_values:
            return listing.as_value
        if self._as_json:
            return lambda known: listing.as_json(chain, known)
        return lambda known: f"{chain}  {listing.as_text(known)}"


def _sampled(settings: Settings, feed: str | None) -> list[FeedSettings]:
    """The sampled feeds, or `feed` alone. Raises UsageError where that is none of them."""
    sampled = [each for each in settings.egress.feeds if each.sampling_key]
    if feed is None:
        if not sampled:
            click.echo("no feed is sampled", err=True)
        return sampled
    found = [each for each in sampled if each.name == feed]
    if not found:
        names = ", ".join(each.name for each in sampled) or "none"
        raise click.UsageError(f"--feed {feed}: expected a sampled feed ({names})")
    return found


def _newest(chains: ChainStore, site: str, feed: str) -> list[Chain]:
    """The chains of the feed's newest incarnation."""
    found = chains.chains(site, feed)
    newest = max((chain.incarnation for chain in found), default=0)
    return [chain for chain in found if chain.incarnation == newest]


def _read(
    store: SegmentStore, chain: Chain, failures: list[FloeError]
) -> tuple[SnapshotRef, Snapshot] | None:
    """The newest readable snapshot; None without one, a failure where there are some and none is readable."""
    from common.errors import DataError
    from egress.sampling.snapshot_store import Snapshots

    snapshots = Snapshots(store.objects, store.layout, chain)
    refs = snapshots.list()
    if not refs:
        click.echo(f"{chain}: no snapshot yet", err=True)
    problems: list[FloeError] = []
    for ref in refs:
        try:
            snapshot = snapshots.read(ref)
        except DataError as error:
            problems.append(error)
            continue
        for problem in problems:
            click.echo(problem.line(), err=True)
        return ref, snapshot
    failures.extend(problems[:1])
    return None
