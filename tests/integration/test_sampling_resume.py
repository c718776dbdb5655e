"""The resume of a sampler after a stop: as if there had been none, or with a report."""

import asyncio
import logging
import random
from pathlib import Path

import pytest

from common.archive.segment import Message
from common.chain import Chain
from common.sequences import SequenceRange
from common.tasks import Stop
from egress import metrics
from egress.advisories.advisory import Advisory, AdvisoryEvent
from egress.sampling.resume import RebuildCancelledError, SamplerRebuild
from egress.sampling.sampler import Sampler
from tests.support.basics import PATIENCE, counted
from tests.support.sampling import CHAIN, FEED, SECOND, SITE, START_NS, SampledArchive, facts, fold, known_keys, sent

PENDING = (Advisory(AdvisoryEvent.NEW, "one", 1, 1),)


@pytest.fixture
def site(tmp_path: Path) -> SampledArchive:
    found = SampledArchive(tmp_path)
    found.begin()
    return found


def rebuilt(reason: str, partition: int = 0) -> float:
    return counted(metrics.sampler_rebuilt.labels(SITE, FEED, partition, reason))


def busy_log(length: int = 600, nodes: int = 12, seed: int = 3) -> list[Message]:
    """A message a second; some nodes are silent for long."""
    chance = random.Random(seed)
    rests = {f"n{n}" for n in range(0, nodes, 3)}
    found = []
    for sequence in range(1, length + 1):
        node = f"n{chance.randrange(nodes)}"
        if node in rests and 200 < sequence < 450:
            node = "n1"
        found.append(sent(sequence, node, sequence, chance.choice([5, 5, 5, 9])))
    return found


def whole(site: SampledArchive, log: list[Message], last: int) -> Sampler:
    """A sampler that has folded the log up to `last` without a stop."""
    sampler = Sampler(site.sampling)
    fold(sampler, [m for m in log if m.sequence <= last])
    return sampler


async def follow(site: SampledArchive, log: list[Message], place: int, source: int = 1) -> Sampler:
    """Resume, and read again up to `place`."""
    found = await site.resume(place, source)
    fold(found.sampler, [m for m in log if found.read_from <= m.sequence < place])
    return found.sampler


# Genesis


async def test_a_new_chain_begins_with_an_empty_snapshot_at_its_first_sequence(site: SampledArchive) -> None:
    found = await site.resume(7, 7, first=7)
    assert (found.read_from, found.newest_ns, found.is_rebuilt, found.outbox) == (7, 0, False, ())
    [ref] = site.snapshots().list()
    assert (ref.position, facts(found.sampler)) == (7, {})


async def test_before_the_first_segment_a_damaged_genesis_or_other_settings_reset(site: SampledArchive) -> None:
    await site.resume(1)
    [ref] = site.snapshots().list()
    site.objects.put(ref.key, b"x" * ref.size)
    assert not (await site.resume(1)).is_rebuilt
    assert site.snapshots().read(site.snapshots().list()[0]).position == 1
    site.set(inspect_duration="50s")
    assert not (await site.resume(1)).is_rebuilt
    assert len(site.snapshots().list()) == 2


async def test_a_stream_that_was_made_again_begins_with_nothing(site: SampledArchive) -> None:
    site.archive(busy_log(), [100])
    chain = CHAIN.next_incarnation()
    site.begin(chain, "2026-11-21T00:00:00Z", {0: 100})
    found = await site.resume(1, chain=chain)
    assert (found.is_rebuilt, facts(found.sampler)) == (False, {})


# Followed


async def test_a_followed_snapshot_keeps_its_outbox_and_of_two_at_one_position_the_fuller_one_counts(
    site: SampledArchive,
) -> None:
    """Both may have the same second of the store's clock."""
    log = busy_log()
    site.archive(log, [100])
    for newest in (200, 900, 500):
        site.save(whole(site, log, 100), 101, outbox=PENDING, newest_ns=START_NS + newest * SECOND)
    found = await site.resume(101)
    assert (found.outbox, found.newest_ns) == (PENDING, START_NS + 900 * SECOND)


@pytest.mark.parametrize("drops", [{"retention": "workqueue"}, {"retention": "interest"}, {"deleted": 1}])
async def test_a_stream_that_has_dropped_single_archived_messages_is_followed_from_the_position(
    site: SampledArchive, drops: dict[str, object]
) -> None:
    log = busy_log()
    site.archive(log, [100])
    site.save(whole(site, log, 100), 101)
    found = await site.resume(101, 105, **drops)  # up to 104 were another partition's
    assert (found.is_rebuilt, found.read_from) == (False, 101)
    site.archive(log, [120], first=101)
    # One message of others is still held from before; archived ones are gone from behind it all the same.
    assert (await site.resume(121, 7, **drops)).is_rebuilt


async def test_a_damaged_snapshot_is_left_for_the_next_older_one(site: SampledArchive, tmp_path: Path) -> None:
    log = busy_log()
    site.archive(log, [300])
    older, newer = site.save(whole(site, log, 99), 100), site.save(whole(site, log, 199), 200)
    path = tmp_path / "store" / newer.key
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    found = await site.resume(301)
    assert (found.snapshot_key, found.is_rebuilt) == (older.key, False)
    assert facts(await follow(site, log, 301)) == facts(whole(site, log, 300))


# Rebuilt


async def test_changed_settings_build_it_again_once(site: SampledArchive, caplog: pytest.LogCaptureFixture) -> None:
    log = busy_log()
    site.archive(log, [300])
    site.save(whole(site, log, 300), 301, outbox=PENDING)
    site.set(inspect_duration="50s")
    before = rebuilt("settings")
    found = await site.resume(301)
    assert (found.is_rebuilt, found.read_from, found.snapshot_key, found.outbox) == (True, 301, "", PENDING)
    assert rebuilt("settings") == before + 1
    [line] = [r for r in caplog.records if "E-SAMPLER-REBUILT" in r.getMessage()]
    assert line.levelno == logging.WARNING
    again = await site.resume(301)
    assert (again.is_rebuilt, facts(again.sampler)) == (False, facts(found.sampler))
    assert rebuilt("settings") == before + 1


@pytest.mark.parametrize("positions", [(1, 301), ()], ids=["damaged", "vanished"])
async def test_snapshots_that_are_all_damaged_or_vanished_build_it_again(
    site: SampledArchive, tmp_path: Path, positions: tuple[int, ...]
) -> None:
    sampler = site.archive(busy_log(), [300])
    for position in positions:
        ref = site.save(sampler, position)
        (tmp_path / "store" / ref.key).write_bytes(b"x" * ref.size)
    before = rebuilt("damaged")
    assert (await site.resume(301)).is_rebuilt
    assert rebuilt("damaged") == before + 1


async def test_a_source_that_expired_behind_it_builds_upon_the_snapshot(site: SampledArchive) -> None:
    log = busy_log()
    site.archive(log, [100, 300])
    site.save(whole(site, log, 250), 251, outbox=PENDING)
    before = rebuilt("source")
    found = await site.resume(301, 260)
    assert (found.is_rebuilt, found.outbox, found.read_from, rebuilt("source")) == (True, PENDING, 301, before + 1)
    known, exact = facts(found.sampler), facts(whole(site, log, 300))
    assert known.keys() == exact.keys()  # also those that only the snapshot knew
    assert {value: due for value, (_, due, _) in known.items()} == {v: due for v, (_, due, _) in exact.items()}


async def test_no_silence_is_reported_right_after_a_rebuild(site: SampledArchive) -> None:
    log = busy_log()
    site.archive(log, [600])
    found = await site.resume(601, 9000, source_time_ns=START_NS + 10**6 * SECOND)
    assert found.is_rebuilt
    assert found.newest_ns == log[-1].timestamp_ns
    assert facts(found.sampler)
    next_ns = START_NS + 10**6 * SECOND
    assert found.sampler.advance(next_ns) == []
    advisories = found.sampler.advance(next_ns + 51 * SECOND)  # silence since then counts
    assert {a.event for a in advisories} == {AdvisoryEvent.TIMEOUT}
    assert {a.value for a in advisories} == facts(found.sampler).keys()


async def test_inputs_of_a_damaged_merge_are_read_and_damaged_ones_left_out(site: SampledArchive) -> None:
    log = busy_log(300)
    site.archive(log, [100, 200, 300])
    inputs = site.store.list(CHAIN)
    merged = site.put(fold(Sampler(site.sampling), log), SequenceRange(1, 300), level=1, examined=log[-1])
    good = facts((await site.resume(301)).sampler)
    for damaged, expected in ((merged, good.keys()), (inputs[2], facts(whole(site, log, 200)).keys())):
        for ref in site.snapshots().list():
            site.objects.delete(ref.key)
        site.objects.put(damaged.key, b"x" * damaged.size)
        found = await site.resume(301)
        assert found.is_rebuilt
        assert facts(found.sampler).keys() == expected


# Former partitions of the same stream


async def test_rows_of_the_partitions_before_count_by_the_new_filter_in_the_order_of_the_stream(
    site: SampledArchive,
) -> None:
    """Several may hold a value; values of unread messages are not learned from those that are ahead."""
    log = busy_log(400)
    for partition, end in ((0, 400), (1, 390)):
        part = [m for m in log[:end] if m.sequence % 2 == partition]
        site.put(part, SequenceRange(1, end), chain=Chain(SITE, FEED, 0, partition), examined=log[end - 1])
    now = Chain(SITE, FEED, 1, 0)
    site.begin(now, previous={0: 400, 1: 390})
    site.part = type(site.part)(SITE, site.part.settings, 0, "nodes.n1")
    found = await site.resume(391, 1, chain=now, first=391)
    last = max(m.timestamp_ns for m in log[:390] if m.subject == b"nodes.n1")
    copied = [(k.value, k.copied_ns) for k in known_keys(found.sampler.freeze())]
    assert (found.is_rebuilt, copied) == (True, [("n1", last)])
    [ref] = site.snapshots(now).list()
    assert ref.position == 391
    again = await site.resume(391, 1, chain=now, first=391)
    assert (again.is_rebuilt, facts(again.sampler)) == (False, facts(found.sampler))


# Faults


async def test_a_cancelled_rebuild_ends_its_thread(site: SampledArchive, monkeypatch: pytest.MonkeyPatch) -> None:
    site.put(busy_log()[:300], SequenceRange(1, 300), digest="")
    reached, ended = Stop(), []
    loop, original = asyncio.get_running_loop(), SamplerRebuild.iter_rows

    def read(self, source, within):  # type: ignore[no-untyped-def]
        loop.call_soon_threadsafe(reached.set)
        assert self.cancelled.wait(PATIENCE)
        try:
            yield from original(self, source, within)
        except RebuildCancelledError:
            ended.append(True)
            raise

    monkeypatch.setattr(SamplerRebuild, "iter_rows", read)
    task = asyncio.create_task(site.resume(301))
    await asyncio.wait_for(reached.wait(), PATIENCE)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]
