"""The evidence of the soak names all files that a run exercises."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.simulated import added

ROOT = Path(__file__).parents[2]
SOAK = ROOT / "tests" / "soak" / "__main__.py"


def imported(path: Path) -> set[Path]:
    """The files of the project that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
        elif isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        else:
            continue
        found |= {ROOT / (name.replace(".", "/") + ".py") for name in names}
    return {path for path in found if path.exists()}


def counted() -> set[str]:
    """The paths that every run counts as its own, read without running anything."""
    for node in ast.parse(SOAK.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "BESIDE":
            return {str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant)}
    raise AssertionError("BESIDE is gone")


def test_what_the_runs_import_of_tests_counts_for_their_evidence():
    waiting, seen = [SOAK], set()
    while waiting:
        if (path := waiting.pop()) not in seen:
            seen.add(path)
            waiting += imported(path)
    names = {str(path.relative_to(ROOT)) for path in seen}
    assert len(names) > 100
    paths, parts = counted(), ("egress/", "ingress/", "compaction/")
    missing = {name for name in names if not name.startswith(parts)}
    missing = {name for name in missing if name not in paths and not any(name.startswith(f"{p}/") for p in paths)}
    assert missing == set()
    assert all((ROOT / path).exists() for path in paths)


def ran(*seeds: str, code: str = "a", ok: bool = True, messages: int = 1) -> dict[str, Any]:
    return {"ok": ok, "code": code, "seeds": [*seeds], "messages": messages}


def test_results_of_other_seeds_add_up():
    assert added(ran("1-20"), ran("21-40")) == ran("1-40", messages=2)
    assert added(ran("41-60"), ran("1-20")) == ran("1-20", "41-60", messages=2)


@pytest.mark.parametrize(
    "before", [{}, ran("1-20", code="b"), ran("1-20", ok=False), ran("21-50"), {"ok": True, "code": "a"}]
)
def test_results_of_other_files_or_the_same_seeds_do_not(before: dict[str, Any]):
    assert added(before, ran("50-60")) == ran("50-60")
