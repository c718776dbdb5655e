"""The commands that surround Floe: `floe emulate`, `floe demo`, `floe site add` and `floe store create`."""

from __future__ import annotations

import asyncio
import math
import random
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from common.chain import Chain
from common.cli import Duration, ParsedType, Size, config_command, config_option, json_option, print_json, run_command
from common.clock import SystemClock
from common.errors import FloeError, UsageError
from common.settings.types import parse_listen

if TYPE_CHECKING:
    from common.settings.root import StoreSettings
    from common.settings.service import NatsSettings

T = TypeVar("T")


class FiniteRange(click.FloatRange):
    """A finite number in a range: the ranges of click contain nan and inf."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"expected a finite number, found {value!r:.60}", param, ctx)
        return found


@click.command()
@click.option("-c", "--config", type=click.Path(), envvar="FLOE_CONFIG", help="Connect as this configuration.")
@click.option("--server", multiple=True, help="Connect to this URL instead; repeat it for the servers of a cluster.")
@click.option("--stream", default="NODE_DATA", show_default=True, help="The stream to publish into.")
@click.option("--create", is_flag=True, help="Create the stream if it is missing.")
@click.option(
    "--subject",
    default="choria.node_metadata.{sender}",
    show_default=True,
    help="The subject of each node; {sender} is its name.",
)
@click.option("--nodes", type=click.IntRange(min=1), default=100, show_default=True, help="How many nodes.")
@click.option(
    "--connections", type=click.IntRange(1, 10_000), default=1, show_default=True, help="Of all nodes together."
)
@click.option("--subscriptions", type=click.IntRange(0, 1000), default=0, show_default=True, help="Of each connection.")
@click.option("--interval", type=Duration(), default="5m", show_default=True, help="How often each one publishes.")
@click.option("--rate", type=FiniteRange(min=0), help="Messages per second of the fleet; 0: no limit.")
@click.option("--min-size", type=Size(), default="1K", show_default=True, help="Approximate smallest document.")
@click.option("--max-size", type=Size(), default="15K", show_default=True, help="Approximate largest document.")
@click.option("--count", type=click.IntRange(min=1), help="Stop after this many messages.")
@click.option("--duration", type=Duration(), help="Stop after this time.")
@click.option("--seed", type=int, help="The same seed makes the same fleet; default: random.")
@click.option("--listen", type=ParsedType("address", tuple, parse_listen), help="Serve /metrics there while it runs.")
@json_option
@run_command
async def emulate(
    config: str | None,
    server: tuple[str, ...],
    nodes: int,
    interval: float,
    rate: float | None,
    min_size: int,
    max_size: int,
    count: int | None,
    duration: float | None,
    seed: int | None,
    as_json: bool,
    **stream: Any,
) -> None:
    """Publish messages into a stream, as a fleet of nodes would.

    Each node registers once in every interval with a document of 1 to 15 KB: its name, the time, facts and
    counters, varied from the facts of this machine. The published messages are compared with the stored ones.
    With --subscriptions, each connection also listens on floe.emulated.ping.0 and so on, and answers each request
    there with the names of its nodes.

    \b
    Examples:
      floe emulate --server nats://127.0.0.1:4222 --create --nodes 500 --interval 5m
      floe emulate -c site.yaml --stream NODE_DATA --rate 20000 --max-size 3K --count 1000000
      floe emulate -c site.yaml --stream NODE_DATA --rate 0 --duration 1m --seed 7
      floe emulate -c site.yaml --nodes 1000 --connections 1000 --subscriptions 20 --listen 127.0.0.1:9470
    """
    from infra.emulator import PublishSchedule, Sizes, run_emulation

    is_on_command_line = click.get_current_context().get_parameter_source("config") is ParameterSource.COMMANDLINE
    settings = _nats_settings(config if is_on_command_line or not server else None, server)
    schedule = PublishSchedule(nodes, interval, rate, count, duration)
    result = await run_emulation(settings, schedule, Sizes(min_size, max_size), seed=_seed(seed), **stream)
    if as_json:
        print_json(result)
    else:
        click.echo(result["line"])


@click.command()
@click.option("--seconds", type=FiniteRange(min=5), default=30, show_default=True, help="How long to publish.")
@click.option("--rate", type=FiniteRange(min=1), default=400, show_default=True, help="Messages per s and site.")
@click.option("--seed", type=int, help="The same seed publishes the same messages; default: random.")
@click.option("--keep", is_flag=True, help="Keep the folder.")
@json_option
@run_command
async def demo(seconds: float, rate: float, seed: int | None, keep: bool, as_json: bool) -> int:
    """Run everything on this machine: two sites, a bucket, a centre, and Floe between them.

    The demo publishes for a while, kills egress and ingress and restarts them, compacts twice, loses the server of a
    site and restores its streams, then compares source, archive and target message by message. It ends with one line,
    and with exit code 0 only if every number in it is 0. It needs Java 17 or 21, and uses only loopback and one
    temporary folder. `make demo` in a checkout installs it first.

    \b
    Examples:
      floe demo
      floe demo --seconds 120 --rate 1000
      floe demo --keep            # leaves data, logs and configurations to look at
      floe demo --json --seed 7
    """
    from infra.demo.demo import STEP_COUNT, ConsoleView, StepView, run_demo
    from infra.demo.world import PublishLoad

    load, clock = PublishLoad(seconds=seconds, seed=_seed(seed), rate=rate), SystemClock()
    if as_json:
        result = await _until_terminated(run_demo(load, StepView(), clock, keep=keep))
        print_json(result.to_json())
    else:
        view = ConsoleView(clock, STEP_COUNT)
        with view.running():
            result = await _until_terminated(run_demo(load, view, clock, keep=keep))
        click.echo(f"\n{result.comparison().summary()}")
    return 0 if result.is_ok else 1


@click.group()
def site() -> None:
    """Prepare sites."""


@site.command()
@click.argument("name")
@click.option("--feeds", default="*", show_default=True, help="Streams, with commas between; `*` for any text.")
@click.option("--output", metavar="DIR", help="Write the files into this folder; none of them may exist yet.")
@config_command
def add(config: str, name: str, feeds: str, output: str | None, as_json: bool) -> None:
    """Print the files of a new site: configuration of egress, rights in NATS, and policy for the bucket.

    The bucket is that of the configuration of the centre. Nothing is changed there: add the policy to the bucket and
    the permissions to nats-server, each for a user of the site alone. A line names the feeds that no target takes.

    \b
    Example: floe site add eu-west --feeds "NODES,KV_*" -c central.yaml --output eu-west
    """
    from common.config_cli import write_files
    from common.open import load_settings
    from infra.rights import site_files

    settings, streams = load_settings(config, quiet=True), [*dict.fromkeys(feeds.split(","))]
    try:
        for each in streams:
            Chain(name, each.replace("*", "x"))
    except ValueError as error:
        raise UsageError(str(error)) from None
    files = site_files(settings, name, streams)
    if output is not None:
        write_files(files, Path(output), "--output")
    if as_json:
        print_json({"site": name, "files": files})
    else:
        texts = (f"# {file}\n{text}" for file, text in files.items())
        click.echo("\n".join(str(Path(output, file)) for file in files) if output is not None else "\n".join(texts))
    pairs = [(name, each) for each in streams if "*" not in each]
    taken = {pair for target in settings.ingress.targets for pair in target.listed_feeds(pairs)}
    if missing := ["/".join(pair) for pair in pairs if pair not in taken]:
        click.echo(f"in no `sources` of {config}: {', '.join(missing)}", err=True)


@click.group()
def store() -> None:
    """Prepare the store."""


@store.command()
@config_option
@run_command
def create(config: str) -> None:
    """Create the bucket of `store.url`, or its folder. One that exists is not changed.

    A store with regions creates it in `store.region`. The credential needs s3:ListBucket and s3:CreateBucket, which no
    role of Floe has: use that of an administrator, in a configuration with `store` alone.

    \b
    Example: floe store create -c central.yaml
    """
    from common.open import load_settings

    settings = load_settings(config, quiet=True).store
    click.echo(f"{settings.url}: {'created' if _create_bucket(settings) else 'exists already'}")


def _create_bucket(settings: StoreSettings) -> bool:
    """Create the bucket or the folder; return False if there is one. Raises as the verbs of a store."""
    from common.objects.open import VIEW_TIMEOUT_S, open_objects
    from common.objects.port import BucketStore

    try:
        open_objects(settings, timeout=VIEW_TIMEOUT_S, creates=False).list("", limit=1)
        return False
    except FloeError as error:
        if error.code not in ("E-S3-BUCKET", "E-STORE-ROOT"):
            raise
    objects = open_objects(settings, timeout=VIEW_TIMEOUT_S)  # a folder is created here
    if isinstance(objects, BucketStore):
        objects.create_bucket()
    return True


def _seed(given: int | None) -> int:
    return random.SystemRandom().getrandbits(32) if given is None else given


def _nats_settings(config: str | None, server: tuple[str, ...]) -> NatsSettings:
    """Return the settings for `server` if it names URLs, else those of the configuration for egress, else defaults."""
    if config and server:
        raise UsageError("--server and --config: expected at most one of them")
    if config:
        from common.open import load_settings

        return load_settings(config, quiet=True).nats_for("egress")
    from common.logs import configure
    from common.settings.service import NatsSettings

    configure()
    try:
        return NatsSettings(url=server) if server else NatsSettings()
    except ValueError as error:
        found = f"found {' '.join(server)!r:.80}"
        raise UsageError(f"--server: expected a URL such as nats://127.0.0.1:4222, {found}") from error


async def _until_terminated(running: Coroutine[Any, Any, T]) -> T:
    """Await `running`, and cancel it on SIGTERM as Ctrl-C does, so that it cleans up."""
    task, outer = asyncio.ensure_future(running), asyncio.current_task()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        if outer is not None and outer.cancelling():
            raise
        raise click.exceptions.Exit(128 + signal.SIGTERM) from None
