"""The servers, processes and publishers of the demo: two sites, a bucket and a centre, on loopback, in one folder."""

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import yaml

from common.clock import Clock
from common.errors import FloeError
from common.nats.api import create_stream
from common.nats.client import FloeClient
from common.tasks import Stop, wait_for
from infra.emulator import Emulator, Fleet, MachineFacts, PublishSchedule
from infra.local.nats import NatsServer
from infra.local.process import spawn
from infra.local.s3 import new_local_s3
from infra.publish import AwkwardReport, publish_awkward

PROJECT_FOLDER = Path(__file__).parents[2]  # the folder of floe.py, in a checkout and when installed
DRAIN_TIMEOUT_S = 30.0  # seconds until a drain has taken too long


class DemoService:
    """One long-running `floe …` command with a log file of its own."""

    def __init__(self, folder: Path, name: str, config: Path, *command: str) -> None:
        self.name, self.config = name, config
        self._command = ("floe", *command, "-c", str(config))
        self.log = folder / f"{name.replace(' ', '-')}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = _spawn(self._command, stdout=log, stderr=log)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def raise_if_ended(self) -> None:
        """Raise FloeError with the end of the log if the process has ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            raise FloeError(
                f"{self.name}: expected to run, found exit code {self._process.returncode}: {log_end(self.log)}",
                code="E-DEMO",
            )

    def kill(self) -> int:
        if self._process is None:
            return 0
        pid = _kill(self._process)
        self._process = None
        return pid

    async def drain(self) -> None:
        """Send SIGTERM and wait until the process has drained. Raises FloeError if its exit code is not 0.

        If it takes longer than `DRAIN_TIMEOUT_S`, it is killed, and TimeoutExpired is raised.
        """
        if self._process is None:
            return
        process, self._process = self._process, None
        process.terminate()
        try:
            code = await asyncio.to_thread(process.wait, DRAIN_TIMEOUT_S)
        except BaseException:
            _kill(process)
            raise
        if code:
            raise FloeError(
                f"{self.name}: expected exit code 0 after SIGTERM, found {code}: {log_end(self.log)}", code="E-DEMO"
            )


async def run_command(folder: Path, name: str, *command: str) -> str:
    """Run one `floe …` command to its end; return its stdout. Raises FloeError if it fails.

    Cancelling kills the process.
    """
    log = folder / f"{name.replace(' ', '-')}.log"
    with log.open("ab") as stderr:
        process = _spawn(command, stdout=subprocess.PIPE, stderr=stderr)
        try:
            out, _ = await asyncio.to_thread(process.communicate)
        finally:
            _kill(process)
    if process.returncode:
        raise FloeError(f"{name}: expected exit code 0, found {process.returncode}: {log_end(log)}", code="E-DEMO")
    return str(out, "utf-8")


def _spawn(command: tuple[str, ...], *, stdout: int | IO[bytes], stderr: IO[bytes]) -> subprocess.Popen[bytes]:
    return spawn(
        [sys.executable, "-m", *command],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        cwd=PROJECT_FOLDER,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # the demo gets Ctrl-C and stops its processes in order
    )


def _kill(process: subprocess.Popen[bytes]) -> int:
    """Send SIGKILL to the process and those that it started (Spark's JVM), unless it has ended; return its id."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.pid


def log_end(log: Path) -> str:
    """Return the end of a log, on one line; empty if there is no log."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return " | ".join(text.splitlines()[-5:])


SITES = ("us-east", "eu-west")
NODES, AWKWARD, ADVISORIES = "NODES", "AWKWARD", "ADVISORIES"  # the streams of a site
TARGET_STREAM, SUBJECT_PREFIX = "FLEET", "fleet"
BUCKET = "floe"

# A message of maximal size becomes larger by its provenance header; the centre has room for it.
CENTRAL_MAX_PAYLOAD = 2 * 1024 * 1024

STREAMS: dict[str, dict[str, Any]] = {
    NODES: {"name": NODES, "subjects": ["nodes.>"], "storage": "file"},
    AWKWARD: {
        "name": AWKWARD,
        "subjects": ["awkward.>"],
        "storage": "file",
        "max_msgs_per_subject": 40,
        "duplicate_window": 500_000_000,  # nanoseconds
        "allow_rollup_hdrs": True,
        "allow_msg_ttl": True,
        "allow_msg_schedules": True,
        "allow_atomic": True,
    },
    ADVISORIES: {"name": ADVISORIES, "subjects": ["advisories.>"], "storage": "file"},
}

# One document of each node in ten seconds, at once if its size changes, and advisories about silent nodes.
WARN_SECONDS, SAMPLE_SECONDS = 5, 10
SAMPLED_FEED = {
    "stream": NODES,
    "inspect_field": "sender",
    "inspect_duration": f"{SAMPLE_SECONDS}s",
    "warn_duration": f"{WARN_SECONDS}s",
    "size_trigger": "1K",
    "snapshot_interval": "2s",
    "advisory": {"subject": "advisories.%s", "reliable": True},
}

# Short enough for dozens of segments, two compactions and a deletion in a run of a minute.
SEGMENT_SETTINGS = {"max_age": "2s", "max_messages": 5000}
LEVEL_SETTINGS = [
    {
        "from": 0,
        "to": 1,
        "min_age": "1s",
        "max_wait": "2s",
        "min_count": 2,
        "max_count": 50,
        "min_size": "1M",
        "max_size": "64M",
    }
]
# For jobs of seconds: the optimising compiler and the parallel collector cost more than they give
# (a count of the archive: 20 s of CPU in the JVM with them, 11 without).
SPARK_CONF = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
DELETE_GRACE = "3s"
LEASE_TTL = "3s"


@dataclass(frozen=True, slots=True)
class Services:
    """The processes of Floe, by their names in the demo."""

    egress: Mapping[str, DemoService]
    ingress: DemoService

    def all(self) -> list[DemoService]:
        return [*self.egress.values(), self.ingress]

    def raise_if_ended(self) -> None:
        for service in self.all():
            service.raise_if_ended()


class DemoWorld:
    """The servers, the configuration files and the processes. `close` ends all of them, in any state."""

    def __init__(self, *, keep: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="floe-demo-"))
        self._keep = keep
        self.sites = {site: NatsServer(self.folder / f"nats-{site}", name=site) for site in SITES}
        self.central = NatsServer(self.folder / "nats-central", name="central", max_payload=CENTRAL_MAX_PAYLOAD)
        self.s3 = new_local_s3(self.folder / "s3")
        self.services: Services | None = None

    def start(self) -> None:
        """Start all servers; return when they are ready. Raises FloeError if one does not start."""
        for server in (*self.sites.values(), self.central):
            try:
                server.start()
            except RuntimeError as error:
                raise FloeError(str(error), code="E-DEMO") from error
        self.s3.start()
        self.s3.create_bucket(BUCKET)

    def write_configs(self) -> Services:
        """Write a configuration for each site and one for the centre; return their services, not yet started."""
        egress = {
            site: DemoService(self.folder, f"egress {site}", self._write_site(site), "egress", "run") for site in SITES
        }
        central = self._write(self.central_config, self._central())
        ingress = DemoService(self.folder, "ingress", central, "ingress", "run")
        self.services = Services(egress, ingress)
        return self.services

    def site_config(self, site: str) -> Path:
        return self.folder / f"{site}.yaml"

    @property
    def central_config(self) -> Path:
        return self.folder / "central.yaml"

    def close(self) -> None:
        """End every process that this world started, and remove the folder unless it is to be kept."""
        for service in self.services.all() if self.services else []:
            service.kill()
        for server in (*self.sites.values(), self.central):
            server.kill()
        self.s3.stop()
        if not self._keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _write_site(self, site: str) -> Path:
        return self._write(
            self.site_config(site),
            {
                "site": site,
                "nats": {"url": self.sites[site].url},
                "store": self._store(),
                "spool_dir": self._spool(site),
                "egress": {
                    "monitor": {"listen": ""},
                    "lease_ttl": LEASE_TTL,
                    "defaults": {"segment": SEGMENT_SETTINGS},
                    "feeds": [SAMPLED_FEED, {"stream": AWKWARD, "capture_deletes": "5s"}, {"stream": ADVISORIES}],
                },
            },
        )

    def _central(self) -> dict[str, Any]:
        sources = [{"site": list(SITES), "feed": list(STREAMS), "subject_prefix": SUBJECT_PREFIX}]
        create = {"replicas": 1, "storage": "file", "subjects": [f"{SUBJECT_PREFIX}.>"]}
        return {
            "nats": {"url": self.central.url},
            "store": self._store(),
            "spool_dir": self._spool("central"),
            "ingress": {
                "monitor": {"listen": ""},
                "lease_ttl": LEASE_TTL,
                "poll_interval": "1s",
                "targets": [{"stream": TARGET_STREAM, "create": create, "sources": sources}],
            },
            "compaction": {
                "spark": {"master": "local[2]", "conf": SPARK_CONF},
                "levels": LEVEL_SETTINGS,
                "delete_grace": DELETE_GRACE,
                "allow_short_times": True,
            },
        }

    def _store(self) -> dict[str, Any]:
        return {
            "url": f"s3://{BUCKET}",
            "endpoint_url": self.s3.endpoint_url,
            "access_key_id": self.s3.access_key,
            "secret_access_key": self.s3.secret_key,
        }

    def _spool(self, name: str) -> str:
        path = self.folder / f"spool-{name}"
        path.mkdir(mode=0o700, exist_ok=True)
        return str(path)

    def _write(self, path: Path, document: Mapping[str, Any]) -> Path:
        path.write_text(yaml.safe_dump(dict(document), sort_keys=False))
        path.chmod(0o600)  # it holds the bucket's key
        return path


AWKWARD_BURSTS = 4
SILENT_NODES = 10  # nodes that fall silent before the others do
FIRST_SILENT_NODE = 90_000  # of the first leaver; the numbers of the fleet are smaller


class SilentFleet(Fleet):
    """Nodes that fall silent early; their names differ from those of the fleet."""

    def sender(self, node: int) -> str:
        return super().sender(node + FIRST_SILENT_NODE)


@dataclass(frozen=True, slots=True)
class PublishLoad:
    """The load at each site. `rate`: documents per second; `awkward`: awkward messages in all."""

    seconds: float
    seed: int
    rate: float = 400.0
    nodes: int = 500
    awkward: int = 600


@dataclass(slots=True)
class SitePublisher:
    """The publisher of one site. `reports`: one for each burst of awkward messages."""

    site: str
    client: FloeClient
    load: PublishLoad
    facts: MachineFacts
    clock: Clock
    emulators: list[Emulator] = field(default_factory=list)
    reports: list[AwkwardReport] = field(default_factory=list)

    async def create_streams(self) -> None:
        for config in STREAMS.values():
            await create_stream(self.client, config)

    async def run(self, stop: Stop) -> None:
        """Publish into both streams until the load's time is over or `stop` is set."""
        async with asyncio.TaskGroup() as group:
            for emulator in self._make_emulators():
                group.create_task(emulator.run(stop))
            group.create_task(self._bursts(stop))

    def sent(self) -> int:
        """Return the number of messages published so far, without those of the current burst."""
        documents = sum(emulator.published.sent for emulator in self.emulators)
        return documents + sum(report.published.sent for report in self.reports)

    def summary(self) -> str:
        documents = self.emulators[0].published.summary() if self.emulators else "none"
        kinds = {kind for report in self.reports for kind in report.stored}
        stored = sum(report.published.stored for report in self.reports)
        deleted = sum(len(report.deleted) for report in self.reports)
        return f"documents: {documents}; awkward: {stored} stored of {len(kinds)} kinds, {deleted} deleted again"

    def _make_emulators(self) -> list[Emulator]:
        load = self.load
        fleet = Fleet(self.facts, seed=self._seed(), nodes=load.nodes)
        silent_fleet = SilentFleet(self.facts, seed=self._seed(), nodes=SILENT_NODES)
        self.emulators = [
            self._emulator(fleet, PublishSchedule(load.nodes, rate=load.rate, duration=load.seconds)),
            self._emulator(silent_fleet, PublishSchedule(SILENT_NODES, rate=SILENT_NODES, duration=load.seconds / 2)),
        ]
        return self.emulators

    def _emulator(self, fleet: Fleet, schedule: PublishSchedule) -> Emulator:
        return Emulator([self.client], fleet, schedule, self.clock, subject=f"{NODES.lower()}.{{sender}}")

    async def _bursts(self, stop: Stop) -> None:
        rng = random.Random(self._seed())
        for burst in range(AWKWARD_BURSTS):
            root = f"{AWKWARD.lower()}.b{burst}"
            count = self.load.awkward // AWKWARD_BURSTS
            self.reports.append(await publish_awkward(self.client, AWKWARD, root, rng, count, clock=self.clock))
            if burst == AWKWARD_BURSTS - 1 or await wait_for(stop, self.load.seconds / AWKWARD_BURSTS):
                return

    def _seed(self) -> int:
        return random.Random(f"{self.load.seed} {self.site}").getrandbits(32)
