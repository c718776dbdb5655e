"""Keeps out of a service what it never uses."""

import os
import sys
from collections.abc import Sequence
from types import ModuleType


class _Without:
    """Answers for one package, before any other finder, that there is none."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None) -> None:
        if name == self._package:
            raise ModuleNotFoundError(f"Floe does without {name} here", name=name)


def slim() -> None:
    """Make a service process small. Call it before anything imports pyarrow.

    Arrow's default pool keeps what it was given: at its peak ingress had 298 to 322 MB, with jemalloc 237 to
    254.
    """
    without("pandas")
    if sys.platform == "linux":
        os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "jemalloc")


def without(package: str) -> None:
    """Have nobody find `package`, unless it is loaded already: those who could use it do without.

    `pandas`: for every command but those that start Spark; pyarrow would import it for nothing, half a second and 40
    to 50 MB. `rich`: for services, where structlog would import it; commands show tables with it.
    """
    sys.meta_path.insert(0, _Without(package))
