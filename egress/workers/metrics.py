"""The metrics of the parent process, which has none of the feeds'."""

from __future__ import annotations

from common.service.metrics import counter, gauge

WORKER = ("worker",)

running = gauge("egress_worker_running", "1 while the process runs under this monitor.", WORKER)
restarts = counter("egress_worker_restarts", "Times it was started again after an unexpected end.", WORKER)
