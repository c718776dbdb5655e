"""The pages of the parent's monitor: the answers of its workers, merged."""

import http.client
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from common.logs import escaped
from common.metrics import REGISTRY
from common.service.monitor import Answer, Health, Pages
from egress.workers.process import WorkerProcess

TIMEOUT = 2.0  # seconds


@dataclass(frozen=True, slots=True)
class Said:
    """The answer of one worker. Status 0: none, because it is not running yet, has ended, or did not answer."""

    index: int
    pid: int
    restarts: int
    port: int
    status: int = 0
    text: str = ""


def ask_all(workers: Sequence[WorkerProcess], path: str) -> list[Said]:
    """Request `path` from all workers, in their order; return within a few seconds, even if they do not answer."""
    with ThreadPoolExecutor(len(workers), thread_name_prefix="ask") as pool:
        return list(pool.map(lambda worker: _ask(worker, path), workers))


def _ask(worker: WorkerProcess, path: str) -> Said:
    said = Said(worker.index, worker.pid, worker.restarts, worker.port)
    if not said.port:
        return said
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", said.port, timeout=TIMEOUT)) as connection:
            connection.request("GET", path, headers={"Accept": "text/plain;version=0.0.4"})
            answer = connection.getresponse()
            return replace(said, status=answer.status, text=answer.read().decode())
    except ConnectionError:  # its process has ended; the supervisor restarts it
        return replace(said, port=0)
    except (OSError, http.client.HTTPException, ValueError):
        return said


@dataclass(slots=True)
class _Family:
    """The lines of one metric: at most one comment of each kind (HELP, TYPE), and the samples of all processes."""

    comments: dict[str, str] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)


def merged(own: str, pages: Mapping[str, str]) -> str:
    """Merge the page `own` with `pages`, which get their keys as the label `worker`.

    Every family appears once, with one HELP and one TYPE.
    """
    families: dict[str, _Family] = {}
    for worker, page in (("", own), *pages.items()):
        family = families.setdefault("", _Family())
        for line in page.splitlines():
            if line.startswith("# "):
                _, kind, name, *_ = line.split(" ", 3)
                family = families.setdefault(name, _Family())
                family.comments.setdefault(kind, line)
            elif line:
                family.samples.append(labelled(line, worker) if worker else line)
    lines = (line for each in families.values() for line in (*each.comments.values(), *each.samples))
    return "".join(f"{line}\n" for line in lines)


def labelled(sample: str, worker: str) -> str:
    brace, space = sample.find("{"), sample.find(" ")
    if 0 <= brace < space:
        return f'{sample[: brace + 1]}worker="{worker}",{sample[brace + 1 :]}'
    return f'{sample[:space]}{{worker="{worker}"}}{sample[space:]}'


class WorkerPages(Pages):
    """The pages of one process, merged over its workers. `health`: the parent's. `ask`: requests a path from them."""

    def __init__(
        self, health: Health, ask: Callable[[str], list[Said]], registry: CollectorRegistry = REGISTRY
    ) -> None:
        super().__init__(health, registry)
        self._own, self._ask = registry, ask

    def document(self) -> dict[str, Any]:
        return self._document("/status")

    def read_document(self) -> dict[str, Any]:
        return self._document("/status?coverage")

    def _document(self, path: str) -> dict[str, Any]:
        said = self._ask(path)
        workers = {each: _of_worker(each) for each in said}
        problems = [
            f"worker {each.index}: {problem}"
            for each, found in workers.items()
            for problem in found.get("problems", [_why_silent(each)])
        ]
        status = {**self._health.status(), "ready": not problems, "problems": problems}
        for of_one in ("parts", "coverage"):
            status.pop(of_one)
        return {**status, "workers": {str(each.index): found for each, found in workers.items()}}

    def _metrics(self, _accept: str) -> Answer:
        said = self._ask("/metrics")
        pages = {str(each.index): each.text for each in said if each.status == 200}
        page = merged(generate_latest(self._own).decode(), pages)
        return 200, CONTENT_TYPE_PLAIN_0_0_4, page.encode()

    def _healthz(self, accept: str) -> Answer:
        """Return 503 if a worker hangs. A worker that is being restarted is no reason to restart the parent."""
        hanging = [
            f"worker {each.index}: {each.text.strip() or 'no answer'}"
            for each in self._ask("/healthz")
            if each.port and each.status != 200
        ]
        return _text(503, hanging) if hanging else super()._healthz(accept)

    def _readyz(self, _accept: str) -> Answer:
        problems = [
            f"worker {each.index}: {escaped(line)}"
            for each in self._ask("/readyz")
            if each.status != 200
            for line in each.text.splitlines() or [_why_silent(each)]
        ]
        return _text(503, problems) if problems else _text(200, ["ready"])


def _of_worker(said: Said) -> dict[str, Any]:
    about: dict[str, Any] = {"pid": said.pid, "restarts": said.restarts}
    with suppress(ValueError, TypeError):
        return {**about, **json.loads(said.text)}
    return about


def _why_silent(said: Said) -> str:
    return "no answer" if said.port else "starting" if said.pid else "not running"


def _text(status: int, lines: Sequence[str]) -> Answer:
    return status, "text/plain; charset=utf-8", ("\n".join(lines) + "\n").encode()
