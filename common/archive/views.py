"""The cover for tools that read Parquet files and cannot choose among them: a view for DuckDB, a frame for Polars.

Both name the files of the cover in its order, with a range of sequences if a file also holds rows that others
account for. A file has no columns for its chain; they are taken from its path, with one type for all archives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING
from urllib.parse import unquote

from common.archive.columns import SCHEMA
from common.archive.segment import SegmentRef
from common.sequences import SequenceRange, Stretch
from common.settings.types import format_count

if TYPE_CHECKING:
    from common.settings.root import StoreSettings

Cover = Sequence[Stretch[SegmentRef]]
Part = tuple[list[str], SequenceRange | None]

_HIVE = {"site": "string", "feed": "string", "incarnation": "int32", "partition": "int32", "level": "int32"}
_COLUMN_TYPES = {**_HIVE, **{field.name: str(field.type) for field in SCHEMA}}
_DUCKDB = {
    "string": "VARCHAR",
    "int32": "INTEGER",
    "int64": "BIGINT",
    "binary": "BLOB",
    "timestamp[us, tz=UTC]": "TIMESTAMP WITH TIME ZONE",
}
_POLARS = {
    "string": "polars.String",
    "int32": "polars.Int32",
    "int64": "polars.Int64",
    "binary": "polars.Binary",
    "timestamp[us, tz=UTC]": 'polars.Datetime("us", "UTC")',
}
_MAX_UNION_PARTS = 100  # parts of one statement; more are nested, because DuckDB limits the depth of an expression


def object_address(store: StoreSettings, key: str) -> str:
    """Return the address of an object for other tools: `s3://…`, or a path."""
    scheme, _, rest = store.url.partition("://")
    return f"{unquote(rest).rstrip('/')}/{key}" if scheme == "file" else f"{store.url.rstrip('/')}/{key}"


def duckdb_view(cover: Cover, store: StoreSettings, name: str) -> str:
    """Return SQL that creates the view `name`. Comments hold statements for access to an S3 store, without secrets."""
    settings = ["--", *(f"-- {line}" for line in _secret(store))] if store.url.startswith("s3:") else []
    nulls = ", ".join(f"NULL::{_DUCKDB[kind]} AS {name}" for name, kind in _COLUMN_TYPES.items())
    selects = [_select(*part) for part in _parts(cover, store)] or [f"SELECT {nulls} WHERE false"]
    while len(selects) > _MAX_UNION_PARTS:
        groups = (selects[at : at + _MAX_UNION_PARTS] for at in range(0, len(selects), _MAX_UNION_PARTS))
        selects = [f"SELECT * FROM (\n{_union(group)}\n)" for group in groups]  # noqa: S608 # of quoted parts
    head = [f"-- {_summary_comment(cover, 'duckdb')}", *settings]
    return "\n".join([*head, f'CREATE OR REPLACE VIEW "{name}" AS', f"{_union(selects)};", ""])


def _union(selects: Sequence[str]) -> str:
    return "\nUNION ALL\n".join(selects)


def _secret(store: StoreSettings) -> Iterator[str]:
    """Yield the statements for access of DuckDB to the store, with placeholders for keys."""
    yield "Once in a session, with keys that may read the bucket:"
    yield "INSTALL httpfs; LOAD httpfs;"
    scheme, _, host = store.endpoint_url.rstrip("/").partition("://")
    is_path = store.addressing_style == "path" or (store.addressing_style == "auto" and bool(host))
    options = ["TYPE s3", "KEY_ID '…'", "SECRET '…'", f"REGION {_quoted(store.region)}"]
    options += [f"ENDPOINT {_quoted(host)}", f"USE_SSL {str(scheme == 'https').lower()}"] if host else []
    options += [f"URL_STYLE '{'path' if is_path else 'vhost'}'", f"SCOPE {_quoted(store.url)}"]
    yield f"CREATE OR REPLACE SECRET floe ({', '.join(options)});"


def _select(files: Sequence[str], rows: SequenceRange | None) -> str:
    kinds = ", ".join(f"'{name}': {_DUCKDB[kind]}" for name, kind in _HIVE.items())
    literal = (re.sub(r"[*?\[]", r"[\g<0>]", file) for file in files)  # a list may hold patterns too
    listed = ",\n".join(f"  {_quoted(file)}" for file in literal)
    source = f"read_parquet([\n{listed}\n], hive_partitioning = true, hive_types = {{{kinds}}})"
    text = f"SELECT {', '.join(_COLUMN_TYPES)} FROM {source}"  # noqa: S608 # every part is quoted
    return text if rows is None else f"{text} WHERE sequence BETWEEN {rows.first} AND {rows.last}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def polars_frame(cover: Cover, store: StoreSettings, name: str) -> str:
    """Return Python that creates the LazyFrame `name`. For S3 it has all settings except the keys, which Polars finds
    as the tools of AWS do.
    """
    lines = [f"# {_summary_comment(cover, 'polars')}"]
    options = None
    if store.url.startswith("s3:"):
        lines += ["# Keys that may read the bucket: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile of AWS."]
        options = {"aws_region": store.region}
        if endpoint := store.endpoint_url:
            options |= {"aws_endpoint_url": endpoint, "aws_allow_http": str(endpoint.startswith("http:")).lower()}
        if store.addressing_style != "auto":
            options["aws_virtual_hosted_style_request"] = str(store.addressing_style == "virtual").lower()
    lines += ["import polars", ""]
    columns = [f'    "{column}": {_POLARS[kind]},' for column, kind in _COLUMN_TYPES.items()]
    # Polars needs a type for every such part of a path, also for those before Floe's.
    parts = [*dict.fromkeys(re.findall(r"([^/=]+)=", object_address(store, cover[0].segment.key)))] if cover else []
    lines += ["_columns = {", *columns, "}", f"_hive = {{name: _columns.get(name, polars.String) for name in {parts}}}"]
    lines += [f"_options = {options}", "", "", "def _scan(*files):", "    return polars.scan_parquet("]
    lines += ["        list(files), hive_partitioning=True, hive_schema=_hive, glob=False, storage_options=_options"]
    lines += ["    )", "", ""]
    if not cover:
        return "\n".join([*lines, f"{name} = polars.LazyFrame(schema=_columns)", ""])
    lines += [f"{name} = polars.concat(", "    ["]
    for files, rows in _parts(cover, store):
        taken = "" if rows is None else f'.filter(polars.col("sequence").is_between({rows.first}, {rows.last}))'
        lines += ["        _scan(", *(f"            {json.dumps(file)}," for file in files), f"        ){taken},"]
    return "\n".join([*lines, "    ]", ").select(list(_columns))", ""])


def _parts(cover: Cover, store: StoreSettings) -> Iterator[Part]:
    """Yield neighbours that are taken whole together, each other stretch alone with the rows that it accounts for."""
    for is_whole, stretches in groupby(cover, key=lambda each: each.rows == each.segment.coverage):
        found = [([object_address(store, each.segment.key)], each.rows) for each in stretches]
        yield from [([file for [file], _ in found], None)] if is_whole else found


def _summary_comment(cover: Cover, form: str) -> str:
    chains = len({each.segment.chain for each in cover})
    counts = f"{format_count(len(cover), 'segment')} of {format_count(chains, 'chain')}, each sequence once"
    return f"{counts}: floe segments ls --cover --format {form}"
