"""What a connection needs from files: the credential and the TLS context, checked before anything is sent.

Files are read again at each connect, so that they may be rotated. Messages name the file and the reason,
never the content.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import os
import re
import shlex
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import nkeys  # type: ignore[import-untyped]
from pydantic import SecretStr

from common.clock import Clock
from common.errors import ConfigError, FloeError, Refused, Unavailable
from common.logs import get_logger
from common.settings.types import FileSecret

if TYPE_CHECKING:
    from common.settings.service import NatsSettings

log = get_logger("jetstream.auth")


_JWT = re.compile(rb"-----BEGIN NATS USER JWT-----\s+(\S+)")
_SEED = re.compile(rb"-----BEGIN USER NKEY SEED-----\s+(\S+)")


@dataclass(frozen=True, slots=True)
class Credential:
    """`label`: how messages name it, such as `credentials_file /etc/floe.creds`; `options`: for the NATS
    client. `is_secret`: whether what is shown to the server is a secret itself (a password, a token), not a
    signature; `file`: where it stands in a file that may be read again.

    `public_nkey`: the public key to show where a bare NKEY is the credential, else empty.
    """

    label: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    public_nkey: str = ""
    file: FileSecret | None = None

    def renew(self) -> str:
        """Read again what was refused; what it is now, empty where it stands in no file."""
        if self.file is not None:
            self.file.read_again()
        return self.in_file

    @property
    def in_file(self) -> str:
        """The secret that is shown, where it stands in a file that may be read again; else empty."""
        return "" if self.file is None else self.file.get_secret_value()

    @property
    def is_secret(self) -> bool:
        return bool(self.options.keys() & {"password", "token"})


def credential(settings: NatsSettings, clock: Clock) -> Credential:
    """The credential that `settings` name.

    Raises Refused where a file is missing, unreadable or no credential.
    """
    seed = _File("nkey_seed_file", settings.nkey_seed_file)
    if settings.credentials_file or settings.jwt_file:
        jwt = _File("jwt_file", settings.jwt_file)
        if settings.credentials_file:
            jwt = seed = _File("credentials_file", settings.credentials_file)
        jwt.check_expiry(clock)
        seed.public_key()
        return Credential(str(jwt), {"user_jwt_cb": jwt.jwt, "signature_cb": seed.sign})
    if settings.nkey_seed_file:
        return Credential(str(seed), {"signature_cb": seed.sign}, seed.public_key())
    if settings.user:
        shown, file = _shown(settings.password)
        return Credential(f"user {settings.user}", {"user": settings.user, "password": shown}, file=file)
    shown, file = _shown(settings.token)
    return Credential("token", {"token": shown}, file=file) if shown else Credential("no credential")


def _shown(secret: SecretStr) -> tuple[str | Callable[[], str], FileSecret | None]:
    """A secret as the NATS client takes it: of a file what it is when it is shown."""
    if isinstance(secret, FileSecret):
        return secret.get_secret_value, secret
    return secret.get_secret_value(), None


@dataclass(frozen=True, slots=True)
class _File:
    """A file that holds a credential or a part of one; `key` is the setting that names it."""

    key: str
    path: str

    def __str__(self) -> str:
        return f"{self.key} {self.path}"

    def jwt(self) -> bytes:
        """The user JWT of a credentials file, or the whole of a file that holds nothing else."""
        content = self._read()
        found = _JWT.search(content)
        jwt = found[1] if found else content.strip()
        if jwt.count(b".") != 2:
            raise self._refused("expected a NATS user JWT, found none")
        return jwt

    def sign(self, nonce: str) -> bytes:
        """The signature over `nonce`, in Base64, by the seed in the file."""
        return base64.b64encode(self._key_pair().sign(nonce.encode()))

    def public_key(self) -> str:
        return str(self._key_pair().public_key.decode())

    def check_expiry(self, clock: Clock) -> None:
        try:
            body = self.jwt().split(b".")[1]
            claims = json.loads(base64.urlsafe_b64decode(body + b"=" * (-len(body) % 4)))
            expires = float(claims.get("exp") or 0)
        except (ValueError, AttributeError, TypeError):
            raise self._refused("expected a NATS user JWT, found one that cannot be decoded") from None
        if expires and expires <= clock.now():
            raise self._refused(f"the JWT expired {clock.now() - expires:.0f} s ago")

    def _key_pair(self) -> Any:
        content = self._read()
        found = _SEED.search(content)
        try:
            return nkeys.from_seed(bytearray(found[1] if found else content.strip()))
        except Exception:  # whatever the library says might carry the seed
            raise self._refused("expected an NKEY seed, found none that is valid") from None

    def _read(self) -> bytes:
        try:
            content = Path(self.path).read_bytes()
            mode = Path(self.path).stat().st_mode & 0o777
        except OSError as error:
            raise self._refused((error.strerror or "cannot be read").lower()) from None
        if mode & 0o077:
            hint = f"chmod 600 {shlex.quote(self.path)}"
            log.warning("credential readable by others", action="credential_mode", file=str(self), hint=hint)
        return content

    def _refused(self, reason: str) -> Refused:
        hint = "issue the credential anew or correct the path"
        return Refused(f"nats.{self}: {reason}", hint=hint, code="E-NATS-CREDS")


def is_loopback(peer: object) -> bool:
    """Whether the address that a socket is connected to (its peername) is this host's own."""
    try:
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0]) if isinstance(peer, tuple) else None
    except (ValueError, IndexError):
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address is not None and (mapped or address).is_loopback


def plaintext(server: str, auth: Credential) -> ConfigError:
    """A credential that is a secret is not sent to `server`, because the connection is not encrypted."""
    hint = f"nats.url: tls://{server}, or nats.allow_plaintext: true where nobody else is on the way"
    text = f"nats server {server}: expected TLS for {auth.label}, found none; nothing was sent"
    return ConfigError(text, hint=hint, code="E-NATS-PLAINTEXT")


def wants_tls(settings: NatsSettings) -> bool:
    """Whether the connection must be encrypted; else it is when the server asks for it."""
    tls = settings.tls
    return bool(tls.ca or tls.cert or tls.key or tls.handshake_first or tls.insecure) or any(
        url.startswith("tls://") for url in settings.url
    )


def tls_context(settings: NatsSettings) -> ssl.SSLContext:
    """The context that `nats.tls` describes. Raises ConfigError naming the file and the reason."""
    tls = settings.tls
    try:
        context = ssl.create_default_context(cafile=tls.ca or None)
    except (OSError, ssl.SSLError) as error:
        raise _tls_error("ca", tls.ca, error) from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if tls.insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if tls.cert:
        try:
            context.load_cert_chain(tls.cert, tls.key or None)
        except (OSError, ssl.SSLError) as error:
            raise _tls_error("cert", f"{tls.cert} with key {tls.key or tls.cert}", error) from None
    return context


def _tls_error(key: str, path: str, error: OSError) -> ConfigError:
    reason = getattr(error, "reason", None) or error.strerror or "not readable"
    return ConfigError(f"nats.tls.{key} {path}: {str(reason).replace('_', ' ').lower()}", code="E-NATS-TLS")


# Key of a context file, and of `nats:`
_SAME = ("token", "user", "password", "jetstream_domain", "inbox_prefix")
_NAMES = {"creds": "credentials_file", "nkey": "nkey_seed_file"} | dict(zip(_SAME, _SAME, strict=True))
_TLS_NAMES = {"ca": "ca", "cert": "cert", "key": "key", "tls_first": "handshake_first"}
_UNSUPPORTED = ("nsc", "jetstream_api_prefix", "user_jwt", "user_seed", "socks_proxy")


def with_context(settings: NatsSettings) -> NatsSettings:
    """`settings`, where a key that is not set there comes from the context they name.

    Raises ConfigError where the context cannot be read or holds what Floe does not support.
    """
    if not settings.context:
        return settings
    home = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    path = Path(home) / "nats" / "context" / f"{settings.context}.json"
    found = _translate(_read(path), path)
    tls = {**found.pop("tls"), **settings.tls.model_dump(exclude_unset=True)}
    own = settings.model_dump(exclude_unset=True, exclude={"tls", "context"})
    try:
        return type(settings).model_validate({**found, **own, "tls": tls})
    except ValueError as error:
        raise ConfigError(f"nats.context {path}: {_first_problem(error)}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"nats.context {path}: {(error.strerror or 'cannot be read').lower()}") from None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise ConfigError(f"nats.context {path}: expected a JSON object")
    return document


def _translate(document: dict[str, Any], path: Path) -> dict[str, Any]:
    for key in _UNSUPPORTED:
        if document.get(key):
            raise ConfigError(f"nats.context {path}: {key} is not supported", hint="set the keys of nats: instead")
    found = {ours: document[theirs] for theirs, ours in _NAMES.items() if document.get(theirs)}
    found["tls"] = {ours: document[theirs] for theirs, ours in _TLS_NAMES.items() if document.get(theirs)}
    if url := document.get("url"):
        found["url"] = tuple(part.strip() for part in str(url).split(","))
    return found


def _first_problem(error: ValueError) -> str:
    """What is wrong with which key; pydantic's own text would show the values, secrets among them."""
    problems: list[dict[str, Any]] = getattr(error, "errors", list)()
    first = problems[0] if problems else {}
    return f"{'.'.join(str(part) for part in first.get('loc', ()))}: {first.get('msg', 'not valid')}".strip(": ")


_REFUSED = re.compile(r"authorization violation|authentication (expired|revoked)|invalid (user|client)", re.I)


def reason(error: BaseException) -> str:
    """What an exception of the NATS client says, without its decoration."""
    text = str(error) or type(error).__name__
    return text.removeprefix("nats: ").strip(" '")


def host(url: str) -> str:
    """`HOST:PORT` of a server's URL, never a credential that stands in it."""
    return urlsplit(url if "://" in url else f"nats://{url}").netloc.rpartition("@")[2]


def is_refusal(text: str) -> bool:
    """Whether a server says so that it does not take the credential."""
    return _REFUSED.search(text) is not None


def explain(error: BaseException, server: str, auth: Credential, settings: NatsSettings) -> BaseException:
    """What failed at the first connect; an error of Floe and what is no error stay as they are."""
    if isinstance(error, FloeError) or not isinstance(error, Exception):
        return error
    where, text = f"nats server {host(server)}", reason(error)
    if isinstance(error, ssl.SSLError):
        return _explain_tls(error, where, settings)
    if is_refusal(text):
        return Refused(f"{where} refused {auth.label}: {text.lower()}", code="E-NATS-AUTH")
    if isinstance(error, TimeoutError):
        text = f"no answer within {settings.connect_timeout:g} s"
    return Unavailable(f"{where} cannot be reached: {text.lower()}", code="E-NATS")


def _explain_tls(error: ssl.SSLError, where: str, settings: NatsSettings) -> FloeError:
    said = getattr(error, "verify_message", "") or getattr(error, "reason", "") or str(error.args[-1])
    said = said.replace("_", " ").lower()
    kind: type[FloeError] = ConfigError
    hint = f"checked with nats.tls.ca {settings.tls.ca or '(empty: the certificates of this system)'}"
    if "alert" in said:
        kind, hint = Refused, f"the server refused nats.tls.cert {settings.tls.cert or '(none given)'}"
    elif said in ("the server offers no tls", "wrong version number"):
        hint = "nats.url: nats:// and no nats.tls; or TLS on the server, with handshake_first as there"
    return kind(f"{where}: tls failed: {said}", hint=hint, code="E-NATS-TLS")
