"""Heartbeats: one leader, each subject at its interval, and one report of a failure."""

import asyncio
import logging
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from common.errors import OutcomeUnknown
from common.nats.headers import header_value, parse_block
from common.nats.kv import KeyValue
from common.nats.protocol import ApiError
from common.nats.pull import get_message
from common.settings.egress import HeartbeatSettings
from egress.heartbeats import check_stored, heartbeat_key, next_due
from tests.support.basics import soon, unique
from tests.support.egress import SITE, Bench, Running
from tests.support.proxies import TcpProxy

pytestmark = pytest.mark.simulated


def beating(stream: str, *names: str, interval: str = "1s", **more: Any) -> dict[str, Any]:
    return {"interval": interval, "subjects": [{"subject": f"{stream}.{name}"} for name in names], **more}


def leads(running: Running) -> bool:
    return bool(running.health.status()["parts"].get("heartbeats", {}).get("leader"))


def failures(running: Running) -> dict[str, str]:
    return dict(running.health.status()["parts"].get("heartbeats", {}).get("failures", {}))


@pytest.mark.real
async def test_each_subject_gets_its_headers_and_the_time_at_its_interval(bench: Bench) -> None:
    stream = await bench.make_stream(unique("T"))
    settings = beating(stream, "quick", headers={"Region": "eu", "note": "naïve"})
    settings["subjects"].append({"subject": f"{stream}.slow", "interval": "1h"})
    # A lease that is lost on a busy machine would begin all subjects again.
    async with bench.egress({"stream": stream}, heartbeats=settings, lease_ttl="60s"):
        await soon(lambda: bench.reaches(stream, 5))
    found = [await get_message(bench.client, stream, n) for n in range(1, 6)]
    messages = [message for message in found if message]
    for message in messages:
        assert abs(int(message.payload) - message.timestamp_ns / 1e9) < 15
        assert header_value(message.headers, b"Floe-Subject") == message.subject
        assert header_value(message.headers, b"Floe-Originator")
        assert dict(parse_block(message.headers or b""))[b"note"] == "naïve".encode()
    times = [m.timestamp_ns / 1e9 for m in messages if m.subject.endswith(b"quick")]
    assert len(times) >= 4, "the slow one is published once"
    assert (times[-1] - times[0]) / (len(times) - 1) > 0.5, times
    assert min(later - earlier for earlier, later in pairwise(times)) < 2, "a busy machine misses turns, but not all"


async def test_one_of_three_members_leads_and_another_follows_at_once(bench: Bench) -> None:
    stream = await bench.make_stream(unique("T"))
    settings = bench.settings({"stream": stream}, heartbeats=beating(stream, "a"), lease_ttl="60s")
    members = [bench.start(settings) for _ in range(3)]
    await soon(lambda: any(map(leads, members)))
    await asyncio.sleep(0.5)
    [leader] = [member for member in members if leads(member)]
    members.remove(leader)
    await leader.drain()
    await soon(lambda: any(map(leads, members)), 20.0)
    assert [*map(leads, members)].count(True) == 1
    await asyncio.gather(*(member.drain() for member in members))
    kv = await KeyValue(bench.client, bench.lease_bucket, ttl=60.0).ensure()
    assert await kv.get(heartbeat_key(SITE)) is None


async def test_a_failure_is_logged_once_and_so_is_its_end(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    stream, missing = await bench.make_stream(unique("T")), unique("M")
    caplog.set_level(logging.INFO, logger="egress.heartbeats")
    logged = lambda action: sum(action in str(r.msg) for r in caplog.records)  # noqa: E731
    async with bench.egress({"stream": stream}, heartbeats=beating(missing, "a")) as running:
        await soon(lambda: failures(running) == {f"{missing}.a": "E-NO-RESPONDERS"})
        await asyncio.sleep(2.2)
        assert logged("heartbeat_failed") == 1
        assert not running.health.problems(), "a heartbeat that fails is no reason to restart egress"
        await bench.make_stream(missing)
        await soon(lambda: failures(running) == {})
        assert logged("heartbeat_recovered") == 1


async def test_a_stream_that_refuses_and_a_server_whose_answer_never_comes_count_as_failures(
    bench: Bench, nats_url: str
) -> None:
    stream = await bench.make_stream(unique("T"))
    full = await bench.make_stream(unique("T"), max_msgs=1, discard="new")
    async with TcpProxy(int(nats_url.rpartition(":")[2])) as proxy:
        far = Bench(proxy.url, bench.root, bench.client, bench.lease_bucket, bench.state_bucket)
        async with far.egress({"stream": stream}, heartbeats=beating(full, "a"), lease_ttl="10s") as running:
            await soon(lambda: failures(running).get(f"{full}.a", "").startswith("E-JS-"))
            proxy.blackhole("down")
            await soon(lambda: failures(running).get(f"{full}.a") in ("E-UNKNOWN", "E-UNAVAILABLE"))
            proxy.heal()
            await soon(lambda: failures(running).get(f"{full}.a", "").startswith("E-JS-"))


# Settings


BAD_SETTINGS = [
    ({"headers": {"a:b": "x"}}, "expected"),
    ({"headers": {"a": "x\r\nNats-Rollup: all"}}, "expected"),
    ({"headers": {"Floe-Source": "s f 0000 0 1 1"}}, "expected"),
    ({"headers": {"ä": "x"}}, "expected"),
    ({"headers": {"a": "x" * 5000}}, "expected"),
    ({"subjects": [{"subject": "a"}, {"subject": "a"}]}, "expected each subject once, found a again"),
    ({"subjects": [{"subject": "a.>"}]}, "wildcards"),
]


@pytest.mark.parametrize(("settings", "expected"), BAD_SETTINGS)
def test_headers_that_would_act_or_break_the_line_and_subjects_that_repeat_or_are_patterns_are_refused(
    settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValidationError, match=expected):
        HeartbeatSettings.model_validate(settings)


# Pure


@given(st.floats(0, 1e6), st.floats(1, 1e5), st.floats(0, 1e6))
def test_the_next_turn_is_in_the_future_and_less_than_an_interval_away(
    due: float, interval: float, late: float
) -> None:
    now = due + late
    following = next_due(due, interval, now)
    assert now <= following + 1e-6
    assert following - now <= interval + 1e-6


def test_other_answers_than_acks_are_errors() -> None:
    check_stored(b'{"stream":"S","seq":7}', "a")
    refused = b'{"error":{"code":503,"err_code":10077,"description":"full"}}'
    for answer, error in ((b'{"stream":"S"}', OutcomeUnknown), (refused, ApiError), (b'{"error":"x"}', ApiError)):
        with pytest.raises(error):
            check_stored(answer, "a")
