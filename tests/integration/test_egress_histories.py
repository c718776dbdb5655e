"""The identity table against a real server: recreated, rolled back, forked, gone, drifted."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.exits import floe_command
from common.nats.client import FloeClient
from common.nats.kv import KeyValue
from common.sequences import SequenceRange
from egress import consumers
from egress.incarnations import HighWaterMarks
from egress.reader import Reader
from tests.support.basics import metric_value, soon, unique
from tests.support.commands import paste
from tests.support.egress import QUICK, SITE, Bench
from tests.support.servers import restore_disk, save_disk

pytestmark = pytest.mark.simulated


async def test_rows_received_before_a_recreation_are_put_though_another_covers_their_beginning(bench: Bench) -> None:
    """The rest has no other copy."""
    stream = await bench.make_stream(unique("T"))
    feed = {"stream": stream, "segment": {"max_age": "1h"}}
    await bench.publish(stream, (b"first %d" % i for i in range(10)))
    async with bench.egress(feed) as running:
        await running.received(stream, 10)
        async with bench.egress({"stream": stream}, lease_bucket=unique("L")):
            await bench.archived_to(stream, 10)
        await bench.publish(stream, (b"first %d" % i for i in range(10, 30)))
        await running.received(stream, 30)
        await bench.recreate(stream, (b"second %d" % i for i in range(7)))
        await soon(lambda: bench.chains.read_stream(bench.chain(stream, 1)) is not None)
    assert [m.payload for m in bench.messages(stream)] == [b"first %d" % i for i in range(30)]


async def test_a_stream_whose_tips_were_all_deleted_is_known_by_an_archived_row(bench: Bench) -> None:
    """A key-value stream: only one old message is left, far below every tip."""
    stream = await bench.filled([b"kept"], subject="quiet", max_msgs_per_subject=1)
    for _ in range(3):
        async with bench.egress({"stream": stream}):
            await bench.publish(stream, [b"hot"] * 5, subject="hot")
            await bench.archived_to(stream, await bench.last(stream))
    await bench.publish(stream, [b"hot"], subject="hot")
    async with bench.egress({"stream": stream}) as running:
        await bench.archived_to(stream, 17)
        await soon(lambda: running.status(stream).get("verdict") == "same")
    bench.check(stream)


async def test_a_message_where_the_archive_found_none_shows_a_stream_set_back(alone, tmp_path: Path):
    """The archive ends behind its last message; the old disk is written again up to there."""
    bench, server = alone
    stream = await bench.begun([b"x"] * 3, storage="file")
    saved = await save_disk(server, tmp_path)
    await bench.publish(stream, [b"lost"])
    await bench.client.api(f"STREAM.PURGE.{stream}")
    await bench.freeze({"stream": stream})
    await restore_disk(server, saved)
    await bench.publish(stream, [b"other"] * 2)
    async with bench.egress({"stream": stream}) as running:
        assert "sequence 3 is as archived, sequence 4 is not" in (await running.stopped(stream))["why"]


# The reader is bound to one history


async def test_right_before_a_put_the_consumer_must_still_be_the_same(bench: Bench, monkeypatch) -> None:
    """The reader notices no recreation: only the check before the put can."""
    stream = await bench.make_stream(unique("T"))
    patient = replace(QUICK, intervals=replace(QUICK.intervals, check=3600.0))
    feed = {"stream": stream, "segment": {"max_messages": 50, "max_age": "1h"}}
    monkeypatch.setattr(Reader, "receive_status", lambda *_: None)
    monkeypatch.setattr(Reader, "tick", lambda *_: None)
    putting, going_on = asyncio.Event(), asyncio.Event()
    real = Reader.check

    async def blocked(self: Reader) -> None:
        putting.set()
        await going_on.wait()
        await real(self)

    monkeypatch.setattr(Reader, "check", blocked)
    async with bench.egress(feed, tuning=patient):
        await soon(lambda: bench.chains.read_chain(bench.chain(stream)) is not None)
        await bench.publish(stream, (b"first %d" % i for i in range(60)))
        await putting.wait()
        await bench.recreate(stream, (b"second %d" % i for i in range(70)))
        going_on.set()
        await bench.archived_to(stream, 60)
        await bench.archived_to(stream, 50, incarnation=1)
    assert [m.payload for m in bench.messages(stream)] == [b"first %d" % i for i in range(60)]
    await bench.same(stream, stream, incarnation=1)


async def test_a_stream_recreated_while_the_consumer_is_made_is_not_read_into_the_old_history(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = await bench.begun([b"first"] * 10)
    real, done = consumers.create_ephemeral_consumer, []

    async def late(client: FloeClient, name: str, config: dict[str, Any]) -> Any:
        if not done:
            done.append(True)
            await bench.recreate(stream, (b"second %d" % i for i in range(25)))
        return await real(client, name, config)

    monkeypatch.setattr(consumers, "create_ephemeral_consumer", late)
    async with bench.egress({"stream": stream}):
        await bench.archived_to(stream, 25, incarnation=1)
    assert done
    assert len(bench.messages(stream)) == 10
    await bench.same(stream, stream, incarnation=1)


# The high-water mark


@pytest.mark.parametrize("is_back", [True, False], ids=["stale", "lost"])
async def test_a_listing_that_ends_before_the_mark_is_repeated_until_an_operator_accepts_the_loss(bench, is_back: bool):
    """F39: it never counts as a first start."""
    stream = await bench.filled([b"x"] * 10)
    feed = {"stream": stream, "segment": {"max_messages": 10, "max_age": "1h"}}
    await bench.freeze(feed)
    (ref,) = bench.refs(stream)
    hidden, file = bench.root / "hidden", bench.root / "bucket" / ref.key
    file.rename(hidden)
    async with bench.egress(feed) as running:
        await soon(lambda: running.state(stream) == "waiting")
        assert "expected a segment that contains the high-water mark 10, found none" in running.status(stream)["why"]
        await bench.publish(stream, [b"y"] * 3)
        if is_back:
            hidden.rename(file)
        else:
            await paste(bench, running.status(stream)["hint"], {"stream": stream})
        await running.received(stream, 13)
    await bench.same(stream, stream)
    assert [ref.coverage.first for ref in bench.refs(stream)] == [1, 11]


async def test_an_empty_bucket_without_a_mark_stops_unless_the_source_holds_everything(bench: Bench) -> None:
    stream = await bench.begun([b"x"] * 10)
    for ref in bench.refs(stream):
        bench.store.delete(ref)
    state = await KeyValue(bench.client, bench.state_bucket).ensure()
    await state.delete(HighWaterMarks.key(bench.chain(stream)))
    await bench.client.api(f"STREAM.PURGE.{stream}", {"seq": 4})
    async with bench.egress({"stream": stream}) as running:
        status = await running.stopped(stream)
        assert "no segment and no high-water mark" in status["why"]
        assert bench.refs(stream) == []
        await paste(bench, status["hint"], {"stream": stream})
        await bench.archived_to(stream, 10)
    assert bench.ledger(stream) == {"gone_before_read": 3}


# Holes


async def archive_in_three(bench: Bench) -> str:
    """A stream of 30 messages in three segments."""
    return await bench.begun((b"%d" % i for i in range(30)), {"max_messages": 10, "max_age": "1h"})


FILLED_HOLES = [
    (1, [15, 17], "1..10 11..20 21..30 31..35"),
    (16, [], "1..10 16..20 21..30 31..35"),
    (21, [], "1..10 21..30 31..35"),
]


@pytest.mark.parametrize(("first", "deleted", "found"), FILLED_HOLES)
async def test_a_hole_is_filled_as_far_as_the_source_goes_and_reading_resumes_behind_it(
    bench: Bench, first: int, deleted: list[int], found: str
) -> None:
    """Messages that left the source one by one after they were archived are gone from the hole, not deleted."""
    stream = await archive_in_three(bench)
    bench.store.delete(bench.refs(stream)[1])
    await bench.client.api(f"STREAM.PURGE.{stream}", {"seq": first})
    for sequence in deleted:
        await bench.client.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})
    async with bench.egress({"stream": stream, "segment": {"max_age": "1h"}}) as running:
        await soon(lambda: sum(len(ref.coverage) for ref in bench.refs(stream)) == 30 - max(0, first - 11))
        await soon(lambda: running.status(stream).get("lost") == max(0, first - 11))
        await bench.publish(stream, [b"more"] * 5)
        await running.received(stream, 35)
    assert " ".join(sorted(str(ref.coverage) for ref in bench.refs(stream))) == found
    assert bench.ledger(stream) == ({"gone_from_hole": 2} if deleted else {})
    assert [each.unread for each in bench.footers(stream) if each.unread] == [SequenceRange(15, 17)] * bool(deleted)


# Names that their footers contradict


@pytest.mark.parametrize("last", [40, 4000])
async def test_a_name_that_its_footer_contradicts_is_not_believed(bench: Bench, last: int, caplog) -> None:
    """A copy of 21..30 with a name that claims more: those sequences are archived all the same."""
    stream = await archive_in_three(bench)
    newest = bench.refs(stream)[-1]
    lie = bench.store.layout.segment(newest.segment._replace(coverage=SequenceRange(21, last)))
    shutil.copy(bench.root / "bucket" / newest.key, bench.root / "bucket" / lie)
    await bench.publish(stream, [b"more"] * 20)

    def is_archived() -> bool:
        return max(ref.coverage.last for ref in bench.refs(stream) if ref.key != lie) == 50

    async with bench.egress({"stream": stream, "segment": {"max_messages": 10}}) as running:
        await soon(is_archived)
        assert running.status(stream)["end"] >= 40
        assert "expected 21.." in running.status(stream)["damaged"][lie]
        assert metric_value("floe_egress_damaged_segments", {"site": SITE, "feed": stream, "partition": "0"}) == 1
    assert floe_command("segments quarantine", lie) in caplog.text
    assert bench.chains.read_tail(bench.chain(stream)) == 50 == await bench.mark(stream)
    (bench.root / "bucket" / lie).unlink()
    await bench.same(stream, stream)


async def test_damage_beyond_the_mark_is_read_again(bench: Bench) -> None:
    """A segment that was put before a crash, and is corrupt when egress starts again."""
    stream = await archive_in_three(bench)
    newest = bench.refs(stream)[-1]
    (bench.root / "bucket" / newest.key).write_bytes(b"not a segment")
    state = await KeyValue(bench.client, bench.state_bucket).ensure()
    await HighWaterMarks(state).overwrite(bench.chain(stream), 20)
    async with bench.egress({"stream": stream}) as running:
        await soon(lambda: bench.refs(stream)[-1].size > 100 or len(bench.refs(stream)) == 4)
        assert [*running.status(stream)["damaged"]] == [newest.key]
    await bench.same(stream, stream)
