"""`floe egress init`."""

from __future__ import annotations

import click

from common.errors import ConfigError
from common.service.cli import config_option, json_option, load_settings, print_json, run_command, table

COLUMNS = ("what", "name", "stream", "result", "note")


@click.command("init")
@config_option
@json_option
@run_command
async def init(config: str, as_json: bool) -> int:
    """Make the buckets, and the durables of interest and work-queue streams, before anything is published.

    Safe to run again, and beside a running egress. Example: floe egress init -c site.yaml
    """
    from egress.initialise import connected, initialise

    settings = load_settings(config)
    if not settings.egress.feeds:
        raise ConfigError("egress.feeds: expected at least one feed, found none")
    async with connected(settings) as client:
        done, problems = await initialise(client, settings)
    if as_json:
        print_json(done)
    else:
        table([[each.what, each.name, each.stream, each.result, each.note] for each in done], COLUMNS)
    for problem in problems:
        click.echo(problem.line(), err=True)
    return max((problem.exit_code for problem in problems), default=0)
