"""From a tree to plain values: variables expanded, secret files read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.service.expand import expand, read_secret
from common.settings.docs import fields_of, is_secret, section_at
from common.settings.secret_file import FileSecret
from common.settings.types import Expanded
from common.settings.yaml import Items, KeyPath, Keys, Node, Problems, Scalar

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
