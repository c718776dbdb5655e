"""`floe egress repartition`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from common.errors import UsageError
from common.service.cli import config_option, json_option, load_settings, print_json, run_command

if TYPE_CHECKING:
    from egress.partitions.repartition import Plan, Result


@click.command()
@click.option("--feed", "name", required=True, help="The feed.")
@click.option("--dry-run", is_flag=True, help="Show what would be done.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@config_option
@run_command
async def repartition(config: str, name: str, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Cut a feed into the partitions that are configured now.

    Its incarnation is closed where the furthest partition is, and the next one begins behind it. Stop egress
    first. May be run again after a crash, and does nothing where the feed is cut as configured.

    Example: floe egress repartition -c site.yaml --feed NODE_DATA
    """
    from common.service.shutdown import stop_on_signals
    from egress.opened import feed_named, opened
    from egress.partitions.repartition import Repartition
    from egress.parts import Tuning

    settings = load_settings(config)
    feed = feed_named(settings, name)
    async with opened(settings, Tuning()) as components, stop_on_signals() as stop:
        work = Repartition(components, feed)
        plan = await work.plan()
        if dry_run:
            _print(_planned(plan), as_json)
            return 0
        if not plan.is_done:
            _confirm(plan, yes)
        result = await work.run(stop)
    _print(_done(result, plan), as_json)
    return 0


def _confirm(plan: Plan, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("expected --yes where nobody can be asked")
    cut = f"{len(plan.old)} into {len(plan.new)} partitions"
    click.confirm(f"close {plan.current} at {plan.end} and cut {cut}?", abort=True, err=True)


def _planned(plan: Plan) -> dict[str, Any]:
    behind = {n: plan.end - reach.through for n, reach in enumerate(plan.reaches)}
    return {
        "chain": str(plan.current),
        "nothing_to_do": plan.is_done,
        "from": [part.filter_subject for part in plan.old],
        "to": [part.filter_subject for part in plan.new],
        "ends_at": None if plan.is_done else plan.end,
        "still_to_read": {} if plan.is_done else behind,
    }


def _done(result: Result, plan: Plan) -> dict[str, Any]:
    return {
        "chain": str(result.chain),
        "nothing_to_do": plan.is_done,
        "to": [part.filter_subject for part in plan.new],
        "first": result.first,
        "ends": result.ends,
    }


def _print(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    if found["nothing_to_do"]:
        click.echo(f"{found['chain']} is cut as configured")
        return
    for key, value in found.items():
        if key != "nothing_to_do":
            click.echo(f"{key.replace('_', ' ')}: {value}")
