"""The listings that egress makes of a chain, and their results: the end, holes, segments for identity."""

import asyncio
import builtins
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from common.archive.documents import ChainStore
from common.archive.keys import SegmentName
from common.chain import Chain
from common.clock import SystemClock
from common.errors import Unavailable
from common.objects.local import LocalObjects
from common.objects.port import ObjectInfo
from common.sequences import SequenceRange
from common.service.process import ThreadPool
from egress.archive import Archive, ArchiveWalks
from egress.deps import Intervals, Pools
from tests.support.basics import raises_code, soon
from tests.support.compaction import CHAIN
from tests.support.compaction import Archive as Segments

pytestmark = pytest.mark.simulated


class Counting(LocalObjects):
    """A store that counts listed `keys`, and the `requests` of a server with pages of 1000 keys."""

    requests = keys = 0

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> builtins.list[ObjectInfo]:
        found = super().list(prefix, start_after=start_after, limit=limit)
        self.requests += max(1, -(-len(found) // 1000))
        self.keys += len(found)
        return found


class Mark:
    """The high-water mark of the one chain; None if there is none."""

    def __init__(self, end: int | None) -> None:
        self._end = end

    async def get(self, _chain: Chain) -> int | None:
        return self._end


class World:
    """A chain with any segments that a test names."""

    def __init__(self, folder: Path) -> None:
        self.objects = Counting(folder / "store")
        self.segments = Segments(folder, self.objects)
        self.threads = ThreadPool("listing", 2)
        self.pools = Pools(self.threads, self.threads, self.threads)

    def name(self, ranges: Iterable[tuple[int, int]], level: int = 0) -> list[str]:
        """Put empty objects with the names of segments: below the mark none is opened."""
        keys = []
        for number, (first, last) in enumerate(ranges):
            name = SegmentName(CHAIN, level, SequenceRange(first, last), f"{number:016x}")
            keys.append(self.segments.layout.segment(name))
            self.segments.path(keys[-1]).parent.mkdir(parents=True, exist_ok=True)
            self.segments.path(keys[-1]).touch()
        return keys

    def archive(self, mark: int | None, first: int = 1) -> Archive:
        chains = ChainStore(self.objects, self.segments.layout)
        return Archive(CHAIN, first, self.segments.store, chains, Mark(mark), self.pools)  # type: ignore[arg-type]

    async def loaded(self, mark: int | None) -> Archive:
        archive = self.archive(mark)
        await archive.load()
        return archive

    def walk(self, archive: Archive, **pace: float) -> ArchiveWalks:
        walk = ArchiveWalks(self.threads, SystemClock(), Intervals(**{"page": 0.0, "check": 0.05, **pace}))
        walk.follow(archive)
        return walk


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.threads.close()


def tens(first: int, last: int) -> list[tuple[int, int]]:
    return [(begin, begin + 9) for begin in range(first, last, 10)]


async def test_a_session_and_a_put_list_the_end_once_each(world: World) -> None:
    world.name(tens(1, 15_000))
    archive = await world.loaded(15_000)
    assert (archive.end, archive.holes, len(archive.newest)) == (15_000, (), 1)
    assert not await archive.is_covered(15_001)
    assert (world.objects.requests, world.objects.keys) == (2, 2), "the newest segment, by each"


MARKS = [
    # A crash before the mark: the segment that contains it may be merged already.
    (90, [(1, 80, 1), (81, 90, 1), (91, 100, 0)], ()),
    (30, [(1, 40, 1), (41, 60, 1), (71, 80, 1), (81, 90, 0), (91, 100, 0)], (SequenceRange(61, 70),)),
    (None, [(1, 10, 0), (21, 100, 0)], (SequenceRange(11, 20),)),
    (90, [(1, 80, 0), (91, 100, 0)], (SequenceRange(81, 90),)),
]


@pytest.mark.parametrize(("mark", "segments", "holes"), MARKS, ids=["crash", "old", "none", "of no segment"])
async def test_the_true_end_and_the_holes_behind_the_mark_are_found_and_a_mark_of_no_segment_is_asked_for_again(
    world: World, mark: int | None, segments: list[tuple[int, int, int]], holes: tuple[SequenceRange, ...]
) -> None:
    for first, last, level in segments:
        world.segments.put(first, last, level=level)
    archive = world.archive(mark)
    if mark is not None and any(hole.first <= mark <= hole.last for hole in holes):
        with raises_code(Unavailable, "E-LISTING", match="contains the high-water mark 90, found none"):
            await archive.load()
        await archive.load_all()
    else:
        await archive.load()
    assert (archive.end, archive.holes, archive.may_be_wiped(2)) == (100, holes, False)
    assert world.objects.requests <= 20


async def test_a_chain_without_segments_may_be_wiped_unless_its_mark_excludes_that(world: World) -> None:
    assert (await world.loaded(0)).end == 0
    assert (await world.loaded(None)).may_be_wiped(2)


async def test_load_older_gives_the_newest_hundred_in_order_and_lists_few_more(world: World) -> None:
    world.name(tens(5_001, 15_000))
    world.name([(1, 3_000), (3_001, 5_000)], level=2)
    archive = await world.loaded(15_000)
    found = await archive.load_older(1)
    assert [ref.coverage.last for ref in found] == [*range(15_000, 14_000, -10)]
    assert world.objects.keys < 1_000
    asked = world.objects.requests
    assert await archive.load_older(1) == found
    assert world.objects.requests == asked, "once a session is enough"
    assert any(4_000 in ref.coverage for ref in await archive.segments_at(4_000))
    assert await archive.segments_at(15_001) == ()


# The walk


async def test_a_walk_finds_holes_below_the_mark_and_keeps_no_page(world: World) -> None:
    world.name([each for each in tens(1, 15_000) if each[0] not in (11, 9_001, 9_011)])
    walk = world.walk(await world.loaded(15_000))
    running = asyncio.create_task(walk.run())
    await soon(walk.walk_ended.is_set)
    running.cancel()
    assert walk.holes == (SequenceRange(11, 20), SequenceRange(9_001, 9_020))
    archive = await world.loaded(15_000)
    assert archive.holes == ()
    walk.follow(archive)
    assert archive.holes == walk.holes


async def test_a_merge_during_a_walk_leaves_no_hole(world: World) -> None:
    lower = world.name(tens(1, 15_000))
    walk = world.walk(await world.loaded(15_000), page=0.05)
    running, listed = asyncio.create_task(walk.run()), world.objects.requests
    await soon(lambda: world.objects.requests > listed + 1)
    world.name([(10_001, 14_990)], level=1)
    for key in lower[1_000:1_499]:
        world.segments.path(key).unlink()
    await soon(walk.walk_ended.is_set)
    running.cancel()
    assert walk.holes == ()


async def test_an_interrupted_walk_resumes_at_its_position_and_comes_again_when_due(world: World) -> None:
    world.name(tens(1, 15_000))
    walk = world.walk(await world.loaded(15_000), page=0.05)
    before, cuts = world.objects.requests, 0
    while not walk.walk_ended.is_set():
        running = asyncio.create_task(walk.run())
        await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.wait({running})
        cuts += 1
        assert cuts < 1_000
    again = asyncio.create_task(walk.run())
    await asyncio.sleep(1.0)
    again.cancel()
    assert (cuts > 1, world.objects.requests - before < 20) == (True, True), "one walk, whatever cut it"


async def test_a_put_sees_that_the_newest_segment_is_gone_unless_it_was_merged_up(world: World) -> None:
    """By its only listing."""
    world.segments.put(1, 10)
    for last, level in ((20, 1), (30, 0)):
        newest = world.segments.put(last - 9, last, level=level).key
        archive = await world.loaded(last)
        if not level:
            world.segments.path(newest).unlink()
        asked = world.objects.requests
        assert not await archive.is_covered(last + 1)
        assert (archive.missing_key, world.objects.requests) == ("" if level else newest, asked + 1)


@pytest.mark.parametrize("is_put", [True, False], ids=["by a put", "by a look"])
async def test_an_archive_whose_newest_segment_is_gone_is_walked_at_once_and_once(world: World, is_put: bool) -> None:
    for first, last in [(1, 10), (11, 20)]:
        world.segments.put(first, last)
    archive = await world.loaded(20)
    walk = world.walk(archive, newest=0.02)
    running = asyncio.create_task(walk.run())
    await soon(walk.walk_ended.is_set)
    assert walk.holes == ()
    walk.walk_ended.clear()
    world.segments.path(archive.newest[0].key).unlink()
    if is_put:
        assert not await archive.is_covered(21)
    await soon(walk.walk_ended.is_set)
    running.cancel()
    assert walk.holes == (SequenceRange(11, 20),)
    due = walk._due
    for _ in range(3):
        await walk._check_newest()
    assert walk._due == due, "one walk for one missing segment"
