"""The positions of a target, which ingress writes for retention, and the rules of retention."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import floe
from common.archive.documents import ChainStore, Floor, TargetPositions
from common.archive.keys import Layout
from common.chain import Chain
from common.errors import ConfigError, DataError, Refused, Stopped
from common.objects.local import LocalObjects
from common.sequences import MAX_SEQUENCE
from common.service.process import ThreadPool
from common.settings.loader import parse
from common.settings.root import RetentionSettings
from compaction.retention import read_needs
from ingress.checkpoint import Checkpoint, StoredState, TargetState
from ingress.report import PositionsWriter
from tests.support.basics import metric_value
from tests.support.clock import ManualClock

A, B = Chain("us-east", "NODES"), Chain("eu-west", "NODES", 1, 2)


@pytest.fixture
def documents(tmp_path: Path) -> ChainStore:
    return ChainStore(LocalObjects(tmp_path / "store"), Layout("data"))


def test_positions_are_read_back_as_they_were_written(documents: ChainStore) -> None:
    put = TargetPositions("FLEET", 1000.5, {A: 31, B: 2**63}, ("us-east/NODES",))
    documents.write_positions(put)

    found = [documents.read_positions(target) for target in ("FLEET", "OTHER")]
    assert (found, documents.targets_with_positions()) == ([put, None], ["FLEET"])
    raw = documents.objects.get("data/_floe/ingress/FLEET/positions.json")
    positions = {"us-east/NODES/0000/0": 31, "eu-west/NODES/0001/2": 2**63}
    rest = {"format_version": 1, "target": "FLEET", "time": 1000.5, "sources": ["us-east/NODES"]}
    assert json.loads(raw) == {**rest, "positions": positions}
    # A later version may add fields.
    assert TargetPositions.from_json(json.dumps({**json.loads(raw), "more": [1]}).encode()) == put


@pytest.mark.parametrize(
    "change",
    [{"format_version": 2}, {"target": "OTHER"}, {"positions": {"us-east/NODES/0000/0": -1}}, {"positions": {"x": 1}}],
)
def test_positions_that_are_not_as_they_must_be_are_never_acted_on(documents: ChainStore, change: Any) -> None:
    document = json.loads(TargetPositions("FLEET", 1.0, {A: 31}).to_json())
    documents.objects.put("data/_floe/ingress/FLEET/positions.json", json.dumps(document | change).encode())

    with pytest.raises(DataError):
        documents.read_positions("FLEET")


class Refusing(LocalObjects):
    """A store that refuses every put while `refuses` is true."""

    refuses, puts = False, 0

    def put(self, key: str, *rest: Any, **more: Any) -> None:
        self.puts += 1
        if self.refuses:
            raise Refused("not allowed", code="E-S3-DENIED")
        super().put(key, *rest, **more)


def errors() -> float:
    return metric_value("floe_ingress_positions_errors_total", {"target": "T"}) or 0.0


async def test_positions_are_put_when_they_changed_and_at_most_once_a_minute(tmp_path: Path, caplog: Any) -> None:
    objects, clock, threads = Refusing(tmp_path / "store"), ManualClock(), ThreadPool("test", 1)
    documents = ChainStore(objects, Layout("data"))
    now: dict[Chain, int] | None = None
    stopped: dict[Chain, str] = {}

    def stored() -> StoredState | None:
        return None if now is None else StoredState(TargetState(Checkpoint(0, "", now)), 1)

    report = PositionsWriter("T", lambda: ("us-east/NODES",), stored, lambda: stopped, documents, threads, clock)
    large = "E-MSG-TOO-LARGE: too large; raise max_payload" + "x" * 2000
    for seconds, positions, stops, puts, held in (
        (0, None, {}, 0, None),  # target and state do not agree yet
        (0, {A: 31}, {}, 1, {A: 31}),
        (59, {A: 40}, {}, 1, {A: 31}),
        (1, {A: 40}, {}, 2, {A: 40}),
        (1, {A: 7, B: 1}, {}, 3, {A: 7, B: 1}),  # moved back: retention may delete by the old position
        (600, {A: 7, B: 1}, {}, 3, {A: 7, B: 1}),  # nothing changed
        (0, {A: 7, B: 1}, {A: large}, 4, {A: 7, B: 1}),
        (60, {A: 7, B: 1}, {A: large}, 4, {A: 7, B: 1}),  # remains stopped
        (0, {A: 7, B: 1}, {A: large, B: "E-GAP: a hole"}, 5, {A: 7, B: 1}),  # at once
        (1, {A: 7, B: 1}, {A: large}, 5, {A: 7, B: 1}),  # the end of the stop, within a minute
        (60, {A: 7, B: 1}, {A: large}, 6, {A: 7, B: 1}),
    ):
        now, stopped = positions, stops
        clock.advance(seconds)
        await report.write_if_due()
        found = documents.read_positions("T")
        assert (objects.puts, found and found.positions) == (puts, held)
    assert found.stopped == {A: large[:1000]}

    before, objects.refuses, now = errors(), True, {A: 8, B: 1}
    for _ in range(3):
        clock.advance(60)
        await report.write_if_due()
    assert (objects.puts, errors() - before) == (9, 3)
    assert sum("positions write failed" in record.message for record in caplog.records) == 1
    objects.refuses = False
    clock.advance(60)
    await report.write_if_due()
    assert documents.read_positions("T").positions == now
    threads.close()


class Centre:
    """The positions of one target, as an ingress of one centre writes them. `stored`: its state."""

    def __init__(self, documents: ChainStore, stored: StoredState) -> None:
        self.documents, self.stored, self.clock, self.threads = documents, stored, ManualClock(), ThreadPool("test", 1)
        self.begin()

    def begin(self) -> None:
        parts = self.documents, self.threads, self.clock
        self.writer = PositionsWriter("T", lambda: (), lambda: self.stored, dict, *parts)

    async def carry(self, position: int) -> None:
        """Begin a delivery, and close an intent at `position`."""
        self.begin()
        checkpoint = Checkpoint(0, "", {A: position}, writers=await self.writer.name_writers(self.stored))
        self.stored = StoredState(TargetState(checkpoint), self.stored.revision + 1)

    async def deliver(self, position: int) -> None:
        await self.carry(position)
        await self.report(position)

    async def report(self, position: int) -> None:
        checkpoint = replace(self.stored.existing.checkpoint, positions={A: position})
        self.stored = StoredState(TargetState(checkpoint), self.stored.revision)
        self.clock.advance(60)
        await self.writer.write_if_due()

    def decide(self) -> None:
        """Correct the state as `floe checkpoint set` does."""
        self.stored = StoredState(TargetState(Checkpoint(0, "", {A: 1})), self.stored.revision + 1)


NOTHING = StoredState(TargetState(Checkpoint(0, "")), 0)


async def test_two_centres_never_write_the_positions_of_one_target(documents: ChainStore) -> None:
    first, second = Centre(documents, NOTHING), Centre(documents, NOTHING)
    await first.deliver(7)
    await first.deliver(9)  # another process of the same centre
    with pytest.raises(Stopped, match="another centre stored at") as stop:
        await second.deliver(40)
    assert (stop.value.code, "--target T --from-target" in stop.value.hint) == ("E-TARGET-TWICE", True)
    assert documents.read_positions("T").positions == {A: 9}

    second.decide()  # the first is gone, as far as the operator knows
    await second.deliver(40)
    await second.deliver(41)
    with pytest.raises(Stopped) as stop:
        await first.report(10)
    assert "--target T --accept" in stop.value.hint
    with pytest.raises(Stopped):
        await first.deliver(10)
    assert documents.read_positions("T").positions == {A: 41}


async def test_a_moved_centre_continues_and_the_one_that_was_copied_stops(documents: ChainStore) -> None:
    old = Centre(documents, NOTHING)
    await old.deliver(7)
    new = Centre(documents, old.stored)  # the state bucket was copied
    await new.deliver(8)
    with pytest.raises(Stopped):
        await old.report(9)
    assert documents.read_positions("T").positions == {A: 8}


async def test_a_bucket_that_was_away_or_is_set_back_is_that_of_this_centre(documents: ChainStore) -> None:
    centre, key = Centre(documents, NOTHING), "data/_floe/ingress/T/positions.json"
    await centre.deliver(7)
    copy = documents.objects.get(key)
    await centre.deliver(8)
    for position in range(9, 20):  # restarts, after which the target gets rows before the bucket is back
        documents.objects.delete(key)
        await centre.carry(position)
    documents.objects.put(key, copy)
    await centre.deliver(20)
    assert documents.read_positions("T").positions == {A: 20}


@pytest.mark.parametrize("there", ["released", "damaged", "none", "crashed"])
async def test_positions_of_nobody_are_replaced(documents: ChainStore, there: str) -> None:
    centre = Centre(documents, NOTHING)
    if there == "damaged":
        documents.objects.put("data/_floe/ingress/T/positions.json", b"[]")
    elif there == "released":
        documents.write_positions(TargetPositions("T", 1.0, released=True))
    elif there == "crashed":  # it named itself in its state, and did not come to write its positions
        await centre.deliver(5)
        await centre.carry(6)
    await centre.deliver(7)
    assert documents.read_positions("T").positions == {A: 7}


def invoke(tmp_path: Path, *arguments: str) -> Any:
    config = tmp_path / "floe.yaml"
    config.write_text(f"store: {{url: 'file://{tmp_path / 'store'}', prefix: data}}\n")
    config.chmod(0o600)
    return CliRunner().invoke(floe.cli, ["checkpoint", "release", "-c", str(config), *arguments], prog_name="floe")


def test_a_target_is_released_only_on_request(tmp_path: Path, documents: ChainStore) -> None:
    documents.write_positions(TargetPositions("FLEET", 1.0, {A: 31}, ("us-east/NODES",)))

    unknown, asked = invoke(tmp_path, "FLEAT", "--yes"), invoke(tmp_path, "FLEET")
    assert (unknown.exit_code, asked.exit_code) == (2, 2)
    assert "(FLEET), found FLEAT" in unknown.output
    assert "us-east/NODES/0000/0: 31" in asked.output
    assert "segments that all other targets have may be" in asked.output
    assert documents.read_positions("FLEET") == TargetPositions("FLEET", 1.0, {A: 31}, ("us-east/NODES",))

    assert invoke(tmp_path, "FLEET", "--yes").exit_code == 0
    released = documents.read_positions("FLEET")
    assert (released.released, released.positions) == (True, {})
    assert "was released already" in invoke(tmp_path, "FLEET", "--yes").output
    # Unreadable positions hold everything; the target may be released too.
    documents.objects.put("data/_floe/ingress/SPOILED/positions.json", b"[]")
    assert invoke(tmp_path, "SPOILED", "--yes").exit_code == 0


# Retention

EAST, WEST, LATER = Chain("us-east", "NODES"), Chain("eu-west", "NODES"), Chain("us-east", "NODES", 1)
DAY = 86_400.0


def settings_of(text: str) -> RetentionSettings:
    [found] = parse(f"store: {{url: s3://floe}}\ncompaction: {{retention: {text}}}\n", "f.yaml")
    return found.compaction.retention


def test_nothing_is_deleted_unless_configured_nor_at_once():
    assert settings_of("{}").limits_of("us-east", "NODES") == (0.0, 0, None)
    assert settings_of("{max_age: 30d}").limits_of("us-east", "NODES") == (30 * DAY, 0, None)
    with pytest.raises(ConfigError, match="delete_after"):
        settings_of("{delete_after: 30d}")
    for text in ("{max_age: 1h}", "{max_bytes: 5K}", "{feeds: [{max_age: 2d}]}"):  # at once, or of no feed
        with pytest.raises(ConfigError):
            settings_of(text)


def test_an_entry_of_a_feed_replaces_the_general_limits_and_one_of_a_site_precedes_it():
    found = settings_of(
        "{max_age: 90d, max_bytes: 10G, feeds: [{feed: NODES, max_age: 365d}, "
        "{site: us-east, feed: NODES, max_bytes: 1G}, {feed: KEPT}]}"
    )
    assert found.limits_of("eu-west", "OTHER") == (90 * DAY, 10 << 30, None)
    assert found.limits_of("eu-west", "NODES") == (365 * DAY, 0, None)
    assert found.limits_of("us-east", "NODES") == (0.0, 1 << 30, None)
    assert found.limits_of("us-east", "KEPT") == (0.0, 0, None)
    with pytest.raises(ConfigError, match=r"one entry per feed, found us-east/NODES in feeds.0 and feeds.1"):
        settings_of("{feeds: [{site: us-east, feed: NODES}, {site: us-east, feed: NODES, max_age: 2d}]}")


def test_the_earlier_of_two_times_from_which_on_all_is_kept_counts():
    found = settings_of(
        "{max_age: 90d, keep_from: '2026-01-02T03:04:05Z', "
        "feeds: [{feed: EAST, keep_from: '1970-01-01T00:00:01Z'}, {feed: WEST, max_age: 1d}]}"
    )
    held = 1_767_323_045 * 10**9
    assert found.limits_of("s", "OTHER")[2] == found.limits_of("s", "WEST")[2] == held
    assert found.limits_of("s", "EAST") == (0.0, 0, 10**9)
    with pytest.raises(ConfigError, match="keep_from: expected a time"):
        settings_of("{keep_from: yesterday}")


# Needs


def test_a_target_needs_what_lies_behind_its_position_and_all_of_a_chain_that_it_has_not_begun(documents: ChainStore):
    documents.write_positions(TargetPositions("FLEET", 1.0, {EAST: 31}, ("us-east/NODES",)))
    documents.write_positions(TargetPositions("COPY", 1.0, {EAST: 11}, ("us-east/NODES",)))

    needs = read_needs(documents, {})
    earliest = [needs.earliest(chain, first) for chain, first in ((EAST, 1), (LATER, 5), (WEST, 1))]
    assert earliest == [(11, "COPY"), (5, "COPY"), (MAX_SEQUENCE, "")]
    # The configuration lists another source by now, and ingress was not restarted.
    assert read_needs(documents, {"FLEET": ["eu-west/NODES"]}).earliest(WEST, 3) == (3, "FLEET")


def test_a_target_without_readable_positions_needs_everything_and_a_released_one_nothing(documents: ChainStore):
    needs = read_needs(documents, {"FLEET": ["us-east/NODES"]})
    assert needs.earliest(WEST, 7) == (0, "FLEET")
    assert needs.unknown == {"FLEET": "it has not reported its positions yet"}
    documents.objects.put("data/_floe/ingress/SPOILED/positions.json", b"[]")
    needs = read_needs(documents, {})
    assert (needs.earliest(EAST, 1), "positions.json" in needs.unknown["SPOILED"]) == ((0, "SPOILED"), True)
    documents.objects.delete("data/_floe/ingress/SPOILED/positions.json")
    documents.write_positions(TargetPositions("FLEET", 1.0, released=True))
    assert read_needs(documents, {"FLEET": ["us-east/NODES"]}).earliest(EAST, 1) == (MAX_SEQUENCE, "")


def test_a_floor_has_its_time(documents: ChainStore):
    assert documents.floor(EAST) is None
    documents.raise_floor(EAST, 21)
    assert documents.floor(EAST) == Floor(21, documents.objects.head(documents.layout.floor_document(EAST)).modified)
    assert str(Floor(21, 1_767_323_045.5)) == "retention deleted the sequences before 21 at 2026-01-02T03:04:05Z"
