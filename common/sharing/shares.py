"""How many leases a member holds at most, and which ones it gives back: pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable


def fair_share(chains: int, members: int) -> int:
    """The most leases that one of `members` holds of `chains`: as many as are needed for all to be held.

    Fewer than one member counts as one: whoever asks is one.
    """
    return -(-chains // max(1, members))


def surplus(held: Collection[str], share: int) -> list[str]:
    """The keys of `held` above `share`: the same ones whenever the same keys are held."""
    return sorted(held)[share:]


def circle_of(keys: Iterable[str]) -> str:
    """A name for a set of leases, in whatever order: members with the same set share it among themselves.

    A member with another configuration is in another circle. Counted together, a chain that only one of them
    knows could be above its share, and nobody's.
    """
    text = "\n".join(sorted(set(keys)))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
