"""Replay of an archive into a stream: ranges, filters, levels, damage, refusals."""

from __future__ import annotations

import random
import shlex
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from common.chain import Chain
from common.errors import ConfigError, DataError, Unavailable, UsageError
from common.jetstream.api import stream_info
from common.segments.documents import ChainDocument, ChainStore, StreamDocument
from common.segments.keys import Layout
from common.segments.parquet_guard import SegmentGone
from common.segments.segment import Ledger, Reason, SegmentRef, Tip
from common.segments.store import SegmentStore
from common.sequences import SequenceRange
from floe import cli
from ingress.replay.request import ReplayOptions
from tests.support.ingress import CHAIN, PREFIX, arrived, rows_of
from tests.support.replay import STEP_NS, World, refused
from tests.support.segments import START_NS, message
from tests.support.stores import CountingObjects, raising

pytestmark = [pytest.mark.servers, pytest.mark.simulated]


def at(sequence: int) -> str:
    """The time of a message of `rows_of`, as it is typed."""
    timestamp_ns = START_NS + sequence * STEP_NS
    whole = datetime.fromtimestamp(timestamp_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{whole}.{timestamp_ns % 10**9:09d}Z"


def spoil(world: World, ref: SegmentRef) -> None:
    path = world.archive.folder / ref.key
    path.write_bytes(path.read_bytes()[:-100] + b"\0" * 100)


async def test_a_whole_feed_comes_back_byte_for_byte(world: World) -> None:
    world.fill((1, 700), (701, 2500))
    await world.make()
    result = await world.run()
    assert (result.finished, result.rows, result.rows_now) == (True, 2500, 2500)
    found = [each.message for each in await arrived(world.client, world.target)]
    prefix = world.target.encode() + b"."
    assert found == [replace(m, subject=prefix + m.subject) for m in world.archive.rows[CHAIN]]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"from_sequence": 150, "to_sequence": 250}, range(150, 251)),
        ({"from_sequence": 290}, range(290, 301)),
        ({"to_sequence": 5, "subjects": ("nodes.1", "nodes.3")}, [1, 3]),
        ({"from_sequence": 99, "to_sequence": 106, "subjects": ("*.2",)}, [100]),
        ({"from_time": at(120), "to_time": at(230)}, range(120, 230)),
    ],
)
async def test_ranges_and_subjects(world: World, asked: dict[str, Any], expected: Any) -> None:
    world.fill((1, 100), (101, 200), (201, 300))
    await world.make()
    result = await world.run(**asked)
    assert (result.finished, result.rows) == (True, len(expected))
    assert await world.sequences() == list(expected)


async def test_levels_are_mixed_by_the_cover_around_what_is_damaged(world: World) -> None:
    world.fill((1, 100), (101, 200), (201, 300), (301, 400))
    rows = world.archive.rows[CHAIN]
    for last, level in ((200, 1), (300, 2), (350, 3)):
        ref = world.archive.put(rows[100 * (level - 1) : last], level=level)
    spoil(world, ref)
    await world.make()
    await world.run(from_sequence=50, to_sequence=350)
    assert await world.sequences() == list(range(50, 351))


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
    view = await world.look(from_sequence=5, to_sequence=9)
    assert any("0001" in note for note in view.notes)
    await world.run(from_sequence=5, to_sequence=9)
    assert await world.held() == [("us-east/NODES/0001/0", s) for s in range(5, 10)]
    await world.run(ReplayOptions(append=True), from_sequence=5, to_sequence=6, incarnation=0)
    assert (await world.held())[5:] == [("us-east/NODES/0000/0", s) for s in (5, 6)]


@pytest.mark.parametrize("by", ["sequence", "time"])
async def test_of_one_segment_only_row_groups_of_the_range_are_read(
    world: World, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.segments.writer.row_group_bytes", lambda _level: 1024 * 1024)
    noise = random.Random(1)
    ref = world.archive.put([message(s, noise.randbytes(4000)) for s in range(1, 2001)])
    await world.make()
    objects = CountingObjects(world.archive.folder)
    world.archive.store = SegmentStore(objects, Layout(PREFIX))
    world.archive.documents = ChainStore(objects, Layout(PREFIX))
    bounds: tuple[Any, Any] = (901, 920) if by == "sequence" else (at(901), at(921))
    asked: dict[str, Any] = {f"from_{by}": bounds[0], f"to_{by}": bounds[1]}
    assert (await world.run(**asked)).rows == 20
    assert await world.sequences() == list(range(901, 921))
    assert objects.read < 0.2 * ref.size, f"{objects.read:,} of {ref.size:,} bytes"


# Requests


def test_one_bound_of_a_kind(tmp_path: Path) -> None:
    for command in ("replay --target BACK", "drill"):
        for bound in ("from", "to"):
            line = f"{command} -c {tmp_path}/none.yaml --site s --feed F --{bound}-sequence 5 --{bound}-time 1h"
            done = CliRunner().invoke(cli, shlex.split(line), prog_name="floe")
            expected = f"error[E-USAGE]: expected one of --{bound}-sequence and --{bound}-time, found both"
            assert (done.exit_code, expected in done.stderr) == (2, True), line


async def test_requests_that_mean_nothing_are_refused(world: World) -> None:
    world.fill((1, 10))
    await world.make()
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
    world.fill((11, 100), (101, 300))
    await world.make()
    for asked in OUTSIDE:
        with pytest.raises(UsageError) as caught:
            await world.run(**asked)
        assert "sequences 11 to 300, from 2023-11-14T22:13:20Z to 2023-11-14T22:13:20Z" in caught.value.message
        option = next(iter(asked)).replace("since", "from_time").replace("_", "-")
        assert caught.value.message.startswith(f"--{option} ")
        with pytest.raises(UsageError):
            await world.look(**asked)


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


# Targets and archives that are refused


async def test_a_missing_target_is_refused_or_made_as_it_was(world: World) -> None:
    kept = {"subjects": [f"{world.target}.>"], "storage": "memory", "max_age": 86_400_000_000_000}
    more = {"name": "NODES", "republish": {"src": ">", "dest": "copy.>"}, "metadata": {"_nats.ver": "2.9"}}
    world.archive.documents.create_stream(CHAIN, StreamDocument({**kept, **more, "num_replicas": 1}, "t0"))
    world.archive.documents.create_chain(CHAIN, ChainDocument((), 1, 1))
    world.archive.put([replace(m, subject=f"{world.target}.a".encode()) for m in rows_of(1, 50)])
    await refused(world, "E-TARGET-MISSING", prefix="")
    view = await world.look(prefix="")
    assert view.recipe is not None
    assert view.recipe.left_out == ("republish",)
    assert await stream_info(world.client, world.target) is None
    await world.run(ReplayOptions(create=True), prefix="")
    info = await stream_info(world.client, world.target)
    assert info is not None
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
        extra = {"allow_atomic": False, "allow_batched": False} if "mirror" in config else {}
        await world.make(**config, **extra)
    with pytest.raises(ConfigError) as caught:
        await world.run()
    assert caught.value.code == "E-TARGET"


async def test_what_came_late_is_no_loss_before_it_is_united_either(world: World) -> None:
    """The segment 1..40 had not read 1..30; another holds 1..20 of them."""
    gone = {"ledger": Ledger({Reason.GONE_BEFORE_READ: 30}), "unread": SequenceRange(1, 30)}
    world.archive.put(rows_of(31, 40), SequenceRange(1, 40), **gone)
    world.archive.put(rows_of(1, 20))
    await world.make()
    error = await refused(world, "E-REPLAY-LOSSY")
    assert "kept 30 of 40 messages (gone_before_read 10)" in error.message
    await world.run(to_sequence=20)  # the command that `segments verify` offers for what came late
    assert await world.sequences() == list(range(1, 21))


@pytest.mark.parametrize(("bad", "asked"), [(1, 150), (1, 201), (2, 250), (0, 101)])
async def test_what_is_damaged_is_a_hole_and_may_be_as_new_as_the_moment(world: World, bad: int, asked: int) -> None:
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


async def test_damage_behind_damage_is_told_as_damage_and_what_vanishes_is_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.fill((1, 100), (101, 200))
    rows = world.archive.rows[CHAIN]
    refs = [*world.archive.store.list(CHAIN), *(world.archive.put(rows, level=n) for n in (1, 2))]
    for ref in refs:
        spoil(world, ref)
    with pytest.raises(DataError) as caught:
        await world.look()
    assert (caught.value.exit_code, caught.value.code) == (3, "E-SEG-CORRUPT")
    assert all(ref.key in caught.value.message for ref in refs)
    assert "floe segments verify -c " in caught.value.hint
    monkeypatch.setattr(world.archive.store, "footer", raising(SegmentGone("x")))
    with pytest.raises(Unavailable) as gone:
        await world.look()
    assert (gone.value.exit_code, gone.value.code) == (75, "E-SEG-GONE")
