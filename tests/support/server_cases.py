"""Streams and their messages: cases of the contract between the simulated nats-server and real ones."""

from functools import partial
from typing import Any

from ingress.recovery.stream_archive import ArchiveState, LogicalWriter
from tests.support.segments import batch_of, message
from tests.support.server_calls import CASES, STREAM, SUBJECTS, Caller, bucket, case, newest_case, ns

# Streams


@case
async def unknown_calls(c: Caller) -> None:
    await c.make()
    await c.api("an unknown call", "STREAM.BLESS.CALLS", {})
    await c.api("an unknown family", "MIRACLES", {})
    await c.publish("a subject of nobody", "nobody.listens")


@case
async def absent_stream(c: Caller) -> None:
    for action in ("INFO", "DELETE", "PURGE", "MSG.GET", "MSG.DELETE"):
        await c.api(action, f"STREAM.{action}.NONE", {"seq": 1} if action.startswith("MSG") else None)
    await c.api("UPDATE", "STREAM.UPDATE.NONE", {"name": "NONE", "subjects": ["none"]})
    await c.api("consumer INFO", "CONSUMER.INFO.NONE.C")
    await c.api("consumer DELETE", "CONSUMER.DELETE.NONE.C")
    await c.api("consumer NAMES", "CONSUMER.NAMES.NONE", {})
    await c.api("consumer LIST", "CONSUMER.LIST.NONE", {})
    config = {"stream_name": "NONE", "config": {"durable_name": "C", "ack_policy": "explicit"}}
    await c.api("consumer CREATE", "CONSUMER.CREATE.NONE.C", config)
    await c.direct("direct", "NONE", {"seq": 1})


@case
async def create_and_describe(c: Caller) -> None:
    await c.make({"max_msgs": 5, "description": "of the contract", "metadata": {"a": "b"}}, step="made")
    await c.make({"max_msgs": 5, "description": "of the contract", "metadata": {"a": "b"}}, step="made again")
    await c.make({"max_msgs": 6}, step="with another configuration")
    await c.api("described", f"STREAM.INFO.{STREAM}")
    await c.fill(7)
    await c.api("filled", f"STREAM.INFO.{STREAM}")
    await c.api("changed", f"STREAM.UPDATE.{STREAM}", {"name": STREAM, "subjects": [SUBJECTS_TWO], "max_msgs": 3})
    await c.api("described then", f"STREAM.INFO.{STREAM}")
    await c.api("deleted", f"STREAM.DELETE.{STREAM}")
    await c.api("deleted again", f"STREAM.DELETE.{STREAM}")


SUBJECTS_TWO = "calls.*"


@case
async def refused_configurations(c: Caller) -> None:
    await c.api("another name", f"STREAM.CREATE.{STREAM}", {"name": "OTHER", "subjects": ["other"]})
    await c.make()
    await c.make({"subjects": ["calls.a"]}, name="SECOND", step="subjects overlap")
    await c.api("changed to another name", f"STREAM.UPDATE.{STREAM}", {"name": "OTHER", "subjects": ["other"]})
    await c.api("changed to no name", f"STREAM.UPDATE.{STREAM}", {})
    await c.api(
        "storage changed", f"STREAM.UPDATE.{STREAM}", {"name": STREAM, "subjects": ["calls.>"], "storage": "memory"}
    )
    await c.api("no JSON", f"STREAM.CREATE.{STREAM}", b"{nothing")


@case
async def names_of_streams(c: Caller) -> None:
    await c.make()
    await c.api("by subject", "STREAM.NAMES", {"subject": "calls.a"})
    await c.api("of nobody", "STREAM.NAMES", {"subject": "nobody.a"})


@case
async def state_of_a_stream(c: Caller) -> None:
    await c.make()
    await c.state("never filled")
    await c.fill(2, "calls.a", b"12345")
    await c.publish("with a header", "calls.b.c", b"", "A: b")
    await c.fill(2)
    await c.api("deleted inside", f"STREAM.MSG.DELETE.{STREAM}", {"seq": 2})
    await c.api("deleted again", f"STREAM.MSG.DELETE.{STREAM}", {"seq": 2})
    await c.api("beyond the end", f"STREAM.MSG.DELETE.{STREAM}", {"seq": 99})
    await c.state("details", {"deleted_details": True, "subjects_filter": ">"})
    await c.state("of one subject", {"subjects_filter": "calls.a"})
    await c.state("of no subject", {"subjects_filter": "calls.none"})
    await c.api("deleted first", f"STREAM.MSG.DELETE.{STREAM}", {"seq": 1})
    await c.state("first gone", {"deleted_details": True})
    await c.api("deleted last", f"STREAM.MSG.DELETE.{STREAM}", {"seq": 5})
    await c.state("last gone", {"deleted_details": True})


@case
async def purge(c: Caller) -> None:
    await c.make()
    await c.fill(6)
    await c.fill(2, "calls.b")
    await c.api("up to 3", f"STREAM.PURGE.{STREAM}", {"seq": 3})
    await c.state("up to 3")
    await c.api("of a subject", f"STREAM.PURGE.{STREAM}", {"filter": "calls.b"})
    await c.state("of a subject")
    await c.api("all but one", f"STREAM.PURGE.{STREAM}", {"keep": 1})
    await c.state("all but one")
    await c.api("seq and keep", f"STREAM.PURGE.{STREAM}", {"keep": 1, "seq": 2})
    await c.api("all", f"STREAM.PURGE.{STREAM}")
    await c.state("all")
    await c.api("beyond the end", f"STREAM.PURGE.{STREAM}", {"seq": 20})
    await c.state("beyond the end")
    await c.publish("then")
    await c.state("then")


@case
async def first_sequence(c: Caller) -> None:
    await c.make({"first_seq": 100}, step="made")
    await c.state("empty")
    await c.publish("first")
    await c.state("one")


@case
async def sealed_against_deletes(c: Caller) -> None:
    await c.make({"deny_delete": True, "deny_purge": True})
    await c.fill(2)
    await c.api("delete", f"STREAM.MSG.DELETE.{STREAM}", {"seq": 1})
    await c.api("purge", f"STREAM.PURGE.{STREAM}")
    await c.state("both are there")


LIMITLESS = dict.fromkeys(["max_bytes", "max_consumers", "max_msg_size", "max_msgs", "max_msgs_per_subject"], -1)
KEPT = {"storage": "file", "retention": "limits", "num_replicas": 1, "compression": "none", "discard": "old"}
RESTORED = {"name": STREAM, "subjects": [SUBJECTS], "duplicate_window": ns(120), **KEPT, **LIMITLESS}


@newest_case
async def restored(c: Caller) -> None:
    """An archive that ends too early, one in two pieces, and the name of an existing stream."""
    state, writer = ArchiveState(3, 100, 4, ns(1_700_000_000), 9, ns(1_700_000_007)), LogicalWriter()
    blocks = {4: None, 5: b"NATS/1.0\r\nA: b\r\n\r\n", 7: None}
    rows = [message(n, b"row %d" % n, subject=b"calls.%d" % (n % 2), headers=block) for n, block in blocks.items()]
    pieces = [
        b"".join([*writer.encode_head(RESTORED, "", state, []), *writer.encode_rows(batch_of(rows[:2]))]),
        b"".join([*writer.encode_rows(batch_of(rows[2:])), *writer.encode_tail()]),
    ]
    asked = {"config": RESTORED, "state": state.to_json(0)}
    for step, sent in {"too early": pieces[:1], "whole": pieces}.items():
        to = (await c.api("", f"STREAM.RESTORE.{STREAM}", asked))["deliver_subject"]
        for number, piece in enumerate([*sent, b"", pieces[0]], 1):
            await c.publish(f"{step}, {number}", to, piece)
        await c.state(step, {"deleted_details": True})
        await c.api(f"{step}, again", f"STREAM.RESTORE.{STREAM}", asked)
        await c.api(f"{step}, a message", f"STREAM.MSG.GET.{STREAM}", {"seq": 5})
        await c.publish(f"{step}, behind it")
        await c.api("", f"STREAM.DELETE.{STREAM}")


# Limits


LIMITS: dict[str, dict[str, Any]] = {
    "max_messages": {"max_msgs": 3},
    "max_messages_refused": {"max_msgs": 3, "discard": "new"},
    "max_bytes": {"max_bytes": 300},
    "max_bytes_refused": {"max_bytes": 300, "discard": "new"},
    "max_bytes_in_memory": {"max_bytes": 250, "storage": "memory"},
    "max_per_subject": {"max_msgs_per_subject": 1},
    "max_per_subject_refused": {
        "max_msgs_per_subject": 1,
        "discard": "new",
        "discard_new_per_subject": True,
        "max_msgs": 50,
    },
    "max_per_subject_with_discard_new": {"max_msgs_per_subject": 1, "discard": "new"},
    "max_message_size": {"max_msg_size": 40},
}


async def limits(config: dict[str, Any], c: Caller) -> None:
    await c.make(config)
    for number, subject in enumerate(["calls.a", "calls.b", "calls.a", "calls.a", "calls.c"], 1):
        await c.publish(f"message {number}", subject, b"x" * 50)
    await c.state("after five", {"subjects_filter": ">", "deleted_details": True})


CASES.update({name: partial(limits, config) for name, config in LIMITS.items()})


@case
async def max_age(c: Caller) -> None:
    await c.make({"max_age": ns(0.2), "duplicate_window": ns(0.1)}, step="made")
    await c.fill(2)
    await c.state("all too old", settled=3.0)  # older servers check once a second
    await c.publish("then")


@case
async def rollups(c: Caller) -> None:
    await c.make({"allow_rollup_hdrs": True})
    await c.fill(3)
    await c.fill(2, "calls.b")
    await c.publish("of the subject", "calls.a", b"", "Nats-Rollup: sub")
    await c.state("of the subject", {"subjects_filter": ">"})
    await c.publish("of all", "calls.a", b"", "Nats-Rollup: all")
    await c.state("of all", {"subjects_filter": ">"})
    await c.publish("of nonsense", "calls.a", b"", "Nats-Rollup: moon")


@case
async def rollups_refused(c: Caller) -> None:
    await c.make()
    await c.fill(2)
    await c.publish("of the subject", "calls.a", b"", "Nats-Rollup: sub")
    await c.state("as before")


# Reading


@case
async def stored_messages(c: Caller) -> None:
    await c.make()
    await c.publish("", "calls.a", b"1", "A: b")
    await c.fill(1, "calls.b", b"2")
    await c.fill(1, "calls.a", b"")
    get = f"STREAM.MSG.GET.{STREAM}"
    for name, request in READS.items():
        await c.api(name, get, request)
    await c.api("nothing asked", get, {})
    await c.api("", f"STREAM.MSG.DELETE.{STREAM}", {"seq": 3})
    await c.api("deleted", get, {"seq": 3})
    await c.api("last behind a delete", get, {"last_by_subj": "calls.a"})


READS: dict[str, dict[str, Any]] = {
    "by sequence": {"seq": 1},
    "with an empty payload": {"seq": 3},
    "beyond the end": {"seq": 4},
    "last of a subject": {"last_by_subj": "calls.a"},
    "last of a pattern": {"last_by_subj": "calls.*"},
    "last of all": {"last_by_subj": ">"},
    "last of no subject": {"last_by_subj": "calls.none"},
    "next of a subject": {"seq": 2, "next_by_subj": "calls.a"},
    "next of a pattern": {"seq": 2, "next_by_subj": ">"},
    "next of a subject from the first": {"next_by_subj": "calls.b"},
    "next of no subject": {"seq": 1, "next_by_subj": "calls.none"},
    "next beyond the end": {"seq": 9, "next_by_subj": ">"},
}


@case
async def direct_reads(c: Caller) -> None:
    await c.make({"allow_direct": True})
    await c.publish("", "calls.a", b"1", "A: b")
    await c.fill(1, "calls.b", b"2")
    await c.fill(1, "calls.a", b"")
    for name, request in READS.items():
        await c.direct(name, STREAM, request)
    await c.direct("by subject in the subject", f"{STREAM}.calls.a")
    await c.direct("nothing asked", STREAM, {})


@case
async def direct_reads_not_allowed(c: Caller) -> None:
    await c.make()
    await c.fill(1)
    await c.direct("by sequence", STREAM, {"seq": 1})


# Buckets, as the product uses them


@case
async def keys_and_values(c: Caller) -> None:
    kv = await bucket(c)
    c.note("create", await kv.create("a.b", b"1"))
    c.note("create again", await kv.create("a.b", b"2"))
    c.note("get", await kv.get("a.b"))
    c.note("get none", await kv.get("none"))
    c.note("update", await kv.update("a.b", b"3", 1))
    c.note("update late", await kv.update("a.b", b"4", 1))
    c.note("put", await kv.put("a.c", b"5"))
    c.note("keys", await kv.keys())
    c.note("keys of a prefix", await kv.keys("a.c"))
    c.note("delete late", await kv.delete("a.b", 1))
    c.note("delete", await kv.delete("a.b", 2))
    c.note("get deleted", await kv.get("a.b"))
    c.note("keys then", await kv.keys())
    c.note("update deleted", await kv.update("a.b", b"6", 2))
    c.note("create deleted", await kv.create("a.b", b"7"))
    c.note("get then", await kv.get("a.b"))
    await c.state("one message a key", {"subjects_filter": ">"}, name="KV_calls")
    await c.api("delete is denied", "STREAM.MSG.DELETE.KV_calls", {"seq": 5})
    await c.publish("purged", "$KV.calls.a.c", b"", "KV-Operation: PURGE", "Nats-Rollup: sub")
    c.note("get purged", await kv.get("a.c"))


@case
async def listening_to_a_bucket(c: Caller) -> None:
    kv, seen = await bucket(c), []
    subscription = await kv.subscribe("a.*", lambda key, value: seen.append((key, value)))
    await kv.put("a.b", b"1")
    await kv.put("b.b", b"2")
    await kv.delete("a.b")
    await c.gathered("listened", seen)
    await subscription.unsubscribe()


@case
async def a_full_bucket(c: Caller) -> None:
    await c.make({"max_bytes": 200, "max_msgs_per_subject": 1, "discard": "new"})
    await c.publish("fits", "calls.a", b"x" * 100)
    await c.publish("replaces", "calls.a", b"x" * 90)
    await c.publish("does not fit", "calls.b", b"x" * 90)
    await c.publish("is too large for what it replaces", "calls.a", b"x" * 180)
    await c.state("one")
