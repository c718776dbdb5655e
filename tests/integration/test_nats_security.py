"""Authentication, permissions and TLS: each method with right and wrong secrets, and no secret in any output."""

import asyncio
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nkeys
import pytest
import yaml

from common.errors import ConfigError, FloeError, Refused
from common.nats.api import stream_info
from common.nats.client import connect, frame
from common.nats.credentials import is_loopback
from common.settings.loader import read_secret
from common.settings.service import NatsSettings, NatsTlsSettings
from common.settings.types import FileSecret
from infra.local.nats import NatsServer
from tests.support import identities
from tests.support.basics import PATIENCE, soon
from tests.support.commands import Done, floe
from tests.support.identities import Operator, certificate, credentials, jwt, key_text, new_key, server_tls
from tests.support.ingress import client_of
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
    async with aclosing(await connect(as_user(guarded, "few"), name="test")) as client:
        assert await stream_info(client, "NONE") is None
        with pytest.raises(Refused, match=r'permissions violation for publish to "\$JS.API.STREAM.CREATE.X"'):
            await client.api("STREAM.CREATE.X", {"name": "X"})
        with pytest.raises(Refused, match=r'permissions violation for subscription to "yours.>"; grant it to user few'):
            await client.subscribe_raw("yours.>", lambda *_: None)
        await client.subscribe_raw("mine.>", lambda *_: None)
        client.send(frame(b"forbidden.x", b""))
        await soon(lambda: client.permission_error(b"forbidden.x"))
        assert (client.permission_error(b"ok.x"), client.generation) == (None, 1)


async def test_a_connection_without_an_inbox_is_refused_and_its_prefix_is_the_configured_one(guarded: NatsServer):
    error = await refused(as_user(guarded, "none"))
    assert isinstance(error, Refused)
    assert 'permissions violation for subscription to "_INBOX.' in str(error)
    async with aclosing(await connect(as_user(guarded, "boxed", inbox_prefix="_FLOE"), name="test")) as client:
        assert await stream_info(client, "NONE") is None
        assert client.new_inbox().startswith("_FLOE.")


async def test_a_token_that_was_changed_is_read_again_when_the_former_is_refused(tmp_path: Path):
    path = tmp_path / "token"

    def changed(token: str) -> str:
        path.write_text(token)
        return f'authorization {{ token: "{token}" }}'

    with NatsServer(extra=changed("former")) as server:
        settings = NatsSettings(url=server.url, token=FileSecret("former", str(path), read_secret))
        async with aclosing(await connect(settings, name="test")) as client:
            path.write_text("ahead of the server")
            server.extra = 'authorization { token: "later" }'
            await asyncio.to_thread(server.restart)
            await soon(lambda: settings.token.get_secret_value() == "ahead of the server")
            assert not client.is_up
            path.write_text("later")
            await soon(lambda: client.is_up)

        server.extra = changed("last")
        await asyncio.to_thread(server.restart)
        await (await connect(settings, name="test")).aclose()
        assert settings.token.get_secret_value() == "last"


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return identities.make_certificates(tmp_path_factory.mktemp("tls"))


async def test_a_certificate_for_another_host_is_refused(certificates: Path, caplog: pytest.LogCaptureFixture):
    with NatsServer(tls=server_tls(certificates, "elsewhere")) as server:
        problem = str(await refused(NatsSettings(url=server.url, tls={"ca": str(certificates / "ca.pem")})))
        assert "127.0.0.1" in problem
        assert f"checked with nats.tls.ca {certificates / 'ca.pem'}" in problem
        caplog.clear()
        await (await connect(NatsSettings(url=server.url, tls={"insecure": True}), name="test")).aclose()
        assert "certificate unverified" in caplog.text


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
    monkeypatch.setattr("common.nats.credentials.is_loopback", lambda _peer: False)
    async with TcpProxy(guarded.port) as proxy:
        url = f"nats://127.0.0.1:{proxy.port}"
        for secret in ({"user": "all", "password": "secret-all"}, {"token": "t"}):
            error = await refused(NatsSettings(url=url, **secret))
            assert (error.exit_code, error.code) == (78, "E-NATS-PLAINTEXT")
            assert f"tls://127.0.0.1:{proxy.port}" in error.hint
        assert proxy.passed["up"] == 0, "something was sent in clear"
        allowed = NatsSettings(url=url, user="all", password="secret-all", allow_plaintext=True)
        await (await connect(allowed, name="test")).aclose()

    # The server asks for TLS, the address does not.
    with NatsServer(tls=server_tls(certificates), extra="authorization { user: u, password: p }") as server:
        url = server.url.replace("tls://", "nats://")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "ca.pem"))
        await (await connect(NatsSettings(url=url, user="u", password="p"), name="test")).aclose()


async def test_a_connection_back_without_tls_sends_no_secret(guarded: NatsServer, monkeypatch: pytest.MonkeyPatch):
    async with TcpProxy(guarded.port) as proxy:
        settings = NatsSettings(url=f"nats://127.0.0.1:{proxy.port}", user="all", password="secret-all")
        async with aclosing(await connect(settings, name="test")) as client:
            monkeypatch.setattr("common.nats.credentials.is_loopback", lambda _peer: False)
            sent, accepted = proxy.passed["up"], proxy.accepted
            proxy.cut()
            await soon(lambda: proxy.accepted > accepted + 1)
            assert not client.is_up
            assert proxy.passed["up"] - sent < 50, "a CONNECT went out"
            monkeypatch.undo()
            await soon(lambda: client.is_up)


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
        identities.authority(folder)
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
        async with client_of(server.url, tls=tls) as client:
            move(later, at_server, "server")
            await asyncio.to_thread(server.restart)
            await soon(lambda: not client.is_up)
            move(later, at_client, "client")
            assert await client.wait_up(PATIENCE)
            assert await stream_info(client, "NONE") is None


async def test_a_credentials_file_that_was_replaced_is_read_when_the_former_is_refused(tmp_path: Path):
    former, later = Operator(), Operator()
    path = tmp_path / "floe.creds"

    def write(operator: Operator) -> None:
        path.write_text(credentials(jwt(operator.claims, operator.owner), operator.user))
        path.chmod(0o600)

    write(former)
    with NatsServer(extra=former.config()) as server:
        async with client_of(server.url, credentials_file=str(path)) as client:
            path.unlink()
            server.extra = later.config()
            await asyncio.to_thread(server.restart)
            await soon(lambda: not client.is_up)
            write(later)
            assert await client.wait_up(PATIENCE)


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
    for wrong, problem in (
        ({"scheme": "puppet", "cert": "/c.pem", "key": "/k.pem"}, "cert: expected none with scheme puppet"),
        ({"identity": "node"}, "identity: expected none with scheme files"),
        ({"scheme": "puppet", "identity": "../x"}, "without a slash"),
    ):
        with pytest.raises(ValueError, match=problem):
            NatsTlsSettings(**wrong)


CANARY, RIGHT = "canary-never-shown", "right-canary"


@dataclass
class Place:
    """A folder with certificates, and files that a method needs."""

    folder: Path
    certificates: Path
    secrets: list[str] = field(default_factory=lambda: [RIGHT])

    def write(self, name: str, content: str) -> str:
        path = self.folder / name
        path.write_text(content)
        path.chmod(0o600)
        return str(path)

    def pem(self, name: str) -> str:
        return str(self.certificates / name)

    def tls(self, client: str = "", ca: str = "ca", **more: Any) -> dict[str, Any]:
        own = {"cert": self.pem(f"{client}.pem"), "key": self.pem(f"{client}.key")} if client else {}
        return {"tls": {"ca": self.pem(f"{ca}.pem"), **own, **more}}


def ways(place: Place) -> dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, dict[str, Any]]]]:
    """By method the server's side, and the right and the wrong ones of `nats:`; CANARY and all keys are secrets."""
    operator, stranger, user, other = Operator(), Operator(), *(new_key(nkeys.PREFIX_BYTE_USER) for _ in range(2))
    signed, seed = jwt(operator.claims, operator.owner), operator.user.seed.decode()
    expired = jwt({**operator.claims, "exp": 1000}, operator.owner)
    place.secrets += [CANARY, signed, seed, *(key.seed.decode() for key in (stranger.user, user, other))]
    creds = {
        "right": credentials(signed, operator.user),
        "of another account": credentials(jwt(stranger.claims, stranger.owner), stranger.user),
        "another's seed": credentials(signed, stranger.user),
        "expired": credentials(expired, operator.user),
        "no credential": CANARY,
        "no JWT": credentials("a.b.c", operator.user),
        "no seed": credentials(signed, operator.user).replace(seed, "SUAAAAAA"),
    }
    files = {name: {"credentials_file": place.write(f"{name}.creds", text)} for name, text in creds.items()}
    files["no file"] = {"credentials_file": str(place.folder / "nothing.creds")}
    by_jwt = {"jwt_file": place.write("user.jwt", signed), "nkey_seed_file": place.write("u.nk", seed)}
    others = {"nkey_seed_file": place.write("other.nk", other.seed.decode())}
    right_password = {"user": "floe", "password_file": place.write("right", RIGHT)}
    return {
        "tls": (
            {"tls": server_tls(place.certificates)},
            place.tls(),
            {
                "another authority": place.tls(ca="other"),
                "the system's authorities": {},
                "handshake first": place.tls(handshake_first=True),
            },
        ),
        "mutual tls": (
            {"tls": server_tls(place.certificates, verify=True)},
            place.tls("client"),
            {
                "a stranger's certificate": place.tls("stranger"),
                "no certificate": place.tls(),
                "a key of another": {"tls": {**place.tls("client")["tls"], "key": place.pem("stranger.key")}},
            },
        ),
        "handshake first": (
            {"tls": server_tls(place.certificates, handshake_first=True)},
            place.tls(handshake_first=True),
            {"another authority": place.tls(ca="other", handshake_first=True), "TLS on request": place.tls()},
        ),
        "credentials file": ({"extra": operator.config()}, files.pop("right"), files),
        "nkey seed": (
            {"extra": f"authorization {{ users: [{{nkey: {key_text(user)}}}] }}"},
            {"nkey_seed_file": place.write("right.nk", user.seed.decode())},
            {
                "another's": others,
                "no seed": {"nkey_seed_file": place.write("no.nk", CANARY)},
                "no file": {"nkey_seed_file": str(place.folder / "nothing.nk")},
            },
        ),
        "jwt and seed": (
            {"extra": operator.config()},
            by_jwt,
            {"another's seed": {**by_jwt, **others}, "no JWT": {**by_jwt, "jwt_file": place.write("no.jwt", CANARY)}},
        ),
        "token": (
            {"extra": f'authorization {{ token: "{RIGHT}" }}'},
            {"token": RIGHT},
            {"another": {"token": CANARY}, "of a file": {"token_file": place.write("t", CANARY)}, "none": {}},
        ),
        "user and password": (
            {"users": {"floe": RIGHT}},
            right_password,
            {
                "another password": {"user": "floe", "password": CANARY},
                "another user": {"user": "nobody", "password": CANARY},
                "of a file": {"user": "floe", "password_file": place.write("wrong", CANARY)},
                "an empty file": {"user": "floe", "password_file": place.write("empty", "")},
            },
        ),
    }


CREDS_WHY = {
    "expired": "the JWT expired ",
    "no credential": "expected a NATS user JWT, found none",
    "no JWT": "found one that cannot be decoded",
    "no seed": "an NKEY seed, found none that is valid",
    "no file": "no such file or directory",
}
WAYS = [
    *("tls", "mutual tls", "handshake first", "credentials file", "nkey seed", "jwt and seed", "token"),
    "user and password",
]


async def ask(place: Place, server: NatsServer, nats: dict[str, Any], timeout: str = "20s") -> Done:
    """Run a command that connects, reads one stream, and ends."""
    config = {
        "site": "s",
        "nats": {"url": server.url, "connect_timeout": timeout, **nats},
        "store": {"url": f"file://{place.folder}/store"},
        "egress": {"feeds": [{"stream": "NODES"}], "monitor": {"listen": ""}},
    }
    return await floe("egress", "init", "-c", place.write("floe.yaml", yaml.safe_dump(config)))


@pytest.mark.parametrize("way", WAYS)
async def test_a_way_opens_a_server_and_each_wrong_secret_is_one_line(way: str, tmp_path: Path, certificates: Path):
    place = Place(tmp_path, certificates)
    side, right, wrong = ways(place)[way]
    with NatsServer(**side) as server:
        done = await ask(place, server, right)
        assert "stream NODES does not exist" in done.err, done
        assert "FLOE_STATE" in done.out, "it wrote nothing"
        for name, nats in wrong.items():
            is_waiting = name in ("TLS on request", "handshake first")
            done = await ask(place, server, nats, "500ms" if is_waiting else "20s")
            print(name, done.code, done.err)
            # If each side waits for the other's first message, nothing was refused: the server may just be slow.
            assert done.code in ((75, 78) if is_waiting else (77, 78)), (name, done)
            assert re.fullmatch(r"error\[.*\n", done.err), name
            if way == "credentials file":
                assert CREDS_WHY.get(name, "") in done.err
                assert str(tmp_path) in done.err or name not in CREDS_WHY
            assert [secret for secret in place.secrets if secret in done.err + done.out] == []
        if way in ("handshake first", "tls"):
            assert "handshake_first" in done.err
