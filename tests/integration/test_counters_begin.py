"""Samples of counters after a start: without one, an alert does not see the first event as an increase."""

import itertools
from pathlib import Path

import pytest
from prometheus_client import Counter, Histogram

from common.metrics import DECLARED_METRICS, REGISTRY
from egress.workers import WorkerProcess
from ingress.discovery.notifications import NotificationHandler
from tests.support.basics import metric_value, soon, unique
from tests.support.egress import SITE, Bench
from tests.support.ingress import CHAIN, Archive, Centre, rows_of

pytestmark = pytest.mark.servers


def missing(known: dict[str, str], feeds: dict[str, str]) -> list[str]:
    """The missing samples. `known`: the value of each label; `feeds`: the feed of each kind of counter."""
    counted = {each.metric: each for each in DECLARED_METRICS}
    found = []
    for metric, names in list(REGISTRY._collector_to_names.items()):
        if not isinstance(metric, Counter | Histogram) or not metric._labelnames:
            continue
        each = counted.get(metric)
        if each is None:
            found.append(f"{metric._name}: not declared with common.metrics")
            continue
        role = "ingress" if each.name.startswith("ingress_") else "egress"
        values = {label: known.get(f"{role}_{label}", known.get(label, "")) for label in each.labels}
        if each.kind:
            values["feed"] = feeds[each.kind]
        sample = next(name for name in names if name.endswith(("_total", "_count")))
        for combination in itertools.product(*each.sets.values()):
            labels = {**values, **dict(zip(each.sets, combination, strict=True))}
            if metric_value(sample, labels) is None:
                found.append(f"{sample} {labels}")
    return found


async def test_every_counter_has_a_sample_after_the_start(bench: Bench, nats_url: str, tmp_path: Path) -> None:
    whole, sampled = await bench.make_stream(unique("T")), await bench.make_stream(unique("T"))
    rules = {"inspect_header": "Node", "inspect_duration": "1h", "advisory": {"subject": unique("adv") + ".%s"}}
    archive = Archive(tmp_path / "store")
    archive.put(rows_of(1, 5))
    centre = Centre(tmp_path, archive, nats_url)
    WorkerProcess(0, 1, [], {})  # of egress with several workers
    async with bench.egress({"stream": whole}, {"stream": sampled, **rules}) as running:
        await soon(lambda: running.state(whole) == running.state(sampled) == "reading")
        async with centre.running() as health:
            NotificationHandler("nats", "b", archive.documents.layout, None, health)  # type: ignore[arg-type]
            await centre.carried(bench.client, 5)
            known = {"egress_site": SITE, "egress_feed": whole, "ingress_site": CHAIN.site, "ingress_feed": CHAIN.feed}
            known |= {"partition": "0", "target": centre.target, "source": "nats", "worker": "0"}
            assert missing(known, {"sampled": sampled, "advisories": sampled}) == []
