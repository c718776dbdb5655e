"""Reads configuration files: all problems at once, each with its place, and never a secret in a message."""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pydantic import ValidationError

from common.errors import ConfigError
from common.settings.base import Section
from common.settings.docs import default_of, default_text, fields_of, is_secret, section_at
from common.settings.root import UNBUILT, Settings
from common.settings.types import FROM_FILE, Expanded, FileSecret
from common.settings.yaml import (
    MAX_BYTES,
    Items,
    KeyPath,
    Keys,
    Node,
    Place,
    Problems,
    Scalar,
    locate,
    parse_yaml,
    read_text,
    refuse,
)


@dataclass(frozen=True, slots=True)
class ConfigDocument:
    """One YAML document that is a valid configuration. `warnings`: what is allowed and should not be."""

    settings: Settings
    root: Keys
    name: str
    warnings: tuple[str, ...]


MAX_SECRET_BYTES = 64 * 1024

_EXPRESSION = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<default>:-[^${}]*)?\}|\$\{")


def expand(text: str, environment: Mapping[str, str]) -> str:
    """`text` with `${VAR}` and `${VAR:-default}` replaced, `$${` as `${`; itself where there is none.

    Raises ValueError where a variable is not set or an expression is not one of the two.
    """
    if "${" not in text:
        return text
    return Expanded(_EXPRESSION.sub(lambda match: _replacement(match, environment), text), text)


def _replacement(match: re.Match[str], environment: Mapping[str, str]) -> str:
    if match[0] == "$${":
        return "${"
    name, default = match["name"], match["default"]
    if name is None:
        raise ValueError("expected ${VAR} or ${VAR:-default}, found another expression; $${ stands for ${")
    if name in environment:
        return environment[name] or (default or "")[2:]
    if default is None:
        raise ValueError(f"expected the environment variable {name}, found it not set")
    return default[2:]


def read_secret(path: str) -> Expanded:
    """The content of the file `path` without one line end behind it.

    Raises ValueError, never with the content.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_SECRET_BYTES + 1)
        text = data.decode()
    except OSError as error:
        raise ValueError(f"expected a file that can be read, found {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ValueError(f"expected UTF-8 text in {path}, found other bytes") from None
    if len(data) > MAX_SECRET_BYTES:
        raise ValueError(f"expected at most {MAX_SECRET_BYTES} bytes in {path}, found more")
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise ValueError(f"expected a secret in {path}, found nothing")
    return Expanded(text, path)


FILE_SUFFIX = "_file"
_UNKNOWN = "?"  # in place of a secret that has its problem already: the key is set


def to_values(root: Keys, problems: Problems, environment: Mapping[str, str]) -> dict[str, Any]:
    """The values of a document; what cannot be expanded or read is noted."""
    return _Values(problems, environment).mapping(root, ())


def secrets_in(root: Keys) -> tuple[list[str], list[str]]:
    """The keys of a document that hold a secret as it is, and the files that are named for others."""
    inline: list[str] = []
    files: list[str] = []

    def look(node: Node, path: KeyPath) -> None:
        if isinstance(node, Items):
            for index, item in enumerate(node.items):
                look(item, (*path, index))
        if not isinstance(node, Keys):
            return
        section = section_at(path)
        for name, below in node.entries.items():
            secret, text = name.removesuffix(FILE_SUFFIX), below.text if isinstance(below, Scalar) else ""
            if is_secret(section, name) and text and "${" not in text:
                inline.append(".".join(map(str, (*path, name))))
            elif secret != name and is_secret(section, secret):
                files.append(text)
            look(below, (*path, name))

    look(root, ())
    return inline, files


class _Values:
    def __init__(self, problems: Problems, environment: Mapping[str, str]) -> None:
        self._problems = problems
        self._environment = environment

    def mapping(self, node: Keys, path: KeyPath) -> dict[str, Any]:
        values = {name: self._value(below, (*path, name)) for name, below in node.entries.items()}
        section = section_at(path)
        for name in list(values):
            secret = name.removesuffix(FILE_SUFFIX)
            if is_secret(section, name) and self._is_empty(values[name], node, (*path, name)):
                values[name] = _UNKNOWN
            elif secret != name and is_secret(section, secret) and section and name not in fields_of(section):
                values[secret] = self._from_file(values.pop(name), secret, node, (*path, name))
        return values

    def _value(self, node: Node, path: KeyPath) -> Any:
        if isinstance(node, Keys):
            return self.mapping(node, path)
        if isinstance(node, Items):
            return [self._value(item, (*path, index)) for index, item in enumerate(node.items)]
        return self._scalar(node, path)

    def _scalar(self, node: Scalar, path: KeyPath) -> Any:
        try:
            expanded = expand(node.text, self._environment)
        except ValueError as error:
            self._problems.add(node.mark, path, str(error))
            return None
        return expanded if isinstance(expanded, Expanded) else node.value()

    def _is_empty(self, value: Any, node: Keys, path: KeyPath) -> bool:
        """Whether a secret was to come from a variable and did not; noted."""
        if not isinstance(value, Expanded) or value:
            return False
        mark = node.entries[str(path[-1])].mark
        self._problems.add(mark, path, f"expected a secret in {value.source}, found nothing")
        return True

    def _from_file(self, file: Any, secret: str, node: Keys, path: KeyPath) -> str | FileSecret:
        """The secret in `file`; an empty name means none, as with every key that names a file."""
        mark = node.entries[str(path[-1])].mark
        if secret in node.entries:
            self._problems.add(mark, path, f"expected either {secret} or {path[-1]}, found both")
        elif not isinstance(file, str):
            self._problems.add(mark, path, "expected the name of a file, found something else")
        elif not file:
            return ""
        else:
            try:
                return FileSecret(read_secret(file), str(file), read_secret)
            except ValueError as error:
                self._problems.add(mark, path, str(error))
        return _UNKNOWN


MAX_FOUND = 60  # characters of a value in a message

_MAPPING = "a mapping"
_LIST = "a list"
_EXPECTED = {
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
    "dict_type": _MAPPING,
    "tuple_type": _LIST,
    "list_type": _LIST,
}
_SECRET_NAME = re.compile(r"secret|passw", re.IGNORECASE)
_FREE = ("conf", "headers")  # mappings whose keys are the user's, secrets perhaps among them


def explain(error: ValidationError, root: Keys, problems: Problems) -> None:
    """Note each problem of `error` at its place in the document `root`."""
    spoiled = problems.marks()  # values that could not be expanded have their problem already
    for detail in error.errors(include_url=False, include_input=False):
        location = detail["loc"]
        if detail["type"] == "floe_combination":
            add_combinations(location, detail["ctx"]["problems"], root, problems)
            continue
        place = locate(root, location)
        if place.mark not in spoiled or place.node is None:
            mark = place.key_mark if detail["type"] == "extra_forbidden" else place.mark
            problems.add(mark, place.path, _message(detail, place))


def add_combinations(
    location: Sequence[str | int], found: Iterable[tuple[str, str]], root: Keys, problems: Problems
) -> None:
    """Note what is wrong between keys of the section at `location`."""
    for key, problem in found:
        parts = (int(part) if part.isdecimal() else part for part in key.split("."))
        place = locate(root, (*location, *parts))
        problems.add(place.mark, place.path, problem)


def _message(detail: Mapping[str, Any], place: Place) -> str:
    kind = detail["type"]
    if kind == "extra_forbidden":
        return _unknown(detail["loc"])
    if kind == "missing":
        return "expected a value (required), found nothing"
    return f"expected {_expected(detail)}, found {found_text(place)}"


def _expected(detail: Mapping[str, Any]) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "floe_value":
        return str(context["expected"])
    if kind == "literal_error":
        return "one of " + re.sub(r"'|,| or", "", str(context["expected"])).replace(" ", " | ")
    return _EXPECTED.get(kind, str(detail["msg"]))


def _unknown(location: Sequence[str | int]) -> str:
    """Asked by where the key would count, which for a key of defaults is the entry."""
    section = section_at([part for part in location[:-1] if not str(part).startswith("(")])
    known = list(fields_of(section)) if section else []
    known += [f"{name}_file" for name in known if is_secret(section, name)]
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    if close:
        return f"unknown key; did you mean {close[0]}?"
    return f"unknown key; expected one of {' '.join(known)}"


def found_text(place: Place) -> str:
    """What stands at `place`, for a message: no secret, no password of a URL, no content of a variable."""
    node = place.node
    if isinstance(node, Keys):
        return _MAPPING
    if isinstance(node, Items):
        return _LIST if node.items else "an empty list"
    if node is None or node.value() is None:
        return "nothing"
    if _is_private(place.path):
        return "a secret"
    text = node.text if len(node.text) <= MAX_FOUND else node.text[:MAX_FOUND] + "…"
    if "@" in node.text:
        text = "***" + node.text[node.text.rindex("@") :][:MAX_FOUND]
    return text if node.is_plain else f'"{text}"'


def _is_private(path: KeyPath) -> bool:
    names = [part for part in path if isinstance(part, str)]
    if any(name in _FREE for name in names[:-1]):
        return True
    return bool(names) and (
        _SECRET_NAME.search(names[-1]) is not None or is_secret(section_at(path[:-1]), names[-1])
    )


class _Found(NamedTuple):
    location: KeyPath
    section: type[Section]
    value: Any


def refuse_unbuilt(document: ConfigDocument) -> None:
    """Raises ConfigError with a line for each key that is set and whose feature is not built."""
    problems = Problems(document.name)
    _add_unbuilt(document, problems)
    refuse(problems)


def refuse_loops(document: ConfigDocument) -> None:
    """Raises ConfigError with a line for each target that flows into itself."""
    problems = Problems(document.name)
    add_combinations((), document.settings.loops(), document.root, problems)
    refuse(problems)


def refuse_unrunnable(document: ConfigDocument) -> None:
    """As `refuse_unbuilt` and `refuse_loops`, all problems at once."""
    problems = Problems(document.name)
    _add_unbuilt(document, problems)
    add_combinations((), document.settings.loops(), document.root, problems)
    refuse(problems)


def _add_unbuilt(document: ConfigDocument, problems: Problems) -> None:
    for path in UNBUILT:
        for found in _values(document.settings, path.split("."), ()):
            if _is_asked_for(found):
                place = locate(document.root, found.location)
                problems.add(place.mark, place.path, _unbuilt_message(found))


def _values(value: Any, parts: Sequence[str], location: KeyPath) -> Iterator[_Found]:
    """The values that the path `parts` names below `value`."""
    part, *rest = parts
    if part == "*":
        for index, item in enumerate(value):
            yield from _values(item, rest, (*location, index))
    elif rest:
        yield from _values(getattr(value, part), rest, (*location, part))
    else:
        yield _Found((*location, part), type(value), getattr(value, part))


def _is_asked_for(found: _Found) -> bool:
    return bool(found.value != default_of(found.section, str(found.location[-1])))


def _unbuilt_message(found: _Found) -> str:
    default = default_text(fields_of(found.section)[str(found.location[-1])])
    return f"not built yet in this version; remove it or leave it at its default ({default})"


def load(path: str) -> Settings:
    """The configuration in the file `path`, which holds one document.

    Raises ConfigError with a line for each problem, keys whose feature this version does not have included.
    """
    return load_document(path).settings


def load_document(path: str) -> ConfigDocument:
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
    return ConfigDocument(document.settings, document.root, document.name, (*warnings, *document.warnings))


def parse(text: str, name: str) -> list[Settings]:
    """The configurations of all YAML documents in `text`, which `name` stands for in messages.

    Raises ConfigError with a line for each problem. Does not ask whether a key's feature is built.
    """
    return [document.settings for document in parse_documents(text.encode(), name)]


def read_documents(path: str) -> list[ConfigDocument]:
    """The documents of the file `path`. Raises ConfigError as `parse`."""
    data, warnings = _read(path)
    found = parse_documents(data, path)
    return [ConfigDocument(d.settings, d.root, d.name, (*warnings, *d.warnings)) for d in found]


def parse_documents(
    data: bytes, name: str, environment: Mapping[str, str] | None = None
) -> list[ConfigDocument]:
    """As `parse`, with the places of all values. `environment`: for `${VAR}`; None: that of the process."""
    problems = Problems(name)
    text = read_text(data, problems)
    refuse(problems)
    roots = parse_yaml(text, problems)
    found = [_document(root, problems, os.environ if environment is None else environment) for root in roots]
    refuse(problems)
    return [document for document in found if document is not None]


def _document(root: Keys, problems: Problems, environment: Mapping[str, str]) -> ConfigDocument | None:
    values = to_values(root, problems, environment)
    try:
        settings = Settings.model_validate(values, context=FROM_FILE)
    except ValidationError as error:
        explain(error, root, problems)
        return None
    cautions = [f"compaction.{key}: {text}" for key, text in settings.compaction.cautions()]
    warnings = (*_insecure(settings), *_exposed(root, problems.name, settings), *cautions)
    return ConfigDocument(settings, root, problems.name, warnings)


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
