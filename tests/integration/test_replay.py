"""Replay of an archive into a stream: ranges, filters, levels, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.chain import Chain
from common.errors import ConfigError, UsageError
from common.jetstream.api import stream_info
from common.segments.documents import ChainDocument, StreamDocument
from common.segments.segment import Ledger, Reason
from common.sequences import SequenceRange
from ingress.replay.request import ReplayOptions
from tests.support.basics import PATIENCE
from tests.support.ingress import CHAIN, arrived, rows_of
from tests.support.replay import STEP_NS, World, refused
from tests.support.segments import START_NS

pytestmark = [pytest.mark.servers, pytest.mark.simulated]


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
        ({"to_sequence": 3}, range(1, 4)),
        ({"from_sequence": 100, "to_sequence": 100}, range(100, 101)),
        ({"to_sequence": 5, "subjects": ("nodes.1", "nodes.3")}, [1, 3]),
        ({"subjects": ("nowhere.>",)}, []),
        ({"from_sequence": 99, "to_sequence": 106, "subjects": ("*.2",)}, [100]),
    ],
)
async def test_ranges_and_subjects(world: World, asked: dict[str, Any], expected: Any) -> None:
    world.fill((1, 100), (101, 200), (201, 300))
    await world.make()
    result = await world.run(**asked)
    assert result.finished
    assert await world.sequences() == list(expected)
    assert result.rows == len(list(expected))


async def test_times_are_from_and_up_to(world: World) -> None:
    world.fill((1, 100), (101, 200), (201, 300))
    await world.make()
    from datetime import UTC, datetime

    def text(timestamp_ns: int) -> str:
        whole = datetime.fromtimestamp(timestamp_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        return f"{whole}.{timestamp_ns % 10**9:09d}Z"

    await world.run(from_time=text(START_NS + 120 * STEP_NS), to_time=text(START_NS + 230 * STEP_NS))
    assert await world.sequences() == list(range(120, 230))


@pytest.mark.parametrize(
    "asked",
    [
        {"from_time": "2026-01-02T03:04:05"},  # without its zone (B23)
        {"from_sequence": 9, "to_sequence": 8},  # B22
        {"from_time": "2026-01-02T03:04:05Z", "to_time": "2026-01-02T03:04:05Z"},
        {"from_sequence": 9, "since": 60.0},
        {"subjects": ("a..b",)},
        {"feed": "NONE"},
        {"incarnation": 7},
        {"partition": 7},
    ],
)
async def test_requests_that_mean_nothing_are_refused(world: World, asked: dict[str, Any]) -> None:
    world.fill((1, 10))
    await world.make()
    with pytest.raises(UsageError):
        await world.run(**asked)


async def test_levels_are_mixed_by_the_cover(world: World) -> None:
    world.fill((1, 100), (101, 200), (201, 300), (301, 400))
    rows = world.archive.rows[CHAIN]
    world.archive.put(rows[:200], level=1)
    world.archive.put(rows[100:300], level=2)
    await world.make()
    await world.run(from_sequence=50, to_sequence=350)
    assert await world.sequences() == list(range(50, 351))


async def test_partitions_take_turns_and_incarnations_follow(world: World) -> None:
    chains = [Chain("us-east", "NODES", k, p) for k in (0, 1) for p in (0, 1)]
    for chain in chains:
        previous = {0: 30, 1: 30} if chain.incarnation else None
        world.archive.begin(chain, previous=previous)
        world.fill((1, 10), (11, 30), chain=chain)
    await world.make()
    await world.run()
    held = await world.held()
    for chain in chains:
        assert [s for c, s in held if c == str(chain)] == list(range(1, 31))
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


async def test_what_lies_behind_the_end_of_an_incarnation_is_not_replayed(world: World) -> None:
    world.fill((1, 20))
    following = Chain("us-east", "NODES", 1)
    world.archive.begin(following, previous={0: 15})
    world.fill((1, 5), chain=following)
    await world.make()
    await world.run()
    assert await world.sequences() == [*range(1, 16), *range(1, 6)]


# Refusals


async def test_a_target_that_is_not_empty_is_refused_unless_told(world: World) -> None:
    world.fill((1, 20))
    await world.make()
    await world.client.request_raw(f"{world.target}.x".encode(), b"theirs", None, timeout=PATIENCE)
    error = await refused(world, "E-TARGET-NOT-EMPTY")
    assert "--append" in error.hint
    await world.run(ReplayOptions(append=True))
    found = await arrived(world.client, world.target)
    assert [each.sequence for each in found] == list(range(1, 22))
    assert [each.message.sequence for each in found[1:]] == list(range(1, 21))


async def test_a_purged_target_is_empty(world: World) -> None:
    world.fill((1, 20))
    await world.make()
    await world.client.request_raw(f"{world.target}.x".encode(), b"theirs", None, timeout=PATIENCE)
    await world.client.api(f"STREAM.PURGE.{world.target}")
    await world.run()
    assert await world.sequences() == list(range(1, 21))


async def test_a_missing_target_is_refused_or_made_as_it_was(world: World) -> None:
    world.archive.documents.create_stream(
        CHAIN,
        StreamDocument(
            {
                "name": "NODES",
                "subjects": [f"{world.target}.>"],
                "storage": "memory",
                "retention": "limits",
                "num_replicas": 1,
                "max_age": 86_400_000_000_000,
                "max_bytes": -1,
                "republish": {"src": ">", "dest": "copy.>"},
                "metadata": {"_nats.ver": "2.9"},
            },
            "t0",
        ),
    )
    world.archive.documents.create_chain(CHAIN, ChainDocument((), 1, 1))
    world.archive.put([replace(m, subject=f"{world.target}.a".encode()) for m in rows_of(1, 50)], chain=CHAIN)
    error = await refused(world, "E-TARGET-MISSING", prefix="")
    assert "--create" in error.hint
    view = await world.look(prefix="")
    assert view.recipe is not None
    assert view.recipe.left_out == ("republish",)
    assert await stream_info(world.client, world.target) is None
    await world.run(ReplayOptions(create=True), prefix="")
    info = await stream_info(world.client, world.target)
    assert info is not None
    assert (info.messages, info.config["max_age"], info.config["storage"]) == (50, 86_400_000_000_000, "memory")
    assert info.config["subjects"] == [f"{world.target}.>"]
    assert "republish" not in info.config


@pytest.mark.parametrize("config", [{"sealed": True}, {"no_ack": True}, {"mirror": {"name": "OTHER"}, "subjects": []}])
async def test_targets_that_break_a_promise_are_refused(world: World, config: dict[str, Any]) -> None:
    world.fill((1, 20))
    if "sealed" in config:
        await world.make()
        await world.client.api(
            f"STREAM.UPDATE.{world.target}",
            {"name": world.target, "subjects": [f"{world.target}.>"], "storage": "memory", "sealed": True},
        )
    else:
        extra = {"allow_atomic": False, "allow_batched": False} if "mirror" in config else {}
        await world.make(**config, **extra)
    with pytest.raises(ConfigError) as caught:
        await world.run()
    assert caught.value.code == "E-TARGET"


async def test_a_copy_is_no_backup(world: World) -> None:
    world.archive.begin()
    world.archive.put(
        rows_of(1, 20), SequenceRange(1, 100), ledger=Ledger({Reason.SAMPLED_OUT: 70, Reason.DELETED: 10})
    )
    await world.make()
    error = await refused(world, "E-REPLAY-LOSSY")
    assert "kept 20 of 90" in error.message
    await world.run(ReplayOptions(allow_lossy=True))
    assert await world.sequences() == list(range(1, 21))


async def test_what_came_late_is_no_loss_before_it_is_united_either(world: World) -> None:
    """The segment 1..40 had not read 1..30; another holds 1..20 of them."""
    gone = {"ledger": Ledger({Reason.GONE_BEFORE_READ: 30}), "unread": SequenceRange(1, 30)}
    world.archive.put(rows_of(31, 40), SequenceRange(1, 40), **gone)
    world.archive.begin()
    world.archive.put(rows_of(1, 20))
    await world.make()
    error = await refused(world, "E-REPLAY-LOSSY")
    assert "kept 30 of 40 messages (gone_before_read 10)" in error.message
    await world.run(to_sequence=20)  # the command that `segments verify` offers for what came late
    assert await world.sequences() == list(range(1, 21))


async def test_holes_are_named_and_never_skipped_silently(world: World) -> None:
    world.fill((1, 20), (31, 40), (51, 60))
    await world.make()
    error = await refused(world, "E-REPLAY-HOLE")
    assert "21..30, 41..50" in error.message
    await world.run(ReplayOptions(skip_holes=True))
    assert await world.sequences() == [*range(1, 21), *range(31, 41), *range(51, 61)]


async def test_accepted_gaps_are_gone_over(world: World) -> None:
    from common.segments.documents import AcceptedGap

    world.fill((1, 20), (31, 40))
    for gap in (SequenceRange(21, 25), SequenceRange(26, 30)):
        world.archive.documents.accept_gap(CHAIN, AcceptedGap(gap, "test", "me"))
    await world.make()
    await world.run()
    assert await world.sequences() == [*range(1, 21), *range(31, 41)]


async def test_damage_is_gone_round_where_something_else_covers(world: World) -> None:
    world.fill((1, 100), (101, 200), (201, 300))
    rows = world.archive.rows[CHAIN]
    bad = world.archive.put(rows[:250], level=1)
    path = world.archive.folder / bad.key
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 3] ^= 1
    path.write_bytes(bytes(raw))
    await world.make()
    await world.run()
    assert await world.sequences() == list(range(1, 301))


async def test_damage_that_nothing_covers_stops(world: World) -> None:
    world.fill((1, 100), (101, 200))
    ref = world.archive.store.list(CHAIN)[1]
    path = world.archive.folder / ref.key
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 3] ^= 1
    path.write_bytes(bytes(raw))
    await world.make()
    await refused(world, "E-REPLAY-HOLE")
    await world.run(ReplayOptions(skip_holes=True))
    assert await world.sequences() == list(range(1, 101))
