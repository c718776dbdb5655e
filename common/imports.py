"""Imports of a process: unused packages are hidden to save memory, compiled modules are loaded where they are built."""

import os
import sys
from collections.abc import Sequence
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

# Modules that `make native` builds, each from the C file beside it.
COMPILED_MODULES = ("common.nats._frames", "ingress.publishers._compose")


class _HiddenPackageFinder:
    """Import finder that comes first and reports one package as not installed."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None) -> None:
        if name == self._package:
            raise ModuleNotFoundError(f"Floe does not use {name} in this process", name=name)


def reduce_memory() -> None:
    """Make a service process small. Call it before anything imports pyarrow.

    Arrow's default pool keeps the memory that it allocated: at its peak ingress used 298 to 322 MB, with jemalloc 237
    to 254.
    """
    hide_package("pandas")
    hide_package("numpy")
    if sys.platform == "linux":
        os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "jemalloc")


def hide_package(package: str) -> None:
    """Hide `package` from imports, unless it is already loaded; libraries that use it optionally then work without it.

    `pandas`: for every command except those that start Spark; pyarrow would import it needlessly, which costs half a
    second and 40 to 50 MB. `numpy`: for services, which saves 13 MB; a restore needs it. `rich`: for services, because
    structlog would import it; commands show tables with it.
    """
    sys.meta_path.insert(0, _HiddenPackageFinder(package))


def load_compiled(name: str) -> Any:
    """Return the compiled module `name`; None if it is not built from the present C file, or if FLOE_PURE is set.

    Its caller then does the same in Python. A module of another source may differ from that Python, so it is not used.
    """
    if os.environ.get("FLOE_PURE"):
        return None
    try:
        module = import_module(name)
        source = Path(module.__file__ or "").with_name(f"{name.rpartition('._')[2]}.c").read_bytes()
    except (ImportError, OSError):
        return None
    return module if sha256(source).hexdigest() == module.SOURCE_SHA256 else None
