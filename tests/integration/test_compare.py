"""`floe compare`: archive against the living stream, row by row."""

import asyncio
import json
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import yaml

from common.archive.columns import batch_of
from common.clock import SystemClock
from common.errors import Stopped
from common.nats.api import stream_info
from common.sequences import SequenceRange
from common.service.process import ThreadPool
from common.service.progress import Progress
from common.tasks import Stop
from infra.local.nats import NatsCluster
from ingress.recovery import living
from ingress.recovery.compare import Differences
from ingress.recovery.living import CompareReport, CompareRequest, Copy, LivingComparison, Tally, reached_after
from tests.support.basics import unique
from tests.support.commands import ran
from tests.support.egress import SITE, Bench, Partitioned
from tests.support.segments import message

COUNTS = ("same", "missing", "altered", "not_archived", "removed", "left_out")


async def compared(bench: Bench, feed: str, **request: Any) -> CompareReport:
    with closing(ThreadPool("compare", 1)) as threads:
        work = LivingComparison(bench.client, bench.store, bench.chains, threads, SystemClock(), Progress())
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
    report = await compared(bench, stream, since_last=True)
    assert (counts(report), report.copies[0].rows) == ([(50, 0, 0, 0, 0, 0)], SequenceRange(51, 100))
    report = await compared(bench, stream, since_last=True)
    assert (report.copies, list(report.lines())) == (
        (),
        [
            f"{stream}: nothing to compare",
            f"note: {SITE}/{stream}/0000/0: equal up to 100, as of the last comparison, and not archived further",
        ],
    )
    await bench.publish(stream, [b"y"] * 5)
    await bench.freeze({"stream": stream})
    assert counts(await compared(bench, stream, since_last=True)) == [(5, 0, 0, 0, 0, 0)]


@pytest.mark.simulated
async def test_each_partition_is_compared_and_a_work_queue_is_refused(bench: Bench) -> None:
    parts = Partitioned(bench, unique("P"), 2)
    stream = await bench.make_stream(parts.feed)
    for number in range(2):
        await bench.publish(stream, [b"x"] * 20, subject=f"{number}.a")
    await parts.freeze(40)
    assert counts(await compared(bench, parts.feed)) == [(20, 0, 0, 0, 0, 0)] * 2
    queue = await bench.begun([b"x"], retention="workqueue")
    with pytest.raises(Stopped, match="work queue") as refused:
        await compared(bench, queue)
    assert refused.value.code == "E-COMPARE-QUEUE"


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
