"""Contexts of the `nats` command as a source of settings."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError

if TYPE_CHECKING:
    from common.settings.nats import NatsSettings

# Key of a context file, and of `nats:`
_NAMES = {
    "creds": "credentials_file",
    "nkey": "nkey_seed_file",
    "token": "token",
    "user": "user",
    "password": "password",
    "jetstream_domain": "jetstream_domain",
    "inbox_prefix": "inbox_prefix",
}
_TLS_NAMES = {"ca": "ca", "cert": "cert", "key": "key", "tls_first": "handshake_first"}
_UNSUPPORTED = ("nsc", "jetstream_api_prefix", "user_jwt", "user_seed", "socks_proxy")


def with_context(settings: NatsSettings) -> NatsSettings:
    """`settings`, where a key that is not set there comes from the context they name.

    Raises ConfigError where the context cannot be read or holds what Floe does not support.
    """
    if not settings.context:
        return settings
    path = context_path(settings.context)
    found = _translate(_read(path), path)
    tls = {**found.pop("tls"), **settings.tls.model_dump(exclude_unset=True)}
    own = settings.model_dump(exclude_unset=True, exclude={"tls", "context"})
    try:
        return type(settings).model_validate({**found, **own, "tls": tls})
    except ValueError as error:
        raise ConfigError(f"nats.context {path}: {_first_problem(error)}") from None


def context_path(name: str) -> Path:
    """Where the `nats` command keeps the context `name`."""
    home = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(home) / "nats" / "context" / f"{name}.json"


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
            raise ConfigError(
                f"nats.context {path}: {key} is not supported", hint="set the keys of nats: instead"
            )
    found = {ours: document[theirs] for theirs, ours in _NAMES.items() if document.get(theirs)}
    found["tls"] = {ours: document[theirs] for theirs, ours in _TLS_NAMES.items() if document.get(theirs)}
    if url := document.get("url"):
        found["url"] = tuple(part.strip() for part in str(url).split(","))
    return found


def _first_problem(error: ValueError) -> str:
    """What is wrong with which key; pydantic's own text would show the values, secrets among them."""
    problems: list[dict[str, Any]] = getattr(error, "errors", list)()
    first = problems[0] if problems else {}
    return f"{'.'.join(str(part) for part in first.get('loc', ()))}: {first.get('msg', 'not valid')}".strip(
        ": "
    )
