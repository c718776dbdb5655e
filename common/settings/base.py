"""What every section is: frozen, no unknown keys, defaults written as in a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
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


def several(names: Mapping[str, object]) -> list[str]:
    """The names whose value is set (not empty, not 0, not false)."""
    return [name for name, value in names.items() if value]
