"""What a replay would do, and whether it may: looks only."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import Stopped
from common.jetstream.client import FloeClient
from common.jetstream.kv import BucketGone, KeyValue
from common.jetstream.streams import StreamInfo
from common.segments.document_values import StreamDocument
from common.service.pasting import command
from ingress.replay import target
from ingress.replay.options import Options
from ingress.replay.plan import Plan
from ingress.replay.receipt import Remembered, remembered
from ingress.replay.request import Request
from ingress.replay.source import hole_error
from ingress.replay.survey import Found, Survey


@dataclass(frozen=True, slots=True)
class Outlook:
    """`info`: the target, None where it is missing; `recipe`: how it would be made. `former`: the last replay
    into it."""

    found: Found
    info: StreamInfo | None
    recipe: target.Recipe | None
    former: Remembered | None
    notes: tuple[str, ...]


async def outlook(client: FloeClient, survey: Survey, request: Request, state_bucket: str) -> Outlook:
    """What replaying `request` would do now. Raises what speaks against the target's kind."""
    found = await survey.look(request)
    target.check_source(request, found.stream)
    info = await target.look(client, request)
    recipe = target.recipe(request, found.stream) if info is None and found.stream else None
    config = info.config if info else recipe.config if recipe else {}
    notes = (*found.notes, *target.notes(config, found.plan, request), *_name_note(request, found.stream))
    return Outlook(found, info, recipe, await former_of(client, state_bucket, request.target), notes)


async def former_of(client: FloeClient, state_bucket: str, stream: str) -> Remembered | None:
    """The last replay into `stream`; no bucket is made to find out."""
    try:
        return await remembered(KeyValue(client, state_bucket, ttl=None, replicas=1), stream)
    except BucketGone:
        return None


def _name_note(request: Request, document: StreamDocument | None) -> list[str]:
    if request.into_source or document is None or document.config.get("name") != request.target:
        return []
    return [f"target {request.target} has the name of the feed's source: if it is that, add --into-source"]


def continued(request: Request, former: Remembered | None, *, again: bool) -> Remembered | None:
    """The former replay that `request` goes on with, or has done; None to begin.

    Raises Stopped where another one is not finished.
    """
    if former is None or again:
        return None
    receipt = former.receipt
    if receipt.request.digest == request.digest:
        return former
    if receipt.finished:
        return None
    raise Stopped(
        f"target {request.target}: another replay into it is not finished: expected {request.words()}, "
        f"found {receipt.request.words()}",
        hint=f"finish that one: {command('replay', receipt.request.words())}; or begin anew: --again",
        code="E-REPLAY-OTHER",
    )


def check_plan(plan: Plan, options: Options) -> None:
    """Raises Stopped where the archive holds less than was asked for, and nobody said that this is fine."""
    if plan.is_lossy and not options.allow_lossy:
        raise Stopped(
            f"the archive of this range is a copy, not a backup: {lossy_text(plan)}",
            hint="replay a feed that is whole; or what there is: --allow-lossy",
            code="E-REPLAY-LOSSY",
        )
    if plan.holes and not options.skip_holes:
        chain = plan.holes[0].chain
        raise hole_error(chain, *(hole.rows for hole in plan.holes if hole.chain == chain))


def lossy_text(plan: Plan) -> str:
    """How much of what was published is there: `kept 1,204 of 9,800 messages (sampled_out 8,596)`."""
    kept = sum(part.footer.rows for part in plan.parts)
    counts = [f"{name} {count:,}" for name, count in plan.ledger.to_json().items()]
    return f"kept {kept:,} of {kept + plan.missing:,} messages ({', '.join(counts) or 'sampled'})"
