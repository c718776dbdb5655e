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
    *(part("A", "1", 0), part("A", "1_0", 0), part("A_1", "0", 0), part("A", "1", 10), part("A", "1_0_0", 0)),
    *(part("A", "B_C"), part("A_B", "C"), part("A", "x$y"), part("A", "x-y"), part("A", "ü")),
    *(part("A", "n" * 255), part("A", "n" * 254)),
]


def test_a_durable_has_a_legal_name_each_time_and_belongs_to_one_slice_however_alike_names_look() -> None:
    for one in ALIKE:
        owners = [other for other in ALIKE if WantedMessages(other, "interest").is_ours(name(one))]
        assert owners == [one]
        assert all(is_of_site(name(one), other.site) == (other.site == one.site) for other in ALIKE)
        assert name(one) != name(one)
        assert (len(name(one)) <= 255, name(one).isascii(), {*name(one)} & {*" .*>/\\\t\r\n"}) == (True, True, set())


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


def test_consumers_are_configured_by_the_retention_and_the_version_of_the_server() -> None:
    queue = durable(WantedMessages(part(), "workqueue", 7), (2, 15, 1))
    interest = durable(WantedMessages(replace(part(), filter_subject="s.a"), "interest", 7), (2, 15, 1))
    for each in (queue, interest):
        fields = (each["max_ack_pending"], each["max_deliver"], each["ack_wait"])
        assert fields == (-1, -1, int(ACK_WAIT * NS_PER_S))
        assert not {"inactive_threshold", "mem_storage", "num_replicas"} & set(each)
    assert not {"opt_start_seq", "filter_subject"} & set(queue)
    assert queue.items() >= {"deliver_policy": "all", "ack_policy": "explicit"}.items()
    begins = {"deliver_policy": "by_start_sequence", "opt_start_seq": 7, "filter_subject": "s.a"}
    assert interest.items() >= {**begins, "ack_policy": "all"}.items()
    for version, policy in (((2, 12, 8), "explicit"), ((2, 15, 0), "all")):
        assert durable(WantedMessages(part(), "interest", 7), version)["ack_policy"] == policy
    passing = ephemeral(WantedMessages(part(), "limits", 7, inactive=60))
    assert passing.items() >= {"ack_policy": "none", "opt_start_seq": 7, "inactive_threshold": 60 * NS_PER_S}.items()
    configs = ({}, {"filter_subject": "a"}, {"filter_subjects": ["a", "b"]})
    assert [filters(config) for config in configs] == [[""], ["a"], ["a", "b"]]


@pytest.mark.parametrize(
    ("begin", "acknowledged", "expected"),
    [(1, [], 101), (1, [100], 101), (1, [0, 50], 51), (60, [50], 60), (1, [300], 101), (101, [0], 101)],
)
def test_a_durable_begins_behind_a_former_one(begin: int, acknowledged: list[int], expected: int) -> None:
    former = [ConsumerInfo("c", "", {}, 0, 0, 0, acknowledged=each) for each in acknowledged]
    assert first(WantedMessages(part(), "interest", 101, begin), former) == expected


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
    assert (found and found.code) == (told and "E-RETENTION")
    assert (told or "") in (found.message if found else "")
