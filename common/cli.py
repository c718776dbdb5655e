"""What every command shares: how it ends, its common options, parameter types and output.

A command never shows a traceback: errors are one line each on stderr, with the exit code of their kind.
stdout carries results only, stderr everything else.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import json
import sys
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click

from common.chain import Chain
from common.errors import UsageError
from common.exits import end_with
from common.logs import escaped
from common.sequences import MAX_SEQUENCE
from common.settings.types import parse_duration, parse_size

if TYPE_CHECKING:
    from common.settings.root import Settings


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """What `parse` makes of a text: a `kind`, or ValueError with what is wrong."""

    def __init__(self, name: str, kind: type, parse: Callable[[str], Any]) -> None:
        self.name, self._kind, self._parse = name, kind, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return value if isinstance(value, self._kind) else self._parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _parse_sequence(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20 and 1 <= int(text) <= MAX_SEQUENCE):
        raise ValueError(f"expected a sequence from 1 to {MAX_SEQUENCE}, found {text!r:.60}")
    return int(text)


#: A stream sequence, 1 .. 2^63-1, as int.
SequenceType = functools.partial(Parsed, "sequence", int, _parse_sequence)
#: A duration such as 1h30m, as float seconds.
Duration = functools.partial(Parsed, "duration", float, parse_duration)
#: A size such as 64K or 1G, as int bytes.
Size = functools.partial(Parsed, "size", int, parse_size)

OutputRow = Sequence[object] | Mapping[str, object]


def print_json(value: object) -> None:
    """Print `value` as one JSON document; dataclasses as objects, bytes as text, sets and tuples as lists."""
    click.echo(json.dumps(value, indent=2, default=_plain))


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"no JSON form for {type(value).__name__}")


def table(rows: Iterable[OutputRow], columns: Sequence[str]) -> None:
    """Print the header `columns`, then each row: values in their order, or a mapping by column name.

    None shows as `-`. Columns of numbers are aligned to the right. On a terminal the header is bold. Each row is one
    line, however wide: what a terminal wraps can still be copied whole.
    """
    from rich.cells import cell_len  # here: a service prints no table
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    values = [[row.get(c) for c in columns] if isinstance(row, Mapping) else list(row) for row in rows]
    cells = [["-" if value is None else escaped(str(value)) for value in row] for row in values]
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    for index, name in enumerate(columns):
        is_number = _is_numeric([row[index] for row in values])
        shown.add_column(Text(name), justify="right" if is_number else "left", overflow="fold")
    for row in cells:
        shown.add_row(*map(Text, row))
    console = Console(force_terminal=sys.stdout.isatty())  # whatever FORCE_COLOR says: a program may read it
    console.width = sum(max(map(cell_len, column)) + 2 for column in zip(columns, *cells, strict=True))
    with console.capture() as printed:
        console.print(shown)
    for line in printed.get().splitlines():
        click.echo(line.rstrip())


def _is_numeric(values: list[object]) -> bool:
    return any(value is not None for value in values) and all(
        value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values
    )


P = ParamSpec("P")
T = TypeVar("T")

#: `-c FILE`; the command gets `config: str`.
config_option = click.option(
    "-c", "--config", envvar="FLOE_CONFIG", show_envvar=True, required=True, metavar="FILE", help="The configuration."
)

#: `--json`; the command gets `as_json: bool`.
json_option = click.option("-j", "--json", "as_json", is_flag=True, help="Print JSON.")


def run_command(fn: Callable[P, Any]) -> Callable[P, None]:
    """Run the body of a click command, a coroutine function or a plain one, and end as its outcome asks.

    Stands below the click decorators. The exit code is what `fn` returns (None: 0), or that of the error.
    Where `fn` has a parameter `named`, it gets what the options say of a chain as one `Named`, None for none.
    """
    takes_named = "named" in inspect.signature(fn).parameters

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        with end_with() as ending:
            if takes_named:
                kwargs["named"] = _named(kwargs)
            result = fn(*args, **kwargs)
            ending.code = (run_async(result) if inspect.iscoroutine(result) else result) or 0

    return wrapper


def _named(options: dict[str, Any]) -> Named | None:
    site, feed, *history = (options.pop(name) for name in ("site", "feed", "incarnation", "partition"))
    is_required = any(each.name == "site" and each.required for each in click.get_current_context().command.params)
    if not is_required and bool(site) is not bool(feed):
        raise UsageError("expected --site and --feed together")
    return Named(site, feed, *history) if is_required or site else None


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a new event loop: uvloop's where it is installed (the extra `fast`).

    Raises Unforeseen for an error in the background that nobody else takes.
    """
    from common.tasks import to_its_end

    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with suppress(ImportError):
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(to_its_end(main))


Command = Callable[..., Any]

#: `--target STREAM`; the command gets `target: str`.
target_option = click.option("--target", required=True, metavar="STREAM", help="The target.")

#: `--yes`; the command gets `yes: bool`.
yes_option = click.option("--yes", is_flag=True, help="Do not ask.")

#: `--dry-run`; the command gets `dry_run: bool`.
dry_run_option = click.option("--dry-run", is_flag=True, help="Show only.")


def history_options(command: Command) -> Command:
    """`[--incarnation] [--partition]`, None where they are not given: the newest, the only one."""
    partition = click.option("--partition", type=click.IntRange(0, 65535), help="The partition, if several.")
    incarnation = click.option("--incarnation", type=click.IntRange(0, 9999), help="Else the newest.")
    return incarnation(partition(command))


def chain_options(command: Command, **given: Any) -> Command:
    """`--site --feed [--incarnation] [--partition]`: one chain."""
    given = given or {"required": True}
    feed = click.option("--feed", help="The feed.", **given)
    site = click.option("--site", help="The site.", **given)
    return site(feed(history_options(command)))


def any_chain_options(command: Command) -> Command:
    """As `chain_options`, where a command can do without; site and feed are empty then."""
    return chain_options(command, default="")


@dataclass(frozen=True, slots=True)
class Named:
    """One chain as an operator names it. `incarnation`, `partition` None: the newest, the only one.

    Raises UsageError for what no chain can be called.
    """

    site: str
    feed: str
    incarnation: int | None = None
    partition: int | None = None

    def __post_init__(self) -> None:
        try:
            Chain(self.site, self.feed, self.incarnation or 0, self.partition or 0)
        except ValueError as error:
            raise UsageError(str(error)) from None

    def chain(self, settings: Settings, held: Collection[Chain] = (), carried: Collection[Chain] = ()) -> Chain:
        """The chain that is meant, of the archive or of `held`: what a target remembers of others.

        Blocking, unless it is named in full and held. `carried`: where a target has a position. Raises
        UsageError for what is not there, and where the target is not at the newest incarnation yet.
        """
        from common.open import open_chains
        from common.segments.archive import among
        from common.segments.keys import configured, one

        site, feed = self.site, self.feed
        if self.incarnation is not None and self.partition is not None:
            named = Chain(site, feed, self.incarnation, self.partition)
            if named in held or named in carried:
                return named
        feeds, others = configured(settings), {*held, *carried}
        found = among(
            open_chains(settings),
            site,
            feed,
            lambda known: one({*known, *others}, feeds, site, feed, self.incarnation, self.partition),
        )
        self._refuse_doubt(found, carried)
        return found

    def _refuse_doubt(self, found: Chain, carried: Collection[Chain]) -> None:
        at = [c.incarnation for c in carried if (c.site, c.feed) == (self.site, self.feed)]
        if self.incarnation is None and at and max(at) < found.incarnation:
            raise UsageError(
                f"{self.site}/{self.feed}: incarnation {found.incarnation:04d} is the newest, and the target "
                f"still carries {max(at):04d}",
                hint=f"say --incarnation {max(at)} or --incarnation {found.incarnation}",
            )


def confirm(question: str, yes: bool) -> None:
    """Ask, on stderr, unless `yes`. Raises UsageError where nobody can be asked, Abort for a no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("expected --yes where nobody can be asked")
    click.confirm(question, abort=True, err=True)
