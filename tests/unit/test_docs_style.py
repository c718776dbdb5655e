"""The language of the documentation: its size, the length of sentences and cells, and its words."""

import re
import statistics
from pathlib import Path

import pytest

from tests.support import reference
from tests.unit.test_english import CODE_SPAN, SPEECH, WORD, too_many

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if path.parent.name != "decisions"]
PAGES += sorted(ROOT.glob("*.md"))

MOST_WORDS = 45_000  # outside of code, the changelog, the generated pages and the decisions
MOST_IN_CHANGELOG = 1_500  # words
MOST_IN_SENTENCE = 40  # words, also in a cell of a table
MOST_MEDIAN = 16  # words in the median of a page's sentences
LEFT_OUT = re.compile(r"\A---\n.*?\n---\n|<!--.*?-->|^( *)```.*?^\1```\s*?$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[([^]]*)\]\([^)]*\)")
CODE_LIST = re.compile(r"`[^`]*`(?:,? (?:(?:and|or) )?`[^`]*`)*")  # counts as one word
SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z0-9`*\"(])")
ITEM = re.compile(r"(?:[-*]|\d+\.)\s+")
SPOKEN = re.compile(f"{SPEECH.pattern}|anew|likewise", re.IGNORECASE)
COUNTED = re.compile(r"[\w'’.-]*\w")


def prose_of(page: str) -> str:
    """Return a page without code blocks, comments and the addresses of links."""
    return LINK.sub(r"\1", LEFT_OUT.sub("", page))


def parts_of(prose: str) -> tuple[list[str], list[str]]:
    """Return the sentences and the cells of tables; a list of code spans is one word."""
    blocks, cells = [""], list[str]()
    for line in map(str.strip, CODE_LIST.sub("`code`", prose).splitlines()):
        if line.startswith("|"):
            cells += line.strip("|").split("|")
        if not line or line.startswith(("|", "#")):
            blocks.append("")
        elif item := ITEM.match(line):
            blocks.append(line[item.end() :])
        else:
            blocks[-1] += f" {line}"
    return [each for block in blocks if block for each in SENTENCE_END.split(block.strip())], cells


def problems(page: str) -> list[str]:
    prose = prose_of(page)
    (sentences, cells), plain = parts_of(prose), CODE_SPAN.sub("", prose)
    median = statistics.median(len(each.split()) for each in sentences or [""])
    found = [each.strip() for each in (*sentences, *cells) if len(each.split()) > MOST_IN_SENTENCE]
    found += [f"a median of {median}"] * (median > MOST_MEDIAN)
    return found + list(filter(SPOKEN.fullmatch, WORD.findall(plain))) + too_many([("", plain)])


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_is_in_plain_english(path: Path) -> None:
    assert problems(path.read_text()) == []


def test_the_pages_by_hand_are_short() -> None:
    by_hand = [path for path in PAGES if path not in reference.PAGES]
    words = {path: len(COUNTED.findall(CODE_SPAN.sub(" ", prose_of(path.read_text())))) for path in by_hand}
    assert words.pop(ROOT / "CHANGELOG.md") <= MOST_IN_CHANGELOG
    assert sum(words.values()) <= MOST_WORDS, words


def test_a_mistake_on_a_page_is_found() -> None:
    page = f"# What\n\nA {'long ' * 45}line. It said so.\n\n| {'wide ' * 41}|\n\n```sh\nsay what\n```\n{'Good. ' * 9}"
    long, wide, *others = problems(page)
    assert (long[:6], wide[:6], others) == ("A long", "wide w", ["said", " What"])
