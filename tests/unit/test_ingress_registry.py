"""Which chains may flow in, and in which order incarnations begin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from common.chain import MAX_INCARNATION, Chain
from common.errors import ConfigError, Stopped
from common.settings.ingress import TargetSettings
from ingress.chains.chain_state import ChainRegistry
from ingress.rows.prepare import Accepting, TargetLimits

CHAIN = Chain("us-east", "NODES")
WHOLE = CHAIN.site, CHAIN.feed
NEXT = CHAIN.next_incarnation()


def new_registry(max_chains: int = 4096, **keys: Any) -> ChainRegistry:
    source = {"site": ["us-east", "eu-west"], "feed": ["NODES", "LOGS"], "max_chains": max_chains}
    settings = TargetSettings.model_validate({"stream": "FLEET", "sources": [source], **keys})
    return ChainRegistry(settings, TargetLimits(Accepting([">"]), 1 << 20))


def standing(registry: ChainRegistry, positions: dict[Chain, int]) -> ChainRegistry:
    registry.positions = positions
    return registry


def test_only_listed_sites_and_feeds_get_a_lane() -> None:
    registry = new_registry()
    listed = [CHAIN, Chain("eu-west", "LOGS", 3, 1)]
    others = [Chain("us-east", "SECRETS"), Chain("mars", "NODES")]
    assert [registry.add(chain) is not None for chain in (*listed, *others)] == [True, True, False, False]
    with pytest.raises(ConfigError, match="sources: expected mars/NODES, found none"):
        registry.preparer(Chain("mars", "NODES"))


@pytest.mark.parametrize(
    ("positions", "chain", "found"),
    [
        ({CHAIN: 42}, CHAIN, (42, True, None)),
        ({CHAIN: 11, NEXT: 5}, CHAIN, (11, True, 10)),  # the next incarnation has begun
        ({}, Chain("us-east", "NODES", 0, 5), (0, False, 0)),  # the next one does not know this partition
    ],
)
def test_a_lane_continues_at_its_position_and_ends_where_the_next_incarnation_says(
    positions: dict[Chain, int], chain: Chain, found: tuple[int, bool, int | None]
) -> None:
    registry = standing(new_registry(), positions)
    state = registry.add(chain)
    if not positions:
        registry.set_previous(NEXT, {0: 10})
    assert state is not None
    assert (state.position, state.has_begun, state.end) == found


def test_an_incarnation_waits_for_stream_json_then_for_the_ends_of_the_one_before() -> None:
    registry = new_registry()
    before, state = registry.add(CHAIN), registry.add(NEXT)
    assert before is not None
    assert state is not None
    assert registry.needs_previous(CHAIN) == registry.needs_previous(NEXT) == [NEXT]
    assert standing(registry, {}).obstacle(NEXT) == "stream.json is not there yet"

    registry.set_previous(NEXT, {0: 10})

    assert registry.needs_previous(CHAIN) == registry.needs_previous(NEXT) == []
    assert before.end == 10
    assert standing(registry, {CHAIN: 10}).obstacle(NEXT) == "us-east/NODES/0000/0 stands at 10 and ends at 10"
    assert standing(registry, {CHAIN: 11}).obstacle(NEXT) == ""
    assert standing(registry, {}).obstacle(CHAIN) == ""


def test_an_incarnation_waits_until_all_partitions_before_it_have_reached_their_ends() -> None:
    registry, other = new_registry(), Chain("us-east", "NODES", 0, 1)
    for chain in (CHAIN, other, NEXT):
        registry.add(chain)
    registry.set_previous(NEXT, {0: 10, 1: 20, 2: 0})

    first = "us-east/NODES/0000/0 stands at 1 and ends at 10; at most 2 more partitions have not ended"
    assert standing(registry, {}).obstacle(NEXT) == first
    last = "us-east/NODES/0000/1 stands at 20 and ends at 20; at most 1 more partitions have not ended"
    assert standing(registry, {CHAIN: 11, other: 20}).obstacle(NEXT) == last
    assert standing(registry, {CHAIN: 11, other: 21}).obstacle(NEXT) == ""
    registry.reset({CHAIN: 5, other: 21})
    assert "us-east/NODES/0000/0 stands at 5" in registry.obstacle(NEXT)


def test_what_an_incarnation_waits_for_is_a_short_text_however_many_partitions_there_are() -> None:
    registry = new_registry()
    registry.add(NEXT)
    registry.cannot_read(NEXT, "stream.json is spoiled")
    assert standing(registry, {}).obstacle(NEXT) == "stream.json is spoiled"

    registry.set_previous(NEXT, dict.fromkeys(range(1024), 9))
    assert len(registry.obstacle(NEXT)) < 200
    assert registry.unknown_before(NEXT) == list(range(1024))
    registry.add(CHAIN)
    assert registry.unknown_before(NEXT) == []


def test_a_partition_that_never_covered_anything_holds_nobody_up() -> None:
    registry = new_registry()
    registry.add(NEXT)
    registry.set_previous(NEXT, {0: 0})
    assert (registry.obstacle(NEXT), registry.unknown_before(NEXT)) == ("", [])


def test_an_incarnation_whose_stream_json_names_no_ends_stops() -> None:
    registry = new_registry()
    registry.add(NEXT)
    registry.set_previous(NEXT, None)

    with pytest.raises(Stopped, match="expected the ends of the incarnation before, found none") as caught:
        registry.check_may_begin(NEXT, 7)
    assert "--incarnation 1 --partition 0 --sequence 7 --yes" in caught.value.hint


def test_a_new_incarnation_can_be_made_to_wait_for_an_operator_once_the_one_before_is_done() -> None:
    registry = new_registry(on_new_incarnation="halt")
    registry.add(NEXT)
    registry.set_previous(NEXT, {0: 5})

    assert standing(registry, {}).obstacle(NEXT) == "us-east/NODES/0000/0 stands at 1 and ends at 5"
    assert standing(registry, {CHAIN: 6}).obstacle(NEXT) == ""
    with pytest.raises(Stopped, match="a new incarnation begins at 3") as caught:
        registry.check_may_begin(NEXT, 3)
    where = "--target FLEET --site us-east --feed NODES --incarnation 1 --partition 0 --sequence 3 --yes"
    assert "floe checkpoint set" in caught.value.hint
    assert caught.value.hint.endswith(where)
    registry.check_may_begin(CHAIN, 1)


def test_a_reset_makes_lanes_anew_and_keeps_what_is_known_of_the_store() -> None:
    registry = new_registry()
    former = registry.add(CHAIN)
    registry.archive(CHAIN, 99)
    registry.reset({CHAIN: 50})
    state = registry.get(CHAIN)

    assert state is not None
    assert state is not former
    assert (state.position, state.archived) == (50, 99)


def test_a_feed_that_has_stopped_refuses_each_further_chain_without_a_search() -> None:
    registry, positions = new_registry(max_chains=100), Positions()
    registry.reset(positions)
    for partition in range(300):
        registry.add(Chain("us-east", "NODES", 0, partition))
    assert len([*registry]) == 100
    asked = positions.asked
    for partition in range(100, 300):  # as each poll of the store does
        assert registry.add(Chain("us-east", "NODES", 0, partition)) is None
    assert positions.asked - asked <= 400
    assert registry.stop_of(CHAIN) is not None
    assert registry.add(Chain("eu-west", "NODES")) is not None


class Positions(dict[Chain, int]):
    """Positions that count how often they are looked through, and how often they are asked for one of them."""

    through = asked = 0

    def __iter__(self) -> Iterator[Chain]:
        self.through += 1
        return super().__iter__()

    def get(self, chain: Chain, default: Any = None) -> Any:
        self.asked += 1
        return super().get(chain, default)


@pytest.mark.parametrize(("incarnations", "partitions"), [(600, 1), (150, 4), (2, 300)])
def test_the_work_of_a_start_grows_with_the_chains_and_not_with_their_square(
    incarnations: int, partitions: int
) -> None:
    registry = new_registry()
    chains = [Chain("us-east", "NODES", n, p) for n in range(incarnations) for p in range(partitions)]
    positions = Positions(dict.fromkeys(chains[:-partitions], 10))
    registry.reset(positions)
    for chain in chains:
        registry.add(chain)
    registry.reset(positions)
    for chain in chains:
        for whole in registry.needs_previous(chain):
            registry.set_previous(whole, dict.fromkeys(range(partitions), 9))

    assert [registry.obstacle(chain) for chain in chains] == [""] * len(chains)
    ends = {chain: state.end for chain in chains if (state := registry.get(chain)) is not None}
    assert ends == dict.fromkeys(chains[:-partitions], 9) | dict.fromkeys(chains[-partitions:])
    assert positions.through <= 2
    assert positions.asked <= 8 * len(chains)


def test_the_last_incarnation_that_there_can_be_is_carried_like_any_other() -> None:
    registry = new_registry()
    last = Chain("us-east", "NODES", MAX_INCARNATION)
    state = standing(registry, {last: 7}).add(last)

    assert state is not None
    assert (state.position, state.end, registry.needs_previous(last)) == (7, None, [Chain(*WHOLE, MAX_INCARNATION)])


def test_a_feed_with_too_many_chains_stops_and_no_other_feed_does(caplog: pytest.LogCaptureFixture) -> None:
    registry = new_registry(max_chains=3)
    for partition in range(6):
        registry.add(Chain("us-east", "NODES", 0, partition))
        registry.add(Chain("us-east", "NODES", 0, partition))
    others = [Chain("us-east", "LOGS", 0, 0), Chain("eu-west", "NODES", 0, 0)]

    assert len(list(registry)) == 3
    assert registry.add(Chain("us-east", "NODES", 0, 4)) is None
    error = registry.stop_of(CHAIN)
    assert error is not None
    assert (error.code, "expected at most 3 chains" in error.message) == ("E-CHAINS", True)
    assert caplog.text.count("feed stopped") == 1
    assert [registry.add(chain) is not None for chain in others] == [True, True]
    assert [registry.stop_of(chain) for chain in others] == [None, None]


def test_chains_that_are_carried_to_their_end_do_not_count() -> None:
    registry = new_registry(max_chains=3)
    chains = [Chain("us-east", "NODES", n) for n in range(20)]
    standing(registry, dict.fromkeys(chains[:-2], 10))
    assert all(registry.add(chain) is not None for chain in chains)
    assert registry.stop_of(CHAIN) is None

    assert [registry.add(Chain("us-east", "NODES", 19, n)) is not None for n in (1, 2)] == [False, False]
    assert registry.stop_of(CHAIN) is not None
    registry.reset({**dict.fromkeys(chains, 10), Chain("us-east", "NODES", 20): 1})
    assert registry.stop_of(CHAIN) is None
    assert len(list(registry)) == 22
