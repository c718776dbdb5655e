"""Command `floe egress repartition`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from common.cli import config_option, confirm, json_option, print_json, run_command
from common.errors import UsageError
from common.logs import escape
from common.open import load_settings

if TYPE_CHECKING:
    from common.chain import Chain
    from egress.partition import Partition
    from egress.repartition import RepartitionPlan, RepartitionResult
    from egress.report import NewlyUnmatched


@click.command()
@click.argument("what", metavar="FEED|SITE/FEED")
@click.option("--dry-run", is_flag=True, help="Show the plan, and change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@config_option
@run_command
async def repartition(config: str, what: str, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Divide a feed into the partitions that are configured now.

    Its incarnation is closed at the end of the furthest partition, and the next one begins after it. Stop egress first.
    May be run again after a crash, and does nothing if the feed is divided as configured.

    \b
    Example: floe egress repartition -c site.yaml us-east/NODE_DATA
    """
    from common.service.process import stop_on_signals
    from egress.context import find_feed, open_context, parse_feed
    from egress.repartition import Repartition

    settings = load_settings(config, quiet=True)
    named, *numbers = parse_feed(settings, what)
    if numbers != [None, None]:
        raise UsageError(f"{what}: expected FEED or SITE/FEED: the whole feed is divided")
    feed = find_feed(settings, named)
    async with open_context(settings) as components, stop_on_signals() as stop:
        work = Repartition(components, feed)
        plan = await work.plan()
        unmatched = await work.left_out(plan)
        if dry_run:
            _print(_planned(plan, unmatched), _planned_lines(plan, unmatched), as_json)
            return 0
        if not plan.is_done:
            for each in unmatched:
                click.echo(escape(f"warning: {each}"), err=True)
            cut = f"divide {_filters(plan.old)} into {_filters(plan.new)}"
            confirm(escape(f"close {plan.current} at {plan.end} and {cut}?"), yes)
        result = await work.run(stop)
    _print(_done(result, plan), _done_lines(result, plan), as_json)
    return 0


def _planned(plan: RepartitionPlan, unmatched: Sequence[NewlyUnmatched]) -> dict[str, Any]:
    return {
        "chain": str(plan.current),
        "nothing_to_do": plan.is_done,
        "from": [partition.filter_subject for partition in plan.old],
        "to": [partition.filter_subject for partition in plan.new],
        "ends_at": None if plan.is_done else plan.end,
        "still_to_read": {} if plan.is_done else plan.remaining,
        "left_out": [{"filter": each.filter_subject, **each.found.as_dict()} for each in unmatched],
    }


def _planned_lines(plan: RepartitionPlan, unmatched: Sequence[NewlyUnmatched]) -> list[str]:
    from common.settings.types import format_count

    if plan.is_done:
        return [f"{_feed(plan.current)} is divided as configured"]
    remaining = [
        f"partition {number}: {format_count(count, 'sequence') if count else 'nothing'} still to read"
        for number, count in plan.remaining.items()
    ]
    return [
        f"{_feed(plan.current)} would be closed at {plan.end}, and the next incarnation would begin after it",
        f"from: {_filters(plan.old)}",
        f"to: {_filters(plan.new)}",
        *remaining,
        *map(str, unmatched),
    ]


def _done(result: RepartitionResult, plan: RepartitionPlan) -> dict[str, Any]:
    return {
        "chain": str(result.chain),
        "nothing_to_do": plan.is_done,
        "to": [partition.filter_subject for partition in plan.new],
        "first": result.first,
        "ends": result.ends,
    }


def _done_lines(result: RepartitionResult, plan: RepartitionPlan) -> list[str]:
    if plan.is_done:
        return [f"{_feed(result.chain)} is divided as configured"]
    ends = [
        f"partition {number} of {_feed(plan.current)}: " + (f"ends at {end}" if end else "holds nothing")
        for number, end in sorted(result.ends.items())
    ]
    return [
        *ends,
        f"{_feed(result.chain)} begins at {result.first}: {_filters(plan.new)}",
        "start egress: it continues with the new partitions",
    ]


def _feed(chain: Chain) -> str:
    """Return the name of an incarnation, for all its partitions."""
    return str(chain).rpartition("/")[0]


def _filters(parts: Sequence[Partition]) -> str:
    from egress.incarnations import filters_text

    return filters_text([partition.filter_subject for partition in parts])


def _print(found: dict[str, Any], lines: Sequence[str], as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        click.echo("\n".join(map(escape, lines)))
