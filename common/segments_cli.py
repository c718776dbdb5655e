"""`floe segments ls | info | cat`: look into the archive, changing nothing."""

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from typing import Any

import click

from common.chain import Chain
from common.cli import SequenceType, config_option, json_option, print_json, run_command, table
from common.clock import NS_PER_S, format_time
from common.errors import UsageError
from common.exits import DIFFERENCES
from common.logs import escaped
from common.open import load_settings, open_chains, open_store
from common.segments.archive import find_chain, read_cover, select_chains, span
from common.segments.columns import is_text, messages
from common.segments.documents import ChainStore
from common.segments.keys import configured
from common.segments.parquet_guard import SegmentGone
from common.segments.segment import Message, Reason, SegmentRef, decode_subject, encode_bytes
from common.segments.store import SegmentStore, quarantine
from common.sequences import MAX_SEQUENCE, SequenceRange, cover, holes
from common.settings.root import Settings
from common.settings.types import format_duration

_COLUMNS = ("chain", "level", "first", "last", "bytes", "modified", "name")


@click.group()
def segments() -> None:
    """List, show and verify segments."""


@segments.command("ls")
@click.argument("what", required=False, metavar="[SITE[/FEED[/INC[/PART]]]]")
@click.option("--cover", "is_cover", is_flag=True, help="Only what accounts for each sequence once.")
@click.option("--level", type=click.IntRange(0, 9), help="Only this level.")
@click.option("--format", "form", type=click.Choice(["table", "paths"]), default="table", help="One path a line.")
@json_option
@config_option
@run_command
def list_segments(config: str, what: str | None, is_cover: bool, level: int | None, form: str, as_json: bool) -> None:
    """List segments, of all chains or of WHAT.

    A glob over the bucket counts every merged row twice; the cover does not:

    \b
    Examples:
        floe segments ls -c central.yaml --cover --format paths us-east/NODE_DATA
        duckdb -c "select count(*) from read_parquet([...])"
    """
    settings = load_settings(config, quiet=True)
    store, chains = open_store(settings), open_chains(settings)
    rows: list[dict[str, object]] = []
    for chain in select_chains(chains, what, configured(settings)):
        refs = store.list(chain, level=level)
        taken = [(each.segment, each.rows) for each in cover(refs, 1)] if is_cover else [(r, r.coverage) for r in refs]
        rows += [_listed(ref, part, settings.store.url) for ref, part in taken]
    if as_json:
        print_json(rows)
    elif form == "paths":
        for row in rows:
            click.echo(row["path"])
        if count := sum((row["first"], row["last"]) != (row["take_first"], row["take_last"]) for row in rows):
            others = "also hold rows that others account for; --json says which rows to take"
            click.echo(f"{count} of these {others}", err=True)
    else:
        table(rows, _COLUMNS)


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
    settings = load_settings(config, quiet=True)
    with closing(open_store(settings)) as store:
        done = quarantine(store, _key(settings, key), accept_hole=yes)
    if as_json:
        print_json(asdict(done))
        return
    click.echo(f"{done.key} is put away: {done.kept_at}")
    for part in done.uncovered:
        click.echo(f"sequences {part} are in no other undamaged segment", err=True)
    if done.note:
        click.echo(done.note, err=True)


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
    settings = load_settings(config, quiet=True)
    store = open_store(settings)
    if (ref := _segment(store, settings, what)) is not None:
        found = describe_segment(store, ref)
    else:
        chains = open_chains(settings)
        found = describe_chain(store, chains, _chain(settings, chains, what))
    if as_json:
        print_json(found)
    else:
        table(lines(readable(found)), ("field", "value"))
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
    settings = load_settings(config, quiet=True)
    store = open_store(settings)
    ref = _segment(store, settings, what)
    chain = None if ref else _chain(settings, open_chains(settings), what)
    refs = store.list(chain, position=from_sequence or 1) if chain else [ref] if ref else []
    problems: list[str] = []
    if (whole := span(refs)) is not None:
        first, last = from_sequence or whole.first, to_sequence or whole.last
        if first > last:
            raise click.UsageError(f"--from-sequence {first} is greater than the last sequence {last}")
        for batch in read_cover(store, refs, SequenceRange(first, min(last, MAX_SEQUENCE)), problems.append):
            for message in messages(batch):
                click.echo(json.dumps(_as_json(message)) if as_json else _as_text(message))
    for problem in problems:
        click.echo(problem, err=True)
    return DIFFERENCES if problems else 0


def _segment(store: SegmentStore, settings: Settings, what: str) -> SegmentRef | None:
    """The segment whose key, path or URL is `what`; None where it is not one."""
    key = _key(settings, what)
    if (name := store.layout.parse_segment(key)) is None:
        return None
    if (info := store.objects.head(key)) is None:
        raise SegmentGone(f"segment {key}: not in the store")
    return SegmentRef(name, key, info.size, info.modified)


def _key(settings: Settings, what: str) -> str:
    """The key of what is named by key, path or URL."""
    url = settings.store.url.rstrip("/")
    return what.removeprefix(f"{url}/").removeprefix(f"{url.removeprefix('file://')}/")


def _chain(settings: Settings, chains: ChainStore, what: str) -> Chain:
    try:
        return find_chain(chains, what, configured(settings))
    except UsageError as error:
        if "=" in what:  # no site is called so
            raise UsageError(f"{what}: expected the key of a segment, or a chain") from None
        raise error


def _listed(ref: SegmentRef, rows: SequenceRange, url: str) -> dict[str, object]:
    """A segment in a listing: `rows` are taken from it; `path` is where other engines find it."""
    return {
        "chain": str(ref.chain),
        "level": ref.level,
        "first": ref.coverage.first,
        "last": ref.coverage.last,
        "take_first": rows.first,
        "take_last": rows.last,
        "bytes": ref.size,
        "modified": format_time(int(ref.modified) * NS_PER_S),
        "name": ref.name,
        "key": ref.key,
        "path": f"{url.removeprefix('file://').rstrip('/')}/{ref.key}",
    }


def describe_segment(store: SegmentStore, ref: SegmentRef) -> dict[str, Any]:
    """The footer of one segment and what the store says of the object. Raises SegmentCorrupt."""
    with store.open(ref) as reader:
        footer = json.loads(reader.footer.to_json())
        groups = [
            {**asdict(group.range), "rows": group.rows, "raw_bytes": group.raw_bytes} for group in reader.row_groups
        ]
    modified = format_time(int(ref.modified) * NS_PER_S)
    return {"key": ref.key, "bytes": ref.size, "modified": modified, **footer, "row_groups": groups}


def describe_chain(store: SegmentStore, chains: ChainStore, chain: Chain) -> dict[str, Any]:
    """What is there of one chain: documents, segments by level, holes."""
    refs = store.list(chain)
    whole = span(refs)
    document, stream = chains.read_chain(chain), chains.read_stream(chain)
    missing = holes((ref.coverage for ref in refs), whole) if whole else []
    return {
        "chain": str(chain),
        "begins": document.first if document else None,
        "filters": list(document.filters) if document else None,
        "partitions": document.partitions if document else None,
        "created": stream.created if stream else None,
        "previous": dict(stream.previous) if stream and stream.previous else None,
        "floor": chains.read_floor(chain),
        "tail": chains.read_tail(chain),
        "first": whole.first if whole else None,
        "last": whole.last if whole else None,
        "levels": {
            level: {"segments": len(at), "bytes": sum(ref.size for ref in at)}
            for level in sorted({ref.level for ref in refs})
            if (at := [ref for ref in refs if ref.level == level])
        },
        "holes": [str(hole) for hole in missing],
    }


def lines(found: Mapping[str, Any]) -> list[tuple[str, object]]:
    """`found` as rows of field and value, nested fields with their path."""
    rows: list[tuple[str, object]] = []
    for name, value in found.items():
        if isinstance(value, Mapping):
            rows += [(f"{name}.{inner}", each) for inner, each in lines(value)]
        elif isinstance(value, list):
            rows += lines({f"{name}[{i}]": each for i, each in enumerate(value)})
        else:
            rows.append((name, value))
    return rows


def readable(found: Mapping[str, Any]) -> dict[str, Any]:
    """`found`, of a segment or a chain, for people: times and durations as they are written, and the share
    that was sampled out.
    """
    shown = _without_nanoseconds(found)
    if found.get("sampling") is not None:
        left_out = found["ledger"].get(Reason.SAMPLED_OUT.value, 0)
        total = found["rows"] + left_out
        shown["sampled out"] = f"{left_out:,} of {total:,} ({100 * left_out // max(1, total)} %)"
    return shown


def _as_written(name: str, nanoseconds: int) -> str:
    if name.endswith("timestamp_ns"):
        return format_time(nanoseconds)
    is_exact = nanoseconds % 1_000_000 == 0 and 0 <= nanoseconds < 2**63  # to the millisecond
    return format_duration(nanoseconds / NS_PER_S) if is_exact else f"{nanoseconds}ns"


def _without_nanoseconds(found: Mapping[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for key, value in found.items():
        name = str(key)  # a level or a partition is a number
        if isinstance(value, Mapping):
            shown[name] = _without_nanoseconds(value)
        elif name.endswith("_ns") and (value is None or isinstance(value, int)):
            shown[name.removesuffix("_ns")] = value if value is None else _as_written(name, value)
        else:
            shown[name] = value
    return shown


def _as_json(message: Message) -> dict[str, object]:
    return {
        "sequence": message.sequence,
        "timestamp": format_time(message.timestamp_ns),
        **_json_bytes("subject", message.subject),
        **_json_bytes("headers", message.headers),
        **_json_bytes("payload", message.payload),
    }


def _json_bytes(name: str, raw: bytes | None) -> dict[str, object]:
    if raw is None:
        return {name: None}
    return {name: raw.decode()} if is_text(raw) else {f"{name}_base64": encode_bytes(raw)}


def _as_text(message: Message) -> str:
    headers = "-" if message.headers is None else _text_bytes(message.headers)
    subject, payload = escaped(decode_subject(message.subject)), _text_bytes(message.payload)
    return "\t".join((str(message.sequence), format_time(message.timestamp_ns), subject, headers, payload))


def _text_bytes(raw: bytes) -> str:
    return escaped(raw.decode()) if is_text(raw) else encode_bytes(raw)
