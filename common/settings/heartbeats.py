"""Heartbeats: small messages to subjects of this site, so that a quiet stream moves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

from common.settings.base import Section, needed, option
from common.settings.types import Duration, Range, Required, Subject, Text

_NAME = re.compile(r"[!#-'*+.0-9A-Z^-z|~-]{1,255}")  # a token of RFC 9110; a colon would end it
_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]{0,4096}")


class HeartbeatSubjectSettings(Section):
    """One subject that heartbeats go to."""

    subject: Annotated[Subject, Required] = needed("the subject")
    interval: Annotated[Duration, Range("1s", "1d", or_zero=True)] = option("0s", "0s: that of `heartbeats`")


class HeartbeatSettings(Section):
    """Messages that keep a quiet stream moving."""

    interval: Annotated[Duration, Range("1s", "1d")] = option("10s", "between two of them")
    headers: dict[Text, Text] = option({}, "headers of each")
    subjects: tuple[HeartbeatSubjectSettings, ...] = option(
        (), "where they are published; none: no heartbeats"
    )

    def combinations(self) -> Iterator[tuple[str, str]]:
        for name, value in self.headers.items():
            if problem := _problem_of(name, value):
                yield "headers", problem
        seen: set[str] = set()
        for index, each in enumerate(self.subjects):
            if each.subject in seen:
                yield f"subjects.{index}.subject", f"expected each subject once, found {each.subject} again"
            seen.add(each.subject)


def _problem_of(name: str, value: str) -> str:
    """What is wrong with one header; empty: nothing."""
    if not _NAME.fullmatch(name):
        return f"expected a name of letters, digits and - _ ., found {name!r:.80}"
    if name.lower().startswith(("nats-", "floe-")):
        return f"expected no header that NATS or Floe acts on, found {name}"
    if not _VALUE.fullmatch(value):
        return f"expected a value of {name} on one line, at most 4096 characters, found {value!r:.80}"
    return ""
