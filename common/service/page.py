"""The status page: the content of /status for people. Server-rendered, without scripts or external resources."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from common.clock import NS_PER_S, format_time
from common.settings.types import duration_words, format_count, size_words

REFRESH_S = 10  # seconds until a browser reloads the page

STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --pale: #5d6b7a; --line: #d5dce4; --paper: #fff; --good: #1a7f4b;
  --bad: #c0262d; --ice: #2d7dd2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e9f0; --pale: #93a1b0; --line: #35414e; --paper: #141a21;
  --good: #43c07f; --bad: #ff6b6b; --ice: #5aa7f0; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 1.5rem auto;
  max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--pale); font-weight: 500; } td.n, th.n { text-align: right; }
pre { background: color-mix(in srgb, var(--ink) 7%, transparent); padding: .6rem;
  overflow-x: auto; white-space: pre-wrap; }
.good { color: var(--good); } .bad { color: var(--bad); } .pale { color: var(--pale); }
svg { display: block; width: 100%; } svg .level { fill: var(--ice); } svg .hole { fill: var(--bad); }
svg .whole { fill: none; stroke: var(--line); } svg text { fill: var(--pale); font-size: 11px; }
"""

_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()

PAGE_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Refresh": str(REFRESH_S),
}

Part = Mapping[str, Any]


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
    others = {name: part for name, part in parts.items() if name not in {**feeds, **targets, **leases}}
    body = [
        *_top(document, paths),
        *_stops({**feeds, **targets}),
        *_workers(document.get("workers", {})),
        *(_feeds(feeds) if feeds else ()),
        *(line for name, part in targets.items() for line in _target(name, part)),
        *(_leases(leases) if leases else ()),
        *_coverages(coverage_of(document)),
        *(line for name, part in others.items() for line in _other(name, part)),
    ]
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Floe</title><style>{STYLE}</style></head>'
    )
    return f"{head}<body>{''.join(body)}</body></html>\n".encode("utf-8", "backslashreplace")


def _top(document: Part, paths: Iterable[str]) -> Iterator[str]:
    ready = "<span class=good>ready</span>" if document.get("ready") else "<span class=bad>not ready</span>"
    yield f"<h1>Floe {escape(str(document.get('version', '')))}: {ready}</h1>"
    links = " ".join(f'<a href="{escape(path)}">{escape(path)}</a>' for path in paths)
    age = _duration(document.get("heartbeat_age_seconds"))
    yield f"<p class=pale>{links} · the event loop turned {_text(age)} ago</p>"
    if problems := document.get("problems"):
        yield f"<ul class=bad>{''.join(f'<li>{_text(problem)}</li>' for problem in problems)}</ul>"


def _stops(parts: Mapping[str, Part]) -> Iterator[str]:
    """Show each part that waits for an operator, with the command that lets it continue."""
    found = [(name, each) for name, part in parts.items() for name, each in _with_chains(name, part)]
    for name, each in found:
        if hint := each.get("hint"):
            reason = each.get("stopped") or each.get("why") or (f"{each['hole']} is missing" if "hole" in each else "")
            yield f"<h3 class=bad>{_text(name)}: {_text(each.get('code') or each.get('phase'))}</h3>"
            yield f"<p>{_text(reason)}</p><pre>{_text(hint)}</pre>"


def _workers(workers: Mapping[str, Part]) -> Iterator[str]:
    if workers:
        yield "<h2>Workers</h2>"
        rows = []
        for index, each in workers.items():
            state = _StateText("ready" if each.get("ready") else "not ready", not each.get("ready"))
            rows.append([index, state, each.get("pid"), each.get("restarts")])
        yield from _table(("worker", "state", "process", "restarts"), rows)


def _with_chains(name: str, part: Part) -> Iterator[tuple[str, Part]]:
    yield name, part
    for chain, state in part.get("chains", {}).items():
        yield f"{chain} into {name}", state


def _feeds(feeds: Mapping[str, Part]) -> Iterator[str]:
    yield "<h2>Archived chains</h2>"
    columns = ("feed", "state", "chain", "archived", "source", "behind", "lost", "damaged", "open segment", "holder")
    rows = []
    for name, part in feeds.items():
        end, last = part.get("end"), part.get("source_last")
        behind = None if end is None or last is None else max(0, last - max(end, part.get("first", 1) - 1))
        state = " ".join(filter(None, (str(part.get("state", "")), part.get("code", ""))))
        is_bad = bool(part.get("code")) or part.get("state") in ("stopped", "stalled", "waiting")
        rows.append([
            name.removeprefix("egress "), _StateText(state, is_bad), part.get("chain"), end, last, behind,
            part.get("lost", 0), len(part.get("damaged", ())), _pairs(part.get("open_segment")), part.get("holder"),
        ])  # fmt: skip
    yield from _table(columns, rows)


def _target(name: str, part: Part) -> Iterator[str]:
    yield f"<h2>{_text(name[0].upper() + name[1:])}</h2>"
    shown = {key: value for key, value in part.items() if key not in ("chains", "hint") and value not in (None, "")}
    yield f"<p>{_text(_pairs(shown))}</p>"
    columns = (
        "chain", "phase", "archived", "position", "lag (sequences)", "behind", "late or lost", "at the source",
    )  # fmt: skip
    rows = []
    for chain, state in part.get("chains", {}).items():
        archived, position = state.get("archived"), state.get("position")
        lag = None if archived is None or position is None else max(0, archived - max(1, position) + 1)
        phase = "stopped" if "stopped" in state else state.get("phase")
        is_bad = phase in ("stopped", "late", "lost", "damaged")
        rows.append([
            chain, _StateText(str(phase), is_bad), archived, position, lag, _duration(state.get("lag_seconds")),
            state.get("hole"), _pairs(state.get("source")),
        ])  # fmt: skip
    if rows:
        yield from _table(columns, rows)


def _leases(parts: Mapping[str, Part]) -> Iterator[str]:
    yield "<h2>Leases</h2>"
    columns = ("part", "owner", "members", "share", "held", "failure")
    rows = [
        [
            name,
            part["owner"],
            part.get("members"),
            part.get("share"),
            ", ".join(map(str, part["held"])),
            part.get("failure"),
        ]
        for name, part in parts.items()
    ]
    yield from _table(columns, rows)


def _other(name: str, part: Part) -> Iterator[str]:
    yield f"<h2>{_text(name)}</h2><p>{_text(_pairs(part))}</p>"


# Coverage, as a picture

IMAGE_WIDTH, BAR_HEIGHT, BAR_GAP, LABEL_WIDTH = 1000, 14, 6, 70  # of the picture, in its own units


def _coverages(coverage: Mapping[str, Part]) -> Iterator[str]:
    yield "<h2>Coverage by level</h2>"
    if not coverage:
        yield "<p class=pale>Not scanned yet: it is scanned while this page is open, at most every five minutes.</p>"
    for chain, found in coverage.items():
        yield f"<h3>{_text(chain)}</h3>"
        yield f"<p>{_text(_coverage_summary(found))}</p>"
        if found.get("levels"):
            yield coverage_svg(found)


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
    levels, first, last = found["levels"], int(found["first"]), int(found["last"])
    height = (BAR_HEIGHT + BAR_GAP) * len(levels)
    lines = [f'<svg viewBox="0 0 {IMAGE_WIDTH} {height + BAR_GAP}" role="img" aria-label="coverage by level">']
    for number, (level, each) in enumerate(sorted(levels.items(), key=lambda item: int(item[0]))):
        y = BAR_GAP + number * (BAR_HEIGHT + BAR_GAP)
        label = f"{format_count(each['segments'], 'segment')}, {size_words(each['bytes'])}"
        lines.append(f'<text x="0" y="{y + BAR_HEIGHT - 3}">level {_text(level)}</text>')
        lines.append(
            f'<rect class="whole" x="{LABEL_WIDTH}" y="{y}" width="{IMAGE_WIDTH - LABEL_WIDTH}" height="{BAR_HEIGHT}"/>'
        )
        lines += [_bar("level", level, each_range, (first, last), y, label) for each_range in each["ranges"]]
        lines += [_bar("hole", level, hole, (first, last), y, "in no level") for hole in found.get("missing", ())]
    return "".join(lines) + "</svg>"


def _bar(kind: str, level: str, rows: Sequence[int], span: tuple[int, int], y: int, label: str) -> str:
    begin, end = int(rows[0]), int(rows[1])
    scale = (IMAGE_WIDTH - LABEL_WIDTH) / (span[1] - span[0] + 1)
    x, width = LABEL_WIDTH + (begin - span[0]) * scale, max(2.0 if kind == "hole" else 0.5, (end - begin + 1) * scale)
    title = f"<title>{begin}..{end}: {_text(label)}</title>"
    place = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{BAR_HEIGHT}"'
    return f'<rect class="{kind}" data-level="{_text(level)}" data-rows="{begin}..{end}" {place}>{title}</rect>'


# Values as text


class _StateText(str):
    """A text, in red if it is bad, else in green."""

    is_bad: bool

    def __new__(cls, text: str, is_bad: bool) -> _StateText:
        made = super().__new__(cls, text)
        made.is_bad = is_bad
        return made


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    kept = [list(row) for row in rows]
    numeric = [any(isinstance(row[i], int | float) for row in kept) for i in range(len(columns))]
    classes = [" class=n" if each else "" for each in numeric]
    yield f"<table><tr>{''.join(f'<th{c}>{_text(name)}</th>' for c, name in zip(classes, columns, strict=True))}</tr>"
    for row in kept:
        yield f"<tr>{''.join(map(_cell, classes, row))}</tr>"
    yield "</table>"


def _cell(kind: str, value: object) -> str:
    text = _text(value)
    if isinstance(value, _StateText):
        text = f"<span class={'bad' if value.is_bad else 'good'}>{text}</span>"
    return f"<td{kind}>{text}</td>"


def _text(value: object) -> str:
    """Escape any value for the page; a dash for nothing."""
    return escape("–" if value is None or value == "" else str(value))


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
