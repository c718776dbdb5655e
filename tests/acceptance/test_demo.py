"""`floe demo`, as a new user runs it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from infra.local.process import spawn
from tests.support.basics import PATIENCE, eventually, soak_only

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.servers


def start_demo(*options: str, env: dict[str, str]) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-m", "floe", "demo", *options], subprocess.PIPE
    return spawn(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env={**os.environ, **env})


def processes_below(folder: Path) -> list[str]:
    """The command lines of all running processes that were given a path in `folder`."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # the process has ended meanwhile
            continue
        if any(str(folder).encode() in word for word in words):
            lines.append(b" ".join(words).decode(errors="replace"))
    return lines


@pytest.mark.spark
def test_nothing_is_lost_repeated_reordered_or_altered_and_nothing_is_left_behind(tmp_path: Path) -> None:
    demo = start_demo("--seconds", "8", "--rate", "150", "--json", env={"TMPDIR": str(tmp_path)})

    out, err = demo.communicate(timeout=5 * PATIENCE)

    assert demo.returncode == 0, f"{out}\n{err}"
    result = json.loads(out)
    assert (result["verdict"], len(result["chains"])) == ("lost 0, repeated 0, out of order 0, altered 0", 6)
    assert all(chain["archive"] == chain["target"] > 100 for chain in result["chains"])
    restored = {chain["chain"]: chain["restored"] for chain in result["chains"]}
    assert all((count is not None) == name.startswith("us-east/") for name, count in restored.items())
    assert restored["us-east/ADVISORIES/0000/0"] > 100
    assert any("1" in chain["segments"] for chain in result["chains"]), "nothing was compacted"
    assert processes_below(tmp_path) == []
    assert [path for path in tmp_path.iterdir() if path.name.startswith("floe-demo")] == []


@pytest.mark.spark
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), soak_only(signal.SIGINT, 130)])
def test_an_interrupted_demo_leaves_no_process_and_no_folder(tmp_path: Path, number: signal.Signals, code: int) -> None:
    demo = start_demo(env={"TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"})
    assert demo.stdout is not None
    for line in demo.stdout:
        if "kill -9" in line:
            break
    assert eventually(lambda: len(processes_below(tmp_path)) > 3)

    demo.send_signal(number)
    _, err = demo.communicate(timeout=PATIENCE)

    assert demo.returncode == code, err
    assert "Traceback" not in err
    assert processes_below(tmp_path) == []
    assert [path for path in tmp_path.iterdir() if path.name.startswith("floe-demo")] == []


def test_without_java_it_stops_at_once_with_the_line_that_installs_it() -> None:
    folder = tempfile.mkdtemp()
    for program in ("bash", "sed", "head", "uname", "apt-get"):
        Path(folder, program).symlink_to(f"/usr/bin/{program}")

    demo = start_demo(env={"PATH": folder, "JAVA_HOME": ""})
    out, err = demo.communicate(timeout=PATIENCE)

    assert demo.returncode == 78
    assert "E-JAVA" in err
    assert "openjdk-17-jre-headless" in err
    assert out == ""
