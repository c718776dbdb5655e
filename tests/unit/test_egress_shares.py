"""Fair shares: enough for every lease to be held, and no more than that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.leasing import fair_share, group_name, surplus


@pytest.mark.parametrize(
    ("chains", "members", "share"),
    [(4, 1, 4), (4, 2, 2), (4, 3, 2), (4, 4, 1), (4, 9, 1), (0, 3, 0), (1, 0, 1), (5, 2, 3)],
)
def test_a_share_is_rounded_up(chains: int, members: int, share: int) -> None:
    assert fair_share(chains, members) == share


@given(st.integers(0, 10_000), st.integers(1, 100))
def test_all_shares_together_reach_and_one_less_of_each_does_not(chains: int, members: int) -> None:
    share = fair_share(chains, members)
    assert share * members >= chains
    assert chains == 0 or (share - 1) * members < chains


@given(st.sets(st.text(max_size=5), max_size=20), st.integers(0, 25))
def test_the_surplus_is_what_is_above_the_share_and_always_the_same(held: set[str], share: int) -> None:
    given_back = surplus(held, share)
    assert len(held - set(given_back)) == min(len(held), share)
    assert surplus(sorted(held, reverse=True), share) == given_back
    assert surplus(held - set(given_back), share) == []


def test_members_with_the_same_leases_in_any_order_are_one_circle() -> None:
    assert group_name(["a", "b"]) == group_name(["b", "a", "a"])
    assert group_name(["a", "b"]) != group_name(["a", "c"])
    assert group_name(["a.b"]) != group_name(["a", "b"])
