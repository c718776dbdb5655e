"""Which chains may flow in, and in which order incarnations begin."""

from __future__ import annotations

from typing import Any

import pytest

from common.chain import Chain
from common.errors import ConfigError, Stopped
from common.settings.ingress import TargetSettings
from ingress.chains.chain_state import ChainRegistry
from ingress.rows.prepare import Accepting, TargetLimits

CHAIN = Chain("us-east", "NODES")
NEXT = CHAIN.next_incarnation()


def new_registry(**keys: Any) -> ChainRegistry:
    source = {"site": ["us-east", "eu-west"], "feed": ["NODES", "LOGS"]}
    settings = TargetSettings.model_validate({"stream": "FLEET", "sources": [source], **keys})
    return ChainRegistry(settings, TargetLimits(Accepting([">"]), 1 << 20))


def standing(registry: ChainRegistry, positions: dict[Chain, int]) -> ChainRegistry:
    registry.positions = positions
    return registry


def test_only_listed_sites_and_feeds_get_a_lane() -> None:
    registry = new_registry()

    assert registry.add(CHAIN) is not None
    assert registry.add(Chain("eu-west", "LOGS", 3, 1)) is not None
    assert registry.add(Chain("us-east", "SECRETS")) is None
    assert registry.add(Chain("mars", "NODES")) is None


def test_rows_of_a_chain_that_is_no_longer_listed_are_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="sources: expected mars/NODES, found none"):
        new_registry().preparer(Chain("mars", "NODES"))


def test_a_lane_continues_at_its_position() -> None:
    state = standing(new_registry(), {CHAIN: 42}).add(CHAIN)

    assert state is not None
    assert (state.position, state.has_begun, state.end) == (42, True, None)


def test_an_incarnation_waits_for_stream_json_then_for_the_ends_of_the_one_before() -> None:
    registry = new_registry()
    before, state = registry.add(CHAIN), registry.add(NEXT)
    assert before is not None
    assert state is not None
    assert registry.needs_previous() == [NEXT]
    assert standing(registry, {}).obstacle(NEXT) == "stream.json is not there yet"

    registry.set_previous(NEXT, {0: 10})

    assert registry.needs_previous() == []
    assert before.end == 10
    assert standing(registry, {CHAIN: 10}).obstacle(NEXT) == "us-east/NODES/0000/0 stands at 10 and ends at 10"
    assert standing(registry, {CHAIN: 11}).obstacle(NEXT) == ""
    assert standing(registry, {}).obstacle(CHAIN) == ""


def test_an_incarnation_whose_stream_json_names_no_ends_stops() -> None:
    registry = new_registry()
    registry.add(NEXT)
    registry.set_previous(NEXT, None)

    with pytest.raises(Stopped, match="expected the ends of the incarnation before, found none") as caught:
        registry.check_may_begin(NEXT, 7)
    assert "--incarnation 1 --partition 0 --sequence 7 --yes" in caught.value.hint


def test_a_new_incarnation_can_be_made_to_wait_for_an_operator_once_the_one_before_is_done() -> None:
    registry = new_registry(on_new_incarnation="halt")
    state = registry.add(NEXT)
    assert state is not None
    registry.set_previous(NEXT, {0: 5})

    assert standing(registry, {}).obstacle(NEXT) == "us-east/NODES/0000/0 stands at 1 and ends at 5"
    assert standing(registry, {CHAIN: 6}).obstacle(NEXT) == ""
    with pytest.raises(Stopped, match="a new incarnation begins at 3") as caught:
        registry.check_may_begin(NEXT, 3)
    assert "floe checkpoint set" in caught.value.hint
    assert caught.value.hint.endswith(
        "--target FLEET --site us-east --feed NODES --incarnation 1 --partition 0 --sequence 3 --yes"
    )
    registry.check_may_begin(CHAIN, 1)


def test_a_stream_json_that_cannot_be_read_is_named_as_what_the_incarnation_waits_for() -> None:
    registry = new_registry()
    state = registry.add(NEXT)
    assert state is not None
    registry.cannot_read(NEXT, "stream.json is spoiled")

    assert standing(registry, {}).obstacle(NEXT) == "stream.json is spoiled"


def test_a_partition_that_the_next_incarnation_does_not_know_had_no_coverage() -> None:
    registry = new_registry()
    state = registry.add(Chain("us-east", "NODES", 0, 5))
    assert state is not None
    registry.set_previous(NEXT, {0: 10})

    assert state.end == 0


def test_once_the_next_incarnation_has_begun_nothing_more_of_the_one_before_is_carried() -> None:
    registry = new_registry()
    state = standing(registry, {CHAIN: 11, NEXT: 5}).add(CHAIN)

    assert state is not None
    assert state.end == 10


def test_a_reset_makes_lanes_anew_and_keeps_what_is_known_of_the_store() -> None:
    registry = new_registry()
    former = registry.add(CHAIN)
    registry.archive(CHAIN, 99)
    registry.reset({CHAIN: 50})
    state = registry.get(CHAIN)

    assert state is not None
    assert state is not former
    assert (state.position, state.archived) == (50, 99)
