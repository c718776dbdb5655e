"""What an operator can do about a verdict that stops a chain: the bounds, and commands to paste. Pure."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from common.chain import Chain
from common.errors import Stopped
from common.sequences import MAX_SEQUENCE, SequenceRange
from common.service.pasting import command
from egress.hints import bring_back, resolve
from egress.identity import Evidence, Held, Kind, Source, Verdict
from egress.partition import Slice

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
    """Whether the stream may be declared the same: no archived message is known to differ, and nothing that
    is archived lies behind its end.
    """
    source = evidence.source
    is_long = source is not None and source.last >= evidence.end
    return verdict.kind is Kind.UNKNOWN and is_long and not _differs(evidence)


def _differs(evidence: Evidence) -> bool:
    return any(witness.held is Held.DIFFERENT for witness in evidence.tips)


def choices(
    evidence: Evidence, verdict: Verdict, proposal: int | None, *, is_cut: bool = False
) -> list[Choice]:
    """The ways on by command, that which loses nothing first; none where there is no stream, or where nothing
    is wrong. `proposal`: the first sequence that is not as archived, None where that cannot be told.
    `is_cut`: into partitions, each of which has a beginning of its own: one `--from` would not do for all.
    """
    source, found = evidence.source, list[Choice]()
    if source is not None and verdict.kind in CLOSABLE:
        sequence = proposal or source.first
        meaning = _anew(evidence, source, verdict, proposal)
        options = "--new-incarnation" if is_cut else f"--new-incarnation --from {sequence}"
        found.append(Choice(options, meaning))
    if source is not None and can_be_same(evidence, verdict):
        both = _both(source, evidence.end)
        what = (
            f"of the {both} sequences that it holds up to there nothing is archived again: lost if they are "
            "others than those that were archived"
            if both
            else "it holds nothing up to there, so nothing is repeated or lost"
        )
        found.append(Choice("--same", f"it is the same stream, and goes on behind {evidence.end}: {what}"))
    return found


def _anew(evidence: Evidence, source: Source, verdict: Verdict, proposal: int | None) -> str:
    """What beginning the next incarnation at the proposal repeats and loses."""
    sequence, end = proposal or source.first, evidence.end
    text = f"freeze what it is now, from {sequence} on, as the next incarnation: "
    both = _both(source, end)
    if proposal is None and both:
        return (
            f"{text}nothing is lost; {both} sequences, up to {end}, that could not be compared may come twice"
        )
    if sequence > source.first:
        return f"{text}up to {sequence - 1} it is as archived, so nothing is repeated or lost"
    if not both or verdict.kind is not Kind.UNKNOWN or _differs(evidence):
        return f"{text}nothing that it holds is archived, so nothing is repeated or lost"
    return f"{text}nothing is lost; {both} sequences, up to {end}, come twice if it is the same stream"


def _both(source: Source, end: int) -> int:
    """How many sequences, at most, the stream holds that the archive covers too."""
    return max(0, min(end, source.last) - source.first + 1)


def never_begun(part: Slice) -> Stopped:
    """Why a feed that nothing was archived of cannot begin."""
    return Stopped(
        f"{part.chain}: stream {part.stream} does not exist",
        hint="create it: the feed then begins by itself",
        code=CODES[Kind.GONE],
    )


def gone_advice(part: Slice, chain: Chain, *, continues: bool = False) -> str:
    """The ways on where the stream of a feed that has begun does not exist any more.

    `continues`: the incarnation goes on with the history of the one before, so one alone is not the stream.
    """
    again = "create it again: then its next incarnation begins by itself"
    if part.settings.on_recreated == "halt":
        again = "create it again and look again with the last command: `on_recreated` is halt"
    lines = [f"restore the stream as it was: the feed goes on; or {again}"]
    if not part.settings.sampling_key:
        lines[0] += (
            "; what the archive holds of it is brought back by the replay below (look with --dry-run first; "
            "publishers wait meanwhile, and the centre gets these messages once more, as new ones)"
        )
        lines.append(bring_back(part, chain, continues=continues))
    if part.settings.on_recreated == "halt":
        lines.append(resolve(part.settings.name))
    return "\n".join(lines)


def stopped_error(
    part: Slice,
    chain: Chain,
    evidence: Evidence,
    verdict: Verdict,
    proposal: int | None,
    *,
    continues: bool = False,
) -> Stopped:
    """Why the chain stops on a verdict, with the choices that there are; `continues` as in `gone_advice`."""
    where = f"{chain}: stream {part.stream}"
    text = f"{where} is {verdict.kind.value.replace('_', ' ')}: {verdict.why}{parting(evidence, proposal)}"
    if evidence.source is None:
        hint = gone_advice(part, chain, continues=continues)
    else:
        hint = _hint(part, chain, evidence, evidence.source, verdict, proposal)
    return Stopped(text, hint=hint, code=CODES.get(verdict.kind, "E-IDENTITY"))


def parting(evidence: Evidence, proposal: int | None) -> str:
    """The first sequence that is not as archived, in words; empty where it is not known."""
    source = evidence.source
    if proposal is None or source is None or not _differs(evidence):
        return ""
    return f"; the first sequence that is not as archived is {proposal}"


def _hint(
    part: Slice, chain: Chain, evidence: Evidence, source: Source, verdict: Verdict, proposal: int | None
) -> str:
    """The ways on: each command on a line of its own, what it means before it."""
    first = {
        Kind.RECREATED: "set `on_recreated: continue`; or begin its next incarnation yourself",
        Kind.ROLLED_BACK: "restore the stream to where it was; or choose",
        Kind.FORKED: "two sources under one name? give one of the sites another `site`; or bring back the "
        "stream that was archived last; or choose",
    }.get(verdict.kind, "compare it with the archive, then choose one")
    lines = [f"{first} (a new incarnation may begin within {bounds(source)})"]
    if verdict.kind is Kind.UNKNOWN:
        lines += ["what is archived:", command("segments ls", shlex.quote(str(chain)))]
    is_cut = len(part.settings.filters()) > 1
    for choice in choices(evidence, verdict, proposal, is_cut=is_cut):
        number = part.partition if is_cut and choice.options == "--same" else None
        lines += [f"{choice.meaning}:", resolve(chain.feed, choice.options, number)]
    if verdict.kind is Kind.UNKNOWN and not can_be_same(evidence, verdict):
        lines[0] += f"; it cannot be the same: {_why_not_same(evidence, source)}"
    return "\n".join(lines)


def _why_not_same(evidence: Evidence, source: Source) -> str:
    if source.last < evidence.end:
        return f"the archive ends at {evidence.end}, the stream at {source.last}"
    differing = min(w.tip.sequence for w in evidence.tips if w.held is Held.DIFFERENT)
    return f"sequence {differing} is not as archived"
