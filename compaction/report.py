"""Report of a run, done or previewed, as rows of a table and as JSON with stable fields."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from common.archive.captures import CaptureRef
from common.archive.checks import ForeignKeys
from common.archive.documents import SnapshotRef
from common.archive.keys import SegmentName
from common.archive.segment import SegmentRef
from common.metrics import gauge
from common.settings.types import format_count, size_words
from compaction.plan import Output
from compaction.retention import RetentionReport
from compaction.run import ChainSurvey, RunReport
from compaction.verify import ChainReport, LevelReport

Ref = TypeVar("Ref", SegmentRef, SnapshotRef, CaptureRef)

RUN_COLUMNS = ("action", "chain", "level", "sequences", "segments", "bytes", "into")
VERIFY_COLUMNS = ("chain", "coverage", "segments", "bytes", "overlapping", "accepted", "problems", "findings")


def report_rows(report: RunReport) -> list[list[object]]:
    retained = report.retention
    rows: list[list[object]] = []
    for (chain, level), count, size in _sum_by(retained.expired, lambda s: (s.chain, s.level)):
        floor = retained.floors.get(chain)
        rows.append(["expired", chain, level, f"before {floor}" if floor else None, count, size, None])
    for chain, count, size in _sum_by(retained.captures, lambda c: c.chain):
        rows.append(["expired", chain, None, format_count(count, "capture"), None, size, None])
    rows += [["held", h.chain, None, f"from {h.first}", None, h.size, f"for {h.target}"] for h in retained.holds]
    rows += [["merged", m.ref.chain, m.ref.level, m.ref.coverage, m.inputs, m.size, m.ref.size] for m in report.merged]
    for (chain, level), count, size in _sum_by(report.deleted, lambda s: (s.chain, s.level)):
        rows.append(["deleted", chain, level, None, count, size, None])
    # A snapshot has no level and is not a segment.
    for chain, count, size in _sum_by(report.pruned, lambda s: s.chain):
        rows.append(["pruned", chain, None, format_count(count, "snapshot"), None, size, None])
    return rows


def totals(report: RunReport) -> dict[str, int]:
    """Return the totals of the run, for the line at its end and its metrics."""
    return {
        "merged": len(report.merged),
        "rows": sum(each.rows for each in report.merged),
        "bytes": sum(each.size for each in report.merged),
        "stored_bytes": sum(each.ref.size for each in report.merged),
        "deleted": len(report.deleted),
        "expired": len(report.retention.expired),
        "pruned": len(report.pruned),
        "failures": len(report.failures),
    }


def report_json(report: RunReport) -> dict[str, Any]:
    return {
        "merged": [
            _output_json(m.ref.segment, m.inputs, m.size)
            | _segment_json(m.ref)
            | {"rows": m.rows, "raw_bytes": m.raw_bytes}
            for m in report.merged
        ],
        "tombstones": report.tombstones,
        "deleted": [_segment_json(s) for s in report.deleted],
        "pruned": [_segment_json(s) for s in report.pruned],
        "retention": retention_json(report.retention),
        "failures": [
            {
                "what": f.work,
                "error": f.line,
                "exit_code": f.exit_code,
                "damaged": sorted(f.damaged),
                "is_new": f not in report.known_failures,
            }
            for f in report.failures
        ],
    }


def retention_json(retained: RetentionReport) -> dict[str, Any]:
    return {
        "expired": [_segment_json(s) for s in retained.expired],
        "captures": [_segment_json(c) for c in retained.captures],
        "floors": [{**chain.log_context(), "floor": floor} for chain, floor in sorted(retained.floors.items())],
        "held": [
            {
                **each.chain.log_context(),
                "target": each.target,
                "first": each.first,
                "bytes": each.size,
                "why": each.reason,
            }
            for each in retained.holds
        ],
    }


def retention_preview_rows(retained: RetentionReport) -> list[list[object]]:
    rows: list[list[object]] = [
        ["expire", s.key, s.size, f"floor {retained.floors[s.chain]}" if s.chain in retained.floors else None]
        for s in retained.expired
    ]
    rows += [["expire", c.key, c.size, None] for c in retained.captures]
    return rows + [["hold", f"{h.chain} from {h.first}", h.size, f"for {h.target}"] for h in retained.holds]


def preview_rows(surveys: Sequence[ChainSurvey]) -> list[list[object]]:
    rows: list[list[object]] = []
    for survey in surveys:
        for output in survey.outputs:
            rows += [["merge", s.key, s.size, f"level {output.level} {output.coverage}"] for s in output.inputs]
        rows += [["delete", s.key, s.size, None] for s in survey.deletable]
        rows += [["delete", s.key, s.size, None] for s in survey.snapshots]
    for survey in surveys:
        for (low, level), outputs in _by_level(survey.outputs):
            segments = format_count(sum(len(o.inputs) for o in outputs), "segment")
            into = f"{segments} into {len(outputs)} of level {level}"
            rows.append(["due", f"{survey.chain} level {low}", sum(o.size for o in outputs), into])
    return rows


def preview_total(surveys: Sequence[ChainSurvey], retained: RetentionReport) -> list[object]:
    """Return the last row: the bytes to read, and the segments that go or expire."""
    sums = _preview_totals(surveys, retained)
    merges = f"{format_count(sums['outputs'], 'merge')} of {format_count(sums['segments'], 'segment')}"
    merges = merges if sums["outputs"] else "no merge"
    others = (("deletable", "to delete", "to delete"), ("expired", "expires", "expire"))
    texts = [
        f"{format_count(count, 'segment')}, {size_words(sums[f'{name}_bytes'])} {one if count == 1 else many}"
        for name, one, many in others
        if (count := sums[name])
    ]
    return ["total", format_count(len(surveys), "chain"), sums["bytes"], "; ".join([merges, *texts])]


def _preview_totals(surveys: Sequence[ChainSurvey], retained: RetentionReport) -> dict[str, int]:
    outputs = [output for survey in surveys for output in survey.outputs]
    deletable = [segment for survey in surveys for segment in survey.deletable]
    return {
        "outputs": len(outputs),
        "segments": sum(len(output.inputs) for output in outputs),
        "bytes": sum(output.size for output in outputs),
        "deletable": len(deletable),
        "deletable_bytes": sum(segment.size for segment in deletable),
        "expired": len(retained.expired),
        "expired_bytes": retained.expired.size,
    }


def _by_level(outputs: Iterable[Output]) -> list[tuple[tuple[int, int], list[Output]]]:
    """Return the outputs by the level that is read and the one that is written."""
    found: defaultdict[tuple[int, int], list[Output]] = defaultdict(list)
    for output in outputs:
        found[output.inputs[0].level, output.level].append(output)
    return sorted(found.items())


def idle_line(report: RunReport) -> str:
    """Return the line of a run that had nothing to do."""
    if not report.chain_count:
        return "nothing to do: the archive holds no such chain"
    if not report.level_count:
        return "nothing to do: no entry of compaction.levels reads that level"
    return f"nothing to do: no segment of {format_count(report.chain_count, 'chain')} is due"


PREVIEW_COLUMNS = ("action", "key", "bytes", "into")


def preview_json(surveys: Sequence[ChainSurvey], retained: RetentionReport) -> dict[str, Any]:
    return {
        "outputs": [
            {**_output_json(o, len(o.inputs), o.size), "inputs": [_segment_json(s) for s in o.inputs]}
            for survey in surveys
            for o in survey.outputs
        ],
        "unproved": sum(len(supersession.superseded) for s in surveys for supersession in s.unproved),
        "deletable": [_segment_json(s) for survey in surveys for s in survey.deletable],
        "outdated": [_segment_json(s) for survey in surveys for s in survey.snapshots],
        "totals": _preview_totals(surveys, retained),
        "retention": retention_json(retained),
    }


def verify_row(report: ChainReport) -> list[object]:
    return [
        report.chain,
        report.coverage,
        _counts(report.segments),
        report.size,
        report.overlapping,
        " ".join(map(str, report.accepted)) or None,
        len(report.problems),
        _counts(report.findings()),
    ]


def verify_total(reports: Sequence[ChainReport], foreign: ForeignKeys) -> list[object]:
    """Return the sums of the rows of all chains, and the count of all foreign keys."""
    segments, findings = Counter[int](), Counter[str]()
    for report in reports:
        segments.update(report.segments)
        findings.update(report.findings())
    findings["foreign"] = foreign.count
    size, overlapping = sum(each.size for each in reports), sum(each.overlapping for each in reports)
    problems = sum(len(each.problems) for each in reports)
    levels = _counts(dict(sorted(segments.items())))
    return ["total", None, levels, size, overlapping, None, problems, _counts(findings)]


def _counts(counts: Mapping[Any, int]) -> str | None:
    """Return the counts that are not 0, in their order, by name; None without any."""
    return " ".join(f"{name}:{count}" for name, count in counts.items() if count) or None


def verify_line(reports: Sequence[ChainReport], *, deep: bool) -> str:
    """Return the last line of `floe segments verify`: the amount that was read, and the number of problems."""
    segments = sum(count for each in reports for count in each.segments.values())
    read = f"{format_count(segments, 'segment')} of {format_count(len(reports), 'chain')}"
    rows, size = sum(each.rows for each in reports), sum(each.size for each in reports)
    how = "every row was read" if deep else "checksums and footers; --deep reads every row"
    problems = sum(len(each.problems) for each in reports)
    well = format_count(problems, "problem") if problems else "all is well"
    return f"{well}: {read}, {format_count(rows, 'row')}, {size_words(size)} ({how})"


def verify_json(report: ChainReport) -> dict[str, Any]:
    coverage = report.coverage
    return {
        **report.chain.log_context(),
        "first": coverage and coverage.first,
        "last": coverage and coverage.last,
        "segments": {str(level): count for level, count in report.segments.items()},
        "size": report.size,
        "rows": report.rows,
        "overlapping": report.overlapping,
        "accepted": [{"first": hole.first, "last": hole.last} for hole in report.accepted],
        "problems": [
            {
                "kind": p.kind,
                "text": p.text,
                "hint": p.hint,
                "finding": p.finding,
                "first": p.rows and p.rows.first,
                "last": p.rows and p.rows.last,
            }
            for p in report.problems
        ],
        "levels": {str(level): _level_json(found) for level, found in report.levels.items()},
        "findings": report.findings(),
    }


def _level_json(level: LevelReport) -> dict[str, int]:
    """Return one level as JSON. `holes`: of the level alone; other levels may cover them."""
    stretches = level.covered.stretches()
    bounds = {"first": stretches[0].first, "last": stretches[-1].last, "holes": len(stretches) - 1}
    return {"segments": level.segments, "size": level.size, **bounds}


def foreign_json(foreign: ForeignKeys) -> list[dict[str, Any]]:
    nobody: dict[str, Any] = dict.fromkeys(("site", "feed", "incarnation", "partition"))
    counts = {"foreign": foreign.count, "keys": foreign.keys, "problems": []}
    return [{**nobody, **counts}] if foreign.count else []


def _sum_by(objects: Iterable[Ref], group_of: Callable[[Ref], Any]) -> list[tuple[Any, int, int]]:
    counts: Counter[Any] = Counter()
    sizes: Counter[Any] = Counter()
    for each in objects:
        counts[group_of(each)] += 1
        sizes[group_of(each)] += each.size
    return [(group, count, sizes[group]) for group, count in sorted(counts.items())]


def _output_json(made: SegmentName | Output, inputs: int, size: int) -> dict[str, Any]:
    return {
        **made.chain.log_context(),
        "level": made.level,
        "first": made.coverage.first,
        "last": made.coverage.last,
        "input_count": inputs,
        "input_bytes": size,
    }


def _segment_json(segment: SegmentRef | SnapshotRef | CaptureRef) -> dict[str, Any]:
    return {"key": segment.key, "size": segment.size}


# For node_exporter's textfile collector: a run ends before a scrape could reach it

_DONE = "compaction_last_success_timestamp_seconds"

last_run = gauge("compaction_last_run_timestamp_seconds", "When the last run ended, since 1970.")
last_success = gauge(_DONE, "When a run last ended with exit code 0, since 1970; 0: none since the file was made.")
duration = gauge("compaction_duration_seconds", "How long the last run took.")
merged_segments = gauge("compaction_merged_segments", "Segments that the last run merged.")
output_segments = gauge("compaction_output_segments", "Segments that the last run wrote.")
merged_rows = gauge("compaction_merged_rows", "Messages in the segments that the last run wrote.")
read_bytes = gauge("compaction_read_bytes", "Stored bytes of the segments that the last run merged.")
written_bytes = gauge("compaction_written_bytes", "Stored bytes of the segments that the last run wrote.")
deleted_segments = gauge("compaction_deleted_segments", "Merged segments that the last run deleted.")
deleted_bytes = gauge("compaction_deleted_bytes", "Stored bytes of merged segments that the last run deleted.")
expired_segments = gauge("compaction_expired_segments", "Segments that retention deleted in the last run.")
expired_bytes = gauge("compaction_expired_bytes", "Stored bytes that retention deleted in the last run.")
held_bytes = gauge(
    "compaction_retention_held_bytes", "Stored bytes that retention would delete but a target still needs.", ("target",)
)
failed = gauge("compaction_failures", "Problems of the last run, reported before or not; 1 if the run was aborted.")


def show_metrics(report: RunReport | None, seconds: float, now: float, *, is_success: bool) -> None:
    """Set the metrics of a run that took `seconds` and ended at `now`; `report` None: it was aborted."""
    done = report or RunReport()
    sums = totals(done)
    last_run.set(now)
    duration.set(seconds)
    if is_success:
        last_success.set(now)
    merged_segments.set(sum(each.inputs for each in done.merged))
    output_segments.set(sums["merged"])
    merged_rows.set(sums["rows"])
    read_bytes.set(sums["bytes"])
    written_bytes.set(sums["stored_bytes"])
    deleted_segments.set(sums["deleted"])
    deleted_bytes.set(done.deleted.size)
    expired_segments.set(sums["expired"])
    expired_bytes.set(done.retention.expired.size)
    held_bytes.clear()
    for each in done.retention.holds:
        held_bytes.labels(each.target).inc(each.size)
    failed.set(1 if report is None else sums["failures"])


def read_last_success(path: Path) -> float:
    """Return the time of the last success, from the file of the run before; 0.0 if there is none."""
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines() if path.is_file() else ():  # a device may have no end
            name, _, value = line.partition(" ")
            if name == f"floe_{_DONE}":
                return float(value)
    return 0.0
