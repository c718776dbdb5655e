"""A real archive in a folder, for tests of compaction: segments with known rows, whose age is set by hand."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa

from common.chain import Chain
from common.clock import ManualClock
from common.objects.local import LocalObjects
from common.objects.port import ObjectStore
from common.segments.keys import Layout
from common.segments.reader import SegmentWriter, record_batch
from common.segments.segment import Footer, Ledger, Reason, SegmentRef, Tip
from common.segments.store import SegmentStore
from common.sequences import SequenceRange, cover

CHAIN = Chain("us-east", "NODES")


def rows(sequences: Iterable[int], *, salt: str = "", sample_key: str | None = None) -> pa.RecordBatch:
    """A message for each sequence, made from its number and `salt`; all kinds of nulls and bytes."""
    numbers = list(sequences)
    return record_batch(
        numbers,
        [1_700_000_000_000_000_000 + n * 1_001 for n in numbers],
        [b"bad.\xff%d" % n if n % 17 == 0 else b"nodes.%d" % (n % 5) for n in numbers],
        [None if n % 3 == 0 else b"NATS/1.0\r\nX-N: %d\r\nX-N:  again\r\n\r\n" % n for n in numbers],
        [b"" if n % 11 == 0 else b"payload %d %s\x00\xff" % (n, salt.encode()) for n in numbers],
        [sample_key if n % 2 else None for n in numbers],
    )


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
        """A segment of `first`..`last`; without `batch` it holds all of them. It is `age` seconds old.

        Without `ledger` what is missing was deleted.
        """
        batch = rows(range(first, last + 1)) if batch is None else batch
        missing = last - first + 1 - batch.num_rows
        counts = ledger if ledger is not None else ({Reason.DELETED: missing} if missing else {})
        writer = SegmentWriter(self.store.new_spool(), level=level, compression_level=1)
        writer.append(batch)
        spooled = writer.finish(
            Footer(
                **{
                    "chain": chain,
                    "level": level,
                    "coverage": SequenceRange(first, last),
                    "rows": batch.num_rows,
                    "ledger": Ledger(dict(counts)),
                    "raw_bytes": 0,
                    "first_timestamp_ns": None,
                    "last_timestamp_ns": None,
                    "tip": Tip(last, last, "0" * 32),
                    "writer": "test",
                    **footer,
                }
            )
        )
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
        """The file of an object."""
        return self.folder / "store" / key

    def listed(self, chain: Chain = CHAIN) -> list[SegmentRef]:
        return self.store.list(chain)

    def ranges(self, chain: Chain = CHAIN) -> list[str]:
        """`level:first..last` of all segments."""
        return sorted(f"{s.level}:{s.coverage}" for s in self.listed(chain))

    def table(self, ref: SegmentRef) -> pa.Table:
        """The rows of one segment."""
        with self.store.open(ref) as reader:
            return pa.Table.from_batches(list(reader.batches()), rows([]).schema)

    def footer(self, ref: SegmentRef) -> Footer:
        return self.store.footer(ref)

    def read(self, chain: Chain = CHAIN) -> pa.Table:
        """What readers of the cover see."""
        found = [rows([])]
        for stretch in cover(self.listed(chain), 1):
            with self.store.open(stretch.segment) as reader:
                found += list(reader.batches(rows=stretch.rows))
        return pa.Table.from_batches(found)
