"""Logs: one line for each event, the same keys everywhere, and no wait for the reader."""

import ast
import io
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common import logs as log_writer
from common.chain import Chain
from common.errors import Stopped, Unavailable
from common.logs import LineHandler, configure, flush, get_logger
from common.metrics import version
from common.observe.monitor import Health
from common.service.progress import LOG_INTERVAL_S, ProcessLog
from common.settings.root import Settings
from egress.report import FeedReport
from infra.local.process import spawn
from tests.support import reference
from tests.support.basics import PATIENCE, eventually, unique
from tests.support.clock import ManualClock
from tests.support.stores import no_room
from tests.support.tree import every_node, parsed

ROOT = Path(__file__).parents[2]

log = get_logger("egress.test")


class Stream(io.StringIO):
    """A stream without a file behind it; a terminal if asked."""

    terminal = False

    def isatty(self) -> bool:
        return self.terminal

    def lines(self) -> list[str]:
        flush()
        return self.getvalue().splitlines()

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines()]


@pytest.fixture
def stream() -> Stream:
    return Stream()


def test_a_line_is_json_with_time_level_logger_and_event_first(stream: Stream):
    configure("info", "json", stream=stream)
    log.info("segment put", action="segment_put", site="us-east", rows=37, level_=None)
    [event] = stream.events()
    assert list(event)[:4] == ["ts", "level", "logger", "event"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", event.pop("ts"))
    own = {"level": "info", "logger": "egress.test", "event": "segment put"}
    assert event == {**own, "action": "segment_put", "site": "us-east", "rows": 37, "level_": None}


def test_text_is_one_line_too_with_line_ends_and_escapes_made_harmless(stream: Stream):
    configure("info", "text", stream=stream)
    log.warning("odd\nsubject", action="odd", subject="a b\x1b[31m\nforged", error="", n=1, name="plain")
    configure("info", "json", stream=stream)
    log.info("x", subject="a\nb\x85c\u2028d")
    line, as_json = stream.lines()
    assert json.loads(as_json)["subject"] == "a\nb\x85c\u2028d"
    assert line[24:] == (
        r" WARNING egress.test: odd\nsubject  action=odd"
        r'  subject="a b\u001b[31m\nforged"  error=""  n=1  name=plain'
    )


def test_auto_is_text_on_a_terminal_and_json_elsewhere(stream: Stream):
    for stream.terminal in (True, False):
        configure("info", "auto", stream=stream)
        log.info("x")
    assert [line[0] for line in stream.lines()] == ["2", "{"]


def test_levels_below_the_configured_one_and_of_libraries_below_warning_are_left_out(stream: Stream):
    configure("warning", "json", stream=stream)
    log.info("quiet")
    log.error("loud")
    configure("debug", "json", stream=stream)
    log.debug("ours")
    get_logger("egress.later").debug("x")
    logging.getLogger("botocore.auth").debug("CanonicalRequest: secret things")
    logging.getLogger("nats.aio.client").warning("lost %s", "connection")
    assert [(e["logger"], e["level"], e["event"]) for e in stream.events()] == [
        ("egress.test", "error", "loud"),
        ("egress.test", "debug", "ours"),
        ("egress.later", "debug", "x"),
        ("nats.aio.client", "warning", "lost connection"),
    ]


def test_configuring_again_replaces_and_never_doubles(stream: Stream):
    other = Stream()
    configure("info", "json", stream=other)
    configure("info", "json", stream=stream, instance="east-1")
    configure("info", "json", stream=stream, instance="east-1")
    log.info("x")
    assert [(event["event"], event["instance"]) for event in stream.events()] == [("x", "east-1")]
    assert other.getvalue() == ""


def test_an_expected_error_has_no_traceback_and_an_unexpected_one_has(stream: Stream):
    configure("info", "json", stream=stream)
    for error in (Unavailable("no answer", hint="wait"), KeyError("x")):
        try:
            raise error
        except Exception:
            log.exception("failed")
    logging.getLogger("nats").error("nats: encountered error", exc_info=ValueError("y"))
    first, second, third = stream.events()
    assert (first["error"], first["error_type"], "traceback" in first) == ("no answer; wait", "Unavailable", False)
    assert (second["error_type"], second["traceback"][:35]) == ("KeyError", "Traceback (most recent call last):\n")
    assert (third["event"], third["error"]) == ("nats: encountered error", "y")


def test_values_of_any_kind_have_a_form_and_a_bounded_length(stream: Stream):
    configure("info", "json", stream=stream)
    log.info("x", raw=b"a\xff", path=Path("/p"), many=(1, {"k": {2}}), long="x" * 10_000)
    event = stream.events()[0]
    assert (event["raw"], event["path"], event["many"]) == ("a\\xff", "/p", [1, {"k": [2]}])
    assert event["long"] == "x" * 4096 + "… (10000 characters)"


def test_a_value_that_cannot_be_shown_does_not_stop_the_service(stream: Stream):
    class Broken:
        __str__ = no_room

    configure("info", "json", stream=stream)
    log.info("x", broken=Broken())
    log.info("y")
    assert [event["event"] for event in stream.events()] == ["log lines dropped: 1", "y"]


def test_before_configuring_nothing_goes_to_stdout_and_the_last_lines_before_the_end_are_written():
    script = """if True:
    from common.logs import configure, get_logger
    log = get_logger("egress")
    log.warning("early", k=1)
    log.info("not shown")
    configure("info", "text")
    for n in range(500):
        log.info(f"line {n}")
"""
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    early, *later = ended.stderr.splitlines()
    assert (ended.stdout, "'event': 'early'" in early, len(later)) == ("", True, 500)
    assert later[-1].endswith("line 499")


def test_a_log_that_nobody_reads_delays_nothing_and_drops_are_counted(monkeypatch: pytest.MonkeyPatch):
    # Given a pipe that is full, and a short queue
    monkeypatch.setattr(log_writer, "FLUSH_TIMEOUT_S", 0.5)
    reader, writer = os.pipe()
    with os.fdopen(reader) as pipe, os.fdopen(writer, "w") as stream:
        handler = log_writer.LineHandler(stream, capacity=10)
        handler.setFormatter(logging.Formatter("%(message)s"))
        record = logging.LogRecord("egress", logging.INFO, "", 0, "x" * 9_999, (), None)
        # When far more is logged than fits
        started = time.monotonic()
        for _ in range(100):
            handler.emit(record)
        assert time.monotonic() - started < 40, "it would be 50, if each line waited"
        assert handler.dropped >= 80
        # Then a reader that comes back sees whole lines, and how many are missing
        lines = [pipe.readline() for _ in range(100 - handler.dropped + 1)]
        counts = [line for line in lines if line.startswith("log lines dropped: ")]
        assert [len(line) for line in lines if line not in counts] == [10_000] * (100 - handler.dropped)
        assert sum(int(line.split(": ")[1]) for line in counts) == handler.dropped
        handler.close()


def test_a_process_whose_log_nobody_reads_still_ends():
    script = """
import sys
from common.logs import configure, get_logger
configure("info", "json")
for _ in range(2000):
    get_logger("egress").info("x" * 1000)
print("done", flush=True)
"""
    with spawn([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert (process.stdout.readline(), process.wait(PATIENCE)) == (b"done\n", 0)
        finally:
            process.kill()


def test_a_closed_stream_is_no_error(stream: Stream):
    configure("info", "json", stream=stream)
    stream.close()
    log.info("x")
    [handler] = (each for each in logging.getLogger().handlers if isinstance(each, LineHandler))
    eventually(lambda: handler.dropped >= 1)


def test_a_field_cannot_take_the_place_of_the_lines_own_keys(stream: Stream):
    """Log the level of a segment: such a line was once dropped, or came without the level of the log."""
    for form in ("json", "text"):
        configure("info", form, stream=stream)
        log.info("merged", level=1, ts=2, logger="x")
    as_json, text = stream.lines()
    own = {"level": "info", "logger": "egress.test", "event": "merged", "level_": 1, "ts_": 2, "logger_": "x"}
    assert json.loads(as_json).items() >= own.items()
    assert ["INFO" in text, "level_=1" in text] == [True, True]


def test_long_addresses_are_cut_behind_the_host(stream: Stream):
    configure("info", "json", stream=stream)
    address = "http://minio.example:9000/floe/" + "site=us-east/" * 20 + "?list-type=2&prefix=data"
    short = "http://minio.example:9000/floe/x"
    log.warning("x", error=f'no connection to "{address}" or {short}; run: floe status', key="k" * 300)
    [event] = stream.events()
    assert event["error"] == f'no connection to "http://minio.example:9000/…" or {short}; run: floe status'
    assert event["key"] == "k" * 300


def test_the_reference_has_each_action_and_no_other():
    found: set[str] = set()
    for path in (each for role in reference.ROLES for each in ROOT.glob(f"{role}/**/*.py")):
        for node in every_node(parsed(path)):
            if isinstance(node, ast.keyword) and node.arg == "action" and isinstance(node.value, ast.Constant):
                found.add(node.value.value)
    rows = [row for section in reference.data("log_events").values() for row in section]
    assert {action for row in rows for action in row["actions"].split()} == found


# The lines of a process's life

SETTINGS = Settings(site="us-east", store={"url": "s3://floe", "prefix": "data"})

Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines(stream: Stream) -> Lines:
    configure("info", "json", stream=stream)
    return lambda: [{k: v for k, v in line.items() if k not in ("ts", "logger")} for line in stream.events()]


def test_start_minutes_and_end(lines: Lines) -> None:
    clock, counted = ManualClock(), {"messages": 5.0}
    health = Health(clock)
    counters = {"messages": lambda: counted["messages"]}
    with ProcessLog("egress", SETTINGS, clock, counters, health.problems, feeds=["A"], monitor="") as life:
        for messages, is_ready in ((5.0, True), (12.0, True), (12.0, False)):  # at first nothing, and all is well
            counted["messages"] = messages
            health.set_ready("nats", is_ready, "no answer")
            clock.advance(LOG_INTERVAL_S)
            life.log_amounts()
        life.add_end_fields(drained=True)
    begins, *later = lines()
    assert begins.pop("configuration")
    own = {"level": "info", "event": "process started", "action": "process_started", "process": "egress"}
    assert begins == {**own, "version": version(), "site": "us-east", "store": "s3://floe/data", "feeds": ["A"]}
    names = ("action", "seconds", "messages", "problems", "drained", "error")
    assert [tuple(line.get(name) for name in names) for line in later] == [
        ("messages_processed", 60.0, 7, None, None, None),
        ("messages_processed", 60.0, 0, ["nats: no answer"], None, None),
        ("process_ended", 180.0, 7, None, True, None),
    ]


def test_a_process_that_fails_logs_why_at_its_end(lines: Lines) -> None:
    def fail(error: Exception) -> None:
        with ProcessLog("ingress", SETTINGS, ManualClock(), {}):
            raise error

    for error in (Stopped("no right", hint="grant it", code="E-X"), KeyError("k")):
        with pytest.raises(type(error)):
            fail(error)
    first, second = (line for line in lines() if line["action"] == "process_ended")
    assert (first["code"], first["error"], second["error"]) == ("E-X", "no right", "KeyError: 'k'")


def test_a_feed_that_recovers_is_logged_once_with_its_trouble_unless_a_standby(lines: Lines) -> None:
    clock = ManualClock()
    report = FeedReport(Chain("s", unique("F")), "S", Health(clock), clock)
    report.set_working()
    report.set_waiting(Unavailable("no answer"))
    clock.advance(10)
    report.set_waiting(Unavailable("no answer"))
    report.set_working()
    report.set_working()
    report.set_stopped(Stopped("forked", code="E-FORKED"))
    clock.advance(5)
    report.set_reading(report.heartbeat().chain or Chain("s", "F"), 7, 6)
    found = [(line["action"], line.get("error"), line.get("trouble"), line.get("seconds")) for line in lines()]
    assert found == [
        ("chain_waiting", "no answer", None, None),
        ("chain_recovered", None, "no answer", 10.0),
        ("chain_stopped", "forked", None, None),
        ("chain_recovered", None, "forked", 5.0),
        ("reading_begun", None, None, None),
    ]
    other = FeedReport(Chain("s", unique("F")), "S", Health(clock), clock)
    other.set_stopped(Stopped("forked", code="E-FORKED"))
    other.set_standby("other")
    other.set_working()
    assert [line["action"] for line in lines()][5:] == ["chain_stopped"]
