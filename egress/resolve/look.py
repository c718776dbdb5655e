"""What a stopped partition looks like to an operator: verdict, evidence, bounds, choices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from common.chain import MAX_INCARNATION, Chain
from common.errors import DataError, FloeError, Unavailable
from common.jetstream.api import stream_info
from common.sequences import SequenceRange
from egress.archive import Archive, Marks
from egress.consumers import check_start
from egress.context import Opened
from egress.identity import Evidence, Kind, Verdict, Witness
from egress.incarnations import History, Incarnation, newest_incarnation
from egress.inquiry import Inquiry
from egress.partition import Slice
from egress.partitions.closings import Closings
from egress.resolve.choices import CODES, Choice, bounds, choices, gone_advice, never_begun, parting
from egress.resolve.decisions import Acceptances

# What is wrong with the listing, or with what is remembered of it; the listing may be believed instead.
OF_LISTING = ("E-LISTING", "E-EMPTY-ARCHIVE", "E-STATE-KV")
OF_FEED = ("E-FILTERS",)  # the same for all partitions, which may be others than the feed has


@dataclass(frozen=True, slots=True)
class Case:
    """One partition. `current`: None for one that has not begun. `end`: where the listing ends now, 0 where
    it is empty. `error`: what keeps it from being judged. `proposal`: where its next incarnation should
    begin, None where nothing is wrong. `incarnation`: the newest, where `current` cannot be read.
    """

    part: Slice
    current: Incarnation | None = None
    first: int = 1
    end: int = 0
    evidence: Evidence | None = None
    verdict: Verdict | None = None
    proposal: int | None = None
    error: FloeError | None = None
    incarnation: int = 0

    @property
    def chain(self) -> Chain:
        if self.current is None:
            return replace(self.part.chain, incarnation=self.incarnation)
        return self.current.chain

    @property
    def code(self) -> str:
        """Why it stops; empty where it does not."""
        if self.error is not None:
            return self.error.code
        if self.verdict is None or self.verdict.is_same:
            return ""
        return CODES.get(self.verdict.kind, "")

    @property
    def bounds(self) -> SequenceRange | None:
        """Where the next incarnation may begin."""
        return bounds(self.evidence.source) if self.evidence and self.evidence.source else None

    @property
    def choices(self) -> list[Choice]:
        """The ways on by command."""
        if self.code in OF_LISTING:
            what = f"the listing is right: it ends at {self.end}" if self.end else "nothing was ever archived"
            return [Choice("--believe-listing", what)]
        if self.evidence is None or self.verdict is None or self.verdict.is_same:
            return []
        is_cut = len(self.part.settings.filters()) > 1
        return choices(self.evidence, self.verdict, self.proposal, is_cut=is_cut)

    @property
    def advice(self) -> str:
        """What to do where no command decides it; empty where one does, or where nothing is wrong."""
        if self.choices:
            return ""
        if self.verdict is not None and self.verdict.kind is Kind.GONE:
            continues = self.current is not None and self.current.stream.continues
            return gone_advice(self.part, self.chain, continues=continues)
        return self.error.hint if self.error else ""

    def as_json(self) -> dict[str, Any]:
        """For `--json` and for people, flat."""
        evidence, verdict = self.evidence, self.verdict
        source = evidence.source if evidence else None
        why = self.error.message if self.error else verdict.why if verdict else "not begun"
        if evidence is not None and self.error is None:
            why += parting(evidence, self.proposal)
        return {
            "chain": str(self.chain),
            "stream": self.part.stream,
            "code": self.code,
            "verdict": verdict.kind.value if verdict else "",
            "why": why,
            "archive_first": self.first,
            "archive_end": self.end,
            "stream_first": source.first if source else None,
            "stream_last": source.last if source else None,
            "created_archived": self.current.stream.created if self.current else "",
            "created_found": source.created if source else "",
            "evidence": [_witness(witness) for witness in (evidence.tips if evidence else ())],
            "from_first": self.bounds.first if self.bounds else None,
            "from_last": self.bounds.last if self.bounds else None,
            "choices": [{"options": each.options, "meaning": each.meaning} for each in self.choices],
            "advice": self.advice,
        }


def _witness(witness: Witness) -> dict[str, Any]:
    return {"sequence": witness.tip.sequence, "held": witness.held.value}


async def look(opened: Opened, part: Slice) -> Case:
    """One partition as it is now. Raises Unavailable where nothing can be asked."""
    parts, io = opened.parts, opened.pools.io
    history = History(part, parts.chains, parts.objects, Marks(parts.state), io, parts.clock)
    number = 0
    try:
        newest = await io.run(newest_incarnation, parts.chains, part.chain)
        number = newest or 0
        following = 0 if newest is None else min(newest + 1, MAX_INCARNATION)
        if (lost := await _lost(history, replace(part.chain, incarnation=following))) is not None:
            return Case(part, error=lost, incarnation=following)
        current = await history.load()
        if current is None:
            await _check_beginning(opened, part)
    except FloeError as error:
        return Case(part, error=error, incarnation=number)
    if current is None:
        return Case(part)
    archive = await Archive.of(current, parts, Marks(parts.state), io)
    try:
        await archive.load()
    except (Unavailable, DataError) as error:
        if error.code not in OF_LISTING:
            raise
        await archive.survey()
        return Case(part, current, archive.first, archive.end, error=error)
    return await _judged(opened, part, current, archive)


async def _lost(history: History, chain: Chain) -> FloeError | None:
    """What keeps an incarnation from being made: an archive of it that was lost, or a mark that is none."""
    try:
        return await history.lost(chain)
    except DataError as spoiled:
        return spoiled


async def _check_beginning(opened: Opened, part: Slice) -> None:
    """Raises Stopped where a feed cannot begin."""
    info = await stream_info(opened.parts.client, part.stream)
    if info is None:
        raise never_begun(part)
    check_start(info, part.settings)


async def _judged(opened: Opened, part: Slice, current: Incarnation, archive: Archive) -> Case:
    parts = opened.parts
    inquiry = Inquiry(part, parts, opened.pools.io)
    try:
        inquiry.acceptance = await Acceptances(parts.state).get(current.chain)
        await Closings(parts.state).get(current.chain)
    except DataError as spoiled:
        return Case(part, current, archive.first, archive.end, error=spoiled)
    evidence, verdict = await inquiry.look(current, archive)
    source = evidence.source
    is_hollow = verdict.is_same and source is not None and archive.is_hollow(source.first)
    error = archive.hollow(source.first) if is_hollow and source is not None else None
    asked = not verdict.is_same and verdict.kind is not Kind.GONE
    proposal = await inquiry.proposal(current, archive, evidence, verdict) if asked else None
    return Case(part, current, archive.first, archive.end, evidence, verdict, proposal, error)
