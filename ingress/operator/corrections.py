"""Corrections of the state of a target: pure functions of the stored state and of the target's content.

`accept`, `rebuild` and `forget` drop the open intent, if there is one. With the first two, the positions pass its rows
that are in the target; the other rows are replayed again.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from common.chain import Chain
from common.errors import Stopped
from common.settings.types import format_count
from ingress.checkpoint import Checkpoint, Intent, ParkedNames, TargetState, advance_positions
from ingress.parked import ParkedEntry, ParkedState
from ingress.verdict.verdict import Finding, NoOrigin, Origin, TargetReading, can_count, judge, origin_of

Message = tuple[Chain, int]
Positions = Mapping[Chain, int]


class CorrectionRefused(Stopped):
    """A correction that would lose or repeat messages without the operator's consent."""

    default_code = "E-CORRECTION"


# The content of a target


@dataclass(slots=True)
class ScannedChain:
    """The messages of one chain in the range that was read.

    `first`, `newest`: least and greatest sequence found, `count`: messages; `newest_at`: target sequence of the newest;
    `found_before`: messages of any kind that were read up to and including it.
    """

    first: int
    newest: int
    count: int
    newest_at: int
    found_before: int


@dataclass(slots=True)
class TargetScan:
    """Content of a target after sequence `after`, up to and including `last`.

    `found`: messages of any kind, `foreign`: messages without provenance, `unexpected`: messages with one that
    `accepts` rejects (None: it accepts all). `parked`: parked messages to find; `parked_seen`: those that are in the
    target, `parked_repeats`: how often one of them was found that `accepts` rejects.
    """

    after: int
    last: int
    accepts: Callable[[Chain, int], bool] | None = None
    parked: Collection[tuple[Chain, int]] = ()
    found: int = field(default=0, init=False)
    foreign: int = field(default=0, init=False)
    unexpected: int = field(default=0, init=False)
    chains: dict[Chain, ScannedChain] = field(default_factory=dict, init=False)
    parked_seen: set[tuple[Chain, int]] = field(default_factory=set, init=False)
    parked_repeats: int = field(default=0, init=False)

    @property
    def gone(self) -> int:
        return max(0, self.last - self.after) - self.found

    @property
    def unexplained(self) -> int:
        return self.unexpected - self.parked_repeats

    def gone_after(self, chain: Chain) -> int:
        """Return how many gone messages were after the chain's newest: some may have been newer ones of the chain."""
        if (scanned := self.chains.get(chain)) is None:
            return self.gone
        return self.last - scanned.newest_at - (self.found - scanned.found_before)

    def add(self, at: int, headers: bytes | None) -> None:
        """Add a message. `at`: its target sequence; call in ascending order."""
        self.found += 1
        origin = origin_of(headers)
        if isinstance(origin, NoOrigin):
            self.foreign += 1
            return
        chain, sequence = origin.chain, origin.sequence
        is_counted = self.accepts is None or self.accepts(chain, sequence)
        if (chain, sequence) in self.parked:
            self.parked_seen.add((chain, sequence))
            self.parked_repeats += not is_counted
        if not is_counted:
            self.unexpected += 1
            return
        scanned = self.chains.setdefault(chain, ScannedChain(sequence, sequence, 0, at, self.found))
        scanned.count += 1
        scanned.first = min(scanned.first, sequence)
        if sequence >= scanned.newest:
            scanned.newest, scanned.newest_at, scanned.found_before = sequence, at, self.found


# Parked messages


@dataclass(frozen=True, slots=True)
class ParkedMarks:
    """Parked messages that a chain has passed (`left_out`), and those that are in the target (`delivered`)."""

    left_out: tuple[Message, ...] = ()
    delivered: tuple[Message, ...] = ()

    def effects(self) -> Iterator[str]:
        if self.left_out:
            yield f"{_named(self.left_out)}: parked; floe parked retry delivers it"
        if self.delivered:
            yield f"{_named(self.delivered)}: parked before, and found in the target: marked as delivered"


def _named(messages: Collection[Message]) -> str:
    first = ", ".join(f"{chain} {sequence}" for chain, sequence in sorted(messages)[:3])
    return first if len(messages) <= 3 else f"{first} and {len(messages) - 3} more"


def marks_of_intent(
    intent: Intent | None, positions: Mapping[Chain, int], stored: int | None, scan: TargetScan, *, repeats: bool
) -> ParkedMarks:
    """Return the marks that the dropped intent would have written, if its chains continue at `positions`.

    `stored`: the number of its messages in the target; None: as many as the scan found. Raises CorrectionRefused if
    it cannot be known that a parked message is there, unless `repeats`.
    """
    if intent is None:
        return ParkedMarks()
    passed = tuple((p.chain, n) for p in intent.pieces for n in p.parked if n < positions.get(p.chain, 0))
    tried = [(p.chain, p.rows.first) for p in intent.pieces if p.is_retry]
    if stored is not None:
        placed = intent.placed_pieces()
        found = [(p.chain, p.rows.first) for before, p in placed if p.is_retry and before + p.count <= stored]
        return ParkedMarks(passed, tuple(found))
    seen = tuple(each for each in tried if each in scan.parked_seen)
    unseen = [each for each in tried if each not in seen]
    if unseen and scan.gone and not repeats:
        raise CorrectionRefused(
            f"{scan.gone} messages cannot be read any more: expected proof that these parked ones are "
            f"stored or not, found none: {_named(unseen)}",
            hint="use --accept-repeats: if the gone messages were these, they are stored twice",
        )
    return ParkedMarks(passed, seen)


def marks_by_listing(entries: Collection[ParkedEntry], checkpoint: Checkpoint, scan: TargetScan) -> ParkedMarks:
    seen = scan.parked_seen
    left_out, delivered = list[Message](), list[Message]()
    for entry in entries:
        chain, sequence = message = (entry.name.chain, entry.name.sequence)
        if entry.name.created != checkpoint.parked_names.name_for(chain, sequence):
            continue  # its chain is replayed again
        if entry.state is ParkedState.PENDING:
            is_passed = sequence < checkpoint.positions.get(chain, 0)
            left_out += [message] if is_passed and entry.has_message and message not in seen else []
        elif entry.state is not ParkedState.DELIVERED and message in seen:
            delivered.append(message)
    return ParkedMarks(tuple(left_out), tuple(delivered))


def parked_names_after(checkpoint: Checkpoint, created: str, positions: Mapping[Chain, int]) -> ParkedNames | None:
    """Return the names of parked messages once chains continue at `positions`, in the stream `created`.

    Messages of a chain that were parked from its new position on no longer count: they come again. Everything else
    is unchanged, even if the stream is another one. None for the names of a first stream without repeats.
    """
    was, before = checkpoint.parked_names, checkpoint.positions
    back = [(chain, at) for chain, at in sorted(positions.items()) if at < before.get(chain, 0)]
    gone = [(chain, 0) for chain in sorted(before) if chain not in positions]
    parked = ParkedNames(was.created, (*was.repeats, *back, *gone))
    return None if parked == ParkedNames(created) else parked


@dataclass(frozen=True, slots=True)
class Correction:
    """The next state (None: the stored one is removed), and the effects on messages in plain words.

    `marks`: written for parked messages, under the names of `after`, before `after` is stored.
    """

    after: TargetState | None
    effects: list[str] = field(default_factory=list)
    marks: ParkedMarks = ParkedMarks()


# One chain


def move(state: TargetState, chain: Chain, sequence: int) -> Correction:
    """Move the chain to a sequence. Raises CorrectionRefused while an open intent holds rows of it."""
    if state.intent is not None and chain in {piece.chain for piece in state.intent.pieces}:
        raise CorrectionRefused(
            f"chain {chain}: expected no open intent with rows of it, found one",
            hint="wait until it is closed; if it cannot be, accept the target as it is first (--accept)",
        )
    checkpoint = state.checkpoint
    positions = {**checkpoint.positions, chain: sequence}
    parked = parked_names_after(checkpoint, checkpoint.target_created, positions)
    after = replace(state, checkpoint=replace(checkpoint, positions=positions, parked=parked))
    return Correction(after, [*position_effects(checkpoint.positions, positions)])


def position_effects(before: Positions, after: Positions) -> Iterator[str]:
    for chain in sorted({*before, *after}):
        was, now = before.get(chain), after.get(chain)
        if was == now:
            continue
        if now is None:
            yield f"{chain}: begins again; messages already stored are stored twice"
        elif was is None:
            yield f"{chain}: begins at {now}; nothing before it is delivered"
        elif now > was:
            yield f"{chain}: {was} to {now - 1} are no longer delivered"
        else:
            twice = f"those already stored are stored twice, at most {was - now:,} messages"
            yield f"{chain}: {now} to {was - 1} are delivered again: {twice}"


# The target as it is


def scan_after_checkpoint(intent: Intent | None, after: int, last: int) -> TargetScan:
    """Return an empty scan that will count messages of the open intent; all others there are foreign."""
    pieces = [piece for piece in intent.pieces if not piece.is_retry] if intent else []
    tried = [(p.chain, p.rows.first) for p in intent.pieces if p.is_retry] if intent else []

    def counts(chain: Chain, sequence: int) -> bool:
        return any(piece.chain == chain and sequence in piece.rows for piece in pieces)

    return TargetScan(after, last, counts, tried)


def accept(
    state: TargetState,
    reading: TargetReading,
    scan: TargetScan,
    given: Positions,
    *,
    repeats: bool = False,
    exclusive: bool = True,
) -> Correction:
    """Begin the next intent after the present end of the target; foreign messages stored there remain.

    `scan`: the rows of the open intent after the checkpoint (in another stream of the same name: anywhere). `given`:
    positions that the operator knows. `exclusive`: there is no other publisher, so the arithmetic counts the rows that
    cannot be read. `repeats`: if nothing shows how much of a chain is stored, take the least. Raises CorrectionRefused
    if that is not allowed, naming each chain.
    """
    is_countable = exclusive and not (scan.foreign or scan.unexplained)
    verdict = judge(state, reading) if is_countable else None
    stored = verdict.stored if verdict and verdict.finding is Finding.STORED else None
    positions, unknown = _positions_found(state, reading, scan, stored)
    if (unknown := unknown - {*given}) and not repeats:
        least = (f"{chain} at {positions.get(chain, 'its beginning')} or later" for chain in sorted(unknown))
        raise CorrectionRefused(
            f"{scan.gone} messages after target sequence {scan.after} cannot be read any more: expected "
            f"the position of each chain, found {', '.join(least)}",
            hint="give it (--position SITE/FEED/INCARNATION/PARTITION=SEQUENCE for each), or accept the lowest "
            "(--accept-repeats): rows among the gone messages are then stored twice",
        )
    positions = {**positions, **given}
    parked = parked_names_after(state.checkpoint, reading.created, positions)
    last = reading.last_sequence
    checkpoint = Checkpoint(last, reading.created, positions, last, parked=parked)
    marks = marks_of_intent(state.intent, positions, stored, scan, repeats=repeats)
    effects = [*_accept_effects(state, reading, scan, positions), *marks.effects()]
    return Correction(TargetState(checkpoint), effects, marks)


def _positions_found(
    state: TargetState, reading: TargetReading, scan: TargetScan, stored: int | None
) -> tuple[dict[Chain, int], set[Chain]]:
    positions = dict(state.checkpoint.positions)
    if state.intent is None:
        return positions, set()
    if stored is not None:
        return advance_by(positions, state.intent, stored, reading.last_origin)
    written = {piece.chain for piece in state.intent.pieces if piece.count and not piece.is_retry}
    positions |= {chain: scanned.newest + 1 for chain, scanned in scan.chains.items()}
    return positions, {chain for chain in written if scan.gone_after(chain)}


def advance_by(positions: Positions, intent: Intent, stored: int, tail: object) -> tuple[dict[Chain, int], set[Chain]]:
    """Return the positions if `stored` messages of the intent are in the target, and the chain (none or one) for which
    that does not give the sequence.

    `tail`: the origin of the last of them, if it can be read.
    """
    placed = intent.placed_pieces()
    done = [piece for before, piece in placed if before < stored and before + piece.count <= stored]
    after, left = advance_positions(positions, done), stored - sum(piece.count for piece in done)
    if not left or (piece := intent.pieces[len(done)]).is_retry:
        return after, set()
    if isinstance(tail, Origin):
        return {**after, piece.chain: tail.sequence + 1}, set()
    if piece.count == len(piece.rows):
        return {**after, piece.chain: piece.rows.first + left}, set()
    return after, {piece.chain}


def _accept_effects(
    state: TargetState, reading: TargetReading, scan: TargetScan, positions: Positions
) -> Iterator[str]:
    checkpoint = state.checkpoint
    if reading.created != checkpoint.target_created:
        yield "another stream of the same name: messages in the former one are not delivered again"
    elif reading.last_sequence < checkpoint.target_sequence:
        lost = checkpoint.target_sequence - reading.last_sequence
        yield f"{lost} stored messages are gone and are not delivered again (with --from-target they are)"
    if state.intent is not None:
        yield "the open intent is dropped: stop every suspended or unreachable instance of ingress first"
    yield from _found_lines(scan)
    yield from _foreign_lines(scan)
    if scan.unexplained:
        yield "if the stored state is an old copy, Floe wrote them: use --from-target instead"
    yield from position_effects(checkpoint.positions, positions)


def _found_lines(scan: TargetScan) -> Iterator[str]:
    for chain, scanned in sorted(scan.chains.items()):
        yield f"{chain}: {scanned.count} messages found, {scanned.first} to {scanned.newest}"


def _foreign_lines(scan: TargetScan) -> Iterator[str]:
    if scan.foreign:
        yield f"{format_count(scan.foreign, 'foreign message')} will stay"
    if scan.unexplained:
        yield f"{format_count(scan.unexplained, 'unexpected message')} with the header Floe-Source will stay"


def count_stored(state: TargetState, reading: TargetReading, stored: int) -> Correction:
    """Count `stored` rows of the open intent as stored; the others are sent after the present end of the target.

    Raises CorrectionRefused if there is no such intent, or the target cannot hold so many of its rows.
    """
    checkpoint, intent = state.checkpoint, state.intent
    if intent is None or not can_count(state):
        raise CorrectionRefused(
            "--stored: expected an open intent with rows that can be counted, found none",
            hint="accept the target as it is (--accept)",
        )
    last = reading.last_sequence
    most = min(intent.count, last - checkpoint.target_sequence)
    if reading.created != checkpoint.target_created or not 0 <= stored <= most:
        raise CorrectionRefused(
            f"--stored: expected from 0 to {most} rows in the stream created {checkpoint.target_created}, "
            f"found {stored} in the one created {reading.created}"
        )
    base, left = last - stored, intent.count - stored
    moved = replace(checkpoint, target_sequence=base, foreign_upto=last)
    lines = [
        f"rows 1 to {stored} of the {intent.count} of the open intent count as stored",
        f"the other {left} are sent after target sequence {last}: those already stored are stored twice",
        "stop every suspended or unreachable instance of ingress first",
    ]
    return Correction(TargetState(moved, replace(intent, base=base)), lines)


# The state is lost, or an old copy


def rebuild(
    state: TargetState | None,
    reading: TargetReading,
    scan: TargetScan,
    *,
    repeats: bool = False,
    entries: Collection[ParkedEntry] = (),
) -> Correction:
    """Continue each chain after its newest message in the target.

    `state`: the stored state, if it can be read: an older copy is a lower bound of the stored rows. `scan`: of all
    messages. `repeats`: take lower bounds if the target no longer holds messages. `entries`: the parked messages.
    Raises CorrectionRefused if that is not allowed.
    """
    if scan.gone and not repeats:
        raise CorrectionRefused(
            f"expected a target that holds all of its {reading.last_sequence} messages, found "
            f"{scan.found}: the positions found are lower bounds",
            hint="restore the state bucket; or store the dropped messages again: --accept-repeats",
        )
    last = reading.last_sequence
    same = state.checkpoint if state and reading.created == state.checkpoint.target_created else None
    lost = same.target_sequence - last if same else 0
    # The stored state is certainly right, unless the target lost messages since.
    positions = dict(same.positions) if same and lost <= 0 else {}
    for chain, scanned in scan.chains.items():
        positions[chain] = max(positions.get(chain, 0), scanned.newest + 1)
    lines = [*_found_lines(scan)]
    if lost > 0:
        repeated = "are delivered again: readers that had them get them twice"
        lines.append(f"the last {lost} messages, which the target has lost, {repeated}")
    if scan.gone:
        lines.append(f"{scan.gone} messages are gone: those newer than the newest found are repeated")
    lines += _foreign_lines(scan)
    if state is None or state.intent is not None:
        lines.append("stop every suspended or unreachable instance of ingress first")
    before = state.checkpoint.positions if state else {}
    parked = parked_names_after(state.checkpoint, reading.created, positions) if state else None
    checkpoint = Checkpoint(last, reading.created, positions, last, parked=parked)
    marks = marks_by_listing(entries, checkpoint, scan)
    lines += [*position_effects(before, positions), *marks.effects()]
    return Correction(TargetState(checkpoint), lines, marks)


# Restart


def forget(state: TargetState | None, reading: TargetReading | None, messages: int) -> Correction:
    """Fill an empty target again from the beginning of its chains. Raises CorrectionRefused if it holds messages."""
    if messages:
        raise CorrectionRefused(
            f"expected an empty target, found {messages} messages: they would be stored twice",
            hint="empty or recreate the stream first; or continue after the messages in it (--from-target)",
        )
    lines = [*position_effects(state.checkpoint.positions if state else {}, {})]
    is_same = state is not None and reading is not None and reading.created == state.checkpoint.target_created
    if reading is None or (reading.last_sequence == 0 and not is_same):
        return Correction(None, lines)
    parked = None
    if state is not None and is_same:
        was = state.checkpoint.parked_names
        parked = ParkedNames(was.created, (*was.repeats, (None, 0)))
        lines.append("parked messages no longer count: each comes in its turn, or is parked again")
    last = reading.last_sequence
    return Correction(TargetState(Checkpoint(last, reading.created, {}, last, parked=parked)), lines)


def forget_unlisted(state: TargetState, pairs: Collection[tuple[str, str]], parked: Collection[Chain]) -> Correction:
    """Forget the chains outside of `pairs` (site and feed). `parked`: the chains with parked messages, for which alone
    a repeat is noted: the state may have to become smaller.
    """
    kept = {piece.chain for piece in state.intent.pieces} if state.intent else set()
    checkpoint, before = state.checkpoint, state.checkpoint.positions
    positions = {c: at for c, at in before.items() if c in kept or (c.site, c.feed) in pairs}
    lines = [
        f"{chain}: forgotten at {before[chain]}; if it is listed again, it starts over"
        for chain in sorted({*before} - {*positions})
    ]
    named = {c: at for c, at in before.items() if c in positions or c not in parked}
    names = parked_names_after(checkpoint, checkpoint.target_created, named)
    return Correction(replace(state, checkpoint=replace(checkpoint, positions=positions, parked=names)), lines)
