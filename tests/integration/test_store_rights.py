"""Each role on the bucket with the policy of its file in infra/rights, and no other right.

SeaweedFS enforces them (`policies` and `policyNames`: its older actions are coarser, and a role that may write may
delete). A proxy before it records its refusals.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pyarrow.parquet as pq
import pytest
import yaml

from common.archive.columns import SCHEMA
from common.archive.documents import ChainDocument, StreamDocument, TargetPositions
from common.archive.keys import Layout
from common.archive.segment import SegmentRef
from common.archive.store import SegmentStore
from common.chain import Chain
from common.clock import SystemClock
from common.doctor import CHECKS
from common.nats.client import FloeClient
from common.observe.monitor import Health
from common.open import load_settings, open_chains, open_store
from common.tasks import Stop
from egress.service import EgressService
from infra.local.s3 import S3Client, SeaweedFS
from ingress.service import Controller
from tests.scenarios.load import make_stream, publish
from tests.support import canaries
from tests.support.basics import only_on_seaweedfs, soon, unique
from tests.support.commands import Done, floe
from tests.support.egress import QUICK, feed_of
from tests.support.ingress import count_in
from tests.support.proxies import Answer, Exchange, FaultProxy

pytestmark = pytest.mark.servers

SITE = "us-east"
CHAIN = Chain(SITE, "NODES")
RIGHTS = Path(__file__).parents[2] / "infra" / "rights"
ROLES = ("egress", "ingress", "compaction", "operator", "replay", "drill")


class Watch(FaultProxy):
    """A proxy that records each request that the store refuses: operation and key."""

    def __init__(self, upstream_url: str) -> None:
        super().__init__(upstream_url)
        self.refused = list[tuple[str, str]]()

    def answer(self, exchange: Exchange) -> Answer | None:
        answer = exchange.forward()
        if answer.status == 403:
            query = parse_qs(urlsplit(exchange.target).query)
            self.refused.append((exchange.operation, exchange.key or query.get("prefix", [""])[0]))
        return answer


@pytest.fixture(scope="module")
def limited() -> Iterator[SeaweedFS]:
    """A store that knows each role by the policy of its file, and the bucket of the files."""
    only_on_seaweedfs("its identities take the policies as they are")
    with SeaweedFS(policies={role: json.loads((RIGHTS / f"s3-{role}.json").read_text()) for role in ROLES}) as server:
        server.create_bucket("floe")
        canaries.note(server.secret_key, *(secret for _, secret in server.keys.values()))
        yield server


class Roles:
    """A site and a centre on one server; each role has its own keys and its own proxy."""

    def __init__(self, limited: SeaweedFS, nats_url: str, folder: Path, stack: ExitStack) -> None:
        self._limited, self._url, self._folder, self._stack = limited, nats_url, folder, stack
        self.stream, self.target, self._suffix = unique("T"), unique("FLEET"), unique("")
        self.guards: dict[str, Watch] = {}

    def config(self, role: str, **feed: Any) -> str:
        """The configuration of a role; an empty one may do everything. `feed`: keys of the site's feed."""
        keys, url = (self._limited.access_key, self._limited.secret_key), self._limited.endpoint_url
        if role:
            if role not in self.guards:
                self.guards[role] = self._stack.enter_context(Watch(url))
            keys, url = self._limited.keys[role], self.guards[role].url
        store = {"url": "s3://floe", "endpoint_url": url, "region": "us-east-1", "subject_statistics": False}
        shared = {name: f"{name[0].upper()}{self._suffix}" for name in ("state_bucket", "lease_bucket")}
        # A command that asks for the holder of a lease fails if a busy machine lets it expire.
        shared |= {"monitor": {"listen": ""}, "lease_ttl": "10s"}
        feeds = [{"name": "NODES", "stream": self.stream, "segment": {"max_age": "1s", "max_messages": 50}, **feed}]
        source = {"site": SITE, "feed": "NODES", "subject_prefix": self.target}
        target = {"stream": self.target, "create": {"subjects": [f"{self.target}.>"]}, "sources": [source]}
        levels = [{"from": 0, "to": 1, "min_age": "1s", "max_wait": "2s", "min_count": 2, "min_size": "1M"}]
        parts = (
            {"site": SITE, "egress": {"feeds": feeds, **shared}}
            if role == "egress"
            else {
                "ingress": {"targets": [target], "poll_interval": "1s", **shared},
                "compaction": {"engine": "local", "delete_grace": "0s", "allow_short_times": True, "levels": levels},
            }
        )
        path = self._folder / f"{role}.yaml"
        store |= {"access_key_id": keys[0], "secret_access_key": keys[1]}
        path.write_text(yaml.safe_dump({"nats": {"url": self._url}, "store": store, **parts}))
        path.chmod(0o600)
        return str(path)

    async def run(self, role: str, *words: str, code: int = 0, **feed: Any) -> Done:
        """Run a command as `role`."""
        done = await floe(*words, "-c", self.config(role, **feed))
        assert done.code == code, (words, done.out, done.err, self.guards[role].refused)
        return done

    @asynccontextmanager
    async def egress(self) -> AsyncIterator[None]:
        """Run egress in this process, and drain it at the end."""
        settings, stop = load_settings(self.config("egress")), Stop()
        clock = SystemClock()
        task = asyncio.create_task(EgressService(settings, QUICK, clock, Health(clock), stop).run())
        yield
        stop.set()
        assert await task

    @asynccontextmanager
    async def ingress(self) -> AsyncIterator[None]:
        """Run ingress likewise."""
        settings, stop = load_settings(self.config("ingress")), Stop()
        store, chains, clock = open_store(settings), open_chains(settings), SystemClock()
        task = asyncio.create_task(Controller(settings, store, chains, Health(clock), clock).run(stop))
        yield
        stop.set()
        await task


@pytest.fixture
def roles(limited: SeaweedFS, nats_url: str, tmp_path: Path) -> Iterator[Roles]:
    with ExitStack() as stack:
        found = Roles(limited, nats_url, tmp_path, stack)
        yield found
        print({role: sorted(set(guard.refused)) for role, guard in found.guards.items()})


def has_subjects(store: SegmentStore, ref: SegmentRef) -> bool:
    """True if the metadata of a segment name a subject, which `store.subject_statistics` forbids here."""
    column = pq.read_metadata(BytesIO(store.objects.get(ref.key))).row_group(0).column(SCHEMA.names.index("subject"))
    return bool(column.is_stats_set or column.has_column_index)


async def test_every_role_works_with_the_rights_of_the_table(roles: Roles, client: FloeClient) -> None:
    settings = load_settings(roles.config(""))
    store = open_store(settings)
    await make_stream(client, roles.stream, roles.stream)
    await publish(client, roles.stream, random.Random(1), 150)
    async with roles.egress():
        await soon(lambda: sum(len(ref.coverage) for ref in store.list(CHAIN)) >= 150)
        of_site = ["compare", SITE, "--all", "--since-last"]
        for command in (["egress", "flush"], ["status"], ["egress", "resolve", "NODES"], of_site, of_site):
            await roles.run("egress", *command)
    await roles.run("egress", "egress", "init")

    async def has_deleted() -> bool:
        return (await roles.run("compaction", "compact", "--json")).json()["deleted"] != []

    await soon(has_deleted, every=0.5)
    assert {ref.level: has_subjects(store, ref) for ref in store.list(CHAIN)} == {0: False, 1: False}

    async def has_all() -> bool:
        return await count_in(client, roles.target) >= 150

    async with roles.ingress():
        await soon(has_all)
    # A role that archives a site also sees the time of its compaction.
    assert "ago" in (await roles.run("egress", "status", "--archive")).out
    await roles.run("egress", "check", "archive", "--warning", "1h")
    assert "last_success" in (await roles.run("operator", "check", "compaction", "--json")).out
    of_chain = ["segments", "cat", str(CHAIN), "--limit", "1"], ["segments", "verify", "--deep"]
    for command in (
        *(["checkpoint", "ls"], ["chain", "ls"], ["parked", "ls"], ["segments", "ls"], *of_chain),
        ["check", "archive", "--warning", "1h"],
    ):
        await roles.run("operator", *command)
    await roles.run("operator", "segments", "info", store.list(CHAIN)[0].key)
    chain = [f"{SITE}/NODES"]
    copy = unique("COPY")
    await roles.run("replay", "replay", *chain, "--target", copy, "--subject-prefix", copy, "--create")
    await roles.run("drill", "drill", *chain)

    junk = f"data/site={SITE}/notes.txt"
    store.objects.put(junk, b"junk")
    for command in (["segments", "verify"], ["status"]):
        assert f"does not read: 1\n  {junk}\n" in (await roles.run("replay", *command)).err
    for role, how in (("operator", "--deep"), ("compaction", "--json")):
        await roles.run(role, "segments", "verify", how)
    await roles.run("replay", "gap", "ls")
    await roles.run("operator", "segments", "quarantine", junk)
    assert store.objects.head(junk) is None
    documents, lost = open_chains(settings), Chain(SITE, "LOST")
    documents.create_chain(lost, ChainDocument((), 1, 1))
    documents.create_stream(lost.next_incarnation(), StreamDocument({}, "t", {0: 5}))
    await roles.run("operator", "gap", "accept", f"{lost}", "--first", "1", "--last", "5", "--yes")
    open_chains(settings).write_positions(TargetPositions(roles.target, 0.0))
    await roles.run("operator", "checkpoint", "release", roles.target, "--yes")
    await roles.run("egress", "egress", "repartition", "NODES", "--yes", **feed_of(roles.stream, 2))

    # A role that may only read tries the store once, is refused, and reads back whole instead.
    probe = f"{Layout('data').documents_prefix(SITE, 'NODES')}probe/wrong-checksum"
    refused = {role: sorted({key for _, key in guard.refused}) for role, guard in roles.guards.items()}
    assert refused == {role: [probe] if role == "replay" else [] for role in ROLES}


async def test_no_role_may_do_more_than_its_file(limited: SeaweedFS) -> None:
    """The policies are enforced: a role is refused everything that it must never do, above all deleting."""
    mine, other = f"data/site={SITE}/feed=NODES/x", "data/site=eu-west/feed=NODES/x"
    tail, of_other = f"data/_floe/tails/{SITE}/NODES/0000/0", "data/_floe/tails/eu-west/NODES/0000/0"

    port = urlsplit(limited.endpoint_url).port or 0

    def may(role: str, method: str, key: str) -> bool:
        status, _ = S3Client(port, *limited.keys[role]).call(method, f"/floe/{key}", b"x" if method == "PUT" else b"")
        assert status in (200, 204, 403), (role, method, key, status)
        return status != 403

    for key in (mine, other, tail, of_other, "elsewhere"):
        S3Client(port, limited.access_key, limited.secret_key).call("PUT", f"/floe/{key}", b"x")
    allowed = {
        (role, method, key)
        for role in ROLES
        for method in ("PUT", "GET", "DELETE")
        for key in (mine, other, tail, of_other, "elsewhere")
        if method != "DELETE" or role not in ("compaction", "operator")
        if may(role, method, key)
    }
    reads = {(role, "GET", key) for role in ROLES if role != "egress" for key in (mine, other, tail, of_other)}
    writes = {*(("egress", "PUT", key) for key in (mine, tail)), *(("compaction", "PUT", key) for key in (mine, other))}
    assert allowed == reads | writes | {("egress", "GET", mine), ("egress", "GET", tail)}
    assert not may("operator", "DELETE", tail)
    assert not may("compaction", "DELETE", tail)
    assert may("compaction", "DELETE", mine)
    chain = "data/_floe/site=us-east/feed=NODES/incarnation=0000/partition=0"
    assert may("compaction", "PUT", f"{chain}/floor.json")
    assert not may("compaction", "PUT", f"{chain}/chain.json")
    assert not may("compaction", "DELETE", f"{chain}/floor.json")
    assert not may("compaction", "PUT", "data/_floe/ingress/FLEET/positions.json")


async def test_a_bucket_is_created_once_and_by_no_role(roles: Roles) -> None:
    for role, code, shown in (
        ("egress", 77, "error[E-S3-DENIED]: "),
        ("", 0, "s3://another: created\n"),
        ("", 0, "s3://another: exists already\n"),
    ):
        path = Path(roles.config(role))
        path.write_text(path.read_text().replace("s3://floe", "s3://another"))
        done = await floe("store", "create", "-c", str(path))
        assert (done.code, (done.out + done.err).startswith(shown)) == (code, True), done


async def test_the_doctor_names_a_missing_right_on_the_bucket(roles: Roles, limited: SeaweedFS) -> None:
    async def found(role: str, credential: str, code: int) -> dict[str, Any]:
        keys, limited.keys[role] = limited.keys[role], limited.keys[credential]
        done = await roles.run(role, "doctor", "--role", role, "--json", code=code)
        limited.keys[role] = keys
        return {each["what"]: each for each in done.json()["findings"] if each["part"] == "store"}

    def states(findings: dict[str, Any]) -> list[str]:
        return [findings[what]["state"] for what in ("list", "write", "read", "delete")]

    egress = await found("egress", "egress", 0)
    assert {egress[what]["state"] for what in CHECKS["store"] if not what.startswith(("life", "vers"))} == {"ok"}
    assert egress["delete"]["found"].startswith("refused")
    assert states(await found("compaction", "compaction", 0)) == ["ok"] * 4
    ingress = await found("ingress", "ingress", 0)
    assert states(ingress) == ["ok", "skipped", "ok", "skipped"]
    assert "this credential may only read" in ingress["layout"]["found"]
    wrong = await found("egress", "ingress", 3)
    assert wrong["write"]["state"] == "problem"
    assert "grant s3:PutObject" in wrong["write"]["todo"]
    assert "python -m infra.rights rights site=us-east bucket=floe prefix=data stream=" in wrong["write"]["todo"]
    assert {wrong[what]["state"] for what in ("checksum", "clock")} == {"skipped"}
    assert states(await found("compaction", "egress", 3))[::3] == ["problem", "problem"]
