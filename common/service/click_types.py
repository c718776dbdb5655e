"""Parameter types of the command line; each refuses with exit 2 and what it expects."""

from __future__ import annotations

from typing import Any

import click

from common.sequences import MAX_SEQUENCE
from common.settings.units import parse_duration, parse_size


class SequenceType(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """A stream sequence, 1 .. 2^63-1, as int."""

    name = "sequence"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value)
        if not (text.isascii() and text.isdigit() and len(text) < 20 and 1 <= int(text) <= MAX_SEQUENCE):
            self.fail(f"expected a sequence from 1 to {MAX_SEQUENCE}, found {text!r:.60}", param, ctx)
        return int(text)


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """A duration such as 1h30m, as float seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return parse_duration(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Size(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """A size such as 64K or 1G, as int bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
