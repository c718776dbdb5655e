"""How far a target is, as ingress says it to those who delete."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import floe
from common.chain import Chain
from common.errors import DataError, Refused
from common.metrics import REGISTRY
from common.objects.local import LocalObjects
from common.segments.documents import ChainStore, TargetPositions
from common.segments.keys import Layout
from common.service.process import Threads
from ingress.report import PositionsReport
from tests.support.clock import ManualClock

A, B = Chain("us-east", "NODES"), Chain("eu-west", "NODES", 1, 2)


@pytest.fixture
def documents(tmp_path: Path) -> ChainStore:
    return ChainStore(LocalObjects(tmp_path / "store"), Layout("data"))


def test_positions_are_read_back_as_they_were_written(documents: ChainStore) -> None:
    said = TargetPositions("FLEET", 1000.5, {A: 31, B: 2**63}, ("us-east/NODES",))
    documents.write_positions(said)

    assert documents.read_positions("FLEET") == said
    assert documents.read_positions("OTHER") is None
    assert documents.targets_with_positions() == ["FLEET"]
    raw = documents.objects.get("data/_floe/ingress/FLEET/positions.json")
    assert raw is not None
    assert json.loads(raw) == {
        "format_version": 1,
        "target": "FLEET",
        "time": 1000.5,
        "positions": {"us-east/NODES/0000/0": 31, "eu-west/NODES/0001/2": 2**63},
        "sources": ["us-east/NODES"],
    }
    # A later version may add fields.
    later = json.dumps({**json.loads(raw), "more": [1]}).encode()
    assert TargetPositions.from_json(later) == said


@pytest.mark.parametrize(
    "change",
    [{"format_version": 2}, {"target": "OTHER"}, {"positions": {"us-east/NODES/0000/0": -1}}, {"positions": {"x": 1}}],
)
def test_positions_that_are_not_as_they_must_be_are_never_acted_on(
    documents: ChainStore, change: dict[str, Any]
) -> None:
    document = json.loads(TargetPositions("FLEET", 1.0, {A: 31}).to_json())
    documents.objects.put("data/_floe/ingress/FLEET/positions.json", json.dumps(document | change).encode())

    with pytest.raises(DataError):
        documents.read_positions("FLEET")


class Refusing(LocalObjects):
    """A store that takes nothing as long as `refuses`."""

    refuses, puts = False, 0

    def put(self, key: str, *rest: Any, **more: Any) -> None:
        self.puts += 1
        if self.refuses:
            raise Refused("not allowed", code="E-S3-DENIED")
        super().put(key, *rest, **more)


def errors() -> float:
    return REGISTRY.get_sample_value("floe_ingress_positions_errors_total", {"target": "T"}) or 0.0


async def test_positions_are_put_when_they_changed_and_at_most_once_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    objects, clock, threads = Refusing(tmp_path / "store"), ManualClock(), Threads("test", 1)
    documents = ChainStore(objects, Layout("data"))
    now: dict[Chain, int] | None = None
    stopped: dict[Chain, str] = {}
    report = PositionsReport("T", ("us-east/NODES",), lambda: now, lambda: stopped, documents, threads, clock)

    def said() -> Mapping[Chain, int] | None:
        found = documents.read_positions("T")
        return None if found is None else found.positions

    await report.look()
    assert said() is None  # target and state did not agree yet
    now = {A: 31}
    await report.look()
    assert said() == {A: 31}
    clock.advance(59)
    now = {A: 40}
    await report.look()
    assert said() == {A: 31}
    clock.advance(1)
    await report.look()
    assert said() == {A: 40}
    clock.advance(1)
    now = {A: 7, B: 1}  # moved back: what was said is ahead, and something may be deleted by it
    await report.look()
    assert said() == {A: 7, B: 1}
    clock.advance(600)
    await report.look()
    assert objects.puts == 3  # nothing changed
    stopped[A] = "E-MSG-TOO-LARGE: too large; raise max_payload" + "x" * 2000
    await report.look()
    found = documents.read_positions("T")
    assert found is not None
    assert found.stopped[A].startswith("E-MSG-TOO-LARGE: too large; raise max_payload")
    assert (len(found.stopped[A]), objects.puts) == (1000, 4)
    clock.advance(60)
    await report.look()
    assert objects.puts == 4, "it stays stopped"
    stopped[B] = "E-GAP: a hole"
    await report.look()
    clock.advance(1)
    del stopped[B]
    await report.look()
    assert objects.puts == 5, "a stop is shown at once, and that it is over within a minute"
    clock.advance(60)
    await report.look()
    assert objects.puts == 6
    clock.advance(60)
    objects.puts = 3

    before, objects.refuses, now = errors(), True, {A: 8, B: 1}
    for _ in range(3):
        await report.look()
        clock.advance(60)
    assert (objects.puts, errors() - before) == (6, 3)
    assert sum("positions not stored" in record.message for record in caplog.records) == 1
    objects.refuses = False
    await report.look()
    assert said() == now
    threads.close()


def invoke(tmp_path: Path, *arguments: str) -> Any:
    config = tmp_path / "floe.yaml"
    config.write_text(f"store: {{url: 'file://{tmp_path / 'store'}', prefix: data}}\n")
    config.chmod(0o600)
    command = ["checkpoint", "release", "-c", str(config), *arguments]
    return CliRunner().invoke(floe.cli, command, prog_name="floe")


def test_a_target_is_let_go_only_where_that_is_said(tmp_path: Path, documents: ChainStore) -> None:
    documents.write_positions(TargetPositions("FLEET", 1.0, {A: 31}, ("us-east/NODES",)))

    unknown = invoke(tmp_path, "FLEAT", "--yes")
    assert unknown.exit_code == 2
    assert "(FLEET), found FLEAT" in unknown.output
    asked = invoke(tmp_path, "FLEET")
    assert asked.exit_code == 2
    assert "us-east/NODES/0000/0: 31" in asked.output
    assert "what every other target has may be deleted" in asked.output
    assert documents.read_positions("FLEET") == TargetPositions("FLEET", 1.0, {A: 31}, ("us-east/NODES",))

    assert invoke(tmp_path, "FLEET", "--yes").exit_code == 0
    released = documents.read_positions("FLEET")
    assert released is not None
    assert (released.released, released.positions) == (True, {})
    assert "was released already" in invoke(tmp_path, "FLEET", "--yes").output
    # What cannot be read holds everything; it may be released too.
    documents.objects.put("data/_floe/ingress/SPOILED/positions.json", b"[]")
    assert invoke(tmp_path, "SPOILED", "--yes").exit_code == 0
