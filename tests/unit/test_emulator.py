"""The fleet that the emulator publishes: plausible, varied, and repeatable by its seed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from common.errors import UsageError
from infra.cli import emulate
from infra.emulator import PublishSchedule, subject_filter
from infra.fleet import Fleet, MachineFacts, Sizes, describe, read_facts

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


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Sizes(0, 10), "the smaller first"),
        (lambda: PublishSchedule(nodes=1, interval=0), "expected more than 0 seconds"),
        *((lambda s=s: subject_filter(s), "a first token, then") for s in ("a", "{sender}", ".{sender}")),
    ],
)
def test_sizes_paces_and_subjects_that_cannot_be_are_refused(make: Callable[[], object], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        make()
    assert subject_filter("nodes.{sender}.facts") == subject_filter("nodes.n-{sender}") == "nodes.>"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--server nowhere", "--server nowhere: expected a URL"),
        ("--min-size 2K --max-size 1K", "sizes 2048 to 1024"),
        ("--server nats://h:1 -c x.yaml", "--server and --config"),
    ],
)
def test_a_wrong_command_line_is_explained_and_ends_with_2(options: str, problem: str) -> None:
    result = CliRunner().invoke(emulate, options.split())

    assert (result.exit_code, problem in result.output) == (2, True)
