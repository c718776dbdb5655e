"""Where the copy of a feed begins: resolved once, and never again by a restart."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from common.chain import Chain
from common.errors import DataError
from common.jetstream.client import FloeClient
from common.settings.service import StartSettings
from ingress.chains.starts import Start, Starts
from tests.support.basics import soon
from tests.support.clock import ManualClock
from tests.support.ingress import CHAIN, Archive, Centre, check_exact, count_in, rows_of
from tests.support.segments import START_NS

LATER = CHAIN.next_incarnation()
OTHER = Chain("eu-west", "NODES")
PACE_NS = 1_000_001  # between two messages of the archive


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    archive = Archive(tmp_path / "store")
    archive.put(rows_of(1, 10))
    archive.put(rows_of(11, 20))
    return archive


def moment(sequence: int) -> str:
    """When the message of that sequence was stored, up to a microsecond before."""
    seconds = (START_NS + sequence * PACE_NS) // 1000 / 1_000_000
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def start(archive: Archive, *, now: float = 2e9, **keys: Any) -> Any:
    """Resolves for a chain as ingress does."""
    starts = Starts("FLEET", archive.store, archive.documents, ManualClock(now))
    settings = StartSettings.model_validate(keys)

    def resolve(chain: Chain = CHAIN, end: int | None = None, positions: Any = None, first: int = 1) -> int:
        return starts.resolve(chain, settings, first, end, positions or {})

    return resolve


@pytest.mark.servers
@pytest.mark.simulated
async def test_a_restart_begins_a_copy_nowhere_else(centre: Centre, client: FloeClient, archive: Archive) -> None:
    centre.target_settings["sources"][0] |= {"start_time": moment(14)}
    async with centre.running():
        states = await centre.state(client)

        async def begun() -> bool:
            state = (await states.load()).state
            return state is not None and state.checkpoint.positions.get(CHAIN, 0) == 21

        await soon(begun)
        assert await count_in(client, centre.target) == 7
    archive.put(rows_of(21, 30))
    async with centre.running():
        archive.rows[CHAIN] = rows_of(14, 30)
        check_exact(await centre.carried(client, 17), archive, centre.prefix)


def test_a_sequence_is_of_the_first_incarnation_and_without_a_key_all_is_carried(archive: Archive) -> None:
    assert start(archive)() == 1
    resolve = start(archive, start_sequence=15)
    assert (resolve(), resolve(LATER), resolve(first=18), resolve(end=9)) == (15, 1, 18, 10)


def test_a_start_that_is_written_down_stays_whatever_archive_clock_and_file_say_later(archive: Archive) -> None:
    now = (START_NS + 16 * PACE_NS) / 1e9
    assert start(archive, now=now, start_delta="5ms")() in (11, 12)
    assert start(archive, now=2e9, start_delta="5ms")() in (11, 12)
    assert start(archive, start_at_end=True)() in (11, 12)


def test_a_new_feed_that_begins_at_the_end_misses_nothing_that_comes_while_ingress_is_away(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "empty")
    archive.begin()
    assert start(archive, start_at_end=True)() == 1
    archive.put(rows_of(1, 10))

    assert start(archive, start_at_end=True)() == 1


def test_the_end_is_of_all_incarnations_there_are_and_later_ones_are_carried_whole(archive: Archive) -> None:
    archive.put(rows_of(1, 7, LATER), chain=LATER)
    archive.documents.write_tail(LATER, 3)  # a hint that is old
    resolve = start(archive, start_at_end=True)

    assert (resolve(end=20), resolve(LATER, positions={CHAIN: 21})) == (21, 8)
    assert resolve(LATER.next_incarnation(), positions={CHAIN: 21, LATER: 8}) == 1


@pytest.mark.parametrize("claimed", [21, 1 << 60])
def test_a_copy_begins_behind_what_is_archived_whatever_a_tail_claims(archive: Archive, claimed: int) -> None:
    archive.documents.write_tail(CHAIN, claimed)

    assert start(archive, start_at_end=True)() == 21


def test_a_moment_leaves_out_whole_incarnations_that_were_before_it(archive: Archive) -> None:
    archive.put(rows_of(101, 120, LATER), chain=LATER)
    resolve = start(archive, start_time=moment(110))

    assert (resolve(end=20), resolve(LATER, positions={CHAIN: 21}, first=101)) == (21, 110)


def test_a_moment_that_nothing_has_reached_is_waited_for(archive: Archive) -> None:
    resolve = start(archive, start_time="2100-01-01T00:00:00Z")

    assert (resolve(), resolve(end=20)) == (0, 21)


def test_the_keys_are_ignored_where_the_copy_has_begun_already(archive: Archive) -> None:
    resolve = start(archive, start_at_end=True)

    assert resolve(LATER, positions={CHAIN: 5}) == 1
    assert resolve(positions={LATER: 5}) == 1
    assert resolve(positions={OTHER: 5}) == 21


def test_a_spoiled_start_is_never_acted_on(archive: Archive) -> None:
    key = archive.store.layout.start_document("FLEET", "us-east", "NODES")
    for spoiled in (b"{", b'{"format_version":1,"ends":{"x":-1}}', b'{"format_version":2}'):
        archive.objects.put(key, spoiled)
        with pytest.raises(DataError, match=r"start\.json"):
            start(archive, start_at_end=True)()


def test_a_start_reads_back_as_it_was_written() -> None:
    for written in (Start(1), Start(1, -5), Start(1, sequence=7), Start(1, ends={"a/b/0000/0": 9})):
        assert Start.from_json(written.to_json()) == written
