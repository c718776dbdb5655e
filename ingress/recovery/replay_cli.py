"""Define the command `floe replay`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from typing import Any

import click

from common.chain import FEED_PATTERN
from common.cli import (
    ChainSelector,
    chain_argument,
    config_command,
    confirm,
    dry_run_option,
    print_json,
    range_options,
    target_option,
    yes_option,
)
from common.errors import UsageError
from common.exits import EXIT_RETRY_LATER
from common.logs import escape
from common.open import load_settings, open_for_work


@click.command()
@chain_argument
@range_options
@click.option("--subject", "subjects", multiple=True, metavar="FILTER", help="Only these subjects; may be repeated.")
@target_option
@click.option("--subject-prefix", "prefix", default="", help="Prefix of each subject, joined with a dot.")
@click.option("--into-source", is_flag=True, help="The target is the source stream of the feed.")
@click.option("--create", is_flag=True, help="Create a missing target from stream.json.")
@click.option("--append", is_flag=True, help="Append after the messages that the target holds.")
@click.option("--rate", default="", metavar="RATE", help="Maximum rate: 5000/s (messages) or 20M/s (bytes).")
@click.option("--allow-lossy", is_flag=True, help="Also replay an archive that lacks messages.")
@click.option("--skip-holes", is_flag=True, help="Continue after sequences that no segment covers.")
@click.option("--again", is_flag=True, help="Begin again, regardless of earlier replays into the target.")
@dry_run_option
@yes_option
@config_command
async def replay(
    config: str, selector: ChainSelector, as_json: bool, dry_run: bool, yes: bool, rate: str, **args: Any
) -> int:
    """Replay the archived messages of a feed into a stream, the target, in order and once.

    Without bounds, all of them. The same command continues a replay that was stopped or killed. Exit 75 if it was
    stopped before its end. On a terminal, --again asks for confirmation.

    \b
    Example: floe replay -c site.yaml us-east/NODES --target NODES --into-source --create --dry-run
    """
    from common.clock import SystemClock
    from common.service.process import stop_on_signals
    from common.service.progress import Progress
    from ingress.recovery.pace import pace_of
    from ingress.recovery.preview import plan_json, plan_lines, result_line
    from ingress.recovery.replay import Replay
    from ingress.recovery.request import FLAG_OPTIONS, ReplayOptions, ReplayRequest

    flags = {name: args.pop(name) for name in FLAG_OPTIONS}
    if not FEED_PATTERN.fullmatch(name := args["target"]):
        form = "1 to 255 characters without space . * > / \\"
        raise UsageError(f"--target: expected a stream name, {form}, found {name!r:.80}")
    request = ReplayRequest(**asdict(selector), **resolve_times(args))
    options = ReplayOptions(**flags, pace=pace_of(rate), pace_arguments=(f"--rate={rate}",) if rate else ())
    settings, clock = load_settings(config, quiet=True), SystemClock()
    if options.again and not dry_run:
        confirm(f"begin again in {request.target}, regardless of earlier replays into it?", yes, is_needed=False)
    store, chains = open_for_work(settings)
    with closing(store):
        work = Replay(settings, request, options, store, chains, clock, progress := Progress())
        async with work.open_connection() as client, stop_on_signals() as stop:
            if dry_run:
                preview = await work.preview(client)
                refused = await work.check(client, preview)
                document = plan_json(preview, request, refused)
                print_json(document) if as_json else echo_lines(plan_lines(preview, request))
                if refused is not None:
                    raise refused
                return 0
            result = await work.run(client, stop)
    progress.end_line()
    print_json(result.as_json()) if as_json else click.echo(result_line(result, request))
    return 0 if result.finished else EXIT_RETRY_LATER


def resolve_times(args: dict[str, Any]) -> dict[str, Any]:
    """Return `args` with its times in the form of a `ReplayRequest`."""
    for name, absolute in (("since", "from_time"), ("until", "to_time")):
        if (at := args.pop(name)) is not None:
            args |= {absolute: at.text} if at.text else {name: at.seconds_ago}
    return args


def echo_lines(lines: Iterable[str], *, err: bool = False) -> None:
    for line in lines:
        click.echo(escape(line), err=err)
