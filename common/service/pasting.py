"""Commands for people to paste: they name the file that this process read its configuration from."""

from __future__ import annotations

import os
import shlex

_source = _path = "site.yaml"  # until something is read from a file


def remember(path: str) -> None:
    """The configuration was read from `path`. The last call wins."""
    global _source, _path
    _source, _path = path, os.path.abspath(path)


def source() -> str:
    """The file of the configuration, as it was named."""
    return _source


def ways(*found: str | tuple[str, ...]) -> str:
    """A hint, each way on in lines of its own: words, and of a tuple the commands behind them, one a line
    with nothing behind it, so that a whole line can be pasted.
    """
    lines: list[str] = []
    for way in found:
        lines += [way] if isinstance(way, str) else [f"{way[0]}:", *way[1:]]
    return "\n".join(lines)


def command(words: str, *rest: str) -> str:
    """`floe {words} -c FILE {rest}`, the file quoted for a shell and found from any folder."""
    return " ".join(["floe", words, "-c", shlex.quote(_path), *filter(None, rest)])
