"""`floe segments ls | info | cat`: look into the archive, changing nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from common.sequences import MAX_SEQUENCE, SequenceRange
from common.service.cli import (
    SequenceType,
    config_option,
    json_option,
    load_settings,
    open_chains,
    open_store,
    print_json,
    run_command,
    table,
)

if TYPE_CHECKING:
    from common.chain import Chain
    from common.segments.documents import ChainStore
    from common.segments.segment import SegmentRef
    from common.segments.store import SegmentStore
    from common.settings.root import Settings

DIFFERENCES = 3  # exit code: done, but something is missing or damaged
_COLUMNS = ("chain", "level", "first", "last", "bytes", "modified", "name")


@click.group()
def segments() -> None:
    """List, show and verify segments."""


@segments.command("ls")
@click.argument("what", required=False, metavar="[SITE[/FEED[/INC[/PART]]]]")
@click.option("--cover", "is_cover", is_flag=True, help="Only what accounts for each sequence once.")
@click.option("--level", type=click.IntRange(0, 9), help="Only this level.")
@click.option(
    "--format", "form", type=click.Choice(["table", "paths"]), default="table", help="One path a line."
)
@json_option
@config_option
@run_command
def list_segments(
    config: str, what: str | None, is_cover: bool, level: int | None, form: str, as_json: bool
) -> None:
    """List segments, of all chains or of WHAT.

    A glob over the bucket counts every merged row twice; the cover does not:

    \b
    Examples:
        floe segments ls -c central.yaml --cover --format paths us-east/NODE_DATA
        duckdb -c "select count(*) from read_parquet([...])"
    """
    from common.segments import listing
    from common.segments.archive import select_chains
    from common.segments.naming import configured

    settings = load_settings(config, quiet=True)
    store, chains = open_store(settings), open_chains(settings)
    rows = []
    for chain in select_chains(chains, what, configured(settings)):
        refs = store.list(chain, level=level)
        rows += listing.covered(refs) if is_cover else listing.listed(refs)
    if as_json:
        print_json([row.as_json(settings.store.url) for row in rows])
    elif form == "paths":
        for row in rows:
            click.echo(row.path(settings.store.url))
        _warn_of_trimmed(sum(row.is_trimmed for row in rows))
    else:
        table([row.as_json(settings.store.url) for row in rows], _COLUMNS)


@segments.command("quarantine")
@click.argument("key", metavar="KEY")
@click.option("--yes", is_flag=True, help="Also where nothing else covers its sequences.")
@json_option
@config_option
@run_command
def quarantine_object(config: str, key: str, yes: bool, as_json: bool) -> None:
    """Put a damaged or false segment, or an object that is none of Floe's, away.

    It is copied below _floe/quarantine/, read back, and then deleted. Refused for documents that rule a
    chain, and without --yes where no other undamaged segment covers the sequences.

    \b
    Example:
        floe segments quarantine -c central.yaml data/site=us-east/…/level=0/….parquet
    """
    from dataclasses import asdict

    from common.segments.quarantine import quarantine

    settings = load_settings(config, quiet=True)
    store = open_store(settings)
    try:
        done = quarantine(store, _key(settings, key), accept_hole=yes)
    finally:
        store.close()
    if as_json:
        print_json(asdict(done))
        return
    click.echo(f"{done.key} is put away: {done.kept_at}")
    for part in done.uncovered:
        click.echo(f"sequences {part} are in no other undamaged segment", err=True)
    if done.note:
        click.echo(done.note, err=True)


def _warn_of_trimmed(count: int) -> None:
    if count:
        click.echo(
            f"{count} of these also hold rows that others account for; --json says which rows to take",
            err=True,
        )


@segments.command()
@click.argument("what", metavar="KEY|CHAIN")
@json_option
@config_option
@run_command
def info(config: str, what: str, as_json: bool) -> int:
    """Show what one segment says of itself, or what is there of one chain.

    Of a feed, the newest incarnation, where none is named. Exit 3 where a chain has holes.

    \b
    Examples:
        floe segments info -c central.yaml us-east/NODE_DATA
        floe segments info -c central.yaml data/site=us-east/…/level=0/….parquet
    """
    from common.segments import listing

    settings = load_settings(config, quiet=True)
    store = open_store(settings)
    if (ref := _segment(store, settings, what)) is not None:
        found = listing.describe_segment(store, ref)
    else:
        chains = open_chains(settings)
        found = listing.describe_chain(store, chains, _chain(settings, chains, what))
    if as_json:
        print_json(found)
    else:
        table(listing.lines(listing.readable(found)), ("field", "value"))
    return DIFFERENCES if found.get("holes") else 0


@segments.command()
@click.argument("what", metavar="KEY|CHAIN")
@click.option("--from-sequence", type=SequenceType(), help="The first sequence to print.")
@click.option("--to-sequence", type=SequenceType(), help="The last sequence to print.")
@json_option
@config_option
@run_command
def cat(config: str, what: str, from_sequence: int | None, to_sequence: int | None, as_json: bool) -> int:
    """Print messages, of one segment or of a chain in sequence order; of a feed, the newest incarnation.

    Columns, or with --json one object a line: sequence, timestamp, subject, headers, payload. Bytes that are
    not text come as base64, as `payload_base64` in JSON. Exit 3 where a segment is damaged or sequences are
    not covered; stderr says which.

    \b
    Examples:
        floe segments cat -c central.yaml us-east/NODE_DATA --from-sequence 1000 --to-sequence 1010
        floe segments cat -c central.yaml us-east/NODE_DATA --json | jq -r .payload
    """
    from common.segments import listing
    from common.segments.archive import read_cover, span

    settings = load_settings(config, quiet=True)
    store = open_store(settings)
    ref = _segment(store, settings, what)
    chain = None if ref else _chain(settings, open_chains(settings), what)
    refs = store.list(chain, position=from_sequence or 1) if chain else [ref] if ref else []
    whole = span(refs)
    problems: list[str] = []
    if whole is not None:
        within = _within(from_sequence or whole.first, to_sequence or whole.last)
        for batch in read_cover(store, refs, within, problems.append):
            for line in listing.message_lines(batch, as_json=as_json):
                click.echo(line)
    for problem in problems:
        click.echo(problem, err=True)
    return DIFFERENCES if problems else 0


def _within(first: int, last: int) -> SequenceRange:
    if first > last:
        raise click.UsageError(f"--from-sequence {first} is greater than the last sequence {last}")
    return SequenceRange(first, min(last, MAX_SEQUENCE))


def _segment(store: SegmentStore, settings: Settings, what: str) -> SegmentRef | None:
    """The segment whose key, path or URL is `what`; None where it is not one."""
    from common.segments.faults import SegmentGone
    from common.segments.segment import SegmentRef

    key = _key(settings, what)
    name = store.layout.parse_segment(key)
    if name is None:
        return None
    info = store.objects.head(key)
    if info is None:
        raise SegmentGone(f"segment {key}: not in the store")
    return SegmentRef(name, key, info.size, info.modified)


def _key(settings: Settings, what: str) -> str:
    """The key of what is named by key, path or URL."""
    url = settings.store.url.rstrip("/")
    return what.removeprefix(f"{url}/").removeprefix(f"{url.removeprefix('file://')}/")


def _chain(settings: Settings, chains: ChainStore, what: str) -> Chain:
    from common.errors import UsageError
    from common.segments.archive import find_chain
    from common.segments.naming import configured

    try:
        return find_chain(chains, what, configured(settings))
    except UsageError as error:
        if "=" in what:  # no site is called so
            raise UsageError(f"{what}: expected the key of a segment, or a chain") from None
        raise error
