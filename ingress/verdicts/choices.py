"""What an operator is told when a target is not what its checkpoint says: the verdict, both sides, the
choices, each a command to paste.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import AnotherWriter, FloeError, Stopped
from common.service.pasting import ways
from ingress.checkpoints.commands import set_command
from ingress.verdict.verdict import Doubt, Finding, Origin, Reading, Verdict

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
            hint=ways(("restore the state bucket; or go on behind what the target holds", self._from_target)),
            code="E-TARGET-NOT-EMPTY",
        )

    def error(self, verdict: Verdict, seen: Sequence[Reading], described: str = "") -> FloeError:
        """What to raise for a confirmed `verdict`; `seen`: the readings, oldest first. `described`: the
        message that speaks against going on, as far as it can be read.
        """
        message = f"target {self.target}: {verdict.finding.value}: {verdict.detail}"
        message = f"{message}; {described}" if described else message
        if verdict.finding in (Finding.GONE, Finding.RECREATED):
            return Stopped(message, hint=self._replaced(seen), code=f"E-TARGET-{verdict.finding.name}")
        if verdict.finding is Finding.BEHIND:
            again = "restore a newer copy; or carry again what it lost (whoever has read it gets it twice)"
            hint = ways((again, self._from_target), ("or go on without it", self._accept))
            return Stopped(message, hint=hint, code="E-TARGET-BEHIND")
        if verdict.finding is Finding.MIXED:
            drop = "or drop the rest of it and leave what else stands there where it is"
            hint = ways(("set `exclusive: false` again until the intent is closed; " + drop, self._accept))
            return Stopped(message, hint=hint, code="E-TARGET-SHARED")
        if verdict.finding is Finding.UNREAD and verdict.doubt is not None:
            return Stopped(message, hint=self._counted(verdict.doubt), code="E-TARGET-UNREAD")
        return self._shared(message, verdict.doubt, seen)

    def _replaced(self, seen: Sequence[Reading]) -> str:
        if not seen or seen[-1].last_sequence == 0:
            return ways(("restore the stream; or fill an empty one from the archive", self._forget))
        same = "or, where it is the same with another creation time, or what was carried shall not come again"
        behind = "restore the stream; or go on behind what this one holds"
        return ways((behind, self._from_target), (same, self._accept))

    def _shared(self, message: str, doubt: Doubt | None, seen: Sequence[Reading]) -> FloeError:
        hint = ways(("stop what else publishes to it; then leave its messages where they are", self._accept))
        if doubt is not None:
            hint = ways("stop what else publishes to it, or purges it; then choose", self._counted(doubt))
        # What came before the last two looks has stopped.
        if len(seen) > 1 and seen[-1].last_sequence > seen[-2].last_sequence:
            return AnotherWriter(f"{message}; it still moves", hint=hint, code="E-TARGET-SHARED")
        if seen and isinstance(seen[-1].tail, Origin):
            hint = ways(hint, ("or, where the state bucket is an old copy", self._from_target))
        return Stopped(message, hint=hint, code="E-TARGET-SHARED")

    def _counted(self, doubt: Doubt) -> str:
        """The two ways to go on where the last sequence does not tell how many rows are stored."""
        rest = f"of the {doubt.count} rows of the open intent"
        again = f"send {rest} those from row {doubt.certain + 1} on (what of them is stored comes twice)"
        count = f"or count {doubt.counted} {rest} as stored (what of them is not stored is lost)"
        return ways((again, self._stored(doubt.certain)), (count, self._stored(doubt.counted)))

    # Commands

    def _stored(self, rows: int) -> str:
        return set_command(self.target, f"--stored {rows}")

    @property
    def _accept(self) -> str:
        return set_command(self.target, "--accept")

    @property
    def _from_target(self) -> str:
        return set_command(self.target, "--from-target")

    @property
    def _forget(self) -> str:
        return set_command(self.target, "--forget")
