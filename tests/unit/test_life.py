"""The lines of a process's life: at its start, each minute, where a trouble is over, at its end."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest

from common.chain import Chain
from common.errors import Stopped, Unavailable
from common.logs import configure, flush
from common.metrics import total, version
from common.service.life import MINUTE, Life
from common.service.monitor import Health
from common.settings.root import Settings
from egress import metrics
from egress.report import FeedReport
from tests.support.basics import unique
from tests.support.clock import ManualClock

SETTINGS = Settings(site="us-east", store={"url": "s3://floe", "prefix": "data"})

Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines() -> Lines:
    stream = io.StringIO()
    configure("info", "json", stream=stream)

    def read() -> list[dict[str, Any]]:
        flush()
        found = [json.loads(line) for line in stream.getvalue().splitlines()]
        return [{k: v for k, v in line.items() if k not in ("ts", "logger")} for line in found]

    return read


def test_start_minutes_and_end(lines: Lines) -> None:
    clock, counted = ManualClock(), {"messages": 5.0}
    health = Health(clock)
    health.set_ready("nats", True)
    with Life(
        "egress", SETTINGS, clock, {"messages": lambda: counted["messages"]}, health, feeds=["A"], monitor=""
    ) as life:
        clock.advance(MINUTE)
        life.look()  # nothing was carried, and all is well
        counted["messages"] = 12.0
        clock.advance(MINUTE)
        life.look()
        health.set_ready("nats", False, "no answer")
        clock.advance(MINUTE)
        life.look()
        life.results(drained=True)
    begins, carried, waits, ended = lines()
    assert begins.pop("configuration")
    assert begins == {
        "level": "info",
        "event": "egress started",
        "action": "started",
        "version": version(),
        "site": "us-east",
        "store": "s3://floe/data",
        "feeds": ["A"],
    }
    assert (carried["action"], carried["seconds"], carried["messages"]) == ("carried", 60.0, 7)
    assert "waits" not in carried
    assert (waits["action"], waits["messages"], waits["waits"]) == ("carried", 0, ["nats: no answer"])
    assert (ended["action"], ended["seconds"], ended["messages"], ended["drained"]) == ("ended", 180.0, 7, True)
    assert "error" not in ended


def test_a_process_that_fails_says_why_at_its_end(lines: Lines) -> None:
    def fail(error: Exception) -> None:
        with Life("ingress", SETTINGS, ManualClock(), {}):
            raise error

    for error in (Stopped("no right", hint="grant it", code="E-X"), KeyError("k")):
        with pytest.raises(type(error)):
            fail(error)
    first, second = (line for line in lines() if line["action"] == "ended")
    assert (first["code"], first["error"]) == ("E-X", "no right")
    assert second["error"] == "KeyError: 'k'"


def test_the_sum_over_all_labels_is_counted() -> None:
    site, before = unique("s"), total(metrics.messages)
    for partition in ("0", "1"):
        metrics.messages.labels(site, "F", partition).inc(3)
    assert total(metrics.messages) - before == 6
    assert total(metrics.messages, site=site, partition="1") == 3


def test_a_feed_that_goes_on_says_so_once_and_what_it_was(lines: Lines) -> None:
    clock = ManualClock()
    report = FeedReport(Chain("s", unique("F")), "S", Health(clock), clock)
    report.works()
    report.waits(Unavailable("no answer"))
    clock.advance(10)
    report.waits(Unavailable("no answer"))
    report.works()
    report.works()
    report.stopped(Stopped("forked", code="E-FORKED"))
    clock.advance(5)
    report.reading(report.sign().chain or Chain("s", "F"), 7, 6)
    found = [(line["action"], line.get("error"), line.get("trouble"), line.get("seconds")) for line in lines()]
    assert found == [
        ("waiting", "no answer", None, None),
        ("over", None, "no answer", 10.0),
        ("chain_stopped", "forked", None, None),
        ("over", None, "forked", 5.0),
        ("reading", None, None, None),
    ]


def test_a_chain_that_another_process_takes_is_not_said_to_go_on(lines: Lines) -> None:
    clock = ManualClock()
    report = FeedReport(Chain("s", unique("F")), "S", Health(clock), clock)
    report.stopped(Stopped("forked", code="E-FORKED"))
    report.standby("other")
    report.works()
    assert [line["action"] for line in lines()] == ["chain_stopped"]
