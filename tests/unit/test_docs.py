"""The docs agree with the code: every name in them exists, and every metric, error code and command is in them."""

import importlib
import inspect
import itertools
import pkgutil
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import click
import pytest
import yaml
from click.testing import CliRunner

import floe
from common.archive.documents import ChainDocument, ChainStore
from common.archive.keys import Layout
from common.archive.store import SegmentStore
from common.archive.writer import SegmentWriter
from common.chain import Chain
from common.metrics import REGISTRY
from common.objects.local import LocalObjects
from common.sequences import SequenceRange
from common.settings import loader
from tests.support import tree
from tests.support.segments import batch_of, footer_of, message

ROOT = Path(__file__).parents[2]
DOCS = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
ROLES = ("common", "egress", "ingress", "compaction")


def sources() -> str:
    return "".join(path.read_text() for role in (*ROLES, "infra") for path in (ROOT / role).rglob("*.py"))


METRICS_ELSEWHERE = {
    *("common.nats.client", "common.objects.port", "common.archive.store", "common.tasks"),
    *("compaction.report", "egress.workers.supervisor", "ingress.recovery.living"),
}


def metric_names() -> set[str]:
    for role in ROLES:
        for module in pkgutil.walk_packages(importlib.import_module(role).__path__, f"{role}."):
            if module.name.endswith("metrics") or module.name in METRICS_ELSEWHERE:
                importlib.import_module(module.name)
    families = [family for family in REGISTRY.collect() if family.name.startswith("floe_")]
    return {family.name + ("_total" if family.type == "counter" else "") for family in families}


def command_at(*words: str) -> click.Command:
    command: click.Command = floe.cli
    for word in words:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), word)
        assert found is not None
        command = found
    return command


def commands(*path: str) -> list[tuple[str, ...]]:
    group = command_at(*path)
    if not isinstance(group, click.Group):
        return [path]
    return [found for name in group.list_commands(click.Context(group)) for found in commands(*path, name)]


def test_every_metric_is_documented_and_every_documented_metric_exists() -> None:
    table = re.search(r"^\| metric \| labels \|.*\n\|[-|]+\n((?:\|.*\n)+)", OPERATIONS, re.MULTILINE)
    assert table is not None
    documented = re.findall(r"^\| `(floe_\w+)` \|", table.group(1), re.MULTILINE)

    assert set(documented) == metric_names()
    assert documented == sorted(documented)


def test_every_error_code_is_documented() -> None:
    used = set(re.findall(r'"(E-[A-Z0-9-]*[A-Z0-9])"', sources()))

    assert {code for code in used if not re.search(rf"\b{code}\b", OPERATIONS)} == set()


def test_nothing_asks_for_a_package_of_a_name_that_a_stranger_may_register() -> None:
    texts = {path: path.read_text() for path in DOCS} | {ROOT: sources()}

    assert [path for path, text in texts.items() if re.search(r"pip install[^`\n]*floe", text)] == []


def test_the_start_page_names_every_page() -> None:
    named = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "index.md").read_text()))

    assert named == {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}


def test_the_configurations_of_the_readme_and_of_a_tree_of_sites_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOE_S3_KEY", "key")
    monkeypatch.setenv("FLOE_S3_SECRET", "secret")
    tree = (ROOT / "docs" / "ingress.md").read_text().partition("\n## Trees\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text() + tree, re.DOTALL)

    assert len(blocks) == 2 + 3
    for block in blocks:
        text = dedent(block)
        assert isinstance(yaml.safe_load(text), dict)
        loader.parse(text, "README.md")


def test_every_command_is_in_the_table_of_operations() -> None:
    documented = set()
    for row in re.findall(r"^\| (`floe [^|]+`) \|", OPERATIONS, re.MULTILINE):
        first, *others = re.findall("`([^`]+)`", row)
        documented |= {first, *(f"{first.rpartition(' ')[0]} {other}" for other in others)}

    assert documented == {f"floe {' '.join(command)}" for command in commands()}


# Commands

FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(floe [a-z][^`]*)`")
ELLIPSIS = "…"


def joined(text: str) -> list[str]:
    """Return the lines, each joined with the next one if it ends in a backslash."""
    return [line.strip() for line in re.sub(r"\\\n\s*", "", text).splitlines()]


def whole_commands(text: str) -> list[str]:
    """Return commands on lines of their own, in fences or indented, as somebody would paste them."""
    indented = "".join(re.findall(r"^    (?: *)(?:floe .*\n(?:(?<=\\\n) .*\n)*)", FENCED.sub("", text), re.MULTILINE))
    lines = [line for block in [*FENCED.findall(text), indented] for line in joined(block)]
    return [line.removeprefix("$ ") for line in lines if re.match(r"(\$ )?floe [a-z]", line)]


def words_of(line: str) -> list[str]:
    """Return the arguments of the first `floe` of a line, optional ones too, up to the syntax of the shell."""
    lexer = shlex.shlex(re.sub(r"\[(\S[^]]*)\]", r"\1", line), posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words = list(itertools.takewhile(lambda word: not set(word) <= set("|&;<>"), lexer))
    return [word for word in words[1:] if word != ELLIPSIS]


def problem(line: str, *, is_whole: bool) -> str:
    """Return why `floe` would refuse the command; empty if it would not. `is_whole`: it has all that is required."""
    command: click.Command = floe.cli
    words = words_of(line)
    while isinstance(command, click.Group) and words:
        found = command.get_command(click.Context(command), words[0])
        if found is None:
            return f"{line}: no command {words[0]}"
        command, words = found, words[1:]
    if isinstance(command, click.Group) or (not is_whole and not words):
        return ""
    try:
        command.make_context(command.name, list(words))
    except click.exceptions.Exit:
        return ""
    except click.MissingParameter as error:
        return f"{line}: {error.format_message()}" if is_whole and ELLIPSIS not in line else ""
    except click.UsageError as error:
        return "" if has_placeholder(error, words) else f"{line}: {error.format_message()}"
    return ""


def has_placeholder(error: click.UsageError, words: list[str]) -> bool:
    """True if the only problem is a value that is a name in capitals, as `--sequence N`."""
    names = (word for word in words if re.fullmatch(r"[A-Z]+(\+1)?", word))
    return isinstance(error, click.BadParameter) and any(f"'{name}'" in error.message for name in names)


def test_a_command_that_floe_would_not_take_is_found() -> None:
    fence = "```sh\nfloe status --nothing\nfloe drill -c f.yaml\n```\n\n"
    text = fence + "    floe parked lss\n\nSee `floe gap ls -x`, `floe checkpoint set … --sequence N`.\n"

    assert [bool(problem(line, is_whole=True)) for line in whole_commands(text)] == [True, True, True]
    assert [bool(problem(line, is_whole=False)) for line in INLINE.findall(text)] == [True, False]


def examples_of(words: tuple[str, ...]) -> Iterator[str]:
    """Return the lines that a help shows as examples; each is complete, so that it can be pasted."""
    text = inspect.cleandoc(command_at(*words).help or "")
    return itertools.takewhile(lambda line: line.startswith("floe "), joined(re.split(r"Examples?:\s+", text)[-1]))


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_help_has_examples_that_are_valid_as_written_and_that_no_terminal_folds(command: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(floe.cli, [*command, "--help"], prog_name="floe", terminal_width=60)
    lines = {re.sub(r"^\s*(Examples?: +)?", "", line) for line in shown.output.splitlines()[1:]}
    examples = re.findall(r"^\s*(?:Examples?: +)?(floe .*)$", command_at(*command).help or "", re.MULTILINE)

    assert shown.exit_code == 0
    assert any(line.startswith(f"floe {' '.join(command)}") for line in examples)
    assert [line for line in examples if line not in lines] == []
    assert [found for line in examples_of(command) if (found := problem(line, is_whole=True))] == []


#: Commands with examples that need neither NATS nor Spark: these examples are run.
RUN = ("segments ls", "segments info", "segments cat", "segments verify", "config check", "version", "completion")


@pytest.mark.parametrize("command", RUN)
def test_the_examples_of_what_reads_only_the_store_work(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    objects = LocalObjects(tmp_path / "store")
    store, chains = SegmentStore(objects, Layout("data"), spool_dir=tmp_path), ChainStore(objects, Layout("data"))
    for chain in (Chain("us-east", "NODE_DATA"), Chain("us-east", "NODES")):
        chains.create_chain(chain, ChainDocument((), 1, 1))
        rows = [message(n, subject=b"nodes.a.temp", timestamp_ns=time.time_ns()) for n in range(1, 1011)]
        writer = SegmentWriter(store.new_spool(), level=0, compression_level=1)
        writer.append(batch_of(rows))
        store.put(writer.finish(footer_of(rows, SequenceRange(1, 1010), level=0, chain=chain)))
    for name in ("central.yaml", "site.yaml"):
        (tmp_path / name).write_text(f"site: us-east\nstore: {{url: 'file://{tmp_path}/store', prefix: data}}\n")
    lines = [line.replace("/etc/floe/", "") for line in examples_of((*command.split(),)) if ELLIPSIS not in line]
    assert lines
    for line in lines:
        result = CliRunner().invoke(floe.cli, words_of(line), prog_name="floe")
        assert (result.exit_code, bool(result.stdout)) == (0, True), (line, result.output)


def test_the_page_of_the_commands_is_their_help() -> None:
    # In a process of its own: click caches the help option of a command that was run without its group.
    script = "from tests.support.commands_page import page; print(page(), end='')"
    made = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)

    assert (ROOT / "docs" / "commands.md").read_text() == made.stdout, "python -m tests.support.commands_page"


# The map of the code

ARCHITECTURE = ROOT / "docs" / "architecture.md"


def test_the_tree_of_the_architecture_is_the_tree_and_one_sentence_describes_each_file() -> None:
    page = ARCHITECTURE.read_text()
    lines = [line.strip() for line in page.partition(tree.BEGIN)[2].partition(tree.END)[0].strip().splitlines()]

    assert tree.with_tree(page) == page, "python -m tests.support.tree docs/architecture.md"
    assert [line for line in lines if not line.endswith((".", "?")) or len(line) > 160] == []


# Decisions name files and functions of their time.
def missing_code(text: str) -> Iterator[str]:
    """Return the files and names of the code that a page names and that do not exist."""
    tops = "|".join((*ROLES, "infra", "bench", "tests"))
    for name, symbol in re.findall(rf"`((?:{tops})/[\w/.]*)`(?: `([\w.]+)`)?", " ".join(text.split())):
        if not (ROOT / name).exists() and name != "bench/results.json":  # which `make bench` makes
            yield name
        elif symbol and name.endswith(".py"):
            code = (ROOT / name).read_text()
            yield from (each for each in symbol.split(".") if not re.search(rf"(class|def) {each}\b", code))


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_what_a_page_names_exists(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check links to files, commands, metrics, and files of the code with their classes and functions."""
    monkeypatch.setenv("FLOE_CONFIG", "floe.yaml")
    text = path.read_text()
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    wrong = [problem(line, is_whole=True) for line in whole_commands(text)]
    wrong += [problem(line, is_whole=False) for line in INLINE.findall(FENCED.sub("", text).replace("\n", " "))]
    known = {re.sub("_total$", "", name) for name in metric_names()}
    named = set(re.findall(r"\bfloe_[a-z][a-z_]*[a-z]\b", text))

    assert [link for link in links if not (path.parent / link).exists()] == []
    assert [each for each in wrong if each] == []
    assert {name for name in named if re.sub("_(total|bucket|sum|count)$", "", name) not in known} == set()
    if path.name != "decisions.md":  # it names the files of the time of a decision
        assert list(missing_code(text)) == []


# The table of findings, in docs/delivery.md

DELIVERY = (ROOT / "docs" / "delivery.md").read_text()
FOUND = DELIVERY[DELIVERY.index("## Cases") : DELIVERY.index("### Limits")]
ROWS = [line for line in FOUND.splitlines() if line.startswith("| ") and not line.startswith("| case")]
CASES = (
    *("first run", "normal restart", "before anything was sent", "in the middle", "before closing", "consumed"),
    *("expired, superseded per subject", "purged", "recreated", "after the checkpoint", "foreign message"),
    *("bucket, or the key, lost", "state rolled back", "other `sources`"),
)


def test_the_table_of_what_is_found_has_its_cases_each_with_a_test_that_exists() -> None:
    for row in ROWS:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        module, test = re.fullmatch(r"`(\w+)::(\w+)`", cells[-1]).groups()  # type: ignore[union-attr]
        (path,) = (ROOT / "tests").rglob(f"{module}.py")

        assert len(cells) == 6, row
        assert re.search(rf"^(async )?def {test}\(", path.read_text(), re.MULTILINE), row
    assert [case for case in CASES if not any(case in row.split("|")[1] for row in ROWS)] == []
