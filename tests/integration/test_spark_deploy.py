"""`infra/spark`: the words that its scripts run, with stand-ins for what they start. On a cluster: `tests/crash`."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pyspark
import pytest

ROOT = Path(__file__).parents[2]
SPARK = ROOT / "infra" / "spark"
JARS = Path(pyspark.__file__).parent / "jars"


def stand_in(folder: Path, name: str, does: str = 'printf "%s\\n" "$@"') -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{does}\n")
    (folder / name).chmod(0o755)


def ran(script: str, *words: str, env: dict[str, str], code: int = 0) -> list[str]:
    """What a script says, line by line; on stderr where it fails."""
    done = subprocess.run(["bash", SPARK / script, *words], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return (done.stderr if code else done.stdout).splitlines()


@pytest.fixture
def path(tmp_path: Path) -> dict[str, str]:
    """An environment with stand-ins in front of all else; `python` is this one."""
    stand_in(tmp_path / "bin", "python", f'exec {sys.executable} "$@"')
    return {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}


def test_spark_submit_gets_the_command_with_the_master_for_both(tmp_path: Path, path: dict[str, str]):
    stand_in(tmp_path / "spark" / "bin", "spark-submit", 'printf "%s\\n" "$@" "$PYSPARK_DRIVER_PYTHON"')
    env = path | {"SPARK_HOME": str(tmp_path / "spark"), "FLOE_PYTHON": sys.executable}
    env["FLOE_SUBMIT"] = "--driver-memory 2g"
    words = ran("submit.sh", "spark://host:7077", "compact", "-c", "a file.yaml", env=env)
    command = ["--driver-memory", "2g", str(ROOT / "floe.py"), "compact", "-c", "a file.yaml"]
    assert words == ["--master", "spark://host:7077", *command, "--master", "spark://host:7077", sys.executable]


def test_submit_says_what_it_needs(tmp_path: Path, path: dict[str, str]):
    [line] = ran("submit.sh", "yarn", env=path, code=2)
    assert line.startswith("expected a master and a command of floe")
    stand_in(tmp_path / "bare", "python", "exit 1")
    assert (
        "expected floe-jetstream"
        in ran("submit.sh", "yarn", "compact", env=path | {"FLOE_PYTHON": f"{tmp_path}/bare/python"}, code=78)[-1]
    )


def test_an_archive_has_a_name_that_spark_unpacks_whole(path: dict[str, str]):
    [line] = ran("environment.sh", "environment.tar", env=path, code=2)
    assert "expected a name that ends with .tar.gz" in line


def test_a_pod_is_an_executor_where_spark_asks_for_one_and_else_floe(tmp_path: Path, path: dict[str, str]):
    stand_in(tmp_path / "bin", "floe")
    assert ran("entrypoint.sh", "compact", "-c", "x.yaml", env=path) == ["compact", "-c", "x.yaml"]

    stand_in(tmp_path / "java" / "bin", "java")
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
    assert dict(zip(options[::2], options[1::2], strict=True)) == {
        "--driver-url": "spark://driver:1",
        "--executor-id": "3",
        "--cores": "2",
        "--app-id": "app",
        "--hostname": "10.0.0.7",
        "--resourceProfileId": "0",
        "--podName": "pod",
    }
    [jar] = JARS.glob("spark-kubernetes_*.jar")
    with zipfile.ZipFile(jar) as classes:
        assert f"{backend.replace('.', '/')}.class" in classes.namelist()
