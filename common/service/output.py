"""Results on stdout: JSON for programs, aligned columns for people."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from common.service.text import escaped

Row = Sequence[object] | Mapping[str, object]


def print_json(value: object) -> None:
    """Print `value` as one JSON document; dataclasses as objects, bytes as text, sets and tuples as lists."""
    click.echo(json.dumps(value, indent=2, default=_plain))


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"no JSON form for {type(value).__name__}")


def table(rows: Iterable[Row], columns: Sequence[str]) -> None:
    """Print the header `columns`, then each row: values in their order, or a mapping by column name.

    None shows as `-`. Columns of numbers are aligned to the right.
    """
    values = [[row.get(c) for c in columns] if isinstance(row, Mapping) else list(row) for row in rows]
    cells = [list(columns), *([_cell(value) for value in row] for row in values)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    right = [_is_numeric([row[i] for row in values]) for i in range(len(columns))]
    for row in cells:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        click.echo("  ".join(padded).rstrip())


def _cell(value: object) -> str:
    return "-" if value is None else escaped(str(value))


def _is_numeric(values: list[object]) -> bool:
    return any(value is not None for value in values) and all(
        value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values
    )
