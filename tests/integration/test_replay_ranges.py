"""What a range means: bounds that contradict, ranges outside the archive, damage, what is read for a part."""

from __future__ import annotations

import random
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from common.chain import Chain
from common.errors import DataError, Unavailable, UsageError
from common.segments.documents import ChainStore
from common.segments.keys import Layout
from common.segments.parquet_guard import SegmentGone
from common.segments.segment import Footer, Ledger, Reason, SegmentRef, Tip
from common.segments.store import SegmentStore
from common.sequences import SequenceRange
from floe import cli
from tests.support.commands import floe
from tests.support.ingress import CHAIN, PREFIX
from tests.support.replay import STEP_NS, World, refused
from tests.support.segments import START_NS, message
from tests.support.stores import CountingObjects

pytestmark = pytest.mark.simulated


def at(sequence: int) -> str:
    """The time of a message of `rows_of`, as it is typed."""
    timestamp_ns = START_NS + sequence * STEP_NS
    whole = datetime.fromtimestamp(timestamp_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{whole}.{timestamp_ns % 10**9:09d}Z"


# Bounds that contradict


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("--from-sequence 5", "--from-time 2026-01-02T03:04:05Z"),
        ("--from-sequence 5", "--from-time 1h"),
        ("--to-sequence 5", "--to-time 2026-01-02T03:04:05Z"),
    ],
)
@pytest.mark.parametrize("command", ["replay --target BACK", "drill"])
def test_one_bound_of_a_kind(command: str, one: str, other: str, tmp_path: Path) -> None:
    words = shlex.split(f"{command} -c {tmp_path / 'none.yaml'} --site s --feed F {one} {other}")
    done = CliRunner().invoke(cli, words, prog_name="floe")
    assert done.exit_code == 2
    expected = f"expected one of {one.split()[0]} and {other.split()[0]}, found both"
    assert f"error[E-USAGE]: {expected}" in done.stderr


# Ranges outside the archive

OUTSIDE: list[dict[str, Any]] = [
    {"from_time": "2062-01-02T03:04:05Z"},
    {"to_time": "2002-01-02T03:04:05Z"},
    {"from_time": "2002-01-02T03:04:05Z", "to_time": "2002-01-03T03:04:05Z"},
    {"since": 60.0},
    {"from_sequence": 301},
    {"from_sequence": 900, "to_sequence": 999},
    {"to_sequence": 10},
]


@pytest.mark.servers
@pytest.mark.parametrize("asked", OUTSIDE)
async def test_a_range_outside_the_archive_is_no_success(world: World, asked: dict[str, Any]) -> None:
    world.archive.begin(first=11)
    world.fill((11, 100), (101, 300))
    await world.make()
    with pytest.raises(UsageError) as caught:
        await world.run(**asked)
    assert "sequences 11 to 300, from 2023-11-14T22:13:20Z to 2023-11-14T22:13:20Z" in caught.value.message
    option = next(iter(asked)).replace("since", "from_time").replace("_", "-")
    assert caught.value.message.startswith(f"--{option} ")
    with pytest.raises(UsageError):
        await world.look(**asked)


@pytest.mark.servers
async def test_the_command_says_so_too(world: World) -> None:
    world.fill((1, 300))
    await world.make()
    words = shlex.split(world.replay(from_time="2062-01-02T03:04:05Z").request.words())
    done = await floe("replay", "-c", str(world.centre.write()), *words)
    assert done.code == 2
    assert "error[E-USAGE]: --from-time 2062-01-02T03:04:05Z: expected a range that meets" in done.err


@pytest.mark.servers
async def test_a_range_that_one_partition_reaches_is_fine(world: World) -> None:
    world.fill((1, 300))
    world.fill((1, 20), chain=Chain("us-east", "NODES", 0, 1))
    await world.make()
    assert (await world.run(from_sequence=290)).rows == 11


@pytest.mark.servers
async def test_a_range_inside_that_holds_no_rows_is_done(world: World) -> None:
    world.fill((1, 100))
    tip = message(200)
    world.archive.put([], SequenceRange(101, 200), ledger=Ledger({Reason.DELETED: 100}), tip=Tip.of(tip))
    world.fill((201, 300))
    world.archive.put([], SequenceRange(301, 400), ledger=Ledger({Reason.DELETED: 100}), tip=Tip.of(message(400)))
    await world.make()
    for asked in (
        {"from_sequence": 120, "to_sequence": 180},
        {"from_time": at(120), "to_time": at(180)},
        {"from_time": at(350)},
        {"subjects": ("nowhere.>",)},
    ):
        result = await world.run(**asked)
        assert (result.finished, result.rows) == (True, 0)


# Damage, and what vanishes


def spoil(world: World, ref: SegmentRef) -> None:
    path = world.archive.folder / ref.key
    path.write_bytes(path.read_bytes()[:-100] + b"\0" * 100)


@pytest.mark.servers
@pytest.mark.parametrize(("bad", "asked"), [(1, 150), (1, 201), (2, 250), (0, 101)])
async def test_what_is_damaged_may_be_as_new_as_the_moment(world: World, bad: int, asked: int) -> None:
    world.fill((1, 100), (101, 200), (201, 300))
    spoil(world, world.archive.store.list(CHAIN)[bad])
    await world.make()
    error = await refused(world, "E-REPLAY-HOLE", from_time=at(asked))
    assert str(SequenceRange(100 * bad + 1, 100 * bad + 100)) in error.message
    if asked != 250:
        await world.run(from_time=at(260))
        assert await world.sequences() == list(range(260, 301))


@pytest.mark.servers
async def test_damage_behind_damage_is_told_as_damage(world: World) -> None:
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
    command = shlex.split(caught.value.hint.split("floe ")[1])
    command[command.index("-c") + 1] = str(world.centre.write())
    done = await floe(*command)
    assert done.code == 3, done


@pytest.mark.servers
async def test_what_vanishes_time_and_again_is_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.fill((1, 100))
    rows = world.archive.rows[CHAIN]
    for level in (1, 2, 3):
        world.archive.put(rows, level=level)

    def footer(ref: SegmentRef) -> Footer:
        raise SegmentGone(ref.key)

    monkeypatch.setattr(world.archive.store, "footer", footer)
    with pytest.raises(Unavailable) as caught:
        await world.look()
    assert (caught.value.exit_code, caught.value.code) == (75, "E-SEG-GONE")


# What is read for a part


@pytest.mark.servers
@pytest.mark.parametrize("by", ["sequence", "time"])
async def test_of_one_segment_only_row_groups_of_the_range_are_read(
    world: World, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.segments.writer.row_group_bytes", lambda _level: 1024 * 1024)
    noise = random.Random(1)
    ref = world.archive.put([message(s, noise.randbytes(4000)) for s in range(1, 2001)])
    with world.archive.store.open_part(ref) as reader:
        assert len(reader.row_groups) >= 6
    await world.make()
    objects = CountingObjects(world.archive.folder)
    world.archive.store = SegmentStore(objects, Layout(PREFIX))
    world.archive.documents = ChainStore(objects, Layout(PREFIX))
    bounds: tuple[Any, Any] = (901, 920) if by == "sequence" else (at(901), at(921))
    asked: dict[str, Any] = {f"from_{by}": bounds[0], f"to_{by}": bounds[1]}
    result = await world.run(**asked)
    assert (result.rows, await world.sequences()) == (20, list(range(901, 921)))
    assert ref.size > 7_000_000
    assert objects.read < 0.2 * ref.size, f"{objects.read:,} of {ref.size:,} bytes"
