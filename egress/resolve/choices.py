"""What an operator can do about a verdict that stops a chain: the bounds, and commands to paste. Pure."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from common.chain import Chain
from common.errors import Stopped
from common.sequences import MAX_SEQUENCE, SequenceRange
from common.service.pasting import command
from egress.identity import Evidence, Kind, Source, Verdict
from egress.resolve.hints import resolve
from egress.slices import Slice

CODES = {
    Kind.GONE: "E-SOURCE-GONE",
    Kind.RECREATED: "E-RECREATED",
    Kind.ROLLED_BACK: "E-ROLLED-BACK",
    Kind.FORKED: "E-FORKED",
    Kind.UNKNOWN: "E-IDENTITY",
}
CLOSABLE = (Kind.RECREATED, Kind.ROLLED_BACK, Kind.FORKED, Kind.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Choice:
    """One way on: the options of `floe egress resolve`, and what they mean."""

    options: str
    meaning: str


def bounds(source: Source) -> SequenceRange:
    """Where the next incarnation of the stream may begin."""
    last = min(max(source.last + 1, source.first), MAX_SEQUENCE)
    return SequenceRange(min(source.first, last), last)


def can_be_same(evidence: Evidence, verdict: Verdict) -> bool:
    """Whether the stream may be declared the same: nothing that is archived lies behind its end."""
    source = evidence.source
    return verdict.kind is Kind.UNKNOWN and source is not None and source.last >= evidence.end


def choices(evidence: Evidence, verdict: Verdict, proposal: int | None) -> list[Choice]:
    """The ways on by command; none where there is no stream, or where nothing is wrong."""
    found = []
    if can_be_same(evidence, verdict):
        meaning = f"it is the same stream: what differs up to {evidence.end} is accepted"
        found.append(Choice("--same", meaning))
    if evidence.source is not None and verdict.kind in CLOSABLE:
        sequence = proposal or evidence.source.first
        meaning = f"freeze what it is now, from {sequence} on, as the next incarnation"
        found.append(Choice(f"--new-incarnation --from {sequence}", meaning))
    return found


def never_begun(part: Slice) -> Stopped:
    """Why a feed that nothing was archived of cannot begin."""
    return Stopped(
        f"{part.chain}: stream {part.stream} does not exist",
        hint="create it: the feed then begins by itself",
        code=CODES[Kind.GONE],
    )


def gone_advice(part: Slice) -> str:
    """The ways on where the stream of a feed that has begun does not exist any more."""
    again = "create it again: then its next incarnation begins by itself"
    if part.settings.on_recreated == "halt":
        again = f"create it again, then look again ({resolve(part.settings.name)}): `on_recreated` is halt"
    return f"restore the stream as it was: the feed goes on; or {again}"


def stopped_error(
    part: Slice, chain: Chain, evidence: Evidence, verdict: Verdict, proposal: int | None
) -> Stopped:
    """Why the chain stops on a verdict, with the choices that there are."""
    where = f"{chain}: stream {part.stream}"
    text = f"{where} is {verdict.kind.value.replace('_', ' ')}: {verdict.why}"
    hint = _hint(part, chain, evidence, verdict, proposal)
    return Stopped(text, hint=hint, code=CODES.get(verdict.kind, "E-IDENTITY"))


def _hint(part: Slice, chain: Chain, evidence: Evidence, verdict: Verdict, proposal: int | None) -> str:
    source = evidence.source
    if source is None:
        return gone_advice(part)
    listing = command("segments ls", shlex.quote(str(chain)))
    first = {
        Kind.RECREATED: "set on_recreated: continue, or begin its next incarnation yourself",
        Kind.ROLLED_BACK: "restore the stream to where it was, or freeze what it is now",
        Kind.FORKED: "bring back the stream that was archived last, or freeze what it is now",
    }.get(verdict.kind, f"compare it with the archive ({listing}), then decide")
    is_cut = len(part.settings.filters()) > 1
    ways = []
    for choice in choices(evidence, verdict, proposal):
        # Each partition of several has a beginning of its own.
        options = choice.options.split(" --from ")[0] if is_cut else choice.options
        number = part.partition if is_cut and options == "--same" else None
        ways.append(resolve(chain.feed, options, number))
    refused = ""
    if verdict.kind is Kind.UNKNOWN and not can_be_same(evidence, verdict):
        refused = (
            f" (--same is not possible: the archive ends at {evidence.end}, the stream at {source.last})"
        )
    return f"{first}: {' | '.join(ways)}, with --from within {bounds(source)}{refused}"
