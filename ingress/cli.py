"""The commands of ingress."""

import click

from common.cli import config_option, json_option, run_command
from common.lean import slim
from ingress.operator.checkpoint_cli import checkpoint_release, checkpoint_set


@click.group()
def ingress() -> None:
    """Melt segments back into target streams."""


@ingress.command("run")
@config_option
@run_command
async def run(config: str) -> None:
    """Carry what the archive holds into the target streams, until SIGTERM.

    Example: floe ingress run -c central.yaml
    """
    slim()
    from common.clock import SystemClock
    from common.open import load_settings, open_chains, open_store
    from common.service.monitor import Health, Monitor
    from common.service.process import SystemdNotifier, stop_on_signals
    from ingress.service import Controller

    settings, clock = load_settings(config), SystemClock()
    health = Health(clock)
    monitor = Monitor(settings.ingress.monitor.listen, health)
    store = open_store(settings)
    controller = Controller(settings, store, open_chains(settings), health, clock)
    monitor.start()
    try:
        async with stop_on_signals() as stop, SystemdNotifier(monitor.says, clock).while_running(stop):
            await controller.run(stop)
    finally:
        monitor.close()


@click.group()
def checkpoint() -> None:
    """Show how far ingress has come, and correct it."""


checkpoint.add_command(checkpoint_set)
checkpoint.add_command(checkpoint_release)


@checkpoint.command("ls")
@config_option
@json_option
@run_command
async def checkpoint_ls(config: str, as_json: bool) -> None:
    """List the checkpoint of each target: what is stored for good, and the open intent if there is one.

    Example: floe checkpoint ls -c central.yaml --json
    """
    from common.open import load_settings
    from ingress.operator.status import print_checkpoints

    await print_checkpoints(load_settings(config, quiet=True), as_json)


@click.command()
@config_option
@json_option
@run_command
async def status(config: str, as_json: bool) -> int:
    """Show for each chain how far the archive and the target are, how far apart, and what egress says of it.

    Exit code 3: something is stopped, or late or silent for longer than `ingress.silent_after`. Keys of the
    bucket that are none of Floe's are counted and named on stderr.

    Example: floe status -c central.yaml
    """
    from common.open import load_settings
    from ingress.operator.status import print_status

    return await print_status(load_settings(config, quiet=True), as_json)
