"""What a correction has to do about parked messages, as pure functions: which marks the intent that it drops
would have put, and from where on what was parked stands for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from common.chain import Chain
from common.errors import Stopped
from ingress.checkpoint import Checkpoint, Intent, ParkedAs
from ingress.operator.target_scan import Census
from ingress.parked.names import Entry, State

Message = tuple[Chain, int]


class CorrectionRefused(Stopped):
    """A correction that would lose or repeat messages without anybody having said so."""

    default_code = "E-CORRECTION"


@dataclass(frozen=True, slots=True)
class Marks:
    """Parked messages that a chain has passed (`left_out`), and that stand in the target (`delivered`)."""

    left_out: tuple[Message, ...] = ()
    delivered: tuple[Message, ...] = ()

    def told(self) -> list[str]:
        """What becomes of them, a line for each kind."""
        lines = []
        if self.left_out:
            lines.append(f"{_named(self.left_out)}: parked; floe parked retry delivers it")
        if self.delivered:
            lines.append(f"{_named(self.delivered)}: parked before, and stands there: marked as delivered")
        return lines


def no_marks() -> Marks:
    """Nothing to do."""
    return Marks()


def _named(messages: Collection[Message]) -> str:
    first = ", ".join(f"{chain} {sequence}" for chain, sequence in sorted(messages)[:3])
    return first if len(messages) <= 3 else f"{first} and {len(messages) - 3} more"


@dataclass(slots=True)
class Sightings:
    """Which messages a census counts, and which `parked` ones it came across (`seen`).

    `again`: how many of those were not counted.
    """

    parked: Collection[Message]
    counts: Callable[[Chain, int], bool] | None = None
    seen: set[Message] = field(default_factory=set)
    again: int = 0

    def __call__(self, chain: Chain, sequence: int) -> bool:
        """Whether a message counts."""
        is_counted = self.counts is None or self.counts(chain, sequence)
        if (chain, sequence) in self.parked:
            self.seen.add((chain, sequence))
            self.again += not is_counted
        return is_counted


def sighted_again(census: Census) -> int:
    """How many messages of the census are parked ones that were tried again."""
    return census.counts.again if isinstance(census.counts, Sightings) else 0


def _seen(census: Census) -> Collection[Message]:
    return census.counts.seen if isinstance(census.counts, Sightings) else ()


def marks_of(
    intent: Intent | None,
    positions: Mapping[Chain, int],
    stored: int | None,
    census: Census,
    *,
    repeats: bool,
) -> Marks:
    """What the intent that is dropped would have marked, where its chains go on at `positions`.

    `stored`: how many of its messages stand in the target; None: what the census saw. Raises
    CorrectionRefused where nobody can tell whether a parked message stands there, unless `repeats`.
    """
    if intent is None:
        return Marks()
    left_out = [(p.chain, each) for p in intent.pieces for each in p.left_out]
    passed = tuple(each for each in left_out if each[1] < positions.get(each[0], 0))
    tried = [(p.chain, p.rows.first) for p in intent.pieces if p.out_of_turn]
    if stored is not None:
        return Marks(passed, _among(intent, stored))
    seen = tuple(each for each in tried if each in _seen(census))
    unseen = [each for each in tried if each not in seen]
    if unseen and census.gone and not repeats:
        raise CorrectionRefused(
            f"{census.gone} messages cannot be read any more: expected to see whether these parked ones are "
            f"stored, found neither: {_named(unseen)}",
            hint="--accept-repeats: where the gone messages were these, they are stored twice",
        )
    return Marks(passed, seen)


def _among(intent: Intent, stored: int) -> tuple[Message, ...]:
    """The messages out of turn among the first `stored` of the intent."""
    found, before = [], 0
    for piece in intent.pieces:
        before += piece.count
        if piece.out_of_turn and before <= stored:
            found.append((piece.chain, piece.rows.first))
    return tuple(found)


def marks_by_listing(entries: Collection[Entry], checkpoint: Checkpoint, census: Census) -> Marks:
    """The marks that are missing, by what is parked and what a census of the whole target saw of that."""
    seen = _seen(census)
    left_out, delivered = list[Message](), list[Message]()
    for entry in entries:
        chain, sequence = message = (entry.name.chain, entry.name.sequence)
        if entry.name.created != checkpoint.parked_as.of(chain, sequence):
            continue  # carried again
        if entry.state is State.PENDING:
            is_passed = sequence < checkpoint.positions.get(chain, 0)
            left_out += [message] if is_passed and entry.is_kept and message not in seen else []
        elif entry.state is not State.DELIVERED and message in seen:
            delivered.append(message)
    return Marks(tuple(left_out), tuple(delivered))


def kept_as(checkpoint: Checkpoint, created: str, positions: Mapping[Chain, int]) -> ParkedAs | None:
    """Under which name parked messages are kept where chains go on at `positions`, in the stream `created`.

    What was parked of a chain behind its new position stands for nothing: it comes again. All else stays what
    it was, also where the stream is another one.
    """
    was, before = checkpoint.parked_as, checkpoint.positions
    back = [(chain, at) for chain, at in sorted(positions.items()) if at < before.get(chain, 0)]
    gone = [(chain, 0) for chain in sorted(before) if chain not in positions]
    parked = ParkedAs(was.created, (*was.anew, *back, *gone))
    return None if parked == ParkedAs(created) else parked


def anew(parked: ParkedAs) -> ParkedAs:
    """Everything is carried again."""
    return ParkedAs(parked.created, (*parked.anew, (None, 0)))
