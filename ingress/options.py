"""Options that several commands of ingress share: the target, one chain, and the question before a change."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from common.chain import Chain
from common.errors import UsageError

if TYPE_CHECKING:
    from common.settings.root import Settings

Command = Callable[..., Any]

#: `--target STREAM`; the command gets `target: str`.
target_option = click.option("--target", required=True, metavar="STREAM", help="The target.")

#: `--yes`; the command gets `yes: bool`.
yes_option = click.option("--yes", is_flag=True, help="Do not ask.")

#: `--dry-run`; the command gets `dry_run: bool`.
dry_run_option = click.option("--dry-run", is_flag=True, help="Show only.")


def history_options(command: Command) -> Command:
    """`[--incarnation] [--partition]`, None where they are not given: the newest, the only one."""
    partition = click.option("--partition", type=click.IntRange(0, 65535), help="The partition, if several.")
    incarnation = click.option("--incarnation", type=click.IntRange(0, 9999), help="Else the newest.")
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


@dataclass(frozen=True, slots=True)
class Named:
    """One chain as an operator names it. `incarnation`, `partition` None: the newest, the only one.

    Raises UsageError for what no chain can be called.
    """

    site: str
    feed: str
    incarnation: int | None = None
    partition: int | None = None

    def __post_init__(self) -> None:
        try:
            Chain(self.site, self.feed, self.incarnation or 0, self.partition or 0)
        except ValueError as error:
            raise UsageError(str(error)) from None

    def chain(
        self, settings: Settings, held: Collection[Chain] = (), carried: Collection[Chain] = ()
    ) -> Chain:
        """The chain that is meant, of the archive or of `held`: what a target remembers of others.

        Blocking, unless it is named in full and held. `carried`: where a target has a position. Raises
        UsageError for what is not there, and where the target is not at the newest incarnation yet.
        """
        from common.open import open_chains
        from common.segments.archive import among
        from common.segments.naming import configured, one

        site, feed = self.site, self.feed
        if self.incarnation is not None and self.partition is not None:
            named = Chain(site, feed, self.incarnation, self.partition)
            if named in held or named in carried:
                return named
        feeds, others = configured(settings), {*held, *carried}
        found = among(
            open_chains(settings),
            site,
            feed,
            lambda known: one({*known, *others}, feeds, site, feed, self.incarnation, self.partition),
        )
        self._refuse_doubt(found, carried)
        return found

    def _refuse_doubt(self, found: Chain, carried: Collection[Chain]) -> None:
        at = [c.incarnation for c in carried if (c.site, c.feed) == (self.site, self.feed)]
        if self.incarnation is None and at and max(at) < found.incarnation:
            raise UsageError(
                f"{self.site}/{self.feed}: incarnation {found.incarnation:04d} is the newest, and the target "
                f"still carries {max(at):04d}",
                hint=f"say --incarnation {max(at)} or --incarnation {found.incarnation}",
            )


def confirm(question: str, yes: bool) -> None:
    """Ask, on stderr, unless `yes`. Raises UsageError where nobody can be asked, Abort for a no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("expected --yes where nobody can be asked")
    click.confirm(question, abort=True, err=True)
