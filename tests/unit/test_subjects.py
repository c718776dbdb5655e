"""Subject filters by the rules of NATS, and subject transforms."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.chain import Chain
from common.errors import ConfigError
from common.settings.ingress import SourceSettings
from common.settings.loader import load
from common.subjects import TransformError, compile_transform, covers, matches, overlaps
from ingress.rows.prepare import SubjectFilters, SubjectRule, patterns_of, rule_of


def test_inside_a_token_a_wildcard_is_a_letter_case_counts_and_what_is_not_text_is_taken_by_its_bytes() -> None:
    for filter_subject, subject in (("", "anything.at.all"), ("a*", "a*"), ("a.b>", "a.b>"), ("A.b", "A.b")):
        assert matches(filter_subject, subject)
        assert matches(filter_subject, subject.encode())
    for filter_subject, subject in (("a", "A"), ("a*", "ab"), (">.a", "b.a")):
        assert not matches(filter_subject, subject)
        assert not matches(filter_subject, subject.encode())
    found = matches("nodes.*", b"nodes.\xff"), matches("nodes.>", b"nodes.\xff.\xfe"), matches("nodes.é", b"nodes.\xe9")
    assert found == (True, True, False)


tokens = st.sampled_from(["a", "b", "ab"])
subjects = st.lists(tokens, min_size=1, max_size=5).map(".".join)
filters = st.tuples(st.lists(tokens | st.just("*"), max_size=4), st.booleans()).map(
    lambda parts: ".".join([*parts[0], *([">"] if parts[1] else [])])
)


@given(filters, subjects)
def test_as_a_regular_expression_does(filter_subject: str, subject: str) -> None:
    parts = [{"*": r"[^.]+", ">": r".+"}.get(token, token) for token in filter_subject.split(".")]
    expected = not filter_subject or re.fullmatch(r"\.".join(parts), subject) is not None
    assert matches(filter_subject, subject) == matches(filter_subject, subject.encode()) == expected


def test_a_wide_filter_covers_a_narrow_one_and_not_the_other_way_round() -> None:
    covered = [("", "a"), ("", ""), (">", ""), ("a", "a"), ("*", "a"), ("*", "*"), ("a.>", "a.b"), ("a.>", "a.>")]
    for wide, narrow in [*covered, ("a.>", "a.*.>"), ("*.>", "a.*"), ("a.*", "a.b")]:
        assert covers(wide, narrow), (wide, narrow)
        assert overlaps(wide, narrow), (wide, narrow)
    not_covered = [("a", ""), ("a", "b"), ("a", "*"), ("a.*", "a.>"), ("a.>", "a"), ("a.>", ">"), ("*", "a.b")]
    for wide, narrow in [*not_covered, ("a.b", "a")]:
        assert not covers(wide, narrow), (wide, narrow)
    for one, other in (("a.*", "a"), ("a.b", "a.c"), ("b.>", "a.>")):
        assert not overlaps(one, other)
        assert not overlaps(other, one)


FILTERS = st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=3).flatmap(
    lambda tokens: st.sampled_from([".".join(tokens), ".".join([*tokens, ">"])])
)
LITERALS = st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=4).map(".".join)


@given(FILTERS, FILTERS, LITERALS)
def test_covers_and_overlaps_agree_with_matches(one: str, other: str, subject: str) -> None:
    if covers(one, other) and matches(other, subject):
        assert matches(one, subject)
    if matches(one, subject) and matches(other, subject):
        assert overlaps(one, other)


# Transforms

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
    prefix = "f.{site}.{feed}.{incarnation}.p{partition}"
    source = SourceSettings(site=["us-east", "eu-west"], feed="A", subject_prefix=prefix)
    assert rule_of(source, Chain("eu-west", "A", 12, 3)).apply(b"nodes.one") == b"f.eu-west.A.12.p3.nodes.one"
    assert patterns_of(source) == ["f.us-east.A.*.*.>", "f.eu-west.A.*.*.>"]


def test_a_transform_of_the_configuration_is_applied(tmp_path: Path) -> None:
    assert loaded(tmp_path, "nodes.*.>", "fleet.{{wildcard(1)}}.>") == "fleet.one.x"


def test_a_mistake_has_its_place(tmp_path: Path) -> None:
    for source, destination, problem in (
        ("nodes.*", "fleet.$2", r"9:63: .*destination: \$2: expected the number of a \* of the source, source has 1"),
        ("nodes.*", "fleet.{{random(3)}}", "expected a function that always gives the same result"),
        ("nodes.*", "fleet.{{wildcard(1}}", "expected one of wildcard, partition, split"),
        ("nodes.*", "fleet.{{left(1,x)}}", "expected a whole number, found 'x'"),
        ("nodes.*", "fleet.*", r"expected \$n or {{wildcard\(n\)}} in place of"),
        ("nodes.>", "fleet.a", "expected a final > in both or in neither"),
        ("nodes.*", "fleet..a", "without empty tokens"),
    ):
        with pytest.raises(ConfigError, match=problem):
            loaded(tmp_path, source, destination)


def test_bytes_that_are_no_text_are_cut_like_others_and_what_the_source_does_not_match_stays() -> None:
    ours = compile_transform("a.*", "b.{{splitFromLeft(1,2)}}.{{right(1,1)}}")

    assert ours.apply(b"a.\xff\xfe\xfd") == b"b.\xff\xfe.\xfd.\xfd"
    for subject in (b"c.d", b"a", b"a.b.c", b"a.*", b"a.", b""):
        assert ours.apply(subject) == subject


pieces = st.sampled_from(["a", "b", "*"])
calls = ["wildcard(1)", "partition(3,1)", "split(1,-)", "sliceFromLeft(1,2)", "left(1,1)"]
functions = st.sampled_from(["lit", "$1", *(f"{{{{{call}}}}}" for call in calls)])
values = st.sampled_from(["a", "b", "x-y", "abcd"])


@given(st.lists(pieces, min_size=1, max_size=3), st.lists(functions, min_size=1, max_size=3), st.booleans(), st.data())
def test_the_pattern_takes_whatever_is_made(source: list[str], destination: list[str], rest: bool, data: Any) -> None:
    """Match all results, so that no start is refused for subjects that the target would have taken."""
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
    assert SubjectFilters([ours.apply(raw).decode()]).overlaps(ours.pattern)


affixes = st.text("ab.", min_size=1, max_size=4)


@given(affixes, st.one_of(st.just(""), affixes), st.lists(st.text("ab", min_size=1, max_size=3), min_size=1))
def test_the_pattern_of_a_prefix_takes_whatever_is_made(prefix: str, remove: str, subject: list[str]) -> None:
    rule = SubjectRule(prefix.encode(), remove.encode())
    pattern, made = rule.pattern, rule.apply(".".join(subject).encode())

    if pattern is not None and made and b"" not in made.split(b"."):
        assert matches(pattern, made), (pattern, made)
