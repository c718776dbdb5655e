"""The list of mutants, and how they are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Change = Callable[[], None]
MUTANTS: dict[str, Change] = {}

#: Mutants that no world finds yet, and why.
NOT_FOUND: dict[str, str] = {
    "acknowledgement_of_any_batch": "each batch has an inbox of its own, so no other answer reaches it",
    "lease_never_ends": "rightly: leases save work and guard nothing (I9)",
    "floor_read_as_the_end": "a target that begins later, or a restore, is missing: none reads so far below",
}


def mutant(make: Change) -> Change:
    """List the mutant by its name; the docstring says which rule it breaks."""
    MUTANTS[make.__name__] = make
    return make


def change(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put what `make` makes of the attribute in its place."""
    setattr(owner, name, make(getattr(owner, name)))
