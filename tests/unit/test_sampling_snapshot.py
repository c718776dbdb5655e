"""Snapshots: read back as written, or refused, in little time and memory; and their writing by a session."""

import asyncio
import hashlib
import random
import resource
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.chain import Chain
from common.errors import Unavailable
from common.service.process import ThreadPool
from egress.advisories.advisory import Advisory, AdvisoryEvent
from egress.report import SamplingReport
from egress.sampling.sampler import CHUNK_VALUES, Sampler, SamplerState
from egress.sampling.snapshot import (
    MAGIC,
    MAX_BLOCK_BYTES,
    Snapshot,
    SnapshotWriter,
    decode,
    decode_frames,
    encode,
    encode_frames,
)
from tests.support.basics import PATIENCE, soon
from tests.support.clock import ManualClock
from tests.support.sampling import HOUR, MINUTE, SECOND, START, known_keys, sampling

CHAIN, HOW = Chain("us-east", "NODE_DATA", 3, 7), sampling()


def snapshot(keys: int = 100, outbox: int = 3) -> Snapshot:
    sampler, dice = Sampler(HOW), random.Random(keys)
    for first in range(0, keys, 5000):
        names = [f"node-{number:06d}.é.example.net" for number in range(first, min(keys, first + 5000))]
        times = [START + first * 1000 + place for place in range(len(names))]
        sampler.fold_keys(names, None, times, [dice.randrange(5000) for _ in names])
    sampler.advance(START + 13 * MINUTE)
    pending = tuple(Advisory(AdvisoryEvent.TIMEOUT, f"node-{n:06d}", START, START + MINUTE) for n in range(outbox))
    return Snapshot(CHAIN, 12_345, HOW.digest, START + 5, sampler.freeze(), pending)


def raw(of: Snapshot) -> bytes:
    return b"".join(encode(of))


def content(of: Snapshot) -> tuple[Any, ...]:
    state = of.state
    head = (of.chain, of.position, of.sampling_digest, of.newest_ns, state.duration_ns, state.watermark_ns)
    return (*head, sorted(known_keys(state), key=lambda k: k.value), of.outbox)


@pytest.mark.parametrize(
    ("keys", "outbox"),
    [(0, 0), (1, 3000), (CHUNK_VALUES - 1, 1), (CHUNK_VALUES, 0), (CHUNK_VALUES + 1, 3), (3 * CHUNK_VALUES + 17, 3000)],
)
def test_what_is_written_comes_back(keys: int, outbox: int) -> None:
    written = snapshot(keys, outbox)
    read = decode(raw(written))
    assert (content(read), read.state.count(), raw(read)) == (content(written), keys, raw(written))


def test_an_empty_state_comes_back_and_steps_are_small() -> None:
    genesis = Snapshot(CHAIN, 1, HOW.digest, 0, SamplerState(HOUR))
    assert decode(raw(genesis)) == genesis
    assert len(raw(genesis)) < 400
    steps = list(encode(snapshot(5 * CHUNK_VALUES, 5000)))
    assert len(steps) == 1 + 1 + 5 + 5 + 1
    assert max(map(len, steps)) < 400_000


def test_keys_of_every_kind_come_back_and_the_longest_fit_a_block() -> None:
    keys = ["\0", "\ufffd", "😀" * 256, "a" * 1024, "\\xff", " ", "\r\n", "é", "\u0301"]
    dice = random.Random(0)
    longest = ["".join(chr(dice.randrange(0x10000, 0x20000)) for _ in range(256)) for _ in range(CHUNK_VALUES)]
    for some in (keys, longest):
        sampler = Sampler(HOW)
        sampler.fold_keys([*some], None, [START] * len(some), [2**32 - 1] * len(some))
        written = Snapshot(CHAIN, 5, HOW.digest, START, sampler.freeze())
        assert (content(decode(raw(written))), written.state.count()) == (content(written), len(some))


def test_every_cut_is_refused_and_another_version() -> None:
    whole = raw(snapshot(50))
    other = MAGIC[:-1] + b"2" + whole[len(MAGIC) : -32]
    for cut in (*(whole[:length] for length in range(len(whole))), whole + b"\0"):
        with pytest.raises(ValueError):
            decode(cut)
    with pytest.raises(ValueError, match="FLOESMP1"):
        decode(other + hashlib.sha256(other).digest())


@given(st.data())
@settings(max_examples=100)
def test_every_flipped_bit_is_refused(data: st.DataObject) -> None:
    whole = bytearray(raw(snapshot(40)))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError):
        decode(bytes(whole))


@given(st.data())
@settings(max_examples=100)
def test_no_block_does_harm(data: st.DataObject) -> None:
    """Damage a block under a correct hash, as an attacker may do."""
    blocks = [bytearray(block) for block in decode_frames(raw(snapshot(30)))]
    block = data.draw(st.sampled_from(blocks))
    place = data.draw(st.integers(0, len(block) - 1))
    if data.draw(st.booleans()):
        block[place] = data.draw(st.integers(0, 255))
    else:
        del block[place:]
    try:
        read = decode(b"".join(encode_frames(map(bytes, blocks))))
    except ValueError:
        return
    # an accepted snapshot is usable
    sampler = Sampler(HOW, read.state)
    assert len(list(known_keys(read.state))) == sampler.freeze().count() == read.state.count()
    sampler.advance(START + 5 * HOUR)
    sampler.fold_keys(["node-000001.é.example.net", "x"], None, [START + HOUR] * 2, [1, 2])


def sealed(body: bytes) -> bytes:
    """Return a snapshot of any content with a correct hash."""
    return MAGIC + body + hashlib.sha256(MAGIC + body).digest()


def head(**changes: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.decode(next(decode_frames(raw(snapshot(0, 0))))) | changes)


def keys_block(values: list[Any], **changes: bytes) -> bytes:
    count = len(values)
    times = struct.pack(f"<{count}q", *[START] * count)
    columns = {"seen": times, "due": times, "sizes": bytes(4 * count), "notices": bytes(count)}
    return msgspec.msgpack.encode([values, *(columns | changes).values()])


def two_keys(**changes: bytes) -> list[bytes]:
    return [head(keys=2), keys_block(["a", "b"], **changes)]


def one_key(value: Any) -> list[bytes]:
    return [head(keys=1), keys_block([value])]


ADVISORIES, GOOD = msgspec.msgpack.encode([("new", "a", 1, 1)]), keys_block(["a", "b"])
BAD: dict[str, list[bytes]] = {
    "no head": [],
    "another byte order": [head(byte_order="big")],
    "an unknown field": [head(more=1)],
    "a chain that is none": [head(chain="../x/y")],
    "a position below 0": [head(position=-1)],
    "more keys than blocks": [head(keys=2)],
    "more keys than bytes": [head(keys=2**62), GOOD],
    "more advisories than bytes": [head(advisories=2**62), ADVISORIES],
    "fewer keys than blocks": [head(keys=1), GOOD],
    "no keys in a block": [head(keys=2), keys_block([]), GOOD],
    "no advisories": [head(advisories=1), msgspec.msgpack.encode([])],
    "one key twice": [head(keys=2), keys_block(["a", "a"])],
    "one key in two blocks": [head(keys=4), GOOD, keys_block(["c", "a"])],
    "a key that is empty": one_key(""),
    "a key that is too long": one_key("a" * 1025),
    "too many keys in a block": [head(keys=CHUNK_VALUES + 1), keys_block([f"{n}" for n in range(CHUNK_VALUES + 1)])],
    "a column too short": two_keys(seen=bytes(15)),
    "a notice that is none": two_keys(notices=b"\0\3"),
    "a time below 0": two_keys(seen=struct.pack("<2q", 1, -1)),
    "the time of a free place": two_keys(seen=struct.pack("<2q", 1, 2**63 - 1)),
    "an unknown event": [head(advisories=1), msgspec.msgpack.encode([("old", "a", 1, 1)])],
    "more than was declared": [head(keys=2), GOOD, ADVISORIES],
}


def test_what_is_no_snapshot_is_refused_and_those_blocks_are_good_otherwise() -> None:
    for what, blocks in BAD.items():
        with pytest.raises(ValueError):
            pytest.fail(f"{what} is taken: {decode(b''.join(encode_frames(blocks)))}")
    read = decode(b"".join(encode_frames([head(keys=2, advisories=1), GOOD, ADVISORIES])))
    assert {k.value for k in known_keys(read.state)} == {"a", "b"}
    assert read.outbox == (Advisory(AdvisoryEvent.NEW, "a", 1, 1),)


def test_sizes_that_are_declared_take_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    packed = next(iter(list(encode_frames([b"a" * 100]))[1:]))[8:]
    for length, size in [(len(packed), 2**32 - 1), (2**32 - 1, 100), (len(packed), MAX_BLOCK_BYTES + 1), (0, 0)]:
        with pytest.raises(ValueError):
            decode(sealed(struct.pack("<II", length, size) + packed))
    huge = b"\xdd\xff\xff\xff\xff"  # a list of 4 billion
    for body in ([head(keys=1), b"\x95" + huge], [head(keys=1), huge], [huge], [head(advisories=1), huge]):
        with pytest.raises(ValueError):
            decode(b"".join(encode_frames(body)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000  # KiB


def test_a_small_file_does_not_become_a_large_one() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def the_same() -> Iterator[bytes]:
        block = keys_block(["a" * 1024 for _ in range(CHUNK_VALUES)])
        yield head(keys=100_000)
        for _ in range(2000):
            yield block

    bomb = b"".join(encode_frames(the_same()))
    assert len(bomb) < 3_000_000
    with pytest.raises(ValueError):
        decode(bomb)
    many = [msgspec.msgpack.encode([("new", "a", 1, 1)] * 1024)] * 5000
    with pytest.raises(ValueError):
        decode(b"".join(encode_frames([head(advisories=5000 * 1024), *many])))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000  # KiB


def test_what_compresses_best_is_not_taken_for_a_bomb() -> None:
    # Given: the most regular state possible
    sampler = Sampler(sampling(inspect_duration=1.0, warn_duration=0.0))
    keys = [f"{number:06d}" for number in range(20_000)]
    sampler.fold_keys([*keys], None, [START] * len(keys), [0] * len(keys))
    pending = sampler.advance(START + SECOND)
    assert len(pending) == 40_000
    # When, Then
    written = Snapshot(CHAIN, 9, HOW.digest, 0, sampler.freeze(), tuple(pending))
    assert content(decode(raw(written))) == content(written)
    written = replace(written, state=SamplerState(SECOND))
    assert decode(raw(written)).outbox == tuple(pending)


# When they are written

SAVED = Chain("site", "UNIT_SAVING")


class SavingBench:
    """A store that only notes its snapshots; `gate` delays writes, `fails` makes them fail."""

    def __init__(self) -> None:
        self.clock, self.gate = ManualClock(), threading.Event()
        self.written, self.fails = list[int](), list[Exception]()
        self.gate.set()
        self.threads, store = ThreadPool("test-saving", 1), cast(Any, self)
        self.saving = SnapshotWriter(store, self.threads, self.clock, 60.0, SamplingReport(SAVED))

    def save(self, snapshot: Any) -> Any:
        assert self.gate.wait(PATIENCE)
        if self.fails:
            raise self.fails.pop()
        self.written.append(snapshot.position)
        return SimpleNamespace(position=snapshot.position, size=1, log_context=dict)

    def schedule(self, position: int, segments: int = 1) -> None:
        self.saving.schedule(SimpleNamespace(position=position), segments)  # type: ignore[arg-type]


@pytest.fixture
async def bench() -> AsyncIterator[SavingBench]:
    bench = SavingBench()
    running = asyncio.create_task(bench.saving.run())
    yield bench
    running.cancel()
    await asyncio.wait({running})
    bench.threads.close()


def test_due_once_the_interval_has_passed_or_somebody_asks_and_a_segment_was_closed() -> None:
    for asked, later in ((False, 600), (True, 0)):
        bench = SavingBench()
        assert not bench.saving.is_due(5)
        bench.saving.request() if asked else bench.clock.advance(60)
        assert [bench.saving.is_due(segments) for segments in (0, 1)] == [False, True]
        bench.schedule(10, segments=1)
        bench.clock.advance(later)
        assert not bench.saving.is_due(9)


async def test_written_once_the_archive_reaches_it_or_at_once_where_it_has(bench: SavingBench) -> None:
    """Write at once if the archive is far enough: a quiet feed has no later put that would trigger it."""
    bench.schedule(10)
    bench.saving.mark_put(8)
    await asyncio.sleep(0.05)
    assert bench.written == []
    bench.saving.mark_put(9)
    await bench.saving.wait_until_written()
    assert bench.written == [10]
    bench.saving.mark_put(50)
    await asyncio.sleep(0.05)
    assert bench.written == [10]
    bench.schedule(20)
    await bench.saving.wait_until_written()
    assert bench.written == [10, 20]


async def test_a_slow_write_holds_nobody_up_and_the_next_one_waits_its_turn(bench: SavingBench) -> None:
    bench.gate.clear()
    bench.schedule(10)
    bench.saving.mark_put(20)
    bench.clock.advance(600)
    await soon(lambda: bench.threads.busy)
    bench.saving.mark_put(30)
    assert not bench.saving.is_due(9)
    bench.gate.set()
    await bench.saving.wait_until_written()
    assert bench.saving.is_due(9)


@pytest.mark.parametrize("error", [Unavailable("the store is down"), OSError(28, "disk full")])
async def test_a_failed_write_is_dropped_and_the_next_one_comes(bench: SavingBench, error: Exception) -> None:
    bench.fails.append(error)
    bench.schedule(10)
    bench.saving.mark_put(9)
    await bench.saving.wait_until_written()
    assert not bench.saving.is_due(2)
    bench.clock.advance(60)
    assert bench.saving.is_due(2)
    bench.schedule(20, segments=2)
    bench.saving.mark_put(19)
    await bench.saving.wait_until_written()
    assert bench.written == [20]
