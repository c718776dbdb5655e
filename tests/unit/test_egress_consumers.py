"""Names and configurations of durables, and what a stream may not impose on them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.clock import NS_PER_S
from common.jetstream.api import ConsumerInfo
from common.jetstream.durables import ACK_WAIT
from common.settings.egress import FeedSettings, SegmentSettings
from common.settings.service import ServiceSettings
from common.settings.types import Range, Section, parse_duration
from egress.consumers import WantedMessages, durable, ephemeral, filters, first, unfit
from egress.partition import Partition, is_of_site, partitions_of


def part(site: str = "alpha", feed: str = "NODES", partition: int = 0, **settings: object) -> Partition:
    return Partition(site, FeedSettings.model_validate({"stream": "S", "name": feed, **settings}), partition)


def name(each: Partition) -> str:
    return str(durable(WantedMessages(each, "workqueue"), (2, 15, 1))["durable_name"])


ALIKE = [
    part("A", "1", 0),
    part("A", "1_0", 0),
    part("A_1", "0", 0),
    part("A", "1", 10),
    part("A", "1_0_0", 0),
    part("A", "B_C"),
    part("A_B", "C"),
    part("A", "x$y"),
    part("A", "x-y"),
    part("A", "ü"),
    part("A", "n" * 255),
    part("A", "n" * 254),
]


def test_a_durable_belongs_to_one_slice_however_alike_names_look() -> None:
    for one in ALIKE:
        owners = [other for other in ALIKE if WantedMessages(other, "interest").is_ours(name(one))]
        assert owners == [one]
        assert [other.site for other in ALIKE if is_of_site(name(one), other.site)].count(one.site)
        assert not any(is_of_site(name(one), other.site) for other in ALIKE if other.site != one.site)


@pytest.mark.parametrize("each", ALIKE)
def test_a_durable_has_a_legal_name_of_its_own_each_time(each: Partition) -> None:
    assert name(each) != name(each)
    assert len(name(each)) <= 255
    assert set(name(each)).isdisjoint(" .*>/\\\t\r\n")
    assert name(each).isascii()


def test_a_former_partition_is_recognised_by_its_number() -> None:
    settings = {"partitions": {"count": 2, "subject": "s.{partition}.>"}}
    wanted = WantedMessages(part(partition=0, **settings), "workqueue")
    assert wanted.is_former(name(part(partition=5, **settings)))
    assert not wanted.is_former(name(part(partition=1, **settings)))
    assert not wanted.is_former(name(part(feed="OTHER", partition=5)))
    assert not wanted.is_former("worker")
    cut = partitions_of("alpha", wanted.partition.settings)
    assert [each.partition_of(name(each)) for each in cut] == [0, 1]


def test_a_durable_waits_for_its_acknowledgements_longer_than_anything_takes() -> None:
    """A message delivered again while it is still read would put the reader in doubt."""

    def longest(section: type[Section], key: str) -> float:
        (limits,) = [each for each in section.model_fields[key].metadata if isinstance(each, Range)]
        return parse_duration(str(limits.maximum))

    assert longest(SegmentSettings, "max_age") + longest(ServiceSettings, "lease_ttl") < ACK_WAIT / 2


def test_durables_are_configured_by_the_retention() -> None:
    queue = durable(WantedMessages(part(), "workqueue", 7), (2, 15, 1))
    interest = durable(WantedMessages(replace(part(), filter_subject="s.a"), "interest", 7), (2, 15, 1))
    for each in (queue, interest):
        assert each["max_ack_pending"] == each["max_deliver"] == -1
        assert each["ack_wait"] == int(ACK_WAIT * NS_PER_S)
        assert not {"inactive_threshold", "mem_storage", "num_replicas"} & set(each)
    assert (queue["deliver_policy"], queue["ack_policy"]) == ("all", "explicit")
    assert "opt_start_seq" not in queue
    assert "filter_subject" not in queue
    assert (interest["deliver_policy"], interest["ack_policy"]) == ("by_start_sequence", "all")
    assert (interest["opt_start_seq"], interest["filter_subject"]) == (7, "s.a")


def test_an_older_server_is_told_of_each_message() -> None:
    wanted = WantedMessages(part(), "interest", 7)
    assert durable(wanted, (2, 12, 8))["ack_policy"] == "explicit"
    assert durable(wanted, (2, 15, 0))["ack_policy"] == "all"


@pytest.mark.parametrize(
    ("position", "begin", "acknowledged", "expected"),
    [
        (101, 1, [], 101),
        (101, 1, [100], 101),
        (101, 1, [50], 51),
        (101, 1, [0, 50], 51),
        (101, 60, [50], 60),
        (101, 1, [300], 101),
        (5, 5, [0], 5),
    ],
)
def test_a_durable_begins_behind_what_a_former_one_acknowledged(
    position: int, begin: int, acknowledged: list[int], expected: int
) -> None:
    former = [ConsumerInfo("c", "", {}, 0, 0, 0, acknowledged=each) for each in acknowledged]
    assert first(WantedMessages(part(), "interest", position, begin), former) == expected


def test_an_ephemeral_takes_no_acknowledgements_and_ends_with_its_reader() -> None:
    config = ephemeral(WantedMessages(part(), "limits", 7, inactive=60))
    assert (config["ack_policy"], config["opt_start_seq"]) == ("none", 7)
    assert config["inactive_threshold"] == 60 * NS_PER_S


@pytest.mark.parametrize(
    ("retention", "config", "told"),
    [
        ("interest", {"max_ack_pending": -1}, None),
        ("interest", {"inactive_threshold": 60}, "inactive_threshold to 60"),
        ("workqueue", {"inactive_threshold": 60}, None),
        ("workqueue", {"max_ack_pending": 1000}, "max_ack_pending to 1000"),
    ],
)
def test_what_a_stream_imposes_on_durables_is_refused(retention: str, config: dict[str, int], told: str | None) -> None:
    found = unfit(WantedMessages(part(), retention), config)
    assert (found is None) == (told is None)
    if found is not None and told is not None:
        assert told in found.message
        assert found.code == "E-RETENTION"


def test_filters_of_a_consumer() -> None:
    assert filters({}) == [""]
    assert filters({"filter_subject": "a"}) == ["a"]
    assert filters({"filter_subjects": ["a", "b"]}) == ["a", "b"]
