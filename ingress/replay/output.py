"""A plan and its end, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from common.errors import FloeError
from common.settings.units import format_duration
from ingress.replay.bounds import time_text
from ingress.replay.options import Result
from ingress.replay.outlook import Outlook, lossy_text
from ingress.replay.plan import Plan
from ingress.replay.progress import size_text
from ingress.replay.receipt import Remembered, Unreadable
from ingress.replay.request import Request

SHOWN = 10  # chains and holes


def plan_json(view: Outlook, request: Request, refused: FloeError | None = None) -> dict[str, Any]:
    """What `--dry-run --json` prints. `refused`: why it would not begin."""
    former = view.former.receipt if isinstance(view.former, Remembered) else None
    return {
        "request": request.to_json(),
        "plan": view.found.plan.as_json(),
        "target": None
        if view.info is None
        else {"messages": view.info.messages, "last_sequence": view.info.last_sequence},
        "create": view.recipe and {"config": view.recipe.config, "left_out": list(view.recipe.left_out)},
        "former": former and {"request": former.request.to_json(), "finished": bool(former.finished)},
        "notes": list(view.notes),
        "refused": refused and {"code": refused.code, "message": refused.message, "hint": refused.hint},
    }


def plan_lines(view: Outlook, request: Request) -> Iterator[str]:
    """What `--dry-run` prints."""
    plan = view.found.plan
    most = "" if plan.is_exact else "at most "
    yield f"{request.site}/{request.feed} into {request.target}: {most}{plan.rows:,} messages"
    yield f"{most}{size_text(plan.raw_bytes)}; to read: {most}{size_text(plan.bytes_to_read)} of " + (
        f"{len(plan.parts):,} segments"
    )
    if plan.times:
        yield f"from {time_text(plan.times[0])} to {time_text(plan.times[1])} in these segments"
    for chain in plan.chains[:SHOWN]:
        yield f"  {chain.chain}  {chain.range.rows}  {chain.rows:,} messages in {len(chain.parts):,} segments"
    if len(plan.chains) > SHOWN:
        yield f"  and {len(plan.chains) - SHOWN} more chains"
    yield from _what_is_missing(plan)
    yield from _target_lines(view, request)
    yield from (f"note: {note}" for note in view.notes)


def _what_is_missing(plan: Plan) -> Iterator[str]:
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
        held = f"{view.info.messages:,} messages up to sequence {view.info.last_sequence:,}"
        yield (
            f"target {request.target} holds {held}"
            if view.info.messages
            else f"target {request.target} is empty"
        )
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


def result_line(result: Result, request: Request) -> str:
    """The last line of a replay."""
    where = f"{request.site}/{request.feed} into {result.target}"
    if result.was_done:
        return f"done before: {result.rows:,} messages of {where}; --again replays them anew"
    took = f"{result.rows_now:,} in {format_duration(round(result.seconds, 1))}, {result.rate:,.0f} msg/s"
    if result.finished:
        return f"done: {result.rows:,} messages of {where} ({took})"
    return f"not finished: {result.rows:,} messages of {where} ({took}); the same command goes on"
