"""The commands of ingress, and `floe status`, which shows the views of all parts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from common import cli
from common.check_cli import HOUR_S, CheckResult, CheckState, PerformanceValue, Thresholds, thresholds
from common.cli import config_command, config_option, print_json, print_table, run_async, run_command
from common.clock import SystemClock
from common.errors import OutcomeUnknown, StoreUnavailable, Unavailable
from common.exits import EXIT_DIFFERENCES, EXIT_RETRY_LATER, report_error
from common.imports import reduce_memory
from common.logs import escape
from common.open import load_settings
from common.settings.types import format_count
from ingress.operator.checkpoint_cli import checkpoint_release, checkpoint_set

if TYPE_CHECKING:
    from common.observe.observation import StatusView
    from common.settings.root import Settings


@click.group()
def ingress() -> None:
    """Replay segments into target streams."""


@ingress.command("run")
@config_option
@run_command
async def run(config: str) -> None:
    """Deliver the archive into the target streams, until SIGTERM.

    SIGHUP takes over targets and sources that were added, changed or removed, log.level and secrets; other chains do
    not pause. If another key has changed, nothing is taken over. SIGQUIT logs the stack of every task.

    \b
    Example: floe ingress run -c central.yaml
    """
    reduce_memory()
    from common.clock import SystemClock
    from common.nats.client import connect
    from common.nats.lease import RenewalThread
    from common.objects.open import open_objects
    from common.observe.monitor import Health, Monitor
    from common.open import load_settings, open_chains, open_store, reload_on_hangup
    from common.service.process import SystemdNotifier, stop_on_signals
    from ingress.errors import check_targets
    from ingress.service import Controller, plan_targets

    settings, clock = load_settings(config), SystemClock()
    check_targets(settings.ingress)
    health = Health(clock, service="ingress", site=settings.site, instance=settings.instance)
    monitor = Monitor(settings.ingress.monitor.listen, health, tls=settings.ingress.monitor.tls)
    store = open_store(settings, open_objects(settings.store))
    connecting = partial(connect, settings.nats_for("ingress"), name="floe ingress leases", clock=clock)
    monitor.start()
    try:
        async with stop_on_signals() as stop, SystemdNotifier(monitor.page_text, clock).while_running(stop):
            with reload_on_hangup(config, settings, plan_targets):
                async with RenewalThread(connecting, health.beat_age) as thread:
                    await Controller(settings, store, open_chains(settings), health, clock, thread=thread).run(stop)
    finally:
        monitor.close()


@click.group()
def checkpoint() -> None:
    """Show the checkpoints of ingress, and correct them."""


checkpoint.add_command(checkpoint_set)
checkpoint.add_command(checkpoint_release)


@checkpoint.command("ls")
@config_command
async def checkpoint_ls(config: str, as_json: bool) -> None:
    """List the checkpoint of each target: the rows known to be stored, and the open intent if there is one.

    \b
    Example: floe checkpoint ls -c central.yaml --json
    """
    from ingress.operator.status import print_checkpoints

    await print_checkpoints(load_settings(config, quiet=True), as_json)


# The exit code of several views is the first of these that one of them has.
EXIT_CODES_BY_SEVERITY = (EXIT_DIFFERENCES, EXIT_RETRY_LATER)
#: The view of each section of the configuration; imported only if the section is not empty.
Views = Mapping[str, Callable[[], "Callable[[Settings], Awaitable[StatusView]]"]]


@click.command()
@click.option("--watch", "every", is_flag=False, flag_value="2s", type=cli.Interval(), help="Repeat at this interval.")
@click.option("--archive", "is_archive", is_flag=True, help="Show only the archive, without NATS.")
@cli.wide_option
@click.pass_obj
@config_command
def status(views: Views, config: str, is_archive: bool, is_wide: bool, every: float | None, as_json: bool) -> int:
    """Show the state of this site, of the centre, or of the archive.

    With `egress.feeds`: each partition of the site, its open segment, the archived position, the holder of its lease.
    With `ingress.targets`: each chain, the positions of archive and target, the last report of egress; without an
    answer of NATS, and with neither: the content of the archive. Exit 3: something is stopped, stalled, lost or
    damaged, has no lease holder, or is late, silent or waiting for longer than `ingress.silent_after`; 75: NATS or the
    store does not answer.

    \b
    Example: floe status -c site.yaml
             floe status -c central.yaml --watch 5s
    """
    settings = load_settings(config, quiet=True)

    def show() -> int:
        found = run_async(_read_views(settings, views, is_archive))
        if every is not None:
            click.clear()
        return _show(found, is_wide=is_wide, as_json=as_json)

    return show() if every is None else _repeat(show, every)


def _repeat(show: Callable[[], int], every: float) -> int:
    code, clock = 0, SystemClock()
    with suppress(KeyboardInterrupt):
        while True:
            try:
                code = show()
            except (Unavailable, OutcomeUnknown) as error:
                code = report_error(error)
            clock.block(every)
    return code


def _show(found: Sequence[StatusView], *, is_wide: bool, as_json: bool) -> int:
    """Print the views and return the exit code."""
    if as_json:
        print_json([row for view in found for row in view.rows()])
    for view in () if as_json else found:
        if len(found) > 1:
            click.echo(f"{view.format.name}:")
        rows, columns = view.table(is_wide=is_wide)
        print_table(rows, columns, None if is_wide else cli.terminal_width())
        for line in view.details:
            click.echo(escape(line))
    for note in (note for view in found for note in view.notes):
        click.echo(escape(note), err=True)
    codes = {view.code for view in found}
    return next((code for code in EXIT_CODES_BY_SEVERITY if code in codes), 0)


async def _read_views(settings: Settings, views: Views, is_archive: bool) -> list[StatusView]:
    """Return the views of the configured sections, and the archive's if there is none or its servers do not answer."""
    sections = {"egress": settings.egress.feeds_, "ingress": settings.ingress.targets}
    names = [] if is_archive else [name for name, has in sections.items() if has]
    found: list[StatusView] = []
    note = "" if names else "NATS is not queried"
    for name in names:
        try:
            found.append(await views[name]()(settings))
        except StoreUnavailable:
            raise
        except (Unavailable, OutcomeUnknown) as error:
            note = f"only the archive is shown: {error.message}"
    if note:
        from common.segments_cli import archive_view

        view = await archive_view(settings)
        found.append(replace(view, notes=[note], code=EXIT_RETRY_LATER if names else 0))
    return found


def check_ingress(settings: Settings, given: Thresholds) -> CheckResult:
    """Check the ingress of this host. `given`: limits of the age of the oldest archived message that is not delivered;
    15 minutes and an hour without values.
    """
    from common.observe.monitor import CHECK_TIMEOUT_S, fetch_status

    limits = thresholds(given, (900.0, HOUR_S))
    return judge_ingress(fetch_status(settings.ingress.monitor, "ingress.monitor.listen", CHECK_TIMEOUT_S), *limits)


def judge_ingress(document: Mapping[str, Any], warning: float, critical: float) -> CheckResult:
    """Judge /status of ingress. `warning`, `critical`: seconds of lag."""
    from common.observe.page import parts_of

    targets = {name: part for name, part in parts_of(document).items() if name.startswith("target ")}
    chains = {
        f"{chain} into {name}": c for name, part in targets.items() for chain, c in part.get("chains", {}).items()
    }
    stopped = [f"{name}: {each.get('code')}" for name, each in chains.items() if "stopped" in each]
    stopped += [f"{name}: {part.get('code')}" for name, part in targets.items() if part.get("state") == "stopped"]
    sites = [(name, each["source"]) for name, each in chains.items() if "source" in each]
    stopped += [f"{name}, at its site: {site.get('code')}" for name, site in sites if site.get("state") == "stopped"]
    lags = {name: float(each.get("lag_seconds", 0)) for name, each in chains.items()}
    limits = f"{warning:.0f}", f"{critical:.0f}"
    max_lag = max(lags.values(), default=0.0)
    counts = f"{format_count(len(targets), 'target')}, {format_count(len(chains), 'chain')}"
    result = CheckResult(f"{counts}, {max_lag:.0f} s behind", [
        PerformanceValue("targets", len(targets)),
        PerformanceValue("chains", len(chains)),
        PerformanceValue("stopped", len(stopped)),
        PerformanceValue("waiting", sum("hole" in each for each in chains.values())),
        PerformanceValue("lag", max_lag, "s", *limits),
    ])  # fmt: skip
    for each in stopped:
        result.add_problem(CheckState.CRITICAL, f"stopped: {each}")
    for name, part in targets.items():
        if count := part.get("untaken_feeds"):
            shown = "; ".join(part.get("untaken", ()))
            result.add_problem(CheckState.CRITICAL, f"{name}: {format_count(count, 'feed')} not delivered: {shown}")
    for name, lag in lags.items():
        result.check_limit(f"{name}: {lag:.0f} s behind", lag, warning, critical)
    result.check_process(document)
    return result
