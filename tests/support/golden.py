"""The archive under `tests/golden/1`: an object of each kind, as Floe wrote it when format 1 became final.

It is never made again: its objects have to be readable for ever. This module states its contents, and how it was
made (`python -m tests.support.golden FOLDER`), for the author of an archive of a later version beside it.
"""

import shutil
import sys
from hashlib import sha256
from pathlib import Path

from common.archive import captures
from common.archive.documents import AcceptedGap, ChainDocument, ChainStart, ChainStore, StreamDocument
from common.archive.keys import CaptureName, Layout
from common.archive.segment import Ledger, Message, Reason, SegmentRef
from common.archive.store import SegmentStore
from common.archive.writer import SegmentWriter
from common.chain import Chain
from common.objects.local import LocalObjects
from common.sequences import SequenceRange
from compaction.merge import merge
from compaction.plan import Output, supersession_of_merge
from compaction.tombstones import TombstoneStore
from tests.support.segments import batch_of, footer_of

CHAIN = Chain("us-east", "NODES", 1, 2)
LAYOUT = Layout("data")
TARGET = "FLEET"
SAMPLING = {"inspect_field": "id", "inspect_duration_ns": 60_000_000_000}
DIGEST = "5" * 64
GENESIS_NS = 1_700_000_000_123_456_789

STREAM = StreamDocument(
    {"name": "NODES", "subjects": ["nodes.>"], "max_age": 86_400_000_000_000, "metadata": {"a": "ä"}},
    "2026-11-20T10:00:00.123456789Z",
    {0: 100, 1: 0},
    tuple(ChainStart((f"nodes.{number}.>",), 1, relay=True) for number in range(3)),
    continues=True,
)
DOCUMENT = ChainDocument(("nodes.2.>",), 3, 1, relay=True)
FLOOR, END = 3, 60
ACCEPTED = AcceptedGap(SequenceRange(41, 45), "disk lost, ticket 77", "operator", "2026-11-20T11:00:00Z")
PASSED = AcceptedGap(SequenceRange(12, 15), "accepted", "ingress", "2026-11-20T12:00:00Z", from_hole=True)
CREATED = "2026-11-20T09:00:00.123456789Z"
CONFIG = captures.CapturedConfig("2026-11-20T10:00:00Z", 40, CREATED, {"name": "NODES", "metadata": {"a": "ä"}})
APP = {"name": "app", "durable_name": "app", "ack_policy": "explicit"}
BOTH = (
    captures.CapturedConsumer(APP, CREATED, 9, 8, 7, 6, 2, 1),
    captures.CapturedConsumer({"name": "new"}, CREATED, paused=True),
)
CONSUMERS = captures.CapturedConsumers("2026-11-20T10:00:30.5Z", 40, BOTH)
DELETIONS = captures.CapturedDeletions("2026-11-20T10:01:00Z", 60, 2, 61, ((3, 8), (10, 10)))

ROWS = [
    Message(1, GENESIS_NS, b"nodes.2.a", None, b""),
    Message(2, GENESIS_NS + 1, b"nodes.2.\xff", b"NATS/1.0\r\nX-N: 1\r\nX-N:  again\r\n\r\n", b"\x00\xff"),
    Message(9, GENESIS_NS + 2_001, "nodes.2.ä".encode(), b"NATS/1.0\r\n\r\n", b"payload"),
    Message(21, -1_500, b"nodes.2.a", None, b"before 1970"),
]
KEYS = ["one", None, "two", "one"]
LEDGERS = (
    {Reason.SAMPLED_OUT: 3, Reason.GONE_BEFORE_READ: 2, Reason.GONE_FROM_HOLE: 2, Reason.TOO_OLD: 10},
    {Reason.NOT_MATCHED: 16, Reason.DELETED: 1, Reason.LOOPED: 2},
)
UNREAD = SequenceRange(4, 15)


def make(folder: Path) -> None:
    """Write the archive into an empty folder."""
    objects = LocalObjects(folder)
    store, chains = SegmentStore(objects, LAYOUT), ChainStore(objects, LAYOUT)
    chains.create_stream(CHAIN, STREAM)
    chains.create_chain(CHAIN, DOCUMENT)
    chains.raise_floor(CHAIN, FLOOR)
    chains.write_tail(CHAIN, END)
    chains.accept_gap(CHAIN, ACCEPTED)
    chains.record_skipped_gap(TARGET, CHAIN, PASSED)
    for each in (CONFIG, CONSUMERS, DELETIONS):  # as they were written before they named their chain
        raw = captures.to_json(each)
        name = CaptureName(
            CHAIN.with_partition(0), captures.CAPTURE_KINDS[type(each)], each.end, sha256(raw).hexdigest()[:16]
        )
        objects.put(LAYOUT.capture(name), raw)
    inputs = [
        _segment(store, SequenceRange(1, 20), slice(0, 3), LEDGERS[0], UNREAD),
        _segment(store, SequenceRange(21, 40), slice(3, 4), LEDGERS[1], None),
    ]
    output = Output(1, tuple(inputs))
    TombstoneStore(objects, LAYOUT).put(supersession_of_merge(merge(store, output).ref, output.inputs))
    store.close()
    shutil.rmtree(folder / ".floe-objects")


def _segment(
    store: SegmentStore, coverage: SequenceRange, rows: slice, ledger: dict[Reason, int], unread: SequenceRange | None
) -> SegmentRef:
    found, keys = ROWS[rows], KEYS[rows]
    writer = SegmentWriter(store.new_spool(), level=0, compression_level=1)
    writer.append(batch_of(found, keys))
    unknown = {"raw_bytes": 0, "first_timestamp_ns": None, "last_timestamp_ns": None, "writer": "floe golden"}
    sampled = {"sampling": SAMPLING, "sampling_digest": DIGEST}
    more = {"chain": CHAIN, "ledger": Ledger(dict(ledger)), "unread": unread, **unknown, **sampled}
    return store.put(writer.finish(footer_of(found, coverage, **more)))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
