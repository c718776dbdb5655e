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

from common.logs import escape
from common.metrics import REGISTRY
from common.observe.monitor import Answer, Health, Pages, text_answer
from egress.workers.process import WorkerProcess

PAGE_TIMEOUT_S = 2.0  # seconds


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """The answer of one worker. Status 0: none, because it is not running yet, has ended, or did not answer."""

    index: int
    pid: int
    restarts: int
    port: int
    status: int = 0
    text: str = ""


def fetch_from_all(workers: Sequence[WorkerProcess], path: str) -> list[WorkerAnswer]:
    """Request `path` from all workers, in their order; return within a few seconds, even if they do not answer."""
    with ThreadPoolExecutor(len(workers), thread_name_prefix="ask") as pool:
        return list(pool.map(lambda worker: _fetch(worker, path), workers))


def _fetch(worker: WorkerProcess, path: str) -> WorkerAnswer:
    found = WorkerAnswer(worker.index, worker.pid, worker.restarts, worker.port)
    if not found.port:
        return found
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", found.port, timeout=PAGE_TIMEOUT_S)) as connection:
            connection.request("GET", path, headers={"Accept": "text/plain;version=0.0.4"})
            answer = connection.getresponse()
            return replace(found, status=answer.status, text=answer.read().decode())
    except ConnectionError:  # its process has ended; the supervisor restarts it
        return replace(found, port=0)
    except (OSError, http.client.HTTPException, ValueError):
        return found


@dataclass(slots=True)
class _MetricFamily:
    """The lines of one metric: at most one comment of each kind (HELP, TYPE), and the samples of all processes."""

    comments: dict[str, str] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)


def merge_metrics(parent_page: str, worker_pages: Mapping[str, str]) -> str:
    """Merge `parent_page` with `worker_pages`, which get their keys as the label `worker`.

    Every family appears once, with one HELP and one TYPE.
    """
    families: dict[str, _MetricFamily] = {}
    for worker, page in (("", parent_page), *worker_pages.items()):
        family = families.setdefault("", _MetricFamily())
        for line in page.splitlines():
            if line.startswith("# "):
                _, kind, name, *_ = line.split(" ", 3)
                family = families.setdefault(name, _MetricFamily())
                family.comments.setdefault(kind, line)
            elif line:
                family.samples.append(add_worker_label(line, worker) if worker else line)
    lines = (line for each in families.values() for line in (*each.comments.values(), *each.samples))
    return "".join(f"{line}\n" for line in lines)


def add_worker_label(sample: str, worker: str) -> str:
    brace, space = sample.find("{"), sample.find(" ")
    if 0 <= brace < space:
        return f'{sample[: brace + 1]}worker="{worker}",{sample[brace + 1 :]}'
    return f'{sample[:space]}{{worker="{worker}"}}{sample[space:]}'


class WorkerPages(Pages):
    """The pages of one process, merged over its workers. `health`: the parent's. `fetch`: requests a path from them."""

    def __init__(
        self, health: Health, fetch: Callable[[str], list[WorkerAnswer]], registry: CollectorRegistry = REGISTRY
    ) -> None:
        super().__init__(health, registry)
        self._registry, self._fetch = registry, fetch

    def document(self) -> dict[str, Any]:
        return self._document("/status")

    def document_for_reader(self) -> dict[str, Any]:
        return self._document("/status?coverage")

    def _document(self, path: str) -> dict[str, Any]:
        answers = self._fetch(path)
        workers = {each: _worker_document(each) for each in answers}
        problems = [
            f"worker {each.index}: {problem}"
            for each, found in workers.items()
            for problem in found.get("problems", [_missing_answer_reason(each)])
        ]
        status = {**self._health.status(), "ready": not problems, "problems": problems}
        for process_key in ("parts", "coverage"):
            status.pop(process_key)
        return {**status, "workers": {str(each.index): found for each, found in workers.items()}}

    def _metrics(self, _accept: str) -> Answer:
        answers = self._fetch("/metrics")
        worker_pages = {str(each.index): each.text for each in answers if each.status == 200}
        page = merge_metrics(generate_latest(self._registry).decode(), worker_pages)
        return 200, CONTENT_TYPE_PLAIN_0_0_4, page.encode()

    def _healthz(self, accept: str) -> Answer:
        """Return 503 if a worker hangs. A worker that is being restarted is no reason to restart the parent."""
        hanging = [
            f"worker {each.index}: {each.text.strip() or 'no answer'}"
            for each in self._fetch("/healthz")
            if each.port and each.status != 200
        ]
        return text_answer(503, "\n".join(hanging)) if hanging else super()._healthz(accept)

    def _readyz(self, _accept: str) -> Answer:
        problems = [
            f"worker {each.index}: {escape(line)}"
            for each in self._fetch("/readyz")
            if each.status != 200
            for line in each.text.splitlines() or [_missing_answer_reason(each)]
        ]
        return text_answer(503, "\n".join(problems)) if problems else text_answer(200, "ready")


def _worker_document(answer: WorkerAnswer) -> dict[str, Any]:
    about: dict[str, Any] = {"pid": answer.pid, "restarts": answer.restarts}
    with suppress(ValueError, TypeError):
        return {**about, **json.loads(answer.text)}
    return about


def _missing_answer_reason(answer: WorkerAnswer) -> str:
    return "no answer" if answer.port else "starting" if answer.pid else "not running"
