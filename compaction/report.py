"""Report of a run, done or previewed, as rows of a table and as JSON with stable fields."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import click
from prometheus_client import write_to_textfile

from common.chain import Chain
from common.cli import print_json
from common.clock import NS_PER_S, format_time
from common.exits import end_with
from common.metrics import REGISTRY, gauge
from common.segments.captures import CaptureRef
from common.segments.checks import Foreign
from common.segments.documents import SnapshotRef
from common.segments.keys import SegmentName
from common.segments.segment import SegmentRef
from common.settings import loader
from common.settings.root import Settings
from common.settings.types import counted, duration_words, format_duration, size_words
from compaction.plan import Output, Waiting
from compaction.retention import RetentionReport
from compaction.run import ChainSurvey, Report
from compaction.sign_off import SignOff
from compaction.spark import Spark
from compaction.verify import FINDINGS, ChainReport, LevelReport

Ref = TypeVar("Ref", SegmentRef, SnapshotRef, CaptureRef)

COLUMNS = ("action", "chain", "level", "sequences", "segments", "bytes", "into")
VERIFY_COLUMNS = (
    "chain",
    "coverage",
    "segments",
    "bytes",
    "overlapping",
    "accepted",
    "problems",
    "findings",
    "signed_off",
)


def report_rows(report: Report) -> list[list[object]]:
    retained = report.retained
    rows: list[list[object]] = []
    for (chain, level), count, size in _added_up(retained.expired, lambda s: (s.chain, s.level)):
        floor = retained.floors.get(chain)
        rows.append(["expired", chain, level, f"before {floor}" if floor else None, count, size, None])
    for chain, count, size in _added_up(retained.captures, lambda c: c.chain):
        rows.append(["expired", chain, None, counted(count, "capture"), None, size, None])
    rows += [["held", h.chain, None, f"from {h.first}", None, h.size, f"for {h.target}"] for h in retained.held]
    rows += [["merged", m.ref.chain, m.ref.level, m.ref.coverage, m.inputs, m.size, m.ref.size] for m in report.merged]
    for (chain, level), count, size in _added_up(report.deleted, lambda s: (s.chain, s.level)):
        rows.append(["deleted", chain, level, None, count, size, None])
    # A snapshot has no level and is not a segment.
    for chain, count, size in _added_up(report.pruned, lambda s: s.chain):
        rows.append(["pruned", chain, None, counted(count, "snapshot"), None, size, None])
    return rows


def totals(report: Report) -> dict[str, int]:
    """Return the totals of the run, for the line at its end."""
    return {
        "merged": len(report.merged),
        "rows": sum(each.rows for each in report.merged),
        "bytes": sum(each.size for each in report.merged),
        "stored_bytes": sum(each.ref.size for each in report.merged),
        "deleted": len(report.deleted),
        "expired": len(report.retained.expired),
        "pruned": len(report.pruned),
        "failures": len(report.failures),
    }


def report_json(report: Report) -> dict[str, Any]:
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
        "waiting": [_waiting_json(each) for each in report.waiting.values()],
        "retention": retention_json(report.retained),
        "failures": [
            {
                "what": f.what,
                "error": f.line,
                "exit_code": f.exit_code,
                "damaged": sorted(f.damaged),
                "is_new": f not in report.told,
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
                "why": each.why,
            }
            for each in retained.held
        ],
    }


def retention_preview_rows(retained: RetentionReport) -> list[list[object]]:
    rows: list[list[object]] = [
        ["expire", s.key, s.size, f"floor {retained.floors[s.chain]}" if s.chain in retained.floors else None]
        for s in retained.expired
    ]
    rows += [["expire", c.key, c.size, None] for c in retained.captures]
    return rows + [["hold", f"{h.chain} from {h.first}", h.size, f"for {h.target}"] for h in retained.held]


def preview_rows(surveys: Sequence[ChainSurvey]) -> list[list[object]]:
    rows: list[list[object]] = []
    for survey in surveys:
        for output in survey.outputs:
            rows += [["merge", s.key, s.size, f"level {output.level} {output.coverage}"] for s in output.inputs]
        rows += [["delete", s.key, s.size, None] for s in survey.going]
        rows += [["delete", s.key, s.size, None] for s in survey.outdated]
    for survey in surveys:
        for (low, level), outputs in _by_level(survey.outputs):
            segments = counted(sum(len(o.inputs) for o in outputs), "segment")
            into = f"{segments} into {len(outputs)} of level {level}"
            rows.append(["due", f"{survey.chain} level {low}", sum(o.size for o in outputs), into])
        for each in survey.waiting:
            if each.segments:
                rows.append(["wait", f"{each.chain} level {each.policy.from_}", each.size, waiting_words(each)])
    return rows


def preview_total(surveys: Sequence[ChainSurvey], retained: RetentionReport) -> list[object]:
    """Return the last row: the bytes to read, and the segments that wait, go or expire."""
    sums = _preview_totals(surveys, retained)
    merges = f"{counted(sums['outputs'], 'merge')} of {counted(sums['segments'], 'segment')}"
    merges = merges if sums["outputs"] else "no merge"
    others = (("waiting", "waits", "wait"), ("deletable", "goes", "go"), ("expired", "expires", "expire"))
    said = [
        f"{counted(count, 'segment')}, {size_words(sums[f'{name}_bytes'])} {one if count == 1 else many}"
        for name, one, many in others
        if (count := sums[name])
    ]
    return ["total", counted(len(surveys), "chain"), sums["bytes"], "; ".join([merges, *said])]


def _preview_totals(surveys: Sequence[ChainSurvey], retained: RetentionReport) -> dict[str, int]:
    outputs = [output for survey in surveys for output in survey.outputs]
    waiting = [each for survey in surveys for each in survey.waiting]
    going = [segment for survey in surveys for segment in survey.going]
    return {
        "outputs": len(outputs),
        "segments": sum(len(output.inputs) for output in outputs),
        "bytes": sum(output.size for output in outputs),
        "waiting": sum(each.segments for each in waiting),
        "waiting_bytes": sum(each.size for each in waiting),
        "deletable": len(going),
        "deletable_bytes": sum(segment.size for segment in going),
        "expired": len(retained.expired),
        "expired_bytes": sum(map(retained.expired.size_of, range(len(retained.expired)))),
    }


def _by_level(outputs: Iterable[Output]) -> list[tuple[tuple[int, int], list[Output]]]:
    """Return the outputs by the level that is read and the one that is written."""
    found: defaultdict[tuple[int, int], list[Output]] = defaultdict(list)
    for output in outputs:
        found[output.inputs[0].level, output.level].append(output)
    return sorted(found.items())


def waiting_words(waiting: Waiting) -> str:
    """Return the reasons why it is not merged yet, by policy key, and the time to a merge if nothing else arrives."""
    policy, (at, key) = waiting.policy, waiting.next_merge()
    said = []
    if waiting.small:
        where = "with" if waiting.runs == 1 else f"in {waiting.runs:,} runs, the largest with"
        limit = f"{size_words(waiting.largest)} of {size_words(policy.min_size)} (min_size)"
        said.append(f"{waiting.small:,} {where} {limit}")
    if waiting.few:
        said.append(f"{waiting.few:,} with fewer than {policy.min_count} beside each other (min_count)")
    if waiting.young:
        left = duration_words(waiting.old_at - waiting.now)
        limit = f"younger than {format_duration(policy.min_age)} (min_age)"
        said.append(f"{waiting.young:,} {limit}, the first for {left} more")
    when = f"next merge in {duration_words(at - waiting.now)} ({key})" if key else "no merge before others come"
    return f"{counted(waiting.segments, 'segment')}: {'; '.join([*said, when])}"


MOST_REASONS = 10  # lines of reasons why nothing was done


def nothing_done(report: Report) -> list[str]:
    """Return the reasons why a run that did nothing had nothing to do, in lines."""
    waiting, (chains, levels) = list(report.waiting.values()), report.looked_at
    why = "no entry of compaction.levels reads that level" if chains else "the archive holds no such chain"
    if not (chains and levels):
        return [f"nothing to do: {why}"]
    if not waiting:
        return [f"nothing to do: of {counted(chains, 'chain')} no segment is left to merge"]
    count = counted(sum(each.segments for each in waiting), "segment")
    lines = [f"{each.chain} level {each.policy.from_}: {waiting_words(each)}" for each in waiting[:MOST_REASONS]]
    more = [f"… and {len(waiting) - MOST_REASONS:,} more: --dry-run lists them"] * (len(waiting) > MOST_REASONS)
    return [f"nothing to do yet: {count} of {counted(chains, 'chain')} left as they are", *lines, *more]


def _waiting_json(waiting: Waiting) -> dict[str, Any]:
    (at, key), policy = waiting.next_merge(), waiting.policy
    return {
        **waiting.chain.log_context(),
        "level": policy.from_,
        "segments": waiting.segments,
        "bytes": waiting.size,
        "small": {
            "segments": waiting.small,
            "bytes": waiting.small_bytes,
            "runs": waiting.runs,
            "largest": waiting.largest,
            "min_size": policy.min_size,
            "too_few": waiting.few,
            "min_count": policy.min_count,
        },
        "young": {
            "segments": waiting.young,
            "bytes": waiting.young_bytes,
            "min_age": policy.min_age,
            "seconds": _seconds(waiting.old_at - waiting.now),
        },
        "next_merge": {"seconds": _seconds(at - waiting.now), "key": key or None},
    }


def _seconds(wait: float) -> int | None:
    """Return whole seconds after which the wait is over for certain; None: never."""
    return None if wait == math.inf else math.floor(wait) + 1


PREVIEW_COLUMNS = ("action", "key", "bytes", "into")


def preview_json(surveys: Sequence[ChainSurvey], retained: RetentionReport) -> dict[str, Any]:
    return {
        "outputs": [
            {**_output_json(o, len(o.inputs), o.size), "inputs": [_segment_json(s) for s in o.inputs]}
            for survey in surveys
            for o in survey.outputs
        ],
        "unproved": sum(len(supersession.superseded) for s in surveys for supersession in s.leftovers),
        "deletable": [_segment_json(s) for survey in surveys for s in survey.going],
        "outdated": [_segment_json(s) for survey in surveys for s in survey.outdated],
        "waiting": [_waiting_json(each) for survey in surveys for each in survey.waiting if each.segments],
        "totals": _preview_totals(surveys, retained),
        "retention": retention_json(retained),
    }


def verify_row(report: ChainReport) -> list[object]:
    return [
        report.chain,
        report.coverage,
        " ".join(f"{level}:{count}" for level, count in report.segments.items()) or None,
        report.size,
        report.overlapping,
        " ".join(map(str, report.accepted)) or None,
        len(report.problems),
        _findings(report.findings()),
        _signed_off(report.former),
    ]


def verify_total(reports: Sequence[ChainReport], foreign: Foreign) -> list[object]:
    """Return the sums of the rows of all chains, and the count of all foreign keys."""
    segments, findings = Counter[int](), Counter[str]()
    for report in reports:
        segments.update(report.segments)
        findings.update(report.findings())
    findings["foreign"] = foreign.count
    levels = " ".join(f"{level}:{count}" for level, count in sorted(segments.items())) or None
    size, overlapping = sum(each.size for each in reports), sum(each.overlapping for each in reports)
    problems = sum(len(each.problems) for each in reports)
    return ["total", None, levels, size, overlapping, None, problems, _findings(findings), None]


def _findings(counts: Mapping[str, int]) -> str | None:
    return " ".join(f"{finding}:{counts[finding]}" for finding in FINDINGS if counts[finding]) or None


def _signed_off(former: SignOff | None) -> str | None:
    if former is None or not former.marks:
        return None
    return f"up to {former.end} on {format_time(int(former.at) * NS_PER_S)}"


def verify_line(reports: Sequence[ChainReport], *, deep: bool) -> str:
    """Return the last line of `floe segments verify`: the amount that was read, and the number of problems."""
    segments = sum(count for each in reports for count in each.segments.values())
    read = f"{counted(segments, 'segment')} of {counted(len(reports), 'chain')}"
    rows, size = sum(each.rows for each in reports), sum(each.size for each in reports)
    skipped = sum(each.skipped for each in reports)
    but = f", but for {counted(skipped, 'segment')} that earlier runs signed off" if skipped else ""
    how = f"every row was read{but}" if deep else f"checksums and footers{but}; --deep reads every row"
    problems = sum(len(each.problems) for each in reports)
    well = counted(problems, "problem") if problems else "all is well"
    return f"{well}: {read}, {counted(rows, 'row')}, {size_words(size)} ({how})"


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
        "skipped": report.skipped,
        "signed_off": report.former and {"last": report.former.end, "at": report.former.at},
    }


def _level_json(level: LevelReport) -> dict[str, int]:
    """Return one level as JSON. `holes`: of the level alone; other levels may cover them."""
    stretches = level.covered.stretches()
    bounds = {"first": stretches[0].first, "last": stretches[-1].last, "holes": len(stretches) - 1}
    return {"segments": level.segments, "size": level.size, **bounds}


def foreign_json(foreign: Foreign) -> list[dict[str, Any]]:
    nobody: dict[str, Any] = dict.fromkeys(("site", "feed", "incarnation", "partition"))
    counts = {"foreign": foreign.count, "keys": foreign.keys, "problems": []}
    return [{**nobody, **counts}] if foreign.count else []


def _added_up(objects: Iterable[Ref], group_of: Callable[[Ref], Any]) -> list[tuple[Any, int, int]]:
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
merged_segments = gauge("compaction_merged_segments", "Segments that the last run made into larger ones.")
output_segments = gauge("compaction_output_segments", "Segments that the last run made of them.")
merged_rows = gauge("compaction_merged_rows", "Messages in what the last run made.")
read_bytes = gauge("compaction_read_bytes", "Stored bytes of the segments that the last run merged.")
written_bytes = gauge("compaction_written_bytes", "Stored bytes of the segments that the last run made.")
deleted_segments = gauge("compaction_deleted_segments", "Segments that were merged and that the last run deleted.")
deleted_bytes = gauge("compaction_deleted_bytes", "Stored bytes of merged segments that the last run deleted.")
expired_segments = gauge("compaction_expired_segments", "Segments that retention deleted in the last run.")
expired_bytes = gauge(
    "compaction_expired_bytes", "Stored bytes of the segments that retention deleted in the last run."
)
held_bytes = gauge(
    "compaction_retention_held_bytes", "Stored bytes that retention would delete and a target still needs.", ("target",)
)
failed = gauge("compaction_failures", "What went wrong in the last run, told before or not; 1 where it broke off.")


def show_metrics(report: Report | None, seconds: float, now: float, *, is_success: bool) -> None:
    """Set the metrics of a run that took `seconds` and ended at `now`; `report` None: it was aborted."""
    done = report or Report()
    last_run.set(now)
    duration.set(seconds)
    if is_success:
        last_success.set(now)
    merged_segments.set(sum(each.inputs for each in done.merged))
    output_segments.set(len(done.merged))
    merged_rows.set(sum(each.rows for each in done.merged))
    read_bytes.set(sum(each.size for each in done.merged))
    written_bytes.set(sum(each.ref.size for each in done.merged))
    deleted_segments.set(len(done.deleted))
    deleted_bytes.set(sum(map(done.deleted.size_of, range(len(done.deleted)))))
    expired = done.retained.expired
    expired_segments.set(len(expired))
    expired_bytes.set(sum(map(expired.size_of, range(len(expired)))))
    held_bytes.clear()
    for each in done.retained.held:
        held_bytes.labels(each.target).inc(each.size)
    failed.set(1 if report is None else len(done.failures))


def write_metrics(path: Path) -> None:
    """Write the metrics of the run to the file `path`, which is whole at any moment. Raises OSError."""
    names = [family.name for family in REGISTRY.collect() if family.name.startswith("floe_compaction_")]
    write_to_textfile(str(path), REGISTRY.restricted_registry(names))


def succeeded_at(path: Path) -> float | None:
    """Return the time of the last success, from the file of the run before; 0: none; None if the file lacks it."""
    with suppress(OSError, ValueError):
        if not path.is_file():  # a device may have no end
            return None
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == f"floe_{_DONE}":
                return float(value)
    return None


_FORMAT = "floe_report"  # Spark registers `floe` itself and allows no replacement
CHAIN_COLUMNS = ("site", "feed", "incarnation", "partition")


def summarise(settings: Settings) -> list[dict[str, object]]:
    """Return for each chain: messages, distinct sequences and subjects, bytes of payloads, first and last sequence.

    Empty if the archive holds no message. Raises ConfigError if PySpark or Java is missing, Unavailable if Spark fails.
    """
    with Spark(settings) as spark:
        session = spark.session()
        from pyspark.sql import functions as f

        from compaction.source import source_of

        session.dataSource.register(source_of(settings, _FORMAT))
        counted = (
            session.read.format(_FORMAT)
            .load()
            .groupBy(*CHAIN_COLUMNS)
            .agg(
                f.count("*").alias("messages"),
                f.count_distinct("sequence").alias("sequences"),
                f.count_distinct("subject").alias("subjects"),
                f.sum(f.octet_length("payload")).alias("payload_bytes"),
                f.min("sequence").alias("first"),
                f.max("sequence").alias("last"),
            )
        )
        rows = [row.asDict() for row in counted.orderBy(*CHAIN_COLUMNS).collect()]
    return [{"chain": str(Chain(*map(row.pop, CHAIN_COLUMNS))), **row} for row in rows]


@click.command()
@click.option("-c", "--config", "path", required=True, help="The configuration that names the store.")
def main(path: str) -> None:
    """Count the messages of the archive with a Spark query."""
    print_json(summarise(loader.load(path)))


if __name__ == "__main__":
    with end_with():
        main(standalone_mode=False)
