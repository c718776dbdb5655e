"""Is this still the stream that the chain was frozen from? A pure verdict from what was read.

| evidence | verdict |
|---|---|
| a held tip is equal, the source reaches the archive's end | SAME |
| a held tip is equal, but the source ends earlier, or a newer held tip differs | ROLLED_BACK |
| nothing of the current history matches, but an older incarnation does, or its `created` | FORKED |
| tips held, none equal, `created` differs | RECREATED |
| the source ends earlier, `created` differs, no tip equal | RECREATED |
| nothing archived yet | SAME if `created` is equal, else RECREATED |
| no tip held, `created` equal, the first held message later than the newest tip | UNVERIFIED |
| no such stream | GONE |
| anything else | UNKNOWN |

A tip also stands for a message found where the archive covers a stretch without any: that one differs.
`created` alone proves nothing: it drifts on the same data, and a recreated stream may already be longer than
the archive. Nothing here waits or asks; `egress.evidence` gathers, and asks again before a verdict has
consequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from common.segments.segment import Tip


class Held(StrEnum):
    """What the source holds at the sequence of a tip."""

    EQUAL = "equal"
    DIFFERENT = "different"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Witness:
    """A message that was archived (or received), and what the source holds in its place."""

    tip: Tip
    held: Held


@dataclass(frozen=True, slots=True)
class Source:
    """The stream as it stands.

    `first`: its first sequence. `last`: the last one it assigned, whether or not it is held.
    `first_timestamp_ns`: of the first message held, None where none is. `last_timestamp_ns`: likewise.
    `retention`: `limits`, `interest` or `workqueue`. `asked_ns`: the server's time of the answer, None where
    it does not say (before 2.10).
    """

    created: str
    first: int
    last: int
    first_timestamp_ns: int | None = None
    last_timestamp_ns: int | None = None
    retention: str = "limits"
    asked_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a verdict is made from.

    `source`: None if there is no such stream. `created`: as `stream.json` has it. `end`: the last sequence
    that the archive covers, 0 if it covers none. `tips`: of the archive, newest first. `received`: the last
    message received and not yet archived, if any. `older`: the incarnation before this one of which a held
    tip is equal, or which was made for a stream with this very `created`.
    """

    source: Source | None
    created: str
    end: int = 0
    tips: tuple[Witness, ...] = ()
    received: Witness | None = None
    older: int | None = None


class Kind(StrEnum):
    SAME = "same"
    UNVERIFIED = "unverified"
    RECREATED = "recreated"
    ROLLED_BACK = "rolled_back"
    FORKED = "forked"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the source is, and `why`, in words. `drifted`: the same data under another `created`."""

    kind: Kind
    why: str
    drifted: bool = False

    @property
    def is_same(self) -> bool:
        """Whether the chain may go on."""
        return self.kind in (Kind.SAME, Kind.UNVERIFIED)


def judge(evidence: Evidence) -> Verdict:
    """The verdict of the table above; its rows are tried in the order in which they stand here."""
    source = evidence.source
    if source is None:
        return Verdict(Kind.GONE, "the stream does not exist")
    equal = _tips(evidence, Held.EQUAL)
    if equal:
        return _judge_matching(evidence, source, equal[0])
    if evidence.received is not None and evidence.received.held is Held.EQUAL:
        return _judge_received(evidence, source, evidence.received.tip)
    if evidence.older is not None:
        why = f"incarnation {evidence.older:04d} is there again"
        return Verdict(Kind.FORKED, f"{why}: two sources under one name, or an old disk")
    if not evidence.end:
        return _judge_unused(evidence, source)
    return _judge_unmatched(evidence, source)


def _tips(evidence: Evidence, held: Held) -> list[Tip]:
    return [witness.tip for witness in evidence.tips if witness.held is held]


def _judge_matching(evidence: Evidence, source: Source, equal: Tip) -> Verdict:
    differing = [tip for tip in _tips(evidence, Held.DIFFERENT) if tip.sequence > equal.sequence]
    if differing:
        first = min(tip.sequence for tip in differing)
        why = f"sequence {equal.sequence} is as archived, sequence {first} is not"
        return Verdict(
            Kind.ROLLED_BACK, f"{why}; the archive ends at {evidence.end}, the stream at {source.last}"
        )
    if source.last < evidence.end:
        why = f"sequence {equal.sequence} is as archived, but the stream ends at {source.last}"
        return Verdict(Kind.ROLLED_BACK, f"{why}, the archive at {evidence.end}")
    return Verdict(Kind.SAME, f"sequence {equal.sequence} is as archived", source.created != evidence.created)


def _judge_received(evidence: Evidence, source: Source, received: Tip) -> Verdict:
    """No archived tip matches, but what was received after them does."""
    if _tips(evidence, Held.DIFFERENT) or source.last < evidence.end:
        return _unknown(evidence, source)
    why = f"sequence {received.sequence} is as received"
    return Verdict(Kind.SAME, why, source.created != evidence.created)


def _judge_unused(evidence: Evidence, source: Source) -> Verdict:
    if source.created == evidence.created:
        return Verdict(Kind.SAME, "nothing is archived yet")
    # Nothing of the old history is archived that the new one could be confused with.
    return Verdict(Kind.RECREATED, f"nothing is archived yet, {_created(evidence, source)}")


def _judge_unmatched(evidence: Evidence, source: Source) -> Verdict:
    drifted = source.created != evidence.created
    differing = _tips(evidence, Held.DIFFERENT)
    if drifted and differing:
        why = f"sequence {differing[0].sequence} is not as archived"
        return Verdict(Kind.RECREATED, f"{why}, {_created(evidence, source)}")
    if drifted and source.last < evidence.end:
        why = f"the stream ends at {source.last}, the archive at {evidence.end}"
        return Verdict(Kind.RECREATED, f"{why}, {_created(evidence, source)}")
    if drifted or differing or source.last < evidence.end or not _begins_later(evidence, source):
        return _unknown(evidence, source)
    return Verdict(Kind.UNVERIFIED, "no archived message is held any more, and all that is held is later")


def _begins_later(evidence: Evidence, source: Source) -> bool:
    newest = max((witness.tip.timestamp_ns for witness in evidence.tips), default=None)
    return newest is None or source.first_timestamp_ns is None or source.first_timestamp_ns > newest


def _unknown(evidence: Evidence, source: Source) -> Verdict:
    differing = _tips(evidence, Held.DIFFERENT)
    what = (
        f"sequence {differing[0].sequence} is not as archived" if differing else "no archived message is held"
    )
    bounds = f"the archive ends at {evidence.end}, the stream holds {source.first}..{source.last}"
    return Verdict(Kind.UNKNOWN, f"{what}; {bounds}; {_created(evidence, source)}")


def _created(evidence: Evidence, source: Source) -> str:
    if source.created == evidence.created:
        return f"created is unchanged ({source.created})"
    return f"created was {evidence.created} and is {source.created}"
