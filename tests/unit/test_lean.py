"""pandas stays out of services."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from common.service.lean import without_pandas
without_pandas()
from common.segments.columns import record_batch
import pyarrow as pa
batch = record_batch([1], [2], [b"s"], [None], [b"p"])
assert batch.to_pylist()[0]["payload"] == b"p"
assert pa.scalar(1).as_py() == 1
print("pandas" in sys.modules)
"""


def test_pyarrow_works_without_pandas_and_does_not_load_it() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")
