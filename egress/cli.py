"""Commands of `floe egress`, which archives the streams of a site."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from common.check_cli import DAY_S, HOUR_S, CheckResult, CheckState, PerformanceValue, Thresholds, thresholds
from common.cli import Duration, config_command, config_option, print_json, print_table, run_command
from common.errors import UsageError
from common.imports import reduce_memory
from common.open import load_settings, reload_on_hangup
from common.settings.types import format_count
from egress.decisions_cli import repartition, resolve

if TYPE_CHECKING:
    from common.settings.root import Settings


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

    SIGHUP takes over feeds that were added, changed or removed, log.level and secrets; the other feeds do not pause. If
    another key has changed, nothing is taken over. SIGQUIT logs the stack of every task.

    \b
    Example: floe egress run -c site.yaml
    """
    from common.logs import add_fields
    from egress.partition import plan_feeds
    from egress.workers import WorkerIdentity, run_workers

    reduce_memory()
    identity = WorkerIdentity.parse(worker) if worker else None
    if identity:
        add_fields(worker=identity.index)
    settings = load_settings(config)
    count = workers or settings.egress.workers
    with reload_on_hangup(config, settings, plan_feeds):
        if count > 1 and identity is None:
            return await run_workers(config, settings, count)
        from egress.service import serve

        return await serve(settings, identity=identity)


@click.command("import")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("feed", metavar="SITE/FEED")
@click.option(
    "--server", default="", metavar="URL|CONTEXT", help="A server that nothing else uses; default: start one."
)
@click.pass_obj
@config_command
async def import_backup(
    parts: Mapping[str, Callable[[], Any]], /, config: str, folder: Path, feed: str, server: str, as_json: bool
) -> int:
    """Import the backup DIR, made by `nats backup stream`, as the beginning of a feed that has no archive yet.

    A nats-server restores it as a scratch stream, which is then read as egress reads any stream, and removed. Egress
    continues where the backup ends. The same command continues an import that was stopped or killed.

    \b
    Example: floe import -c site.yaml backup/NODES us-east/NODES
    """
    from common.service.process import stop_on_signals
    from common.service.progress import Progress
    from egress.deps import open_context, parse_feed
    from egress.importing import Backup, BackupImport, server_settings

    nats, backup, settings = server_settings(server), Backup.open(folder), load_settings(config, quiet=True)
    name, incarnation, partition = parse_feed(settings, feed)
    if (incarnation, partition) != (None, None):
        raise UsageError(f"{feed}: expected SITE/FEED, found more: a backup becomes its first incarnation")
    async with open_context(settings) as context, stop_on_signals() as stop:
        work = BackupImport(context, backup, name, nats, parts["server"](), progress := Progress())
        try:
            report = await work.run(stop)
        finally:
            progress.end_line()
    print_json(report) if as_json else click.echo("\n".join(report.lines()))
    return 0


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
    from egress.deps import connect_egress
    from egress.init import NOT_NEEDED, set_up
    from egress.partition import require_feeds

    settings = load_settings(config, quiet=True)
    require_feeds(settings.egress.feeds_)
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


def check_egress(settings: Settings, given: Thresholds) -> CheckResult:
    """Check the egress of this host. `given`: limits of the time until the source expires unarchived messages; a day
    and six hours without values.
    """
    from common.observe.monitor import CHECK_TIMEOUT_S, fetch, fetch_status

    limits = thresholds(given, (DAY_S, 6 * HOUR_S), at_least=True)
    document = fetch_status(settings.egress.monitor, "egress.monitor.listen", CHECK_TIMEOUT_S)
    metrics = fetch(settings.egress.monitor, "/metrics", CHECK_TIMEOUT_S)
    left = re.findall(r"^floe_egress_expiry_seconds(?:\{.*\})? (\S+)$", metrics, re.MULTILINE)
    return judge_egress(document, min(map(float, left), default=math.inf), *limits)


def judge_egress(document: Mapping[str, Any], expiry: float, warning: float, critical: float) -> CheckResult:
    """Judge /status of egress. `expiry`: seconds until the first source expires messages that are not archived."""
    from common.observe.observation import unarchived
    from common.observe.page import parts_of
    from egress.account import uncovered_part, uncovered_text
    from egress.status import parts_by_chain

    parts = parts_of(document)
    feeds = parts_by_chain(document)
    behind = sum(
        unarchived(each.get("source_last"), each.get("end"), each.get("first", 1)) or 0 for each in feeds.values()
    )
    stopped = [f"{name}: {part.get('code')}" for name, part in feeds.items() if part.get("state") == "stopped"]
    result = CheckResult(f"{format_count(len(feeds), 'chain')}, {format_count(behind, 'sequence')} not archived", [
        PerformanceValue("chains", len(feeds)),
        PerformanceValue("stopped", len(stopped)),
        PerformanceValue("not_archived", behind),
        PerformanceValue("expiry", expiry, "s", f"{warning:.0f}:", f"{critical:.0f}:"),
    ])  # fmt: skip
    if uncovered := uncovered_part(parts):
        result.performance_data.append(PerformanceValue("uncovered", uncovered["uncovered_streams"]))
    if text := uncovered_text(parts):
        result.add_problem(CheckState.WARNING, text)
    for each in stopped:
        result.add_problem(CheckState.CRITICAL, f"stopped: {each}")
    result.check_limit(f"the source expires in {expiry:.0f} s", expiry, warning, critical, at_least=True)
    result.check_process(document)
    return result
