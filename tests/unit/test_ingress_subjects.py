"""Subjects at the target: the rules of stream-replicator, what may be published, what a stream takes."""

from __future__ import annotations

import pytest

from ingress.rows.prepare import MAX_SUBJECT, Accepting, SubjectRule, problem


@pytest.mark.parametrize(
    ("prefix", "remove", "subject", "target"),
    [
        (b"", b"", b"a.b", b"a.b"),
        (b"", b"", b"a..b", b"a..b"),
        (b"fleet", b"", b"a.b", b"fleet.a.b"),
        (b"fleet.", b"", b"a.b", b"fleet.a.b"),
        (b"", b"choria.", b"choria.node.a", b"node.a"),
        (b"", b"x", b"a.x.b.x.c", b"a.b.c"),
        (b"fleet", b"choria", b"choria.node", b"fleet.node"),
        (b"fleet", b"fleet.a.", b"a.b", b"b"),
        (b"fleet", b"", b"\xff\xfe", b"fleet.\xff\xfe"),
    ],
)
def test_prefix_then_remove_then_one_dot_for_two(prefix: bytes, remove: bytes, subject: bytes, target: bytes) -> None:
    assert SubjectRule(prefix, remove).apply(subject) == target


@pytest.mark.parametrize(
    ("subject", "why"),
    [
        (b"", "empty"),
        (b"a b", "space"),
        (b"a\r\nPUB x 0", "space"),
        (b"a\tb", "space"),
        (b"a\x00b", "space"),
        (b".a", "empty token"),
        (b"a.", "empty token"),
        (b"a..b", "empty token"),
        (b"a" * (MAX_SUBJECT + 1), "3901 bytes"),
    ],
)
def test_what_cannot_be_published_to_is_named(subject: bytes, why: str) -> None:
    assert why in problem(subject)


@pytest.mark.parametrize(
    "subject", [b"a", b"a.b-c_d$", b"a*b.c>d", b"a.*.>", b"\x01.\xff.\xc3\xa4", b"x" * MAX_SUBJECT]
)
def test_what_the_wire_can_carry_is_taken(subject: bytes) -> None:
    assert problem(subject) == ""


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        (">", [b"a", b"a.b"], []),
        ("fleet.>", [b"fleet.a", b"fleet.a.b"], [b"fleet", b"fleets.a", b"x.fleet.a"]),
        ("a.*.c", [b"a.b.c"], [b"a.c", b"a.b.b.c", b"a.b.d"]),
        ("a.b", [b"a.b"], [b"a", b"a.b.c"]),
        ("*.>", [b"a.b", b"a.b.c"], [b"a"]),
    ],
)
def test_a_stream_takes_what_its_subjects_match(pattern: str, inside: list[bytes], outside: list[bytes]) -> None:
    accepting = Accepting([pattern, "other"])

    assert all(subject in accepting for subject in [*inside, b"other"])
    assert not any(subject in accepting for subject in outside)


def test_a_stream_covers_patterns_that_are_not_wider_than_its_own() -> None:
    accepting = Accepting(["fleet.>", "a.*.c"])

    assert all(accepting.covers(p) for p in ("fleet.>", "fleet.a", "fleet.*.b", "a.*.c", "a.b.c"))
    assert not any(accepting.covers(p) for p in (">", "fleet", "*.a", "a.>", "a.*.>", "a.*.*"))
    assert Accepting([">"]).covers("a.>")
