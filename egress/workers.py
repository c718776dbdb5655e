"""Several processes of one egress: their parent starts them, restarts one that ends unexpectedly, ends all together.

The monitor of the parent merges the answers of its workers. A socket between the two sides gives the parent the port of
a worker's monitor, and shows a worker that its parent has ended.
"""

import asyncio
import http.client
import importlib.util
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from common.clock import Backoff, Clock, SystemClock
from common.errors import FloeError, UsageError
from common.exits import EXIT_RETRY_LATER, is_debug, requested_context
from common.logs import escape, flush, get_logger
from common.metrics import REGISTRY, counter, gauge, show_zeros
from common.observe.monitor import Answer, Health, Monitor, Pages, text_answer
from common.service.process import SystemdNotifier, exit_at_once, handle_signal, on_hangup, on_quit, stop_on_signals
from common.service.progress import ProcessLog
from common.settings.root import Settings
from common.tasks import BACKOFF_RESET_S, Stop, cancel, first_of, raise_fatal, record_unexpected, spawn, wait_for
from egress.partition import require_feeds

log = get_logger(__name__)

FATAL_EXIT_CODES = (78, 77, 2)  # a restart would only repeat these errors: configuration, credentials, the command line


def shell_exit_code(returncode: int) -> int:
    """Return the shell's exit code. `returncode` below 0: a signal ended the process; it is 128 plus its number."""
    return 128 - returncode if returncode < 0 else returncode


def worst_exit_code(codes: Iterable[int]) -> int:
    """Return the code that matters most to an operator; 0 if `codes` is empty."""
    ranks = {0: 0, EXIT_RETRY_LATER: 1, **dict.fromkeys(FATAL_EXIT_CODES, 3)}
    return max(codes, key=lambda code: (ranks.get(code, 2), code), default=0)


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The worker's side: it is `index` of `count`; its parent holds the other end of the socket `descriptor`."""

    index: int
    count: int
    descriptor: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `INDEX/COUNT/DESCRIPTOR`. Raises UsageError for anything else; only the parent uses the option."""
        try:
            index, count, descriptor = map(int, text.split("/"))
        except ValueError:
            raise UsageError(f"--worker: expected INDEX/COUNT/DESCRIPTOR, found {text!r:.40}") from None
        return cls(index, count, descriptor)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}/{self.descriptor}"

    async def watch_parent(self, port: int, stop: Stop) -> None:
        """Send the monitor's `port` to the parent; set `stop` when the parent has ended."""
        with socket.socket(fileno=self.descriptor) as connection:
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            try:
                await loop.sock_sendall(connection, json.dumps({"port": port}).encode() + b"\n")
                while await loop.sock_recv(connection, 1024):
                    pass
            except OSError as error:
                log.debug("parent socket closed", action="parent_socket_closed", error=str(error))
        log.warning("parent lost", action="parent_lost")
        stop.set()


class WorkerProcess:
    """The parent's side of worker `index` of `count`. It runs one process at a time, as often as `run_once` is called.

    `pid` and `port` are 0 while they are unknown. Other threads read them.
    """

    def __init__(self, index: int, count: int, command: Sequence[str], environment: dict[str, str]) -> None:
        self.index, self._count = index, count
        self._command, self._environment = tuple(command), environment
        self.pid, self.port, self.restarts = 0, 0, 0
        self._has_handlers, self._delayed = False, set[int]()  # signals for later
        show_zeros("egress_worker_", worker=str(index))

    async def run_once(self, stop: Stop, kill_after_s: float) -> int:
        """Run one process until it ends, and return its exit code. Raises OSError if it cannot be started.

        Once `stop` is set, it receives SIGTERM and drains; after `kill_after_s` seconds it is killed.
        """
        self._has_handlers, self._delayed = False, set()
        parent_end, worker_end = socket.socketpair()
        with parent_end:
            with worker_end:
                process = await self.start(worker_end)
            self.pid = process.pid
            log.info("worker started", action="worker_started", worker=self.index, pid=process.pid)
            reading = spawn(self._read_port(parent_end), self._on_read_error, name=f"line of worker {self.index}")
            try:
                return shell_exit_code(await self._wait_for_end(process, stop, kill_after_s))
            finally:
                self.pid = self.port = 0
                await cancel(reading)

    async def start(self, connection: socket.socket) -> asyncio.subprocess.Process:
        descriptor, devnull = connection.fileno(), asyncio.subprocess.DEVNULL
        command = (*self._command, "--worker", str(WorkerIdentity(self.index, self._count, descriptor)))
        # In a session of its own: a terminal's Ctrl-C goes to the parent only, which signals its workers once.
        return await asyncio.create_subprocess_exec(
            *command, stdin=devnull, env=self._environment, pass_fds=(descriptor,), start_new_session=True
        )

    async def _read_port(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        loop, text = asyncio.get_running_loop(), b""
        while not text.endswith(b"\n"):
            if not (part := await loop.sock_recv(connection, 1024)):
                return
            text += part
        self.port = int(json.loads(text)["port"])
        self._has_handlers = True
        for each in sorted(self._delayed):
            self.send_signal(each)

    def _on_read_error(self, error: Exception) -> None:
        record_unexpected(error, "worker", f"line of worker {self.index}")
        self.send_signal(signal.SIGTERM)

    async def _wait_for_end(self, process: asyncio.subprocess.Process, stop: Stop, kill_after_s: float) -> int:
        try:
            await first_of(process.wait(), stop.wait())
            if process.returncode is None:
                self.send_signal(signal.SIGTERM)
                await first_of(process.wait(), seconds=kill_after_s)
            if process.returncode is None:
                log.error("worker killed", action="worker_killed", worker=self.index, pid=self.pid)
                self.send_signal(signal.SIGKILL)
            return await process.wait()
        finally:
            if process.returncode is None:
                self.send_signal(signal.SIGKILL)

    def send_signal(self, signal_number: int) -> None:
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal_number)

    def notify(self, signal_number: int) -> None:
        """Send a signal that the worker handles; later, if it has not sent its port yet: it would end by the signal."""
        if self._has_handlers:
            self.send_signal(signal_number)
        else:
            self._delayed.add(signal_number)


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


KILL_MARGIN_S = 10.0  # seconds beyond the shutdown timeout until a worker that does not end is killed


WORKER_LABELS = ("worker",)
running_workers = gauge("egress_worker_running", "1 while the process runs under this monitor.", WORKER_LABELS)
restarts = counter("egress_worker_restarts", "Restarts of the worker after an unexpected end.", WORKER_LABELS)


class Supervisor:
    """The workers of one parent. `shutdown_timeout`: seconds that each may take to drain, at most."""

    def __init__(
        self, workers: Sequence[WorkerProcess], shutdown_timeout: float, clock: Clock, rng: random.Random
    ) -> None:
        self.workers = workers
        self._kill_after_s, self._clock, self._rng = shutdown_timeout + KILL_MARGIN_S, clock, rng
        self._stop = Stop()

    async def run(self, stop: Stop) -> int:
        """Run until all have ended, and return the worst of their exit codes.

        They end after `stop` is set, or after one of them ends with a code in `FATAL_EXIT_CODES`.
        """
        self._stop = Stop(stop)
        async with asyncio.TaskGroup() as tasks:
            worker_tasks = [tasks.create_task(self._run_with_restarts(worker)) for worker in self.workers]
        return worst_exit_code(task.result() for task in worker_tasks)

    def send_signal(self, signal_number: int) -> None:
        """Send a signal to all; may be called from a signal handler."""
        for worker in self.workers:
            worker.send_signal(signal_number)

    def notify(self, signal_number: int) -> None:
        """Send all a signal that they handle; see `WorkerProcess.notify`."""
        for worker in self.workers:
            worker.notify(signal_number)

    async def _run_with_restarts(self, worker: WorkerProcess) -> int:
        backoff = Backoff(self._rng)
        while True:
            started = self._clock.monotonic()
            if (code := await self._run_once(worker)) in FATAL_EXIT_CODES and not self._stop.is_set:
                log.error("workers stopped", action="workers_stopped", worker=worker.index, exit_code=code)
                self._stop.set()
            if self._stop.is_set:
                return code
            if self._clock.monotonic() - started > BACKOFF_RESET_S:
                backoff.reset()
            seconds = backoff.next_delay()
            context = {"worker": worker.index, "exit_code": code, "seconds": round(seconds, 2)}
            log.error("worker restart scheduled", action="worker_restart_scheduled", **context)
            if await wait_for(self._stop, seconds):
                return code
            worker.restarts += 1
            restarts.labels(str(worker.index)).inc()

    async def _run_once(self, worker: WorkerProcess) -> int:
        running = running_workers.labels(str(worker.index))
        running.set(1)
        try:
            return await worker.run_once(self._stop, self._kill_after_s)
        except OSError as error:
            log.error("worker start failed", action="worker_start_failed", worker=worker.index, error=str(error))
            return 1
        finally:
            running.set(0)


def worker_command(config: str) -> list[str]:
    """Return the command line of a worker: this Python, this Floe, the same file in the same context."""
    # Run as a script, its own folder comes first in the module path, not the working directory of the parent.
    if (found := importlib.util.find_spec("floe")) is None or found.origin is None:
        raise FloeError("floe: expected the command among the modules, found none", code="E-UNEXPECTED")
    context = ["--context", name] if (name := requested_context()) else []
    return [sys.executable, found.origin, "egress", "run", "-c", config, *context]


async def run_workers(config: str, settings: Settings, count: int) -> int:
    """Run `count` workers of the configuration file `config` until a signal; return the worst of their exit codes.

    On the first signal they drain. The second kills them.
    """
    require_feeds(settings.egress.feeds_)
    clock = SystemClock()
    environment = {**os.environ, **({"FLOE_DEBUG": "1"} if is_debug() else {})}
    workers = [WorkerProcess(index, count, worker_command(config), environment) for index in range(count)]
    supervisor = Supervisor(workers, settings.egress.shutdown_timeout, clock, random.SystemRandom())
    health = Health(clock, service="egress", site=settings.site, instance=settings.instance)
    pages, wanted = WorkerPages(health, partial(fetch_from_all, workers)), settings.egress.monitor
    monitor = Monitor(wanted.listen, health, pages=pages, tls=wanted.tls)
    monitor.start()
    log_fields = {"feeds": [each.label for each in settings.egress.feeds_], "workers": count, "monitor": wanted.listen}
    with closing(monitor), ProcessLog("egress", settings, clock, {}, list, **log_fields) as life:
        status_page = monitor.page_text if wanted.listen else lambda _path: (200, f"{count} workers, not checked")
        code = await supervise(supervisor, health, SystemdNotifier(status_page, clock))
        life.add_end_fields(exit_code=code)
        return code


async def supervise(supervisor: Supervisor, health: Health, notifier: SystemdNotifier | None = None) -> int:
    """Run the workers until a signal, and return the exit code. Raises any error of this process."""

    def kill(signal_number: int) -> None:
        supervisor.send_signal(signal.SIGKILL)
        flush()
        exit_at_once(signal_number)

    hang_up, quit_ = partial(supervisor.notify, signal.SIGHUP), partial(supervisor.notify, signal.SIGQUIT)
    on_hangup.append(hang_up)
    on_quit.append(quit_)
    with handle_signal(signal.SIGUSR1, partial(supervisor.notify, signal.SIGUSR1)):
        async with stop_on_signals(second=kill) as stop:
            heartbeat_task = spawn(health.keep_beating(), raise_fatal, name="beat")
            try:
                async with notifier.while_running(stop) if notifier else nullcontext():
                    return await supervisor.run(stop)
            finally:
                on_hangup.remove(hang_up)
                on_quit.remove(quit_)
                await cancel(heartbeat_task)
