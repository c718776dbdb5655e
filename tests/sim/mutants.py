"""Mistakes in the product that the worlds must find, each one line that breaks one rule of the protocols."""

from __future__ import annotations

from collections.abc import Callable

MUTANTS: dict[str, Callable[[], None]] = {}


def apply(name: str) -> None:
    """Make the mistake `name` in this process. Raises KeyError where there is none of that name."""
    MUTANTS[name]()
