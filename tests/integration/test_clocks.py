"""O11: what a site's clock says changes nothing of what is archived, nor of its times."""

from __future__ import annotations

import pytest

from common.clock import SystemClock
from tests.support.basics import unique
from tests.support.egress import Bench

pytestmark = pytest.mark.servers

MINUTES, HOUR = 600.0, 3600.0


class OffClock(SystemClock):
    """The host's clock, `off` seconds ahead."""

    off = 0.0

    def now(self) -> float:
        return super().now() + self.off


async def test_a_clock_that_is_wrong_and_steps_changes_nothing_of_what_is_archived(bench: Bench) -> None:
    stream, clock = await bench.make_stream(unique("T")), OffClock()
    sampled = {"stream": stream, "name": unique("S"), "inspect_subject_token": 2, "inspect_duration": "1h"}
    end = 0
    async with bench.egress({"stream": stream}, sampled, clock=clock) as running:
        for off in (MINUTES, MINUTES - HOUR, HOUR, 0.0):  # ahead, back by an hour, daylight saving, right
            clock.off = off
            await bench.publish(stream, (b"%d" % n for n in range(50)), subject=f"n{end}")
            end += 50
            await bench.archived_to(stream, end)
            await bench.archived_to(sampled["name"], end)
        assert [running.state(feed) for feed in (stream, sampled["name"])] == ["reading"] * 2
    await bench.same(stream, stream)
    kept = bench.messages(sampled["name"])
    assert [message.sequence for message in kept] == [1, 51, 101, 151]
    assert {footer.first_timestamp_ns for footer in bench.footers(stream)} <= {
        message.timestamp_ns for message in bench.messages(stream)
    }
