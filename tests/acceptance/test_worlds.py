"""Ordinary worlds: without a fault, everything arrives as it was stored.

Numbers O1 to O12 are those of the project's list of worlds. Tested elsewhere: O1 (a beginning that moves) by
`tests/integration/test_egress_feeds.py`, O3 (one message per subject) by `test_egress_histories.py`, O4 (idle or dead)
by `test_signs_of_life.py`, O6 by `test_many_feeds.py`, O12 (typing) by `test_gap_command.py`.
"""

import base64
import json
import secrets
from typing import Any

import pytest

from common.nats.api import create_stream, stream_info
from common.nats.client import FloeClient
from common.open import load_settings, open_chains
from infra.local.nats import NatsServer
from infra.publish import AckedPublisher, publish_awkward
from tests.scenarios.judge import judged
from tests.scenarios.world import World
from tests.support.basics import SharedS3, seeded, soon
from tests.support.commands import floe
from tests.support.ingress import client_of

pytestmark = pytest.mark.servers

SITE = "alpha"
SEGMENT = {"max_age": "1s", "max_messages": 200}


async def put(client: FloeClient, *messages: tuple[str, bytes, bytes | None]) -> int:
    """Publish the messages, and return the number that the server stored."""
    async with AckedPublisher(client, window=256) as publisher:
        for subject, payload, headers in messages:
            await publisher.publish(subject.encode(), payload, headers)
        return (await publisher.wait_for_acks()).stored


def headers(*lines: str) -> bytes:
    return ("NATS/1.0\r\n" + "".join(f"{line}\r\n" for line in lines) + "\r\n").encode()


# O2, O7, O8


async def kv_bucket(client: FloeClient, name: str, history: int) -> str:
    """Make a bucket as clients do: many revisions of few keys, deletes and purges among them."""
    stream = f"KV_{name}"
    config = {"subjects": [f"$KV.{name}.>"], "max_msgs_per_subject": history, "discard": "new"}
    flags = {"allow_rollup_hdrs": True, "deny_delete": True, "allow_direct": True}
    await create_stream(client, {"name": stream, "storage": "file", **config, **flags})
    purge = headers("KV-Operation: PURGE", "Nats-Rollup: sub")
    messages = [(f"$KV.{name}.k{n % 20}", b"v%d" % n, None) for n in range(200)]
    messages += [(f"$KV.{name}.k{n}", b"", headers("KV-Operation: DEL")) for n in range(3)]
    messages += [(f"$KV.{name}.k{n}", b"", purge) for n in range(3, 6)]
    assert await put(client, *messages) == len(messages)
    return stream


async def object_store(client: FloeClient, name: str) -> str:
    """Make an object-store bucket: chunks, a description that rolls up, one object written twice."""
    stream = f"OBJ_{name}"
    subjects = [f"$O.{name}.C.>", f"$O.{name}.M.>"]
    flags = {"allow_rollup_hdrs": True, "allow_direct": True, "discard": "new"}
    await create_stream(client, {"name": stream, "storage": "file", "subjects": subjects, **flags})
    for key in ("one", "two", "one"):
        nuid = secrets.token_hex(8)
        chunks = [(f"$O.{name}.C.{nuid}", secrets.token_bytes(10_000), None) for _ in range(5)]
        meta = json.dumps({"name": key, "nuid": nuid, "chunks": 5}).encode()
        subject = f"$O.{name}.M.{base64.urlsafe_b64encode(key.encode()).decode()}"
        await put(client, *chunks, (subject, meta, headers("Nats-Rollup: sub")))
    return stream


async def special_streams(client: FloeClient) -> list[str]:
    """Make one stream for each setting that changes the stored messages, each with messages that use it."""
    kinds: dict[str, dict[str, Any]] = {
        "DISCARD_NEW": {"discard": "new", "max_msgs": 150},
        "REPUBLISH": {"republish": {"src": ">", "dest": "again.>"}},
        "TRANSFORMED": {"subject_transform": {"src": "TRANSFORMED.>", "dest": "TRANSFORMED.x.>"}},
        "WITH_TTL": {"allow_msg_ttl": True, "subject_delete_marker_ttl": 3600 * 10**9},
        "SCHEDULED": {"allow_msg_ttl": True, "allow_msg_schedules": True},
        "ROLLED_UP": {"allow_rollup_hdrs": True},
        "COMPRESSED": {"compression": "s2"},
        "SEALED": {},
    }
    rng = seeded()
    for name, config in kinds.items():
        given = {"name": name, "subjects": [f"{name}.>"], "storage": "file", "duplicate_window": 10**9}
        await create_stream(client, {**given, **config})
        await publish_awkward(client, name, name, rng, 120, max_message_bytes=20_000)
    await create_stream(
        client, {"name": "COUNTED", "subjects": ["COUNTED.>"], "storage": "file", "allow_msg_counter": True}
    )
    counts = [(f"COUNTED.c{n % 3}", b"", headers(f"Nats-Incr: {n}")) for n in range(1, 60)]
    assert await put(client, *counts) == len(counts)
    await create_stream(client, {"name": "MIRROR", "storage": "file", "mirror": {"name": "REPUBLISH"}})
    sources = [{"name": "REPUBLISH"}, {"name": "COMPRESSED"}]
    await create_stream(client, {"name": "SOURCED", "storage": "file", "sources": sources})
    await client.api("STREAM.UPDATE.SEALED", {**(await stream_info(client, "SEALED")).config, "sealed": True})
    return [*kinds, "COUNTED", "MIRROR", "SOURCED"]


async def named_streams(client: FloeClient) -> list[str]:
    """Make streams with names that look alike, are odd or are long, and with odd and long subjects."""
    names = ["orders", "ORDERS", "12345", "x" * 200, "ü%#?:=", "a-_b"]
    for number, name in enumerate(names):
        root = f"names{number}"
        await create_stream(client, {"name": name, "subjects": [f"{root}.>"], "storage": "file"})
        deep = ".".join(["t"] * 200)
        subjects = [f"{root}.plain", f"{root}.ü.%23?", f"{root}.{deep}", f"{root}.{'w' * 3000}"]
        messages = [(subject, b"%d" % n, None) for n, subject in enumerate(subjects * 5)]
        assert await put(client, *messages) == len(messages)
    return names


async def test_streams_of_every_ordinary_kind_are_archived_and_carried_as_they_are_through_restarts(
    s3: SharedS3,
) -> None:
    with World(s3.store(), SITE, segment=SEGMENT) as world:
        url = world.sites[SITE].url
        async with client_of(url) as client:
            feeds = [await kv_bucket(client, f"h{history}", history) for history in (1, 5, 64)]
            feeds += [await object_store(client, "files"), *await special_streams(client)]
            feeds += await named_streams(client)
            await soon(lambda: has_all(client, "MIRROR", "REPUBLISH"))
            await soon(lambda: has_all(client, "SOURCED", "REPUBLISH", "COMPRESSED"))
        site = world.site_config(SITE, *({"stream": feed} for feed in feeds))
        centre = world.central_config(feeds=feeds)
        egress, ingress = world.egress(site), world.ingress(centre)
        await judged(world, SITE, site, feeds)
        assert (egress.drain(), ingress.drain()) == (0, 0)
        async with client_of(url) as client:  # a restart, and the messages published meanwhile
            more = [(f"$KV.h5.k{n % 7}", b"again %d" % n, None) for n in range(40)]
            more += [(f"names{n}.plain", b"again", None) for n in range(5)]
            await put(client, *more)
        egress.start()
        ingress.start()
        await judged(world, SITE, site, feeds, gone=True)
        drill = await floe("drill", "-c", str(centre), f"{SITE}/KV_h5")
        assert drill.code == 0, drill


async def has_all(client: FloeClient, copy: str, *origins: str) -> bool:
    held, *there = [(await stream_info(client, name)).messages for name in (copy, *origins)]
    return held == sum(there)


# O9, O10


async def test_a_site_that_is_installed_again_and_a_server_that_is_renamed_and_moved_go_on(s3: SharedS3) -> None:
    with World(s3.store(), SITE, segment=SEGMENT) as world:
        old = world.sites[SITE]
        async with client_of(old.url) as client:
            await create_stream(client, {"name": "NODES", "subjects": ["nodes.>"], "storage": "file"})
            await put(client, *((f"nodes.{n}", b"before", None) for n in range(300)))
            site, centre = world.site_config(SITE), world.central_config()
            egress = world.egress(site)
            world.ingress(centre)
            await judged(world, SITE, site, ["NODES"])
            assert egress.drain() == 0
            for bucket in ("FLOE_STATE", "FLOE_LEASES"):  # another disk, another host, the state gone
                await client.api(f"STREAM.DELETE.KV_{bucket}", {})
            await put(client, *((f"nodes.{n}", b"after", None) for n in range(300)))
        egress = world.egress(site, "egress-reinstalled", TMPDIR=str(world.folder), HOSTNAME="another")
        await judged(world, SITE, site, ["NODES"])
        assert egress.drain() == 0
        old.stop()
        world.sites[SITE] = new = NatsServer(old.folder, name="renamed")
        new.start()
        async with client_of(new.url) as client:
            await put(client, *((f"nodes.{n}", b"moved", None) for n in range(300)))
        world.egress(world.site_config(SITE), "egress-moved")
        await judged(world, SITE, site, ["NODES"])
        assert [chain.incarnation for chain in open_chains(load_settings(str(site))).chains(SITE, "NODES")] == [0]
