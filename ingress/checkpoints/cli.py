"""`floe checkpoint set`: an operator's corrections of what ingress remembers of a target."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from common.chain import Chain
from common.errors import UsageError
from common.sequences import MAX_SEQUENCE
from common.service.cli import Sequence, config_option, json_option, load_settings, run_command
from ingress.options import (
    chain_of,
    confirm,
    dry_run_option,
    history_options,
    target_option,
    yes_option,
)

if TYPE_CHECKING:
    from ingress.checkpoints.correcting import Desk, Plan

POSITION_COLUMNS = ("site", "feed", "incarnation", "partition", "before", "after")


class Position(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """`SITE/FEED[/INCARNATION[/PARTITION]]=SEQUENCE`, as a pair."""

    name = "chain=sequence"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Chain, int]:
        name, _, sequence = str(value).rpartition("=")
        try:
            chain, at = Chain.parse(name), int(sequence)
        except ValueError as error:
            self.fail(f"expected SITE/FEED/INCARNATION/PARTITION=SEQUENCE: {error}", param, ctx)
        if not 1 <= at <= MAX_SEQUENCE:
            self.fail(f"expected a sequence from 1 to {MAX_SEQUENCE}, found {at}", param, ctx)
        return chain, at


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line asks for."""

    chain: Chain | None
    sequence: int
    accept: bool
    from_target: bool
    forget: bool
    forget_unlisted: bool
    told: dict[Chain, int]
    repeats: bool
    yes: bool
    dry_run: bool
    as_json: bool

    def planning(self, desk: Desk) -> Callable[[], Awaitable[Plan]]:
        """What makes the plan."""
        if self.accept:
            return lambda: desk.accept(self.told, self.repeats)
        if self.from_target:
            return lambda: desk.rebuild(self.repeats)
        if self.forget:
            return desk.forget
        if self.forget_unlisted:
            return desk.forget_unlisted
        chain = self.chain
        assert chain is not None, "one of them stands there"
        return lambda: desk.move(chain, self.sequence)

    @property
    def while_at_work(self) -> bool:
        """Whether it may be done while ingress carries: it touches single chains only."""
        return self.chain is not None or self.forget_unlisted


@click.command("set")
@config_option
@target_option
@click.option("--site", default="", help="With --feed and --sequence: of this site.")
@click.option("--feed", default="", help="The feed.")
@history_options
@click.option("--sequence", type=Sequence(), help="The sequence that the chain goes on at.")
@click.option("--accept", is_flag=True, help="Take the target as it is now.")
@click.option("--from-target", is_flag=True, help="Find the positions by reading the target.")
@click.option("--forget", is_flag=True, help="Fill the empty target again from the archive.")
@click.option("--forget-unlisted", is_flag=True, help="Forget chains that `sources` does not list.")
@click.option("--position", "told", type=Position(), multiple=True, help="With --accept: you know it.")
@click.option("--accept-repeats", "repeats", is_flag=True, help="Rather store messages twice than not.")
@dry_run_option
@yes_option
@json_option
@run_command
async def checkpoint_set(
    config: str,
    target: str,
    site: str,
    feed: str,
    incarnation: int,
    partition: int,
    sequence: int | None,
    **options: Any,
) -> int:
    """Correct what ingress remembers of a target. The service goes on by itself, without a restart.

    Shows every position before and after and what becomes of messages, and asks. Nothing is published.

    \b
    Example: floe checkpoint set -c central.yaml --target FLEET --accept
             floe checkpoint set -c central.yaml --target FLEET --from-target --dry-run
             floe checkpoint set -c central.yaml --target FLEET --forget
             floe checkpoint set -c central.yaml --target FLEET --site us-east --feed NODES --sequence 4711
    """
    chain = _chain(site, feed, incarnation, partition, sequence)
    told = dict(options.pop("told"))
    wish = Wish(chain=chain, sequence=sequence or 0, told=told, **options)
    _check(wish)
    return await run(config, target, wish)


def _chain(site: str, feed: str, incarnation: int, partition: int, sequence: int | None) -> Chain | None:
    if not site and not feed and sequence is None:
        return None
    if not site or not feed or sequence is None:
        raise UsageError("expected --site, --feed and --sequence together")
    return chain_of(site, feed, incarnation, partition)


def _check(wish: Wish) -> None:
    asked = (wish.chain is not None, wish.accept, wish.from_target, wish.forget, wish.forget_unlisted)
    if sum(asked) != 1:
        raise UsageError(
            "expected one of --accept, --from-target, --forget, --forget-unlisted and "
            "--site, --feed, --sequence"
        )
    if wish.told and not wish.accept:
        raise UsageError("--position: expected --accept beside it")
    if wish.repeats and not (wish.accept or wish.from_target):
        raise UsageError("--accept-repeats: expected --accept or --from-target beside it")


async def run(config: str, target: str, wish: Wish) -> int:
    """Plan, show, ask, do; the exit code."""
    from ingress.checkpoints.correcting import opened

    async with opened(load_settings(config, quiet=True), target) as desk:
        planning = wish.planning(desk)
        plan = await (desk.patiently(planning) if wish.while_at_work else planning())
        if not wish.as_json:
            _show(desk.target, plan)
        if wish.dry_run or not plan.changes:
            _end(wish, desk.target, plan, "nothing was changed")
            return 0
        confirm(f"change what is remembered of {desk.target}?", wish.yes)
        if wish.while_at_work:
            await desk.apply_again(plan, planning)
        else:
            await desk.apply(plan)
        _end(wish, desk.target, plan, "done: ingress goes on by itself")
    return 0


def _show(target: str, plan: Plan) -> None:
    from common.service.output import table
    from ingress.checkpoints.correcting import position_rows

    state, after = plan.known.state, plan.correction.after
    if plan.known.problem:
        click.echo(f"stored: {plan.known.problem}")
    was = state.checkpoint.target_sequence if state else "-"
    now = after.checkpoint.target_sequence if after else "-"
    click.echo(f"{target}: target sequence {was} -> {now}")
    if state and state.intent:
        kept = bool(after and after.intent)
        intent = state.intent
        click.echo(
            f"open intent after {intent.base}, {intent.count} messages -> {'kept' if kept else 'dropped'}"
        )
    table(position_rows(plan), POSITION_COLUMNS)
    for line in plan.correction.told:
        click.echo(line)


def _end(wish: Wish, target: str, plan: Plan, text: str) -> None:
    if not wish.as_json:
        click.echo(text, err=True)
        return
    from common.service.output import print_json
    from ingress.reports import checkpoint_json

    print_json(
        {
            "target": target,
            "changed": plan.changes and not wish.dry_run,
            "dry_run": wish.dry_run,
            "problem": plan.known.problem or None,
            "before": checkpoint_json(target, plan.known.state),
            "after": checkpoint_json(target, plan.correction.after),
            "told": plan.correction.told,
        }
    )
