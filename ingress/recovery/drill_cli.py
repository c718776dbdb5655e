"""Define the commands `floe drill` and `floe compare`, which change no stream but their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import aclosing, closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from common.chain import CHAIN_FORM
from common.cli import (
    ChainSelector,
    ParsedType,
    check_range,
    check_textfile,
    config_command,
    from_sequence_option,
    print_json,
    range_options,
    textfile_option,
    to_sequence_option,
)
from common.errors import FloeError, UsageError
from common.exits import EXIT_RETRY_LATER, report_error
from ingress.recovery.cli import (
    SITE_OR_CHAIN_TYPE,
    check_all,
    echo_lines,
    open_recovery,
    print_report,
    resolve_times,
    restore_request,
)

if TYPE_CHECKING:
    from ingress.recovery.drill import DrillReport, ExactReport
    from ingress.recovery.plan import RestoreRequest
    from ingress.recovery.site_restore import SiteReport


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

    check_all(selector, is_all := args.pop("is_all"), args["to_sequence"])
    exact = {key: args.pop(key) for key in ("exact", "server", "replicas", "allow_lossy", "force")}
    is_exact, storage = exact.pop("exact") or is_all, args.pop("storage")
    _check_drill(is_exact, exact if not is_exact else {**args, "storage": storage, "partition": selector.partition})
    is_local = exact.pop("server") == "local"
    request: RestoreRequest | ReplayRequest
    if is_exact:
        request = restore_request(selector, args["until"], to_sequence=args["to_sequence"], **exact)
    else:
        request = ReplayRequest(**asdict(selector), target=SCRATCH_PREFIX, **resolve_times(args))
    report: ExactReport | DrillReport | SiteReport
    with open_recovery(config) as (settings, archive):

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
    print_report(report, as_json)
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
    from common.nats.buckets import optional_state
    from common.nats.client import connect
    from common.service.process import ThreadPool, stop_on_signals
    from ingress.recovery.delivered import TargetComparison
    from ingress.recovery.living import CompareReport, CompareRequest, LivingComparison, show_metrics
    from ingress.recovery.request import pace_of

    check_all(selector, is_all, first := args.pop("from_sequence"), last := args.pop("to_sequence"))
    check_range(first, last, None, None)
    (kind, name), textfile = mode, args.pop("textfile")
    check_textfile(textfile)
    args |= {"mode": kind, "first": first, "last": last, "pace": pace_of(rate)}
    reports, codes = list[CompareReport](), list[int]()
    with open_recovery(config) as (settings, archive), closing(ThreadPool("compare", 1)) as threads:
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
        echo_lines(line for each in reports for line in each.lines())
    codes += [each.exit_code or (0 if each.finished else EXIT_RETRY_LATER) for each in reports]
    return next((code for code in codes if code not in (0, EXIT_RETRY_LATER)), max(codes, default=0))
