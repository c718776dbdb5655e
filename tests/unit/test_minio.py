"""Where MinIO is looked for, and what is said where it is not."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from common.errors import ConfigError
from infra.demo.world import PROJECT
from infra.local import minio
from infra.local.minio import MinIO, find_minio, local_s3
from infra.local.seaweedfs import SeaweedFS

Put = Callable[[str], Path]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Puts a program called minio into a folder of a machine that has none."""
    for variable in ("FLOE_MINIO", "GOBIN", "GOPATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path / "venv"))

    def put(folder: str) -> Path:
        path = tmp_path / folder / "minio"
        path.parent.mkdir(parents=True)
        path.write_text("#!/bin/sh\necho minio version RELEASE.2026-02-12T00-00-00Z\n")
        path.chmod(0o755)
        return path

    return put


def test_each_place_counts_before_the_next(put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_minio() is None
    assert isinstance(local_s3(tmp_path / "data"), SeaweedFS)
    monkeypatch.setenv("GOBIN", str(tmp_path / "gobin"))
    monkeypatch.setenv("GOPATH", f"{tmp_path / 'none'}:{tmp_path / 'go'}")
    for folder in ("venv", "home/go/bin", "go/bin", "gobin", "path"):
        program = put(folder)
        assert find_minio() == program
    monkeypatch.setenv("FLOE_MINIO", str(tmp_path / "venv" / "minio"))
    assert find_minio() == tmp_path / "venv" / "minio"
    assert isinstance(local_s3(tmp_path / "data"), MinIO)
    monkeypatch.setenv("FLOE_MINIO", "")
    assert find_minio() is None


def test_without_minio_and_go_one_line_says_how(put: Put, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert minio.main() == 78
    line = capsys.readouterr().err
    assert f"go install {minio.MODULE}" in line
    with pytest.raises(ConfigError, match="minio: not installed"):
        MinIO(tmp_path / "data").start()


def test_compose_takes_the_image_that_make_minio_takes() -> None:
    services = yaml.safe_load((PROJECT / "infra" / "compose.yaml").read_text())["services"]
    expected = f"${{{minio.IMAGE_VARIABLE}:-{minio.IMAGE}}}"
    assert services["minio"]["image"] == services["bucket"]["image"] == expected
