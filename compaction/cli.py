"""`floe compact`, for cron, and `floe segments verify`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from common.cli import config_option, json_option, print_json, run_command, table
from common.errors import DataError
from common.open import load_settings, open_chains, open_store

if TYPE_CHECKING:
    from common.segments.store import SegmentStore
    from common.settings.root import Settings
    from compaction.failures import Failure
    from compaction.run import Compaction, Selection


@click.command()
@click.option("--site", help="Only chains of this site; otherwise that of the configuration, or all.")
@click.option("--feed", help="Only chains of this feed.")
@click.option("--partition", type=click.IntRange(0, 65535), help="Only this partition.")
@click.option("--level", type=click.IntRange(0, 8), help="Only merges that read this level.")
@click.option("--engine", type=click.Choice(["spark", "local"]), help="Where to merge.")
@click.option("--verify", type=click.Choice(["spark", "merge"]), help="How to prove that no row was lost.")
@click.option("--master", metavar="URL", help="Spark's master, such as local[2] or spark://host:7077.")
@click.option("--dry-run", is_flag=True, help="List what would be read and deleted, and do nothing.")
@click.option("--strict", is_flag=True, help="Exit 3 also for what an earlier run has told.")
@json_option
@config_option
@run_command
def compact(
    config: str,
    site: str | None,
    feed: str | None,
    partition: int | None,
    level: int | None,
    engine: str | None,
    verify: str | None,
    master: str | None,
    dry_run: bool,
    strict: bool,
    as_json: bool,
) -> int:
    """Merge small segments into larger ones, prove it, and delete what was merged after a grace.

    Without Java: --engine local. What is wrong with data is told once: exit 3 while it is new, then only
    with --strict.

    \b
    Examples:
      floe compact -c central.yaml
      floe compact -c central.yaml --dry-run --site us-east
    """
    from compaction.run import Selection

    settings = _overridden(load_settings(config), engine, verify, master)
    selection = Selection(site or settings.site or None, feed, partition, level)
    store = open_store(settings)
    try:
        if (site, feed, partition) != (None, None, None):
            _check_names(settings, selection)
        with _compaction(settings, store) as compaction:
            return (_preview if dry_run else _run)(compaction, selection, as_json, strict)
    finally:
        store.close()


@click.command()
@click.argument("what", required=False, metavar="[SITE[/FEED[/INC[/PART]]]]")
@click.option("--deep", is_flag=True, help="Read every row, and compare levels row by row.")
@json_option
@config_option
@run_command
def verify(config: str, what: str | None, deep: bool, as_json: bool) -> int:
    """Look for holes, damaged segments and levels that disagree; of all chains or of WHAT.

    Exit 3 where anything is not as it must be. Keys that are none of Floe's are counted and named, and are no
    difference.

    Example: floe segments verify -c central.yaml us-east/NODES --deep
    """
    from common.segments.archive import select_chains
    from common.segments.checks import look_for_foreign
    from common.segments.keys import configured
    from compaction import report
    from compaction.verify import verify_chain

    settings = load_settings(config, quiet=True)
    store, chains = open_store(settings), open_chains(settings)
    selected = select_chains(chains, what, configured(settings))
    found = [verify_chain(store, chains, chain, deep=deep) for chain in selected]
    places = [place for chain in selected for place in store.layout.places(chain)] if what else []
    foreign = look_for_foreign(store.objects, store.layout, places)
    store.close()
    if as_json:
        print_json([report.verify_json(chain) for chain in found] + report.foreign_json(foreign))
    else:
        table([report.verify_row(chain) for chain in found], report.VERIFY_COLUMNS)
        for line in foreign.lines():
            click.echo(line, err=True)
        _offer(foreign.keys)
    problems = [(chain.chain, problem) for chain in found for problem in chain.problems]
    for chain, problem in problems:
        text = f"{chain}: {problem.kind}: {problem.text}"
        click.echo(DataError(text, hint=problem.hint, code="E-VERIFY").line(), err=True)
    return DataError.exit_code if problems else 0


def _overridden(settings: Settings, engine: str | None, verify: str | None, master: str | None) -> Settings:
    """`settings` with the command line on top; without Spark the merge proves itself."""
    compaction = settings.compaction
    engine = engine or compaction.engine
    verify = verify or ("merge" if engine == "local" else compaction.verify)
    spark = compaction.spark.model_copy(update={"master": master or compaction.spark.master})
    changes = {"engine": engine, "verify": verify, "spark": spark}
    return settings.model_copy(update={"compaction": compaction.model_copy(update=changes)})


def _check_names(settings: Settings, selection: Selection) -> None:
    """Raises UsageError for a site, feed or partition that is not there."""
    from common.segments.archive import among
    from common.segments.keys import chosen, configured

    site, feed, partition = selection.site, selection.feed, selection.partition
    feeds = configured(settings)
    among(open_chains(settings), site, feed, lambda known: chosen(known, feeds, site, feed, None, partition))


@contextmanager
def _compaction(settings: Settings, store: SegmentStore) -> Iterator[Compaction]:
    """The parts put together as configured; Spark starts when there is work for it."""
    from compaction.proof import SparkProver
    from compaction.run import Compaction, LocalRunner
    from compaction.spark import Spark

    chosen = settings.compaction
    with Spark(settings) as spark:
        runner = spark if chosen.engine == "spark" else LocalRunner(store)
        prove = SparkProver(spark, store).prove if chosen.verify == "spark" else None
        grace = chosen.delete_grace if chosen.delete else None
        yield Compaction(store, chosen.levels, grace, runner, prove)


def _run(compaction: Compaction, selection: Selection, as_json: bool, strict: bool) -> int:
    from compaction import report

    done = compaction.run(selection)
    if as_json:
        print_json(report.report_json(done))
    else:
        _show(report.report_rows(done), report.COLUMNS)
    return _ending(done.failures, [] if strict else done.told)


def _preview(compaction: Compaction, selection: Selection, as_json: bool, strict: bool) -> int:
    from compaction import report

    surveys = compaction.preview(selection)
    problems = [problem for survey in surveys for problem in survey.problems]
    if as_json:
        print_json(report.preview_json(surveys))
    else:
        _show(report.preview_rows(surveys), report.PREVIEW_COLUMNS)
    return _ending(problems, [] if strict else compaction.reported.told(problems))


def _show(rows: list[list[object]], columns: Sequence[str]) -> None:
    if rows:
        table(rows, columns)
    else:
        click.echo("nothing to do")


def _ending(failures: list[Failure], told: list[Failure]) -> int:
    """The exit code, once each of `failures` was said that is not among `told`, with the ways out."""
    from compaction.failures import exit_code

    new = [failure for failure in failures if failure not in told]
    for failure in new:
        click.echo(failure.line, err=True)
        _offer(failure.suspects)
    if told:
        click.echo(f"problems that were told before: {len(told)}; --strict says them again", err=True)
    return exit_code(new)


def _offer(keys: Sequence[str]) -> None:
    """The commands that put objects away, one a line."""
    from common.segments.store import quarantine_command

    for key in keys:
        click.echo(quarantine_command(key), err=True)
