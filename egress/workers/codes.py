"""What the exit codes of several processes mean together: pure."""

from __future__ import annotations

from collections.abc import Iterable

FINAL = (78, 77, 2)  # what a restart would only repeat: configuration, credentials, the command line
LATER = 75  # what is done again by the next start


def exit_code(returned: int) -> int:
    """The exit code of a process that `returned`, below 0: ended by that signal."""
    return 128 - returned if returned < 0 else returned


def worst(codes: Iterable[int]) -> int:
    """The code that says most of what an operator has to do; 0 if there is none."""
    return max(codes, key=_gravity, default=0)


def _gravity(code: int) -> tuple[int, int]:
    rank = {0: 0, LATER: 1}.get(code, 3 if code in FINAL else 2)
    return rank, code
