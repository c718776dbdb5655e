"""`python -m tests.sim 1-20 [--twice N] [--mutant NAME] [--shrink]`: run the worlds of some seeds."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from common import imports
from tests.sim.plan import MESSAGES, Cut

if TYPE_CHECKING:
    from tests.sim.scenario import Result


def _same_hashes() -> None:
    """Start again with a fixed hash seed if there is none: the order of sets is part of a trace."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.sim", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"}
        )


def _stay_on_one_core() -> None:
    """Stay on one core. The threads of a world take turns: that costs a tenth less if no other core has to wake up, and
    less again if a thread that is released waits until the other one has stopped: before, it cannot have the GIL.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main() -> int:
    """Return 0 if every seed is well (with a mutant: if one finds it; with `all`: if every mutant is found)."""
    _same_hashes()
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("seeds", help="A or A-B; several with commas; AxN: with a target of N chains")
    parser.add_argument("--twice", type=int, default=0, metavar="N", help="the first N seeds twice: one trace")
    parser.add_argument("--mutant", default="", help="mistakes in the product to find, with commas; or all")
    parser.add_argument("--log", action="store_true", help="with the log of the product")
    parser.add_argument("--verbose", action="store_true", help="with plan and faults of each seed")
    parser.add_argument("--shrink", action="store_true", help="look for the smallest world of a seed that still fails")
    parser.add_argument("--without", default="", metavar="KIND,…", help="without these kinds of faults")
    parser.add_argument("--only", default="", metavar="N,…", help="of all faults these only, by number; or none")
    parser.add_argument("--messages", type=int, default=MESSAGES, help="how many are published, about")
    parser.add_argument("--chains", type=int, default=0, help="of the target; default: those of one stream")
    parser.add_argument("--one-core", action="store_true", help="leave the other cores to others")
    args = parser.parse_args()
    imports.hide_package("pandas")
    imports.hide_package("rich")
    from tests.sim import doors, mutants
    from tests.sim.scenario import run_seed

    cut = Cut.of(args.without, args.only, args.messages, args.chains)
    doors.install()
    if args.one_core:
        _stay_on_one_core()
    gc.freeze()  # loaded modules stay, so the collector need not scan them behind each seed
    if not args.log:
        logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda _: None  # coroutines that a killed process never finished
    if args.mutant and (args.shrink or str(replace(cut, chains=0))):
        cut = replace(cut, chains=cut.chains or mutants.chains_of(args.mutant))
        mutants.apply(args.mutant)
    elif args.mutant:
        names = sorted(mutants.FOUND) if args.mutant == "all" else args.mutant.split(",")
        return _find(names, [seed for seed, _ in _worlds(args.seeds, cut)], cut.chains)
    total, began, code = Counter[str](), time.process_time(), 0
    for number, (seed, mine) in enumerate(_worlds(args.seeds, cut)):
        results = [run_seed(seed, mine) for _ in range(2 if number < args.twice else 1)]
        result = results[0]
        print(result.line(), flush=True)
        if args.verbose:
            print(f"  {result.plan}\n  {dict(result.faults)}")
        total.update(result.counts)
        total["faults"] += sum(result.faults.values())
        total["seeds"] += 1
        if len({each.trace for each in results}) > 1:
            print(f"seed {seed}: NOT DETERMINISTIC: {' '.join(each.trace for each in results)}")
            code = 1
        if result.problem:
            total["failed"] += 1
            code = 1
            _explain(result, mine, args.mutant, is_shrunk=args.shrink)
    print(json.dumps({**total, "processor seconds": round(time.process_time() - began, 1)}))
    return code


def _worlds(text: str, cut: Cut) -> Iterator[tuple[int, Cut]]:
    """Yield the seeds in `text`, such as `1-25,18x40`, each with its cut: `cut`, with the chains behind an x."""
    for part in text.split(","):
        span, _, chains = part.partition("x")
        first, _, last = span.partition("-")
        for seed in range(int(first), int(last or first) + 1):
            yield seed, replace(cut, chains=int(chains or cut.chains))


def _find(names: Sequence[str], seeds: Sequence[int], chains: int) -> int:
    """Make each mistake in a process of its own: first with the seed that found it before, then with all of `seeds`.
    Return 0 if these worlds show every one.
    """
    from tests.sim import mutants

    code = 0
    for name in names:
        if (child := os.fork()) == 0:
            mutants.apply(name)
            before = [mutants.FOUND[name]] if mutants.FOUND.get(name) in seeds else []
            os._exit(_shows(name, [*before, *seeds], Cut(chains=chains or mutants.chains_of(name))))
        code = max(code, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return code


def _shows(name: str, seeds: Iterable[int], cut: Cut) -> int:
    from tests.sim.scenario import run_seed

    for seed in seeds:
        if problem := run_seed(seed, cut).problem:
            print(f"mutant {name}: found at seed {seed}: {problem.splitlines()[0]}", flush=True)
            return 0
    print(f"mutant {name}: not found", flush=True)
    return 1


def _explain(result: Result, cut: Cut, mutant: str, *, is_shrunk: bool) -> None:
    from tests.sim.shrinking import Shrinking

    if is_shrunk:
        shrinking = Shrinking(result, cut)
        shrinking.run()
        result, cut = shrinking.result, shrinking.cut
        print(f"shrunk in {shrinking.runs} runs to {len(result.happened)} faults: {result.line()}")
    print("\n".join([f"  {line}" for line in result.last]))
    print(f"  plan: {result.plan}")
    print(f"seed {result.seed}: {result.problem}")
    words = [str(result.seed), str(cut), f"--mutant {mutant}" if mutant else "", "--log"]
    print(f"again: python -m tests.sim {' '.join(filter(None, words))}")


if __name__ == "__main__":
    sys.exit(main())
