"""`floe advisories`: what it finds and prints, for whom, and how it ends."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.jetstream.client import FloeClient, frame
from egress.advisories.advisory import Advisory, AdvisoryDocument, Event
from egress.advisories.cli import line_of
from infra.local.process import spawn
from tests.support.advisories import SECOND, World, new, now_ns, running
from tests.support.basics import PATIENCE, soon
from tests.support.commands import ROOT, Done, invoke

MINUTE = 60 * SECOND


@pytest.fixture
async def world(client: FloeClient) -> World:
    world = World(client)
    await world.make_stream()
    return world


@pytest.fixture
def config(tmp_path: Path, nats_url: str) -> Path:
    return written(tmp_path / "site.yaml", {"site": "US_EAST", "nats": {"url": nats_url}})


def written(path: Path, settings: dict[str, Any]) -> Path:
    quiet = {"store": {"url": f"file://{path.parent}/bucket"}, "log": {"level": "warning"}}
    path.write_text(yaml.safe_dump({**quiet, **settings}))
    return path


async def floe(config: Path, *arguments: str) -> Done:
    return await invoke("advisories", *arguments, "-c", str(config))


async def store(world: World, sent: list[Advisory], foreign: int = 0) -> None:
    before = await world.count()
    async with running(world.advisories()) as advisories:
        advisories.take(sent, again=False)
        await advisories.drain(10)
    for _ in range(foreign):
        world.client.send(frame(f"{world.prefix}.other".encode(), b'{"protocol": "x", "value": "node1"}'))

    async def there() -> bool:
        return await world.count() == before + len(sent) + foreign

    await soon(there)


def silence(value: str, moment_ns: int, silent_ns: int = 662 * SECOND) -> Advisory:
    return Advisory(Event.TIMEOUT, value, moment_ns - silent_ns, moment_ns)


async def test_each_is_one_line_in_order_or_one_as_json_and_foreign_messages_are_counted(
    world: World, config: Path
) -> None:
    empty = await floe(config, world.stream)
    assert (empty.code, empty.out, empty.err) == (0, "", "")
    await store(world, [silence("node1", now_ns() - MINUTE), new("node2"), new("node1")], foreign=3)
    done = await floe(config, world.stream)
    first, second, _ = done.out.splitlines()
    assert first.endswith("] timeout node1 seen 11m2s earlier on US_EAST")
    assert second.endswith("]     new node2 seen 0s earlier on US_EAST")
    assert (done.code, done.err) == (0, f"3 messages of {world.stream} are no advisories\n")
    documents = [json.loads(line) for line in (await floe(config, world.stream, "node1", "--json")).out.splitlines()]
    assert sorted((each["event"], each["value"]) for each in documents) == [("new", "node1"), ("timeout", "node1")]
    assert list(documents[0]) == list(AdvisoryDocument.__struct_fields__)


async def test_since_counts_from_now_by_time_of_storing(world: World, config: Path) -> None:
    await store(world, [new("old", now_ns() - 30 * 86_400 * SECOND)])

    assert "old seen 0s earlier" in (await floe(config, world.stream, "--since", "1m")).out
    assert (await floe(config, world.stream, "--since", "1ms")).out == ""


async def test_at_the_centre_subjects_and_headers_are_others_and_do_not_matter(
    world: World, tmp_path: Path, nats_url: str
) -> None:
    document = (
        b'{"protocol":"io.choria.sr.v2.age_advisory","event_id":"26QSY17sb9aJL6UPPG6MLOVjIrE",'
        b'"inspect_field":"sender","age":3600,"seen":1647351430,"replicator":"US-EAST",'
        b'"timestamp":1647355030,"event":"expire","value":"node1"}'
    )
    world.client.send(frame(f"{world.prefix}.central.x".encode(), document))
    await soon(world.count)
    nowhere = {"url": "nats://127.0.0.1:1", "connect_timeout": "300ms"}
    targets = [{"stream": "T", "sources": [{"site": "s", "feed": "f"}]}]
    settings = {"nats": nowhere, "ingress": {"nats": {"url": nats_url}, "targets": targets}}
    centre = written(tmp_path / "centre.yaml", settings)

    shown = (await floe(centre, world.stream)).out
    assert shown == "[2022-03-15 14:37:10]  expire node1 seen 1h earlier on US-EAST\n"
    assert (await floe(centre, world.stream, "--nats", "egress")).code == 75


async def test_no_such_stream_is_one_line_and_exit_1_and_what_is_no_name_a_usage_error(
    config: Path,
) -> None:
    done = await floe(config, "NO_SUCH_STREAM")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert done.err.startswith("error[E-STREAM]: stream NO_SUCH_STREAM: expected one on this server")
    for name in ("a.b", "a b", "*", ""):
        assert (await floe(config, name)).code == 2, name


async def test_follow_shows_those_that_come_until_it_is_interrupted(world: World, config: Path, tmp_path: Path) -> None:
    await store(world, [new("before")])
    out, errors = tmp_path / "out", tmp_path / "errors"
    with out.open("w") as stdout, errors.open("w") as stderr:
        command = [sys.executable, str(ROOT / "floe.py"), "advisories", world.stream, "--follow", "-c", str(config)]
        process = spawn(command, stdout=stdout, stderr=stderr)
    try:
        await soon(lambda: "before" in out.read_text())
        await store(world, [new("after")], foreign=1)
        await soon(lambda: "after" in out.read_text())
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
    assert out.read_text().count("\n") == 2
    assert f"1 message of {world.stream} is no advisory" in errors.read_text()
    assert "Traceback" not in errors.read_text()


def test_a_line_is_one_whatever_a_value_and_its_times_are() -> None:
    with pytest.raises(ValueError, match="expected seconds since 1970"):
        line_of(AdvisoryDocument("p", "i", "f", 0, 0, "r", 2**62, "new", "v"))
    unseen = AdvisoryDocument("p", "i", "f", -1, -62_135_596_800, "r", 0, "new", "v")
    assert line_of(unseen).startswith("[1970-01-01 00:00:00]     new v seen ")
    forged = AdvisoryDocument("p", "i", "f", 0, 0, "r", 0, "new", "a\n[2026-01-01 00:00:00] expire node1\x1b[2J\u202e")
    assert line_of(forged).isprintable()
