"""Mistakes of a restore: completeness, leftovers, and writers during the restore."""

from typing import Any

import ingress.recovery.restore
from ingress.recovery.guard import GuardedStream
from ingress.recovery.history import ArchivedHistory
from tests.sim.mutants.registry import change, mutant


@mutant
def growth_of_the_archive_ignored() -> None:
    """Segments that egress archives during a restore are left out."""
    change(ArchivedHistory, "growth", lambda _growth: lambda _self, _plan: "")


@mutant
def leftover_of_a_restore_kept() -> None:
    """The leftover of a killed restore is not removed."""

    async def nothing(*_: Any) -> None:
        return None

    change(GuardedStream, "remove_leftover", lambda _remove_leftover: nothing)


@mutant
def restored_without_a_guard() -> None:
    """Producers reach the stream during its restore."""

    def made(guarded: Any) -> Any:
        return lambda config, marker: {**guarded(config, marker), "subjects": config["subjects"]}

    change(ingress.recovery.restore, "guarded_config", made)
