"""The columns of `spark.read.format("floe")`: a segment's, where a row is from, parsed headers."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from common.chain import Chain
from common.jetstream.headers import parse_block
from common.segments.parquet import SCHEMA
from compaction.rows import Values

_CHAIN = {"site": pa.string(), "feed": pa.string(), "incarnation": pa.int32(), "partition": pa.int32()}

CHAIN_FIELDS = pa.schema([pa.field(name, kind, nullable=False) for name, kind in _CHAIN.items()])
HEADERS_PARSED = pa.field(
    "headers_parsed",
    pa.list_(pa.field("element", pa.struct([pa.field("name", pa.string()), pa.field("value", pa.string())]))),
)
SEGMENT = pa.field("segment", pa.int32(), nullable=False)


def segment_columns(schema: pa.Schema) -> list[str]:
    """The columns of segments that a result of `schema` is made from."""
    wanted = {"headers"} if "headers_parsed" in schema.names else set()
    return [name for name in SCHEMA.names if name in schema.names or name in wanted]


def arranged(batch: pa.RecordBatch, schema: pa.Schema, chain: Chain, segment: int) -> pa.RecordBatch:
    """`batch`, a segment's rows, as `schema` wants them; `segment` is what its column `segment` says."""
    rows = batch.num_rows
    added: dict[str, Callable[[], Values]] = {
        "site": lambda: pa.repeat(pa.scalar(chain.site, pa.string()), rows),
        "feed": lambda: pa.repeat(pa.scalar(chain.feed, pa.string()), rows),
        "incarnation": lambda: pa.repeat(pa.scalar(chain.incarnation, pa.int32()), rows),
        "partition": lambda: pa.repeat(pa.scalar(chain.partition, pa.int32()), rows),
        "segment": lambda: pa.repeat(pa.scalar(segment, pa.int32()), rows),
        "headers_parsed": lambda: _parsed(batch.column("headers")),
    }
    arrays = [added[name]() if name in added else batch.column(name) for name in schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _parsed(blocks: Values) -> Values:
    """Names and values in order with repeats, as text; null where a message has no header block."""
    return pa.array([_pairs(block) for block in blocks.to_pylist()], HEADERS_PARSED.type)


def _pairs(block: bytes | None) -> list[dict[str, str]] | None:
    if block is None:
        return None
    return [{"name": _text(name), "value": _text(value)} for name, value in parse_block(block)]


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")
