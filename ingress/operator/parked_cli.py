"""`floe parked ls | cat | retry`: messages that were too large for their target."""

from __future__ import annotations

import base64
import sys
from typing import TYPE_CHECKING

import click

from common import cli
from common.audit import decide, decision_command
from common.clock import format_unix
from common.errors import DataError, UsageError
from common.exits import choices, floe_command
from common.hints import parked_command
from common.open import load_settings
from common.settings.types import format_count

if TYPE_CHECKING:
    from common.chain import Chain
    from common.settings.root import Settings
    from ingress.parked import ParkedEntry, ParkedStore

PARKED_COLUMNS = ("target", "chain", "sequence", "state", "bytes", "since", "why")


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
    rows = [_row(store, entry) for store in stores for entry in store.list_entries(all_targets=True).values()]
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
    entry = _entry(store, _find_chain(settings, store, selector, sequence), sequence)
    if (message := store.read(entry.name)) is None:
        raise _parked_error(
            f"message {sequence} of {entry.name.chain} is no longer in the store",
            "put it back from a copy of the bucket; to list the parked messages",
            parked_command(target),
        )
    if as_json:
        row = _row(store, entry)
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
        wanted = [_check_deliverable(_entry(store, chain, sequence), target)]
    if not as_json:
        cli.print_table([_row(store, entry) for entry in wanted], PARKED_COLUMNS)
    if wanted:
        question = f"retry {format_count(len(wanted), 'parked message')} of {chain} for {target}?"
        await decide(settings, question, yes)
        store.request_retry(*wanted)
    if as_json:
        cli.print_json([_row(store, entry) for entry in wanted])
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


def _entry(store: ParkedStore, chain: Chain, sequence: int) -> ParkedEntry:
    for name, entry in store.list_entries().items():
        if (name.chain, name.sequence) == (chain, sequence):
            return entry
    raise _parked_error(
        f"target {store.target}: expected message {sequence} of {chain} among the parked ones, found none",
        "to list the parked messages",
        parked_command(store.target),
    )


def _row(store: ParkedStore, entry: ParkedEntry) -> dict[str, object]:
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
