"""The tests that only `make soak` runs: crash points and publishers beyond those of `make test`."""

import asyncio
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from infra.local.process import kill_with_parent

ROOT = Path(__file__).parents[2]


async def crash_rounds(rng: random.Random) -> dict[str, Any]:
    """Run the tests marked `soak`, then those marked `timing` one at a time, beside nothing else.

    Raises AssertionError with the end of pytest's output if one fails.
    """
    started, seed = time.monotonic(), str(rng.getrandbits(32))
    found = [await _run(seed, "soak and not timing", "2"), await _run(seed, "timing", "0")]
    sums = {name: sum(each[name] for each in found) for name in found[0]}
    return {**sums, "seconds": round(time.monotonic() - started, 1)}


async def _run(seed: str, marked: str, processes: str) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "pytest", "-q", "-m", marked, "-n", processes, f"--junit-xml={report}"),
            cwd=ROOT,
            env={**os.environ, "FLOE_SEED": seed},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        kill_with_parent(process.pid)
        out, _ = await process.communicate()
        assert process.returncode == 0, out.decode(errors="replace")[-2000:]
        suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None, "pytest wrote no report"
    return {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
