"""Parts of reports: new rows, hour and reason of a missing sequence, the page, the CSV."""

import base64
import csv
import hashlib
import io
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from common.archive.segment import Ledger, Reason
from common.chain import Chain
from common.errors import UsageError
from common.sequences import CoverageSet, SequenceRange
from common.settings.root import Settings
from compaction import traffic as reporting
from compaction.reports import ReportState, open_place, operation_of, uncovered
from compaction.traffic import HOUR_NS, TRAFFIC, HourCount, missing_by_hour, render_page, write_csv
from tests.support.basics import seeded
from tests.support.compaction import ref
from tests.support.segments import footer_of, message

CHAIN = Chain("us-east", "NODES")


def covered(*ranges: tuple[int, int]) -> CoverageSet:
    found = CoverageSet()
    for first, last in ranges:
        found.add(SequenceRange(first, last))
    return found


def taken(refs: list[Any], accounted: CoverageSet, *, finest: bool) -> list[str]:
    return [f"{stretch.segment.level}:{stretch.rows}" for stretch in uncovered(refs, accounted, finest=finest)]


def test_what_is_new_is_taken_once_and_from_the_lowest_level_where_that_is_wanted():
    refs = [ref(1, 10), ref(11, 20), ref(1, 20, level=1), ref(31, 40, level=1), ref(35, 45)]
    assert taken(refs, covered(), finest=False) == ["1:1..20", "1:31..40", "0:41..45"]
    assert taken(refs, covered(), finest=True) == ["0:1..10", "0:11..20", "1:31..34", "0:35..45"]
    assert taken(refs, covered((1, 15), (40, 45)), finest=True) == ["0:16..20", "1:31..34", "0:35..39"]
    assert taken(refs, covered((1, 20), (31, 45)), finest=True) == []


def test_what_a_report_accounts_for_is_read_back_as_it_was_written():
    state = ReportState("traffic", "s3://b/data", "all sites", {}, 3 * HOUR_NS)
    grown = state.plus([(CHAIN, SequenceRange(1, 10)), (CHAIN, SequenceRange(21, 30)), (CHAIN, SequenceRange(11, 15))])
    assert (grown.accounted, ReportState.from_json(grown.to_json())) == ({str(CHAIN): [(1, 15), (21, 30)]}, grown)
    with pytest.raises(ValueError, match="format_version"):
        ReportState.from_json(grown.to_json().replace(b'"format_version":1', b'"format_version":2'))


def hour(number: int, sequences: list[int]) -> HourCount:
    return HourCount(number, len(sequences), 0, min(sequences), max(sequences), 0, number * HOUR_NS)


def test_a_missing_sequence_counts_in_the_hour_of_the_next_row():
    rows = SequenceRange(1, 20)
    assert missing_by_hour(rows, [hour(5, [3, 4]), hour(6, [8, 10])], 7) == {5: 2, 6: 4, 7: 10}
    assert (missing_by_hour(rows, [], 9), missing_by_hour(SequenceRange(3, 4), [hour(5, [3, 4])], 7)) == ({9: 20}, {})


def test_missing_sequences_are_counted_once_also_where_time_runs_backwards():
    rng = seeded()
    for _ in range(200):
        rows = SequenceRange(rng.randint(1, 5), rng.randint(6, 60))
        of: dict[int, list[int]] = {}
        for sequence in range(rows.first, rows.last + 1):
            if rng.random() < 0.6:
                of.setdefault(max(0, sequence // 10 + rng.randint(-1, 1)), []).append(sequence)
        found = missing_by_hour(rows, [hour(number, some) for number, some in of.items()], 99)
        assert sum(found.values()) == len(rows) - sum(map(len, of.values()))
        assert all(count > 0 for count in found.values())


def test_reasons_are_those_of_the_ledger_and_shared_out_where_there_are_several():
    def of(missing: dict[int, int], **ledger: int) -> dict[int, dict[str, int]]:
        footer = footer_of([message(1)], SequenceRange(1, 1 + sum(ledger.values())), ledger=Ledger(ledger))
        return reporting.reasons_by_hour(missing, footer)

    assert of({1: 3, 2: 4}, sampled_out=7) == {1: {"sampled_out": 3}, 2: {"sampled_out": 4}}
    assert of({1: 3}, sampled_out=7) == {1: {"sampled_out": 3}}
    assert of({1: 2}, sampled_out=1) == {1: {"sampled_out": 1, "unattributed": 1}}
    assert of({1: 2}, something_newer=2) == {1: {"unattributed": 2}}
    rng = seeded()
    for _ in range(200):
        ledger = {reason.value: rng.randint(0, 20) for reason in rng.sample(list(Reason), 3)}
        left, missing = sum(ledger.values()), dict[int, int]()
        while left:
            missing[len(missing)] = count = rng.randint(1, left)
            left -= count
        found = of(missing, **ledger)
        assert {number: sum(reasons.values()) for number, reasons in found.items()} == missing
        sums = {reason: sum(each.get(reason, 0) for each in found.values()) for reason in ledger}
        assert sums == ledger, "over a whole segment nothing is estimated"


def test_lag_is_known_at_level_0_only_and_messages_are_those_that_egress_had():
    segment = ref(1, 10)
    put = int(segment.modified)
    began = put // 3600
    at = HourCount(began, 4, 400, 1, 8, 2_000, began * 3600 * 10**9 + 10**9)
    left_out = Ledger({Reason.SAMPLED_OUT: 5, Reason.DELETED: 1})
    footer = footer_of([message(n) for n in (1, 3, 5, 8)], SequenceRange(1, 10), ledger=left_out)

    def hours(of: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        [stretch] = uncovered([of], covered(), finest=True)
        found = reporting.hour_rows(stretch, [at], footer)
        [kept] = [each for each in found if each["kept"]]
        return found, kept

    found, kept = hours(segment)
    lag = (4, (put - began * 3600) * 4000 - 2_000, (put - began * 3600 - 1) * 1000)
    assert (kept["lag_known"], kept["lag_total_ms"], kept["lag_max_ms"]) == lag
    assert [sum(each[name] for each in found) for name in ("messages", "deleted")] == [9, 1]
    _, kept = hours(ref(1, 10, level=1))
    assert (kept["lag_known"], kept["lag_max_ms"]) == (0, None)


def test_a_marker_is_not_a_value():
    blocks = {b"X: y": None, b"KV-Operation: DEL": "DEL", b"KV-Operation: PURGE\r\nNats-Rollup: sub": "PURGE"}
    blocks[b"Nats-Marker-Reason: MaxAge"] = "MaxAge"
    found = {lines: operation_of(b"NATS/1.0\r\n" + lines + b"\r\n\r\n") for lines in blocks}
    assert (found, operation_of(None)) == (blocks, None)


def test_a_report_is_put_beside_the_archive_or_in_a_directory():
    outputs = [("s3://other/reports", "data"), ("s3://archive", "data"), ("s3://archive/data/reports", "data")]
    outputs += [("s3://archive/reports", ""), ("gs://archive/reports", "data")]
    stores = [(output, "s3://archive", prefix) for output, prefix in outputs]
    for output, url, prefix in (*stores, ("s3://archive/reports", "file:///srv/archive", "data")):
        settings = Settings.model_validate({"store": {"url": url, "prefix": prefix}})
        with pytest.raises(UsageError, match="--output: expected"):
            open_place(output, settings)


# Output for people

BEGIN = 1_700_000_000 // 3600 * 3600  # seconds


def traffic(*rows: dict[str, Any]) -> pa.Table:
    zeros = dict.fromkeys(TRAFFIC.names, 0)
    return pa.Table.from_pylist([{**zeros, **row, "hour": row["hour"] * 1_000_000} for row in rows], TRAFFIC)


def row(number: int, messages: int = 10, kept: int = 4, feed: str = "NODES", **more: Any) -> dict[str, Any]:
    of = {"site": "us-east", "feed": feed, "hour": BEGIN + number * 3600, "messages": messages, "kept": kept}
    return {**of, "sampled_out": messages - kept, "lag_max_ms": None, **more}


def test_csv_holds_no_text_that_a_spreadsheet_takes_for_a_formula():
    file, names = io.StringIO(), ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "NODES=1"]
    table = traffic(*(row(number) for number in range(len(names))))
    write_csv(table.set_column(table.schema.get_field_index("feed"), "feed", pa.array(names)), file)
    read = csv.DictReader(io.StringIO(file.getvalue()))
    assert [each["feed"] for each in read] == ["'=1+1", "'+1", "'-1", "'@SUM(A1)", "'\tx", "NODES=1"]


def test_csv_has_a_header_hours_in_utc_and_nothing_for_what_is_not_known(tmp_path: Path):
    file, table = io.StringIO(), traffic(row(0), row(1, lag_known=4, lag_max_ms=1500), row(2))
    write_csv(reporting.select_hours(table, None, (BEGIN + 7200) * 10**9), file)
    read = list(csv.DictReader(io.StringIO(file.getvalue())))
    assert [each["hour"] for each in read] == ["2023-11-14T22:00:00Z", "2023-11-14T23:00:00Z"]
    assert ([each["lag_max_ms"] for each in read], read[0].keys()) == (["", "1500"], set(TRAFFIC.names))


def test_the_page_is_one_file_that_a_strict_policy_allows():
    evil = "<script>alert(1)</script>"
    page = render_page(traffic(row(0, feed=evil), row(5, feed=evil, lag_known=4, lag_max_ms=90_000)), None, None, BEGIN)
    text = page.decode()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert not re.search(r"\s(style|on\w+|src|href)=", text), "nothing inline but the one style, nothing from elsewhere"
    [style] = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert base64.b64encode(hashlib.sha256(style.encode()).digest()).decode() in text
    assert "prefers-color-scheme: dark" in style
    assert text.count("<svg") == 2
    assert "1m30s" in text


def test_an_empty_page_states_it_and_that_of_a_long_time_and_many_feeds_stays_small():
    assert b"no messages" in render_page(traffic(), None, None, BEGIN)
    rows = [row(number, feed=f"F{feed}") for number in range(0, 24 * 60, 31) for feed in range(300)]
    page = render_page(traffic(*rows), BEGIN * 10**9, None, BEGIN)
    assert page.count(b"<svg") == 200
    assert all(text in page for text in (b"feeds with most messages", b"a day"))
    assert len(page) < 2_000_000
