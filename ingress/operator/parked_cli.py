"""`floe parked ls | cat | retry`: messages that were too large for their target."""

from __future__ import annotations

import base64
import shlex
import sys
from typing import TYPE_CHECKING

import click

from common.errors import DataError, UsageError
from common.service.cli import (
    Named,
    SequenceType,
    chain_options,
    config_option,
    confirm,
    json_option,
    load_settings,
    print_json,
    run_command,
    table,
    target_option,
    yes_option,
)
from common.service.exits import command, ways

if TYPE_CHECKING:
    from common.chain import Chain
    from ingress.parked import ParkedEntry, ParkedName, ParkedStore

COLUMNS = ("target", "chain", "sequence", "state", "bytes", "since", "why")


@click.group()
def parked() -> None:
    """List, show and deliver messages that were too large for their target."""


@parked.command("ls")
@config_option
@click.option("--target", default="", metavar="STREAM", help="Only of this target.")
@json_option
@run_command
def parked_ls(config: str, target: str, as_json: bool) -> None:
    """List what was put aside: for which target, since when, why, and what became of it.

    \b
    Example: floe parked ls -c central.yaml --target FLEET
    """
    settings = load_settings(config, quiet=True)
    known = [each.stream for each in settings.ingress.targets]
    names = [name for name in known if target in ("", name)]
    if target and not names:
        raise UsageError(f"--target: expected one of {', '.join(known) or 'none'}, found {target}")
    stores = [_store(config, name) for name in names]
    rows = [_row(store, entry) for store in stores for entry in store.entries(all_targets=True).values()]
    if as_json:
        print_json(rows)
    else:
        table(rows, COLUMNS)


@parked.command("cat")
@config_option
@target_option
@chain_options
@click.option("--sequence", type=SequenceType(), required=True, help="The message.")
@click.option("--headers", "is_headers", is_flag=True, help="Its header block instead of its payload.")
@json_option
@run_command
async def parked_cat(
    config: str,
    target: str,
    named: Named,
    sequence: int,
    is_headers: bool,
    as_json: bool,
) -> None:
    """Write one parked message to stdout: its payload as it is; with --json everything, bytes in Base64.

    \b
    Example: floe parked cat -c central.yaml --target FLEET --site us-east --feed NODES --sequence 4711
    """
    store = await _current(config, target)
    chain = _meant(config, store, named, sequence)
    entry = _entry(store, chain, sequence)
    message = store.read(entry.name)
    if message is None:
        raise DataError(
            f"message {sequence} of {chain} is not in the store any more",
            hint=ways(("put it back from a copy of the bucket; what there is", _ls(target))),
            code="E-PARKED",
        )
    if as_json:
        row = _row(store, entry)
        headers = None if message.headers is None else _base64(message.headers)
        row |= {"timestamp_ns": message.timestamp_ns, "subject": _base64(message.subject)}
        print_json(row | {"headers": headers, "payload": _base64(message.payload)})
    else:
        sys.stdout.buffer.write((message.headers or b"") if is_headers else message.payload)
        sys.stdout.buffer.flush()


@parked.command("retry")
@config_option
@target_option
@chain_options
@click.option("--sequence", type=SequenceType(), help="The message.")
@click.option("--all", "is_all", is_flag=True, help="All of the chain.")
@yes_option
@json_option
@run_command
async def parked_retry(
    config: str,
    target: str,
    named: Named,
    sequence: int | None,
    is_all: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Ask the running service to try messages again, by the limits of now.

    Each is delivered at most once, behind what the target holds by then; `floe parked ls` says what came of
    it.

    \b
    Example: floe parked retry -c central.yaml --target FLEET --site us-east --feed NODES --all
    """
    if (sequence is None) is not is_all:
        raise UsageError("expected one of --sequence and --all")
    store = await _current(config, target)
    chain = _meant(config, store, named, sequence)
    wanted = _wanted(store, chain, sequence)
    if not as_json:
        table([_row(store, entry) for entry in wanted], COLUMNS)
    if wanted:
        confirm(f"try {len(wanted)} of them again for {target}?", yes)
        store.ask(*wanted)
    if as_json:
        print_json([_row(store, entry) for entry in wanted])
    else:
        click.echo(f"asked for {len(wanted)}: ingress tries them within half a minute", err=True)


def _wanted(store: ParkedStore, chain: Chain, sequence: int | None) -> list[ParkedEntry]:
    """What may be asked for. Raises DataError for a single message that may not."""
    from ingress.parked import State

    if sequence is None:
        return [entry for entry in _of_chain(store, chain).values() if entry.state is State.PARKED]
    entry = _entry(store, chain, sequence)
    if entry.state is State.DELIVERED:
        raise DataError(
            f"message {sequence} of {chain}: expected one to deliver, it is delivered",
            hint=ways(("what there is", _ls(store.target))),
            code="E-PARKED",
        )
    if entry.state is State.PENDING:
        raise DataError(
            f"message {sequence} of {chain}: expected one that its chain has passed, it has not",
            hint=ways(
                (
                    "its turn comes; where the target holds it already, there is nothing to do",
                    command("checkpoint ls"),
                )
            ),
            code="E-PARKED",
        )
    return [entry]


def _store(config: str, target: str) -> ParkedStore:
    from common.open import open_chains
    from ingress.parked import ParkedStore

    documents = open_chains(load_settings(config, quiet=True))
    return ParkedStore(documents.objects, documents.layout, target, "")


async def _current(config: str, target: str) -> ParkedStore:
    """What is parked for the target as its stored state says. Raises DataError where there is no state."""
    from ingress.operator.correct import opened

    store = _store(config, target)
    async with opened(load_settings(config, quiet=True), target) as desk:
        known = await desk.known()
    if known.state is None:
        raise DataError(
            f"target {target}: expected a stored state, found none: {known.problem or 'no key'}",
            hint=ways(("to see what ingress makes of it", command("status"))),
            code="E-PARKED",
        )
    store.kept_as = known.state.checkpoint.parked_as
    return store


def _meant(config: str, store: ParkedStore, named: Named, sequence: int | None) -> Chain:
    """The chain of which it is parked. Raises UsageError where that may be several."""
    found = sorted(
        {
            name.chain
            for name in store.entries()
            if (name.chain.site, name.chain.feed) == (named.site, named.feed)
            and named.incarnation in (None, name.chain.incarnation)
            and named.partition in (None, name.chain.partition)
            and sequence in (None, name.sequence)
        }
    )
    if len(found) > 1:
        raise UsageError(
            f"{named.site}/{named.feed}: expected one chain, found {', '.join(map(str, found))}",
            hint="name --incarnation and --partition",
        )
    return found[0] if found else named.chain(load_settings(config, quiet=True))


def _of_chain(store: ParkedStore, chain: Chain) -> dict[ParkedName, ParkedEntry]:
    """What is parked of the chain and counts now."""
    return {name: entry for name, entry in store.entries().items() if name.chain == chain}


def _entry(store: ParkedStore, chain: Chain, sequence: int) -> ParkedEntry:
    for name, entry in _of_chain(store, chain).items():
        if name.sequence == sequence:
            return entry
    raise DataError(
        f"target {store.target}: expected message {sequence} of {chain} among the parked ones, found none",
        hint=ways(("to see what there is", _ls(store.target))),
        code="E-PARKED",
    )


def _ls(target: str) -> str:
    return command("parked ls", f"--target {shlex.quote(target)}")


def _row(store: ParkedStore, entry: ParkedEntry) -> dict[str, object]:
    from common.clock import format_time

    return {
        "target": store.target,
        "chain": str(entry.name.chain),
        "sequence": entry.name.sequence,
        "state": str(entry.state),
        "bytes": entry.size,
        "since": format_time(int(entry.since) * 1_000_000_000),
        "why": store.why(entry),
        "created": entry.name.created,
    }


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
