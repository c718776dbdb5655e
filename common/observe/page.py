"""The status page: the content of /status for people. Server-rendered, without scripts or external resources.

The templates (`page.html`, `macros.html`) are loaded at the first page; they escape every value.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.clock import NS_PER_S, format_time
from common.settings.types import duration_words, format_count, size_words

if TYPE_CHECKING:
    from jinja2 import Environment

REFRESH_S = 10  # seconds until a browser reloads the page

FOLDER = Path(__file__).parent
STYLE = (FOLDER / "page.css").read_text()


def style_source(style: str) -> str:
    """Return the source by which a Content-Security-Policy allows this style and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}'"


PAGE_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src {style_source(STYLE)}; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Refresh": str(REFRESH_S),
}

Part = Mapping[str, Any]


@cache
def templates(folder: Path = FOLDER) -> Environment:
    """Return the templates in `folder`, with those of this package."""
    from jinja2 import Environment, FileSystemLoader

    found = Environment(loader=FileSystemLoader([folder, FOLDER]), autoescape=True)
    found.filters |= {"text": _text, "pairs": _pairs, "duration": _duration}
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


def render_page(document: Part, paths: Iterable[str]) -> bytes:
    """Render the page of `document`, an answer of /status. `paths`: those of the other pages."""
    parts = parts_of(document)
    feeds = {name: part for name, part in parts.items() if "stream" in part}
    targets = {name: part for name, part in parts.items() if name.startswith("target ")}
    leases = {name: part for name, part in parts.items() if "owner" in part and "held" in part}
    text = (
        templates()
        .get_template("page.html")
        .render(
            style=STYLE,
            document=document,
            paths=[*paths],
            stops=[*_stops({**feeds, **targets})],
            workers=[_worker(index, each) for index, each in document.get("workers", {}).items()],
            feeds=[_feed(name, part) for name, part in feeds.items()],
            targets=[_target(name, part) for name, part in targets.items()],
            leases=[_lease(name, part) for name, part in leases.items()],
            coverages=[(chain, _coverage_summary(f), _picture(f)) for chain, f in coverage_of(document).items()],
            others=[(name, part) for name, part in parts.items() if name not in {**feeds, **targets, **leases}],
        )
    )
    return text.encode("utf-8", "backslashreplace")


def _stops(parts: Mapping[str, Part]) -> Iterator[Part]:
    """Yield each part that waits for an operator, with the command that lets it continue."""
    found = [(name, each) for name, part in parts.items() for name, each in _with_chains(name, part)]
    for name, each in found:
        if hint := each.get("hint"):
            reason = each.get("stopped") or each.get("why") or (f"{each['hole']} is missing" if "hole" in each else "")
            yield {"name": name, "code": each.get("code") or each.get("phase"), "reason": reason, "hint": hint}


def _with_chains(name: str, part: Part) -> Iterator[tuple[str, Part]]:
    yield name, part
    for chain, state in part.get("chains", {}).items():
        yield f"{chain} into {name}", state


# Rows of the tables

Row = list[object]


def _worker(index: str, part: Part) -> Row:
    state = _StateText("ready" if part.get("ready") else "not ready", not part.get("ready"))
    return [index, state, part.get("pid"), part.get("restarts")]


def _feed(name: str, part: Part) -> Row:
    end, last = part.get("end"), part.get("source_last")
    behind = None if end is None or last is None else max(0, last - max(end, part.get("first", 1) - 1))
    state = " ".join(filter(None, (str(part.get("state", "")), part.get("code", ""))))
    is_bad = bool(part.get("code")) or part.get("state") in ("stopped", "stalled", "waiting")
    return [
        name.removeprefix("egress "), _StateText(state, is_bad), part.get("chain"), end, last, behind,
        part.get("lost", 0), len(part.get("damaged", ())), _pairs(part.get("open_segment")), part.get("holder"),
    ]  # fmt: skip


def _target(name: str, part: Part) -> dict[str, object]:
    facts = {key: value for key, value in part.items() if key not in ("chains", "hint") and value not in (None, "")}
    chains = [_chain(chain, state) for chain, state in part.get("chains", {}).items()]
    return {"name": name[0].upper() + name[1:], "facts": facts, "chains": chains}


def _chain(chain: str, state: Part) -> Row:
    archived, position = state.get("archived"), state.get("position")
    lag = None if archived is None or position is None else max(0, archived - max(1, position) + 1)
    phase = "stopped" if "stopped" in state else state.get("phase")
    is_bad = phase in ("stopped", "late", "lost", "damaged")
    return [
        chain, _StateText(str(phase), is_bad), archived, position, lag, _duration(state.get("lag_seconds")),
        state.get("hole"), _pairs(state.get("source")),
    ]  # fmt: skip


def _lease(name: str, part: Part) -> Row:
    held = ", ".join(map(str, part["held"]))
    return [name, part["owner"], part.get("members"), part.get("share"), held, part.get("failure")]


# Coverage, as a picture

IMAGE_WIDTH, BAR_HEIGHT, BAR_GAP, LABEL_WIDTH = 1000, 14, 6, 70  # of the picture, in its own units


def _coverage_summary(found: Part) -> str:
    if not found.get("levels"):
        return "no segments"
    holes = found.get("holes", 0)
    rest = "" if found.get("is_complete", True) else "; only the first segments were scanned"
    what = f"{found['first']}..{found['last']}, {format_count(holes, 'hole') if holes else 'no hole'}"
    return f"{what}, {_last_compaction(found)}; scanned {_time(found.get('at'))}{rest}"


def _last_compaction(found: Part) -> str:
    """Return the time of the last successful compaction: by its last run, else by the newest merged segment."""
    run, merged = found.get("compaction") or {}, found.get("compacted")
    at = run.get("succeeded") or merged
    failed = f", its last run, {_time(run['ended'])}, ended with exit code {run['code']}" if run.get("code") else ""
    return (f"last compaction {_time(at)}" if at else "not compacted yet") + failed


def coverage_svg(found: Part) -> str:
    """Return an SVG of the coverage of each level, and of the holes that no level fills."""
    macros: Any = templates().get_template("macros.html").module
    return str(macros.coverage(_picture(found)))


def _picture(found: Part) -> Part:
    """Return the places of all bars: for each level its own, and those of the holes that no level fills."""
    levels = []
    for number, (name, each) in enumerate(sorted(found.get("levels", {}).items(), key=lambda item: int(item[0]))):
        label = f"{format_count(each['segments'], 'segment')}, {size_words(each['bytes'])}"
        span = int(found["first"]), int(found["last"])
        bars = [_bar("level", rows, span, label) for rows in each["ranges"]]
        bars += [_bar("hole", hole, span, "in no level") for hole in found.get("missing", ())]
        levels.append({"name": name, "y": BAR_GAP + number * (BAR_HEIGHT + BAR_GAP), "bars": bars})
    height = BAR_GAP + (BAR_HEIGHT + BAR_GAP) * len(levels)
    return {"levels": levels, "width": IMAGE_WIDTH, "height": height, "left": LABEL_WIDTH, "bar": BAR_HEIGHT}


def _bar(kind: str, rows: Sequence[int], span: tuple[int, int], label: str) -> Part:
    begin, end = int(rows[0]), int(rows[1])
    scale = (IMAGE_WIDTH - LABEL_WIDTH) / (span[1] - span[0] + 1)
    x, width = LABEL_WIDTH + (begin - span[0]) * scale, max(2.0 if kind == "hole" else 0.5, (end - begin + 1) * scale)
    return {"kind": kind, "rows": f"{begin}..{end}", "x": x, "width": width, "label": label}


# Values as text


class _StateText(str):
    """A text, in red if it is bad, else in green."""

    is_bad: bool

    def __new__(cls, text: str, is_bad: bool) -> _StateText:
        made = super().__new__(cls, text)
        made.is_bad = is_bad
        return made


def _text(value: object) -> object:
    """Return a value for the page; a dash for nothing."""
    return "–" if value is None or value == "" else value


def _pairs(value: object) -> str:
    """Return a mapping as `key value`, one after the other, with durations, sizes and times for people; a list with
    commas; other values as they are, empty for nothing.
    """
    if isinstance(value, Mapping):
        return " · ".join(_pair(key, each) for key, each in value.items() if each not in (None, ""))
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return "" if value is None else str(value)


def _pair(key: str, value: object) -> str:
    if isinstance(value, int | float):
        if key.endswith("_seconds"):
            key, value = key.removesuffix("_seconds"), _duration(value)
        elif key in ("bytes", "max_size"):
            key, value = {"bytes": "size"}.get(key, key), size_words(value)
        elif key == "alive":
            value = _time(value)
    return f"{key.replace('_', ' ')} {_pairs(value)}"


def _duration(seconds: object) -> object:
    """Format seconds for people; return anything but a number as it is."""
    return duration_words(seconds) if isinstance(seconds, int | float) else seconds


def _time(seconds: object) -> str:
    return format_time(int(seconds) * NS_PER_S) if isinstance(seconds, int | float) else "–"
