"""Mistakes of a restore: what it takes for whole, what it leaves behind, who may write meanwhile."""

from __future__ import annotations

from typing import Any

import ingress.restore.restore
from ingress.restore.guard import GuardedStream
from ingress.restore.history import ArchivedHistory
from tests.sim.mutants.registry import change, mutant


@mutant
def growth_of_the_archive_ignored() -> None:
    """What egress archives while a stream is filled is left out."""
    change(ArchivedHistory, "grown", lambda _grown: lambda _self, _plan: "")


@mutant
def leftover_of_a_restore_kept() -> None:
    """What a killed restore left is not removed."""

    async def nothing(*_: Any) -> None:
        return None

    change(GuardedStream, "clear", lambda _clear: nothing)


@mutant
def restored_without_a_guard() -> None:
    """Producers reach the stream while it is filled."""

    def made(guarded: Any) -> Any:
        return lambda config, marker: {**guarded(config, marker), "subjects": config["subjects"]}

    change(ingress.restore.restore, "guarded_config", made)
