"""Commands of `floe egress`, which archives the streams of a site."""

import click

from common.cli import Duration, config_command, config_option, print_json, print_table, run_command
from common.memory import reduce_memory
from common.open import load_settings, reload_on_hangup
from egress.decisions_cli import repartition, resolve


@click.group()
def egress() -> None:
    """Archive the streams of this site as segments."""


egress.add_command(repartition)
egress.add_command(resolve)


@egress.command()
@click.argument("feed", default="", metavar="[FEED|SITE/FEED[/INC[/PART]]]")
@click.option("--wait/--no-wait", default=None, help="Also wait for partitions without a lease holder; or do not wait.")
@click.option("--timeout", type=Duration(), default=60.0, help="How long to wait.  [default: 1m]")
@config_command
async def flush(config: str, feed: str, wait: bool | None, timeout: float, as_json: bool) -> int:
    """Close the open segment of FEED now, or of all feeds, and wait until it is stored.

    The process that holds the lease closes it within a second or two. Exit 75 if no process holds the lease, or if the
    segment is not stored in time. The request then remains, and the next process that takes the lease carries it out.

    \b
    Example: floe egress flush -c site.yaml us-east/NODE_DATA
             floe egress flush -c site.yaml us-east/NODE_DATA/0000/1
    """
    from egress.flush import run_flush

    return await run_flush(load_settings(config, quiet=True), feed, wait, timeout, as_json)


@egress.command()
@config_option
@click.option("--workers", type=click.IntRange(1, 64), help="Number of processes, instead of `egress.workers`.")
@click.option("--worker", hidden=True, default="", help="Identity of the worker; set by its parent.")
@run_command
async def run(config: str, workers: int | None, worker: str) -> int:
    """Archive until SIGTERM; then store the messages that were read, and exit.

    SIGHUP checks the configuration again and applies the keys that can change (log.level, secrets). SIGQUIT logs the
    stack of every task.

    \b
    Example: floe egress run -c site.yaml
    """
    from common.logs import add_fields
    from egress.workers.process import WorkerIdentity

    reduce_memory()
    identity = WorkerIdentity.parse(worker) if worker else None
    if identity:
        add_fields(worker=identity.index)
    settings = load_settings(config)
    count = workers or settings.egress.workers
    with reload_on_hangup(config, settings):
        if count > 1 and identity is None:
            from egress.workers.supervisor import run_workers

            return await run_workers(config, settings, count)
        from egress.service import serve

        return await serve(settings, identity=identity)


INIT_COLUMNS = ("what", "name", "stream", "result", "note")


@egress.command("init")
@config_command
async def init(config: str, as_json: bool) -> int:
    """Create the buckets, and the durables of interest and work-queue streams, before anything is published.

    Safe to run again, and beside a running egress.

    \b
    Example: floe egress init -c site.yaml
    """
    from contextlib import aclosing

    from common.clock import SystemClock
    from egress.context import connect_egress
    from egress.init import NOT_NEEDED, set_up
    from egress.partition import require_feeds

    settings = load_settings(config, quiet=True)
    require_feeds(settings.egress.feeds)
    async with aclosing(await connect_egress(settings, "init", SystemClock())) as client:
        done, problems = await set_up(client, settings)
    if as_json:
        print_json(done)
    else:
        shown = [each for each in done if each.result != NOT_NEEDED]
        print_table([[each.what, each.name, each.stream, each.result, each.note] for each in shown], INIT_COLUMNS)
    for problem in problems:
        click.echo(problem.as_text(), err=True)
    return max((problem.exit_code for problem in problems), default=0)
