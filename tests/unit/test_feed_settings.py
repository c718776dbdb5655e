"""The keys `partitions` and `ingress.events`: valid values, and the problems of invalid ones."""

from typing import Any

import pytest
from pydantic import ValidationError

from common.archive.documents import ChainDocument
from common.settings.egress import FeedSettings
from common.settings.root import Settings
from egress.incarnations import configured_layout, partition_layout
from egress.partition import partitions_of
from egress.repartition import settings_of
from egress.report import Unmatched, unmatched


def feed(**keys: Any) -> FeedSettings:
    return FeedSettings.model_validate({"stream": "NODES", **keys})


def settings(store: str = "s3://floe", **ingress: Any) -> Settings:
    return Settings(store={"url": store}, ingress=ingress)


def test_a_template_gives_each_partition_its_number() -> None:
    found = feed(partitions={"count": 3, "subject": "nodes.{partition}.>"})

    assert found.filters() == ("nodes.0.>", "nodes.1.>", "nodes.2.>")
    assert (found.is_partitioned, feed(filter_subject="nodes.0.>").is_partitioned) == (True, False)


BAD_PARTITIONS = [
    ([], "expected filters, none of them empty, found []"),
    (["a.>", ""], "expected filters, none of them empty, found ['a.>', '']"),
    (["a.>", "b", "a.>"], "expected each filter once, found 'a.>' again"),
    (["a.>", "b.*", "*.c"], "expected filters that do not overlap, found 'a.>' and '*.c'"),
    ({"count": 2, "subject": "a..{partition}"}, "without empty tokens, found 'a..{partition}'"),
    ({"count": 2, "subject": ">.{partition}"}, "a last > allowed"),
    ({"count": 1025, "subject": "a.{partition}"}, "expected 1 to 1024"),
]


@pytest.mark.parametrize(("partitions", "expected"), BAD_PARTITIONS)
def test_partitions_that_cannot_be_are_refused_with_both_sides(partitions: Any, expected: str) -> None:
    with pytest.raises(ValidationError) as caught:
        feed(partitions=partitions)
    assert expected in str(caught.value)


CUTS = [
    {"filter_subject": "a.>"},
    {"partitions": ["a", "b.*"]},
    {"partitions": ["a"]},
    {"partitions": {"count": 3, "subject": "a.{partition}"}, "relay": True},
]


@pytest.mark.parametrize("keys", CUTS)
def test_a_cut_can_be_read_back_into_settings(keys: dict[str, Any]) -> None:
    """Read the filters back: an old incarnation is closed with the filters of its beginning."""
    [*parts] = partitions_of("site", feed(**keys))
    cut = configured_layout(parts[0], 5)

    back = settings_of(cut, feed(partitions=["x", "y"]))

    assert partition_layout(configured_layout(partitions_of("site", back)[0])) == partition_layout(cut)
    assert cut[0] == ChainDocument(parts[0].filters, len(parts), 5, back.relay)


def test_what_no_partition_takes_is_counted_with_an_example() -> None:
    subjects = {"a.1": 3, "b.1": 4, "c.1": 5, "c.2": 6}

    assert [unmatched(subjects, each) for each in (["a.>", "b.*"], [">"])] == [Unmatched(11, 2, "c.1"), Unmatched()]


# `ingress.events`, and the poll interval beside it


def test_a_subject_a_queue_or_its_whole_address() -> None:
    address = "sqs://sqs.eu-west-1.amazonaws.com/123456789012/floe-events"
    for events in ("nats://minio.events", "nats://floe.*.created", "nats://minio.>", "sqs://floe-events", address):
        assert settings(events=events).ingress.events == events


NO_SUBJECTS = ("", "a..b", "a.>.b", "nats.example.net:4222", "user:secret@host", "host/subject")
NO_QUEUES = ("", "https://sqs.eu-west-1.amazonaws.com/123456789012/floe-events", "a queue", "floe.fifo")


def test_anything_else_is_refused_with_the_forms_and_a_folder_sends_no_notifications() -> None:
    odd = [f"nats://{each}" for each in NO_SUBJECTS] + [f"sqs://{each}" for each in NO_QUEUES]
    for events in ("minio.events", "kafka://minio", *odd):
        with pytest.raises(ValidationError, match="nats://SUBJECT or sqs://QUEUE"):
            settings(events=events)
    with pytest.raises(ValidationError, match="expected none with a file:// store"):
        settings("file:///srv/floe", events="nats://minio.events")


def test_polls_are_rarer_beside_events_unless_their_interval_is_set() -> None:
    events = {"events": "nats://minio.events"}
    keys: list[dict[str, Any]] = [{}, {"poll_interval": "5s"}, events, {**events, "poll_interval": "10s"}]
    assert [settings(**each).ingress.poll_seconds for each in keys] == [10, 5, 60, 10]


def test_the_series_are_of_all_chains_of_the_moving_ones_or_of_none() -> None:
    found = [settings(monitor={"per_chain": each}).ingress.monitor.per_chain for each in (True, False, "moving")]
    assert found == [True, False, "moving"]
    with pytest.raises(ValidationError, match="expected true, false or moving"):
        settings(monitor={"per_chain": "some"})
