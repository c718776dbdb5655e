"""The command `nats` (natscli 0.5 or newer), for backups: from FLOE_NATS_CLI, .venv/nats-cli, or the PATH."""

import asyncio
import os
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

import pytest

from tests.support.basics import PATIENCE

GO_MODULE = "github.com/nats-io/natscli/nats@v0.5.1"
FOLDER = Path(sysconfig.get_path("scripts")).parent / "nats-cli"


@cache
def program() -> str:
    """Return the program; empty if there is none that knows `nats backup`."""
    for found in (os.environ.get("FLOE_NATS_CLI"), str(FOLDER / "nats"), shutil.which("nats")):
        if found and Path(found).is_file():
            done = subprocess.run([found, "backup", "validate", "--help"], capture_output=True, check=False)
            if not done.returncode:
                return found
    return ""


def require_nats(*, build: bool) -> None:
    """Skip the test where there is no `nats`. `build`: build it if there is Go, which needs the network."""
    if build and not program() and shutil.which("go"):
        subprocess.run(["go", "install", GO_MODULE], env={**os.environ, "GOBIN": str(FOLDER)}, check=True)
        program.cache_clear()
    if not program():
        pytest.skip(f"no `nats` with `nats backup`: GOBIN={FOLDER} go install {GO_MODULE}")


async def nats(url: str, *words: str) -> str:
    """Run `nats` on a server. Return its output, and fail unless it succeeds."""
    command = [program(), "-s", url, *words]
    env = {**os.environ, "XDG_CONFIG_HOME": "/nonexistent"}
    run = asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, env=env, check=False)
    done = await asyncio.wait_for(run, 10 * PATIENCE)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return str(done.stdout)
