"""The smallest world of a seed that still fails: fewer kinds of faults, fewer faults, fewer messages."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from tests.sim.plan import Cut
from tests.sim.scenario import Result, run_seed


def broken_promise(result: Result) -> str:
    """Return the broken promise, by its number or the first words of the problem; empty if there is none."""
    found = re.match(r"\w+: (I\d|\w+ \w+)", result.problem)
    return found[1] if found else result.problem


class Shrinking:
    """The reduction of the world of `result`, as long as the same promise stays broken."""

    def __init__(self, result: Result, cut: Cut, run: Callable[[int, Cut], Result] = run_seed) -> None:
        self.result, self.cut, self.runs = result, cut, 0
        self._run, self._promise = run, broken_promise(result)

    def run(self) -> None:
        """Continue until nothing more can be left out."""
        before = None
        while before != self.cut:
            before = self.cut
            self._leave_out_kinds()
            self._leave_out_faults()
            self._publish_less()
        # The numbers of the faults that happened replace the other options.
        self.cut = replace(self.cut, without=frozenset(), only=frozenset(n for n, _ in self.result.happened))

    def _fails(self, cut: Cut) -> bool:
        """Return true if it still fails, and keep the smaller world then."""
        self.runs += 1
        result = self._run(self.result.seed, cut)
        if broken_promise(result) != self._promise:
            return False
        self.result, self.cut = result, cut
        return True

    def _leave_out_kinds(self) -> None:
        for kind in sorted({kind for _, kind in self.result.happened}):
            self._fails(replace(self.cut, without=self.cut.without | {kind}))

    def _leave_out_faults(self) -> None:
        """Leave out halves of the faults that happened, then quarters, down to single faults."""
        size = max(1, len(self.result.happened) // 2)
        while self.result.happened and size:
            numbers = [number for number, _ in self.result.happened]
            parts = [numbers[at : at + size] for at in range(0, len(numbers), size)]
            if not any(self._fails(self._only(numbers, part)) for part in parts):
                size //= 2
            size = min(size, len(self.result.happened))

    def _only(self, numbers: Sequence[int], left_out: Sequence[int]) -> Cut:
        return replace(self.cut, only=frozenset(numbers) - frozenset(left_out))

    def _publish_less(self) -> None:
        low, high = 0, self.cut.messages  # fails with `high`, not known to fail with `low`
        while high - low > 1:
            middle = (low + high) // 2
            if self._fails(replace(self.cut, messages=middle)):
                high = middle
            else:
                low = middle
