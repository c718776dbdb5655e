"""Subject transforms without a server: what is refused, at which line, and what is made of bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.chain import Chain
from common.errors import ConfigError
from common.settings.ingress import SourceSettings
from common.settings.loader import load
from common.subjects import matches
from common.transforms import TransformError, compile_transform
from ingress.rows.prepare import Accepting, SubjectRule, patterns_of, rule_of

CONFIG = """\
nats: {url: nats://127.0.0.1}
store: {url: s3://bucket}
ingress:
  targets:
    - stream: FLEET
      sources:
        - site: a
          feed: A
          subject_transform: {source: "SOURCE", destination: "DESTINATION"}
"""


def loaded(folder: Path, source: str, destination: str) -> str:
    path = folder / "c.yaml"
    path.write_text(CONFIG.replace("SOURCE", source).replace("DESTINATION", destination))
    path.chmod(0o600)
    [target] = load(str(path)).ingress.targets
    return rule_of(target.sources[0], Chain("us-east", "A")).apply(b"nodes.one.x").decode()


def test_a_prefix_has_the_fields_of_the_chain() -> None:
    given = {
        "site": ["us-east", "eu-west"],
        "feed": "A",
        "subject_prefix": "f.{site}.{feed}.{incarnation}.p{partition}",
    }
    source = SourceSettings.model_validate(given)
    rule = rule_of(source, Chain("eu-west", "A", 12, 3))
    assert rule.apply(b"nodes.one") == b"f.eu-west.A.12.p3.nodes.one"
    assert patterns_of(source) == ["f.us-east.A.*.*.>", "f.eu-west.A.*.*.>"]


def test_a_transform_of_the_configuration_is_applied(tmp_path: Path) -> None:
    assert loaded(tmp_path, "nodes.*.>", "fleet.{{wildcard(1)}}.>") == "fleet.one.x"


@pytest.mark.parametrize(
    ("source", "destination", "problem"),
    [
        ("nodes.*", "fleet.$2", r"9:63: .*destination: \$2: expected the number of a \* of the source, source has 1"),
        ("nodes.a", "fleet.$1", "source has none"),
        ("nodes.*", "fleet.{{random(3)}}", "expected a function that gives the same each time"),
        ("nodes.*", "fleet.{{wildcard(1}}", "expected one of wildcard, partition, split"),
        ("nodes.*", "fleet.{{split(1,)}}", "expected a text without spaces to split at"),
        ("nodes.*", "fleet.{{left(1,x)}}", "expected a whole number, found 'x'"),
        ("nodes.*", "fleet.*", r"expected \$n or {{wildcard\(n\)}} in the place of"),
        ("nodes.>", "fleet.a", "expected a last > in both or in none"),
        ("nodes.*", "fleet..a", "without empty tokens"),
        ("nodes.*", "fleet.a b", "no spaces and control characters"),
    ],
)
def test_a_mistake_is_told_with_its_place(tmp_path: Path, source: str, destination: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        loaded(tmp_path, source, destination)


def test_one_without_the_other_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected destination beside it, found none"):
        loaded(tmp_path, "a", "")


def test_bytes_that_are_no_text_are_cut_like_others() -> None:
    ours = compile_transform("a.*", "b.{{splitFromLeft(1,2)}}.{{right(1,1)}}")

    assert ours.apply(b"a.\xff\xfe\xfd") == b"b.\xff\xfe.\xfd.\xfd"


def test_what_the_source_does_not_match_stays() -> None:
    ours = compile_transform("a.*", "b.$1")

    for subject in (b"c.d", b"a", b"a.b.c", b"a.*", b"a.", b""):
        assert ours.apply(subject) == subject


tokens = st.sampled_from(["a", "b", "*"])
functions = st.sampled_from(
    ["lit", "$1", "{{wildcard(1)}}", "{{partition(3,1)}}", "{{split(1,-)}}", "{{sliceFromLeft(1,2)}}", "{{left(1,1)}}"]
)
values = st.sampled_from(["a", "b", "x-y", "abcd"])


@given(st.lists(tokens, min_size=1, max_size=3), st.lists(functions, min_size=1, max_size=3), st.booleans(), st.data())
def test_the_pattern_takes_whatever_is_made(
    source: list[str], destination: list[str], rest: bool, data: st.DataObject
) -> None:
    """So a start is never refused for subjects that the target would have taken."""
    end = [">"] if rest else []
    try:
        ours = compile_transform(".".join(source + end), ".".join(destination + end))
    except TransformError:
        return
    subject = [data.draw(values) if token == "*" else token for token in source]
    subject += data.draw(st.lists(values, min_size=1, max_size=3)) if rest else []
    raw = ".".join(subject).encode()

    assert matches(ours.source, raw)
    assert matches(ours.pattern, ours.apply(raw))
    assert Accepting([ours.apply(raw).decode()]).meets(ours.pattern)


affixes = st.text("ab.", min_size=1, max_size=4)


@given(affixes, st.one_of(st.just(""), affixes), st.lists(st.text("ab", min_size=1, max_size=3), min_size=1))
def test_the_pattern_of_a_prefix_takes_whatever_is_made(prefix: str, remove: str, subject: list[str]) -> None:
    rule = SubjectRule(prefix.encode(), remove.encode())
    pattern, made = rule.pattern, rule.apply(".".join(subject).encode())

    if pattern is not None and made and b"" not in made.split(b"."):
        assert matches(pattern, made), (pattern, made)


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        ("a.>", "a.b", True),
        ("a.*", "*.b", True),
        ("a.*", "a", False),
        ("a.b", "a.c", False),
        ("a.*.c", "a.>", True),
        ("b.>", "a.>", False),
        (">", "a", True),
    ],
)
def test_two_filters_meet_where_a_subject_is_of_both(one: str, other: str, meet: bool) -> None:
    assert Accepting([one]).meets(other) is Accepting([other]).meets(one) is meet
