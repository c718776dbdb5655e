"""Which leases are shared out, and who wants to hear how many are held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

HAND_OVERS = ("drained", "surplus", "lost")  # why a lease was given up


@dataclass(frozen=True, slots=True)
class Scope:
    """A kind of work that is shared out by leases.

    `leases`: the pattern that their keys have in the bucket, such as `egress.us-east.*.*`. `members`: what
    the keys of members begin with; the name of their circle and the owner follow, so that it must not match
    `leases`. `part`: the name of it all in /status.
    """

    leases: str
    members: str
    part: str


class Counts(Protocol):
    """Whose metrics tell of the sharing."""

    def shown(self, members: int, share: int, held: int) -> None:
        """There are so many members; this one holds `held` leases, at most `share`."""
        ...

    def handed_over(self, reason: str) -> None:
        """A lease was given up: `drained`, `surplus` to the fair share, or `lost`."""
        ...

    def taken_over(self) -> None:
        """A lease was taken that another member was seen to hold."""
        ...
