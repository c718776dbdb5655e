"""Segments in a store: put and read back through every fault, listed, opened whole or by ranges."""

import os
import random
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.archive import store as fetching
from common.archive.keys import Layout
from common.archive.segment import Message, SegmentRef, Tip
from common.archive.store import IN_MEMORY_BYTES, SegmentGone, SegmentStore
from common.archive.writer import SegmentWriter, SpooledSegment
from common.chain import Chain
from common.errors import FloeError, OutcomeUnknown, Refused, SegmentCorrupt, Unavailable
from common.objects.local import LocalObjects
from common.objects.port import ChecksumMismatch, ConditionalPutRefused, ObjectStore
from common.objects.s3 import S3Account, S3Objects
from common.sequences import SequenceRange
from tests.support.basics import SharedS3, raises_code
from tests.support.clock import ManualClock
from tests.support.segments import CHAIN, batch_of, footer_of, message, read_all
from tests.support.stores import FaultyStore, answering, raising

LAYOUT = Layout("data")
ROWS = [message(n, b"payload %d" % n) for n in range(1, 101)]


@pytest.fixture(params=["local", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "local":
        return LocalObjects(tmp_path / "store")
    s3: SharedS3 = request.getfixturevalue("s3")
    return S3Objects(s3.new_bucket(), S3Account(s3.access_key, s3.secret_key, endpoint_url=s3.endpoint_url))


@pytest.fixture
def local(tmp_path: Path) -> LocalObjects:
    return LocalObjects(tmp_path / "store")


@pytest.fixture
def make(tmp_path: Path) -> Callable[[Any], SegmentStore]:
    """A segment store over any object store, with a spool of its own and a clock that does not wait."""

    def store(objects: Any) -> SegmentStore:
        return SegmentStore(objects, LAYOUT, spool_dir=tmp_path / "spool", clock=ManualClock())

    return store


def spool(store: SegmentStore, rows: Sequence[Message] = ROWS, **fields: Any) -> SpooledSegment:
    footer = footer_of(rows, fields.pop("coverage", None), **fields)
    writer = SegmentWriter(store.new_spool(), level=footer.level, compression_level=1)
    writer.append(batch_of(rows))
    return writer.finish(footer)


def put(store: SegmentStore, first: int, last: int, level: int = 0, chain: Chain = CHAIN) -> SegmentRef:
    return store.put(spool(store, [message(last)], coverage=SequenceRange(first, last), level=level, chain=chain))


def test_segments_of_a_level_have_its_storage_class(tmp_path: Path) -> None:
    class Classed(LocalObjects):
        puts: dict[str, str] = {}  # noqa: RUF012
        name = "other"

        def with_storage_class(self, name: str) -> LocalObjects:
            view = Classed(tmp_path)
            view.name = name
            return view

        def put_if_absent(self, key: str, *args: Any, **named: Any) -> bool:
            self.puts[key] = self.name
            return super().put_if_absent(key, *args, **named)

    store = SegmentStore(Classed(tmp_path), LAYOUT, storage_classes={1: "STANDARD_IA", 2: "GLACIER_IR"})
    refs = [put(store, 1, 5, level) for level in (0, 1, 2)]
    assert [Classed.puts[ref.key] for ref in refs] == ["other", "STANDARD_IA", "GLACIER_IR"]


def rows_of(store: SegmentStore, ref: SegmentRef, rows: SequenceRange | None = None) -> list[Message]:
    with store.open(ref, rows=rows) as reader:
        return read_all(reader)


Make = Callable[[Any], SegmentStore]
Large = tuple[SegmentRef, list[Message]]


# On real stores


def test_a_put_is_listed_and_read_back_and_gone_once_deleted(objects: ObjectStore, make: Make) -> None:
    store = make(objects)
    spooled = spool(store)
    ref = store.put(spooled)
    assert (store.list(CHAIN), ref.segment, ref.size) == ([ref], spooled.segment_name, spooled.size)
    assert (rows_of(store, ref), rows_of(store, ref, SequenceRange(10, 12))) == (ROWS, ROWS[9:12])
    assert (store.footer(ref), store.tip(ref)) == (spooled.footer, Tip.of(ROWS[-1]))
    assert store.is_intact(ref)
    info = objects.head(ref.key)
    assert (set(info.metadata), info.metadata["rows"]) == ({"format", "rows", "bytes", "sha256", "tip"}, "100")
    assert store.put(spooled) == ref, "again changes nothing"
    assert store.list(CHAIN) == [ref]
    store.delete(ref)
    store.delete(ref)
    assert store.list(CHAIN) == []
    assert not store.is_intact(ref)
    for read in (store.open, store.footer, store.tip):
        with pytest.raises(SegmentGone, match="no longer in the store"):
            read(ref)


@pytest.mark.parametrize("size", [1, 3])
def test_a_walk_shows_every_segment_once_from_the_lowest_level(objects: ObjectStore, make: Make, size: int) -> None:
    store, prefix = make(objects), LAYOUT.segments_prefix(CHAIN, 0)
    refs = [put(store, first, first + 9, level) for level in (0, 1, 9) for first in (1, 11)]
    put(store, 1, 10, chain=CHAIN.with_partition(10))
    for name in ("foreign", "00000000000000000015.tmp", "00000000000000000015-x.parquet", "00000000000000000016"):
        objects.put(f"{prefix}{name}", b"foreign")
    found = [[ref.key for ref in page] for page in store.walk(CHAIN, size)]
    assert [key for page in found for key in page] == [ref.key for ref in refs]
    assert all(len(page) <= size for page in found)
    assert store.list(CHAIN, level=0, position=11, limit=1) == store.list(CHAIN, level=0, position=11) == [refs[1]]


# Faults of a put: F32, F33


def storing(damage: Callable[[bytes], bytes]) -> Any:
    """A fault: damaged bytes are stored."""
    return lambda real, key, body, **_: real(key, damage(body.read_bytes()))


PUTS = {
    "answer lost": raising(OutcomeUnknown("lost"), after=True),
    "lost": raising(OutcomeUnknown("lost")),
    "damaged on the way": raising(ChecksumMismatch("other bytes")),
    "no conditions": raising(ConditionalPutRefused("this store takes no conditions")),
    "stored short": storing(lambda raw: raw[:-1]),
    "stored damaged": storing(lambda raw: damaged(raw, 100)),
    "stored empty": storing(lambda _: b""),
}


@pytest.mark.parametrize("fault", PUTS.values(), ids=PUTS)
def test_after_a_fault_of_a_put_the_store_holds_the_bytes_that_were_spooled(
    local: LocalObjects, make: Make, fault: Any
) -> None:
    faulty = FaultyStore(local).on("put_if_absent", fault)
    store = make(faulty)
    spooled = spool(store)
    ref = store.put(spooled)
    assert local.get(ref.key) == spooled.path.read_bytes()
    puts = [(verb, key) for verb, key in faulty.keys if verb.startswith("put") and "probe" not in key]
    assert {key for _, key in puts} == {ref.key}
    assert (len(puts) == 1) is (fault is PUTS["answer lost"]), "settled by a look, else put again"
    assert [each.key for each in store.list(CHAIN)] == [store.put(spooled).key]


def test_a_put_that_never_reads_back_and_one_that_is_lost_differ(local: LocalObjects, make: Make) -> None:
    def truncated(_real: Any, key: str, body: Any, **_: Any) -> bool:
        local.put(key, b"short")
        return True

    cut = raising(OutcomeUnknown("connection reset"))
    for fault, text in ((cut, "put 4 times, not found: connection reset"), (truncated, "never read back")):
        store = make(FaultyStore(local).on("put_if_absent", fault).on("put", fault))
        with pytest.raises(Unavailable, match=text) as caught:
            store.put(spool(store))
        assert (caught.value.code == "E-READ-BACK") is (fault is truncated)


def test_each_attempt_of_a_put_needs_permission(local: LocalObjects, make: Make) -> None:
    """A put that is repeated for long may go on behind the end of a lease."""
    permits = iter([True, True])
    fault = raising(OutcomeUnknown("connection reset"))
    faulty = FaultyStore(local).on("put_if_absent", fault).on("put", fault)
    store = make(faulty)
    with pytest.raises(StopIteration):
        store.put(spool(store), lambda: next(permits))
    assert [verb for verb, key in faulty.keys if verb.startswith("put") and "probe" not in key] == [
        "put_if_absent",
        "put",
    ]


@pytest.mark.parametrize("error", [Unavailable("away"), Refused("no right")])
def test_an_outage_is_raised_and_foreign_bytes_are_replaced(local: LocalObjects, make: Make, error: FloeError) -> None:
    store = make(FaultyStore(local).on("put_if_absent", raising(error), nth=1))
    spooled = spool(store)
    with pytest.raises(type(error)):
        store.put(spooled)
    local.put(LAYOUT.segment(spooled.segment_name), b"x" * spooled.size)
    assert rows_of(store, store.put(spooled)) == ROWS


def test_a_store_that_believes_any_checksum_is_read_back_whole(local: LocalObjects, make: Make) -> None:
    """It damages the first copy of a file, and repeats the checksum of the request."""
    digests: dict[str, str] = {}

    def unchecked(_real: Any, key: str, body: Any, *, sha256: str = "", metadata: Any = None) -> bool:
        raw = body if isinstance(body, bytes) else body.read_bytes()
        local.put(key, raw if isinstance(body, bytes) or key in digests else damaged(raw, 50), metadata=metadata)
        digests[key] = sha256
        return True

    def echoing(real: Any, key: str) -> Any:
        info = real(key)
        return info and info._replace(sha256=digests.get(key))

    store = make(FaultyStore(local).on("put", unchecked).on("put_if_absent", unchecked).on("head", echoing))
    ref = store.put(spool(store))
    assert store.is_intact(ref)
    assert rows_of(store, ref) == ROWS
    local.put(ref.key, b"x" * ref.size)
    assert not store.is_intact(ref)


def test_checksums_are_probed_once_and_a_store_without_them_is_read_back_whole(local: LocalObjects, make: Make) -> None:
    faulty = FaultyStore(local)
    store = make(faulty)
    for n in range(1, 4):
        put(store, n, n)
    assert (sum("probe" in key for verb, key in faulty.keys if verb == "put"), faulty.calls["download"]) == (1, 0)

    def without(real: Any, key: str) -> Any:
        info = real(key)
        return info and info._replace(sha256=None)

    faulty = FaultyStore(local).on("head", without)
    put(make(faulty), 4, 4)
    assert (faulty.calls["download"], faulty.calls["put"]) == (1, 0)


# Faults of a read: F35, F36, F37, F50


def damaged(raw: bytes, at: int = 200) -> bytes:
    """The bytes with one flipped bit."""
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


@pytest.mark.parametrize(("verb", "size"), [("get", 1), ("download", 2 * IN_MEMORY_BYTES)])
def test_a_segment_damaged_on_the_way_is_fetched_again(local: LocalObjects, make: Make, verb: str, size: int) -> None:
    left = [2]

    def fault(real: Any, key: str, *path: Path, **more: Any) -> Any:
        found = real(key, *path, **more)
        if not left[0]:
            return found
        left[0] -= 1
        if not path:
            return damaged(found)
        path[0].write_bytes(damaged(path[0].read_bytes()))
        return found

    row = replace(message(5), payload=os.urandom(size))
    ref = make(local).put(spool(make(local), [row], coverage=SequenceRange(1, 5)))
    store = make(FaultyStore(local).on(verb, fault))
    assert ([m.payload for m in rows_of(store, ref)], left) == ([row.payload], [0])


@pytest.mark.parametrize(
    "changed", [lambda _: b"", lambda _: b"<html>", lambda _: b"x" * 5000, lambda raw: damaged(raw, len(raw) - 30)]
)
def test_a_segment_with_other_bytes_is_corrupt(
    local: LocalObjects, make: Make, changed: Callable[[bytes], bytes]
) -> None:
    store = make(local)
    ref = put(store, 1, 5)
    local.put(ref.key, changed(local.get(ref.key) or b""))
    with pytest.raises(SegmentCorrupt, match=r"expected .* bytes with SHA-256") as caught:
        store.open(ref)
    assert ref.key in caught.value.message
    assert not store.is_intact(ref)


# Tips


def test_a_tip_whose_metadata_were_lost_comes_from_the_footer(local: LocalObjects, make: Make) -> None:
    store = make(local)
    spooled = spool(store)
    ref = store.put(spooled)
    for metadata in ({}, {"format": "1", "tip": "nonsense"}, {"rows": "1"}):
        local.put(ref.key, spooled.path, metadata=metadata)
        assert store.tip(ref) == spooled.footer.tip
    assert store.tip(store.put(spool(store, tip=None))) is None, "of no message that was examined"


# Large segments, by ranges


@pytest.fixture
def large(local: LocalObjects, make: Make, monkeypatch: pytest.MonkeyPatch) -> Large:
    """A segment of 7 MB in several row groups, larger than the limit for whole reads (here)."""
    monkeypatch.setattr(fetching, "WHOLE_BYTES", 1 << 20)
    monkeypatch.setattr("common.archive.guard.ROW_GROUP_BYTES_LEVEL_0", 2 << 20)
    store = make(local)
    rows = [message(n, random.Random(n).randbytes(100 << 10)) for n in range(1, 71)]
    return store.put(spool(store, rows)), rows


def fetched(faulty: FaultyStore) -> list[int]:
    """The lengths of the requested ranges, in order."""
    asked: list[int] = []

    def noted(real: Any, key: str, **options: Any) -> Any:
        asked.append(options["length"])
        return real(key, **options)

    faulty.on("get", noted)
    return asked


def test_wanted_rows_of_a_large_segment_are_read_by_ranges(local: LocalObjects, make: Make, large: Large) -> None:
    ref, rows = large
    faulty = FaultyStore(local)
    asked, store = fetched(faulty), make(faulty)
    assert (rows_of(store, ref), sum(asked)) == (rows, ref.size)
    assert max(asked) <= 3 << 20
    assert faulty.calls["download"] == 0
    asked.clear()
    assert rows_of(store, ref, SequenceRange(70, 70)) == rows[69:]
    assert sum(asked) < 3 << 20, "its row group alone"
    asked.clear()
    store.footer(ref)
    assert sum(asked) <= 2 << 20, "the end alone"


def test_a_large_segment_may_be_corrupt_gone_or_away(local: LocalObjects, make: Make, large: Large) -> None:
    ref, rows = large
    raw = local.get(ref.key)
    local.put(ref.key, damaged(raw, raw.index(rows[50].payload[:64]) + 1000))
    store = make(local)
    assert rows_of(store, ref, SequenceRange(1, 5)) == rows[:5]
    with pytest.raises(SegmentCorrupt, match="checksum"):
        rows_of(store, ref)
    for fault, error in ((answering(None), SegmentGone), (raising(Unavailable("away")), Unavailable)):
        faulty = FaultyStore(local)
        with make(faulty).open(ref) as reader:
            faulty.on("get", fault)
            with pytest.raises(error):
                read_all(reader)
    local.put(ref.key, b"x" * (2 << 20))
    with pytest.raises(SegmentCorrupt, match=r"expected .* bytes at"):
        make(local).open(ref)


# The spool


def files_under(folder: Path) -> list[str]:
    return [name for _, _, names in os.walk(folder) for name in names if name != "lock"]


def test_nothing_stays_in_the_spool_and_nobody_else_may_read(
    local: LocalObjects, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(local)
    path = store.new_spool()
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (0o600, 0o700)
    path.unlink()
    ref = put(store, 1, 5)
    [spooled] = files_under(tmp_path / "spool")
    (path.parent / spooled).unlink()
    reader = store.open(ref)
    store.footer(ref)
    assert (files_under(tmp_path / "spool"), len(read_all(reader))) == ([], 1)
    reader.close()
    local.put(ref.key, b"x" * ref.size)
    for most in (fetching.WHOLE_BYTES, 1):
        monkeypatch.setattr(fetching, "WHOLE_BYTES", most)
        with pytest.raises(SegmentCorrupt):
            store.open(ref)
    assert files_under(tmp_path / "spool") == []
    store.close()
    assert list((tmp_path / "spool").iterdir()) == []
    assert store.new_spool().exists()


def test_leftovers_of_a_kill_are_removed(local: LocalObjects, make: Make, tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from common.archive.writer import Spool
spool = Spool(Path({str(tmp_path / "spool")!r}))
spool.new_file().write_bytes(b"x" * 1000)
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program], check=False)
    assert len(files_under(tmp_path / "spool")) == 1
    mine = make(local).new_spool()
    assert files_under(tmp_path / "spool") == [mine.name]
    make(local).new_spool()
    assert mine.exists()


def test_a_forked_process_has_a_spool_of_its_own(local: LocalObjects, make: Make) -> None:
    store = make(local)
    mine = store.new_spool()
    if (child := os.fork()) == 0:
        is_own = store.new_spool().parent != mine.parent
        store.close()
        os._exit(0 if is_own else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert mine.exists()


def test_folders_that_are_not_spools_are_left_alone(local: LocalObjects, make: Make, tmp_path: Path) -> None:
    (tmp_path / "spool/floe-spool-mine").mkdir(parents=True)
    (tmp_path / "spool/floe-spool-mine/notes").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/lock").touch()
    (tmp_path / "spool/floe-spool-link").symlink_to(tmp_path / "other")
    make(local).new_spool()
    assert (tmp_path / "spool/floe-spool-mine/notes").exists()
    assert (tmp_path / "other/lock").exists()
    store = SegmentStore(local, LAYOUT, spool_dir=tmp_path / "other/lock")
    with raises_code(Unavailable, "E-SPOOL", match="spool folder"):
        store.new_spool()
