"""Commands `floe compact` (for cron), `floe segments verify` and `floe check compaction`."""

from __future__ import annotations

import gc
import math
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from common.chain import Chain
from common.check_cli import DAY_S, CheckResult, CheckState, PerformanceValue, Thresholds, thresholds
from common.cli import chains_argument, check_textfile, config_command, print_json, print_table, textfile_option
from common.clock import Clock, SystemClock
from common.errors import DataError, FloeError, Unavailable, UsageError
from common.logs import get_logger
from common.open import load_settings, open_chains, open_for_view, open_for_work, reload_on_hangup
from common.service.progress import ProcessLog, Progress, format_share
from common.settings.types import format_count, size_words

log = get_logger("compaction.cli")

STORE_SILENCE_S = 25.0  # seconds that a call of the store may take after a signal

if TYPE_CHECKING:
    from common.archive.documents import ChainStore
    from common.archive.segment import Footer, SegmentRef
    from common.archive.store import SegmentStore
    from common.settings.root import Settings
    from compaction.failures import Failure
    from compaction.retention import Retention
    from compaction.run import Compaction, RunReport, Selection


@click.command()
@chains_argument
@click.option("--level", type=click.IntRange(0, 8), help="Only merges that read this level.")
@click.option("--engine", type=click.Choice(["spark", "local"]), help="The engine for the merges.")
@click.option("--master", metavar="URL", help="Spark's master, such as local[2] or spark://host:7077.")
@click.option(
    "--jobs", type=click.IntRange(1, 64), help="With the engine local: processes; default: as many as processors."
)
@click.option("--dry-run", is_flag=True, help="Print the planned merges and deletions, and why others wait.")
@click.option("--strict", is_flag=True, help="Exit 3 also for problems that an earlier run reported.")
@textfile_option
@config_command
def compact(
    config: str,
    what: str | None,
    level: int | None,
    engine: str | None,
    master: str | None,
    jobs: int | None,
    dry_run: bool,
    strict: bool,
    textfile: Path | None,
    as_json: bool,
) -> int:
    """Merge small segments into larger ones, prove the merge, and delete the merged segments after a grace; in all
    chains, or in those that are named. Segments that `compaction.retention` no longer keeps are deleted before that,
    unless only a part of a feed is named.

    Without Java: --engine local. It merges in --jobs processes of this host, by default one for each processor as far
    as memory allows (512 MiB each). Spark pays on several hosts, for runs that would take half an hour or more here;
    then a line on stderr names it.

    A problem of the data is reported once: exit 3 while it is new, later only with --strict. SIGTERM ends the run after
    its current step, or after 25 s without an answer from the store: exit 75, and the next run continues.

    \b
    Examples:
      floe compact -c central.yaml
      floe compact -c central.yaml us-east/NODES --dry-run
      floe compact -c central.yaml --metrics-textfile /var/lib/prometheus/node-exporter/floe.prom
    """
    if dry_run and textfile:
        raise UsageError("expected --dry-run or --metrics-textfile, found both: a dry run has no metrics")
    check_textfile(textfile)
    from common.archive.catalog import ChainName, configured_feeds, parse_chain_name, select_chains
    from compaction import report
    from compaction.jobs import default_jobs
    from compaction.run import Selection
    from compaction.spark import require_spark, with_engine

    site, feed, incarnation, partition = ChainName() if what is None else parse_chain_name(what)
    with _Metrics(textfile, SystemClock()) as metrics:
        settings = with_engine(load_settings(config, quiet=True), master, engine)
        if jobs and settings.compaction.engine != "local":
            raise UsageError("--jobs: expected with --engine local, found engine spark")
        jobs = 0 if settings.compaction.engine == "spark" else jobs or default_jobs()
        selection = Selection((settings.site or None) if site is None else site, feed, partition, level, incarnation)
        store, chains = open_for_work(settings)
        with closing(store):
            life = ProcessLog("compact", settings, SystemClock(), {}, engine=settings.compaction.engine, feed=feed)
            if what is not None:
                select_chains(chains, what, configured_feeds(settings))  # raises UsageError for unknown names
            with _compaction(config, settings, store, jobs) as compaction:
                retention = _retention(settings, store)
                if dry_run:
                    return _preview(compaction, retention, selection, as_json, strict, jobs)
                with life, _RunRecord(chains, selection, SystemClock()) as note:
                    if settings.compaction.engine == "spark":
                        require_spark()
                    done = compaction.run(selection, retention)
                    _advise(jobs, [(merged.inputs, merged.size) for merged in done.merged])
                    life.add_end_fields(**report.totals(done))
                    note.code = _report_run(done, as_json, strict, metrics)
                    return note.code


@click.command()
@chains_argument
@click.option("--deep", is_flag=True, help="Read every row, and compare levels row by row.")
@config_command
def verify(config: str, what: str | None, deep: bool, as_json: bool) -> int:
    """Find holes, damaged segments and levels that disagree, in all chains or in those that are named.

    Exit 3 if there is any problem. Foreign keys are counted and named, and are not a problem. The last line on stderr
    states the amount that was read, and the number of problems.

    \b
    Example:
      floe segments verify -c central.yaml us-east/NODES --deep
    """
    from common.archive.catalog import configured_feeds, select_chains
    from common.archive.checks import find_foreign_keys
    from compaction import report
    from compaction.verify import known_chains, verify_chains

    settings = load_settings(config, quiet=True)
    store, chains = open_for_work(settings)
    with closing(store):
        selected = select_chains(chains, what, configured_feeds(settings)) if what else known_chains(chains)
        with closing(_VerifyProgress(len(selected), SystemClock())) as bar:
            found = verify_chains(store, chains, selected, deep=deep, on_segment=bar, on_listed=bar.listed)
        places = [place for chain in selected for place in store.layout.chain_prefixes(chain)] if what else None
        foreign = find_foreign_keys(store.objects, store.layout, places)
    for each in found:
        each.foreign = foreign.chains[each.chain]
    if as_json:
        print_json([report.verify_json(chain) for chain in found] + report.foreign_json(foreign))
    else:
        print_table([*map(report.verify_row, found), report.verify_total(found, foreign)], report.VERIFY_COLUMNS)
        for line in foreign.lines():
            click.echo(line, err=True)
        _print_quarantine_commands(foreign.keys)
    problems = [(chain.chain, problem) for chain in found for problem in chain.problems]
    for chain, problem in problems:
        text = f"{chain}: {problem.kind}: {problem.text}"
        click.echo(DataError(text, hint=problem.hint, code="E-VERIFY").as_text(), err=True)
    if not as_json:
        click.echo(report.verify_line(found, deep=deep), err=True)
    return DataError.exit_code if problems else 0


def check_compaction(settings: Settings, given: Thresholds) -> CheckResult:
    """Check the bucket: the segments that a run of compaction would merge now, and the time that they have waited.

    Lists all segments, and reads the results that the last runs left there: the time of the last success. `given`
    without values: a day and three days after the last success, and after the oldest of the merges was due.
    """
    from common.archive.documents import run_of
    from compaction.run import Compaction, LocalRunner, Selection

    levels, now = settings.compaction.levels, SystemClock().now()
    limits = thresholds(given, (DAY_S, 3 * DAY_S))  # a run that has nothing to do succeeds too
    with closing(open_for_view(settings)[0]) as store:
        surveys = Compaction(store, levels, None, LocalRunner(store)).preview(Selection(settings.site or None), now)
        merged = (store.pages(survey.chain, level) for survey in surveys for level in {level.to for level in levels})
        done = max((ref.modified for pages in merged for page in pages for ref in page), default=None)
        small = (ref.modified for survey in surveys for page in store.pages(survey.chain, 0) for ref in page)
        oldest = min(small, default=now)
        runs = open_chains(settings).runs()
    outputs = [output for survey in surveys for output in survey.outputs]
    waiting = [segment for output in outputs for segment in output.inputs]
    age = now - min((output.due for output in outputs), default=now)
    ranges = f"{limits[0]:.0f}", f"{limits[1]:.0f}"
    last = "no merge yet" if done is None else f"the last merge was {now - done:.0f} s ago"
    result = CheckResult(f"{len(waiting)} segments wait for a merge; {last}", [
        PerformanceValue("chains", len(surveys)),
        PerformanceValue("waiting", len(waiting)),
        PerformanceValue("waiting_bytes", sum(segment.size for segment in waiting), "B"),
        PerformanceValue("oldest", max(0.0, age), "s", *ranges),
        PerformanceValue("last_merge", math.inf if done is None else max(0.0, now - done), "s"),
    ])  # fmt: skip
    result.check_limit(f"{len(waiting)} segments wait for a merge, the oldest for {age:.0f} s", age, *limits)
    for survey in surveys:
        for problem in survey.problems:
            result.add_problem(CheckState.WARNING, problem.line)
    # Runs that covered one of the chains. Without any, the archive has waited since its oldest segment.
    found = [run for survey in surveys if (run := run_of(runs, survey.chain)) is not None]
    if not found:
        text = f"no run is recorded, and the oldest segment is {now - oldest:.0f} s old"
        result.check_limit(text, now - oldest, *limits)
        return result
    done = min(run.succeeded or 0 for run in found)
    if done == 0:
        result.add_problem(CheckState.CRITICAL, "no run has succeeded yet")
    else:
        result.performance_data.append(PerformanceValue("last_success", now - done, "s", *ranges))
        result.check_limit(f"no run has succeeded for {now - done:.0f} s", now - done, *limits)
    return result


class _VerifyProgress:
    """Progress of a verification of some chains, on stderr; called with each segment.

    The number of segments of a chain is known once it is listed, so each chain counts alike.
    """

    def __init__(self, chains: int, clock: Clock) -> None:
        self._chains, self._clock, self._progress, self._began = chains, clock, Progress(), clock.monotonic()
        self._listed, self._checked = dict[Chain, int](), Counter[Chain]()
        self._rows = self._size = 0

    def listed(self, chain: Chain, segments: int) -> None:
        self._listed[chain] = segments

    def __call__(self, segment: SegmentRef, footer: Footer) -> None:
        chain, now = segment.chain, self._clock.monotonic()
        self._checked[chain] += 1
        self._rows, self._size = self._rows + footer.rows, self._size + segment.size
        ended = len(self._listed) - 1
        part = self._checked[chain] / max(1, self._listed.get(chain, 1))
        share = format_share(ended + part, self._chains, now - self._began)
        count = format_count(self._checked.total(), "segment")
        read = f"{count}, {format_count(self._rows, 'row')}, {size_words(self._size)}"
        self._progress.update(f"{share}  {chain} ({ended + 1} of {format_count(self._chains, 'chain')}): {read}", now)

    def close(self) -> None:
        self._progress.end_line()


@contextmanager
def _compaction(config: str, settings: Settings, store: SegmentStore, jobs: int) -> Iterator[Compaction]:
    """Yield the compaction as configured; Spark starts when there is work for it.

    Raises Unavailable if a signal requests a stop.
    """
    from compaction.jobs import JobRunner
    from compaction.run import Compaction
    from compaction.spark import spark_until_stopped

    chosen = settings.compaction
    with (
        reload_on_hangup(config, settings),
        spark_until_stopped(settings, _exit_if_store_silent) as spark,
        closing(JobRunner(store, settings, jobs, spark.check)) as local,
    ):
        runner = spark if chosen.engine == "spark" else local
        grace = chosen.delete_grace if chosen.delete else None
        reduce_garbage_collection()
        proves = chosen.prove_deletions
        yield Compaction(store, chosen.levels, grace, runner, prove_deletions=proves, check=spark.check)


def reduce_garbage_collection() -> None:
    """Collect garbage rarely, for runs of millions of small values, none in a cycle: it took a tenth of their time."""
    gc.freeze()  # objects that exist by now stay
    gc.set_threshold(50_000)


def _exit_if_store_silent() -> None:
    """End the process once a call of the store has taken STORE_SILENCE_S: it cannot be cancelled, and every step of a
    run may be interrupted. Never returns.
    """
    from common.exits import EXIT_RETRY_LATER
    from common.logs import flush
    from common.objects.port import calls_in_flight

    seconds, tick = dict[object, int](), threading.Event()
    while max(seconds.values(), default=0) < STORE_SILENCE_S:
        tick.wait(1.0)
        seconds = {call: seconds.get(call, 0) + 1 for call in set(calls_in_flight)}
    text = f"stopped by a signal; the store has not answered for {STORE_SILENCE_S:g} s"
    click.echo(Unavailable(text, hint="finished work stays; the next run continues").as_text(), err=True)
    flush()
    os._exit(EXIT_RETRY_LATER)


def _retention(settings: Settings, store: SegmentStore) -> Retention | None:
    """Return the configured retention; None if there is none: then no request is made for it."""
    from compaction.retention import Retention, RetentionRule

    rules, targets = settings.compaction.retention, settings.ingress.targets
    if not rules.is_set:
        return None
    sources = {each.stream: each.source_names for each in targets}
    return Retention(store, lambda site, feed: RetentionRule(*rules.limits_of(site, feed)), sources)


def _report_run(done: RunReport, as_json: bool, strict: bool, metrics: _Metrics) -> int:
    from compaction import report

    if as_json:
        print_json(report.report_json(done))
    else:
        _print_table(report.report_rows(done), report.RUN_COLUMNS, report.idle_line(done))
    code = _print_failures(done.failures, [] if strict else done.known_failures)
    metrics.write(done, is_success=code == 0)
    return code


class _Metrics(AbstractContextManager["_Metrics"]):
    """Metrics of a run, written to the file `path` at its end (None: not requested), also if the run is aborted."""

    def __init__(self, path: Path | None, clock: Clock) -> None:
        self._path, self._clock, self._began = path, clock, clock.monotonic()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with suppress(OSError):  # the error that aborted the run is reported instead
                self.write(None, is_success=False)

    def write(self, done: RunReport | None, *, is_success: bool) -> None:
        """Write the metrics. `done` None: the run was aborted. Raises OSError if the file cannot be written."""
        from common.metrics import write_textfile
        from compaction import report

        if self._path is None:
            return
        report.last_success.set(report.read_last_success(self._path))
        seconds = self._clock.monotonic() - self._began
        report.show_metrics(done, seconds, self._clock.now(), is_success=is_success)
        write_textfile(self._path, "compaction_")


class _RunRecord(AbstractContextManager["_RunRecord"]):
    """Record of the end of a run in the store, for status and checks on other hosts, also if the run is aborted.

    A run over single levels, incarnations or partitions leaves none: it covers too little.
    """

    def __init__(self, documents: ChainStore, selection: Selection, clock: Clock) -> None:
        self._documents, self._selection, self._clock = documents, selection, clock
        self._began = clock.monotonic()
        #: The exit code, set when the run ends by itself.
        self.code = 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        from common.archive.documents import CompactionRun

        chosen, now, seconds = self._selection, self._clock.now(), self._clock.monotonic() - self._began
        if any(each is not None for each in (chosen.level, chosen.incarnation, chosen.partition)):
            return
        code = error.exit_code if isinstance(error, FloeError) else 1 if kind else self.code
        try:
            before = self._documents.read_run(chosen.site, chosen.feed)
            succeeded = now if code == 0 else before.succeeded if before else None
            self._documents.write_run(chosen.site, chosen.feed, CompactionRun(now, seconds, code, succeeded))
        except FloeError as lost:
            log.warning("run record failed", action="run_record_failed", error=str(lost))


def _preview(
    compaction: Compaction, retention: Retention | None, selection: Selection, as_json: bool, strict: bool, jobs: int
) -> int:
    from compaction import report

    now = SystemClock().now()
    retained = compaction.preview_retention(selection, retention, now)
    surveys = compaction.preview(selection, now, frozenset(segment.key for segment in retained.expired))
    problems = [*retained.failures, *(problem for survey in surveys for problem in survey.problems)]
    if as_json:
        print_json(report.preview_json(surveys, retained))
    else:
        rows = [*report.retention_preview_rows(retained), *report.preview_rows(surveys)]
        total = [report.preview_total(surveys, retained)] if rows else []
        _print_table([*rows, *total], report.PREVIEW_COLUMNS, "nothing to do")
    _advise(jobs, [(len(output.inputs), output.size) for survey in surveys for output in survey.outputs])
    return _print_failures(problems, [] if strict else compaction.known_failures.known(problems))


def _advise(jobs: int, merges: Sequence[tuple[int, int]]) -> None:
    """Print a line if other hosts should help with merges of so many segments and bytes. `jobs`: 0 for Spark."""
    from compaction.jobs import spark_advice

    if jobs and (advice := spark_advice(sum(n for n, _ in merges), sum(size for _, size in merges), jobs)):
        click.echo(advice, err=True)


def _print_table(rows: list[list[object]], columns: Sequence[str], otherwise: str) -> None:
    if rows:
        print_table(rows, columns)
    else:
        click.echo(otherwise)


def _print_failures(failures: list[Failure], known: list[Failure]) -> int:
    """Print each of `failures` that is not in `known_failures`, with its remedies. Return the exit code."""
    from compaction.failures import exit_code

    new = [failure for failure in failures if failure not in known]
    for each in new:
        click.echo(f"{each.line}; put a good copy back, or quarantine it:" if each.damaged else each.line, err=True)
        _print_quarantine_commands(each.suspects)
    if known:
        click.echo(f"problems reported before: {len(known)}; --strict reports them again", err=True)
    return exit_code(new)


def _print_quarantine_commands(keys: Sequence[str]) -> None:
    from common.archive.store import quarantine_command

    for key in keys:
        click.echo(quarantine_command(key), err=True)
