"""Checks of the target before anything is published: its creation, its problems, its publisher."""

from collections.abc import Sequence
from typing import Any

import pytest

from common.errors import ConfigError
from common.settings.ingress import IngressSettings, TargetSettings
from ingress.preflight import add_command, config_problems, settings_problems, stream_config
from ingress.publishers.batches import choose_publisher, objections


def target(control_headers: Sequence[str] = (), **keys: Any) -> TargetSettings:
    source = {"site": "us-east", "feed": "NODES", "subject_prefix": "fleet", "control_headers": control_headers}
    return TargetSettings.model_validate({"stream": "FLEET", "sources": [source], **keys})


def created(**keys: Any) -> dict[str, Any]:
    settings = target(**{"create": {}, **keys})
    return stream_config(settings, settings.create)


def test_a_created_target_allows_batches_and_what_its_control_headers_need_and_keeps_everything() -> None:
    headers = ["Nats-TTL", "Nats-Rollup"]
    config = created(create={"replicas": 3, "max_age": "1d", "max_bytes": "1G"}, control_headers=headers)
    expected = {
        **dict.fromkeys(("allow_atomic", "allow_batched", "allow_direct", "allow_msg_ttl", "allow_rollup_hdrs"), True),
        "subjects": ["fleet.>"],
        "retention": "limits",
        "discard": "old",
        "num_replicas": 3,
        "max_age": 86_400_000_000_000,
        "max_bytes": 1 << 30,
    }
    assert config.items() >= expected.items()


def test_the_line_that_makes_a_missing_target_can_be_pasted_and_allows_what_its_control_headers_need() -> None:
    assert add_command(target()) == (
        "nats stream add FLEET --subjects 'fleet.>' --storage file --replicas 1 --retention limits "
        "--discard old --allow-batch --allow-fast --allow-direct --defaults"
    )
    line = add_command(target(control_headers=["Nats-TTL", "Nats-Rollup", "Nats-Marker-Reason"]))
    assert line.endswith("--allow-direct --allow-msg-ttl --allow-rollup --defaults")


def source(**keys: Any) -> dict[str, Any]:
    return {"site": "us-east", "feed": "NODES", **keys}


def moved(before: str, after: str) -> dict[str, Any]:
    return source(subject_transform={"source": before, "destination": after})


SUBJECT_OPTIONS = [
    ([source(subject_prefix="fleet", subject_remove="nodes.")], "--subjects 'fleet.>' "),
    ([source(subject_prefix="b"), source(subject_prefix="a")], "--subjects 'a.>,b.>' "),
    (
        [source(site=["eu", "us"], subject_prefix="f.{site}"), source(site="x", subject_prefix="f.{feed}.x")],
        "--subjects 'f.F1.x.>,f.eu.>,f.us.>' ",
    ),
    ([source(subject_prefix="f.{site}.r{incarnation}-{partition}")], "--subjects 'f.us-east.*.>' "),
    ([moved("nodes.*", "fleet.{{partition(4,1)}}.$1")], "--subjects 'fleet.*.*' "),
    ([moved("nodes.*", "fleet.$1"), source(subject_prefix="fleet")], "--subjects 'fleet.>' "),
    # `nats` asks for values that may be anything.
    ([source()], "--storage"),
    ([source(subject_prefix="fleet", subject_remove="fleet.")], "--storage"),
    ([source(subject_prefix="{site}", subject_remove="east.")], "--storage"),
    ([source(subject_prefix="f.{partition}", subject_remove="7.nodes.")], "--storage"),
]


@pytest.mark.parametrize(("sources", "rest"), SUBJECT_OPTIONS)
def test_the_line_that_makes_a_target_names_its_subjects(sources: list[dict[str, Any]], rest: str) -> None:
    line = add_command(target(sources=[{**each, "feed": f"F{n}"} for n, each in enumerate(sources)]))

    assert line.startswith(f"nats stream add FLEET {rest}")


def test_what_floe_creates_it_also_takes_and_a_target_of_the_operators_own_may_forget() -> None:
    assert list(config_problems(created(), target(create={}))) == []
    lossy = {**created(), "persist_mode": "async"}
    assert list(config_problems(lossy, target(create={}, allow_async_persist=True))) == []
    config = {**created(), "retention": "workqueue", "max_age": 5, "storage": "memory"}
    assert list(config_problems(config, target())) == []


DANGEROUS = [
    ({"mirror": {"name": "X"}}, "mirror: expected none"),
    ({"sources": [{"name": "X"}]}, "sources: expected none"),
    ({"subject_transform": {"src": "a", "dest": "b"}}, "subject_transform: expected none"),
    *(({key: True}, f"{key}: expected false, found true") for key in ("sealed", "no_ack", "allow_msg_counter")),
    ({"discard_new_per_subject": True}, "discard_new_per_subject: expected false, found true"),
    ({"persist_mode": "async"}, "persist_mode: expected default, found async"),
    ({"subject_delete_marker_ttl": 5}, "subject_delete_marker_ttl: expected 0, found more"),
    ({"retention": "interest"}, "retention: expected limits (create), found interest"),
    ({"storage": "memory"}, "storage: expected file (create), found memory"),
    ({"num_replicas": 1}, "num_replicas: expected 3 (create), found 1"),
    ({"max_age": 5}, "max_age: expected 0 (create), found 5"),
    ({"max_bytes": 7}, "max_bytes: expected -1 (create), found 7"),
    ({"subjects": ["fleet.*"]}, "subjects: expected fleet.> (create) among them, found fleet.*"),
    ({"allow_msg_ttl": False}, "allow_msg_ttl: expected true for control_headers nats-ttl, found false"),
    ({"deny_purge": True}, "deny_purge: expected false for control_headers nats-rollup, found true"),
]


@pytest.mark.parametrize(("changes", "problem"), DANGEROUS)
def test_a_dangerous_difference_is_named_with_both_values(changes: dict[str, Any], problem: str) -> None:
    keys = {"create": {"replicas": 3}, "control_headers": ["Nats-TTL", "Nats-Rollup"]}

    (found,) = config_problems({**created(**keys), **changes}, target(**keys))

    assert found.startswith(problem)


def test_a_control_header_that_none_may_be_is_named() -> None:
    (found,) = config_problems(created(), target(control_headers=["Nats-Schedule"]))
    assert found.startswith("control_headers: expected some of nats-marker-reason, nats-rollup, nats-ttl, found")


ROLLUP = {"control_headers": ["Nats-Rollup"]}
TO_A = {"source": "nodes.>", "destination": "a.>"}


ROLLUPS = [
    ([source(site=["us-east", "eu-west"], subject_prefix="fleet", **ROLLUP)], [0]),
    ([source(site=["us-east", "eu-west"], subject_prefix="fleet.{feed}.{site}", **ROLLUP)], []),
    ([source(site="*", subject_prefix="fleet", **ROLLUP)], [0]),
    ([source(site="*", subject_prefix="fleet.{site}", **ROLLUP)], []),
    ([source(site=["us-east", "eu-west"], feed=["NODES", "LOGS"], subject_prefix="f.{site}", **ROLLUP)], []),
    ([source(site=["us-east", "eu-west"], subject_prefix="fleet")], []),
    ([source(**ROLLUP), source(site="eu-west", subject_prefix="eu")], [0]),
    ([source(subject_prefix="a", **ROLLUP), source(site="eu-west", subject_prefix="b", **ROLLUP)], []),
    ([source(subject_prefix="a", **ROLLUP), source(site="eu-west", subject_prefix="a.b", **ROLLUP)], [0, 1]),
    ([source(subject_prefix="a", **ROLLUP), source(site="eu-west", subject_transform=TO_A)], [0]),
    ([source(subject_prefix="a", **ROLLUP), source(site="eu", subject_prefix="b", subject_remove="b.")], [0]),
]


@pytest.mark.parametrize(("sources", "meeting"), ROLLUPS)
def test_a_source_rolls_up_only_its_own_subjects(sources: list[dict[str, Any]], meeting: list[int]) -> None:
    settings = target(sources=sources)
    config = {"subjects": [">"], "allow_rollup_hdrs": True}

    found = list(config_problems(config, settings))

    assert all("control_headers: expected nats-rollup only if no other site" in each for each in found)
    assert [int(each.split(".")[1]) for each in found] == meeting
    keys = [key for key, _ in settings_problems(IngressSettings(targets=(settings,)))]
    assert keys == [f"ingress.targets.0.sources.{index}.control_headers" for index in meeting]


STORING = [
    ({"subject_prefix": "fleet"}, "fleet.>"),
    ({"subject_prefix": "fleet", "subject_remove": "nodes."}, "fleet.>"),
    ({"subject_prefix": "fleet.{site}"}, "fleet.us-east.>"),
    ({"subject_transform": {"source": ">", "destination": "fleet.>"}}, "fleet.>"),
    ({"subject_transform": {"source": "a.*", "destination": "b.{{split(1,-)}}"}}, "b.>"),
    ({}, None),
    ({"subject_prefix": "m{incarnation}.x"}, None),
    ({"subject_prefix": "fleet", "subject_remove": "fleet."}, None),
    ({"subject_prefix": "fleet", "subject_remove": ".nodes"}, None),
    ({"subject_transform": {"source": "a.*", "destination": "{{split(1,-)}}.b"}}, None),
    ({"subject_transform": {"source": "a.*", "destination": "more.$1"}}, None),
]


@pytest.mark.parametrize(("source", "found"), STORING)
def test_a_source_that_could_store_nothing_is_found(source: dict[str, Any], found: str | None) -> None:
    settings = target(sources=[{"site": "us-east", "feed": "NODES", **source}])
    expected = [f"sources.0: expected subjects that the target takes (other.>, more.*), found {found}"] if found else []

    assert list(config_problems({"subjects": ["other.>", "more.*"]}, settings)) == expected


ATOMIC, BOTH = {"allow_atomic": True}, {"allow_atomic": True, "allow_batched": True}


def test_each_publisher_has_its_reason_and_a_refusal_names_the_key_and_the_command() -> None:
    against = objections((2, 15, 1), BOTH, frozenset(), exclusive=False)
    assert choose_publisher("FLEET", "auto", against) == "atomic"
    assert against["fast"] == "exclusive is false, and a foreign message ends a whole batch"
    reasons = {"fast": "nats-server 2.13.0 is older than 2.14", "atomic": "the stream has allow_atomic false"}
    assert objections((2, 13, 0), {}, frozenset()) == {**reasons, "single": ""}
    for name in ("fast", "atomic"):
        with pytest.raises(ConfigError, match=f"expected a supported one, found {name}: the stream has") as error:
            choose_publisher("FLEET", name, objections((2, 15, 1), {}, frozenset()))
        assert (error.value.code, "nats stream edit FLEET --allow-" in error.value.hint) == ("E-PUBLISHER", True)


PUBLISHERS = [
    ((2, 14, 0), BOTH, "", "fast"),
    ((2, 14, 0), {"allow_batched": True}, "", "fast"),
    ((2, 15, 1), BOTH, "nats-rollup", "fast"),
    ((2, 13, 9), BOTH, "", "atomic"),
    ((2, 15, 1), {**ATOMIC, "allow_batched": False}, "", "atomic"),
    ((2, 12, 0), ATOMIC, "", "atomic"),
    ((2, 15, 1), ATOMIC, "nats-ttl", "atomic"),
    ((2, 11, 9), BOTH, "", "single"),
    ((2, 15, 1), {"allow_atomic": "yes"}, "", "single"),
    ((2, 15, 1), ATOMIC, "nats-rollup", "single"),
]


@pytest.mark.parametrize(("version", "config", "control", "name"), PUBLISHERS)
def test_the_publisher_follows_the_server_and_what_the_stream_echoes(
    version: tuple[int, int, int], config: dict[str, Any], control: str, name: str
) -> None:
    acting = frozenset({control.encode()} if control else ())
    assert choose_publisher("FLEET", "auto", objections(version, config, acting)) == name
