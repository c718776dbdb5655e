"""Traffic of a fleet by site, feed and hour: the counts, the CSV, and one HTML page with plots.

The page is one file, without scripts or external parts; it contains a strict Content-Security-Policy.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from common.archive.segment import Footer, Reason, SegmentRef
from common.clock import NS_PER_S, format_time
from common.observe.page import STYLE, style_source, templates
from common.sequences import SequenceRange, Stretch
from common.settings.types import duration_words, size_words
from compaction.reports import FEED_FIELDS, METADATA, ArchiveReport, ReportState, as_floe_error
from compaction.run import in_parallel

HOUR, DAY = 3600, 86_400  # seconds
HOUR_NS = HOUR * NS_PER_S

REASONS = tuple(reason.value for reason in Reason)
LEFT_OUT = (Reason.SAMPLED_OUT, Reason.TOO_OLD, Reason.LOOPED)  # of messages that egress had and did not keep
_COUNTS = ("messages", "bytes", "kept", *REASONS, "lag_known", "lag_total_ms")
_HOUR = pa.timestamp("us", tz="UTC")
TRAFFIC: pa.Schema = pa.schema([
    *FEED_FIELDS,
    pa.field("hour", _HOUR),
    *(pa.field(name, pa.int64()) for name in _COUNTS),
    pa.field("lag_max_ms", pa.int64()),
])  # fmt: skip
_KEYS = ["site", "feed", "hour"]


@dataclass(frozen=True, slots=True)
class HourCount:
    """Rows of one stretch with messages that were stored in one hour. `hour`: since 1970; `size`: raw bytes; `first`,
    `last`: sequences; `past_ms`: milliseconds from the beginning of the hour to each row, summed; `earliest_ns`: the
    earliest timestamp.
    """

    hour: int
    rows: int
    size: int
    first: int
    last: int
    past_ms: int
    earliest_ns: int


def missing_by_hour(rows: SequenceRange, hours: Sequence[HourCount], end: int) -> dict[int, int]:
    """Return the number of sequences of `rows` without a row, by hour: each counts in the hour of the next row, after
    the last row in the hour `end`.
    """
    ordered = sorted(hours, key=lambda each: each.last)
    sums, kept, last = [], 0, rows.first - 1
    for each in ordered:
        kept, last = kept + each.rows, max(last, each.last)
        sums.append(last - rows.first + 1 - kept)
    # If timestamps run backwards, hours overlap: a later sum is the better one.
    for index in range(len(sums) - 2, -1, -1):
        sums[index] = min(sums[index], sums[index + 1])
    found, before = dict[int, int](), 0
    for each, total in zip(ordered, sums, strict=True):
        found[each.hour] = found.get(each.hour, 0) + total - before
        before = total
    found[end] = found.get(end, 0) + len(rows) - kept - before
    return {hour: count for hour, count in found.items() if count}


def reasons_by_hour(missing: Mapping[int, int], footer: Footer) -> dict[int, dict[str, int]]:
    """Return the reasons why the sequences that are `missing` in each hour have no row: from the ledger, in proportion
    if it has several. Over a whole segment the sums are those of the ledger.
    """
    left, found = dict[str, int](), dict[int, dict[str, int]]()
    for reason, number in footer.ledger.to_json().items():
        known = reason if reason in REASONS else Reason.UNATTRIBUTED.value
        left[known] = left.get(known, 0) + number
    for hour, count in sorted(missing.items()):
        total, taken = sum(left.values()), dict[str, int]()
        for reason, number in left.items():
            taken[reason] = number * min(count, total) // total if total else 0
        for reason in sorted(left, key=lambda each: left[each] - taken[each], reverse=True):
            more = min(left[reason] - taken[reason], count - sum(taken.values()))
            taken[reason] += more
        rest = count - sum(taken.values())
        for reason, number in taken.items():
            left[reason] -= number
        if rest:
            taken[Reason.UNATTRIBUTED.value] = taken.get(Reason.UNATTRIBUTED.value, 0) + rest
        found[hour] = {reason: number for reason, number in taken.items() if number}
    return found


def hour_rows(stretch: Stretch[SegmentRef], hours: Sequence[HourCount], footer: Footer | None) -> list[dict[str, Any]]:
    """Return the rows of the traffic of one stretch. `footer`: of its segment; None if no sequence lacks a row.

    The lag is known at level 0: its objects are as old as the put that made the messages visible.
    """
    segment, found = stretch.segment, dict[int, dict[str, Any]]()

    def of(hour: int) -> dict[str, Any]:
        empty = {"site": segment.chain.site, "feed": segment.chain.feed, "hour": hour * 3_600_000_000}
        return found.setdefault(hour, {**empty, **dict.fromkeys(_COUNTS, 0), "lag_max_ms": None})

    for each in hours:
        row = of(each.hour)
        row["kept"], row["messages"], row["bytes"] = each.rows, each.rows, each.size
        if segment.level == 0:
            put = int(segment.modified * 1000)
            row["lag_known"] = each.rows
            row["lag_total_ms"] = (put - each.hour * 3_600_000) * each.rows - each.past_ms
            row["lag_max_ms"] = put - each.earliest_ns // 1_000_000
    if footer is not None:
        end = footer.tip.timestamp_ns // HOUR_NS if footer.tip else int(segment.modified) // 3600
        if hours and (footer.tip is None or stretch.rows.last != footer.coverage.last):
            end = max(each.hour for each in hours)
        for hour, reasons in reasons_by_hour(missing_by_hour(stretch.rows, hours, end), footer).items():
            row = of(hour)
            for reason, count in reasons.items():
                row[reason] += count
                row["messages"] += count if reason in LEFT_OUT else 0
    return list(found.values())


class TrafficReport(ArchiveReport):
    """Per site, feed and hour: messages, bytes, kept messages, the reasons for the others, and the lag."""

    name, is_finest = "traffic", True

    def _write(self, path: Path, former: Path | None, part: Sequence[Stretch[SegmentRef]], state: ReportState) -> None:
        rows = [row for row in self._hours(part) if state.since is None or row["hour"] * 1000 >= state.since]
        tables = [pa.Table.from_pylist(rows, TRAFFIC)]
        if former is not None:
            tables.append(pq.read_table(former, columns=TRAFFIC.names).cast(TRAFFIC))
        sums: list[Any] = [(name, "sum") for name in _COUNTS]
        grouped = pa.concat_tables(tables).group_by(_KEYS).aggregate([*sums, ("lag_max_ms", "max")])
        whole = grouped.select([*_KEYS, *(f"{n}_sum" for n in _COUNTS), "lag_max_ms_max"]).rename_columns(TRAFFIC.names)
        ordered = whole.cast(TRAFFIC).sort_by([(name, "ascending") for name in _KEYS])
        pq.write_table(ordered.replace_schema_metadata({METADATA: state.to_json()}), path, compression="zstd")

    def table(self) -> pa.Table:
        """Return all of the report."""
        path = self.store.new_spool()
        try:
            return pq.read_table(path).cast(TRAFFIC) if self.place.get(self.file, path) else TRAFFIC.empty_table()
        finally:
            path.unlink(missing_ok=True)

    def _hours(self, part: Sequence[Stretch[SegmentRef]]) -> Iterator[dict[str, Any]]:
        if not part:
            return
        found: dict[int, list[HourCount]] = {}
        for number, *numbers in self._counted(part):
            found.setdefault(number, []).append(HourCount(*numbers))
        lacking = [n for n, s in enumerate(part) if sum(each.rows for each in found.get(n, ())) < len(s.rows)]
        footers = dict(zip(lacking, in_parallel(self.store.footer, (part[n].segment for n in lacking)), strict=True))
        for number, stretch in enumerate(part):
            yield from hour_rows(stretch, found.get(number, []), footers.get(number))

    def _counted(self, part: Sequence[Stretch[SegmentRef]]) -> list[Any]:
        columns = ("segment", "sequence", "timestamp_ns", "subject", "subject_raw", "headers", "payload")
        try:
            frame = self._frame(part, columns)
            from pyspark.sql import functions as f

            subject = f.coalesce(f.octet_length("subject_raw"), f.octet_length("subject"))
            size = subject + f.coalesce(f.octet_length("headers"), f.lit(0)) + f.octet_length("payload")
            hour = f.expr(f"timestamp_ns div {HOUR_NS}")
            grouped = frame.groupBy("segment", hour.alias("hour")).agg(
                f.count(f.lit(1)),
                f.sum(size),
                f.min("sequence"),
                f.max("sequence"),
                f.sum(f.expr(f"(timestamp_ns % {HOUR_NS}) div 1000000")),
                f.min("timestamp_ns"),
            )
            return list(grouped.collect())
        except Exception as error:  # Spark raises its own, py4j's and the source's errors
            raise as_floe_error("report traffic", error) from error


# Page and spreadsheet

PAGE_PERIOD_NS = 30 * DAY * NS_PER_S  # on the page without --since
MAX_BARS = 24 * 14  # of a plot; for a longer time a bar is a day
MAX_PLOTS = 200  # feeds with a plot, those with most messages; all are in the table

TrafficRow = Mapping[str, Any]


def select_hours(table: pa.Table, since: int | None, until: int | None) -> pa.Table:
    """Return the hours that begin at `since` or later and before `until`, ns since 1970."""
    for bound, keeps in ((since, pc.greater_equal), (until, pc.less)):
        if bound is not None:
            moment = pa.scalar(bound // 1000, pa.int64()).cast(table.schema.field("hour").type)
            table = table.filter(keeps(table["hour"], moment))
    return table


def write_csv(table: pa.Table, file: TextIO) -> None:
    """Write a header, then a line for each row; hours as RFC 3339 in UTC, an empty cell for an unknown value.

    Text that a spreadsheet would take for a formula begins with an apostrophe.
    """
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(table.schema.names)
    for batch in table.to_batches(10_000):
        hours: list[Any] = batch.column("hour").cast(pa.int64()).to_pylist()
        columns = [[_as_cell(each) for each in batch.column(name).to_pylist()] for name in batch.schema.names]
        columns[batch.schema.get_field_index("hour")] = [format_time(hour * 1000) for hour in hours]
        writer.writerows(zip(*columns, strict=True))


def _as_cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def render_page(table: pa.Table, since: int | None, until: int | None, made: float) -> bytes:
    """Return the page of `table`, for the hours from `since` (None: its last 30 days) up to `until`. `made`: now."""
    if since is None and table.num_rows:
        newest: Any = pc.max(table["hour"]).cast(pa.int64()).as_py()
        since = newest * 1000 + HOUR * NS_PER_S - PAGE_PERIOD_NS
    rows = select_hours(table, since, until).to_pylist()
    for row in rows:
        row["hour"] = int(row["hour"].timestamp())
    feeds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        feeds.setdefault((row["site"], row["feed"]), []).append(row)
    hours = [row["hour"] for row in rows]
    begin, end = min(hours, default=0), max(hours, default=0) + HOUR
    period = f"{_time(begin)} to {_time(end)}" if rows else "no messages"
    drawn = sorted(feeds, key=lambda feed: -sum(row["messages"] for row in feeds[feed]))[:MAX_PLOTS]
    text = (
        templates(Path(__file__).parent)
        .get_template("traffic.html")
        .render(
            style=STYLE + _STYLE,
            style_source=style_source(STYLE + _STYLE),
            period=period,
            made=_time(int(made)),
            columns=_COLUMNS,
            rows=[_row(feed, feeds[feed]) for feed in sorted(feeds)],
            feeds=[("/".join(feed), [*_plots(feeds[feed], begin, end)]) for feed in sorted(drawn)],
            omitted=len(drawn) < len(feeds),
            width=WIDTH,
            height=HEIGHT,
            left=LEFT,
            above=ABOVE,
            below=BELOW,
        )
    )
    return text.encode("utf-8", "backslashreplace")


_STYLE = """
svg .kept { fill: var(--ice); } svg .left { fill: var(--line); } svg .lag { fill: none; stroke: var(--bad); }
svg .axis { stroke: var(--line); } h3 { margin-top: 1.6rem; }
"""

_GONE_REASONS = ("gone_before_read", "gone_from_hole", "lost")
_COLUMNS = (
    "site",
    "feed",
    "messages",
    "kept",
    "sampled out",
    "too old",
    "looped",
    "gone",
    "bytes",
    "mean lag",
    "greatest lag",
)


def _row(feed: tuple[str, str], rows: Sequence[TrafficRow]) -> list[str]:
    sums = [f"{sum(row[n] for row in rows):,}" for n in ("messages", "kept", "sampled_out", "too_old", "looped")]
    gone = sum(row[name] for row in rows for name in _GONE_REASONS)
    lags = ("–" if each is None else duration_words(max(0.0, each)) for each in _lag(rows))
    return [*feed, *sums, f"{gone:,}", size_words(sum(row["bytes"] for row in rows)), *lags]


def _lag(rows: Iterable[TrafficRow]) -> tuple[float | None, float | None]:
    """Return the mean and the greatest lag in seconds; None if none is known."""
    known = [row for row in rows if row["lag_known"]]
    if not known:
        return None, None
    mean = sum(row["lag_total_ms"] for row in known) / sum(row["lag_known"] for row in known)
    return mean / 1000, max(row["lag_max_ms"] for row in known) / 1000


# Plots

WIDTH, HEIGHT, LEFT, ABOVE, BELOW = 1000, 110, 70, 14, 16  # in units of the picture


def _plots(rows: Sequence[TrafficRow], begin: int, end: int) -> Iterator[dict[str, object]]:
    step = HOUR if (end - begin) // HOUR <= MAX_BARS else DAY
    begin -= begin % step
    bars = -(-(end - begin) // step)
    held: dict[int, list[TrafficRow]] = {}
    for row in rows:
        held.setdefault((row["hour"] - begin) // step, []).append(row)
    sums = {at: (sum(r["messages"] for r in some), sum(r["kept"] for r in some)) for at, some in held.items()}
    lags = {at: most for at, some in held.items() if (most := _lag(some)[1]) is not None}
    most = max((messages for messages, _ in sums.values()), default=0)
    name = f"messages {'an hour' if step == HOUR else 'a day'}"
    span = {"begin": _time(begin), "end": _time(begin + bars * step)}
    both = _columns({at: messages for at, (messages, _) in sums.items()}, most, bars)
    kept = _columns({at: kept for at, (_, kept) in sums.items()}, most, bars)
    title = f"{name}: kept, and above them left out; at most {most:,}"
    yield {"title": title, "most": f"{most:,}", "paths": [("left", both), ("kept", kept)], **span}
    if lags:
        top = max(*lags.values(), 1.0)
        label = duration_words(top)
        title = f"greatest lag; at most {label}"
        yield {"title": title, "most": label, "paths": [("lag", _line(lags, top, bars))], **span}


def _columns(values: Mapping[int, int], most: int, bars: int) -> str:
    """Return one path for all columns: a page of many feeds stays small."""
    width = (WIDTH - LEFT) / bars
    return "".join(
        f"M{LEFT + at * width:.1f} {ABOVE + HEIGHT}v{-HEIGHT * value / most:.1f}h{width * 0.9:.1f}V{ABOVE + HEIGHT}z"
        for at, value in sorted(values.items())
        if value
    )


def _line(values: Mapping[int, float], most: float, bars: int) -> str:
    """Return the path of the lags, with a break if no lag is known."""
    width, path = (WIDTH - LEFT) / bars, ""
    for at, value in sorted(values.items()):
        x, y = LEFT + at * width, ABOVE + HEIGHT * (1 - min(max(value, 0.0) / most, 1.0))
        path += f"{'L' if at - 1 in values else 'M'}{x:.1f} {y:.1f}h{width:.1f}"
    return path


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
