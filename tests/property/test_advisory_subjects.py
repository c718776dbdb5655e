"""Subjects of advisories: valid for publishing and matched by the template's filter, for any value."""

from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from common.nats.protocol import frame
from common.settings.egress import AdvisorySettings
from common.settings.types import MAX_VALUE_BYTES, is_subject
from common.subjects import matches
from egress.advisories.advisory import Advisory, AdvisoryEvent, advisory_subject, subject_filter, subject_tokens

AWKWARD = st.text(st.sampled_from("a.%* >\t\r\n\x00\x7f\x85\u2028\u00a0ü\ud800sv"), max_size=40)
VALUES = st.one_of(
    AWKWARD, st.text(st.characters(), max_size=1500), st.sampled_from(["", ".", "..", "%v", "%s.%v", "a" * 5000])
)
TEMPLATES = ("adv.%s.%v", "adv", "adv.%v", "%s.x-%v-y.z", "adv.%v.%s.%v", "a.b%s", "adv.%%v", "%s")


@given(st.sampled_from(TEMPLATES), st.sampled_from(AdvisoryEvent), VALUES)
def test_any_value_gives_a_subject_of_the_template(template: str, event: AdvisoryEvent, value: str) -> None:
    subject = advisory_subject(template, Advisory(event, value, 0, 0))

    assert is_subject(subject)
    assert not set(subject.encode()) & set(b"\x00\t\n\r *>")
    assert matches(subject_filter(template), subject)
    assert subject.startswith(template.partition("%")[0])
    assert frame(subject.encode(), b"").count(b"\r\n") == 2  # one message, nothing after it
    assert len(subject.encode()) <= len(template) * 8 + 2 * MAX_VALUE_BYTES


@given(VALUES, VALUES)
def test_a_value_can_be_read_from_its_subject_unless_it_was_cut_and_no_other_has_that_subject(
    value: str, other: str
) -> None:
    subject = subject_tokens(value)

    assert len(subject.encode()) <= MAX_VALUE_BYTES
    if len(subject.encode()) < MAX_VALUE_BYTES - 40 and value:
        assert unquote(subject, errors="surrogatepass") == value
    assert (subject == subject_tokens(other)) == (value == other)


SUBJECTS_OF_VALUES = [
    ("node1.example.net", "node1.example.net"),
    ("größe", "größe"),
    ("a b", "a%20b"),
    ("*.>", "%2A.%3E"),
    ("50%", "50%25"),
    (".a..b.", "%2Ea.%2Eb%2E"),
    ("x\r\nPUB $JS.API.STREAM.DELETE.S 0", "x%0D%0APUB%20$JS.API.STREAM.DELETE.S%200"),
]


@pytest.mark.parametrize(("value", "subject"), SUBJECTS_OF_VALUES)
def test_what_becomes_of_a_value(value: str, subject: str) -> None:
    assert subject_tokens(value) == subject


def test_valid_templates_are_taken_and_have_a_filter() -> None:
    filters = {"adv": "adv", "adv.%s.%v": "adv.*.>", "adv.%v.%s": "adv.>", "adv.on-%s.x": "adv.*.x", "%s": "*"}
    assert {template: subject_filter(template) for template in filters} == filters
    for template in ("", *TEMPLATES):
        assert AdvisorySettings(subject=template).subject == template


TURNED = ("%v", "%v.adv", "x%v.adv", "$JS.API.%v", "$SYS.x", "adv.*", "adv.>", "adv..%v", "adv.", "a b", "a\r\n")


@pytest.mark.parametrize("template", [*TURNED, "adv." + "%v" * 7, "a" * 4000])
def test_templates_that_a_value_or_a_typing_error_could_turn_against_the_server_are_refused(template: str) -> None:
    with pytest.raises(ValidationError):
        AdvisorySettings(subject=template)
