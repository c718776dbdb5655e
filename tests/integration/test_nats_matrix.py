"""Each way to authenticate, against a server that requires it; each wrong secret is one line, exit 77 or 78."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nkeys
import pytest
import yaml

from infra.local.nats import NatsServer
from tests.support.commands import Done, floe
from tests.support.identities import Operator, credentials, jwt, key_text, make_certificates, new_key, server_tls

CANARY = "canary-never-shown"


@dataclass
class Way:
    """One way: the server's side, and the right and the wrong ones of `nats:`. `secrets`: what no output may hold."""

    server: dict[str, Any]
    right: dict[str, Any]
    wrong: dict[str, dict[str, Any]]
    secrets: list[str] = field(default_factory=lambda: [CANARY])


@dataclass
class Place:
    """A folder with certificates; what a way needs is written there."""

    folder: Path
    certificates: Path

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


def tls(place: Place) -> Way:
    server = {"tls": server_tls(place.certificates)}
    wrong = {"another authority": place.tls(ca="other"), "the system's authorities": {}}
    return Way(server, place.tls(), {**wrong, "handshake first": place.tls(handshake_first=True)})


def mutual_tls(place: Place) -> Way:
    server = {"tls": server_tls(place.certificates, verify=True)}
    wrong = {"a stranger's certificate": place.tls("stranger"), "no certificate": place.tls()}
    wrong["a key of another"] = {"tls": {**place.tls("client")["tls"], "key": place.pem("stranger.key")}}
    return Way(server, place.tls("client"), wrong)


def handshake_first(place: Place) -> Way:
    server = {"tls": server_tls(place.certificates, handshake_first=True)}
    wrong = {"another authority": place.tls(ca="other", handshake_first=True), "TLS on request": place.tls()}
    return Way(server, place.tls(handshake_first=True), wrong)


def credentials_file(place: Place) -> Way:
    operator, stranger = Operator(), Operator()
    right = credentials(jwt(operator.claims, operator.owner), operator.user)
    wrong = {
        "of another account": credentials(jwt(stranger.claims, stranger.owner), stranger.user),
        "another's seed": credentials(jwt(operator.claims, operator.owner), stranger.user),
        "expired": credentials(jwt({**operator.claims, "exp": 1000}, operator.owner), operator.user),
        "no credential": CANARY,
    }
    return Way(
        {"extra": operator.config()},
        {"credentials_file": place.write("right.creds", right)},
        {name: {"credentials_file": place.write(f"{name}.creds", text)} for name, text in wrong.items()},
        [CANARY, operator.user.seed.decode(), stranger.user.seed.decode(), jwt(operator.claims, operator.owner)],
    )


def nkey_seed(place: Place) -> Way:
    user, other = new_key(nkeys.PREFIX_BYTE_USER), new_key(nkeys.PREFIX_BYTE_USER)
    return Way(
        {"extra": f"authorization {{ users: [{{nkey: {key_text(user)}}}] }}"},
        {"nkey_seed_file": place.write("right.nk", user.seed.decode())},
        {
            "another's": {"nkey_seed_file": place.write("other.nk", other.seed.decode())},
            "no seed": {"nkey_seed_file": place.write("no.nk", CANARY)},
            "no file": {"nkey_seed_file": str(place.folder / "nothing.nk")},
        },
        [CANARY, user.seed.decode(), other.seed.decode()],
    )


def jwt_and_seed(place: Place) -> Way:
    operator, other = Operator(), new_key(nkeys.PREFIX_BYTE_USER)
    signed = jwt(operator.claims, operator.owner)
    right = {
        "jwt_file": place.write("user.jwt", signed),
        "nkey_seed_file": place.write("u.nk", operator.user.seed.decode()),
    }
    return Way(
        {"extra": operator.config()},
        right,
        {
            "another's seed": {**right, "nkey_seed_file": place.write("o.nk", other.seed.decode())},
            "no JWT": {**right, "jwt_file": place.write("no.jwt", CANARY)},
        },
        [CANARY, operator.user.seed.decode(), other.seed.decode(), signed],
    )


def token(place: Place) -> Way:
    return Way(
        {"extra": 'authorization { token: "right-canary" }'},
        {"token": "right-canary"},
        {"another": {"token": CANARY}, "of a file": {"token_file": place.write("t", CANARY)}, "none": {}},
        [CANARY, "right-canary"],
    )


def user_and_password(place: Place) -> Way:
    return Way(
        {"users": {"floe": "right-canary"}},
        {"user": "floe", "password_file": place.write("right", "right-canary")},
        {
            "another password": {"user": "floe", "password": CANARY},
            "another user": {"user": "nobody", "password": CANARY},
            "of a file": {"user": "floe", "password_file": place.write("wrong", CANARY)},
            "an empty file": {"user": "floe", "password_file": place.write("empty", "")},
        },
        [CANARY, "right-canary"],
    )


WAYS: tuple[Callable[[Place], Way], ...] = (
    *(tls, mutual_tls, handshake_first),
    *(credentials_file, nkey_seed, jwt_and_seed, token, user_and_password),
)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


async def ask(place: Place, server: NatsServer, nats: dict[str, Any], timeout: str = "20s") -> Done:
    """A command that connects, looks at one stream, and ends."""
    config = {
        "site": "s",
        "nats": {"url": server.url, "connect_timeout": timeout, **nats},
        "store": {"url": f"file://{place.folder}/store"},
        "egress": {"feeds": [{"stream": "NODES"}], "monitor": {"listen": ""}},
    }
    return await floe("egress", "init", "-c", place.write("floe.yaml", yaml.safe_dump(config)))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_a_way_opens_a_server_that_requires_it_and_each_wrong_secret_is_one_line(
    way: Callable[[Place], Way], tmp_path: Path, certificates: Path, stack: ExitStack
):
    place = Place(tmp_path, certificates)
    found = way(place)
    server = stack.enter_context(NatsServer(**found.server))
    done = await ask(place, server, found.right)
    assert "stream NODES does not exist" in done.err, done
    assert "FLOE_STATE" in done.out, "it wrote nothing"
    for name, nats in found.wrong.items():
        is_waiting = name in ("TLS on request", "handshake first")
        done = await ask(place, server, nats, "500ms" if is_waiting else "20s")
        print(name, done.code, done.err)
        # Where each side waits for the other's first word, nothing was refused: the server may just be slow.
        assert done.code in ((75, 78) if is_waiting else (77, 78)), (name, done)
        lines = [line for line in done.err.splitlines() if line.startswith("error[")]
        assert lines == done.err.splitlines(), name
        assert len(lines) == 1, name
        for secret in found.secrets:
            assert secret not in done.err + done.out, name
    if way in (handshake_first, tls):
        assert "handshake_first" in done.err
