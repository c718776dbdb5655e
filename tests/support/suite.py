"""`python -m tests.support.suite [--busy]`: run `make test` and add the results to docs/evidence/suite.json.

`--busy`: beside four processes that burn processor time.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "docs" / "evidence" / "suite.json"
BURNERS = 4


def counted(output: str, seconds: float) -> dict[str, Any]:
    """Return the numbers of a run, from the last line with sums that pytest writes."""
    sums = {
        name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|errors?)\b", output.splitlines()[-1])
    }
    failed = sums.get("failed", 0) + sums.get("error", 0) + sums.get("errors", 0)
    return {"seconds": round(seconds), "passed": sums.get("passed", 0), "failed": failed}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.suite")
    parser.add_argument("--busy", action="store_true", help=f"beside {BURNERS} processes that burn processor time")
    busy = parser.parse_args().busy
    commit = subprocess.check_output(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, text=True).strip()
    at, load = datetime.now(UTC).isoformat(timespec="seconds"), round(os.getloadavg()[0], 1)
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BURNERS if busy else 0)]
    began = time.monotonic()
    try:
        done = subprocess.run(["make", "test"], cwd=ROOT, capture_output=True, text=True, check=False)
    finally:
        for each in burners:
            each.kill()
            each.wait()
    output = "\n".join(line for line in done.stdout.splitlines() if " passed" in line or " failed" in line) or "nothing"
    found = {"commit": commit, "at": at, "load": load, "busy": busy, **counted(output, time.monotonic() - began)}
    if failures := re.findall(r"^(?:FAILED|ERROR) (tests/.*)", done.stdout, re.MULTILINE):
        found["failures"] = failures
        print(done.stdout, file=sys.stderr)
    runs = json.loads(EVIDENCE.read_text())["runs"] if EVIDENCE.exists() else []
    EVIDENCE.write_text(json.dumps({"runs": [*runs, found]}, indent=1) + "\n")
    print(json.dumps(found))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
