"""`floe version` and `floe completion`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from typing import Any

import click

from common.cli import json_option, print_json, run_command, table
from common.metrics import version

#: What Floe runs on, by distribution: shown where it is installed.
PARTS = ("nats-py", "pyarrow", "pyspark", "boto3", "uvloop")


def versions() -> dict[str, str | None]:
    """The version of Floe, of Python, and of each of `PARTS`; None where it is not installed."""
    found: dict[str, str | None] = {"floe": version(), "python": sys.version.split()[0]}
    for name in PARTS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


@click.command("version")
@json_option
@run_command
def show_version(as_json: bool) -> None:
    """Show the version of Floe, of Python, and of what Floe runs on; `-` or null where it is not installed.

    \b
    Example: floe version --json
    """
    found = versions()
    print_json(found) if as_json else table(list(found.items()), ("part", "version"))


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@run_command
def completion(shell: str) -> None:
    """Print the code by which a shell completes commands and options of floe.

    \b
    To have it in every new shell:
      echo 'eval "$(floe completion bash)"' >> ~/.bashrc
      echo 'eval "$(floe completion zsh)"' >> ~/.zshrc
      floe completion fish > ~/.config/fish/completions/floe.fish

    \b
    Example: floe completion bash
    """
    from click.shell_completion import get_completion_class

    kind: Any = get_completion_class(shell)
    made = kind(click.get_current_context().find_root().command, {}, "floe", "_FLOE_COMPLETE")
    click.echo(made.source_template % made.source_vars())
