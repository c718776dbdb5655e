"""Removal of looped messages: archived here, carried to another site, and copied back into the stream.

On a relay, hops are trusted. Elsewhere any publisher may have written them, so a claim in a header is only checked. A
message is left out as `looped` if the message that it names exists: of this site, feed and incarnation, of a lower
sequence, with the same time and payload. Everything else is archived, including messages that cannot be compared, so a
forged header hides nothing.

The header alone decides which messages claim to be copies. A sampler never receives those, regardless of the check, so
it chooses the same when the stream is read again (I8).
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

log = get_logger(__name__)

MOST_CLAIMS = 4  # claims checked for one message: a genuine message has one, a forged one may have a thousand
ASKED_BYTES = 16 * 2**20  # of messages requested at once, each as large as the server allows
MOST_SEGMENTS = 8  # segments opened for one piece; messages that would need more are archived
LISTED = 4  # segments listed that reach a sequence; one of them contains it, unless many overlap

_SOURCE_PREFIX = SOURCE + b": "
_ORIGINAL_PREFIX = ORIGINAL + b": "
_REPLAY_PREFIX = REPLAY + b":"


class Claims:
    """Claims of messages to be copies of older messages of `chain`'s feed, in its incarnation. Pure."""

    def __init__(self, chain: Chain) -> None:
        self._mark = b"%b%b %b %04d " % (_SOURCE_PREFIX, chain.site.encode(), chain.feed.encode(), chain.incarnation)

    def places(self, rows: Columns) -> list[int]:
        mark, sequences = self._mark, rows.sequences
        if mark not in b"".join(filter(None, rows.headers)):
            return []
        return [
            place
            for place, block in enumerate(rows.headers)
            if block is not None and mark in block and self.of(sequences[place], block)
        ]

    def of(self, sequence: int, block: bytes) -> list[Provenance]:
        """Return the claims of a message, the newest first; empty if a replay brought it.

        A claim counts regardless of how deep it was escaped: a site in between may treat this one's hop as a
        publisher's text.
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
    """Message at index `place` of its piece, and the messages that it claims to be a copy of."""

    place: int
    payload: bytes
    claims: Sequence[Provenance]

    def is_copy(self, claim: Provenance, message: Message) -> bool:
        return claim.timestamp_ns == message.timestamp_ns and self.payload == message.payload


class Loops:
    """Filter that takes looped messages out of pieces of `chain`: it queries `stream`, then the cover of the archive.

    One query holds at most 16 MiB in memory, or one message if the server takes larger ones.
    """

    def __init__(self, deps: PartitionDeps, chain: Chain) -> None:
        self._client, self._stream, self._store = deps.client, deps.partition.stream, deps.store
        self._threads, self._report, self._claims = deps.pools.io, deps.report, Claims(chain)

    async def without(self, piece: Piece) -> Piece:
        """Return `piece` without the looped rows. Raises the errors of the stream and the store."""
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
        """Return None if the source holds the original; else `asked` with the claims on messages that are gone."""
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
        """Return the segment that covers the claimed sequence; None if it is not found."""
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
