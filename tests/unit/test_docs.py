"""The docs agree with the code: every name in them exists, every error code is in them, no generated page is stale."""

import ast
import inspect
import itertools
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent

import click
import pytest
import yaml
from click.testing import CliRunner

import floe
from common import errors
from common.settings import loader
from common.settings.root import Settings, fields_of
from tests.support import reference, tree
from tests.support.config_keys import every_key
from tests.support.reference import command_at, commands

ROOT = Path(__file__).parents[2]
DOCS = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
ROLES = reference.ROLES
PYTHON = [path for role in (*ROLES, "infra") for path in (ROOT / role).rglob("*.py")]


@cache
def sources() -> str:
    return "".join(path.read_text() for path in PYTHON)


def exits_in_code() -> set[tuple[str, str]]:
    """Return the error codes with the exit codes of the classes that are raised with them."""
    kinds = {name: each for name, each in vars(errors).items() if getattr(each, "default_code", "")}
    found = {(each.default_code, str(each.exit_code)) for each in kinds.values()}
    for node in itertools.chain.from_iterable(tree.every_node(tree.parsed(path)) for path in PYTHON):
        if isinstance(node, ast.Call) and (kind := kinds.get(getattr(node.func, "id", ""))):
            codes = [key.value for key in node.keywords if key.arg == "code" and isinstance(key.value, ast.Constant)]
            found |= {(str(code.value), str(kind.exit_code)) for code in codes}
    return found


def test_the_error_codes_and_their_exit_codes_are_those_of_the_code() -> None:
    used = set(re.findall(r'"(E-[A-Z0-9-]*[A-Z0-9])"', sources()))
    rows = [(each["code"], code) for each in reference.data("errors") for code in each["exit"].split(", ")]

    assert used ^ {code for code, _ in rows} == {
        *("E-JS-…", "E-JS-10039", "E-JS-10076"),
        *("E-TARGET-GONE", "E-TARGET-RECREATED"),  # made from the names of findings
    }
    assert exits_in_code() - set(rows) == set()


def test_nothing_asks_for_a_package_of_a_name_that_a_stranger_may_register() -> None:
    texts = {path: path.read_text() for path in DOCS} | {ROOT: sources()}

    assert [path for path, text in texts.items() if re.search(r"pip install[^`\n]*floe", text)] == []


def test_start_page_and_navigation_name_every_page() -> None:
    start, docs = ROOT / "docs" / "index.md", ROOT / "docs"
    named = re.findall(r"\]\(([\w/.-]+\.md)\)", start.read_text())
    nav = re.findall(r'= "([\w/.-]+\.md)"', (ROOT / "zensical.toml").read_text())
    pages = sorted(str(path.relative_to(docs)) for path in docs.rglob("*.md"))

    assert sorted({*named, "index.md"}) == sorted(nav) == pages
    assert [page for page in re.findall(r"\bdocs/([\w/-]+\.md)", sources()) if page not in pages] == []


YAML = re.compile(r"^( *)```yaml\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
NEEDED = {"site": "site: us-east\n", "store": "store: {url: 's3://floe'}\n"}


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_a_configuration_on_a_page_parses(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (secret := tmp_path / "secret").write_text("secret")
    for _, block in YAML.findall(path.read_text()):
        [document] = yaml.safe_load_all(text := re.sub(r"/etc/floe/credentials/[\w-]+", str(secret), dedent(block)))
        for name in {*re.findall(r"\${(\w+)}", text)} - {"HOME"}:
            monkeypatch.setenv(name, "floe")
        if document.keys() == {"sources"}:
            document = {"ingress": {"targets": [{"stream": "FLEET", "create": {"subjects": ["fleet.>"]}, **document}]}}
            text = yaml.safe_dump(document)
        if document.keys() <= fields_of(Settings).keys():
            loader.parse("".join(line for key, line in NEEDED.items() if key not in document) + text, path.name)


# Commands

FENCED = re.compile(r"^ *```\w*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:/opt/floe/bin/)?floe [a-z][^`]*)`")
ELLIPSIS = "…"
# Names in capitals that stand for a value, each with one that its option takes.
PLACEHOLDERS = {"N": "7", "N+1": "8", "SEQ": "7"}
# A program with its path: at the beginning, after the syntax of a shell or the columns of cron, or in a container.
PROGRAM = re.compile(r"(?:^|^\$ |&& |-- | {2})(?:[\w$/.-]+/bin/)?(?=floe [a-z])")


def joined(text: str) -> list[str]:
    """Return the lines, each joined with the next one if it ends in a backslash."""
    return [line.strip() for line in re.sub(r"\\\n\s*", "", text).splitlines()]


def whole_commands(text: str) -> list[str]:
    """Return commands on lines of their own, in fences or indented, as somebody would paste them."""
    indented = "".join(re.findall(r"^    (?: *)(?:floe .*\n(?:(?<=\\\n) .*\n)*)", FENCED.sub("", text), re.MULTILINE))
    lines = [line for block in [*FENCED.findall(text), indented] for line in joined(block)]
    return [line[found.end() :] for line in lines if (found := PROGRAM.search(line))]


def words_of(line: str) -> list[str]:
    """Return the arguments of the first `floe` of a line, optional ones too, up to the syntax of the shell."""
    lexer = shlex.shlex(re.sub(r"\[(\S[^]]*)\]", r"\1", line), posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words = list(itertools.takewhile(lambda word: not set(word) <= set("|&;<>"), lexer))
    return [PLACEHOLDERS.get(word, word) for word in words[1:] if word != ELLIPSIS]


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
        return f"{line}: {error.format_message()}"
    return ""


def test_a_command_that_floe_would_not_take_is_found() -> None:
    fence = "```sh\nfloe status --nothing\nfloe drill -c f.yaml\n```\n\n"
    text = fence + "    floe parked lss\n\nSee `floe gap ls -x`, `floe checkpoint set … --sequence N`.\n"

    assert [bool(problem(line, is_whole=True)) for line in whole_commands(text)] == [True, True, True]
    assert [bool(problem(line, is_whole=False)) for line in INLINE.findall(text)] == [True, False]


def test_commands_that_texts_of_the_code_name_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOE_CONFIG", "floe.yaml")
    text = re.sub(r'"\s*\n\s*f?"|\s*\n\s*(?:# )?', " ", sources())
    assert [found for line in INLINE.findall(text) if (found := problem(line, is_whole=False))] == []


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


@pytest.mark.parametrize("path", sorted(reference.PAGES), ids=lambda path: path.name)
def test_a_generated_page_is_current(path: Path) -> None:
    assert path.read_text() == reference.page(path), "python -m tests.support.reference"


def test_one_sentence_describes_each_file() -> None:
    lines = [line.strip() for line in tree.tree().splitlines()]

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


def anchors_of(path: Path) -> set[str]:
    text = path.read_text()
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE)
    slugs = {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", each.lower()).strip()) for each in headings}
    return slugs | set(re.findall(r"{ #([\w-]+) }", text))


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_page_names_exists(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check links, commands, metrics, and files of the code with their classes and functions."""
    monkeypatch.setenv("FLOE_CONFIG", "floe.yaml")
    text = path.read_text()
    links = [(path.parent / link if link else path, at) for link, at in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", text)]
    wrong = [problem(line, is_whole=True) for line in whole_commands(text)]
    wrong += [problem(line, is_whole=False) for line in INLINE.findall(FENCED.sub("", text).replace("\n", " "))]
    known = {re.sub("_total$", "", each["name"]) for each in reference.metrics()}
    named = set(re.findall(r"\bfloe_[a-z][a-z_]*[a-z]\b", text))

    assert [link for link, _ in links if not link.exists()] == []
    assert [(link, at) for link, at in links if at and link.suffix == ".md" and at not in anchors_of(link)] == []
    assert [each for each in wrong if each] == []
    assert {name for name in named if re.sub("_(total|bucket|sum|count)$", "", name) not in known} == set()
    if "docs/decisions" not in str(path):  # these name the files of the time of a decision
        assert list(missing_code(text)) == []


# The glossary


def words_of_names() -> set[str]:
    """Return the words of keys, codes, actions of the log, metrics, labels and columns of tables."""
    columns = re.findall(r"\w*columns\w*(?:: [^=\n]+)? ?= ?\(([^()]*)\)", sources(), re.IGNORECASE)
    names = [text for each in columns for text in re.findall(r'"([^"]+)"', each)]
    names += [part for key in every_key() for part in key.path]
    names += [each["code"].removeprefix("E-") for each in reference.data("errors")]
    names += [row["actions"] for section in reference.data("log_events").values() for row in section]
    names += [name for each in reference.metrics() for name in (each["name"], *each["labels"])]
    return set(re.findall(r"[a-z]{2,}", " ".join(names).lower()))


def test_each_word_of_a_name_is_ordinary_or_in_the_glossary() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / "concepts.md").read_text(), re.MULTILINE)
    ordinary = (Path(__file__).parent / "ordinary_words.txt").read_text()
    known = set(re.findall(r"[a-z]+", " ".join((*rows, ordinary)).lower()))
    forms = {word: {word, word.removesuffix("s"), word.removesuffix("es")} for word in words_of_names()}

    assert sorted(word for word, each in forms.items() if not {*each, re.sub("ies$", "y", word)} & known) == []


# The table of findings, in docs/design/delivery.md

DELIVERY = (ROOT / "docs" / "design" / "delivery.md").read_text()
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
