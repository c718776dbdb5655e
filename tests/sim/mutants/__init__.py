"""Mistakes in the product that the worlds must find: each is one line that breaks one rule of the protocols.

They are made in the process of a simulation only. If no world finds a mutant, an actor or an auditor is missing, or
another check covers the line: `registry.NOT_FOUND` names those, each with its reason;
`registry.FOUND` names a seed that shows the mistake for all others.
"""

from tests.sim.mutants import of_changes, of_compaction, of_egress, of_hardships, of_ingress, of_restore, of_sampling
from tests.sim.mutants.registry import FOUND, MUTANTS, NOT_FOUND

__all__ = [
    "FOUND",
    "MUTANTS",
    "NOT_FOUND",
    "of_changes",
    "of_compaction",
    "of_egress",
    "of_hardships",
    "of_ingress",
    "of_restore",
    "of_sampling",
]


def apply(name: str) -> None:
    """Make the mistake `name` in this process. Raises KeyError if there is none of that name."""
    MUTANTS[name]()
