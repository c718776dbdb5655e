"""A typed document under a key: reading, writing without loss of other writes, invalid values. Leases on a thread."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from common.documents import JsonCodec
from common.errors import DataError, OutcomeUnknown, Unavailable
from common.nats import lease as leasing
from common.nats.kv import KvDocument, KvEntry
from common.observe.monitor import Health
from common.tasks import cancel
from ingress.checkpoint import Checkpoint, StateStore, StoredState, TargetState
from tests.support.clock import ManualClock
from tests.support.compaction import CHAIN


class Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="format_version", tag=1):
    end: int
    ends: dict[int, int] = {}


FORM = JsonCodec(Mark)
CORRUPT = [
    b"",
    b"[]",
    b'{"end":1}',
    b'{"end":1,"format_version":2}',
    b'{"end":"1","format_version":1}',
    b'{"end":1,"format_version":1,"more":2}',
    b'{"end":1,"format_version":1,"ends":' + b"[" * 100_000,
]


class Bucket:
    """A key-value bucket in memory; another writer stores `between` just before the next write."""

    def __init__(self, value: bytes | None = None) -> None:
        self.entry = None if value is None else KvEntry(value, 1)
        self.between: bytes | None = None

    async def get(self, _key: str) -> KvEntry | None:
        return self.entry

    async def create(self, _key: str, value: bytes) -> int | None:
        return await self.update(_key, value, 0)

    async def update(self, _key: str, value: bytes, revision: int) -> int | None:
        if self.between is not None:
            other, self.between = self.between, None
            await self.put(_key, other)
        return await self.put(_key, value) if (self.entry.revision if self.entry else 0) == revision else None

    async def put(self, _key: str, value: bytes) -> int:
        self.entry = KvEntry(value, 1 if self.entry is None else self.entry.revision + 1)
        return self.entry.revision


def document(bucket: Bucket) -> KvDocument[Mark]:
    return KvDocument(bucket, "mark", FORM, lambda why: DataError(f"mark: {why}", code="E-STATE-KV"))


async def test_reads_what_was_written_with_its_revision() -> None:
    kept = document(Bucket())
    assert (await kept.get(), await kept.update(Mark(1), 0)) == ((None, 0), 1)
    assert (await kept.update(Mark(2, {10: 1, 9: 2}), 1), await kept.get()) == (2, (Mark(2, {10: 1, 9: 2}), 2))
    assert (await kept.update(Mark(3), 1), await kept.create(Mark(3)), await kept.put(Mark(4))) == (None, None, 3)
    assert (await kept.change(lambda _: None), await kept.get()) == (Mark(4), (Mark(4), 3))


@pytest.mark.parametrize(("value", "bad"), [(FORM.encode(Mark(1)), False), (b"no mark", True)])
async def test_a_change_is_made_again_where_somebody_else_was_first(value: bytes, bad: bool) -> None:
    """Make the change again, also if the other value replaced an invalid one."""
    bucket = Bucket(value)
    bucket.between = FORM.encode(Mark(5))
    changed = await document(bucket).change(lambda mark: Mark(mark.end + 1 if mark else 1), allow_unreadable=bad)
    assert (changed, bucket.entry) == (Mark(6), KvEntry(FORM.encode(Mark(6)), 3))


@pytest.mark.parametrize("raw", CORRUPT)
async def test_an_invalid_value_is_named_and_not_replaced(raw: bytes) -> None:
    bucket = Bucket(raw)
    for attempt in (document(bucket).get(), document(bucket).change(lambda _: Mark(1))):
        with pytest.raises(DataError, match=r"mark: .* \(begins b'") as caught:
            await attempt
        assert caught.value.code == "E-STATE-KV"
    assert bucket.entry == KvEntry(raw, 1)


# The state of a target: never two writers, and no guess after a lost answer


class LosingBucket(Bucket):
    """A bucket that loses a write ("lost") or its answer alone ("unanswered"), in the order of `fates`."""

    def __init__(self, *fates: str) -> None:
        super().__init__()
        self.fates = list(fates)

    async def update(self, key: str, value: bytes, revision: int) -> int | None:
        fate = self.fates.pop(0)
        written = None if fate == "lost" else await super().update(key, value, revision)
        if fate != "done":
            raise OutcomeUnknown(fate)
        return written


@pytest.mark.parametrize("fate", ["done", "lost", "unanswered"])
async def test_a_lost_answer_is_settled_by_reading_and_what_somebody_else_changed_is_not_overwritten(fate: str) -> None:
    first, second, rival = (TargetState(Checkpoint(0, "t0", {CHAIN: at})) for at in (5, 6, 7))
    store = StateStore(LosingBucket(fate, "done"), "FLEET")
    saved = await store.save(first, 0)
    assert (saved, await store.load()) == (StoredState(first, 1), saved)
    assert (await store.load()).state is first, "an unchanged state is not decoded again"

    for revision in (0, 1):
        store = StateStore(LosingBucket("done", "done", fate, "done"), "FLEET")
        saved = [await store.save(first, 0), await store.save(second, 1)]
        assert saved == [StoredState(first, 1), StoredState(second, 2)]
        assert (await store.save(rival, revision), await store.load()) == (None, StoredState(second, 2))


# Leases that are renewed on a thread: work that holds the event loop keeps them, a process that hangs loses them


class SharedClock(ManualClock):
    """The clock of several event loops that turn in this thread, each only when it is named."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def run(self, seconds: float, *loops: asyncio.AbstractEventLoop) -> None:
        for turn in range(round(seconds * 40)):
            self.advance(0.25 if turn % 10 == 0 else 0.0)
            for loop in loops:
                loop.call_soon(loop.stop)
                loop.run_forever()


class Expiring(Bucket):
    """A bucket with one key, which expires at `until`."""

    bucket, ttl, until = "LEASES", 10.0, 0.0

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock = clock

    async def put(self, key: str, value: bytes) -> int:
        self.until = self.clock.monotonic() + self.ttl
        return await super().put(key, value)

    async def delete(self, _key: str, _revision: int) -> bool:
        self.until = 0.0
        return True


@pytest.mark.parametrize(
    ("blocked", "is_up", "is_kept"), [(30, 1, True), (59, 1, True), (75, 1, False), (30, 0, False)]
)
def test_blocked_work_keeps_its_leases_for_a_minute(blocked: int, is_up: int, is_kept: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(leasing, "threading", SimpleNamespace(Thread=lambda **_: SimpleNamespace(start=lambda: None)))
    clock, work, ended = SharedClock(), asyncio.new_event_loop(), asyncio.Event()
    bucket, health, held, lost = Expiring(clock), Health(clock), list[leasing.Lease](), list[bool]()
    answers: list[Any] = [SimpleNamespace(aclose=lambda: asyncio.sleep(0)), Unavailable("no server yet")]

    async def connect() -> Any:
        assert asyncio.get_running_loop() is thread._loop
        if isinstance(answer := answers.pop(), Exception):
            raise answer
        return answer

    thread = leasing.RenewalThread(connect, health.beat_age)
    for loop in (work, thread._loop):
        monkeypatch.setattr(loop, "time", clock.monotonic)

    async def hold() -> None:
        async with thread:
            with pytest.raises(Unavailable):
                await thread.open(lambda _: bucket, lambda: not lost)
            await thread.open(lambda _: bucket, lambda: not lost)
            held.append(await leasing.Leases(bucket, "me", bucket.ttl, clock, thread).acquire("k"))
            tasks = [asyncio.create_task(each) for each in (health.keep_beating(), held[0].run_renewals())]
            await ended.wait()
            await cancel(*tasks)
            await held[0].release()

    holding = work.create_task(hold())
    clock.run(20, work, thread._loop)
    assert held[0].is_usable()
    lost += [] if is_up else [True]
    clock.run(blocked, thread._loop)
    assert (held[0].is_usable(), clock.monotonic() < bucket.until) == (is_kept, is_kept)
    clock.run(1, work, thread._loop)
    assert held[0].lost.is_set is not is_kept
    ended.set()
    clock.run(2, work, thread._loop)
    assert (holding.done(), holding.exception(), bucket.until == 0) == (True, None, is_kept)
    work.close()
    thread._loop.close()
