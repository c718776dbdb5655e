"""Beginning of the copy of a feed, if its source entry sets one.

Resolved once for a target and stored, so that a restart does not resolve it again:

    start_sequence            of the first incarnation; later ones are replayed completely
    start_time, start_delta   a time: of every incarnation the messages at or after it
    start_at_end              of every existing incarnation the messages after the end of its coverage

A target that has a position for any chain of the feed has begun: the keys are ignored then.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from common.archive.documents import ChainStore, Document
from common.archive.scan import ChainArchive
from common.archive.store import SegmentStore
from common.archive.times import search
from common.chain import Chain
from common.clock import NS_PER_S, Clock, parse_time
from common.logs import get_logger
from common.sequences import MAX_SEQUENCE
from common.settings.service import StartSettings

log = get_logger(__name__)

FORMAT_VERSION = 1


class FeedStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Beginning of the copy of one feed. `moment_ns`: messages at or after this time (ns since 1970 UTC); None: no such
    bound. `sequence`: the first one of incarnation 0; 0: no such bound. `ends`: by chain, the sequence after which it
    begins.
    """

    format_version: int
    moment_ns: int | None = None
    sequence: int = 0
    ends: dict[str, int] = {}

    def to_json(self) -> bytes:
        return _ENCODER.encode(self)

    @classmethod
    def from_json(cls, raw: bytes) -> FeedStart:
        """Parse a stored start. Raises ValueError."""
        start = _DECODER.decode(raw)
        numbers = (start.sequence, *start.ends.values())
        if start.format_version != FORMAT_VERSION or not all(0 <= n <= MAX_SEQUENCE for n in numbers):
            raise ValueError(f"expected a start of version {FORMAT_VERSION}, found {start}")
        return start


# Created at import: if two threads decode a type for the first time at once, the process crashes.
_DECODER = msgspec.json.Decoder(FeedStart)
_ENCODER = msgspec.json.Encoder(order="sorted")
RESOLVED_AGAIN_HINT = "delete it, and the start keys are resolved again"


class StartResolver:
    """Resolution of the start keys for one target. Blocking."""

    def __init__(self, target: str, store: SegmentStore, documents: ChainStore, clock: Clock) -> None:
        self._target, self._store, self._documents, self._clock = target, store, documents, clock
        # By moment (ns): the sequence up to which nothing is at or after it; the search continues there.
        self._searched: dict[tuple[Chain, int], int] = {}

    def resolve(
        self, chain: Chain, settings: StartSettings, first: int, end: int | None, positions: Mapping[Chain, int]
    ) -> int:
        """Return the sequence at which `chain`, which has no position, begins; 0 while nothing is archived from the
        start time on.

        `first`: its first sequence in the archive; `end`: the last of its incarnation, None if that has not ended;
        `positions`: of all chains of the target. Raises DataError for an invalid document, else as the store does.
        """
        if (start := self._start(chain, settings, positions)) is None:
            return first
        behind = MAX_SEQUENCE if end is None else end + 1
        if start.moment_ns is None:
            wanted = max(start.sequence if chain.incarnation == 0 else 0, start.ends.get(str(chain), 0) + 1)
        elif (found := self._first_since(chain, start.moment_ns)) is not None:
            wanted = found
        elif end is None:
            return 0
        else:
            wanted = behind
        return max(first, min(wanted, behind))

    def _first_since(self, chain: Chain, moment_ns: int) -> int | None:
        """Return the first sequence at or after the moment; None if none is archived."""
        place = chain, moment_ns
        found, behind = search(self._store, chain, moment_ns, self._searched.get(place, 1))
        self._searched[place] = behind if found is None else 1
        return found

    def _start(self, chain: Chain, settings: StartSettings, positions: Mapping[Chain, int]) -> FeedStart | None:
        """Return the stored start, or store one now; None if the whole feed is replayed."""
        if not settings.is_set:
            return None
        key = self._documents.layout.start_document(self._target, chain.site, chain.feed)
        objects, claims = self._documents.objects, self._documents.claims
        form = FeedStart.to_json, FeedStart.from_json
        document = Document(objects, key, *form, hint=RESOLVED_AGAIN_HINT, claims=claims)
        if (start := document.read()) is not None:
            return start
        if any(_feed(other) == _feed(chain) for other in positions):
            return None
        found = document.create(start := self._resolve_new(chain, settings))
        log.info("start resolved", action="start_resolved", key=key, start=start.to_json().decode())
        return found

    def _resolve_new(self, chain: Chain, settings: StartSettings) -> FeedStart:
        if settings.start_at_end:
            return FeedStart(
                FORMAT_VERSION, ends={str(c): self._coverage_end(c) for c in self._documents.chains(*_feed(chain))}
            )
        if settings.start_sequence:
            return FeedStart(FORMAT_VERSION, sequence=settings.start_sequence)
        if settings.start_time:
            return FeedStart(FORMAT_VERSION, moment_ns=parse_time(settings.start_time))
        return FeedStart(FORMAT_VERSION, moment_ns=round((self._clock.now() - settings.start_delta) * NS_PER_S))

    def _coverage_end(self, chain: Chain) -> int:
        """Return the end of the coverage, by listing: the tail is a hint that may be old, or claim too much."""
        tail = self._documents.read_tail(chain) or 1
        return ChainArchive.listed(self._store, chain, tail).end or ChainArchive.listed(self._store, chain).end


def _feed(chain: Chain) -> tuple[str, str]:
    return chain.site, chain.feed
