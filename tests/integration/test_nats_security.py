"""Who may connect: credentials, permissions, TLS, contexts of the `nats` command; what is told."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, FloeError, Refused
from common.jetstream.api import stream_info
from common.jetstream.client import connect, frame
from common.jetstream.credentials import is_loopback
from common.settings.loader import read_secret
from common.settings.service import NatsSettings, NatsTlsSettings
from common.settings.types import FileSecret
from infra.local.nats import NatsServer
from tests.support.basics import PATIENCE, soon
from tests.support.identities import Operator, authority, certificate, credentials, jwt, make_certificates, server_tls
from tests.support.proxies import TcpProxy


async def refused(settings: NatsSettings) -> FloeError:
    """The error of a connect that must fail."""
    with pytest.raises(FloeError) as caught:
        await connect(settings, name="test")
    assert "\n" not in caught.value.message
    return caught.value


# Credentials and permissions

PERMISSIONS = """
authorization { users: [
  {user: all, password: secret-all}
  {user: few, password: secret-few, permissions: {
    publish: ["ok.>", "$JS.API.STREAM.INFO.>"], subscribe: ["_INBOX.>", "mine.>"]}}
  {user: none, password: secret-none, permissions: {publish: ["x"], subscribe: ["x"]}}
  {user: boxed, password: secret-boxed, permissions: {publish: [">"], subscribe: ["_FLOE.>"]}}
] }
"""


@pytest.fixture(scope="module")
def guarded() -> Iterator[NatsServer]:
    with NatsServer(extra=PERMISSIONS) as server:
        yield server


def as_user(server: NatsServer, user: str, **more: Any) -> NatsSettings:
    return NatsSettings(url=server.url, user=user, password=f"secret-{user}", **more)


async def test_a_missing_permission_is_refused_by_name(guarded: NatsServer):
    client = await connect(as_user(guarded, "few"), name="test")
    assert await stream_info(client, "NONE") is None
    with pytest.raises(Refused, match=r'permissions violation for publish to "\$JS.API.STREAM.CREATE.X"'):
        await client.api("STREAM.CREATE.X", {"name": "X"})
    with pytest.raises(Refused, match=r'permissions violation for subscription to "yours.>"; grant it to user few'):
        await client.subscribe_raw("yours.>", lambda *_: None)
    await client.subscribe_raw("mine.>", lambda *_: None)
    client.send(frame(b"forbidden.x", b""))
    await soon(lambda: client.refusal(b"forbidden.x"))
    assert client.refusal(b"ok.x") is None
    assert client.generation == 1
    await client.aclose()


async def test_a_connection_without_an_inbox_is_refused_and_its_prefix_is_the_configured_one(guarded: NatsServer):
    error = await refused(as_user(guarded, "none"))
    assert isinstance(error, Refused)
    assert 'permissions violation for subscription to "_INBOX.' in str(error)
    client = await connect(as_user(guarded, "boxed", inbox_prefix="_FLOE"), name="test")
    assert await stream_info(client, "NONE") is None
    assert client.new_inbox().startswith("_FLOE.")
    await client.aclose()


async def test_a_token_that_was_changed_is_read_again_when_the_former_is_refused(tmp_path: Path):
    path = tmp_path / "token"

    def changed(token: str) -> str:
        path.write_text(token)
        return f'authorization {{ token: "{token}" }}'

    with NatsServer(extra=changed("former")) as server:
        settings = NatsSettings(url=server.url, token=FileSecret("former", str(path), read_secret))
        client = await connect(settings, name="test")
        path.write_text("ahead of the server")
        server.extra = 'authorization { token: "later" }'
        await asyncio.to_thread(server.restart)
        await soon(lambda: settings.token.get_secret_value() == "ahead of the server")
        assert not client.is_up
        path.write_text("later")
        await soon(lambda: client.is_up)
        await client.aclose()

        server.extra = changed("last")
        await asyncio.to_thread(server.restart)
        await (await connect(settings, name="test")).aclose()
        assert settings.token.get_secret_value() == "last"


async def test_a_bad_credentials_file_is_named_with_the_reason(tmp_path: Path):
    """That no secret of it is shown, `test_nats_matrix.py` has."""
    operator = Operator()
    user, good = operator.user, jwt(operator.claims, operator.owner)
    path = tmp_path / "floe.creds"
    settings = NatsSettings(credentials_file=str(path))
    assert str(await refused(settings)).startswith(f"nats.credentials_file {path}: no such file or directory")
    for text, why in (
        ("something else", "expected a NATS user JWT, found none"),
        (credentials("a.b.c", user), "found one that cannot be decoded"),
        (credentials(good, user).replace(user.seed.decode(), "SUAAAAAA"), "an NKEY seed, found none that is valid"),
        (credentials(jwt({**operator.claims, "exp": 1000}, operator.owner), user), "the JWT expired "),
    ):
        path.write_text(text)
        assert why in str(await refused(settings))


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls"))


async def test_a_certificate_for_another_host_is_refused(certificates: Path, caplog: pytest.LogCaptureFixture):
    with NatsServer(tls=server_tls(certificates, "elsewhere")) as server:
        told = str(await refused(NatsSettings(url=server.url, tls={"ca": str(certificates / "ca.pem")})))
        assert "127.0.0.1" in told
        assert f"checked with nats.tls.ca {certificates / 'ca.pem'}" in told
        caplog.clear()
        client = await connect(NatsSettings(url=server.url, tls={"insecure": True}), name="test")
        await client.aclose()
        assert "not checked" in caplog.text


async def test_files_that_are_no_certificates_are_named_and_tls_is_kept_to(certificates: Path, nats_url: str):
    nothing = str(certificates / "nothing.pem")
    assert str(await refused(NatsSettings(url=nats_url, tls={"ca": nothing}))) == (
        f"nats.tls.ca {nothing}: no such file or directory"
    )
    mixed = {"cert": str(certificates / "client.pem"), "key": str(certificates / "server.key")}
    assert "key values mismatch" in str(await refused(NatsSettings(url=nats_url, tls=mixed)))
    error = await refused(NatsSettings(url=nats_url.replace("nats://", "tls://"), user="u", password="p"))
    assert (type(error), "the server offers no tls" in str(error)) == (ConfigError, True)
    assert "nats.url: nats://" in error.hint, "the authority is not what is wrong"


async def test_a_secret_goes_over_tls_only(guarded: NatsServer, certificates: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("common.jetstream.credentials.is_loopback", lambda _peer: False)
    async with TcpProxy(guarded.port) as proxy:
        url = f"nats://127.0.0.1:{proxy.port}"
        for secret in ({"user": "all", "password": "secret-all"}, {"token": "t"}):
            error = await refused(NatsSettings(url=url, **secret))
            assert (error.exit_code, error.code) == (78, "E-NATS-PLAINTEXT")
            assert f"tls://127.0.0.1:{proxy.port}" in error.hint
        assert proxy.passed["up"] == 0, "something was sent in clear"
        allowed = NatsSettings(url=url, user="all", password="secret-all", allow_plaintext=True)
        await (await connect(allowed, name="test")).aclose()

    # The server asks for TLS, the address does not say so.
    extra = "authorization { user: u, password: p }"
    with NatsServer(tls=server_tls(certificates), extra=extra) as server:
        url = server.url.replace("tls://", "nats://")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "ca.pem"))
        await (await connect(NatsSettings(url=url, user="u", password="p"), name="test")).aclose()


async def test_a_connection_back_without_tls_sends_no_secret(guarded: NatsServer, monkeypatch: pytest.MonkeyPatch):
    async with TcpProxy(guarded.port) as proxy:
        settings = NatsSettings(url=f"nats://127.0.0.1:{proxy.port}", user="all", password="secret-all")
        client = await connect(settings, name="test")
        monkeypatch.setattr("common.jetstream.credentials.is_loopback", lambda _peer: False)
        sent, accepted = proxy.passed["up"], proxy.accepted
        proxy.cut()
        await soon(lambda: proxy.accepted > accepted + 1)
        assert not client.is_up
        assert proxy.passed["up"] - sent < 50, "a CONNECT went out"
        monkeypatch.undo()
        await soon(lambda: client.is_up)
        await client.aclose()


OWN = [("127.0.0.1", 4222), ("127.8.9.1", 4222), ("::1", 4222, 0, 0), ("::ffff:127.0.0.1", 4222, 0, 0)]
OTHERS = [("10.0.0.1", 4222), ("fe80::1%eth0", 4222, 0, 2), ("::ffff:10.0.0.1", 4222, 0, 0), None, ""]


def test_only_this_host_is_this_host():
    assert [peer for peer in (*OWN, *OTHERS) if is_loopback(peer)] == OWN


# Files that are replaced


@pytest.mark.parametrize("first", [False, True])
async def test_certificates_that_were_replaced_are_read_at_the_next_connect(tmp_path: Path, first: bool):
    """Both sides move to another authority; the server does so first."""
    places = former, later, at_server, at_client = [tmp_path / name for name in ("former", "later", "server", "client")]
    for folder in places:
        folder.mkdir()
    for folder in (former, later):
        authority(folder)
        certificate(folder, "server", "IP:127.0.0.1")
        certificate(folder, "client", "DNS:client")

    def move(source: Path, folder: Path, name: str) -> None:
        for file in ("ca.pem", f"{name}.pem", f"{name}.key"):
            shutil.copy(source / file, folder)

    move(former, at_server, "server")
    move(former, at_client, "client")
    with NatsServer(tls=server_tls(at_server, verify=True, handshake_first=first)) as server:
        files = {"ca": "ca.pem", "cert": "client.pem", "key": "client.key"}
        tls = {"handshake_first": first, **{key: str(at_client / name) for key, name in files.items()}}
        client = await connect(NatsSettings(url=server.url, tls=tls), name="test")
        move(later, at_server, "server")
        await asyncio.to_thread(server.restart)
        await soon(lambda: not client.is_up)
        move(later, at_client, "client")
        assert await client.wait_up(PATIENCE)
        assert await stream_info(client, "NONE") is None
        await client.aclose()


async def test_a_credentials_file_that_was_replaced_is_read_when_the_former_is_refused(tmp_path: Path):
    former, later = Operator(), Operator()
    path = tmp_path / "floe.creds"

    def write(operator: Operator) -> None:
        path.write_text(credentials(jwt(operator.claims, operator.owner), operator.user))
        path.chmod(0o600)

    write(former)
    with NatsServer(extra=former.config()) as server:
        client = await connect(NatsSettings(url=server.url, credentials_file=str(path)), name="test")
        path.unlink()
        server.extra = later.config()
        await asyncio.to_thread(server.restart)
        await soon(lambda: not client.is_up)
        write(later)
        assert await client.wait_up(PATIENCE)
        await client.aclose()


# Puppet's layout


async def test_the_certificates_of_puppets_agent_open(certificates: Path, tmp_path: Path):
    agent = {"certs/ca.pem": "ca.pem", "certs/node.pem": "client.pem", "private_keys/node.pem": "client.key"}
    for name, source in agent.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(certificates / source, tmp_path / name)
    tls = {"scheme": "puppet", "identity": "node", "ssl_dir": str(tmp_path)}
    with NatsServer(tls=server_tls(certificates, verify=True)) as server:
        await (await connect(NatsSettings(url=server.url, tls=tls), name="test")).aclose()
        missing = str(await refused(NatsSettings(url=server.url, tls={**tls, "identity": "other"})))
        files = f"{tmp_path}/certs/other.pem with key {tmp_path}/private_keys/other.pem"
        assert missing.startswith(f"nats.tls.cert {files}: no such file")
    files = NatsTlsSettings(scheme="puppet").files
    assert files.ca == "/etc/puppetlabs/puppet/ssl/certs/ca.pem"
    assert files.cert == f"/etc/puppetlabs/puppet/ssl/certs/{socket.gethostname().lower()}.pem"
    for wrong, told in (
        ({"scheme": "puppet", "cert": "/c.pem", "key": "/k.pem"}, "cert: expected none beside scheme puppet"),
        ({"identity": "node"}, "identity: expected none beside scheme files"),
        ({"scheme": "puppet", "identity": "../x"}, "without a slash"),
    ):
        with pytest.raises(ValueError, match=told):
            NatsTlsSettings(**wrong)
