"""Merges of real segments in a folder; the output is compared with the inputs."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa
import pytest

from common.archive.segment import Ledger, MergeInputs, Reason, SegmentRef, Tip
from common.archive.unread import UnreadableSegment
from common.errors import DataError, Unavailable
from common.sequences import SequenceRange, Stretch
from compaction.compare import prove_by_reading
from compaction.merge import MergedSegment, merge
from compaction.plan import Output, Supersession, supersession_of_merge
from tests.support.basics import raises_code
from tests.support.compaction import Archive, rows

# Kept for ever: everything that was allocated from it refers to it.
COUNTING = pa.proxy_memory_pool(pa.default_memory_pool())


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path)


def merged(archive: Archive, *inputs: SegmentRef, level: int = 1) -> MergedSegment:
    return merge(archive.store, Output(level, tuple(sorted(inputs, key=lambda s: (s.coverage, s.name)))))


def replaced(batch: pa.RecordBatch, name: str, value: Callable[[int], bytes | None]) -> pa.RecordBatch:
    """`batch` with the binary column `name` made from each sequence."""
    arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
    arrays[name] = pa.array([value(n) for n in arrays["sequence"].to_pylist()], pa.binary())
    return pa.RecordBatch.from_arrays(list(arrays.values()), schema=batch.schema)


def test_the_footer_unites_those_of_the_inputs(archive: Archive):
    inputs = [
        archive.put(1, 50, rows(range(1, 41)), ledger={Reason.SAMPLED_OUT: 7, Reason.DELETED: 3}),
        archive.put(51, 60, rows([]), ledger={Reason.NOT_MATCHED: 10}, tip=None),
    ]
    footer = archive.footer(merged(archive, *inputs).ref)
    assert footer.is_balanced()
    assert footer.ledger == Ledger({Reason.DELETED: 3, Reason.NOT_MATCHED: 10, Reason.SAMPLED_OUT: 7})
    assert (footer.tip, footer.inputs) == (Tip(50, 50, "0" * 32), MergeInputs.of([s.name for s in inputs]))
    assert (footer.first_timestamp_ns, footer.last_timestamp_ns) == tuple(
        1_700_000_000_000_000_000 + n * 1_001 for n in (1, 40)
    )


def test_the_same_inputs_give_the_same_bytes(archive: Archive):
    inputs = [archive.put(1, 40), archive.put(30, 90)]
    first = merged(archive, *inputs).ref
    archive.store.delete(first)
    assert merged(archive, *reversed(inputs)).ref.name == first.name


def gone(archive: Archive, first: int, last: int, *missing: int, reason: Reason, **ledger: int) -> SegmentRef:
    """Put a segment that lacks `missing` and records them as unread."""
    held = rows(s for s in range(first, last + 1) if s not in missing)
    counts = {reason: len(missing) - sum(ledger.values()), **{Reason(r): n for r, n in ledger.items()}}
    return archive.put(first, last, held, ledger=counts, unread=SequenceRange(min(missing), max(missing)))


def test_the_ledger_of_a_merge_is_balanced_and_names_unread_rows(archive: Archive):
    def united(*inputs: SegmentRef) -> tuple[Ledger, SequenceRange | None]:
        footer = archive.footer(merged(archive, *inputs).ref)
        assert footer.is_balanced()
        return footer.ledger, footer.unread

    one = archive.put(1, 60, rows(range(1, 31)), ledger={Reason.DELETED: 20, Reason.TOO_OLD: 10})
    other = archive.put(51, 100, rows(range(91, 101)), ledger={Reason.DELETED: 20, Reason.NOT_MATCHED: 20})
    assert united(one, other) == (Ledger({Reason.DELETED: 20, Reason.TOO_OLD: 10, Reason.UNATTRIBUTED: 30}), None)
    # An overlap with one remaining reason keeps that reason.
    part = archive.put(251, 300, rows(range(251, 261)), ledger={Reason.SAMPLED_OUT: 40})
    assert united(archive.put(201, 260), part) == (Ledger({Reason.SAMPLED_OUT: 40}), None)

    unread, hole = Reason.GONE_BEFORE_READ, Reason.GONE_FROM_HOLE
    inputs = [
        gone(archive, 1001, 1100, *range(1011, 1031), reason=unread),
        archive.put(1001, 1020, rows(range(1013, 1019))),
        gone(archive, 1101, 1150, 1120, 1123, reason=hole),
        archive.put(1151, 1200),
    ]
    assert united(*inputs) == (Ledger({unread: 14, hole: 2}), SequenceRange(1011, 1123))
    # Rows that the longer segment has read are no longer counted as unread of the shorter one.
    part = gone(archive, 2001, 2060, *range(2041, 2061), reason=hole)
    assert united(part, archive.put(2051, 2100)) == (Ledger({hole: 10}), SequenceRange(2041, 2050))
    # The ledger does not state which of 5..14 are gone: none of the five is forgotten.
    mixed = gone(archive, 3001, 3020, *range(3005, 3015), reason=unread, sampled_out=3, too_old=2)
    ledger = Ledger({unread: 5, Reason.UNATTRIBUTED: 2})
    assert united(mixed, archive.put(3005, 3007)) == (ledger, SequenceRange(3008, 3014))


def test_the_tip_is_that_of_the_input_that_reaches_furthest(archive: Archive):
    inputs = [
        archive.put(1, 60, tip=Tip(60, 5, "a" * 32)),
        archive.put(10, 100, rows(range(10, 51)), tip=Tip(50, 9, "b" * 32)),
    ]
    assert archive.footer(merged(archive, *inputs).ref).tip == Tip(50, 9, "b" * 32)


def test_a_merge_with_sampled_inputs_is_a_sampled_copy(archive: Archive):
    def put(first: int, digest: str) -> SegmentRef:
        sampling = {"inspect_field": digest} if digest else None
        return archive.put(first, first + 9, sampling=sampling, sampling_digest=digest)

    alike = archive.footer(merged(archive, put(1, "aa"), put(11, "aa")).ref)
    assert (alike.sampling, alike.sampling_digest) == ({"inspect_field": "aa"}, "aa")
    mixed = archive.footer(merged(archive, put(101, "aa"), put(111, ""), put(121, "bb")).ref)
    assert mixed.sampling == {"merged": {"aa": {"inspect_field": "aa"}, "": None, "bb": {"inspect_field": "bb"}}}
    again = merged(archive, put(201, "bb"), put(211, "aa"), put(221, ""))
    assert archive.footer(again.ref).sampling_digest == mixed.sampling_digest != ""


def test_no_headers_and_empty_headers_are_different_content(archive: Archive):
    def with_fifth(value: bytes | None, last: int) -> pa.RecordBatch:
        return replaced(rows(range(1, last + 1)), "headers", lambda n: value if n == 5 else b"NATS/1.0\r\n\r\n")

    with pytest.raises(DataError, match="sequence 5 "):
        merged(archive, archive.put(1, 10, with_fifth(None, 10)), archive.put(1, 11, with_fifth(b"", 11)))


def test_the_sample_key_is_no_content_and_the_preferred_segment_s_stays(archive: Archive):
    inputs = [
        archive.put(1, 20, rows(range(1, 21), sample_key="old")),
        archive.put(11, 30, rows(range(11, 31), sample_key="new")),
    ]
    result = merged(archive, *inputs)
    keys = archive.table(result.ref).column("sample_key").to_pylist()
    assert (keys[:2], set(keys[10:])) == (["old", None], {"new", None})
    prove_by_reading(archive.store, supersession_of_merge(result.ref, inputs))


def test_a_damaged_or_deleted_input_is_named_as_such_and_nothing_is_left_behind(archive: Archive):
    sound, damaged, deleted = archive.put(1, 40), archive.put(41, 90), archive.put(91, 99)
    archive.path(damaged.key).write_bytes(b"PAR1" + bytes(damaged.size - 8) + b"PAR1")
    archive.store.delete(deleted)
    for input_, is_gone in ((damaged, False), (deleted, True)):
        with pytest.raises(UnreadableSegment) as caught:
            merged(archive, sound, input_)
        assert (caught.value.segment, caught.value.is_gone) == (input_, is_gone)
    assert [s.level for s in archive.listed()] == [0, 0]
    assert [f for f in (archive.folder / "spool").rglob("*") if f.is_file() and f.name != "lock"] == []
    with raises_code(Unavailable, "E-SPOOL", match="free bytes"):
        merged(archive, sound, archive.put(41, 90)._replace(size=2**60))


# The proof: outputs that `prove_by_reading` refuses


ALL = range(1, 101)


@pytest.mark.parametrize(
    ("held", "lower", "second", "salt", "code", "number"),
    [
        ({*ALL} - {33}, ALL, 51, "", "E-ROWS-MISSING", 33),
        ({*ALL} - {48}, ALL, 46, "", "E-ROWS-MISSING", 48),
        (ALL, {*ALL} - {50}, 51, "", "E-ROWS-ADDED", 50),
        (ALL, ALL, 51, "x", "E-FORK", 1),
        (ALL, ALL, 46, "x", "E-FORK", 1),
    ],
    ids=["missing", "missing of an overlap", "added", "changed", "changed below an overlap"],
)
def test_a_row_that_is_missing_added_or_changed_is_found(
    archive: Archive, held: Iterable[int], lower: Iterable[int], second: int, salt: str, code: str, number: int
):
    inputs = [archive.put(a, z, rows(n for n in lower if a <= n <= z)) for a, z in ((1, 50), (second, 100))]
    upper = archive.put(1, 100, rows(sorted(held), salt=salt), level=1)
    with raises_code(DataError, code, match=f"sequence {number} of"):
        prove_by_reading(archive.store, supersession_of_merge(upper, inputs))


def test_two_segments_may_contain_a_third_together_that_has_less_and_not_more(archive: Archive):
    stretches = tuple(Stretch(s, s.coverage) for s in (archive.put(1, 60, level=1), archive.put(61, 100, level=1)))
    prove_by_reading(archive.store, Supersession((archive.put(50, 70, rows(range(50, 65))),), stretches))
    with raises_code(DataError, "E-ROWS-MISSING", match="sequence 10"):
        prove_by_reading(archive.store, Supersession((archive.put(101, 110),), stretches))


def test_memory_of_a_merge_is_bounded_by_row_groups(archive: Archive):
    """Twenty inputs of 32 MB each, 640 MB together; an output's row group holds 128 MiB."""
    payload = b"x" * 32_000
    inputs = [
        archive.put(n, n + 999, replaced(rows(range(n, n + 1000)), "payload", lambda _: payload))
        for n in range(1, 20_001, 1000)
    ]
    usual = pa.default_memory_pool()
    pa.set_memory_pool(COUNTING)
    try:
        assert merged(archive, *inputs).rows == 20_000
    finally:
        pa.set_memory_pool(usual)
    print(f"peak {COUNTING.max_memory() >> 20} MiB")
    assert COUNTING.max_memory() < 450 << 20
