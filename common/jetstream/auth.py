"""What a connection needs from files: the credential and the TLS context, checked before anything is sent.

Files are read again at each connect, so that they may be rotated. Messages name the file and the reason,
never the content.
"""

from __future__ import annotations

import base64
import json
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nkeys  # type: ignore[import-untyped]

from common.clock import Clock
from common.errors import ConfigError, Refused
from common.service.logs import get_logger

if TYPE_CHECKING:
    from common.settings.nats import NatsSettings

log = get_logger("jetstream.auth")

_JWT = re.compile(rb"-----BEGIN NATS USER JWT-----\s+(\S+)")
_SEED = re.compile(rb"-----BEGIN USER NKEY SEED-----\s+(\S+)")


@dataclass(frozen=True, slots=True)
class Credential:
    """`label`: how messages name it, such as `credentials_file /etc/floe.creds`; `options`: for the NATS
    client.

    `public_nkey`: the public key to show where a bare NKEY is the credential, else empty.
    """

    label: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    public_nkey: str = ""


def credential(settings: NatsSettings, clock: Clock) -> Credential:
    """The credential that `settings` name.

    Raises Refused where a file is missing, unreadable or no credential.
    """
    if settings.credentials_file:
        path = str(settings.credentials_file)
        return _with_jwt(_File("credentials_file", path), _File("credentials_file", path), clock)
    if settings.jwt_file:
        seed = _File("nkey_seed_file", str(settings.nkey_seed_file))
        return _with_jwt(_File("jwt_file", str(settings.jwt_file)), seed, clock)
    if settings.nkey_seed_file:
        seed = _File("nkey_seed_file", str(settings.nkey_seed_file))
        return Credential(str(seed), {"signature_cb": seed.sign}, seed.public_key())
    if settings.user:
        return Credential(
            f"user {settings.user}", {"user": settings.user, "password": _plain(settings.password)}
        )
    token = _plain(settings.token)
    return Credential("token", {"token": token}) if token else Credential("no credential")


def _with_jwt(jwt: _File, seed: _File, clock: Clock) -> Credential:
    jwt.check_expiry(clock)
    seed.public_key()
    return Credential(str(jwt), {"user_jwt_cb": jwt.jwt, "signature_cb": seed.sign})


def _plain(secret: Any) -> str:
    """The text of a SecretStr; empty for None."""
    return str(secret.get_secret_value()) if secret is not None else ""


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
            log.warning("credential readable by others", action="credential_mode", file=str(self))
        return content

    def _refused(self, reason: str) -> Refused:
        hint = "issue the credential anew or correct the path"
        return Refused(f"nats.{self}: {reason}", hint=hint, code="E-NATS-CREDS")


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
