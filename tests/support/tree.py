"""The files of the product, each parsed once in a process, and their tree for the page docs/design/tree.md."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOPS = ("floe.py", "pyspark_floe.py", "common", "egress", "ingress", "compaction", "infra", "bench")


tree_of = cache(ast.parse)


def parsed(path: Path) -> ast.Module:
    return tree_of(path.read_text())


@cache
def every_node(tree: ast.Module) -> list[ast.AST]:
    """Return all nodes below `tree`, without the contexts of names: one list for all tests that look for some."""
    return [node for node in ast.walk(tree) if not isinstance(node, ast.expr_context)]


def first_line(path: Path) -> str:
    """Return the first sentence of a file's docstring; empty without one."""
    text = " ".join((ast.get_docstring(parsed(path)) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.])\s", text)[0]


def tree() -> str:
    """Return every folder and file of the product, with the first sentence of its docstring, in Markdown."""
    lines: list[str] = []
    for top in TOPS:
        if top.endswith(".py"):
            lines.append(f"- `{top}`: {first_line(ROOT / top)}")
        else:
            lines += _folder(ROOT / top)
    return "\n".join(lines)


def _folder(folder: Path, depth: int = 0) -> list[str]:
    indent = "  " * depth
    found = [f"{indent}- **`{folder.relative_to(ROOT)}/`** {first_line(folder / '__init__.py')}".rstrip()]
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            found.append(f"{indent}  - `{path.name}`: {first_line(path)}")
    for below in sorted(path for path in folder.iterdir() if (path / "__init__.py").exists()):
        found += _folder(below, depth + 1)
    return found
