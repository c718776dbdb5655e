"""`ingress.events`: its forms, and how long a poll may wait beside it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from common.settings.root import Settings


def settings(store: str = "s3://floe", **ingress: Any) -> Settings:
    return Settings(store={"url": store}, ingress=ingress)


def test_a_subject_a_queue_or_its_whole_address() -> None:
    address = "sqs://sqs.eu-west-1.amazonaws.com/123456789012/floe-events"
    for events in ("nats://minio.events", "nats://floe.*.created", "nats://minio.>", "sqs://floe-events", address):
        assert settings(events=events).ingress.events == events


ODD_NATS = ("", "a..b", "a.>.b", "nats.example.net:4222", "user:secret@host", "host/subject")
ODD_SQS = ("", "https://sqs.eu-west-1.amazonaws.com/123456789012/floe-events", "a queue", "floe.fifo")


def test_anything_else_is_refused_with_the_forms() -> None:
    odd = [f"nats://{each}" for each in ODD_NATS] + [f"sqs://{each}" for each in ODD_SQS]
    for events in ("minio.events", "kafka://minio", *odd):
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
