"""The metrics registry. Each part declares its metrics once, at import, with these helpers.

Every name gets the prefix `floe_`. Labels are site, feed, partition, target and small fixed sets (reason,
level, op, result); never a subject, a sender or a segment, which would grow without bound. Base units only:
seconds and bytes.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector

from common.service.version import version

PREFIX = "floe_"

#: Seconds: from one object request within a rack to an upload over a slow line.
SECONDS_BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

# Counters are read as rates; their creation times would double the number of series.
disable_created_metrics()  # type: ignore[no-untyped-call]

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
GCCollector(registry=REGISTRY)


def counter(name: str, help: str, labels: Sequence[str] = ()) -> Counter:
    """A counter `floe_{name}_total`; `name` may end in `_total` or not. Raises ValueError if it exists."""
    return Counter(PREFIX + name, help, labels, registry=REGISTRY)


def gauge(name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
    """A gauge `floe_{name}`. Raises ValueError if it exists."""
    return Gauge(PREFIX + name, help, labels, registry=REGISTRY)


def histogram(
    name: str, help: str, labels: Sequence[str] = (), buckets: Sequence[float] = SECONDS_BUCKETS
) -> Histogram:
    """A histogram `floe_{name}`; `buckets` are upper bounds in its unit. Raises ValueError if it exists."""
    return Histogram(PREFIX + name, help, labels, registry=REGISTRY, buckets=buckets)


build_info = gauge("build_info", "1, labelled with the version of Floe and of Python", ("version", "python"))
build_info.labels(version(), platform.python_version()).set(1)
