"""Keeps out of a service what it never uses."""

import os
import sys
from collections.abc import Sequence
from types import ModuleType


class _NoPandas:
    """Answers for pandas, before any other finder, that there is none."""

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("a service of Floe does without pandas", name=name)


def slim() -> None:
    """Make a service process small. Call it before anything imports pyarrow.

    Arrow's default pool keeps what it was given: at its peak ingress had 298 to 322 MB, with jemalloc 237 to
    254.
    """
    without_pandas()
    if sys.platform == "linux":
        os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "jemalloc")


def without_pandas() -> None:
    """Have pyarrow find no pandas, unless it is loaded already: it imports it for nothing, 40 to 50 MB.

    For every command but those that start Spark. Sites do not have pandas; where the extra `spark` is
    installed, they would pay for it: half a second and 40 MB.
    """
    sys.meta_path.insert(0, _NoPandas())
