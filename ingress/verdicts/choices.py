"""What an operator is told when a target is not what its checkpoint says: the verdict, both sides, the
choices.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import AnotherWriter, FloeError, Stopped
from ingress.verdicts.verdict import Finding, Origin, Reading, Verdict

_GONE = Verdict(Finding.GONE, detail="expected the stream, found none")


class Choices:
    """Errors about one target. `forget`: the command that makes ingress forget it."""

    def __init__(self, target: str, forget: str) -> None:
        self.target, self.forget = target, forget

    def no_checkpoint(self, reading: Reading | None) -> FloeError:
        """A target that is missing, or that holds or held messages, and of which nothing is remembered."""
        if reading is None:
            return self.error(_GONE, [])
        return Stopped(
            f"target {self.target}: expected a checkpoint or an empty stream, found last sequence "
            f"{reading.last_sequence} and no checkpoint",
            hint="restore the state bucket, or carry into a new stream: what is stored cannot be told",
            code="E-TARGET-NOT-EMPTY",
        )

    def error(self, verdict: Verdict, seen: Sequence[Reading]) -> FloeError:
        """What to raise for a confirmed `verdict`; `seen`: the readings, oldest first."""
        message = f"target {self.target}: {verdict.finding.value}: {verdict.detail}"
        if verdict.finding in (Finding.GONE, Finding.RECREATED):
            return Stopped(
                message,
                hint=f"restore the stream; or to fill an empty one from the archive: {self.forget}",
                code=f"E-TARGET-{verdict.finding.name}",
            )
        if verdict.finding is Finding.BEHIND:
            again = f"recreate it and: {self.forget}"
            return Stopped(
                message,
                hint=f"restore a newer copy of the stream; or to fill it again from the archive, {again}",
                code="E-TARGET-BEHIND",
            )
        return self._shared(message, seen)

    def _shared(self, message: str, seen: Sequence[Reading]) -> FloeError:
        again = f"carry into a new stream, or recreate this one and: {self.forget}"
        hint = f"find what else publishes to it; then {again}"
        if seen and seen[-1].last_sequence > seen[0].last_sequence:
            return AnotherWriter(f"{message}; it still moves", hint=hint, code="E-TARGET-SHARED")
        if seen and isinstance(seen[-1].tail, Origin):
            hint = f"the state bucket may be an old copy: restore the newest. Or {hint}"
        return Stopped(message, hint=hint, code="E-TARGET-SHARED")
