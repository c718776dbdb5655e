"""Keeps out of a service what it never uses."""

import os
import sys
from collections.abc import Sequence
from types import ModuleType


class _Without:
    """Import finder that is asked first and says of one package that it is not installed."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None) -> None:
        if name == self._package:
            raise ModuleNotFoundError(f"Floe does without {name} here", name=name)


def slim() -> None:
    """Makes a service process small. Call it before anything imports pyarrow.

    Arrow's default pool keeps the memory it was given: at its peak ingress used 298 to 322 MB, with jemalloc 237 to
    254.
    """
    without("pandas")
    without("numpy")
    if sys.platform == "linux":
        os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "jemalloc")


def without(package: str) -> None:
    """Hides `package` from imports, unless it is loaded already; libraries that use it optionally then do without it.

    `pandas`: for every command except those that start Spark; pyarrow would import it needlessly, which costs half a
    second and 40 to 50 MB. `numpy`: for services, likewise 13 MB; a restore needs it. `rich`: for services, where
    structlog would import it; commands show tables with it.
    """
    sys.meta_path.insert(0, _Without(package))
