"""Streams of the account that no feed archives, as egress finds and names them."""

from typing import Any

import pytest

from tests.support.basics import metric_value, soon, unique
from tests.support.egress import SITE, Bench


@pytest.mark.simulated
async def test_new_streams_without_a_feed_are_named_until_they_are_gone_or_archived(bench: Bench) -> None:
    stream, other = await bench.filled([b"x"]), unique("OTHER")
    copies = await bench.make_stream(unique("COPIES"))
    await bench.publish(copies, [b"x"], headers=b"NATS/1.0\r\nFloe-Source: eu S 0000 0 1 1\r\n\r\n")

    def shown() -> Any:
        return running.health.status()["parts"].get("account", {})

    async with bench.egress({"stream": stream}, not_archived=["TMP_*"]) as running:
        await soon(lambda: shown().get("uncovered_streams") == 0)
        await bench.make_stream("TMP_1")
        await bench.make_stream(other)
        await soon(lambda: shown().get("uncovered") == [other])
        assert (shown()["streams"], metric_value("floe_egress_uncovered_streams", {"site": SITE})) == (6, 1)
        await bench.publish(copies, [b"not a copy"])
        await soon(lambda: shown()["uncovered_streams"] == 2)
        await bench.delete_stream(copies)
        await bench.delete_stream(other)
        await soon(lambda: shown()["uncovered_streams"] == 0)
