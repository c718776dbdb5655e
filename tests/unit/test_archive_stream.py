"""A stream over the archive, without Spark: positions of chains, limits, and the cover between two positions."""

import json
import random
from pathlib import Path

import pytest

from common.archive.documents import AcceptedGap, ChainDocument, ChainStore
from common.chain import Chain
from common.errors import DataError, UsageError
from common.sequences import SequenceRange
from compaction.source import read_stretch
from compaction.source_options import parse_options
from compaction.stream import FORMAT, ArchiveStream, Positions
from tests.support.clock import ManualClock
from tests.support.compaction import CHAIN, OTHER, Archive, begun, rows, run
from tests.support.stores import FaultyStore

NAME, OTHER_NAME = str(CHAIN), str(OTHER)


def stream_of(archive: Archive, **options: str) -> ArchiveStream:
    asked = parse_options({"url": f"file://{archive.folder}/store", **options}, 1_700_000_000.0)
    return ArchiveStream(archive.store, asked, ManualClock())


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return begun(tmp_path, CHAIN)


def documents(archive: Archive) -> ChainStore:
    return ChainStore(archive.objects, archive.layout)


def read(archive: Archive, stream: ArchiveStream, start: Positions, end: Positions) -> list[tuple[str, int]]:
    return [
        (str(stretch.segment.chain), sequence)
        for stretch in stream.stretches(start, end)
        for batch in read_stretch(archive.store, stretch, ["sequence"])
        for sequence in batch.column("sequence").to_pylist()
    ]


STARTS = [
    ({}, 1),
    ({"from": "latest"}, 21),
    ({"from_sequence": "7"}, 7),
    ({"since": "2023-11-14T22:13:20.000012Z"}, 12),
    ({"since": "2024-01-01T00:00:00Z"}, 21),
]


@pytest.mark.parametrize(("options", "position"), STARTS)
def test_where_a_query_begins_is_an_option(archive: Archive, options: dict[str, str], position: int) -> None:
    archive.put(1, 20)
    assert stream_of(archive, **options).latest({}) == {**FORMAT, NAME: position}
    documents(archive).write_tail(CHAIN, 500)  # a copy of a bucket may have the tail before the segments
    assert stream_of(archive, **options).latest({}) == {**FORMAT, NAME: position}


def test_a_stream_of_nothing_yet_has_begun_nevertheless(tmp_path: Path) -> None:
    archive = begun(tmp_path)
    stream = stream_of(archive, **{"from": "latest"})
    start = stream.latest({})
    assert start == FORMAT
    documents(archive).create_chain(CHAIN, ChainDocument((), 1, 1))
    archive.put(1, 10)
    assert stream.latest(start) == {**FORMAT, NAME: 1}, "what came after the query is not skipped"


def test_a_name_that_is_not_there_and_positions_of_a_newer_floe_are_errors(archive: Archive) -> None:
    with pytest.raises(UsageError, match="there are us-east"):
        stream_of(archive, site="us-esat").latest({})
    with pytest.raises(DataError, match="expected positions of format 1, found 2"):
        stream_of(archive).latest({"format_version": 2})


def test_a_new_chain_begins_in_one_batch_and_is_read_in_the_next(archive: Archive) -> None:
    stream = stream_of(archive)
    start = stream.latest({})
    documents(archive).create_chain(OTHER, ChainDocument((), 1, 5))
    archive.put(5, 9, chain=OTHER)
    first = stream.latest(start)
    assert first == {**FORMAT, OTHER_NAME: 5, NAME: 1}
    assert list(first) == sorted(first), "Spark compares the text"
    assert stream.stretches(start, first) == []
    second = stream.latest(first)
    assert second == {**FORMAT, OTHER_NAME: 10, NAME: 1}
    assert read(archive, stream_of(archive), first, second) == [(OTHER_NAME, n) for n in range(5, 10)]


def test_an_accepted_gap_is_passed_and_what_comes_late_before_it_is_passed_is_read(archive: Archive) -> None:
    archive.put(1, 10)
    archive.put(21, 30)
    stream = stream_of(archive)
    assert (stream.latest({**FORMAT, NAME: 1}), stream.ends()) == ({**FORMAT, NAME: 11}, {NAME: 31})
    documents(archive).accept_gap(CHAIN, AcceptedGap(SequenceRange(11, 15)))
    assert stream.latest({**FORMAT, NAME: 11}) == {**FORMAT, NAME: 16}, "a part of the hole is left"
    documents(archive).accept_gap(CHAIN, AcceptedGap(SequenceRange(16, 20)))
    assert stream.latest({**FORMAT, NAME: 1}) == {**FORMAT, NAME: 31}
    late = archive.put(13, 14)
    end = stream.latest({**FORMAT, NAME: 1})
    assert [n for _, n in read(archive, stream, {**FORMAT, NAME: 1}, end)] == [*range(1, 11), 13, 14, *range(21, 31)]
    archive.store.delete(late)
    again = read(archive, stream_of(archive), {**FORMAT, NAME: 1}, end)
    assert [n for _, n in again] == [*range(1, 11), *range(21, 31)], "a batch that is planned again after a restart"


def test_what_is_deleted_ends_the_query_but_what_retention_deleted_may_be_skipped(archive: Archive) -> None:
    planned = archive.put(1, 10)
    archive.put(11, 20)
    archive.store.delete(planned)
    with pytest.raises(DataError, match=r"cover 1\.\.10 of a planned batch"):
        stream_of(archive).stretches({**FORMAT, NAME: 1}, {**FORMAT, NAME: 21})
    documents(archive).raise_floor(CHAIN, 11)
    with pytest.raises(DataError, match="expected sequence 1, found that retention deleted those before 11"):
        stream_of(archive).latest({**FORMAT, NAME: 1})
    lenient = stream_of(archive, on_expired="skip")
    assert lenient.latest({**FORMAT, NAME: 1}) == {**FORMAT, NAME: 21}
    assert [n for _, n in read(archive, lenient, {**FORMAT, NAME: 1}, {**FORMAT, NAME: 21})] == list(range(11, 21))
    assert stream_of(archive).latest({}) == {**FORMAT, NAME: 11}


def test_a_batch_holds_no_more_than_its_limit_and_chains_share_it(archive: Archive) -> None:
    documents(archive).create_chain(OTHER, ChainDocument((), 1, 1))
    for first in range(1, 100, 10):
        archive.put(first, first + 9)
    archive.put(1, 4, chain=OTHER)
    stream, start = stream_of(archive), {**FORMAT, NAME: 1, OTHER_NAME: 1}
    assert stream.latest(start, rows=30) == {**FORMAT, OTHER_NAME: 5, NAME: 21}, "whole segments, as many as fit"
    assert stream.latest(start, rows=8) == {**FORMAT, OTHER_NAME: 5, NAME: 5}, "a segment that is too large is cut"
    assert stream.latest(start, segments=3) == {**FORMAT, OTHER_NAME: 5, NAME: 21}
    two = stream.latest(stream.latest(start, segments=1), segments=1)
    assert two == {**FORMAT, OTHER_NAME: 5, NAME: 11}, "they take turns where there are more chains than that"
    position, batches = start, 0
    while (end := stream.latest(position, rows=7)) != position:
        assert len(read(archive, stream, position, end)) <= 7
        position, batches = end, batches + 1
    assert position == {**FORMAT, OTHER_NAME: 5, NAME: 101}
    assert batches >= 104 // 7


def test_trigger_available_now_reads_what_was_there_when_it_began(archive: Archive) -> None:
    archive.put(1, 10)
    stream = stream_of(archive)
    stream.limit_to_present()
    first = stream.latest({**FORMAT, NAME: 1}, rows=4)
    archive.put(11, 20)
    documents(archive).create_chain(OTHER, ChainDocument((), 1, 1))
    archive.put(1, 4, chain=OTHER)
    assert (first, stream.latest({**FORMAT, NAME: 5})) == ({**FORMAT, NAME: 5}, {**FORMAT, NAME: 11})
    assert stream.latest({**FORMAT, NAME: 11}) == {**FORMAT, NAME: 11}
    again = stream_of(archive)
    again.limit_to_present()
    begins = again.latest({**FORMAT, NAME: 11})
    assert (begins, again.latest(begins)) == ({**FORMAT, OTHER_NAME: 1, NAME: 21}, {**FORMAT, OTHER_NAME: 5, NAME: 21})


def test_a_chain_that_has_nothing_new_is_not_listed_again_while_its_tail_stays(tmp_path: Path) -> None:
    counted = FaultyStore(Archive(tmp_path).objects)
    archive = Archive(tmp_path, counted)  # type: ignore[arg-type]
    documents(archive).create_chain(CHAIN, ChainDocument((), 1, 1))
    archive.put(1, 10)
    documents(archive).write_tail(CHAIN, 10)
    clock = ManualClock()
    stream = ArchiveStream(archive.store, parse_options({"url": f"file://{tmp_path}/store"}, 0.0), clock)
    end = stream.latest({**FORMAT, NAME: 1})
    assert stream.latest(end) == end

    def listings() -> int:
        before = counted.calls["list"]
        assert stream.latest(end) == end
        return counted.calls["list"] - before

    assert listings() == 2, "the chains and the tails"
    clock.advance(301)
    assert listings() > 2
    archive.put(11, 20)
    documents(archive).write_tail(CHAIN, 20)
    assert stream.latest(end) == {**FORMAT, NAME: 21}


@pytest.mark.parametrize("seed", range(2))
def test_every_row_once_and_in_order_through_compaction_and_restarts(tmp_path: Path, seed: int) -> None:
    """Compare with the rows put: random segments, some late or twice, merges that delete inputs, limits, restarts."""
    rng, archive = random.Random(seed), begun(tmp_path, CHAIN, OTHER)
    waiting: list[tuple[Chain, int, int]] = []
    ends: dict[Chain, int] = {CHAIN: 0, OTHER: 0}
    found: dict[str, list[int]] = {NAME: [], OTHER_NAME: []}
    stream = stream_of(archive)
    position = stream.latest({})

    def step() -> None:
        nonlocal position
        rows_limit = rng.choice([None, 3, 17])
        end = stream.latest(position, rows=rows_limit, segments=None if rows_limit else rng.choice([None, 1, 4]))
        if rng.random() < 0.3:
            archive.age_all(1000)
            run(tmp_path)
        for name, sequence in read(archive, stream_of(archive) if rng.random() < 0.3 else stream, position, end):
            found[name].append(sequence)
        position = json.loads(json.dumps(end))  # as a checkpoint keeps it

    for _ in range(40):
        chain = rng.choice([CHAIN, OTHER])
        first = ends[chain] + 1
        ends[chain] = first + rng.randint(0, 9)
        if rng.random() < 0.2:
            waiting.append((chain, first, ends[chain]))
        else:
            again = rng.randint(max(1, first - 5), first) if rng.random() < 0.2 else first
            archive.put(again, ends[chain], chain=chain)
        if waiting and rng.random() < 0.3:
            late = waiting.pop(0)
            archive.put(*late[1:], chain=late[0])
        if rng.random() < 0.5:
            step()
        if rng.random() < 0.2:
            stream = stream_of(archive)
    for chain, first, last in waiting:
        archive.put(first, last, rows(range(first, last + 1)), chain=chain)
    stream, before = stream_of(archive), None
    while position != before:
        before = position
        step()
    assert found == {str(chain): list(range(1, end + 1)) for chain, end in ends.items()}
