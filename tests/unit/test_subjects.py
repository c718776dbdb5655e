"""Which subjects a filter takes: the rules of NATS."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.subjects import covers, matches, overlaps

TAKEN = [
    ("", "anything.at.all"),
    ("a", "a"),
    ("a.b", "a.b"),
    ("*", "a"),
    ("a.*", "a.b"),
    ("*.b", "a.b"),
    ("*.*", "a.b"),
    (">", "a"),
    (">", "a.b.c"),
    ("a.>", "a.b"),
    ("a.>", "a.b.c"),
    ("a.*.>", "a.b.c.d"),
    ("a*", "a*"),  # inside a token it is a letter
    ("a.b>", "a.b>"),
    ("A.b", "A.b"),
]
LEFT = [
    ("a", "b"),
    ("a", "A"),
    ("a", "a.b"),
    ("a.b", "a"),
    ("*", "a.b"),
    ("a.*", "a"),
    ("a.*", "a.b.c"),
    ("a.>", "a"),
    ("a.>", "b.c"),
    ("a.*.>", "a.b"),
    ("a*", "ab"),
    (">.a", "b.a"),
]


@pytest.mark.parametrize(("filter_subject", "subject"), TAKEN)
def test_taken(filter_subject: str, subject: str) -> None:
    assert matches(filter_subject, subject)
    assert matches(filter_subject, subject.encode())


@pytest.mark.parametrize(("filter_subject", "subject"), LEFT)
def test_left(filter_subject: str, subject: str) -> None:
    assert not matches(filter_subject, subject)
    assert not matches(filter_subject, subject.encode())


def test_a_subject_that_is_not_text_is_taken_by_its_bytes() -> None:
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
    assert matches(filter_subject, subject) == expected


COVERED = [
    ("", "a"),
    ("", ""),
    (">", ""),
    ("a", "a"),
    ("*", "a"),
    ("*", "*"),
    ("a.>", "a.b"),
    ("a.>", "a.>"),
    ("a.>", "a.*.>"),
    ("*.>", "a.*"),
    ("a.*", "a.b"),
]
NOT_COVERED = [
    ("a", ""),
    ("a", "b"),
    ("a", "*"),
    ("a.*", "a.>"),
    ("a.>", "a"),
    ("a.>", ">"),
    ("*", "a.b"),
    ("a.b", "a"),
]


@pytest.mark.parametrize(("wide", "narrow"), COVERED)
def test_a_wide_filter_covers_a_narrow_one(wide: str, narrow: str) -> None:
    assert covers(wide, narrow)
    assert overlaps(wide, narrow)


@pytest.mark.parametrize(("wide", "narrow"), NOT_COVERED)
def test_a_narrow_filter_does_not_cover_a_wide_one(wide: str, narrow: str) -> None:
    assert not covers(wide, narrow)


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
