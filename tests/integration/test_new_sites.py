"""Sites that appear while ingress runs, taken by patterns of a target."""

import pytest

from common.chain import Chain
from common.nats.client import FloeClient
from ingress.cli import judge_ingress
from tests.support.basics import metric_value, soon
from tests.support.commands import floe
from tests.support.ingress import Centre, check_exact, rows_of

pytestmark = [pytest.mark.servers, pytest.mark.simulated]


async def test_new_sites_are_delivered_by_the_holder_of_the_lease_and_after_restarts(
    client: FloeClient, centre: Centre
) -> None:
    wide = {"site": "edge-*", "feed": "*", "subject_prefix": centre.target}
    centre.having(sources=[wide, {**wide, "site": "*-9", "feed": "NODES"}])
    archive, target = centre.archive, {"target": centre.target}
    one, two, three = (Chain(f"edge-{number}", "NODES") for number in (1, 2, 3))
    refused, other = Chain("edge-9", "NODES"), Chain("edge-9", "LOGS")
    _, stop, task = centre.started()
    archive.put(rows_of(1, 20, one), chain=one)
    await centre.carried(client, 20)
    async with centre.running() as health:  # on standby
        archive.put(rows_of(1, 10, two), chain=two)
        archive.put(rows_of(21, 30, one), chain=one)
        await centre.carried(client, 40)
        stop.set()
        await task
        archive.put(rows_of(1, 5, refused), chain=refused)
        archive.put(rows_of(1, 5, other), chain=other)
        await centre.carried(client, 45)
        await soon(lambda: centre.status(health).get("untaken_feeds") == 1)
        assert centre.status(health)["untaken"][0].startswith("edge-9/NODES: sources.0 and sources.1 match it")
        assert [metric_value(f"floe_ingress_{each}_feeds", target) for each in ("matched", "untaken")] == [3, 1]
        line = judge_ingress({**health.status(), "heartbeat_age_seconds": 0}, 900, 3600).line()
        assert line.startswith("CRITICAL")
        assert "1 feed not delivered: edge-9/NODES" in line
    archive.put(rows_of(31, 40, one), chain=one)
    archive.put(rows_of(1, 7, three), chain=three)
    async with centre.running(poll_interval="1h"):
        messages = await centre.carried(client, 62)
        await soon(lambda: archive.documents.read_positions(centre.target))
    del archive.rows[refused]
    check_exact(messages, archive, centre.prefix)
    assert archive.documents.read_positions(centre.target).sources == ("*-9/NODES", "edge-*/*")
    done = await floe("status", "-c", str(centre.write()), "--json")
    rows = {f"{row['site']}/{row['feed']}": row["phase"] for row in done.json()}
    others = dict.fromkeys((f"{each.site}/{each.feed}" for each in (one, two, three, other)), "idle")
    assert (done.code, rows) == (3, {**others, "edge-9/NODES": "stopped"}), done
    for info in archive.objects.list(""):
        if three.site in info.key:
            archive.objects.delete(info.key)
    async with centre.running() as health:
        await soon(lambda: health.status()["parts"].get("sources") == {"missing": ["edge-3/NODES"]})
