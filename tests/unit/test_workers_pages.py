"""One monitor for several processes: one page, one verdict, one exit code."""

from __future__ import annotations

import json
import socket

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from common.errors import UsageError
from common.service.monitor import MAX_BEAT_AGE, Health
from egress.workers.pages import Said, WorkerPages, ask_all, labelled, merged
from egress.workers.process import WorkerPlace, WorkerProcess, exit_code, worst
from tests.support.browser import bars, table_rows
from tests.support.clock import ManualClock


def page(count: float, awkward: str = "a") -> str:
    registry = CollectorRegistry()
    Gauge("memory_bytes", "Bytes.", registry=registry).set(count)
    Counter("messages", 'With "quotes" and\nlines.', ("feed",), registry=registry).labels(awkward).inc(count)
    Histogram("put_seconds", "Time.", ("feed",), registry=registry, buckets=(1, 2)).labels("x").observe(1.5)
    Counter("never", "No sample yet.", ("feed",), registry=registry)
    return generate_latest(registry).decode()


def test_each_family_stands_once_and_each_sample_names_its_worker() -> None:
    own = "# HELP own 1\n# TYPE own gauge\nown 1.0\n"
    text = merged(own, {"0": page(1), "1": page(2)})
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert text.count("# TYPE messages_total") == 1
    assert text.count("# HELP put_seconds ") == 1
    assert [(s.labels["worker"], s.value) for s in families["memory_bytes"].samples] == [("0", 1), ("1", 2)]
    assert {s.labels["worker"] for s in families["put_seconds"].samples} == {"0", "1"}
    assert [s.labels for s in families["own"].samples] == [{}]
    lines = text.splitlines()
    first, last = (
        lines.index('messages_total{worker="0",feed="a"} 1.0'),
        lines.index('messages_total{worker="1",feed="a"} 2.0'),
    )
    assert last == first + 1, "the samples of a family stand together"


@pytest.mark.parametrize("value", ['a{b}"c', "a b", "a\\b\nc", "}", ""])
def test_a_label_keeps_its_value_whatever_it_holds(value: str) -> None:
    text = merged("", {"3": page(1, value)})
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["messages"].samples[0].labels == {"worker": "3", "feed": value}


def test_a_sample_without_labels_gets_one() -> None:
    assert labelled("a 1.0", "0") == 'a{worker="0"} 1.0'
    assert labelled('a{le="+Inf"} 1.0', "0") == 'a{worker="0",le="+Inf"} 1.0'


def test_without_workers_the_own_page_stands() -> None:
    assert merged(page(1), {}) == page(1)


# Pages


def pages(*said: Said) -> tuple[WorkerPages, ManualClock, list[str]]:
    clock, asked = ManualClock(), []

    def ask(path: str) -> list[Said]:
        asked.append(path)
        return list(said)

    return WorkerPages(Health(clock), ask, CollectorRegistry()), clock, asked


def answer(found: WorkerPages, path: str) -> tuple[int, str]:
    status, _, body = found.answer(path, "")
    return status, body.decode()


def said(index: int, status: int, text: str, port: int = 1) -> Said:
    return Said(index, 100 + index, 0, port, status, text)


def test_ready_means_that_all_are() -> None:
    assert answer(pages(said(0, 200, "ready\n"), said(1, 200, "ready\n"))[0], "/readyz") == (200, "ready\n")
    found = pages(said(0, 200, "ready\n"), said(1, 503, "nats: down\nobjects: down\n"))[0]
    assert answer(found, "/readyz") == (503, "worker 1: nats: down\nworker 1: objects: down\n")


def test_a_worker_that_starts_hangs_or_is_gone_is_not_ready() -> None:
    found = pages(Said(0, 7, 0, 0), Said(1, 0, 2, 0), Said(2, 9, 0, 1234))[0]
    assert answer(found, "/readyz") == (503, "worker 0: starting\nworker 1: not running\nworker 2: no answer\n")


def test_healthy_is_whoever_does_not_hang() -> None:
    assert answer(pages(said(0, 200, "ok\n"), Said(1, 0, 3, 0))[0], "/healthz")[0] == 200
    assert answer(pages(said(0, 503, "hangs: 40 s\n"))[0], "/healthz") == (503, "worker 0: hangs: 40 s\n")
    assert answer(pages(Said(0, 7, 0, 1234))[0], "/healthz") == (503, "worker 0: no answer\n")
    found, clock, _ = pages(said(0, 200, "ok\n"))
    clock.advance(MAX_BEAT_AGE + 1)
    assert answer(found, "/healthz")[0] == 503, "the parent itself hangs"


def test_a_worker_that_is_gone_and_not_started_again_yet_does_not_hang() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    gone = WorkerProcess(0, 1, [], {})
    gone.pid, gone.port = 7, port
    [found] = ask_all([gone], "/healthz")
    assert (found.port, found.status) == (0, 0)
    assert answer(pages(found)[0], "/healthz")[0] == 200


def test_the_status_holds_each_worker_and_all_problems() -> None:
    child = json.dumps({"ready": False, "problems": ["nats: down"], "parts": {"egress A": {}}})
    found, _, asked = pages(said(0, 200, child), Said(1, 0, 2, 0))
    status, text = answer(found, "/status")
    document = json.loads(text)
    assert (status, asked) == (200, ["/status"])
    assert document["problems"] == ["worker 0: nats: down", "worker 1: not running"]
    assert document["ready"] is False
    assert document["workers"]["0"]["parts"] == {"egress A": {}}
    assert document["workers"]["1"] == {"pid": 0, "restarts": 2}
    assert answer(found, "/")[0] == 200


def test_a_reader_of_the_page_has_the_workers_look_at_their_coverage() -> None:
    levels = {"0": {"segments": 1, "bytes": 9, "newest": 0.0, "ranges": [[1, 5]]}}
    coverage = {"site/A/0000/0": {"at": 0.0, "first": 1, "last": 5, "levels": levels}}
    child = json.dumps({"ready": True, "problems": [], "parts": {}, "coverage": coverage})
    found, _, asked = pages(said(0, 200, child), Said(1, 0, 2, 0))
    status, text = answer(found, "/")

    assert (status, asked) == (200, ["/status?coverage"])
    assert bars(text) == {(0, 1, 5)}
    assert table_rows(text)[1:] == [["0", "ready", "100", "0"], ["1", "not ready", "0", "2"]]


def test_only_the_metrics_of_workers_that_answer_are_shown() -> None:
    found, _, _ = pages(said(0, 200, "a 1.0\n"), said(1, 500, "b 1.0\n"), Said(2, 0, 0, 0))
    assert answer(found, "/metrics") == (200, 'a{worker="0"} 1.0\n')


# Exit codes


def test_the_worst_code_is_the_one_to_act_on_and_a_signal_counts_as_shells_count_it() -> None:
    cases = [([], 0), ([0, 0], 0), ([0, 75], 75), ([75, 1], 1), ([75, 137, 1], 137), ([78, 137, 75], 78)]
    for codes, code in [*cases, ([77, 137], 77), ([77, 78], 78), ([2, 137], 2)]:
        assert worst(codes) == worst(reversed(codes)) == code, codes
    assert [exit_code(-9), exit_code(75)] == [137, 75]


@pytest.mark.parametrize("text", ["", "1", "a/b/c", "1/2/3/4"])
def test_a_place_that_is_none_is_refused(text: str) -> None:
    assert WorkerPlace.parse(str(WorkerPlace(1, 4, 7))) == WorkerPlace(1, 4, 7)
    with pytest.raises(UsageError):
        WorkerPlace.parse(text)
