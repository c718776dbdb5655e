"""Keys, JWTs and certificates, made for a test."""

import base64
import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nkeys

from infra.local.nats import TlsFiles
from tests.support import canaries


def new_key(prefix: int) -> Any:
    seed = nkeys.encode_seed(os.urandom(32), prefix)
    canaries.note(bytes(seed).decode())
    return nkeys.from_seed(bytearray(seed))


def jwt(claims: dict[str, Any], signer: Any) -> str:
    def part(document: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(document).encode()).decode().rstrip("=")

    text = part({"typ": "JWT", "alg": "ed25519-nkey"}) + "." + part(claims)
    return text + "." + base64.urlsafe_b64encode(signer.sign(text.encode())).decode().rstrip("=")


def credentials(user_jwt: str, user: Any) -> str:
    return (
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )


def key_text(key: Any) -> str:
    return str(key.public_key.decode())


def account(name: str, key: Any, root: Any) -> str:
    unlimited = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
    storage = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1} if name == "A" else {}
    nats = {"limits": {**unlimited, **storage, "wildcards": True}, "type": "account", "version": 2}
    return jwt({"jti": name, "iat": 1, "iss": key_text(root), "name": name, "sub": key_text(key), "nats": nats}, root)


@dataclass
class Operator:
    """An operator, accounts and a user. `config` makes a server trust them; `claims` are the user's."""

    user: Any = field(default_factory=lambda: new_key(nkeys.PREFIX_BYTE_USER))
    owner: Any = field(default_factory=lambda: new_key(nkeys.PREFIX_BYTE_ACCOUNT))

    @property
    def claims(self) -> dict[str, Any]:
        rights = {"subs": -1, "data": -1, "payload": -1, "type": "user", "version": 2, "pub": {}, "sub": {}}
        who = {"iss": key_text(self.owner), "sub": key_text(self.user)}
        return {"jti": "u", "iat": 1, "name": "U", "nats": rights, **who}

    def config(self) -> str:
        root, system = new_key(nkeys.PREFIX_BYTE_OPERATOR), new_key(nkeys.PREFIX_BYTE_ACCOUNT)
        nats = {"type": "operator", "version": 2, "system_account": key_text(system)}
        root_jwt = jwt(
            {"jti": "o", "iat": 1, "iss": key_text(root), "name": "O", "sub": key_text(root), "nats": nats}, root
        )
        accounts = "\n".join(
            f'{key_text(key)}: "{account(name, key, root)}"' for name, key in (("SYS", system), ("A", self.owner))
        )
        return f"operator: {root_jwt}\nresolver: MEMORY\nresolver_preload: {{\n{accounts}\n}}"


def _openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def authority(folder: Path, name: str = "ca") -> None:
    """Write `{name}.pem` and `{name}.key`: a CA."""
    usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")  # Python 3.13 requires it
    words = ("-x509", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2", "-subj", f"/CN={name}")
    _openssl(folder, "req", *words, *usage)


def certificate(folder: Path, name: str, alternative: str, ca: str = "ca") -> None:
    """Write `{name}.pem` and `{name}.key`, for `alternative` such as `DNS:client`, signed by a CA in the folder."""
    _openssl(folder, "req", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
    (folder / f"{name}.ext").write_text(f"subjectAltName={alternative}\nauthorityKeyIdentifier=keyid\n")
    signed = ("-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext")
    _openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")


def make_certificates(folder: Path) -> Path:
    """Write a CA, a server's and a client's certificate, another CA with a client's, and one for another host."""
    for ca in ("ca", "other"):
        authority(folder, ca)
    for name, alternative, ca in (
        ("server", "IP:127.0.0.1", "ca"),
        ("client", "DNS:client", "ca"),
        ("elsewhere", "DNS:elsewhere.example", "ca"),
        ("stranger", "DNS:client", "other"),
    ):
        certificate(folder, name, alternative, ca)
    return folder


def server_tls(folder: Path, name: str = "server", **more: Any) -> TlsFiles:
    return TlsFiles(folder / f"{name}.pem", folder / f"{name}.key", folder / "ca.pem", **more)
