"""Options of `spark.read.format("floe")` and `readStream`, parsed from text, and the columns that follow from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pydantic import ValidationError

from common.archive.catalog import ChainName, FeedId, configured_feeds, filter_chains, match_chains
from common.archive.columns import SCHEMA
from common.archive.documents import ChainStore
from common.archive.keys import MAX_LEVEL
from common.archive.reader import RowFilter
from common.archive.times import SKEW_MARGIN_NS
from common.chain import Chain
from common.cli import RequestedTime
from common.clock import NS_PER_S, format_time
from common.errors import UsageError
from common.nats.headers import parse_block
from common.sequences import MAX_SEQUENCE, SequenceRange
from common.settings.root import StoreSettings
from common.settings.types import is_filter, parse_duration

_CHAIN = {"site": pa.string(), "feed": pa.string(), "incarnation": pa.int32(), "partition": pa.int32()}

CHAIN_FIELDS = pa.schema([pa.field(name, kind, nullable=False) for name, kind in _CHAIN.items()])
HEADERS_PARSED = pa.field(
    "headers_parsed",
    pa.list_(pa.field("element", pa.struct([pa.field("name", pa.string()), pa.field("value", pa.string())]))),
)


def arrange_columns(batch: pa.RecordBatch, schema: pa.Schema, values: Mapping[str, object]) -> pa.RecordBatch:
    """Return `batch` with the columns of `schema`. `values`: of columns with the same value in each row."""

    def column(name: str) -> Any:
        if name == HEADERS_PARSED.name:
            return pa.array(map(_pairs, batch.column("headers").to_pylist()), HEADERS_PARSED.type)
        if name in values:
            return pa.repeat(pa.scalar(values[name], schema.field(name).type), batch.num_rows)
        return batch.column(name)

    arrays = [column(name) for name in schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _pairs(block: bytes | None) -> list[dict[str, str]] | None:
    """Return names and values in order with repeats, as text; None if a message has no header block."""
    if block is None:
        return None
    return [{"name": _text(name), "value": _text(value)} for name, value in parse_block(block)]


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


_CREDENTIALS = {"access_key_id", "secret_access_key"}
_STORE_OPTIONS = {"url", "prefix", "endpoint_url", "region", "addressing_style", "checksum", *_CREDENTIALS}
_BEGINS, _ENDS = ("since", "from_time"), ("until", "to_time")
_COMMON_OPTIONS = {
    *_STORE_OPTIONS,
    *CHAIN_FIELDS.names,
    *_BEGINS,
    "config",
    "from_sequence",
    "subject",
    "columns",
    "headers_parsed",
}
_BATCH_OPTIONS = {*_ENDS, "to_sequence", "level", "time_margin", "pushdown"}
_STREAM_OPTIONS = {"from", "on_expired", "max_rows_per_batch", "max_segments_per_batch"}
OPTIONS = frozenset(_COMMON_OPTIONS | _BATCH_OPTIONS | _STREAM_OPTIONS)
_MAX_NS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options that only a stream has.

    `from_latest`: a new query begins after the present end. `skips_expired`: it continues after the sequences that
    retention deleted. `rows`, `segments`: the limit of one batch, None for no limit.
    """

    from_latest: bool = False
    skips_expired: bool = False
    rows: int | None = None
    segments: int | None = None


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Selection and columns of a read.

    `chain`: each part that is None is a column. `rows`: of every chain. `columns`: None for all. `level`: only its
    segments, None for the cover over all. `row_filter`: rows by time and subject; `margin_ns`: the time by which a
    message may be earlier than one before it. `feeds`: those of the configuration, if there is one; they need not be
    archived yet. `pushdown`: filters are pushed down. `given`: names of the options that are set.
    """

    store: StoreSettings
    spool_dir: str
    chain: ChainName
    rows: SequenceRange
    columns: tuple[str, ...] | None
    headers_parsed: bool
    level: int | None = None
    row_filter: RowFilter = field(default_factory=RowFilter)
    margin_ns: int = SKEW_MARGIN_NS
    feeds: frozenset[FeedId] = frozenset()
    pushdown: bool = False
    stream: StreamOptions = field(default_factory=StreamOptions)
    given: frozenset[str] = frozenset()

    def check_allowed(self, *, streams: bool) -> None:
        """Raise UsageError for an option that a read, or a stream, does not have."""
        if wrong := sorted(self.given & (_BATCH_OPTIONS if streams else _STREAM_OPTIONS)):
            raise UsageError(f"option {wrong[0]}: only for {'read' if streams else 'readStream'}")

    def selected(self, chains: ChainStore) -> list[Chain]:
        """Return the selected chains. Raises UsageError if there are no chains of the given names."""
        return match_chains(chains, self.chain, lambda known: filter_chains(known, self.feeds, self.chain))

    def schema(self) -> pa.Schema:
        fields = [field for field, part in zip(CHAIN_FIELDS, self.chain, strict=True) if part is None]
        fields += list(SCHEMA.remove_metadata())
        fields += [HEADERS_PARSED] if self.headers_parsed else []
        if self.columns is not None:
            fields = [field for field in fields if field.name in self.columns]
        return pa.schema([field.remove_metadata() for field in fields])


def parse_options(options: Mapping[str, str], now: float) -> ReadOptions:
    """Parse the options of a read or a stream. `now`: seconds since 1970, for times such as `2h ago`.

    Raises UsageError, naming the option, for one that is unknown or wrong; ConfigError from `config`.
    """
    given = {name.lower(): value for name, value in options.items()}
    if unknown := sorted(given.keys() - OPTIONS):
        raise UsageError(f"option {unknown[0]}: expected one of {', '.join(sorted(OPTIONS))}")
    store, spool_dir, feeds = _store(given)
    incarnation, partition = (_number(given, name, 0, 65_535) for name in ("incarnation", "partition"))
    columns = [name.strip() for name in given.get("columns", "").split(",") if name.strip()]
    parsed = ReadOptions(
        store=store,
        spool_dir=spool_dir,
        chain=ChainName(given.get("site"), given.get("feed"), incarnation, partition),
        rows=_rows(given),
        columns=tuple(columns) or None,
        headers_parsed=_flag(given, "headers_parsed"),
        level=_number(given, "level", 0, MAX_LEVEL),
        row_filter=_row_filter(given, now),
        margin_ns=_margin(given),
        feeds=feeds,
        pushdown=_flag(given, "pushdown"),
        stream=_stream(given),
        given=frozenset(given),
    )
    if parsed.columns is not None and (missing := set(parsed.columns) - set(parsed.schema().names)):
        raise UsageError(f"option columns: no column {sorted(missing)[0]!r}")
    return parsed


def _store(given: Mapping[str, str]) -> tuple[StoreSettings, str, frozenset[FeedId]]:
    fields = {name: given[name] for name in _STORE_OPTIONS & given.keys()}
    if path := given.get("config"):
        if fields:
            raise UsageError(f"option config: excludes {', '.join(sorted(fields))}")
        from common.settings.loader import load

        settings = load(path)
        return settings.store, settings.spool_dir, configured_feeds(settings)
    try:
        return StoreSettings.model_validate(fields), "", frozenset()
    except ValidationError as error:
        # The message of pydantic is shown without the value: it may be a secret.
        found = error.errors(include_input=False, include_url=False, include_context=False)
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in found)
        raise UsageError(f"options of the store: {problems}", hint="or give option config") from None


def _rows(given: Mapping[str, str]) -> SequenceRange:
    first = _number(given, "from_sequence", 1, MAX_SEQUENCE) or 1
    last = _number(given, "to_sequence", 1, MAX_SEQUENCE) or MAX_SEQUENCE
    if last < first:
        raise UsageError(f"option to_sequence: expected at least from_sequence {first}, found {last}")
    return SequenceRange(first, last)


def _row_filter(given: Mapping[str, str], now: float) -> RowFilter:
    begin, end = (_moment(given, names, now) for names in (_BEGINS, _ENDS))
    if begin is not None and end is not None and begin >= end:
        raise UsageError(f"option since: expected before {format_time(end)}, found {format_time(begin)}")
    subjects = tuple(given.get("subject", "").split())  # no subject contains a space
    for each in subjects:
        if not is_filter(each):
            raise UsageError(f"option subject: expected filters such as nodes.*.temp, found {each!r:.80}")
    return RowFilter(begin, end, subjects)


def _moment(given: Mapping[str, str], names: tuple[str, ...], now: float) -> int | None:
    if not (asked := [name for name in names if name in given]):
        return None
    if len(asked) > 1:
        raise UsageError(f"expected one of the options {' and '.join(names)}, found both")
    try:
        return max(-_MAX_NS, min(RequestedTime.parse(given[asked[0]]).at(now), _MAX_NS))
    except ValueError as error:
        raise UsageError(f"option {asked[0]}: {error}") from error


def _margin(given: Mapping[str, str]) -> int:
    try:
        return round(parse_duration(given["time_margin"]) * NS_PER_S) if "time_margin" in given else SKEW_MARGIN_NS
    except ValueError as error:
        raise UsageError(f"option time_margin: {error}") from error


def _stream(given: Mapping[str, str]) -> StreamOptions:
    rows, segments = (_number(given, f"max_{n}_per_batch", 1, 2**31 - 1) for n in ("rows", "segments"))
    if rows and segments:
        raise UsageError("expected one of the options max_rows_per_batch and max_segments_per_batch, found both")
    starts = {*_BEGINS, "from_sequence", "from"} & given.keys()
    if "from" in starts and len(starts) > 1:
        raise UsageError(f"option from: excludes {', '.join(sorted(starts - {'from'}))}")
    from_latest = _choice(given, "from", "earliest", "latest") == "latest"
    return StreamOptions(from_latest, _choice(given, "on_expired", "fail", "skip") == "skip", rows, segments)


def _number(given: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    """Return the number that an option sets; None if it is not given."""
    if (text := given.get(name)) is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20 and low <= int(text) <= high):
        raise UsageError(f"option {name}: expected a number from {low} to {high}, found {text!r:.60}")
    return int(text)


def _flag(given: Mapping[str, str], name: str) -> bool:
    return _choice(given, name, "false", "true") == "true"


def _choice(given: Mapping[str, str], name: str, usual: str, other: str) -> str:
    if (text := given.get(name, usual).lower()) not in (usual, other):
        raise UsageError(f"option {name}: expected {other} or {usual}, found {text!r:.60}")
    return text
