"""The pages of the parent's monitor: what its workers say, together."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from common.service.metrics import REGISTRY
from common.service.monitor import Health, Pages
from common.service.monitor_http import Answer
from common.service.text import escaped
from egress.workers.asking import Said, ask_all
from egress.workers.exposition import merged
from egress.workers.process import WorkerProcess

Ask = Callable[[Sequence[WorkerProcess], str], list[Said]]


class WorkerPages(Pages):
    """As the pages of one process. `health` is the parent's, and `ask` asks the workers."""

    def __init__(
        self,
        health: Health,
        workers: Sequence[WorkerProcess],
        registry: CollectorRegistry = REGISTRY,
        ask: Ask = ask_all,
    ) -> None:
        super().__init__(health, registry)
        self._own, self._workers, self._ask = registry, workers, ask

    def document(self) -> dict[str, Any]:
        said = self._ask(self._workers, "/status")
        problems = [problem for each in said for problem in _problems(each)]
        status = {**self._health.status(), "ready": not problems, "problems": problems}
        status.pop("parts")
        return {**status, "workers": {str(each.index): _of_worker(each) for each in said}}

    def _metrics(self, _accept: str) -> Answer:
        said = self._ask(self._workers, "/metrics")
        pages = {str(each.index): each.text for each in said if each.status == 200}
        page = merged(generate_latest(self._own).decode(), pages)
        return 200, CONTENT_TYPE_PLAIN_0_0_4, page.encode()

    def _healthz(self, accept: str) -> Answer:
        """A worker that is being started again is no reason to restart the parent; one that hangs is."""
        hanging = [
            f"worker {each.index}: {each.text.strip() or 'no answer'}"
            for each in self._ask(self._workers, "/healthz")
            if each.port and each.status != 200
        ]
        return _text(503, hanging) if hanging else super()._healthz(accept)

    def _readyz(self, _accept: str) -> Answer:
        problems = [
            f"worker {each.index}: {escaped(line)}"
            for each in self._ask(self._workers, "/readyz")
            if each.status != 200
            for line in each.text.splitlines() or [_why_silent(each)]
        ]
        return _text(503, problems) if problems else _text(200, ["ready"])


def _problems(said: Said) -> list[str]:
    status = _of_worker(said)
    found = status.get("problems", [_why_silent(said)])
    return [f"worker {said.index}: {problem}" for problem in found]


def _of_worker(said: Said) -> dict[str, Any]:
    """What /status shows of one worker."""
    about: dict[str, Any] = {"pid": said.pid, "restarts": said.restarts}
    with suppress(ValueError, TypeError):
        return {**about, **json.loads(said.text)}
    return about


def _why_silent(said: Said) -> str:
    return "no answer" if said.port else "starting" if said.pid else "not running"


def _text(status: int, lines: Sequence[str]) -> Answer:
    return status, "text/plain; charset=utf-8", ("\n".join(lines) + "\n").encode()
