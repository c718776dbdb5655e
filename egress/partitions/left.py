"""What a stream holds beside its partitions: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.jetstream.subjects import matches


@dataclass(frozen=True, slots=True)
class Unmatched:
    """Messages that no filter takes. `example`: one of their subjects, empty where there are none.

    `is_complete`: all subjects of the stream were looked at.
    """

    messages: int = 0
    subjects: int = 0
    example: str = ""
    is_complete: bool = True


def unmatched(subjects: Mapping[str, int], filters: Sequence[str]) -> Unmatched:
    """What of `subjects`, with the number of messages of each, no filter takes."""
    left = {
        subject: count
        for subject, count in subjects.items()
        if not any(matches(each, subject) for each in filters)
    }
    return Unmatched(sum(left.values()), len(left), min(left, default=""))
