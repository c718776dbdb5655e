"""Format the plan, the progress and the result of a replay, for people and for programs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.chain import Chain
from common.errors import FloeError
from common.settings.types import counted, duration_words, size_words
from ingress.replay.plan import ChainRange, ReplayPlan, time_text
from ingress.replay.receipt import Remembered, Unreadable
from ingress.replay.request import ReplayResult, Request
from ingress.replay.survey import Outlook, lossy_text


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """The progress of a replay. `sequences`: accounted for, of `of`; `rows`: messages stored; `bytes`: of the messages
    of this run. `chain`, `sequence`: the last sequence accounted for; None and 0 before the first.
    """

    rows: int
    bytes: int
    sequences: int
    of: int
    chain: Chain | None
    sequence: int

    @property
    def share(self) -> float:
        return self.sequences / self.of if self.of else 1.0


def standing(ranges: Sequence[ChainRange], positions: Mapping[Chain, int], rows: int, raw_bytes: int) -> ReplayProgress:
    done = {each: min(positions.get(each.chain, 0), each.rows.last + 1) - each.rows.first for each in ranges}
    chain = next((each.chain for each in reversed(ranges) if done[each] > 0), None)
    sequences, of = sum(max(0, count) for count in done.values()), sum(len(each.rows) for each in ranges)
    return ReplayProgress(rows, raw_bytes, sequences, of, chain, positions[chain] - 1 if chain else 0)


def progress_line(now: ReplayProgress, begun: ReplayProgress, seconds: float) -> str:
    moved = now.sequences - begun.sequences
    left = "-"
    if moved > 0 and seconds > 0:
        left = duration_words(round((now.of - now.sequences) * seconds / moved))
    rate = (now.rows - begun.rows) / seconds if seconds > 0 else 0
    where = f", {now.chain} at {now.sequence:,}" if now.chain else ""
    done = f"{now.share:4.0%}  {counted(now.rows, 'message')}, {size_words(now.bytes)}"
    return f"{done}, {rate:,.0f} msg/s, {left} left{where}"


SHOWN = 10  # chains and holes


def plan_json(view: Outlook, request: Request, refused: FloeError | None = None) -> dict[str, Any]:
    """Return the document of `--dry-run --json`. `refused`: the error of a replay that would not begin."""
    former = view.former.receipt if isinstance(view.former, Remembered) else None
    info, recipe = view.info, view.recipe
    return {
        "request": request.to_json(),
        "plan": view.plan.as_json(),
        "target": info and {"messages": info.messages, "last_sequence": info.last_sequence},
        "create": recipe and {"config": recipe.config, "left_out": list(recipe.left_out)},
        "former": former and {"request": former.request.to_json(), "finished": bool(former.finished)},
        "notes": list(view.notes),
        "refused": refused and {"code": refused.code, "message": refused.message, "hint": refused.hint},
    }


def plan_lines(view: Outlook, request: Request) -> Iterator[str]:
    plan = view.plan
    most = "" if plan.is_exact else "at most "
    yield f"{request.site}/{request.feed} into {request.target}: {most}{counted(plan.rows, 'message')}"
    to_read = f"to read: {most}{size_words(plan.bytes_to_read)} of {counted(len(plan.parts), 'segment')}"
    yield f"{most}{size_words(plan.raw_bytes)}; {to_read}"
    if plan.times:
        yield f"from {time_text(plan.times[0])} to {time_text(plan.times[1])} in these segments"
    for chain in plan.chains[:SHOWN]:
        parts = counted(len(chain.parts), "segment")
        yield f"  {chain.chain}  {chain.range.rows}  {counted(chain.rows, 'message')} in {parts}"
    if len(plan.chains) > SHOWN:
        yield f"  and {counted(len(plan.chains) - SHOWN, 'more chain')}"
    yield from _what_is_missing(plan)
    yield from _target_lines(view, request)
    yield from (f"note: {note}" for note in view.notes)


def _what_is_missing(plan: ReplayPlan) -> Iterator[str]:
    if not plan.chains:
        yield "nothing of the archive lies in this range"
    if plan.is_lossy:
        yield f"a copy, not a backup (--allow-lossy): {lossy_text(plan)}"
    for name, found in (("hole (--skip-holes)", plan.holes), ("accepted gap", plan.accepted)):
        for hole in found[:SHOWN]:
            yield f"{name}: {hole.chain} {hole.rows}"
        if len(found) > SHOWN:
            yield f"{name}: {len(found) - SHOWN} more"


def _target_lines(view: Outlook, request: Request) -> Iterator[str]:
    if view.info is not None:
        held = f"holds {view.info.messages:,} messages up to sequence {view.info.last_sequence:,}"
        yield f"target {request.target} {held if view.info.messages else 'is empty'}"
    elif view.recipe is None:
        yield f"target {request.target} is missing, and there is no stream.json to make it by"
    else:
        config = ", ".join(f"{name} {value}" for name, value in view.recipe.config.items() if name != "name")
        yield f"target {request.target} is missing; --create makes it with {config}"
        if view.recipe.left_out:
            yield f"it would be made without {', '.join(view.recipe.left_out)} of the source"
    if isinstance(view.former, Unreadable):
        yield f"what is remembered of the last replay into it cannot be read: {view.former.why}"
    elif view.former is not None:
        receipt = view.former.receipt
        done = "finished" if receipt.finished else "not finished"
        yield f"the last replay into it is {done}: {receipt.request.words()}"


def result_line(result: ReplayResult, request: Request) -> str:
    where = f"{request.site}/{request.feed} into {result.target}"
    if result.was_done:
        return f"done before: {counted(result.rows, 'message')} of {where}; --again replays them anew"
    took = f"{result.rows_now:,} in {duration_words(result.seconds)}, {result.rate:,.0f} msg/s"
    if result.finished:
        return f"done: {counted(result.rows, 'message')} of {where} ({took})"
    return f"not finished: {counted(result.rows, 'message')} of {where} ({took}); the same command goes on"
