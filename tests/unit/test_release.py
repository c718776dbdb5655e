"""`make release`, in a small repository: equal builds, chart, notes and checksums, and the commits that it refuses."""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from tests.support.basics import PATIENCE

ROOT = Path(__file__).parents[2]
COPIED = "infra/release.sh infra/helm docs/guides/upgrade.md pyproject.toml README.md LICENSE .gitignore floe.py"
[VERSION] = re.findall(r'^version = "(.*)\.dev0"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
CHANGELOG = f"# Changelog\n\n## Unreleased\n\n## {VERSION}\n\n### New\n\n- A line.\n\n## 0.0.1\n\n- An old line.\n"
NAMES = {f"GIT_{who}_{what}": "floe" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def run(tree: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command without nfpm; a missing tool is skipped."""
    settings = {"capture_output": True, "text": True, "check": False, "timeout": PATIENCE}
    return subprocess.run(["bash", "-ec", command], cwd=tree, env={**os.environ, **NAMES, "NFPM": "none"}, **settings)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    assert run(ROOT, f"cp -r --parents {COPIED} {tmp_path}").returncode == 0
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert run(tmp_path, "git init -q && git add -A && git commit -qm first").returncode == 0
    return tmp_path


def test_a_release_has_equal_builds_a_chart_notes_and_checksums(tree: Path) -> None:
    done = run(tree, "bash infra/release.sh && cd dist && sha256sum -c --quiet SHA256SUMS && git log -1 --format=%ct")
    assert done.returncode == 0, done.stderr
    assert re.findall("^skipped: ([^:]+)", done.stdout, re.MULTILINE) == ["deb and rpm", "CycloneDX documents"]
    chart, wheel = f"floe-{VERSION}.tgz", f"floe_jetstream-{VERSION}-py3-none-any.whl"
    built = {chart, wheel, f"floe_jetstream-{VERSION}.tar.gz", "RELEASE-NOTES.md"}
    assert {path.name for path in (tree / "dist").iterdir()} == {*built, "SHA256SUMS"}
    with tarfile.open(tree / "dist" / chart) as packed:
        found = {each.name: each for each in packed}
        values = yaml.safe_load(packed.extractfile("floe/Chart.yaml"))  # type: ignore[arg-type]
    helm = tree / "infra" / "helm"
    assert [*found] == sorted(str(path.relative_to(helm)) for path in helm.rglob("*") if path.is_file())
    assert {(each.mtime, each.mode, each.uid) for each in found.values()} == {(int(done.stdout.split()[-1]), 0o644, 0)}
    assert (values["version"], values["appVersion"]) == (VERSION, VERSION)
    notes = (tree / "dist" / "RELEASE-NOTES.md").read_text()
    assert f"# Floe {VERSION}\n\nTag `v{VERSION}`, commit `" in notes
    assert "### New\n\n- A line.\n\n## Supported versions\n\n| part |" in notes
    assert "old line" not in notes
    assert {link for link in re.findall(r"\]\(([^)#]+)", notes) if not (ROOT / link).exists()} == set()


NOT_READY = [
    ("echo >> README.md", "expected a tree without changes, found 1 changed, the first: README.md;"),
    (f"sed -i 's/^## {VERSION}/## 9.9.9/' CHANGELOG.md", f"expected lines below '## {VERSION}', found none;"),
    ("sed -i 's/^## Unreleased/&\\n- A line./' CHANGELOG.md", "expected nothing below '## Unreleased', found lines;"),
    ("sed -i 's/[.]dev0//' pyproject.toml", f"expected a version that ends in .dev0, found {VERSION}"),
    (f"git tag v{VERSION}; echo >> README.md", f"expected no tag v{VERSION} at another commit, found "),
]


@pytest.mark.parametrize(("change", "found"), NOT_READY)
def test_a_commit_that_is_not_ready_is_refused_in_one_line(tree: Path, change: str, found: str) -> None:
    commit = "true" if "without changes" in found else "git commit -qam second"
    done = run(tree, f"{change}; {commit}; bash infra/release.sh")
    assert (done.returncode, done.stdout, done.stderr[:9], done.stderr.count("\n")) == (1, "", "release: ", 1), done
    assert found in done.stderr
