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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain as joined

from common.archive.columns import Columns, messages
from common.archive.scan import ChainArchive
from common.archive.segment import Message, Reason, SegmentRef
from common.chain import Chain
from common.errors import DataError
from common.logs import get_logger
from common.nats.api import STREAM_NOT_FOUND
from common.nats.headers import ORIGINAL_HEADER, REPLAY_HEADER, SOURCE_HEADER, Provenance, header_lines
from common.nats.protocol import ApiError
from common.nats.pull import get_message
from common.sequences import MAX_SEQUENCE, SequenceRange, choose_segment
from egress.builder import CODE_LOOPED, Piece
from egress.deps import PartitionDeps

log = get_logger(__name__)

MAX_CLAIMS = 4  # claims checked for one message: a genuine message has one, a forged one may have a thousand
QUERY_BYTES = 16 * 2**20  # of messages requested at once, each as large as the server allows
MAX_SEGMENTS = 8  # segments opened for one piece; messages that would need more are archived
LISTED_SEGMENTS = 4  # segments listed that reach a sequence; one of them contains it, unless many overlap

_SOURCE_PREFIX = SOURCE_HEADER + b": "
_ORIGINAL_PREFIX = ORIGINAL_HEADER + b": "
_REPLAY_PREFIX = REPLAY_HEADER + b":"


class LoopMarkers:
    """Claims of messages to be copies of older messages of `chain`'s feed, in its incarnation. Pure."""

    def __init__(self, chain: Chain) -> None:
        self._mark = b"%b%b %b %04d " % (_SOURCE_PREFIX, chain.site.encode(), chain.feed.encode(), chain.incarnation)

    def indexes(self, rows: Columns) -> list[int]:
        mark, sequences = self._mark, rows.sequences
        if mark not in b"".join(filter(None, rows.headers)):
            return []
        return [
            index
            for index, block in enumerate(rows.headers)
            if block is not None and mark in block and self.claims_of(sequences[index], block)
        ]

    def claims_of(self, sequence: int, block: bytes) -> list[Provenance]:
        """Return the claims of a message, the newest first; empty if a replay brought it.

        A claim counts regardless of how deep it was escaped: a site in between may treat this one's hop as a
        publisher's text.
        """
        found: list[Provenance] = []
        for line in header_lines(block):
            if line.startswith(_REPLAY_PREFIX):
                return []
            start = 0
            while line.startswith(_ORIGINAL_PREFIX, start):
                start += len(_ORIGINAL_PREFIX)
            if line.startswith(self._mark, start) and len(found) < MAX_CLAIMS:
                found += _parse_older(line[start:], sequence)
        return found


def _parse_older(line: bytes, sequence: int) -> list[Provenance]:
    try:
        provenance = Provenance.parse(line)
    except ValueError:
        return []
    return [provenance] if 1 <= provenance.sequence < sequence else []


@dataclass(frozen=True, slots=True)
class _Claimant:
    """Message at index `index` of its piece, and the messages that it claims to be a copy of."""

    index: int
    payload: bytes
    claims: Sequence[Provenance]

    def is_copy(self, claim: Provenance, message: Message) -> bool:
        return claim.timestamp_ns == message.timestamp_ns and self.payload == message.payload


class LoopFilter:
    """Filter that takes looped messages out of pieces of `chain`: it queries `stream`, then the cover of the archive.

    One query holds at most 16 MiB in memory, or one message if the server takes larger ones.
    """

    def __init__(self, deps: PartitionDeps, chain: Chain) -> None:
        self._client, self._stream, self._store = deps.client, deps.partition.stream, deps.store
        self._threads, self._report, self._markers = deps.pools.io, deps.report, LoopMarkers(chain)

    async def remove_looped(self, piece: Piece) -> Piece:
        """Return `piece` without the looped rows. Raises the errors of the stream and the store."""
        indexes = self._markers.indexes(piece.rows)
        if not indexes or not (looped := await self._looped(piece.rows, indexes)):
            return piece
        self._report.warn_looped(len(looped))
        return _remove(piece, looped)

    async def _looped(self, rows: Columns, indexes: Sequence[int]) -> set[int]:
        at_once = max(1, QUERY_BYTES // self._client.max_payload)
        looped: set[int] = set()
        gone: list[_Claimant] = []
        for begin in range(0, len(indexes), at_once):
            claimants = [self._claimant(rows, index) for index in indexes[begin : begin + at_once]]
            for each, answer in zip(claimants, await asyncio.gather(*map(self._check_source, claimants)), strict=True):
                if answer is None:
                    looped.add(each.index)
                elif answer.claims:
                    gone.append(answer)
        if gone:
            looped |= await self._threads.run(self._archived, gone)
        return looped

    def _claimant(self, rows: Columns, index: int) -> _Claimant:
        claims = self._markers.claims_of(rows.sequences[index], rows.headers[index] or b"")
        return _Claimant(index, rows.payloads[index], claims)

    async def _check_source(self, claimants: _Claimant) -> _Claimant | None:
        """Return None if the source holds the original; else `claimants` with the claims on messages that are gone."""
        gone = []
        for claim in claimants.claims:
            try:
                message = await get_message(self._client, self._stream, claim.sequence)
            except ApiError as error:
                if error.err_code != STREAM_NOT_FOUND:
                    raise
                message = None
            if message is None:
                gone.append(claim)
            elif claimants.is_copy(claim, message):
                return None
        return replace(claimants, claims=gone)

    # The archive. Blocking.

    def _archived(self, claimants: Sequence[_Claimant]) -> set[int]:
        claimed = [(claim, each) for each in claimants for claim in each.claims if claim.sequence <= MAX_SEQUENCE]
        wanted = sorted(claimed, key=lambda pair: (pair[0].partition, pair[0].sequence))
        found: set[int] = set()
        for _ in range(MAX_SEGMENTS):
            if not wanted:
                break
            count = 1
            if (ref := self._segment(wanted[0][0])) is not None:
                partition, covered = ref.chain.partition, ref.coverage
                count = sum(claim.partition == partition and claim.sequence in covered for claim, _ in wanted)
                found |= self._find_copies(ref, wanted[:count])
            wanted = wanted[count:]
        return found

    def _segment(self, claim: Provenance) -> SegmentRef | None:
        """Return the segment that covers the claimed sequence; None if it is not found."""
        try:
            chain = claim.chain
        except ValueError:
            return None
        for level in (0, None):
            near = ChainArchive.listed(self._store, chain, claim.sequence, level=level, limit=LISTED_SEGMENTS)
            if (ref := choose_segment(near.refs, claim.sequence)) is not None:
                return ref
        return None

    def _find_copies(self, ref: SegmentRef, wanted: Sequence[tuple[Provenance, _Claimant]]) -> set[int]:
        within = SequenceRange(wanted[0][0].sequence, wanted[-1][0].sequence)
        by_sequence: dict[int, list[tuple[Provenance, _Claimant]]] = {}
        for claim, claimants in wanted:
            by_sequence.setdefault(claim.sequence, []).append((claim, claimants))
        found: set[int] = set()
        try:
            with self._store.open_part(ref, rows=within) as reader:
                for message in joined.from_iterable(map(messages, reader.batches())):
                    for claim, claimants in by_sequence.get(message.sequence, ()):
                        if claimants.is_copy(claim, message):
                            found.add(claimants.index)
        except DataError as error:
            log.warning("looped messages not compared", action="loop_uncompared", error=str(error), **ref.log_context())
        return found


def _remove(piece: Piece, looped: set[int]) -> Piece:
    keep = bytearray(b"\1") * len(piece.rows)
    codes = bytearray(piece.codes) or bytearray(len(piece.examined))
    for index in looped:
        keep[index] = 0
        codes[bisect_left(piece.examined, piece.rows.sequences[index])] = CODE_LOOPED
    rows = piece.rows.select(keep, piece.rows.sample_keys)
    left_out = Counter(piece.left_out)
    left_out[Reason.LOOPED] += piece.size - rows.raw_size
    return replace(piece, rows=rows, size=rows.raw_size, codes=codes, left_out=left_out)
