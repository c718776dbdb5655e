"""The small JSON objects beside the segments: what a chain is, where it begins, where it ends.

    stream.json   one for each incarnation: the stream as it was found, where the one before ended, and where
                  each partition begins
    chain.json    one for each chain: filters, number of partitions, first sequence, whether it is a relay
    floor.json    the first sequence that retention has left
    tails/…       the end of a chain's coverage; a hint that tells when a listing is worth while
    gaps/…        sequences that are given up (`common.segments.gaps`)
    alive/…       what each process of egress says of itself every minute (`common.segments.alive`)
    ingress/…     how far each target is (`common.segments.target_positions`)

Whoever can write to the bucket can write these: they are read up to a size, every field is checked, and one
that is not as it must be is never acted on (DataError, code E-STATE-JSON).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

from common.chain import MAX_INCARNATION, Chain
from common.errors import DataError, OutcomeUnknown, Unavailable
from common.objects.port import ObjectInfo, ObjectStore
from common.segments.alive import Alive, to_read
from common.segments.document_values import (
    ChainDocument,
    StreamDocument,
    floor_from_json,
    floor_to_json,
    tail_from_json,
    tail_to_json,
)
from common.segments.gaps import AcceptedGap
from common.segments.keys import Layout
from common.segments.target_positions import MAX_BYTES as POSITIONS_BYTES
from common.segments.target_positions import TargetPositions
from common.service.logs import get_logger

__all__ = ["ChainDocument", "ChainStore", "StreamDocument"]

log = get_logger("segments.documents")

MAX_DOCUMENT_BYTES = 1024 * 1024
_ROUNDS = 5  # of compare-and-set, each lost to another writer

D = TypeVar("D")


class ChainStore:
    """The documents under one layout. Blocking; safe to use from several threads.

    Every method raises what the object store raises, and DataError (E-STATE-JSON) for a document that is
    there and is not what it must be.
    """

    def __init__(self, objects: ObjectStore, layout: Layout) -> None:
        self.objects = objects
        self.layout = layout
        self._ignored: dict[str, str] = {}  # spoiled gaps and signs of life by key, and why

    def create_stream(self, chain: Chain, document: StreamDocument) -> StreamDocument:
        """Make `stream.json` of the chain's incarnation unless there is one; what is there now."""
        key = self.layout.stream_document(chain)
        return self._create(key, document.to_json(), StreamDocument.from_json)

    def read_stream(self, chain: Chain) -> StreamDocument | None:
        """`stream.json` of the chain's incarnation; None if there is none."""
        return self._read(self.layout.stream_document(chain), StreamDocument.from_json)

    def is_followed(self, chain: Chain) -> bool:
        """Whether the next incarnation exists: nothing is put into this one any more. One HEAD."""
        if chain.incarnation == MAX_INCARNATION:
            return False
        return self.objects.head(self.layout.stream_document(chain.next_incarnation())) is not None

    def read_end(self, chain: Chain) -> int | None:
        """Where the chain ended with its incarnation (0: nothing was covered); None while it has not."""
        if chain.incarnation == MAX_INCARNATION:
            return None
        following = self.read_stream(chain.next_incarnation())
        previous = None if following is None else following.previous
        return None if previous is None else previous.get(chain.partition, 0)

    def create_chain(self, chain: Chain, document: ChainDocument) -> ChainDocument:
        """Make `chain.json` unless there is one; what is there now."""
        key = self.layout.chain_document(chain)
        return self._create(key, document.to_json(), ChainDocument.from_json)

    def read_chain(self, chain: Chain) -> ChainDocument | None:
        """`chain.json`; None if there is none."""
        return self._read(self.layout.chain_document(chain), ChainDocument.from_json)

    def read_floor(self, chain: Chain) -> int | None:
        """The first sequence that retention has left; None where it has never run."""
        return self._read(self.layout.floor_document(chain), floor_from_json)

    def raise_floor(self, chain: Chain, first: int) -> None:
        """Make `first` the floor unless it is that high already: it never falls. Raises Unavailable too."""
        body = floor_to_json(first)
        for _ in range(_ROUNDS):
            # The etag before the content: a change between the two makes the write fail, not the check.
            info = self.objects.head(self.layout.floor_document(chain))
            if (self.read_floor(chain) or 0) >= first:
                return
            self._replace(self.layout.floor_document(chain), body, info.etag if info else None)
        if (self.read_floor(chain) or 0) < first:
            raise Unavailable(f"floor of {chain}: lost to other writers {_ROUNDS} times", code="E-RACE")

    def write_tail(self, chain: Chain, end: int) -> None:
        """Say that coverage ends at `end`."""
        self.objects.put(self.layout.tail(chain), tail_to_json(end))

    def read_tail(self, chain: Chain) -> int | None:
        """Where coverage ended when the tail was written; None if there is none, or it is not a tail.

        It is only a hint: a spoiled one is written again, and stops nobody.
        """
        try:
            return self._read(self.layout.tail(chain), tail_from_json)
        except DataError as error:
            log.warning("tail ignored", action="tail_ignored", error=str(error), **chain.log_context())
            return None

    def tails(self) -> dict[Chain, str]:
        """The etag of every tail, by one listing: what changed since the last call has a new one."""
        return {chain: info.etag for chain, info in self.listed_tails().items()}

    def listed_tails(self) -> dict[Chain, ObjectInfo]:
        """Every tail as one listing shows it; its `modified` is when something was archived last."""
        listing = self.objects.list(self.layout.tails_prefix())
        found = ((self.layout.parse_tail(info.key), info) for info in listing)
        return {chain: info for chain, info in found if chain is not None}

    # Signs of life

    def write_alive(self, process: str, alive: Alive) -> None:
        """Put the sign of life of one process of a site in place of its last one."""
        self.objects.put(self.layout.alive(alive.site, process), alive.to_json())

    def listed_alive(self) -> list[ObjectInfo]:
        """The signs of life that may still say something, of all sites, by one listing."""
        listing = self.objects.list(self.layout.alive_prefix())
        parsed = ((self.layout.parse_alive(info.key), info) for info in listing)
        return to_read((name[0], info) for name, info in parsed if name is not None)

    def read_alive(self, key: str) -> Alive | None:
        """The sign of life at `key`; None if there is none, or it is not one: it stops nobody."""
        name = self.layout.parse_alive(key)
        try:
            alive = self._read(key, Alive.from_json)
            if alive is not None and (name is None or alive.site != name[0]):
                raise _spoiled(key, f"expected the site of its key, found {alive.site!r:.80}")
        except DataError as error:
            self._ignore(key, str(error), "sign of life")
            return None
        self._ignored.pop(key, None)
        return alive

    # Targets

    def write_positions(self, positions: TargetPositions) -> None:
        """Say how far a target is, in place of what was said before."""
        self.objects.put(self.layout.ingress_positions(positions.target), positions.to_json())

    def read_positions(self, target: str) -> TargetPositions | None:
        """How far a target is; None where nothing was ever said. Raises DataError for what cannot be read."""
        key = self.layout.ingress_positions(target)
        found = self._read(key, TargetPositions.from_json, POSITIONS_BYTES)
        if found is not None and found.target != target:
            raise _spoiled(key, f"expected target {target}, found {found.target!r:.80}")
        return found

    def targets_with_positions(self) -> list[str]:
        """The targets that say how far they are, released ones too."""
        listing = self.objects.list(self.layout.ingress_targets_prefix())
        return [t for info in listing if (t := self.layout.parse_ingress_positions(info.key)) is not None]

    def chains(self, site: str | None = None, feed: str | None = None) -> list[Chain]:
        """The chains that have a `chain.json`, in order; of one site, of one feed."""
        listing = self.objects.list(self.layout.documents_prefix(site, feed))
        found = (self.layout.parse_chain_document(info.key) for info in listing)
        return sorted(chain for chain in found if chain is not None and feed in (None, chain.feed))

    # Gaps that are given up

    def gaps(self, chain: Chain, *, position: int = 1) -> list[AcceptedGap]:
        """The accepted gaps that reach `position`, by where they end; spoiled ones are passed over."""
        return self._gaps(self.layout.gaps_prefix(chain), position)

    def accept_gap(self, chain: Chain, gap: AcceptedGap) -> AcceptedGap:
        """Write an accepted gap unless its range is accepted already; what is there now, read back."""
        return self._keep_gap(self.layout.gaps_prefix(chain), gap)

    def passed_gaps(self, target: str, chain: Chain, *, position: int = 1) -> list[AcceptedGap]:
        """The gaps that reach `position` and that `target` goes on behind, by where they end."""
        return self._gaps(self.layout.passed_prefix(target, chain), position)

    def pass_gap(self, target: str, chain: Chain, gap: AcceptedGap) -> AcceptedGap:
        """Write down that `target` goes on behind `gap`; what is there now, read back."""
        return self._keep_gap(self.layout.passed_prefix(target, chain), gap)

    def _gaps(self, prefix: str, position: int) -> list[AcceptedGap]:
        listing = self.objects.list(prefix, start_after=self.layout.gaps_after(prefix, position))
        return [gap for info in listing if (gap := self._gap(prefix, info.key)) is not None]

    def _gap(self, prefix: str, key: str) -> AcceptedGap | None:
        expected = self.layout.parse_gap(prefix, key)
        try:
            gap = None if expected is None else self._read(key, AcceptedGap.from_json)
            if gap is not None and gap.range != expected:
                raise _spoiled(key, f"expected {expected}, found {gap.range}")
        except DataError as error:
            self._ignore(key, str(error), "gap")
            return None
        self._ignored.pop(key, None)
        return gap

    def _ignore(self, key: str, why: str, what: str) -> None:
        """Tell it once: a chain that waits has its gaps read again and again."""
        if self._ignored.get(key) != why:
            self._ignored[key] = why
            log.warning(f"{what} ignored", action=f"{what.replace(' ', '_')}_ignored", error=why)

    def _keep_gap(self, prefix: str, gap: AcceptedGap) -> AcceptedGap:
        return self._create(self.layout.gap(prefix, gap.range), gap.to_json(), AcceptedGap.from_json)

    def _create(self, key: str, body: bytes, parse: Callable[[bytes], D]) -> D:
        if len(body) > MAX_DOCUMENT_BYTES:
            raise DataError(f"{key}: expected at most {MAX_DOCUMENT_BYTES} bytes, found {len(body)}")
        # Looked for first, because some servers ignore the condition of the put.
        if self.objects.head(key) is None:
            self._replace(key, body, None)
        document = self._read(key, parse)
        if document is None:
            raise Unavailable(f"{key}: put and not there", code="E-READ-BACK")
        return document

    def _replace(self, key: str, body: bytes, etag: str | None) -> None:
        """Write where the object is still as `etag` says (None: absent); reading tells what came of it."""
        try:
            if etag is None:
                self.objects.put_if_absent(key, body, sha256=hashlib.sha256(body).hexdigest())
            else:
                self.objects.put_if_match(key, body, etag)
        except OutcomeUnknown as error:
            log.warning("document in doubt", action="document_in_doubt", key=key, error=str(error))

    def _read(self, key: str, parse: Callable[[bytes], D], most: int = MAX_DOCUMENT_BYTES) -> D | None:
        raw = self.objects.get(key, length=most + 1)
        if raw is None:
            return None
        if len(raw) > most:
            raise _spoiled(key, f"expected at most {most} bytes, found more")
        try:
            return parse(raw)
        except ValueError as error:
            raise _spoiled(key, str(error)) from error


def _spoiled(key: str, cause: str) -> DataError:
    return DataError(
        f"{key}: {cause}", hint="compare it with a good copy; it is not used", code="E-STATE-JSON"
    )
