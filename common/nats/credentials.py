"""The credential and the TLS context of a NATS connection, checked before anything is sent, and contexts of `nats`.

Files are read again at each connect, so that they may be rotated. Messages name the file and the reason, never the
content. Contexts of the `nats` command, as selected by `nats.context` and `--context`, are read from
`$XDG_CONFIG_HOME/nats/context/NAME.json` (otherwise `~/.config/nats/context/NAME.json`), in the fields that the command
writes.
"""

from __future__ import annotations

import base64
import errno
import ipaddress
import json
import math
import os
import re
import shlex
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr

from common.clock import Clock
from common.errors import ConfigError, FloeError, Refused, Unavailable, certificate_hint, is_out_of_date
from common.logs import get_logger
from common.metrics import gauge
from common.settings.service import NatsSettings
from common.settings.types import FileSecret, regular_file

log = get_logger(__name__)

credential_expiry = gauge(
    "credential_expiry_timestamp_seconds",
    "End of the certificate or JWT in the file of a key, since 1970; +Inf: it has none; 0: it cannot be read.",
    ("key",),
)

PEM_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
# The validity in a certificate, two times one after the other: the second is its end, with two or four digits of year.
_VALIDITY = re.compile(rb"[\x17\x18][\x0d\x0f]\d{12,14}Z[\x17\x18][\x0d\x0f](\d{12,14}Z)")
_JWT = re.compile(rb"-----BEGIN NATS USER JWT-----\s+(\S+)")
_SEED = re.compile(rb"-----BEGIN USER NKEY SEED-----\s+(\S+)")


@dataclass(frozen=True, slots=True)
class Credential:
    """A credential for the NATS client.

    `label`: its name in messages, such as `credentials_file /etc/floe.creds`. `options`: for the NATS client.
    `is_secret`: True if the value sent to the server is itself a secret (a password, a token), not a signature.
    `public_nkey`: the public key to send if the credential is a bare NKEY, otherwise empty. `file`: the file with the
    secret, which may be read again.
    """

    label: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    public_nkey: str = ""
    file: FileSecret | None = None

    def reread(self) -> str:
        """Read a refused secret again and return it; empty if it is not in a file."""
        if self.file is not None:
            self.file.reread()
        return self.secret_from_file

    @property
    def secret_from_file(self) -> str:
        """The secret that is sent, if it is in a file that may be read again; otherwise empty."""
        return "" if self.file is None else self.file.get_secret_value()

    @property
    def is_secret(self) -> bool:
        return bool(self.options.keys() & {"password", "token"})


def load_credential(settings: NatsSettings, clock: Clock) -> Credential:
    """Return the credential that `settings` name.

    Raises Refused if a file is missing, unreadable or holds no credential.
    """
    seed = _File("nkey_seed_file", settings.nkey_seed_file)
    if settings.credentials_file or settings.jwt_file:
        jwt = _File("jwt_file", settings.jwt_file)
        if settings.credentials_file:
            jwt = seed = _File("credentials_file", settings.credentials_file)
        jwt.check_expiry(clock)
        show_expiry(f"nats.{jwt.key}", jwt.path)
        seed.public_key()
        return Credential(str(jwt), {"user_jwt_cb": jwt.jwt, "signature_cb": seed.sign})
    if settings.nkey_seed_file:
        return Credential(str(seed), {"signature_cb": seed.sign}, seed.public_key())
    if settings.user:
        secret, file = _secret_option(settings.password)
        return Credential(f"user {settings.user}", {"user": settings.user, "password": secret}, file=file)
    secret, file = _secret_option(settings.token)
    return Credential("token", {"token": secret}, file=file) if secret else Credential("no credential")


def _secret_option(secret: SecretStr) -> tuple[str | Callable[[], str], FileSecret | None]:
    if isinstance(secret, FileSecret):
        return secret.get_secret_value, secret
    return secret.get_secret_value(), None


@dataclass(frozen=True, slots=True)
class _File:
    """A file that holds a credential or a part of it; `key` is the setting that names it."""

    key: str
    path: str

    def __str__(self) -> str:
        return f"{self.key} {self.path}"

    def jwt(self) -> bytes:
        """Return the user JWT of a credentials file, or the whole content of a file that holds nothing else."""
        jwt = _user_jwt(self._read())
        if jwt.count(b".") != 2:
            raise self._credential_error("expected a NATS user JWT, found none")
        return jwt

    def sign(self, nonce: str) -> bytes:
        return base64.b64encode(self._key_pair().sign(nonce.encode()))

    def public_key(self) -> str:
        return str(self._key_pair().public_key.decode())

    def check_expiry(self, clock: Clock) -> None:
        try:
            expires = _jwt_expiry(self.jwt())
        except (ValueError, AttributeError, TypeError):
            raise self._credential_error("expected a NATS user JWT, found one that cannot be decoded") from None
        if expires <= clock.now():
            raise self._credential_error(f"the JWT expired {clock.now() - expires:.0f} s ago")

    def _key_pair(self) -> Any:
        import nkeys  # type: ignore[import-untyped]

        content = self._read()
        found = _SEED.search(content)
        try:
            return nkeys.from_seed(bytearray(found[1] if found else content.strip()))
        except Exception:  # the library's own message might contain the seed
            raise self._credential_error("expected an NKEY seed, found none that is valid") from None

    def _read(self) -> bytes:
        try:
            content = regular_file(self.path).read_bytes()
            mode = Path(self.path).stat().st_mode & 0o777
        except OSError as error:
            raise self._credential_error((error.strerror or "cannot be read").lower()) from None
        if mode & 0o077:
            hint = f"chmod 600 {shlex.quote(self.path)}"
            log.warning("credential exposed", action="credential_exposed", file=str(self), hint=hint)
        return content

    def _credential_error(self, reason: str) -> Refused:
        hint = "issue the credential again, or correct the path"
        return Refused(f"nats.{self}: {reason}", hint=hint, code="E-NATS-CREDS")


def _user_jwt(content: bytes) -> bytes:
    found = _JWT.search(content)
    return found[1] if found else content.strip()


def _jwt_expiry(jwt: bytes) -> float:
    body = jwt.split(b".")[1]
    claims = json.loads(base64.urlsafe_b64decode(body + b"=" * (-len(body) % 4)))
    return float(claims.get("exp") or math.inf)


def show_expiry(key: str, path: str) -> None:
    """Show when the certificate or JWT in the file of `key` ends. Each scrape reads the file, which may be renewed."""
    credential_expiry.labels(key).set_function(partial(expiry_of, path))


def expiry_of(path: str) -> float:
    """Return the end of the first certificate in a file, else of the user JWT, in seconds since 1970; infinite if it
    has none, 0 if it cannot be read.
    """
    try:
        content = regular_file(path).read_bytes()
        if (pem := PEM_CERTIFICATE.search(content.decode(errors="replace"))) is None:
            return _jwt_expiry(_user_jwt(content))
        [end] = _VALIDITY.findall(ssl.PEM_cert_to_DER_cert(pem[0]))[:1]
        return datetime.strptime(end.decode(), f"%{'y' if len(end) == 13 else 'Y'}%m%d%H%M%S%z").timestamp()
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return 0.0


def is_loopback(peer: object) -> bool:
    try:
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0]) if isinstance(peer, tuple) else None
    except (ValueError, IndexError):
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address is not None and (mapped or address).is_loopback


def plaintext_error(server: str, auth: Credential) -> ConfigError:
    hint = f"set nats.url: tls://{server}, or nats.allow_plaintext: true on a trusted network"
    text = f"nats server {server}: expected TLS for {auth.label}, found none; nothing was sent"
    return ConfigError(text, hint=hint, code="E-NATS-PLAINTEXT")


def wants_tls(settings: NatsSettings) -> bool:
    """True if the connection must be encrypted; otherwise it is encrypted only if the server requires it."""
    tls = settings.tls
    return any(tls.files) or tls.handshake_first or tls.insecure or any(u.startswith("tls://") for u in settings.url)


def tls_context(settings: NatsSettings) -> ssl.SSLContext:
    """Return the context that `nats.tls` describes. Raises ConfigError with the file and the reason."""
    tls, files = settings.tls, settings.tls.files
    try:
        context = ssl.create_default_context(cafile=regular_file(files.ca) if files.ca else None)
    except (OSError, ssl.SSLError) as error:
        raise tls_file_error(f"nats.tls.ca {files.ca}", error) from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if tls.insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if files.cert:
        try:
            context.load_cert_chain(regular_file(files.cert), regular_file(files.key))
            show_expiry("nats.tls.cert", files.cert)
        except (OSError, ssl.SSLError) as error:
            raise tls_file_error(f"nats.tls.cert {files.cert} with key {files.key}", error) from None
    return context


def tls_file_error(where: str, error: OSError, code: str = "E-NATS-TLS") -> ConfigError:
    """Return the error for a file of TLS that cannot be used. `where`: key and path; `error`: also an SSLError."""
    reason = getattr(error, "reason", None) or error.strerror or "not readable"
    return ConfigError(f"{where}: {str(reason).replace('_', ' ').lower()}", code=code)


_AUTH_ERROR = re.compile(r"authorization violation|authentication (expired|revoked)|invalid (user|client)", re.I)


def error_text(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text.removeprefix("nats: ").strip(" '")


def host(url: str) -> str:
    """Return `HOST:PORT` of a server's URL, without any credential in it."""
    return urlsplit(url if "://" in url else f"nats://{url}").netloc.rpartition("@")[2]


def is_auth_error(text: str) -> bool:
    return _AUTH_ERROR.search(text) is not None


def connect_error(error: BaseException, server: str, auth: Credential, settings: NatsSettings) -> BaseException:
    if isinstance(error, FloeError) or not isinstance(error, Exception):
        return error
    where, text = f"nats server {host(server)}", error_text(error)
    if isinstance(error, ssl.SSLError):
        return _handshake_error(error, where, settings)
    if is_auth_error(text):
        hint = "renew it, or compare it with the users that the server knows"
        return Refused(f"{where} refused {auth.label}: {text.lower()}", hint=hint, code="E-NATS-AUTH")
    if isinstance(error, TimeoutError):
        text = f"no answer within {settings.connect_timeout:g} s"
    return Unavailable(
        f"{where} cannot be reached: {text.lower()}", hint=_unreachable_hint(error, text, settings), code="E-NATS"
    )


def _unreachable_hint(error: Exception, text: str, settings: NatsSettings) -> str:
    """Return the hint for a server that cannot be reached."""
    if isinstance(error, TimeoutError) or text.startswith("empty response"):
        first = "set nats.tls.handshake_first: true if it begins with TLS"
        if wants_tls(settings):  # each side may wait for the other to begin
            other = "false" if settings.tls.handshake_first else "true"
            first = f"set nats.tls.handshake_first: {other} if the server has it so"
        return f"check that nats.url is a NATS server, that it answers others, and the network path to it; {first}"
    if f"[errno {errno.ECONNREFUSED}]" in text.lower():
        return "check that nats-server runs there, and its port in nats.url"
    if isinstance(error, socket.gaierror):
        return "check the name in nats.url, and this host's resolver"
    return "check nats.url, and the network path to it" if isinstance(error, OSError) else "see the server's log"


# The last two depend on the version of OpenSSL.
_NO_TLS = ("the server offers no tls", "wrong version number", "record layer failure")


def _handshake_error(error: ssl.SSLError, where: str, settings: NatsSettings) -> FloeError:
    text = getattr(error, "verify_message", "") or getattr(error, "reason", "") or str(error.args[-1])
    text = text.replace("_", " ").lower()
    kind: type[FloeError] = Unavailable if is_out_of_date(text) else ConfigError
    hint = f"checked with nats.tls.ca {settings.tls.files.ca or '(empty: the certificates of this system)'}"
    if todo := certificate_hint(text, "nats.url", "server"):
        hint += f"; {todo}"
    elif "certificate" in text:
        hint += "; it must contain the CA of the server's certificate"
    if "alert" in text:
        kind, hint = (
            Refused,
            f"the server refused nats.tls.cert {settings.tls.files.cert or '(none given)'}; see its log",
        )
    elif text in _NO_TLS:
        hint = "set nats.url: nats:// and no nats.tls; or enable TLS on the server, with the same handshake_first"
        if settings.tls.handshake_first:
            hint = "set nats.tls.handshake_first: false if the server has it so"
    return kind(f"{where}: tls failed: {text}", hint=hint, code="E-NATS-TLS")


# Contexts of the `nats` command

# Field of a context, and the key of `nats:` that it sets.
_PATH_FIELDS = {"creds": "credentials_file", "nkey": "nkey_seed_file"}
_TLS_PATH_FIELDS = ("ca", "cert", "key")
_SECRET_FIELDS = ("token", "password")
_TEXT_FIELDS = ("user", "jetstream_domain", "jetstream_api_prefix", "inbox_prefix")
# Not supported: another program provides the secret, it is in a Windows store, or it has no file of its own.
_UNSUPPORTED_FIELDS = (
    "nsc", "socks_proxy", "user_jwt", "user_seed", "windows_cert_store", "windows_cert_match_by", "windows_cert_match",
    "windows_ca_certs_match",
)  # fmt: skip
# If the configuration sets one key of a group, the context's keys of that group are all ignored.
_EXCLUSIVE_GROUPS = (
    ("credentials_file", "nkey_seed_file", "jwt_file", "token", "user", "password"),
    ("jetstream_domain", "jetstream_api_prefix"),
)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


def apply_context(settings: NatsSettings) -> NatsSettings:
    """Return `settings`, with each key that is not set there taken from the context that they name.

    Authentication in `settings` replaces all of the context's. Raises ConfigError if there is no such context, if it
    cannot be read, or if it uses something that Floe does not support.
    """
    if not settings.context:
        return settings
    path = _folder() / f"{settings.context}.json"
    found = _NatsContext(path, _read(path)).keys()
    own = settings.model_dump(exclude_unset=True, exclude={"context"})
    for group in _EXCLUSIVE_GROUPS:
        if any(own.get(key) for key in group):
            found = {key: value for key, value in found.items() if key not in group}
    own_tls = own.pop("tls", {})
    tls = own_tls if own_tls.get("scheme", "files") != "files" else {**found["tls"], **own_tls}
    try:
        return type(settings).model_validate({**found, **own, "tls": tls})
    except ValueError as error:
        raise ConfigError(f"nats.context {path}: {_first_problem(error)}") from None


def _folder() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "nats" / "context"


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(regular_file(path).read_bytes())
    except FileNotFoundError:
        raise _unknown_context(path) from None
    except OSError as error:
        raise ConfigError(f"nats.context {path}: {(error.strerror or 'cannot be read').lower()}") from None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise ConfigError(f"nats.context {path}: expected a JSON object, found none")
    return document


def _unknown_context(path: Path) -> ConfigError:
    names = sorted(each.stem for each in _folder().glob("*.json"))
    expected = f"expected one of {', '.join(names)}" if names else "expected a context of the nats command"
    return ConfigError(
        f"nats.context {path.stem}: {expected} in {_folder()}, found none of that name",
        hint="`nats context ls` lists those of this user, `nats context add` creates one",
    )


class _NatsContext:
    """A context that was read from `path`."""

    def __init__(self, path: Path, document: Mapping[str, Any]) -> None:
        self._path, self._document = path, document

    def keys(self) -> dict[str, Any]:
        """Return the keys of `nats:` that the context sets, always including `tls`. Raises ConfigError."""
        for name in _UNSUPPORTED_FIELDS:
            if self._document.get(name):
                raise self._field_error(name, "is not supported", "set the keys of nats: instead")
        found: dict[str, Any] = {field: text for field in _TEXT_FIELDS if (text := self._text(field))}
        found |= {ours: path for field, ours in _PATH_FIELDS.items() if (path := self._file(field))}
        found |= {field: self._secret(field) for field in _SECRET_FIELDS if self._text(field)}
        if prefix := found.get("jetstream_api_prefix"):
            found["jetstream_api_prefix"] = prefix.removesuffix(".")
        if urls := self._text("url"):
            parts = (part.strip() for part in urls.split(","))
            found["url"] = tuple(part if "://" in part else f"nats://{part}" for part in parts)
        found["tls"] = {field: path for field in _TLS_PATH_FIELDS if (path := self._file(field))}
        if self._document.get("tls_first"):
            found["tls"]["handshake_first"] = True
        return found

    def _text(self, field: str) -> str:
        value = self._document.get(field) or ""
        if not isinstance(value, str):
            raise self._field_error(field, "expected text, found something else")
        return value

    def _file(self, field: str) -> str:
        """Return a path as the command reads it: without `file://`, with `~` and variables expanded; empty for none."""
        text = self._text(field).removeprefix("file://")
        if _SCHEME.match(text):
            raise self._field_error(field, "expected a path, found a reference of another kind", "put it into a file")
        return os.path.expanduser(os.path.expandvars(text))

    def _secret(self, field: str) -> FileSecret:
        """Return a secret of the context; like a secret in any other file, it can be read again."""

        def read(path: str) -> str:
            try:
                return _NatsContext(self._path, _read(Path(path)))._secret_text(field)
            except ConfigError as error:
                raise ValueError(str(error)) from None

        return FileSecret(self._secret_text(field), str(self._path), read)

    def _secret_text(self, field: str) -> str:
        text = self._text(field)
        if not text:
            raise self._field_error(field, "expected a secret, found nothing")
        if text.lower().startswith(("env://", "file://", "op://", "data:")):
            hint = "set the keys of nats: instead"
            raise self._field_error(field, "expected the secret itself, found a reference", hint)
        return text

    def _field_error(self, field: str, problem: str, hint: str = "") -> ConfigError:
        return ConfigError(f"nats.context {self._path}: {field}: {problem}", hint=hint)


def _first_problem(error: ValueError) -> str:
    """Return the first wrong key and the reason; pydantic's own text would show the values, secrets included."""
    problems: list[dict[str, Any]] = getattr(error, "errors", list)()
    first = problems[0] if problems else {}
    return f"{'.'.join(str(part) for part in first.get('loc', ()))}: {first.get('msg', 'not valid')}".strip(": ")
