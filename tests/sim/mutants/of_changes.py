"""Mistakes of egress where its source changes: identity, what is held, decisions, incarnations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

import egress.evidence
from egress.evidence import Inquiry, Proposal
from egress.identity import SourceVerdict, VerdictKind
from egress.incarnations import History
from egress.uploader import Unflushed
from egress.worker import Worker
from tests.sim.mutants.registry import change, mutant


@mutant
def every_stream_taken_for_the_same() -> None:
    """Nothing is compared: a stream of the same name is the same."""

    def judging(judge: Any) -> Any:
        def trusting(evidence: Any, *more: Any) -> SourceVerdict:
            verdict: SourceVerdict = judge(evidence, *more)
            return verdict if evidence.source is None else replace(verdict, kind=VerdictKind.SAME)

        return trusting

    change(egress.evidence, "judge_with", judging)


@mutant
def held_messages_thrown_away() -> None:
    """What was received and not archived is dropped where the stream changes."""

    def putting(_put: Any) -> Any:
        async def dropping(self: Unflushed, *_: Any) -> None:
            self.discard()

        return dropping

    change(Unflushed, "put", putting)


@mutant
def proposal_one_too_far() -> None:
    """An operator is told to begin one message behind the first that is not archived."""

    def proposing(proposal: Any) -> Any:
        async def careless(self: Inquiry, *more: Any) -> Proposal | None:
            found: Proposal | None = await proposal(self, *more)
            return None if found is None else found._replace(first=found.first + 1)

        return careless

    change(Inquiry, "proposal", proposing)


@mutant
def decision_ignored() -> None:
    """The next incarnation begins at the first message, wherever an operator wanted it."""

    def beginning(_next_first: Any) -> Any:
        return lambda _self, _archive, _verdict, decision: 1 if decision is not None else None

    change(Worker, "_next_first", beginning)


@mutant
def next_incarnation_behind_the_old_end() -> None:
    """What a stream that was made anew holds is read from the end of the former one on."""

    def beginning(next_first: Any) -> Any:
        def careless(self: Worker, archive: Any, *more: Any) -> int | None:
            first: int | None = next_first(self, archive, *more)
            return first and max(first, archive.end + 1)

        return careless

    change(Worker, "_next_first", beginning)


@mutant
def incarnation_without_its_end() -> None:
    """The next incarnation names no end of the former one: nobody knows when that is carried."""

    def opening(open_next: Any) -> Any:
        async def forgetful(self: History, chain: Any, document: Any) -> None:
            ends = dict.fromkeys(document.previous, 0)
            await open_next(self, chain, msgspec.structs.replace(document, previous=ends))

        return forgetful

    change(History, "open_next", opening)
