"""What an operator is told when a target is not what its checkpoint says: the verdict, both sides, the
choices, each a command to paste.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import AnotherWriter, FloeError, Stopped
from ingress.checkpoints.commands import set_command
from ingress.verdicts.verdict import Finding, Origin, Reading, Verdict

_GONE = Verdict(Finding.GONE, detail="expected the stream, found none")


class Choices:
    """Errors about one target."""

    def __init__(self, target: str) -> None:
        self.target = target

    def no_checkpoint(self, reading: Reading | None) -> FloeError:
        """A target that is missing, or that holds or held messages, and of which nothing is remembered."""
        if reading is None:
            return self.error(_GONE, [])
        return Stopped(
            f"target {self.target}: expected a checkpoint or an empty stream, found last sequence "
            f"{reading.last_sequence} and no checkpoint",
            hint=f"restore the state bucket; or go on behind what the target holds: {self._from_target}",
            code="E-TARGET-NOT-EMPTY",
        )

    def error(self, verdict: Verdict, seen: Sequence[Reading]) -> FloeError:
        """What to raise for a confirmed `verdict`; `seen`: the readings, oldest first."""
        message = f"target {self.target}: {verdict.finding.value}: {verdict.detail}"
        if verdict.finding in (Finding.GONE, Finding.RECREATED):
            return Stopped(message, hint=self._replaced(seen), code=f"E-TARGET-{verdict.finding.name}")
        if verdict.finding is Finding.BEHIND:
            hint = f"restore a newer copy; or carry what it lost again: {self._from_target}"
            hint += f"; or go on without it: {self._accept}"
            return Stopped(message, hint=hint, code="E-TARGET-BEHIND")
        if verdict.finding is Finding.MIXED:
            hint = (
                "set `exclusive: false` again until the intent is closed; or drop the rest of it and leave "
            )
            hint += f"what else stands there where it is: {self._accept}"
            return Stopped(message, hint=hint, code="E-TARGET-SHARED")
        return self._shared(message, seen)

    def _replaced(self, seen: Sequence[Reading]) -> str:
        if not seen or seen[-1].last_sequence == 0:
            return f"restore the stream; or fill an empty one from the archive: {self._forget}"
        return (
            f"restore the stream; or go on behind what this one holds: {self._from_target}; or, where it is "
            f"the same with another creation time, or what was carried shall not come again: {self._accept}"
        )

    def _shared(self, message: str, seen: Sequence[Reading]) -> FloeError:
        hint = f"stop what else publishes to it; then leave its messages where they are: {self._accept}"
        if seen and seen[-1].last_sequence > seen[0].last_sequence:
            return AnotherWriter(f"{message}; it still moves", hint=hint, code="E-TARGET-SHARED")
        if seen and isinstance(seen[-1].tail, Origin):
            hint += f"; or, where the state bucket is an old copy: {self._from_target}"
        return Stopped(message, hint=hint, code="E-TARGET-SHARED")

    # Commands

    @property
    def _accept(self) -> str:
        return set_command(self.target, "--accept")

    @property
    def _from_target(self) -> str:
        return set_command(self.target, "--from-target")

    @property
    def _forget(self) -> str:
        return set_command(self.target, "--forget")
