"""A server's store on disk: saved, and put back in place of what came later."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from infra.local.nats import NatsServer


async def save_disk(server: NatsServer, folder: Path) -> Path:
    """A copy of the server's store as it is now."""
    saved = folder / "saved"

    def save() -> None:
        server.stop()
        shutil.copytree(server.store, saved)
        server.start()

    await asyncio.to_thread(save)
    return saved


async def restore_disk(server: NatsServer, saved: Path) -> None:
    """Put the copy back in place of what the server has now."""

    def restore() -> None:
        server.kill()
        shutil.rmtree(server.store)
        shutil.copytree(saved, server.store)
        server.start()

    await asyncio.to_thread(restore)
