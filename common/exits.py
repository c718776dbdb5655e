"""The end of a command: its errors as lines on stderr, its exit code, and the commands to paste next.

0 done, 1 failure, 2 usage, 3 differences found, 4 another writer, 75 try again later, 77 refused,
78 configuration; 130 interrupted, 141 the reader of the output is gone.

The commands to paste are built from values, with the quoting of a shell. Those about the segments of a chain and its
gaps are in `common/archive/`, those that repeat a replay or a restore beside their requests; all are built by
`floe_command`.
"""

import asyncio
import errno
import os
import select
import shlex
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import click

from common.chain import Chain
from common.errors import FloeError

EXIT_DIFFERENCES = 3  # done, but something is missing, damaged or needs a decision
EXIT_RETRY_LATER = 75  # the same command, run again later, continues
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


@dataclass(slots=True)
class CommandEnding:
    """The exit code of a command that raises nothing."""

    code: int = 0


@contextmanager
def exit_with_code() -> Iterator[CommandEnding]:
    """Run a block, then exit: with the code that it set, or that of `report_error`. Click's exceptions pass through."""
    ending = CommandEnding()
    try:
        yield ending
        sys.stdout.flush()
    except (click.ClickException, click.Abort, click.exceptions.Exit, SystemExit):
        raise
    except BaseException as error:
        ending.code = report_error(error)
    if ending.code:
        sys.exit(ending.code)


def report_error(error: BaseException) -> int:
    if isinstance(error, BrokenPipeError) and _is_stdout_closed():
        _discard_output()
        return EXIT_BROKEN_PIPE
    causes = [cause for cause in _causes(error) if not isinstance(cause, asyncio.CancelledError)]
    if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
        return EXIT_INTERRUPTED
    errors = [_as_floe_error(cause) for cause in causes or [error]]
    for line in dict.fromkeys(explained.as_text() for explained in errors):
        _to_stderr(line)
    if is_debug():
        _to_stderr("".join(traceback.format_exception(error)))
    return errors[0].exit_code


def is_debug() -> bool:
    """True if tracebacks are wanted: `floe --debug …` or FLOE_DEBUG=1."""
    return _has_flag("debug") or os.environ.get("FLOE_DEBUG", "") not in ("", "0")


def is_verbose() -> bool:
    """True if a command that ends by itself shows its log: `floe -v …`, or as `is_debug`."""
    return _has_flag("verbose") or is_debug()


def _has_flag(flag: str) -> bool:
    """True if a flag is given before the command."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.find_root().params.get(flag))


def _causes(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _causes(inner)
    else:
        yield error


def _as_floe_error(error: BaseException) -> FloeError:
    if isinstance(error, FloeError):
        return error
    if isinstance(error, OSError) and error.strerror:
        code = "E-DISK" if error.errno in _DISK_ERRORS else "E-OS"
        path = f"{error.filename}: " if error.filename else ""
        return FloeError(f"{path}{error.strerror}", code=code)
    return FloeError(
        f"{type(error).__name__}: {error}",
        hint="this is a defect; --debug or FLOE_DEBUG=1 shows more",
        code="E-UNEXPECTED",
    )


def _to_stderr(text: str) -> None:
    with suppress(OSError, ValueError):  # stderr may be closed; the exit code still reports the error
        click.echo(text, err=True)


def _is_stdout_closed() -> bool:
    """True if the reader of stdout is gone; a broken pipe may also be one of this process's connections."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
    except (OSError, ValueError):
        return False


def _discard_output() -> None:
    # The rest of the buffer would raise again when the interpreter ends.
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


_source = _path = "site.yaml"  # until a configuration is read from a file
_context = ""
CONTEXT_META_KEY = "floe.context"  # key of the option `--context` in the `meta` of click's context
ARGUMENTS_META_KEY = "floe.arguments"  # key of the words of the command line there, which `floe` sets


def set_config(path: str) -> None:
    """Remember that `path` holds the configuration, for use in the context of `--context`. The last call wins."""
    global _source, _path, _context
    _source, _path, _context = path, os.path.abspath(path), requested_context()


def requested_context() -> str:
    """Return the context that `--context` names; empty without it."""
    called = click.get_current_context(silent=True)
    return "" if called is None else str(called.meta.get(CONTEXT_META_KEY, ""))


def config_source() -> str:
    return _source


#: The command that installs the packages of every extra, from the lock of a checkout: no package index has Floe.
INSTALL_ALL = "in a checkout of Floe: pip install --require-hashes -r requirements.lock"


def choices(*found: str | tuple[str, ...]) -> str:
    """Return a hint that lists choices, each on its own lines: words, or a tuple of words and commands.

    Each command has a line for itself, so that the whole line can be pasted.
    """
    return "\n".join(each if isinstance(each, str) else "\n".join([f"{each[0]}:", *each[1:]]) for each in found)


def floe_command(words: str, *rest: str) -> str:
    """Return `floe {words} -c FILE {rest}`, in the same context; FILE is quoted for a shell and valid in any folder."""
    context = ["--context", shlex.quote(_context)] if _context else []
    return " ".join(["floe", words, "-c", shlex.quote(_path), *context, *filter(None, rest)])


def nats_command(words: str, *rest: object) -> str:
    """Return `nats {words} {rest}`, with `rest` quoted for a shell."""
    return shlex.join(["nats", *words.split(), *map(str, rest)])


def name_argument(site: str, feed: str, incarnation: int | None = None, partition: int | None = None) -> str:
    """Return the argument that names a feed, an incarnation or a chain, as far as the parts are given."""
    numbers = ["" if incarnation is None else f"/{incarnation:04d}", "" if partition is None else f"/{partition}"]
    return shlex.quote("".join([f"{site}/{feed}", *numbers]))


def option_words(given: Mapping[str, object]) -> list[str]:
    """Return options by their names, with quoted values: True gives an option alone, a list one for each of its values,
    any other value that is not true none.
    """
    words = list[str]()
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value:
            words += [f"{option} {shlex.quote(str(each))}" for each in (value if isinstance(value, list) else [value])]
    return words


# Stops of a feed


def resolve_command(feed: str | Chain, options: str = "") -> str:
    """Return the command that resolves a stop of a feed, or of one chain of it."""
    return floe_command("egress resolve", *_feed_argument(str(feed), options))


def believe_command(chain: Chain) -> str:
    return resolve_command(chain if chain.partition else chain.feed, "--believe-listing")


def repartition_command(feed: str) -> str:
    return floe_command("egress repartition", *_feed_argument(feed))


def _feed_argument(feed: str, options: str = "") -> tuple[str, ...]:
    named = shlex.quote(feed)
    return (options, "--", named) if named.startswith("-") else (named, options)


def restore_command(chain: Chain, *, elsewhere: bool = False) -> str:
    """Return the command that restores the stream. `elsewhere`: with effects outside of its own subjects."""
    return floe_command("restore", name_argument(chain.site, chain.feed), "--allow-elsewhere" if elsewhere else "")


def import_command(folder: Path | str, feed: Chain) -> str:
    """Return the command that imports a backup into a feed, or continues."""
    return floe_command("import", shlex.quote(str(folder)), name_argument(feed.site, feed.feed))


# The archive


def list_command(chain: Chain) -> str:
    return floe_command("segments ls", shlex.quote(str(chain)))


def verify_command(named: str) -> str:
    """Return the command that verifies what `named` names: a site, a feed, an incarnation or a chain."""
    return floe_command("segments verify", shlex.quote(named))


# Stops of a target and of its chains


def checkpoint_command(target: str, *options: str) -> str:
    return floe_command("checkpoint set", f"--target {shlex.quote(target)}", *options)


def position_command(target: str, chain: Chain, sequence: int) -> str:
    """Return the command that continues `chain` at `sequence`."""
    return checkpoint_command(target, shlex.quote(str(chain)), f"--sequence {sequence}")


def resume_command(target: str, chain: Chain | None) -> str:
    """Return the command that resumes `chain`; None: all chains of the target."""
    named = "--all" if chain is None else shlex.quote(str(chain))
    return floe_command("chain resume", f"--target {shlex.quote(target)}", named)


def parked_command(target: str) -> str:
    return floe_command("parked ls", f"--target {shlex.quote(target)}")
