"""Expectations, batches and times to live: cases of the contract between the simulated nats-server and real ones."""

from tests.support.server_calls import STREAM, Caller, case, ns


@case
async def message_ids(c: Caller) -> None:
    await c.make()
    await c.publish("first", "calls.a", b"1", "Nats-Msg-Id: one")
    await c.publish("again", "calls.a", b"2", "Nats-Msg-Id: one")
    await c.publish("on another subject", "calls.b", b"2", "Nats-Msg-Id: one")
    await c.publish("another", "calls.a", b"2", "Nats-Msg-Id: two")
    await c.publish(
        "duplicate of a wrong expectation", "calls.a", b"", "Nats-Msg-Id: two", "Nats-Expected-Last-Sequence: 9"
    )
    await c.publish("wrong expectation", "calls.a", b"", "Nats-Msg-Id: three", "Nats-Expected-Last-Sequence: 9")
    await c.publish("the same id, right", "calls.a", b"", "Nats-Msg-Id: three", "Nats-Expected-Last-Sequence: 2")
    await c.api("", f"STREAM.PURGE.{STREAM}")
    await c.publish("after a purge", "calls.a", b"1", "Nats-Msg-Id: one")


@case
async def forgotten_ids(c: Caller) -> None:
    await c.make({"duplicate_window": ns(0.1)})
    await c.publish("first", "calls.a", b"1", "Nats-Msg-Id: one")
    await c.pause(1.0)
    await c.publish("behind the window", "calls.a", b"1", "Nats-Msg-Id: one")


@case
async def expectations(c: Caller) -> None:
    await c.make()
    await c.publish("of an empty stream", "calls.a", b"", "Nats-Expected-Last-Sequence: 0")
    await c.publish("right", "calls.a", b"", "Nats-Expected-Last-Sequence: 1", "Nats-Expected-Stream: CALLS")
    await c.publish("wrong stream", "calls.a", b"", "Nats-Expected-Stream: OTHER")
    await c.publish("too low", "calls.a", b"", "Nats-Expected-Last-Sequence: 1")
    await c.publish("too high", "calls.a", b"", "Nats-Expected-Last-Sequence: 7")
    await c.publish("subject, right", "calls.a", b"", "Nats-Expected-Last-Subject-Sequence: 2")
    await c.publish("subject, wrong", "calls.a", b"", "Nats-Expected-Last-Subject-Sequence: 2")
    await c.publish("subject, new", "calls.b", b"", "Nats-Expected-Last-Subject-Sequence: 0")
    await c.publish("subject, new no more", "calls.b", b"", "Nats-Expected-Last-Subject-Sequence: 0")
    await c.publish("subject, unknown", "calls.c", b"", "Nats-Expected-Last-Subject-Sequence: 4")
    await c.publish("id, none yet", "calls.a", b"", "Nats-Expected-Last-Msg-Id: a")
    await c.publish("with an id", "calls.a", b"", "Nats-Msg-Id: a")
    await c.publish("id, right", "calls.a", b"", "Nats-Expected-Last-Msg-Id: a", "Nats-Msg-Id: b")
    await c.publish("id, wrong", "calls.a", b"", "Nats-Expected-Last-Msg-Id: a")
    two = "Nats-Expected-Last-Sequence: 6", "Nats-Expected-Last-Subject-Sequence: 9"
    await c.publish("two at once, second wrong", "calls.a", b"", *two)
    await c.state("what is stored")


@case
async def expectation_behind_deletes(c: Caller) -> None:
    await c.make()
    await c.fill(3)
    await c.api("", f"STREAM.MSG.DELETE.{STREAM}", {"seq": 3})
    await c.publish("stream", "calls.a", b"", "Nats-Expected-Last-Sequence: 2")
    await c.publish("subject, deleted", "calls.a", b"", "Nats-Expected-Last-Subject-Sequence: 3")
    await c.publish("subject, held", "calls.a", b"", "Nats-Expected-Last-Subject-Sequence: 2")
    await c.api("", f"STREAM.PURGE.{STREAM}")
    await c.publish("purged, subject", "calls.a", b"", "Nats-Expected-Last-Subject-Sequence: 0")
    await c.publish("purged, stream", "calls.a", b"", "Nats-Expected-Last-Sequence: 5")


# Batches


@case
async def atomic_batch(c: Caller) -> None:
    await c.make({"allow_atomic": True}, step="made")
    await batch(c, "A", 3)
    await c.state("stored")
    await c.publish("the next", "calls.a")


@case
async def atomic_batch_with_expectation(c: Caller) -> None:
    await c.make({"allow_atomic": True})
    await c.fill(2)
    await batch(c, "right", 2, "Nats-Expected-Last-Sequence: 2")
    await batch(c, "wrong", 2, "Nats-Expected-Last-Sequence: 2")
    await c.state("one batch")


@case
async def atomic_batch_with_a_gap(c: Caller) -> None:
    await c.make({"allow_atomic": True})
    await part(c, "first", "G", 1)
    await part(c, "gap", "G", 3)
    await part(c, "behind the gap", "G", 4, "Nats-Batch-Commit: 1")
    await part(c, "begins in the middle", "H", 2)
    await part(c, "commits alone", "I", 1, "Nats-Batch-Commit: 1")
    await c.publish("no number", "calls.a", b"x", "Nats-Batch-Id: J")
    await c.state("only one")


@case
async def atomic_batch_not_allowed(c: Caller) -> None:
    await c.make()
    await part(c, "first", "N", 1)
    await part(c, "commit", "N", 2, "Nats-Batch-Commit: 1")


@case
async def atomic_batch_beyond_limits(c: Caller) -> None:
    await c.make({"allow_atomic": True, "max_msgs": 2, "discard": "new"})
    await batch(c, "three for two", 3)
    await c.state("nothing stored")


async def batch(c: Caller, name: str, size: int, *lines: str) -> None:
    for number in range(1, size + 1):
        more = [*(lines if number == 1 else []), *(["Nats-Batch-Commit: 1"] if number == size else [])]
        await part(c, f"{name} {number}", name, number, *more)


async def part(c: Caller, step: str, name: str, number: int, *lines: str) -> None:
    await c.publish(step, "calls.a", b"x", f"Nats-Batch-Id: {name}", f"Nats-Batch-Sequence: {number}", *lines)


@case
async def fast_batches(c: Caller) -> None:
    await c.make({"allow_batched": True}, step="made")
    await c.fast("whole", [1, 2, 3], last=3)
    await c.fast("gap", [1, 3, 4], last=4)
    await c.fast("middle", [2, 3], last=3)
    await c.fast("wrong", [1, 2], "Nats-Expected-Last-Sequence: 0", last=2)
    await c.state("stored")


@case
async def fast_batches_not_allowed(c: Caller) -> None:
    await c.make()
    await c.fast("refused", [1, 2], last=2)
    await c.state("stored")


# Time to live of a message


@case
async def time_to_live(c: Caller) -> None:
    await c.make({"allow_msg_ttl": True}, step="made")
    await c.publish("seconds", "calls.a", b"x", "Nats-TTL: 600")
    await c.publish("a duration", "calls.a", b"x", "Nats-TTL: 500s")
    await c.publish("never", "calls.a", b"x", "Nats-TTL: never")
    await c.publish("too short", "calls.a", b"x", "Nats-TTL: 10ms")
    await c.publish("nonsense", "calls.a", b"x", "Nats-TTL: soon")
    await c.state("stored")
    await c.publish("a second", "calls.a", b"x", "Nats-TTL: 1")
    await c.state("as before, but for the last sequence", settled=3.0)


@case
async def time_to_live_not_allowed(c: Caller) -> None:
    await c.make()
    await c.publish("seconds", "calls.a", b"x", "Nats-TTL: 1")
    await c.state("as it is")
