"""The fleet that the emulator publishes: plausible, varied, and the same again for the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from common.errors import UsageError
from infra.cli import emulate
from infra.emulator import PublishSchedule, subject_filter
from infra.fleet import Facts, Fleet, Sizes, describe, read_facts

NOW = 1_700_000_000.0
FACTS = read_facts()


def fleet(seed: int = 1, nodes: int = 200, sizes: Sizes | None = None, facts: Facts = FACTS) -> Fleet:
    return Fleet(facts, seed=seed, nodes=nodes, sizes=sizes)


def documents(made: Fleet, turn: int = 0) -> list[dict[str, object]]:
    return [json.loads(made.document(node, turn, NOW)) for node in range(made.nodes)]


def test_a_document_names_its_sender_its_time_facts_and_status() -> None:
    made = fleet()
    document = documents(made)[7]

    assert document["sender"] == made.sender(7)
    assert document["timestamp"] == int(NOW)
    assert {"agents", "classes", "facts", "status"} <= document.keys()


def test_facts_are_this_machines_own() -> None:
    packages = [document["facts"]["packages"] for document in documents(fleet())]

    assert all(set(chosen) <= set(FACTS.packages) for chosen in packages)
    assert documents(fleet())[0]["facts"]["os"] == FACTS.os


def test_every_node_has_a_name_of_its_own() -> None:
    made = fleet(nodes=5000)

    assert len({made.sender(node) for node in range(5000)}) == 5000


def test_documents_are_between_one_and_fifteen_kilobytes_and_of_many_sizes() -> None:
    made = fleet()
    sizes = [len(made.document(node, 0, NOW)) for node in range(200)]

    assert min(sizes) >= 800
    assert max(sizes) <= 16 * 1024
    assert len(set(sizes)) > 30
    assert max(sizes) > 3 * min(sizes)


def test_sizes_follow_the_range_that_was_asked_for() -> None:
    made = fleet(sizes=Sizes(2000, 3000))
    sizes = [len(made.document(node, 0, NOW)) for node in range(200)]

    assert min(sizes) >= 1500
    assert max(sizes) <= 3300


def test_the_same_seed_makes_the_same_fleet_and_another_seed_another() -> None:
    assert documents(fleet(seed=5)) == documents(fleet(seed=5))
    assert documents(fleet(seed=5)) != documents(fleet(seed=6))


def test_uptime_and_counters_grow_and_load_changes_from_turn_to_turn() -> None:
    first, second = (documents(fleet(), turn)[3]["status"] for turn in (0, 1))

    assert second["uptime"] == first["uptime"] + 300
    assert second["valid_messages"] > first["valid_messages"]
    assert second["load"] != first["load"]


def test_a_node_is_upgraded_now_and_then_and_its_document_changes_size() -> None:
    made = fleet()
    sizes = {len(made.document(3, turn, NOW)) // 100 for turn in range(0, 400, 48)}

    assert len(sizes) > 2


def test_a_fleet_can_be_made_on_a_machine_that_shows_nothing(tmp_path: Path) -> None:
    made = fleet(facts=read_facts(tmp_path))

    assert len(documents(made)) == 200
    assert "packages" in describe(read_facts(tmp_path))


@pytest.mark.parametrize(("least", "most"), [(0, 10), (11, 10)])
def test_refuses_impossible_sizes(least: int, most: int) -> None:
    with pytest.raises(UsageError, match="the smaller first"):
        Sizes(least, most)


def test_each_node_publishes_once_in_an_interval() -> None:
    pace = PublishSchedule(nodes=300, interval=60)

    assert pace.per_second() == 5
    assert [pace.due(elapsed) for elapsed in (0, 0.5, 1, 60)] == [1, 3, 6, 301]


def test_a_rate_counts_for_the_whole_fleet_and_zero_means_as_fast_as_possible() -> None:
    assert PublishSchedule(nodes=10, rate=200).due(0.5) == 101
    assert PublishSchedule(nodes=10, rate=0, count=77).due(0.001) == 77


def test_stops_at_the_count_or_after_the_duration() -> None:
    pace = PublishSchedule(nodes=10, rate=100, count=50, duration=2)

    assert not pace.is_over(49, 1.9)
    assert pace.is_over(50, 0.1)
    assert pace.is_over(0, 2)
    assert not PublishSchedule(nodes=1).is_over(10**9, 10**9)


@pytest.mark.parametrize("wrong", [{"interval": 0}, {"rate": -1}])
def test_refuses_a_pace_that_never_comes(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="expected more than 0 seconds"):
        PublishSchedule(nodes=1, **wrong)


@pytest.mark.parametrize(
    ("subject", "stream"),
    [
        ("choria.node_metadata.{sender}", "choria.node_metadata.>"),
        ("nodes.{sender}.facts", "nodes.>"),
        ("nodes.n-{sender}", "nodes.>"),
    ],
)
def test_a_created_stream_takes_the_subjects_that_are_published(subject: str, stream: str) -> None:
    assert subject_filter(subject) == stream


@pytest.mark.parametrize("subject", ["nodes", "{sender}", "x{sender}.y", ".{sender}"])
def test_refuses_a_subject_without_a_place_for_the_node(subject: str) -> None:
    with pytest.raises(UsageError, match="expected a first token and then"):
        subject_filter(subject)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--server", "nowhere"], "--server nowhere: expected a URL"),
        (["--min-size", "2K", "--max-size", "1K"], "sizes 2048 to 1024"),
        (["--server", "nats://h:1", "-c", "x.yaml"], "--server and --config"),
        (["--rate", "-1"], "--rate"),
        (["--interval", "5"], "expected a duration"),
    ],
)
def test_a_wrong_command_line_is_explained_and_ends_with_2(options: list[str], problem: str) -> None:
    result = CliRunner().invoke(emulate, options)

    assert result.exit_code == 2
    assert problem in result.output
