"""Patterns in `sources`: the feeds of the store that a target takes, and those that it names and does not take."""

from itertools import permutations
from typing import Any

import pytest

from common.archive.documents import TargetPositions
from common.chain import Chain
from common.errors import ConfigError
from common.settings.ingress import TargetSettings
from common.settings.root import Settings
from ingress.chains.chain_state import ChainRegistry
from ingress.chains.sources import plan_sources
from ingress.rows.prepare import SubjectFilters, TargetLimits, patterns_of

EDGE = {"site": "edge-*", "feed": "*", "subject_prefix": "fleet.{site}"}
NINES = {"site": "*-9", "feed": "NODES", "subject_prefix": "nines"}
LOOP = {"site": "s*", "feed": "f*"}
NAMED = {"site": ["edge-1", "hq"], "feed": "NODES", "subject_prefix": "named"}


def target(*sources: dict[str, Any], **keys: Any) -> TargetSettings:
    return TargetSettings.model_validate({"stream": "FLEET", "sources": sources, **keys})


def feeds(text: str) -> set[tuple[str, str]]:
    return {(site, feed) for each in text.split() for site, _, feed in [each.partition("/")]}


def registry(*sources: dict[str, Any]) -> ChainRegistry:
    return ChainRegistry(target(*sources), TargetLimits(SubjectFilters([">"]), 1 << 20))


@pytest.mark.parametrize("sources", [*permutations((EDGE, NINES, NAMED))])
def test_a_feed_flows_in_by_its_name_or_by_the_one_pattern_that_matches(sources: tuple[dict[str, Any], ...]) -> None:
    settings = target(*sources)
    plan = plan_sources(settings, feeds("edge-1/NODES edge-1/LOGS edge-9/NODES edge-9/LOGS x-9/NODES x/NODES"), set())
    prefixes = {"/".join(feed): source.subject_prefix for feed, source in plan.taken.items()}
    assert prefixes == {"edge-1/LOGS": "fleet.{site}", "edge-9/LOGS": "fleet.{site}", "x-9/NODES": "nines"}
    first, second = sorted((sources.index(EDGE), sources.index(NINES)))
    reason = f"sources.{first} and sources.{second} match it: name it in one of them"
    assert plan.untaken == {("edge-9", "NODES"): reason}
    assert {*settings.feed_sources} == feeds("edge-1/NODES hq/NODES")
    assert plan.untaken_texts() == [f"edge-9/NODES: {reason}"]
    assert settings.listed_feeds(feeds("edge-9/NODES x/NODES")) == feeds("edge-1/NODES hq/NODES edge-9/NODES")


LIMITS = [
    ({"max_sites": 2}, "", "", "a/A a/B b/A"),
    ({"max_sites": 2}, "c/A", "", "a/A a/B c/A"),
    ({"max_sites": 2}, "c/A d/A", "", "c/A d/A"),
    ({"max_sites": 2}, "c/A", "d/A", "c/A d/A"),
    ({"max_sites": 4}, "", "", "a/A a/B b/A c/A d/A"),
    ({"max_chains": 1}, "a/B", "", "a/B b/A c/A d/A"),
]


@pytest.mark.parametrize(("limit", "stored", "before", "taken"), LIMITS)
def test_a_limit_leaves_those_that_have_begun_then_the_first_by_name(
    limit: dict[str, int], stored: str, before: str, taken: str
) -> None:
    known, settings = feeds("a/A a/B b/A c/A d/A"), target({"site": "*", "feed": "*", **limit})
    plan = plan_sources(settings, known, feeds(stored), feeds(before))
    assert ({*plan.taken}, {*plan.untaken}) == (feeds(taken), known - feeds(taken))


def test_a_process_gives_up_no_feed_and_names_a_refused_one_once(caplog: pytest.LogCaptureFixture) -> None:
    chains = registry({"site": "*", "feed": "A", "max_sites": 1})
    assert chains.take_feeds(feeds("c/A")) == []
    chains.reset({})
    assert chains.take_feeds(feeds("c/A x/B")) == [("c", "A")]
    chains.reset({Chain("b", "A"): 7})
    assert [chains.take_feeds(feeds("b/A c/A x/B")) for _ in range(2)] == [[], []]
    assert caplog.text.count("b/A: its site is beyond max_sites of sources.0, 1") == 1
    assert (chains.patterns.may_take(("b", "A")), chains.patterns.may_take(("d", "A"))) == (False, True)
    assert [chains.add(Chain(site, "A")) is not None for site in "bc"] == [False, True]


def test_rows_of_an_open_intent_are_prepared_before_the_store_was_read() -> None:
    chains = registry(EDGE, NINES)
    assert chains.preparer(Chain("edge-1", "NODES"))._rule.apply(b"x") == b"fleet.edge-1.x"  # type: ignore[union-attr]
    for site in ("edge-9", "mars"):
        with pytest.raises(ConfigError, match=f"sources: expected {site}/NODES, found none"):
            chains.preparer(Chain(site, "NODES"))


def test_the_subjects_of_a_pattern_are_wildcards_and_cover_those_of_its_sites() -> None:
    wide, one = EDGE | {"feed": "NODES"}, {"site": "hq", "feed": "NODES", "subject_prefix": "fleet.{site}"}
    assert target(wide, one, NINES, create={}).subjects_to_create() == ("fleet.*.>", "nines.>")
    assert patterns_of(target(EDGE).sources[0]) == ["fleet.*.>"]
    assert patterns_of(target({**EDGE, "subject_remove": "edge-"}).sources[0]) is None


def test_a_pattern_that_takes_the_archive_of_its_own_target_is_a_loop() -> None:
    for site, name, found in (("s", "f", 1), ("s", "g", 0), ("other", "f", 0)):
        egress, ingress = {"feeds": [{"stream": "FLEET", "name": name}]}, {"targets": [target(EDGE, LOOP)]}
        settings = Settings(site=site, store={"url": "s3://floe"}, egress=egress, ingress=ingress)  # type: ignore[arg-type]
        assert [key for key, _ in settings.loop_problems()] == ["ingress.targets.0.sources.1"] * found


def test_retention_keeps_a_feed_that_a_pattern_matches_until_it_has_begun() -> None:
    positions = TargetPositions("FLEET", 0.0, {Chain("edge-1", "A"): 7}, ("edge-*/*",))
    chains = Chain("edge-1", "A"), Chain("edge-2", "B"), Chain("x", "A")
    assert [positions.needed_from(chain, 3) for chain in chains] == [7, 3, None]
