"""`floe compare`: archive against the living stream, row by row."""

import asyncio
import json
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import yaml

from common.archive.columns import batch_of
from common.archive.documents import AcceptedGap
from common.archive.segment import Message
from common.chain import Chain
from common.clock import SystemClock
from common.errors import Stopped, UsageError
from common.nats.api import stream_info
from common.nats.client import FloeClient
from common.nats.headers import Provenance, build_block
from common.sequences import SequenceRange
from common.service.process import ThreadPool
from common.service.progress import Progress
from common.tasks import Stop
from infra.local.nats import NatsCluster
from ingress.recovery import living
from ingress.recovery.delivered import DeliveredRows, as_stored, removable
from ingress.recovery.living import Batches, CompareReport, CompareRequest, Copy, LivingComparison, Tally, reached_after
from ingress.recovery.read_back import Differences
from ingress.recovery.request import RecoveryParts
from tests.support.basics import raises_code, unique
from tests.support.commands import configuration, ran
from tests.support.egress import SITE, Bench, Partitioned
from tests.support.headers import escape
from tests.support.ingress import CHAIN, Centre, change, closed_at, make, rows_of, store, update
from tests.support.segments import message

COUNTS = ("same", "missing", "altered", "not_archived", "removed", "left_out")


async def compared(bench: Bench, feed: str, **request: Any) -> CompareReport:
    with closing(ThreadPool("compare", 1)) as threads:
        work = LivingComparison(
            bench.client, RecoveryParts(bench.store, bench.chains, SystemClock(), Progress()), threads
        )
        return await work.run(CompareRequest(SITE, feed, **request), Stop())


def counts(report: CompareReport) -> list[tuple[int, ...]]:
    return [tuple(copy.as_json()[name] for name in COUNTS) for copy in report.copies]


def test_pieces_and_batches_of_any_size_are_compared_row_by_row():
    rows = [message(sequence, b"x%d" % sequence) for sequence in range(1, 41)]
    found = [each for each in rows if each.sequence not in (3, 4, 20, 40)]
    found[7] = replace(found[7], payload=b"another")
    found = sorted([*found, message(50), message(52)], key=lambda each: each.sequence)
    archived = [each for each in rows if each.sequence not in (11, 30)]
    for size in (1, 2, 7, 60):
        tally = Tally(iter([batch_of(*archived[at : at + 9]) for at in range(0, len(archived), 9)]))
        for at in range(0, len(found), size):
            piece = found[at : at + size]
            tally.add(piece, piece[-1].sequence)
        tally.add((), 60)
        assert (list(tally.absent), list(tally.extra)) == ([3, 4, 20, 40], [11, 30, 50, 52])
        assert (tally.expected, tally.found, tally.examples) == (38, 38, ["10: altered"])


@pytest.mark.parametrize(
    ("order", "differences"),
    [
        ("123", {}), ("13", {"lost": [2]}), ("1223", {"late": [2]}), ("213", {"lost": [1], "late": [1]}),
        ("1234", {}), ("0123", {"after": 1}), ("1f23", {}),
        ("2a3", {"lost": [1], "late": [1], "altered_late": [1]}), ("1213a", {"late": [1, 1], "altered_late": [1]}),
        *((f"12{what}", {"altered": 1}) for what in ("payload", "headers", "subject", "timestamp_ns")),
    ],
)  # fmt: skip
def test_rows_are_found_in_a_stream_that_floe_has_filled(order: str, differences: dict[str, Any]) -> None:
    altered = {"payload": b"else", "headers": build_block([b"A: 1"]), "subject": b"nodes.two", "timestamp_ns": 1}
    rows, stored = {str(n): message(n, b"x") for n in range(5)} | {"a": message(1, b"else")}, list[Message]()
    for place, name in enumerate([*order] if order[2:] not in altered else ["1", "2", order[2:]], 1):
        row = rows.get(name) or message(3, **{"payload": b"x", name: altered[name]} if name in altered else {})
        origin = Provenance(CHAIN.site, CHAIN.feed, 0, 0, row.sequence, row.timestamp_ns)
        headers = escape(row.headers, origin) if name != "f" else None
        stored.append(replace(row, sequence=place, subject=b"to." + row.subject, headers=headers))

    def batches(_rows: SequenceRange) -> Batches:
        return as_stored(iter([batch_of(*(rows[n] for n in "123"))]), lambda subject: b"to." + subject, is_relay=False)

    arrivals, tally = DeliveredRows(CHAIN, SequenceRange(1, 3), 9), Tally(batches(SequenceRange(1, 3)))
    found = [*arrivals.rows_of(stored)]
    tally.add(found, found[-1].sequence)
    tally.add((), 3)
    wanted = {"lost": [], "late": [], "altered": 0, "after": 0, "altered_late": [], **differences}
    shown = {"lost": [*tally.absent], "late": [*arrivals.late], "altered": tally.altered, "after": arrivals.after}
    assert wanted == {**shown, "altered_late": [*arrivals.altered(batches)]}
    assert arrivals.behind == (4 if order == "1234" else 10)


@pytest.mark.parametrize(
    ("config", "removed"),
    [
        ({}, 0), ({"max_msgs": -1, "max_bytes": -1, "max_age": 0}, 0), ({"max_age": 1}, 3), ({"max_bytes": 1}, 3),
        ({"max_msgs": 9, "discard": "new"}, 0), ({"max_age": 1, "discard": "new"}, 3), ({"retention": "interest"}, 5),
        ({"max_msgs_per_subject": 1}, 5), ({"allow_msg_ttl": True}, 5), ({"allow_rollup_hdrs": True}, 5),
    ],
)  # fmt: skip
def test_only_limits_explain_that_messages_are_gone_from_a_target(config: dict[str, Any], removed: int) -> None:
    assert removable({"retention": "limits", "discard": "old", **config}, 3, 2) == removed


@pytest.mark.parametrize(
    ("reached", "first", "last", "is_same", "then"),
    [
        (0, 1, 10, True, 10), (10, 11, 20, True, 20), (10, 13, 20, True, 10), (10, 5, 8, True, 10),
        (10, 11, 20, False, 10), (10, 5, 8, False, 4),
    ],
)  # fmt: skip
def test_what_is_recorded_as_equal_has_no_gap(reached: int, first: int, last: int, is_same: bool, then: int):
    found = Copy(None, "", SequenceRange(first, last), Differences(altered=not is_same))  # type: ignore[arg-type]
    assert reached_after(reached, found) == then


@pytest.mark.simulated
async def test_removed_and_left_out_rows_are_counted_apart_and_others_are_differences(bench: Bench) -> None:
    stream = await bench.filled([b"%d" % number for number in range(100)])
    await bench.freeze({"stream": stream})
    for sequence in (40, 41):
        await bench.client.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})
    await bench.client.api(f"STREAM.PURGE.{stream}", {"seq": 11})
    report = await compared(bench, stream, mode="each-replica")
    assert (counts(report), report.exit_code) == ([(88, 0, 0, 0, 2, 0)], 0)
    assert [each.partition(": ")[2] for each in report.notes] == [
        "the stream begins at 11; rows before it are not compared"
    ]
    sampled = {"name": unique("S"), "stream": stream, "inspect_subject_token": 2, "inspect_duration": "1h"}
    await bench.freeze(sampled)
    report = await compared(bench, sampled["name"])
    assert (counts(report), report.exit_code) == ([(1, 0, 0, 0, 0, 87)], 0)

    await bench.client.api(f"STREAM.PURGE.{stream}", {})
    report = await compared(bench, stream)
    assert (report.copies, "the stream begins at 101" in report.notes[0]) == ((), True)

    await bench.recreate(stream, [b"%d" % number for number in range(60)])
    report = await compared(bench, stream)
    assert (counts(report), report.exit_code) == ([(0, 40, 60, 0, 0, 0)], 3)
    assert report.copies[0].differences.examples == tuple(f"{each}: altered" for each in range(1, 6))
    assert "the stream was created at" in report.notes[0]
    assert "NOT as archived" in "\n".join(report.lines())


@pytest.mark.simulated
async def test_a_comparison_goes_on_where_the_last_one_found_all_equal(bench: Bench, monkeypatch: Any) -> None:
    monkeypatch.setattr(living, "RECORDED_SEQUENCES", 30)
    stream = await bench.filled([b"x"] * 100)
    await bench.freeze({"stream": stream})
    assert counts(await compared(bench, stream, last=50)) == [(50, 0, 0, 0, 0, 0)]
    assert counts(await compared(bench, stream, first=80)) == [(21, 0, 0, 0, 0, 0)]
    with pytest.raises(UsageError, match=r"--from-sequence 101: expected a range that meets .*: sequences 1 to 100"):
        await compared(bench, stream, first=101)
    report = await compared(bench, stream, since_last=True)
    assert (counts(report), report.copies[0].rows) == ([(50, 0, 0, 0, 0, 0)], SequenceRange(51, 100))
    report = await compared(bench, stream, since_last=True)
    note = f"note: {SITE}/{stream}/0000/0: equal up to 100, as of the last comparison, and not archived further"
    assert (report.copies, [*report.lines()]) == ((), [f"{SITE}/{stream}: nothing to compare", note])
    await bench.publish(stream, [b"y"] * 5)
    await bench.freeze({"stream": stream})
    assert counts(await compared(bench, stream, since_last=True)) == [(5, 0, 0, 0, 0, 0)]


@pytest.mark.simulated
@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (0, 1, 2)])
async def test_segments_that_are_lost_from_the_bucket_are_missing(bench: Bench, lost: tuple[int, ...]) -> None:
    stream = await bench.make_stream(unique("T"))
    for _ in range(3):
        await bench.publish(stream, [b"x"] * 10)
        await bench.freeze({"stream": stream})
    chain, refs = bench.chain(stream), bench.refs(stream)
    assert counts(await compared(bench, stream)) == [(30, 0, 0, 0, 0, 0)]
    for place in lost:
        bench.objects.delete(refs[place].key)
    count = 10 * len(lost)
    report = await compared(bench, stream, since_last=True)
    first, last = refs[lost[0]].coverage.first, refs[lost[-1]].coverage.last
    assert report.copies[0].differences.examples[0] == f"{first}..{last}: missing in the archive: no segment covers it"
    assert (report.exit_code, counts(report)[0][1], counts(report)[0][3]) == (3, count, count)
    # Also where the stream has given them up, and a part is compared.
    await bench.client.api(f"STREAM.PURGE.{stream}", {})
    report = await compared(bench, stream, since_last=True, first=first + 1)
    assert (report.exit_code, counts(report)) == (3, [(0, count - 1, 0, 0, 0, 0)])
    # Neither what retention removed is missing, nor what an operator gave up.
    bench.chains.raise_floor(chain, 11)
    bench.chains.accept_gap(chain, AcceptedGap(SequenceRange(11, 30)))
    assert (await compared(bench, stream)).exit_code == 0


@pytest.mark.simulated
async def test_all_feeds_of_a_site_leave_metrics_and_name_those_that_cannot_be_compared(bench: Bench) -> None:
    stream, metrics = await bench.filled([b"x"] * 10), bench.root / "floe-compare.prom"
    await bench.freeze({"stream": stream})
    await bench.client.api(f"STREAM.MSG.DELETE.{stream}", {"seq": 3})
    config = str(configuration(bench, {"stream": stream}))
    words = ("compare", "-c", config, SITE, "--all", "--metrics-textfile", str(metrics))
    assert [report["ok"] for report in (await ran(*words, "--json")).json()] == [True]
    series = f'floe_compare_differs{{copy="source",feed="{stream}",partition="0",site="{SITE}"}}'
    assert f"{series} 0.0" in metrics.read_text()
    await bench.recreate(stream, [b"other"] * 4)
    queue = await bench.begun([b"x"], retention="workqueue")
    done = await ran(*words, code=3)
    assert ("E-COMPARE-QUEUE" in done.err, f"{SITE}/{stream}/0000/0: NOT as archived" in done.out) == (True, True), (
        queue
    )
    assert f"{series} 1.0" in metrics.read_text()
    assert "floe_compare_last_run_timestamp_seconds 1" in metrics.read_text()
    assert "found none" in (await ran("compare", *words[1:3], "nowhere", "--all", code=2)).err


@pytest.mark.simulated
async def test_a_damaged_segment_is_warned_of_once(bench: Bench) -> None:
    stream = await bench.filled([b"x"] * 10)
    await bench.freeze({"stream": stream})
    [ref] = bench.store.list(Chain(SITE, stream))
    path = bench.root / "bucket" / ref.key
    path.write_bytes(path.read_bytes()[:-9] + b"123456789")
    done = await ran("compare", "-c", str(configuration(bench, {"stream": stream})), f"{SITE}/{stream}", code=3)
    assert done.err.count("segment unreadable") == 1, done


@pytest.mark.simulated
async def test_each_partition_is_compared_and_a_work_queue_is_refused(bench: Bench) -> None:
    parts = Partitioned(bench, unique("P"), 2)
    stream = await bench.make_stream(parts.feed)
    for number in range(2):
        await bench.publish(stream, [b"x"] * 20, subject=f"{number}.a")
    await parts.freeze(40)
    assert counts(await compared(bench, parts.feed)) == [(20, 0, 0, 0, 0, 0)] * 2
    queue = await bench.begun([b"x"], retention="workqueue")
    with raises_code(Stopped, "E-COMPARE-QUEUE", match="work queue"):
        await compared(bench, queue)


# With a target

TARGET_COUNTS = (*COUNTS, "parked", "skipped", "out_of_order", "repeated", "waiting")


async def with_target(centre: Centre, *words: str, code: int = 0) -> dict[str, Any]:
    command = ("compare", "-c", str(centre.write()), "us-east/NODES", "--with", f"target={centre.target}", "--json")
    return dict((await ran(*command, *words, code=code)).json())


def of_target(report: dict[str, Any]) -> list[tuple[int, ...]]:
    return [tuple(copy[name] for name in TARGET_COUNTS) for copy in report["copies"]]


@pytest.mark.servers
@pytest.mark.simulated
async def test_a_target_is_compared_row_by_row(client: FloeClient, centre: Centre) -> None:
    archive, config = centre.archive, centre.having(on_oversize="park").write()
    archive.put([*rows_of(1, 4), message(5, b"L" * 2000), *rows_of(6, 100)])
    await make(client, centre, max_msg_size=1000)
    assert "ingress has not begun" in (await with_target(centre))["notes"][0]
    async with centre.running():
        await closed_at(client, centre, 99)
    assert of_target(await with_target(centre)) == [(99, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0)]
    report = await with_target(centre, "--since-last")
    assert (report["copies"], "not archived further" in report["notes"][0]) == ([], True)

    # Messages that a limit may have removed explain as many rows, those before the first one too; others are missing.
    await client.api(f"STREAM.MSG.DELETE.{centre.target}", {"seq": 50})
    await client.api(f"STREAM.PURGE.{centre.target}", {"seq": 4})
    for limits, removed in (({}, 0), ({"max_age": 10**18}, 3), ({"max_msgs_per_subject": 1000}, 4)):
        await update(client, centre, **limits)
        report = await with_target(centre, code=3 if removed < 4 else 0)
        assert of_target(report) == [(95, 4 - removed, 0, 0, removed, 0, 1, 0, 0, 0, 0)]
        assert ["somebody purged or deleted" in note for note in report["notes"]] == [True] * (removed < 4)

    # Lost, altered and repeated rows of a part; the rest has not been delivered.
    archive.put(rows_of(101, 130))
    again = replace(*rows_of(115, 115), payload=b"else")
    await store(client, centre, [*rows_of(103, 109), *rows_of(111, 120), again])
    await change(client, centre, positions={CHAIN: 121}, target_sequence=117)
    ref = archive.put([replace(row, payload=b"other") for row in rows_of(131, 132)])
    await store(client, centre, rows_of(121, 131))
    await change(client, centre, positions={CHAIN: 132}, target_sequence=128)
    report = await with_target(centre, "--since-last", "--rate", "1M/s", code=3)
    assert of_target(report) == [(27, 3, 2, 0, 0, 0, 0, 0, 0, 1, 1)]
    altered, missing = ("131: altered", "115: altered"), ("101: missing", "102: missing", "110: missing")
    assert report["copies"][0]["examples"] == [*altered, *missing]
    part = ("--from-sequence", "116", "--to-sequence", "131")
    await client.api(f"STREAM.MSG.DELETE.{centre.target}", {"seq": 128})
    assert of_target(await with_target(centre, *part)) == [(15, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1)]
    archive.objects.delete(ref.key)
    assert of_target(await with_target(centre, *part[:2], code=3)) == [(15, 2, 0, 0, 0, 0, 0, 0, 0, 0, 1)]

    centre.target_settings["sources"][0]["subject_prefix"] = f"{centre.target}.other"
    refused = await ran("compare", "-c", str(centre.write()), "us-east/NODES", "--with", "target", code=1)
    assert "found no message there" in refused.err
    refused = await ran("compare", "-c", str(config), "us-east/OTHER", "--with", "target", code=2)
    assert "us-east/OTHER: expected one target that takes it (--with target=NAME), found none" in refused.err
    assert "target=NAME" in (await ran("compare", "-c", str(config), "us-east/NODES", "--with", "replica", code=2)).err


@pytest.mark.servers
async def test_the_copy_of_each_replica_is_compared_by_the_command(clustered: Bench) -> None:
    bench, stream = clustered, await clustered.make_replicated()
    await bench.publish(stream, [b"x"] * 200)
    await bench.freeze({"stream": stream})
    config = bench.root / "floe.yaml"
    config.write_text(yaml.safe_dump(bench.document({"stream": stream})))
    words = ("compare", "-c", str(config), f"{SITE}/{stream}", "--with", "each-replica")
    found = json.loads((await ran(*words, "--json")).out)
    info = await stream_info(bench.client, stream)
    assert info is not None
    assert len({copy["server"] for copy in found["copies"]}) == info.config["num_replicas"] == 3
    assert [copy["same"] for copy in found["copies"]] == [200] * 3
    assert "as archived" in (await ran(*words)).out


@pytest.mark.soak
@pytest.mark.servers
async def test_a_bit_that_flips_on_the_disk_of_one_replica_is_found_there(
    clustered: Bench, cluster: NatsCluster
) -> None:
    bench, stream = clustered, await clustered.make_replicated()
    await bench.publish(stream, [b"payload-%d" % number for number in range(200)])
    await bench.freeze({"stream": stream})
    info = await bench.client.api(f"STREAM.INFO.{stream}")
    damaged = cluster.server(info["cluster"]["replicas"][0]["name"])
    (block,) = damaged.store.rglob(f"{stream}/msgs/*.blk")
    with block.open("r+b") as file:
        file.seek(block.read_bytes().index(b"payload-100"))
        file.write(b"q")
    await asyncio.sleep(20)  # the server keeps what it wrote in memory for ten seconds after the last use
    assert counts(await compared(bench, stream)) == [(200, 0, 0, 0, 0, 0)]
    found = {copy.server: copy for copy in (await compared(bench, stream, mode="each-replica")).copies}
    assert found.pop(damaged.name).differences.examples == ("101: missing",)
    assert [copy.is_same for copy in found.values()] == [True, True]
