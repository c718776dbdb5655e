"""Carries out what an operator decided about a stopped feed; the running service then goes on by itself."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import DataError, UsageError
from common.service.logs import get_logger
from egress.archive import Marks
from egress.context import Opened
from egress.identity import Kind
from egress.partitions.closing import Decision
from egress.partitions.closings import Closings
from egress.resolve.acceptance import Acceptance
from egress.resolve.choices import can_be_same, parting
from egress.resolve.decisions import Acceptances
from egress.resolve.look import OF_LISTING, Case

log = get_logger("egress.resolve")


def plan_incarnation(cases: Sequence[Case], sequence: int | None) -> Decision:
    """Where the partitions that cannot go on begin anew: at `sequence`, or where each one's proposal is.

    The others begin behind their ends by themselves. Raises UsageError where that cannot be decided now.
    """
    for case in cases:
        if case.error is not None or case.evidence is None or case.evidence.source is None:
            why, hint = case.as_json()["why"], case.advice or "deal with that first"
            raise UsageError(f"{case.chain}: {why.removeprefix(f'{case.chain}: ')}", hint=hint)
    stopped = [case for case in cases if case.code]
    if not stopped:
        raise UsageError("nothing stops this feed: a new incarnation would only cut its history")
    created = {case.evidence.source.created for case in cases if case.evidence and case.evidence.source}
    if len(created) > 1:
        raise UsageError("the stream was made anew while it was looked at", hint="look again")
    first = {case.part.partition: _first(case, sequence) for case in stopped}
    return Decision(created.pop(), first)


def _first(case: Case, sequence: int | None) -> int:
    bounds = case.bounds
    first = sequence or case.proposal
    if bounds is None or first is None:
        raise UsageError(f"{case.chain}: where to begin cannot be told", hint="name it: --from SEQ")
    if first not in bounds:
        raise UsageError(f"--from: expected a sequence within {bounds}, found {first}")
    return first


def warnings(case: Case, first: int) -> str:
    """What beginning at `first` would repeat or leave out; empty where it does neither."""
    if case.proposal is None or first == case.proposal:
        return ""
    if first < case.proposal:
        return f"{case.chain}: {first}..{case.proposal - 1} is archived already, and will be once more"
    return f"{case.chain}: {case.proposal}..{first - 1} is not archived, and will not be"


async def new_incarnation(opened: Opened, cases: Sequence[Case], decision: Decision) -> None:
    """Let the incarnation of all partitions end. Raises UsageError where it has ended already."""
    chain = cases[0].chain
    closing = await Closings(opened.parts.state).change(chain, lambda found: found.decided(decision))
    if closing.next is not None:
        raise UsageError(f"{chain}: its incarnation has ended meanwhile", hint="look again")
    log.info("decided", action="decided", what="new incarnation", **chain.log_context())


def check_same(case: Case) -> Acceptance:
    """What accepting the stream as the same would be. Raises UsageError where that cannot be."""
    evidence, verdict = case.evidence, case.verdict
    if evidence is None or verdict is None or evidence.source is None or not case.code or case.error:
        raise UsageError(f"{case.chain}: --same is not a choice here: {case.as_json()['why']}")
    if evidence.source.last < evidence.end:
        raise UsageError(
            f"{case.chain}: the stream ends at {evidence.source.last}, the archive at {evidence.end}: "
            f"what is stored next up to {evidence.end} would be lost",
            hint="--new-incarnation loses nothing",
        )
    if not can_be_same(evidence, verdict):
        is_unknown, parted = verdict.kind is Kind.UNKNOWN, parting(evidence, case.proposal)
        why = f"where messages differ{parted}" if is_unknown else f"where it is {verdict.kind.value}"
        raise UsageError(
            f"{case.chain}: --same is not a choice {why}", hint="--new-incarnation loses nothing"
        )
    return Acceptance(evidence.source.created, evidence.end)


async def same(opened: Opened, case: Case) -> None:
    """Accept the stream of this partition as the one that was archived."""
    await Acceptances(opened.parts.state).put(case.chain, check_same(case))
    log.info("decided", action="decided", what="same stream", **case.chain.log_context())


async def believe_listing(opened: Opened, case: Case) -> int:
    """Have the mark where the listing ends, and forget what cannot be read; the mark."""
    if case.code not in OF_LISTING:
        raise UsageError(f"{case.chain}: nothing is wrong with its listing")
    parts, chain = opened.parts, case.chain
    end = max(case.end, case.first - 1)
    await Marks(parts.state).set(chain, end)
    try:
        await Acceptances(parts.state).get(chain)
    except DataError:
        await parts.state.delete(Acceptances.key(chain))
    try:
        await Closings(parts.state).get(chain)
    except DataError:
        await parts.state.delete(Closings.key(chain))
    log.info("decided", action="decided", what="listing", end=end, **chain.log_context())
    return end
