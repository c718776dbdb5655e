"""Asks the monitors of the workers, all at once, from a thread of the parent's monitor."""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from egress.workers.process import WorkerProcess

TIMEOUT = 2.0  # seconds


@dataclass(frozen=True, slots=True)
class Said:
    """What one worker answered; status 0: nothing, because it runs not, not yet, or not on."""

    index: int
    pid: int
    restarts: int
    port: int
    status: int = 0
    text: str = ""


def ask_all(workers: Sequence[WorkerProcess], path: str) -> list[Said]:
    """What each says on `path`, in their order; within a few seconds, whatever they do."""
    with ThreadPoolExecutor(len(workers), thread_name_prefix="ask") as pool:
        return list(pool.map(lambda worker: _ask(worker, path), workers))


def _ask(worker: WorkerProcess, path: str) -> Said:
    index, pid, restarts, port = worker.index, worker.pid, worker.restarts, worker.port
    if not port:
        return Said(index, pid, restarts, port)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    try:
        connection.request("GET", path, headers={"Accept": "text/plain;version=0.0.4"})
        answer = connection.getresponse()
        return Said(index, pid, restarts, port, answer.status, answer.read().decode())
    except (OSError, http.client.HTTPException, ValueError):
        return Said(index, pid, restarts, port)
    finally:
        connection.close()
