"""The picture of the README: the path of messages as an SVG. `python -m tests.support.picture docs/images/path.svg`

It stands on a light card of its own, so that it reads the same on light and dark pages, and takes nothing from outside.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

WIDTH, HEIGHT = 960, 350
INK, SOFT, LINE, CARD = "#1f2933", "#52606d", "#9aa5b1", "#f7f9fb"
STREAM, OLD, MERGED = "#dbeafe", "#e0f2f1", "#80cbc4"
FONT = "font-family='ui-sans-serif, system-ui, Segoe UI, Helvetica, Arial, sans-serif'"
MONO = "font-family='ui-monospace, SFMono-Regular, Menlo, Consolas, monospace'"


def text(
    x: float, y: float, words: str, *, size: int = 14, fill: str = INK, bold: bool = False, at: str = "start"
) -> str:
    weight = " font-weight='600'" if bold else ""
    return f"<text x='{x}' y='{y}' font-size='{size}' fill='{fill}' text-anchor='{at}'{weight}>{words}</text>"


def command(x: float, y: float, words: str) -> str:
    return f"<text x='{x}' y='{y}' font-size='13' fill='{INK}' text-anchor='middle' {MONO}>{words}</text>"


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str = LINE) -> str:
    return f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='6' fill='{fill}' stroke='{stroke}'/>"


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f"<path d='M{x1} {y1} L{x2} {y2}' stroke='{SOFT}' stroke-width='2' fill='none' marker-end='url(#head)'/>"


def place(x: float, y: float, name: str, stream: str, height: float = 92) -> Iterator[str]:
    """A site or the centre, with its stream in it."""
    yield box(x, y, 170, height, "#ffffff")
    yield text(x + 14, y + 24, name, bold=True)
    yield box(x + 14, y + 38, 142, 40, STREAM)
    yield text(x + 85, y + 63, f"stream {stream}", at="middle", size=13)


def segments(y: float, label: str, ranges: list[tuple[float, float]], fill: str) -> Iterator[str]:
    """One row of a level: each segment a box as wide as its range."""
    yield text(372, y + 16, label, size=12, fill=SOFT)
    for begin, end in ranges:
        yield box(432 + begin, y, end - begin - 4, 24, fill, "#4f8f88")


def picture() -> str:
    """The whole file."""
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}' "
        f"role='img' {FONT} aria-labelledby='title'>",
        "<title id='title'>floe egress freezes the streams of two sites into segments in a bucket, floe compact merges "
        "them, floe ingress melts them into a stream at the centre.</title>",
        f"<defs><marker id='head' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' markerHeight='7' orient='auto'>"
        f"<path d='M0 0 L10 5 L0 10 z' fill='{SOFT}'/></marker></defs>",
        f"<rect x='0.5' y='0.5' width='{WIDTH - 1}' height='{HEIGHT - 1}' rx='12' fill='{CARD}' stroke='{LINE}'/>",
        *place(24, 34, "site us-east", "NODES"),
        *place(24, 158, "site eu-west", "NODES"),
        # The bucket
        box(352, 24, 264, 236, "#ffffff"),
        text(372, 48, "bucket", bold=True),
        text(596, 48, "Parquet, in sequence", size=12, fill=SOFT, at="end"),
        text(372, 76, "us-east/NODES", size=12),
        *segments(84, "level 0", [(104, 130), (130, 156)], OLD),
        *segments(114, "level 1", [(0, 104)], MERGED),
        text(372, 170, "eu-west/NODES", size=12),
        *segments(178, "level 0", [(52, 78), (78, 104), (104, 130)], OLD),
        *segments(208, "level 1", [(0, 52)], MERGED),
        *place(766, 86, "centre", "FLEET"),
        arrow(196, 92, 346, 92),
        arrow(196, 216, 346, 216),
        command(270, 78, "floe egress"),
        text(270, 112, "freezes", size=12, fill=SOFT, at="middle"),
        command(270, 202, "floe egress"),
        text(270, 236, "freezes", size=12, fill=SOFT, at="middle"),
        arrow(618, 142, 760, 142),
        command(689, 128, "floe ingress"),
        text(689, 162, "melts, in order, once", size=12, fill=SOFT, at="middle"),
        command(484, 296, "floe compact"),
        text(484, 315, "merges, proves, then deletes", size=12, fill=SOFT, at="middle"),
        arrow(456, 282, 456, 262),
        arrow(512, 262, 512, 282),
        # Back
        f"<path d='M618 236 L720 236 Q740 236 740 256 L740 310 Q740 330 720 330 L130 330 Q109 330 109 310 L109 256' "
        f"stroke='{LINE}' stroke-width='2' stroke-dasharray='5 5' fill='none' marker-end='url(#head)'/>",
        command(850, 270, "floe replay"),
        text(850, 290, "what was lost comes back", size=12, fill=SOFT, at="middle"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture())
