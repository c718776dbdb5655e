"""`floe egress resolve`: an operator's decision about a feed that stopped."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from common.errors import UsageError
from common.open import load_settings
from common.service.cli import SequenceType, config_option, json_option, print_json, run_command
from common.service.exits import DIFFERENCES

if TYPE_CHECKING:
    from common.settings.root import Settings
    from egress.context import CommandContext
    from egress.deps import Tuning
    from egress.resolve import Case


@click.command()
@click.argument("feed")
@click.option("--partition", type=click.IntRange(0), help="Only this partition.")
@click.option("--same", "is_same", is_flag=True, help="It is the stream that was archived.")
@click.option("--new-incarnation", "is_new", is_flag=True, help="Freeze what it is now as what follows.")
@click.option("--from", "sequence", type=SequenceType(), help="Where the new incarnation begins.")
@click.option("--believe-listing", "is_believed", is_flag=True, help="What the bucket shows is all there is.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@config_option
@run_command
async def resolve(
    config: str,
    feed: str,
    partition: int | None,
    is_same: bool,
    is_new: bool,
    sequence: int | None,
    is_believed: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Show why FEED has stopped and what can be done about it, or decide it.

    The running service looks again every 30 seconds and goes on by itself. Exit 3 where something is to be
    decided.

    \b
    Example: floe egress resolve -c site.yaml NODE_DATA
             floe egress resolve -c site.yaml NODE_DATA --new-incarnation --from 1201
    """
    from egress.deps import Tuning

    if is_same + is_new + is_believed > 1 or (sequence is not None and not is_new):
        raise UsageError("expected one of --same, --new-incarnation [--from SEQ] and --believe-listing")
    wish = ResolveOptions(feed, partition, is_same, is_new, sequence, is_believed, yes, as_json)
    return await run(load_settings(config, quiet=True), wish, Tuning())


@dataclass(frozen=True, slots=True)
class ResolveOptions:
    """What the command line asks for."""

    feed: str
    partition: int | None
    is_same: bool
    is_new: bool
    sequence: int | None
    is_believed: bool
    yes: bool
    as_json: bool

    def confirm(self, question: str) -> None:
        """Ask, unless `--yes` stands there. Raises UsageError where nobody can be asked."""
        if self.yes:
            return
        if not sys.stdin.isatty():
            raise UsageError("expected --yes where nobody can be asked")
        click.confirm(question, abort=True, err=True)


async def run(settings: Settings, wish: ResolveOptions, tuning: Tuning) -> int:
    """Show or decide; the exit code. Raises UsageError for a decision that cannot be made."""
    from egress.context import feed_named, opened
    from egress.partition import partitions_of
    from egress.resolve import look

    parts = partitions_of(settings.site, feed_named(settings, wish.feed))
    if wish.partition is not None and wish.partition >= len(parts):
        raise UsageError(f"--partition: expected 0 to {len(parts) - 1}, found {wish.partition}")
    async with opened(settings, tuning) as components:
        cases = [await look(components, partition) for partition in parts]
        chosen = cases if wish.partition is None else [cases[wish.partition]]
        if wish.is_new:
            return await _new_incarnation(components, cases, wish)
        if wish.is_same:
            return await _same(components, chosen, wish)
        if wish.is_believed:
            return await _believe(components, chosen, wish)
    return _show(chosen, wish.as_json)


async def _new_incarnation(opened: CommandContext, cases: Sequence[Case], wish: ResolveOptions) -> int:
    from egress.resolve import new_incarnation, plan_incarnation, warnings

    decision = plan_incarnation(cases, wish.sequence)
    told = [warnings(cases[number], first) for number, first in decision.first.items()]
    for text in filter(None, told):
        click.echo(f"warning: {text}", err=True)
    begins = ", ".join(f"partition {number} at {first}" for number, first in sorted(decision.first.items()))
    wish.confirm(f"end the incarnation of {cases[0].chain}, and begin the next with {begins}?")
    await new_incarnation(opened, cases, decision)
    _done(wish, {"decided": "new incarnation", "first": dict(decision.first)})
    return 0


async def _same(opened: CommandContext, cases: Sequence[Case], wish: ResolveOptions) -> int:
    from egress.resolve import check_same, same

    stopped = [case for case in cases if case.code] or cases
    accepted = {str(case.chain): check_same(case).end for case in stopped}
    for chain, end in accepted.items():
        wish.confirm(
            f"take the stream for the one that {chain} was frozen from, whatever differs up to {end}?"
        )
    for case in stopped:
        await same(opened, case)
    _done(wish, {"decided": "same", "accepted": accepted})
    return 0


async def _believe(opened: CommandContext, cases: Sequence[Case], wish: ResolveOptions) -> int:
    from egress.resolve import OF_LISTING, believe_listing

    stopped = [case for case in cases if case.code in OF_LISTING] or cases[:1]
    for case in stopped:
        wish.confirm(f"believe that the archive of {case.chain} ends at {case.end}?")
    marks = {str(case.chain): await believe_listing(opened, case) for case in stopped}
    _done(wish, {"decided": "listing", "marks": marks})
    return 0


def _done(wish: ResolveOptions, result: dict[str, object]) -> None:
    if wish.as_json:
        print_json(result)
    else:
        click.echo("decided; a running egress looks again every 30 seconds and goes on by itself")


def _show(cases: Sequence[Case], as_json: bool) -> int:
    if as_json:
        print_json([case.as_json() for case in cases])
    else:
        for case in _told(cases):
            click.echo("\n".join(_lines(case)))
    return DIFFERENCES if any(case.code for case in cases) else 0


def _told(cases: Sequence[Case]) -> Sequence[Case]:
    """One for each partition; one alone where what is wrong is the feed's."""
    from egress.resolve import OF_FEED

    first = next((case for case in cases if case.code in OF_FEED), None)
    return cases if first is None else [first]


def _lines(case: Case) -> list[str]:
    from common.service.logs import escaped
    from egress.hints import resolve as command
    from egress.resolve import OF_FEED

    found, chain = case.as_json(), str(case.chain)
    named = chain.rpartition("/")[0] if case.code in OF_FEED else chain
    state = case.code or "nothing to decide"
    lines = [f"{named}  {state}: {found['why'].removeprefix(f'{chain}: ')}"]
    if case.current is not None:
        lines.append(f"  archive ends at {found['archive_end']}, created {found['created_archived'] or '-'}")
    if found["stream_last"] is not None:
        held = f"{found['stream_first']}..{found['stream_last']}"
        lines.append(f"  stream holds {held}, created {found['created_found']}")
    lines += [f"  sequence {witness['sequence']}: {witness['held']}" for witness in found["evidence"]]
    if case.bounds is not None and case.code:
        lines.append(f"  a new incarnation may begin within {case.bounds}")
    for choice in case.choices:
        partition = None if choice.options.startswith("--new") else case.partition.number or None
        lines.append(f"  {choice.meaning}:")
        lines.append(f"    {command(case.partition.settings.name, choice.options, partition)}")
    if case.advice:
        lines += [f"  {line}" for line in case.advice.split("\n")]
    return [escaped(line) for line in lines]
