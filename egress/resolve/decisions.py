"""Where acceptances are kept: one key of the state bucket for each chain."""

from __future__ import annotations

from common.chain import Chain
from common.errors import DataError
from common.jetstream.kv import KeyValue, state_key
from egress.hints import believe_listing
from egress.resolve.acceptance import Acceptance


class Acceptances:
    """The acceptances of an operator. Methods raise what the bucket raises."""

    def __init__(self, state: KeyValue) -> None:
        self._state = state

    @staticmethod
    def key(chain: Chain) -> str:
        """Where the acceptance of a chain stands."""
        return state_key(
            "egress", "same", chain.site, chain.feed, f"{chain.incarnation:04d}", str(chain.partition)
        )

    async def get(self, chain: Chain) -> Acceptance | None:
        """The acceptance; None if there is none. Raises DataError (E-STATE-KV) for a value that is none."""
        entry = await self._state.get(self.key(chain))
        if entry is None:
            return None
        try:
            return Acceptance.from_json(entry.value)
        except ValueError as error:
            raise DataError(
                f"acceptance of {chain}: {error} (begins {entry.value[:40]!r})",
                hint=f"without it the evidence counts: {believe_listing(chain)}",
                code="E-STATE-KV",
            ) from error

    async def put(self, chain: Chain, acceptance: Acceptance) -> None:
        """Have this acceptance, whatever there was before."""
        await self._state.put(self.key(chain), acceptance.to_json())
