"""Mistakes in the product that the worlds must find: each is one line that breaks one rule of the protocols.

They are made in the process of a simulation only. If no world finds a mutant, an actor or an auditor is missing, or
another check covers the line: `registry.NOT_FOUND` names those, each with its reason;
`registry.FOUND` names a seed that shows the mistake for all others.
"""

from importlib import import_module

from tests.sim.mutants.registry import FOUND, MUTANTS, NOT_FOUND

__all__ = ["FOUND", "MUTANTS", "NOT_FOUND", "apply", "chains_of"]
MANY = f"{__name__}.of_many"

for _part in ("accounts", "changes", "compaction", "egress", "hardships", "ingress", "many", "restore", "sampling"):
    import_module(f"{__name__}.of_{_part}")


def chains_of(name: str) -> int:
    """Return the chains of the worlds that show the mutant `name`; 0: those of one stream."""
    return 40 if MUTANTS[name].__module__ == MANY else 0


def apply(name: str) -> None:
    """Make the mistake `name` in this process. Raises KeyError if there is none of that name."""
    MUTANTS[name]()
