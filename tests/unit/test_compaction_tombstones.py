"""What a tombstone says, and what may be deleted by it."""

from __future__ import annotations

import hashlib
import json

import pytest

from common.chain import Chain
from common.segments.table import SegmentTable
from compaction.supersede import Supersession, made_by
from compaction.tombstones import StoredTombstone, Tombstone, TombstoneIndex
from tests.support.compaction import CHAIN, LAYOUT, NOW, index_of, ref

INPUTS = (ref(1, 50), ref(51, 100))
OUTPUT = ref(1, 100, 1)
BEYOND = ref(101, 150)
LISTING = [*INPUTS, OUTPUT, BEYOND]


def standing(output=OUTPUT, inputs=INPUTS, *, age: float = 1000) -> StoredTombstone:
    stone = Tombstone.of(made_by(output, inputs))
    return StoredTombstone(stone, stone.name, NOW - age)


def going(listing=LISTING, stones=None, *, grace: float = 100) -> list[str]:
    found = index(listing, *(stones or [standing()])).deletable(NOW, grace)
    return [str(s.coverage) for each in found for s in each.superseded]


def index(listing, *stones: StoredTombstone) -> TombstoneIndex:
    return index_of(SegmentTable.listing(listing), stones)


def changed(**fields: object) -> bytes:
    return json.dumps(json.loads(standing().tombstone.to_json()) | fields).encode()


def test_what_is_written_is_read_back():
    stone = Tombstone.of(made_by(OUTPUT, INPUTS))
    assert Tombstone.from_json(stone.to_json(), LAYOUT, CHAIN) == stone


def test_two_jobs_write_the_same_bytes_under_the_same_name():
    one = Tombstone.of(made_by(OUTPUT, INPUTS))
    other = Tombstone.of(made_by(ref(1, 100, 1, age=3), [ref(51, 100, age=7), ref(1, 50, age=9)]))
    assert (one.to_json(), one.name) == (other.to_json(), other.name)
    assert one.name.endswith(f"-{hashlib.sha256(one.to_json()).hexdigest()[:16]}.json")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"[]", "expected an object"),
        (b"{", "Expecting property name"),
        (b'{"format_version":1,"superseded":[]}', "expected an object of"),
        (changed(format_version=2), "format_version: expected 1, found 2"),
        (changed(superseding=[]), "expected a list of segments that is not empty"),
        (changed(superseded=[{"level": 0, "name": "../../other", "size": 1}]), "expected the name of a segment"),
        (changed(superseded=[{"level": True, "name": INPUTS[0].name, "size": 1}]), "expected level, name and size"),
        (changed(superseding=[{"level": 0, "name": INPUTS[1].name, "size": 1}]), "is not below all"),
        (changed(superseded=[{"level": 0, "name": BEYOND.name, "size": 1}]), "is not contained"),
    ],
)
def test_an_unsound_tombstone_is_refused(raw, message):
    with pytest.raises(ValueError, match=message):
        Tombstone.from_json(raw, LAYOUT, CHAIN)


def test_nothing_goes_before_the_grace_is_over():
    assert going(stones=[standing(age=99)], grace=100) == []
    assert going(stones=[standing(age=100)], grace=100) == ["1..50", "51..100"]


def test_nothing_goes_while_what_replaces_it_is_not_listed():
    assert going([*INPUTS, BEYOND]) == []


def test_nothing_goes_when_what_replaces_it_has_another_length():
    assert going([*INPUTS, ref(1, 100, 1, size=99), BEYOND]) == []


def test_nothing_goes_when_what_replaces_it_is_condemned_itself():
    upper = ref(1, 1000, 2)
    stones = [standing(), standing(upper, [OUTPUT])]
    assert going([*LISTING, upper], stones) == ["1..100"]
    assert [stone.key for stone in index([*LISTING, upper], *stones).valid()] == [stones[1].key]
    assert [*index([*LISTING, upper], *stones).buried()] == [0, 0, 0, 1, 0]


def test_the_chain_s_greatest_end_stays():
    assert going([*INPUTS, OUTPUT]) == ["1..50"]


def test_a_segment_of_another_length_than_the_tombstone_says_stays():
    assert going([ref(1, 50, size=101), INPUTS[1], OUTPUT, BEYOND]) == ["51..100"]


def test_a_tombstone_is_done_when_all_it_names_is_gone():
    assert index(LISTING, standing()).done() == []
    assert index([INPUTS[1], OUTPUT], standing()).done() == []
    assert index([OUTPUT], standing()).done() == [standing().key]


def test_a_supersession_that_breaks_the_order_is_a_problem():
    backwards = Supersession((OUTPUT,), made_by(INPUTS[0], [OUTPUT]).stretches)
    assert "is not below all" in Tombstone.of(backwards).problem()


def test_a_tombstone_names_segments_of_its_own_chain_only():
    foreign = Chain("eu-west", "NODES")
    stone = Tombstone.from_json(standing().tombstone.to_json(), LAYOUT, foreign)
    assert {s.chain for s in (*stone.superseded, *stone.superseding)} == {foreign}
