"""The commands of ingress, `floe checkpoint`, and `floe status`, which shows the views of all parts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from common import cli
from common.archive.documents import TargetPositions
from common.audit import decide, decision_command, note_option
from common.check_cli import HOUR_S, CheckResult, CheckState, PerformanceValue, Thresholds, thresholds
from common.clock import SystemClock
from common.errors import DataError, OutcomeUnknown, StoreUnavailable, Unavailable, UsageError
from common.exits import EXIT_DIFFERENCES, EXIT_RETRY_LATER, report_error
from common.imports import reduce_memory
from common.logs import escape
from common.open import load_settings, open_for_view
from common.settings.types import format_count

if TYPE_CHECKING:
    from common.chain import Chain
    from common.observe.observation import StatusView
    from common.settings.root import Settings
    from ingress.operator.correct import CheckpointEditor, CheckpointPlan


@click.group()
def ingress() -> None:
    """Replay segments into target streams."""


@ingress.command("run")
@cli.config_option
@cli.run_command
async def run(config: str) -> None:
    """Deliver the archive into the target streams, until SIGTERM.

    SIGHUP takes over targets and sources that were added, changed or removed, log.level and secrets; other chains do
    not pause. If another key has changed, nothing is taken over. SIGQUIT logs the stack of every task.

    \b
    Example: floe ingress run -c central.yaml
    """
    reduce_memory()
    from common.nats.client import connect
    from common.nats.lease import RenewalThread
    from common.objects.open import open_objects
    from common.observe.monitor import Health, Monitor
    from common.open import open_chains, open_store, reload_on_hangup
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


# Checkpoints


@click.group()
def checkpoint() -> None:
    """Show the checkpoints of ingress, and correct them."""


@checkpoint.command("ls")
@cli.config_command
async def checkpoint_ls(config: str, as_json: bool) -> None:
    """List the checkpoint of each target: the rows known to be stored, and the open intent if there is one.

    \b
    Example: floe checkpoint ls -c central.yaml --json
    """
    from ingress.operator.status import print_checkpoints

    await print_checkpoints(load_settings(config, quiet=True), as_json)


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


@checkpoint.command("set")
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
            _show_correction(target, plan)
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


def _show_correction(target: str, plan: CheckpointPlan) -> None:
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


@checkpoint.command("release")
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


# Status

# The exit code of several views is the first of these that one of them has.
EXIT_CODES_BY_SEVERITY = (EXIT_DIFFERENCES, EXIT_RETRY_LATER)
#: The view of each section of the configuration; imported only if the section is not empty.
Views = Mapping[str, Callable[[], "Callable[[Settings], Awaitable[StatusView]]"]]


@click.command()
@click.option("--watch", "every", is_flag=False, flag_value="2s", type=cli.Interval(), help="Repeat at this interval.")
@click.option("--archive", "is_archive", is_flag=True, help="Show only the archive, without NATS.")
@cli.wide_option
@click.pass_obj
@cli.config_command
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
        found = cli.run_async(_read_views(settings, views, is_archive))
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
        cli.print_json([row for view in found for row in view.rows()])
    for view in () if as_json else found:
        if len(found) > 1:
            click.echo(f"{view.format.name}:")
        rows, columns = view.table(is_wide=is_wide)
        cli.print_table(rows, columns, None if is_wide else cli.terminal_width())
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
