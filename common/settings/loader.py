"""Reads configuration files: all problems at once, each with its place, and never a secret in a message."""

from __future__ import annotations

import ipaddress
import os
import shlex
import stat
from collections.abc import Mapping
from urllib.parse import urlsplit

from pydantic import ValidationError

from common.errors import ConfigError
from common.service.config_document import Document
from common.service.config_problems import explain
from common.service.config_unbuilt import refuse_unrunnable
from common.service.config_values import secrets_in, to_values
from common.settings.root import Settings
from common.settings.types import FROM_FILE
from common.settings.yaml import MAX_BYTES, Keys, Problems, parse_yaml, read_text, refuse


def load(path: str) -> Settings:
    """The configuration in the file `path`, which holds one document.

    Raises ConfigError with a line for each problem, keys whose feature this version does not have included.
    """
    return load_document(path).settings


def load_document(path: str) -> Document:
    """As `load`, with the places of all values and the warnings."""
    data, warnings = _read(path)
    documents = parse_documents(data, path)
    if len(documents) != 1:
        raise ConfigError(
            f"{path}: expected one document, found {len(documents)}",
            hint=f"floe config check {path} checks them all; a command takes a file with one",
        )
    refuse_unrunnable(documents[0])
    document = documents[0]
    return Document(document.settings, document.root, document.name, (*warnings, *document.warnings))


def parse(text: str, name: str) -> list[Settings]:
    """The configurations of all YAML documents in `text`, which `name` stands for in messages.

    Raises ConfigError with a line for each problem. Does not ask whether a key's feature is built.
    """
    return [document.settings for document in parse_documents(text.encode(), name)]


def read_documents(path: str) -> list[Document]:
    """The documents of the file `path`. Raises ConfigError as `parse`."""
    data, warnings = _read(path)
    found = parse_documents(data, path)
    return [Document(d.settings, d.root, d.name, (*warnings, *d.warnings)) for d in found]


def parse_documents(data: bytes, name: str, environment: Mapping[str, str] | None = None) -> list[Document]:
    """As `parse`, with the places of all values. `environment`: for `${VAR}`; None: that of the process."""
    problems = Problems(name)
    text = read_text(data, problems)
    refuse(problems)
    roots = parse_yaml(text, problems)
    found = [_document(root, problems, os.environ if environment is None else environment) for root in roots]
    refuse(problems)
    return [document for document in found if document is not None]


def _document(root: Keys, problems: Problems, environment: Mapping[str, str]) -> Document | None:
    values = to_values(root, problems, environment)
    try:
        settings = Settings.model_validate(values, context=FROM_FILE)
    except ValidationError as error:
        explain(error, root, problems)
        return None
    cautions = [f"compaction.{key}: {text}" for key, text in settings.compaction.cautions()]
    warnings = (*_insecure(settings), *_exposed(root, problems.name, settings), *cautions)
    return Document(settings, root, problems.name, warnings)


def _insecure(settings: Settings) -> list[str]:
    sections = {
        "egress.nats.tls": settings.egress.nats.tls.insecure,
        "ingress.nats.tls": settings.ingress.nats.tls.insecure,
        "store.tls": settings.store.tls.insecure,
    }
    found = [
        f"{name}.insecure: the server's certificate is not checked" for name, on in sections.items() if on
    ]
    clear = settings.store.endpoint_url
    if clear.startswith("http://") and not _is_own(urlsplit(clear).hostname or ""):
        found.append(f"store.endpoint_url: {clear}: payloads are sent in clear (keys are not); use https://")
    return found


def _is_own(host: str) -> bool:
    """Whether a host of an address is this one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _exposed(root: Keys, name: str, settings: Settings) -> list[str]:
    """Files that hold secrets and that others may read: this one, and those that it names."""
    inline, files = secrets_in(root)
    nats = (settings.egress.nats, settings.ingress.nats)
    files += [file for each in nats for file in (each.credentials_file, each.nkey_seed_file, each.tls.key)]
    warnings = [
        f"{file}: a secret that others may read: {chmod}"
        for file in dict.fromkeys(files)
        if (chmod := chmod_against_others(file))
    ]
    if inline and (chmod := chmod_against_others(name)):
        warnings.append(f"{name}: holds {' and '.join(inline)}, and others may read it: {chmod}")
    return warnings


def chmod_against_others(path: str) -> str:
    """The command that takes from others what they may read of a file; empty where they may not, or there is
    no such file.

    The group of the file counts as others only where it is the owner's own, as files are made by default: a
    file of another owner is read through its group, and another group was chosen.
    """
    try:
        found = os.stat(path) if path else None
    except (OSError, ValueError):
        return ""
    if found is None or not stat.S_ISREG(found.st_mode):
        return ""
    is_chosen = found.st_uid != os.geteuid() or found.st_gid != os.getegid()
    if not found.st_mode & (stat.S_IROTH if is_chosen else stat.S_IROTH | stat.S_IRGRP):
        return ""
    return f"chmod {640 if is_chosen else 600} {shlex.quote(path)}"


def read_bytes(path: str) -> bytes:
    """The content of a file of at most 1 MiB; one byte more of a longer one. Raises ConfigError."""
    return _read(path)[0]


def _read(path: str) -> tuple[bytes, list[str]]:
    """The content of a file, one byte too much of one that is too long, and warnings about its mode."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{path}: expected a file that can be read, found: {reason}") from error
    is_open = stat.S_ISREG(mode) and mode & stat.S_IWOTH
    return data, [f"{path}: every user of this host may write it"] if is_open else []
