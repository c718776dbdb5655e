"""The contract of publishers: they send rows after an expected target sequence, one batch in flight, and
say how far it is known to have come. What they cannot tell (`Outcome.unclear`) is settled by whoever reads
the target.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ingress.publishers.publisher import Unclear
from ingress.rows.rows import Rows

ACK_TIMEOUT = 5.0  # seconds


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many rows of the intent are stored for certain, and why it is not known whether there are more.

    `handed`: the rows from this index on were not given to the connection by this call; it never is less than
    what was.
    """

    stored: int
    unclear: Unclear | None = None
    handed: int = field(default=0, compare=False)


class Publisher(Protocol):
    """Sends rows so that the server takes row n only at base + n."""

    name: str

    async def publish(self, rows: Rows, base: int, stored: int) -> Outcome:
        """Send the rows from index `stored` on, the first at target sequence base + stored + 1.

        Returns when all are stored, or at the first answer that is not exactly the expected one. Raises
        nothing for what the server or the connection does.
        """
        ...

    async def aclose(self) -> None:
        """Let go of the inbox."""
        ...
