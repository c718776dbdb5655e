"""Replay of an archive into a stream: ranges, filters, levels, damage, refusals."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from common.archive.documents import AcceptedGap, ChainDocument, StreamDocument
from common.archive.guard import SegmentGone
from common.archive.segment import Ledger, Reason, SegmentRef, Tip
from common.chain import Chain
from common.clock import SystemClock
from common.errors import ConfigError, DataError, Unavailable, UsageError
from common.nats.api import stream_info
from common.nats.kv import KeyValue, kv_replicas, state_key
from common.nats.lease import Leases
from common.sequences import SequenceRange
from common.service.progress import Progress
from common.settings.egress import EgressSettings
from common.tasks import Stop
from ingress.recovery.drill import ScratchStreams
from ingress.recovery.request import Pace, ReplayOptions, ReplayResult
from tests.support.basics import raises_code, soon
from tests.support.commands import run_here
from tests.support.ingress import CHAIN, Centre, count_in, rows_of
from tests.support.replay import STEP_NS, World, refused
from tests.support.segments import START_NS, message
from tests.support.servers import place
from tests.support.stores import raising

pytestmark = [pytest.mark.servers, pytest.mark.simulated]


def at(sequence: int) -> str:
    """The time of a message of `rows_of`, as it is typed."""
    timestamp_ns = START_NS + sequence * STEP_NS
    whole = datetime.fromtimestamp(timestamp_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{whole}.{timestamp_ns % 10**9:09d}Z"


def spoil(world: World, ref: SegmentRef) -> None:
    path = world.archive.folder / ref.key
    path.write_bytes(path.read_bytes()[:-100] + b"\0" * 100)


REPLAYED_RANGES = [
    ({"from_sequence": 150, "to_sequence": 250}, range(150, 251)),
    ({"from_sequence": 290}, range(290, 301)),
    ({"to_sequence": 5, "subjects": ("nodes.1", "nodes.3")}, [1, 3]),
    ({"from_sequence": 99, "to_sequence": 106, "subjects": ("*.2",)}, [100]),
    ({"from_time": at(120), "to_time": at(230)}, range(120, 230)),
]


@pytest.mark.parametrize(("asked", "expected"), REPLAYED_RANGES)
async def test_ranges_and_subjects(world: World, asked: dict[str, Any], expected: Any) -> None:
    await world.make((1, 100), (101, 200), (201, 300))
    result = await world.run(**asked)
    assert (result.finished, result.rows) == (True, len(expected))
    assert await world.sequences() == list(expected)


async def test_partitions_take_turns_and_incarnations_follow_each_to_its_end(world: World) -> None:
    chains = [Chain("us-east", "NODES", k, p) for k in (0, 1) for p in (0, 1)]
    for chain in chains:
        world.archive.begin(chain, previous={0: 30, 1: 25} if chain.incarnation else None)
        world.fill((1, 10), (11, 30), chain=chain)
    await world.make()
    await world.run()
    held = await world.held()
    for chain in chains:
        end = 25 if chain == chains[1] else 30
        assert [s for c, s in held if c == str(chain)] == list(range(1, end + 1))
    incarnations = [c.split("/")[2] for c, _ in held]
    assert incarnations == sorted(incarnations)
    assert len({c for c, _ in held[:40]}) == 2, "partitions take turns"


async def test_sequences_mean_the_newest_incarnation(world: World) -> None:
    for k in (0, 1):
        chain = Chain("us-east", "NODES", k)
        world.archive.begin(chain, previous={0: 20} if k else None)
        world.fill((1, 20), chain=chain)
    await world.make()
    assert any("0001" in note for note in (await world.preview(from_sequence=5, to_sequence=9)).notes)
    await world.run(from_sequence=5, to_sequence=9)
    assert await world.held() == [("us-east/NODES/0001/0", s) for s in range(5, 10)]
    await world.run(ReplayOptions(append=True), from_sequence=5, to_sequence=6, incarnation=0)
    assert (await world.held())[5:] == [("us-east/NODES/0000/0", s) for s in (5, 6)]


# Requests


def test_one_bound_of_a_kind_and_no_option_of_another_kind_of_drill(tmp_path: Path) -> None:
    both = "expected one of --{}-sequence and --{}, found both"
    for words, expected in (
        ("replay s/F --target BACK --from-sequence 5 --since 1h", both.format("from", "since")),
        ("drill s/F --to-sequence 5 --until 1h", both.format("to", "until")),
        ("drill s/F --exact --to-sequence 5 --until 1h", "found both"),
        ("drill s/F --exact --storage memory --from-sequence 2", "--from-sequence, --storage: expected none with"),
        ("drill s/F --server local", "--server: expected only with --exact"),
    ):
        done = run_here(*words.split(), "-c", f"{tmp_path}/none.yaml")
        assert (done.code, expected in done.err) == (2, True), done


async def test_requests_that_mean_nothing_are_refused(world: World) -> None:
    await world.make((1, 10))
    asked: list[dict[str, Any]] = [
        {"from_time": "2026-01-02T03:04:05"},  # without its zone
        {"from_sequence": 9, "to_sequence": 8},
        {"from_time": "2026-01-02T03:04:05Z", "to_time": "2026-01-02T03:04:05Z"},
        {"from_sequence": 9, "since": 60.0},
        {"subjects": ("a..b",)},
        *({name: wrong} for name, wrong in (("feed", "NONE"), ("incarnation", 7), ("partition", 7))),
    ]
    for each in asked:
        with pytest.raises(UsageError):
            await world.run(**each)


OUTSIDE: list[dict[str, Any]] = [
    {"from_time": "2062-01-02T03:04:05Z"},
    {"to_time": "2002-01-02T03:04:05Z"},
    {"since": 60.0},
    {"from_sequence": 301},
    {"to_sequence": 10},
]


async def test_a_range_outside_the_archive_is_no_success(world: World) -> None:
    world.archive.begin(first=11)
    await world.make((11, 100), (101, 300))
    for asked in OUTSIDE:
        with pytest.raises(UsageError) as caught:
            await world.run(**asked)
        assert "sequences 11 to 300, from 2023-11-14T22:13:20Z to 2023-11-14T22:13:20Z" in caught.value.message
        option = next(iter(asked)).replace("from_time", "since").replace("to_time", "until").replace("_", "-")
        assert caught.value.message.startswith(f"--{option} ")
        with pytest.raises(UsageError):
            await world.preview(**asked)


async def test_a_range_inside_that_holds_no_rows_is_done_though_a_partition_ends_before_it(world: World) -> None:
    world.fill((1, 20), chain=Chain("us-east", "NODES", 0, 1))
    world.fill((1, 100), (201, 300))
    for first in (101, 301):
        deleted = {"ledger": Ledger({Reason.DELETED: 100}), "tip": Tip.of(message(first + 99))}
        world.archive.put([], SequenceRange(first, first + 99), **deleted)
    await world.make()
    for asked in (
        {"from_sequence": 120, "to_sequence": 180},
        {"from_time": at(120), "to_time": at(180)},
        {"from_time": at(350)},
        {"subjects": ("nowhere.>",)},
    ):
        result = await world.run(**asked)
        assert (result.finished, result.rows) == (True, 0)
    assert (await world.run(from_sequence=290)).rows == 11


# Refused targets and archives


async def test_a_missing_target_is_refused_or_made_as_it_was(world: World) -> None:
    kept = {"subjects": [f"{world.target}.>"], "storage": "memory", "max_age": 86_400_000_000_000}
    more = {"name": "NODES", "republish": {"src": ">", "dest": "copy.>"}, "metadata": {"_nats.ver": "2.9"}}
    world.archive.documents.create_stream(CHAIN, StreamDocument({**kept, **more, "num_replicas": 1}, "t0", None))
    world.archive.documents.create_chain(CHAIN, ChainDocument((), 1, 1))
    world.archive.put([replace(m, subject=f"{world.target}.a".encode()) for m in rows_of(1, 50)])
    await refused(world, "E-TARGET-MISSING", prefix="")
    assert (await world.preview(prefix="")).template.left_out == ("republish",)
    assert await stream_info(world.client, world.target) is None
    await world.run(ReplayOptions(create=True), prefix="")
    info = await stream_info(world.client, world.target)
    assert (info.messages, {name: info.config[name] for name in kept}) == (50, kept)
    assert "republish" not in info.config


@pytest.mark.parametrize("config", [{"sealed": True}, {"no_ack": True}, {"mirror": {"name": "OTHER"}, "subjects": []}])
async def test_targets_that_break_a_promise_are_refused(world: World, config: dict[str, Any]) -> None:
    world.fill((1, 20))
    if "sealed" in config:
        await world.make()
        sealed = {"name": world.target, "subjects": [f"{world.target}.>"], "storage": "memory", **config}
        await world.client.api(f"STREAM.UPDATE.{world.target}", sealed)
    else:
        await world.make(**config, **dict.fromkeys(("allow_atomic", "allow_batched"), "mirror" not in config))
    assert isinstance(await refused(world, "E-TARGET"), ConfigError)


async def test_late_rows_are_no_loss_before_the_union_either(world: World) -> None:
    """The segment 1..40 had not read 1..30; another holds 1..20 of them."""
    gone = {"ledger": Ledger({Reason.GONE_BEFORE_READ: 30}), "unread": SequenceRange(1, 30)}
    world.archive.put(rows_of(31, 40), SequenceRange(1, 40), **gone)
    world.archive.put(rows_of(1, 20))
    await world.make()
    assert "kept 30 of 40 messages (gone_before_read 10)" in (await refused(world, "E-REPLAY-LOSSY")).message
    await world.run(to_sequence=20)  # the command that `segments verify` offers for late rows
    assert await world.sequences() == list(range(1, 21))


async def test_unread_rows_of_a_damaged_segment_and_a_lost_end_are_holes(world: World) -> None:
    """The segment 1..40 had not read 1..30; damage hides 11..20 of them, and 41..50 of the incarnation are gone."""
    gone = {"ledger": Ledger({Reason.GONE_BEFORE_READ: 30}), "unread": SequenceRange(1, 30)}
    world.archive.put(rows_of(31, 40), SequenceRange(1, 40), **gone)
    for first, level in ((1, 0), (11, 0), (21, 0), (11, 1)):
        world.archive.put(rows_of(first, first + 9), level=level)
    for ref in world.archive.store.list(CHAIN):
        if ref.coverage.first == 11:
            spoil(world, ref)
    following = StreamDocument({"name": "NODES"}, "2026-11-21T10:00:00Z", {0: 50})
    world.archive.documents.create_stream(CHAIN.next_incarnation(), following)
    await world.make()
    assert "no segment covers 11..20, 41..50" in (await refused(world, "E-REPLAY-HOLE", incarnation=0)).message
    await world.run(ReplayOptions(skip_holes=True, allow_lossy=True), incarnation=0)
    assert await world.sequences() == [*range(1, 11), *range(21, 41)]


@pytest.mark.parametrize(("bad", "asked"), [(1, 150), (1, 201), (2, 250), (0, 101)])
async def test_damage_is_a_hole_and_may_be_as_new_as_the_moment(world: World, bad: int, asked: int) -> None:
    world.fill((1, 100), (101, 200), (201, 300))
    spoil(world, world.archive.store.list(CHAIN)[bad])
    await world.make()
    error = await refused(world, "E-REPLAY-HOLE", from_time=at(asked))
    assert str(SequenceRange(100 * bad + 1, 100 * bad + 100)) in error.message
    if asked != 250:
        await world.run(from_time=at(260))
        assert await world.sequences() == list(range(260, 301))
    else:
        await world.run(ReplayOptions(skip_holes=True))
        assert await world.sequences() == list(range(1, 201))


async def test_damage_is_named_and_a_gone_segment_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.fill((1, 100), (101, 200))
    rows = world.archive.rows[CHAIN]
    refs = [*world.archive.store.list(CHAIN), *(world.archive.put(rows, level=n) for n in (1, 2))]
    for ref in refs:
        spoil(world, ref)
    with raises_code(DataError, "E-SEG-CORRUPT", 3) as caught:
        await world.preview()
    assert all(ref.key in caught.value.message for ref in refs)
    assert "floe segments verify -c " in caught.value.hint
    monkeypatch.setattr(world.archive.store, "footer", raising(SegmentGone("x")))
    with raises_code(Unavailable, "E-SEG-GONE", 75):
        await world.preview()


# Replays that were stopped, are not alone, or write into the lost source


async def test_the_same_command_again_does_nothing(world: World) -> None:
    await world.make((1, 20))
    await world.run()
    again = await world.run()
    assert (again.was_done, again.rows, again.rows_now) == (True, 20, 0)
    await refused(world, "E-TARGET-NOT-EMPTY", ReplayOptions(again=True))
    await world.run(ReplayOptions(again=True, append=True))
    assert await world.sequences() == [*range(1, 21), *range(1, 21)]


@asynccontextmanager
async def under_way(world: World, rate: int, **asked: Any) -> AsyncIterator[asyncio.Task[ReplayResult]]:
    """A slow replay that has stored something, stopped at the end of the block."""
    work, stop = world.replay(ReplayOptions(pace=Pace(rate)), **asked), Stop()
    async with work.open_connection() as client:
        running = asyncio.create_task(work.run(client, stop))
        await soon(lambda: count_in(world.client, world.target))
        yield running
        stop.set()
        assert not (await running).finished


async def test_a_stopped_replay_resumes_to_its_former_end_without_a_repeat(world: World) -> None:
    await world.make((1, 700), (701, 1400), (1401, 2500))
    ten_years = 10 * 365 * 86400.0
    async with under_way(world, 400, since=ten_years) as stopped:
        pass
    result = await stopped
    assert 0 < len(await world.sequences()) < 2500
    assert (result.rows_now, result.bytes) == (0, 0), "its one intent is open"
    refs = world.archive.store.list(CHAIN)
    world.archive.put(world.archive.rows[CHAIN], level=1)
    for ref in refs:
        world.archive.store.delete(ref)
    world.fill((2501, 2600))
    went_on = await world.run(since=ten_years)
    assert await world.sequences() == list(range(1, 2501))
    whole = await world.run(ReplayOptions(again=True, append=True), to_sequence=2500)
    assert (went_on.rows, went_on.rows_now, went_on.bytes) == (2500, 2500, whole.bytes)


async def test_another_that_runs_for_long_is_refused(world: World) -> None:
    await world.make((1, 2500))
    async with under_way(world, 50):
        error = await refused(world, "E-REPLAY-RUNS")
    assert "a replay by " in error.message
    assert error.hint.startswith("wait until it is done, or stop it there; then:\nfloe replay -c ")


async def test_no_hint_stops_an_ingress_for_a_replay_that_is_refused_then(world: World) -> None:
    world.fill((1, 20))
    asked = {"target": world.centre.target, "prefix": world.centre.target}
    async with world.centre.running():
        await world.centre.carried(world.client, 20)
        error = await refused(world, "E-REPLAY-INGRESS", **asked)
        work = world.replay(**asked)
        async with work.open_connection() as client:
            planned = await work.check(client, await work.preview(client))
    assert "stop" not in error.hint
    assert (planned.code, planned.message, planned.hint) == (error.code, error.message, error.hint)


async def test_ingress_that_is_about_to_carry_is_not_overtaken(world: World) -> None:
    """It holds the lease, and there is no state of the target yet."""
    await world.make((1, 20))
    bucket = await KeyValue(world.client, world.centre.lease_bucket, ttl=2).ensure()
    lease = await Leases(bucket, "central/a/1/x", 2, SystemClock()).acquire(state_key("ingress", world.target))
    keeping = asyncio.create_task(lease.run_renewals())
    work = world.replay()
    async with work.open_connection() as client:
        planned = await work.check(client, await work.preview(client))
    error = await refused(world, "E-REPLAY-RUNS")
    keeping.cancel()
    assert (planned.code, planned.message, planned.hint) == (error.code, error.message, error.hint)
    assert "ingress by " in error.message
    assert f"us-east/NODES --target {world.target}" in error.hint


async def test_a_dry_run_touches_nothing(world: World) -> None:
    world.fill((1, 100), (101, 200), (301, 400))
    world.archive.documents.accept_gap(CHAIN, AcceptedGap(SequenceRange(221, 240)))
    view = await world.preview(from_sequence=50)
    document = view.as_json()
    shown = "\n".join(view.lines())
    for hole in ("201..220", "241..300"):
        assert f"hole (--skip-holes): us-east/NODES/0000/0 {hole}" in shown
    assert "accepted gap: us-east/NODES/0000/0 221..240" in shown
    assert (document["plan"]["rows"], document["plan"]["exact"], document["target"]) == (251, False, None)
    for bucket in (world.centre.state_bucket, world.centre.lease_bucket):
        assert await stream_info(world.client, f"KV_{bucket}") is None


async def test_the_first_replay_or_drill_makes_buckets_as_ingress_or_egress_would(world: World) -> None:
    """Also if its own target has one replica, and that of ingress does not exist yet."""
    create = {"subjects": ["fleet.>"], "replicas": 3}
    drilling = Centre(world.centre.folder, world.archive, world.centre.url, create=create)
    world.centre.having(create=create)
    await world.make((1, 10))
    assert (await world.run()).finished
    await ScratchStreams(world.client, drilling.settings().ingress, "", SystemClock(), Progress()).remove_leftovers()
    for bucket in (world.centre.lease_bucket, world.centre.state_bucket, drilling.lease_bucket):
        assert (await stream_info(world.client, f"KV_{bucket}")).config["num_replicas"] == 3

    await place(world.client, {"name": "SOURCE", "subjects": ["SOURCE.>"], "num_replicas": 3})
    two: dict[str, Any] = {"kv_replicas": 2}
    for feed, keys, expected in (("SOURCE", {}, 3), ("GONE", {}, 1), ("SOURCE", two, 2)):
        settings = EgressSettings(feeds=({"stream": feed},), **keys)
        assert await kv_replicas(world.client, settings, world.target) == expected
    assert await kv_replicas(world.client, EgressSettings(), "SOURCE") == 3
