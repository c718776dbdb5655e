"""What every section is: frozen, no unknown keys, defaults written as in a file."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator
from pydantic_core import PydanticCustomError


def option(default: Any, meaning: str) -> Any:
    """A key with its default, written as in a file, and its line in the documentation."""
    return Field(default, description=meaning)


def needed(meaning: str) -> Any:
    """A key without a default, and its line in the documentation."""
    return Field(description=meaning)


class Section(BaseModel):
    """A section of the configuration. Defaults are validated too, so they stand as a file would have them."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True)

    def combinations(self) -> Iterator[tuple[str, str]]:
        """What is wrong between keys: the key to point at (dotted, within the section) and the problem.

        Asked once every value is right by itself.
        """
        yield from ()

    def given(self, *names: str) -> list[str]:
        """Those of the keys that are set (not empty, not 0, not false)."""
        return [name for name in names if getattr(self, name)]

    def together(self, one: str, other: str) -> Iterator[tuple[str, str]]:
        """The problem, if one of two keys is set without the other."""
        for there, missing in ((one, other), (other, one)):
            value = getattr(self, missing)
            if getattr(self, there) and not value:
                file = f" or {missing}_file" if isinstance(value, SecretStr) else ""
                yield there, f"expected {missing}{file} beside it, found none"

    @classmethod
    def completed(cls, given: Mapping[str, Any]) -> Any:
        """What is given, with what other keys say of it; asked before any value is judged."""
        return given

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        return cls.completed(data) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _refuse_combinations(self) -> Self:
        if problems := list(self.combinations()):
            text = "; ".join(f"{key}: {problem}" for key, problem in problems)
            raise PydanticCustomError("floe_combination", "{text}", {"text": text, "problems": problems})
        return self


def plain(value: Any) -> Any:
    """The keys that were set, where `value` is a section; anything else as it is."""
    return value.model_dump(by_alias=True, exclude_unset=True) if isinstance(value, Section) else value


def merged(defaults: Any, entry: Any) -> Any:
    """`entry` over `defaults`, nested mappings key by key; where either is no mapping, `entry` stands."""
    defaults, entry = plain(defaults), plain(entry)
    if not isinstance(defaults, Mapping) or not isinstance(entry, Mapping):
        return entry
    both = {name: merged(defaults[name], value) for name, value in entry.items() if name in defaults}
    return {**defaults, **entry, **both}


def merged_entries(section: Any, key: str, defaults: Any) -> Any:
    """`section` with `defaults` below each entry of its list `key`, if it has one."""
    if not isinstance(section, Mapping) or not isinstance(section.get(key), list | tuple):
        return section
    return {**section, key: [merged(defaults, entry) for entry in section[key]]}


def repeated(values: Iterable[Hashable]) -> Iterator[tuple[int, int]]:
    """The positions of each value that stood before: first the one where it did."""
    first: dict[Hashable, int] = {}
    for index, value in enumerate(values):
        if first.setdefault(value, index) != index:
            yield first[value], index
