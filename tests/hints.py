"""Commands in hints: each stands at the end of its line, and the parser of `floe` takes it as pasted."""

from __future__ import annotations

import re
import shlex

import click

from floe import cli

# What `common.service.exits` makes: it names a configuration. A command named in words does not.
_COMMAND = re.compile(r"\bfloe (?=[a-z][^\n]*? -c )[^\n]*")


def commands_of(hint: str) -> list[str]:
    """From where each command of a hint begins to the end of its line: what is pasted."""
    return _COMMAND.findall(hint)


def problem_of(command: str) -> str:
    """Why `floe` would not take the command as it stands; empty where it would. Nothing is run."""
    try:
        words = shlex.split(command)[1:]
        context = cli.make_context("floe", words)
        while isinstance(context.command, click.Group):
            rest = [*context._protected_args, *context.args]
            _, found, rest = context.command.resolve_command(context, rest)
            assert found is not None, command
            context = found.make_context(found.name, rest, parent=context)
    except (ValueError, click.ClickException) as error:
        return f"{command}: {error}"
    return ""


def problems_of(hint: str) -> list[str]:
    """What is wrong with the commands of a hint."""
    return [problem for command in commands_of(hint) if (problem := problem_of(command))]
