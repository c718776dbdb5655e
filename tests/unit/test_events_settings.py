"""`ingress.events`: its forms, and how long a poll may wait beside it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from common.settings.root import Settings


def settings(store: str = "s3://floe", **ingress: Any) -> Settings:
    return Settings(store={"url": store}, ingress=ingress)


@pytest.mark.parametrize(
    "events",
    [
        "nats://minio.events",
        "nats://floe.*.created",
        "nats://minio.>",
        "sqs://floe-events",
        "sqs://sqs.eu-west-1.amazonaws.com/123456789012/floe-events",
    ],
)
def test_a_subject_a_queue_or_its_whole_address(events: str) -> None:
    assert settings(events=events).ingress.events == events


@pytest.mark.parametrize(
    "events",
    [
        "minio.events",
        "kafka://minio",
        "nats://",
        "nats://a..b",
        "nats://a.>.b",
        "nats://nats.example.net:4222",
        "nats://user:secret@host",
        "nats://host/subject",
        "sqs://",
        "sqs://https://sqs.eu-west-1.amazonaws.com/123456789012/floe-events",
        "sqs://a queue",
        "sqs://floe.fifo",
    ],
)
def test_anything_else_is_refused_with_the_forms(events: str) -> None:
    with pytest.raises(ValidationError, match="nats://SUBJECT or sqs://QUEUE"):
        settings(events=events)


def test_a_folder_sends_no_notifications() -> None:
    with pytest.raises(ValidationError, match="expected none beside a file:// store"):
        settings("file:///srv/floe", events="nats://minio.events")


def test_polls_are_rarer_beside_events_unless_their_interval_is_set() -> None:
    assert settings().ingress.poll_seconds == 10
    assert settings(poll_interval="5s").ingress.poll_seconds == 5
    assert settings(events="nats://minio.events").ingress.poll_seconds == 60
    assert settings(events="nats://minio.events", poll_interval="10s").ingress.poll_seconds == 10
