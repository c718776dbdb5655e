"""The target before anything is published: how it is made, what speaks against it, its publisher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from common.errors import ConfigError
from common.settings.ingress import IngressSettings, TargetSettings
from ingress.preflight import add_command, contradictions, problems, stream_config
from ingress.publishers.choose import choose, offered


def target(control_headers: Sequence[str] = (), **keys: Any) -> TargetSettings:
    source = {"site": "us-east", "feed": "NODES", "subject_prefix": "fleet", "control_headers": control_headers}
    return TargetSettings.model_validate({"stream": "FLEET", "sources": [source], **keys})


def created(**keys: Any) -> dict[str, Any]:
    settings = target(**{"create": {}, **keys})
    assert settings.create is not None
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


@pytest.mark.parametrize(
    ("sources", "told"),
    [
        ([source(subject_prefix="fleet", subject_remove="nodes.")], "--subjects 'fleet.>' "),
        ([source(subject_prefix="b"), source(subject_prefix="a")], "--subjects 'a.>,b.>' "),
        (
            [source(site=["eu", "us"], subject_prefix="f.{site}"), source(site="x", subject_prefix="f.{feed}.x")],
            "--subjects 'f.F1.x.>,f.eu.>,f.us.>' ",
        ),
        ([source(subject_prefix="f.{site}.r{incarnation}-{partition}")], "--subjects 'f.us-east.*.>' "),
        ([source(subject_prefix="f.{partition}", subject_remove="nodes.")], "--subjects 'f.*.>' "),
        ([moved("nodes.*", "fleet.{{partition(4,1)}}.$1")], "--subjects 'fleet.*.*' "),
        ([moved("nodes.*", "fleet.$1"), source(subject_prefix="fleet")], "--subjects 'fleet.>' "),
        # What may be anything is asked for by `nats`.
        ([source()], "--storage"),
        ([source(subject_prefix="fleet"), source(site="eu-west")], "--storage"),
        ([source(subject_prefix="fleet", subject_remove="fleet.")], "--storage"),
        ([source(subject_prefix="{site}", subject_remove="east.")], "--storage"),
        ([source(subject_prefix="f.{partition}", subject_remove="7.nodes.")], "--storage"),
    ],
)
def test_the_line_that_makes_a_target_names_the_subjects_that_its_sources_make(
    sources: list[dict[str, Any]], told: str
) -> None:
    line = add_command(target(sources=[{**each, "feed": f"F{n}"} for n, each in enumerate(sources)]))

    assert line.startswith(f"nats stream add FLEET {told}")


def test_what_floe_creates_it_also_takes_and_a_target_of_the_operators_own_may_forget() -> None:
    assert list(problems(created(), target(create={}))) == []
    config = {**created(), "retention": "workqueue", "max_age": 5, "storage": "memory"}
    assert list(problems(config, target())) == []


@pytest.mark.parametrize(
    ("header", "more", "problem"),
    [
        ("Nats-TTL", {}, "allow_msg_ttl: expected true for control_headers nats-ttl, found false"),
        ("Nats-Schedule", {}, "control_headers: expected some of nats-marker-reason, nats-rollup, nats-ttl, found"),
        (
            "Nats-Rollup",
            {"allow_rollup_hdrs": True, "deny_purge": True},
            "deny_purge: expected false for control_headers nats-rollup, found true",
        ),
    ],
)
def test_control_headers_that_the_target_would_refuse_are_named(
    header: str, more: dict[str, Any], problem: str
) -> None:
    (found,) = problems({**created(), **more}, target(control_headers=[header]))
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mirror": {"name": "X"}}, "mirror: expected none"),
        ({"sources": [{"name": "X"}]}, "sources: expected none"),
        ({"subject_transform": {"src": "a", "dest": "b"}}, "subject_transform: expected none"),
        ({"sealed": True}, "sealed: expected false, found true"),
        ({"no_ack": True}, "no_ack: expected false, found true"),
        ({"allow_msg_counter": True}, "allow_msg_counter: expected false, found true"),
        ({"discard_new_per_subject": True}, "discard_new_per_subject: expected false, found true"),
        ({"subject_delete_marker_ttl": 5}, "subject_delete_marker_ttl: expected 0, found more"),
        ({"retention": "interest"}, "retention: expected limits (create), found interest"),
        ({"storage": "memory"}, "storage: expected file (create), found memory"),
        ({"num_replicas": 1}, "num_replicas: expected 3 (create), found 1"),
        ({"max_age": 5}, "max_age: expected 0 (create), found 5"),
        ({"max_bytes": 7}, "max_bytes: expected -1 (create), found 7"),
        ({"subjects": ["fleet.*"]}, "subjects: expected fleet.> (create) among them, found fleet.*"),
    ],
)
def test_a_dangerous_difference_is_named_with_both_values(changes: dict[str, Any], problem: str) -> None:
    settings = target(create={"replicas": 3})
    config = {**created(create={"replicas": 3}), **changes}

    (found,) = problems(config, settings)

    assert found.startswith(problem)


ROLLUP = {"control_headers": ["Nats-Rollup"]}
TO_A = {"source": "nodes.>", "destination": "a.>"}


@pytest.mark.parametrize(
    ("sources", "meeting"),
    [
        ([source(site=["us-east", "eu-west"], subject_prefix="fleet", **ROLLUP)], [0]),
        ([source(site=["us-east", "eu-west"], subject_prefix="fleet.{site}", **ROLLUP)], []),
        ([source(site=["us-east", "eu-west"], subject_prefix="fleet.{feed}.{site}", **ROLLUP)], []),
        ([source(site=["us-east", "eu-west"], feed=["NODES", "LOGS"], subject_prefix="f.{site}", **ROLLUP)], []),
        ([source(site=["us-east", "eu-west"], subject_prefix="fleet")], []),
        ([source(**ROLLUP)], []),
        ([source(**ROLLUP), source(site="eu-west", subject_prefix="eu")], [0]),
        ([source(subject_prefix="us"), source(site="eu-west", **ROLLUP)], [1]),
        ([source(subject_prefix="a", **ROLLUP), source(site="eu-west", subject_prefix="b", **ROLLUP)], []),
        ([source(subject_prefix="a", **ROLLUP), source(site="eu-west", subject_prefix="a.b", **ROLLUP)], [0, 1]),
        ([source(subject_prefix="a", **ROLLUP), source(site="eu-west", subject_transform=TO_A)], [0]),
        ([source(subject_prefix="a", **ROLLUP), source(site="eu", subject_prefix="b", subject_remove="b.")], [0]),
    ],
)
def test_a_source_may_roll_up_only_subjects_that_no_other_site_has(
    sources: list[dict[str, Any]], meeting: list[int]
) -> None:
    settings = target(sources=sources)
    config = {"subjects": [">"], "allow_rollup_hdrs": True}

    found = list(problems(config, settings))

    assert all("control_headers: expected nats-rollup only where no other site" in each for each in found)
    assert [int(each.split(".")[1]) for each in found] == meeting
    keys = [key for key, _ in contradictions(IngressSettings(targets=(settings,)))]
    assert keys == [f"ingress.targets.0.sources.{index}.control_headers" for index in meeting]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ({"subject_prefix": "fleet"}, "fleet.>"),
        ({"subject_prefix": "fleet", "subject_remove": "nodes."}, "fleet.>"),
        ({"subject_prefix": "fleet.{site}"}, "fleet.us-east.>"),
        ({"subject_transform": {"source": ">", "destination": "fleet.>"}}, "fleet.>"),
        ({"subject_transform": {"source": "a.*", "destination": "b.{{split(1,-)}}"}}, "b.>"),
    ],
)
def test_a_source_of_which_nothing_could_be_stored_is_found_at_the_start(source: dict[str, Any], found: str) -> None:
    settings = target(sources=[{"site": "us-east", "feed": "NODES", **source}])

    (problem,) = problems({"subjects": ["other.>", "more.*"]}, settings)

    assert problem == f"sources.0: expected subjects that the target takes (other.>, more.*), found {found}"


@pytest.mark.parametrize(
    "source",
    [
        {},
        {"subject_remove": "x"},
        {"subject_prefix": "more"},
        {"subject_prefix": "m{incarnation}.x"},
        {"subject_prefix": "fleet", "subject_remove": "fleet."},
        {"subject_prefix": "fleet", "subject_remove": ".nodes"},
        {"subject_transform": {"source": "a.*", "destination": "{{split(1,-)}}.b"}},
        {"subject_transform": {"source": "a.*", "destination": "more.$1"}},
    ],
)
def test_a_source_of_which_something_may_be_stored_is_not_refused(source: dict[str, Any]) -> None:
    settings = target(sources=[{"site": "us-east", "feed": "NODES", **source}])

    assert list(problems({"subjects": ["other.>", "more.*"]}, settings)) == []


ATOMIC = {"allow_atomic": True}
BOTH = {"allow_atomic": True, "allow_batched": True}


@pytest.mark.parametrize("name", ["fast", "atomic"])
def test_the_refusal_of_a_publisher_names_the_key_and_the_command(name: str) -> None:
    with pytest.raises(ConfigError, match=f"expected one that it offers, found {name}: the stream says") as error:
        choose("FLEET", name, offered((2, 15, 1), {}, frozenset()))
    assert "nats stream edit FLEET --allow-" in str(error.value.hint)
    assert error.value.code == "E-PUBLISHER"


def test_a_shared_target_gets_no_fast_batches_and_each_publisher_has_its_reason() -> None:
    against = offered((2, 15, 1), BOTH, frozenset(), exclusive=False)
    assert choose("FLEET", "auto", against) == "atomic"
    assert against["fast"] == "exclusive is false, and a foreign message ends a whole batch"
    assert offered((2, 13, 0), {}, frozenset()) == {
        "fast": "nats-server 2.13.0 is older than 2.14",
        "atomic": "the stream says allow_atomic false",
        "single": "",
    }


@pytest.mark.parametrize(
    ("version", "config", "control", "name"),
    [
        ((2, 14, 0), BOTH, frozenset(), "fast"),
        ((2, 14, 0), {"allow_batched": True}, frozenset(), "fast"),
        ((2, 15, 1), BOTH, frozenset({b"nats-rollup"}), "fast"),
        ((2, 13, 9), BOTH, frozenset(), "atomic"),
        ((2, 15, 1), {**ATOMIC, "allow_batched": False}, frozenset(), "atomic"),
        ((2, 10, 26), BOTH, frozenset(), "single"),
        ((2, 12, 0), ATOMIC, frozenset(), "atomic"),
        ((2, 15, 1), ATOMIC, frozenset({b"nats-ttl"}), "atomic"),
        ((2, 11, 9), ATOMIC, frozenset(), "single"),
        ((2, 15, 1), {}, frozenset(), "single"),
        ((2, 15, 1), {"allow_atomic": "yes"}, frozenset(), "single"),
        ((2, 15, 1), ATOMIC, frozenset({b"nats-rollup"}), "single"),
    ],
)
def test_the_publisher_follows_the_server_and_what_the_stream_echoes(
    version: tuple[int, int, int], config: dict[str, Any], control: frozenset[bytes], name: str
) -> None:
    assert choose("FLEET", "auto", offered(version, config, control)) == name
