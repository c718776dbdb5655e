"""The status page: the content of /status for people. Server-rendered, without scripts or external resources.

The templates (`page.html`, `macros.html`) are loaded at the first page; they escape every value.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.clock import format_unix
from common.observe.observation import unarchived
from common.settings.types import duration_words, format_count, size_words

if TYPE_CHECKING:
    from jinja2 import Environment

REFRESH_S = 10  # seconds until a browser reloads the page
MAX_PAGE_CHAINS = 100  # rows of the table of a target; /status has more

FOLDER = Path(__file__).parent
STYLE = (FOLDER / "page.css").read_text()
_STYLE_DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
PAGE_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_DIGEST}'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Refresh": str(REFRESH_S),
}

Part = Mapping[str, Any]


@cache
def templates() -> Environment:
    """Return the templates of this package."""
    from jinja2 import Environment, FileSystemLoader

    found = Environment(loader=FileSystemLoader(FOLDER), autoescape=True)
    found.filters |= {"text": _text, "pairs": _pairs, "duration": _duration, "size": size_words, "time": format_unix}
    found.globals |= {"unarchived": unarchived, "count": format_count, "parts_of": parts_of}
    return found


def parts_of(document: Part) -> dict[str, Part]:
    """Return the parts in an answer of /status by name; with several workers, those of all workers."""
    found = dict(document.get("parts", {}))
    for worker, answer in document.get("workers", {}).items():
        found |= {f"{name} (worker {worker})": part for name, part in answer.get("parts", {}).items()}
    return found


def coverage_of(document: Part) -> dict[str, Part]:
    """Return the coverage of each chain in an answer of /status, by chain."""
    answers = [document, *document.get("workers", {}).values()]
    return {chain: found for each in answers for chain, found in each.get("coverage", {}).items()}


def render_page(document: Part, paths: Iterable[str], earlier: Part | None = None) -> bytes:
    """Render the page of `document`, an answer of /status. `paths`: those of the other pages. `earlier`: an earlier
    answer, since which rates count; None: no rates.
    """
    template = templates().get_template("page.html")
    text = template.render(
        style=STYLE,
        document=document,
        paths=[*paths],
        parts={name: _with_first_chains(part) for name, part in parts_of(document).items()},
        earlier=earlier or {},
        coverages=coverage_of(document),
    )
    return text.encode("utf-8", "backslashreplace")


def _with_first_chains(target: Part) -> Part:
    """Return the part of a target with at most MAX_PAGE_CHAINS chains: those that are stopped, wait or are behind."""
    chains: Mapping[str, Part] = target.get("chains") or {}
    if (left_out := len(chains) - MAX_PAGE_CHAINS) <= 0:
        return target

    def rank(name: str) -> tuple[bool, bool, float]:
        each = chains[name]
        return "stopped" not in each, "hole" not in each, -each.get("lag_seconds", 0.0)

    first = sorted(chains, key=rank)[:MAX_PAGE_CHAINS]
    return {**target, "chains": {name: chains[name] for name in first}, "chains_not_shown": left_out}


# Values as text


def _text(value: object) -> object:
    """Return a value for the page: numbers in groups of thousands; a dash for nothing, also for a value that is not
    there.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,}"
    return "–" if value is None or str(value) == "" else value


def _pairs(value: object) -> str:
    """Return a mapping as `key value`, one after the other, with durations, sizes and times for people; a list with
    commas; other values as they are, empty for nothing.
    """
    if isinstance(value, Mapping):
        return " · ".join(_pair(key, each) for key, each in value.items() if each not in (None, ""))
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return "" if value is None else str(_text(value))


def _pair(key: str, value: object) -> str:
    if isinstance(value, int | float):
        if key.endswith("_seconds"):
            key, value = key.removesuffix("_seconds"), _duration(value)
        elif key in ("bytes", "max_size"):
            key, value = {"bytes": "size"}.get(key, key), size_words(value)
        elif key == "alive":
            value = format_unix(value)
    return f"{key.replace('_', ' ')} {_pairs(value)}"


def _duration(seconds: object) -> object:
    """Format seconds for people; return anything but a number as it is."""
    return duration_words(seconds) if isinstance(seconds, int | float) else seconds
