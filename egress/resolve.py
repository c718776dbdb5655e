"""State of a stopped partition for an operator: verdict, evidence, bounds, choices; and the decisions."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from common.chain import MAX_INCARNATION, Chain
from common.clock import format_unix
from common.errors import ConfigError, DataError, FloeError, Stopped, Unavailable, UsageError
from common.exits import restore_command
from common.logs import get_logger
from common.nats.api import stream_info
from common.sequences import SequenceRange
from egress.account_watch import matched_streams
from egress.archive import Archive
from egress.consumers import check_retention, check_start
from egress.deps import CommandContext, PartitionDeps
from egress.evidence import IdentityCheck
from egress.identity import (
    CODES,
    Choice,
    Evidence,
    IdentityRecord,
    SourceStream,
    SourceVerdict,
    VerdictKind,
    can_be_same,
    choices,
    first_difference_text,
    gone_hint,
    identity_of,
    no_stream_error,
    possible_first,
    why_not_same,
)
from egress.incarnations import Closings, EndDecision, HighWaterMarks, Incarnation, Incarnations, newest_incarnation
from egress.partition import Partition, accounted_until

log = get_logger(__name__)


# Problems of the listing or of the mark; `--believe-listing` solves them.
LISTING_CODES = ("E-LISTING", "E-EMPTY-ARCHIVE", "E-STATE-KV")
FEED_CODES = ("E-FILTERS",)  # one problem of all partitions, which may differ from the configured ones


@dataclass(frozen=True, slots=True)
class Case:
    """State of one partition. `current`: None if it has not begun. `end`: the end of the listing now, 0 if it is empty.
    `error`: the reason that the partition cannot be judged. `proposal`: the beginning of its next incarnation, None if
    nothing is wrong. `incarnation`: the newest, if `current` cannot be read. `is_agreed`: as in Proposal. `mark`: the
    high-water mark, if a listing is in doubt; 0 without.
    """

    partition: Partition
    current: Incarnation | None = None
    first: int = 1
    end: int = 0
    evidence: Evidence | None = None
    verdict: SourceVerdict | None = None
    proposal: int | None = None
    error: FloeError | None = None
    incarnation: int = 0
    is_agreed: bool = False
    mark: int = 0

    @property
    def chain(self) -> Chain:
        if self.current is None:
            return self.partition.chain.with_incarnation(self.incarnation)
        return self.current.chain

    @property
    def code(self) -> str:
        """Code of the error; empty if the partition is not stopped."""
        if self.error is not None:
            return self.error.code
        if self.verdict is None or self.verdict.is_same:
            return ""
        return CODES.get(self.verdict.kind, "")

    @property
    def bounds(self) -> SequenceRange | None:
        return possible_first(self.evidence.source) if self.evidence and self.evidence.source else None

    @property
    def choices(self) -> list[Choice]:
        if self.code in LISTING_CODES:
            lost = f"the archive up to {self.mark} is lost for good" if self.mark else "nothing was ever archived"
            what = f"the listing is right: it ends at {self.end}" if self.end else lost
            return [Choice("--believe-listing", what)]
        if self.evidence is None or self.verdict is None or self.verdict.is_same:
            return []
        has_partitions = len(self.partition.settings.filters()) > 1
        return choices(self.evidence, self.verdict, self.proposal, has_partitions=has_partitions)

    @property
    def advice(self) -> str:
        """Advice if no command decides the case; empty if one does, or if nothing is wrong."""
        if self.choices:
            return ""
        if self.verdict is not None and self.verdict.kind is VerdictKind.GONE:
            return gone_hint(self.partition, self.chain, elsewhere=bool(self.evidence and self.evidence.affects_others))
        return self.error.hint if self.error else ""

    def as_json(self) -> dict[str, Any]:
        evidence, verdict = self.evidence, self.verdict
        source, tips = (evidence.source, evidence.tips) if evidence else (None, ())
        reason = self.error.message if self.error else verdict.reason if verdict else "not begun"
        if evidence is not None and self.error is None:
            reason += first_difference_text(evidence, self.proposal)
        return {
            "chain": str(self.chain),
            "stream": self.partition.stream,
            "code": self.code,
            "verdict": verdict.kind.value if verdict else "",
            "why": reason,
            "archive_first": self.first,
            "archive_end": self.end,
            "stream_first": source.first if source else None,
            "stream_last": source.last if source else None,
            "created_archived": self.current.stream.created if self.current else "",
            "created_found": source.created if source else "",
            "evidence": [{"sequence": each.tip.sequence, "held": each.held.value} for each in tips],
            "from_first": self.bounds.first if self.bounds else None,
            "from_last": self.bounds.last if self.bounds else None,
            "choices": [asdict(each) for each in self.choices],
            "advice": self.advice,
        }


async def load_case(context: CommandContext, partition: Partition) -> Case:
    """Return the state of the partition. Raises Unavailable, Refused and ApiError if nothing can be queried."""
    deps = context.deps_of(partition)
    incarnations = Incarnations(deps)
    number = 0
    try:
        newest = await deps.pools.io.run(newest_incarnation, deps.chains, partition.chain)
        number = newest or 0
        following = 0 if newest is None else min(newest + 1, MAX_INCARNATION)
        chain = partition.chain.with_incarnation(following)
        if (lost := await _lost(incarnations, chain)) is not None:
            return Case(partition, error=lost, incarnation=following, mark=await _mark(deps, chain))
        current, info = await incarnations.load(), await stream_info(context.deps.client, partition.stream)
        if info is not None:
            check_retention(info, partition.settings)
        elif (deleted := await _deleted_error(context, partition)) is not None:
            raise deleted
        if current is None:
            if info is None:
                raise _unknown_error(partition) if partition.settings.streams else no_stream_error(partition)
            check_start(info, partition.settings)
    except (Stopped, ConfigError, DataError) as error:  # other errors prove nothing about the partition
        return Case(partition, error=error, incarnation=number)
    if current is None:
        return Case(partition)
    archive = await Archive.open(current, deps)
    try:
        await archive.load()
    except (Unavailable, DataError) as error:
        if error.code not in LISTING_CODES:
            raise
        await archive.load_all()
        mark = await _mark(deps, current.chain)
        return Case(partition, current, archive.first, archive.end, error=error, mark=mark)
    return await _judge(deps, current, archive)


async def _deleted_error(context: CommandContext, partition: Partition) -> UsageError | None:
    """Return the error for a stream that a pattern matched and whose deletion was announced; None for another one."""
    document = matched_streams(context.deps.state, partition.chain.site)
    found, name = (await document.get(allow_unreadable=True))[0], partition.stream
    if found is None or (deleted := found.deleted.get(name)) is None:
        return None
    text = f"{name}: the stream was deleted, and its feed has ended, at {format_unix(deleted.at)}: {deleted}"
    again = "nothing to decide: if it is created again, its next incarnation begins; to restore it as it was:\n"
    return UsageError(text, hint=again + restore_command(partition.chain, elsewhere=False))


def _unknown_error(partition: Partition) -> UsageError:
    pattern = partition.settings.pattern
    return UsageError(f"{partition.stream}: expected a feed or a stream that {pattern} matches, found neither")


async def _mark(deps: PartitionDeps, chain: Chain) -> int:
    """Return the mark; 0 if there is none, or none that can be read."""
    with suppress(DataError):
        return await HighWaterMarks(deps.state).get(chain) or 0
    return 0


async def _lost(incarnations: Incarnations, chain: Chain) -> FloeError | None:
    try:
        return await incarnations.find_lost(chain)
    except DataError as unreadable:
        return unreadable


async def _judge(deps: PartitionDeps, current: Incarnation, archive: Archive) -> Case:
    partition, identity = deps.partition, IdentityCheck(deps)
    try:
        identity.record, _ = await identity_of(deps.state, current.chain).get()
        await Closings(deps.state).get(current.chain)
    except DataError as unreadable:
        return Case(partition, current, archive.first, archive.end, error=unreadable)
    evidence, verdict = await identity.judge_once(current, archive)
    source = evidence.source
    error = None
    if verdict.is_same and source is not None and archive.may_be_wiped(source.first):
        error = archive.wiped_error(source.first)
    needs_proposal = not verdict.is_same and verdict.kind is not VerdictKind.GONE
    found = await identity.proposal(current, archive, evidence, verdict) if needs_proposal else None
    first, is_agreed = found or (None, False)
    return Case(partition, current, archive.first, archive.end, evidence, verdict, first, error, is_agreed=is_agreed)


def plan_incarnation(cases: Sequence[Case], sequence: int | None) -> EndDecision:
    """Decide the beginnings of the partitions that cannot continue: at `sequence`, or each at its proposal.

    The others begin after their ends by themselves. Raises UsageError if that cannot be decided now.
    """
    sources: list[SourceStream] = []
    for case in cases:
        if case.error is not None or case.evidence is None or case.evidence.source is None:
            reason, hint = case.as_json()["why"], case.advice or "solve that first"
            raise UsageError(f"{case.chain}: {reason.removeprefix(f'{case.chain}: ')}", hint=hint)
        sources.append(case.evidence.source)
    stopped = [case for case in cases if case.code]
    if not stopped:
        raise UsageError("this feed is not stopped: a new incarnation would only split its history")
    if len({source.created for source in sources}) > 1:
        raise UsageError("the stream was recreated during the check", hint="run the command again")
    first = {case.partition.number: _first(case, sequence) for case in stopped}
    older = {case.evidence.older_match for case in stopped if case.evidence}
    joins = {c.partition.number: min(first[c.partition.number], c.proposal or 1) for c in stopped if c.is_agreed}
    # All of one history: a partition that continues by itself continues the incarnation that ends, no older one.
    is_one = len(joins) == len(stopped) and (older == {None} or (len(older) == 1 and stopped == list(cases)))
    least = min(source.first for source in sources)
    return EndDecision(sources[0].created, first, joins if is_one else {}, older.pop() if is_one else None, least)


def _first(case: Case, sequence: int | None) -> int:
    bounds = case.bounds
    first = sequence or case.proposal
    if bounds is None or first is None:
        raise UsageError(f"{case.chain}: expected a sequence to begin at, found none", hint="give it: --from SEQ")
    if first not in bounds:
        raise UsageError(f"--from: expected a sequence within {bounds}, found {first}")
    return first


def overlap_warning(case: Case, first: int) -> str:
    """Describe the sequences that a beginning at `first` would repeat or leave out; empty if there are none."""
    if case.proposal is None or first == case.proposal:
        return ""
    if first < case.proposal:
        return f"{case.chain}: {first}..{case.proposal - 1} is archived already, and will be archived again"
    return f"{case.chain}: {case.proposal}..{first - 1} is not archived, and never will be"


async def decide_incarnation(context: CommandContext, cases: Sequence[Case], decision: EndDecision) -> None:
    """Record the decision. Raises UsageError if the incarnation has ended already."""
    chain = cases[0].chain
    closing = await Closings(context.deps.state).change(chain, lambda found: found.with_decision(decision))
    if closing.next is not None:
        raise UsageError(f"{chain}: its incarnation has ended meanwhile", hint="run the command again")
    log.info("new incarnation decided", action="incarnation_decided", **chain.log_context())


def check_same(case: Case) -> IdentityRecord:
    """Return the acceptance of the stream as the same. Raises UsageError if that is not possible."""
    evidence, verdict = case.evidence, case.verdict
    if evidence is None or verdict is None or evidence.source is None or not case.code or case.error:
        raise UsageError(f"{case.chain}: --same is not possible: {case.as_json()['why']}")
    if not can_be_same(evidence, verdict):
        other = f"the stream is {verdict.kind.value.replace('_', ' ')}"
        reason = why_not_same(evidence, evidence.source) if verdict.kind is VerdictKind.UNKNOWN else other
        raise UsageError(f"{case.chain}: --same is not possible: {reason}", hint="--new-incarnation loses nothing")
    return IdentityRecord(evidence.source.created, evidence.end)


async def accept_same(context: CommandContext, case: Case) -> None:
    await identity_of(context.deps.state, case.chain).put(check_same(case))
    log.info("stream accepted as the same", action="stream_accepted", **case.chain.log_context())


def check_listing(case: Case) -> None:
    """Raise UsageError if nothing is wrong with the listing."""
    if case.code not in LISTING_CODES:
        raise UsageError(f"{case.chain}: nothing is wrong with its listing")


async def accept_listing(context: CommandContext, case: Case) -> int:
    """Set the mark to the end of the listing, and return it. Delete an acceptance or a closing that cannot be read, or
    that is about an incarnation without any object left.

    Raises UsageError if nothing is wrong with the listing.
    """
    check_listing(case)
    deps, chain = context.deps, case.chain
    end = accounted_until(case.first, case.end)
    await HighWaterMarks(deps.state).overwrite(chain, end)
    identity, closings = identity_of(deps.state, chain), Closings(deps.state)
    for read, key in ((identity.get(), identity.key), (closings.get(chain), closings.key(chain))):
        with suppress(DataError):
            await read
            if case.current is not None:
                continue
        await deps.state.delete(key)
    log.info("listing accepted", action="listing_accepted", end=end, **chain.log_context())
    return end


async def accept_following(context: CommandContext, case: Case) -> list[Chain]:
    """Do the same for the lost incarnations after that of `case` that have a mark, and return them."""
    found: list[Chain] = []
    chain = case.chain
    while case.current is None and chain.incarnation < MAX_INCARNATION:
        chain = chain.next_incarnation()
        if (lost := await _lost(Incarnations(context.deps_of(case.partition)), chain)) is None:
            break
        await accept_listing(context, replace(case, error=lost, incarnation=chain.incarnation))
        found.append(chain)
    return found
