"""Durable consumers of Floe, captures that are put, and acknowledgements: their sending and their confirmation."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest

from common.archive.captures import CapturedConfig, CapturedConsumer, CapturedConsumers, CapturedDeletions
from common.clock import NS_PER_S
from common.errors import DataError, OutcomeUnknown, Refused
from common.nats.api import ACK_WAIT_S, ConsumerInfo, StreamInfo
from common.sequences import SequenceRange
from common.settings.egress import FeedSettings, SegmentSettings
from common.settings.service import ServiceSettings
from common.settings.types import Range, Section, parse_duration
from egress.captures import are_consumers_due, captured_consumers, check_size, config_differs, deletions_differ
from egress.consumers import (
    Acknowledger,
    ReaderResetError,
    WantedMessages,
    archived_ranges,
    durable,
    ephemeral,
    filter_subjects,
    first_of_durable,
    is_settled,
    limits_error,
)
from egress.deps import Tuning
from egress.memory import MemoryBudget
from egress.partition import Partition, Position, is_durable_of_site, is_floe_consumer, partitions_of
from egress.reader import Reader
from tests.support.clock import ManualClock


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
        assert [other for other in ALIKE if WantedMessages(other, "interest").is_own_durable(name(one))] == [one]
        assert all(is_durable_of_site(name(one), other.site) == (other.site == one.site) for other in ALIKE)
        assert name(one) != name(one)
        assert (len(name(one)) <= 255, name(one).isascii(), {*name(one)} & {*" .*>/\\\t\r\n"}) == (True, True, set())


def test_a_former_partition_is_recognised_by_its_number() -> None:
    settings = {"partitions": {"count": 2, "subject": "s.{partition}.>"}}
    wanted = WantedMessages(part(partition=0, **settings), "workqueue")
    assert wanted.is_former_durable(name(part(partition=5, **settings)))
    assert not wanted.is_former_durable(name(part(partition=1, **settings)))
    assert not wanted.is_former_durable(name(part(feed="OTHER", partition=5)))
    assert not wanted.is_former_durable("worker")
    cut = partitions_of("alpha", wanted.partition.settings)
    assert [each.partition_of(name(each)) for each in cut] == [0, 1]


def test_a_durable_waits_for_its_acknowledgements_longer_than_anything_takes() -> None:
    """Check `ack_wait`: a message delivered again while it is still being read would make the reader doubt."""

    def longest(section: type[Section], key: str) -> float:
        (limits,) = [each for each in section.model_fields[key].metadata if isinstance(each, Range)]
        return parse_duration(str(limits.maximum))

    assert longest(SegmentSettings, "max_age") + longest(ServiceSettings, "lease_ttl") < ACK_WAIT_S / 2


def test_consumers_are_configured_by_the_retention_and_the_version_of_the_server() -> None:
    queue = durable(WantedMessages(part(), "workqueue", 7), (2, 15, 1))
    interest = durable(WantedMessages(replace(part(), filter_subject="s.a"), "interest", 7), (2, 15, 1))
    for each in (queue, interest):
        fields = (each["max_ack_pending"], each["max_deliver"], each["ack_wait"])
        assert fields == (-1, -1, int(ACK_WAIT_S * NS_PER_S))
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
    assert [filter_subjects(config) for config in configs] == [[""], ["a"], ["a", "b"]]


def test_a_durable_begins_behind_a_former_one() -> None:
    def begins(begin: int, acknowledged: tuple[int, ...]) -> int:
        former = [ConsumerInfo("c", "", {}, 0, 0, 0, acknowledged=each) for each in acknowledged]
        return first_of_durable(WantedMessages(part(), "interest", 101, begin), former)

    found = {(1, ()): 101, (1, (100,)): 101, (1, (0, 50)): 51, (60, (50,)): 60, (1, (300,)): 101, (101, (0,)): 101}
    assert {each: begins(*each) for each in found} == found


def test_what_a_stream_imposes_on_durables_is_refused() -> None:
    queue, interest = (WantedMessages(part(), retention) for retention in ("workqueue", "interest"))
    assert limits_error(interest, {"max_ack_pending": -1}) is limits_error(queue, {"inactive_threshold": 60}) is None
    for wanted, key, value in ((interest, "inactive_threshold", 60), (queue, "max_ack_pending", 1000)):
        found = limits_error(wanted, {key: value})
        assert (found.code, f"{key} to {value}" in found.message) == ("E-RETENTION", True)


CREATED, EVERY = "2026-11-20T10:00:00Z", 300.0
APP = CapturedConsumer({"name": "app", "durable_name": "app"}, CREATED, 5, 5, 3, 3)
PASSING = CapturedConsumer({"name": "XyZ"}, CREATED)


def at(second: int) -> str:
    return f"2026-11-20T10:{second // 60:02d}:{second % 60:02d}Z"


def consumers(second: int, *found: CapturedConsumer, end: int = 0) -> CapturedConsumers:
    return CapturedConsumers(at(second), end, found)


def altered(**fields: Any) -> CapturedConsumer:
    return msgspec.structs.replace(APP, **fields)


MOVED, MORE = altered(delivered_stream=6), {**APP.config, "max_deliver": 3}


CONSUMERS = [
    (consumers(400, APP, end=9), False),
    (consumers(299, MOVED), False),
    *((consumers(300, each), True) for each in (MOVED, altered(ack_floor_stream=4), altered(ack_pending=1))),
    (consumers(1), True),
    (consumers(1, APP, altered(config={"name": "b", "durable_name": "b"})), True),
    *((consumers(1, each), True) for each in (altered(paused=True), altered(created=at(1)), altered(config=MORE))),
    (consumers(1, PASSING, APP), False),
    (consumers(300, PASSING, APP), True),
]


@pytest.mark.parametrize(("found", "is_due"), CONSUMERS)
def test_consumers_are_put_when_they_were_changed_or_moved_for_a_while(found: CapturedConsumers, is_due: bool) -> None:
    newest = consumers(0, APP)
    assert are_consumers_due(newest, found, EVERY, False) is is_due
    assert are_consumers_due(newest, found, EVERY, True) is (found.consumers != newest.consumers)
    assert are_consumers_due(None, found, EVERY, False)
    assert are_consumers_due(consumers(100, APP), consumers(0, MOVED), EVERY, False), "a clock that was set back"


def test_a_configuration_and_deletions_are_put_where_they_differ() -> None:
    config, same = (CapturedConfig(at(second), end, CREATED, {"max_age": 1}) for second, end in ((0, 5), (9, 50)))
    others = [CapturedConfig(at(9), 5, CREATED, {"max_age": 2}), CapturedConfig(at(9), 5, at(1), {"max_age": 1})]
    assert [config_differs(*each) for each in ((None, config), (config, same))] == [True, False]
    assert all(config_differs(config, other) for other in others)
    newest, later = (CapturedDeletions(at(n), end, 1, end + 1, ((3, 4),)) for n, end in ((0, 9), (9, 99)))
    changed = [CapturedDeletions(at(9), 99, *each) for each in ((1, 100, ((3, 5),)), (5, 100, ()), (2, 100, ((3, 4),)))]
    assert [deletions_differ(*each) for each in ((None, newest), (newest, later))] == [True, False]
    assert all(deletions_differ(newest, other) for other in changed)


def test_consumers_are_captured_by_name_without_those_of_floe() -> None:
    wanted = WantedMessages(Partition("site", FeedSettings(stream="S")), "workqueue")
    own = [durable(wanted, (2, 15, 0))["durable_name"], ephemeral(wanted)["name"], f"floe-start-{'0' * 16}"]
    assert all(map(is_floe_consumer, own))
    assert not any(
        map(is_floe_consumer, ("floe", "floe_app_1", "floe-0123", "app", f"{own[0]}x", f"floe-start-{'0' * 15}"))
    )
    answer = {
        "name": "b",
        "created": CREATED,
        "config": {"durable_name": "b", "ack_policy": "explicit"},
        "delivered": {"consumer_seq": 7, "stream_seq": 6},
        "ack_floor": {"consumer_seq": 5, "stream_seq": 4},
        "num_ack_pending": 2,
        "num_redelivered": 1,
        "paused": True,
    }
    bare = {"name": "a", "created": CREATED, "config": {}}
    config = {"name": "b", "durable_name": "b", "ack_policy": "explicit"}
    assert captured_consumers([answer, *({**answer, "name": name} for name in own), bare]) == (
        CapturedConsumer({"name": "a"}, CREATED),
        CapturedConsumer(config, CREATED, 7, 6, 5, 4, 2, 1, paused=True),
    )
    for corrupt in ({}, {**bare, "created": None}, {**bare, "delivered": {"stream_seq": "x"}}, {**bare, "config": 3}):
        with pytest.raises(DataError, match=r"CONSUMER\.LIST: expected consumers"):
            captured_consumers([corrupt])


def test_deletions_that_one_answer_does_not_hold_are_not_asked_for() -> None:
    info = StreamInfo("S", CREATED, {}, 1, 99_999, 0, "", "", "", deleted=80_000)
    check_size(info, 1024 * 1024)
    with pytest.raises(DataError, match="found 80,000 deleted messages") as refusal:
        check_size(info, 900_000)
    assert "capture_deletes: never" in str(refusal.value.hint)


def test_deletions_are_checked_where_deleting_leaves_no_message_and_how_often_is_never_or_a_duration() -> None:
    def period(stream: str, retention: str = "limits", **keys: str) -> float:
        return FeedSettings.model_validate({"stream": stream, **keys}).capture_deletes_s(retention)

    assert period("S") == period("S", "interest") == period("KV_S") == 0
    assert period("OBJ_S") == period("S", "workqueue") == 600
    assert period("OBJ_S", "workqueue", capture_deletes="never") == 0
    assert (period("S", capture_deletes="1h"), FeedSettings(stream="S").capture_consumers_s) == (3600, 60)
    assert FeedSettings(stream="S", capture_consumers="never").capture_consumers_s == 0
    consumers, deletes = ("", "0s", "500ms"), ("2d", "always")
    for wrong in [{"capture_consumers": each} for each in consumers] + [{"capture_deletes": each} for each in deletes]:
        with pytest.raises(ValueError, match="expected"):
            FeedSettings.model_validate({"stream": "S", **wrong})


SHORT = b"$JS.ACK.S.C.1.%d.%d.1700000000000000000.9"
LONG = b"$JS.ACK.hub.ACCHASH.S.C.1.%d.%d.1700000000000000000.9.x7"


def info(floor: int = 0, delivered: int = 0, pending: int = 0, created: str = "now") -> ConsumerInfo:
    return ConsumerInfo("C", created, {}, 0, delivered, 0, floor, pending)


class Server:
    """A consumer that takes acknowledgements, except those of `deaf` (consumer sequences)."""

    def __init__(self) -> None:
        self.generation, self.sent, self.deaf, self.whole = 0, [], set[int](), False
        self.delivered, self.acked, self.found, self.refused = 0, set[int](), "now", False
        self.clock = ManualClock()

    def send(self, data: bytes) -> None:
        for subject in re.findall(rb"PUB (\S+) 4\r\n\+ACK\r\n", data):
            words = subject.split(b".")
            at = words.index(b"1", 2)
            self.sent.append((int(words[at + 1]), int(words[at + 2])))
            numbers = range(1, self.sent[-1][1] + 1) if self.whole else [self.sent[-1][1]]
            self.acked |= {number for number in numbers if number not in self.deaf}

    async def flush_writes(self) -> None:
        return None

    def permission_error(self, subject: bytes) -> Refused | None:
        return Refused("no right to publish") if self.refused else None

    async def info(self, *_: Any) -> ConsumerInfo:
        floor = next(n for n in range(self.delivered + 1) if n + 1 not in self.acked)
        return info(floor, self.delivered, self.delivered - len(self.acked), self.found)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr("egress.consumers.consumer_info", made.info)
    return made


def acks(server: Any, **settings: Any) -> Acknowledger:
    account = MemoryBudget(10**9).account(lambda: None)
    consumer = replace(info(), config={"ack_policy": "all" if server.whole else "explicit"})
    return Acknowledger(server, "S", consumer, account, **{"first": 1, **settings})


def reader(client: Any, clock: ManualClock) -> Reader:
    deps: Any = SimpleNamespace(client=client, partition=part(), clock=clock, tuning=Tuning())
    deps.budget = MemoryBudget(2**20)
    source: Any = SimpleNamespace(created=CREATED, retention="limits")
    more: Any = {"first": 1, "archived": (), "account": None, "has_room": lambda _: True}
    return Reader(deps, source, Mock(), Mock(), **more)


def deliver(server: Server, made: Acknowledger, *sequences: int, reply: bytes = SHORT) -> None:
    made.record_delivered(reply % (sequences[0], server.delivered + 1), sequences)
    server.delivered += len(sequences)


@pytest.mark.parametrize("reply", [SHORT, LONG])
async def test_each_message_is_acknowledged_up_to_the_last_one(server: Server, reply: bytes) -> None:
    made = acks(server)
    deliver(server, made, 3, 5, 9, reply=reply)
    deliver(server, made, 10, 12, reply=reply)
    await made.acknowledge_up_to(10)
    assert sorted(set(server.sent)) == [(3, 1), (5, 2), (9, 3), (10, 4)]
    server.sent.clear()
    await made.acknowledge_up_to(11)
    assert server.sent == []
    await made.acknowledge_up_to(20)
    assert server.sent == [(12, 5)]


async def test_all_up_to_a_message_are_acknowledged_by_one(server: Server) -> None:
    server.whole = True
    made = acks(server)
    deliver(server, made, *range(1, 5001))
    await made.acknowledge_up_to(4000)
    assert set(server.sent) <= {(1, 1), (4000, 4000)}
    assert server.acked == set(range(1, 4001))


async def test_what_is_kept_is_charged_and_given_back(server: Server) -> None:
    budget = MemoryBudget(10**9)
    made = Acknowledger(server, "S", info(), budget.account(lambda: None), first=1)  # type: ignore[arg-type]
    deliver(server, made, *range(1, 1001))
    for upto, used in ((0, 8_000), (400, 4_800), (1000, 0)):
        await made.acknowledge_up_to(upto)
        assert budget.used == used


async def test_what_is_not_taken_is_unknown_and_sent_again(server: Server) -> None:
    made = acks(server)
    deliver(server, made, 1, 2, 3)
    server.deaf = {2}
    with pytest.raises(OutcomeUnknown, match="expected message 3 acknowledged, found 1 pending from 2 on"):
        await made.acknowledge_up_to(3)
    server.deaf, server.sent = set(), []
    await made.acknowledge_up_to(3)
    assert ([number for _, number in server.sent], server.acked) == ([1, 2, 3], {1, 2, 3})


async def test_only_what_a_segment_accounts_for_is_acknowledged_below_the_position(server: Server) -> None:
    """Leave messages before the chain or in a hole in the stream, and count them."""
    ranges = archived_ranges(3, Position(20, lost=(SequenceRange(8, 9),)))
    assert ranges == (SequenceRange(3, 7), SequenceRange(10, 19))
    assert (archived_ranges(5, Position(5)), archived_ranges(5, Position(6))) == ((), (SequenceRange(5, 5),))
    made = acks(server, first=20, archived=ranges)
    deliver(server, made, 1, 2, 3, 7, 8, 9, 10, 19, 20, 21)
    for upto, sent in ((19, [3, 7, 10, 19]), (21, [3, 7, 10, 19, 20, 21])):
        await made.acknowledge_up_to(upto)
        assert (sorted({sequence for sequence, _ in server.sent}), made.unacknowledged) == (sent, 4)


@pytest.mark.parametrize("changed", [{"found": "later"}, {"generation": 1}], ids=["consumer", "connection"])
async def test_another_consumer_or_connection_is_a_doubt_at_once(server: Server, changed: dict[str, Any]) -> None:
    made = acks(server)
    deliver(server, made, 1)
    vars(server).update(changed)
    with pytest.raises(ReaderResetError):
        await made.acknowledge_up_to(1)


async def test_a_missing_right_shows_after_one_message(server: Server) -> None:
    made = acks(server)
    deliver(server, made, *range(1, 1001))
    server.refused = True
    with pytest.raises(Refused):
        await made.acknowledge_up_to(1000)
    assert len(server.sent) == 1


async def test_a_reader_without_the_right_to_pull_ends_and_awaits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = StreamInfo("S", CREATED, {}, 1, 9, 9, "", "", "")
    monkeypatch.setattr("egress.reader.stream_info", AsyncMock(return_value=stream))
    monkeypatch.setattr("egress.reader.open_consumer", AsyncMock(return_value=(info(), [])))
    client = Mock(generation=0, max_payload=2**20, round_trip=AsyncMock())
    client.subscribe_raw = AsyncMock(return_value=AsyncMock())
    client.new_inbox.return_value, client.api_subject = "_INBOX.x", "$JS.API.{}".format
    subject = "$JS.API.CONSUMER.MSG.NEXT.S.C"
    client.permission_error = {subject.encode(): Refused(f"no right to {subject}")}.get
    with pytest.raises(Refused, match=r"MSG.NEXT.S.\*$"):
        await (made := reader(client, clock := ManualClock())).open()
    clock.advance(60)
    assert made.silent_in == 0
    await made.stop()
    assert made.silent_in > 0


PENDING = [
    (info(floor=10, delivered=20, pending=10), 10, 0, True),
    (info(floor=9, delivered=20, pending=11), 10, 0, False),
    (info(floor=0, delivered=20, pending=13), 10, 3, True),
    (info(floor=0, delivered=20, pending=14), 10, 3, False),
    (info(floor=0, delivered=10, pending=0), 10, 0, True),
    (info(floor=0, delivered=9, pending=0), 10, 0, False),
]


@pytest.mark.parametrize(("found", "number", "left", "expected"), PENDING)
def test_settled_is_what_leaves_nothing_pending(found: ConsumerInfo, number: int, left: int, expected: bool) -> None:
    assert is_settled(found, number, left) is expected
