"""Each role with the rights on the bucket that docs/operations.md names, and no others.

A proxy in front of the store enforces them by operation and key, because what SeaweedFS knows is coarser.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from subprocess import CompletedProcess
from urllib.parse import parse_qs, urlsplit

import pyarrow.parquet as pq
import pytest
import yaml

from common.chain import Chain
from common.open import load_settings, open_chains, open_store
from common.segments.columns import SCHEMA
from common.segments.keys import Layout
from common.segments.segment import SegmentRef
from common.segments.store import SegmentStore
from infra.local.nats import NatsServer
from tests.scenarios.load import client_of, make_stream, publish
from tests.scenarios.processes import run_floe
from tests.scenarios.world import TARGET, World
from tests.support.basics import SharedS3, soon
from tests.support.ingress import count_in
from tests.support.proxies import Answer, Exchange, FaultProxy, refuse

pytestmark = pytest.mark.servers

CHAIN = Chain("alpha", "NODES")
OWN = ("site=alpha/", "_floe/site=alpha/", "_floe/tails/", "_floe/alive/alpha/")
WHOLE = ("",)
READING = {"Get": WHOLE, "List": WHOLE}

# What stands in the table of docs/operations.md, as regular expressions of keys below the prefix.
RIGHTS: dict[str, dict[str, tuple[str, ...]]] = {
    "egress": {"Get": OWN, "List": OWN, "Put": OWN},
    "ingress": {**READING, "Put": (f"_floe/ingress/{TARGET}/",)},
    "compaction": {
        **READING,
        "Put": ("site=", "_floe/tombstones/", "_floe/site=[^/]*/feed=[^/]*/probe/"),
        "Delete": ("site=", "_floe/tombstones/", "_floe/site=.*/state/", "_floe/site=[^/]*/feed=[^/]*/probe/"),
    },
    "reader": READING,
    "gap": {**READING, "Put": ("_floe/site=.*/gaps/",)},
    "quarantine": {**READING, "Put": ("_floe/quarantine/",), "Delete": WHOLE},
}
NEEDED = {
    **dict.fromkeys(("get", "head"), "Get"),
    "list": "List",
    **dict.fromkeys(("put", "create_upload", "part", "complete", "abort"), "Put"),
    "delete": "Delete",
}


class Guard(FaultProxy):
    """Lets through what one role may do. `refused`: operation and key of what it may not."""

    def __init__(self, upstream_url: str, role: str) -> None:
        super().__init__(upstream_url)
        self.rights, self.refused = RIGHTS[role], list[tuple[str, str]]()

    def answer(self, exchange: Exchange) -> Answer | None:
        query = parse_qs(urlsplit(exchange.target).query)
        key = query.get("prefix", [""])[0] if exchange.operation == "list" else exchange.key
        allowed = self.rights.get(NEEDED.get(exchange.operation, ""), ())
        if any(re.match(f"data/{each}", key) for each in allowed):
            return exchange.forward()
        self.refused.append((exchange.operation, key))
        return refuse(403, "AccessDenied")(exchange)


class Roles:
    """A world of one site, seen by each role through its own guard."""

    def __init__(self, world: World, stack: ExitStack) -> None:
        self.world, self._stack = world, stack
        self.guards: dict[str, Guard] = {}

    def config(self, role: str) -> Path:
        """The configuration of a role."""
        levels = [{"from": 0, "to": 1, "min_age": "1s", "max_wait": "2s", "min_count": 2, "min_size": "1M"}]
        how = {"engine": "local", "verify": "merge", "delete_grace": "0s", "allow_short_times": True}
        compaction = {**how, "levels": levels}
        world = self.world
        path = world.site_config("alpha") if role == "egress" else world.central_config(compaction=compaction)
        document = yaml.safe_load(path.read_text())
        if role not in self.guards:
            self.guards[role] = self._stack.enter_context(Guard(world.s3.endpoint_url, role))
        document["store"] |= {"endpoint_url": self.guards[role].url, "subject_statistics": False}
        return world.write(role, document)

    def floe(self, role: str, *words: str) -> CompletedProcess[str]:
        """Run a command as `role`."""
        done = run_floe(*words[:2], "-c", str(self.config(role)), *words[2:])
        assert done.returncode == 0, (words, done.stdout, done.stderr, self.guards[role].refused)
        return done


@pytest.fixture
def roles(s3: SharedS3) -> Iterator[Roles]:
    with World(s3, "alpha", segment={"max_age": "1s", "max_messages": 50}) as world, ExitStack() as stack:
        found = Roles(world, stack)
        yield found
        world.print_tails()
        print({role: sorted(set(guard.refused)) for role, guard in found.guards.items()})


def has_subjects(store: SegmentStore, ref: SegmentRef) -> bool:
    """Whether the metadata of a segment name a subject, which `store.subject_statistics` forbids here."""
    raw = store.objects.get(ref.key)
    assert raw is not None
    column = pq.read_metadata(BytesIO(raw)).row_group(0).column(SCHEMA.names.index("subject"))
    return bool(column.is_stats_set or column.has_column_index)


def server(roles: Roles) -> NatsServer:
    return roles.world.sites["alpha"]


async def test_every_role_works_with_the_rights_of_the_table(roles: Roles) -> None:
    world = roles.world
    settings = load_settings(str(world.central_config()))
    store = open_store(settings)
    async with client_of(server(roles).url) as client:
        await make_stream(client, "NODES", "alpha")
        await publish(client, "alpha", random.Random(1), 300)
    egress = world.egress(roles.config("egress"))
    await soon(lambda: sum(len(ref.coverage) for ref in store.list(CHAIN)) >= 300)
    assert egress.drain() == 0, egress.tail()

    await soon(lambda: json.loads(roles.floe("compaction", "compact", "--json").stdout)["deleted"] != [])
    assert {ref.level: has_subjects(store, ref) for ref in store.list(CHAIN)} == {0: False, 1: False}
    ingress = world.ingress(roles.config("ingress"))
    async with client_of(world.central.url) as client:

        async def has_all() -> bool:
            return await count_in(client, TARGET) >= 300

        await soon(has_all)
    assert ingress.drain() == 0, ingress.tail()

    segments, junk = store.list(CHAIN), "data/site=alpha/notes.txt"
    store.objects.put(junk, b"junk")
    for command in (["segments", "verify"], ["status"]):
        assert f"nothing reads: 1\n  {junk}\n" in roles.floe("reader", *command).stderr
    roles.floe("reader", "gap", "ls")
    roles.floe("quarantine", "segments", "quarantine", junk)
    assert store.objects.head(junk) is None
    end = max(ref.coverage.last for ref in segments)
    open_chains(settings).write_tail(CHAIN, end + 1)
    bounds = ["--first", str(end + 1), "--last", str(end + 1), "--yes"]
    roles.floe("gap", "gap", "accept", "--site", "alpha", "--feed", "NODES", *bounds)

    # Who may only read tries the store once, is refused, and reads back whole instead.
    probe = f"{Layout('data').documents_prefix('alpha', 'NODES')}probe/wrong-checksum"
    refused = {role: sorted({key for _, key in guard.refused}) for role, guard in roles.guards.items()}
    assert refused == {"egress": [], "compaction": [], "ingress": [], "reader": [probe], "quarantine": [], "gap": []}
