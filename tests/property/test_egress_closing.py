"""Overlapping filters against brute force; closing an incarnation against every interleaving."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.subjects import first_overlap, matches, overlaps
from egress.incarnations import CLOSING, Closing, End, EndDecision, NextStream
from egress.partition import accounted_until

LETTERS = ("a", "b")
# Every filter over two letters of up to four tokens, and every subject of up to five: a subject shared by two
# filters never needs more tokens than the longer filter has, plus one for a `>`.
TOKENS = st.lists(st.sampled_from([*LETTERS, "*"]), min_size=1, max_size=4)
FILTERS = st.one_of(
    TOKENS.map(".".join), TOKENS.map(lambda tokens: ".".join([*tokens[:3], ">"])), st.sampled_from([">", ""])
)
SUBJECTS = [".".join(each) for count in range(1, 6) for each in product(LETTERS, repeat=count)]


@given(FILTERS, FILTERS)
def test_filters_overlap_where_one_subject_matches_both(one: str, other: str) -> None:
    expected = any(matches(one, subject) and matches(other, subject) for subject in SUBJECTS)

    assert overlaps(one, other) is expected
    assert overlaps(other, one) is expected
    assert first_overlap(["x.y.z.u.v.w", one, one]) is not None


# Closing

COUNT = 3
CREATED = ("c1", "c2")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("note"), st.integers(0, COUNT - 1), st.sampled_from(CREATED), st.integers(0, 9)),
        st.tuples(st.just("withdraw"), st.integers(0, COUNT - 1), st.just(""), st.just(0)),
        st.tuples(st.just("decide"), st.integers(0, COUNT - 1), st.sampled_from(CREATED), st.integers(1, 9)),
    ),
    max_size=30,
)


@given(STEPS)
def test_an_incarnation_closes_once_with_the_ends_that_all_partitions_agree_on(
    steps: list[tuple[str, int, str, int]],
) -> None:
    """Compare with a model: the last report of each partition, and the agreement of all."""
    closing = Closing()
    ends: dict[int, tuple[str, int]] = {}
    closed: dict[int, tuple[str, int]] | None = None
    for what, partition, created, number in steps:
        former = closing
        if what == "note":
            stream = NextStream(created, {"name": created})
            closing = closing.with_end(partition, End(number, 1, created), COUNT, stream)
            ends = {**ends, partition: (created, number)}
        elif what == "withdraw":
            closing = closing.without_end(partition)
            ends = {p: each for p, each in ends.items() if p != partition}
        else:
            closing = closing.with_decision(EndDecision(created, {partition: number}))
        if closed is not None:
            assert closing == former, "nothing changes behind the end"
            continue
        agreed = len(ends) == COUNT and len({each[0] for each in ends.values()}) == 1
        assert (closing.next is not None) is agreed
        if agreed:
            closed = ends
            assert {p: (e.created, e.end) for p, e in closing.ends.items()} == closed
            assert {closing.next.created} == {each[0] for each in closed.values()}
        assert CLOSING.decode(CLOSING.encode(closing)) == closing


BAD_CLOSINGS = [
    b"",
    b"[]",
    b"{}",
    b"[" * 100_000,
    b'{"format_version":2,"ends":{},"decision":null,"next":null}',
    b'{"format_version":1,"ends":{"x":{"end":1,"first":1,"created":""}},"decision":null,"next":null}',
    b'{"format_version":1,"ends":{"0":{"end":-1,"first":1,"created":""}},"decision":null,"next":null}',
    b'{"format_version":1,"ends":{"0":{"end":1,"first":0,"created":""}},"decision":null,"next":null}',
    b'{"format_version":1,"ends":{},"decision":{"created":"","first":{"0":0}},"next":null}',
    b'{"format_version":1,"ends":{},"decision":null,"next":null,"more":1}',
]


@pytest.mark.parametrize("raw", BAD_CLOSINGS)
def test_what_is_no_closing_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError):
        CLOSING.decode(raw)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1))
def test_the_cut_lies_behind_everything_that_is_archived_and_before_no_beginning(
    reaches: list[tuple[int, int]],
) -> None:
    """Cut after the latest beginning: a chain that begins later than the others end must not be read again."""
    end = max(accounted_until(first, end) for first, end in reaches)

    assert end >= max(each[1] for each in reaches)
    assert end + 1 >= max(each[0] for each in reaches)
