"""Common parts of all commands: exit, options, parameter types and output; and `floe version` and `floe completion`.

Without `--debug` a command never shows a traceback: errors are one line each on stderr, with the exit code of their
kind. stdout carries results only, stderr everything else.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click

from common.chain import CHAIN_FORM, FEED_PATTERN, Chain, parse_feed_parts
from common.clock import NS_PER_S, format_time, parse_time
from common.errors import UsageError
from common.exits import CONTEXT_META_KEY, exit_with_code
from common.imports import COMPILED_MODULES, load_compiled
from common.logs import escape
from common.metrics import version
from common.sequences import MAX_SEQUENCE
from common.settings.types import StyledCell, parse_duration, parse_size

if TYPE_CHECKING:
    from common.settings.root import Settings


class ParsedType(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """A parameter type: `parse` makes a `kind` of a text, or raises ValueError that names the problem."""

    def __init__(self, name: str, kind: type, parse: Callable[[str], Any]) -> None:
        self.name, self._kind, self._parse = name, kind, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return value if isinstance(value, self._kind) else self._parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def parse_sequence(text: str) -> int:
    """Parse a stream sequence, 1 .. 2^63-1. Raises ValueError."""
    if not (text.isascii() and text.isdigit() and len(text) < 20 and 1 <= int(text) <= MAX_SEQUENCE):
        raise ValueError(f"expected a sequence from 1 to {MAX_SEQUENCE}, found {text!r:.60}")
    return int(text)


def _parse_interval(text: str) -> float:
    if not 1 <= (seconds := parse_duration(text)) <= 86_400:
        raise ValueError(f"expected from 1s to 1d, found {text!r:.60}")
    return seconds


#: A stream sequence, 1 .. 2^63-1, as int.
SequenceType = functools.partial(ParsedType, "sequence", int, parse_sequence)
#: A duration such as 1h30m, as float seconds.
Duration = functools.partial(ParsedType, "duration", float, parse_duration)
#: A duration between two checks, 1s to 1d, as float seconds.
Interval = functools.partial(ParsedType, "duration", float, _parse_interval)
#: A size such as 64K or 1G, as int bytes.
Size = functools.partial(ParsedType, "size", int, parse_size)

MOMENT_FORM = "a time such as 2026-01-02T03:04:05Z (with its zone, from 1970 on), -2h or 2h ago"
_AGO = re.compile(r"-?\s*(\S(?:.*\S)?)\s+ago|-?(\S+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class RequestedTime:
    """A time as the user gave it. `text`: RFC 3339; empty if it is `seconds_ago`, seconds before now."""

    text: str = ""
    seconds_ago: float = 0.0

    @classmethod
    def parse(cls, text: str) -> RequestedTime:
        """Parse `text`. Raises ValueError."""
        with suppress(ValueError):
            if parse_time(text) >= 0:  # far earlier ones do not fit into 64 bits, as nanoseconds
                return cls(text)
        if match := _AGO.fullmatch(text):
            with suppress(ValueError):
                return cls(seconds_ago=parse_duration((match[1] or match[2]).replace(" ", "")))
        raise ValueError(f"expected {MOMENT_FORM}, found {text!r:.60}")

    def at(self, now: float) -> int:
        """Return nanoseconds since 1970 UTC. `now`: seconds since 1970, from which `seconds_ago` counts."""
        return parse_time(self.text) if self.text else round((now - self.seconds_ago) * NS_PER_S)


Bounds = tuple[int | None, int | None]  # from and up to, in ns since 1970; None: no bound


def resolve_time(now: float, requested: RequestedTime | None) -> int | None:
    """Return `requested.at(now)`; None if `requested` is None."""
    return None if requested is None else requested.at(now)


#: A time, as RequestedTime.
Time = functools.partial(ParsedType, "time", RequestedTime, RequestedTime.parse)

OutputRow = Sequence[object] | Mapping[str, object]


def print_json(value: object) -> None:
    """Print `value` as one JSON document; dataclasses as objects, bytes as text, sets and tuples as lists."""
    click.echo(json.dumps(value, indent=2, default=_json_value))


def _json_value(value: object) -> Any:
    if isinstance(value, Chain):
        return value.log_context()
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


def is_terminal() -> bool:
    """True if stdout is a terminal, so that people read it; FORCE_COLOR does not count."""
    return sys.stdout.isatty()


def terminal_width() -> int | None:
    """Return the columns of the terminal on stdout; None if a program reads stdout."""
    return shutil.get_terminal_size().columns if is_terminal() else None


#: The column that is never left out: on a narrow terminal it goes below its row.
WHY_COLUMN = "why"


def _fitting_columns(columns: Sequence[str], widths: Sequence[int], width: int | None) -> list[int]:
    """Return the columns to show side by side: all, or without `why` as many from the left as fit, one at least."""
    kept = sorted(range(len(columns)), key=lambda index: columns[index] == WHY_COLUMN)  # `why` goes first
    while width is not None and len(kept) > 1 and sum(widths[index] + 2 for index in kept) - 2 > width:
        kept.pop()
    return sorted(kept)


def truncate(line: str, width: int) -> str:
    """Return `line` cut to `width` columns of a terminal, with an ellipsis if it is longer."""
    from rich.cells import cell_len, set_cell_size  # here: as in `print_table`

    return line if cell_len(line) <= width else f"{set_cell_size(line, width - 1)}…"


def print_table(rows: Iterable[OutputRow], columns: Sequence[str], width: int | None = None) -> None:
    """Print the header `columns`, then each row: values in their order, or a mapping by column name.

    None shows as `-`. Columns of numbers are aligned to the right. On a terminal the header is bold and `StyledCell`
    cells have their colours, unless NO_COLOR is set. Each row is one line, at any width: a row that a terminal wraps
    can still be copied whole. If a row is wider than `width`, the column `why` goes below its row, wrapped between
    words, and columns are left out from the right until the rest fits.
    """
    from rich.cells import cell_len  # here: a service prints no table

    values = [[row.get(c) for c in columns] if isinstance(row, Mapping) else list(row) for row in rows]
    styles = [[value.style if isinstance(value, StyledCell) else "" for value in row] for row in values]
    values = [[value.text if isinstance(value, StyledCell) else value for value in row] for row in values]
    cells = [["-" if value is None else escape(str(value)) for value in row] for row in values]
    lengths = [[len(cell) if cell.isascii() else cell_len(cell) for cell in row] for row in [list(columns), *cells]]

    widths = [*map(max, zip(*lengths, strict=True))]
    kept = _fitting_columns(columns, widths, width)
    has_below = len(kept) < len(columns) and WHY_COLUMN in columns
    numeric = [_is_numeric([row[index] for row in values]) for index in range(len(columns))]
    has_colours = is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def print_row(row: Sequence[str], taken: Sequence[int], paint: Callable[[int], str]) -> None:
        parts = []
        for index in kept:
            text, padding = row[index], " " * (widths[index] - taken[index])
            if has_colours and text and (style := paint(index)):
                colour = None if style in ("bold", "dim") else style
                text = click.style(text, colour, bold=style == "bold" or None, dim=style == "dim" or None)
            parts.append(padding + text if numeric[index] else text + padding)
        click.echo("  ".join(parts).rstrip())

    print_row(columns, lengths[0], lambda _: "bold")
    for row, taken, style in zip(cells, lengths[1:], styles, strict=True):
        print_row(row, taken, style.__getitem__)
        if has_below and (reason := row[columns.index(WHY_COLUMN)]) != "-":
            text = textwrap.fill(reason, max(1, (width or 0) - 4), break_long_words=False, break_on_hyphens=False)
            click.echo(textwrap.indent(text, "    "))


def _is_numeric(values: list[object]) -> bool:
    return any(value is not None for value in values) and all(
        value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values
    )


P = ParamSpec("P")
T = TypeVar("T")

#: The configuration that is used if none is named.
DEFAULT_CONFIG = Path("/etc/floe/floe.yaml")


def config_file(ctx: click.Context, _param: click.Parameter, value: str | None) -> str:
    """Return the file that is named, that of FLOE_CONFIG, or the default.

    Raises click.UsageError if none is named and the default does not exist.
    """
    if not value and not DEFAULT_CONFIG.exists():
        message = f"expected a configuration: -c FILE, FLOE_CONFIG or {DEFAULT_CONFIG}; found none of them"
        raise click.UsageError(message, ctx)
    return value or str(DEFAULT_CONFIG)


def config_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `-c FILE` and `--context NAME`; the command gets `config: str`, and `load_settings` uses the context."""

    def keep(ctx: click.Context, _param: click.Parameter, name: str) -> None:
        ctx.meta[CONTEXT_META_KEY] = name

    context = click.option(
        "--context",
        default="",
        expose_value=False,
        callback=keep,
        metavar="NAME",
        help="A context of the `nats` command; it replaces `nats` of the configuration.",
    )
    file = click.option(
        "-c",
        "--config",
        envvar="FLOE_CONFIG",
        show_envvar=True,
        callback=config_file,
        metavar="FILE",
        help=f"The configuration; default: {DEFAULT_CONFIG}.",
    )
    return file(context(command))


#: `-j`, `--json`; the command gets `as_json: bool`.
json_option = click.option("-j", "--json", "as_json", is_flag=True, help="Print JSON.")


def run_command(fn: Callable[P, Any]) -> Callable[P, None]:
    """Run the body of a click command, a coroutine function or a plain one, and exit according to its outcome.

    Place it below the click decorators. The exit code is the returned value (None: 0), or that of the error."""

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        with exit_with_code() as ending:
            result = fn(*args, **kwargs)
            ending.code = (run_async(result) if inspect.iscoroutine(result) else result) or 0

    return wrapper


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a new event loop: uvloop's if it is installed (the extra `fast`).

    Raises UnexpectedError for an error in the background that has no owner.
    """
    from common.tasks import run_until_fatal

    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with suppress(ImportError):
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(run_until_fatal(main))


Command = Callable[..., Any]


def config_command(fn: Callable[P, Any]) -> Command:
    """Run `fn` as `run_command` does, with `config: str` and `as_json: bool`; place it below the click decorators."""
    return json_option(config_option(run_command(fn)))


#: `--target STREAM`; the command gets `target: str`.
target_option = click.option("--target", required=True, metavar="STREAM", help="The target.")

#: `--yes`; the command gets `yes: bool`.
yes_option = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")

#: `--wide`; the command gets `is_wide: bool`.
wide_option = click.option("--wide", "is_wide", is_flag=True, help="All columns, uncut.")

#: `--dry-run`; the command gets `dry_run: bool`.
dry_run_option = click.option("--dry-run", is_flag=True, help="Show the changes; make none.")


#: `--since TIME`, inclusive, and `--until TIME`, exclusive; the command gets `RequestedTime | None`.
since_option = click.option("--since", type=Time(), help="From this time on: 2026-01-02T03:04:05Z, 2h (ago).")
until_option = click.option("--until", type=Time(), help="Up to this time, exclusive.")

#: `--from-sequence N` and `--to-sequence N`, both inclusive; the command gets `int | None`.
from_sequence_option = click.option("--from-sequence", type=SequenceType(), help="The first sequence.")
to_sequence_option = click.option("--to-sequence", type=SequenceType(), help="The last sequence.")


#: `--metrics-textfile FILE`; the command gets `textfile: Path | None`, for `check_textfile`.
textfile_option = click.option(
    "--metrics-textfile",
    "textfile",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the metrics of the run there, for node_exporter: NAME.prom.",
)


def check_textfile(path: Path | None) -> None:
    """Check that the file can be written, before a run that takes long. Raises UsageError."""
    if path and (path.exists() and not path.is_file()):
        raise UsageError(f"--metrics-textfile {path}: expected the name of a file, found something else")
    if path and not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"--metrics-textfile {path}: expected a file in a writable folder, found none")


def check_stream_name(option: str, name: str | None) -> None:
    """Check that `name` can be the name of a stream; None: not given. Raises UsageError."""
    if name is not None and not FEED_PATTERN.fullmatch(name):
        form = "a stream name, 1 to 255 characters without space . * > / \\"
        raise UsageError(f"{option}: expected {form}, found {name!r:.80}")


def range_options(command: Command) -> Command:
    """Add the bounds of a range, as sequences and as times."""
    return from_sequence_option(to_sequence_option(since_option(until_option(command))))


def check_range(first: int | None, last: int | None, since: RequestedTime | None, until: RequestedTime | None) -> None:
    """Raise UsageError for two bounds at one end, and for sequences in the wrong order."""
    if first is not None and since is not None:
        raise UsageError("expected one of --from-sequence and --since, found both")
    if last is not None and until is not None:
        raise UsageError("expected one of --to-sequence and --until, found both")
    if first is not None and last is not None and first > last:
        raise UsageError(f"--from-sequence {first} is greater than --to-sequence {last}")


def resolve_range(now: float, since: RequestedTime | None, until: RequestedTime | None) -> Bounds:
    """Return both times in ns since 1970, None for no bound. Raises UsageError if nothing lies between them."""
    begin, end = resolve_time(now, since), resolve_time(now, until)
    if begin is not None and end is not None and begin >= end:
        raise UsageError(f"--since {format_time(begin)}: expected before --until {format_time(end)}")
    return begin, end


@dataclass(frozen=True, slots=True)
class ChainSelector:
    """One chain as an operator names it. `incarnation`, `partition` None: the newest, the only one."""

    site: str
    feed: str
    incarnation: int | None = None
    partition: int | None = None

    @classmethod
    def parse(cls, text: str) -> ChainSelector:
        """Parse `SITE/FEED[/INCARNATION[/PARTITION]]`. Raises ValueError."""
        return cls(*parse_feed_parts(text))

    def resolve(self, settings: Settings, tracked: Collection[Chain] = (), delivered: Collection[Chain] = ()) -> Chain:
        """Return the chain that is meant, among those of the archive, `tracked` and `delivered`.

        `tracked`: chains that a target remembers. `delivered`: chains of which a target has a position. Blocking,
        unless all parts are named and one of the two has the chain. Raises UsageError if there is no such chain, and if
        the target is not at the newest incarnation yet.
        """
        from common.archive.catalog import ChainName, configured_feeds, match_chains, resolve_chain
        from common.open import open_for_view

        name = ChainName(self.site, self.feed, self.incarnation, self.partition)
        if self.incarnation is not None and self.partition is not None:
            named = Chain(self.site, self.feed, self.incarnation, self.partition)
            if named in tracked or named in delivered:
                return named
        feeds, others = configured_feeds(settings), {*tracked, *delivered}
        chains = open_for_view(settings)[1]
        found = match_chains(chains, name, lambda known: resolve_chain({*known, *others}, feeds, name))
        self._refuse_ambiguous(found, delivered)
        return found

    def _refuse_ambiguous(self, found: Chain, delivered: Collection[Chain]) -> None:
        at = [c.incarnation for c in delivered if (c.site, c.feed) == (self.site, self.feed)]
        if self.incarnation is None and at and max(at) < found.incarnation:
            feed = f"{self.site}/{self.feed}"
            raise UsageError(
                f"{feed}: incarnation {found.incarnation:04d} is the newest, and the target is at {max(at):04d}",
                hint=f"name one: {feed}/{max(at):04d} or {feed}/{found.incarnation:04d}",
            )


CHAIN_TYPE = ParsedType("chain", ChainSelector, ChainSelector.parse)

#: `SITE/FEED[/INCARNATION[/PARTITION]]`; the command gets `selector: ChainSelector`.
chain_argument = click.argument("selector", type=CHAIN_TYPE, metavar=CHAIN_FORM)

#: Any chains of the archive; the command gets `what: str | None`.
chains_argument = click.argument("what", required=False, metavar="[SITE[/FEED[/INC[/PART]]]]")

#: One chain, for a command that can do without; the command gets `selector: ChainSelector | None`.
optional_chain_argument = click.argument("selector", type=CHAIN_TYPE, required=False, metavar=f"[{CHAIN_FORM}]")


def confirm(question: str, yes: bool, *, is_needed: bool = True) -> None:
    """Ask for a confirmation on stderr, unless `yes`. Raises UsageError if stdin is no terminal, Abort for a no.

    Not `is_needed`: if stdin is no terminal, the command proceeds all the same, as a pasted command in a script.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        if not is_needed:
            return
        raise UsageError("expected --yes without a terminal")
    # The event loop's own handler only cancels a task, and the terminal would still be read.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        click.confirm(question, abort=True, err=True)
    finally:
        signal.signal(signal.SIGINT, before)


#: The distributions that Floe runs on, in the order in which `floe version` lists them.
LISTED_DISTRIBUTIONS = ("nats-py", "pyarrow", "pyspark", "boto3", "uvloop")


def installed_versions() -> dict[str, str | None]:
    """Return the versions of Floe, of Python, and of each of `LISTED_DISTRIBUTIONS`; None for one that is not
    installed. `native`: the compiled modules in use, None without any.
    """
    found: dict[str, str | None] = {"floe": version(), "python": sys.version.split()[0]}
    for name in LISTED_DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    compiled = [name.rpartition("._")[2] for name in COMPILED_MODULES if load_compiled(name) is not None]
    return {**found, "native": ", ".join(compiled) or None}


@click.command("version")
@json_option
@run_command
def show_version(as_json: bool) -> None:
    """Show the versions of Floe, of Python, and of the libraries that Floe runs on; `-` or null if not installed.

    \b
    Example: floe version --json
    """
    found = installed_versions()
    print_json(found) if as_json else print_table(list(found.items()), ("part", "version"))


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@run_command
def completion(shell: str) -> None:
    """Print the code with which a shell completes the commands and options of floe.

    \b
    To load it in every new shell:
      echo 'eval "$(floe completion bash)"' >> ~/.bashrc
      echo 'eval "$(floe completion zsh)"' >> ~/.zshrc
      floe completion fish > ~/.config/fish/completions/floe.fish

    \b
    Example: floe completion bash
    """
    from click.shell_completion import get_completion_class

    kind: Any = get_completion_class(shell)
    completer = kind(click.get_current_context().find_root().command, {}, "floe", "_FLOE_COMPLETE")
    click.echo(completer.source_template % completer.source_vars())
