"""Which version of Floe runs."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "floe-jetstream"


@cache
def version() -> str:
    """The version of the installed distribution, or of the checkout that runs; else `unknown`."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return _of_checkout(Path(__file__).parents[2] / "pyproject.toml")


def _of_checkout(project: Path) -> str:
    try:
        found = tomllib.loads(project.read_text())["project"]
    except (OSError, tomllib.TOMLDecodeError, KeyError):
        return "unknown"
    return str(found["version"]) if found.get("name") == DISTRIBUTION else "unknown"
