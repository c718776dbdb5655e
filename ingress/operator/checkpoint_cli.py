"""`floe checkpoint set`: an operator's corrections of what ingress remembers of a target."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from common.chain import Chain
from common.errors import UsageError
from common.sequences import MAX_SEQUENCE
from common.service.cli import (
    Named,
    SequenceType,
    config_option,
    confirm,
    dry_run_option,
    history_options,
    json_option,
    load_settings,
    run_command,
    target_option,
    yes_option,
)

if TYPE_CHECKING:
    from common.settings.root import Settings
    from ingress.operator.correct import CheckpointEditor, CheckpointPlan
from common.clock import SystemClock
from common.errors import DataError
from common.open import open_chains
from common.segments.documents import TargetPositions

POSITION_COLUMNS = ("site", "feed", "incarnation", "partition", "before", "after")


class PositionParam(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """`SITE/FEED[/INCARNATION[/PARTITION]]=SEQUENCE`, as a pair of a `Named` and the sequence."""

    name = "chain=sequence"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Named, int]:
        from common.segments.naming import parse

        name, _, sequence = str(value).rpartition("=")
        try:
            site, feed, *numbers = parse(name)
            named, at = Named(site, feed or "", *numbers), int(sequence)
        except (ValueError, UsageError) as error:
            self.fail(f"expected SITE/FEED/INCARNATION/PARTITION=SEQUENCE: {error}", param, ctx)
        if not 1 <= at <= MAX_SEQUENCE:
            self.fail(f"expected a sequence from 1 to {MAX_SEQUENCE}, found {at}", param, ctx)
        return named, at


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """What the command line asks for."""

    named: Named | None
    sequence: int
    accept: bool
    stored: int | None
    from_target: bool
    forget: bool
    forget_unlisted: bool
    told: dict[Named, int]
    repeats: bool
    yes: bool
    dry_run: bool
    as_json: bool

    def planning(
        self, desk: CheckpointEditor, chain: Chain | None, told: dict[Chain, int]
    ) -> Callable[[], Awaitable[CheckpointPlan]]:
        """What makes the plan. `chain`, `told`: what is meant by the names."""
        if self.accept:
            return lambda: desk.accept(told, self.repeats)
        stored = self.stored
        if stored is not None:
            return lambda: desk.count_stored(stored)
        if self.from_target:
            return lambda: desk.rebuild(self.repeats)
        if self.forget:
            return desk.forget
        if self.forget_unlisted:
            return desk.forget_unlisted
        assert chain is not None, "one of them stands there"
        return lambda: desk.move(chain, self.sequence)

    @property
    def while_at_work(self) -> bool:
        """Whether it may be done while ingress carries: it touches single chains only."""
        return self.named is not None or self.forget_unlisted


@click.command("set")
@config_option
@target_option
@click.option("--site", default="", help="With --feed and --sequence: of this site.")
@click.option("--feed", default="", help="The feed.")
@history_options
@click.option("--sequence", type=SequenceType(), help="The sequence that the chain goes on at.")
@click.option("--accept", is_flag=True, help="Take the target as it is now.")
@click.option("--stored", type=click.IntRange(min=0), help="So many rows of the open intent are stored.")
@click.option("--from-target", is_flag=True, help="Find the positions by reading the target.")
@click.option("--forget", is_flag=True, help="Fill the empty target again from the archive.")
@click.option("--forget-unlisted", is_flag=True, help="Forget chains that `sources` does not list.")
@click.option("--position", "told", type=PositionParam(), multiple=True, help="With --accept: you know it.")
@click.option("--accept-repeats", "repeats", is_flag=True, help="Rather store messages twice than not.")
@dry_run_option
@yes_option
@json_option
@run_command
async def checkpoint_set(
    config: str,
    target: str,
    named: Named | None,
    sequence: int | None,
    **options: Any,
) -> int:
    """Correct what ingress remembers of a target. The service goes on by itself, without a restart.

    Shows every position before and after and what becomes of messages, and asks. Nothing is published.

    \b
    Example: floe checkpoint set -c central.yaml --target FLEET --accept
             floe checkpoint set -c central.yaml --target FLEET --from-target --dry-run
             floe checkpoint set -c central.yaml --target FLEET --stored 11
             floe checkpoint set -c central.yaml --target FLEET --forget
             floe checkpoint set -c central.yaml --target FLEET --site us-east --feed NODES --sequence 4711
    """
    if (named is None) is not (sequence is None):
        raise UsageError("expected --site, --feed and --sequence together")
    told = dict(options.pop("told"))
    wish = CheckpointOptions(named=named, sequence=sequence or 0, told=told, **options)
    _check(wish)
    return await run(config, target, wish)


def _check(wish: CheckpointOptions) -> None:
    is_counted = wish.stored is not None
    asked = (wish.named is not None, wish.accept, wish.from_target, wish.forget, wish.forget_unlisted)
    if sum((*asked, is_counted)) != 1:
        raise UsageError(
            "expected one of --accept, --stored, --from-target, --forget, --forget-unlisted and "
            "--site, --feed, --sequence"
        )
    if wish.told and not wish.accept:
        raise UsageError("--position: expected --accept beside it")
    if wish.repeats and not (wish.accept or wish.from_target):
        raise UsageError("--accept-repeats: expected --accept or --from-target beside it")


async def run(config: str, target: str, wish: CheckpointOptions) -> int:
    """Plan, show, ask, do; the exit code."""
    from ingress.operator.correct import opened

    settings = load_settings(config, quiet=True)
    async with opened(settings, target) as desk:
        planning = wish.planning(desk, *await _meant(settings, desk, wish))
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


async def _meant(
    settings: Settings, desk: CheckpointEditor, wish: CheckpointOptions
) -> tuple[Chain | None, dict[Chain, int]]:
    """The chains that are meant by the names."""
    names = [*wish.told, *([wish.named] if wish.named else [])]
    if not names:
        return None, {}
    state = (await desk.known()).state
    carried = list(state.checkpoint.positions) if state else []
    found = {name: await asyncio.to_thread(name.chain, settings, (), carried) for name in names}
    return found.get(wish.named) if wish.named else None, {found[name]: at for name, at in wish.told.items()}


def _show(target: str, plan: CheckpointPlan) -> None:
    from common.service.cli import table
    from ingress.operator.correct import position_rows

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


def _end(wish: CheckpointOptions, target: str, plan: CheckpointPlan, text: str) -> None:
    if not wish.as_json:
        click.echo(text, err=True)
        return
    from common.service.cli import print_json
    from ingress.operator.status import checkpoint_json

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


MEANING = (
    "{target}: retention keeps nothing for it any more: what every other target has may be deleted, and is "
    "then gone for good. The target, its checkpoint and the archive stay as they are. Take it out of the "
    "configuration of ingress first: whoever carries into it says within a minute where it is, and holds it."
)


@click.command("release")
@config_option
@click.argument("target")
@yes_option
@run_command
async def checkpoint_release(config: str, target: str, yes: bool) -> None:
    """Let a target go that is not carried any more: nothing is kept in the archive because of it.

    Example: floe checkpoint release -c central.yaml FLEET --yes
    """
    chains = open_chains(load_settings(config, quiet=True))
    try:
        known = chains.read_positions(target)
    except DataError as error:  # what cannot be read holds everything, until it is released
        click.echo(str(error), err=True)
        known = TargetPositions(target, 0.0)
    if known is None:
        there = ", ".join(chains.targets_with_positions()) or "none"
        raise UsageError(f"TARGET: expected one that says how far it is ({there}), found {target}")
    for chain, at in sorted(known.positions.items()):
        click.echo(f"{chain}: {at}")
    click.echo(MEANING.format(target=target))
    if known.released:
        click.echo(f"{target} was released already", err=True)
        return
    if not yes:
        raise UsageError(f"expected --yes: {target} is not released")
    chains.write_positions(TargetPositions(target, SystemClock().now(), released=True))
    click.echo(f"{target} is released", err=True)
