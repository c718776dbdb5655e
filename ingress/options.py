"""Options that several commands of ingress share: the target, one chain, and the question before a change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click

from common.chain import Chain
from common.errors import UsageError

Command = Callable[..., Any]

#: `--target STREAM`; the command gets `target: str`.
target_option = click.option("--target", required=True, metavar="STREAM", help="The target.")

#: `--yes`; the command gets `yes: bool`.
yes_option = click.option("--yes", is_flag=True, help="Do not ask.")

#: `--dry-run`; the command gets `dry_run: bool`.
dry_run_option = click.option("--dry-run", is_flag=True, help="Show only.")


def history_options(command: Command) -> Command:
    """`[--incarnation] [--partition]`, both 0 where they are not given."""
    partition = click.option("--partition", type=click.IntRange(0, 65535), default=0, help="The partition.")
    incarnation = click.option(
        "--incarnation", type=click.IntRange(0, 9999), default=0, help="The incarnation."
    )
    return incarnation(partition(command))


def chain_options(command: Command) -> Command:
    """`--site --feed [--incarnation] [--partition]`: one chain."""
    feed = click.option("--feed", required=True, help="The feed.")
    site = click.option("--site", required=True, help="The site.")
    return site(feed(history_options(command)))


def any_chain_options(command: Command) -> Command:
    """As `chain_options`, where a command can do without; site and feed are empty then."""
    feed = click.option("--feed", default="", help="The feed.")
    site = click.option("--site", default="", help="The site.")
    return site(feed(history_options(command)))


def chain_of(site: str, feed: str, incarnation: int, partition: int) -> Chain:
    """The chain that the options name. Raises UsageError for what no chain can be called."""
    try:
        return Chain(site, feed, incarnation, partition)
    except ValueError as error:
        raise UsageError(str(error)) from None


def confirm(question: str, yes: bool) -> None:
    """Ask, on stderr, unless `yes`. Raises UsageError where nobody can be asked, Abort for a no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("expected --yes where nobody can be asked")
    click.confirm(question, abort=True, err=True)
