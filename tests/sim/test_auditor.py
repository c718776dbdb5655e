"""The auditor detects each promise, broken once by hand."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from common.settings.egress import FeedSettings
from tests.sim.auditor import Broken, Publication, PublisherLog, SourceTap, TargetAuditor, read_copy
from tests.sim.sampled import SAMPLING, Choices
from tests.sim.streams import StoredMessage

HEADERS = b"NATS/1.0\r\nX-N: 1\r\nNats-Msg-Id: a\r\n\r\n"


def archive_of(count: int) -> tuple[PublisherLog, TargetAuditor, list[StoredMessage]]:
    """Return a log of `count` acknowledged messages of one chain, its auditor, and the copies that ought to arrive."""
    log, copies = PublisherLog(), []
    tap = SourceTap(log)
    for number in range(count):
        publication = log.add("partition 0", b"a.%d" % number, HEADERS, b"rest")
        publication.is_acknowledged = True
        tap.stored(StoredMessage(number + 1, publication.subject, HEADERS, publication.payload, 10**18 + number))
        copies.append(copy_of(publication, number + 1))
    return log, TargetAuditor(log, b"c."), copies


def copy_of(publication: Publication, sequence: int) -> StoredMessage:
    origin = b"Floe-Source: eu A 0000 0 %d %d" % (publication.sequence, publication.time_ns)
    block = b"NATS/1.0\r\n%b\r\nX-N: 1\r\nFloe-Original: Nats-Msg-Id: a\r\n\r\n" % origin
    return StoredMessage(sequence, b"c." + publication.subject, block, publication.payload, 2 * 10**18)


ADVISORY = b'{"protocol":"io.choria.sr.v2.age_advisory","event_id":"A","inspect_field":"subject","age":9,"seen":1,'
SENT = StoredMessage(1, b"ADVISED", None, ADVISORY + b'"replicator":"eu","timestamp":3,"event":"new","value":"a"}', 1)


@pytest.mark.parametrize(("link", "sent", "is_broken"), [("one", 0.5, True), ("two", 1.5, True), ("two", 0.5, False)])
def test_an_advisory_may_come_again_only_if_another_sent_it_before(link: str, sent: float, is_broken: bool) -> None:
    world: Any = SimpleNamespace(arriving=("one", 0.5), now=1.0)
    choices = Choices(world, PublisherLog(), "eu", FeedSettings(stream="A", **SAMPLING))
    choices.stored(SENT)
    world.arriving, world.now = (link, sent), 2.0
    with pytest.raises(Broken, match="I8") if is_broken else nullcontext():
        choices.stored(SENT)
    assert choices.seen == 1


def test_copies_in_order_pass() -> None:
    _, auditor, copies = archive_of(3)
    for copy in copies:
        auditor.stored(copy)
    assert auditor.missing() == []


@pytest.mark.parametrize(("first", "promise"), [(0, "I2"), (1, "I1")])
def test_a_message_that_comes_twice_or_behind_a_later_one_breaks_a_promise(first: int, promise: str) -> None:
    _, auditor, copies = archive_of(2)
    auditor.stored(copies[first])
    with pytest.raises(Broken, match=promise):
        auditor.stored(copies[0])


@pytest.mark.parametrize(
    "change",
    [
        {"payload": b"0|other"},
        {"subject": b"c.b"},
        {"headers": None},
        {"headers": b"NATS/1.0\r\nFloe-Source: eu A 0000 0 1 1\r\nX-N: 1\r\nNats-Msg-Id: a\r\n\r\n"},
    ],
)
def test_a_changed_message_breaks_a_promise(change: dict[str, bytes | None]) -> None:
    _, auditor, copies = archive_of(1)
    with pytest.raises(Broken, match="I6"):
        auditor.stored(replace(copies[0], **change))  # type: ignore[arg-type]


def test_acknowledged_messages_are_owed_unless_the_source_drops_them() -> None:
    log, auditor, copies = archive_of(2)
    auditor.stored(copies[0])
    assert [each.sequence for each in auditor.missing()] == [2]
    SourceTap(log).removed(StoredMessage(2, b"a.1", None, log.all[1].payload, 0), "limit")
    assert auditor.missing() == []


def test_a_target_that_forgets_its_tail_gets_it_again() -> None:
    _, auditor, copies = archive_of(1)
    auditor.stored(copies[0])
    auditor.removed(copies[0], "lost")
    assert len(auditor.missing()) == 1
    auditor.stored(copies[0])


@pytest.mark.parametrize(
    ("lines", "original"),
    [
        (b"", None),
        (b"Floe-Original:\r\n", b"NATS/1.0\r\n\r\n"),
        (b"Floe-Block: eA==\r\n", b"x"),
        (b"A: 1\r\nFloe-Original: Nats-TTL: 1s\r\n", b"NATS/1.0\r\nA: 1\r\nNats-TTL: 1s\r\n\r\n"),
    ],
)
def test_a_copy_is_read_by_its_documented_form(lines: bytes, original: bytes | None) -> None:
    block = b"NATS/1.0\r\nNats-Expected-Last-Sequence: 4\r\nFloe-Source: eu A 0000 0 7 9\r\n" + lines + b"\r\n"
    assert read_copy(block) == ((7, 9), original)
