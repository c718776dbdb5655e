"""Reading configuration files: all problems at once, each with its place, never a secret in a message."""

import os
import re
import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from pydantic import SecretStr, ValidationError

from common.errors import ConfigError
from common.settings import yaml
from common.settings.root import Settings, fields_of, is_secret, section_at
from common.settings.types import FROM_FILE, ExpandedText, FileSecret, Section, is_plaintext, regular_file


@dataclass(frozen=True, slots=True)
class ConfigDocument:
    """One YAML document that is a valid configuration. `warnings`: allowed settings that are not advised."""

    settings: Settings
    root: yaml.MappingNode
    name: str
    warnings: tuple[str, ...]


MAX_SECRET_BYTES = 64 * 1024

_EXPRESSION = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<default>:-[^${}]*)?\}|\$\{")


def expand(text: str, environment: Mapping[str, str]) -> str:
    """Return `text` with `${VAR}` and `${VAR:-default}` replaced, `$${` as `${`; `text` itself if there is nothing to
    replace.

    Raises ValueError if a variable is not set or an expression is neither of the two.
    """
    if "${" not in text:
        return text
    return ExpandedText(_EXPRESSION.sub(lambda match: _replacement(match, environment), text), text)


def _replacement(match: re.Match[str], environment: Mapping[str, str]) -> str:
    if match[0] == "$${":
        return "${"
    name, default = match["name"], match["default"]
    if name is None:
        raise ValueError("expected ${VAR} or ${VAR:-default}, found another expression; write $${ for ${")
    if name in environment:
        return environment[name] or (default or "")[2:]
    if default is None:
        raise ValueError(f"expected the environment variable {name}, found it unset")
    return default[2:]


def read_secret(path: str) -> ExpandedText:
    """Return the content of the file `path` without one line end after it.

    Raises ValueError, never with the content or the value of a variable in `path`, which may be the secret itself.
    """
    shown_path = path.source if isinstance(path, ExpandedText) else path
    try:
        with regular_file(path).open("rb") as file:
            data = file.read(MAX_SECRET_BYTES + 1)
        text = data.decode()
    except OSError as error:
        raise ValueError(f"expected a file that can be read, found {shown_path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ValueError(f"expected UTF-8 text in {shown_path}, found other bytes") from None
    if len(data) > MAX_SECRET_BYTES:
        raise ValueError(f"expected at most {MAX_SECRET_BYTES} bytes in {shown_path}, found more")
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise ValueError(f"expected a secret in {shown_path}, found nothing")
    return ExpandedText(text, path)


_UNREADABLE = "?"  # in place of a secret with a recorded problem: the key counts as set


class _Values:
    """The values of a document; a value that cannot be expanded or read is recorded as a problem.

    `inline`: the keys that hold a secret directly; `files`: the secret files that are named.
    """

    def __init__(self, problems: yaml.Problems, environment: Mapping[str, str]) -> None:
        self._problems, self._environment = problems, environment
        self.inline: list[str] = []
        self.files: list[str] = []

    def mapping(self, node: yaml.MappingNode, path: yaml.KeyPath) -> dict[str, Any]:
        values = {name: self._value(below, (*path, name)) for name, below in node.entries.items()}
        section = section_at(path)
        for name, below in node.entries.items():
            secret, here = name.removesuffix("_file"), (*path, name)
            text = below.text if isinstance(below, yaml.Scalar) else ""
            if is_secret(section, name):
                values[name] = self._check_secret(values[name], below.mark, here)
                if text and "${" not in text:
                    self.inline.append(".".join(map(str, here)))
            elif secret != name and is_secret(section, secret):
                file = values.pop(name)
                values[secret] = self._read_secret_file(file, secret, node, here)
                self.files.append(str(file))
        return values

    def _value(self, node: yaml.Node, path: yaml.KeyPath) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.ListNode):
            return [self._value(item, (*path, index)) for index, item in enumerate(node.items)]
        try:
            expanded = expand(node.text, self._environment)
        except ValueError as error:
            self._problems.add(node.mark, path, str(error))
            return None
        return expanded if isinstance(expanded, ExpandedText) else node.value()

    def _check_secret(self, value: Any, mark: yaml.Mark, path: yaml.KeyPath) -> Any:
        """Return the secret; record a problem if a variable or file left it empty."""
        if not isinstance(value, ExpandedText) or value:
            return value
        self._problems.add(mark, path, f"expected a secret in {value.source}, found nothing")
        return _UNREADABLE

    def _read_secret_file(self, file: Any, secret: str, node: yaml.MappingNode, path: yaml.KeyPath) -> str | FileSecret:
        """Return the secret in `file`; an empty name means none, as with every key that names a file."""
        if secret in node.entries:
            problem = f"expected either {secret} or {path[-1]}, found both"
        elif not isinstance(file, str):
            problem = "expected the name of a file, found something else"
        else:
            try:
                return FileSecret(read_secret(file), str(file), read_secret) if file else ""
            except ValueError as error:
                problem = str(error)
        self._problems.add(node.entries[str(path[-1])].mark, path, problem)
        return _UNREADABLE


MAX_SHOWN_CHARS = 60  # characters of a value in a message

_MAPPING = "a mapping"
_LIST = "a list"
_EXPECTED = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), _MAPPING),
    **dict.fromkeys(("tuple_type", "list_type"), _LIST),
}
_SECRET_NAME = re.compile(r"secret|passw", re.IGNORECASE)
_USER_KEY_MAPPINGS = ("conf", "headers")  # mappings with keys of the user, which may be secret


def add_validation_problems(error: ValidationError, root: yaml.MappingNode, problems: yaml.Problems) -> None:
    unreadable = problems.marks()  # values that could not be expanded already have their problem
    for detail in error.errors(include_url=False, include_input=False):
        location = detail["loc"]
        if detail["type"] == "floe_combination":
            add_combinations(location, detail["ctx"]["problems"], root, problems)
            continue
        place = yaml.locate(root, location)
        if place.mark not in unreadable or place.node is None:
            mark = place.key_mark if detail["type"] == "extra_forbidden" else place.mark
            problems.add(mark, place.path, _message(detail, place))


def add_combinations(
    location: Sequence[str | int], found: Iterable[tuple[str, str]], root: yaml.MappingNode, problems: yaml.Problems
) -> None:
    for key, problem in found:
        parts = (int(part) if part.isdecimal() else part for part in key.split("."))
        place = yaml.locate(root, (*location, *parts))
        problems.add(place.mark, place.path, problem)


def _message(detail: Mapping[str, Any], place: yaml.Place) -> str:
    kind, expected = detail["type"], str(detail.get("ctx", {}).get("expected"))
    if kind == "extra_forbidden":
        return _unknown_key_message(detail["loc"])
    if kind == "missing":
        return "expected a value (required), found nothing"
    if kind == "literal_error":
        expected = "one of " + re.sub(r"'|,| or", "", expected).replace(" ", " | ")
    elif kind != "floe_value":
        expected = _EXPECTED.get(kind, str(detail["msg"]))
    return f"expected {expected}, found {found_text(place)}"


def _unknown_key_message(location: Sequence[str | int]) -> str:
    """Return the message for an unknown key. The section that uses the key decides; for `defaults`, the entry."""
    section = section_at([part for part in location[:-1] if not str(part).startswith("(")])
    known = list(fields_of(section)) if section else []
    known += [f"{name}_file" for name in known if is_secret(section, name)]
    return f"unknown key; {yaml.suggest_key(str(location[-1]), known)}"


def found_text(place: yaml.Place) -> str:
    """Return the value at `place`, for a message: no secret, no password of a URL, no content of a variable."""
    node = place.node
    if isinstance(node, yaml.MappingNode):
        return _MAPPING
    if isinstance(node, yaml.ListNode):
        return _LIST if node.items else "an empty list"
    if node is None or node.value() is None:
        return "nothing"
    if _is_private(place.path):
        return "a secret"
    text = node.text if len(node.text) <= MAX_SHOWN_CHARS else node.text[:MAX_SHOWN_CHARS] + "…"
    if "@" in node.text:
        text = "***" + node.text[node.text.rindex("@") :][:MAX_SHOWN_CHARS]
    return text if node.is_plain else f'"{text}"'


def _is_private(path: yaml.KeyPath) -> bool:
    *above, name = [part for part in path if isinstance(part, str)] or [""]
    is_free = any(each in _USER_KEY_MAPPINGS for each in above)
    return is_free or _SECRET_NAME.search(name) is not None or is_secret(section_at(path[:-1]), name)


def find_loops(document: ConfigDocument) -> yaml.Problems:
    """Return a problem for each target that flows into itself: such a document cannot be run."""
    problems = yaml.Problems(document.name)
    add_combinations((), document.settings.loop_problems(), document.root, problems)
    return problems


def load(path: str) -> Settings:
    """Return the configuration in the file `path`, which holds one document.

    Raises ConfigError with a line for each problem.
    """
    return load_document(path).settings


def load_document(path: str) -> ConfigDocument:
    """Load the document as `load` does, with the places of all values, and warnings."""
    documents = read_documents(path)
    if len(documents) != 1:
        raise ConfigError(
            f"{path}: expected one document, found {len(documents)}",
            hint=f"a command takes a file with one; to check all documents:\nfloe config check -c {shlex.quote(path)}",
        )
    yaml.raise_problems(find_loops(documents[0]))
    return documents[0]


def changed_keys(before: Section, now: Section, path: str = "") -> dict[str, tuple[str | None, str | None]]:
    """Return the dotted keys with different values, each with both values as text; None if there is none. `path`: of
    the section.

    Each change appears once: not again at a key that is completed from it. An entry that only one side has appears as a
    whole. For a secret, and for a value that may be one, the text shows only that it changed; for a secret in a file,
    the file.
    """
    found = dict(_differences(before, now, path))
    return {
        key: (_display_text(key, former), _display_text(key, later))
        for key, (former, later) in sorted(found.items())
        if not _is_completed(key, found)
    }


_ValuePair = tuple[Any, Any]


def _differences(former: Any, later: Any, path: str) -> Iterator[tuple[str, _ValuePair]]:
    if isinstance(former, Section) and type(former) is type(later):
        names = type(former).model_fields
        pairs = {f".{name.rstrip('_')}": (getattr(former, name), getattr(later, name)) for name in names}
    elif isinstance(former, Mapping) or isinstance(later, Mapping):
        former, later = former or {}, later or {}
        pairs = {f".{name}": (former.get(name), later.get(name)) for name in {**former, **later}}
    elif any(isinstance(each, Section) for value in (former, later) if isinstance(value, tuple) for each in value):
        former, later = _by_name(former), _by_name(later)
        pairs = {name: (former.get(name), later.get(name)) for name in {**former, **later}}
    else:
        if _comparable(former) != _comparable(later):
            is_file = isinstance(later, FileSecret) or (isinstance(former, FileSecret) and not _comparable(later))
            yield (f"{path}_file" if is_file else path), (former, later)
        return
    for name, (one, other) in pairs.items():
        yield from _differences(one, other, f"{path}{name}".lstrip("."))


def _by_name(entries: tuple[Any, ...]) -> dict[str, Any]:
    """Return the entries of a list, by name if they have one, otherwise by number: `[NODES]`, `[0]`."""
    names = [getattr(each, "name", "") or getattr(each, "stream", "") for each in entries]
    return {f"[{name or number}]": each for number, (name, each) in enumerate(zip(names, entries, strict=True))}


_COMPLETED = re.compile(r"(?:egress|ingress)\.(nats\..+)")  # keys that are completed from the key in the group


def _is_completed(key: str, found: Mapping[str, _ValuePair]) -> bool:
    match = _COMPLETED.fullmatch(key)
    above = found.get(match[1], ()) if match else ()
    return [*map(_comparable, above)] == [*map(_comparable, found[key])]


def _comparable(value: Any) -> Any:
    """Return the value to compare. A secret in a file counts by its path: its content is read again separately."""
    if isinstance(value, FileSecret):
        return ("file", value.path)
    return value.get_secret_value() if isinstance(value, SecretStr) else value


A_SECRET = "a secret"  # noqa: S105  (the text in place of one)


def _display_text(key: str, value: Any) -> str | None:
    if value is None or (isinstance(value, SecretStr) and not value.get_secret_value()):
        return None
    if isinstance(value, FileSecret):
        return value.path
    if isinstance(value, SecretStr):
        return A_SECRET
    if isinstance(value, Section):
        return "an entry"
    return "a value" if set(key.split(".")) & set(_USER_KEY_MAPPINGS) else str(value)


def parse(text: str, name: str) -> list[Settings]:
    """Return the configurations of all YAML documents in `text`; messages call it `name`.

    Raises ConfigError with a line for each problem.
    """
    return [document.settings for document in parse_documents(text.encode(), name)]


def read_documents(path: str) -> list[ConfigDocument]:
    """Return the documents in the file `path`, with warnings. Raises ConfigError as `parse`."""
    data, warnings = read_file(path)
    return [replace(each, warnings=(*warnings, *each.warnings)) for each in parse_documents(data, path)]


def parse_documents(data: bytes, name: str, environment: Mapping[str, str] = os.environ) -> list[ConfigDocument]:
    """Parse as `parse` does, with the places of all values. `environment`: for `${VAR}`."""
    problems = yaml.Problems(name)
    roots = yaml.parse_yaml(data, problems)
    found = [_document(root, _Values(problems, environment), problems) for root in roots]
    yaml.raise_problems(problems)
    return [document for document in found if document is not None]


def _document(root: yaml.MappingNode, values: _Values, problems: yaml.Problems) -> ConfigDocument | None:
    try:
        settings = Settings.model_validate(values.mapping(root, ()), context=FROM_FILE)
    except ValidationError as error:
        add_validation_problems(error, root, problems)
        return None
    compaction = (f"compaction.{key}: {text}" for key, text in settings.compaction.warnings())
    warnings = (*_insecure_warnings(settings), *_exposed_secret_warnings(values, problems.name, settings), *compaction)
    return ConfigDocument(settings, root, problems.name, warnings)


def _insecure_warnings(settings: Settings) -> list[str]:
    insecure = "insecure: the server's certificate is not checked"
    sections = ("egress.nats.tls", "ingress.nats.tls", "store.tls")
    found = [f"{section}.{insecure}" for section in sections if attrgetter(section)(settings).insecure]
    clear = settings.store.endpoint_url
    if is_plaintext(clear):
        found.append(f"store.endpoint_url: {clear}: payloads are sent in clear (keys are not); use https://")
    return found


def _exposed_secret_warnings(values: _Values, name: str, settings: Settings) -> list[str]:
    nats = (settings.egress.nats, settings.ingress.nats)
    files = [file for each in nats for file in (each.credentials_file, each.nkey_seed_file, each.tls.files.key)]
    files += [each.monitor.tls.key for each in (settings.egress, settings.ingress)]
    warnings = [
        f"{file}: a secret that others may read: {chmod}"
        for file in dict.fromkeys([*values.files, *files])
        if (chmod := chmod_command(file))
    ]
    if values.inline and (chmod := chmod_command(name)):
        holds = " and ".join(values.inline)
        warnings.append(f"{name}: holds {holds}, and others may read it: {chmod}")
    return warnings


def chmod_command(path: str) -> str:
    """Return the command that removes the others' right to read a file; empty if they have none, or if there is no
    file.

    The group of the file counts as others only if it is the owner's own group, the default for new files: a file of
    another owner is read through its group, and another group was chosen on purpose.
    """
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return ""
    is_chosen = found.st_uid != os.geteuid() or found.st_gid != os.getegid()
    by_others = stat.S_IROTH if is_chosen else stat.S_IROTH | stat.S_IRGRP
    if not stat.S_ISREG(found.st_mode) or not found.st_mode & by_others:
        return ""
    return f"chmod {640 if is_chosen else 600} {shlex.quote(path)}"


def read_file(path: str) -> tuple[bytes, list[str]]:
    """Return the content of a file, but only one byte more than 1 MiB of a larger one, and warnings about its mode.

    Raises ConfigError.
    """
    try:
        # Not blocking: to open a pipe without a writer would take for ever. A pipe of a shell's <(…) has a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISFIFO(mode):
                regular_file(path)
            os.set_blocking(file.fileno(), True)
            data = file.read(yaml.MAX_FILE_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{path or repr(path)}: expected a file that can be read, found: {reason}") from error
    is_open = stat.S_ISREG(mode) and mode & stat.S_IWOTH
    return data, [f"{path}: every user of this host may write it"] if is_open else []
