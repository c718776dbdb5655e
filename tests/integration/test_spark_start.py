"""Errors when Spark cannot start: one line with the next step, before anything is listed. Also the commands that the
scripts of `infra/spark` run, with stand-ins for the programs. On a cluster: `tests/crash`.
"""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pyspark
import pytest
import yaml

from common.errors import ConfigError
from compaction.spark import require_spark
from tests.support.basics import PATIENCE
from tests.support.commands import ROOT, run_here
from tests.support.compaction import CHAIN, begun

INSTALL = "sudo apt-get install -y openjdk-17-jre-headless"


def java(folder: Path, version: str, otherwise: str = "exit 0") -> Path:
    """A JAVA_HOME with a program that reports that version, and does `otherwise` for anything else."""
    program = folder / "java" / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"""#!/bin/sh
[ "$*" != -version ] || {{ echo 'openjdk version "{version}" 2025-04-15' >&2; exit 0; }}
{otherwise}
""")
    program.chmod(0o755)
    return folder / "java"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    archive = begun(tmp_path, CHAIN)
    for first in range(1, 40, 10):
        archive.put(first, first + 9, age=7200)
    levels = [{"from": 0, "to": 1, "min_age": "1h", "max_wait": "1h", "min_count": 3}]
    store = {"store": {"url": f"file://{tmp_path}/store"}, "spool_dir": str(tmp_path / "spool")}
    path = tmp_path / "floe.yaml"
    path.write_text(yaml.safe_dump({**store, "compaction": {"levels": levels}}))
    return path


def parsed(code: int, out: str, err: str) -> tuple[str, list[dict[str, object]], str]:
    """The one line of the error, the log, and all other output."""
    assert (code, out, "Traceback" in err) == (78, "", False), err
    lines = err.splitlines()
    [error] = [each for each in lines if each.startswith("error[")]
    log = [each for each in lines if each[:1] == "{"]
    return error, [json.loads(each) for each in log], "\n".join(each for each in lines if each not in (error, *log))


def test_missing_or_wrong_parts_are_named_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (empty := tmp_path / "empty").mkdir()
    old, older = java(tmp_path / "old", "11.0.23"), java(tmp_path / "older", "1.8.0_402")
    broken = java(tmp_path / "broken", "17.0.1")
    (broken / "bin" / "java").write_text("#!/bin/sh\necho 'Error: could not find libjli.so' >&2\nexit 1\n")
    unset = f"found none (JAVA_HOME={empty}); {INSTALL} && unset JAVA_HOME, or use --engine local"
    for variable, value, part in (
        ("PATH", empty, f"found none (java); {INSTALL}, or use --engine local"),
        ("JAVA_HOME", empty, unset),
        ("JAVA_HOME", old, 'expected Java 17 or 21, found openjdk version "11.0.23" 2025-04-15'),
        ("JAVA_HOME", older, 'found openjdk version "1.8.0_402"'),
        ("JAVA_HOME", broken, "found Error: could not find libjli.so"),
        ("SPARK_HOME", empty, "expected Spark there, found no bin/spark-submit; unset SPARK_HOME"),
    ):
        with monkeypatch.context() as patch, pytest.raises(ConfigError) as caught:
            for name in ("JAVA_HOME", "SPARK_HOME"):
                patch.delenv(name, raising=False)
            patch.setenv(variable, str(value))
            require_spark()
        line = caught.value.as_text()
        assert line.startswith("error[E-SPARK]: engine spark: "), line
        assert (part in line, "\n" in line) == (True, False), line


def test_a_run_fails_with_one_line_and_does_nothing(config: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyspark", None)
    done = run_here("-v", "compact", "-c", str(config))
    error, log, rest = parsed(done.code, done.out, done.err)
    assert error.endswith(
        "expected pyspark, found none; in a checkout of Floe: pip install --require-hashes -r requirements.lock, "
        "or use --engine local"
    )
    assert ([line["action"] for line in log], rest) == (["process_started", "process_ended"], "")


def test_a_java_that_dies_at_its_start_shows_why(config: Path, tmp_path: Path):
    dies = "echo 'Error occurred during initialization of VM: could not reserve enough space' >&2; exit 1"
    env = os.environ | {"JAVA_HOME": str(java(tmp_path, "17.0.15", dies))}
    words = [sys.executable, "-m", "floe", "compact", "-c", str(config)]
    done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=ROOT, timeout=PATIENCE, check=False)
    error, _, rest = parsed(done.returncode, done.stdout, done.stderr)
    assert error.startswith("error[E-SPARK]: engine spark: Java ended before Spark was up; see its output above")
    assert "could not reserve enough space" in rest


def test_spark_is_required_only_if_needed(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setitem(sys.modules, "pyspark", None)
    for options in (["--dry-run"], ["--engine", "local"]):
        done = run_here("compact", "-c", str(config), *options)
        assert done.code == 0, done


@pytest.mark.parametrize("version", ["4.1.4", "5.0.0"])
def test_another_pyspark_is_named_with_its_version(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / f"pyspark-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: pyspark\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=re.escape(f"expected pyspark 4.2 or newer, below 5, found {version}")):
        require_spark()


def test_java_is_not_checked_if_spark_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`spark-env.sh` sets JAVA_HOME in some distributions; under `spark-submit` Java runs already."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="found none"):
        require_spark()
    (tmp_path / "spark-env.sh").touch()
    require_spark()
    (tmp_path / "spark-env.sh").unlink()
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    require_spark()


SPARK = ROOT / "infra" / "spark"
JARS = Path(pyspark.__file__).parent / "jars"


def stub(folder: Path, name: str, does: str = 'printf "%s\\n" "$@"') -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{does}\n")
    (folder / name).chmod(0o755)


def ran(script: str, *words: str, env: dict[str, str], code: int = 0) -> list[str]:
    """The lines of the output of a script; of stderr if it fails."""
    done = subprocess.run(["bash", SPARK / script, *words], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return (done.stderr if code else done.stdout).splitlines()


@pytest.fixture
def path(tmp_path: Path) -> dict[str, str]:
    """An environment with stand-ins in front of everything else; `python` is this one."""
    stub(tmp_path / "bin", "python", f'exec {sys.executable} "$@"')
    return {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}


def test_spark_submit_gets_the_command_with_the_master_for_both(tmp_path: Path, path: dict[str, str]):
    stub(tmp_path / "spark" / "bin", "spark-submit", 'printf "%s\\n" "$@" "$PYSPARK_DRIVER_PYTHON"')
    env = path | {"SPARK_HOME": str(tmp_path / "spark"), "FLOE_PYTHON": sys.executable}
    env["FLOE_SUBMIT"] = "--driver-memory 2g"
    words = ran("submit.sh", "spark://host:7077", "compact", "-c", "a file.yaml", env=env)
    command = ["--driver-memory", "2g", str(ROOT / "floe.py"), "compact", "-c", "a file.yaml"]
    assert words == ["--master", "spark://host:7077", *command, "--master", "spark://host:7077", sys.executable]


def test_submit_and_environment_name_their_needs(tmp_path: Path, path: dict[str, str]):
    [line] = ran("submit.sh", "yarn", env=path, code=2)
    assert line.startswith("expected a master and a command of floe")
    stub(tmp_path / "bare", "python", "exit 1")
    bare = path | {"FLOE_PYTHON": f"{tmp_path}/bare/python"}
    assert "expected floe-jetstream" in ran("submit.sh", "yarn", "compact", env=bare, code=78)[-1]

    [line] = ran("environment.sh", "environment.tar", env=path, code=2)
    assert "expected a name that ends with .tar.gz" in line


def test_a_pod_is_an_executor_where_spark_asks_for_one_and_else_floe(tmp_path: Path, path: dict[str, str]):
    stub(tmp_path / "bin", "floe")
    assert ran("entrypoint.sh", "compact", "-c", "x.yaml", env=path) == ["compact", "-c", "x.yaml"]

    stub(tmp_path / "java" / "bin", "java")
    asked = {
        "SPARK_DRIVER_URL": "spark://driver:1",
        "SPARK_EXECUTOR_ID": "3",
        "SPARK_EXECUTOR_CORES": "2",
        "SPARK_EXECUTOR_MEMORY": "512m",
        "SPARK_APPLICATION_ID": "app",
        "SPARK_EXECUTOR_POD_IP": "10.0.0.7",
        "SPARK_RESOURCE_PROFILE_ID": "0",
        "SPARK_EXECUTOR_POD_NAME": "pod",
        "SPARK_CONF_DIR": "/opt/spark/conf",
        "SPARK_JAVA_OPT_10": "-Dlast=1",
        "SPARK_JAVA_OPT_9": "-Dspaced=a b",
        "JAVA_HOME": str(tmp_path / "java"),
    }
    words = ran("entrypoint.sh", "executor", env=path | asked)
    assert words[:6] == ["-Dspaced=a b", "-Dlast=1", "-Xms512m", "-Xmx512m", "-cp", f"/opt/spark/conf:{JARS}/*"]
    backend, *options = words[6:]
    known = "--executor-id 3 --cores 2 --app-id app --hostname 10.0.0.7 --resourceProfileId 0 --podName pod"
    assert options == ["--driver-url", "spark://driver:1", *known.split()]
    [jar] = JARS.glob("spark-kubernetes_*.jar")
    with zipfile.ZipFile(jar) as classes:
        assert f"{backend.replace('.', '/')}.class" in classes.namelist()
