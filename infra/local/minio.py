"""MinIO, the S3 server of the demo and the tests if it is installed: one process on loopback.

`python -m infra.local.minio` (`make minio`) starts one and prints the settings to connect to it. It runs an installed
MinIO, else one that it builds with go.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from common.errors import ConfigError, FloeError, Unavailable
from infra.local.seaweedfs import LocalS3, SeaweedFS

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
