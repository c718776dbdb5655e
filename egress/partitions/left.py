"""What a stream holds beside its partitions: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.subjects import matches


@dataclass(frozen=True, slots=True)
class Unmatched:
    """Messages that no filter takes. `example`: one of their subjects, empty where there are none.

    `is_complete`: all subjects of the stream were looked at.
    """

    messages: int = 0
    subjects: int = 0
    example: str = ""
    is_complete: bool = True

    def __str__(self) -> str:
        """For people: how many messages, on which subjects."""
        least = "" if self.is_complete else "at least "
        such = "" if self.subjects == 1 else "such as "
        count = f"{least}{_counted(self.messages, 'message')} on {_counted(self.subjects, 'subject')}"
        return f"{count}, {such}{self.example},"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What the old filter `filter_subject` took (empty: all), and no new one does."""

    filter_subject: str
    found: Unmatched

    def __str__(self) -> str:
        verb = "belongs" if self.found.messages == 1 else "belong"
        return f"{self.filter_subject or '>'}: {self.found} {verb} to no partition any more"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def unmatched(subjects: Mapping[str, int], filters: Sequence[str]) -> Unmatched:
    """What of `subjects`, with the number of messages of each, no filter takes."""
    left = {
        subject: count
        for subject, count in subjects.items()
        if not any(matches(each, subject) for each in filters)
    }
    return Unmatched(sum(left.values()), len(left), min(left, default=""))
