"""Mistakes of egress at a change of its source: identity, held messages, decisions, incarnations."""

from dataclasses import replace
from typing import Any

import msgspec

import egress.evidence
from egress.evidence import IdentityCheck, Proposal
from egress.identity import SourceVerdict, VerdictKind
from egress.incarnations import Incarnations
from egress.uploader import UnputSegments
from egress.worker import Worker
from tests.sim.mutants.registry import change, changing, mutant


@mutant
def every_stream_taken_for_the_same() -> None:
    """Every stream of the same name counts as the same: nothing is compared."""

    @changing(egress.evidence, "judge_with")
    def trusting(judge: Any, evidence: Any, *more: Any) -> SourceVerdict:
        verdict: SourceVerdict = judge(evidence, *more)
        return verdict if evidence.source is None else replace(verdict, kind=VerdictKind.SAME)


@mutant
def held_messages_thrown_away() -> None:
    """Messages that were received and not archived are dropped at a change of the stream."""

    @changing(UnputSegments, "put")
    async def dropping(_put: Any, self: UnputSegments, *_: Any) -> None:
        self.discard()


@mutant
def proposal_one_too_far() -> None:
    """The hint proposes a first sequence one too high to the operator."""

    @changing(IdentityCheck, "proposal")
    async def careless(proposal: Any, self: IdentityCheck, *more: Any) -> Proposal | None:
        found: Proposal | None = await proposal(self, *more)
        return None if found is None else found._replace(first=found.first + 1)


@mutant
def decision_ignored() -> None:
    """The next incarnation begins at the first message, even if an operator chose another one."""

    def beginning(_next_first: Any) -> Any:
        return lambda _self, _archive, _verdict, decision: 1 if decision is not None else None

    change(Worker, "_next_first", beginning)


@mutant
def next_incarnation_behind_the_old_end() -> None:
    """A recreated stream is read only from behind the end of the former one."""

    @changing(Worker, "_next_first")
    def careless(next_first: Any, self: Worker, archive: Any, *more: Any) -> int | None:
        first: int | None = next_first(self, archive, *more)
        return first and max(first, archive.end + 1)


@mutant
def incarnation_without_its_end() -> None:
    """The next incarnation names no end of the former one: its delivery can never be known to be complete."""

    @changing(Incarnations, "open_next")
    async def forgetful(open_next: Any, self: Incarnations, chain: Any, document: Any) -> None:
        await open_next(self, chain, msgspec.structs.replace(document, previous=dict.fromkeys(document.previous, 0)))
