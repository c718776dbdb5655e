"""What every command shares: how it ends, its common options, parameter types and output.

A command never shows a traceback: errors are one line each on stderr, with the exit code of their kind.
stdout carries results only, stderr everything else.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import click

from common.open import load_settings, open_chains, open_store
from common.service.click_types import Duration, SequenceType, Size
from common.service.exits import end_with
from common.service.output import print_json, table

__all__ = [
    "Duration",
    "SequenceType",
    "Size",
    "config_option",
    "json_option",
    "load_settings",
    "open_chains",
    "open_store",
    "print_json",
    "run_async",
    "run_command",
    "table",
]

P = ParamSpec("P")
T = TypeVar("T")

#: `-c FILE`; the command gets `config: str`.
config_option = click.option(
    "-c",
    "--config",
    envvar="FLOE_CONFIG",
    show_envvar=True,
    required=True,
    metavar="FILE",
    help="The configuration.",
)

#: `--json`; the command gets `as_json: bool`.
json_option = click.option("-j", "--json", "as_json", is_flag=True, help="Print JSON.")


def run_command(fn: Callable[P, Any]) -> Callable[P, None]:
    """Run the body of a click command, a coroutine function or a plain one, and end as its outcome asks.

    Stands below the click decorators. The exit code is what `fn` returns (None: 0), or that of the error.
    """

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        with end_with() as ending:
            result = fn(*args, **kwargs)
            ending.code = (run_async(result) if inspect.iscoroutine(result) else result) or 0

    return wrapper


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a new event loop: uvloop's where it is installed (the extra `fast`).

    Raises Unforeseen for an error in the background that nobody else takes.
    """
    from common.tasks import to_its_end

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(to_its_end(main))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
