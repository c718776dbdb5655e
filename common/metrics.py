"""The metrics registry and Floe's version. Each component declares its metrics once, at import, with these functions.

Every name gets the prefix `floe_`. Labels are site, feed, partition, target and small fixed sets (reason,
level, op, result); never a subject, a sender or a segment, which would grow without bound. Base units only:
seconds and bytes.
"""

import itertools
import platform
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, write_to_textfile
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.samples import Sample

M = TypeVar("M", Counter, Histogram)

DISTRIBUTION = "floe-jetstream"


@cache
def version() -> str:
    """Return the version of the installed distribution, or of the checkout that runs; else `unknown`."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return _of_checkout(Path(__file__).parents[1] / "pyproject.toml")


def _of_checkout(project: Path) -> str:
    try:
        found = tomllib.loads(project.read_text())["project"]
    except (OSError, tomllib.TOMLDecodeError, KeyError):
        return "unknown"
    return str(found["version"]) if found.get("name") == DISTRIBUTION else "unknown"


PREFIX = "floe_"

#: Seconds: from one object request within a rack to an upload over a slow line.
DURATION_BUCKETS_S = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

# Counters are read as rates; their creation times would double the number of series.
disable_created_metrics()  # type: ignore[no-untyped-call]

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
GCCollector(registry=REGISTRY)


def counter(name: str, help: str, labels: Sequence[str] = (), *, kind: str = "", **sets: Iterable[str]) -> Counter:
    """Create the counter `floe_{name}_total`; `name` may end in `_total`. Raises ValueError if it exists.

    `sets`: the values of labels that have a small fixed set; ValueError for another label. `kind`: see `show_zeros`.
    """
    if unknown := sets.keys() - set(labels):
        raise ValueError(f"metric {name}: expected sets of its labels, found {unknown}")
    return _declare(Counter(PREFIX + name, help, labels, registry=REGISTRY), name, labels, kind, sets)


def write_textfile(path: Path, begin: str) -> None:
    """Write the metrics whose names begin so to the file `path`, which is whole at any moment. Raises OSError."""
    names = [family.name for family in REGISTRY.collect() if family.name.startswith(PREFIX + begin)]
    write_to_textfile(str(path), REGISTRY.restricted_registry(names))


def gauge(name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
    """Create the gauge `floe_{name}`. Raises ValueError if it exists."""
    return Gauge(PREFIX + name, help, labels, registry=REGISTRY)


def histogram(
    name: str,
    help: str,
    labels: Sequence[str] = (),
    *,
    kind: str = "",
    buckets: Sequence[float] = DURATION_BUCKETS_S,
    **sets: Iterable[str],
) -> Histogram:
    """Create the histogram `floe_{name}` of seconds. Raises ValueError if it exists.

    `kind`: see `show_zeros`; `sets`: as in `counter`.
    """
    made = Histogram(PREFIX + name, help, labels, registry=REGISTRY, buckets=buckets)
    return _declare(made, name, labels, kind, sets)


ScrapedValues = tuple[dict[str, str], Sequence[float | None]]


class ScrapedMetrics:
    """Metrics with the same labels whose values are read at a scrape, so that nothing is kept and set for each series.

    `counters`, `gauges`: their names without the prefix, and the help texts. Each of `sources` yields labels with a
    value for each metric, the counters first; None: no sample. It is called from any thread.
    """

    def __init__(self, labels: Sequence[str], counters: Mapping[str, str], gauges: Mapping[str, str]) -> None:
        self.labels, self._helps = tuple(labels), {"counter": counters, "gauge": gauges}
        self.sources: dict[str, Callable[[], Iterable[ScrapedValues]]] = {}
        REGISTRY.register(self)

    def describe(self) -> list[Metric]:
        return [Metric(PREFIX + name, text, kind) for kind, each in self._helps.items() for name, text in each.items()]

    def collect(self) -> list[Metric]:
        found = self.describe()
        names = [each.name + ("_total" if each.type == "counter" else "") for each in found]
        for source in [*self.sources.values()]:
            for labels, values in source():
                for metric, name, value in zip(found, names, values, strict=True):
                    if value is not None:
                        metric.samples.append(Sample(name, labels, value))
        return found


# The counts of removed series, by counter and by the labels that they had besides those of the removal
_REMOVED = defaultdict[MetricWrapperBase, dict[frozenset[tuple[str, str]], float]](dict)


def counter_total(metric: Counter, **labels: str) -> float:
    """Return the count of `metric` over all labels, or over those that have the values `labels`; also of series that
    were removed.
    """
    counts = [*_counts(metric), *_REMOVED[metric].items()]
    return sum(value for known, value in counts if labels.items() <= known)


def _counts(metric: Counter) -> Iterator[tuple[frozenset[tuple[str, str]], float]]:
    samples = (sample for family in metric.collect() for sample in family.samples if sample.name.endswith("_total"))
    return ((frozenset(sample.labels.items()), sample.value) for sample in samples)


def remove_series(labels: Mapping[str, str], *, but: str = "") -> None:
    """Remove the series of all metrics with these labels, which may have others too, unless that is the label `but`."""
    for metric in {each for each in REGISTRY._collector_to_names if isinstance(each, MetricWrapperBase)}:
        if labels.keys() <= set(metric._labelnames) and but not in metric._labelnames:
            for known, value in _counts(metric) if isinstance(metric, Counter) else ():
                if labels.items() <= known and value:
                    left, removed = frozenset(known - labels.items()), _REMOVED[metric]
                    removed[left] = removed.get(left, 0.0) + value
            metric.remove_by_labels(dict(labels))


# Counters begin at 0: without a sample before its first event, a counter has no increase that an alert could see


class DeclaredMetric(NamedTuple):
    """A counter or a histogram. `labels`: those that `show_zeros` receives; `sets`: all values of the others."""

    metric: Counter | Histogram
    name: str
    labels: tuple[str, ...]
    kind: str
    sets: Mapping[str, tuple[str, ...]]


DECLARED_METRICS: list[DeclaredMetric] = []


def _declare(metric: M, name: str, labels: Sequence[str], kind: str, sets: Mapping[str, Iterable[str]]) -> M:
    free = tuple(label for label in labels if label not in sets)
    fixed = {label: tuple(map(str, values)) for label, values in sets.items()}
    if labels:  # without labels it shows 0 from its declaration on
        DECLARED_METRICS.append(DeclaredMetric(metric, name, free, kind, fixed))
    return metric


def show_zeros(prefix: str, kind: str = "", **labels: str) -> None:
    """Show 0 for all counters and histograms `floe_{prefix}…` with exactly these labels, besides those with fixed sets.

    `kind`: only those that were declared with it, because they do not concern every owner of these labels.
    """
    for each in DECLARED_METRICS:
        if each.name.startswith(prefix) and each.kind == kind and set(each.labels) == labels.keys():
            for values in itertools.product(*each.sets.values()):
                each.metric.labels(**labels, **dict(zip(each.sets, values, strict=True)))


build_info = gauge("build_info", "1, labelled with the version of Floe and of Python", ("version", "python"))
build_info.labels(version(), platform.python_version()).set(1)
