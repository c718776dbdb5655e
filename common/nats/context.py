"""Contexts of the `nats` command, as selected by `nats.context` and `--context`.

They are read from `$XDG_CONFIG_HOME/nats/context/NAME.json` (otherwise `~/.config/nats/context/NAME.json`), in the
fields that the command writes. Error messages name the file and the field, never the content.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError
from common.settings.types import FileSecret, regular_file

if TYPE_CHECKING:
    from common.settings.service import NatsSettings

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
        for field in _UNSUPPORTED_FIELDS:
            if self._document.get(field):
                raise self._field_error(field, "is not supported", "set the keys of nats: instead")
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
