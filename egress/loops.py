"""Messages that came round: archived here, carried to another site, and copied back into the stream.

On a relay their hops are believed. Elsewhere anybody may have written them: what a header claims is only
asked about. A message is left out as `looped` where the one that it names is there: of this very site, feed
and incarnation, of a lower sequence, with the same time and payload. Everything else is archived, and so is
what cannot be compared, so a forged header hides nothing.

Which messages claim to have come round says the header alone: a sampler is never shown those, whatever comes
of the question, and so chooses the same when the stream is read again (I8).
"""

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain as joined

from common.chain import Chain
from common.errors import DataError
from common.jetstream.api import STREAM_NOT_FOUND
from common.jetstream.headers import ORIGINAL, REPLAY, SOURCE, Provenance, lines
from common.jetstream.pull import get_message
from common.jetstream.requests import ApiError
from common.logs import get_logger
from common.segments.columns import Columns, messages
from common.segments.segment import Message, SegmentRef
from common.sequences import MAX_SEQUENCE, SequenceRange, choose
from egress.batch import LOOPED
from egress.builder import Piece
from egress.deps import PartitionDeps

log = get_logger("egress.loops")

MOST_CLAIMS = 4  # of one message that are asked about: an honest one has one, a forged one a thousand
ASKED_BYTES = 16 * 2**20  # of messages asked for at once, each as large as the server takes them
MOST_SEGMENTS = 8  # looked into for one piece; what would need more is archived
LISTED = 4  # segments that reach a sequence; one of them contains it, but where many overlap

_SOURCE_PREFIX = SOURCE + b": "
_ORIGINAL_PREFIX = ORIGINAL + b": "
_REPLAY_PREFIX = REPLAY + b":"


class Claims:
    """Which messages claim to be copies of older messages of `chain`'s feed, in its incarnation. Pure."""

    def __init__(self, chain: Chain) -> None:
        self._mark = b"%b%b %b %04d " % (_SOURCE_PREFIX, chain.site.encode(), chain.feed.encode(), chain.incarnation)

    def places(self, rows: Columns) -> list[int]:
        """The places of those messages. Hot: where nobody copies back, one search through all blocks."""
        mark, sequences = self._mark, rows.sequences
        if mark not in b"".join(filter(None, rows.headers)):
            return []
        return [
            place
            for place, block in enumerate(rows.headers)
            if block is not None and mark in block and self.of(sequences[place], block)
        ]

    def of(self, sequence: int, block: bytes) -> list[Provenance]:
        """What the message claims to be copies of, the newest first; nothing where a replay brought it.

        However deep it was escaped: a site in between may take this one's hop for a publisher's text.
        """
        found: list[Provenance] = []
        for line in lines(block):
            if line.startswith(_REPLAY_PREFIX):
                return []
            start = 0
            while line.startswith(_ORIGINAL_PREFIX, start):
                start += len(_ORIGINAL_PREFIX)
            if line.startswith(self._mark, start) and len(found) < MOST_CLAIMS:
                found += _older(line[start:], sequence)
        return found


def _older(line: bytes, sequence: int) -> list[Provenance]:
    try:
        provenance = Provenance.parse(line)
    except ValueError:
        return []
    return [provenance] if 1 <= provenance.sequence < sequence else []


@dataclass(frozen=True, slots=True)
class _Asked:
    """A message at `place` of its piece, and what it claims to be a copy of."""

    place: int
    payload: bytes
    claims: Sequence[Provenance]

    def is_copy(self, claim: Provenance, message: Message) -> bool:
        return claim.timestamp_ns == message.timestamp_ns and self.payload == message.payload


class Loops:
    """Takes out of pieces of `chain` what came round: `stream` is asked, then the cover of what is archived.

    Of what is asked for at once, memory holds 16 MiB, or one message where the server takes larger ones.
    """

    def __init__(self, deps: PartitionDeps, chain: Chain) -> None:
        self._client, self._stream, self._store = deps.client, deps.partition.stream, deps.store
        self._threads, self._report, self._claims = deps.pools.io, deps.report, Claims(chain)

    async def without(self, piece: Piece) -> Piece:
        """`piece` without the rows that came round. Raises what the stream and the store raise."""
        places = self._claims.places(piece.rows)
        if not places or not (looped := await self._looped(piece.rows, places)):
            return piece
        self._report.looped(len(looped))
        return _without(piece, looped)

    async def _looped(self, rows: Columns, places: Sequence[int]) -> set[int]:
        at_once = max(1, ASKED_BYTES // self._client.max_payload)
        looped: set[int] = set()
        gone: list[_Asked] = []
        for begin in range(0, len(places), at_once):
            asked = [self._asked(rows, place) for place in places[begin : begin + at_once]]
            for each, answer in zip(asked, await asyncio.gather(*map(self._at_source, asked)), strict=True):
                if answer is None:
                    looped.add(each.place)
                elif answer.claims:
                    gone.append(answer)
        if gone:
            looped |= await self._threads.run(self._archived, gone)
        return looped

    def _asked(self, rows: Columns, place: int) -> _Asked:
        claims = self._claims.of(rows.sequences[place], rows.headers[place] or b"")
        return _Asked(place, rows.payloads[place], claims)

    async def _at_source(self, asked: _Asked) -> _Asked | None:
        """None where the source holds what it is a copy of; else with the claims whose message is gone."""
        gone = []
        for claim in asked.claims:
            try:
                message = await get_message(self._client, self._stream, claim.sequence)
            except ApiError as error:
                if error.err_code != STREAM_NOT_FOUND:
                    raise
                message = None
            if message is None:
                gone.append(claim)
            elif asked.is_copy(claim, message):
                return None
        return replace(asked, claims=gone)

    # The archive. Blocking.

    def _archived(self, asked: Sequence[_Asked]) -> set[int]:
        """The places of those that are copies of archived rows, as far as few segments tell."""
        claimed = [(claim, each) for each in asked for claim in each.claims if claim.sequence <= MAX_SEQUENCE]
        wanted = sorted(claimed, key=lambda pair: (pair[0].partition, pair[0].sequence))
        found: set[int] = set()
        for _ in range(MOST_SEGMENTS):
            if not wanted:
                break
            count = 1
            if (ref := self._segment(wanted[0][0])) is not None:
                partition, covered = ref.chain.partition, ref.coverage
                count = sum(claim.partition == partition and claim.sequence in covered for claim, _ in wanted)
                found |= self._equal(ref, wanted[:count])
            wanted = wanted[count:]
        return found

    def _segment(self, claim: Provenance) -> SegmentRef | None:
        """The segment that covers what is claimed; None where that is not found."""
        try:
            chain = claim.chain
        except ValueError:
            return None
        for level in (0, None):
            refs = self._store.list(chain, position=claim.sequence, level=level, limit=LISTED)
            if (ref := choose(refs, claim.sequence)) is not None:
                return ref
        return None

    def _equal(self, ref: SegmentRef, wanted: Sequence[tuple[Provenance, _Asked]]) -> set[int]:
        within = SequenceRange(wanted[0][0].sequence, wanted[-1][0].sequence)
        by_sequence: dict[int, list[tuple[Provenance, _Asked]]] = {}
        for claim, asked in wanted:
            by_sequence.setdefault(claim.sequence, []).append((claim, asked))
        found: set[int] = set()
        try:
            with self._store.open_part(ref, rows=within) as reader:
                for message in joined.from_iterable(map(messages, reader.batches())):
                    for claim, asked in by_sequence.get(message.sequence, ()):
                        if asked.is_copy(claim, message):
                            found.add(asked.place)
        except DataError as error:
            log.warning("not compared", action="not_compared", error=str(error), **ref.log_context())
        return found


def _without(piece: Piece, looped: set[int]) -> Piece:
    keep = bytearray(b"\1") * len(piece.rows)
    codes = bytearray(piece.codes) or bytearray(len(piece.examined))
    for place in looped:
        keep[place] = 0
        codes[bisect_left(piece.examined, piece.rows.sequences[place])] = LOOPED
    rows = piece.rows.chosen(keep, piece.rows.sample_keys)
    return replace(piece, rows=rows, size=rows.raw_size, codes=codes)
