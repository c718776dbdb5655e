"""Plain English in the docstrings, comments, names and log events of the product, package by package."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from tests.support.tree import every_node, parsed, tree_of
from tests.unit.test_house import COUNTED, PRODUCT, TEXT, files, name_of

MOST_QUESTION_WORDS = 5  # for each 1,000 words of docstrings and comments
QUESTION_WORD = re.compile(r"\b(what|who|where|whether|whoever|whatever|whose)\b", re.IGNORECASE)
FIRST_WORD = re.compile(r"\s*(What|Whether|Where|Who|That)\b.*")
CODE_SPAN = re.compile(r"`[^`]*`")
WORD = re.compile(r"[A-Za-z'’]+")
NAME_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
SPEECH = re.compile(r"tell|told|tells|say|said|says|stand|stands|hear|heard", re.IGNORECASE)
ACTION = re.compile(r"'[a-z]+(_[a-z]+)+'")
CONSTANT = re.compile(r"[A-Z][A-Z0-9_]+")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}

Place = tuple[int, str]  # a line, and the text there


def docstring_texts(tree: ast.Module) -> list[Place]:
    nodes = [each for each in every_node(tree) if isinstance(each, DOCUMENTED)]
    return [(each.body[0].lineno, text) for each in nodes if (text := ast.get_docstring(each, clean=False))]


def question_starts(tree: ast.Module) -> Iterator[Place]:
    return ((line, match[0]) for line, text in docstring_texts(tree) if (match := FIRST_WORD.match(text)))


def prose(source: str) -> list[Place]:
    """Return docstrings and comments without their code spans."""
    line, at, comments = 1, 0, []
    for text in TEXT.finditer(source):
        line, at = line + source.count("\n", at, text.start()), text.start()
        comments += [(line, text[0])] * text[0].startswith("#")
    return [(line, CODE_SPAN.sub("", text)) for line, text in docstring_texts(tree_of(source)) + comments]


def too_many(texts: Iterable[tuple[object, str]]) -> list[str]:
    """Return the question words in `texts`, with their places; none if they are few among all words."""
    texts = list(texts)
    found = [f"{place} {word}" for place, text in texts for word in QUESTION_WORD.findall(text)]
    return found if 1000 * len(found) > MOST_QUESTION_WORDS * sum(len(WORD.findall(text)) for _, text in texts) else []


def names(tree: ast.Module) -> Iterator[Place]:
    """Yield the names that `tree` defines."""
    for node in every_node(tree):
        if isinstance(getattr(node, "ctx", ast.Store()), ast.Store) and not isinstance(node, ast.keyword):
            found = (getattr(node, field, None) for field in ("name", "asname", "arg", "id", "attr"))
            yield from ((getattr(node, "lineno", 0), name) for name in found if isinstance(name, str))


def log_calls(tree: ast.Module) -> Iterator[tuple[int, ast.expr, ast.expr]]:
    """Yield line, event and action of each call that logs."""
    for node in every_node(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOG_METHODS:
            yield from ((node.lineno, node.args[0], each.value) for each in node.keywords if each.arg == "action")


def has_speech(text: str) -> bool:
    return any(map(SPEECH.fullmatch, NAME_PART.findall(text)))


def speech_words(tree: ast.Module) -> Iterator[Place]:
    logged = ((line, ast.unparse(part)) for line, *parts in log_calls(tree) for part in parts)
    return ((line, text) for line, text in (*names(tree), *logged) if has_speech(text))


def unclear_events(tree: ast.Module) -> Iterator[Place]:
    """Yield events that are not constant text, and actions that are not noun_verb."""
    for line, event, action in log_calls(tree):
        yield from [(line, ast.unparse(event))] * (not isinstance(event, ast.Constant))
        yield from [(line, ast.unparse(action))] * (not ACTION.fullmatch(ast.unparse(action)))


def constants(tree: ast.Module) -> Iterator[tuple[int, str, object]]:
    """Yield line, name and value of each public constant of a module; single letters are type variables."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                pairs = list(zip(targets, values, strict=True))
            case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=ast.expr() as value):
                pairs = [(target, value)]
            case _:
                continue
        named = [(each.id, value) for each, value in pairs if isinstance(each, ast.Name) and len(each.id) > 1]
        yield from ((node.lineno, name, value_of(value)) for name, value in named if CONSTANT.fullmatch(name))


def value_of(expression: ast.expr) -> object:
    """Return the value of an expression, such as 8 << 20; the text of one that refers to names."""
    try:
        return eval(ast.unparse(expression), {"__builtins__": {}})
    except Exception:
        return ast.unparse(expression)


def ambiguous(modules: Iterable[tuple[str, ast.Module]]) -> list[str]:
    """Return the constants that have different values in `modules`, with their places."""
    found: dict[str, dict[str, Any]] = {}
    for module, tree in modules:
        for line, name, value in constants(tree):
            found.setdefault(name, {})[f"{module}:{line}"] = value
    several = {name: uses for name, uses in found.items() if any(a != b for a in uses.values() for b in uses.values())}
    return [f"{name}: {', '.join(uses)}" for name, uses in sorted(several.items())]


def shown(found: dict[str, list[str]]) -> str:
    return "".join("\n  ".join([f"\n{package}: {len(each)}", *each]) for package, each in found.items() if each)


def in_product(rule: Callable[[ast.Module], Iterable[Place]]) -> str:
    found: dict[str, list[str]] = {}
    for package in PRODUCT:
        places = ((path, *place) for path in files(package) for place in rule(parsed(path)))
        found[package] = [f"{name_of(path)}:{line} {text}" for path, line, text in places]
    return shown(found)


def test_no_docstring_begins_with_a_question_word() -> None:
    assert not (found := in_product(question_starts)), found


def test_question_words_are_few() -> None:
    found: dict[str, list[str]] = {}
    for package in PRODUCT:
        places = ((path, *place) for path in files(package) for place in prose(path.read_text()))
        found[package] = too_many((f"{name_of(path)}:{line}", text) for path, line, text in places)
    assert not any(found.values()), shown(found)


def test_no_name_and_no_log_event_has_a_word_of_speech() -> None:
    assert not (found := in_product(speech_words)), found
    assert [name_of(path) for path in files(*PRODUCT) if has_speech(path.stem)] == []


def test_log_events_are_constant_and_their_actions_noun_verb() -> None:
    assert not (found := in_product(unclear_events)), found


def test_a_constant_name_has_one_value() -> None:
    found = ambiguous((name_of(path), parsed(path)) for path in files(*COUNTED))  # others are scripts of their own
    assert not found, shown({"constants": found})


MISTAKES = [
    (question_starts, '"""Whether it runs."""\ndef f():\n    """Return what it does."""', {"Whether it runs."}),
    (speech_words, "class Tell:\n    def understand(x, said): x.is_heard = y.told", {"Tell", "said", "is_heard"}),
    (speech_words, "log.info('lease stands', action='lease_told')", {"'lease stands'", "'lease_told'"}),
    (unclear_events, "log.info(f'{x}', action='x_read')\nlog.info('x', action='read')", {"f'{x}'", "'read'"}),
]


@pytest.mark.parametrize(("rule", "source", "expected"), MISTAKES)
def test_a_rule_finds_a_mistake(rule: Callable[[ast.Module], Iterable[Place]], source: str, expected: set[str]) -> None:
    assert {text for _, text in rule(ast.parse(source))} == expected


def test_question_words_are_counted_outside_of_code_spans() -> None:
    source = "x = 1  # where it is, and " + "more " * 150
    assert too_many(prose(source)) == ["1 where"]
    assert too_many(prose(source.replace("where", "`where`"))) == too_many(prose(source + "more " * 50)) == []


def test_constants_of_one_name_are_compared_by_value() -> None:
    sources = {"a": "SIZE = 8 << 20\nLATE, _OWN = 1.0, 2", "b": "SIZE = 8388608\nLATE: int = 2\n_OWN = 3"}
    assert ambiguous((name, ast.parse(source)) for name, source in sources.items()) == ["LATE: a:2, b:2"]
