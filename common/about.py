"""The commands `floe version` and `floe completion`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from typing import Any

import click

from common.cli import json_option, print_json, print_table, run_command
from common.imports import COMPILED_MODULES, load_compiled
from common.metrics import version

#: The distributions that Floe runs on, in the order in which `floe version` lists them.
LISTED_DISTRIBUTIONS = ("nats-py", "pyarrow", "pyspark", "boto3", "uvloop")


def installed_versions() -> dict[str, str | None]:
    """Return the versions of Floe, of Python, and of each of `LISTED_DISTRIBUTIONS`; None for one that is not
    installed. `native`: the compiled modules in use, None without any.
    """
    found: dict[str, str | None] = {"floe": version(), "python": sys.version.split()[0]}
    for name in LISTED_DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    compiled = [name.rpartition("._")[2] for name in COMPILED_MODULES if load_compiled(name) is not None]
    return {**found, "native": ", ".join(compiled) or None}


@click.command("version")
@json_option
@run_command
def show_version(as_json: bool) -> None:
    """Show the versions of Floe, of Python, and of the libraries that Floe runs on; `-` or null if not installed.

    \b
    Example: floe version --json
    """
    found = installed_versions()
    print_json(found) if as_json else print_table(list(found.items()), ("part", "version"))


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@run_command
def completion(shell: str) -> None:
    """Print the code with which a shell completes the commands and options of floe.

    \b
    To load it in every new shell:
      echo 'eval "$(floe completion bash)"' >> ~/.bashrc
      echo 'eval "$(floe completion zsh)"' >> ~/.zshrc
      floe completion fish > ~/.config/fish/completions/floe.fish

    \b
    Example: floe completion bash
    """
    from click.shell_completion import get_completion_class

    kind: Any = get_completion_class(shell)
    completer = kind(click.get_current_context().find_root().command, {}, "floe", "_FLOE_COMPLETE")
    click.echo(completer.source_template % completer.source_vars())
