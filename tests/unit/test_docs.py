"""Docs that drift are bugs: what they name exists, and what exists they name."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

import floe
from common.service import config
from common.service.metrics import REGISTRY

ROOT = Path(__file__).parents[2]
DOCS = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
ROLES = ("common", "egress", "ingress", "compaction")


def sources() -> str:
    return "".join(path.read_text() for role in (*ROLES, "infra") for path in (ROOT / role).rglob("*.py"))


def metric_names() -> set[str]:
    for role in ROLES:
        package = importlib.import_module(role)
        for module in pkgutil.walk_packages(package.__path__, f"{role}."):
            if module.name.endswith("metrics") or module.name == "common.segments.store":
                importlib.import_module(module.name)
    return {
        family.name + ("_total" if family.type == "counter" else "")
        for family in REGISTRY.collect()
        if family.name.startswith("floe_")
    }


def commands(group: click.Command, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(group, click.Group):
        return [path]
    context = click.Context(group)
    found = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found += commands(command, (*path, name))
    return found


def test_every_metric_is_documented_and_every_documented_metric_exists() -> None:
    documented = set(re.findall(r"^\| `(floe_\w+)` \|", OPERATIONS, re.MULTILINE))

    assert documented == metric_names()


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_metrics_named_in_the_docs_exist(path: Path) -> None:
    known = {re.sub("_total$", "", name) for name in metric_names()}
    named = set(re.findall(r"\bfloe_[a-z][a-z_]*[a-z]\b", path.read_text()))

    assert {name for name in named if re.sub("_(total|bucket|sum|count)$", "", name) not in known} == set()


def test_every_error_code_is_documented() -> None:
    used = set(re.findall(r'"(E-[A-Z0-9-]*[A-Z0-9])"', sources()))

    assert {code for code in used if not re.search(rf"\b{code}\b", OPERATIONS)} == set()


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())

    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_configurations_of_the_readme_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOE_S3_KEY", "key")
    monkeypatch.setenv("FLOE_S3_SECRET", "secret")
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

    assert len(blocks) == 2
    for block in blocks:
        text = "\n".join(line[3:] if line.startswith("   ") else line for line in block.splitlines())
        assert isinstance(yaml.safe_load(text), dict)
        config.parse(text, "README.md")


def test_every_command_stands_in_the_table_of_operations() -> None:
    documented = set()
    for row in re.findall(r"^\| (`floe [^|]+`) \|", OPERATIONS, re.MULTILINE):
        first, *others = re.findall("`([^`]+)`", row)
        documented |= {first, *(f"{first.rpartition(' ')[0]} {other}" for other in others)}

    assert documented == {f"floe {' '.join(command)}" for command in commands(floe.cli)}


@pytest.mark.parametrize("command", commands(floe.cli), ids=" ".join)
def test_every_command_has_help_with_an_example(command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(floe.cli, [*command, "--help"], prog_name="floe")

    assert result.exit_code == 0
    assert f"floe {' '.join(command)}" in result.output.split("\n", 1)[1]


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_commands_in_the_docs_exist(path: Path) -> None:
    known = {" ".join(command[: n + 1]) for command in commands(floe.cli) for n in range(len(command))}
    named = re.findall(r"^\s*floe ([a-z]+(?: [a-z]+)?)", path.read_text(), re.MULTILINE)

    assert [name for name in named if name not in known and name.split()[0] not in known] == []
