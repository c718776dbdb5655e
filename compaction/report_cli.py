"""`floe report latest` and `floe report traffic`: tables of the archive for the users of a fleet, kept current."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import click

from common.cli import RequestedTime, config_command, print_json, print_table, resolve_range, since_option, until_option
from common.clock import SystemClock
from common.errors import DataError, FloeError, UsageError
from common.open import load_settings, open_chains, open_store, reload_on_hangup

if TYPE_CHECKING:
    from common.chain import Chain
    from common.settings.root import Settings
    from compaction.reports import ArchiveReport, ReportRun
    from compaction.traffic import TrafficReport

    R = TypeVar("R", bound=ArchiveReport)

REPORT_COLUMNS = ("report", "chains", "segments", "bytes", "rows", "damaged")


@click.command()
@click.argument("kind", type=click.Choice(["latest", "traffic"]))
@click.argument("what", required=False, metavar="[SITE[/FEED]]")
@since_option
@until_option
@click.option(
    "--output",
    required=True,
    metavar="DIR",
    help="The place of the report: a directory, or s3://BUCKET/PREFIX beside the archive.",
)
@click.option("--full", is_flag=True, help="Begin again: drop the data that retention has deleted since.")
@click.option("--master", metavar="URL", help="Spark's master, such as local[2] or spark://host:7077.")
@config_command
def report(as_json: bool, kind: str, since: RequestedTime | None, until: RequestedTime | None, **options: Any) -> int:
    """Make a table of the archive, or keep it current: a second run reads only new data. Needs Spark.

    latest: the newest message of each sample key, as a registry at the centre would hold it: latest.parquet. For
    messages without a sample key, the newest of each subject. A deleted key of a key-value bucket is also a row, with
    `operation` DEL or PURGE.

    traffic: messages, bytes, kept, sampled out and lag by site, feed and hour: traffic.parquet, traffic.csv,
    traffic.html. A kept message counts in the hour of its timestamp. One that was left out counts in that of the next
    kept one, with the reason from the ledger of its segment. The lag is known only for data that the report read before
    compaction. With --since, a new report reads no data of earlier hours, and the page shows the hours from there on,
    else the last 30 days. --until ends the page and the CSV; the Parquet file also holds later hours.

    \b
    Examples:
      floe report latest -c central.yaml --output /srv/floe
      floe report latest -c central.yaml us-east/NODES --output s3://archive/reports
      floe report traffic -c central.yaml us-east --since 7d --output /srv/floe/us-east --json
    """
    from compaction.reports import LatestReport
    from compaction.traffic import HOUR_NS, TrafficReport

    now = SystemClock().now()
    begin, end = resolve_range(now, since, until)
    if kind == "latest" and (since is not None or until is not None):
        raise UsageError("--since, --until: expected only with traffic")
    begin = None if begin is None else begin - begin % HOUR_NS
    with _updated_report(LatestReport if kind == "latest" else TrafficReport, begin, **options) as (made, done):
        if isinstance(made, TrafficReport):
            _put_views(made, begin, end, now)
        return _show(kind, options["output"], done, as_json)


@contextmanager
def _updated_report(
    kind: type[R], since: int | None, *, config: str, what: str | None, output: str, full: bool, master: str | None
) -> Iterator[tuple[R, ReportRun]]:
    """Yield the updated report, and the result of the run. Spark starts only for new data.

    Raises Unavailable if a signal requests a stop.
    """
    from common.service.progress import ProcessLog
    from compaction.reports import ReportState, open_place
    from compaction.spark import require_spark, spark_until_stopped, with_engine

    settings = with_engine(load_settings(config, quiet=True), master)
    chains, named = _selected(settings, what)
    place, address = open_place(output, settings), f"{settings.store.url}/{settings.store.prefix}"
    with closing(open_store(settings)) as store:
        life = ProcessLog(f"report {kind.name}", settings, SystemClock(), {}, chains=len(chains), output=output)
        with life, reload_on_hangup(config, settings), spark_until_stopped(settings) as spark:
            made = kind(spark, store, place)
            try:
                require_spark()
                done = made.run(ReportState(kind.name, address, named, {}, since), chains, full=full)
            except FloeError as error:
                error.hint = error.hint.replace(", or use --engine local", "")  # there is no other engine here
                raise
            life.add_end_fields(segments=done.segments, bytes=done.size, rows=done.rows, failures=len(done.damaged))
            yield made, done


def _selected(settings: Settings, what: str | None) -> tuple[list[Chain], str]:
    """Return the selected chains, and a name for them. Raises UsageError for a site or feed that does not exist."""
    from common.archive.catalog import ChainName, configured_feeds, parse_chain_name, select_chains

    site, feed, *history = ChainName() if what is None else parse_chain_name(what)
    if any(part is not None for part in history):
        raise UsageError(f"{what}: expected SITE[/FEED], found a chain", hint="a report is about whole feeds")
    documents, site = open_chains(settings), site or settings.site or None
    named = f"{site or 'all sites'}/{feed}" if feed else site or "all sites"
    chains = documents.chains(site) if what is None else select_chains(documents, what, configured_feeds(settings))
    return chains, named


def _put_views(made: TrafficReport, since: int | None, until: int | None, now: float) -> None:
    """Put the page and the CSV of the hours from `since` up to `until`."""
    from compaction.traffic import render_page, select_hours, write_csv

    whole, new = made.table(), made.store.new_spool()
    try:
        with new.open("w", newline="", encoding="utf-8") as file:
            write_csv(select_hours(whole, since, until), file)
        made.place.put("traffic.csv", new)
        new.write_bytes(render_page(whole, since, until, now))
        made.place.put("traffic.html", new)
    finally:
        new.unlink(missing_ok=True)


def _show(name: str, output: str, done: ReportRun, as_json: bool) -> int:
    from common.archive.store import quarantine_command

    if as_json:
        print_json({"report": name, "output": output, **asdict(done)})
    else:
        print_table([[name, done.chains, done.segments, done.size, done.rows, len(done.damaged)]], REPORT_COLUMNS)
    for key in done.damaged:
        text = f"segment {key}: expected bytes with the digest of its name, found others; the report leaves it out"
        click.echo(
            DataError(text, hint=f"quarantine it:\n{quarantine_command(key)}", code="E-SEG-CORRUPT").as_text(), err=True
        )
    return DataError.exit_code if done.damaged else 0
