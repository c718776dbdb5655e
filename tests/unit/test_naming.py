"""Names of sites, feeds and chains, resolved among the existing chains; an unknown name is an error that lists them."""

from typing import Any

import pytest

from common.archive import catalog
from common.archive.catalog import MAX_LISTED_NAMES, ChainName, parse_chain_name, suggestion
from common.chain import Chain
from common.errors import UsageError
from common.settings.root import Settings

OLD, NEW = Chain("us-east", "NODES"), Chain("us-east", "NODES", 1)
PARTS = [Chain("eu-west", "NODES", 0, n) for n in range(2)]
KNOWN = [OLD, NEW, *PARTS]
FEEDS = {("us-east", "LATER")}


def filter_chains(known: list[Chain], feeds: set[tuple[str, str]], *named: Any) -> list[Chain]:
    return catalog.filter_chains(known, feeds, ChainName(*named))


def resolve_chain(known: list[Chain], feeds: set[tuple[str, str]], *named: Any) -> Chain:
    return catalog.resolve_chain(known, feeds, ChainName(*named))


def refused(*named: object) -> str:
    with pytest.raises(UsageError) as refusal:
        filter_chains(KNOWN, FEEDS, *named)
    return str(refusal.value)


def test_what_is_not_named_is_all() -> None:
    assert filter_chains(KNOWN, FEEDS, None) == sorted(KNOWN)
    assert filter_chains(KNOWN, FEEDS, "us-east") == filter_chains(KNOWN, FEEDS, "us-east", "NODES") == [OLD, NEW]
    assert (filter_chains(KNOWN, FEEDS, None, "NODES", None, 1), filter_chains([], set(), None)) == ([PARTS[1]], [])


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    there = "there are eu-west/NODES, us-east/LATER, us-east/NODES"
    assert f"did you mean us-east/NODES? {there}" in refused("us-esat", "NODES")
    assert "did you mean us-east? there are eu-west, us-east" in refused("us-esat")
    assert "did you mean NODES? there are LATER, NODES" in refused(None, "NODE")
    assert "incarnation 0007" in refused("us-east", "NODES", 7)
    assert "there are us-east/NODES/0000/0, us-east/NODES/0001/0" in refused("us-east", "NODES", 7)
    assert "partition 9" in refused(None, None, None, 9)
    assert "did you mean" not in refused("somewhere")
    with pytest.raises(UsageError, match="there are none"):
        filter_chains([], set(), "us-east")


def test_a_feed_of_the_configuration_may_be_empty() -> None:
    assert filter_chains(KNOWN, FEEDS, "us-east", "LATER") == []
    assert resolve_chain(KNOWN, FEEDS, "us-east", "LATER") == Chain("us-east", "LATER")
    feeds, sources = [{"stream": "A"}, {"stream": "A", "name": "B"}], [{"site": ["c", "d"], "feed": "E"}]
    roles = {"egress": {"feeds": feeds}, "ingress": {"targets": [{"stream": "T", "sources": sources}]}}
    settings = Settings(site="us-east", store={"url": "file:///bucket"}, **roles)
    assert catalog.configured_feeds(settings) == {("us-east", "A"), ("us-east", "B"), ("c", "E"), ("d", "E")}


def test_one_chain_is_that_of_the_newest_incarnation() -> None:
    assert resolve_chain(KNOWN, set(), "us-east", "NODES") == NEW
    assert resolve_chain(KNOWN, set(), "us-east", "NODES", 0) == OLD
    assert resolve_chain(KNOWN, set(), "eu-west", "NODES", None, 1) == PARTS[1]
    with pytest.raises(UsageError, match=r"name the partition, such as eu-west/NODES/[0-9]{4}/1$"):
        resolve_chain(KNOWN, set(), "eu-west", "NODES")


def test_a_name_is_read_part_by_part() -> None:
    assert parse_chain_name("us-east") == ("us-east", None, None, None)
    assert parse_chain_name("us-east/NODES/1") == ("us-east", "NODES", 1, None)
    assert parse_chain_name("us-east/NODES/0001/2") == ("us-east", "NODES", 1, 2)
    for text in ("", "a//0", "a/b/x", "a/b/0/0/0", "a b", "a/b/10000"):
        with pytest.raises(UsageError):
            parse_chain_name(text)


def test_some_of_many_names_are_listed() -> None:
    names = [f"site-{number:03d}" for number in range(100)]
    assert suggestion("other", names) == f"there are {', '.join(names[:MAX_LISTED_NAMES])} and 80 more"
