"""Contexts of the `nats` command, JetStream domains and API prefixes."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.errors import ConfigError, Unavailable
from common.nats.api import create_stream, stream_info
from common.nats.client import FloeClient, connect
from common.nats.credentials import apply_context
from common.nats.kv import KeyValue
from common.settings.service import NatsSettings
from infra.local.nats import NatsServer
from tests.support.basics import answered, soon, unique
from tests.support.commands import configuration, floe
from tests.support.domains import hub_and_leaf
from tests.support.egress import Bench
from tests.support.ingress import Archive, Centre, check_exact, client_of, rows_of


class Contexts:
    """The folder of the `nats` command."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "nats" / "context"
        self.folder.mkdir(parents=True)

    def write(self, name: str, **fields: Any) -> Path:
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps({"description": "", "token": "", "windows_ca_certs_match": None, **fields}))
        return path


@pytest.fixture
def contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Contexts:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return Contexts(tmp_path)


def refused(context: str) -> str:
    with pytest.raises(ConfigError) as caught:
        apply_context(NatsSettings(context=context))
    assert caught.value.exit_code == 78
    assert "\n" not in caught.value.message
    return caught.value.message


# Contexts


@pytest.fixture(scope="module")
def guarded() -> Iterator[NatsServer]:
    with NatsServer(users={"all": "secret-all"}) as server:
        yield server


def test_every_field_of_a_context_becomes_its_key(contexts: Contexts, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/u")
    monkeypatch.setenv("WHERE", "/where")
    tls = {"ca": "$WHERE/ca.pem", "cert": "file:///c.pem", "key": "/k.pem", "tls_first": True}
    more = {"jetstream_domain": "hub", "inbox_prefix": "_I", "color_scheme": "dark"}
    contexts.write("all", url="tls://one.example, tls://two.example:4223", creds="~/a.creds", **tls, **more)
    found = apply_context(NatsSettings(context="all", connect_timeout=1.0))
    assert found.url == ("tls://one.example", "tls://two.example:4223")
    assert (found.credentials_file, found.tls.ca) == ("/home/u/a.creds", "/where/ca.pem")
    assert (found.tls.cert, found.tls.key, found.tls.handshake_first) == ("/c.pem", "/k.pem", True)
    assert (found.jetstream_domain, found.inbox_prefix, found.connect_timeout) == ("hub", "_I", 1.0)
    contexts.write("more", nkey="/n.nk", url="demo.example", jetstream_api_prefix="JS.acc.API.")
    found = apply_context(NatsSettings(context="more"))
    assert (found.nkey_seed_file, found.url, found.api_prefix) == ("/n.nk", ("nats://demo.example",), "JS.acc.API")
    contexts.write("secret", token="t")
    token = apply_context(NatsSettings(context="secret")).token
    contexts.write("secret", token="later")
    assert (token.get_secret_value(), token.reread(), token.get_secret_value()) == ("t", True, "later")


def test_a_way_to_authenticate_and_a_domain_of_the_configuration_replace_those_of_the_context(contexts: Contexts):
    contexts.write("site", creds="/a.creds", jetstream_domain="hub", ca="/ca.pem")
    found = apply_context(
        NatsSettings(context="site", token="t", jetstream_api_prefix="P", tls={"insecure": True, "scheme": "puppet"})
    )
    assert (found.credentials_file, found.jetstream_domain, found.api_prefix) == ("", "", "P")
    assert found.tls.files.ca == "/etc/puppetlabs/puppet/ssl/certs/ca.pem"


def test_unsupported_fields_are_refused_by_name(contexts: Contexts):
    for field, value in (
        *(("nsc", "nsc://o/a/u"), ("socks_proxy", "socks5://h"), ("user_jwt", "CANARY"), ("user_seed", "CANARY")),
        *(("windows_cert_store", "machine"), ("windows_ca_certs_match", ["x"]), ("url", "wss://host")),
        *(("url", "nats://CANARY@host:4222"), ("creds", "op://CANARY/x"), ("creds", ["CANARY"]), ("user", "CANARY")),
        *(("cert", "data:;base64,CANARY"), ("password", "env://CANARY"), ("jetstream_domain", "a.CANARY")),
    ):
        path = contexts.write("site", **{field: value})
        shown = refused("site")
        assert shown.startswith(f"nats.context {path}: {field}")
        assert "CANARY" not in shown


def test_an_unknown_context_is_named_with_the_known_ones(contexts: Contexts):
    assert f"expected a context of the nats command in {contexts.folder}, found none of that name" in refused("x")
    contexts.write("b")
    contexts.write("a")
    assert refused("x") == f"nats.context x: expected one of a, b in {contexts.folder}, found none of that name"
    assert "expected one of a, b" in refused("../x")
    contexts.write("b").write_text("[]")
    assert "expected a JSON object" in refused("b")


async def test_the_option_replaces_the_connection(
    contexts: Contexts, guarded: NatsServer, tmp_path: Path, client: FloeClient, nats_url: str
):
    """`--context` of the command line: no key of `nats` in the file interferes with it."""
    path = configuration(Bench(nats_url, tmp_path, client), {"stream": "NODES"})
    document = yaml.safe_load(path.read_text())
    document["nats"] = {"url": "nats://127.0.0.1:1", "token": "t", "connect_timeout": "1s"}
    document["ingress"] = {"nats": {"user": "u", "password": "p", "token": ""}, "monitor": {"listen": ""}}
    path.write_text(yaml.safe_dump(document))
    contexts.write("there", url=guarded.url, user="all", password="secret-all", inbox_prefix="_CTX")
    contexts.write("wrong", url=guarded.url, user="all", password="CANARY")

    for command in (["egress", "init"], ["egress", "run"], ["ingress", "run"], ["status"], ["replay"], ["drill"]):
        assert "--context NAME" in (await floe(*command, "--help")).out, command

    assert (await floe("egress", "init", "-c", str(path))).code == 75
    path.write_text(path.read_text().replace("connect_timeout: 1s", "connect_timeout: 1m"))  # a busy server is slow
    for name, code, why in (
        ("there", 1, "stream NODES does not exist"),
        ("wrong", 77, "refused user all"),
        ("elsewhere", 78, "expected one of there, wrong"),
    ):
        done = await floe("egress", "init", "-c", str(path), "--context", name)
        assert (done.code, why in done.err) == (code, True), done
        assert "CANARY" not in done.err + done.out


# Domains, each of a hub and of a leaf

Servers, Clients = tuple[NatsServer, NatsServer], tuple[FloeClient, FloeClient]


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[NatsServer, NatsServer]]:
    """A hub and a leaf."""
    with hub_and_leaf() as both:
        yield both


@pytest.fixture
async def clients(servers: Servers) -> AsyncIterator[tuple[FloeClient, FloeClient]]:
    """A connection to each server, in the domain of that server."""
    async with client_of(servers[0].url) as hub, client_of(servers[1].url) as leaf:
        yield hub, leaf


async def test_ingress_fills_a_stream_of_another_domain(servers: Servers, clients: Clients, tmp_path: Path):
    hub, leaf = clients
    archive = Archive(tmp_path / "store")
    archive.put(rows_of(1, 300))
    centre = Centre(tmp_path, archive, servers[1].url)
    async with centre.running(nats={"jetstream_domain": "hub"}):
        await centre.carried(hub, 300)
    archive.put(rows_of(301, 400))
    async with centre.running(nats={"jetstream_domain": "hub"}):
        check_exact(await centre.carried(hub, 400), archive, centre.prefix)
    for name in (centre.target, f"KV_{centre.state_bucket}", f"KV_{centre.lease_bucket}"):
        assert await stream_info(leaf, name) is None
        assert await stream_info(hub, name) is not None


async def test_a_release_arrives_on_either_side_of_the_border(servers: Servers):
    hub, leaf = servers
    received: list[tuple[str, bytes | None]] = []
    bucket = unique("B")
    for server in (hub, leaf):
        settings = NatsSettings(url=server.url, jetstream_domain="leaf")
        one, other = [await connect(settings, name="test") for _ in range(2)]
        kv = await answered(KeyValue(one, bucket).ensure, Unavailable)  # once the leaf has joined the hub
        listening = await kv.subscribe("a.*", lambda key, value: received.append((key, value)))
        received.clear()
        await (await KeyValue(other, bucket).ensure()).put("a.b", b"x")
        await soon(lambda: received == [("a.b", b"x")])
        await listening.unsubscribe()
        await kv.put("a.c", b"y")
        assert (await kv.keys(), received) == (["a.b", "a.c"], [("a.b", b"x")])
        for client in (one, other):
            await client.aclose()


IMPORTED = """
accounts {
  OWNER: {
    jetstream: enabled
    users: [{user: owner, password: p}]
    exports: [{service: "$JS.API.>", response: stream}, {service: "$KV.>"}]
  }
  GUEST: {
    users: [{user: guest, password: p}]
    imports: [
      {service: {account: OWNER, subject: "$JS.API.>"}, to: "JS.owner.API.>"}
      {service: {account: OWNER, subject: "$KV.>"}, to: "JS.owner.API.$KV.>"}
    ]
  }
}
"""


async def test_an_api_prefix_reaches_the_streams_and_buckets_of_another_account():
    with NatsServer(extra=IMPORTED) as server:
        owner = await connect(NatsSettings(url=server.url, user="owner", password="p"), name="test")
        await create_stream(owner, {"name": "NODES", "subjects": ["nodes.>"]})
        as_guest = NatsSettings(url=server.url, user="guest", password="p", jetstream_api_prefix="JS.owner.API")
        guest = await connect(as_guest, name="test")
        assert await stream_info(guest, "NODES") is not None
        bucket = await KeyValue(guest, "B").ensure()
        assert await bucket.update("a", b"y", await bucket.put("a", b"x")) is not None
        assert (await (await KeyValue(owner, "B").ensure()).get("a")).value == b"y"
        await owner.aclose()
        await guest.aclose()
    for wrong, shown in (
        ({"jetstream_domain": "hub", "jetstream_api_prefix": "JS.API"}, "expected either jetstream_domain or "),
        ({"jetstream_domain": "a.b"}, "a domain"),
    ):
        with pytest.raises(ValueError, match=shown):
            NatsSettings(**wrong)
