"""A configuration together with the file it came from."""

from __future__ import annotations

from dataclasses import dataclass

from common.settings.root import Settings
from common.settings.yaml import Keys


@dataclass(frozen=True, slots=True)
class Document:
    """One YAML document that is a valid configuration. `warnings`: what is allowed and should not be."""

    settings: Settings
    root: Keys
    name: str
    warnings: tuple[str, ...]
