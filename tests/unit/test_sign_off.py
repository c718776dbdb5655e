"""What a run has found sound: written last, read back, and by one of two runs at once."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from common.errors import OutcomeUnknown, Refused
from common.objects.local import LocalObjects
from compaction import sign_off
from compaction.sign_off import SignOff, SignOffs, mark
from tests.support.compaction import CHAIN, LAYOUT, OTHER, ref
from tests.support.stores import FaultyStore, raising


@pytest.fixture
def objects(tmp_path: Path) -> LocalObjects:
    return LocalObjects(tmp_path)


def marks(*refs) -> array[int]:
    return array("Q", map(mark, refs))


def test_what_is_signed_off_is_known_again_until_anything_of_it_is_another(objects: LocalObjects):
    sign_offs, known = SignOffs(objects, LAYOUT, deep=True), [ref(n, n + 9) for n in range(1, 500, 10)]
    assert sign_offs.read(CHAIN) == SignOff()
    assert sign_offs.write(CHAIN, SignOff(), 500, marks(*known))
    found = sign_offs.read(CHAIN)
    assert (found.end, len(found.marks), list(found.marks)) == (500, 50, sorted(marks(*known)))
    assert found.at > 0
    assert all(each in found for each in known)
    one = known[7]
    for other in (
        *(one._replace(size=one.size + 1), one._replace(modified=one.modified + 0.5)),
        *(ref(71, 80, 1), ref(71, 80, twin=1), ref(71, 80, chain=OTHER), ref(71, 81)),
    ):
        assert other not in found
    assert SignOffs(objects, LAYOUT, deep=False).read(CHAIN) == SignOff()
    assert sign_offs.read(OTHER) == SignOff()


def test_of_two_runs_at_once_the_second_signs_nothing_off(objects: LocalObjects):
    sign_offs = SignOffs(objects, LAYOUT, deep=False)
    first, second = sign_offs.read(CHAIN), sign_offs.read(CHAIN)
    assert sign_offs.write(CHAIN, first, 10, marks(ref(1, 10)))
    assert not sign_offs.write(CHAIN, second, 20, marks(ref(11, 20)))
    first, second = sign_offs.read(CHAIN), sign_offs.read(CHAIN)
    assert sign_offs.write(CHAIN, second, 30, marks(ref(21, 30)))
    assert not sign_offs.write(CHAIN, first, 20, marks(ref(11, 20)))
    assert sign_offs.read(CHAIN).end == 30
    assert sign_offs.write(CHAIN, sign_offs.read(CHAIN), 0, marks())
    assert list(sign_offs.read(CHAIN).marks) == []


def test_what_is_spoiled_signs_nothing_off_and_is_written_anew(objects: LocalObjects, monkeypatch: pytest.MonkeyPatch):
    sign_offs = SignOffs(objects, LAYOUT, deep=True)
    for spoiled in (
        b"{",
        b'{"deep":false,"end":1,"format_version":1,"marks":""}',
        b'{"deep":true,"end":1,"format_version":2,"marks":""}',
        b'{"deep":true,"end":1,"format_version":1,"marks":"AAAA"}',
        b'{"deep":true,"end":1,"format_version":1,"marks":"?"}',
    ):
        objects.put(LAYOUT.sign_off(CHAIN, deep=True), spoiled)
        found = sign_offs.read(CHAIN)
        assert (found.end, len(found.marks)) == (0, 0)
    assert sign_offs.write(CHAIN, found, 10, marks(ref(1, 10)))
    assert ref(1, 10) in sign_offs.read(CHAIN)
    monkeypatch.setattr(sign_off, "MAX_BYTES", 20)
    found = sign_offs.read(CHAIN)
    assert len(found.marks) == 0
    assert not sign_offs.write(CHAIN, found, 10, marks(ref(1, 10)))


def test_the_object_tells_what_became_of_a_write(objects: LocalObjects):
    lost = FaultyStore(objects).on("put_if_absent", raising(OutcomeUnknown("no answer"), after=True))
    assert SignOffs(lost, LAYOUT, deep=True).write(CHAIN, SignOff(), 10, marks(ref(1, 10)))  # type: ignore[arg-type]
    lost = FaultyStore(objects).on("put_if_absent", raising(OutcomeUnknown("no answer")))
    assert not SignOffs(lost, LAYOUT, deep=False).write(CHAIN, SignOff(), 10, marks())  # type: ignore[arg-type]
    refused = FaultyStore(objects).on("put_if_absent", raising(Refused("no right")))
    with pytest.raises(Refused):
        SignOffs(refused, LAYOUT, deep=False).write(CHAIN, SignOff(), 10, marks())  # type: ignore[arg-type]
