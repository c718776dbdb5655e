"""A reload of a running service: what is not touched goes on, what is removed drains and gives its lease back."""

from typing import Any

import pytest

from common.chain import Chain
from common.nats.client import FloeClient
from common.nats.kv import KeyValue, state_key
from egress.partition import lease_key
from ingress.target import TargetRunner
from tests.support.basics import soon, unique
from tests.support.egress import SITE, Bench, Running
from tests.support.ingress import CHAIN, OTHER, Centre, arrived, check_exact, count_in, rows_of

pytestmark = pytest.mark.simulated


async def test_feeds_come_and_go_and_the_others_go_on(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    kept, gone, new, edited = [await bench.filled([b"x"] * 3) for _ in range(4)]
    queue = await bench.filled([b"job"] * 2, retention="workqueue")
    slow = {"segment": {"max_age": "1h"}}  # only a drain closes the segment
    before = [{"stream": each, **slow} for each in (kept, gone, edited)] + [{"stream": queue}]
    after = [before[0], {"stream": new}, {"stream": edited, "segment": {"max_age": "2h"}}]
    async with bench.egress(*before) as one, bench.egress(*before) as two:

        async def received(feed: str, last: int) -> object:
            """Return the process that has received all up to `last`."""

            def is_reader(each: Running) -> bool:
                return (each.status(feed).get("open_segment") or {}).get("last") == last

            return await soon(lambda: next(filter(is_reader, (one, two)), None))

        reading, *_ = [await received(feed, 3) for feed in (kept, gone, edited)]
        await bench.archived_to(queue, 2)
        for each in (one, two):
            refused = each.service.reload(bench.settings({**before[0], "relay": True}, {"stream": new})).refused
            assert refused == {f"egress.feeds[{kept}].relay": ("False", "True")}
        await bench.publish(gone, [b"y"] * 2)
        for each in (one, two):
            plan = each.service.reload(bench.settings(*after))
            assert (plan.started, plan.ended, plan.replaced) == ((new,), (gone, queue), (edited,))
        await bench.publish(kept, [b"y"] * 2)
        leases = await KeyValue(bench.client, bench.lease_bucket, ttl=2.0).ensure()
        for feed in (gone, queue):
            await soon(lambda: not (one.status(feed) or two.status(feed)))  # noqa: B023
            assert await leases.get(lease_key(bench.chain(feed))) is None
        await soon(lambda: f"nats consumer rm {queue} floe_{SITE}_{queue}_0_" in caplog.text)
        await bench.archived_to(new, 3)
        assert await received(kept, 5) is reading
        for feeds in (before, after, before):  # before the former one is carried out
            plans = [each.service.reload(bench.settings(*feeds)).started for each in (one, two)]
        assert plans == [(gone, queue)] * 2
        await bench.publish(gone, [b"z"])
        await received(gone, 6)
        for each in (one, two):  # a pattern takes over what no other entry names
            each.service.reload(bench.settings(before[0], {"streams": "T*", "except": edited, **slow}))
        await soon(lambda: {one.state(new), two.state(new)} == {"reading", "standby"})
        await soon(lambda: {one.state(gone), two.state(gone)} == {"reading", "standby"})
        await soon(lambda: not (one.status(edited) or two.status(edited)))
    for feed in (kept, gone, new, edited):
        await bench.same(feed, feed)
    assert len(bench.refs(kept)) == 1, "it never drained before the end"


async def test_sources_and_targets_come_and_go_and_the_other_chains_go_on(
    client: FloeClient, centre: Centre, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, runs, first = Chain("af", "NODES"), list[str](), centre.target
    begin = TargetRunner.run

    def run(self: TargetRunner, *given: Any) -> Any:
        runs.append(self._target)
        return begin(self, *given)

    def target(stream: str, *sites: str, **keys: Any) -> dict[str, Any]:
        source = {"site": sites, "feed": "NODES", "subject_prefix": stream}
        return {"stream": stream, "create": {"subjects": [f"{stream}.>"]}, "sources": [source], **keys}

    monkeypatch.setattr(TargetRunner, "run", run)
    for chain in (CHAIN, OTHER, new):
        centre.archive.put(rows_of(1, 20, chain), chain=chain)
    gone, later = unique("GONE"), unique("LATER")
    before = [target(first, "us-east", "eu-west"), target(gone, "us-east")]
    health, stop, task = centre.started(targets=before)
    await centre.carried(client, 40)
    await soon(lambda: count_in(client, gone))
    found = centre.service.reload(centre.settings(targets=[target(first, "us-east", "af"), target(later, "us-east")]))
    assert (found.started, found.ended) == ((f"{first}: af/NODES", later), (f"{first}: eu-west/NODES", gone))
    centre.archive.put(rows_of(21, 30))
    centre.archive.put(rows_of(21, 30, OTHER), chain=OTHER)  # for nobody, for now
    await centre.carried(client, 70)
    await soon(lambda: f"target {gone}" not in health.status()["parts"])
    leases = await KeyValue(client, centre.lease_bucket, ttl=2.0).ensure()
    assert [await leases.get(state_key("ingress", each)) is None for each in (first, gone)] == [False, True]
    parked = target(later, "us-east", on_oversize="park")
    centre.service.reload(centre.settings(targets=[target(first, "us-east", "eu-west", "af"), parked]))
    await centre.carried(client, 80)
    await soon(lambda: runs.count(later) == 2)
    stop.set()
    await task
    assert (runs.count(first), runs.count(gone)) == (1, 1)
    check_exact(await arrived(client, first), centre.archive, centre.prefix)
