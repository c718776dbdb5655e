"""`floe segments ls | quarantine | info | cat`, `floe consumers ls`, and the archive in `floe status`.

Only `quarantine` changes the archive.
"""

import asyncio
import heapq
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import click
from msgspec import structs

from common.archive.captures import CapturedConsumer, CapturedConsumers, CaptureStore
from common.archive.catalog import (
    chain_ends,
    configured_feeds,
    find_chain,
    find_incarnation,
    first_sequence,
    parse_chain_name,
    select_chains,
    span,
)
from common.archive.columns import is_text, messages
from common.archive.documents import ChainStore, CompactionRun, run_of
from common.archive.guard import SegmentGone
from common.archive.scan import ChainArchive, Hole, Problem, Scan
from common.archive.segment import Message, SegmentRef, decode_subject, encode_bytes
from common.archive.store import SegmentStore, quarantine
from common.archive.times import Timeline
from common.archive.views import duckdb_view, object_address, polars_frame
from common.audit import decide_blocking, decision_command
from common.chain import Chain
from common.cli import (
    Bounds,
    RequestedTime,
    SequenceType,
    chains_argument,
    check_range,
    config_command,
    print_json,
    print_table,
    range_options,
    resolve_range,
    since_option,
    terminal_width,
    truncate,
    until_option,
    wide_option,
)
from common.clock import NS_PER_S, SystemClock, format_time, format_unix, parse_time
from common.errors import ConfigError, DataError, UsageError
from common.exits import EXIT_DIFFERENCES
from common.logs import escape
from common.nats.headers import parse_block
from common.objects.port import ObjectInfo, check_key
from common.observe.observation import Observation, StatusView, ViewFormat
from common.open import load_settings, open_for_view, open_for_work
from common.sequences import MAX_SEQUENCE, SequenceRange, Stretch, cover, holes
from common.service.process import ThreadPool
from common.settings.root import Settings
from common.settings.types import StyledCell, format_age, format_count, format_duration, is_filter, size_words
from common.subjects import matches

_LIST_COLUMNS = ("chain", "level", "first", "last", "bytes", "modified", "name")
_WIDE_LIST_COLUMNS = ("chain", "level", "first", "last", "rows", "first_time", "last_time", "bytes", "modified", "name")
PARALLEL_FOOTERS = 8
ArchivePart = tuple[ChainArchive, SequenceRange]
MAX_BINARY_BYTES_SHOWN = 64  # of a payload that is no text, on a terminal
VIEWS = {"duckdb": duckdb_view, "polars": polars_frame}


@click.group()
def segments() -> None:
    """List, show and verify segments."""


@segments.command("ls")
@chains_argument
@click.option("--cover", "is_cover", is_flag=True, help="Only the segments of the cover: each sequence once.")
@click.option("--level", type=click.IntRange(0, 9), help="Only this level.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "paths", *VIEWS]),
    default="table",
    help="paths: one path per line; duckdb, polars: SQL or Python that defines `messages` over the cover.",
)
@since_option
@until_option
@wide_option
@config_command
def list_segments(
    config: str,
    what: str | None,
    is_cover: bool,
    level: int | None,
    form: str,
    since: RequestedTime | None,
    until: RequestedTime | None,
    is_wide: bool,
    as_json: bool,
) -> int:
    """List segments, of all chains or of those that the argument names; the totals go to stderr.

    A listing reads no segment. --since and --until select the segments with messages of these times, and read the
    footers of some segments of each chain; --wide reads that of every listed segment: rows, and the times of the first
    and last message (also with --json).

    A glob over the bucket counts every merged row twice; the cover does not. A view holds no secret: its first
    lines explain how it gets keys for S3.

    \b
    Examples:
        floe segments ls -c central.yaml us-east/NODE_DATA --since 2h --wide
        floe segments ls -c central.yaml us-east/NODE_DATA --cover --format paths
        floe segments ls -c central.yaml us-east --cover --format duckdb > us-east.sql
    """
    if form in VIEWS and not is_cover:
        raise click.UsageError(f"--format {form}: expected --cover; without it merged rows count twice")
    settings = load_settings(config, quiet=True)
    store, chains = open_for_view(settings)

    bounds, taken = resolve_range(SystemClock().now(), since, until), list[Stretch[SegmentRef]]()
    for chain in select_chains(chains, what, configured_feeds(settings)):
        archive = ChainArchive.listed(store, chain, level=level)
        refs = archive.overlapping(within) if (within := _select(archive, bounds)) else []
        taken += cover(refs, 1) if is_cover else [Stretch(ref, ref.coverage) for ref in refs]
    rows = [_listed(each, settings) for each in taken]
    problems = _add_footers(store, [each.segment for each in taken], rows) if is_wide else []
    if as_json:
        print_json(rows)
    elif form == "table":
        print_table(rows, _WIDE_LIST_COLUMNS if is_wide else _LIST_COLUMNS, None if is_wide else terminal_width())
        click.echo(_total([each.segment for each in taken], rows), err=True)
    elif form in VIEWS:
        click.echo(VIEWS[form](taken, settings.store, "messages"), nl=False)
    else:
        for each in taken:
            click.echo(object_address(settings.store, each.segment.key))
        if count := sum(each.rows != each.segment.coverage for each in taken):
            others = "also hold rows that others account for; --json names the rows to take"
            click.echo(f"{count} of these {others}", err=True)
    for problem in problems:
        click.echo(problem, err=True)
    return EXIT_DIFFERENCES if problems else 0


def _select(archive: ChainArchive, bounds: Bounds) -> SequenceRange | None:
    """Return the sequences of one chain between two times, by the footers of some listed segments, with those that are
    missing or damaged right before them; all without bounds, None if there are none.
    """
    (begin, end), timeline = bounds, Timeline(archive.store, archive.refs)
    first = 1 if begin is None else timeline.start_sequence_at(begin) or timeline.next_position
    last = MAX_SEQUENCE if end is None else (timeline.first_sequence_at(end) or MAX_SEQUENCE + 1) - 1
    return SequenceRange(first, last) if first <= last else None


def _add_footers(store: SegmentStore, refs: Sequence[SegmentRef], rows: Sequence[dict[str, object]]) -> list[str]:
    """Add values from the footer of its segment to each of `rows`; None if the footer cannot be read. Return the
    problems.
    """
    problems = list[str]()
    with ThreadPoolExecutor(PARALLEL_FOOTERS) as pool:
        for row, found in zip(rows, pool.map(store.inspect, refs), strict=True):
            row |= dict.fromkeys(("rows", "first_time", "last_time"))
            if isinstance(found, DataError):
                problems.append(found.message)
                continue
            row["rows"] = found.rows
            times = {"first_time": found.first_timestamp_ns, "last_time": found.last_timestamp_ns}
            row |= {name: format_time(at) for name, at in times.items() if at is not None}
    return problems


def _total(refs: Sequence[SegmentRef], rows: Sequence[Mapping[str, Any]]) -> str:
    chains, size = len({ref.chain for ref in refs}), size_words(sum(ref.size for ref in refs))
    text = f"{format_count(len(refs), 'segment')} of {format_count(chains, 'chain')}, {size}"
    if rows and "rows" in rows[0]:
        text += f", {format_count(sum(row['rows'] or 0 for row in rows), 'row')}"
    return text


@segments.command("quarantine")
@click.argument("key", metavar="KEY")
@click.option("--yes", is_flag=True, help="Do not ask, even if no other segment covers its sequences.")
@decision_command
def quarantine_object(config: str, key: str, yes: bool, as_json: bool) -> None:
    """Move a damaged or wrong segment, or an object that Floe did not write, to quarantine.

    It is copied below _floe/quarantine/, read back, and then deleted; on a terminal the command asks first. Refused
    for documents that a chain depends on, and without --yes if no other undamaged segment covers the sequences.

    \b
    Example:
        floe segments quarantine -c central.yaml data/site=us-east/…/level=0/….parquet
    """
    settings = load_settings(config, quiet=True)
    try:
        check_key(named := _key(settings, key))
    except ConfigError as error:
        raise UsageError(error.message) from None
    decide_blocking(settings, f"quarantine {escape(key)}?", yes, is_needed=False)
    with closing(open_for_work(settings)[0]) as store:
        done = quarantine(store, named, accept_hole=yes)
    if as_json:
        print_json(asdict(done))
        return
    click.echo(f"{done.key} is in quarantine: {done.kept_at}")
    for part in done.uncovered:
        click.echo(f"sequences {part} are in no other undamaged segment", err=True)
    if done.note:
        click.echo(done.note, err=True)


@segments.command()
@click.argument("what", metavar="KEY|CHAIN")
@config_command
def info(config: str, what: str, as_json: bool) -> int:
    """Show the footer of one segment, or the state of one chain in the archive.

    For a feed: its newest incarnation, unless one is named. Exit 3 if a chain has holes.

    \b
    Examples:
        floe segments info -c central.yaml us-east/NODE_DATA
        floe segments info -c central.yaml data/site=us-east/…/level=0/….parquet
    """
    settings = load_settings(config, quiet=True)
    store, chains = open_for_view(settings)
    if (ref := _segment(store, settings, what)) is not None:
        found = describe_segment(store, ref)
    else:
        found = describe_chain(store, chains, _chain(settings, chains, what))
    if as_json:
        print_json(found)
    else:
        print_table(flatten(for_people(found)), ("field", "value"))
    return EXIT_DIFFERENCES if found.get("holes") else 0


@segments.command()
@click.argument("what", metavar="KEY|CHAIN")
@range_options
@click.option("--subject", "subjects", multiple=True, metavar="FILTER", help="Only these; may be repeated.")
@click.option("--limit", type=click.IntRange(min=1), help="At most this many messages.")
@config_command
def cat(
    config: str,
    what: str,
    from_sequence: int | None,
    to_sequence: int | None,
    since: RequestedTime | None,
    until: RequestedTime | None,
    subjects: tuple[str, ...],
    limit: int | None,
    as_json: bool,
) -> int:
    """Print messages, of one segment or of a chain in sequence order; of a feed, the newest incarnation.

    A feed includes the earlier incarnations that the newest one continues.

    Columns, or with --json one object per line: sequence, timestamp, subject, headers (a list of [name, value]),
    payload. Binary payloads are printed as base64, in JSON as `payload_base64`; on a terminal as their size and
    first bytes in hex. Exit 3 if a segment is damaged or sequences are not covered; stderr names them.

    \b
    Examples:
        floe segments cat -c central.yaml us-east/NODE_DATA --since 2h --subject 'nodes.*.temp' --limit 10
        floe segments cat -c central.yaml us-east/NODE_DATA --from-sequence 1000 --to-sequence 1010
        floe segments cat -c central.yaml us-east/NODE_DATA --json | jq -r .payload
    """
    check_range(from_sequence, to_sequence, since, until)
    if wrong := [each for each in subjects if not is_filter(each)]:
        raise click.UsageError(f"--subject: expected a filter such as nodes.*.temp, found {wrong[0]!r:.80}")
    settings = load_settings(config, quiet=True)
    bounds, (store, chains) = resolve_range(SystemClock().now(), since, until), open_for_view(settings)
    ref = _segment(store, settings, what)
    chain, position = ref.chain if ref else _chain(settings, chains, what), from_sequence or 1
    archive = ChainArchive(store, chain, (ref,), is_fixed=True) if ref else ChainArchive.listed(store, chain, position)
    within = _select(archive, bounds)
    problems = list[Problem]()
    whole = within and (span(archive.refs) if ref or from_sequence else _range_of(chains, archive))
    form = (lambda each: json.dumps(_as_json(each))) if as_json else partial(format_message, width=terminal_width())
    is_feed = ref is None and parse_chain_name(what).incarnation is None
    before = _earlier_parts(store, chains, chain, (from_sequence, to_sequence), bounds) if is_feed else []
    limit = _print(chains, before, subjects, limit, form, problems)
    if within and whole and limit != 0:
        first, last = from_sequence or whole.first, to_sequence or whole.last
        if before:
            first = max(first, first_sequence(chains, chain))
        first, last = max(first, within.first), min(last, within.last)
        if first <= last:
            rows = SequenceRange(first, min(last, MAX_SEQUENCE))
            _print(chains, [(archive, rows)], subjects, limit, form, problems)
        elif bounds == (None, None) and not before:
            raise click.UsageError(f"--from-sequence {first} is greater than the last sequence {last}")
    elif to_sequence is not None and bounds == (None, None) and not before:
        problems.append(Hole(SequenceRange(position, to_sequence)))
    for problem in problems:
        click.echo(str(problem), err=True)
    return EXIT_DIFFERENCES if problems else 0


def _print(
    chains: ChainStore,
    parts: Sequence[ArchivePart],
    subjects: Sequence[str],
    limit: int | None,
    form: Callable[[Message], str],
    problems: list[Problem],
) -> int | None:
    """Print the messages of `parts` by sequence that match one of `subjects`, all if there are none; return how many
    more may be printed, None for any number.
    """
    reports = [partial(_note_problem, problems, chains, archive.chain) for archive, _ in parts]
    scans = [Scan(*part, report).batches() for part, report in zip(parts, reports, strict=True)]
    rows = ((message for batch in each for message in messages(batch)) for each in scans)
    for message in heapq.merge(*rows, key=lambda message: message.sequence):
        if subjects and not any(matches(each, message.subject) for each in subjects):
            continue
        click.echo(form(message))
        if limit is not None and (limit := limit - 1) == 0:
            return 0
    return limit


def _note_problem(problems: list[Problem], chains: ChainStore, chain: Chain, problem: Problem) -> None:
    """Note a problem; of a hole only the sequences that no accepted gap has."""
    if isinstance(problem, Hole):
        gaps = [gap.range for gap in chains.gaps(chain, position=problem.rows.first)]
        problems += [Hole(rows, problem.causes) for rows in holes(gaps, problem.rows)]
    else:
        problems.append(problem)


def _earlier_parts(
    store: SegmentStore, chains: ChainStore, newest: Chain, requested: tuple[int | None, int | None], bounds: Bounds
) -> list[ArchivePart]:
    """Return the requested parts of the incarnations that the one of `newest` continues, all partitions."""
    found = list[ArchivePart]()
    for each, end in chain_ends(chains, newest).items():
        if each.incarnation == newest.incarnation:
            continue
        archive = ChainArchive.listed(store, each, requested[0] or 1)
        if (within := _select(archive, bounds)) is None:
            continue
        first = max(requested[0] or 1, first_sequence(chains, each), within.first)
        last = min(end, chains.read_end(each) or end, requested[1] or end, within.last)
        if first <= last and (archive.refs or last < MAX_SEQUENCE):
            found.append((archive, SequenceRange(first, last)))
    return found


def _segment(store: SegmentStore, settings: Settings, what: str) -> SegmentRef | None:
    """Return the segment with the key, path or URL `what`; None if it is none. Raises SegmentGone if it is missing."""
    key = _key(settings, what)
    if (name := store.layout.parse_segment(key)) is None:
        return None
    if (info := store.objects.head(key)) is None:
        raise SegmentGone(f"segment {key}: not in the store")
    return SegmentRef(name, key, info.size, info.modified)


def _key(settings: Settings, what: str) -> str:
    url = settings.store.url.rstrip("/")
    return what.removeprefix(f"{url}/").removeprefix(f"{url.removeprefix('file://')}/")


def _chain(settings: Settings, chains: ChainStore, what: str) -> Chain:
    try:
        return find_chain(chains, what, configured_feeds(settings))
    except UsageError as error:
        if "=" in what:  # no site has such a name
            raise UsageError(f"{what}: expected the key of a segment, or a chain") from None
        raise error


def _listed(stretch: Stretch[SegmentRef], settings: Settings) -> dict[str, object]:
    ref, rows = stretch.segment, stretch.rows
    return {
        "chain": str(ref.chain),
        "level": ref.level,
        "first": ref.coverage.first,
        "last": ref.coverage.last,
        "take_first": rows.first,
        "take_last": rows.last,
        "bytes": ref.size,
        "modified": format_unix(ref.modified),
        "name": ref.name,
        "key": ref.key,
        "path": object_address(settings.store, ref.key),
    }


def describe_segment(store: SegmentStore, ref: SegmentRef) -> dict[str, Any]:
    """Return the footer of one segment, and size and time of its object in the store. Raises SegmentCorrupt."""
    with store.open(ref) as reader:
        footer = json.loads(reader.footer.to_json())
        groups = [{**asdict(g.range), "rows": g.rows, "raw_bytes": g.raw_bytes} for g in reader.row_groups]
    modified = format_unix(ref.modified)
    return {"key": ref.key, "bytes": ref.size, "modified": modified, **footer, "row_groups": groups}


def _range_of(chains: ChainStore, archive: ChainArchive) -> SequenceRange | None:
    """Return the range from the begin to the end of a chain, by its documents and segments; None if there is none."""
    chain, whole = archive.chain, span(archive.refs)
    with suppress(DataError):  # `segments verify` reports it
        if (document := chains.read_chain(chain)) is None:
            return whole
        end, floor = chains.read_end(chain), chains.read_floor(chain)
        end = max(whole.last if whole else 0, (chains.read_tail(chain) or 0) if end is None else end)
        first = max(document.first, floor) if floor else min(document.first, whole.first if whole else MAX_SEQUENCE)
        if first <= end:
            return SequenceRange(first, end)
    return whole


def describe_chain(store: SegmentStore, chains: ChainStore, chain: Chain) -> dict[str, Any]:
    archive = ChainArchive.listed(store, chain)
    refs, whole = archive.refs, span(archive.refs)
    document, stream, floor = chains.read_chain(chain), chains.read_stream(chain), chains.floor(chain)
    reach = _range_of(chains, archive)
    gaps = [gap.range for gap in chains.gaps(chain)]
    return {
        "chain": str(chain),
        "begins": document.first if document else None,
        "filters": list(document.filters) if document else None,
        "partitions": document.partitions if document else None,
        "created": stream.created if stream else None,
        "previous": dict(stream.previous) if stream and stream.previous else None,
        "floor": floor and floor.first,
        "floor_since": floor and format_unix(floor.raised_at),
        "tail": chains.read_tail(chain),
        "first": whole.first if whole else None,
        "last": whole.last if whole else None,
        "levels": {
            level: {"segments": len(at), "bytes": sum(ref.size for ref in at)}
            for level in sorted({ref.level for ref in refs})
            if (at := [ref for ref in refs if ref.level == level])
        },
        "holes": [str(hole) for hole in (archive.holes(reach, gaps) if reach else ())],
    }


def flatten(found: Mapping[str, Any]) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = []
    for name, value in found.items():
        if isinstance(value, Mapping):
            rows += [(f"{name}.{inner}", each) for inner, each in flatten(value)]
        elif isinstance(value, list):
            rows += flatten({f"{name}[{i}]": each for i, each in enumerate(value)})
        else:
            rows.append((name, value))
    return rows


def _as_written(name: str, nanoseconds: int) -> str:
    if name.endswith("timestamp_ns"):
        return format_time(nanoseconds)
    is_exact = nanoseconds % 1_000_000 == 0 and 0 <= nanoseconds < 2**63  # to the millisecond
    return format_duration(nanoseconds / NS_PER_S) if is_exact else f"{nanoseconds}ns"


def for_people(found: Mapping[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for key, value in found.items():
        name = str(key)  # a level or a partition is a number
        if isinstance(value, Mapping):
            shown[name] = for_people(value)
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
        **_json_headers(message.headers),
        **_json_bytes("payload", message.payload),
    }


def _json_bytes(name: str, raw: bytes | None) -> dict[str, object]:
    if raw is None:
        return {name: None}
    return {name: raw.decode()} if is_text(raw) else {f"{name}_base64": encode_bytes(raw)}


def _json_headers(block: bytes | None) -> dict[str, object]:
    """Return the headers as pairs, in order and with repeats; null without a block, base64 if it is no text."""
    if block is None or not is_text(block):
        return _json_bytes("headers", block)
    return {"headers": [[name.decode(), value.decode()] for name, value in parse_block(block)]}


def format_message(message: Message, *, width: int | None = None) -> str:
    """Format one line. `width`: of the terminal, at which the line is cut; None: a program reads all of it."""
    headers, is_read = "-", width is not None
    if message.headers is not None:
        pairs = [b": ".join(pair) for pair in parse_block(message.headers)]
        headers = _text_bytes(b"; ".join(pairs) if is_read else message.headers, is_read)
    subject, payload = escape(decode_subject(message.subject)), _text_bytes(message.payload, is_read)
    line = "\t".join((str(message.sequence), format_time(message.timestamp_ns), subject, headers, payload))
    return line if width is None else truncate(line.expandtabs(), width)


def _text_bytes(raw: bytes, is_read: bool) -> str:
    if is_text(raw):
        return escape(raw.decode())
    if not is_read:
        return encode_bytes(raw)
    more = "…" if len(raw) > MAX_BINARY_BYTES_SHOWN else ""
    return f"<{format_count(len(raw), 'byte')}: {raw[:MAX_BINARY_BYTES_SHOWN].hex()}{more}>"


PARALLEL_LISTINGS = 8  # chains


ARCHIVE_FORMAT = ViewFormat(
    "archive",
    keys=("chain", "archived", "last_archived", "segments", "bytes", "last_compaction", "last_compaction_exit_code"),
    columns=("chain", "archived", "last archived", "segments", "stored", "last compaction"),
    row_values={
        "bytes": lambda o: o.size,
        "last_compaction": lambda o: format_unix((o.run and o.run.succeeded) or None),
        "last_compaction_exit_code": lambda o: o.run and o.run.code,
    },
    cells={"stored": lambda o, _: size_words(o.size), "last compaction": lambda o, now: _last_compaction(o.run, now)},
)


def _last_compaction(run: CompactionRun | None, now: float) -> object:
    """Return the time of the last success, in red with the exit code if the last run failed."""
    if run is None:
        return None
    done = format_age(None if run.succeeded is None else now - run.succeeded) or "never"
    return StyledCell(f"{done}, then exit code {run.code}", "red") if run.code else done


async def archive_view(settings: Settings) -> StatusView:
    """Return the archive view: the contents of the store, by chain. Sends no request to NATS."""
    (store, documents), clock = open_for_view(settings), SystemClock()
    # A site may list only its own keys.
    site = settings.site if settings.egress.feeds_ and not settings.ingress.targets else None
    with closing(store), closing(ThreadPool("archive", PARALLEL_LISTINGS)) as threads:
        tails = await threads.run(documents.list_tails, site)
        named = await threads.run(documents.chains, site)
        runs = await threads.run(documents.runs)
        chains = sorted({*named, *tails})
        found = await asyncio.gather(*(threads.run(_chain_figures, store, chain, tails.get(chain)) for chain in chains))
    found = [structs.replace(each, run=run_of(runs, each.chain)) for each in found]
    return StatusView(ARCHIVE_FORMAT, found, clock.now())


def _chain_figures(store: SegmentStore, chain: Chain, tail: ObjectInfo | None) -> Observation:
    """Return the figures of one chain, all its levels together. Blocking."""
    end, count, size, modified = 0, 0, 0, tail.modified if tail else 0.0
    for page in store.walk(chain):
        for ref in page:
            end, count, size = max(end, ref.coverage.last), count + 1, size + ref.size
            modified = modified if tail else max(modified, ref.modified)
    return Observation(chain=chain, archived=end or None, archived_at=modified or None, segments=count, size=size)


@click.group()
def consumers() -> None:
    """Show the captured positions of the consumers of a stream."""


_CONSUMER_COLUMNS = ("consumer", "delivered", "ack_floor", "ack_pending", "redelivered", "filter", "paused")


@consumers.command("ls")
@click.argument("feed", metavar="SITE/FEED[/INC]")
@click.option("--to-sequence", type=SequenceType(), help="As captured at or before this end of the archive.")
@config_command
def list_consumers(config: str, feed: str, to_sequence: int | None, as_json: bool) -> None:
    """List the consumers of a feed's stream as egress captured them last; the age of the capture goes to stderr.

    For the newest incarnation, unless one is named. With --to-sequence, from the last capture at or before this end of
    the archive. Sequences are those of the stream: the last one delivered, and the one up to which all are
    acknowledged. Progress of a consumer since the capture is not shown.

    \b
    Examples:
        floe consumers ls -c central.yaml us-east/NODE_DATA
        floe consumers ls -c central.yaml us-east/NODE_DATA/0000 --to-sequence 120000 --json
    """
    settings = load_settings(config, quiet=True)
    _, chains = open_for_view(settings)
    chain = find_incarnation(chains, feed, configured_feeds(settings))
    found = CaptureStore(chains.layout, chains.objects).consumers(chain, to_sequence)
    age = None if found is None else max(0.0, SystemClock().now() - parse_time(found.at) / NS_PER_S)
    if as_json:
        print_json(_captured_json(chain, found, age))
        return
    if found is not None:
        print_table([_captured_row(each) for each in found.consumers], _CONSUMER_COLUMNS)
    of = f"{chain.site}/{chain.feed}/{chain.incarnation:04d}"
    if found is None:
        text = f"{of}: no consumers captured" + (f" up to sequence {to_sequence}" if to_sequence else "")
    else:
        count = format_count(len(found.consumers), "consumer")
        text = f"{of}: {count}, captured {format_age(age)}, when {found.end} was archived"
    click.echo(escape(text), err=True)


def _captured_row(consumer: CapturedConsumer) -> list[object]:
    filters = consumer.config.get("filter_subjects") or [consumer.config.get("filter_subject", "")]
    return [
        escape(consumer.name),
        consumer.delivered_stream,
        consumer.ack_floor_stream,
        consumer.ack_pending,
        consumer.redelivered,
        escape(" ".join(map(str, filters))) or None,
        "yes" if consumer.paused else None,
    ]


def _captured_json(chain: Chain, found: CapturedConsumers | None, age: float | None) -> dict[str, Any]:
    of = {"site": chain.site, "feed": chain.feed, "incarnation": chain.incarnation}
    if found is None or age is None:
        return {**of, "at": None, "age_seconds": None, "end": None, "consumers": []}
    listed = [{"name": each.name, **structs.asdict(each)} for each in found.consumers]
    return {**of, "at": found.at, "age_seconds": round(age, 1), "end": found.end, "consumers": listed}
