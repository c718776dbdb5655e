"""Helpers to run `floe` as a process over a bench, and to paste commands from hints."""

import asyncio
import json
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml
from click.testing import CliRunner

from common import logs
from floe import cli
from infra.local.process import spawn
from tests.support import canaries
from tests.support.basics import PATIENCE, unique
from tests.support.egress import Bench

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Done:
    """The end of a command: exit code and output."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


def configuration(bench: Bench, *feeds: dict[str, Any], **egress: Any) -> Path:
    """Write a configuration file for the bench's site; return its path."""
    path = bench.root / f"{unique('site')}.yaml"
    path.write_text(yaml.safe_dump(bench.document(*feeds, **{"monitor": {"listen": ""}, **egress})))
    path.chmod(0o600)
    return path


_one_at_a_time = threading.Lock()  # the runner takes this process's stdout


async def floe(*arguments: str, env: dict[str, str] | None = None, seconds: float = PATIENCE) -> Done:
    """Run `floe` with these arguments: in this process, since another one costs a second; with `env` as a process.

    `tests/unit/test_cli.py` and the acceptance tests prove that the command is a process.
    """
    if env is None:
        return await asyncio.wait_for(invoke(*arguments), seconds)
    return await asyncio.to_thread(run_floe, *arguments, env=env, seconds=seconds)


@contextmanager
def spawned(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run `floe` as a process for the length of a block; kill it at the end."""
    with spawn([sys.executable, "-m", "floe", *arguments], cwd=ROOT, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def run_floe(*arguments: str, env: dict[str, str] | None = None, seconds: float = 5 * PATIENCE) -> Done:
    """Run `floe` as a process to its end, as Spark and commands that kill themselves need it."""
    pipe = subprocess.PIPE
    with spawned(*arguments, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as process:
        out, err = process.communicate(timeout=seconds)
    canaries.check(out + err, " ".join(arguments[:2]))
    return Done(process.returncode, out, err)


async def invoke(*arguments: str) -> Done:
    """Run `floe` in this process, on a loop of its own: that saves a second."""
    return await asyncio.to_thread(run_here, *arguments)


async def ran(*arguments: str, code: int = 0) -> Done:
    """Run `floe` in this process; fail unless it ends with `code`."""
    done = await invoke(*arguments)
    assert done.code == code, (arguments, done)
    return done


class _Ending(click.Command):
    """`floe`, with its log written at its end, as that of a process is."""

    def main(self, *arguments: Any, **named: Any) -> Any:
        try:
            return cli.main(*arguments, **named)
        finally:
            logs.flush()


def run_here(*arguments: str) -> Done:
    """Run `floe` in this process, for a test without a loop."""
    with _one_at_a_time:
        result = CliRunner().invoke(_Ending("floe"), [*arguments], prog_name="floe")
    canaries.check(result.stdout + result.stderr, " ".join(arguments[:2]))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Done(result.exit_code, result.stdout, result.stderr)


def command_of(hint: str, wanted: str = "", name: str = "egress (?:resolve|repartition)") -> list[str]:
    """Return the arguments of the first `floe` command of that name in a hint, among those with `wanted` in them."""
    return shlex.split(next(each for each in re.findall(rf"floe ({name} [^|;,()\n]*)", hint) if wanted in each))


async def paste_checkpoint(config: Path, hint: str, wanted: str = "", *more: str) -> Done:
    """Run a `floe checkpoint set` of a hint, with `config` in place of the file that it names."""
    arguments = command_of(hint, wanted, "checkpoint set")
    arguments[arguments.index("-c") + 1] = str(config)
    done = await invoke(*arguments, "--yes", *more)
    assert done.code == 0, done
    return done


async def paste(bench: Bench, hint: str, *feeds: dict[str, Any], wanted: str = "") -> Done:
    """Run the command of a hint, with a configuration of these feeds in place of the one that it names."""
    arguments = command_of(hint, wanted)
    arguments[arguments.index("-c") + 1] = str(configuration(bench, *feeds))
    done = await floe(*arguments, "--yes")
    assert done.code == 0, done
    return done
