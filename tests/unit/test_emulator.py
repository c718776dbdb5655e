"""The fleet that the emulator publishes: plausible, varied, and repeatable by its seed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from common.clock import SystemClock
from common.errors import UsageError
from common.nats.client import frame
from common.settings.service import NatsSettings
from common.tasks import Stop
from infra.cli import emulate
from infra.emulator import (
    PING_SUBJECT,
    Connections,
    Emulator,
    Fleet,
    MachineFacts,
    PublishSchedule,
    Sizes,
    check_stored,
    describe,
    open_stream,
    read_facts,
    serve_figures,
    subject_filter,
)
from tests.support.basics import soon, unique

NOW = 1_700_000_000.0
FACTS = read_facts()


def documents(turn: int = 0, seed: int = 1, facts: MachineFacts = FACTS) -> list[dict[str, object]]:
    made = Fleet(facts, seed=seed, nodes=200)
    return [json.loads(made.document(node, turn, NOW)) for node in range(200)]


def test_a_document_names_its_sender_its_time_this_machines_facts_and_status(tmp_path: Path) -> None:
    made = Fleet(FACTS, seed=1, nodes=5000)
    document = json.loads(made.document(7, 0, NOW))

    assert (document["sender"], document["timestamp"]) == (made.sender(7), int(NOW))
    assert {"agents", "classes", "facts", "status"} <= document.keys()
    assert set(document["facts"]["packages"]) <= set(FACTS.packages)
    assert len({made.sender(node) for node in range(5000)}) == 5000
    nothing = read_facts(tmp_path)  # of a machine without readable facts
    assert (len(documents(facts=nothing)), "packages" in describe(nothing)) == (200, True)


def test_documents_are_of_many_sizes_and_of_those_that_are_asked_for() -> None:
    for asked, min_bytes, max_bytes in ((None, 800, 48 * 1024), (Sizes(2000, 3000), 1500, 3300)):
        made = Fleet(FACTS, seed=1, nodes=200, sizes=asked)
        sizes = {len(made.document(node, 0, NOW)) for node in range(200)}
        assert (min_bytes <= min(sizes) <= max(sizes) <= max_bytes, len(sizes) > 30) == (True, True)


def test_the_same_seed_makes_the_same_fleet_which_changes_from_turn_to_turn_and_another_seed_another() -> None:
    made, later = documents(), documents(1)
    assert (documents() == made, documents(seed=6) == made) == (True, False)
    first, second = (each[3]["status"] for each in (made, later))
    assert second["uptime"] == first["uptime"] + 300
    assert second["valid_messages"] > first["valid_messages"]
    assert second["load"] != first["load"]


def test_each_node_publishes_once_in_an_interval_or_all_by_a_rate_until_a_count_or_a_duration() -> None:
    assert [PublishSchedule(nodes=300, interval=60).due_count(elapsed) for elapsed in (0, 0.5, 1, 60)] == [1, 3, 6, 301]
    assert PublishSchedule(nodes=10, rate=200).due_count(0.5) == 101
    assert PublishSchedule(nodes=10, rate=0, count=77).due_count(0.001) == 77, "as fast as possible"
    pace = PublishSchedule(nodes=10, rate=100, count=50, duration=2)
    assert [pace.is_over(*each) for each in ((49, 1.9), (50, 0.1), (0, 2))] == [False, True, True]
    assert not PublishSchedule(nodes=1).is_over(10**9, 10**9)


BAD_VALUES = [
    (lambda: Sizes(0, 10), "the smaller first"),
    (lambda: PublishSchedule(nodes=1, interval=0), "--interval: expected more than 0s, found 0s"),
    (lambda: PublishSchedule(nodes=1, duration=0), "--duration: expected more than 0s, found 0s"),
    *((lambda s=s: subject_filter(s), "a first token, then") for s in ("a", "{sender}", ".{sender}", "a. {sender}")),
]


@pytest.mark.parametrize(("make", "expected"), BAD_VALUES)
def test_sizes_paces_and_subjects_that_cannot_be_are_refused(make: Callable[[], object], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        make()
    assert subject_filter("nodes.{sender}.facts") == subject_filter("nodes.n-{sender}") == "nodes.>"


WRONG_CALLS = [
    ("--server nowhere", "--server: expected a URL such as nats://127.0.0.1:4222, found 'nowhere'"),
    ("--min-size 2K --max-size 1K", "--min-size 2048, --max-size 1024: expected"),
    ("--stream a.b", "--stream: expected a stream name"),
    ("--subject em..{sender}", "--subject: expected a first token, then {sender}"),
    ("--listen bogus", "'--listen': expected an address such as 127.0.0.1:9464 or [::1]:9464, found 'bogus'"),
    ("--server nats://h:1 -c x.yaml", "--server and --config"),
    ("--connections 0", "0 is not in the range"),
]


@pytest.mark.parametrize(("options", "problem"), WRONG_CALLS)
def test_a_wrong_command_line_is_explained_and_ends_with_2(options: str, problem: str) -> None:
    result = CliRunner().invoke(emulate, options.split())

    assert (result.exit_code, problem in result.output) == (2, True)


@pytest.mark.simulated
async def test_nodes_share_connections_that_answer_each_request_with_the_names_of_their_nodes(nats_url: str) -> None:
    """Of seven nodes, two connections carry two each and the third carries three."""
    fleet, stream = Fleet(FACTS, seed=1, nodes=7), unique("NODES")
    settings, nodes = NatsSettings(url=(nats_url,)), Connections(fleet, 3, 2)
    async with nodes.open(settings, SystemClock()) as client:
        before = await open_stream(client, stream, f"{stream}.all.{{sender}}", create=True)
        schedule = PublishSchedule(7, rate=100, count=21)
        emulator = Emulator(nodes.clients, fleet, schedule, SystemClock(), subject=f"{stream}.all.{{sender}}")
        serve_figures(emulator, nodes, None)
        await emulator.run(Stop())
        await check_stored(client, before, emulator.published)
        assert (emulator.published.stored, len(nodes.clients)) == (21, 3)

        names: list[bytes] = []
        inbox = client.new_inbox()
        await client.subscribe_raw(inbox, lambda _s, _r, name, _h: names.append(name))
        client.send(frame(f"{PING_SUBJECT}1".encode(), b"", None, inbox.encode()))
        await soon(lambda: nodes.pings == 3 and len(names) == 7)
        assert {*names} == {fleet.sender(node).encode() for node in range(7)}
    with pytest.raises(UsageError, match="--listen: expected a free address such as"):
        serve_figures(emulator, nodes, ("192.0.2.1", 9))
