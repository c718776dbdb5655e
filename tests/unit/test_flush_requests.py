"""What is asked of whoever freezes: partitions of feeds, by several commands at the same time."""

from __future__ import annotations

from common.chain import Chain
from egress.flush import FlushAnswer, FlushRequests

FEED = [Chain("us-east", "NODES", partition=number) for number in range(3)]
COUNTS = {"NODES": 3}
NOTHING = FlushRequests({})


def asked(found: FlushRequests) -> list[int]:
    return [chain.partition for chain in FEED if found.feeds["NODES"].asks(chain.partition)]


def stored(found: FlushRequests, *partitions: int) -> FlushRequests:
    number = found.feeds["NODES"].id
    return found.answered({FEED[each]: (number, FlushAnswer(0, 9, is_stored=True)) for each in partitions})


def test_a_partition_is_asked_alone_and_a_feed_whole():
    assert asked(NOTHING.asking(FEED[1:2], COUNTS, "a", 0)) == [1]
    whole = NOTHING.asking(FEED, COUNTS, "a", 0)
    assert (asked(whole), whole.feeds["NODES"].only) == ([0, 1, 2], ())
    assert asked(stored(whole, 0, 2)) == [1]


def test_what_another_command_waits_for_stays_asked():
    first = NOTHING.asking(FEED[:1], COUNTS, "a", 0)
    assert asked(first.asking(FEED[1:2], COUNTS, "b", 1)) == [0, 1]
    assert asked(stored(NOTHING.asking(FEED, COUNTS, "a", 0), 0).asking(FEED[:1], COUNTS, "b", 1)) == [0, 1, 2]


def test_what_was_answered_to_another_command_stays_until_it_is_asked_again():
    done = stored(NOTHING.asking(FEED[:1], COUNTS, "a", 0), 0)
    again = done.asking(FEED[1:2], COUNTS, "b", 1)
    assert asked(again) == [1]
    assert again.feeds["NODES"].answers.keys() == {0}
    assert again.asking(FEED[:1], COUNTS, "c", 2).feeds["NODES"].answers == {}
