"""`floe egress …`: freezes the streams of a site."""

from __future__ import annotations

import click

from common.service.cli import config_option, load_settings, run_command
from common.service.lean import slim


@click.group()
def egress() -> None:
    """Freeze the streams of this site into segments."""


@egress.command()
@config_option
@run_command
async def run(config: str) -> int:
    """Freeze until SIGTERM; then store what was read, and end.

    Example: floe egress run -c site.yaml
    """
    slim()
    settings = load_settings(config)
    from egress.service import serve

    return await serve(settings)
