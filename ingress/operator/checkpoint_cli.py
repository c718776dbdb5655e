"""`floe checkpoint set | release`: an operator's corrections of the stored state of a target."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from common import cli
from common.archive.documents import TargetPositions
from common.audit import decide, decision_command, note_option
from common.clock import SystemClock
from common.errors import DataError, UsageError
from common.open import load_settings, open_for_view
from common.settings.types import format_count

if TYPE_CHECKING:
    from common.chain import Chain
    from common.settings.root import Settings
    from ingress.operator.correct import CheckpointEditor, CheckpointPlan

Position = tuple[cli.ChainSelector, int]
POSITION_COLUMNS = ("chain", "before", "after")


def _parse_position(text: str) -> Position:
    """Parse `SITE/FEED[/INCARNATION[/PARTITION]]=SEQUENCE`. Raises ValueError."""
    name, _, sequence = text.rpartition("=")
    try:
        return cli.ChainSelector.parse(name), cli.parse_sequence(sequence)
    except ValueError as error:
        raise ValueError(f"expected SITE/FEED/INCARNATION/PARTITION=SEQUENCE: {error}") from None


position_type = cli.ParsedType("chain=sequence", tuple, _parse_position)


@click.command("set")
@cli.target_option
@cli.optional_chain_argument
@click.option("--sequence", type=cli.SequenceType(), help="The sequence at which the chain continues.")
@click.option("--accept", is_flag=True, help="Accept the target as it is now.")
@click.option("--stored", type=click.IntRange(min=0), help="Number of rows of the open intent that are stored.")
@click.option("--from-target", is_flag=True, help="Find the positions by reading the target.")
@click.option("--forget", is_flag=True, help="Fill the empty target again from the archive.")
@click.option("--forget-unlisted", is_flag=True, help="Forget chains that `sources` does not list.")
@click.option("--position", "known", type=position_type, multiple=True, help="With --accept: a position that you know.")
@click.option("--accept-repeats", "repeats", is_flag=True, help="Store messages twice rather than lose them.")
@cli.dry_run_option
@cli.yes_option
@decision_command
async def checkpoint_set(
    config: str, target: str, selector: cli.ChainSelector | None, dry_run: bool, yes: bool, as_json: bool, **chosen: Any
) -> None:
    """Correct the stored state of a target. The service continues by itself, without a restart.

    Only after exit code 4 or 78 has the target ended in its process: then restart ingress.

    It shows every position before and after and the effect on messages, and asks for consent. Nothing is published.

    \b
    Example: floe checkpoint set -c central.yaml --target FLEET --accept
             floe checkpoint set -c central.yaml --target FLEET --from-target --dry-run
             floe checkpoint set -c central.yaml --target FLEET --stored 11
             floe checkpoint set -c central.yaml --target FLEET --forget
             floe checkpoint set -c central.yaml --target FLEET us-east/NODES --sequence 4711
    """
    if (selector is None) is not (chosen["sequence"] is None):
        raise UsageError("expected a chain, as SITE/FEED, and --sequence together")
    known_positions: tuple[Position, ...] = chosen.pop("known")
    repeats: bool = chosen.pop("repeats")
    action = _chosen_action(chosen)
    if known_positions and action != "accept":
        raise UsageError("--position: expected together with --accept")
    if repeats and action not in ("accept", "from_target"):
        raise UsageError("--accept-repeats: expected together with --accept or --from-target")

    from ingress.operator.correct import open_editor

    settings = load_settings(config, quiet=True)
    async with open_editor(settings, target) as editor:
        chains = await _chains(settings, editor, {selector, *(name for name, _ in known_positions)} - {None})
        plans: dict[str, Callable[[], Awaitable[CheckpointPlan]]] = {
            "accept": lambda: editor.accept({chains[name]: at for name, at in known_positions}, repeats),
            "stored": lambda: editor.count_stored(chosen["stored"]),
            "from_target": lambda: editor.rebuild(repeats),
            "forget": editor.forget,
            "forget_unlisted": editor.forget_unlisted,
            "sequence": lambda: editor.move(chains[selector], chosen["sequence"]),
        }
        # A correction of single chains is allowed while ingress delivers.
        planning, is_live = plans[action], action in ("sequence", "forget_unlisted")
        plan = await (editor.plan_with_retry(planning) if is_live else planning())
        if not as_json:
            _show(target, plan)
        is_done = plan.has_changes and not dry_run
        if is_done:
            await decide(settings, f"change the stored state of {target}?", yes)
            await (editor.apply_with_retry(plan, planning) if is_live else editor.apply(plan))
        if as_json:
            cli.print_json(_plan_json(target, plan, dry_run))
        else:
            click.echo("done: ingress continues by itself" if is_done else "nothing was changed", err=True)


def _chosen_action(options: Mapping[str, Any]) -> str:
    actions = ("accept", "stored", "from_target", "forget", "forget_unlisted", "sequence")
    chosen = [action for action in actions if options[action] is not None and options[action] is not False]
    if len(chosen) != 1:
        raise UsageError(
            "expected one of --accept, --stored, --from-target, --forget, --forget-unlisted and SITE/FEED --sequence"
        )
    return chosen[0]


async def _chains(
    settings: Settings, editor: CheckpointEditor, names: set[cli.ChainSelector | None]
) -> dict[cli.ChainSelector | None, Chain]:
    state = (await editor.known()).state if names else None
    known_chains = [*state.checkpoint.positions] if state else []
    return {name: await asyncio.to_thread(name.resolve, settings, (), known_chains) for name in names if name}


def _show(target: str, plan: CheckpointPlan) -> None:
    state, after = plan.known.state, plan.correction.after
    if plan.known.problem:
        click.echo(f"stored: {plan.known.problem}")
    was = state.checkpoint.target_sequence if state else "-"
    now = after.checkpoint.target_sequence if after else "-"
    click.echo(f"{target}: target sequence {was} -> {now}")
    if state and state.intent:
        kept = "kept" if after and after.intent else "dropped"
        click.echo(f"open intent after {state.intent.base}, {format_count(state.intent.count, 'message')} -> {kept}")
    before = state.checkpoint.positions if state else {}
    behind = after.checkpoint.positions if after else {}
    rows = [{"chain": c, "before": before.get(c), "after": behind.get(c)} for c in sorted({*before, *behind})]
    cli.print_table(rows, POSITION_COLUMNS)
    for line in plan.correction.effects:
        click.echo(line)


def _plan_json(target: str, plan: CheckpointPlan, dry_run: bool) -> dict[str, object]:
    from ingress.operator.status import checkpoint_json

    return {
        "target": target,
        "changed": plan.has_changes and not dry_run,
        "dry_run": dry_run,
        "problem": plan.known.problem or None,
        "before": checkpoint_json(target, plan.known.state),
        "after": checkpoint_json(target, plan.correction.after),
        "effects": plan.correction.effects,
    }


RELEASE_WARNING = (
    "{target}: retention keeps nothing for this target any more: segments that all other targets have may be "
    "deleted for good. The target, its checkpoint and the archive stay as they are. First remove it from the "
    "configuration of ingress: an instance that delivers into it reports its positions within a minute, and holds it."
)


@click.command("release")
@note_option
@cli.config_option
@click.argument("target")
@cli.yes_option
@cli.run_command
async def checkpoint_release(config: str, target: str, yes: bool) -> None:
    """Release a target that is no longer delivered into: the archive keeps nothing for it.

    \b
    Example: floe checkpoint release -c central.yaml FLEET --yes
    """
    settings = load_settings(config, quiet=True)
    _, chains = open_for_view(settings)
    try:
        known = chains.read_positions(target)
    except DataError as error:  # an unreadable file keeps everything in the archive, until it is released
        click.echo(str(error), err=True)
        known = TargetPositions(target, 0.0)
    if known is None:
        there = ", ".join(chains.targets_with_positions()) or "none"
        raise UsageError(f"TARGET: expected one with stored positions ({there}), found {target}")
    for chain, at in sorted(known.positions.items()):
        click.echo(f"{chain}: {at}")
    click.echo(RELEASE_WARNING.format(target=target))
    if known.released:
        click.echo(f"{target} was released already", err=True)
        return
    if not yes and not sys.stdin.isatty():
        raise UsageError(f"expected --yes: {target} is not released")
    await decide(settings, f"release {target}?", yes, chains=chains)
    chains.write_positions(TargetPositions(target, SystemClock().now(), released=True))
    click.echo(f"{target} is released", err=True)
