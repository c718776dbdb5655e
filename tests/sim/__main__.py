"""`python -m tests.sim 1-20 [--twice] [--mutant NAME]`: run the worlds of some seeds."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
from collections import Counter


def _same_hashes() -> None:
    """Begin again with a fixed hash of text, where it is not: the order of sets is part of a trace."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.sim", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"}
        )


def main() -> int:
    """Returns 0 where every seed is well (with a mutant: where it was found)."""
    _same_hashes()
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("seeds", help="A or A-B")
    parser.add_argument("--twice", action="store_true", help="each seed twice: one trace")
    parser.add_argument("--mutant", default="", help="a mistake in the product that is to be found")
    parser.add_argument("--log", action="store_true", help="with the log of the product")
    parser.add_argument("--verbose", action="store_true", help="with plan and faults of each seed")
    args = parser.parse_args()
    first, _, last = args.seeds.partition("-")
    from tests.sim import doors
    from tests.sim.scenario import run_seed

    doors.install()
    gc.freeze()  # what is loaded stays, and is not looked at again behind each seed
    if not args.log:
        logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda _: None  # what a killed process never finished
    if args.mutant:
        from tests.sim import mutants

        mutants.apply(args.mutant)
    total: Counter[str] = Counter()
    began, code = time.process_time(), 0
    for seed in range(int(first), int(last or first) + 1):
        results = [run_seed(seed) for _ in range(1 + args.twice)]
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
            if args.mutant:
                print(f"mutant {args.mutant}: found at seed {seed}: {result.problem.splitlines()[0]}")
                return 0
            _explain(result)
    if args.mutant:
        print(f"mutant {args.mutant}: not found")
        return 1
    print(f"{dict(total)}, {(time.process_time() - began) / max(1, total['seeds'] * (1 + args.twice)):.2f} s a seed")
    return code


def _explain(result: object) -> None:
    from tests.sim.scenario import Result

    assert isinstance(result, Result)
    print("\n".join([f"  {line}" for line in result.last]))
    print(f"  plan: {result.plan}")
    print(f"seed {result.seed}: {result.problem}")
    print(f"again: python -m tests.sim {result.seed} --log")


if __name__ == "__main__":
    sys.exit(main())
