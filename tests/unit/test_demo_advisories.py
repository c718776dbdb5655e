"""The demo's view of advisories: it must notice a story that cannot be true."""

from __future__ import annotations

import json

import pytest

from common.segments.segment import Message
from infra.demo.compare import Stories


def told(*events: tuple[str, str]) -> Stories:
    """The stories of (event, id) of one node."""
    stories = Stories()
    for event, identity in events:
        document = {"event": event, "value": "n1", "event_id": identity}
        stories.take(Message(1, 1, b"s", None, json.dumps(document).encode()))
    return stories


def test_a_life_is_told_without_problems() -> None:
    events = ("new", "timeout", "recover", "timeout", "expire", "new")

    stories = told(*((event, str(number)) for number, event in enumerate(events)))

    assert stories.problems == []
    assert stories.counts == {"new": 2, "timeout": 2, "recover": 1, "expire": 1}


@pytest.mark.parametrize(
    "events", [("timeout",), ("new", "recover"), ("new", "new"), ("new", "expire"), ("new", "timeout", "new")]
)
def test_what_cannot_follow_is_a_problem(events: tuple[str, ...]) -> None:
    assert told(*((event, str(number)) for number, event in enumerate(events))).problems


def test_one_id_twice_is_a_problem() -> None:
    assert "twice under one id" in told(("new", "a"), ("timeout", "a")).problems[0]
