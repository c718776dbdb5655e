"""`floe compact`, for cron, and `floe segments verify`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from common.chain import Chain
from common.check_cli import CheckFigure, CheckResult, CheckState, check_command
from common.cli import config_option, json_option, print_json, refuse_beside, run_command, table
from common.clock import Clock, SystemClock
from common.errors import DataError, FloeError, UsageError
from common.open import load_settings, open_chains, open_store, reloaded_on_hangup
from common.settings.types import counted, size_words

DAY = 86_400.0  # seconds

if TYPE_CHECKING:
    from common.segments.segment import Footer, SegmentRef
    from common.segments.store import SegmentStore
    from common.service.life import Life
    from common.settings.root import Settings
    from compaction.failures import Failure
    from compaction.run import Compaction, Report, Runner, Selection


@click.command()
@click.argument("what", required=False, metavar="[SITE[/FEED[/INC[/PART]]]]")
@click.option("--site", help="Only chains of this site; otherwise that of the configuration, or all.")
@click.option("--feed", help="Only chains of this feed.")
@click.option("--partition", type=click.IntRange(0, 65535), help="Only this partition.")
@click.option("--level", type=click.IntRange(0, 8), help="Only merges that read this level.")
@click.option("--engine", type=click.Choice(["spark", "local"]), help="Where to merge.")
@click.option("--verify", type=click.Choice(["spark", "merge"]), help="How to prove that no row was lost.")
@click.option("--master", metavar="URL", help="Spark's master, such as local[2] or spark://host:7077.")
@click.option("--dry-run", is_flag=True, help="List what would be read and deleted, and do nothing.")
@click.option("--strict", is_flag=True, help="Exit 3 also for what an earlier run has told.")
@click.option(
    "--metrics-textfile",
    "textfile",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Put what the run did there, for node_exporter: NAME.prom.",
)
@json_option
@config_option
@run_command
def compact(
    config: str,
    what: str | None,
    site: str | None,
    feed: str | None,
    partition: int | None,
    level: int | None,
    engine: str | None,
    verify: str | None,
    master: str | None,
    dry_run: bool,
    strict: bool,
    textfile: Path | None,
    as_json: bool,
) -> int:
    """Merge small segments into larger ones, prove it, and delete what was merged after a grace; of all
    chains, or of WHAT.

    Without Java: --engine local. What is wrong with data is told once: exit 3 while it is new, then only
    with --strict. SIGTERM ends it behind what it works on: exit 75, and the next run goes on.

    \b
    Examples:
      floe compact -c central.yaml
      floe compact -c central.yaml us-east/NODES --dry-run
      floe compact -c central.yaml --metrics-textfile /var/lib/prometheus/node-exporter/floe.prom
    """
    if dry_run and textfile:
        raise UsageError("expected --dry-run or --metrics-textfile: what does nothing has no metrics")
    if "" in (site, feed):
        raise UsageError("expected names, found an empty --site or --feed")
    from common.segments.keys import parse
    from common.service.life import Life
    from compaction.run import Selection

    incarnation = None
    if what is not None:
        refuse_beside(what, {"site": site, "feed": feed, "partition": partition})
        site, feed, incarnation, partition = parse(what)
    with _Metrics(textfile, SystemClock()) as metrics:
        settings = _overridden(load_settings(config), engine, verify, master)
        selection = Selection((settings.site or None) if site is None else site, feed, partition, level, incarnation)
        with closing(open_store(settings)) as store:
            life = Life("compact", settings, SystemClock(), {}, engine=settings.compaction.engine, feed=feed)
            if (site, feed, incarnation, partition) != (None,) * 4:
                _check_names(settings, selection)
            with _compaction(config, settings, store) as compaction:
                if dry_run:
                    return _preview(compaction, selection, as_json, strict)
                with life:
                    return _run(compaction, selection, as_json, strict, metrics, life)


@click.command()
@click.argument("what", required=False, metavar="[SITE[/FEED[/INC[/PART]]]]")
@click.option("--deep", is_flag=True, help="Read every row, and compare levels row by row.")
@click.option(
    "--engine", type=click.Choice(["spark", "local"]), default="local", help="Where segments are read; without: local."
)
@click.option("--master", metavar="URL", help="Spark's master, such as local[2] or spark://host:7077.")
@click.option(
    "--since-last",
    is_flag=True,
    help="Read only what no earlier run with --since-last has found sound, and sign it off.",
)
@json_option
@config_option
@run_command
def verify(
    config: str, what: str | None, deep: bool, engine: str, master: str | None, since_last: bool, as_json: bool
) -> int:
    """Look for holes, damaged segments and levels that disagree; of all chains or of WHAT.

    Exit 3 where anything is not as it must be. Keys that are none of Floe's are counted and named, and are no
    difference. The last line on stderr says how much was read, and that all is well where it is.

    With --since-last everything is listed, so that a hole is seen wherever it is; what an earlier run has read and
    signed off, with --deep for --deep, is not read again. It needs the right to write below _floe/verify/.

    \b
    Examples:
      floe segments verify -c central.yaml us-east/NODES --deep
      floe segments verify -c central.yaml --deep --since-last
    """
    from common.segments.archive import select_chains
    from common.segments.checks import look_for_foreign
    from common.segments.keys import configured
    from compaction import report
    from compaction.sign_off import SignOffs
    from compaction.verify import known_chains, verify_chains

    if master and engine != "spark":
        raise UsageError("--master: expected --engine spark")
    settings = _overridden(load_settings(config, quiet=engine == "local"), engine, None, master)
    with closing(open_store(settings)) as store:
        chains = open_chains(settings)
        selected = select_chains(chains, what, configured(settings)) if what else known_chains(chains)
        sign_offs = SignOffs(store.objects, store.layout, deep=deep) if since_last else None
        with _telling(len(selected)) as tell, _tasks(settings) as runner:
            found = verify_chains(store, chains, selected, deep=deep, tell=tell, runner=runner, sign_offs=sign_offs)
        places = [place for chain in selected for place in store.layout.places(chain)] if what else []
        foreign = look_for_foreign(store.objects, store.layout, places)
    for each in found:
        each.foreign = foreign.chains[each.chain]
    if as_json:
        print_json([report.verify_json(chain) for chain in found] + report.foreign_json(foreign))
    else:
        columns = report.VERIFY_COLUMNS if since_last else report.VERIFY_COLUMNS[:-1]
        rows = [*map(report.verify_row, found), report.verify_total(found, foreign)]
        table([row[: len(columns)] for row in rows], columns)
        for line in foreign.lines():
            click.echo(line, err=True)
        _offer(foreign.keys)
    problems = [(chain.chain, problem) for chain in found for problem in chain.problems]
    for chain, problem in problems:
        text = f"{chain}: {problem.kind}: {problem.text}"
        click.echo(DataError(text, hint=problem.hint, code="E-VERIFY").line(), err=True)
    unsigned = [(chain.chain, chain.unsigned) for chain in found if chain.unsigned is not None]
    for chain, refusal in unsigned:
        click.echo(f"{chain}: what was read is not signed off: {refusal.line()}", err=True)
    if not as_json:
        click.echo(report.verify_line(found, deep=deep), err=True)
    if problems:
        return DataError.exit_code
    return next((refusal.exit_code for _, refusal in unsigned if refusal.code != "E-RACE"), 0)


@check_command(None, "compaction", "", "", "age of the oldest segment that waits for a merge")
@click.option(
    "--textfile",
    type=click.Path(dir_okay=False, path_type=Path),
    help="What `floe compact --metrics-textfile` wrote: the last success is judged too.",
)
def check_compaction(
    settings: Settings, warning: float | None, critical: float | None, textfile: Path | None
) -> CheckResult:
    """Look at the bucket: what a run of compaction would merge now, and since when that waits.

    Lists all segments, as `floe compact --dry-run` does. Without thresholds: WARNING a day, CRITICAL three days
    beyond the longest `max_wait` of the levels.

    Example: floe check compaction -c central.yaml --warning 2d --critical 4d
    """
    from compaction.report import succeeded_at
    from compaction.run import Compaction, LocalRunner, Selection

    levels, now = settings.compaction.levels, SystemClock().now()
    longest = max((level.max_wait for level in levels), default=0.0)
    limits = longest + DAY if warning is None else warning, longest + 3 * DAY if critical is None else critical
    with closing(open_store(settings)) as store:
        surveys = Compaction(store, levels, None, LocalRunner(store)).preview(Selection(settings.site or None))
        merged = (store.pages(survey.chain, level) for survey in surveys for level in {level.to for level in levels})
        done = max((ref.modified for pages in merged for page in pages for ref in page), default=None)
    waiting = [segment for survey in surveys for output in survey.outputs for segment in output.inputs]
    age = now - min((segment.modified for segment in waiting), default=now)
    ranges = f"{limits[0]:.0f}", f"{limits[1]:.0f}"
    last = "none was made yet" if done is None else f"the last was made {now - done:.0f} s ago"
    result = CheckResult(f"{len(waiting)} segments wait for a merge; {last}", [
        CheckFigure("chains", len(surveys)),
        CheckFigure("waiting", len(waiting)),
        CheckFigure("waiting_bytes", sum(segment.size for segment in waiting), "B"),
        CheckFigure("oldest", max(0.0, age), "s", *ranges),
        CheckFigure("last_merge", math.inf if done is None else max(0.0, now - done), "s"),
    ])  # fmt: skip
    result.limit(f"{len(waiting)} segments wait for a merge, the oldest for {age:.0f} s", age, *limits)
    for survey in surveys:
        for problem in survey.problems:
            result.add(CheckState.WARNING, problem.line)
    if textfile is not None:
        if (done := succeeded_at(textfile)) is None:
            result.add(CheckState.UNKNOWN, f"{textfile}: expected the metrics of a run, found none")
        elif done == 0:
            result.add(CheckState.CRITICAL, "no run has succeeded yet")
        else:
            result.figures.append(CheckFigure("last_success", now - done, "s", *ranges))
            result.limit(f"no run has succeeded for {now - done:.0f} s", now - done, *limits)
    return result


@contextmanager
def _telling(chains: int) -> Iterator[Callable[[SegmentRef, Footer], None]]:
    """Tells how far the look at so many chains is; called with each segment."""
    from common.clock import SystemClock
    from common.service.progress import Teller

    teller, clock, seen = Teller(), SystemClock(), set[Chain]()
    segments = rows = size = 0

    def tell(segment: SegmentRef, footer: Footer) -> None:
        nonlocal segments, rows, size
        seen.add(segment.chain)
        segments, rows, size = segments + 1, rows + footer.rows, size + segment.size
        read = f"{counted(segments, 'segment')}, {counted(rows, 'row')}, {size_words(size)}"
        teller.progress(f"{segment.chain} ({len(seen)} of {counted(chains, 'chain')}): {read}", clock.monotonic())

    try:
        yield tell
    finally:
        teller.end_line()


@contextmanager
def _tasks(settings: Settings) -> Iterator[Runner | None]:
    """Where tasks of a verification are done: None for this process. Spark starts when there is one."""
    from common.service.process import stop_asked
    from compaction.spark import Spark

    if settings.compaction.engine == "local":
        yield None
        return
    spark = Spark(settings, check=lambda: asked.check())
    with stop_asked(spark.cancel) as asked, spark:
        try:
            yield spark
        except FloeError:
            asked.check()  # what was cancelled fails in many ways
            raise


def _overridden(settings: Settings, engine: str | None, verify: str | None, master: str | None) -> Settings:
    compaction = settings.compaction
    engine = engine or compaction.engine
    verify = verify or ("merge" if engine == "local" else compaction.verify)
    spark = compaction.spark.model_copy(update={"master": master or compaction.spark.master})
    changes = {"engine": engine, "verify": verify, "spark": spark}
    return settings.model_copy(update={"compaction": compaction.model_copy(update=changes)})


def _check_names(settings: Settings, selection: Selection) -> None:
    """Raises UsageError for a site, feed or partition that does not exist."""
    from common.segments.archive import among
    from common.segments.keys import chosen, configured

    site, feed, incarnation, partition = selection.site, selection.feed, selection.incarnation, selection.partition
    feeds = configured(settings)
    among(open_chains(settings), site, feed, lambda known: chosen(known, feeds, site, feed, incarnation, partition))


@contextmanager
def _compaction(config: str, settings: Settings, store: SegmentStore) -> Iterator[Compaction]:
    """The parts put together as configured; Spark starts when there is work for it.

    Raises Unavailable where a signal asked it to stop.
    """
    from common.service.process import stop_asked
    from compaction.proof import SparkProver
    from compaction.run import Compaction, LocalRunner
    from compaction.spark import Spark

    chosen = settings.compaction
    spark = Spark(settings, check=lambda: asked.check())
    with reloaded_on_hangup(config, settings), stop_asked(spark.cancel) as asked, spark:
        runner = spark if chosen.engine == "spark" else LocalRunner(store, check=asked.check)
        prove = SparkProver(spark, store).prove if chosen.verify == "spark" else None
        grace = chosen.delete_grace if chosen.delete else None
        try:
            yield Compaction(store, chosen.levels, grace, runner, prove, check=asked.check)
        except FloeError:
            asked.check()  # what was cancelled fails in many ways
            raise


def _run(
    compaction: Compaction, selection: Selection, as_json: bool, strict: bool, metrics: _Metrics, life: Life
) -> int:
    from compaction import report

    done = compaction.run(selection)
    life.results(**report.totals(done))
    if as_json:
        print_json(report.report_json(done))
    else:
        _show(report.report_rows(done), report.COLUMNS)
    code = _ending(done.failures, [] if strict else done.told)
    metrics.write(done, is_success=code == 0)
    return code


class _Metrics:
    """The metrics of a run, as the file `path` at its end (None: nobody wants them), also where it breaks off."""

    def __init__(self, path: Path | None, clock: Clock) -> None:
        self._path, self._clock, self._began = path, clock, clock.monotonic()

    def __enter__(self) -> _Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with suppress(OSError):  # what broke it off is told instead
                self.write(None, is_success=False)

    def write(self, done: Report | None, *, is_success: bool) -> None:
        """`done` None: the run broke off. Raises OSError where the file cannot be written."""
        from compaction import report

        if self._path is None:
            return
        report.last_success.set(report.succeeded_at(self._path) or 0.0)
        seconds = self._clock.monotonic() - self._began
        report.show_metrics(done, seconds, self._clock.now(), is_success=is_success)
        report.write_metrics(self._path)


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
    """Prints each of `failures` that is not in `told`, with the ways out. Returns the exit code."""
    from compaction.failures import exit_code

    new = [failure for failure in failures if failure not in told]
    for failure in new:
        click.echo(failure.line, err=True)
        _offer(failure.suspects)
    if told:
        click.echo(f"problems that were told before: {len(told)}; --strict says them again", err=True)
    return exit_code(new)


def _offer(keys: Sequence[str]) -> None:
    from common.segments.store import quarantine_command

    for key in keys:
        click.echo(quarantine_command(key), err=True)
