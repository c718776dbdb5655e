"""An archive over days of egress, compaction and retention, with one clock."""

from pathlib import Path

from common.archive.documents import ChainDocument, ChainStore, StreamDocument, TargetPositions
from common.archive.keys import Layout
from common.archive.store import SegmentStore
from common.objects.local import LocalObjects
from compaction.retention import Retention, RetentionRule
from compaction.run import Compaction, LocalRunner, Selection
from infra.oracle import archive_holes, archived_messages
from tests.support.basics import seeded
from tests.support.clock import ManualClock
from tests.support.compaction import CHAIN, TestPolicy
from tests.support.segments import message, write_segment
from tests.support.stores import DatedObjects

HOUR, DAY = 3600.0, 86_400.0
EACH = 3600.0  # seconds between two segments
WIDTH = 10  # sequences of a segment
RUNS = 4 * HOUR  # seconds between two runs of compaction
AGE, GRACE = DAY, 6 * HOUR
# Keys, for 144 segments: those younger than `min_age`, too few for a merge, or merged within GRACE, with a tombstone
# for each merge; the segments of level 2 that retention keeps; the documents.
MOST = 42
HALTED = range(2 * 6, 4 * 6)  # runs during which ingress carries nothing: twice AGE
LEVELS = [
    TestPolicy(level, level + 1, min_age=HOUR, max_wait=10 * DAY, min_count=1000, min_size=size, max_size=8 * size)
    for level, size in enumerate([15_000, 30_000])
]


def test_keys_stay_as_few_as_the_policy_sets_and_retention_waits_for_the_target(tmp_path: Path) -> None:
    rng = seeded()
    clock, layout = ManualClock(), Layout("data")
    objects = DatedObjects(LocalObjects(tmp_path / "store"), clock)
    store = SegmentStore(objects, layout, spool_dir=tmp_path / "spool", clock=clock)  # type: ignore[arg-type]
    documents = ChainStore(objects, layout)  # type: ignore[arg-type]
    documents.create_stream(CHAIN, StreamDocument({"name": CHAIN.feed}, "t0", None))
    documents.create_chain(CHAIN, ChainDocument((), 1, 1))
    source = f"{CHAIN.site}/{CHAIN.feed}"
    retention = Retention(store, lambda *_: RetentionRule(AGE), {"FLEET": frozenset({source})})
    end = carried = 0
    levels, held = set[int](), list[int]()
    for run in range(6 * 6):
        for _ in range(int(RUNS / EACH)):
            clock.advance(EACH)
            new, at_ns = range(end + 1, end + WIDTH + 1), int(clock.now() * 1e9)
            path = store.new_spool()
            store.put(
                write_segment(path, [message(n, rng.randbytes(200), timestamp_ns=at_ns) for n in new], chain=CHAIN)
            )
            path.unlink()
            end += WIDTH
        documents.write_tail(CHAIN, end)
        carried = carried if run in HALTED else end
        documents.write_positions(TargetPositions("FLEET", clock.now(), {CHAIN: carried + 1}, (source,)))
        report = Compaction(store, LEVELS, GRACE, LocalRunner(store)).run(Selection(), retention)
        assert report.failures == []
        levels |= {merged.ref.level for merged in report.merged}
        held += [run] if report.retention.holds else []
        floor = documents.read_floor(CHAIN) or 1
        assert floor <= carried + 1, "deleted before the target had it"
        assert len(objects.list("")) <= MOST
    assert levels == {1, 2}
    assert held
    assert {*held} <= {*HALTED}
    assert end - floor < 2 * AGE / EACH * WIDTH, "kept though nobody needs it"
    assert archive_holes(store, CHAIN) == []
    assert [row.sequence for row in archived_messages(store, CHAIN, floor)] == [*range(floor, end + 1)]
    store.close()
