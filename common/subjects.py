"""Which subjects a filter takes, by the rules of NATS."""

from __future__ import annotations


def matches(filter_subject: str, subject: bytes | str) -> bool:
    """Whether `filter_subject` takes `subject`, a literal one; the empty filter takes all.

    `*` stands for one token, `>` at the end for one or more; anywhere else they are letters like others.
    """
    if not filter_subject:
        return True
    subject = subject.encode() if isinstance(subject, str) else subject
    wanted, tokens = filter_subject.encode().split(b"."), subject.split(b".")
    if wanted[-1] == b">":
        wanted = wanted[:-1]
        return len(tokens) > len(wanted) and _agree(wanted, tokens[: len(wanted)])
    return len(tokens) == len(wanted) and _agree(wanted, tokens)


def _agree(wanted: list[bytes], tokens: list[bytes]) -> bool:
    return all(filter_token in (b"*", token) for filter_token, token in zip(wanted, tokens, strict=True))
