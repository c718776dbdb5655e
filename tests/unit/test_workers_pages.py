"""The monitor of several worker processes: one page, one verdict, one exit code."""

import base64
import hashlib
import json
import re
import signal
import socket
from html import unescape
from html.parser import HTMLParser
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from common.archive.keys import SegmentName
from common.archive.segment import SegmentRef
from common.chain import Chain
from common.errors import UsageError
from common.observe import page
from common.observe.coverage import MAX_DRAWN_RANGES, sum_coverage
from common.observe.monitor import MAX_BEAT_AGE_S, Health, Pages
from common.sequences import SequenceRange
from egress.workers import (
    WorkerAnswer,
    WorkerIdentity,
    WorkerPages,
    WorkerProcess,
    fetch_from_all,
    merge_metrics,
    shell_exit_code,
    worst_exit_code,
)
from tests.support.browser import bars, table_rows
from tests.support.clock import ManualClock


def metrics_page(count: float, awkward: str = "a") -> str:
    registry = CollectorRegistry()
    Gauge("memory_bytes", "Bytes.", registry=registry).set(count)
    Counter("messages", 'With "quotes" and\nlines.', ("feed",), registry=registry).labels(awkward).inc(count)
    Histogram("put_seconds", "Time.", ("feed",), registry=registry, buckets=(1, 2)).labels("x").observe(1.5)
    Counter("never", "No sample yet.", ("feed",), registry=registry)
    return generate_latest(registry).decode()


async def test_a_signal_reaches_a_worker_once_it_has_handlers(monkeypatch: Any) -> None:
    sent, worker = list[int](), WorkerProcess(0, 1, [], {})
    monkeypatch.setattr(worker, "send_signal", sent.append)
    worker.notify(signal.SIGQUIT)
    worker.notify(signal.SIGHUP)
    assert sent == []
    parent_end, worker_end = socket.socketpair()
    with parent_end, worker_end:
        worker_end.send(b'{"port": 5}\n')
        await worker._read_port(parent_end)
    worker.notify(signal.SIGQUIT)
    assert sent == [signal.SIGHUP, signal.SIGQUIT, signal.SIGQUIT]


def test_each_family_comes_once_and_each_sample_names_its_worker() -> None:
    own = "# HELP own 1\n# TYPE own gauge\nown 1.0\n"
    text = merge_metrics(own, {"0": metrics_page(1), "1": metrics_page(2)})
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert text.count("# TYPE messages_total") == 1
    assert text.count("# HELP put_seconds ") == 1
    assert [(s.labels["worker"], s.value) for s in families["memory_bytes"].samples] == [("0", 1), ("1", 2)]
    assert {s.labels["worker"] for s in families["put_seconds"].samples} == {"0", "1"}
    assert [s.labels for s in families["own"].samples] == [{}]
    lines = text.splitlines()
    first, last = (f'messages_total{{worker="{n}",feed="a"}} {n + 1}.0' for n in (0, 1))
    assert lines.index(last) == lines.index(first) + 1, "the samples of a family stand together"


def test_a_label_keeps_its_value_whatever_it_holds() -> None:
    for value in ('a{b}"c', "a b", "a\\b\nc", "}", ""):
        text = merge_metrics("", {"3": metrics_page(1, value)})
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert families["messages"].samples[0].labels == {"worker": "3", "feed": value}


# Pages


def pages(*reply: WorkerAnswer) -> tuple[WorkerPages, ManualClock, list[str]]:
    clock, asked = ManualClock(), []

    def fetch(path: str) -> list[WorkerAnswer]:
        asked.append(path)
        return list(reply)

    return WorkerPages(Health(clock), fetch, CollectorRegistry()), clock, asked


def answer(found: WorkerPages, path: str) -> tuple[int, str]:
    status, _, body = found.answer(path, "")
    return status, body.decode()


def reply(index: int, status: int, text: str, port: int = 1) -> WorkerAnswer:
    return WorkerAnswer(index, 100 + index, 0, port, status, text)


def test_ready_means_that_all_are_which_who_starts_hangs_or_is_gone_is_not() -> None:
    assert answer(pages(reply(0, 200, "ready\n"), reply(1, 200, "ready\n"))[0], "/readyz") == (200, "ready\n")
    found = pages(reply(0, 200, "ready\n"), reply(1, 503, "nats: down\nobjects: down\n"))[0]
    assert answer(found, "/readyz") == (503, "worker 1: nats: down\nworker 1: objects: down\n")
    found = pages(WorkerAnswer(0, 7, 0, 0), WorkerAnswer(1, 0, 2, 0), WorkerAnswer(2, 9, 0, 1234))[0]
    assert answer(found, "/readyz") == (503, "worker 0: starting\nworker 1: not running\nworker 2: no answer\n")


def test_healthy_is_whoever_does_not_hang_also_who_is_gone_and_not_started_again_yet() -> None:
    assert answer(pages(reply(0, 200, "ok\n"), WorkerAnswer(1, 0, 3, 0))[0], "/healthz")[0] == 200
    assert answer(pages(reply(0, 503, "hangs: 40 s\n"))[0], "/healthz") == (503, "worker 0: hangs: 40 s\n")
    assert answer(pages(WorkerAnswer(0, 7, 0, 1234))[0], "/healthz") == (503, "worker 0: no answer\n")
    found, clock, _ = pages(reply(0, 200, "ok\n"))
    clock.advance(MAX_BEAT_AGE_S + 1)
    assert answer(found, "/healthz")[0] == 503, "the parent itself hangs"
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    gone = WorkerProcess(0, 1, [], {})
    gone.pid, gone.port = 7, port
    [found] = fetch_from_all([gone], "/healthz")
    assert (found.port, found.status, answer(pages(found)[0], "/healthz")[0]) == (0, 0, 200)


def test_the_status_holds_each_worker_and_all_problems() -> None:
    child = json.dumps({"ready": False, "problems": ["nats: down"], "parts": {"egress A": {}}})
    found, _, asked = pages(reply(0, 200, child), WorkerAnswer(1, 0, 2, 0))
    status, text = answer(found, "/status")
    document = json.loads(text)
    assert (status, asked, document["ready"]) == (200, ["/status"], False)
    assert document["problems"] == ["worker 0: nats: down", "worker 1: not running"]
    assert document["workers"]["0"]["parts"] == {"egress A": {}}
    assert (document["workers"]["1"], answer(found, "/")[0]) == ({"pid": 0, "restarts": 2}, 200)


def test_a_reader_of_the_page_has_the_workers_read_their_coverage() -> None:
    levels = {"0": {"segments": 1, "bytes": 9, "newest": 0.0, "ranges": [[1, 5]]}}
    coverage = {"site/A/0000/0": {"at": 0.0, "first": 1, "last": 5, "levels": levels}}
    child = json.dumps({"ready": True, "problems": [], "parts": {}, "coverage": coverage})
    found, _, asked = pages(reply(0, 200, child), WorkerAnswer(1, 0, 2, 0))
    status, text = answer(found, "/")

    assert (status, asked, bars(text)) == (200, ["/status?coverage"], {(0, 1, 5)})
    assert table_rows(text)[1:] == [["0", "ready", "100", "0"], ["1", "not ready", "0", "2"]]


def test_only_the_metrics_of_workers_that_answer_are_shown() -> None:
    found, _, _ = pages(reply(0, 200, "a 1.0\n"), reply(1, 500, "b 1.0\n"), WorkerAnswer(2, 0, 0, 0))
    assert answer(found, "/metrics") == (200, 'a{worker="0"} 1.0\n')


# Exit codes


def test_the_worst_code_is_the_one_to_act_on_and_a_signal_counts_as_shells_count_it() -> None:
    cases = [([], 0), ([0, 0], 0), ([0, 75], 75), ([75, 1], 1), ([75, 137, 1], 137), ([78, 137, 75], 78)]
    for codes, code in [*cases, ([77, 137], 77), ([77, 78], 78), ([2, 137], 2)]:
        assert worst_exit_code(codes) == worst_exit_code(reversed(codes)) == code, codes
    assert [shell_exit_code(-9), shell_exit_code(75)] == [137, 75]


@pytest.mark.parametrize("text", ["", "a/b/c", "1/2/3/4"])
def test_a_place_that_is_none_is_refused(text: str) -> None:
    assert WorkerIdentity.parse(str(WorkerIdentity(1, 4, 7))) == WorkerIdentity(1, 4, 7)
    with pytest.raises(UsageError):
        WorkerIdentity.parse(text)


# The status page

CHAIN = Chain("us-east", "NODES")
HOSTILE = '<script>alert("x")</script>\'&\n\u202e\ud800'


def document(**parts: Any) -> dict[str, Any]:
    return {"version": "1", "ready": True, "problems": [], "heartbeat_age_seconds": 0.1, "parts": parts}


def html(document: dict[str, Any]) -> str:
    return page.render_page(document, ["/", "/status"]).decode()


def ref(first: int, last: int, level: int = 0, modified: float = 0.0, size: int = 10) -> SegmentRef:
    name = SegmentName(CHAIN, level, SequenceRange(first, last), f"{first:016x}")
    return SegmentRef(name, f"{level}/{first}-{last}", size, modified)


FEED: dict[str, Any] = {"stream": "NODES", "state": "stopped", "code": "E-FORKED", "why": "another history"}
FEED |= {"chain": str(CHAIN), "hint": "floe egress resolve -c f", "end": 90, "source_last": 100, "lost": 2}
FEED |= {"since": 500.0, "damaged": {"k": "w"}, "holder": "this instance", "open_segment": {"messages": 7, "age": 1.5}}
CHAIN_STATE = {"position": 41, "archived": 50, "phase": "late", "hole": "41..45", "hint": "floe gap ls -c f"}
CHAIN_STATE |= {"lag_seconds": 9}
TARGET = {"state": "carrying", "publisher": "fast", "trouble": "", "target_sequence": 40}
TARGET |= {"chains": {str(CHAIN): CHAIN_STATE}}


class Seen(HTMLParser):
    """A parser that collects the elements and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.attributes = list[str](), list[tuple[str, str | None]]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def hostile(value: Any) -> Any:
    """Return `value` with every text in it, names too, made hostile."""
    if isinstance(value, dict):
        return {f"{key}{HOSTILE}" if key not in KNOWN else key: hostile(each) for key, each in value.items()}
    return HOSTILE if isinstance(value, str) else value


KNOWN = {*FEED, *TARGET, *CHAIN_STATE, "owner", "held", "messages", "age", "parts", "version", "ready"}


@pytest.mark.parametrize("workers", [False, True])
def test_any_text_of_a_part_is_shown_as_text(workers: bool) -> None:
    leases = {"owner": "me", "members": 1, "share": 1, "held": ["k"], "failure": ""}
    parts = {"egress NODES": FEED, "target FLEET": TARGET, "sharing": leases, "events": {"why": "x"}}
    shown = {name if name.startswith("target ") else f"{name}{HOSTILE}": hostile(part) for name, part in parts.items()}
    found = {"version": HOSTILE, "ready": False, "problems": [HOSTILE], "heartbeat_age_seconds": 0, "parts": shown}
    found["coverage"] = {HOSTILE: {**sum_coverage([ref(1, 5), ref(8, 9)], 0.0)}}
    if workers:
        found = {**found, "parts": {}, "workers": {"0": {"parts": shown, "coverage": found["coverage"]}}}
    text = page.render_page(found, ["/"]).decode()

    seen = Seen(text)
    assert "script" not in seen.tags
    assert text.count("&lt;script&gt;") > 10
    names = {name for name, _ in seen.attributes}
    assert {name for name in names if name.startswith("on") or name in ("src", "style", "action", "srcset")} == set()
    assert {value for name, value in seen.attributes if name == "href"} == {"/"}


def test_the_policy_allows_the_page_its_own_style_and_nothing_else() -> None:
    [style] = re.findall(r"<style>(.*?)</style>", html(document()), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = page.PAGE_HEADERS["Content-Security-Policy"].split("; ")

    assert policy[:2] == ["default-src 'none'", f"style-src 'sha256-{digest}'"]
    assert not re.search(r"url\(|@import", style)


def test_a_feed_is_shown_with_its_lag_and_its_stop_with_the_command() -> None:
    text = html(document(**{"egress NODES": FEED}))

    [_, row] = table_rows(text)
    counts, rest = ["90", "100", "10", "–", "2", "1"], ["messages 7 · age 1.5", "this instance"]
    assert [*map(unescape, row)] == ["us-east/NODES/0000/0", "stopped E-FORKED", "–", *counts, *rest]
    assert "<pre>floe egress resolve -c f</pre>" in text


def test_head_and_title_name_the_process_and_rates_count_from_an_earlier_page_on() -> None:
    def answer(time: float, end: int, position: int) -> dict[str, Any]:
        about = {"service": "egress", "site": "us-east", "host": "web1", "instance": "", "started": 500.0, "time": time}
        target = {**TARGET, "chains": {str(CHAIN): {**CHAIN_STATE, "position": position}}}
        return {**document(**{"egress NODES": {**FEED, "end": end}, "target FLEET": target}), **about}

    text = page.render_page(answer(7_700, 1_234_567, 2_001), ["/"], answer(7_660, 1_234_067, 1)).decode()

    assert text.count("Floe egress, us-east, web1: ") == 2
    assert re.findall(r"<title>(.*?)</title>", text) == ["Floe egress, us-east, web1: ready"]
    assert "1970-01-01T02:08:20Z · runs since 1970-01-01T00:08:20Z, 2h · version 1" in text
    _, feed, _, chain = table_rows(text)
    assert (feed[2], feed[3], feed[6]) == ("1970-01-01T00:08:20Z, 2h", "1,234,567", "12.5")
    assert (chain[3], chain[6], "rates over 40 s" in text) == ("2,000", "50.0", True)


def test_the_page_counts_rates_from_an_answer_that_is_a_while_ago_and_shows_none_at_first() -> None:
    clock = ManualClock()
    found = Pages(Health(clock, service="egress"), CollectorRegistry())
    texts = []
    for seconds in (0, 10, 30, 10, 1000, -3600):
        clock.advance(seconds)
        texts.append(re.findall("rates over [^<]*", answer(found, "/")[1]))
    assert texts == [[], ["rates over 10 s"], ["rates over 40 s"], ["rates over 50 s"], ["rates over 16m50s"], []]


def test_durations_sizes_and_times_are_put_in_words() -> None:
    held = {"messages": 7, "bytes": 2150, "age_seconds": 207.0, "closes_in_seconds": 3393.042, "max_size": 104857600}
    source = {"state": "reading", "code": "", "sequence": 99, "alive": 1795517471.0}
    state = {**CHAIN_STATE, "lag_seconds": 9051, "source": source}
    parts = {"egress NODES": {**FEED, "open_segment": held}, "target FLEET": {**TARGET, "chains": {str(CHAIN): state}}}
    text = html({**document(**parts), "heartbeat_age_seconds": 75})

    feed, chain = table_rows(text)[1], table_rows(text)[3]
    assert unescape(feed[9]) == "messages 7 · size 2.1 KiB · age 3m27s · closes in 56m33s · max size 100 MiB"
    assert (chain[5], unescape(chain[8])) == ("2h30m", "state reading · sequence 99 · alive 2026-11-24T10:51:11Z")
    assert "the event loop last ran 1m15s ago" in text


def test_a_target_is_shown_with_its_chains_and_leases_with_who_shares_them() -> None:
    text = html(document(**{"target FLEET": TARGET}))
    [_, row] = table_rows(text)
    assert row[:8] == ["us-east/NODES/0000/0", "late", "50", "40", "10", "9.0 s", "–", "41..45"]
    assert "<pre>floe gap ls -c f</pre>" in text

    text = html(document(sharing={"owner": "host-1", "members": 2, "share": 3, "held": ["a", "b"]}))
    assert table_rows(text)[1] == ["sharing", "host-1", "2", "3", "a, b", "–"]


# Coverage


def test_coverage_is_summed_by_level_with_the_holes_that_no_level_fills() -> None:
    refs = [ref(1, 10), ref(11, 20), ref(31, 40, modified=5.0), ref(1, 20, level=1, modified=9.0, size=100)]
    found = sum_coverage(refs, 77.0)

    assert found["levels"]["0"] == {"segments": 3, "bytes": 30, "newest": 5.0, "ranges": [[1, 20], [31, 40]]}
    assert found["levels"]["1"] == {"segments": 1, "bytes": 100, "newest": 9.0, "ranges": [[1, 20]]}
    assert (found["first"], found["last"], found["holes"], found["missing"]) == (1, 40, 1, [[21, 30]])
    assert (found["compacted"], found["at"], found["is_complete"]) == (9.0, 77.0, True)
    drawn = html({**document(), "coverage": {"c": found}})
    assert (bars(drawn), bars(drawn, "hole")) == ({(0, 1, 20), (0, 31, 40), (1, 1, 20)}, {(0, 21, 30), (1, 21, 30)})


def test_the_page_shows_compactions_last_success_and_how_its_last_run_ended() -> None:
    def about(**more: object) -> str:
        return html({**document(), "coverage": {"c": {**sum_coverage([ref(1, 10)], 77.0), **more}}})

    assert "not compacted yet;" in about()
    assert "last compaction 1970-01-01T00:00:09Z;" in about(compacted=9.0)
    run = {"ended": 99.0, "code": 0, "succeeded": 99.0}
    assert "last compaction 1970-01-01T00:01:39Z;" in about(compacted=9.0, compaction=run)
    failed = about(compaction={"ended": 99.0, "code": 75, "succeeded": None})
    assert "not compacted yet, its last run, 1970-01-01T00:01:39Z, ended with exit code 75;" in failed


def test_the_picture_shows_fewer_than_very_many_ranges_and_none_without_segments() -> None:
    found = sum_coverage((ref(n, n) for n in range(1, 4001, 2)), 0.0)

    assert len(found["levels"]["0"]["ranges"]) <= MAX_DRAWN_RANGES
    assert (found["holes"], len(found["missing"]), found["levels"]["0"]["segments"]) == (1999, MAX_DRAWN_RANGES, 2000)
    assert "no segments" in html({**document(), "coverage": {"c": sum_coverage([], 0.0)}})


def test_only_so_many_segments_of_a_huge_chain_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.observe.coverage.MAX_SCANNED_SEGMENTS", 3)
    many = iter([ref(n, n) for n in range(1, 100)])
    found = sum_coverage(many, 0.0)
    assert (found["is_complete"], found["last"], len([*many])) == (False, 3, 95)
    assert "only the first segments" in html({**document(), "coverage": {"c": found}})
