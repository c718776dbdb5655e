"""Mistakes in the product that the worlds must find: each is one line that breaks one rule of the protocols.

They are made in the process of a simulation only. A mutant that no world finds means that an actor or an auditor is
missing, or that another check covers the line: `registry.NOT_FOUND` names those, each with its reason;
`registry.FOUND` a seed that shows the mistake for all others.
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
    """Make the mistake `name` in this process. Raises KeyError where there is none of that name."""
    MUTANTS[name]()
