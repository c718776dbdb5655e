"""Store of segments: list, put and read back, open, delete and quarantine.

The listing is the index, and the name holds the digest of the content: nothing is ever overwritten with other bytes,
so a put that is repeated, doubled or late can only repair the object.

Quarantine moves a harmful object out of the way: it is copied, read back, and only then deleted.

    {prefix}/_floe/quarantine/{sha256[:16]}/{its key below the prefix}

It is for segments (damaged, or one side of a fork) and for keys that are none of Floe's. Documents that rule a
chain are repaired by an operator, never quarantined.
"""

from __future__ import annotations

import builtins
import copy
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common.archive.documents import SnapshotRef
from common.archive.guard import MIB, SegmentGone
from common.archive.keys import MAX_LEVEL, Layout
from common.archive.reader import Admit, SegmentReader, admit_all, open_file
from common.archive.segment import Footer, SegmentRef, Tip
from common.archive.table import SegmentTable
from common.archive.writer import Spool, SpooledSegment, spool_errors
from common.chain import Chain
from common.clock import Clock, SystemClock
from common.errors import DataError, OutcomeUnknown, SegmentCorrupt, Unavailable, UsageError
from common.exits import floe_command
from common.failpoints import failpoint
from common.logs import get_logger
from common.metrics import counter
from common.objects.open import is_verifying
from common.objects.port import ChecksumMismatch, ClassingStore, ObjectInfo, ObjectStore, body_size, put_new, sha256_of
from common.sequences import SequenceRange, cover, holes

log = get_logger(__name__)


BLOCK_BYTES = 32 * 1024  # the footer of most segments fits
_MAX_GET_BYTES = 32 * MIB


class PartialObjectFile:
    """A file `path` of `size` bytes that receives blocks of the object `key` on demand.

    Blocks are counted from the end, so that the last bytes, which are read first, come with the footer.
    """

    def __init__(self, objects: ObjectStore, key: str, size: int, path: Path) -> None:
        self._objects, self._key, self._size, self._shift = objects, key, size, -size % BLOCK_BYTES
        self._present: set[int] = set()
        self._folder, self._file = path.parent, path.open("r+b", buffering=0)
        self._file.truncate(size)

    def fetch(self, first: int, length: int) -> None:
        """Make `length` bytes from offset `first` readable, as far as the object reaches.

        Raises SegmentGone, SegmentCorrupt if the object is shorter than listed, Unavailable (E-SPOOL too).
        """
        last = min(first + length, self._size) - 1
        if first < 0 or last < first:
            return
        wanted = range((first + self._shift) // BLOCK_BYTES, (last + self._shift) // BLOCK_BYTES + 1)
        for run in _runs([block for block in wanted if block not in self._present]):
            self._copy(run)

    def _copy(self, run: range) -> None:
        begin = max(0, run.start * BLOCK_BYTES - self._shift)
        length = run.stop * BLOCK_BYTES - self._shift - begin
        if (data := self._objects.get(self._key, first=begin, length=length)) is None:
            raise SegmentGone(f"segment {self._key}: no longer in the store")
        if len(data) != length:
            raise SegmentCorrupt(f"expected {length} bytes at {begin}, found {len(data)}")
        with spool_errors(self._folder):
            self._file.seek(begin)
            self._file.write(data)
        self._present.update(run)

    def close(self) -> None:
        self._file.close()


def _runs(blocks: list[int]) -> list[range]:
    runs: list[range] = []
    for block in blocks:
        if runs and runs[-1].stop == block and len(runs[-1]) * BLOCK_BYTES < _MAX_GET_BYTES:
            runs[-1] = range(runs[-1].start, block + 1)
        else:
            runs.append(range(block, block + 1))
    return runs


# Up to this size a segment is fetched whole, so that its name proves its bytes; beyond it, by ranges.
WHOLE_BYTES = 256 * MIB
IN_MEMORY_BYTES = 64 * 1024  # up to this size without a file, in half of the time
ONE_FETCH_BYTES = MIB  # up to this size one request for all of a segment costs no more than several for a part
FETCH_RETRY_S = (0.1, 0.5)  # seconds before damaged bytes are fetched again


class DigestMismatch(SegmentCorrupt):
    """Fetched bytes that do not match the listed size or the digest of the name."""


__all__ = ["SegmentGone", "SegmentStore", "object_metadata"]

_bad_read_backs = counter("segment_read_back_failures", "Puts that did not read back as sent.", ("site", "feed"))

LIST_PAGE_SEGMENTS = 1000  # segments of one listing
TABLE_PAGE_SEGMENTS = 5000  # the same if all are wanted: a folder is read again for each page
Check = Callable[[], object]  # raises an error unless the caller may go on
PUT_RETRY_S = (0.2, 1.0, 5.0)  # seconds before a segment that did not read back is put again


class SegmentStore:
    """The segments under one layout. Blocking; safe to use from several threads.

    A file in the spool is unlinked as soon as it is open, so that a killed process leaves none. Every
    method raises the errors of the object store. `spool_dir` None: the system's temporary folder.
    `subject_statistics`: for writers of segments here, as in `SegmentWriter`. `storage_classes`: of segments, by level,
    if the object store has classes; other levels have its own.
    """

    def __init__(
        self,
        objects: ObjectStore,
        layout: Layout,
        *,
        spool_dir: Path | None = None,
        clock: Clock | None = None,
        subject_statistics: bool = True,
        storage_classes: Mapping[int, str] | None = None,
    ) -> None:
        self.objects, self.layout, self.subject_statistics = objects, layout, subject_statistics
        self._spool, self._storage_classes = Spool(spool_dir), storage_classes or {}
        self._clock = clock or SystemClock()
        self._partial = self._always_partial = False
        self._admit: Admit = admit_all

    def with_partial_reads(self, *, always: bool = False) -> SegmentStore:
        """Return the same store, but `open` with `rows` fetches only those parts of a segment that are read.

        `always`: also without `rows`, or with all of them, for readers of few columns or row groups.
        For reading a little of an archive: page checksums and the footer prove the bytes of such a part, not the
        segment's name. Closing either closes both.
        """
        view = copy.copy(self)
        view._partial, view._always_partial = True, always
        return view

    def with_admission(self, admit: Admit) -> SegmentStore:
        """Return the same store, but open segments call `admit` before they decode rows. Closing either closes both."""
        view = copy.copy(self)
        view._admit = admit
        return view

    # Listing

    def list(
        self, chain: Chain, *, position: int = 1, level: int | None = None, limit: int | None = None
    ) -> builtins.list[SegmentRef]:
        """List the segments that reach `position`, by level and within a level by their end.

        `level` None: all levels. `limit`: of each level. Foreign keys are skipped.
        """
        levels = range(MAX_LEVEL + 1) if level is None else (level,)
        afters = ((each, self.layout.start_after(chain, each, position)) for each in levels)
        return [ref for each, after in afters for ref in self._list_from(chain, each, after, limit)]

    def list_above(self, chain: Chain, level: int, limit: int) -> builtins.list[SegmentRef] | None:
        """List all segments of the levels above `level`, by one request; None if there are `limit` or more objects."""
        after = f"{self.layout.segments_prefix(chain, level).removesuffix('/')}0"  # sorts right after the slash
        page = self.objects.list(self.layout.partition_prefix(chain), start_after=after, limit=limit)
        return None if len(page) >= limit else [ref for info in page if (ref := self._ref(info)) is not None]

    def list_after(self, ref: SegmentRef, limit: int) -> builtins.list[SegmentRef]:
        return self._list_from(ref.chain, ref.level, ref.key, limit)

    def pages(
        self, chain: Chain, level: int | None = None, *, position: int = 1, size: int = LIST_PAGE_SEGMENTS
    ) -> Iterator[builtins.list[SegmentRef]]:
        """Yield the segments that reach `position`, `size` at a time: of a level by their end, of all levels (None)
        level by level from the bottom, so that a segment that a merge moves up meanwhile is seen in the higher level.
        """
        for each in range(MAX_LEVEL + 1) if level is None else (level,):
            page = self.list(chain, position=position, level=each, limit=size)
            while page:
                yield page
                page = self.list_after(page[-1], size) if len(page) >= size else []

    def walk(self, chain: Chain, size: int = LIST_PAGE_SEGMENTS) -> Iterator[builtins.list[SegmentRef]]:
        """Yield all segments, `size` at a time, as `pages`; from one listing if there are fewer."""
        page = self.objects.list(self.layout.partition_prefix(chain), limit=size)
        if len(page) < size:
            yield [ref for info in page if (ref := self._ref(info)) is not None]
            return
        yield from self.pages(chain, size=size)

    def table(self, chain: Chain) -> SegmentTable:
        """Return the segments of `list(chain)` in a sixteenth of the memory: no page is kept."""
        return SegmentTable(ref for page in self.walk(chain, TABLE_PAGE_SEGMENTS) for ref in page)

    def _list_from(self, chain: Chain, level: int, after: str, limit: int | None) -> builtins.list[SegmentRef]:
        prefix = self.layout.segments_prefix(chain, level)
        found: builtins.list[SegmentRef] = []
        while True:
            # A foreign key takes a place in a limited page: without another page it would hide a segment.
            wanted = None if limit is None else limit - len(found)
            page = self.objects.list(prefix, start_after=after, limit=wanted)
            found += [ref for info in page if (ref := self._ref(info)) is not None]
            if wanted is None or len(page) < wanted or len(found) == limit:
                return found
            after = page[-1].key

    def _ref(self, info: ObjectInfo) -> SegmentRef | None:
        if (name := self.layout.parse_segment(info.key)) is None:
            log.debug("foreign key skipped", action="foreign_key_skipped", key=info.key)
        return SegmentRef(name, info.key, info.size, info.modified) if name else None

    # Writing

    def new_spool(self) -> Path:
        """Return a new empty file in a private folder; the caller removes it. Raises Unavailable, code E-SPOOL."""
        return self._spool.new_file()

    def spooled_bytes(self) -> int:
        """Return the bytes of the files in the private folder: segments being written, and segments not yet put."""
        return self._spool.size()

    def put(self, spooled: SpooledSegment, may_put: Check = lambda: None) -> SegmentRef:
        """Put the segment and read it back; on return, the store holds these very bytes.

        `may_put`: called before each attempt; what it raises ends the put. Raises Unavailable, code E-READ-BACK, if it
        never reads back as it was sent; then, and after every other error, the same call may be repeated. The spooled
        file stays.
        """
        name = spooled.segment_name
        ref = SegmentRef(name, self.layout.segment(name), spooled.size, 0.0)
        info = self.put_verified(ref, spooled.path, object_metadata(spooled), may_put, "segments.")
        return ref._replace(modified=info.modified)

    def put_verified(
        self, ref: SegmentRef | SnapshotRef, body: Path | bytes, metadata: Mapping[str, str], may_put: Check, point: str
    ) -> ObjectInfo:
        """Put `body`, with its `sha256` in `metadata`, and read it back; repeat this a few times if needed.

        On return, the store holds these very bytes. `may_put`: as in `put`. `point`: the prefix of its failpoints.
        Raises Unavailable, with code E-READ-BACK if a put succeeded and never reads back as it was sent.
        """
        kind, sha256 = "segment" if isinstance(ref, SegmentRef) else "snapshot", metadata["sha256"]
        objects = self._objects_of(ref)
        for number, pause in enumerate((*PUT_RETRY_S, 0.0)):
            put = objects.put if number else partial(put_new, objects)
            cause: OutcomeUnknown | None = None
            failpoint(f"{point}put")
            may_put()
            try:
                put(ref.key, body, sha256=sha256, metadata=metadata)
            except (OutcomeUnknown, ChecksumMismatch) as error:
                # Reading back shows the outcome.
                cause = error if isinstance(error, OutcomeUnknown) else None
                log.warning("put unconfirmed", action="put_unconfirmed", error=str(error), **ref.log_context())
            failpoint(f"{point}read_back")
            if (info := self._read_back(ref, sha256)) is not None:
                return info
            if cause is None:
                if isinstance(ref, SegmentRef):
                    _bad_read_backs.labels(ref.chain.site, ref.chain.feed).inc()
                log.warning("read-back failed", action="read_back_failed", **ref.log_context())
            self._clock.block(pause)
        if cause is not None:
            raise Unavailable(f"{kind} {ref.key}: put {len(PUT_RETRY_S) + 1} times, not found: {cause}") from cause
        text = f"{kind} {ref.key}: put {len(PUT_RETRY_S) + 1} times, never read back as it was sent"
        raise Unavailable(text, hint="check the store: it accepts objects that it does not keep", code="E-READ-BACK")

    def _objects_of(self, ref: SegmentRef | SnapshotRef) -> ObjectStore:
        name = self._storage_classes.get(ref.level) if isinstance(ref, SegmentRef) else None
        if name and isinstance(objects := self.objects, ClassingStore):
            return objects.with_storage_class(name)
        return self.objects

    def delete(self, ref: SegmentRef) -> None:
        """Delete the segment; no error if it is gone."""
        self.objects.delete(ref.key)

    # Reading back

    def is_intact(self, ref: SegmentRef) -> bool:
        """True if the segment exists, with the size of the listing and the bytes that its name promises."""
        return self._read_back(ref, ref.segment.digest) is not None

    def _read_back(self, ref: SegmentRef | SnapshotRef, digest: str) -> ObjectInfo | None:
        if (info := self.objects.head(ref.key)) is None or info.size != ref.size:
            return None
        probe = f"{self.layout.documents_prefix(ref.chain.site, ref.chain.feed)}probe/"
        is_proven = info.sha256 is not None and is_verifying(self.objects, probe)
        sha256 = info.sha256 if is_proven else self._stored_sha256(ref)
        return info if sha256 is not None and sha256.startswith(digest) else None

    def _stored_sha256(self, ref: SegmentRef | SnapshotRef) -> str | None:
        """Return 64 hex digits; None if there is no such object."""
        with self._download(ref) as path:
            return sha256_of(path) if path else None

    @contextmanager
    def _download(self, ref: SegmentRef | SnapshotRef) -> Iterator[Path | None]:
        path = self._spool.new_file()
        try:
            with spool_errors(path.parent):
                is_there = self.objects.download(ref.key, path)
            yield path if is_there else None
        finally:
            path.unlink(missing_ok=True)

    # Opening

    def open(self, ref: SegmentRef, *, rows: SequenceRange | None = None, whole: bool = False) -> SegmentReader:
        """Open the segment; `rows`: the default rows of `batches` (None: all).

        Up to 256 MiB, and with `whole`, it is fetched whole and its SHA-256 compared with its name. A larger one is
        fetched by ranges as it is read, under the page checksums (for smaller ones see `with_partial_reads`). Raises
        SegmentCorrupt, SegmentGone.
        """
        is_part = self._partial and rows is not None and not rows.encloses(ref.coverage)
        if not whole and (is_part or self._always_partial or ref.size > WHOLE_BYTES):
            return self.open_part(ref, rows=rows)
        for number, pause in enumerate(FETCH_RETRY_S):
            try:
                return self._open_whole(ref, rows)
            except DigestMismatch as error:
                # The network may have damaged bytes that are intact in the store.
                report = log.info if number else log.warning  # one warning for an attempt and its repeats
                report("segment unreadable", action="segment_unreadable", error=str(error), **ref.log_context())
                self._clock.block(pause)
        return self._open_whole(ref, rows)

    def _open_whole(self, ref: SegmentRef, rows: SequenceRange | None) -> SegmentReader:
        if ref.size <= IN_MEMORY_BYTES:
            return self._open_verified(ref, self.objects.get(ref.key, length=ref.size + 1), rows)
        with self._download(ref) as path:
            return self._open_verified(ref, path, rows)

    def _open_verified(self, ref: SegmentRef, source: Path | bytes | None, rows: SequenceRange | None) -> SegmentReader:
        """Open `source`, the fetched bytes, None if there is no such object, once the name has proved them."""
        if source is None:
            raise SegmentGone(f"segment {ref.key}: no longer in the store")
        size, sha256 = body_size(source), sha256_of(source)
        if size != ref.size or not sha256.startswith(ref.segment.digest):
            raise DigestMismatch(
                f"segment {ref.key}: expected {ref.size} bytes with SHA-256 {ref.segment.digest}…, "
                f"found {size} with {sha256[:16]}…"
            )
        return open_file(source, ref.segment, key=ref.key, rows=rows, admit=self._admit)

    def open_part(self, ref: SegmentRef, *, rows: SequenceRange | None = None) -> SegmentReader:
        """Open as `open` does, but fetch only the parts of the object that are read, at any size.

        The name cannot prove bytes that are incomplete: page checksums and the footer do.
        """
        path = self._spool.new_file()
        try:
            parts = PartialObjectFile(self.objects, ref.key, ref.size, path)
            return open_file(
                path, ref.segment, key=ref.key, rows=rows, fetch=parts.fetch, on_close=parts.close, admit=self._admit
            )
        finally:
            path.unlink(missing_ok=True)

    def footer(self, ref: SegmentRef) -> Footer:
        """Read the footer, from the end of the object only. Raises SegmentCorrupt, SegmentGone."""
        with self.open_part(ref) as reader:
            return reader.footer

    def inspect(self, ref: SegmentRef, *, deep: bool = False) -> Footer | DataError:
        """Return the footer; or the error, SegmentCorrupt or SegmentGone, if it cannot be read.

        `deep`: fetch the segment whole, so that its name proves its bytes, and read all rows, so that their order,
        range and counts and the checksums of pages are checked.
        """
        try:
            if not deep:
                return self.footer(ref)
            with self.open(ref, whole=True) as reader:
                for _batch in reader.batches():
                    pass
                return reader.footer
        except (SegmentCorrupt, SegmentGone) as error:
            return error

    def tip(self, ref: SegmentRef) -> Tip | None:
        """Return the last message examined for the segment; None if there was none.

        From the object's metadata; from the footer if a copy of the bucket lost them. Raises SegmentGone,
        SegmentCorrupt.
        """
        if (info := self.objects.head(ref.key)) is None:
            raise SegmentGone(f"segment {ref.key}: no longer in the store")
        with suppress(ValueError):
            if "format" in info.metadata:
                return Tip.from_text(info.metadata["tip"]) if "tip" in info.metadata else None
        return self.footer(ref).tip

    def close(self) -> None:
        """Remove the spool folder. Open readers stay usable."""
        self._spool.close()


def object_metadata(spooled: SpooledSegment) -> dict[str, str]:
    """Return the object metadata of a segment, readable without opening it; far below the 2 KB limit of S3."""
    footer, sha256 = spooled.footer, spooled.sha256
    numbers = {"format": footer.format_version, "rows": footer.rows, "bytes": footer.raw_bytes}
    tip = {"tip": footer.tip.to_text()} if footer.tip else {}
    return {**{name: str(number) for name, number in numbers.items()}, "sha256": sha256, **tip}


REFETCH_HINT = "egress reads them again if the source still holds them; otherwise every target waits there"


@dataclass(frozen=True, slots=True)
class QuarantineResult:
    """The result for the object at `key`. `uncovered`: sequences that nothing else covers now. `note`: the decision
    that egress needs before it continues; empty if it needs none.
    """

    key: str
    kept_at: str
    size: int
    sha256: str
    uncovered: tuple[SequenceRange, ...]
    note: str = ""


def quarantine_command(key: str, *options: str) -> str:
    """Return the command for the object at `key`. It needs `--yes` if no other segment covers the sequences."""
    return floe_command("segments quarantine", shlex.quote(key), *options)


def quarantine(store: SegmentStore, key: str, *, accept_hole: bool = False) -> QuarantineResult:
    """Quarantine the object at `key`.

    Raises UsageError (E-QUARANTINE) unless `Layout.can_quarantine`, and unless `accept_hole` for a segment with
    sequences that no other undamaged segment covers; SegmentGone if there is no such object; OutcomeUnknown if the copy
    does not read back. The object stays until the copy reads back; it is safe to repeat.
    """
    if (info := store.objects.head(key)) is None:
        raise SegmentGone(f"object {key}: not in the store")
    if not store.layout.can_quarantine(key):
        raise UsageError(
            f"{key}: expected a segment, or a foreign object below the prefix, "
            "found one that a chain depends on or that belongs to others",
            hint="if a chain depends on it, put a good copy of it back instead",
            code="E-QUARANTINE",
        )
    name = store.layout.parse_segment(key)
    segment = SegmentRef(name, key, info.size, info.modified) if name else None
    uncovered = _uncovered_ranges(store, segment) if segment else []
    note = _end_note(store, segment) if segment and uncovered else ""
    if uncovered and not accept_hole:
        text = f"{key}: no other segment covers {', '.join(map(str, uncovered))}: expected --yes"
        raise UsageError(text, hint="; ".join(filter(None, [REFETCH_HINT, note])), code="E-QUARANTINE")
    kept_at, sha256 = _copy(store, key, info.metadata)
    failpoint("segments.quarantine")
    store.objects.delete(key)
    return QuarantineResult(key, kept_at, info.size, sha256, tuple(uncovered), note)


def _end_note(store: SegmentStore, segment: SegmentRef) -> str:
    """Return the decision that egress needs if no other segment reaches the end of `segment`: the mark may be there.
    Else return an empty text.
    """
    last = segment.coverage.last
    if any(ref.key != segment.key for ref in store.list(segment.chain, position=last, limit=2)):
        return ""
    feed = shlex.quote(segment.chain.feed)
    return (
        "it is the last segment of its chain: if egress at the site then waits with E-LISTING, accept the "
        f"listing there:\nfloe egress resolve -c site.yaml {feed} --believe-listing"
    )


def _uncovered_ranges(store: SegmentStore, segment: SegmentRef) -> Sequence[SequenceRange]:
    first, last = segment.coverage.first, segment.coverage.last
    others = [s for s in store.list(segment.chain, position=first) if s.key != segment.key]
    while True:
        chosen = {stretch.segment.key: stretch.segment for stretch in cover(others, first, last)}
        damaged = {key for key, other in chosen.items() if not _is_sound(store, other)}
        if not damaged:
            return holes((s.coverage for s in chosen.values()), segment.coverage)
        others = [s for s in others if s.key not in damaged]


def _is_sound(store: SegmentStore, segment: SegmentRef) -> bool:
    with suppress(DataError), store.open(segment):
        return True
    return False


def _copy(store: SegmentStore, key: str, metadata: Mapping[str, str]) -> tuple[str, str]:
    """Copy the object. Return the key of the copy and the SHA-256. Raises OutcomeUnknown if it does not read back."""
    spool = store.new_spool()
    try:
        sha256 = _download_sha256(store, key, spool)
        kept_at = store.layout.quarantine_key(key, sha256)
        store.objects.put(kept_at, spool, sha256=sha256, metadata=metadata)
        # The network may damage bytes that are intact in the store: the original is read again too.
        if {_download_sha256(store, each, spool) for each in (kept_at, key)} != {sha256}:
            raise OutcomeUnknown(f"object {kept_at}: the bytes read back differ from those written")
    finally:
        spool.unlink(missing_ok=True)
    return kept_at, sha256


def _download_sha256(store: SegmentStore, key: str, spool: Path) -> str:
    with spool_errors(spool.parent):
        if not store.objects.download(key, spool):
            raise SegmentGone(f"object {key}: not in the store")
        return sha256_of(spool)
