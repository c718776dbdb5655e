"""The worlds as tests run them: two processes at a site and two at the centre, with every fault.

`python -m tests.sim SEED` repeats a seed. They run in a process of their own: time, chance and threads belong to the
world there, and hashes of text are the same in every run.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEEDS = 100  # of a run of all tests
#: By quarter: a world with 40 chains, in which a site dies, once after segments without a tail; and those that failed.
MORE = {1: "18x40,1390", 2: "270,1305", 3: "29x40,1805", 4: "771,859,1215"}


def worlds(*arguments: str, code: int = 0) -> str:
    """Run the command with `arguments` and return its output. Fails with its last lines at any other exit `code`."""
    command, env = [sys.executable, "-m", "tests.sim", "--one-core", *arguments], {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, (
        f"python -m tests.sim {' '.join(arguments)}\n{done.stdout[-12000:]}\n{done.stderr[-4000:]}"
    )
    return done.stdout


def quarter(number: int) -> None:
    """Run the worlds of one quarter of SEEDS, 1 to 4, some of them twice: ten of all. Each quarter has a test
    file, since the workers of a run share the files among them.
    """
    each = SEEDS // 4
    seeds = f"{each * (number - 1) + 1}-{each * number},{MORE[number]}"
    worlds(seeds, "--twice", "3" if number in (2, 4) else "2")
