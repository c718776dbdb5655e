"""A worker's side: which of how many it is, and the line to its parent."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass
from typing import Self

from common.errors import UsageError
from common.service.logs import always, get_logger
from common.tasks import Stop

log = get_logger("egress.place")

LISTEN = "127.0.0.1:0"  # the parent alone reads the monitor of a worker


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Worker `index` of `count`, whose parent is at the other end of the socket `descriptor`."""

    index: int
    count: int
    descriptor: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """`INDEX/COUNT/DESCRIPTOR`. Raises UsageError: the option is the parent's, not for people."""
        try:
            index, count, descriptor = map(int, text.split("/"))
        except ValueError:
            raise UsageError(f"--worker: expected INDEX/COUNT/DESCRIPTOR, found {text!r:.40}") from None
        return cls(index, count, descriptor)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}/{self.descriptor}"

    def listen(self, configured: str) -> str:
        """Where this worker's monitor listens; nowhere if the parent's does not."""
        return configured and LISTEN

    def sign_logs(self) -> None:
        """Have every line of this process say which worker it is."""
        always(worker=self.index)

    async def watch(self, port: int, stop: Stop) -> None:
        """Tell the parent the monitor's `port`; set `stop` when the parent has gone."""
        with socket.socket(fileno=self.descriptor) as line:
            line.setblocking(False)
            loop = asyncio.get_running_loop()
            try:
                await loop.sock_sendall(line, json.dumps({"port": port}).encode() + b"\n")
                while await loop.sock_recv(line, 1024):
                    pass
            except OSError as error:
                log.debug("line broken", action="line_broken", error=str(error))
        log.warning("the parent has gone", action="parent_gone")
        stop.set()
