"""Advisories that would come back into the stream that they tell about."""

from __future__ import annotations

import pytest

from common.jetstream.api import StreamInfo
from common.settings.egress import FeedSettings
from egress.advisories.advisory import fed_back, loop_of
from egress.partition import partitions_of


@pytest.mark.parametrize(
    ("template", "subjects", "filter_subject", "found"),
    [
        ("loop.adv.%s.%v", "loop.>", "", ("loop.adv.new.>", "loop.>")),
        ("adv.%s.%v", "loop.> adv.*.a.b", "", ("adv.new.>", "adv.*.a.b")),
        ("adv.%s", "adv.expire", "", ("adv.expire", "adv.expire")),
        ("adv", "*", "", ("adv", "*")),
        ("adv.x%v", ">", "", ("adv.>", ">")),
        ("loop.adv.%s", "loop.>", "loop.*.recover", ("loop.adv.recover", "loop.>")),
        ("loop.adv.%v", "loop.*.a loop.data.>", "loop.*.*", ("loop.adv.>", "loop.*.a")),
        ("adv.%s.%v", "loop.>", "", None),
        ("loop.%s", "loop.data loop.*.x", "", None),  # no event is called data
        ("loop.adv.%s.%v", "loop.>", "loop.data.>", None),
        ("loop.adv.%s.%v", "loop.>", "loop.adv", None),
        ("loop.adv.%s", "loop.adv.x loop.data.>", "loop.>", None),
        ("loop.%v", "loop", "", None),
        ("adv.%s.%v", "", "", None),  # a mirror
    ],
)
def test_what_can_come_back_is_named_and_nothing_else(
    template: str, subjects: str, filter_subject: str, found: tuple[str, str] | None
) -> None:
    assert fed_back(template, subjects.split(), filter_subject) == found


def stream(*subjects: str) -> StreamInfo:
    return StreamInfo("LOOP", "", {"name": "LOOP", "subjects": list(subjects)}, 0, 0, 0, "", "", "")


def feed(**keys: object) -> FeedSettings:
    sampled = {"inspect_subject_token": -1, "inspect_duration": "1h"}
    return FeedSettings.model_validate({"stream": "LOOP", **sampled, **keys})


def test_the_error_names_the_subjects_and_the_ways_out() -> None:
    [part] = partitions_of("site", feed(advisory={"subject": "loop.adv.%s.%v"}))
    error = loop_of(part, part.chain, stream("loop.>"))
    assert error is not None
    assert error.code == "E-ADVISORY-LOOP"
    told = "site/LOOP/0000/0: advisories on loop.adv.new.> would be messages of stream LOOP itself (loop.>)"
    assert error.message.startswith(told)
    for way in ("advisory.subject", "filter_subject that leaves loop.adv.*.> out"):
        assert way in error.hint
    [part] = partitions_of("site", feed())
    assert loop_of(part, part.chain, stream(">")) is None, "a feed without advisories"


def test_only_the_partition_that_reads_them_stops() -> None:
    parts = partitions_of("site", feed(advisory={"subject": "loop.adv.%s"}, partitions=["loop.a.>", "loop.adv.>"]))
    found = [loop_of(part, part.chain, stream("loop.>")) for part in parts]
    assert found[0] is None
    assert found[1] is not None
    assert "(loop.>, of which loop.adv.> is read)" in found[1].message
