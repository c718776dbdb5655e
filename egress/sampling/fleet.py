"""`floe fleet`: the senders of every site, from the newest snapshots of its samplers and the advisories since."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, cast

import click
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.archive.documents import SnapshotRef
from common.chain import Chain
from common.cli import ParsedType, RequestedTime, chains_argument, config_command, resolve_time, since_option
from common.clock import NS_PER_S, SystemClock, format_time
from common.errors import DataError, FloeError
from common.logs import escape
from common.open import load_settings, open_for_view
from common.settings.types import duration_words, format_count
from egress.advisories.advisory import AdvisoryDocument, AdvisoryEvent
from egress.sampling.sampler import Notice, SamplerState
from egress.sampling.snapshot import Snapshot, SnapshotStore

if TYPE_CHECKING:
    from common.archive.store import SegmentStore
    from common.settings.root import Settings

STATES = ("active", "silent", "expired")
_ACTIVE = pa.scalar(0, pa.int8())
_LINES_PER_WRITE = 10_000
_LATEST_S = 253_402_300_799  # the last second of the year 9999
_CLOCKS_DIFFER_S = 60.0  # the store's and the server's; an advisory from before the snapshot does no harm
_OLDEST_S = 86_400.0  # of the advisories, if no snapshot was read


class Sender(msgspec.Struct):
    """One line of output. `seen`: RFC 3339 with whole seconds; `state`: one of STATES."""

    site: str
    sender: str
    seen: str
    state: str


def senders_table(site: str, state: SamplerState) -> pa.Table:
    """Return the senders that a sampler knows: `site`, `sender`, `seen` (s since 1970), `state` (an index of STATES),
    and `at`, the time (s) of the state.

    A sender is expired if the sampler reported it, or if it was last seen `inspect_duration` before the newest message.
    """
    values = pa.chunked_array([pa.array(chunk, pa.string()) for chunk in state.values] or [pa.array([], pa.string())])
    seen, notices = np.frombuffer(state.seen, np.int64), np.frombuffer(state.notices, np.uint8)
    states = notices.astype(np.int8)
    states[seen <= state.watermark_ns - state.duration_ns] = Notice.EXPIRE
    at = state.watermark_ns // NS_PER_S
    table = _table(site, values, seen // NS_PER_S, states, np.full(len(seen), at))
    return table.filter(pc.is_valid(values))  # free places have no value


def advisories_table(site: str, documents: Iterable[AdvisoryDocument]) -> pa.Table:
    """Return what the advisories of the site report, in the form of `senders_table`."""
    found = [each for each in documents if each.replicator == site and abs(each.seen) <= _LATEST_S]
    states = [_NOTICES.get(each.event, Notice.NONE) for each in found]
    seen = [each.timestamp if state is Notice.NONE else each.seen for each, state in zip(found, states, strict=True)]
    senders = pa.array([each.value for each in found], pa.string())
    return _table(site, senders, np.asarray(seen, np.int64), np.asarray(states, np.int8), [d.timestamp for d in found])


_NOTICES = {AdvisoryEvent.TIMEOUT.value: Notice.TIMEOUT, AdvisoryEvent.EXPIRE.value: Notice.EXPIRE}


def _table(site: str, sender: Any, seen: Any, state: Any, at: Any) -> pa.Table:
    columns: Any = {"site": pa.repeat(site, len(sender)), "sender": sender, "seen": seen, "state": state}
    return pa.table({**columns, "at": pa.array(at, pa.int64())})


def merge(tables: Iterable[pa.Table]) -> pa.Table:
    """Return each sender once, sorted: when it was seen last, and of that the newest state.

    `tables`: of one site; one alone is that of a sampler, which has each sender once.
    """
    found = [*tables]
    whole: Any = pa.concat_tables(found).combine_chunks()
    order: Any = [("sender", "ascending"), ("seen", "descending"), ("at", "descending")]
    # The rows of one sampler need one key, which takes half of the time.
    whole = whole.take(pc.sort_indices(whole, sort_keys=order[: 1 if len(found) == 1 else None])).combine_chunks()
    if whole.num_rows < 2 or len(found) == 1:
        return cast(pa.Table, whole)
    senders = whole.column("sender").combine_chunks()
    differs = pc.not_equal(senders.slice(1), senders.slice(0, len(senders) - 1))
    return cast(pa.Table, whole.filter(pa.concat_arrays([pa.array([True]), differs])))


def select(table: pa.Table, since_s: int, *, is_silent: bool, pattern: re.Pattern[str] | None) -> pa.Table:
    """Return the senders that were seen at `since_s` or later and match `pattern`, with `is_silent` only those that are
    not active.
    """
    wanted: Any = pc.greater_equal(table.column("seen"), pa.scalar(since_s, pa.int64()))
    found = table.filter(pc.and_(wanted, pc.greater(table.column("state"), _ACTIVE)) if is_silent else wanted)
    if pattern is None:
        return found
    senders: list[Any] = found.column("sender").to_pylist()
    return found.filter(pa.array([pattern.search(each) is not None for each in senders], pa.bool_()))


def lines(table: pa.Table, *, as_json: bool, only_values: bool) -> Iterator[str]:
    """Yield the output, some thousand senders at a time."""
    for batch in table.to_batches(_LINES_PER_WRITE):
        columns: Any = batch.to_pydict()
        if only_values:
            yield "\n".join(map(escape, columns["sender"]))
            continue
        seen = np.datetime_as_string(np.asarray(columns["seen"], "datetime64[s]")).tolist()
        rows = zip(columns["site"], columns["sender"], seen, map(STATES.__getitem__, columns["state"]), strict=True)
        if as_json:
            found = (Sender(site, sender, f"{at}Z", state) for site, sender, at, state in rows)
            yield msgspec.json.Encoder().encode_lines(found).decode().rstrip("\n")
        else:
            yield "\n".join(f"{escape(site)}  {at}Z  {state:7}  {escape(sender)}" for site, sender, at, state in rows)


def _parse_pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"expected a regular expression, found {text!r:.60}: {error}") from None


@click.command()
@chains_argument
@click.option(
    "--value",
    metavar="REGEX",
    type=ParsedType("regular expression", re.Pattern, _parse_pattern),
    help="Only senders in which this regular expression is found.",
)
@since_option
@click.option("--silent", is_flag=True, help="Only senders that are silent or expired.")
@click.option("--advisories", "stream", metavar="STREAM", help="Also what the advisories in STREAM report since.")
@click.option("--values", "only_values", is_flag=True, help="Print the senders only.")
@config_command
async def fleet(
    config: str,
    what: str | None,
    value: re.Pattern[str] | None,
    since: RequestedTime | None,
    silent: bool,
    stream: str | None,
    only_values: bool,
    as_json: bool,
) -> int:
    """List the senders of every site: when each was last seen, and if it is active, silent or expired.

    From the newest snapshot of each sampled feed; a sender of several feeds of a site is listed once. stderr shows the
    age of each site's snapshots, and counts the states. A feed writes no snapshot while it is quiet: `floe egress
    flush` makes it write one, and --advisories adds what was reported since, read from the server of ingress. With
    --json, one object a line.

    \b
    Examples:
      floe fleet -c central.yaml --silent
      floe fleet -c site.yaml us-east/NODE_DATA --value 'node-1[0-9]'
      floe fleet -c central.yaml us-east --advisories CENTRAL_ADVISORIES --json
    """
    from common.archive.catalog import select_chains

    settings, now, failures = load_settings(config, quiet=True), SystemClock().now(), list[FloeError]()
    tables, refs = dict[str, list[pa.Table]](), list[SnapshotRef]()
    store, documents = open_for_view(settings)
    with closing(store):
        for chain in _newest_incarnations(select_chains(documents, what)):
            if (found := _newest_snapshot(store, chain, failures)) is not None:
                refs.append(found[0])
                tables.setdefault(chain.site, []).append(senders_table(chain.site, found[1].state))
    if stream is not None:
        oldest = min((ref.modified for ref in refs), default=now - _OLDEST_S)
        begin = format_time(round((oldest - _CLOCKS_DIFFER_S) * NS_PER_S))
        reported = await _advisories(settings, stream, RequestedTime(begin))
        for site in {*tables, *(each.replicator for each in reported if what is None)}:
            tables.setdefault(site, [senders_table(site, SamplerState(0))]).append(advisories_table(site, reported))
    if not tables:
        click.echo("no feed is sampled, or none has a snapshot yet", err=True)
    for site in sorted(tables):
        senders = merge(tables.pop(site))
        _summarize(site, senders, now, [ref for ref in refs if ref.chain.site == site])
        shown = select(senders, (resolve_time(now, since) or 0) // NS_PER_S, is_silent=silent, pattern=value)
        for text in lines(shown, as_json=as_json, only_values=only_values):
            click.echo(text)
    return failures[0].exit_code if failures else 0


def _newest_incarnations(chains: Sequence[Chain]) -> list[Chain]:
    newest = {(chain.site, chain.feed): chain.incarnation for chain in chains}  # ascending, so the last one stays
    return [chain for chain in chains if chain.incarnation == newest[chain.site, chain.feed]]


def _newest_snapshot(
    store: SegmentStore, chain: Chain, failures: list[FloeError]
) -> tuple[SnapshotRef, Snapshot] | None:
    """Return the newest readable snapshot; None if there is none. stderr shows the errors of damaged ones. If there are
    snapshots and none is readable, the first error is added to `failures`.
    """
    snapshots, problems = SnapshotStore(store, chain), list[FloeError]()
    for ref in snapshots.list():
        try:
            return ref, snapshots.read(ref)
        except DataError as error:
            click.echo(error.as_text(), err=True)
            problems.append(error)
    failures += problems[:1]
    return None


def _summarize(site: str, senders: pa.Table, now: float, refs: list[SnapshotRef]) -> None:
    counts = np.bincount(senders.column("state").to_numpy(), minlength=len(STATES))
    states = ", ".join(f"{count:,} {state}" for count, state in zip(counts, STATES, strict=True))
    oldest = min((ref.modified for ref in refs), default=None)
    age = "without a snapshot" if oldest is None else f"as of {duration_words(max(0.0, now - oldest))} ago"
    click.echo(escape(f"{site}: {format_count(senders.num_rows, 'sender')}: {states}; {age}"), err=True)


async def _advisories(settings: Settings, stream: str, since: RequestedTime) -> list[AdvisoryDocument]:
    from common.nats.client import connect
    from egress.advisories.cli import AdvisorySearch

    clock = SystemClock()
    nats = settings.nats_for("ingress" if settings.ingress.targets else "egress")
    async with aclosing(await connect(nats, name="floe fleet", clock=clock)) as client:
        search = AdvisorySearch(client, clock, stream, None, since, follow=False)
        async with aclosing(search.documents()) as documents:
            return [each async for each in documents]
