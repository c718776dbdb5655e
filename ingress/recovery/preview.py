"""Format the plan, the progress and the result of a replay, for people and for programs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.chain import Chain
from common.errors import FloeError
from common.settings.types import duration_words, format_count, size_words
from ingress.recovery.ranges import ChainRange, ReplayPlan, time_text
from ingress.recovery.receipt import StoredReplay, UnreadableReplay
from ingress.recovery.request import ReplayRequest, ReplayResult
from ingress.recovery.survey import ReplayPreview, lossy_text


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """The progress of a replay. `sequences`: accounted for, of `total_sequences`; `rows`: messages stored; `bytes`: of
    the messages of this run. `chain`, `sequence`: the last sequence accounted for; None and 0 before the first.
    """

    rows: int
    bytes: int
    sequences: int
    total_sequences: int
    chain: Chain | None
    sequence: int

    @property
    def share(self) -> float:
        return self.sequences / self.total_sequences if self.total_sequences else 1.0


def progress_of(ranges: Sequence[ChainRange], positions: Mapping[Chain, int], rows: int, size: int) -> ReplayProgress:
    done = {each: min(positions.get(each.chain, 0), each.rows.last + 1) - each.rows.first for each in ranges}
    chain = next((each.chain for each in reversed(ranges) if done[each] > 0), None)
    sequences, total = sum(max(0, count) for count in done.values()), sum(len(each.rows) for each in ranges)
    return ReplayProgress(rows, size, sequences, total, chain, positions[chain] - 1 if chain else 0)


def progress_line(now: ReplayProgress, begun: ReplayProgress, seconds: float) -> str:
    moved = now.sequences - begun.sequences
    left = "-"
    if moved > 0 and seconds > 0:
        left = duration_words(round((now.total_sequences - now.sequences) * seconds / moved))
    rate = (now.rows - begun.rows) / seconds if seconds > 0 else 0
    place = f", {now.chain} at {now.sequence:,}" if now.chain else ""
    done = f"{now.share:4.0%}  {format_count(now.rows, 'message')}, {size_words(now.bytes)}"
    return f"{done}, {rate:,.0f} msg/s, {left} left{place}"


MAX_SHOWN_LINES = 10  # chains and holes


def plan_json(preview: ReplayPreview, request: ReplayRequest, refused: FloeError | None = None) -> dict[str, Any]:
    """Return the document of `--dry-run --json`. `refused`: the error of a replay that would not begin."""
    former = preview.former.receipt if isinstance(preview.former, StoredReplay) else None
    info, template = preview.info, preview.template
    return {
        "request": request.to_json(),
        "plan": preview.plan.as_json(),
        "target": info and {"messages": info.messages, "last_sequence": info.last_sequence},
        "create": template and {"config": template.config, "left_out": list(template.left_out)},
        "former": former and {"request": former.request.to_json(), "finished": bool(former.finished)},
        "notes": list(preview.notes),
        "refused": refused and {"code": refused.code, "message": refused.message, "hint": refused.hint},
    }


def plan_lines(preview: ReplayPreview, request: ReplayRequest) -> Iterator[str]:
    plan = preview.plan
    most = "" if plan.is_exact else "at most "
    yield f"{request.site}/{request.feed} into {request.target}: {most}{format_count(plan.rows, 'message')}"
    to_read = f"to read: {most}{size_words(plan.bytes_to_read)} of {format_count(len(plan.parts), 'segment')}"
    yield f"{most}{size_words(plan.raw_bytes)}; {to_read}"
    if plan.time_range_ns:
        yield f"from {time_text(plan.time_range_ns[0])} to {time_text(plan.time_range_ns[1])} in these segments"
    for chain in plan.chains[:MAX_SHOWN_LINES]:
        parts = format_count(len(chain.parts), "segment")
        yield f"  {chain.chain}  {chain.range.rows}  {format_count(chain.rows, 'message')} in {parts}"
    if len(plan.chains) > MAX_SHOWN_LINES:
        yield f"  and {format_count(len(plan.chains) - MAX_SHOWN_LINES, 'more chain')}"
    yield from _missing_lines(plan)
    yield from _target_lines(preview, request)
    yield from (f"note: {note}" for note in preview.notes)


def _missing_lines(plan: ReplayPlan) -> Iterator[str]:
    if not plan.chains:
        yield "the archive has nothing in this range"
    if plan.is_lossy:
        yield f"a copy, not a backup (--allow-lossy): {lossy_text(plan)}"
    for name, found in (("hole (--skip-holes)", plan.holes), ("accepted gap", plan.accepted)):
        for hole in found[:MAX_SHOWN_LINES]:
            yield f"{name}: {hole.chain} {hole.rows}"
        if len(found) > MAX_SHOWN_LINES:
            yield f"{name}: {len(found) - MAX_SHOWN_LINES} more"


def _target_lines(preview: ReplayPreview, request: ReplayRequest) -> Iterator[str]:
    if preview.info is not None:
        held = f"holds {preview.info.messages:,} messages up to sequence {preview.info.last_sequence:,}"
        yield f"target {request.target} {held if preview.info.messages else 'is empty'}"
    elif preview.template is None:
        yield f"target {request.target} is missing, and there is no stream.json to create it from"
    else:
        config = ", ".join(f"{name} {value}" for name, value in preview.template.config.items() if name != "name")
        yield f"target {request.target} is missing; --create creates it with {config}"
        if preview.template.left_out:
            yield f"it would be created without {', '.join(preview.template.left_out)} of the source"
    if isinstance(preview.former, UnreadableReplay):
        yield f"the record of the last replay into it cannot be read: {preview.former.reason}"
    elif preview.former is not None:
        receipt = preview.former.receipt
        done = "finished" if receipt.finished else "not finished"
        yield f"the last replay into it is {done}: {receipt.request.arguments()}"


def result_line(result: ReplayResult, request: ReplayRequest) -> str:
    route = f"{request.site}/{request.feed} into {result.target}"
    if result.was_done:
        return f"done before: {format_count(result.rows, 'message')} of {route}; --again replays them again"
    took = f"{result.rows_now:,} in {duration_words(result.seconds)}, {result.rate:,.0f} msg/s"
    if result.finished:
        return f"done: {format_count(result.rows, 'message')} of {route} ({took})"
    return f"not finished: {format_count(result.rows, 'message')} of {route} ({took}); the same command continues"
