"""What a replay would do, and whether it may: looks only."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import Stopped
from common.jetstream.api import StreamInfo
from common.jetstream.client import FloeClient
from common.jetstream.kv import BucketGone, KeyValue
from common.segments.documents import StreamDocument
from common.service.exits import ways
from ingress.replay import target
from ingress.replay.plan import ReplayPlan
from ingress.replay.receipt import Remembered, Unreadable, other, remembered, unreadable
from ingress.replay.request import Advice, Request
from ingress.replay.source import hole_error
from ingress.replay.survey import ReplaySurvey, SurveyFindings


@dataclass(frozen=True, slots=True)
class Outlook:
    """`info`: the target, None where it is missing; `recipe`: how it would be made. `former`: the last replay
    into it."""

    found: SurveyFindings
    info: StreamInfo | None
    recipe: target.Recipe | None
    former: Remembered | Unreadable | None
    notes: tuple[str, ...]


async def outlook(client: FloeClient, survey: ReplaySurvey, advice: Advice, state_bucket: str) -> Outlook:
    """What replaying the request of `advice` would do now. Raises what speaks against the target's kind."""
    request = advice.request
    found = await survey.look(request)
    target.check_source(advice, found.stream)
    info = await target.look(client, request)
    recipe = target.recipe(request, found.stream) if info is None and found.stream else None
    config = info.config if info else recipe.config if recipe else {}
    notes = (*found.notes, *target.notes(config, found.plan, request), *_name_note(request, found.stream))
    return Outlook(found, info, recipe, await former_of(client, state_bucket, request.target), notes)


async def former_of(client: FloeClient, state_bucket: str, stream: str) -> Remembered | Unreadable | None:
    """The last replay into `stream`; no bucket is made to find out."""
    try:
        return await remembered(KeyValue(client, state_bucket, ttl=None, replicas=1), stream)
    except BucketGone:
        return None


def _name_note(request: Request, document: StreamDocument | None) -> list[str]:
    if request.into_source or document is None or document.config.get("name") != request.target:
        return []
    return [f"target {request.target} has the name of the feed's source: if it is that, add --into-source"]


def continued(advice: Advice, former: Remembered | Unreadable | None) -> Remembered | None:
    """The former replay that the one of `advice` goes on with, or has done; None to begin.

    Raises Stopped where another one is not finished, or nobody can tell.
    """
    if former is None or advice.options.again:
        return None
    if isinstance(former, Unreadable):
        raise unreadable(advice, former.why)
    receipt = former.receipt
    if receipt.request.digest == advice.request.digest:
        return former
    if receipt.finished:
        return None
    raise other(advice, receipt)


def check_plan(plan: ReplayPlan, advice: Advice) -> None:
    """Raises Stopped where the archive holds less than was asked for, and nobody said that this is fine."""
    if plan.is_lossy and not advice.options.allow_lossy:
        raise Stopped(
            f"the archive of this range is a copy, not a backup: {lossy_text(plan)}",
            hint=ways(("replay a feed that is whole; or what there is", advice.same("--allow-lossy"))),
            code="E-REPLAY-LOSSY",
        )
    if plan.holes and not advice.options.skip_holes:
        chain = plan.holes[0].chain
        raise hole_error(advice, chain, *(hole.rows for hole in plan.holes if hole.chain == chain))


def lossy_text(plan: ReplayPlan) -> str:
    """How much of what was published is there: `kept 1,204 of 9,800 messages (sampled_out 8,596)`."""
    kept = sum(part.kept for part in plan.parts)
    counts = [f"{name} {count:,}" for name, count in plan.ledger.to_json().items()]
    return f"kept {kept:,} of {kept + plan.missing:,} messages ({', '.join(counts) or 'sampled'})"
