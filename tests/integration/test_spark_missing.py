"""What is said where Spark cannot start: one line with what to do, before anything is listed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from common.errors import ConfigError
from compaction.spark import require_spark
from tests.support.basics import PATIENCE
from tests.support.commands import ROOT, run_here
from tests.support.compaction import CHAIN, begun

INSTALL = "sudo apt-get install -y openjdk-17-jre-headless"

Done = tuple[list[str], list[dict[str, object]], str]  # errors, log lines, everything else that was said


def java(folder: Path, version: str, otherwise: str = "exit 0") -> Path:
    """A home of Java whose program tells that version, and does `otherwise` for anything else."""
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
    path.chmod(0o600)
    return path


def failed(config: Path, environment: dict[str, str]) -> Done:
    words = [sys.executable, "-m", "floe", "-v", "compact", "-c", str(config)]
    env = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"} | environment
    done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=ROOT, timeout=PATIENCE, check=False)
    return said(done.returncode, done.stdout, done.stderr)


def said(code: int, out: str, err: str) -> Done:
    assert (code, out) == (78, ""), err
    lines = err.splitlines()
    assert "Traceback" not in err
    errors, log = [each for each in lines if each.startswith("error[")], [each for each in lines if each[:1] == "{"]
    rest = "\n".join(each for each in lines if each not in errors and each not in log)
    return errors, [json.loads(each) for each in log], rest


def environments(folder: Path) -> dict[str, tuple[dict[str, str], str]]:
    """Names of what is wrong, the environment that has it, and what is said of it."""
    (folder / "empty").mkdir()
    old = java(folder / "old", "11.0.23")
    older = java(folder / "older", "1.8.0_402")
    broken = java(folder / "broken", "17.0.1") / "bin" / "java"
    broken.write_text("#!/bin/sh\necho 'Error: could not find libjli.so' >&2\nexit 1\n")
    return {
        "no Java": ({"PATH": str(folder / "empty")}, f"found none (java); {INSTALL}, or use --engine local"),
        "a wrong JAVA_HOME": (
            {"JAVA_HOME": str(folder / "empty")},
            f"found none (JAVA_HOME={folder}/empty); {INSTALL} && unset JAVA_HOME, or use --engine local",
        ),
        "Java 11": ({"JAVA_HOME": str(old)}, 'expected Java 17 or 21, found openjdk version "11.0.23" 2025-04-15'),
        "Java 8": ({"JAVA_HOME": str(older)}, 'found openjdk version "1.8.0_402"'),
        "a broken Java": ({"JAVA_HOME": str(broken.parents[1])}, "found Error: could not find libjli.so"),
        "a wrong SPARK_HOME": (
            {"SPARK_HOME": str(folder / "empty")},
            "expected Spark there, found no bin/spark-submit; unset SPARK_HOME",
        ),
    }


def test_what_is_missing_or_wrong_is_told_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, (environment, said) in environments(tmp_path).items():
        with monkeypatch.context() as patch, pytest.raises(ConfigError) as caught:
            for variable in ("JAVA_HOME", "SPARK_HOME"):
                patch.delenv(variable, raising=False)
            for variable, value in environment.items():
                patch.setenv(variable, value)
            require_spark()
        assert said in caught.value.line(), name
        assert caught.value.line().startswith("error[E-SPARK]: engine spark: "), name
        assert "\n" not in caught.value.line(), name


def test_a_run_says_it_in_one_line_and_does_nothing(config: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyspark", None)
    done = run_here("-v", "compact", "-c", str(config))
    [error], log, rest = said(done.code, done.out, done.err)
    assert error.endswith(
        "expected pyspark, found none; in a checkout of Floe: pip install --require-hashes -r requirements.lock, "
        "or use --engine local"
    )
    assert [line["action"] for line in log] == ["started", "ended"]
    assert rest == ""


def test_a_report_has_no_other_engine_to_offer(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAVA_HOME", str(java(tmp_path, "11.0.23")))
    done = run_here("report", "latest", "--output", str(tmp_path / "report"), "-c", str(config))
    [error], _, _ = said(done.code, done.out, done.err)
    assert error.endswith(f"; {INSTALL} && unset JAVA_HOME")
    assert not (tmp_path / "report").exists()


def test_a_java_that_dies_at_its_start_has_said_why(config: Path, tmp_path: Path):
    dies = "echo 'Error occurred during initialization of VM: could not reserve enough space' >&2; exit 1"
    [error], _, rest = failed(config, {"JAVA_HOME": str(java(tmp_path, "17.0.15", dies))})
    assert error.startswith("error[E-SPARK]: engine spark: Java ended before Spark was up; what it said stands above")
    assert "could not reserve enough space" in rest


def test_who_needs_no_spark_is_asked_for_none(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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


def test_where_spark_has_its_own_word_on_java_it_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`spark-env.sh` sets JAVA_HOME where a distribution says so; under `spark-submit` Java runs already."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="found none"):
        require_spark()
    (tmp_path / "spark-env.sh").touch()
    require_spark()
    (tmp_path / "spark-env.sh").unlink()
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    require_spark()
