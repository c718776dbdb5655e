"""Pure verdict on the identity of a stream, compared with the one that the chain was archived from.

| evidence | verdict |
|---|---|
| a held tip is equal, the source reaches the archive's end | SAME |
| a held tip is equal, but the source ends earlier, or a newer held tip differs | ROLLED_BACK |
| the source ends before this incarnation began, and an older one matches | ROLLED_BACK |
| nothing of the current history matches, but an older incarnation does, or its `created` | FORKED |
| tips held, none equal, `created` differs | RECREATED |
| the source ends earlier, `created` differs, no tip equal | RECREATED |
| nothing archived yet | SAME if `created` is equal, else RECREATED |
| no tip held, `created` equal, the first held message after the newest tip, and later | UNVERIFIED |
| no such stream | GONE |
| anything else | UNKNOWN |

A message in a stretch that the archive covers without messages counts as a tip that differs. `created` alone proves
nothing: it drifts on the same data, and a recreated stream may already be longer than the archive. Nothing here waits
or queries. `egress.evidence` gathers the evidence, and gathers it again before a verdict has consequences.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec.structs import replace as replace_fields

from common.archive.segment import Tip
from common.chain import Chain
from common.documents import JsonCodec
from common.errors import Stopped
from common.exits import believe_command, list_command, resolve_command, restore_command
from common.nats.kv import KeyValue, KvDocument, state_key
from common.sequences import MAX_SEQUENCE, SequenceRange
from egress.partition import Partition, kv_error


class HeldMessage(StrEnum):
    """Comparison of a tip with the source's message at its sequence."""

    EQUAL = "equal"
    DIFFERENT = "different"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Witness:
    """Message that was archived (or received), and its comparison with the source."""

    tip: Tip
    held: HeldMessage

    @property
    def is_held(self) -> bool:
        return self.held is not HeldMessage.ABSENT


def is_any_equal(witnesses: Iterable[Witness]) -> bool:
    return any(witness.held is HeldMessage.EQUAL for witness in witnesses)


@dataclass(frozen=True, slots=True)
class SourceStream:
    """Present state of the stream.

    `first`: its first sequence. `last`: the last one it assigned, even if that message is gone. `first_timestamp_ns`:
    of the first message held, None if none is. `last_timestamp_ns`: that of the last message. `retention`:
    `limits`, `interest` or `workqueue`. `server_time_ns`: the server's time of the answer, None if it is absent (before
    2.10). `deleted`: the number of sequences between `first` and `last` that it does not hold.
    """

    created: str
    first: int
    last: int
    first_timestamp_ns: int | None = None
    last_timestamp_ns: int | None = None
    retention: str = "limits"
    server_time_ns: int | None = None
    deleted: int = 0


@dataclass(frozen=True, slots=True)
class Evidence:
    """Input of a verdict.

    `source`: None if there is no such stream. `created`: from `stream.json`. `end`: the last sequence that the archive
    covers, 0 if it covers none. `tips`: of the archive, newest first. `received`: the last message received and not yet
    archived, if any. `older_match`: the incarnation before this one of which a held tip is equal, or which was made for
    a stream with the same `created`; `ends_before_incarnation`: the source ends before this incarnation began.
    `affects_others`: the stream that is gone had effects outside of its own subjects, so a restore needs
    `--allow-elsewhere`.
    """

    source: SourceStream | None
    created: str
    end: int = 0
    tips: tuple[Witness, ...] = ()
    received: Witness | None = None
    older_match: int | None = None
    ends_before_incarnation: bool = False
    affects_others: bool = False


class VerdictKind(StrEnum):
    SAME = "same"
    UNVERIFIED = "unverified"
    RECREATED = "recreated"
    ROLLED_BACK = "rolled_back"
    FORKED = "forked"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class SourceVerdict:
    """Identity of the source, and its reason in words. `has_drifted`: the same data under another `created`."""

    kind: VerdictKind
    reason: str
    has_drifted: bool = False

    @property
    def is_same(self) -> bool:
        return self.kind in (VerdictKind.SAME, VerdictKind.UNVERIFIED)


def judge(evidence: Evidence) -> SourceVerdict:
    if (source := evidence.source) is None:
        return SourceVerdict(VerdictKind.GONE, "the stream does not exist")
    if equal := _tips(evidence, HeldMessage.EQUAL):
        return _judge_matching(evidence, source, equal[0])
    if evidence.received is not None and evidence.received.held is HeldMessage.EQUAL:
        return _judge_received(evidence, source, evidence.received.tip)
    if (older := evidence.older_match) is not None and evidence.ends_before_incarnation:
        reason = f"the stream ends at {source.last} in incarnation {older:04d}, the archive at {evidence.end}"
        return SourceVerdict(VerdictKind.ROLLED_BACK, reason)
    if older is not None:
        reason = f"incarnation {older:04d} is back"
        return SourceVerdict(VerdictKind.FORKED, f"{reason}: two sources under one name, or an old disk")
    if not evidence.end and source.created == evidence.created:
        return SourceVerdict(VerdictKind.SAME, "nothing is archived yet")
    if not evidence.end:  # no archived message that the new history could be confused with
        return SourceVerdict(VerdictKind.RECREATED, f"nothing is archived yet, {_created(evidence, source)}")
    return _judge_unmatched(evidence, source)


def _tips(evidence: Evidence, held: HeldMessage) -> list[Tip]:
    return [witness.tip for witness in evidence.tips if witness.held is held]


def _judge_matching(evidence: Evidence, source: SourceStream, equal: Tip) -> SourceVerdict:
    reason = f"sequence {equal.sequence} is as archived"
    newer = [tip.sequence for tip in _tips(evidence, HeldMessage.DIFFERENT) if tip.sequence > equal.sequence]
    if newer:
        reason += f", sequence {min(newer)} is not; the archive ends at {evidence.end}, the stream at {source.last}"
        return SourceVerdict(VerdictKind.ROLLED_BACK, reason)
    if source.last < evidence.end:
        reason += f", but the stream ends at {source.last}, the archive at {evidence.end}"
        return SourceVerdict(VerdictKind.ROLLED_BACK, reason)
    return SourceVerdict(VerdictKind.SAME, reason, source.created != evidence.created)


def _judge_received(evidence: Evidence, source: SourceStream, received: Tip) -> SourceVerdict:
    if _tips(evidence, HeldMessage.DIFFERENT) or source.last < evidence.end:
        return _unknown_verdict(evidence, source)
    reason = f"sequence {received.sequence} is as received"
    return SourceVerdict(VerdictKind.SAME, reason, source.created != evidence.created)


def _judge_unmatched(evidence: Evidence, source: SourceStream) -> SourceVerdict:
    drifted = source.created != evidence.created
    differing = _tips(evidence, HeldMessage.DIFFERENT)
    if drifted and differing:
        reason = f"sequence {differing[0].sequence} is not as archived"
        return SourceVerdict(VerdictKind.RECREATED, f"{reason}, {_created(evidence, source)}")
    if drifted and source.last < evidence.end:
        reason = f"the stream ends at {source.last}, the archive at {evidence.end}"
        return SourceVerdict(VerdictKind.RECREATED, f"{reason}, {_created(evidence, source)}")
    if drifted or differing or source.last < evidence.end or not _begins_later(evidence, source):
        return _unknown_verdict(evidence, source)
    return SourceVerdict(VerdictKind.UNVERIFIED, "the stream holds no archived message any more, only later ones")


def _begins_later(evidence: Evidence, source: SourceStream) -> bool:
    newest = max((witness.tip for witness in evidence.tips), key=lambda tip: tip.timestamp_ns, default=None)
    at = source.first_timestamp_ns
    return newest is None or at is None or (source.first > newest.sequence and at > newest.timestamp_ns)


def _unknown_verdict(evidence: Evidence, source: SourceStream) -> SourceVerdict:
    differing = _tips(evidence, HeldMessage.DIFFERENT)
    what = f"sequence {differing[0].sequence} is not as archived" if differing else "no archived message is left"
    bounds = f"the archive ends at {evidence.end}, the stream holds {source.first}..{source.last}"
    return SourceVerdict(VerdictKind.UNKNOWN, f"{what}; {bounds}; {_created(evidence, source)}")


def _created(evidence: Evidence, source: SourceStream) -> str:
    if source.created == evidence.created:
        return f"created is unchanged ({source.created})"
    return f"created was {evidence.created} and is {source.created}"


class IdentityRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="format_version", tag=1):
    """Lasting knowledge of the stream created at `created`.

    `end`: an operator accepted it as the one that was archived up to there, even if messages up to there differ; 0: not
    accepted. `set_back_at`: it was set back, and this sequence was not as archived; 0: it was not.
    """

    created: str
    end: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)] = 0
    set_back_at: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)] = 0


IDENTITY_RECORD = JsonCodec(IdentityRecord)


def identity_key(chain: Chain) -> str:
    number = f"{chain.incarnation:04d}"
    return state_key("egress", "same", chain.site, chain.feed, number, str(chain.partition))


def identity_of(state: KeyValue, chain: Chain) -> KvDocument[IdentityRecord]:
    hint = f"to discard it, so that the evidence decides:\n{believe_command(chain)}"
    return KvDocument(state, identity_key(chain), IDENTITY_RECORD, kv_error(f"identity of {chain}", hint))


def remember(record: IdentityRecord | None, evidence: Evidence, verdict: SourceVerdict) -> IdentityRecord | None:
    """Return the record with the first sequence that is known not to be as archived, if the stream was set back."""
    source, equal = evidence.source, max((tip.sequence for tip in _tips(evidence, HeldMessage.EQUAL)), default=0)
    if source is None or verdict.kind is not VerdictKind.ROLLED_BACK:
        return record
    missing = (source.last + 1,) if source.last < evidence.end else ()
    differing = (tip.sequence for tip in _tips(evidence, HeldMessage.DIFFERENT) if tip.sequence > equal)
    at, known = min((*differing, *missing), default=0), record
    if known is None or known.created != source.created:
        known = IdentityRecord(source.created)
    return record if known.set_back_at or not at else replace_fields(known, set_back_at=at)


def judge_with(evidence: Evidence, record: IdentityRecord | None) -> SourceVerdict:
    """Return the verdict with what is known of this stream; the record of another one has no effect.

    A stream that was set back remains so until a message is as archived at or after the sequence that was not:
    messages that leave it, and new ones that pass the archive's end, prove nothing.
    """
    source = evidence.source
    if record is None or source is None or source.created != record.created:
        return judge(evidence)
    verdict, back = _judge_accepted(evidence, source, record), record.set_back_at
    is_back = any(tip.sequence >= back for tip in _tips(evidence, HeldMessage.EQUAL))
    if not back or is_back or not (verdict.is_same or verdict.kind is VerdictKind.UNKNOWN):
        return verdict
    return SourceVerdict(VerdictKind.ROLLED_BACK, f"sequence {back} was not as archived, and nothing after it is since")


def _judge_accepted(evidence: Evidence, source: SourceStream, record: IdentityRecord) -> SourceVerdict:
    """Return the verdict; an acceptance replaces the evidence for all that was archived up to its end.

    It has no effect if the stream or the archive ends before the accepted end. Messages archived since are judged as
    usual.
    """
    if not record.end or source.last < record.end or evidence.end < record.end:
        return judge(evidence)
    newer = tuple(witness for witness in evidence.tips if witness.tip.sequence > record.end)
    if not newer and evidence.end == record.end:
        return SourceVerdict(VerdictKind.SAME, f"accepted up to {record.end}")
    return judge(replace(evidence, created=record.created, tips=newer, older_match=None))


CODES = {
    VerdictKind.GONE: "E-SOURCE-GONE",
    VerdictKind.RECREATED: "E-RECREATED",
    VerdictKind.ROLLED_BACK: "E-ROLLED-BACK",
    VerdictKind.FORKED: "E-FORKED",
    VerdictKind.UNKNOWN: "E-IDENTITY",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """Possible decision: the options of `floe egress resolve`, and their meaning."""

    options: str
    meaning: str


def possible_first(source: SourceStream) -> SequenceRange:
    last = min(max(source.last + 1, source.first), MAX_SEQUENCE)
    return SequenceRange(min(source.first, last), last)


def can_be_same(evidence: Evidence, verdict: SourceVerdict) -> bool:
    """True if the stream may be declared the same: no archived message is known to differ, and the archive does not
    reach beyond the stream's end.
    """
    source = evidence.source
    is_long = source is not None and source.last >= evidence.end
    return verdict.kind is VerdictKind.UNKNOWN and is_long and not _differs(evidence)


def _differs(evidence: Evidence) -> bool:
    return bool(_tips(evidence, HeldMessage.DIFFERENT))


def choices(evidence: Evidence, verdict: SourceVerdict, proposal: int | None, *, has_partitions: bool) -> list[Choice]:
    """Return the possible decisions, the one that loses nothing first; empty if there is no stream, or if nothing is
    wrong. `proposal`: the first sequence that is not as archived, None if it is not known. `has_partitions`: the feed
    has partitions, each with its own beginning: one `--from` would not fit all.
    """
    source, found = evidence.source, list[Choice]()
    if source is not None and not verdict.is_same:
        sequence = proposal or source.first
        meaning = _incarnation_text(evidence, source, verdict, proposal)
        options = "--new-incarnation" if has_partitions else f"--new-incarnation --from {sequence}"
        found.append(Choice(options, meaning))
    if source is not None and can_be_same(evidence, verdict):
        both = _count_common(source, evidence.end)
        what = (
            f"its {both} sequences up to there are not archived again, and are lost if they differ from the archive"
            if both
            else "it holds no message up to there, so nothing is repeated or lost"
        )
        found.append(Choice("--same", f"it is the same stream, and continues after {evidence.end}: {what}"))
    return found


def _incarnation_text(evidence: Evidence, source: SourceStream, verdict: SourceVerdict, proposal: int | None) -> str:
    sequence, end = proposal or source.first, evidence.end
    text = f"archive the stream as it is now, from {sequence} on, as the next incarnation: "
    both = _count_common(source, end)
    if proposal is None and both:
        return f"{text}nothing is lost; {both} sequences up to {end} could not be compared and may be archived twice"
    if sequence > source.first:
        return f"{text}nothing is repeated, and nothing lost but a message up to {sequence - 1} that was never archived"
    if not both or verdict.kind is not VerdictKind.UNKNOWN or _differs(evidence):
        return f"{text}none of its messages is archived, so nothing is repeated or lost"
    return f"{text}nothing is lost; {both} sequences up to {end} are archived twice if it is the same stream"


def _count_common(source: SourceStream, end: int) -> int:
    return max(0, min(end, source.last) - source.first + 1)


def no_stream_error(partition: Partition) -> Stopped:
    return Stopped(
        f"{partition.chain}: stream {partition.stream} does not exist",
        hint=f"create it: the feed then begins by itself{_exclusion_hint(partition)}",
        code=CODES[VerdictKind.GONE],
    )


def _exclusion_hint(partition: Partition) -> str:
    """Return the step for a stream that a pattern matched and that was deleted while nobody listened."""
    if not partition.settings.streams:
        return ""
    return f"; or, if it was deleted on purpose, add {partition.stream} to `except` of {partition.settings.pattern}"


def gone_hint(partition: Partition, chain: Chain, *, elsewhere: bool) -> str:
    """Return the possible steps if the stream of a feed that has begun no longer exists. `elsewhere`: as in
    `restore_command`.
    """
    again = "create it again, and its next incarnation begins by itself"
    if partition.settings.on_recreated == "halt":
        again = "create it again, then decide with the last command: `on_recreated` is halt"
    lines = [f"restore the stream as it was, and the feed continues; or {again}{_exclusion_hint(partition)}"]
    if not partition.settings.sampling_key:
        lines[0] += "; to restore it from the archive (try --dry-run first):"
        lines.append(restore_command(chain, elsewhere=elsewhere))
    if partition.settings.on_recreated == "halt":
        lines.append(resolve_command(partition.settings.name))
    return "\n".join(lines)


def verdict_error(
    partition: Partition, chain: Chain, evidence: Evidence, verdict: SourceVerdict, proposal: int | None
) -> Stopped:
    """Return the error that stops the chain on a verdict, with the possible choices."""
    is_known = verdict.kind is not VerdictKind.UNKNOWN
    state = f"is {verdict.kind.value.replace('_', ' ')}" if is_known else "cannot be identified"
    text = f"{chain}: stream {partition.stream} {state}: {verdict.reason}{first_difference_text(evidence, proposal)}"
    if evidence.source is None:
        hint = gone_hint(partition, chain, elsewhere=evidence.affects_others)
    else:
        hint = _hint(partition, chain, evidence, verdict, proposal)
    return Stopped(text, hint=hint, code=CODES[verdict.kind])


def first_difference_text(evidence: Evidence, proposal: int | None) -> str:
    """Return the first sequence that is not as archived, in words; empty if it is not known, or if no tip differs."""
    source = evidence.source
    if proposal is None or source is None or not _differs(evidence):
        return ""
    return f"; the first sequence that is not as archived is {proposal}"


def _hint(partition: Partition, chain: Chain, evidence: Evidence, verdict: SourceVerdict, proposal: int | None) -> str:
    source = evidence.source
    assert source is not None, "a stream that is gone has no choices"
    first = {
        VerdictKind.RECREATED: "set `on_recreated: continue`; or begin its next incarnation yourself",
        VerdictKind.ROLLED_BACK: "restore the stream up to its former end; or choose",
        VerdictKind.FORKED: "two sources under one name? give one of the sites another `site`; or bring back "
        "the stream that was archived last; or choose",
    }.get(verdict.kind, "compare it with the archive, then choose")
    lines = [f"{first} (a new incarnation may begin within {possible_first(source)})"]
    if verdict.kind is VerdictKind.UNKNOWN:
        lines += ["to list the archive:", list_command(chain)]
    has_partitions = len(partition.settings.filters()) > 1
    for choice in choices(evidence, verdict, proposal, has_partitions=has_partitions):
        named = chain if has_partitions and choice.options == "--same" else chain.feed
        lines += [f"{choice.meaning}:", resolve_command(named, choice.options)]
    if verdict.kind is VerdictKind.UNKNOWN and not can_be_same(evidence, verdict):
        lines[0] += f"; it cannot be the same: {why_not_same(evidence, source)}"
    return "\n".join(lines)


def why_not_same(evidence: Evidence, source: SourceStream) -> str:
    """Return the reason why an unknown stream cannot be the same."""
    if source.last < evidence.end:
        return f"the archive ends at {evidence.end}, the stream at {source.last}"
    differing = min(tip.sequence for tip in _tips(evidence, HeldMessage.DIFFERENT))
    return f"sequence {differing} is not as archived"
