"""What failed on a NATS connection, in one line and as one of Floe's errors."""

from __future__ import annotations

import re
import ssl
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from common.errors import ConfigError, FloeError, Refused, Unavailable
from common.jetstream.credentials import Credential

if TYPE_CHECKING:
    from common.settings.nats import NatsSettings

_REFUSED = re.compile(r"authorization violation|authentication (expired|revoked)|invalid (user|client)", re.I)
_TLS = re.compile(r"certificate|ssl|tls", re.I)


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
    if "alert" in said:
        hint = f"the server refused nats.tls.cert {settings.tls.cert or '(none given)'}"
        return Refused(f"{where}: tls failed: {said}", hint=hint, code="E-NATS-TLS")
    if said in ("the server offers no tls", "wrong version number"):
        hint = "nats.url: nats:// and no nats.tls; or TLS on the server, with handshake_first as there"
        return ConfigError(f"{where}: tls failed: {said}", hint=hint, code="E-NATS-TLS")
    hint = f"checked with nats.tls.ca {settings.tls.ca or '(empty: the certificates of this system)'}"
    return ConfigError(f"{where}: tls failed: {said}", hint=hint, code="E-NATS-TLS")
