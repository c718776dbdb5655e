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
from collections.abc import Iterable
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
    """Stay on one core. The threads of a world take turns: that costs a tenth less if no other core has to wake up."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})


def main() -> int:
    """Return 0 if every seed is well (with a mutant: if one finds it; with `all`: if every mutant is found)."""
    _same_hashes()
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("seeds", help="A or A-B")
    parser.add_argument("--twice", type=int, default=0, metavar="N", help="the first N seeds twice: one trace")
    parser.add_argument("--mutant", default="", help="a mistake in the product that is to be found; all: each of them")
    parser.add_argument("--log", action="store_true", help="with the log of the product")
    parser.add_argument("--verbose", action="store_true", help="with plan and faults of each seed")
    parser.add_argument("--shrink", action="store_true", help="look for the smallest world of a seed that still fails")
    parser.add_argument("--without", default="", metavar="KIND,…", help="without these kinds of faults")
    parser.add_argument("--only", default="", metavar="N,…", help="of all faults these only, by number; or none")
    parser.add_argument("--messages", type=int, default=MESSAGES, help="how many are published, about")
    parser.add_argument("--chains", type=int, default=0, help="of the target; default: those of one stream")
    parser.add_argument("--one-core", action="store_true", help="leave the other cores to others")
    args = parser.parse_args()
    first, _, last = args.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    imports.hide_package("pandas")
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
    if args.mutant == "all":
        return _find_all(seeds)
    if args.mutant:
        cut = replace(cut, chains=cut.chains or mutants.chains_of(args.mutant))
    if args.mutant and (args.shrink or str(replace(cut, chains=0))):
        mutants.apply(args.mutant)
    elif args.mutant:
        return _find(args.mutant, seeds, cut.chains)
    total: Counter[str] = Counter()
    began, code = time.process_time(), 0
    for seed in seeds:
        results = [run_seed(seed, cut) for _ in range(2 if seed < seeds.start + args.twice else 1)]
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
            _explain(result, cut, args.mutant, is_shrunk=args.shrink)
    print(json.dumps({**total, "processor seconds": round(time.process_time() - began, 1)}))
    return code


def _find(name: str, seeds: Iterable[int], chains: int) -> int:
    """Make the mistake in this process. Return 0 if one of these worlds shows it."""
    from tests.sim import mutants
    from tests.sim.scenario import run_seed

    mutants.apply(name)
    for seed in seeds:
        if problem := run_seed(seed, Cut(chains=chains)).problem:
            print(f"mutant {name}: found at seed {seed}: {problem.splitlines()[0]}", flush=True)
            return 0
    print(f"mutant {name}: not found", flush=True)
    return 1


def _find_all(seeds: range) -> int:
    """Try each mutant in a process of its own: first with the seed that found it before, then with all of `seeds`."""
    from tests.sim.mutants import FOUND, MUTANTS, NOT_FOUND, chains_of

    code = 0
    for name in sorted(MUTANTS.keys() - NOT_FOUND.keys()):
        if (child := os.fork()) == 0:
            before = [FOUND[name]] if FOUND.get(name) in seeds else []
            os._exit(_find(name, [*before, *seeds], chains_of(name)))
        code = max(code, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return code


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
