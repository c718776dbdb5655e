"""The metrics of ingress on /metrics, added up over processes that are killed."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Callable, Iterable
from contextlib import suppress
from http.client import HTTPException

from tests.scenarios.delivery_centre import Instance

SPACING = 0.4  # seconds between two readings
_SAMPLE = re.compile(r"^(floe_\w+?)(?:\{([^}]*)\})? ([-+0-9.eEinfNa]+)$", re.MULTILINE)

Samples = dict[tuple[str, str], float]


def scrape(monitor: str, timeout: float = 1.0) -> Samples:
    """Return every sample by its name and labels, as /metrics writes them. Raises OSError."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{monitor}/metrics", timeout=timeout) as answer:
        text = answer.read().decode()
    return {(name, labels): float(value) for name, labels, value in _SAMPLE.findall(text)}


def value(samples: Samples, name: str, *labels: str) -> float:
    """Return the sum of all samples of this name with each of `labels` in their labels."""
    return sum(v for (n, text), v in samples.items() if n == name and all(one in text for one in labels))


class Meter:
    """A reader of the metrics of all instances, within a block.

    `holder`: the name of the last instance that took the target; empty: none yet.
    `take_overs`: times that it was another one than before. `publishers`: all that were in use.
    """

    def __init__(self, instances: Iterable[Instance]) -> None:
        self.holder, self.take_overs = "", 0
        self.publishers: set[str] = set()
        self._instances = list(instances)
        self._last: dict[tuple[str, int], Samples] = {}
        self._held: set[tuple[str, int]] = set()

    async def __aenter__(self) -> Meter:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self.look()

    def total(self, name: str, *labels: str) -> int:
        """Return the sum over all processes that ever ran, as far as they were read before they ended."""
        return round(sum(value(samples, name, *labels) for samples in self._last.values()))

    def answers(self, instance: Instance) -> bool:
        """Return true if it has answered since it was last started."""
        return instance.service.runs() and (instance.name, instance.service.pid) in self._last

    @property
    def unclear(self) -> int:
        """Return the number of outcomes that had to be read from the target."""
        return self.total("floe_ingress_unclear_outcomes_total")

    def totals(self) -> dict[str, int]:
        """Return the main numbers for an operator."""
        names = {
            "unclear outcomes": ("floe_ingress_unclear_outcomes_total",),
            "intents closed": ("floe_ingress_intents_total", 'result="closed"'),
            "intents taken over": ("floe_ingress_intents_total", 'result="taken_over"'),
            "refused batches": ("floe_ingress_refused_batches_total",),
        }
        return {text: self.total(*name) for text, name in names.items()}

    async def look(self) -> None:
        """Read each once; an instance that does not answer is asked again next time."""
        await asyncio.gather(*(self._look_at(instance) for instance in self._instances))
        held = {(i.name, i.service.pid) for i in self._instances if self._holds(i)}
        for name, _ in held - self._held:  # a paused one still reports that it holds the target
            self.take_overs += self.holder not in ("", name)
            self.holder = name
        self._held = held

    async def _look_at(self, instance: Instance) -> None:
        if not instance.service.runs():
            return
        key = (instance.name, instance.service.pid)
        with suppress(OSError, ValueError, HTTPException):  # it may be killed in the middle of an answer
            self._last[key] = await asyncio.to_thread(scrape, instance.monitor)
            for (name, labels), number in self._last[key].items():
                if name == "floe_ingress_publisher" and number:
                    self.publishers.update(re.findall(r'publisher="(\w+)"', labels))

    def _holds(self, instance: Instance) -> bool:
        if not instance.service.runs():
            return False
        return value(self._last.get((instance.name, instance.service.pid), {}), "floe_ingress_lease_held") > 0

    async def _run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(SPACING)


def peak_memory(pid: int) -> int:
    """Return the peak memory of the process in bytes (Linux). Raises OSError."""
    with open(f"/proc/{pid}/status") as status:
        line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


async def until(check: Callable[[], bool], seconds: float) -> bool:
    """Wait for `check`. Return true if it became true within so many seconds."""
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.1)
    return True
