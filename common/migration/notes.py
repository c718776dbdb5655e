"""What an import leaves out or does otherwise, by the key of the imported file."""

from __future__ import annotations

from dataclasses import dataclass

from common.settings.yaml import Mark


@dataclass(frozen=True, slots=True)
class Note:
    """A key that has no counterpart, or one that works otherwise; `text` says why and what to do."""

    path: str
    mark: Mark
    text: str

    def __str__(self) -> str:
        return f"{self.path} (line {self.mark.line}): {self.text}"
