"""What the server that is connected to now takes: nodes of a cluster, and a server that is started again, may
differ. A message above `max_payload` cuts the connection that all targets share, so none is written.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from common.chain import Chain
from common.errors import Stopped
from common.jetstream.client import FloeClient, no_headers
from ingress.chains.roster import Roster
from ingress.rows.prepare import Shape
from ingress.rows.rows import Rows


class ServerLimits:
    """The limits of the server, beside those that the rows of one target were made ready for.

    `ask`: what the target and its server take now. `reset`: drops what is ready, and begins again at
    positions. `hint`: what is done about a row of the open intent that is too large.
    """

    def __init__(
        self,
        client: FloeClient,
        roster: Roster,
        ask: Callable[[], Awaitable[Shape]],
        reset: Callable[[Mapping[Chain, int]], None],
        hint: str,
    ) -> None:
        self._hint = hint
        self._client, self._roster, self._ask, self._reset = client, roster, ask, reset

    @property
    def are_outdated(self) -> bool:
        """Whether rows were made ready for another server than the one that is connected to now."""
        return self._roster.shape.max_payload != self._client.max_payload

    async def renew(self, positions: Mapping[Chain, int]) -> None:
        """Have rows made ready anew from `positions`, which are stored. Raises what asking raises."""
        self._roster.reshape(await self._ask())
        self._reset(positions)

    def check(self, rows: Rows, stored: int) -> None:
        """Right before rows of an open intent are written, of which the first `stored` are not.

        Raises Stopped for a row that the server would not take, ConfigError where it takes no headers.
        """
        most = self._client.max_payload
        if not self._client.takes_headers:
            raise no_headers()
        if rows.most <= most or (found := rows.above(most, stored)) is None:
            return
        chain, sequence, size = found
        raise Stopped(
            f"chain {chain}: message {sequence} of the open intent needs {size} bytes with its headers: "
            f"expected a server with max_payload {self._roster.shape.max_payload}, as it was made ready for, "
            f"found {most}",
            hint=self._hint,
            code="E-OVERSIZE-INTENT",
        )
