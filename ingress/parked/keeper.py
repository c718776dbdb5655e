"""Has parked messages kept under the name that the stored state says, whoever changes it."""

from __future__ import annotations

from ingress.checkpoint import TargetState
from ingress.checkpoints.state import Stored
from ingress.interfaces import StateKeeper
from ingress.parked.store import ParkedStore


class ParkedKeeper:
    """The stored state of a target (`ingress.interfaces.StateKeeper`).

    A state that is loaded and is another one is adopted at once, and everything that was made ready before is
    dropped: so no mark is put under a former name.
    """

    def __init__(self, keeper: StateKeeper, parked: ParkedStore) -> None:
        self._keeper, self._parked = keeper, parked

    async def load(self) -> Stored:
        """As the keeper; the parked messages are then those of what it found."""
        stored = await self._keeper.load()
        if stored.state is not None:
            self._parked.kept_as = stored.state.checkpoint.parked_as
        return stored

    async def save(self, state: TargetState, revision: int) -> Stored | None:
        """As the keeper."""
        self._parked.kept_as = state.checkpoint.parked_as
        return await self._keeper.save(state, revision)
