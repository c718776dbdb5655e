"""Metrics of several processes on one page, in the text format of Prometheus: pure.

The pages are Floe's own, so a line is what prometheus_client writes: `# HELP name …`, `# TYPE name …`, or a
sample `name{labels} value`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Family:
    """The lines of one metric: at most one of each kind of comment, and the samples of all processes."""

    comments: dict[str, str] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)


def merged(own: str, pages: Mapping[str, str]) -> str:
    """The page `own`, and each of `pages` with its key as the label `worker`.

    Every family stands once, with one HELP and one TYPE.
    """
    families: dict[str, _Family] = {}
    _collect(families, own.splitlines(), "")
    for worker, page in pages.items():
        _collect(families, page.splitlines(), worker)
    return "".join(f"{line}\n" for line in _lines(families.values()))


def _collect(families: dict[str, _Family], lines: Iterable[str], worker: str) -> None:
    family = families.setdefault("", _Family())
    for line in lines:
        if line.startswith("# "):
            _, kind, name, *_ = line.split(" ", 3)
            family = families.setdefault(name, _Family())
            family.comments.setdefault(kind, line)
        elif line:
            family.samples.append(labelled(line, worker) if worker else line)


def _lines(families: Iterable[_Family]) -> Iterator[str]:
    for family in families:
        yield from family.comments.values()
        yield from family.samples


def labelled(sample: str, worker: str) -> str:
    """A sample line with the label `worker` before its others."""
    brace, space = sample.find("{"), sample.find(" ")
    if 0 <= brace < space:
        return f'{sample[: brace + 1]}worker="{worker}",{sample[brace + 1 :]}'
    return f'{sample[:space]}{{worker="{worker}"}}{sample[space:]}'
