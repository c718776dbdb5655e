"""Simulated worlds and mutants (`tests/sim/`) at length, in processes of their own."""

import asyncio
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BLOCK = 20  # seeds of one process
MUTANTS_WITHIN = 300  # seeds
KEPT = ("ok", "seed", "commit", "code", "seeds")  # fields of a result that are no numbers to add up


async def worlds(seeds: range, chains: int = 0) -> dict[str, Any]:
    """Run the worlds of `seeds` with `chains` chains a target (0: those of one stream), as many at once as there are
    cores. Raises AssertionError naming those that fail.
    """
    began, blocks = time.monotonic(), [seeds[i : i + BLOCK] for i in range(0, len(seeds), BLOCK)]
    free = asyncio.Semaphore(os.cpu_count() or 1)

    async def run(block: range) -> tuple[int, str]:
        async with free:
            return await _simulate(f"{block[0]}-{block[-1]}", "--chains", str(chains))

    total: Counter[str] = Counter()
    failed = []
    for code, output in await asyncio.gather(*map(run, blocks)):
        lines = output.splitlines()
        failed += [line for line in lines if line.startswith("seed ") and ": ok;" not in line]
        if code and not failed:
            failed = lines[-5:]
        elif not code:
            total.update(json.loads(lines[-1]))
    assert not failed, "\n".join(failed)
    total["worlds"] = total.pop("seeds")
    total["processor seconds"] = round(total["processor seconds"])
    return {"seeds": [f"{seeds[0]}-{seeds[-1]}"], "wall seconds": round(time.monotonic() - began), **total}


async def mutants() -> dict[str, Any]:
    """Look for each mutant; return the seed that shows it, by name. Raises AssertionError naming those without one."""
    began = time.monotonic()
    code, output = await _simulate(f"1-{MUTANTS_WITHIN}", "--mutant", "all")
    lines = [line.removeprefix("mutant ") for line in output.splitlines() if line.startswith("mutant ")]
    found = {line.partition(":")[0]: int(line.split()[4].rstrip(":")) for line in lines if ": found at seed " in line}
    missed = [line for line in lines if ": found at seed " not in line]
    assert not missed, "\n".join(missed)
    assert not code, output[-2000:]
    return {"found": found, "mutants": len(found), "wall seconds": round(time.monotonic() - began)}


async def _simulate(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "tests.sim", *arguments]
    pipe, joined = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
    child = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=pipe, stderr=joined)
    output, _ = await child.communicate()
    return child.returncode or 0, output.decode(errors="replace")


def added(before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Add the results of other seeds, made with the same files; return `found` alone if the files differ."""
    is_same = before.get("code") == found["code"] and before.get("ok") and found["ok"]
    if not (is_same and "seeds" in before and "seeds" in found):
        return found
    done, new = (sorted(map(_bounds, each["seeds"])) for each in (before, found))
    if any(first <= end and begin <= last for first, last in new for begin, end in done):
        return found
    united: list[list[int]] = []
    for first, last in sorted(done + new):
        if united and united[-1][1] + 1 == first:
            united[-1][1] = last
        else:
            united.append([first, last])
    numbers = (Counter({k: v for k, v in each.items() if k not in KEPT}) for each in (before, found))
    return {**found, "seeds": [f"{first}-{last}" for first, last in united], **sum(numbers, Counter())}


def _bounds(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last)
