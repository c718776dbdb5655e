"""pandas, rich and what a restore needs stay out of services."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import floe

SCRIPT = """
import sys
from common.lean import without
without("pandas")
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


@pytest.mark.parametrize("role", ["egress", "ingress"])
def test_a_service_loads_nothing_that_only_shows(role: str, tmp_path: Path) -> None:
    """Every file of the service is imported, `rich` and what a restore needs by none, and pyarrow behind its pool."""
    script = f"import sys, floe; sys.argv = ['floe', '{role}', 'run', '-c', '{tmp_path}/none.yaml']\n"
    script += f"try:\n    floe.main()\nfinally:\n    import {role}.service, pyarrow\n"
    script += (
        "    print({'rich', 'numpy', 'google_crc32c'} & sys.modules.keys(), pyarrow.default_memory_pool().backend_name)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (78, "set() jemalloc\n"), done.stderr


@pytest.mark.parametrize(
    ("command", "may_start_spark"),
    [("compact", True), ("compact --engine local", False), ("segments verify", False)]
    + [(f"segments verify {option}", True) for option in ("--engine spark", "--engine=spark")],
)
def test_it_is_known_beforehand_which_commands_may_start_spark(command: str, may_start_spark: bool) -> None:
    assert floe._uses_spark(floe._words(["-v", *command.split(), "-c", "none.yaml"])) == may_start_spark


@pytest.mark.parametrize("engine", ["spark", "local"])
def test_pandas_is_hidden_from_what_starts_no_spark(engine: str, tmp_path: Path) -> None:
    script = f"import sys, floe; sys.argv = 'floe compact --engine {engine} -c {tmp_path}/none.yaml'.split()\n"
    script += "try:\n    floe.main()\nfinally:\n    import pandas"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert (done.returncode == 78) == (engine == "spark"), done.stderr
    assert ("Floe does without pandas here" in done.stderr) == (engine == "local")
