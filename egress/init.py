"""`floe egress init`."""

from __future__ import annotations

import click

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
    from egress.initialise import UNNEEDED, connected, initialise
    from egress.partition import require_feeds

    settings = load_settings(config, quiet=True)
    require_feeds(settings.egress.feeds)
    async with connected(settings) as client:
        done, problems = await initialise(client, settings)
    if as_json:
        print_json(done)
    else:
        shown = [each for each in done if each.result != UNNEEDED]
        table([[each.what, each.name, each.stream, each.result, each.note] for each in shown], COLUMNS)
    for problem in problems:
        click.echo(problem.line(), err=True)
    return max((problem.exit_code for problem in problems), default=0)
