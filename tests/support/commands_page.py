"""The help of every command, as click prints it: `python -m tests.support.commands_page` writes `docs/commands.md`."""

from collections.abc import Iterator
from pathlib import Path

import click
from click.testing import CliRunner

import floe

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"
HEAD = """# Commands

What `--help` of every command says. Made by `python -m tests.support.commands_page`; a test holds that it is current.
[operations.md](operations.md) says when to use which.
"""


def commands(group: click.Command = floe.cli, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command that is no group."""
    if not isinstance(group, click.Group):
        yield path
        return
    context = click.Context(group)
    for name in group.list_commands(context):
        if (command := group.get_command(context, name)) is not None:
            yield from commands(command, (*path, name))


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for words in sorted(commands()):
        shown = CliRunner().invoke(floe.cli, [*words, "--help"], prog_name="floe", terminal_width=110)
        parts.append(f"## floe {' '.join(words)}\n\n```text\n{shown.output.rstrip()}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
