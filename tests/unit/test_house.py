"""The size and the structure of the product: limits that keep it readable for a newcomer."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.tree import every_node, parsed

ROOT = Path(__file__).parents[2]
COUNTED = ("common", "egress", "ingress", "compaction", "floe.py", "pyspark_floe.py")
PRODUCT = (*COUNTED, "infra", "bench")

# 200 files and 29,000 lines when the product was restructured. docs/decisions/2026.md has a line for each increase.
MOST_FILES = 202
# Lines of code by folder. A number rises only where another falls by as much in the same commit. Ten thousand chains in
# one centre were granted 800 lines: 682 of them are in the first four folders, 115 in `bench`, which had room to 1,400.
# Knowing the fleet was granted 3,000 and 15 files: 65 for the next servers, 2,745 with 40 of `bench`, 15 files.
# infra may have 3,500; 180 of these are with the tests, tests/sim included.
MOST_LINES = {
    "common": 14_764,
    "egress": 9_690,
    "ingress": 13_385,
    "compaction": 3_546,
    "floe.py": 161,
    "pyspark_floe.py": 22,
    "infra": 3_176,
    "bench": 1_466,
}
MOST_TEST_LINES = 44_960
MOST_PARAMETERS = 8  # of a constructor, beside self
SMALL = 60  # lines; a smaller file needs more than one importer
# A comment or a string of Python before 3.12; `tokenize` finds the same, and needs twenty times as long for the tree.
TEXT = re.compile(r"""#[^\n]*|(\"{3}|'{3})(?:\\.|[^\\])*?\1|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL)
COLON = re.compile(r":(  #[^\n]*)?\n\s*r?\Z")
# Values that hold components, one name for each; their constructors are called with named fields.
COMPONENTS = {"egress/deps.py EgressDeps", "ingress/target.py IngressDeps"}


@cache
def files(*tops: str) -> tuple[Path, ...]:
    """Return files with more content than a docstring."""
    found: list[Path] = []
    for top in tops:
        found += [ROOT / top] if top.endswith(".py") else sorted((ROOT / top).rglob("*.py"))
    return tuple(path for path in found if lines_of(path))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def lines_of(path: Path) -> int:
    """Return the lines of code, without blank ones, comments and docstrings."""
    code = TEXT.sub(lambda text: "" if is_prose(text) else "\n".join("x" * (text[0].count("\n") + 1)), path.read_text())
    return sum(bool(line.strip(" \\r")) for line in code.split("\n"))


def is_prose(text: re.Match[str]) -> bool:
    """Find comments and docstrings; a docstring begins a file or follows a colon at the end of a line."""
    before = text.string[max(0, text.start() - 240) : text.start()]
    return text[0][0] == "#" or not before or bool(COLON.search(before))


def classes(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in every_node(parsed(path)) if isinstance(node, ast.ClassDef))


def imported(path: Path) -> set[Path]:
    """Return the files of the product that `path` imports."""
    names: set[str] = set()
    for node in every_node(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
    return {ROOT / (name.replace(".", "/") + ".py") for name in names}


def test_the_product_has_few_files():
    assert len(files(*PRODUCT)) <= MOST_FILES


def test_each_folder_of_the_product_has_few_lines_of_code():
    counts = {top: sum(map(lines_of, files(top))) for top in PRODUCT}
    assert {top: count for top, count in counts.items() if count > MOST_LINES[top]} == {}


def test_the_tests_have_few_lines_of_code():
    assert sum(map(lines_of, files("tests"))) <= MOST_TEST_LINES


def test_a_public_class_name_is_unique_in_the_product():
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in files(*PRODUCT):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name_of(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_a_small_file_is_needed_by_several_others():
    needed: defaultdict[Path, set[Path]] = defaultdict(set)
    for path in files(*PRODUCT):
        for other in imported(path):
            needed[other].add(path)
    alone = {name_of(path) for path in files(*PRODUCT) if lines_of(path) < SMALL and len(needed[path]) == 1}
    assert alone == set()


def parameters(made: ast.ClassDef) -> int:
    """Count the constructor's parameters beside self. A frozen dataclass is a value, which may have many fields."""
    for node in made.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            given = node.args
            count = len(given.posonlyargs + given.args + given.kwonlyargs) - 1
            return count + (given.vararg is not None) + (given.kwarg is not None)
    decorated = [ast.unparse(each) for each in made.decorator_list if ast.unparse(each).startswith("dataclass")]
    if not decorated or ("frozen=True" in decorated[0] and not made.name.endswith("Deps")):
        return 0
    fields = [node for node in made.body if isinstance(node, ast.AnnAssign)]
    return sum("init=False" not in ast.unparse(node) and "ClassVar" not in ast.unparse(node) for node in fields)


def test_a_constructor_has_few_parameters():
    found = {f"{name_of(path)} {each.name}": parameters(each) for path in files(*PRODUCT) for each in classes(path)}
    assert {name for name, count in found.items() if count > MOST_PARAMETERS} == COMPONENTS
