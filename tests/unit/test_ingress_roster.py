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


def roster(**keys: Any) -> ChainRegistry:
    source = {"site": ["us-east", "eu-west"], "feed": ["NODES", "LOGS"]}
    settings = TargetSettings.model_validate({"stream": "FLEET", "sources": [source], **keys})
    return ChainRegistry(settings, TargetLimits(Accepting([">"]), 1 << 20))


def standing(lanes: ChainRegistry, positions: dict[Chain, int]) -> ChainRegistry:
    lanes.positions = positions
    return lanes


def test_only_listed_sites_and_feeds_get_a_lane() -> None:
    lanes = roster()

    assert lanes.add(CHAIN) is not None
    assert lanes.add(Chain("eu-west", "LOGS", 3, 1)) is not None
    assert lanes.add(Chain("us-east", "SECRETS")) is None
    assert lanes.add(Chain("mars", "NODES")) is None


def test_rows_of_a_chain_that_is_no_longer_listed_are_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="sources: expected mars/NODES, found none"):
        roster().preparer(Chain("mars", "NODES"))


def test_a_lane_continues_at_its_position() -> None:
    lane = standing(roster(), {CHAIN: 42}).add(CHAIN)

    assert lane is not None
    assert (lane.position, lane.has_begun, lane.end) == (42, True, None)


def test_an_incarnation_waits_for_stream_json_then_for_the_ends_of_the_one_before() -> None:
    lanes = roster()
    before, lane = lanes.add(CHAIN), lanes.add(NEXT)
    assert before is not None
    assert lane is not None
    assert lanes.needs_previous() == [NEXT]
    assert standing(lanes, {}).obstacle(NEXT) == "stream.json is not there yet"

    lanes.set_previous(NEXT, {0: 10})

    assert lanes.needs_previous() == []
    assert before.end == 10
    assert standing(lanes, {CHAIN: 10}).obstacle(NEXT) == "us-east/NODES/0000/0 stands at 10 and ends at 10"
    assert standing(lanes, {CHAIN: 11}).obstacle(NEXT) == ""
    assert standing(lanes, {}).obstacle(CHAIN) == ""


def test_an_incarnation_whose_stream_json_names_no_ends_stops() -> None:
    lanes = roster()
    lanes.add(NEXT)
    lanes.set_previous(NEXT, None)

    with pytest.raises(Stopped, match="expected the ends of the incarnation before, found none") as caught:
        lanes.check_may_begin(NEXT, 7)
    assert "--incarnation 1 --partition 0 --sequence 7 --yes" in caught.value.hint


def test_a_new_incarnation_can_be_made_to_wait_for_an_operator_once_the_one_before_is_done() -> None:
    lanes = roster(on_new_incarnation="halt")
    lane = lanes.add(NEXT)
    assert lane is not None
    lanes.set_previous(NEXT, {0: 5})

    assert standing(lanes, {}).obstacle(NEXT) == "us-east/NODES/0000/0 stands at 1 and ends at 5"
    assert standing(lanes, {CHAIN: 6}).obstacle(NEXT) == ""
    with pytest.raises(Stopped, match="a new incarnation begins at 3") as caught:
        lanes.check_may_begin(NEXT, 3)
    assert "floe checkpoint set" in caught.value.hint
    assert caught.value.hint.endswith(
        "--target FLEET --site us-east --feed NODES --incarnation 1 --partition 0 --sequence 3 --yes"
    )
    lanes.check_may_begin(CHAIN, 1)


def test_a_stream_json_that_cannot_be_read_is_named_as_what_the_incarnation_waits_for() -> None:
    lanes = roster()
    lane = lanes.add(NEXT)
    assert lane is not None
    lanes.cannot_read(NEXT, "stream.json is spoiled")

    assert standing(lanes, {}).obstacle(NEXT) == "stream.json is spoiled"


def test_a_partition_that_the_next_incarnation_does_not_know_had_no_coverage() -> None:
    lanes = roster()
    lane = lanes.add(Chain("us-east", "NODES", 0, 5))
    assert lane is not None
    lanes.set_previous(NEXT, {0: 10})

    assert lane.end == 0


def test_once_the_next_incarnation_has_begun_nothing_more_of_the_one_before_is_carried() -> None:
    lanes = roster()
    lane = standing(lanes, {CHAIN: 11, NEXT: 5}).add(CHAIN)

    assert lane is not None
    assert lane.end == 10


def test_a_reset_makes_lanes_anew_and_keeps_what_is_known_of_the_store() -> None:
    lanes = roster()
    former = lanes.add(CHAIN)
    lanes.archive(CHAIN, 99)
    lanes.reset({CHAIN: 50})
    lane = lanes.get(CHAIN)

    assert lane is not None
    assert lane is not former
    assert (lane.position, lane.archived) == (50, 99)
