"""The chain: its parts, its text, its order."""

from __future__ import annotations

import pytest

from common.chain import Chain


def test_a_chain_is_written_with_four_parts_and_read_back() -> None:
    chain = Chain("us-east", "NODES", 3, 12)
    assert str(chain) == "us-east/NODES/0003/12"
    assert Chain.parse(str(chain)) == chain
    assert Chain.parse("us-east/NODES") == Chain("us-east", "NODES", 0, 0)
    assert chain.next_incarnation() == Chain("us-east", "NODES", 4, 12)
    assert chain.log_context() == {"site": "us-east", "feed": "NODES", "incarnation": 3, "partition": 12}


@pytest.mark.parametrize("text", ["", "us-east", "a/b/0/0/0", "a/b/x", "a/b/-1", "a//0/0", "/b"])
def test_text_that_is_not_a_chain_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|invalid"):
        Chain.parse(text)


def test_parts_are_what_every_key_header_and_stream_can_carry() -> None:
    for site in ("", "-a", "_a", "a.b", "a/b", "a b", "a" * 64, "ä", ".."):
        with pytest.raises(ValueError, match="site"):
            Chain(site, "F")
    for feed in ("", "a.b", "a b", "a*", "a>", "a/b", "a\\b", "a\n", "a" * 256):
        with pytest.raises(ValueError, match="feed"):
            Chain("s", feed)
    for incarnation, partition in ((-1, 0), (10000, 0), (0, -1), (0, 65536)):
        with pytest.raises(ValueError, match="expected 0 to"):
            Chain("s", "F", incarnation, partition)


def test_chains_sort_by_site_feed_incarnation_partition() -> None:
    chains = [Chain("b", "A"), Chain("a", "B"), Chain("a", "A", 1), Chain("a", "A", 0, 1), Chain("a", "A")]
    assert [str(c) for c in sorted(chains)] == ["a/A/0000/0", "a/A/0000/1", "a/A/0001/0", "a/B/0000/0", "b/A/0000/0"]
