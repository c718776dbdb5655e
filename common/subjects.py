"""Subject filters and the subjects that they match, by the rules of NATS."""

from collections.abc import Sequence
from itertools import combinations, zip_longest


def matches(filter_subject: str, subject: bytes | str) -> bool:
    """True if `filter_subject` matches the literal `subject`; the empty filter matches all.

    `*` matches one token, a last `>` one or more; elsewhere they are ordinary letters.
    """
    if not filter_subject:
        return True
    subject = subject.encode() if isinstance(subject, str) else subject
    wanted, tokens = filter_subject.encode().split(b"."), subject.split(b".")
    if wanted[-1] == b">":
        wanted = wanted[:-1]
        return len(tokens) > len(wanted) and _tokens_match(wanted, tokens[: len(wanted)])
    return len(tokens) == len(wanted) and _tokens_match(wanted, tokens)


def _tokens_match(wanted: list[bytes], tokens: list[bytes]) -> bool:
    return all(filter_token in (b"*", token) for filter_token, token in zip(wanted, tokens, strict=True))


def covers(wide: str, narrow: str) -> bool:
    """True if `wide` matches every subject that `narrow` matches; the empty filter matches all."""
    if not wide or wide == ">":
        return True
    outside, inside = wide.split("."), (narrow or ">").split(".")
    for its, mine in zip(outside, inside, strict=False):
        if its == ">":
            return True
        if mine == ">" or its not in ("*", mine):
            return False
    return len(outside) == len(inside)


def overlaps(left: str, right: str) -> bool:
    """True if some subject matches both filters, by the rules of NATS; the empty filter matches all."""
    if not left or not right:
        return True
    for mine, other in zip_longest(left.split("."), right.split(".")):
        if mine is None or other is None:
            return False  # the shorter one matches no subject with so many tokens
        if ">" in (mine, other):
            return True  # it matches the rest of the other, which has one token at least
        if mine != other and "*" not in (mine, other):
            return False
    return True


def first_overlap(filters: Sequence[str]) -> tuple[str, str] | None:
    return next((pair for pair in combinations(filters, 2) if overlaps(*pair)), None)
