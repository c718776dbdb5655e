"""Helpers shared by tests: polling, builders, unique names."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pickle
import platform
import random
import secrets
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from inspect import isawaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import boto3
import pytest

from common.errors import ConfigError, FloeError, OutcomeUnknown, Unavailable
from common.metrics import REGISTRY
from common.nats.protocol import reply_layout
from common.sequences import SequenceRange

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet
import re
import shlex

import click

from floe import cli
from infra.local.nats import nats_server_binary
from infra.local.s3 import LocalS3, MinIO, SeaweedFS, find_minio, find_weed

T = TypeVar("T")

MAX_POLL_S = 0.1
PATIENCE = 120.0  # seconds for work that takes one on a quiet machine: only a hang takes that long


def eventually(check: Callable[[], T], seconds: float = PATIENCE, every: float = 0.05) -> T:
    """Call `check` until it returns something true, and return that; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (answer := check()):
        assert time.monotonic() < deadline, f"not within {seconds} s: last answer {answer!r}"
        time.sleep(every)
    return answer


def metric_value(name: str, labels: Mapping[str, str] | None = None) -> float | None:
    """The value of a metric in this process; None without such labels. Collects this metric only, not all of them."""
    found = REGISTRY.restricted_registry([name]).collect()
    values = {(each.name, *sorted(each.labels.items())): each.value for metric in found for each in metric.samples}
    return values.get((name, *sorted((labels or {}).items())))


async def soon(check: Callable[[], T | Awaitable[T]], seconds: float = PATIENCE, every: float = 0.02) -> T:
    """Run `eventually` on the event loop, less and less often; `check` may be a coroutine function.

    A question that is not answered is asked again: a busy machine may take longer to reconnect than the client waits.
    """
    deadline = time.monotonic() + seconds
    while True:
        answer: Any = None
        with suppress(Unavailable, OutcomeUnknown):
            found = check()
            answer = await found if isawaitable(found) else found
        if answer:
            return cast(T, answer)
        assert time.monotonic() < deadline, f"not within {seconds} s: last answer {answer!r}"
        await asyncio.sleep(every)
        every = min(every * 1.3, max(every, MAX_POLL_S))


async def answered(ask: Callable[[], Awaitable[T]], *errors: type[BaseException]) -> T:
    """Return the result of `ask` as soon as it raises none of `errors`."""

    async def attempt() -> tuple[T] | None:
        with suppress(*errors):
            return (await ask(),)
        return None

    return cast(tuple[T], await soon(attempt))[0]


def has_stopped(pid: int) -> bool:
    """True if the process is stopped by a signal, as at a failpoint."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel the task and wait for its end; its error is dropped. Cancels again after a while: `asyncio.wait_for` of
    Python 3.11, which the NATS library uses, loses a cancellation that comes together with its result.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=PATIENCE / 8)


def counted(metric: Any) -> float:
    """Return the value of a counter or a gauge with its labels."""
    samples = [each for family in metric.collect() for each in family.samples]
    [sample] = [each for each in samples if not each.name.endswith("_created")]
    return float(sample.value)


@contextmanager
def raises_code(kind: type[FloeError], code: str, exit_code: int | None = None, *, match: str = "") -> Iterator[Any]:
    """Check that the block raises an error of this kind and code; the error is the `value` of the result."""
    with pytest.raises(kind, match=match or None) as caught:
        yield caught
    assert caught.value.code == code, caught.value
    assert exit_code in (None, caught.value.exit_code), caught.value


def unique(prefix: str) -> str:
    """Return a name that no other test uses."""
    return f"{prefix}_{secrets.token_hex(4)}"


def seeded(seed: int | None = None) -> random.Random:
    """Return a random source, and print its seed: `seed`, else FLOE_SEED, else a random one."""
    chosen = seed if seed is not None else int(os.environ.get("FLOE_SEED", secrets.randbits(32)))
    print(f"FLOE_SEED={chosen}")
    return random.Random(chosen)


TEST_S3 = "FLOE_TEST_S3"
_S3_SERVERS = {"seaweedfs": SeaweedFS, "minio": MinIO}


def s3_name() -> str:
    """Return the S3 server that this test run uses."""
    if (chosen := os.environ.get(TEST_S3) or "seaweedfs") not in _S3_SERVERS:
        raise pytest.UsageError(f"{TEST_S3}: expected {' or '.join(_S3_SERVERS)}, found {chosen!r}")
    return chosen


@contextmanager
def shared_s3_server(folder: Path) -> Iterator[LocalS3]:
    """Yield the S3 server that `FLOE_TEST_S3` names, one for all processes with this folder. The first one starts it,
    and stops it when the others have ended.
    """
    known = folder / "s3"
    with (folder / "s3.users").open("w") as users, (folder / "s3.start").open("w") as start:
        fcntl.flock(users, fcntl.LOCK_SH)
        fcntl.flock(start, fcntl.LOCK_EX)
        if is_known := known.exists():
            server: LocalS3 = pickle.loads(known.read_bytes())
        else:
            server = _S3_SERVERS[s3_name()]()
            server.start()
            elsewhere = copy(server)
            elsewhere._process = None
            known.write_bytes(pickle.dumps(elsewhere))
        fcntl.flock(start, fcntl.LOCK_UN)
        yield server
        if not is_known:
            fcntl.flock(users, fcntl.LOCK_EX)
            server.stop()


def servers_line() -> str:
    """Name the servers of this run: Python, nats-server, the S3 server and Java, each with its version or `none`."""
    s3 = "MinIO" if s3_name() == "minio" else "SeaweedFS"
    found = {
        "nats-server": (nats_server_binary, "--version"),
        s3: (find_minio, "--version") if s3 == "MinIO" else (find_weed, "version"),
        "Java": (lambda: shutil.which("java"), "-version"),
    }
    parts = [f"{name} {_version(find, option)}" for name, (find, option) in found.items()]
    return f"runs on Python {platform.python_version()}, {', '.join(parts)}"


def _version(find: Callable[[], Path | str | None], option: str) -> str:
    """Return the version that a program prints; `none` if the program is not installed."""
    program = None
    with suppress(FileNotFoundError, ConfigError):
        program = find()
    if program is None:
        return "none"
    done = subprocess.run([str(program), option], capture_output=True, text=True, check=False)
    version = re.search(r"(?:RELEASE|DEVELOPMENT)\.\S+|\d+\.\d[\w.+-]*", done.stdout + done.stderr)
    return version[0] if version else "of an unknown version"


def only_on_seaweedfs(why: str) -> None:
    """Skip the test with this reason if the run uses another S3 server."""
    if s3_name() != "seaweedfs":
        pytest.skip(f"SeaweedFS only: {why}")


def soak_only(*values: object) -> ParameterSet:
    """Return a parameter set that `make soak` runs, and `make test` does not."""
    return pytest.param(*values, marks=pytest.mark.soak)


@dataclass(frozen=True)
class SharedS3:
    """One S3 server that many tests share, each with buckets of its own."""

    server: LocalS3

    @property
    def endpoint_url(self) -> str:
        return self.server.endpoint_url

    @property
    def access_key(self) -> str:
        return self.server.access_key

    @property
    def secret_key(self) -> str:
        return self.server.secret_key

    def new_bucket(self) -> str:
        """Create a bucket that no other test uses; return its name."""
        name = unique("t").replace("_", "-")
        self.server.create_bucket(name)
        return name

    def store(self, bucket: str = "") -> dict[str, str]:
        """Return the `store` of a configuration, with a bucket of its own if none is named."""
        keys = {"access_key_id": self.access_key, "secret_access_key": self.secret_key}
        return {"url": f"s3://{bucket or self.new_bucket()}", "endpoint_url": self.endpoint_url, **keys}

    def client(self) -> Any:
        """Return a client of boto3, for requests that no part of Floe makes."""
        keys = {"aws_access_key_id": self.access_key, "aws_secret_access_key": self.secret_key}
        return boto3.session.Session(**keys, region_name="us-east-1").client("s3", endpoint_url=self.endpoint_url)


# The form of `common.exits`: it names a configuration. A command named in words does not.
_COMMAND = re.compile(r"\bfloe (?=[a-z][^\n]*? -c )[^\n]*")


def commands_of(hint: str) -> list[str]:
    """Return the commands of a hint, each from its beginning to the end of its line, to be pasted."""
    return _COMMAND.findall(hint)


def problem_of(command: str) -> str:
    """Return why `floe` would not accept the command; empty if it would. Nothing is run."""
    try:
        context = cli.make_context("floe", shlex.split(command)[1:])
        while isinstance(context.command, click.Group):
            rest = [*context._protected_args, *context.args]
            _, found, rest = context.command.resolve_command(context, rest)
            assert found is not None, command
            context = found.make_context(found.name, rest, parent=context)
    except (ValueError, click.ClickException) as error:
        return f"{command}: {error}"
    return ""


def problems_of(hint: str) -> list[str]:
    """Return the problems of the commands of a hint."""
    return [problem for command in commands_of(hint) if (problem := problem_of(command))]


class AckReply(NamedTuple):
    """The parts of the reply subject of a delivered message (`$JS.ACK…`)."""

    stream: str
    consumer: str
    stream_sequence: int
    consumer_sequence: int
    timestamp_ns: int
    pending: int


def parse_ack(reply: bytes) -> AckReply:
    """Parse the reply subject of a delivered message. Raises ValueError."""
    words = reply.split(b".")[reply_layout(reply)[1] :]
    return AckReply(words[0].decode(), words[1].decode(), *map(int, words[3:7]))


def is_gapless(ranges: Iterable[SequenceRange]) -> bool:
    """True if each range, in the order given, begins exactly behind the end of the one before. For verification."""
    previous = None
    for current in ranges:
        if previous is not None and not current.follows(previous):
            return False
        previous = current
    return True
