"""Late or missing documents, store or state of a chain; the beginning of the copy of a feed, which is resolved once,
and never again by a restart.
"""

import asyncio
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from common.archive.documents import AcceptedGap, ChainStore
from common.archive.keys import Layout
from common.archive.store import SegmentStore
from common.chain import Chain
from common.errors import DataError, FloeError, Refused, Unavailable
from common.nats.client import FloeClient
from common.objects.local import LocalObjects
from common.objects.port import ObjectInfo
from common.sequences import SequenceRange
from common.settings.service import StartSettings
from ingress import metrics
from ingress.chains.plan import plan_from_listings
from ingress.chains.sources import StartResolver
from tests.integration.test_chain_turns import Centre
from tests.support.basics import PATIENCE, counted, soon
from tests.support.clock import ManualClock
from tests.support.ingress import CHAIN, OTHER, PREFIX, Archive, check_exact, count_in, rows_of
from tests.support.ingress import Centre as Service
from tests.support.segments import START_NS
from tests.support.stores import FaultyStore

PART = Chain("us-east", "NODES", 0, 1)
LATER = CHAIN.next_incarnation()
PACE_NS = 1_000_001  # between two messages of the archive
START = Layout(PREFIX).start_document("FLEET", "us-east", "NODES")


def moment(sequence: int) -> str:
    """The time at which the message of that sequence was stored, up to a microsecond before."""
    seconds = (START_NS + sequence * PACE_NS) // 1000 / 1_000_000
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    archive = Archive(tmp_path / "store")
    archive.put(rows_of(1, 100))
    return archive


# Documents and segments that come late


async def test_nothing_is_read_before_the_stored_positions_are_known(archive: Archive) -> None:
    archive.put(rows_of(1, 30, PART), chain=PART)
    centre = Centre(archive, start_at_end=True)
    async with centre.running(is_known=False):
        for _ in range(5):
            await centre.look()
            centre.prefetcher.wake(CHAIN)
            await asyncio.sleep(0.02)
        assert (tuple(centre.prefetcher.ahead), centre.prefetcher.positions, centre.threads.busy) == ((), {}, 0)

        centre.stored = {CHAIN: 51}
        centre.prefetcher.reset(centre.stored)
        # By itself: it needs no poll.
        await soon(lambda: centre.stored == {CHAIN: 101, PART: 31})

    assert (centre.messages_of(CHAIN), centre.messages_of(PART), archive.objects.get(START)) == (50, 30, None)


async def test_a_start_is_resolved_by_the_state_then(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, go_on = threading.Event(), threading.Event()

    def slow(chain: Chain) -> int | None:
        reads.set()
        assert go_on.wait(PATIENCE)
        return None

    monkeypatch.setattr(archive.documents, "read_floor", slow)
    centre = Centre(archive, start_at_end=True)
    async with centre.running():
        await centre.look()
        await soon(reads.is_set)
        centre.stored = {CHAIN: 51}
        centre.prefetcher.reset(centre.stored)
        go_on.set()
        await centre.reaches({CHAIN: 101})
    assert (centre.messages_of(CHAIN), archive.objects.get(START)) == (50, None)


# One error of the store


@pytest.mark.parametrize("error", [Unavailable("503"), Refused("no right")])
async def test_an_error_drops_no_start(archive: Archive, monkeypatch: pytest.MonkeyPatch, error: FloeError) -> None:
    centre = Centre(archive, start_sequence=90)
    monkeypatch.setattr(centre.prefetcher, "stopped_recheck_s", 0.0)
    gaps = centre.prefetcher.locator.gaps
    real, asked = gaps.late_segments, []

    def arrived(chain: Chain, position: int) -> Any:
        asked.append(position)
        if len(asked) == 1:
            raise error
        return real(chain, position)

    monkeypatch.setattr(gaps, "late_segments", arrived)
    async with centre.running():
        await centre.look()
        await soon(lambda: asked)
        await centre.prefetcher.apply_decisions()
        await centre.reaches({CHAIN: 101})
    assert (len(asked) >= 2, centre.messages_of(CHAIN)) == (True, 11)


async def test_an_unreadable_stream_json_starves_nobody_and_is_logged_once(
    archive: Archive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    archive.put(rows_of(1, 9, PART), chain=PART)
    archive.begin(LATER, previous={0: 100, 1: 9})
    real, errors = archive.documents.read_stream, [Unavailable("archived"), Refused("no right")]

    def read(chain: Chain) -> Any:
        if chain.incarnation == 1 and errors:
            raise errors[0]
        return real(chain)

    monkeypatch.setattr(archive.documents, "read_stream", read)
    centre = Centre(archive)
    async with centre.running():
        await centre.reaches({CHAIN: 101, PART: 10})
        await centre.look()
        await soon(lambda: "archived" in centre.prefetcher.chains.get(LATER).begin_obstacle)
        assert caplog.text.count("document read failed") == 1
        errors.pop(0)
        await centre.look()
        await soon(lambda: "no right" in centre.prefetcher.chains.get(LATER).begin_obstacle)
        await centre.look()
        assert caplog.text.count("document read failed") == 2
        errors.clear()
        archive.put(rows_of(1, 5, LATER), chain=LATER)
        await centre.reaches({LATER: 6})


async def test_a_refusal_for_a_chain_stops_it_alone(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    archive.put(rows_of(1, 9, PART), chain=PART)
    real = archive.store.list

    def listed(chain: Chain, **limits: Any) -> Any:
        if chain == PART:
            raise Refused("key revoked", code="E-S3-KMS")
        return real(chain, **limits)

    monkeypatch.setattr(archive.store, "list", listed)
    centre = Centre(archive)
    async with centre.running():
        await centre.reaches({CHAIN: 101})
        await soon(lambda: getattr(centre.prefetcher.chains.get(PART).stopped, "code", "") == "E-S3-KMS")
        archive.put(rows_of(101, 110))
        await centre.reaches({CHAIN: 111})


# Searches, and how often they run


def test_an_awaited_moment_is_searched_for_only_in_new_segments(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "store")
    for first in range(1, 101, 10):
        archive.put(rows_of(first, first + 9))
    objects, listed = FaultyStore(LocalObjects(archive.folder)), []

    def noted(real: Any, *args: Any, **kwargs: Any) -> list[ObjectInfo]:
        found = list(real(*args, **kwargs))
        listed.extend(found)
        return found

    objects.on("list", noted)
    layout = Layout(PREFIX)
    store, documents = SegmentStore(objects, layout), ChainStore(objects, layout)  # type: ignore[arg-type]
    starts = StartResolver("FLEET", store, documents, ManualClock())
    settings = StartSettings.model_validate({"start_time": moment(115)})

    def begins() -> int:
        listed.clear()
        return starts.resolve(CHAIN, settings, 1, None, {})

    assert (begins(), len(listed)) == (0, 10)
    archive.put(rows_of(101, 110))
    assert (begins(), len(listed)) == (0, 1)
    archive.put(rows_of(1, 120), level=1)
    assert [(begins(), len(listed)) for _ in range(2)] == [(115, 1), (115, 12)]


async def test_late_messages_are_searched_too(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    centre = Centre(archive, start_time=moment(105))
    starts = centre.prefetcher.locator.starts
    real, asked = starts.resolve, []

    def resolve(*args: Any) -> Any:
        found = real(*args)
        asked.append(found)
        if len(asked) == 1:
            archive.put(rows_of(101, 110))
            centre.prefetcher.chains.set_archived_end(CHAIN, 110)
        return found

    monkeypatch.setattr(starts, "resolve", resolve)
    async with centre.running():
        await centre.reaches({CHAIN: 111})
    assert (asked[0], centre.messages_of(CHAIN)) == (0, 6)


@pytest.mark.parametrize("level", [0, 1])
async def test_a_last_segment_without_a_tail_is_found_in_a_listing_of_its_level(archive: Archive, level: int) -> None:
    centre = Centre(archive)
    async with centre.running():
        await centre.reaches({CHAIN: 101})
        archive.put(rows_of(101, 110), level=level, tail=False)
        centre.prefetcher.search(CHAIN, everywhere=level > 0)
        await centre.reaches({CHAIN: 111})


@pytest.mark.parametrize("is_accepted", [False, True])
async def test_keys_far_down_a_listing_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_accepted: bool
) -> None:
    archive = Archive(tmp_path / "other")
    monkeypatch.setattr(
        "ingress.chains.locate.plan_from_listings", lambda *args, search, **more: plan_from_listings(*args, **more)
    )
    archive.begin()
    for sequence in range(11, 131):
        archive.put(rows_of(sequence, sequence), tail=False)
    archive.put(rows_of(1, 130))
    if is_accepted:
        archive.documents.accept_gap(CHAIN, AcceptedGap(SequenceRange(1, 10)))
    centre, stops = Centre(archive, lost_segment_timeout="1s"), []
    monkeypatch.setattr(centre.prefetcher, "stop_chain", lambda *stop: stops.append(stop))
    async with centre.running():
        await centre.reaches({CHAIN: 131})
    assert (stops, centre.messages_of(CHAIN), archive.documents.skipped_gaps("FLEET", CHAIN)) == ([], 130, [])


# Skipped gaps


async def test_a_gap_is_counted_and_shown_once(archive: Archive, caplog: pytest.LogCaptureFixture) -> None:
    archive.put(rows_of(111, 120))
    archive.documents.accept_gap(CHAIN, AcceptedGap(SequenceRange(101, 110)))
    counter = metrics.lost_sequences.labels("FLEET")
    before, centre = counted(counter), Centre(archive)
    centre.stored = {CHAIN: 101}
    async with centre.running():
        await centre.reaches({CHAIN: 121})
        centre.stored = {CHAIN: 101}
        centre.prefetcher.reset(centre.stored)  # the position was not stored, though the gap was recorded
        await centre.reaches({CHAIN: 121})
    assert (counted(counter) - before, caplog.text.count("gap skipped")) == (10, 1)


def test_a_corrupt_gap_is_logged_once_until_it_is_fixed(archive: Archive, caplog: pytest.LogCaptureFixture) -> None:
    gap = AcceptedGap(SequenceRange(101, 110))
    key = archive.store.layout.gap(archive.store.layout.gaps_prefix(CHAIN), gap.range)
    for times in (1, 2):
        archive.objects.put(key, b"{")
        for _ in range(3):
            assert archive.documents.gaps(CHAIN) == []
        assert caplog.text.count("document ignored") == times
        archive.objects.put(key, gap.to_json())
        assert archive.documents.gaps(CHAIN) == [gap]


# The beginning of a copy


@pytest.fixture
def begun(tmp_path: Path) -> Archive:
    archive = Archive(tmp_path / "begun")
    archive.put(rows_of(1, 10))
    archive.put(rows_of(11, 20))
    return archive


def start(begun: Archive, *, now: float = 2e9, **keys: Any) -> Any:
    """Resolve the beginning of a chain as ingress does."""
    starts = StartResolver("FLEET", begun.store, begun.documents, ManualClock(now))
    settings = StartSettings.model_validate(keys)

    def resolve(chain: Chain = CHAIN, end: int | None = None, positions: Any = None, first: int = 1) -> int:
        return starts.resolve(chain, settings, first, end, positions or {})

    return resolve


@pytest.mark.servers
@pytest.mark.simulated
async def test_a_restart_begins_a_copy_nowhere_else(
    tmp_path: Path, nats_url: str, client: FloeClient, begun: Archive
) -> None:
    centre = Service(tmp_path, begun, nats_url)
    centre.target_settings["sources"][0] |= {"start_time": moment(14)}
    async with centre.running():
        states = await centre.state(client)

        async def is_carried() -> bool:
            state = (await states.load()).state
            return state is not None and state.checkpoint.positions.get(CHAIN, 0) == 21

        await soon(is_carried)
        assert await count_in(client, centre.target) == 7
    begun.put(rows_of(21, 30))
    async with centre.running():
        begun.rows[CHAIN] = rows_of(14, 30)
        check_exact(await centre.carried(client, 17), begun, centre.prefix)


def test_a_sequence_is_of_the_first_incarnation_and_without_a_key_all_is_carried(begun: Archive) -> None:
    assert start(begun)() == 1
    resolve = start(begun, start_sequence=15)
    assert (resolve(), resolve(LATER), resolve(first=18), resolve(end=9)) == (15, 1, 18, 10)


def test_a_recorded_start_stays_though_archive_clock_and_file_change(begun: Archive) -> None:
    assert start(begun, now=(START_NS + 16 * PACE_NS) / 1e9, start_delta="5ms")() in (11, 12)
    assert start(begun, now=2e9, start_delta="5ms")() in (11, 12)
    assert start(begun, start_at_end=True)() in (11, 12)


def test_a_new_feed_that_begins_at_the_end_misses_nothing_that_comes_while_ingress_is_away(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "empty")
    archive.begin()
    assert start(archive, start_at_end=True)() == 1
    archive.put(rows_of(1, 10))

    assert start(archive, start_at_end=True)() == 1


def test_the_end_is_of_all_incarnations_there_are_and_later_ones_are_carried_whole(begun: Archive) -> None:
    begun.put(rows_of(1, 7, LATER), chain=LATER)
    begun.documents.write_tail(LATER, 3)  # an old hint
    resolve = start(begun, start_at_end=True)

    assert (resolve(end=20), resolve(LATER, positions={CHAIN: 21})) == (21, 8)
    assert resolve(LATER.next_incarnation(), positions={CHAIN: 21, LATER: 8}) == 1


@pytest.mark.parametrize("claimed", [21, 1 << 60])
def test_a_copy_begins_behind_the_archive_at_any_claim_of_a_tail(begun: Archive, claimed: int) -> None:
    begun.documents.write_tail(CHAIN, claimed)

    assert start(begun, start_at_end=True)() == 21


def test_a_moment_leaves_out_whole_incarnations_that_were_before_it(begun: Archive) -> None:
    begun.put(rows_of(101, 120, LATER), chain=LATER)
    resolve = start(begun, start_time=moment(110))

    assert (resolve(end=20), resolve(LATER, positions={CHAIN: 21}, first=101)) == (21, 110)


def test_the_keys_are_ignored_where_the_copy_has_begun_already(begun: Archive) -> None:
    resolve = start(begun, start_at_end=True)

    assert resolve(LATER, positions={CHAIN: 5}) == 1
    assert [resolve(positions={chain: 5}) for chain in (LATER, OTHER)] == [1, 21]


def test_a_corrupt_start_is_never_used(begun: Archive) -> None:
    key = begun.store.layout.start_document("FLEET", "us-east", "NODES")
    for spoiled in (b"{", b'{"format_version":1,"ends":{"x":-1}}', b'{"format_version":2}'):
        begun.objects.put(key, spoiled)
        with pytest.raises(DataError, match=r"start\.json"):
            start(begun, start_at_end=True)()
