"""The record of operators' decisions: one small object for each, stored before the decision takes effect.

    {prefix}/_floe/audit/{time}[/site={site}]/{digest}.json

The names sort by time, so that a listing costs no more than the records of the times that are asked for. Floe never
changes or deletes a record.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import click
import msgspec
from pydantic import SecretStr

from common import cli
from common.archive.documents import ChainStore, Document
from common.clock import NS_PER_S, SystemClock, format_time, parse_time
from common.documents import JsonCodec
from common.errors import DataError, FloeError, Unavailable
from common.exits import ARGUMENTS_META_KEY, report_error
from common.open import load_settings, open_for_view
from common.service.process import ThreadPool

if TYPE_CHECKING:
    from common.settings.root import Settings

AUDIT_COLUMNS = ("at", "by", "from", "site", "decision", "note", "command")
DEFAULT_PERIOD_NS = 30 * 86_400 * NS_PER_S
HIDDEN = "***"  # in place of a secret
MAX_NOTE = 1000  # characters
PAGE_KEYS = 1000  # keys of one listing
PARALLEL_READS = 8

_arguments: tuple[str, ...] = ()  # of the command of this process, once they are parsed
_note = ""


class AuditRecord(msgspec.Struct, frozen=True, tag_field="format_version", tag=1, rename={"origin": "from"}):
    """One decision. `at`: RFC 3339, to the millisecond. `by`: user and host. `origin`: the address of the SSH client,
    the terminal and the user before sudo, as far as they are known. `site`: of the configuration, may be empty.

    `by` and `origin` are what the host reports: only the credential of the bucket proves anything.
    """

    at: str
    by: str
    origin: str
    site: str
    decision: str
    note: str
    command: str


_CODEC = JsonCodec(AuditRecord)


def operator_name() -> str:
    """Return `user@host`."""
    name = "?"
    with suppress(OSError, KeyError):
        name = getpass.getuser()
    return f"{name}@{socket.gethostname()}"


def _origin() -> str:
    found = []
    if client := os.environ.get("SSH_CONNECTION", "").split():
        found.append(f"ssh from {client[0]}")
    with suppress(OSError, ValueError, AttributeError):
        found.append(os.ttyname(sys.stdin.fileno()))
    if user := os.environ.get("SUDO_USER"):
        found.append(f"sudo by {user}")
    return ", ".join(found)


def _secrets(value: object) -> Iterator[str]:
    """Yield the secrets in the values of a configuration."""
    if isinstance(value, SecretStr):
        yield value.get_secret_value()
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _secrets(each)


def _hide_secrets(text: str, settings: Settings) -> str:
    for secret in filter(None, _secrets(settings.model_dump())):
        text = text.replace(secret, HIDDEN)
    return text


def _keep_note(ctx: click.Context, _param: click.Parameter, note: str) -> None:
    global _arguments, _note
    if len(note) > MAX_NOTE:
        raise click.BadParameter(f"expected at most {MAX_NOTE} characters, found {len(note)}")
    _arguments, _note = ctx.meta.get(ARGUMENTS_META_KEY, ()), note


#: `--note`, for `decide`, which takes it from the context.
note_option = click.option(
    "--note", default="", expose_value=False, callback=_keep_note, help="Reason; `floe audit ls` shows it."
)


def decision_command(command: cli.Command) -> cli.Command:
    """Add `-c`, `--json` and `--note`, as `config_command` does, for a command that calls `decide`."""
    return note_option(cli.config_command(command))


def given_note(settings: Settings) -> str:
    """Return the value of `--note` without the secrets of the configuration; empty if it was not given."""
    return _hide_secrets(_note, settings)


async def decide(
    settings: Settings, question: str, yes: bool = True, *, is_needed: bool = True, chains: ChainStore | None = None
) -> None:
    """Ask as `cli.confirm` does, then store a record of the decision: the last line without the question mark.

    `chains`: the open store, if there is one. Raises the errors of `confirm`, and Unavailable (E-AUDIT) if the record
    cannot be stored: the decision must not take effect then.
    """
    cli.confirm(question, yes, is_needed=is_needed)
    with closing(ThreadPool("audit", 1)) as threads:
        await threads.run(_record, settings, question, chains or open_for_view(settings)[1])


def decide_blocking(settings: Settings, question: str, yes: bool = True, *, is_needed: bool = True) -> None:
    """Do the same without an event loop."""
    cli.confirm(question, yes, is_needed=is_needed)
    _record(settings, question, open_for_view(settings)[1])


def _record(settings: Settings, question: str, chains: ChainStore) -> None:
    at_ns = int(SystemClock().now() * 1000) * 1_000_000
    texts = question.rpartition("\n")[2].removesuffix("?"), _note, *_arguments
    decision, note, *arguments = (_hide_secrets(each, settings) for each in texts)
    command = shlex.join(["floe", *arguments])  # quoted last: quotes would hide a part of a secret
    record = AuditRecord(format_time(at_ns), operator_name(), _origin(), settings.site, decision, note, command)
    try:
        _document(chains, _key_of(chains, record)).add(record)
    except FloeError as error:
        raise Unavailable(
            f"the record of this decision cannot be stored, so it has no effect: {error.message}",
            hint="grant the right to put objects below _floe/audit/, or wait for the store, then run the command again",
            code="E-AUDIT",
        ) from error


def _document(chains: ChainStore, key: str) -> Document[AuditRecord]:
    def check(found: AuditRecord) -> str:
        return "" if _key_of(chains, found) == key else "expected the time, the site and the digest of its key"

    return Document(chains.objects, key, _CODEC.encode, _CODEC.decode, check=check)


def _key_of(chains: ChainStore, record: AuditRecord) -> str:
    """Return the key that names time, site and content. Raises ValueError if the record has an invalid time."""
    digest = hashlib.sha256(_CODEC.encode(record)).hexdigest()
    return chains.layout.audit_record(parse_time(record.at), record.site, digest)


def list_keys(chains: ChainStore, begin: int, end: int | None) -> Iterator[list[str]]:
    """Yield the keys of the records from `begin` on and before `end`, in ns since 1970, a page at a time."""
    after = chains.layout.audit_prefix(begin)
    last = None if end is None else chains.layout.audit_prefix(end)
    while page := chains.objects.list(chains.layout.audit_prefix(), start_after=after, limit=PAGE_KEYS):
        yield [info.key for info in page if last is None or info.key < last]
        if len(page) < PAGE_KEYS or (last is not None and page[-1].key >= last):
            return
        after = page[-1].key


@click.group()
def audit() -> None:
    """Show the decisions of operators."""


@audit.command("ls")
@cli.since_option
@cli.until_option
@cli.config_command
def audit_ls(config: str, since: cli.RequestedTime | None, until: cli.RequestedTime | None, as_json: bool) -> int:
    """List the decisions of operators: those of the last 30 days, or of the times given.

    Each is recorded before it takes effect: a command that failed afterwards is listed too. by, from: as the host of
    the command reported them. Exit 3 if a record is damaged: the others are listed.

    \b
    Example: floe audit ls -c central.yaml --since 7d --json
    """
    clock, code, rows = SystemClock(), 0, list[dict[str, Any]]()
    begin, end = cli.resolve_range(clock.now(), since, until)
    if begin is None:
        begin = (int(clock.now() * NS_PER_S) if end is None else end) - DEFAULT_PERIOD_NS

    def read(key: str) -> AuditRecord | FloeError | None:
        try:
            return _document(chains, key).read()
        except DataError as error:
            return error

    _, chains = open_for_view(load_settings(config, quiet=True))
    with ThreadPoolExecutor(PARALLEL_READS) as pool:
        for keys in list_keys(chains, begin, end):
            for found in pool.map(read, keys):
                if isinstance(found, FloeError):
                    code = report_error(found)
                elif found is not None:
                    rows.append(
                        {key: each for key, each in msgspec.to_builtins(found).items() if key != "format_version"}
                    )
    cli.print_json(rows) if as_json else cli.print_table(rows, AUDIT_COLUMNS)
    return code
