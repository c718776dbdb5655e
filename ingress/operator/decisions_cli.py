"""`floe gap`, `floe chain` and `floe parked`: an operator's decisions about holes, chains and parked messages."""

from __future__ import annotations

import asyncio
import base64
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from typing import TYPE_CHECKING

import click

from common import cli
from common.archive.catalog import suggestion
from common.audit import decide, decide_blocking, decision_command, given_note, operator_name
from common.clock import SystemClock, format_time, format_unix
from common.errors import DataError, Stopped, UsageError
from common.exits import choices, floe_command, parked_command, report_error
from common.open import load_settings, open_chains, open_for_view, open_for_work
from common.settings.types import format_count

if TYPE_CHECKING:
    from common.chain import Chain
    from common.settings.root import Settings
    from ingress.chains.sources import Pauses, PauseStore
    from ingress.operator.status import States
    from ingress.parked import ParkedEntry, ParkedStore

    Step = Callable[[Pauses, Chain], Pauses]


GAP_COLUMNS = ("chain", "first", "last", "kind", "since", "behind", "accepted")
PAUSE_COLUMNS = ("target", "chain", "since", "by", "note")
PARKED_COLUMNS = ("target", "chain", "sequence", "state", "bytes", "since", "why")


def _now() -> str:
    return format_time(int(SystemClock().now() * 1000) * 1_000_000)


# Gaps


@click.group()
def gap() -> None:
    """List holes in the archive, and accept them as gaps."""


@gap.command("ls")
@cli.config_command
async def gap_ls(config: str, as_json: bool) -> int:
    """List the holes of every chain that flows into a target, from the target's position on.

    kind: hole, no segment covers it; at the position of the target also gone (a hole was filled in part) and
    damaged. since: when the first segment after the hole was stored. accepted: yes, if ingress continues after
    it. Exit 3 if a document of a chain is damaged: the holes of the others are listed.

    \b
    Example: floe gap ls -c central.yaml --json
    """
    from common.archive.documents import HOLE_HINT, accept_command
    from ingress.operator.holes import find_blocking_hole, read_cover
    from ingress.operator.status import read_states

    settings = load_settings(config, quiet=True)
    states = await read_states(settings)
    found, code = [], 0
    store, documents = open_for_view(settings)
    with closing(store):
        for chain, position in sorted(_positions(settings, documents.chains(), states).items()):
            try:
                archived = read_cover(store, documents, chain, position)
                found += [*filter(None, [find_blocking_hole(store, archived)]), *archived.holes()]
            except DataError as error:
                code = report_error(error)
    rows = [hole.row() for hole in found]
    if as_json:
        cli.print_json(rows)
        return code
    cli.print_table(rows, GAP_COLUMNS)
    # The commands that accept a gap come last: they are the last resort.
    for hole in found:
        if hole.kind != "hole":
            click.echo("\n".join(hole.remedies()), err=True)
    missing = [(hole.chain, part) for hole in found if hole.kind == "hole" for part in hole.unaccepted]
    if missing:
        click.echo(HOLE_HINT, err=True)
        click.echo("only if no copy is left, accept them as a gap for all targets:", err=True)
    for chain, part in missing:
        click.echo(accept_command(chain, part), err=True)
    return code


def _positions(settings: Settings, chains: list[Chain], states: States) -> dict[Chain, int | None]:
    """Return each chain that flows into a target, with the position of the target that is furthest behind; None: it
    has not begun there.
    """
    found: dict[Chain, int | None] = {}
    for target in settings.ingress.targets:
        listed = target.listed_feeds({(chain.site, chain.feed) for chain in chains})
        state = states.get(target.stream)
        positions = state.checkpoint.positions if state else {}
        for chain in chains:
            if (chain.site, chain.feed) in listed:
                at = positions.get(chain)
                before = found.get(chain, at)
                found[chain] = None if at is None or before is None else min(at, before)
    return found


@gap.command("accept")
@cli.chain_argument
@click.option("--first", type=cli.SequenceType(), required=True, help="The first sequence of the gap.")
@click.option("--last", type=cli.SequenceType(), required=True, help="The last sequence of the gap.")
@cli.dry_run_option
@cli.yes_option
@decision_command
def gap_accept(
    config: str, selector: cli.ChainSelector, first: int, last: int, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Accept a gap of sequences that no segment covers: every target continues after it, within a minute.

    The last resort: the source may still hold them. Egress at the site checks at each start and every six hours;
    the segments that it archives fill the hole.

    Segments that arrive before a target has passed the gap are delivered all the same; later ones are reported.
    Refused if a sound segment covers a part. Without an incarnation the newest is meant, unless an older one
    has a hole there, too.

    \b
    Example: floe gap accept -c central.yaml us-east/NODES --first 101 --last 200
    """
    from common.archive.documents import AcceptedGap
    from common.sequences import SequenceRange
    from ingress.operator.holes import check_acceptable, check_unambiguous, read_cover

    if first > last:
        raise UsageError(f"--first {first} is greater than --last {last}")
    wanted, settings = SequenceRange(first, last), load_settings(config, quiet=True)
    try:
        decision = AcceptedGap(wanted, given_note(settings), operator_name(), _now())
    except ValueError as error:
        raise UsageError(f"--note: {error}") from None
    (store, documents), chain = open_for_work(settings), selector.resolve(settings)
    with closing(store):
        if selector.incarnation is None:
            check_unambiguous(store, documents, chain, wanted)
        damaged = check_acceptable(store, read_cover(store, documents, chain, first), wanted)
        for problem in damaged:
            click.echo(f"damaged, and accepted as lost with the gap: {problem}", err=True)
        if not dry_run:
            lost = format_count(len(wanted), "sequence")
            decide_blocking(settings, f"accept the loss of {lost}, {wanted}, of {chain}?", yes)
            decision = documents.accept_gap(chain, decision)
    if as_json:
        shown = {"first": decision.range.first, "last": decision.range.last, "note": decision.note}
        decided = {"by": decision.decided_by, "at": decision.decided_at, "damaged": damaged, "dry_run": dry_run}
        cli.print_json({**chain.log_context(), **shown, **decided})
    elif dry_run:
        click.echo(f"{chain} {decision.range} can be accepted as a gap; nothing was changed")
    else:
        click.echo(f"{chain} {decision.range} is accepted as a gap, by {decision.decided_by} at {decision.decided_at}")


# Pauses


@click.group()
def chain() -> None:
    """Pause single chains, and resume them."""


@chain.command("pause")
@cli.target_option
@cli.chain_argument
@decision_command
async def chain_pause(config: str, target: str, selector: cli.ChainSelector, as_json: bool) -> None:
    """Deliver nothing more of a chain into a target until it is resumed; others continue.

    Rows that are being stored now are still stored. A pause holds through restarts and take-overs.

    \b
    Example: floe chain pause -c central.yaml --target FLEET us-east/NODES --note "bad data"
    """
    from ingress.chains.sources import Pause

    settings = load_settings(config, quiet=True)
    pause = Pause(_now(), operator_name(), given_note(settings))
    _, pauses = await _decide(settings, target, selector, lambda old, chain: old.with_pause(chain, pause), is_new=True)
    _show_pauses(target, pauses, as_json)


@chain.command("resume")
@cli.target_option
@cli.optional_chain_argument
@click.option("--all", "is_all", is_flag=True, help="Every paused chain of the target.")
@click.option("--yes", is_flag=True, help="With --all: do not ask.")
@decision_command
async def chain_resume(
    config: str, target: str, selector: cli.ChainSelector | None, is_all: bool, yes: bool, as_json: bool
) -> None:
    """Resume a paused chain; or recheck at once a chain that stopped by itself.

    --all resumes every chain, even if the stored pauses are unreadable (E-PAUSES).

    \b
    Example: floe chain resume -c central.yaml --target FLEET us-east/NODES
             floe chain resume -c central.yaml --target FLEET --all
    """
    # Two resumptions within a millisecond must differ.
    at = f"{_now()} {secrets.token_hex(4)}"
    if is_all is (selector is not None):
        raise UsageError("expected a chain, as SITE/FEED, or --all")
    settings = load_settings(config, quiet=True)
    if selector is None:
        async with _store(settings, target) as store:
            try:
                paused = f"chains paused now: {len((await store.read()).paused)}"
            except Stopped as error:
                paused = error.message
            await decide(settings, f"resume all chains of {target} ({paused})?", yes)
            pauses = await store.resume_all(at)
    else:
        chain, pauses = await _decide(settings, target, selector, lambda pauses, chain: pauses.with_resume(chain, at))
        click.echo(f"{chain}: resumed; a running ingress checks it within two seconds", err=True)
    _show_pauses(target, pauses, as_json)


@chain.command("ls")
@cli.config_command
async def chain_ls(config: str, as_json: bool) -> None:
    """List the paused chains of every target.

    \b
    Example: floe chain ls -c central.yaml --json
    """
    from ingress.chains.sources import pause_stores

    rows = []
    async with pause_stores(load_settings(config, quiet=True)) as stores:
        for target, store in stores.items():
            rows += _pause_rows(target, await store.read())
    cli.print_json(rows) if as_json else cli.print_table(rows, PAUSE_COLUMNS)


@asynccontextmanager
async def _store(settings: Settings, target: str) -> AsyncIterator[PauseStore]:
    from ingress.chains.sources import pause_stores
    from ingress.operator.correct import find_target

    async with pause_stores(settings) as stores:
        yield stores[find_target(settings, target).stream]


async def _decide(
    settings: Settings, target: str, selector: cli.ChainSelector, step: Step, *, is_new: bool = False
) -> tuple[Chain, Pauses]:
    """Return the chain that was meant, and the pauses now. Raises UsageError if a decision that `is_new` names a chain
    that does not flow into the target; an old one may name a chain that once did.
    """
    from ingress.operator.correct import find_target

    async with _store(settings, target) as store:
        paused, known_chains = (await store.read()).paused, await store.known_chains()
        chain = await asyncio.to_thread(selector.resolve, settings, paused, known_chains)
        if is_new and chain not in known_chains:
            pair, into = (chain.site, chain.feed), find_target(settings, target)
            if pair not in (pairs := into.listed_feeds([pair])):
                there = suggestion(f"{chain.site}/{chain.feed}", map("/".join, pairs))
                raise UsageError(f"{chain}: expected a chain that flows into {target}, found another", hint=there)
            if chain not in await asyncio.to_thread(open_chains(settings).chains, chain.site, chain.feed):
                click.echo(f"{chain}: not archived yet; it is paused from the first segment", err=True)
        await decide(settings, f"{'pause' if is_new else 'resume'} {chain} in {target}")
        return chain, await store.change(lambda pauses: step(pauses, chain))


def _pause_rows(target: str, pauses: Pauses) -> list[dict[str, object]]:
    return [
        {
            "target": target,
            "chain": str(chain),
            **chain.log_context(),
            "since": pause.at,
            "by": pause.by,
            "note": pause.note,
        }
        for chain, pause in sorted(pauses.paused.items())
    ]


def _show_pauses(target: str, pauses: Pauses, as_json: bool) -> None:
    rows = _pause_rows(target, pauses)
    if rows or as_json:
        cli.print_json(rows) if as_json else cli.print_table(rows, PAUSE_COLUMNS)
    else:
        click.echo(f"paused chains of {target}: none")


# Parked messages


@click.group()
def parked() -> None:
    """List, show and deliver messages that were too large for their target."""


@parked.command("ls")
@click.option("--target", default="", metavar="STREAM", help="Only messages of this target.")
@cli.config_command
def parked_ls(config: str, target: str, as_json: bool) -> None:
    """List parked messages: their target, time, reason and state.

    \b
    Example: floe parked ls -c central.yaml --target FLEET
    """
    from ingress.operator.correct import find_target, open_parked

    settings = load_settings(config, quiet=True)
    targets = [find_target(settings, target)] if target else settings.ingress.targets
    stores = [open_parked(settings, each.stream, "") for each in targets]
    rows = [_parked_row(store, entry) for store in stores for entry in store.list_entries(all_targets=True).values()]
    cli.print_json(rows) if as_json else cli.print_table(rows, PARKED_COLUMNS)


@parked.command("cat")
@cli.target_option
@cli.chain_argument
@click.option("--sequence", type=cli.SequenceType(), required=True, help="Sequence of the message.")
@click.option("--headers", "is_headers", is_flag=True, help="Its header block instead of its payload.")
@cli.config_command
async def parked_cat(
    config: str, target: str, selector: cli.ChainSelector, sequence: int, is_headers: bool, as_json: bool
) -> None:
    """Write one parked message to stdout: its payload unchanged; with --json everything, bytes in Base64.

    \b
    Example: floe parked cat -c central.yaml --target FLEET us-east/NODES --sequence 4711
    """
    settings = load_settings(config, quiet=True)
    store = await _open_current_store(settings, target)
    entry = _parked_entry(store, _find_chain(settings, store, selector, sequence), sequence)
    if (message := store.read(entry.name)) is None:
        raise _parked_error(
            f"message {sequence} of {entry.name.chain} is no longer in the store",
            "put it back from a copy of the bucket; to list the parked messages",
            parked_command(target),
        )
    if as_json:
        row = _parked_row(store, entry)
        row["timestamp_ns"] = message.timestamp_ns
        for name in ("subject", "headers", "payload"):
            raw = getattr(message, name)
            row[name] = None if raw is None else base64.b64encode(raw).decode()
        cli.print_json(row)
    else:
        sys.stdout.buffer.write((message.headers or b"") if is_headers else message.payload)
        sys.stdout.buffer.flush()


@parked.command("retry")
@cli.target_option
@cli.chain_argument
@click.option("--sequence", type=cli.SequenceType(), help="Sequence of the message.")
@click.option("--all", "is_all", is_flag=True, help="All parked messages of the chain.")
@cli.yes_option
@decision_command
async def parked_retry(
    config: str, target: str, selector: cli.ChainSelector, sequence: int | None, is_all: bool, yes: bool, as_json: bool
) -> None:
    """Request that the running service retries messages, with the current limits.

    Each is delivered at most once, after the messages that the target holds by then; `floe parked ls` shows
    the result.

    \b
    Example: floe parked retry -c central.yaml --target FLEET us-east/NODES --all
    """
    if (sequence is None) is not is_all:
        raise UsageError("expected one of --sequence and --all")
    from ingress.parked import ParkedState

    settings = load_settings(config, quiet=True)
    store = await _open_current_store(settings, target)
    chain = _find_chain(settings, store, selector, sequence)
    if sequence is None:
        entries = store.list_entries().values()
        wanted = [each for each in entries if each.name.chain == chain and each.state is ParkedState.PARKED]
    else:
        wanted = [_check_deliverable(_parked_entry(store, chain, sequence), target)]
    if not as_json:
        cli.print_table([_parked_row(store, entry) for entry in wanted], PARKED_COLUMNS)
    if wanted:
        question = f"retry {format_count(len(wanted), 'parked message')} of {chain} for {target}?"
        await decide(settings, question, yes)
        store.request_retry(*wanted)
    if as_json:
        cli.print_json([_parked_row(store, entry) for entry in wanted])
    elif wanted:
        click.echo(f"requested {len(wanted)}: ingress retries them within half a minute", err=True)
    else:
        click.echo(f"no message of {chain} is parked for {target}", err=True)


def _check_deliverable(entry: ParkedEntry, target: str) -> ParkedEntry:
    from ingress.parked import ParkedState

    message = f"message {entry.name.sequence} of {entry.name.chain}"
    if entry.state is ParkedState.DELIVERED:
        raise _parked_error(f"{message} is delivered already", "to list the parked messages", parked_command(target))
    if entry.state is ParkedState.PENDING:
        raise _parked_error(
            f"{message}: expected one before the position of its chain, found a later one",
            "wait for its turn; if the target already holds it, there is nothing to do; to show the positions",
            floe_command("checkpoint ls"),
        )
    return entry


def _parked_error(reason: str, remedy: str, command: str) -> DataError:
    return DataError(reason, hint=choices((remedy, command)), code="E-PARKED")


async def _open_current_store(settings: Settings, target: str) -> ParkedStore:
    """Open the parked messages of the present state. Raises DataError if there is no state."""
    from ingress.operator.correct import open_editor, open_parked

    async with open_editor(settings, target) as editor:
        known = await editor.known()
    if known.state is None:
        raise _parked_error(
            f"target {target}: expected a stored state, found none: {known.problem or 'no key'}",
            "to show the state of the target",
            floe_command("status"),
        )
    return open_parked(settings, target, known.state.checkpoint.parked_names)


def _find_chain(settings: Settings, store: ParkedStore, selector: cli.ChainSelector, sequence: int | None) -> Chain:
    """Return the chain of the message. Raises UsageError if there are several."""
    found = {
        name.chain
        for name in store.list_entries()
        if (name.chain.site, name.chain.feed) == (selector.site, selector.feed)
        and selector.incarnation in (None, name.chain.incarnation)
        and selector.partition in (None, name.chain.partition)
        and sequence in (None, name.sequence)
    }
    if len(found) > 1:
        raise UsageError(
            f"{selector.site}/{selector.feed}: expected one chain, found {', '.join(map(str, sorted(found)))}",
            hint="name the incarnation and the partition",
        )
    return found.pop() if found else selector.resolve(settings)


def _parked_entry(store: ParkedStore, chain: Chain, sequence: int) -> ParkedEntry:
    for name, entry in store.list_entries().items():
        if (name.chain, name.sequence) == (chain, sequence):
            return entry
    raise _parked_error(
        f"target {store.target}: expected message {sequence} of {chain} among the parked ones, found none",
        "to list the parked messages",
        parked_command(store.target),
    )


def _parked_row(store: ParkedStore, entry: ParkedEntry) -> dict[str, object]:
    return {
        "target": store.target,
        "chain": str(entry.name.chain),
        "sequence": entry.name.sequence,
        "state": str(entry.state),
        "bytes": entry.size,
        "since": format_unix(entry.since),
        "why": store.read_reason(entry),
        "created": entry.name.created,
    }
