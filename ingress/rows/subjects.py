"""From the subject at the source to the subject at the target, and whether the target takes it.

A subject comes from a file in a bucket: nothing of it reaches a socket before it was checked here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.settings.ingress import SourceSettings
from common.subjects import overlaps
from common.transforms import Transform, compile_transform

# What would end or split the control line of the protocol. All else a server takes as it is, wildcards too:
# a source may hold `a.*` as the subject of a message.
_UNSAFE = re.compile(rb"[\x00\t\n\r ]")
MAX_SUBJECT = 3900  # bytes: with reply and sizes it must fit the control line, 4096 by default


@dataclass(frozen=True, slots=True)
class SubjectRule:
    """`prefix` and a dot are put before the subject, then every occurrence of `remove` is taken out; each
    step collapses `..` to one dot, as stream-replicator does. Both empty: the subject stays as it was.
    """

    prefix: bytes = b""
    remove: bytes = b""

    def apply(self, subject: bytes) -> bytes:
        """The subject at the target; not yet checked."""
        if self.prefix:
            subject = (self.prefix + b"." + subject).replace(b"..", b".")
        if self.remove:
            subject = subject.replace(self.remove, b"").replace(b"..", b".")
        return subject

    @property
    def pattern(self) -> str | None:
        """A filter that takes whatever it makes: `{prefix}.>`, where nothing that is removed can touch the
        prefix; None elsewhere.
        """
        kept = (self.prefix + b".").replace(b"..", b".")
        ends = (kept[at:] for at in range(len(kept)))
        if b"" in kept[:-1].split(b".") or (self.remove and self.remove in kept):
            return None
        if self.remove and any(self.remove.startswith(end) for end in ends):
            return None
        return kept.decode() + ">"


Rule = SubjectRule | Transform


def rule_of(source: SourceSettings) -> Rule:
    """The rule that the configuration of a source names."""
    wanted = source.subject_transform
    if wanted.source:
        return compile_transform(wanted.source, wanted.destination)
    return SubjectRule(source.subject_prefix.encode(), source.subject_remove.encode())


def problem(subject: bytes) -> str:
    """Why `subject` cannot be published to; empty if it can."""
    if not subject:
        return "it is empty"
    if len(subject) > MAX_SUBJECT:
        return f"it has {len(subject)} bytes, expected at most {MAX_SUBJECT}"
    if _UNSAFE.search(subject):
        return "it holds a space, tab, CR, LF or NUL"
    if b"" in subject.split(b"."):
        return "it has an empty token"
    return ""


class Accepting:
    """The subjects of a stream, wildcards included."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = [pattern.encode().split(b".") for pattern in patterns]
        self._all = [b">"] in self._patterns

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Accepting) and other._patterns == self._patterns

    def __hash__(self) -> int:
        return hash(str(self))

    def __contains__(self, subject: bytes) -> bool:
        if self._all:
            return True
        tokens = subject.split(b".")
        return any(_matches(pattern, tokens) for pattern in self._patterns)

    def covers(self, pattern: str) -> bool:
        """Whether each subject that `pattern` stands for is one of these."""
        return self._all or any(_covers(mine, pattern.encode().split(b".")) for mine in self._patterns)

    def meets(self, pattern: str) -> bool:
        """Whether any subject that `pattern` stands for is one of these."""
        return any(overlaps(b".".join(mine).decode(), pattern) for mine in self._patterns)

    def __str__(self) -> str:
        return ", ".join(b".".join(pattern).decode() for pattern in self._patterns)


def _matches(pattern: Sequence[bytes], tokens: Sequence[bytes]) -> bool:
    if pattern[-1] == b">":
        return len(tokens) >= len(pattern) and _matches(pattern[:-1], tokens[: len(pattern) - 1])
    return len(pattern) == len(tokens) and all(p in (b"*", t) for p, t in zip(pattern, tokens, strict=True))


def _covers(pattern: Sequence[bytes], other: Sequence[bytes]) -> bool:
    if pattern[-1] == b">":
        return len(other) >= len(pattern) and _covers(pattern[:-1], other[: len(pattern) - 1])
    return (
        len(pattern) == len(other)
        and other[-1:] != [b">"]
        and all(p in (b"*", o) for p, o in zip(pattern, other, strict=True))
    )
