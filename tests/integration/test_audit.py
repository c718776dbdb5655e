"""Decisions of operators are recorded before they take effect, and refused if they cannot be."""

import shlex
from pathlib import Path
from typing import Any

import click
import pytest

import floe as program
from common.archive.documents import TargetPositions
from common.audit import operator_name
from common.nats.client import FloeClient
from common.sequences import SequenceRange
from tests.support.commands import floe, ran
from tests.support.ingress import CHAIN, Archive, Centre, rows_of

pytestmark = pytest.mark.servers

DECISIONS = {
    ("chain", "pause"), ("chain", "resume"), ("checkpoint", "release"), ("checkpoint", "set"), ("gap", "accept"),
    ("parked", "retry"), ("segments", "quarantine"), ("egress", "repartition"), ("egress", "resolve"),
    ("replay",), ("restore",),
}  # fmt: skip


def options_of(command: click.Command, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], set[str]]:
    if not isinstance(command, click.Group):
        return {path: {word for each in command.params for word in each.opts}}
    with click.Context(command) as ctx:
        found = [(name, command.get_command(ctx, name)) for name in command.list_commands(ctx)]
    return dict(item for name, each in found if each for item in options_of(each, (*path, name)).items())


def test_each_command_that_asks_for_a_confirmation_records_it() -> None:
    options = options_of(program.cli)
    assert {path for path, words in options.items() if "--note" in words} == DECISIONS
    assert {path for path, words in options.items() if "--yes" in words} <= DECISIONS


class Desk:
    """A place of records beside an archive with a hole, which may be closed for new ones."""

    def __init__(self, centre: Centre) -> None:
        self.archive, self._centre = centre.archive, centre
        self.folder = centre.archive.folder / "data" / "_floe" / "audit"
        self._config = ["-c", str(centre.write())]
        for rows in (rows_of(1, 10), rows_of(21, 30)):
            self.archive.put(rows)

    async def decide(self, *words: str, code: int = 0) -> str:
        return (await ran(*words, *self._config, code=code)).err

    async def records(self, *words: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await ran("audit", "ls", *self._config, "--json", *words)).json()
        return found


@pytest.fixture
def desk(tmp_path: Path, nats_url: str) -> Desk:
    return Desk(Centre(tmp_path, Archive(tmp_path / "store"), nats_url, stream="FLEET"))


ACCEPT = ["gap", "accept", str(CHAIN), "--first", "11", "--last", "20"]


async def test_no_decision_takes_effect_without_its_record(desk: Desk, client: FloeClient) -> None:
    desk.archive.documents.write_positions(TargetPositions("FLEET", 0.0))
    desk.archive.objects.put("data/site=us-east/notes.txt", b"junk")
    named = ["--target", "FLEET", "us-east/NODES"]
    commands = {
        "accept the loss of 10 sequences, 11..20, of us-east/NODES/0000/0": [*ACCEPT, "--yes"],
        "pause us-east/NODES/0000/0 in FLEET": ["chain", "pause", *named],
        "resume us-east/NODES/0000/0 in FLEET": ["chain", "resume", *named],
        "release FLEET": ["checkpoint", "release", "FLEET", "--yes"],
        "quarantine data/site=us-east/notes.txt": ["segments", "quarantine", "data/site=us-east/notes.txt"],
    }
    desk.folder.write_text("in the way")
    for words in commands.values():
        assert "error[E-AUDIT]: the record of this decision cannot be stored" in await desk.decide(*words, code=75)
    assert desk.archive.documents.gaps(CHAIN) == []
    assert desk.archive.objects.head("data/site=us-east/notes.txt")
    positions = desk.archive.documents.read_positions("FLEET")
    assert positions
    assert not positions.released
    assert await desk.decide("chain", "ls") == ""

    desk.folder.unlink()
    for decision, words in commands.items():
        await desk.decide(*words, "--note", f"for {decision}")
    found = await desk.records()
    assert [(each["decision"], each["note"]) for each in found] == [(each, f"for {each}") for each in commands]


async def test_a_record_names_everything_but_secrets(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "canary'in a note"
    (desk.folder.parents[2] / "secret").write_text(secret)
    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.7 50000 192.0.2.1 22")
    monkeypatch.setenv("SUDO_USER", "alice")
    centre = desk._centre
    document = centre.document()
    document["nats"] |= {"user": "u", "password_file": str(desk.folder.parents[2] / "secret")}
    monkeypatch.setattr(centre, "document", lambda: document)
    words = [*ACCEPT, "--yes", "--note", f"not {secret}", "-c", str(centre.write())]
    assert (await floe(*words, "--dry-run")).code == (await floe(*ACCEPT, "-c", words[-1])).code - 2 == 0
    assert await desk.records() == []
    await ran(*words)

    [record] = await desk.records()
    assert (record["by"], record["site"]) == (operator_name(), "")
    assert record["from"].startswith("ssh from 192.0.2.7")
    assert record["from"].endswith("sudo by alice")
    assert record["note"] == "not ***"
    assert record["command"] == shlex.join(["floe", *(word.replace(secret, "***") for word in words)])
    [stored] = desk.folder.rglob("*.json")
    assert secret not in stored.read_text()
    await ran("chain", "pause", "--target", centre.target, "us-east/NODES", *words[-4:])
    assert [each["note"] for each in (await ran("chain", "ls", *words[-2:], "--json")).json()] == ["not ***"]


async def test_a_store_whose_folder_is_gone_is_not_made_again(desk: Desk) -> None:
    folder = desk._centre.archive.folder
    folder.rename(folder.with_name("away"))
    config = ("-c", str(desk._centre.write()))
    for words in (
        ("audit", "ls"), ("fleet",), ("compare", "us-east/NODES"), ("gap", "ls"), ("status",),
        ("chain", "pause", "--target", desk._centre.target, "us-east/NODES"),
    ):  # fmt: skip
        assert "E-STORE-ROOT" in (await ran(*words, *config, code=75)).err, words
    assert not folder.exists()


async def test_a_listing_reads_only_the_records_of_the_times_asked_for(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for day in (1, 2, 3):
        monkeypatch.setattr("common.clock.SystemClock.now", lambda _, day=day: 1_790_000_000.123 + day * 86_400)
        await desk.decide(*ACCEPT, "--yes", "--note", str(day))
    monkeypatch.setattr("common.audit.PAGE_KEYS", 1)
    first, second, third = (each["at"] for each in await desk.records())
    for words, wanted in (
        (["--since", second], "23"), (["--until", second], "1"), (["--since", second, "--until", third], "2"),
        (["--since", first, "--until", "1d"], "1"), (["--since", "1s"], "3"), (["--until", first], ""),
    ):  # fmt: skip
        assert "".join(each["note"] for each in await desk.records(*words)) == wanted, words

    damaged, *others = sorted(desk.folder.rglob("*.json"))
    damaged.write_text(others[0].read_text())
    done = await floe("audit", "ls", *desk._config)
    assert (done.code, len(done.out.splitlines())) == (3, 3), done
    assert "E-STATE-JSON" in done.err
    assert [gap.range for gap in desk.archive.documents.gaps(CHAIN)] == [SequenceRange(11, 20)]
