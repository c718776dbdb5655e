"""The harness of the benchmarks: paired runs, medians, the table and `bench/results.json`."""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).with_name("results.json")
REPEATS = 3


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The values of a figure. `floor`: in the same unit, None if nothing compares; `ratio`: value / floor."""

    value: float
    floor: float | None = None
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Bench:
    """A figure, its unit and its `requirement`: the least ratio, or a bound of the value if there is no floor."""

    name: str
    unit: str
    requirement: str
    run: Callable[[], BenchResult]


def measure_paired(*, floor: Callable[[], float], value: Callable[[], float]) -> BenchResult:
    """Measure floor and value in turn, so that a machine that changes speed affects both; return the medians."""
    pairs = [(floor(), value()) for _ in range(REPEATS)]
    floors, values = zip(*pairs, strict=True)
    ratios = [v / f for f, v in pairs]
    medians = round(statistics.median(values), 1), round(statistics.median(floors), 1)
    return BenchResult(*medians, round(statistics.median(ratios), 3))


def memory_mb(field: str, pid: int | str = "self") -> float:
    """Return the resident size of a running process (`field` VmRSS), or its peak so far (VmHWM), in MB (10^6 bytes)."""
    status = Path(f"/proc/{pid}/status").read_text()
    kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field))
    return round(kib * 1024 / 1e6, 1)


def run_in_child(module: str, *words: str) -> dict[str, float]:
    """Run a module of the benchmarks in a process of its own; return the figures that it prints as JSON."""
    done = subprocess.run([sys.executable, "-m", module, *words], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def print_table(results: Iterable[tuple[Bench, BenchResult]]) -> None:
    table = Table("name", "value", "unit", "floor", "ratio", "requirement")
    for bench, result in results:
        floor = "–" if result.floor is None else f"{result.floor:,.0f}"
        ratio = "–" if result.ratio is None else f"{result.ratio:.2f}"
        table.add_row(bench.name, _shown(result.value), bench.unit, floor, ratio, bench.requirement)
    Console().print(table)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def save(results: Iterable[tuple[Bench, BenchResult]]) -> None:
    """Save the figures: replace those of the same names, keep those of other names (`ONLY=` runs one)."""
    kept = {r["name"]: r for r in (json.loads(RESULTS.read_text()) if RESULTS.exists() else [])}
    kept |= {bench.name: {"name": bench.name, "unit": bench.unit, **asdict(result)} for bench, result in results}
    RESULTS.write_text(json.dumps(sorted(kept.values(), key=lambda r: r["name"]), indent=1) + "\n")
