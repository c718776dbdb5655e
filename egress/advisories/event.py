"""What an advisory says: a value of the sampled field, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Event(StrEnum):
    """What became of a value; the words of stream-replicator."""

    NEW = "new"
    TIMEOUT = "timeout"
    RECOVER = "recover"
    EXPIRE = "expire"


@dataclass(frozen=True, slots=True)
class Advisory:
    """One event of one value. All of it follows from the log, so that it is the same whoever finds it.

    `seen_ns`: when the value was last seen, by message time: for NEW the message itself, for the others the
    message before the silence. `moment_ns`: when the event was: of NEW and RECOVER the message's time, of
    TIMEOUT `seen_ns` and `warn_duration`, of EXPIRE `seen_ns` and `inspect_duration`. Nanoseconds since 1970.
    """

    event: Event
    value: str
    seen_ns: int
    moment_ns: int
