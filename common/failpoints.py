"""Failpoints: named places at which a test may kill, stop, fail or delay the program.

Only the environment enables them: `FLOE_FAILPOINTS="egress.after_put=kill,ingress.mid_batch=stop@3"`. Actions:
`kill` (SIGKILL to itself), `stop` (SIGSTOP to itself), `raise` (FailpointRaised), `sleep:SECONDS` (blocks the
calling thread). `@N` acts on the N-th pass only (1 is the first and the default); `@*` acts on every pass.
"""

import os
import signal
from collections import Counter

from common.clock import SystemClock


class FailpointRaised(RuntimeError):
    """The error that the action `raise` raises."""


_points: dict[str, tuple[str, str]] = {}
_passes: Counter[str] = Counter()


def set_failpoints(text: str) -> None:
    """Set the failpoints to `text`, in the format of FLOE_FAILPOINTS; forget those that were set before."""
    _points.clear()
    for part in filter(None, text.split(",")):
        name, _, action = part.partition("=")
        mode, _, nth = action.partition("@")
        _points[name.strip()] = (mode, nth or "1")


set_failpoints(os.environ.get("FLOE_FAILPOINTS", ""))


def failpoint(name: str) -> None:
    if name not in _points:
        return
    action, nth = _points[name]
    _passes[name] += 1
    if nth == "*" or _passes[name] == int(nth):
        _act(name, action)


def _act(name: str, action: str) -> None:
    if action == "kill":
        signal.raise_signal(signal.SIGKILL)
    elif action == "stop":
        # Sent to this thread: a signal to the process leaves this thread time to take a lock first.
        signal.raise_signal(signal.SIGSTOP)
    elif action == "raise":
        raise FailpointRaised(name)
    elif action.startswith("sleep:"):
        # In pieces: a signal that another thread receives does not end this sleep; it is handled between two pieces.
        clock = SystemClock()
        until = clock.monotonic() + float(action.removeprefix("sleep:"))
        while (left := until - clock.monotonic()) > 0:
            clock.block(min(left, 0.1))
    else:
        raise ValueError(f"unknown failpoint action {action!r} for {name}")
