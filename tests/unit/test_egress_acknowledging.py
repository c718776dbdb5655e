"""Which acknowledgements are sent, and when they count as taken."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from common.errors import OutcomeUnknown, Refused
from common.jetstream.api import ConsumerInfo
from common.sequences import SequenceRange
from egress import acks as acknowledging
from egress.acks import Acknowledging, ReaderResetError, archived, is_settled
from egress.memory import MemoryBudget
from egress.partition import Position
from tests.support.basics import cases
from tests.support.clock import ManualClock

SHORT = b"$JS.ACK.S.C.1.%d.%d.1700000000000000000.9"
LONG = b"$JS.ACK.hub.ACCHASH.S.C.1.%d.%d.1700000000000000000.9.x7"


def info(floor: int = 0, delivered: int = 0, pending: int = 0, created: str = "now") -> ConsumerInfo:
    return ConsumerInfo("C", created, {}, 0, delivered, 0, floor, pending)


class Server:
    """A consumer that takes acknowledgements, but for those of `deaf` (by the consumer's numbers)."""

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

    def refusal(self, subject: bytes) -> Refused | None:
        return Refused("no right to publish") if self.refused else None

    async def info(self, *_: Any) -> ConsumerInfo:
        floor = next(n for n in range(self.delivered + 1) if n + 1 not in self.acked)
        return info(floor, self.delivered, self.delivered - len(self.acked), self.found)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr(acknowledging, "consumer_info", made.info)
    return made


def acks(server: Any, **settings: Any) -> Acknowledging:
    account = MemoryBudget(10**9).account(lambda: None)
    consumer = replace(info(), config={"ack_policy": "all" if server.whole else "explicit"})
    return Acknowledging(server, "S", consumer, account, **{"first": 1, **settings})


def deliver(server: Server, made: Acknowledging, *sequences: int, reply: bytes = SHORT) -> None:
    made.delivered(reply % (sequences[0], server.delivered + 1), sequences)
    server.delivered += len(sequences)


@pytest.mark.parametrize("reply", [SHORT, LONG])
async def test_each_message_is_acknowledged_up_to_the_last_one(server: Server, reply: bytes) -> None:
    made = acks(server)
    deliver(server, made, 3, 5, 9, reply=reply)
    deliver(server, made, 10, 12, reply=reply)
    await made.upto(10)
    assert sorted(set(server.sent)) == [(3, 1), (5, 2), (9, 3), (10, 4)]
    server.sent.clear()
    await made.upto(11)
    assert server.sent == []
    await made.upto(20)
    assert server.sent == [(12, 5)]


async def test_all_up_to_a_message_are_acknowledged_by_one(server: Server) -> None:
    server.whole = True
    made = acks(server)
    deliver(server, made, *range(1, 5001))
    await made.upto(4000)
    assert set(server.sent) <= {(1, 1), (4000, 4000)}
    assert server.acked == set(range(1, 4001))


async def test_what_is_kept_is_charged_and_given_back(server: Server) -> None:
    budget = MemoryBudget(10**9)
    made = Acknowledging(server, "S", info(), budget.account(lambda: None), first=1)  # type: ignore[arg-type]
    deliver(server, made, *range(1, 1001))
    for upto, used in ((0, 8_000), (400, 4_800), (1000, 0)):
        await made.upto(upto)
        assert budget.used == used


async def test_what_is_not_taken_is_unknown_and_sent_again(server: Server) -> None:
    made = acks(server)
    deliver(server, made, 1, 2, 3)
    server.deaf = {2}
    with pytest.raises(OutcomeUnknown, match="expected message 3 acknowledged, found 1 pending from 2 on"):
        await made.upto(3)
    server.deaf, server.sent = set(), []
    await made.upto(3)
    assert [number for _, number in server.sent] == [1, 2, 3]
    assert server.acked == {1, 2, 3}


async def test_only_what_a_segment_accounts_for_is_acknowledged_below_the_position(server: Server) -> None:
    """What lies before the chain or in a hole stays in the stream, and is counted."""
    ranges = archived(3, Position(20, lost=(SequenceRange(8, 9),)))
    assert ranges == (SequenceRange(3, 7), SequenceRange(10, 19))
    assert (archived(5, Position(5)), archived(5, Position(6))) == ((), (SequenceRange(5, 5),))
    made = acks(server, first=20, archived=ranges)
    deliver(server, made, 1, 2, 3, 7, 8, 9, 10, 19, 20, 21)
    for upto, sent in ((19, [3, 7, 10, 19]), (21, [3, 7, 10, 19, 20, 21])):
        await made.upto(upto)
        assert (sorted({sequence for sequence, _ in server.sent}), made.left) == (sent, 4)


@pytest.mark.parametrize("changed", [{"found": "later"}, {"generation": 1}], ids=["consumer", "connection"])
async def test_another_consumer_or_connection_is_a_doubt_at_once(server: Server, changed: dict[str, Any]) -> None:
    made = acks(server)
    deliver(server, made, 1)
    vars(server).update(changed)
    with pytest.raises(ReaderResetError):
        await made.upto(1)


async def test_a_missing_right_is_told_after_one_message(server: Server) -> None:
    made = acks(server)
    deliver(server, made, *range(1, 1001))
    server.refused = True
    with pytest.raises(Refused):
        await made.upto(1000)
    assert len(server.sent) == 1


@cases(
    "found, number, left, expected",
    (info(floor=10, delivered=20, pending=10), 10, 0, True),
    (info(floor=9, delivered=20, pending=11), 10, 0, False),
    (info(floor=0, delivered=20, pending=13), 10, 3, True),
    (info(floor=0, delivered=20, pending=14), 10, 3, False),
    (info(floor=0, delivered=10, pending=0), 10, 0, True),
    (info(floor=0, delivered=9, pending=0), 10, 0, False),
)
def test_settled_is_what_leaves_nothing_pending(found: ConsumerInfo, number: int, left: int, expected: bool) -> None:
    assert is_settled(found, number, left) is expected
