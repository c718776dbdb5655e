"""Where the closing of incarnations is kept: one key of the state bucket for each, changed by
compare-and-set.
"""

from __future__ import annotations

from collections.abc import Callable

from common.chain import Chain
from common.errors import DataError
from common.jetstream.kv import KeyValue, state_key
from egress.hints import believe_listing
from egress.partitions.closing import Closing


class Closings:
    """The closing of each incarnation. Methods raise what the bucket raises, and DataError (E-STATE-KV)."""

    def __init__(self, state: KeyValue) -> None:
        self._state = state

    @staticmethod
    def key(chain: Chain) -> str:
        """The key of the chain's incarnation; all its partitions share it."""
        return state_key("egress", "end", chain.site, chain.feed, f"{chain.incarnation:04d}")

    async def get(self, chain: Chain) -> Closing:
        """How far closing is; an empty one where nobody has begun."""
        entry = await self._state.get(self.key(chain))
        return Closing() if entry is None else self._parse(chain, entry.value)

    async def change(self, chain: Chain, step: Callable[[Closing], Closing]) -> Closing:
        """Make what `step` makes of it, whoever else changes it meanwhile; what is there then."""
        result = Closing()

        def changed(found: bytes | None) -> bytes | None:
            nonlocal result
            former = Closing() if found is None else self._parse(chain, found)
            result = step(former)
            return None if result == former else result.to_json()

        await self._state.change(self.key(chain), changed)
        return result

    def _parse(self, chain: Chain, value: bytes) -> Closing:
        try:
            return Closing.from_json(value)
        except ValueError as error:
            raise DataError(
                f"closing of {chain}: {error} (begins {value[:40]!r})",
                hint="without it each partition notes its end again, and a decision is to be made again: "
                + believe_listing(chain),
                code="E-STATE-KV",
            ) from error
