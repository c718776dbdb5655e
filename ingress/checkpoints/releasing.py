"""`floe checkpoint release`: a target holds back no deletion any more."""

from __future__ import annotations

import click

from common.clock import SystemClock
from common.errors import DataError, UsageError
from common.open import open_chains
from common.segments.target_positions import TargetPositions
from common.service.cli import config_option, load_settings, run_command
from ingress.options import yes_option

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
