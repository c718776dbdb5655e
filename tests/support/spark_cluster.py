"""Spark's standalone cluster on loopback, from the wheel of PySpark: a master and two workers, with authentication."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

import pyspark

from infra.local.process import free_ports, spawn
from tests.support import canaries
from tests.support.basics import PATIENCE, eventually, has_stopped

ROOT = Path(__file__).parents[2]
PACKAGES = Path(pyspark.__file__).parents[1]
SPARK_HOME = Path(pyspark.__file__).parent
# A JVM that compiles little and uses one thread starts soonest.
JAVA_OPTIONS = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
ENVIRONMENT = "environment"
ARCHIVE = f"{ENVIRONMENT}.tar.gz"  # others are unpacked without the right to execute


class SparkCluster:
    """`with SparkCluster(folder) as cluster:`; its logs, working folders and event logs are in `folder`.

    `failpoints`: FLOE_FAILPOINTS of the first worker's processes.
    """

    def __init__(self, folder: Path, failpoints: str = "") -> None:
        self.folder, self._failpoints = folder, failpoints
        self.secret = os.urandom(16).hex()
        canaries.note(self.secret)
        port, self.web = free_ports(2)
        self.url = f"spark://127.0.0.1:{port}"
        self.secret_file, self._conf = folder / "secret", folder / "cluster.conf"
        self.events = folder / "events"
        self.events.mkdir(parents=True)
        for path in (self.secret_file, self._conf):
            path.touch(mode=0o600)
        self.secret_file.write_text(self.secret + "\n")
        settings = {
            "spark.authenticate": "true",
            "spark.authenticate.secret": self.secret,
            "spark.network.crypto.enabled": "true",
            "spark.master.rest.enabled": "false",
        }
        self._conf.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        self._port = port
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def conf(self, more: Mapping[str, str]) -> dict[str, str]:
        """Return `compaction.spark.conf` of a job on this cluster, with the keys of `more`."""
        return {
            "spark.authenticate.secret.file": str(self.secret_file),
            "spark.archives": f"{environment(self.folder)}#{ENVIRONMENT}",
            "spark.pyspark.python": f"./{ENVIRONMENT}/bin/python",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.extraJavaOptions": JAVA_OPTIONS,
            "spark.executor.extraJavaOptions": JAVA_OPTIONS,
            "spark.executor.memory": "512m",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": str(self.events),
            "spark.eventLog.compress": "false",
            "spark.sql.codegen.wholeStage": "false",
            "spark.sql.shuffle.partitions": "2",
            **more,
        }

    def __enter__(self) -> SparkCluster:
        try:
            words = ["org.apache.spark.deploy.master.Master", "--port", str(self._port), "--webui-port", str(self.web)]
            self._start("master", "127.0.0.1", words)
            self.start_worker(1, self._failpoints)
            self.start_worker(2)
            eventually(lambda: self.alive() == 2)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start_worker(self, number: int, failpoints: str = "") -> None:
        """Start a worker. Workers have addresses of their own, so that Spark takes them for two hosts."""
        words = ["org.apache.spark.deploy.worker.Worker", "--webui-port", "0", "--cores", "1", "--memory", "1g"]
        words += ["--work-dir", str(self.work(number)), self.url]
        self._start(f"worker{number}", f"127.0.0.{number}", words, FLOE_FAILPOINTS=failpoints)

    def kept(self) -> dict[Path, str]:
        """Return the text of the cluster's files: logs, events, output of executors; not of those with its secret."""
        ours = (self.secret_file, self._conf, self.folder / ARCHIVE)
        files = [path for path in self.folder.rglob("*") if path.is_file() and ENVIRONMENT not in path.parts]
        return {path: path.read_text(errors="replace") for path in files if path not in ours}

    def work(self, number: int) -> Path:
        """Return the folder of a worker's executors, with their output."""
        return self.folder / f"work{number}"

    def _start(self, name: str, host: str, words: list[str], **env: str) -> None:
        environ = {
            key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYSPARK", "SPARK"))
        }
        environ |= {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS, "SPARK_LOCAL_IP": host}
        options = ["--host", host, "--properties-file", str(self._conf)]
        command = [SPARK_HOME / "bin" / "spark-class", words[0], *options, *words[1:]]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = spawn(command, cwd=self.folder, env={**environ, **env}, stdout=log, stderr=log)

    def alive(self) -> int:
        """Return how many workers the master knows to be alive; 0 while it does not answer."""
        with suppress(OSError, ValueError):
            return int(json.loads(self.page("/json/"))["aliveworkers"])
        return 0

    def page(self, path: str) -> str:
        """Return a page of the master."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.web}{path}", timeout=PATIENCE) as answer:
            return str(answer.read().decode())

    def processes_of(self, number: int) -> list[int]:
        """Return a worker and all its descendants, the youngest last."""
        return list(_tree(self._processes[f"worker{number}"].pid))

    def kill_worker(self, number: int) -> None:
        """Send SIGKILL to a worker and all its descendants, as if its host were gone; nothing if there is none."""
        if (process := self._processes.pop(f"worker{number}", None)) is not None:
            with _held(process.pid) as all_of_it:
                for each in all_of_it:
                    _kill(each)
            process.wait(PATIENCE)

    def replace_worker(self, number: int) -> None:
        self.kill_worker(number)
        eventually(lambda: self.alive() == 1)
        self.start_worker(number)
        eventually(lambda: self.alive() == 2)

    def stopped(self, number: int) -> list[int]:
        """Return the worker's descendants, mainly Python processes, that have stopped themselves at a failpoint."""
        return [pid for pid in self.processes_of(number) if has_stopped(pid)]

    def stop(self) -> None:
        for process in reversed(self._processes.values()):
            with _held(process.pid) as all_of_it:
                process.terminate()
                process.wait(PATIENCE)
                for each in all_of_it:  # executors end with their worker, unless they are stopped
                    _kill(each)
        self._processes.clear()


@contextmanager
def _held(pid: int) -> Iterator[list[int]]:
    """Open a process and all its descendants as descriptors: a number might be another process's a moment later."""
    held = []
    try:
        for each in list(_tree(pid)):
            with suppress(ProcessLookupError):
                held.append(os.pidfd_open(each))
        yield held
    finally:
        for each in held:
            os.close(each)


def _kill(descriptor: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):  # Java starts processes from any thread
        with suppress(OSError):
            for each in path.read_text().split():
                yield from _tree(int(each))


class Wire:
    """`with Wire(port) as wire:` 127.0.0.3 at that port is 127.0.0.1 at the same, and all bytes are recorded."""

    HOST = "127.0.0.3"

    def __init__(self, port: int) -> None:
        self._port, self._recorded = port, bytearray()
        self._server = socket.create_server((self.HOST, port))

    def __enter__(self) -> Wire:
        Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)

    @property
    def recorded(self) -> bytes:
        return bytes(self._recorded)

    def _accept(self) -> None:
        with suppress(OSError), self._server:
            while True:
                executor = self._server.accept()[0]
                try:
                    driver = socket.create_connection(("127.0.0.1", self._port))
                except OSError:
                    executor.close()
                    continue
                for source, sink in ((executor, driver), (driver, executor)):
                    Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with source, suppress(OSError):
            while data := source.recv(2**16):
                self._recorded += data
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)  # its own thread closes it


class CommandLines:
    """`with CommandLines() as commands:` the command lines of this host, which every user may read, again and again."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self._ended = Event()
        self._looking = Thread(target=self._look)

    def __enter__(self) -> CommandLines:
        self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._looking.join()

    def _look(self) -> None:
        while not self._ended.wait(0.1):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    self.seen.add(path.read_text(errors="replace"))


def environment(folder: Path) -> Path:
    """Return the archive that executors unpack: a Python environment with the needs of a task of Floe only.

    Made once in a folder. PySpark is not in it: the executors' Spark brings it along.
    """
    archive = folder / ARCHIVE
    if archive.exists():
        return archive
    base = Path(sys._base_executable).resolve()
    site = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    made = folder / "pyvenv.cfg"
    made.write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(made, "pyvenv.cfg")
        tar.add(base, "bin/python")  # no link: Spark unpacks none that leads out of the archive
        for name in NEEDED:
            tar.add(PACKAGES / name, f"{site}/{name}", filter=_wanted)
        for name in ("common", "compaction"):
            tar.add(ROOT / name, f"{site}/{name}", filter=_wanted)
        for each in PACKAGES.glob("floe_jetstream-*.dist-info"):
            tar.add(each, f"{site}/{each.name}")
    return archive


NEEDED = """
annotated_types boto3 botocore certifi click dateutil jmespath msgspec numpy numpy.libs prometheus_client pyarrow
pydantic pydantic_core s3transfer six.py structlog typing_extensions.py typing_inspection urllib3 yaml _yaml
""".split()  # noqa: SIM905
_LEFT_OUT = ("include", "tests", "examples", "src")
_UNUSED = re.compile(r"flight|_s3|_s3fs|_gcsfs|_azurefs|_hdfs|\.(pyi|pxd|pyx|h)$")  # of pyarrow
_DATA = ("s3", "sts", "endpoints.json", "partitions.json", "sdk-default-configuration.json", "_retry.json")


def _wanted(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    parts = info.name.split("/")
    if parts[-1] in _LEFT_OUT or ("pyarrow" in parts and _UNUSED.search(parts[-1])):
        return None
    if parts[-2:-1] == ["data"] and parts[-3] == "botocore" and parts[-1] not in _DATA:
        return None
    return info
