"""Real S3 servers on loopback for demo, tests and benchmarks: SeaweedFS from its wheel, and MinIO if it is installed.

`python -m infra.local.s3` (`make minio`) starts a MinIO and prints the settings to connect to it. It runs an installed
MinIO, else one that it builds with go.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self
from urllib.parse import quote

import click
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from common.errors import ConfigError, FloeError, Unavailable
from common.exits import INSTALL_ALL
from infra.local.process import PAIR_DISTANCE, free_ports, spawn

REGION = "us-east-1"
_REQUEST_TIMEOUT_S = 10.0  # seconds


@dataclass(frozen=True, slots=True)
class S3Client:
    """A client of the S3 server on `port` of 127.0.0.1 that signs its requests."""

    port: int
    access_key: str
    secret_key: str

    def call(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Return status and body of the answer. Raises OSError and http.client.HTTPException."""
        request = AWSRequest(method, f"http://127.0.0.1:{self.port}{quote(path)}", data=body)
        S3SigV4Auth(Credentials(self.access_key, self.secret_key), "s3", REGION).add_auth(request)
        return send_request(self.port, method, quote(path), body, dict(request.headers))


def send_request(port: int, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_REQUEST_TIMEOUT_S)
    try:
        connection.request(method, path, body=body, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


START_TIMEOUT_S = 120.0  # seconds; a start takes 3.4, sometimes 7.5, a restart 2.2
_POLL_INTERVAL_S = 0.05  # seconds
_START_ATTEMPTS = 3  # attempts, each on other ports


class LocalS3:
    """One S3 server on loopback, in a folder of its own.

    `folder`: keeps the data after `stop`; by default a temporary folder that `stop` removes. Data, ports and keys stay
    over `kill` and `start`. `access_key` has all permissions.
    """

    #: The name in messages.
    name: ClassVar[str]
    _services: ClassVar[tuple[str, ...]]
    _paired: ClassVar[bool] = False

    def __init__(self, folder: Path | None) -> None:
        self.access_key, self.secret_key = "floe-admin", secrets.token_hex(20)
        self._keeps_folder = folder is not None
        self._folder = folder or Path(tempfile.mkdtemp(prefix=f"floe-{self.name.lower()}-"))
        self._ports: dict[str, int] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._ports['s3']}"

    @property
    def pid(self) -> int | None:
        """The process id; None while it does not run."""
        return self._process.pid if self._process else None

    @property
    def log_path(self) -> Path:
        return self._folder / f"{self.name.lower()}.log"

    def start(self) -> None:
        """Start the server; return when an object was written and read back.

        Raises ConfigError if the program is not installed, Unavailable (with the end of its log) if it is not ready in
        time.
        """
        for _ in range(_START_ATTEMPTS if not self._ports else 1):
            self._ports = self._ports or self._choose_ports()
            try:
                return self._start_once()
            except _PortTakenError as error:
                taken = error
                self._ports = {}
        raise taken

    def kill(self) -> None:
        """Send SIGKILL, as in a crash; data, ports and keys stay."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """End the process, and remove the folder if it is a temporary one."""
        # A stop by SIGTERM waits for the other servers of a cluster; this one has none.
        self.kill()
        if not self._keeps_folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def create_bucket(self, name: str) -> None:
        """Create a bucket, if it does not exist. Raises Unavailable."""
        status, body = self._client().call("PUT", f"/{name}")
        if status not in (200, 409):
            raise Unavailable(f"create bucket {name}: expected 200, found {status} {body[:200]!r}")

    def new_bucket(self) -> str:
        """Create a bucket with a unique name, and return the name."""
        name = f"b-{secrets.token_hex(6)}"
        self.create_bucket(name)
        return name

    def _command(self, data: Path) -> list[str]:
        """Return the command that starts it on the chosen ports. Raises ConfigError if the program is not installed."""
        raise NotImplementedError

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ.get("PATH", ""),
            "HOME": str(self._folder),  # else it would read settings and certificates of the user
            "TMPDIR": str(self._folder),
        }

    def _choose_ports(self) -> dict[str, int]:
        return dict(zip(self._services, free_ports(len(self._services), paired=self._paired), strict=True))

    def _start_once(self) -> None:
        assert self._process is None, "already started"
        self._process = self._spawn()
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def _spawn(self) -> subprocess.Popen[bytes]:
        data = self._folder / "data"
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = self._command(data)
        with self.log_path.open("wb") as log:
            return spawn(
                command,
                cwd=self._folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # the demo gets Ctrl-C and then stops this
            )

    def _wait_until_ready(self) -> None:
        self._wait_for("a write", self._write_and_read)

    def _wait_for(self, description: str, succeeds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _succeeds(succeeds):
            self.raise_if_ended()
            if time.monotonic() > deadline:
                raise Unavailable(f"{self.name}: {description} failed for {START_TIMEOUT_S} s: {self._log_end()!r}")
            time.sleep(_POLL_INTERVAL_S)

    def raise_if_ended(self) -> None:
        """Raise Unavailable with the end of its log if it has ended by itself."""
        assert self._process is not None
        if (status := self._process.poll()) is not None:
            log = self._log_end()
            kind = _PortTakenError if b"address already in use" in log else Unavailable
            raise kind(f"{self.name}: ended with {status}: {log!r}")

    def _write_and_read(self) -> bool:
        client, bucket, body = self._client(), "/floe-ready", secrets.token_bytes(16)
        client.call("PUT", bucket)
        wrote, _ = client.call("PUT", f"{bucket}/object", body)
        _, found = client.call("GET", f"{bucket}/object")
        client.call("DELETE", f"{bucket}/object")
        return wrote == 200 and found == body and client.call("DELETE", bucket)[0] == 204

    def _client(self) -> S3Client:
        return S3Client(self._ports["s3"], self.access_key, self.secret_key)

    def _log_end(self) -> bytes:
        return self.log_path.read_bytes()[-1000:]


class SeaweedFS(LocalS3):
    """`weed server`, with two identities.

    `reader_access_key` may only read objects, neither list nor write. All buckets share their volumes (64 MiB each,
    at most 20), so a new bucket takes writes at once. `policies`: by name; each has an identity of its own, with
    its keys in `keys`.
    """

    name = "SeaweedFS"
    _services = ("master", "volume", "filer", "s3")
    _paired = True

    def __init__(
        self, folder: Path | None = None, *, policies: Mapping[str, Mapping[str, object]] | None = None
    ) -> None:
        super().__init__(folder)
        self.reader_access_key, self.reader_secret_key = "floe-reader", secrets.token_hex(20)
        self._policies = dict(policies or {})
        #: Access key and secret of each identity with a policy, by the policy's name.
        self.keys = {name: (f"floe-{name}", secrets.token_hex(20)) for name in self._policies}

    def kill(self) -> None:
        """Send SIGKILL, as in a crash; data, ports and keys stay."""
        running = self._process is not None
        super().kill()
        if running:
            self._remove_sockets()

    def _command(self, data: Path) -> list[str]:
        config = self._folder / "s3.json"
        config.touch(mode=0o600)
        config.write_text(json.dumps(self._identities()))
        return [str(find_weed()), "-logtostderr=true", "server", *self._options(data, config)]

    def _options(self, data: Path, config: Path) -> list[str]:
        return [
            f"-dir={data}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            *(f"-{service}.port={port}" for service, port in self._ports.items()),
            "-filer",
            "-s3",
            f"-s3.config={config}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.autoCreateBucket=false",
            "-volume.max=20",
            "-volume.minFreeSpace=100MiB",
            "-master.volumeSizeLimitMB=64",
            "-master.electionTimeout=200ms",  # it elects itself; by default a restart takes 7 s, not 2
            "-master.heartbeatInterval=50ms",
            "-master.telemetry=false",
        ]

    def _environment(self) -> dict[str, str]:
        return {
            **super()._environment(),
            "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1",  # grow by one volume, not by seven
            "WEED_S3_SSE_KEY": self.secret_key,
        }

    def _identities(self) -> dict[str, object]:
        everything = ["Admin", "Read", "Write", "List", "Tagging"]
        limited = [_identity(name, *self.keys[name], []) | {"policyNames": [name]} for name in self._policies]
        return {
            "identities": [
                _identity("admin", self.access_key, self.secret_key, everything),
                _identity("reader", self.reader_access_key, self.reader_secret_key, ["Read"]),
                *limited,
            ],
            "policies": [{"name": name, "content": json.dumps(policy)} for name, policy in self._policies.items()],
        }

    def _wait_until_ready(self) -> None:
        self._wait_for("the setup of its filer", self._share_volumes)
        super()._wait_until_ready()

    def _share_volumes(self) -> bool:
        # Without this, each new bucket waits for volumes of its own, and the twentieth finds none left.
        rule = {"locationPrefix": "/buckets/", "collection": "all-buckets", "volumeGrowthCount": 1}
        body = json.dumps({"locations": [rule]}).encode()
        return send_request(self._ports["filer"], "PUT", "/etc/seaweedfs/filer.conf", body, {})[0] in (200, 201)

    def _remove_sockets(self) -> None:
        # The server always creates them in /tmp, and a SIGKILL leaves them there.
        for service, port in self._ports.items():
            for name in (f"{service}-{port}", f"{service}-grpc-{port + PAIR_DISTANCE}"):
                Path(f"/tmp/seaweedfs-{name}.sock").unlink(missing_ok=True)


class _PortTakenError(Unavailable):
    """Another process took a port between the search and the start."""


def find_weed() -> Path:
    """Return the server program: beside the running interpreter, else on the PATH. Raises ConfigError."""
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise ConfigError("weed: not installed", hint=INSTALL_ALL)
    return Path(found)


def _identity(name: str, access_key: str, secret_key: str, actions: list[str]) -> dict[str, object]:
    credentials = [{"accessKey": access_key, "secretKey": secret_key}]
    return {"name": name, "credentials": credentials, "actions": actions}


def _succeeds(succeeds: Callable[[], bool]) -> bool:
    try:
        return succeeds()
    except (OSError, http.client.HTTPException):
        return False


#: The last release with source; it builds in some ten minutes on two cores.
GO_MODULE = "github.com/minio/minio@v0.0.0-20260212201848-7aac2a2c5b7c"
PROGRAM_VARIABLE = "FLOE_MINIO"
_BUCKET = "floe"
_CHECK_INTERVAL_S = 0.5  # seconds between two checks that it still runs


def find_minio() -> Path | None:
    """Return `FLOE_MINIO`, else `minio` on the PATH, in the folder of `go install`, or beside this Python; else None.

    Raises ConfigError if FLOE_MINIO does not name a program; an empty FLOE_MINIO means none.
    """
    named = os.environ.get(PROGRAM_VARIABLE)
    if named is not None:
        if named and not _is_program(Path(named)):
            raise ConfigError(
                f"{PROGRAM_VARIABLE}: expected a program, found {named!r}", hint=f"correct or unset {PROGRAM_VARIABLE}"
            )
        return Path(named) if named else None
    if on_path := shutil.which("minio"):
        return Path(on_path)
    return next((path for folder in _program_folders() if _is_program(path := folder / "minio")), None)


def new_local_s3(folder: Path) -> LocalS3:
    """Return MinIO if it is installed, else SeaweedFS; its data stays in `folder`."""
    return MinIO(folder) if find_minio() else SeaweedFS(folder)


class MinIO(LocalS3):
    """`minio server` with one drive.

    `environment`: further settings of MinIO, such as MINIO_NOTIFY_NATS_… for notifications.
    """

    name = "MinIO"
    _services = ("s3", "console")

    def __init__(self, folder: Path | None = None, *, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(folder)
        key = base64.b64encode(hashlib.sha256(self.secret_key.encode()).digest()).decode()
        self._settings = {
            "MINIO_ROOT_USER": self.access_key,
            "MINIO_ROOT_PASSWORD": self.secret_key,
            "MINIO_BROWSER": "off",
            "MINIO_UPDATE": "off",
            "MINIO_KMS_SECRET_KEY": f"floe:{key}",  # for objects that ask to be encrypted
            **(environment or {}),
        }

    def _command(self, data: Path) -> list[str]:
        if (program := find_minio()) is None:
            raise ConfigError("minio: not installed", hint=f"go install {GO_MODULE}")
        address, console = (f"127.0.0.1:{self._ports[service]}" for service in self._services)
        return [str(program), "server", "--address", address, "--console-address", console, str(data)]

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), **self._settings}


def _program_folders() -> Iterator[Path]:
    """Yield the folders that may hold a program that is not on the PATH."""
    for folder in (os.environ.get("GOBIN"), *(f"{p}/bin" for p in os.environ.get("GOPATH", "").split(":") if p)):
        if folder:
            yield Path(folder)
    yield Path.home() / "go" / "bin"
    yield Path(sysconfig.get_path("scripts"))


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _new_server() -> MinIO:
    """Return a server, built if needed. Raises ConfigError without go, Unavailable if the build fails."""
    if not find_minio():
        if not shutil.which("go"):
            raise ConfigError(
                f"minio: expected it on the PATH or in {PROGRAM_VARIABLE}, found neither it nor go",
                hint=f"install go, then: go install {GO_MODULE}",
            )
        _build()
    return MinIO()


def _build() -> None:
    """Run `go install`. Raises Unavailable if the build fails."""
    click.echo(f"minio is not installed: go install {GO_MODULE} (about ten minutes, once) …", err=True)
    if code := subprocess.run(["go", "install", GO_MODULE], check=False).returncode:
        raise Unavailable(f"go install {GO_MODULE}: expected exit code 0, found {code}")


def _settings(server: LocalS3) -> str:
    return f"""\
# MinIO runs until Ctrl-C, then its data is deleted. For a configuration of Floe:
store:
  url: s3://{_BUCKET}
  endpoint_url: {server.endpoint_url}
  access_key_id: {server.access_key}
  secret_access_key: {server.secret_key}
"""


def main() -> int:
    """Run MinIO with a bucket, in a temporary folder, until SIGINT or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server = _new_server()
        try:
            server.start()
            server.create_bucket(_BUCKET)
            click.echo(_settings(server), nl=False)
            while True:
                server.raise_if_ended()
                time.sleep(_CHECK_INTERVAL_S)
        finally:
            server.stop()
    except KeyboardInterrupt:
        return 0
    except FloeError as error:
        click.echo(error.as_text(), err=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
