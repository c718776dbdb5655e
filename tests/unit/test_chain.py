"""The chain: its parts, its text, its order."""

from __future__ import annotations

import pytest

from common.chain import Chain


def test_a_chain_is_written_with_four_parts_and_read_back() -> None:
    chain = Chain("us-east", "NODES", 3, 12)
    assert str(chain) == "us-east/NODES/0003/12"
    assert Chain.parse(str(chain)) == chain


def test_site_and_feed_alone_mean_the_first_incarnation_and_partition() -> None:
    assert Chain.parse("us-east/NODES") == Chain("us-east", "NODES", 0, 0)


@pytest.mark.parametrize("text", ["", "us-east", "a/b/0/0/0", "a/b/x", "a/b/-1", "a//0/0", "/b"])
def test_text_that_is_not_a_chain_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|invalid"):
        Chain.parse(text)


@pytest.mark.parametrize("site", ["", "-a", "_a", "a.b", "a/b", "a b", "a" * 64, "ä", ".."])
def test_a_site_is_what_every_key_and_header_can_carry(site: str) -> None:
    with pytest.raises(ValueError, match="site"):
        Chain(site, "F")


@pytest.mark.parametrize("feed", ["", "a.b", "a b", "a*", "a>", "a/b", "a\\b", "a\n", "a" * 256])
def test_a_feed_is_what_a_stream_may_be_called(feed: str) -> None:
    with pytest.raises(ValueError, match="feed"):
        Chain("s", feed)


@pytest.mark.parametrize(("incarnation", "partition"), [(-1, 0), (10000, 0), (0, -1), (0, 65536)])
def test_numbers_outside_their_range_are_refused(incarnation: int, partition: int) -> None:
    with pytest.raises(ValueError, match="expected 0 to"):
        Chain("s", "F", incarnation, partition)


def test_the_next_incarnation_keeps_the_partition() -> None:
    assert Chain("s", "F", 1, 2).next_incarnation() == Chain("s", "F", 2, 2)


def test_chains_sort_by_site_feed_incarnation_partition() -> None:
    chains = [Chain("b", "A"), Chain("a", "B"), Chain("a", "A", 1), Chain("a", "A", 0, 1), Chain("a", "A")]
    assert [str(c) for c in sorted(chains)] == ["a/A/0000/0", "a/A/0000/1", "a/A/0001/0", "a/B/0000/0", "b/A/0000/0"]


def test_every_log_line_about_a_chain_carries_its_parts() -> None:
    assert Chain("s", "F", 1, 2).log_context() == {"site": "s", "feed": "F", "incarnation": 1, "partition": 2}
