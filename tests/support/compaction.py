"""A real archive in a folder, for tests of compaction: segments with known rows, and an age set by hand."""

import hashlib
import multiprocessing
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pyarrow as pa
from hypothesis import strategies as st

from common import failpoints
from common.archive.columns import record_batch
from common.archive.documents import ChainDocument, ChainStore
from common.archive.keys import Layout, SegmentName
from common.archive.segment import Footer, Ledger, Reason, SegmentRef, Tip
from common.archive.store import SegmentStore
from common.archive.table import SegmentTable
from common.archive.writer import SegmentWriter, Spool
from common.chain import Chain
from common.objects.local import LocalObjects
from common.objects.port import ObjectStore
from common.sequences import SequenceRange, cover
from compaction.plan import Output, Planner, blocks
from compaction.retention import Retention, RetentionRule
from compaction.run import Compaction, LocalRunner, RunReport, Selection
from compaction.tombstones import Tombstone, TombstoneIndex
from tests.support.basics import PATIENCE, eventually, has_stopped
from tests.support.clock import ManualClock

CHAIN, OTHER = Chain("us-east", "NODES"), Chain("eu-west", "NODES")


def rows(
    sequences: Iterable[int], *, salt: str = "", sample_key: str | None = None, at_ns: int = 1_700_000_000_000_000_000
) -> pa.RecordBatch:
    """Return a message for each sequence, made from its number and `salt`; all kinds of nulls and bytes. `at_ns`: about
    the time of their publication.
    """
    numbers = list(sequences)
    return record_batch(
        numbers,
        [at_ns + n * 1_001 for n in numbers],
        [b"bad.\xff%d" % n if n % 17 == 0 else b"nodes.%d" % (n % 5) for n in numbers],
        [None if n % 3 == 0 else b"NATS/1.0\r\nX-N: %d\r\nX-N:  again\r\n\r\n" % n for n in numbers],
        [b"" if n % 11 == 0 else b"payload %d %s\x00\xff" % (n, salt.encode()) for n in numbers],
        [sample_key if n % 2 else None for n in numbers],
    )


def at_once(level: Mapping[str, object]) -> dict[str, object]:
    """Return `compaction` of a configuration: one level, in this process; merged inputs are deleted in the same run."""
    return {"levels": [level], "engine": "local", "delete_grace": "0s", "allow_short_times": True}


class Archive:
    """A store in `folder`."""

    def __init__(self, folder: Path, objects: ObjectStore | None = None) -> None:
        self.folder = folder
        self.objects = objects or LocalObjects(folder / "store")
        self.layout = Layout("data")
        self.store = SegmentStore(self.objects, self.layout, spool_dir=folder / "spool", clock=ManualClock())

    def put(
        self,
        first: int,
        last: int,
        batch: pa.RecordBatch | None = None,
        *,
        level: int = 0,
        age: float = 0,
        ledger: Mapping[Reason, int] | None = None,
        chain: Chain = CHAIN,
        **footer: object,
    ) -> SegmentRef:
        """Put a segment of `first`..`last`; without `batch` it holds all of them. It is `age` seconds old.

        Without `ledger`, missing messages count as deleted.
        """
        batch = rows(range(first, last + 1)) if batch is None else batch
        missing = last - first + 1 - batch.num_rows
        counts = ledger if ledger is not None else ({Reason.DELETED: missing} if missing else {})
        writer = SegmentWriter(self.store.new_spool(), level=level, compression_level=1)
        writer.append(batch)
        fields = {"chain": chain, "level": level, "coverage": SequenceRange(first, last), "rows": batch.num_rows}
        fields |= {"ledger": Ledger(dict(counts)), "raw_bytes": 0, "first_timestamp_ns": None, "writer": "test"}
        fields |= {"last_timestamp_ns": None, "tip": Tip(last, last, "0" * 32), **footer}
        spooled = writer.finish(Footer(**fields))
        ref = self.store.put(spooled)
        spooled.path.unlink()
        self.age(ref.key, age)
        return next(s for s in self.store.list(chain, level=level) if s.key == ref.key)

    def age(self, key: str, seconds: float) -> None:
        """Make an object `seconds` old."""
        if seconds and isinstance(self.objects, LocalObjects):
            path = self.path(key)
            modified = path.stat().st_mtime - seconds
            os.utime(path, (modified, modified))

    def age_all(self, seconds: float) -> None:
        """Make every object that much older."""
        for info in self.objects.list(""):
            self.age(info.key, seconds)

    def path(self, key: str) -> Path:
        """Return the file of an object."""
        return self.folder / "store" / key

    def listed(self, chain: Chain = CHAIN) -> list[SegmentRef]:
        return self.store.list(chain)

    def ranges(self, chain: Chain = CHAIN) -> list[str]:
        """Return `level:first..last` of all segments."""
        return sorted(f"{s.level}:{s.coverage}" for s in self.listed(chain))

    def table(self, ref: SegmentRef) -> pa.Table:
        """Return the rows of one segment."""
        with self.store.open(ref) as reader:
            return pa.Table.from_batches(list(reader.batches()), rows([]).schema)

    def footer(self, ref: SegmentRef) -> Footer:
        return self.store.footer(ref)

    def read(self, chain: Chain = CHAIN) -> pa.Table:
        """Return the rows that readers of the cover get."""
        found = [rows([])]
        for stretch in cover(self.listed(chain), 1):
            with self.store.open(stretch.segment) as reader:
                found += list(reader.batches(rows=stretch.rows))
        return pa.Table.from_batches(found)


LAYOUT, NOW = Layout("data"), 1_700_000_000.0


@dataclass(frozen=True)
class TestPolicy:
    """A policy with maxima that no test reaches."""

    __test__ = False

    from_: int = 0
    to: int = 1
    min_age: float = 60
    max_wait: float = 1000
    min_count: int = 3
    max_count: int = 1000
    min_size: int = 1000
    max_size: int = 1_000_000


DUE = TestPolicy(min_age=60, max_wait=600, min_count=3, min_size=10**9, max_size=10**9)


def begun(folder: Path, *chains: Chain) -> Archive:
    """Return an archive in which egress has begun these chains."""
    archive = Archive(folder)
    for chain in chains:
        ChainStore(archive.objects, archive.layout).create_chain(chain, ChainDocument((), 1, 1))
    return archive


def left_over(archive: Archive) -> list[str]:
    """Return the files that are left in the spool after the next run that uses it."""
    with closing(Spool(archive.folder / "spool")) as spool:
        spool.new_file().unlink()
    return [f.name for f in (archive.folder / "spool").rglob("*") if f.is_file() and f.name != "lock"]


def plan(
    segments: Sequence[SegmentRef], policy: TestPolicy, now: float, *, damaged: AbstractSet[str] = frozenset()
) -> list[Output]:
    """Return the outputs that are due among one chain's `segments` (all levels), planned in one window."""
    planner = Planner(policy, now)
    return [*planner.add(blocks(s for s in segments if s.key not in damaged)), *planner.end()]


def table_of(refs: Iterable[SegmentRef]) -> SegmentTable:
    """Return these segments in the order of a listing."""
    return SegmentTable(sorted(refs, key=lambda ref: (ref.level, ref.name)))


#: A tombstone with its key and its time in the store.
StoredTombstone = tuple[Tombstone, str, float]


def index_of(listed: SegmentTable, stones: Iterable[StoredTombstone]) -> TombstoneIndex:
    """Return the index of these tombstones over the listed segments."""
    index = TombstoneIndex(listed)
    for stone in stones:
        index.add(*stone)
    return index


def ref(
    first: int, last: int, level: int = 0, *, size: int = 100, age: float = 500, twin: int = 0, chain: Chain = CHAIN
) -> SegmentRef:
    """Return a segment with an object of `age` seconds at NOW; `twin` distinguishes those of equal coverage."""
    digest = hashlib.sha256(f"{first} {last} {level} {twin}".encode()).hexdigest()[:16]
    name = SegmentName(chain, level, SequenceRange(first, last), digest)
    return SegmentRef(name, LAYOUT.segment(name), size, NOW - age)


def refs(first: int, *, level: int, size: int, count: int) -> st.SearchStrategy[list[SegmentRef]]:
    """Generate segments with keys of their own, at most `count`; the other parameters are upper bounds of theirs."""
    one = st.builds(
        lambda first, length, level, size, age, twin: ref(first, first + length, level, size=size, age=age, twin=twin),
        st.integers(1, first),
        *(st.integers(0, most) for most in (15, level, size, 3000, 1)),
    )
    return st.lists(one, max_size=count, unique_by=lambda segment: segment.key)


SECOND = TestPolicy(from_=1, to=2, min_age=0, max_wait=-1, min_count=2, min_size=10**9, max_size=10**9)

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.compaction"])


def run(folder: Path, *, grace: float = 0, max_age: float = 0) -> RunReport:
    """Run compaction once over the archive in `folder`, without Spark. `max_age`: of retention, in seconds; 0: none."""
    store = Archive(folder).store
    retention = Retention(store, lambda _site, _feed: RetentionRule(max_age), {})
    try:
        return Compaction(store, [DUE, SECOND], grace, LocalRunner(store)).run(Selection(), retention)
    finally:
        store.close()


def _job(folder: Path, points: str, max_age: float) -> None:
    failpoints.set_failpoints(points)
    run(folder, max_age=max_age)


class Job:
    """A run in another process, with failpoints as FLOE_FAILPOINTS names them."""

    def __init__(self, folder: Path, points: str = "", *, max_age: float = 0) -> None:
        self._process: ForkServerProcess = _context.Process(target=_job, args=(folder, points, max_age))
        self._process.start()

    def wait(self, seconds: float = PATIENCE) -> int:
        """Return its exit code; -9 if it was killed."""
        self._process.join(seconds)
        code = self._process.exitcode
        assert code is not None, f"still running after {seconds} s"
        return code

    def wait_until_stopped(self) -> None:
        """Wait until it has stopped itself at a failpoint."""
        eventually(lambda: has_stopped(self._process.pid or 0))

    def resume(self) -> None:
        """Resume it after a failpoint."""
        assert self._process.pid
        os.kill(self._process.pid, signal.SIGCONT)
