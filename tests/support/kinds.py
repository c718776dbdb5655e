"""The kinds of tests, and the second try of CI after a failure: `python -m tests.support.kinds` behind `make test`.

pure        no server, no process, no clock
simulated   in simulated time, or a simulated world
real        on real servers, Spark, processes
soak        long, or right only on a quiet machine; `make soak` runs it, `make test` does not

A real test may fail by chance: if at most MOST failed and all of them are real, each is run once more, alone.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FAILED = Path(__file__).parents[2] / "build" / "failed_tests.json"
MOST = 2
KINDS = ("pure", "simulated", "real", "soak")

_REAL_MARKS = ("servers", "spark", "real")
_REAL_FIXTURES = {"nats_server", "nats_url", "s3", "cluster", "alone", "limited"}
_REAL_FOLDERS = {"acceptance", "crash"}


def in_simulated_time(item: pytest.Item) -> bool:
    """True if it is marked so itself, or its file is and it uses the server."""
    if item.get_closest_marker("simulated") is None or item.get_closest_marker("real") is not None:
        return False
    return "nats_url" in fixtures_of(item) or any(mark.name == "simulated" for mark in item.own_markers)


def fixtures_of(item: pytest.Item) -> set[str]:
    return {*getattr(item, "fixturenames", ())}


def kind_of(item: pytest.Item) -> str:
    """Return one of KINDS."""
    has = item.get_closest_marker
    if has("soak") or has("timing"):
        return "soak"
    if in_simulated_time(item) or "sim" in item.path.parts:
        return "simulated"
    if fixtures_of(item) & _REAL_FIXTURES or any(map(has, _REAL_MARKS)) or {*item.path.parts} & _REAL_FOLDERS:
        return "real"
    return "pure"


def write_failed(failed: dict[str, str]) -> None:
    """Write the failed tests to a file, by name, with the kind of each."""
    FAILED.parent.mkdir(exist_ok=True)
    FAILED.write_text(json.dumps(failed))


def verdict(failed: dict[str, str]) -> str:
    """Return why the failures count at once; empty if they are tried again."""
    if not failed:
        return "no test failed, and yet the run did"
    if len(failed) > MOST:
        return f"{len(failed)} tests failed: expected at most {MOST} for a second try"
    others = [f"{name} is {kind}" for name, kind in failed.items() if kind != "real"]
    return f"only real tests get a second try: {', '.join(others)}" if others else ""


def main() -> int:
    """Return 0 if every failed test is real and passes alone."""
    failed: dict[str, str] = json.loads(FAILED.read_text()) if FAILED.exists() else {}
    if why := verdict(failed):
        print(f"no second try: {why}")
        return 1
    code = 0
    for name in failed:
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", name], check=False)
        print(f"second try: {name}: first failed, then {'failed' if done.returncode else 'passed'}", flush=True)
        code = code or done.returncode
    return code


if __name__ == "__main__":
    sys.exit(main())
