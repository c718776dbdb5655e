"""The whole world, seed by seed: two processes at a site and two at the centre, with everything that can break.

`python -m tests.sim SEED` repeats a seed. The worlds run in a process of their own, where time, chance and threads are
the world's, and hashes of text are the same in every run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK, BLOCKS = 10, 10


def worlds(*arguments: str) -> str:
    """Run the command with `arguments`; its output. Fails with its last lines where it does."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.sim", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (
        f"python -m tests.sim {' '.join(arguments)}\n{done.stdout[-12000:]}\n{done.stderr[-4000:]}"
    )
    return done.stdout


@pytest.mark.parametrize("first", range(1, BLOCK * BLOCKS, BLOCK))
def test_the_promises_hold_in_every_world(first: int) -> None:
    worlds(f"{first}-{first + BLOCK - 1}")
