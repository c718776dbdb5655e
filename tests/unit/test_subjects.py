"""Which subjects a filter takes: the rules of NATS."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from common.subjects import covers, matches, overlaps


def test_inside_a_token_a_wildcard_is_a_letter_case_counts_and_what_is_not_text_is_taken_by_its_bytes() -> None:
    for filter_subject, subject in (("", "anything.at.all"), ("a*", "a*"), ("a.b>", "a.b>"), ("A.b", "A.b")):
        assert matches(filter_subject, subject)
        assert matches(filter_subject, subject.encode())
    for filter_subject, subject in (("a", "A"), ("a*", "ab"), (">.a", "b.a")):
        assert not matches(filter_subject, subject)
        assert not matches(filter_subject, subject.encode())
    assert matches("nodes.*", b"nodes.\xff")
    assert matches("nodes.>", b"nodes.\xff.\xfe")
    assert not matches("nodes.é", b"nodes.\xe9")


tokens = st.sampled_from(["a", "b", "ab"])
subjects = st.lists(tokens, min_size=1, max_size=5).map(".".join)
filters = st.tuples(st.lists(tokens | st.just("*"), max_size=4), st.booleans()).map(
    lambda parts: ".".join([*parts[0], *([">"] if parts[1] else [])])
)


@given(filters, subjects)
def test_as_a_regular_expression_says(filter_subject: str, subject: str) -> None:
    parts = [{"*": r"[^.]+", ">": r".+"}.get(token, token) for token in filter_subject.split(".")]
    expected = not filter_subject or re.fullmatch(r"\.".join(parts), subject) is not None
    assert matches(filter_subject, subject) == matches(filter_subject, subject.encode()) == expected


def test_a_wide_filter_covers_a_narrow_one_and_not_the_other_way_round() -> None:
    covered = [("", "a"), ("", ""), (">", ""), ("a", "a"), ("*", "a"), ("*", "*"), ("a.>", "a.b"), ("a.>", "a.>")]
    for wide, narrow in [*covered, ("a.>", "a.*.>"), ("*.>", "a.*"), ("a.*", "a.b")]:
        assert covers(wide, narrow), (wide, narrow)
        assert overlaps(wide, narrow), (wide, narrow)
    not_covered = [("a", ""), ("a", "b"), ("a", "*"), ("a.*", "a.>"), ("a.>", "a"), ("a.>", ">"), ("*", "a.b")]
    for wide, narrow in [*not_covered, ("a.b", "a")]:
        assert not covers(wide, narrow), (wide, narrow)


FILTERS = st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=3).flatmap(
    lambda tokens: st.sampled_from([".".join(tokens), ".".join([*tokens, ">"])])
)
LITERALS = st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=4).map(".".join)


@given(FILTERS, FILTERS, LITERALS)
def test_covers_and_overlaps_agree_with_matches(one: str, other: str, subject: str) -> None:
    if covers(one, other) and matches(other, subject):
        assert matches(one, subject)
    if matches(one, subject) and matches(other, subject):
        assert overlaps(one, other)
