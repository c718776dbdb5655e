"""The commands of recovery: `floe replay`, `restore` and `export`, and `floe drill` and `compare`, which test them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Protocol

import click

from common.audit import decide, decision_command
from common.chain import CHAIN_FORM, parse_chain_parts
from common.cli import (
    CHAIN_TYPE,
    ChainSelector,
    ParsedType,
    RequestedTime,
    SequenceType,
    chain_argument,
    check_range,
    check_stream_name,
    check_textfile,
    config_command,
    dry_run_option,
    from_sequence_option,
    print_json,
    range_options,
    resolve_time,
    target_option,
    textfile_option,
    to_sequence_option,
    until_option,
    yes_option,
)
from common.errors import FloeError, UsageError
from common.exits import EXIT_RETRY_LATER, report_error
from common.logs import escape
from common.open import load_settings, open_for_work
from common.settings.types import format_count

if TYPE_CHECKING:
    from common.settings.root import Settings
    from ingress.recovery.drill import DrillReport, ExactReport
    from ingress.recovery.plan import RestorePlan, RestoreRequest
    from ingress.recovery.request import RecoveryParts
    from ingress.recovery.restore import RestoreReport
    from ingress.recovery.site_restore import SiteReport
    from ingress.recovery.survey import ReplayPreview


def _parse_site_or_chain(text: str) -> ChainSelector:
    """Parse a chain, or a site alone. Raises ValueError."""
    return ChainSelector.parse(text) if "/" in text else ChainSelector(parse_chain_parts(text)[0], "")


#: A chain, or a site with `--all`; the command gets `selector: ChainSelector`, without a feed for a site.
SITE_OR_CHAIN_TYPE = ParsedType("chain or site", ChainSelector, _parse_site_or_chain)


def _check_all(selector: ChainSelector, is_all: bool, *single: object) -> None:
    """Check that `--all` is given for a site, and for nothing else. `single`: options of one stream; None: not given.

    Raises UsageError.
    """
    if is_all is bool(selector.feed):
        raise UsageError("expected SITE/FEED, or SITE with --all")
    if is_all and (found := [each for each in single if each is not None]):
        raise UsageError(f"--all: expected no option for one stream, found {found[0]!r:.80}")


@contextmanager
def _open_recovery(config: str) -> Iterator[tuple[Settings, RecoveryParts]]:
    """Open the configured archive for the block. The line of the progress ends after the block."""
    from common.clock import SystemClock
    from common.service.progress import Progress
    from ingress.recovery.request import RecoveryParts

    settings, progress = load_settings(config, quiet=True), Progress()
    store, documents = open_for_work(settings)
    with closing(store):
        try:
            yield settings, RecoveryParts(store, documents, SystemClock(), progress)
        finally:
            progress.end_line()


class CommandReport(Protocol):
    """The plan or the result of a command, for people and for programs."""

    def as_json(self) -> dict[str, Any]: ...
    def lines(self) -> Iterator[str]: ...


def _print_report(report: CommandReport, as_json: bool) -> None:
    print_json(report.as_json()) if as_json else _echo_lines(report.lines())


def _show_plan(
    plan: RestorePlan | ReplayPreview, notes: Sequence[str], refused: FloeError | None, as_json: bool
) -> int:
    """Print the plan of a dry run. `notes`: of the server; `refused`: the error of the command, which is raised."""
    if as_json:
        reason = None if refused is None else {"code": refused.code, "message": refused.message, "hint": refused.hint}
        print_json({**plan.as_json(), "notes": [*plan.notes, *notes], "refused": reason})
    else:
        _echo_lines([*plan.lines(), *(f"note: {note}" for note in notes)])
    if refused is not None:
        raise refused
    return 0


def _echo_lines(lines: Iterable[str], *, err: bool = False) -> None:
    for line in lines:
        click.echo(escape(line), err=err)


def _restore_request(selector: ChainSelector, until: RequestedTime | None, **fields: Any) -> RestoreRequest:
    """Return a request for a feed up to `to_sequence` of its fields, or a time. Raises UsageError for both."""
    from common.clock import SystemClock
    from ingress.recovery.plan import RestoreRequest

    check_range(None, fields["to_sequence"], None, until)
    end_ns = resolve_time(SystemClock().now(), until)
    return RestoreRequest(selector.site, selector.feed, selector.incarnation, to_time_ns=end_ns, **fields)


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
@decision_command
async def replay(
    config: str, selector: ChainSelector, as_json: bool, dry_run: bool, yes: bool, rate: str, **args: Any
) -> int:
    """Replay the archived messages of a feed into a stream, the target, in order and once.

    Without bounds, all of them. The same command continues a replay that was stopped or killed. Exit 75 if it was
    stopped before its end. On a terminal, --again asks for confirmation.

    \b
    Example: floe replay -c site.yaml us-east/NODES --target NODES --into-source --create --dry-run
    """
    from common.service.process import stop_on_signals
    from ingress.recovery.replay import Replay
    from ingress.recovery.request import FLAG_OPTIONS, ReplayOptions, ReplayRequest, pace_of

    flags = {name: args.pop(name) for name in FLAG_OPTIONS}
    check_stream_name("--target", args["target"])
    request = ReplayRequest(**asdict(selector), **_resolve_times(args))
    options = ReplayOptions(**flags, pace=pace_of(rate), pace_arguments=(f"--rate={rate}",) if rate else ())
    with _open_recovery(config) as (settings, parts):
        if not dry_run:
            what = f"replay {selector.site}/{selector.feed} into {request.target}"
            again = f"begin again in {request.target}, regardless of earlier replays into it?"
            await decide(settings, again if options.again else what, yes or not options.again, is_needed=False)
        work = Replay(settings, request, options, parts)
        async with work.open_connection() as client, stop_on_signals() as stop:
            if dry_run:
                preview = await work.preview(client)
                return _show_plan(preview, (), await work.check(client, preview), as_json)
            result = await work.run(client, stop)
    _print_report(result, as_json)
    return result.exit_code


def _resolve_times(args: dict[str, Any]) -> dict[str, Any]:
    """Return `args` with its times in the form of a `ReplayRequest`. Raises UsageError for a beginning that is now."""
    for name, absolute in (("since", "from_time"), ("until", "to_time")):
        if (at := args.pop(name)) is not None:
            if name == "since" and not (at.text or at.seconds_ago):
                raise UsageError("--since: expected a time before now, found 0s")
            args |= {absolute: at.text} if at.text else {name: at.seconds_ago}
    return args


def _check_whole_feed(selector: ChainSelector, done: str) -> None:
    if selector.partition is not None:
        raise UsageError(f"expected SITE/FEED[/INCARNATION], found partition {selector.partition}: all are {done}")


@click.command()
@click.argument("selector", type=SITE_OR_CHAIN_TYPE, metavar="SITE/FEED[/INCARNATION]|SITE")
@click.option("--all", "is_all", is_flag=True, help="All streams of SITE: each from the feed that holds it whole.")
@click.option("--as", "name", metavar="NAME", help="Name of the restored stream; default: its former name.")
@click.option("--subjects", metavar="A,B", help="With --as: its subjects; default: the former ones.")
@click.option("--to-sequence", type=SequenceType(), help="The last sequence; default: the end of the archive.")
@until_option
@click.option(
    "--skip-to-sequence",
    "skip_to",
    type=SequenceType(),
    is_flag=False,
    flag_value=0,
    help="New messages begin after it; without a value: after all that were seen.",
)
@click.option("--replicas", type=click.IntRange(1, 5), help="Replicas; default: the former number.")
@click.option("--no-consumers", is_flag=True, help="Restore no consumers.")
@click.option("--dry-run", is_flag=True, help="Show the plan, and if the server permits it.")
@click.option(
    "--verify",
    type=click.Choice(["full", "sample", "state"]),
    default="full",
    show_default=True,
    help="Read back all, a sample, or only compare the state.",
)
@click.option("--allow-lossy", is_flag=True, help="Also restore an archive that lacks messages.")
@click.option("--allow-elsewhere", is_flag=True, help="Allow effects on other subjects, without asking.")
@click.option("--force", is_flag=True, help="Also on a nats-server newer than the tested ones.")
@click.option(
    "--format",
    type=click.Choice(["auto", "logical", "files"]),
    default="auto",
    show_default=True,
    help="Form of the archive that is sent; files: one server keeps `created` on 2.15 too, as sourcing streams need.",
)
@yes_option
@decision_command
async def restore(
    config: str, selector: ChainSelector, as_json: bool, name: str | None, is_all: bool, yes: bool, **args: Any
) -> int:
    """Restore a lost stream exactly: sequences, times, headers, configuration, consumers with their positions.

    The stream must not exist. No producer reaches it before everything is compared. The same command starts a
    killed restore again. Exit 3 if the restored stream differs: then it is not promoted. On a terminal it asks for
    confirmation. With --all, streams that exist are left alone, and those that no feed holds whole are skipped (exit
    3); the same command continues.

    \b
    Examples:
      floe restore -c site.yaml us-east/NODES --dry-run
      floe restore -c site.yaml us-east --all --dry-run
    """
    from common.nats.api import RESTORE_PREFIX
    from common.service.process import stop_on_signals
    from common.settings.types import is_filter
    from common.subjects import first_overlap, overlaps
    from ingress.recovery.restore import Restore

    dry_run, subjects, until = (args.pop(each) for each in ("dry_run", "subjects", "until"))
    skip_to, to_sequence = args["skip_to"], args["to_sequence"]
    _check_whole_feed(selector, "restored")
    _check_all(selector, is_all, name, subjects, to_sequence, skip_to)
    check_stream_name("--as", name)
    own_subjects = tuple(each.strip() for each in subjects.split(",")) if subjects is not None else ()
    if wrong := [each for each in own_subjects if not is_filter(each)]:
        raise UsageError(f"--subjects: expected subjects separated by commas, found {wrong[0]!r:.80}")
    reserved = ("$JS.>", "$SYS.>", f"{RESTORE_PREFIX}>")
    taken = [(own, each) for each in own_subjects if each != ">" for own in reserved if overlaps(each, own)]
    if taken:
        own, each = taken[0]
        raise UsageError(f"--subjects: expected none reserved by the server or a restore ({own}), found {each!r:.80}")
    if (pair := first_overlap(own_subjects)) is not None:
        raise UsageError(
            f"--subjects: expected subjects that do not overlap, found {pair[0]!r:.80} and {pair[1]!r:.80}"
        )
    if own_subjects and name is None:
        raise UsageError("--subjects: expected only with --as: under its own name it keeps its subjects")
    args["consumers"] = not args.pop("no_consumers")
    request = _restore_request(selector, until, name=name or "", subjects=own_subjects, **args)
    if skip_to is not None and (to_sequence, until) != (None, None):
        raise UsageError("--skip-to-sequence: expected only without --to-sequence and --until")
    report: RestoreReport | SiteReport
    with _open_recovery(config) as (settings, parts):
        if is_all:
            report = await _restore_site(settings, request, parts, dry_run=dry_run, yes=yes)
        elif dry_run:
            work = Restore(settings, request, parts)
            plan = await work.plan()
            return _show_plan(plan, *await work.check(plan), as_json)
        else:
            work, confirmed = Restore(settings, request, parts), None
            if not yes and sys.stdin.isatty():
                confirmed = await work.plan()
                _echo_lines(confirmed.lines(), err=True)
            effects = confirmed.elsewhere if confirmed else ()
            what = f"{selector.site}/{selector.feed}" + (f" as {name}" if name else "")
            await decide(settings, "\n".join([*effects, f"restore the stream of {what}?"]), yes, is_needed=False)
            async with work.open_connection() as client, stop_on_signals() as stop:
                report = await work.run(client, stop, confirmed)
    _print_report(report, as_json)
    return report.exit_code


async def _restore_site(
    settings: Settings, request: RestoreRequest, parts: RecoveryParts, *, dry_run: bool, yes: bool
) -> SiteReport:
    from common.service.process import stop_on_signals
    from ingress.recovery.site_restore import WholeSiteRestore

    with closing(WholeSiteRestore(settings, request, parts)) as site:
        plans = await site.plan()
        if dry_run:
            return await site.check(plans)
        is_asked = not yes and sys.stdin.isatty()
        if is_asked:
            _echo_lines((line for plan in plans for line in plan.lines()), err=True)
        what = f"restore {format_count(len(plans), 'stream')} of site {request.site}?"
        await decide(settings, what, yes, is_needed=False)
        async with stop_on_signals() as stop:
            return await site.run(plans, stop, is_confirmed=is_asked)


@click.command()
@click.argument("selector", type=CHAIN_TYPE, metavar="SITE/FEED[/INCARNATION]")
@click.argument("directory", metavar="DIR")
@to_sequence_option
@until_option
@click.option("--allow-lossy", is_flag=True, help="Also export an archive that lacks messages.")
@dry_run_option
@config_command
async def export(config: str, selector: ChainSelector, as_json: bool, dry_run: bool, **args: Any) -> None:
    """Export a stream as a backup of the command `nats`, into the new folder DIR.

    `nats backup restore stream DIR` makes the stream from it, on nats-server 2.15 or newer: messages with their
    sequences, times and headers, the configuration, consumers with their positions. The same command begins a stopped
    export again.

    \b
    Example: floe export -c site.yaml us-east/NODES backup/NODES
    """
    from common.service.process import stop_on_signals
    from ingress.recovery.fill import Export

    _check_whole_feed(selector, "exported")
    request = _restore_request(selector, args.pop("until"), verify="state", **args)
    async with stop_on_signals() as stop:
        with _open_recovery(config) as (_, parts), closing(Export(request, parts, stop)) as work:
            plan = await work.plan()
            report: CommandReport = plan
            if not dry_run:
                _echo_lines((f"note: {note}" for note in (*plan.notes, *plan.elsewhere)), err=True)
                report = await work.run(plan)
    _print_report(report, as_json)


@click.command()
@click.argument("selector", type=SITE_OR_CHAIN_TYPE, metavar=f"{CHAIN_FORM}|SITE")
@click.option("--all", "is_all", is_flag=True, help="All streams of SITE, with --exact, one after another.")
@range_options
@click.option("--storage", type=click.Choice(["file", "memory"]), help="Storage of the scratch stream; default: file.")
@click.option("--exact", is_flag=True, help="Restore the whole stream, as `floe restore` does, and compare everything.")
@click.option(
    "--server",
    type=click.Choice(["same", "local"]),
    help="With --exact: the server of a restore, or a nats-server started for the drill.  [default: same]",
)
@click.option("--replicas", type=click.IntRange(1, 5), help="With --exact: replicas; default: the former number.")
@click.option("--allow-lossy", is_flag=True, help="With --exact: also an archive that lacks messages.")
@click.option("--force", is_flag=True, help="With --exact: also on a nats-server newer than the tested ones.")
@click.pass_obj
@config_command
async def drill(
    parts: Mapping[str, Callable[[], Any]], /, config: str, selector: ChainSelector, as_json: bool, **args: Any
) -> int:
    """Replay a part of a feed into a scratch stream, compare it with the archive, and remove it.

    Without bounds, the last 10,000 sequences. With --exact the whole stream is restored under a scratch name and
    compared: messages, state, configuration, consumers with their positions. Exit 3 if there are differences, or the
    archive has holes; with --all also if no feed holds a stream whole.

    \b
    Examples:
      floe drill -c site.yaml us-east/NODES --since 1h
      floe drill -c site.yaml us-east/NODES --exact
      floe drill -c site.yaml us-east/NODES --exact --server local
      floe drill -c site.yaml us-east --all --server local
    """
    from common.nats.api import SCRATCH_PREFIX
    from common.service.process import stop_on_signals
    from ingress.recovery.drill import Drill, ExactDrill
    from ingress.recovery.request import ReplayRequest
    from ingress.recovery.site_restore import WholeSiteRestore

    _check_all(selector, is_all := args.pop("is_all"), args["to_sequence"])
    exact = {key: args.pop(key) for key in ("exact", "server", "replicas", "allow_lossy", "force")}
    is_exact, storage = exact.pop("exact") or is_all, args.pop("storage")
    _check_drill(is_exact, exact if not is_exact else {**args, "storage": storage})
    if is_exact:
        _check_whole_feed(selector, "drilled")
    is_local = exact.pop("server") == "local"
    request: RestoreRequest | ReplayRequest
    if is_exact:
        request = _restore_request(selector, args["until"], to_sequence=args["to_sequence"], **exact)
    else:
        request = ReplayRequest(**asdict(selector), target=SCRATCH_PREFIX, **_resolve_times(args))
    report: ExactReport | DrillReport | SiteReport
    with _open_recovery(config) as (settings, archive):

        def exact_drill(request: RestoreRequest) -> ExactDrill:
            return ExactDrill(settings, request, archive, parts["server"]() if is_local else None)

        async with stop_on_signals() as stop:
            if isinstance(request, ReplayRequest):
                report = await Drill(settings, archive, storage or "file").run(request, stop)
            elif is_all:
                with closing(WholeSiteRestore(settings, request, archive, exact_drill)) as site:
                    report = await site.run(await site.plan(), stop, is_confirmed=False)
            else:
                report = await exact_drill(request).run(stop)
    _print_report(report, as_json)
    return report.exit_code


def _check_drill(is_exact: bool, args: Mapping[str, Any]) -> None:
    """Check that no option of the other kind of drill is given. `args`: those options. Raises UsageError."""
    wrong = [f"--{key.replace('_', '-')}" for key, value in args.items() if value not in (None, False)]
    if is_exact and (wrong := [each for each in wrong if each not in ("--to-sequence", "--until")]):
        raise UsageError(f"{', '.join(wrong)}: expected none with --exact, which restores from the beginning")
    if wrong and not is_exact:
        raise UsageError(f"{', '.join(wrong)}: expected only with --exact")


def _parse_mode(text: str) -> tuple[str, str]:
    """Return the mode of `--with`, and the name of a target, empty for none. Raises ValueError."""
    mode, equals, name = text.partition("=")
    if mode not in ("source", "each-replica", "target") or (equals and not (name and mode == "target")):
        raise ValueError(f"expected source, each-replica, target or target=NAME, found {text!r:.80}")
    return mode, name


@click.command()
@click.argument("selector", type=SITE_OR_CHAIN_TYPE, metavar=f"{CHAIN_FORM}|SITE")
@click.option("--all", "is_all", is_flag=True, help="All feeds of SITE; with a target, those that it takes.")
@click.option(
    "--with",
    "mode",
    type=ParsedType("copy", tuple, _parse_mode),
    default="source",
    show_default=True,
    metavar="source|each-replica|target[=NAME]",
    help="The stream, its copy on each server of its cluster in turn, or a target of ingress.",
)
@from_sequence_option
@to_sequence_option
@click.option("--since-last", is_flag=True, help="Only what no earlier comparison found equal.")
@click.option("--rate", default="", metavar="RATE", help="Maximum rate of reading: 5000/s (messages) or 20M/s (bytes).")
@textfile_option
@config_command
async def compare(
    config: str, selector: ChainSelector, as_json: bool, is_all: bool, mode: tuple[str, str], rate: str, **args: Any
) -> int:
    """Compare the archive of a feed with its living stream, or with a target, row by row, and change neither.

    Names what is missing in the stream or in the archive, altered, or not archived. Rows that limits, deletion or
    acknowledgement took away are counted apart; of a target only those that its limits may have taken away, and those
    that ingress parked, skipped, or has not delivered yet. --since-last also continues a comparison that was stopped.
    Exit 3 if there are differences, 75 if it was stopped before its end. With --all, work queues and streams that do
    not exist are named, and the others are compared.

    \b
    Examples:
      floe compare -c site.yaml us-east/ORDERS --since-last
      floe compare -c site.yaml us-east --all --since-last
      floe compare -c central.yaml us-east/ORDERS --with target=FLEET --rate 20M/s
    """
    from common.metrics import write_textfile
    from common.nats.client import connect
    from common.nats.kv import optional_state
    from common.service.process import ThreadPool, stop_on_signals
    from ingress.recovery.delivered import TargetComparison
    from ingress.recovery.living import CompareReport, CompareRequest, LivingComparison, show_metrics
    from ingress.recovery.request import pace_of

    _check_all(selector, is_all, first := args.pop("from_sequence"), last := args.pop("to_sequence"))
    check_range(first, last, None, None)
    (kind, name), textfile = mode, args.pop("textfile")
    check_textfile(textfile)
    args |= {"mode": kind, "first": first, "last": last, "pace": pace_of(rate)}
    reports, codes = list[CompareReport](), list[int]()
    with _open_recovery(config) as (settings, archive), closing(ThreadPool("compare", 1)) as threads:
        targets = settings.ingress.targets if kind == "target" else (None,)
        feeds = [selector.feed] if selector.feed else sorted({c.feed for c in archive.documents.chains(selector.site)})
        works = [
            (feed, each)
            for feed in feeds
            for each in targets
            if each is None or (name in ("", each.stream) and each.source_of(selector.site, feed))
        ]
        if not works or (len(works) > 1 and not is_all):
            names = ", ".join(each.stream for _, each in works if each) or "none"
            expected = "one target that takes it (--with target=NAME)" if kind == "target" else "an archive"
            raise UsageError(f"{selector.site}/{selector.feed or '*'}: expected {expected}, found {names}")
        nats = settings.nats_for("ingress" if kind == "target" else "egress")
        client = await connect(nats, name="floe compare", clock=archive.clock)
        async with aclosing(client), stop_on_signals() as stop:
            parts = client, archive, threads
            states = optional_state(client, settings.ingress)
            for feed, target in works:
                work = TargetComparison(target, states, *parts) if target else LivingComparison(*parts)
                try:
                    reports.append(await work.run(CompareRequest(**asdict(replace(selector, feed=feed)), **args), stop))
                except FloeError as error:
                    if not is_all:
                        raise
                    code = report_error(error)
                    codes.append(0 if error.code in ("E-COMPARE-QUEUE", "E-SOURCE-GONE") else code)
    if textfile:
        show_metrics(reports, kind, archive.clock.now())
        write_textfile(textfile, "compare_")
    if as_json:
        print_json([each.as_json() for each in reports] if is_all else reports[0].as_json())
    else:
        _echo_lines(line for each in reports for line in each.lines())
    codes += [each.exit_code or (0 if each.finished else EXIT_RETRY_LATER) for each in reports]
    return next((code for code in codes if code not in (0, EXIT_RETRY_LATER)), max(codes, default=0))
