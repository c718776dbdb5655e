"""What `spark.read.format("floe")` is asked for: options as text, and the columns that follow from them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
from pydantic import ValidationError

from common.chain import Chain
from common.errors import UsageError
from common.jetstream.headers import parse_block
from common.segments.archive import among
from common.segments.columns import SCHEMA
from common.segments.documents import ChainStore
from common.segments.keys import Pair, chosen, configured
from common.sequences import MAX_SEQUENCE, SequenceRange
from common.settings.root import StoreSettings
from compaction.union import Values

_CHAIN = {"site": pa.string(), "feed": pa.string(), "incarnation": pa.int32(), "partition": pa.int32()}

CHAIN_FIELDS = pa.schema([pa.field(name, kind, nullable=False) for name, kind in _CHAIN.items()])
HEADERS_PARSED = pa.field(
    "headers_parsed",
    pa.list_(pa.field("element", pa.struct([pa.field("name", pa.string()), pa.field("value", pa.string())]))),
)
SEGMENT = pa.field("segment", pa.int32(), nullable=False)


def arranged(batch: pa.RecordBatch, schema: pa.Schema, chain: Chain, segment: int) -> pa.RecordBatch:
    parts = {**chain.log_context(), "segment": segment}

    def column(name: str) -> Values:
        if name == HEADERS_PARSED.name:
            return pa.array(map(_pairs, batch.column("headers").to_pylist()), HEADERS_PARSED.type)
        if name in parts:
            return pa.repeat(pa.scalar(parts[name], schema.field(name).type), batch.num_rows)
        return batch.column(name)

    arrays = [column(name) for name in schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _pairs(block: bytes | None) -> list[dict[str, str]] | None:
    """Names and values in order with repeats, as text; None where a message has no header block."""
    if block is None:
        return None
    return [{"name": _text(name), "value": _text(value)} for name, value in parse_block(block)]


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


_CREDENTIALS = {"access_key_id", "secret_access_key"}
_STORE_OPTIONS = {"url", "prefix", "endpoint_url", "region", "addressing_style", "checksum", *_CREDENTIALS}
_READ_OPTIONS = {"from_sequence", "to_sequence", "columns", "headers_parsed", "pushdown", "segments"}
_OPTIONS = {"config", *_STORE_OPTIONS, *CHAIN_FIELDS.names, *_READ_OPTIONS}


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What to read, and with which columns.

    `chain`: the parts of a chain that are given; each missing one is a column. `rows`: of every chain. `columns`:
    None for all. `segments`: keys and rows (None: all) to read as they are instead of the cover, usually None.
    `feeds`: of the configuration, if there is one; they need not be archived yet. `pushdown`: whether filters are to
    be pushed down.
    """

    store: StoreSettings
    spool_dir: str
    chain: Mapping[str, str | int]
    rows: SequenceRange
    columns: tuple[str, ...] | None
    headers_parsed: bool
    segments: tuple[tuple[str, SequenceRange | None], ...] | None = None
    feeds: frozenset[Pair] = frozenset()
    pushdown: bool = False

    def selected(self, chains: ChainStore) -> list[Chain]:
        """Raises UsageError where there are no chains of the names given."""
        site, feed = (str(self.chain[n]) if n in self.chain else None for n in ("site", "feed"))
        numbers = [int(self.chain[n]) if n in self.chain else None for n in ("incarnation", "partition")]
        return among(chains, site, feed, lambda known: chosen(known, self.feeds, site, feed, *numbers))

    def schema(self) -> pa.Schema:
        fields = [field for field in CHAIN_FIELDS if field.name not in self.chain]
        fields += list(SCHEMA.remove_metadata())
        fields += [HEADERS_PARSED] if self.headers_parsed else []
        fields += [SEGMENT] if self.segments is not None else []
        if self.columns is not None:
            fields = [field for field in fields if field.name in self.columns]
        return pa.schema([field.remove_metadata() for field in fields])


def parse_options(options: Mapping[str, str]) -> ReadOptions:
    """Raises UsageError, naming the option, for one that is unknown or wrong; ConfigError from `config`."""
    given = {name.lower(): value for name, value in options.items()}
    if unknown := sorted(given.keys() - _OPTIONS):
        raise UsageError(f"option {unknown[0]}: expected one of {', '.join(sorted(_OPTIONS))}")
    store, spool_dir, feeds = _store(given)
    chain: dict[str, str | int] = {n: given[n] for n in ("site", "feed") if n in given}
    chain |= {n: _number(given, n, 0, 65_535) for n in ("incarnation", "partition") if n in given}
    columns = [name.strip() for name in given.get("columns", "").split(",") if name.strip()]
    parsed = ReadOptions(
        store=store,
        spool_dir=spool_dir,
        chain=chain,
        rows=_rows(given),
        columns=tuple(columns) or None,
        headers_parsed=_flag(given, "headers_parsed"),
        segments=_segments(given),
        feeds=feeds,
        pushdown=_flag(given, "pushdown"),
    )
    if parsed.columns is not None and (missing := set(parsed.columns) - set(parsed.schema().names)):
        raise UsageError(f"option columns: no column {sorted(missing)[0]!r}")
    return parsed


def _store(given: Mapping[str, str]) -> tuple[StoreSettings, str, frozenset[Pair]]:
    fields = {name: given[name] for name in _STORE_OPTIONS & given.keys()}
    if path := given.get("config"):
        if fields:
            raise UsageError(f"option config: excludes {', '.join(sorted(fields))}")
        from common.settings.loader import load

        settings = load(path)
        return settings.store, settings.spool_dir, configured(settings)
    try:
        return StoreSettings.model_validate(fields), "", frozenset()
    except ValidationError as error:
        # The message of pydantic is shown without the value: it may be a secret.
        found = error.errors(include_input=False, include_url=False, include_context=False)
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in found)
        raise UsageError(f"options of the store: {problems}", hint="or give option config") from None


def _rows(given: Mapping[str, str]) -> SequenceRange:
    first = _number(given, "from_sequence", 1, MAX_SEQUENCE) if "from_sequence" in given else 1
    last = _number(given, "to_sequence", 1, MAX_SEQUENCE) if "to_sequence" in given else MAX_SEQUENCE
    if last < first:
        raise UsageError(f"option to_sequence: expected at least from_sequence {first}, found {last}")
    return SequenceRange(first, last)


def _segments(given: Mapping[str, str]) -> tuple[tuple[str, SequenceRange | None], ...] | None:
    if "segments" not in given:
        return None
    try:
        return tuple((str(key), SequenceRange(*rows) if rows else None) for key, rows in json.loads(given["segments"]))
    except (ValueError, TypeError) as error:
        raise UsageError(f"option segments: expected JSON [[key, [first, last] or null], …]: {error}") from error


def _number(given: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = given[name]
    if not (text.isascii() and text.isdigit() and len(text) < 20 and low <= int(text) <= high):
        raise UsageError(f"option {name}: expected a number from {low} to {high}, found {text!r:.60}")
    return int(text)


def _flag(given: Mapping[str, str], name: str) -> bool:
    if (text := given.get(name, "false").lower()) not in ("true", "false"):
        raise UsageError(f"option {name}: expected true or false, found {text!r:.60}")
    return text == "true"
