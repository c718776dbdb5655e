"""Consumers of every retention: cases of the contract between the simulated nats-server and real ones."""

import asyncio
from typing import Any

from tests.support.server_calls import LONG, SHORT, STREAM, Caller, case, ns

# Consumers


@case
async def consumers(c: Caller) -> None:
    await c.make()
    await c.fill(3)
    await c.consumer("made", "C", {"filter_subject": "calls.a"})
    await c.consumer("made again", "C", {"filter_subject": "calls.a"})
    await c.consumer("create what is there", "C", {"filter_subject": "calls.a"}, action="create")
    await c.consumer("create another config", "C", {"filter_subject": "calls.b"}, action="create")
    await c.consumer("update what is not there", "D", action="update")
    await c.consumer("policy changed", "C", {"filter_subject": "calls.a", "deliver_policy": "new"})
    await c.consumer("made of two subjects", "E", {"filter_subjects": ["calls.b", "calls.c"]})
    await c.consumer("of overlapping subjects", "F", {"filter_subjects": ["calls.>", "calls.c"]})
    await c.consumer("of one and of two", "F", {"filter_subject": "calls.a", "filter_subjects": ["calls.b"]})
    await c.consumer("of a foreign subject", "F", {"filter_subject": "other.a"})
    await c.consumer_state("info", "C")
    await c.consumer_state("info of nobody", "X")
    await c.api("names", f"CONSUMER.NAMES.{STREAM}", {})
    await c.api("list", f"CONSUMER.LIST.{STREAM}", {})
    await c.api("deleted", f"CONSUMER.DELETE.{STREAM}.C")
    await c.api("deleted again", f"CONSUMER.DELETE.{STREAM}.C")
    await c.pull("a pull of nobody", "C")


@case
async def starts(c: Caller) -> None:
    await c.make()
    await c.fill(3)
    await c.fill(2, "calls.b")
    await c.api("", f"STREAM.MSG.DELETE.{STREAM}", {"seq": 2})
    for name, config in STARTS.items():
        await c.consumer(f"{name}, made", name.replace(" ", "-"), config)
        await c.pull(f"{name}, pulled", name.replace(" ", "-"), {"batch": 10, "no_wait": True})
        await c.consumer_state(f"{name}, then", name.replace(" ", "-"))
    await c.consumer("a start without its sequence", "Y", {"deliver_policy": "by_start_sequence"})
    await c.consumer("a sequence without its policy", "Z", {"opt_start_seq": 3})


STARTS: dict[str, dict[str, Any]] = {
    "all": {},
    "none acknowledged": {"ack_policy": "none"},
    "last": {"deliver_policy": "last"},
    "last of a subject": {"deliver_policy": "last", "filter_subject": "calls.a"},
    "new": {"deliver_policy": "new"},
    "at a sequence": {"deliver_policy": "by_start_sequence", "opt_start_seq": 3},
    "at a deleted one": {"deliver_policy": "by_start_sequence", "opt_start_seq": 2},
    "beyond the end": {"deliver_policy": "by_start_sequence", "opt_start_seq": 9},
    "of two subjects": {"filter_subjects": ["calls.b", "calls.c"]},
    "headers only": {"headers_only": True},
}


@case
async def new_behind_a_start(c: Caller) -> None:
    await c.make()
    await c.fill(2)
    await c.consumer("new", "N", {"deliver_policy": "new"})
    await c.consumer("beyond", "B", {"deliver_policy": "by_start_sequence", "opt_start_seq": 5})
    await c.fill(2)
    await c.counted("N", 2)
    await c.pull("new", "N", 2)
    await c.pull("beyond, not yet", "B", {"batch": 5, "no_wait": True})
    await c.fill(2)
    await c.counted("B", 2)
    await c.pull("beyond", "B", 2)
    await c.consumer_state("beyond", "B")


# These give a server a second to send the messages at hand: it sends them soon, and the pull then waits.
LESS_THERE = {"batch": 5, "expires": ns(1)}
BEATING = {"batch": 5, "expires": ns(1.5), "idle_heartbeat": ns(0.3)}


@case
async def pulls(c: Caller) -> None:
    await c.make()
    await c.consumer("", "C")
    await c.pull("no wait, nothing there", "C", {"batch": 2, "no_wait": True})
    await c.pull("expires, nothing there", "C", {"batch": 2, "expires": ns(SHORT)})
    await c.pull("no wait and expires", "C", {"batch": 2, "no_wait": True, "expires": ns(SHORT)})
    await c.pull("heartbeats", "C", BEATING)
    await c.pull("heartbeat too long", "C", {"batch": 1, "expires": ns(0.2), "idle_heartbeat": ns(0.2)})
    await c.pull("heartbeat without an end", "C", {"batch": 1, "idle_heartbeat": ns(0.1)}, wait=0.15)
    await c.fill(5, payload=b"x" * 100)
    await c.counted("C", 5)
    await c.pull("a batch", "C", 2)
    await c.pull("more than there is", "C", LESS_THERE)
    await c.consumer_state("all delivered", "C")
    await c.pull("nothing asked", "C", {}, wait=0.1)


@case
async def beats_of_a_filter(c: Caller) -> None:
    await c.make()
    await c.fill(1)
    await c.fill(2, "calls.b")
    for name, config in FILTERED.items():
        await c.consumer(f"{name}, made", name, config)
    pulls = [c.begin_pull(name, BEATING) for name in FILTERED]
    found = [await c.end_pull(f"{name}, pulled", each) for name, each in zip(FILTERED, pulls, strict=True)]
    await c.fill(2, "calls.b")
    for name, delivered in zip(FILTERED, found, strict=True):
        await c.consumer_state(f"{name}, then", name)
        for each in delivered:
            await c.acknowledge(each)
        await c.consumer_state(f"{name}, acknowledged", name)


FILTERED: dict[str, dict[str, Any]] = {
    "all": {"filter_subject": "calls.a"},
    "last": {"filter_subject": "calls.a", "deliver_policy": "last"},
    "new": {"filter_subject": "calls.a", "deliver_policy": "new"},
    "none": {"filter_subject": "calls.a", "ack_policy": "none"},
    "absent": {"filter_subject": "calls.c"},
}


@case
async def pulls_by_size(c: Caller) -> None:
    await c.make()
    await c.fill(5, payload=b"x" * 100)
    await c.consumer("", "C")
    await c.pull("room for none", "C", {"batch": 5, "max_bytes": 50, "expires": ns(LONG)})
    await c.pull("room for two", "C", {"batch": 5, "max_bytes": 400, "expires": ns(LONG)})
    await c.pull("room for all", "C", {"batch": 2, "max_bytes": 4000, "expires": ns(LONG)})


@case
async def limits_of_pulls(c: Caller) -> None:
    await c.make()
    await c.fill(3)
    await c.consumer("made", "C", {"max_batch": 2, "max_expires": ns(1), "max_waiting": 1})
    await c.pull("too many", "C", {"batch": 3, "expires": ns(SHORT)})
    await c.pull("too long", "C", {"batch": 1, "expires": ns(2)})
    await c.pull("as allowed", "C", {"batch": 2, "expires": ns(1)})


@case
async def pending_limit(c: Caller) -> None:
    await c.make()
    await c.fill(3)
    await c.consumer("", "C", {"max_ack_pending": 2})
    found = await c.pull("until the limit", "C", LESS_THERE)
    await c.pull("at the limit", "C", {"batch": 3, "no_wait": True, "expires": ns(SHORT)})
    await c.acknowledge(found[0])
    await c.pull("after one", "C", LESS_THERE)


@case
async def acknowledgements(c: Caller) -> None:
    await c.make()
    await c.fill(5)
    await c.consumer("", "C")
    found = await c.pull("pulled", "C", 4)
    await c.acknowledge(found[1], step="the second")
    await c.consumer_state("the second", "C")
    await c.acknowledge(found[1], step="the second again")
    await c.acknowledge(found[0], step="the first")
    await c.consumer_state("the first", "C")
    await c.acknowledge(found[2], b"+TERM", step="the third, ended")
    await c.consumer_state("the third", "C")
    await c.acknowledge(found[3], b"", step="the fourth, empty")
    await c.consumer_state("the fourth", "C")
    await c.state("limits keep them")


@case
async def acknowledge_all(c: Caller) -> None:
    await c.make()
    await c.fill(5)
    await c.consumer("made", "C", {"ack_policy": "all"})
    found = await c.pull("pulled", "C", 4)
    await c.acknowledge(found[2])
    await c.consumer_state("up to the third", "C")
    await c.acknowledge(found[0])
    await c.consumer_state("an earlier one", "C")


@case
async def delivered_again_on_request(c: Caller) -> None:
    await c.make()
    await c.fill(3)
    await c.consumer("", "C")
    found = await c.pull("pulled", "C", 2)
    await c.acknowledge(found[0], b"-NAK", step="the first again")
    await c.consumer_state("waiting for it", "C")
    again = await c.pull("again", "C", 2)
    await c.consumer_state("then", "C")
    await c.acknowledge(again[0])
    await c.acknowledge(found[1])
    await c.consumer_state("two acknowledged", "C")


@case
async def delivered_again_after_a_wait(c: Caller) -> None:
    await c.make()
    await c.fill(2)
    await c.consumer("", "C", {"ack_wait": ns(0.4)})
    await c.acknowledge((await c.pull("pulled", "C", 2))[1])
    again = await c.pull("the first again, once its time has come", "C", 1)
    await c.consumer_state("then", "C")
    await c.acknowledge(again[0])
    await c.fill(1)
    await c.acknowledge((await c.pull("the next", "C", 1))[0])
    await c.consumer_state("all", "C")


@case
async def delivered_too_often(c: Caller) -> None:
    await c.make()
    await c.fill(2)
    await c.consumer("", "C", {"ack_wait": ns(0.2), "max_deliver": 1})
    await c.pull("pulled", "C", 1)
    await c.pause(0.5)
    await c.pull("the next only", "C", {"batch": 2, "no_wait": True})


@case
async def in_progress(c: Caller) -> None:
    """Its ack wait restarts if the word came before its end; else the message is delivered again."""
    await c.make()
    await c.fill(1)
    now, took = asyncio.get_running_loop().time, IN_PROGRESS
    while took >= IN_PROGRESS:
        await c.api("", f"CONSUMER.DELETE.{STREAM}.C")
        await c.consumer("", "C", {"ack_wait": ns(IN_PROGRESS)})
        began = now()
        (delivery,), _ = await c.begin_pull("C")[0]
        await c.pause(IN_PROGRESS / 2)
        sent = now()
        await c.acknowledge(delivery, b"+WPI")
        took = now() - began
        (again,), _ = await c.begin_pull("C")[0]
    c.note("not before its time", now() - sent > IN_PROGRESS * 0.9)
    c.note("again", again.shown)
    await c.consumer_state("still pending", "C")


IN_PROGRESS = 1.0  # seconds until a message is delivered again


async def _delete_while_pulled(c: Caller, call: str) -> None:
    await c.make()
    await c.consumer("", "C")
    pull = c.begin_pull("C")
    await c.consumer_state("waits", "C")
    await c.api("deleted", call)
    await c.end_pull("deleted meanwhile", pull)


@case
async def deleted_while_pulled(c: Caller) -> None:
    await _delete_while_pulled(c, f"CONSUMER.DELETE.{STREAM}.C")


@case
async def stream_deleted_while_pulled(c: Caller) -> None:
    await _delete_while_pulled(c, f"STREAM.DELETE.{STREAM}")


@case
async def a_message_for_an_open_pull(c: Caller) -> None:
    await c.make()
    await c.consumer("", "C", {"filter_subject": "calls.a"})
    pull = c.begin_pull("C")
    await c.consumer_state("waits", "C")
    await c.fill(1, "calls.b")
    await c.fill(1, "calls.a")
    await c.end_pull("given as it comes", pull)
    await c.consumer_state("then", "C")


@case
async def consumer_over_a_purge(c: Caller) -> None:
    await c.make()
    await c.fill(6)
    await c.consumer("", "C")
    await c.acknowledge((await c.pull("two", "C", 2))[0])
    await c.api("", f"STREAM.PURGE.{STREAM}", {"seq": 5})
    await c.consumer_state("purged beyond it", "C")
    await c.pull("then", "C", 1)
    await c.api("", f"STREAM.PURGE.{STREAM}")
    await c.consumer_state("purged all", "C")


# Interest and work queues


@case
async def work_queue(c: Caller) -> None:
    await c.make({"retention": "workqueue"})
    await c.fill(4)
    await c.consumer("made", "C")
    await c.consumer("a second", "D")
    found = await c.pull("pulled", "C", 3)
    await c.acknowledge(found[1])
    await c.state("the second left", {"deleted_details": True})
    await c.acknowledge(found[0], b"+TERM")
    await c.state("the first left")
    await c.api("", f"CONSUMER.DELETE.{STREAM}.C")
    await c.state("what nobody acknowledged stays")


@case
async def consumers_of_a_work_queue(c: Caller) -> None:
    await c.make({"retention": "workqueue"})
    await c.consumer("acknowledges none", "C", {"ack_policy": "none"})
    await c.consumer("acknowledges all", "C", {"ack_policy": "all"})
    await c.consumer("new only", "C", {"deliver_policy": "new"})
    await c.consumer("last only", "C", {"deliver_policy": "last"})
    await c.consumer("of a", "A", {"filter_subject": "calls.a"})
    await c.consumer("of a again", "A2", {"filter_subject": "calls.a"})
    await c.consumer("of b", "B", {"filter_subject": "calls.b"})
    await c.consumer("of all", "C")
    await c.consumer("of a pattern", "P", {"filter_subject": "calls.*"})


@case
async def interest(c: Caller) -> None:
    await c.make({"retention": "interest"})
    await c.publish("nobody wants it")
    await c.state("nobody wants it")
    await c.consumer("made", "C", {"filter_subject": "calls.a"})
    await c.publish("wanted")
    await c.publish("not wanted", "calls.b")
    await c.publish("wanted too")
    await c.state("what is wanted", {"deleted_details": True})
    await c.consumer("a second", "D", {"filter_subject": "calls.a"})
    await c.publish("of both")
    await c.counted("C", 3)
    found = await c.pull("of the first", "C", 3)
    for each in found:
        await c.acknowledge(each)
    await c.state("of the second")
    await c.counted("D", 3)
    for each in await c.pull("of the second", "D", 3):
        await c.acknowledge(each)
    await c.state("all left")
    await c.publish("one more")
    await c.api("", f"CONSUMER.DELETE.{STREAM}.C")
    await c.state("the second wants it")
    await c.api("", f"CONSUMER.DELETE.{STREAM}.D")
    await c.state("nobody is left")


@case
async def interest_of_the_product(c: Caller) -> None:
    await c.make({"retention": "interest"})
    start = {"deliver_policy": "by_start_sequence", "ack_policy": "all", "max_ack_pending": -1}
    await c.consumer("made", "C", {**start, "opt_start_seq": 1})
    await c.fill(5)
    await c.counted("C", 5)
    await c.acknowledge((await c.pull("pulled", "C", 4))[2])
    await c.state("three left")
    await c.consumer("its successor", "D", {**start, "opt_start_seq": 4})
    await c.api("", f"CONSUMER.DELETE.{STREAM}.C")
    await c.state("the successor wants two")
    await c.pull("of the successor", "D", 2)
    await c.consumer("acknowledges none", "N", {"ack_policy": "none"})
