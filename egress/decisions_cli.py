"""`floe egress resolve` and `floe egress repartition`: an operator's decisions about feeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from common.audit import decide, decision_command
from common.cli import SequenceType, dry_run_option, print_json, yes_option
from common.errors import UsageError
from common.exits import EXIT_DIFFERENCES
from common.logs import escape
from common.open import load_settings

if TYPE_CHECKING:
    from common.chain import Chain
    from egress.deps import CommandContext
    from egress.partition import Partition
    from egress.repartition import RepartitionPlan, RepartitionResult
    from egress.report import NewlyUnmatched
    from egress.resolve import Case


@click.command()
@click.argument("feed", metavar="FEED|SITE/FEED[/INC[/PART]]")
@click.option("--same", "is_same", is_flag=True, help="Accept the stream as the archived one.")
@click.option("--new-incarnation", "is_new", is_flag=True, help="Archive the present stream as the next incarnation.")
@click.option("--from", "sequence", type=SequenceType(), help="First sequence of the new incarnation.")
@click.option("--believe-listing", "is_believed", is_flag=True, help="Accept the listing of the bucket as complete.")
@click.option("--all-incarnations", "is_whole", is_flag=True, help="Accept it for later lost incarnations too.")
@yes_option
@decision_command
async def resolve(
    config: str,
    feed: str,
    is_same: bool,
    is_new: bool,
    sequence: int | None,
    is_believed: bool,
    is_whole: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Show the reason that FEED has stopped and the possible decisions, or decide.

    The running service checks again and continues by itself, within a minute or so. Exit 3 if there is something to
    decide.

    \b
    Example: floe egress resolve -c site.yaml NODE_DATA
             floe egress resolve -c site.yaml NODE_DATA --new-incarnation --from 1201
    """
    from egress import resolve as resolving
    from egress.deps import find_feed, open_context, parse_feed
    from egress.partition import partitions_of

    if is_same + is_new + is_believed > 1 or (sequence is not None and not is_new):
        raise UsageError("expected one of --same, --new-incarnation [--from SEQ] and --believe-listing")
    if is_whole and not is_believed:
        raise UsageError("--all-incarnations: expected together with --believe-listing")
    settings = load_settings(config, quiet=True)
    name, incarnation, partition = parse_feed(settings, feed)
    partitions = partitions_of(settings.site, find_feed(settings, name))
    if partition is not None and partition >= len(partitions):
        raise UsageError(f"{feed}: expected a partition from 0 to {len(partitions) - 1}")
    async with open_context(settings, is_view=not (is_new or is_same or is_believed)) as components:
        cases = [await resolving.load_case(components, each) for each in partitions]
        chosen = cases if partition is None else [cases[partition]]
        if incarnation not in (None, newest := chosen[0].chain.incarnation):
            raise UsageError(f"{feed}: expected the newest incarnation, {newest:04d}: the others have ended")
        if is_new:
            result = await _new_incarnation(components, cases, sequence, yes)
        elif is_same:
            result = await _same(components, chosen, yes)
        elif is_believed:
            result = await _believe(components, chosen, yes, is_whole)
        else:
            return _show(chosen, as_json)
    _print(result, ["decided; a running egress checks again and continues by itself, within a minute or so"], as_json)
    return 0


async def _new_incarnation(
    context: CommandContext, cases: Sequence[Case], sequence: int | None, yes: bool
) -> dict[str, object]:
    from egress.resolve import decide_incarnation, overlap_warning, plan_incarnation

    decision = plan_incarnation(cases, sequence)
    for text in filter(None, (overlap_warning(cases[number], first) for number, first in decision.first.items())):
        click.echo(f"warning: {text}", err=True)
    begins = ", ".join(f"partition {number} at {first}" for number, first in sorted(decision.first.items()))
    question = f"end the incarnation of {cases[0].chain}, and begin the next with {begins}?"
    await decide(context.settings, question, yes, chains=context.deps.chains)
    await decide_incarnation(context, cases, decision)
    return {"decided": "new incarnation", "first": decision.first}


async def _same(context: CommandContext, cases: Sequence[Case], yes: bool) -> dict[str, object]:
    from egress.resolve import accept_same, check_same

    stopped = [case for case in cases if case.code] or cases
    accepted = {str(case.chain): check_same(case).end for case in stopped}
    for chain, end in accepted.items():
        question = f"accept the stream as the one archived in {chain}, even if messages up to {end} differ?"
        await decide(context.settings, question, yes, chains=context.deps.chains)
    for case in stopped:
        await accept_same(context, case)
    return {"decided": "same", "accepted": accepted}


async def _believe(context: CommandContext, cases: Sequence[Case], yes: bool, is_whole: bool) -> dict[str, object]:
    from egress.resolve import LISTING_CODES, accept_following, accept_listing, check_listing

    stopped = [case for case in cases if case.code in LISTING_CODES] or cases[:1]
    for case in stopped:
        check_listing(case)
        more = ", and that all later lost incarnations hold nothing" if is_whole else ""
        question = f"believe that the archive of {case.chain} ends at {case.end}{more}?"
        await decide(context.settings, question, yes, chains=context.deps.chains)
    marks = {str(case.chain): await accept_listing(context, case) for case in stopped}
    for case in stopped if is_whole else ():
        marks |= {str(chain): 0 for chain in await accept_following(context, case)}
    return {"decided": "listing", "marks": marks}


def _show(cases: Sequence[Case], as_json: bool) -> int:
    from egress.resolve import FEED_CODES

    # One case for each partition; a single one if the problem is the feed's.
    of_feed = next((case for case in cases if case.code in FEED_CODES), None)
    lines = [line for case in (cases if of_feed is None else [of_feed]) for line in _lines(case)]
    _print([case.as_json() for case in cases], lines, as_json)
    return EXIT_DIFFERENCES if any(case.code for case in cases) else 0


def _lines(case: Case) -> list[str]:
    from common.exits import resolve_command as command
    from egress.resolve import FEED_CODES

    found, chain = case.as_json(), str(case.chain)
    named = _feed(case.chain) if case.code in FEED_CODES else chain
    state = case.code or "nothing to decide"
    lines = [f"{named}  {state}: {found['why'].removeprefix(f'{chain}: ')}"]
    if case.current is not None:
        lines.append(f"  archive ends at {found['archive_end']}, created {found['created_archived'] or '-'}")
    if found["stream_last"] is not None:
        held = f"{found['stream_first']}..{found['stream_last']}"
        lines.append(f"  stream holds {held}, created {found['created_found']}")
    lines += [f"  sequence {witness['sequence']}: {witness['held']}" for witness in found["evidence"]]
    if case.bounds is not None and case.code:
        lines.append(f"  a new incarnation may begin within {case.bounds}")
    has_partitions = len(case.partition.settings.filters()) > 1
    for choice in case.choices:
        is_one = has_partitions and not choice.options.startswith("--new")
        lines.append(f"  {choice.meaning}:")
        lines.append(f"    {command(case.chain if is_one else case.chain.feed, choice.options)}")
    if case.advice:
        lines += [f"  {line}" for line in case.advice.split("\n")]
    return lines


# Partitions


@click.command()
@click.argument("what", metavar="FEED|SITE/FEED")
@dry_run_option
@yes_option
@decision_command
async def repartition(config: str, what: str, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Divide a feed into the partitions that are configured now.

    Its incarnation is closed at the end of the furthest partition, and the next one begins after it. Stop egress first.
    May be run again after a crash, and does nothing if the feed is divided as configured.

    \b
    Example: floe egress repartition -c site.yaml us-east/NODE_DATA
    """
    from common.service.process import stop_on_signals
    from egress.deps import find_feed, open_context, parse_feed
    from egress.repartition import Repartition

    settings = load_settings(config, quiet=True)
    named, *numbers = parse_feed(settings, what)
    if numbers != [None, None]:
        raise UsageError(f"{what}: expected FEED or SITE/FEED: the whole feed is divided")
    feed = find_feed(settings, named)
    async with open_context(settings) as components, stop_on_signals() as stop:
        work = Repartition(components, feed)
        plan = await work.plan()
        unmatched = await work.left_out(plan)
        if dry_run:
            _print(_planned(plan, unmatched), _planned_lines(plan, unmatched), as_json)
            return 0
        if not plan.is_done:
            for each in unmatched:
                click.echo(escape(f"warning: {each}"), err=True)
            cut = f"divide {_filters(plan.old)} into {_filters(plan.new)}"
            question = escape(f"close {plan.current} at {plan.end} and {cut}?")
            await decide(settings, question, yes, chains=components.deps.chains)
        result = await work.run(stop)
    _print(_done(result, plan), _done_lines(result, plan), as_json)
    return 0


def _planned(plan: RepartitionPlan, unmatched: Sequence[NewlyUnmatched]) -> dict[str, Any]:
    return {
        "chain": str(plan.current),
        "nothing_to_do": plan.is_done,
        "from": [partition.filter_subject for partition in plan.old],
        "to": [partition.filter_subject for partition in plan.new],
        "ends_at": None if plan.is_done else plan.end,
        "still_to_read": {} if plan.is_done else plan.remaining,
        "left_out": [{"filter": each.filter_subject, **each.found.as_dict()} for each in unmatched],
    }


def _planned_lines(plan: RepartitionPlan, unmatched: Sequence[NewlyUnmatched]) -> list[str]:
    from common.settings.types import format_count

    if plan.is_done:
        return [f"{_feed(plan.current)} is divided as configured"]
    remaining = [
        f"partition {number}: {format_count(count, 'sequence') if count else 'nothing'} still to read"
        for number, count in plan.remaining.items()
    ]
    return [
        f"{_feed(plan.current)} would be closed at {plan.end}, and the next incarnation would begin after it",
        f"from: {_filters(plan.old)}",
        f"to: {_filters(plan.new)}",
        *remaining,
        *map(str, unmatched),
    ]


def _done(result: RepartitionResult, plan: RepartitionPlan) -> dict[str, Any]:
    return {
        "chain": str(result.chain),
        "nothing_to_do": plan.is_done,
        "to": [partition.filter_subject for partition in plan.new],
        "first": result.first,
        "ends": result.ends,
    }


def _done_lines(result: RepartitionResult, plan: RepartitionPlan) -> list[str]:
    if plan.is_done:
        return [f"{_feed(result.chain)} is divided as configured"]
    ends = [
        f"partition {number} of {_feed(plan.current)}: " + (f"ends at {end}" if end else "holds nothing")
        for number, end in sorted(result.ends.items())
    ]
    return [
        *ends,
        f"{_feed(result.chain)} begins at {result.first}: {_filters(plan.new)}",
        "start egress: it continues with the new partitions",
    ]


def _feed(chain: Chain) -> str:
    """Return the name of an incarnation, for all its partitions."""
    return str(chain).rpartition("/")[0]


def _filters(parts: Sequence[Partition]) -> str:
    from egress.incarnations import filters_text

    return filters_text([partition.filter_subject for partition in parts])


def _print(found: object, lines: Sequence[str], as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        click.echo("\n".join(map(escape, lines)))
