"""The chains that are carried, and the order in which incarnations begin."""

from collections.abc import Iterator
from typing import Any

import pytest

from common.chain import MAX_INCARNATION, Chain
from common.errors import ConfigError, Stopped
from common.settings.ingress import TargetSettings
from ingress.chains.chain_state import ChainRegistry
from ingress.rows.prepare import SubjectFilters, TargetLimits
from tests.support.ingress import CHAIN

NEXT, LATEST = CHAIN.next_incarnation(), Chain("us-east", "NODES", MAX_INCARNATION)


def new_registry(max_chains: int = 4096, **keys: Any) -> ChainRegistry:
    source = {"site": ["us-east", "eu-west"], "feed": ["NODES", "LOGS"], "max_chains": max_chains}
    settings = TargetSettings.model_validate({"stream": "FLEET", "sources": [source], **keys})
    return ChainRegistry(settings, TargetLimits(SubjectFilters([">"]), 1 << 20))


def obstacle(registry: ChainRegistry, positions: dict[Chain, int], chain: Chain = NEXT) -> str:
    registry.positions = positions
    return registry.obstacle(chain)


def partition(number: int) -> Chain:
    return Chain("us-east", "NODES", 0, number)


def test_only_listed_sites_and_feeds_get_a_lane() -> None:
    registry = new_registry()
    chains = [CHAIN, Chain("eu-west", "LOGS", 3, 1), Chain("us-east", "SECRETS"), Chain("mars", "NODES")]
    assert [registry.add(chain) is not None for chain in chains] == [True, True, False, False]
    with pytest.raises(ConfigError, match="sources: expected mars/NODES, found none"):
        registry.preparer(Chain("mars", "NODES"))


def test_a_lane_begins_and_ends() -> None:
    for positions, chain, found in (
        ({CHAIN: 42}, CHAIN, (42, True, None)),
        ({CHAIN: 11, NEXT: 5}, CHAIN, (11, True, 10)),  # the next incarnation has begun
        ({LATEST: 7}, LATEST, (7, True, None)),  # the last possible incarnation
        ({}, partition(5), (0, False, 0)),  # the next one does not know this partition
    ):
        registry = new_registry()
        registry.positions = positions
        state = registry.add(chain)
        if not positions:
            registry.set_previous_ends(NEXT, {0: 10})
        assert (state.position, state.has_begun, state.end) == found


def test_an_incarnation_waits_for_stream_json_then_for_the_ends_of_the_one_before() -> None:
    registry = new_registry()
    before, *_ = registry.add(CHAIN), registry.add(NEXT), registry.add(LATEST)
    assert registry.stream_documents_to_read(CHAIN) == registry.stream_documents_to_read(NEXT) == [NEXT]
    assert registry.stream_documents_to_read(LATEST) == [LATEST]
    assert obstacle(registry, {}) == "stream.json does not exist yet"
    registry.record_unread(NEXT, "stream.json is spoiled")
    assert obstacle(registry, {}) == "stream.json is spoiled"

    registry.set_previous_ends(NEXT, {0: 10})

    assert registry.stream_documents_to_read(CHAIN) == registry.stream_documents_to_read(NEXT) == []
    assert (before.end, obstacle(registry, {CHAIN: 10})) == (10, "us-east/NODES/0000/0 is at 10 and ends at 10")
    assert obstacle(registry, {CHAIN: 11}) == obstacle(registry, {}, CHAIN) == ""


def test_an_incarnation_waits_until_all_partitions_before_it_have_reached_their_ends() -> None:
    registry, other = new_registry(), partition(1)
    for chain in (CHAIN, other, NEXT):
        registry.add(chain)
    registry.set_previous_ends(NEXT, {0: 10, 1: 20, 2: 0})  # the third never covered anything

    first = "us-east/NODES/0000/0 is at 1 and ends at 10; at most 2 more partitions have not ended"
    assert obstacle(registry, {}) == first
    last = "us-east/NODES/0000/1 is at 20 and ends at 20; at most 1 more partitions have not ended"
    assert (obstacle(registry, {CHAIN: 11, other: 20}), obstacle(registry, {CHAIN: 11, other: 21})) == (last, "")
    registry.reset({CHAIN: 5, other: 21})
    assert "us-east/NODES/0000/0 is at 5" in registry.obstacle(NEXT)


def test_an_incarnation_waits_for_partitions_it_has_not_seen_yet_and_reports_it_briefly() -> None:
    registry = new_registry()
    registry.add(NEXT)
    registry.set_previous_ends(NEXT, dict.fromkeys(range(1024), 9))
    assert len(registry.obstacle(NEXT)) < 200
    assert registry.unknown_before(NEXT) == list(range(1024))
    registry.add(CHAIN)
    assert registry.unknown_before(NEXT) == []


def test_an_incarnation_whose_stream_json_names_no_ends_stops() -> None:
    registry = new_registry()
    registry.add(NEXT)
    registry.set_previous_ends(NEXT, None)

    with pytest.raises(Stopped, match="expected the ends of the incarnation before, found none") as caught:
        registry.check_may_begin(NEXT, 7)
    assert caught.value.hint.endswith("/0001/0 --sequence 7")


def test_a_new_incarnation_can_be_made_to_wait_for_an_operator_once_the_one_before_is_done() -> None:
    registry = new_registry(on_new_incarnation="halt")
    registry.add(NEXT)
    registry.set_previous_ends(NEXT, {0: 5})

    assert obstacle(registry, {}) == "us-east/NODES/0000/0 is at 1 and ends at 5"
    assert obstacle(registry, {CHAIN: 6}) == ""
    with pytest.raises(Stopped, match="a new incarnation begins at 3") as caught:
        registry.check_may_begin(NEXT, 3)
    assert "floe checkpoint set" in caught.value.hint
    assert caught.value.hint.endswith("NODES/0001/0 --sequence 3")
    registry.check_may_begin(CHAIN, 1)


def test_a_reset_makes_new_lanes_and_keeps_what_is_known_of_the_store() -> None:
    registry = new_registry()
    former = registry.add(CHAIN)
    registry.set_archived_end(CHAIN, 99)
    registry.reset({CHAIN: 50})
    state = registry.get(CHAIN)

    assert (state is former, state.position, state.archived) == (False, 50, 99)
    assert [registry.add(CHAIN, end).listing_due for end in (120, 120)] == [False, True], "it may have been a newer one"


class Positions(dict[Chain, int]):
    """Positions that count how often they are iterated, and how often one of them is read."""

    through = asked = 0

    def __iter__(self) -> Iterator[Chain]:
        self.through += 1
        return super().__iter__()

    def get(self, chain: Chain, default: Any = None) -> Any:
        self.asked += 1
        return super().get(chain, default)


@pytest.mark.parametrize(("incarnations", "partitions"), [(600, 1), (150, 4), (2, 300)])
def test_the_work_of_a_start_grows_with_the_chains_only(incarnations: int, partitions: int) -> None:
    registry = new_registry()
    chains = [Chain("us-east", "NODES", n, p) for n in range(incarnations) for p in range(partitions)]
    positions = Positions(dict.fromkeys(chains[:-partitions], 10))
    registry.reset(positions)
    for chain in chains:
        registry.add(chain)
    registry.reset(positions)
    for chain in chains:
        for whole in registry.stream_documents_to_read(chain):
            registry.set_previous_ends(whole, dict.fromkeys(range(partitions), 9))

    assert [registry.obstacle(chain) for chain in chains] == [""] * len(chains)
    ends = {chain: state.end for chain in chains if (state := registry.get(chain)) is not None}
    assert ends == dict.fromkeys(chains[:-partitions], 9) | dict.fromkeys(chains[-partitions:])
    assert positions.through <= 2
    assert positions.asked <= 8 * len(chains)


def test_a_feed_with_too_many_chains_stops_and_no_other_does(caplog: pytest.LogCaptureFixture) -> None:
    registry, positions = new_registry(max_chains=100), Positions({partition(0): 1})
    registry.reset(positions)
    for number in range(300):
        registry.add(partition(number))
    assert len([*registry]) == 100
    asked = positions.asked
    assert [registry.add(partition(number)) for number in range(100, 300)] == [None] * 200  # as each poll does
    assert positions.asked - asked <= 400
    error = registry.feed_error(CHAIN)
    assert (error.code, "expected at most 100 chains" in error.message) == ("E-CHAINS", True)
    assert caplog.text.count("feed stopped") == 1
    for other in (Chain("us-east", "LOGS", 0, 0), Chain("eu-west", "NODES", 0, 0)):
        assert (registry.add(other) is None, registry.feed_error(other)) == (False, None)


def test_chains_that_are_carried_to_their_end_do_not_count() -> None:
    registry = new_registry(max_chains=3)
    chains = [Chain("us-east", "NODES", n) for n in range(20)]
    registry.positions = dict.fromkeys(chains[:-2], 10)
    assert all(registry.add(chain) is not None for chain in chains)
    assert registry.feed_error(CHAIN) is None

    assert [registry.add(Chain("us-east", "NODES", 19, n)) is not None for n in (1, 2)] == [False, False]
    assert registry.feed_error(CHAIN) is not None
    registry.reset({**dict.fromkeys(chains, 10), Chain("us-east", "NODES", 20): 1})
    assert (registry.feed_error(CHAIN), len(list(registry))) == (None, 22)
